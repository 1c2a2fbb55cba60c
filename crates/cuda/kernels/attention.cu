// Softmax attention on the tensor cores, forward and backward, without atomics.
//
// Legend: B batch, H heads, T tokens, D head size, C = H·D. A tile is 16 tokens, a unit 8 elements (16 bytes).
// qkv is (B,T,3C): queries, keys and values of a token lie side by side, head h at h·D of each.
#include "attention_mma.cuh"

// ---- Forward ----

// A tile of queries that loops over the keys.
template <typename E, int T, int D, bool DROP> struct Queries {
    u32 q[WIDE<D> / 16][4];
    float o[WIDE<D> / 8][4];
    float top[2], sum[2];

    __device__ __forceinline__ void start(const E* queries, int stride, int first) {
        load_left<T, D>(q, queries, stride, first);
#pragma unroll
        for (int j = 0; j < WIDE<D> / 8; j++) o[j][0] = o[j][1] = o[j][2] = o[j][3] = 0.0f;
        top[0] = top[1] = __int_as_float(0xff800000);
        sum[0] = sum[1] = 0.0f;
    }

    // Goes through N tiles of keys from tile `first`, of which keys and values lie from `row` on. TAIL says that they end
    // with key T-1.
    template <int N, bool TAIL>
    __device__ __forceinline__ void attend(u32 keys, u32 values, int row, int first, const Stream& stream, u32 token,
                                           u32 threshold) {
        constexpr float LOWEST = -1e30f;
        constexpr int REAL = TAIL ? T - (ceil_div(T, 16) - N) * 16 : 16 * N;
        int t = threadIdx.x % 4;
        float s[2 * N][4];
#pragma unroll
        for (int j = 0; j < 2 * N; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) s[j][i] = 8 * j + 8 <= REAL || 8 * j + 2 * t + i % 2 < REAL ? 0.0f : LOWEST;
#pragma unroll
        for (int j = 0; j < N; j++)
#pragma unroll
            for (int k = 0; k < WIDE<D> / 16; k++) {
                u32 b[4];
                load_right_transposed<WIDE<D>>(b, keys, row + 16 * j, k);
                mma<E>(s[2 * j], q[k], b[0], b[1]);
                if (16 * j + 8 < REAL) mma<E>(s[2 * j + 1], q[k], b[2], b[3]);
            }

        soften<D, N, REAL, DROP>(s, o, top, sum, first, stream, token, threshold);

#pragma unroll
        for (int j = 0; j < N; j++) {
            u32 p[4];
            as_left<E>(p, s[2 * j], s[2 * j + 1]);
#pragma unroll
            for (int n = 0; n < WIDE<D> / 16; n++) {
                u32 b[4];
                load_right<WIDE<D>>(b, values, row + 16 * j, n);
                mma<E>(o[2 * n], p, b[0], b[1]);
                mma<E>(o[2 * n + 1], p, b[2], b[3]);
            }
        }
    }

    __device__ __forceinline__ void finish(E* out, int stride, float* lse, int first, float keep_scale) {
        float factor[2];
        finish_rows<T, D>(factor, top, sum, lse, first, keep_scale);
        store_tile<T, D>(out, stride, first, o, factor[0], factor[1]);
    }
};

// Warps that an SM's registers are to hold.
template <int D> struct Residency {
    static constexpr int FORWARD = D <= 64 ? 16 : D <= 96 ? 12 : 8;
};

// One block for a head. PARTS parts of the keys and values are in shared memory at a time; each warp goes through them
// with a tile of queries. Grid: (B·H, how many blocks share a head's queries).
template <typename E, int T, int D, int WARPS, int PARTS, bool DROP>
__global__ void __launch_bounds__(32 * WARPS, at_least_1(Residency<D>::FORWARD / WARPS))
    attention(const E* __restrict__ qkv, E* __restrict__ out, float* __restrict__ lse, int heads,
              const Header* __restrict__ header, u32 site, u32 threshold, float keep_scale) {
    using P = Parts<T>;
    constexpr bool WHOLE = PARTS >= P::COUNT;
    constexpr int ROWS = 16 * ((PARTS - 1) * P::PART + P::LAST);
    extern __shared__ uint4 shared[];
    const u32 keys = shared_address(shared), values = keys + ROWS * Rows<WIDE<D>>::BYTES;

    const int b = blockIdx.x / heads, h = blockIdx.x % heads, channels = heads * D, stride = 3 * channels;
    const E* head = qkv + (i64)b * T * stride + h * D;
    E* out_head = out + (i64)b * T * channels + h * D;
    const Stream stream = draws<DROP>(header, site, b);

    auto fetch = [&](int part) {
        if constexpr (!WHOLE) __syncthreads();
        copy_rows<T, D, ROWS, 32 * WARPS>(keys, head + channels, stride, part * P::PART * 16);
        copy_rows<T, D, ROWS, 32 * WARPS>(values, head + 2 * channels, stride, part * P::PART * 16);
        close_copies();
    };
    auto arrive = [&] {
        wait_copies<0>();
        __syncthreads();
    };

    if constexpr (WHOLE) fetch(0);
    bool arrived = false;
    for (int round = blockIdx.y * WARPS; round < P::TILES; round += gridDim.y * WARPS) {
        const int tile = round + threadIdx.x / 32, first = 16 * tile;
        const u32 token = h * T + first + threadIdx.x % 32 / 4;
        Queries<E, T, D, DROP> queries;
        queries.start(head, stride, first);
        if (WHOLE && !arrived) arrive();
        arrived = true;
#pragma unroll 1
        for (int part = 0; part < P::COUNT - 1; part++) {
            if (!WHOLE && part % PARTS == 0) fetch(part), arrive();
            if (tile < P::TILES)
                queries.template attend<P::PART, false>(keys, values, part % PARTS * P::PART * 16, part * P::PART, stream,
                                                        token, threshold);
        }
        constexpr int LAST = P::COUNT - 1;
        if (!WHOLE && LAST % PARTS == 0) fetch(LAST), arrive();
        if (tile < P::TILES) {
            queries.template attend<P::LAST, true>(keys, values, LAST % PARTS * P::PART * 16, LAST * P::PART, stream, token,
                                                   threshold);
            queries.finish(out_head, channels, lse + (i64)blockIdx.x * T, first, keep_scale);
        }
    }
}

// ---- Backward ----

// The backward of a head goes through squares of (16·WARPS keys) × (16·WARPS queries), each in two phases:
//   1. A warp owns a tile of keys. For each tile of queries it computes Pᵀ and dSᵀ, adds Pᵀ·dO to dV and dSᵀ·Q to dK, and
//      leaves dSᵀ in shared memory.
//   2. A warp owns a tile of queries, and adds dS·K to dQ.
// dK and dV of a warp's keys stay in registers through all queries. dQ does only if one square is the whole head; else it
// waits in `partial` for the next keys.
//
// Blocks go through heads in turn. The queries, dO and O of the next square are fetched while this one is computed. SUM says that
// the head's sums over its tokens are wanted.
template <typename E, int T, int D, int WARPS, int STAGES, bool DROP, bool SUM> struct Backward {
    static constexpr int TILES = ceil_div(T, 16);
    // Squares along one side.
    static constexpr int SQUARES = ceil_div(TILES, WARPS);
    static constexpr int SIDE = 16 * WARPS;
    static constexpr int THREADS = 32 * WARPS;
    static constexpr int ROWS_BYTES = SIDE * Rows<WIDE<D>>::BYTES;
    // A row of dSᵀ has an odd number of units, so that neither its writes nor its reads meet in a bank.
    static constexpr int SCORES_STRIDE = (SIDE / 8 | 1) * 16;
    // dSᵀ, and later the sums of the warps.
    static constexpr int SUMS = WARPS * 3 * D * 4;
    static constexpr int SCORES = SIDE * SCORES_STRIDE > SUMS ? SIDE * SCORES_STRIDE : SUMS;
    static constexpr int SHARED = (2 * STAGES + 1) * ROWS_BYTES + SCORES + 2 * SIDE * 4;

    struct Square {
        int head, keys, queries;
        __device__ __forceinline__ Square next() const {
            Square n = *this;
            if (SQUARES == 1 || ++n.queries == SQUARES) {
                n.queries = 0;
                if (SQUARES == 1 || ++n.keys == SQUARES) n.keys = 0, n.head += gridDim.x;
            }
            return n;
        }
    };

    // Arguments.
    const E* qkv;
    const E* out;
    const float* lse;
    const E* dout;
    E* dqkv;
    float* partial;
    float* sums;
    int total, heads;
    const Header* header;
    u32 site, threshold;
    float keep_scale;

    // Where things lie in shared memory.
    u32 stages, keys, scores;
    float *log_sums, *deltas, *shared_sums;

    // This warp's share of the head's sums.
    ColumnSums<D> query_sums, key_sums, value_sums;
    // A warp's tile of keys and values, and their gradients.
    u32 k[WIDE<D> / 16][4], v[WIDE<D> / 16][4];
    float dk[WIDE<D> / 8][4], dv[WIDE<D> / 8][4];
    // Half of a row of O, and its log-sum-exp, of the next square.
    uint4 o[WIDE<D> / 16];
    float log_sum;

    __device__ __forceinline__ int warp() const { return threadIdx.x / 32; }
    __device__ __forceinline__ i64 packed(int head) const {
        return (i64)(head / heads) * T * 3 * heads * D + head % heads * D;
    }
    __device__ __forceinline__ i64 plain(int head) const { return (i64)(head / heads) * T * heads * D + head % heads * D; }
    __device__ __forceinline__ u32 queries_at(int stage) const { return stages + stage * 2 * ROWS_BYTES; }

    __device__ __forceinline__ void fetch_queries(Square s, int stage) {
        if (s.head < total) {
            u32 to = queries_at(stage);
            copy_rows<T, D, SIDE, THREADS>(to, qkv + packed(s.head), 3 * heads * D, s.queries * SIDE);
            copy_rows<T, D, SIDE, THREADS>(to + ROWS_BYTES, dout + plain(s.head), heads * D, s.queries * SIDE);
        }
        close_copies();
    }

    __device__ __forceinline__ void fetch_keys(Square s) {
        if (s.queries == 0)
            copy_rows<T, D, SIDE, THREADS>(keys, qkv + packed(s.head) + heads * D, 3 * heads * D, s.keys * SIDE);
        close_copies();
    }

    // Loads to registers.
    __device__ __forceinline__ void fetch_rows(Square s) {
        if (s.head >= total) return;
        int row = s.queries * SIDE + threadIdx.x / 2, half = threadIdx.x % 2;
        const E* from = out + plain(s.head) + (i64)row * heads * D + half * 8;
#pragma unroll
        for (int i = 0; i < WIDE<D> / 16; i++)
            o[i] = row < T && (WIDE<D> == D || 16 * i + 8 * half < D) ? *reinterpret_cast<const uint4*>(from + 16 * i) : make_uint4(0, 0, 0, 0);
        // A query that isn't there has probabilities 0.
        log_sum = row < T ? lse[(i64)s.head * T + row] * LOG2E : __int_as_float(0x7f800000);
        if (s.queries > 0) return;
        const E* head = qkv + packed(s.head);
        int first = s.keys * SIDE + 16 * warp();
        load_left<T, D>(k, head + heads * D, 3 * heads * D, first);
        load_left<T, D>(v, head + 2 * heads * D, 3 * heads * D, first);
    }

    // rowsum(dO ∘ O), by two threads a row.
    __device__ __forceinline__ void sum_rows(int stage) {
        int row = threadIdx.x / 2, half = threadIdx.x % 2;
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < WIDE<D> / 16; i++) {
            uint4 x = o[i], y;
            asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                         : "=r"(y.x), "=r"(y.y), "=r"(y.z), "=r"(y.w)
                         : "r"(queries_at(stage) + ROWS_BYTES + Rows<WIDE<D>>::at(row, 2 * i + half))
                         : "memory");
            add_dot(sum, x.x, y.x);
            add_dot(sum, x.y, y.y);
            add_dot(sum, x.z, y.z);
            add_dot(sum, x.w, y.w);
        }
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        if (half == 0) deltas[row] = sum;
        else log_sums[row] = log_sum;
    }
    static __device__ __forceinline__ void add_dot(float& sum, u32 x, u32 y) {
        float x0, x1, y0, y1;
        unpack2<E>(x, x0, x1);
        unpack2<E>(y, y0, y1);
        sum = fmaf(x0, y0, fmaf(x1, y1, sum));
    }

    __device__ __forceinline__ void keys_phase(Square s, int stage) {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        const int key_tile = s.keys * WARPS + warp();
        const u32 q_rows = queries_at(stage), do_rows = q_rows + ROWS_BYTES;
        const float scale = score_scale<D>() * LOG2E;
        const Stream stream = draws<DROP>(header, site, s.head / heads);
        // Keys that aren't there get probabilities 0.
        const float start_low = T % 16 == 0 || key_tile * 16 + g < T ? 0.0f : -1e30f;
        const float start_high = T % 16 == 0 || key_tile * 16 + g + 8 < T ? 0.0f : -1e30f;
        const int tiles = SQUARES == 1 ? TILES : min(WARPS, TILES - s.queries * WARPS);
        const u32 to = scores + (16 * warp() + g) * SCORES_STRIDE + 4 * t;
#pragma unroll 1
        for (int tile = 0; tile < tiles; tile++) {
            float p[2][4], ds[2][4];
#pragma unroll
            for (int j = 0; j < 2; j++) {
                p[j][0] = p[j][1] = start_low;
                p[j][2] = p[j][3] = start_high;
                ds[j][0] = ds[j][1] = ds[j][2] = ds[j][3] = 0.0f;
            }
#pragma unroll
            for (int i = 0; i < WIDE<D> / 16; i++) {
                u32 b[4];
                load_right_transposed<WIDE<D>>(b, q_rows, 16 * tile, i);
                mma<E>(p[0], k[i], b[0], b[1]);
                mma<E>(p[1], k[i], b[2], b[3]);
            }
#pragma unroll
            for (int i = 0; i < WIDE<D> / 16; i++) {
                u32 b[4];
                load_right_transposed<WIDE<D>>(b, do_rows, 16 * tile, i);
                mma<E>(ds[0], v[i], b[0], b[1]);
                mma<E>(ds[1], v[i], b[2], b[3]);
            }
#pragma unroll
            for (int j = 0; j < 2; j++) {
                int query = 16 * tile + 8 * j;
                float2 log_sum = *reinterpret_cast<const float2*>(log_sums + query + 2 * t);
                float2 delta = *reinterpret_cast<const float2*>(deltas + query + 2 * t);
                u32 stay =
                    DROP ? kept_transposed(stream, s.head % heads * T + s.queries * SIDE + query, key_tile, threshold) : 0;
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    float x = exp2_fast(fmaf(p[j][i], scale, i % 2 ? -log_sum.y : -log_sum.x));
                    float dx = ds[j][i];
                    if constexpr (DROP) dx = stay >> i & 1 ? dx * keep_scale : 0.0f;
                    ds[j][i] = x * (dx - (i % 2 ? delta.y : delta.x));
                    p[j][i] = DROP && !(stay >> i & 1) ? 0.0f : x;
                }
            }
            u32 a[4], da[4];
            as_left<E>(a, p[0], p[1]);
            as_left<E>(da, ds[0], ds[1]);
#pragma unroll
            for (int i = 0; i < 4; i++)
                asm volatile("st.shared.u32 [%0], %1;" ::"r"(to + 32 * tile + (i / 2) * 16 + (i % 2) * 8 * SCORES_STRIDE),
                             "r"(da[i])
                             : "memory");
#pragma unroll
            for (int n = 0; n < WIDE<D> / 16; n++) {
                u32 b[4];
                load_right<WIDE<D>>(b, do_rows, 16 * tile, n);
                mma<E>(dv[2 * n], a, b[0], b[1]);
                mma<E>(dv[2 * n + 1], a, b[2], b[3]);
            }
#pragma unroll
            for (int n = 0; n < WIDE<D> / 16; n++) {
                u32 b[4];
                load_right<WIDE<D>>(b, q_rows, 16 * tile, n);
                mma<E>(dk[2 * n], da, b[0], b[1]);
                mma<E>(dk[2 * n + 1], da, b[2], b[3]);
            }
        }
    }

    __device__ __forceinline__ void store_keys(Square s) {
        E* head = dqkv + packed(s.head);
        int first = s.keys * SIDE + 16 * warp();
        float scale = score_scale<D>();
        store_tile<T, D>(head + heads * D, 3 * heads * D, first, dk, scale, scale);
        store_tile<T, D>(head + 2 * heads * D, 3 * heads * D, first, dv, keep_scale, keep_scale);
        if constexpr (SUM) {
            key_sums.template add<T>(first, [&](int j, int i) { return dk[j][i]; });
            value_sums.template add<T>(first, [&](int j, int i) { return dv[j][i]; });
        }
    }

    // Sums over all tokens of a head, once dSᵀ is free.
    __device__ __forceinline__ void store_sums(int head) {
        float* own = shared_sums + warp() * 3 * D;
        __syncthreads();
        query_sums.store(own, score_scale<D>());
        key_sums.store(own + D, score_scale<D>());
        value_sums.store(own + 2 * D, keep_scale);
        __syncthreads();
        add_column_sums<D, WARPS, THREADS>(shared_sums, sums + (i64)(head / heads) * 3 * heads * D, heads, head % heads);
    }

    __device__ __forceinline__ void queries_phase(Square s) {
        const int lane = threadIdx.x % 32;
        float dq[WIDE<D> / 8][4];
        // Each thread gets back what it left itself.
        float4* mine = reinterpret_cast<float4*>(partial) +
                       ((i64)(blockIdx.x * SQUARES + s.queries) * WARPS + warp()) * (WIDE<D> / 8) * 32 + lane;
#pragma unroll
        for (int j = 0; j < WIDE<D> / 8; j++) {
            float4 x = SQUARES > 1 && s.keys > 0 ? mine[j * 32] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            dq[j][0] = x.x, dq[j][1] = x.y, dq[j][2] = x.z, dq[j][3] = x.w;
        }
        const int tiles = SQUARES == 1 ? TILES : min(WARPS, TILES - s.keys * WARPS);
        const u32 from = scores + ((lane / 16) * 8 + lane % 8) * SCORES_STRIDE + (2 * warp() + (lane / 8) % 2) * 16;
#pragma unroll 2
        for (int tile = 0; tile < tiles; tile++) {
            u32 a[4];
            load_transposed(a, from + 16 * tile * SCORES_STRIDE);
#pragma unroll
            for (int n = 0; n < WIDE<D> / 16; n++) {
                u32 b[4];
                load_right<WIDE<D>>(b, keys, 16 * tile, n);
                mma<E>(dq[2 * n], a, b[0], b[1]);
                mma<E>(dq[2 * n + 1], a, b[2], b[3]);
            }
        }
        if (SQUARES == 1 || s.keys == SQUARES - 1) {
            float scale = score_scale<D>();
            int first = s.queries * SIDE + 16 * warp();
            store_tile<T, D>(dqkv + packed(s.head), 3 * heads * D, first, dq, scale, scale);
            if constexpr (SUM) query_sums.template add<T>(first, [&](int j, int i) { return dq[j][i]; });
        } else {
#pragma unroll
            for (int j = 0; j < WIDE<D> / 8; j++) mine[j * 32] = make_float4(dq[j][0], dq[j][1], dq[j][2], dq[j][3]);
        }
    }

    __device__ __forceinline__ void run() {
        Square s = {(int)blockIdx.x, 0, 0};
        int stage = 0;
        fetch_queries(s, stage);
        fetch_rows(s);
        while (s.head < total) {
            const Square next = s.next();
            wait_copies<0>();
            __syncthreads();
            fetch_keys(s);
            sum_rows(stage);
            __syncthreads();
            if (STAGES == 2) fetch_queries(next, stage ^ 1);
            if (s.queries == 0) {
#pragma unroll
                for (int j = 0; j < WIDE<D> / 8; j++)
#pragma unroll
                    for (int i = 0; i < 4; i++) dk[j][i] = dv[j][i] = 0.0f;
            }
            if (SUM && s.queries == 0 && s.keys == 0) query_sums.clear(), key_sums.clear(), value_sums.clear();
            if (s.keys * WARPS + warp() < TILES) {
                keys_phase(s, stage);
                if (s.queries == SQUARES - 1) store_keys(s);
            }
            wait_copies<STAGES - 1>();
            __syncthreads();
            if (STAGES == 1) fetch_queries(next, stage);
            fetch_rows(next);
            if (s.queries * WARPS + warp() < TILES) queries_phase(s);
            if (SUM && next.head != s.head) store_sums(s.head);
            if (STAGES == 2) stage ^= 1;
            s = next;
        }
    }
};

// Grid: as many blocks as run at once. `partial` has 16·D·WARPS numbers (D up to a multiple of 16) for every block and square along a side. With SUM, a row
// of `sums` (B,3C) has the sums over a sample's tokens.
template <typename E, int T, int D, int WARPS, int STAGES, int RESIDENT, bool DROP, bool SUM>
__global__ void __launch_bounds__(32 * WARPS, RESIDENT)
    attention_grad(const E* __restrict__ qkv, const E* __restrict__ out, const float* __restrict__ lse,
                   const E* __restrict__ dout, E* __restrict__ dqkv, float* __restrict__ partial,
                   float* __restrict__ sums, int total, int heads, const Header* __restrict__ header, u32 site,
                   u32 threshold, float keep_scale) {
    using B = Backward<E, T, D, WARPS, STAGES, DROP, SUM>;
    extern __shared__ uint4 shared[];
    B b;
    b.qkv = qkv, b.out = out, b.lse = lse, b.dout = dout, b.dqkv = dqkv, b.partial = partial;
    b.sums = sums;
    b.total = total, b.heads = heads;
    b.header = header, b.site = site, b.threshold = threshold, b.keep_scale = keep_scale;
    b.stages = shared_address(shared);
    b.keys = b.stages + 2 * STAGES * B::ROWS_BYTES;
    b.scores = b.keys + B::ROWS_BYTES;
    b.log_sums = reinterpret_cast<float*>(reinterpret_cast<u8*>(shared) + B::SHARED) - 2 * B::SIDE;
    b.deltas = b.log_sums + B::SIDE;
    b.shared_sums = reinterpret_cast<float*>(reinterpret_cast<u8*>(shared) + (b.scores - b.stages));
    b.run();
}
