// Backward of scaled cosine attention in windows of several squares, more than 64 tokens, on the tensor cores: one kernel for queries, one
// for keys. Without atomics. See windows_grad.cu for what is computed.
//
// Legend: H heads, T tokens of a window, D head size, C = H·D.
#include "windows_tiles.cuh"

template <int ROWS, int COLUMNS, int D> struct Wide {
    using W = Windows<ROWS, COLUMNS>;
    static constexpr int T = W::T, SIDE = Squares<T>::SIDE, COUNT = Squares<T>::COUNT, N = SIDE / 16;
    // One piece, and all of them.
    static constexpr int BYTES = SIDE * Rows<D>::BYTES, ALL = COUNT * BYTES;
};

// The sums so far of a tile of queries and N tiles of keys: rows `first_query` on and columns `first_key` on of (T,T), those that are there.
// All are loaded before any is stored: one by one, each would wait for the memory.
template <int T, int N> struct BiasSums {
    float x[2 * N][4];

    template <typename F> static __device__ __forceinline__ void each(float* sums, int first_query, int first_key, F pair) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int j = 0; j < 2 * N; j++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int query = first_query + lane / 4 + 8 * i, key = first_key + 8 * j + lane % 4 * 2;
                if (query < T && key < T) pair(sums + query * T + key, j, 2 * i, key + 1 < T);
            }
    }
    __device__ __forceinline__ void load(float* sums, int first_query, int first_key) {
        each(sums, first_query, first_key, [&](const float* at, int j, int e, bool both) {
            if constexpr (T % 2 == 0) {
                const float2 v = *reinterpret_cast<const float2*>(at);
                x[j][e] = v.x, x[j][e + 1] = v.y;
            } else {
                x[j][e] = at[0];
                if (both) x[j][e + 1] = at[1];
            }
        });
    }
    __device__ __forceinline__ void store(float* sums, int first_query, int first_key) const {
        each(sums, first_query, first_key, [&](float* at, int j, int e, bool both) {
            if constexpr (T % 2 == 0) {
                *reinterpret_cast<float2*>(at) = make_float2(x[j][e], x[j][e + 1]);
            } else {
                at[0] = x[j][e];
                if (both) at[1] = x[j][e + 1];
            }
        });
    }
};

// dQ, the sums of dS and those over tokens, and for window_grad_keys each query's log-sum-exp (in powers of two) and rowsum(P ∘ dP).
// A block has one head and one piece of the queries of `per` windows. Its sums of dS grow in bias_parts (blocks, H, T, T), where each
// thread finds what it left itself; all others go to rows of token_parts (blocks·pieces, 2C+H). Grid: (H, windows / per, pieces).
template <typename E, int ROWS, int COLUMNS, int D>
__global__ void __launch_bounds__(Squares<ROWS* COLUMNS>::THREADS, D <= 32 ? 3 : 1)
    window_grad_queries(const E* __restrict__ qkv, const float* __restrict__ q_bias, const float* __restrict__ scales,
                        const float* __restrict__ position_bias, const float* __restrict__ lse, const E* __restrict__ dout,
                        E* __restrict__ dqkv, float* __restrict__ log_sums, float* __restrict__ deltas, float* bias_parts,
                        float* __restrict__ token_parts, int heads, int total, int per, int height, int width, int down,
                        int right) {
    using S = Wide<ROWS, COLUMNS, D>;
    constexpr int T = S::T, SIDE = S::SIDE, COUNT = S::COUNT, N = S::N, BYTES = S::BYTES;
    extern __shared__ uint4 shared[];
    const u32 q_rows = shared_address(shared), do_rows = q_rows + BYTES, k_rows = do_rows + BYTES, v_rows = k_rows + S::ALL;
    float* key_scales = reinterpret_cast<float*>(reinterpret_cast<u8*>(shared) + 2 * BYTES + 2 * S::ALL);

    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int h = blockIdx.x, channels = heads * D, stride = 3 * channels;
    const int piece = blockIdx.z * SIDE, own = 16 * (threadIdx.x / 32), first = piece + own;
    const E* head = qkv + h * D;
    const float* bias_of_head = position_bias + (i64)h * T * T;
    const float factor = cosine_factor(scales[h]);
    float* summed = bias_parts + ((i64)blockIdx.y * heads + h) * T * T;
    const int begin = blockIdx.y * per, last = min(begin + per, total);
    typename S::W here(height, width, down, right);
    TokenSums<E, D> sums;
    sums.clear();

    for (int window = begin; window < last; window++) {
        here.turn_to(window);
        __syncthreads();
        each_unit<D, SIDE>(here, piece, [&](u32 at, int place, int element) {
            copy_place(q_rows + at, head, place, stride, element);
            copy_place(do_rows + at, dout + h * D, place, channels, element);
        });
        for (int part = 0; part < COUNT; part++)
            each_unit<D, SIDE>(here, part * SIDE, [&](u32 at, int place, int element) {
                copy_place(k_rows + part * BYTES + at, head + channels, place, stride, element);
                copy_place(v_rows + part * BYTES + at, head + 2 * channels, place, stride, element);
            });
        close_copies();
        const i64 stats = ((i64)window * heads + h) * T;
        float log_sum[2];
        load_log_sums<T>(log_sum, lse + stats, first);
        wait_copies<0>();
        __syncthreads();
        for (int part = 0; part < COUNT; part++) {
            float of_key = row_scale<E, D, false>(k_rows + part * BYTES, threadIdx.x / 2, nullptr);
            if (threadIdx.x % 2 == 0) key_scales[part * SIDE + threadIdx.x / 2] = of_key;
        }
        QueryTile<E, D> queries;
        queries.load(q_rows, own, q_bias + h * D);
        u32 grads[D / 16][4];
        left_of<D>(grads, do_rows, own);
        const float scale[2] = {queries.scale[0] * factor * LOG2E, queries.scale[1] * factor * LOG2E};
        __syncthreads();

        // Probabilities, not yet divided by their sum, and dP of one part of the keys.
        auto attend = [&](int part, float(&p)[2 * N][4], float(&dp)[2 * N][4]) {
            load_bias<T, N>(dp, bias_of_head, first, part * SIDE);
            multiply_rows<E, D, N>(p, queries.q, k_rows + part * BYTES, 0);
            to_scores<N>(p, dp, scale, key_scales + part * SIDE, here, first, part * SIDE);
#pragma unroll
            for (int j = 0; j < 2 * N; j++)
#pragma unroll
                for (int e = 0; e < 4; e++) p[j][e] = exp2_fast(p[j][e] - log_sum[e / 2]);
            multiply_rows<E, D, N>(dp, grads, v_rows + part * BYTES, 0);
        };
        float p[2 * N][4], ds[2 * N][4], sum[2] = {}, delta[2] = {};
#pragma unroll 1
        for (int part = 0; part < COUNT; part++) {
            attend(part, p, ds);
#pragma unroll
            for (int j = 0; j < 2 * N; j++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    sum[e / 2] += p[j][e];
                    delta[e / 2] = fmaf(p[j][e], ds[j][e], delta[e / 2]);
                }
        }
        int places[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float all = quad_sum(sum[i]);
            const int token = first + g + 8 * i;
            sum[i] = inverse_sum(all);
            delta[i] = quad_sum(delta[i]) * sum[i];
            places[i] = here.place(token);
            if (t == 0 && token < T) {
                log_sums[stats + token] = log_sum[i] + log2f(all);
                deltas[stats + token] = delta[i];
            }
        }
        float dq[D / 8][4] = {};
#pragma unroll 1
        for (int part = 0; part < COUNT; part++) {
            BiasSums<T, N> so_far = {};
            if (window > begin) so_far.load(summed, first, part * SIDE);
            attend(part, p, ds);
#pragma unroll
            for (int j = 0; j < 2 * N; j++) {
                float2 k = *reinterpret_cast<const float2*>(key_scales + part * SIDE + 8 * j + 2 * t);
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    float d = p[j][e] * sum[e / 2] * (ds[j][e] - delta[e / 2]);
                    so_far.x[j][e] += d;
                    ds[j][e] = d * (e % 2 ? k.y : k.x);
                }
            }
            so_far.store(summed, first, part * SIDE);
#pragma unroll
            for (int j = 0; j < N; j++) {
                u32 a[4];
                as_left<E>(a, ds[2 * j], ds[2 * j + 1]);
                add_rows<E, D>(dq, a, k_rows + part * BYTES, 16 * j);
            }
        }
        float along = through_lengths<E, D>(dq, queries.q, queries.scale, factor);
        sums.add(dq, grads, along);
        store_places<D>(dqkv + h * D, stride, places, dq);
    }
    float* row = token_parts + ((i64)blockIdx.y * COUNT + blockIdx.z) * (2 * channels + heads);
    sums.template leave<N>(reinterpret_cast<float*>(shared), row, heads, h, cosine_slope(scales[h]));
}

// dK and dV. A block has one head and one piece of the keys of `per` windows. Grid: (H, windows / per, pieces).
template <typename E, int ROWS, int COLUMNS, int D>
__global__ void __launch_bounds__(Squares<ROWS* COLUMNS>::THREADS, D <= 32 ? 3 : 1)
    window_grad_keys(const E* __restrict__ qkv, const float* __restrict__ q_bias, const float* __restrict__ scales,
                     const float* __restrict__ position_bias, const float* __restrict__ log_sums,
                     const float* __restrict__ deltas, const E* __restrict__ dout, E* __restrict__ dqkv, int heads, int total,
                     int per, int height, int width, int down, int right) {
    using S = Wide<ROWS, COLUMNS, D>;
    constexpr int T = S::T, SIDE = S::SIDE, COUNT = S::COUNT, N = S::N, BYTES = S::BYTES, PADDED = COUNT * SIDE;
    extern __shared__ uint4 shared[];
    const u32 k_rows = shared_address(shared), v_rows = k_rows + BYTES, q_rows = v_rows + BYTES, do_rows = q_rows + S::ALL;
    float* query_scales = reinterpret_cast<float*>(reinterpret_cast<u8*>(shared) + 2 * BYTES + 2 * S::ALL);
    float *own_log_sums = query_scales + PADDED, *own_deltas = own_log_sums + PADDED;

    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int h = blockIdx.x, channels = heads * D, stride = 3 * channels;
    const int piece = blockIdx.z * SIDE, own = 16 * (threadIdx.x / 32), first = piece + own;
    const E* head = qkv + h * D;
    const float* bias_of_head = position_bias + (i64)h * T * T;
    const float factor = cosine_factor(scales[h]);
    const int last = min(((int)blockIdx.y + 1) * per, total);
    typename S::W here(height, width, down, right);

    for (int window = blockIdx.y * per; window < last; window++) {
        here.turn_to(window);
        __syncthreads();
        each_unit<D, SIDE>(here, piece, [&](u32 at, int place, int element) {
            copy_place(k_rows + at, head + channels, place, stride, element);
            copy_place(v_rows + at, head + 2 * channels, place, stride, element);
        });
        for (int part = 0; part < COUNT; part++)
            each_unit<D, SIDE>(here, part * SIDE, [&](u32 at, int place, int element) {
                copy_place(q_rows + part * BYTES + at, head, place, stride, element);
                copy_place(do_rows + part * BYTES + at, dout + h * D, place, channels, element);
            });
        close_copies();
        const i64 stats = ((i64)window * heads + h) * T;
        for (int i = threadIdx.x; i < PADDED; i += 2 * SIDE) {
            own_log_sums[i] = i < T ? log_sums[stats + i] : __int_as_float(0x7f800000);
            own_deltas[i] = i < T ? deltas[stats + i] : 0.0f;
        }
        wait_copies<0>();
        __syncthreads();
        for (int part = 0; part < COUNT; part++) {
            float of_query = row_scale<E, D, true>(q_rows + part * BYTES, threadIdx.x / 2, q_bias + h * D);
            if (threadIdx.x % 2 == 0) query_scales[part * SIDE + threadIdx.x / 2] = of_query;
        }
        u32 k[D / 16][4], v[D / 16][4];
        float scale[2], dk[D / 8][4] = {}, dv[D / 8][4] = {};
        left_of<D>(k, k_rows, own);
        left_of<D>(v, v_rows, own);
        tile_scales<E, D>(k, scale);
        const float key_scale[2] = {scale[0] * factor * LOG2E, scale[1] * factor * LOG2E};
        const int sides[2] = {here.side(first + g), here.side(first + g + 8)};
        __syncthreads();

#pragma unroll 1
        for (int tile = 0; tile < COUNT * N; tile++) {
            float p[2][4], ds[2][4];
            multiply_rows<E, D, 1>(p, k, q_rows, 16 * tile);
            multiply_rows<E, D, 1>(ds, v, do_rows, 16 * tile);
#pragma unroll
            for (int j = 0; j < 2; j++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const int query = 16 * tile + 8 * j + 2 * t + e % 2, key = first + g + 8 * (e / 2);
                    const float of_query = query_scales[query];
                    float bias = query < T && key < T ? bias_of_head[query * T + key] * LOG2E : 0.0f;
                    float s = fmaf(p[j][e] * of_query, key_scale[e / 2], bias);
                    if (here.parted && here.apart(sides[e / 2], here.side(query))) s += APART * LOG2E;
                    p[j][e] = exp2_fast(s - own_log_sums[query]);
                    ds[j][e] = p[j][e] * (ds[j][e] - own_deltas[query]) * of_query;
                }
            u32 a[4];
            as_left<E>(a, p[0], p[1]);
            add_rows<E, D>(dv, a, do_rows, 16 * tile);
            as_left<E>(a, ds[0], ds[1]);
            add_rows<E, D>(dk, a, q_rows, 16 * tile);
        }
        through_lengths<E, D>(dk, k, scale, factor);
        const int places[2] = {here.place(first + g), here.place(first + g + 8)};
        store_places<D>(dqkv + channels + h * D, stride, places, dk);
        store_places<D>(dqkv + 2 * channels + h * D, stride, places, dv);
    }
}
