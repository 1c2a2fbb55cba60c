// The gradient of softmax attention for Hopper, under the same conditions as the forward pass. Without atomics. sm_90a only.
//
// Legend: B batch, H heads, T tokens, D head size, C = H·D. qkv is (B,T,3C): queries, keys and values of a token lie side by side, head h
// at h·D of each.
#include "attention_tiles.cuh"

// A head goes in two phases:
//   1. A warpgroup owns a tile of keys. For each part of the queries it computes Pᵀ and dSᵀ, adds Pᵀ·dO to dV and dSᵀ·Q to dK,
//      and leaves dSᵀ in shared memory.
//   2. A warpgroup owns a tile of queries, and computes dQ = dS·K.
// Blocks go through heads in turn. What phase 2 doesn't need of the next head is fetched while it runs. With STAGES = 2, the
// next keys are fetched while phase 1 runs. LEFT says that the left sides of Pᵀ and dPᵀ (keys and values) are in registers, SUM
// that the head's sums over its tokens are wanted.
template <typename E, int T, int D, int GROUPS, int STAGES, bool LEFT, bool SUM> struct Backward {
    static constexpr int THREADS = 128 * GROUPS;
    static constexpr int ROWS = round_up(T, 16), COLUMNS = round_up(T, 8);
    static constexpr int TILES = ceil_div(T, 64);
    // The last 8 queries join the part before them: then dSᵀ has them in rows of their own, TAIL, which are 16 bytes.
    static constexpr bool TAIL = COLUMNS % 64 == 8 && COLUMNS > 64;
    static constexpr int PARTS = TAIL ? COLUMNS / 64 : TILES;
    static constexpr int LAST = COLUMNS - (PARTS - 1) * 64;

    static constexpr int MATRIX = ROWS * Rows<D>::BYTES, SCORES = ROWS * 128;
    // dSᵀ, and when it is through the sums of the warps, and those of the last queries.
    static constexpr int WARPS = 4 * GROUPS, SUMS = (3 * WARPS + 1) * D * 4;
    static constexpr int SHARED_SCORES = PARTS * SCORES > SUMS ? PARTS * SCORES : SUMS;
    static constexpr int SMALL = (TAIL ? ROWS * 16 : 0) + 2 * ROWS * 4;
    // Values are there if there is room. Else they go straight to registers.
    static constexpr bool VALUES = (STAGES + 3) * MATRIX + SHARED_SCORES + SMALL <= 232448;
    static constexpr int SHARED = (STAGES + 2 + VALUES) * MATRIX + SHARED_SCORES + SMALL;
    static_assert(VALUES || LEFT, "no room for values");
    static_assert(GROUPS <= TILES, "a warpgroup without a tile");

    // Results leave by way of rows that nobody needs any more: dK and dV by this warp's values, dQ by its dSᵀ.
    static constexpr bool BY_VALUES = VALUES && LEFT, BY_SCORES = ROWS >= 64;

    // Rows of O that all threads hold a unit of, and how often.
    static constexpr int STEP = THREADS / Rows<D>::UNITS, OUTS = ceil_div(ROWS, STEP);
    static constexpr int LOG_SUMS = ceil_div(ROWS, THREADS);

    // Arguments.
    const E* qkv;
    const E* out;
    const float* lse;
    const E* dout;
    E* dqkv;
    float* sums;
    int total, heads;

    // Where things lie in shared memory. Matmuls read rows of the last tile that aren't there, from what follows.
    u32 keys, values, queries, douts, scores, tail;
    float *log_sums, *deltas, *shared_sums;

    // This warp's share of the head's sums.
    ColumnSums<D> query_sums, key_sums, value_sums;
    float tail_sums[2];

    // Of the head that comes next.
    uint4 o[OUTS];
    float log_sum[LOG_SUMS];

    __device__ __forceinline__ int group() const { return __shfl_sync(0xffffffffu, threadIdx.x / 128, 0); }
    __device__ __forceinline__ int warp() const { return __shfl_sync(0xffffffffu, threadIdx.x / 32 % 4, 0); }
    __device__ __forceinline__ int stride() const { return 3 * heads * D; }
    __device__ __forceinline__ i64 packed(int head) const {
        return (i64)(head / heads) * T * stride() + head % heads * D;
    }
    __device__ __forceinline__ i64 plain(int head) const { return (i64)(head / heads) * T * heads * D + head % heads * D; }

    __device__ __forceinline__ void fetch_keys(int head, int stage) {
        if (head < total)
            copy_rows<T, D, 0, ROWS, THREADS>(keys + stage * MATRIX, qkv + packed(head) + heads * D, stride());
        close_copies();
    }
    // Queries, dO and values.
    __device__ __forceinline__ void fetch_others(int head) {
        if (head < total) {
            copy_rows<T, D, 0, ROWS, THREADS>(douts, dout + plain(head), heads * D);
            copy_rows<T, D, 0, ROWS, THREADS>(queries, qkv + packed(head), stride());
            if constexpr (VALUES) copy_rows<T, D, 0, ROWS, THREADS>(values, qkv + packed(head) + 2 * heads * D, stride());
        }
        close_copies();
    }
    // Loads to registers.
    __device__ __forceinline__ void fetch_rows(int head) {
        if (head >= total) return;
        const int first = threadIdx.x / Rows<D>::UNITS, unit = threadIdx.x % Rows<D>::UNITS;
        const E* from = out + plain(head) + first * heads * D + unit * 8;
#pragma unroll
        for (int i = 0; i < OUTS; i++, from += STEP * heads * D)
            o[i] = i * STEP + first < T ? *reinterpret_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int i = 0; i < LOG_SUMS; i++) {
            int row = i * THREADS + threadIdx.x;
            // A query that isn't there has probabilities 0.
            log_sum[i] = row < T ? lse[(i64)head * T + row] : __int_as_float(0x7f800000);
        }
    }

    // rowsum(dO ∘ O), by as many threads a row as it has units.
    __device__ __forceinline__ void sum_rows() {
        const int first = threadIdx.x / Rows<D>::UNITS, unit = threadIdx.x % Rows<D>::UNITS;
#pragma unroll
        for (int i = 0; i < OUTS; i++) {
            const int row = i * STEP + first;
            if ((i + 1) * STEP > ROWS && row >= ROWS) break;
            uint4 x = o[i], y;
            asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                         : "=r"(y.x), "=r"(y.y), "=r"(y.z), "=r"(y.w)
                         : "r"(douts + Rows<D>::at(first, unit) + i * STEP * Rows<D>::BYTES)
                         : "memory");
            float sum = 0.0f;
            add_dot(sum, x.x, y.x);
            add_dot(sum, x.y, y.y);
            add_dot(sum, x.z, y.z);
            add_dot(sum, x.w, y.w);
#pragma unroll
            for (int lane = 1; lane < Rows<D>::UNITS; lane *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lane);
            if (unit == 0) deltas[row] = sum;
        }
#pragma unroll
        for (int i = 0; i < LOG_SUMS; i++) {
            int row = i * THREADS + threadIdx.x;
            if (row < ROWS) log_sums[row] = log_sum[i] * -LOG2E;
        }
    }
    static __device__ __forceinline__ void add_dot(float& sum, u32 x, u32 y) {
        float x0, x1, y0, y1;
        unpack2<E>(x, x0, x1);
        unpack2<E>(y, y0, y1);
        sum = fmaf(x0, y0, fmaf(x1, y1, sum));
    }

    // A tile of keys that loops over the queries.
    struct Tile {
        u32 k[D / 16][4], v[D / 16][4];
        float dk[D / 2], dv[D / 2];
    };

    // Part PART of the queries.
    template <int PART> __device__ __forceinline__ void pass(Tile& x, int tile, int head, u32 own_keys) {
        constexpr int N = PART < PARTS - 1 ? 64 : LAST;
        constexpr int STEPS = ceil_div(N, 16);
        const int lane = threadIdx.x % 32, t = lane % 4, query = 64 * PART, row = 64 * tile + 16 * warp();
        const bool there = row < T;
        const float scale = score_scale<D>() * LOG2E;
        const u32 some_queries = queries + query * Rows<D>::BYTES, some_douts = douts + query * Rows<D>::BYTES;

        float p[N / 2], ds[N / 2];
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < D / 16; k++) {
            u64 right = Rows<D>::side(some_queries + 32 * k);
            if constexpr (LEFT) wgmma<E, N, false>(p, x.k[k], right, k > 0);
            else wgmma<E, N, false, false>(p, Rows<D>::side(own_keys + 64 * tile * Rows<D>::BYTES + 32 * k), right, k > 0);
        }
        wgmma_commit();
#pragma unroll
        for (int k = 0; k < D / 16; k++) {
            u64 right = Rows<D>::side(some_douts + 32 * k);
            if constexpr (LEFT) wgmma<E, N, false>(ds, x.v[k], right, k > 0);
            else wgmma<E, N, false, false>(ds, Rows<D>::side(values + 64 * tile * Rows<D>::BYTES + 32 * k), right, k > 0);
        }
        wgmma_commit();

        // Meanwhile, sums over rows.
        if (PART == 0 && tile < GROUPS) {
            sum_rows();
            __syncthreads();
        }

        // All but dPᵀ has arrived, also what the part before left under way.
        wgmma_wait<1>();
        arrived(p);
        u32 left[STEPS][4], dleft[STEPS][4];
        if (there) {
#pragma unroll
            for (int j = 0; j < N / 8; j++) {
                float2 sum = *reinterpret_cast<const float2*>(log_sums + query + 8 * j + 2 * t);
#pragma unroll
                for (int i = 0; i < 4; i++) p[4 * j + i] = exp2_fast(fmaf(p[4 * j + i], scale, i % 2 ? sum.y : sum.x));
            }
        }
        as_left<E, N>(left, p);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < STEPS; k++)
            wgmma<E, D, true>(x.dv, left[k], Rows<D>::side(some_douts + 16 * k * Rows<D>::BYTES), PART > 0 || k > 0);
        wgmma_commit();

        wgmma_wait<1>();
        arrived(ds);
        if (there) {
#pragma unroll
            for (int j = 0; j < N / 8; j++) {
                float2 delta = *reinterpret_cast<const float2*>(deltas + query + 8 * j + 2 * t);
#pragma unroll
                for (int i = 0; i < 4; i++) ds[4 * j + i] = p[4 * j + i] * (ds[4 * j + i] - (i % 2 ? delta.y : delta.x));
            }
        }
        as_left<E, N>(dleft, ds);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < STEPS; k++)
            wgmma<E, D, true>(x.dk, dleft[k], Rows<D>::side(some_queries + 16 * k * Rows<D>::BYTES), PART > 0 || k > 0);
        wgmma_commit();

        if (there) {
            const int own = row + lane % 16;
            const u32 block = scores + PART * SCORES;
#pragma unroll
            for (int k = 0; k < STEPS; k++) {
                if (k == 4) store_two_matrices(tail + own * 16, dleft[k][0], dleft[k][1]);
                else if (16 * k + 8 == N) store_two_matrices(block + Rows<64>::at(own, 2 * k), dleft[k][0], dleft[k][1]);
                else store_matrices(block + Rows<64>::at(own, 2 * k + lane / 16), dleft[k]);
            }
        }
    }

    // Parts from PART on.
    template <int PART> __device__ __forceinline__ void passes(Tile& x, int tile, int head, u32 own_keys) {
        pass<PART>(x, tile, head, own_keys);
        if constexpr (PART + 1 < PARTS) passes<PART + 1>(x, tile, head, own_keys);
    }

    __device__ __forceinline__ void keys_phase(int head, u32 own_keys) {
        const int lane = threadIdx.x % 32;
        const float scale = score_scale<D>();
        E* to = dqkv + packed(head) + heads * D;
#pragma unroll 1
        for (int tile = group(); tile < TILES; tile += GROUPS) {
            const int row = 64 * tile + 16 * warp();
            Tile x;
            if constexpr (LEFT) {
                load_left<D>(x.k, own_keys, row);
                if constexpr (VALUES) load_left<D>(x.v, values, row);
                else load_left<T, D>(x.v, qkv + packed(head) + 2 * heads * D, stride(), row);
            }
            passes<0>(x, tile, head, own_keys);
            // Keys that aren't there must not reach dQ.
            if constexpr (T < ROWS) {
                if (row < T && row + 16 > T) {
                    __syncwarp();
                    for (int i = lane; i < (ROWS - T) * (8 * PARTS + TAIL); i += 32) {
                        int unit = i / (ROWS - T), none = T + i % (ROWS - T);
                        u32 at = unit == 8 * PARTS ? tail + none * 16
                                                   : scores + unit / 8 * SCORES + Rows<64>::at(none, unit % 8);
                        asm volatile("st.shared.v4.u32 [%0], {%1,%1,%1,%1};" ::"r"(at), "r"(0) : "memory");
                    }
                }
            }
            wgmma_wait<0>();
            arrived(x.dk);
            arrived(x.dv);
            if (row >= T) continue;
            if constexpr (SUM) {
                key_sums.template add<T>(row, [&](int j, int i) { return x.dk[4 * j + i]; });
                value_sums.template add<T>(row, [&](int j, int i) { return x.dv[4 * j + i]; });
            }
            if constexpr (BY_VALUES) {
                const u32 by = values + row * Rows<D>::BYTES;
                store_rows_by<T, D>(by, to, stride(), row, x.dk, scale, scale);
                store_rows_by<T, D>(by, to + heads * D, stride(), row, x.dv, 1.0f, 1.0f);
            } else {
                store_rows<T, D>(to, stride(), row, x.dk, scale, scale);
                store_rows<T, D>(to + heads * D, stride(), row, x.dv, 1.0f, 1.0f);
            }
        }
    }

    __device__ __forceinline__ void queries_phase(int head, u32 own_keys) {
        const int lane = threadIdx.x % 32;
        const float scale = score_scale<D>();
        E* to = dqkv + packed(head);
#pragma unroll 1
        for (int part = group(); part < PARTS; part += GROUPS) {
            float dq[D / 2];
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < ROWS / 16; k++)
                wgmma<E, D, true, true>(dq, Rows<64>::side(scores + part * SCORES + 16 * k * 128),
                                          Rows<D>::side(own_keys + 16 * k * Rows<D>::BYTES), k > 0);
            wgmma_commit();
            wgmma_wait<0>();
            arrived(dq);
            const int row = 64 * part + 16 * warp();
            if constexpr (SUM) {
                if (row < T) query_sums.template add<T>(row, [&](int j, int i) { return dq[4 * j + i]; });
            }
            if constexpr (BY_SCORES) {
                // All four warps are through with this part of dSᵀ.
                asm volatile("bar.sync %0, 128;" ::"r"(1 + group()) : "memory");
                const u32 by = scores + part * SCORES + 16 * warp() * 128;
                if (row < T) store_rows_by<T, D>(by, to, stride(), row, dq, scale, scale);
            } else {
                if (row < T) store_rows<T, D>(to, stride(), row, dq, scale, scale);
            }
        }
        // dQᵀ = Kᵀ·dSᵀ of the last queries, by 16 channels a warp.
        if (TAIL && group() == PARTS % GROUPS && 16 * warp() < D) {
            float dq[4] = {};
#pragma unroll 4
            for (int k = 0; k < ROWS / 16; k++) {
                u32 a[4], b[2];
                load_transposed(a, own_keys + Rows<D>::at(16 * k + lane / 16 * 8 + lane % 8, 2 * warp() + lane / 8 % 2));
                load_two_transposed(b, tail + (16 * k + lane % 16) * 16);
                mma<E>(dq, a, b);
            }
            int channel = 16 * warp() + lane / 4;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int query = 64 * PARTS + lane % 4 * 2 + i % 2;
                if (query < T) to[(i64)query * stride() + channel + i / 2 * 8] = from_float<E>(dq[i] * scale);
                if (SUM && query < T) tail_sums[i / 2] += dq[i];
            }
            if constexpr (SUM) {
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    tail_sums[i] += __shfl_xor_sync(0xffffffffu, tail_sums[i], 1);
                    tail_sums[i] += __shfl_xor_sync(0xffffffffu, tail_sums[i], 2);
                }
            }
        }
    }

    __device__ __forceinline__ void clear_sums() {
        query_sums.clear();
        key_sums.clear();
        value_sums.clear();
        tail_sums[0] = tail_sums[1] = 0.0f;
    }

    // Sums over all tokens of a head, once dSᵀ is free.
    __device__ __forceinline__ void store_sums(int head) {
        const int lane = threadIdx.x % 32;
        const float scale = score_scale<D>();
        float* own = shared_sums + (4 * group() + warp()) * 3 * D;
        float* tail_row = shared_sums + WARPS * 3 * D;
        __syncthreads();
        query_sums.store(own, scale);
        key_sums.store(own + D, scale);
        value_sums.store(own + 2 * D, 1.0f);
        // `warp` and `group` ask all lanes, so not where some are elsewhere.
        const int channel = 16 * warp() + lane / 4;
        if (TAIL && group() == PARTS % GROUPS && 16 * warp() < D) {
            if (lane % 4 == 0) {
                tail_row[channel] = tail_sums[0] * scale;
                tail_row[channel + 8] = tail_sums[1] * scale;
            }
        }
        __syncthreads();
        float* row = sums + (i64)(head / heads) * stride();
        if constexpr (TAIL) {
            for (int i = threadIdx.x; i < D; i += THREADS) shared_sums[i] += tail_row[i];
            __syncthreads();
        }
        add_column_sums<D, WARPS, THREADS>(shared_sums, row, heads, head % heads);
    }

    __device__ __forceinline__ void run() {
        int stage = 0;
        fetch_others(blockIdx.x);
        fetch_keys(blockIdx.x, 0);
        fetch_rows(blockIdx.x);
#pragma unroll 1
        for (int head = blockIdx.x; head < total; head += gridDim.x) {
            const int next = head + gridDim.x;
            const u32 own_keys = keys + stage * MATRIX;
            wait_copies<0>();
            publish();
            __syncthreads();
            if constexpr (STAGES == 2) fetch_keys(next, stage ^ 1);
            if constexpr (SUM) clear_sums();
            keys_phase(head, own_keys);
            publish();
            __syncthreads();
            fetch_others(next);
            fetch_rows(next);
            queries_phase(head, own_keys);
            if constexpr (SUM) store_sums(head);
            if constexpr (STAGES == 2) {
                stage ^= 1;
            } else {
                __syncthreads();
                fetch_keys(next, 0);
            }
        }
    }
};

// Grid: as many blocks as run at once. With SUM, a row of `sums` (B,3C) has the sums over a sample's tokens.
template <typename E, int T, int D, int GROUPS, int STAGES, bool LEFT, int RESIDENT, bool SUM>
__global__ void __launch_bounds__(128 * GROUPS, RESIDENT)
    attention_grad_hopper(const E* __restrict__ qkv, const E* __restrict__ out, const float* __restrict__ lse,
                          const E* __restrict__ dout, E* __restrict__ dqkv, float* __restrict__ sums, int total,
                          int heads) {
    using B = Backward<E, T, D, GROUPS, STAGES, LEFT, SUM>;
    extern __shared__ __align__(1024) u8 shared[];
    B b;
    b.qkv = qkv, b.out = out, b.lse = lse, b.dout = dout, b.dqkv = dqkv, b.sums = sums;
    b.total = total, b.heads = heads;
    b.keys = shared_address(shared);
    b.values = b.keys + STAGES * B::MATRIX;
    b.queries = b.values + B::VALUES * B::MATRIX;
    b.douts = b.queries + B::MATRIX;
    b.scores = b.douts + B::MATRIX;
    b.tail = b.scores + B::SHARED_SCORES;
    b.shared_sums = reinterpret_cast<float*>(shared + (b.scores - b.keys));
    b.log_sums = reinterpret_cast<float*>(shared + B::SHARED) - 2 * B::ROWS;
    b.deltas = b.log_sums + B::ROWS;
    b.run();
}
