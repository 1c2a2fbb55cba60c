// Softmax attention for Hopper: a head's tokens in shared memory, matmuls by warpgroups (wgmma). Without dropout, T ≤ 256,
// D 32 or 64, 16-bit elements. Without atomics. sm_90a only.
//
// Legend: B batch, H heads, T tokens, D head size, C = H·D. qkv is (B,T,3C): queries, keys and values of a token lie side by side, head h
// at h·D of each.
#include "attention_tiles.cuh"

// A tile of queries that loops over the keys, which come in PARTS parts.
template <typename E, int T, int D, int PARTS> struct Forward {
    static constexpr int ROWS = round_up(T, 16), COLUMNS = round_up(T, 8), TILES = ceil_div(T, 64);
    static constexpr int PART = PARTS == 1 ? COLUMNS : round_up(ceil_div(COLUMNS, PARTS), 16);
    static constexpr int LAST = COLUMNS - (PARTS - 1) * PART;
    static_assert(LAST > 0, "too many parts");
    static constexpr int MATRIX = ROWS * Rows<D>::BYTES;

    u32 q[D / 16][4];
    float top[2], sum[2];
    float o[D / 2];

    // Starts q·kᵀ for N keys from AT on.
    template <int N> __device__ __forceinline__ void score(float (&s)[N / 2], u32 keys, int at) {
#pragma unroll
        for (int k = 0; k < D / 16; k++)
            wgmma<E, N, false>(s, q[k], Rows<D>::side(keys + at * Rows<D>::BYTES + 32 * k), k > 0);
        wgmma_commit();
    }

    // Turns scores of N keys from AT on, which have arrived, into unnormalised probabilities.
    template <int N, int AT> __device__ __forceinline__ void soften(float (&s)[N / 2]) {
        const float scale = score_scale<D>() * LOG2E;
        const int t = threadIdx.x % 4;
        float shift[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float m = AT == 0 ? -1e30f : top[half];
#pragma unroll
            for (int j = 0; j < N / 8; j++)
#pragma unroll
                for (int i = 2 * half; i < 2 * half + 2; i++) {
                    if (AT + 8 * j + 8 > T && AT + 8 * j + 2 * t + i % 2 >= T) s[4 * j + i] = -1e30f;
                    m = fmaxf(m, s[4 * j + i]);
                }
            m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 1));
            m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 2));
            if constexpr (AT == 0) {
                sum[half] = 0.0f;
            } else {
                float shrink = exp2_fast((top[half] - m) * scale);
                sum[half] *= shrink;
#pragma unroll
                for (int j = 0; j < D / 8; j++) o[4 * j + 2 * half] *= shrink, o[4 * j + 2 * half + 1] *= shrink;
            }
            top[half] = m;
            shift[half] = -m * scale;
        }
#pragma unroll
        for (int i = 0; i < N / 2; i++) {
            s[i] = exp2_fast(fmaf(s[i], scale, shift[i / 2 % 2]));
            sum[i / 2 % 2] += s[i];
        }
    }
    // Starts to add up their values.
    template <int N, int AT> __device__ __forceinline__ void attend(const float (&s)[N / 2], u32 values) {
        u32 p[ceil_div(N, 16)][4];
        as_left<E, N>(p, s);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < ceil_div(N, 16); k++)
            wgmma<E, D, true>(o, p[k], Rows<D>::side(values + (AT + 16 * k) * Rows<D>::BYTES), AT > 0 || k > 0);
        wgmma_commit();
    }

    // Goes through all parts from AT on. `s` has the scores of the first of them, under way. Values are there once `ready`
    // was called. A warp whose queries aren't `there` only takes part in matmuls.
    template <int N, int AT, typename Ready>
    __device__ __forceinline__ void go(float (&s)[N / 2], bool there, u32 keys, u32 values, Ready ready) {
        wgmma_wait<0>();
        arrived(s);
        if constexpr (AT == 0) ready();
        else arrived(o);
        if (there) soften<N, AT>(s);
        attend<N, AT>(s, values);
        if constexpr (AT + N < COLUMNS) {
            constexpr int NEXT = AT + N + PART < COLUMNS ? PART : LAST;
            float next[NEXT / 2];
            score<NEXT>(next, keys, AT + N);
            go<NEXT, AT + N>(next, there, keys, values, ready);
        }
    }
};

// One block for a head; each warpgroup goes through tiles of queries. Grid: B·H.
template <typename E, int T, int D, int GROUPS, int PARTS, int RESIDENT>
__global__ void __launch_bounds__(128 * GROUPS, RESIDENT)
    attention_hopper(const E* __restrict__ qkv, E* __restrict__ out, float* __restrict__ lse, int heads) {
    using F = Forward<E, T, D, PARTS>;
    extern __shared__ __align__(1024) u8 shared[];
    const int lane = threadIdx.x % 32, channels = heads * D, stride = 3 * channels;
    const int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32 % 4, 0);
    const int b = blockIdx.x / heads, h = blockIdx.x % heads;
    const E* head = qkv + (i64)b * T * stride + h * D;
    E* to = out + (i64)b * T * channels + h * D;
    const u32 keys = shared_address(shared), values = keys + F::MATRIX, queries = values + F::MATRIX;
    const u32 results = queries + GROUPS * 64 * Rows<D>::BYTES;

    // A warp fetches its own queries, and nobody else reads them.
    const int place = 64 * group + 16 * warp;
    auto fetch_queries = [&](int tile) {
        constexpr int UNITS = D / 8, STEP = 32 / UNITS;
        if (tile < F::TILES) {
#pragma unroll
            for (int i = 0; i < 16 / STEP; i++) {
                int row = i * STEP + lane / UNITS, unit = lane % UNITS, token = 64 * tile + 16 * warp + row;
                copy_unit(queries + Rows<D>::at(place + row, unit), token < T ? head + token * stride + unit * 8 : head,
                          token < T);
            }
        }
        close_copies();
    };

    copy_rows<T, D, 0, F::ROWS, 128 * GROUPS>(keys, head + channels, stride);
    fetch_queries(group);
    copy_rows<T, D, 0, F::ROWS, 128 * GROUPS>(values, head + 2 * channels, stride);
    close_copies();
#pragma unroll 1
    for (int tile = group; tile < F::TILES; tile += GROUPS) {
        const bool first = tile == group;
        const int row = 64 * tile + 16 * warp;
        if (first) {
            wait_copies<1>();
            publish();
            __syncthreads();
        } else {
            wait_copies<0>();
            __syncwarp();
        }
        F f;
        load_left<D>(f.q, queries, place);
        __syncwarp();
        fetch_queries(tile + GROUPS);

        constexpr int FIRST = PARTS == 1 ? F::LAST : F::PART;
        float s[FIRST / 2];
        wgmma_fence();
        f.template score<FIRST>(s, keys, 0);
        f.template go<FIRST, 0>(s, row < T, keys, values, [&] {
            if (!first) return;
            wait_copies<1>();
            publish();
            __syncthreads();
        });
        float factor[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float total = f.sum[half];
            total += __shfl_xor_sync(0xffffffffu, total, 1);
            total += __shfl_xor_sync(0xffffffffu, total, 2);
            factor[half] = 1.0f / total;
            int query = row + lane / 4 + 8 * half;
            if (lane % 4 == 0 && query < T)
                lse[(i64)blockIdx.x * T + query] = f.top[half] * score_scale<D>() + logf(total);
        }
        wgmma_wait<0>();
        arrived(f.o);
        if (row < T) store_rows_by<T, D>(results + place * Rows<D>::BYTES, to, channels, row, f.o, factor[0], factor[1]);
    }
}
