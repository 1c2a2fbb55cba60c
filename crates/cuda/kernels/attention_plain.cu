// Softmax attention without tensor cores, forward and backward: f32 arithmetic, any head size, any element type. Without atomics.
//
// Legend: B batch, H heads, T tokens, D head size, C = H·D. A piece is TILE tokens.
// qkv is (B,T,3C): queries, keys and values of a token lie side by side, head h at h·D of each.
#include "plain.cuh"

// Dropout factor of a probability.
template <bool DROP>
__device__ __forceinline__ float drop_factor(const Stream& stream, u32 token, int key, u32 threshold, float keep_scale) {
    if constexpr (!DROP) return 1.0f;
    return kept(stream, token, key / 4, threshold) >> (key % 4) & 1 ? keep_scale : 0.0f;
}

// Grid: (B·H, pieces of queries).
template <typename E, int T, int D, int TILE, bool DROP>
__global__ void __launch_bounds__(TILE* TILE / 16)
    plain_attention(const E* __restrict__ qkv, E* __restrict__ out, float* __restrict__ lse, int heads,
                    const Header* __restrict__ header, u32 site, u32 threshold, float keep_scale) {
    using P = Plain<D, TILE>;
    extern __shared__ float4 shared4[];
    float* queries = reinterpret_cast<float*>(shared4);
    float *keys = queries + P::PIECE, *values = keys + P::PIECE, *kept_scores = values + P::PIECE;
    const int b = blockIdx.x / heads, h = blockIdx.x % heads, channels = heads * D, stride = 3 * channels;
    const int first = blockIdx.y * TILE;
    const E* head = qkv + (i64)b * T * stride + h * D;
    const Stream stream = draws<DROP>(header, site, b);
    const float scale = 1.0f / sqrtf((float)D);

    float o[4][P::COLUMNS] = {}, top[4], sum[4] = {};
#pragma unroll
    for (int i = 0; i < 4; i++) top[i] = __int_as_float(0xff800000);
    P::template load<T>(queries, head, stride, first);
    for (int key = 0; key < T; key += TILE) {
        __syncthreads();
        P::template load<T>(keys, head + channels, stride, key);
        P::template load<T>(values, head + 2 * channels, stride, key);
        __syncthreads();
        float s[4][4];
        P::scores(s, queries, keys);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float m = top[i];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                s[i][j] = key + P::x() + P::SIDE * j < T ? s[i][j] * scale : -1e30f;
                m = fmaxf(m, s[i][j]);
            }
            m = P::row_max(m);
            float shrink = exp2f((top[i] - m) * LOG2E);
            top[i] = m;
            sum[i] *= shrink;
#pragma unroll
            for (int c = 0; c < P::COLUMNS; c++) o[i][c] *= shrink;
            u32 token = h * T + first + 4 * P::y() + i;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                float p = exp2f((s[i][j] - m) * LOG2E);
                sum[i] += p;
                s[i][j] = p * drop_factor<DROP>(stream, token, key + P::x() + P::SIDE * j, threshold, keep_scale);
            }
        }
        P::keep(kept_scores, s);
        P::add_matmul(o, kept_scores, values);
    }
    float factor[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float total = P::row_sum(sum[i]);
        factor[i] = 1.0f / total;
        int row = first + 4 * P::y() + i;
        if (P::x() == 0 && row < T) lse[(i64)blockIdx.x * T + row] = top[i] + logf(total);
    }
    P::template store<T>(out + (i64)b * T * channels + h * D, channels, first, o, factor);
}

// dQ, and rowsum(dO ∘ O) for plain_attention_grad_keys. With SUM, a row of `sums` (B·pieces,3C) has the sums over a piece of a
// sample's tokens. Grid: (B·H, pieces of queries).
template <typename E, int T, int D, int TILE, bool DROP, bool SUM>
__global__ void __launch_bounds__(TILE* TILE / 16)
    plain_attention_grad_queries(const E* __restrict__ qkv, const E* __restrict__ out, const float* __restrict__ lse,
                                 const E* __restrict__ dout, E* __restrict__ dqkv, float* __restrict__ deltas,
                                 float* __restrict__ sums, int heads, const Header* __restrict__ header, u32 site,
                                 u32 threshold, float keep_scale) {
    using P = Plain<D, TILE>;
    extern __shared__ float4 shared4[];
    float* queries = reinterpret_cast<float*>(shared4);
    float *douts = queries + P::PIECE, *keys = douts + P::PIECE, *values = keys + P::PIECE, *kept_scores = values + P::PIECE;
    const int b = blockIdx.x / heads, h = blockIdx.x % heads, channels = heads * D, stride = 3 * channels;
    const int first = blockIdx.y * TILE;
    const i64 packed = (i64)b * T * stride + h * D, plain = (i64)b * T * channels + h * D;
    const Stream stream = draws<DROP>(header, site, b);
    const float scale = 1.0f / sqrtf((float)D);

    P::template load<T>(queries, qkv + packed, stride, first);
    P::template load<T>(douts, dout + plain, channels, first);
    __syncthreads();
    float delta[4], log_sum[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int row = first + 4 * P::y() + i;
        float sum = 0.0f;
        if (row < T)
            for (int d = P::x(); d < D; d += P::SIDE)
                sum = fmaf(to_float(out[plain + (i64)row * channels + d]), douts[(4 * P::y() + i) * P::STRIDE + d], sum);
        delta[i] = P::row_sum(sum);
        log_sum[i] = row < T ? lse[(i64)blockIdx.x * T + row] : __int_as_float(0x7f800000);
        if (P::x() == 0 && row < T) deltas[(i64)blockIdx.x * T + row] = delta[i];
    }
    float dq[4][P::COLUMNS] = {};
    for (int key = 0; key < T; key += TILE) {
        __syncthreads();
        P::template load<T>(keys, qkv + packed + channels, stride, key);
        P::template load<T>(values, qkv + packed + 2 * channels, stride, key);
        __syncthreads();
        float s[4][4], dp[4][4];
        P::scores(s, queries, keys);
        P::scores(dp, douts, values);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 token = h * T + first + 4 * P::y() + i;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                int k = key + P::x() + P::SIDE * j;
                float p = k < T ? exp2f((s[i][j] * scale - log_sum[i]) * LOG2E) : 0.0f;
                s[i][j] = p * (dp[i][j] * drop_factor<DROP>(stream, token, k, threshold, keep_scale) - delta[i]);
            }
        }
        P::keep(kept_scores, s);
        P::add_matmul(dq, kept_scores, keys);
    }
    const float factor[4] = {scale, scale, scale, scale};
    P::template store<T>(dqkv + packed, stride, first, dq, factor);
    if constexpr (SUM)
        P::template store_sums<T>(sums + ((i64)b * gridDim.y + blockIdx.y) * stride + h * D, keys, first, dq, scale);
}

// dK and dV, and their sums as above. Grid: (B·H, pieces of keys).
template <typename E, int T, int D, int TILE, bool DROP, bool SUM>
__global__ void __launch_bounds__(TILE* TILE / 16)
    plain_attention_grad_keys(const E* __restrict__ qkv, const float* __restrict__ lse, const E* __restrict__ dout,
                              E* __restrict__ dqkv, const float* __restrict__ deltas, float* __restrict__ sums, int heads,
                              const Header* __restrict__ header, u32 site, u32 threshold, float keep_scale) {
    using P = Plain<D, TILE>;
    extern __shared__ float4 shared4[];
    float* queries = reinterpret_cast<float*>(shared4);
    float *douts = queries + P::PIECE, *keys = douts + P::PIECE, *values = keys + P::PIECE, *kept_scores = values + P::PIECE;
    const int b = blockIdx.x / heads, h = blockIdx.x % heads, channels = heads * D, stride = 3 * channels;
    const int first = blockIdx.y * TILE;
    const i64 packed = (i64)b * T * stride + h * D, plain = (i64)b * T * channels + h * D;
    const Stream stream = draws<DROP>(header, site, b);
    const float scale = 1.0f / sqrtf((float)D);

    P::template load<T>(keys, qkv + packed + channels, stride, first);
    P::template load<T>(values, qkv + packed + 2 * channels, stride, first);
    float dk[4][P::COLUMNS] = {}, dv[4][P::COLUMNS] = {};
    for (int query = 0; query < T; query += TILE) {
        __syncthreads();
        P::template load<T>(queries, qkv + packed, stride, query);
        P::template load<T>(douts, dout + plain, channels, query);
        __syncthreads();
        float p[4][4], ds[4][4];
        P::scores(p, keys, queries);
        P::scores(ds, values, douts);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int q = query + P::x() + P::SIDE * j;
            float log_sum = q < T ? lse[(i64)blockIdx.x * T + q] : 0.0f;
            float delta = q < T ? deltas[(i64)blockIdx.x * T + q] : 0.0f;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int k = first + 4 * P::y() + i;
                float x = q < T && k < T ? exp2f((p[i][j] * scale - log_sum) * LOG2E) : 0.0f;
                float factor = drop_factor<DROP>(stream, h * T + q, k, threshold, keep_scale);
                ds[i][j] = x * (ds[i][j] * factor - delta);
                p[i][j] = x * factor;
            }
        }
        P::keep(kept_scores, p);
        P::add_matmul(dv, kept_scores, douts);
        P::keep(kept_scores, ds);
        P::add_matmul(dk, kept_scores, queries);
    }
    const float one[4] = {1.0f, 1.0f, 1.0f, 1.0f}, factor[4] = {scale, scale, scale, scale};
    P::template store<T>(dqkv + packed + channels, stride, first, dk, factor);
    P::template store<T>(dqkv + packed + 2 * channels, stride, first, dv, one);
    if constexpr (SUM) {
        float* row = sums + ((i64)b * gridDim.y + blockIdx.y) * stride + h * D;
        P::template store_sums<T>(row + channels, queries, first, dk, scale);
        P::template store_sums<T>(row + 2 * channels, queries, first, dv, 1.0f);
    }
}
