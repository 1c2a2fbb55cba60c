// Backward of scaled cosine attention in windows of one square, up to 64 tokens, on the tensor cores. Without atomics.
//
// Legend: H heads, T tokens of a window, D head size, C = H·D. With P the probabilities: dV = Pᵀ·dO, dS = P ∘ (dP - rowsum(P ∘ dP)) with
// dP = dO·Vᵀ, then the gradients of unit queries and keys, dS·K̂ and dSᵀ·Q̂, through their lengths. The bias of values adds the same to
// all of a row of dP, and so nothing to dS. A padded query has dO = 0, and no part in any of it.
#include "windows_tiles.cuh"

// A block has one head, and goes through `per` windows in two phases each:
//   1. A warp owns a tile of queries. It computes P and dS, leaves both in shared memory, and finishes dQ.
//   2. A warp owns a tile of keys, and computes dV and dK.
// The next window is fetched meanwhile. Sums of dS over the windows stay in registers.
template <typename E, int ROWS, int COLUMNS, int D, int STAGES> struct WindowBackward {
    using W = Windows<ROWS, COLUMNS>;
    static constexpr int T = W::T, SIDE = Squares<T>::SIDE, N = SIDE / 16, THREADS = 2 * SIDE;
    static constexpr int BYTES = SIDE * Rows<D>::BYTES;
    // An odd number of units, so that neither writes nor reads meet in a bank.
    static constexpr int SCORES_STRIDE = (SIDE / 8 | 1) * 16, SCORES = SIDE * SCORES_STRIDE;
    // Stages of queries, keys, values and dO; P and dS; the position bias, as threads read it; lengths of keys.
    static constexpr int SHARED = STAGES * 4 * BYTES + 2 * SCORES + SIDE * SIDE * 4 + SIDE * 4;
};

// Grid: (H, windows of the batch / per). Sums of dS go to bias_parts (blocks, H, T, T), all others to rows of token_parts
// (blocks, 2C+H).
template <typename E, int ROWS, int COLUMNS, int D, int STAGES, int RESIDENT>
__global__ void __launch_bounds__(Squares<ROWS* COLUMNS>::THREADS, RESIDENT)
    window_attention_grad(const E* __restrict__ qkv, const float* __restrict__ q_bias, const float* __restrict__ scales,
                          const float* __restrict__ position_bias, const float* __restrict__ lse, const E* __restrict__ dout,
                          E* __restrict__ dqkv, float* __restrict__ bias_parts, float* __restrict__ token_parts, int heads,
                          int total, int per, int height, int width, int down, int right) {
    using B = WindowBackward<E, ROWS, COLUMNS, D, STAGES>;
    using W = typename B::W;
    constexpr int T = B::T, SIDE = B::SIDE, N = B::N, BYTES = B::BYTES, STRIDE = B::SCORES_STRIDE;
    static_assert(Squares<T>::COUNT == 1, "one square");
    extern __shared__ uint4 shared[];
    const u32 stages = shared_address(shared);
    const u32 p_rows = stages + STAGES * 4 * BYTES, ds_rows = p_rows + B::SCORES;
    u8* behind = reinterpret_cast<u8*>(shared) + STAGES * 4 * BYTES + 2 * B::SCORES;
    float4* kept_bias = reinterpret_cast<float4*>(behind);
    float* key_scales = reinterpret_cast<float*>(behind) + SIDE * SIDE;

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int h = blockIdx.x, channels = heads * D, stride = 3 * channels, first = 16 * warp;
    const E* head = qkv + h * D;
    const float factor = cosine_factor(scales[h]);
    const int last = min(((int)blockIdx.y + 1) * per, total);
    W here(height, width, down, right), ahead = here;

    auto fetch = [&](int window, int stage) {
        const u32 to = stages + stage * 4 * BYTES;
        ahead.turn_to(window);
        each_unit<D, SIDE>(ahead, 0, [&](u32 at, int place, int element) {
            copy_place(to + at, head, place, stride, element);
            copy_place(to + BYTES + at, head + channels, place, stride, element);
            copy_place(to + 2 * BYTES + at, head + 2 * channels, place, stride, element);
            copy_place(to + 3 * BYTES + at, dout + h * D, place, channels, element);
        });
    };
    // Of rows g and g+8, in powers of two.
    float log_sums[2];
    auto fetch_log_sums = [&](int window) { load_log_sums<T>(log_sums, lse + ((i64)window * heads + h) * T, first); };

    int window = blockIdx.y * per, stage = 0;
    if (window < last) fetch(window, 0), fetch_log_sums(window);
    close_copies();
    float dbias[2 * N][4];
    load_bias<T, N>(dbias, position_bias + (i64)h * T * T, first, 0);
#pragma unroll
    for (int j = 0; j < 2 * N; j++) {
        kept_bias[(warp * 2 * N + j) * 32 + lane] = make_float4(dbias[j][0], dbias[j][1], dbias[j][2], dbias[j][3]);
        dbias[j][0] = dbias[j][1] = dbias[j][2] = dbias[j][3] = 0.0f;
    }
    TokenSums<E, D> sums;
    sums.clear();

    for (; window < last; window++) {
        const u32 q_rows = stages + stage * 4 * BYTES, k_rows = q_rows + BYTES, v_rows = k_rows + BYTES, do_rows = v_rows + BYTES;
        wait_copies<0>();
        __syncthreads();
        if (STAGES == 2 && window + 1 < last) fetch(window + 1, stage ^ 1);
        close_copies();
        here.turn_to(window);
        float of_key = row_scale<E, D, false>(k_rows, threadIdx.x / 2, nullptr);
        if (threadIdx.x % 2 == 0) key_scales[threadIdx.x / 2] = of_key;
        QueryTile<E, D> queries;
        queries.load(q_rows, first, q_bias + h * D);
        queries.keep(q_rows, first);
        int places[2] = {here.place(first + g), here.place(first + g + 8)};
        __syncthreads();

        // Phase 1.
        float p[2 * N][4], ds[2 * N][4];
        multiply_rows<E, D, N>(p, queries.q, k_rows, 0);
        {
            float bias[2 * N][4];
#pragma unroll
            for (int j = 0; j < 2 * N; j++) {
                float4 b = kept_bias[(warp * 2 * N + j) * 32 + lane];
                bias[j][0] = b.x - log_sums[0], bias[j][1] = b.y - log_sums[0];
                bias[j][2] = b.z - log_sums[1], bias[j][3] = b.w - log_sums[1];
            }
            const float scale[2] = {queries.scale[0] * factor * LOG2E, queries.scale[1] * factor * LOG2E};
            to_scores<N>(p, bias, scale, key_scales, here, first, 0);
        }
        if (window + 1 < last) fetch_log_sums(window + 1);
        u32 grads[D / 16][4];
        left_of<D>(grads, do_rows, first);
        multiply_rows<E, D, N>(ds, grads, v_rows, 0);
        // The sum of p is 1 but for the rounding of the log-sum-exp.
        float sum[2] = {}, delta[2] = {};
#pragma unroll
        for (int j = 0; j < 2 * N; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                p[j][e] = exp2_fast(p[j][e]);
                sum[e / 2] += p[j][e];
                delta[e / 2] = fmaf(p[j][e], ds[j][e], delta[e / 2]);
            }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            sum[i] = inverse_sum(quad_sum(sum[i]));
            delta[i] = quad_sum(delta[i]) * sum[i];
        }
        float dq[D / 8][4] = {};
        const u32 row = (first + g) * STRIDE + 4 * t;
#pragma unroll
        for (int j = 0; j < N; j++) {
            float of_query[2][4], of_keys[2][4];
#pragma unroll
            for (int side = 0; side < 2; side++) {
                float2 k = *reinterpret_cast<const float2*>(key_scales + 16 * j + 8 * side + 2 * t);
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    float& x = p[2 * j + side][e];
                    x *= sum[e / 2];
                    float d = x * (ds[2 * j + side][e] - delta[e / 2]);
                    dbias[2 * j + side][e] += d;
                    of_query[side][e] = d * queries.scale[e / 2];
                    of_keys[side][e] = d * (e % 2 ? k.y : k.x);
                }
            }
            u32 a[4], da[4];
            as_left<E>(a, p[2 * j], p[2 * j + 1]);
            as_left<E>(da, of_query[0], of_query[1]);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                u32 at = row + 32 * j + i / 2 * 16 + i % 2 * 8 * STRIDE;
                asm volatile("st.shared.u32 [%0], %1;" ::"r"(p_rows + at), "r"(a[i]) : "memory");
                asm volatile("st.shared.u32 [%0], %1;" ::"r"(ds_rows + at), "r"(da[i]) : "memory");
            }
            as_left<E>(a, of_keys[0], of_keys[1]);
            add_rows<E, D>(dq, a, k_rows, 16 * j);
        }
        float along = through_lengths<E, D>(dq, queries.q, queries.scale, factor);
        sums.add(dq, grads, along);
        store_places<D>(dqkv + h * D, stride, places, dq);
        __syncthreads();

        // Phase 2.
        float dk[D / 8][4] = {}, dv[D / 8][4] = {};
        const u32 from = (lane / 16 * 8 + lane % 8) * STRIDE + (2 * warp + lane / 8 % 2) * 16;
#pragma unroll
        for (int j = 0; j < N; j++) {
            u32 a[4];
            load_transposed(a, p_rows + from + 16 * j * STRIDE);
            add_rows<E, D>(dv, a, do_rows, 16 * j);
            load_transposed(a, ds_rows + from + 16 * j * STRIDE);
            add_rows<E, D>(dk, a, q_rows, 16 * j);
        }
        u32 keys[D / 16][4];
        left_of<D>(keys, k_rows, first);
        const float scale[2] = {key_scales[first + g], key_scales[first + g + 8]};
        through_lengths<E, D>(dk, keys, scale, factor);
        store_places<D>(dqkv + channels + h * D, stride, places, dk);
        store_places<D>(dqkv + 2 * channels + h * D, stride, places, dv);
        if (STAGES == 1) {
            __syncthreads();
            if (window + 1 < last) fetch(window + 1, 0);
            close_copies();
        } else {
            stage ^= 1;
        }
    }

    float* to = bias_parts + ((i64)blockIdx.y * heads + h) * T * T;
#pragma unroll
    for (int j = 0; j < 2 * N; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            int query = first + g + 8 * (e / 2), key = 8 * j + 2 * t + e % 2;
            if (query < T && key < T) to[query * T + key] = dbias[j][e];
        }
    float* row = token_parts + (i64)blockIdx.y * (2 * channels + heads);
    sums.template leave<N>(reinterpret_cast<float*>(shared), row, heads, h, cosine_slope(scales[h]));
}
