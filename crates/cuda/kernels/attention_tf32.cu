// Softmax attention of f32 on the tensor cores, whose operands are rounded to tf32. Forward and backward, without atomics.
// sm_80 and later.
//
// Legend: B batch, H heads, T tokens, D head size, C = H·D. A tile is 16 tokens, a unit 4 elements (16 bytes). g = lane/4 and
// t = lane%4. qkv is (B,T,3C): queries, keys and values of a token lie side by side, head h at h·D of each.
//
// A warp owns a tile of one side (queries or keys), and goes through the tokens of the other side, of which two matrices come by
// in parts. The backward pass goes twice, once for each side: it computes probabilities twice, but nothing has to be passed
// from one side to the other.
#include "attention.cuh"

// ---- Instructions ----

__device__ __forceinline__ u32 to_tf32(float x) {
    u32 y;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
    return y;
}

// c += a·b for a 16×8 a and an 8×8 b. A thread holds of c rows g and g+8, columns 2t and 2t+1; of a rows g and g+8, columns t
// and t+4; of b rows t and t+4, column g.
__device__ __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// A number that is known when this is compiled.
template <int N> struct Number { static constexpr int VALUE = N; };

// Column i of WARPS rows of D numbers, added in order.
template <int D, int WARPS> __device__ __forceinline__ float sum_of_warps(const float* rows, int i) {
    float sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++) sum += rows[warp * D + i];
    return sum;
}

// ---- Rows in shared memory ----

// Rows of D elements. They have an odd number of units, so that neither the 8 rows of a matrix nor every second of 8 rows meet
// in a bank.
template <int D> struct Rows {
    static constexpr int UNITS = D / 4, STRIDE = 4 * (UNITS | 1), BYTES = 4 * STRIDE;
    // Bytes from the first row.
    static __device__ __forceinline__ u32 at(int row, int unit) { return row * BYTES + unit * 16; }
};

// The right side of x·yᵀ: 16 rows of y from `row`, elements 8·k on. Words 0 and 1 are for rows 0..8, 2 and 3 for the rest.
template <int D> __device__ __forceinline__ void load_right_transposed(u32 (&b)[4], u32 rows, int row, int k) {
    int lane = threadIdx.x % 32;
    load_matrices(b, rows + Rows<D>::at(row + (lane / 16) * 8 + lane % 8, 2 * k + (lane / 8) % 2));
}

// sum += x·y for a 16×8 x and the 8 rows of y from `row`. What a thread has of x, columns 2t and 2t+1, counts as columns t and
// t+4; so do the rows of y.
template <int D>
__device__ __forceinline__ void add_matmul(float (&sum)[D / 8][4], const float (&x)[4], u32 rows, int row) {
    const int lane = threadIdx.x % 32;
    const u32 a[4] = {to_tf32(x[0]), to_tf32(x[2]), to_tf32(x[1]), to_tf32(x[3])};
    const u32 from = rows + (row + 2 * (lane % 4)) * Rows<D>::BYTES + lane / 4 * 4;
#pragma unroll
    for (int n = 0; n < D / 8; n++) {
        u32 b0, b1;
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(b0) : "r"(from + 32 * n) : "memory");
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(b1) : "r"(from + 32 * n + Rows<D>::BYTES) : "memory");
        mma(sum[n], a, b0, b1);
    }
}

// s += x·yᵀ for a tile x and 16 rows of y from `row`; the second 8 rows only if they are there.
template <int D>
__device__ __forceinline__ void add_scores(float (&low)[4], float (&high)[4], const u32 (&x)[D / 8][4], u32 rows, int row,
                                           bool both = true) {
#pragma unroll
    for (int k = 0; k < D / 8; k++) {
        u32 b[4];
        load_right_transposed<D>(b, rows, row, k);
        mma(low, x[k], b[0], b[1]);
        if (both) mma(high, x[k], b[2], b[3]);
    }
}

// ---- Tiles in registers ----

// Elements of rows g and g+8, columns 8k+t and 8k+t+4, of a tile of a head. Rows from T on are zeros.
template <int T, int D> struct Tile {
    float x[D / 8][4];

    __device__ __forceinline__ Tile(const float* head, int stride, int first) {
        const int lane = threadIdx.x % 32, row = first + lane / 4;
        const float* low = head + (i64)row * stride + lane % 4;
        const float* high = low + 8 * (i64)stride;
#pragma unroll
        for (int k = 0; k < D / 8; k++) {
            x[k][0] = row < T ? low[8 * k] : 0.0f;
            x[k][1] = row + 8 < T ? high[8 * k] : 0.0f;
            x[k][2] = row < T ? low[8 * k + 4] : 0.0f;
            x[k][3] = row + 8 < T ? high[8 * k + 4] : 0.0f;
        }
    }

    // Converts to the left side of a matmul.
    __device__ __forceinline__ void round(u32 (&a)[D / 8][4]) const {
#pragma unroll
        for (int k = 0; k < D / 8; k++)
#pragma unroll
            for (int i = 0; i < 4; i++) a[k][i] = to_tf32(x[k][i]);
    }
};

template <int D> __device__ __forceinline__ void clear(float (&x)[D / 8][4]) {
#pragma unroll
    for (int j = 0; j < D / 8; j++) x[j][0] = x[j][1] = x[j][2] = x[j][3] = 0.0f;
}

// Writes a tile, rows g times `low` and rows g+8 times `high`, to rows first..T of a head.
template <int T, int D>
__device__ __forceinline__ void store_tile(float* head, int stride, int first, const float (&x)[D / 8][4], float low,
                                           float high) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int row = first + lane / 4 + 8 * half;
        float factor = half ? high : low;
        float* to = head + (i64)row * stride + 2 * (lane % 4);
#pragma unroll
        for (int j = 0; j < D / 8; j++)
            if (row < T)
                *reinterpret_cast<float2*>(to + 8 * j) =
                    make_float2(x[j][2 * half] * factor, x[j][2 * half + 1] * factor);
    }
}

// ---- The other side ----

// Two matrices of a head's tokens (keys and values, or queries and dO), cut into the parts of Parts<T>. With two STAGES the next
// part is fetched while one is worked on.
template <int T, int D, int WARPS, int STAGES> struct Others {
    using P = Parts<T>;
    static constexpr int ROWS = 16 * P::LAST, MATRIX = ROWS * Rows<D>::BYTES, THREADS = 32 * WARPS;
    static constexpr int UNITS = ROWS * Rows<D>::UNITS;

    const float *first, *second;
    int first_stride, second_stride;
    u32 shared;

    static __device__ __forceinline__ int rows(int part) { return 16 * (part == P::COUNT - 1 ? P::LAST : P::PART); }
    __device__ __forceinline__ u32 stage(int part) const { return shared + (part % STAGES) * 2 * MATRIX; }

    // What every thread copies it also rounds, once it is there: then all may read it.
    template <typename F> static __device__ __forceinline__ void each_unit(int part, F f) {
#pragma unroll 4
        for (int index = threadIdx.x; index < UNITS; index += THREADS) {
            int row = index / Rows<D>::UNITS, unit = index % Rows<D>::UNITS;
            if (row < rows(part)) f(row, unit);
        }
    }

    __device__ __forceinline__ void fetch(int part) const {
        if (part < P::COUNT) {
            const u32 to = stage(part);
            each_unit(part, [&](int row, int unit) {
                int token = part * P::PART * 16 + row;
                bool real = token < T;
                u32 at = to + Rows<D>::at(row, unit);
                copy_unit(at, first + (real ? (i64)token * first_stride + 4 * unit : 0), real);
                copy_unit(at + MATRIX, second + (real ? (i64)token * second_stride + 4 * unit : 0), real);
            });
        }
        close_copies();
    }

    static __device__ __forceinline__ void round_unit(u32 at) {
        float x[4];
        asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];"
                     : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
                     : "r"(at)
                     : "memory");
        asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(to_tf32(x[0])), "r"(to_tf32(x[1])),
                     "r"(to_tf32(x[2])), "r"(to_tf32(x[3]))
                     : "memory");
    }

    // Calls f(part, first matrix, second matrix) for every part.
    template <typename F> __device__ __forceinline__ void walk(F f) const {
        fetch(0);
#pragma unroll 1
        for (int part = 0; part < P::COUNT; part++) {
            if (STAGES == 2) fetch(part + 1);
            wait_copies<STAGES - 1>();
            const u32 here = stage(part);
            each_unit(part, [&](int row, int unit) {
                round_unit(here + Rows<D>::at(row, unit));
                round_unit(here + MATRIX + Rows<D>::at(row, unit));
            });
            __syncthreads();
            f(part, here, here + MATRIX);
            __syncthreads();
            if (STAGES == 1) fetch(part + 1);
        }
    }
};

// Where a block's tile lies.
template <int T, int D, int WARPS> struct Place {
    int b, h, heads, warp, first;
    __device__ __forceinline__ Place(int heads) : b(blockIdx.x / heads), h(blockIdx.x % heads), heads(heads) {
        warp = threadIdx.x / 32;
        first = 16 * (blockIdx.y * WARPS + warp);
    }
    __device__ __forceinline__ int stride() const { return 3 * heads * D; }
    __device__ __forceinline__ i64 packed() const { return (i64)b * T * stride() + h * D; }
    __device__ __forceinline__ i64 plain() const { return (i64)b * T * heads * D + h * D; }
    __device__ __forceinline__ i64 statistics() const { return (i64)blockIdx.x * T; }
    // A row of sums (B·blocks of a head, 3C).
    __device__ __forceinline__ i64 sums() const { return ((i64)b * gridDim.y + blockIdx.y) * stride() + h * D; }
};

// ---- Forward ----

// Grid: (B·H, blocks that share the queries of a head).
template <int T, int D, int WARPS, int STAGES, int RESIDENT, bool DROP>
__global__ void __launch_bounds__(32 * WARPS, RESIDENT)
    attention_tf32(const float* __restrict__ qkv, float* __restrict__ out, float* __restrict__ lse, int heads,
                   const Header* __restrict__ header, u32 site, u32 threshold, float keep_scale) {
    using P = Parts<T>;
    extern __shared__ uint4 shared[];
    const Place<T, D, WARPS> at(heads);
    const int lane = threadIdx.x % 32, t = lane % 4;
    const float* head = qkv + at.packed();
    const Stream stream = draws<DROP>(header, site, at.b);
    const u32 token = at.h * T + at.first + lane / 4;

    u32 q[D / 8][4];
    Tile<T, D>(head, at.stride(), at.first).round(q);
    float o[D / 8][4], top[2], sum[2] = {};
    clear<D>(o);
    top[0] = top[1] = __int_as_float(0xff800000);

    // N tiles of keys; LAST_PART says that they end with key T-1.
    auto attend = [&](auto n, auto last_part, int first, u32 keys, u32 values) {
        constexpr int N = decltype(n)::VALUE;
        constexpr int REAL = decltype(last_part)::VALUE ? T - (P::TILES - N) * 16 : 16 * N;
        float s[2 * N][4];
#pragma unroll
        for (int j = 0; j < 2 * N; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) s[j][i] = 8 * j + 8 <= REAL || 8 * j + 2 * t + i % 2 < REAL ? 0.0f : -1e30f;
#pragma unroll
        for (int j = 0; j < N; j++) add_scores<D>(s[2 * j], s[2 * j + 1], q, keys, 16 * j, 16 * j + 8 < REAL);
        soften<D, N, REAL, DROP>(s, o, top, sum, first, stream, token, threshold);
#pragma unroll
        for (int j = 0; j < 2 * N; j++)
            if (8 * j < REAL) add_matmul<D>(o, s[j], values, 8 * j);
    };
    const Others<T, D, WARPS, STAGES> others = {head + heads * D, head + 2 * heads * D, at.stride(), at.stride(),
                                                shared_address(shared)};
    others.walk([&](int part, u32 keys, u32 values) {
        if (at.first >= T) return;
        if (part < P::COUNT - 1) attend(Number<P::PART>(), Number<false>(), part * P::PART, keys, values);
        else attend(Number<P::LAST>(), Number<true>(), part * P::PART, keys, values);
    });
    if (at.first >= T) return;
    float factor[2];
    finish_rows<T, D>(factor, top, sum, lse + at.statistics(), at.first, keep_scale);
    store_tile<T, D>(out + at.plain(), heads * D, at.first, o, factor[0], factor[1]);
}

// ---- Backward ----

// dQ, and rowsum(dO ∘ O) for attention_tf32_grad_keys. With SUM, a row of `sums` has the sums over a block's tokens. Grid: (B·H,
// blocks that share the queries of a head).
template <int T, int D, int WARPS, int STAGES, int RESIDENT, bool DROP, bool SUM>
__global__ void __launch_bounds__(32 * WARPS, RESIDENT)
    attention_tf32_grad_queries(const float* __restrict__ qkv, const float* __restrict__ out, const float* __restrict__ lse,
                                const float* __restrict__ dout, float* __restrict__ dqkv, float* __restrict__ deltas,
                                float* __restrict__ sums, int heads, const Header* __restrict__ header, u32 site,
                                u32 threshold, float keep_scale) {
    using P = Parts<T>;
    extern __shared__ uint4 shared[];
    const Place<T, D, WARPS> at(heads);
    const int lane = threadIdx.x % 32, t = lane % 4, row = at.first + lane / 4;
    const float* head = qkv + at.packed();
    const Stream stream = draws<DROP>(header, site, at.b);
    const float scale = score_scale<D>();

    u32 q[D / 8][4], d[D / 8][4];
    Tile<T, D>(head, at.stride(), at.first).round(q);
    float delta[2] = {}, log_sum[2];
    {
        Tile<T, D> o(out + at.plain(), heads * D, at.first), douts(dout + at.plain(), heads * D, at.first);
        douts.round(d);
#pragma unroll
        for (int k = 0; k < D / 8; k++)
#pragma unroll
            for (int i = 0; i < 4; i++) delta[i % 2] = fmaf(o.x[k][i], douts.x[k][i], delta[i % 2]);
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        delta[half] += __shfl_xor_sync(0xffffffffu, delta[half], 1);
        delta[half] += __shfl_xor_sync(0xffffffffu, delta[half], 2);
        bool real = row + 8 * half < T;
        if (t == 0 && real) deltas[at.statistics() + row + 8 * half] = delta[half];
        // A query that isn't there has probabilities 0.
        log_sum[half] = real ? lse[at.statistics() + row + 8 * half] * LOG2E : __int_as_float(0x7f800000);
    }
    float dq[D / 8][4];
    clear<D>(dq);

    const Others<T, D, WARPS, STAGES> others = {head + heads * D, head + 2 * heads * D, at.stride(), at.stride(),
                                                shared_address(shared)};
    others.walk([&](int part, u32 keys, u32 values) {
        if (at.first >= T) return;
        const int tiles = part == P::COUNT - 1 ? P::LAST : P::PART;
#pragma unroll 1
        for (int tile = 0; tile < tiles; tile++) {
            const int key = 16 * (part * P::PART + tile);
            float p[2][4], ds[2][4] = {};
#pragma unroll
            for (int j = 0; j < 2; j++)
#pragma unroll
                for (int i = 0; i < 4; i++) p[j][i] = T % 16 == 0 || key + 8 * j + 2 * t + i % 2 < T ? 0.0f : -1e30f;
            add_scores<D>(p[0], p[1], q, keys, 16 * tile);
            add_scores<D>(ds[0], ds[1], d, values, 16 * tile);
            u32 stay[2] = {};
            if constexpr (DROP) {
                KeptKeys kept_keys(stream, at.h * T + row, part * P::PART + tile, threshold);
                stay[0] = kept_keys.of_side(0), stay[1] = kept_keys.of_side(1);
            }
#pragma unroll
            for (int j = 0; j < 2; j++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    float x = exp2_fast(fmaf(p[j][i], scale * LOG2E, -log_sum[i / 2]));
                    float dx = ds[j][i];
                    if constexpr (DROP) dx = stay[j] >> (4 * (i / 2) + i % 2) & 1 ? dx * keep_scale : 0.0f;
                    ds[j][i] = x * (dx - delta[i / 2]);
                }
                add_matmul<D>(dq, ds[j], keys, 16 * tile + 8 * j);
            }
        }
    });
    if (at.first < T) store_tile<T, D>(dqkv + at.packed(), at.stride(), at.first, dq, scale, scale);
    if constexpr (SUM) {
        ColumnSums<D> own;
        own.clear();
        if (at.first < T) own.template add<T>(at.first, [&](int j, int i) { return dq[j][i]; });
        float* by = reinterpret_cast<float*>(shared);
        own.store(by + at.warp * D, scale);
        __syncthreads();
        for (int i = threadIdx.x; i < D; i += 32 * WARPS) sums[at.sums() + i] = sum_of_warps<D, WARPS>(by, i);
    }
}

// dK and dV, and their sums as above. Grid: (B·H, blocks that share the keys of a head).
template <int T, int D, int WARPS, int STAGES, int RESIDENT, bool DROP, bool SUM>
__global__ void __launch_bounds__(32 * WARPS, RESIDENT)
    attention_tf32_grad_keys(const float* __restrict__ qkv, const float* __restrict__ lse, const float* __restrict__ dout,
                             float* __restrict__ dqkv, const float* __restrict__ deltas, float* __restrict__ sums, int heads,
                             const Header* __restrict__ header, u32 site, u32 threshold, float keep_scale) {
    using P = Parts<T>;
    extern __shared__ uint4 shared[];
    const Place<T, D, WARPS> at(heads);
    const int lane = threadIdx.x % 32, t = lane % 4, key = at.first + lane / 4;
    const float* head = qkv + at.packed();
    const Stream stream = draws<DROP>(header, site, at.b);
    const float scale = score_scale<D>();

    u32 k[D / 8][4], v[D / 8][4];
    Tile<T, D>(head + heads * D, at.stride(), at.first).round(k);
    Tile<T, D>(head + 2 * heads * D, at.stride(), at.first).round(v);
    float dk[D / 8][4], dv[D / 8][4];
    clear<D>(dk);
    clear<D>(dv);
    // Keys that aren't there get probabilities 0.
    const float start[2] = {T % 16 == 0 || key < T ? 0.0f : -1e30f, T % 16 == 0 || key + 8 < T ? 0.0f : -1e30f};

    const Others<T, D, WARPS, STAGES> others = {head, dout + at.plain(), at.stride(), heads * D, shared_address(shared)};
    others.walk([&](int part, u32 queries, u32 douts) {
        if (at.first >= T) return;
        const int tiles = part == P::COUNT - 1 ? P::LAST : P::PART;
#pragma unroll 1
        for (int tile = 0; tile < tiles; tile++) {
            float p[2][4], ds[2][4] = {};
#pragma unroll
            for (int j = 0; j < 2; j++)
#pragma unroll
                for (int i = 0; i < 4; i++) p[j][i] = start[i / 2];
            add_scores<D>(p[0], p[1], k, queries, 16 * tile);
            add_scores<D>(ds[0], ds[1], v, douts, 16 * tile);
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const int query = 16 * (part * P::PART + tile) + 8 * j;
                float log_sum[2], delta[2];
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    bool real = query + 2 * t + i < T;
                    log_sum[i] = real ? lse[at.statistics() + query + 2 * t + i] * LOG2E : __int_as_float(0x7f800000);
                    delta[i] = real ? deltas[at.statistics() + query + 2 * t + i] : 0.0f;
                }
                u32 stay =
                    DROP ? kept_transposed(stream, at.h * T + query, blockIdx.y * WARPS + at.warp, threshold) : 0;
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    float x = exp2_fast(fmaf(p[j][i], scale * LOG2E, -log_sum[i % 2]));
                    float dx = ds[j][i];
                    if constexpr (DROP) dx = stay >> i & 1 ? dx * keep_scale : 0.0f;
                    ds[j][i] = x * (dx - delta[i % 2]);
                    p[j][i] = DROP && !(stay >> i & 1) ? 0.0f : x;
                }
                add_matmul<D>(dv, p[j], douts, 16 * tile + 8 * j);
                add_matmul<D>(dk, ds[j], queries, 16 * tile + 8 * j);
            }
        }
    });
    if (at.first < T) {
        float* to = dqkv + at.packed() + heads * D;
        store_tile<T, D>(to, at.stride(), at.first, dk, scale, scale);
        store_tile<T, D>(to + heads * D, at.stride(), at.first, dv, keep_scale, keep_scale);
    }
    if constexpr (SUM) {
        ColumnSums<D> key_sums, value_sums;
        key_sums.clear();
        value_sums.clear();
        if (at.first < T) {
            key_sums.template add<T>(at.first, [&](int j, int i) { return dk[j][i]; });
            value_sums.template add<T>(at.first, [&](int j, int i) { return dv[j][i]; });
        }
        float* by = reinterpret_cast<float*>(shared);
        key_sums.store(by + at.warp * D, scale);
        value_sums.store(by + (WARPS + at.warp) * D, keep_scale);
        __syncthreads();
        for (int i = threadIdx.x; i < D; i += 32 * WARPS) {
            float* to = sums + at.sums() + heads * D + i;
            to[0] = sum_of_warps<D, WARPS>(by, i);
            to[heads * D] = sum_of_warps<D, WARPS>(by + WARPS * D, i);
        }
    }
}
