// Scaled cosine attention in shifted windows without tensor cores, forward and backward: f32 arithmetic, any head size, window and element
// type. Without atomics.
//
// Legend: H heads, T tokens of a window, D head size, C = H·D. A piece is TILE tokens. See windows_grad.cu for what the backward computes.
#include "plain.cuh"
#include "windows.cuh"

// The shortest length that a row is divided by.
static constexpr float LEAST = 1e-12f;

template <typename E, int ROWS, int COLUMNS, int D, int TILE> struct PlainWindow : Plain<D, TILE> {
    using P = Plain<D, TILE>;
    using W = Windows<ROWS, COLUMNS>;
    static constexpr int T = W::T, STRIDE = P::STRIDE, THREADS = P::THREADS, PIECES = ceil_div(T, TILE);
    // Columns that a thread sums or stores.
    static constexpr int OWN = ceil_div(D, THREADS);

    // The rows of a head of tokens `first` on, with a bias if there is one. Padding is zeros before the bias.
    static __device__ __forceinline__ void gather(float* to, const E* head, int stride, const W& window, int first,
                                                  const float* bias) {
        constexpr int WIDE = ceil_div(D, 4) * 4;
        for (int i = threadIdx.x; i < TILE * WIDE; i += THREADS) {
            int row = i / WIDE, c = i % WIDE, place = window.place(first + row);
            float x = place >= 0 && c < D ? to_float(head[(i64)place * stride + c]) : 0.0f;
            to[row * STRIDE + c] = bias && c < D ? x + bias[c] : x;
        }
    }

    // Rows get length 1. Two threads have a row.
    static __device__ __forceinline__ void normalise(float* rows, float* lengths) {
        for (int i = threadIdx.x; i < 2 * TILE; i += THREADS) {
            float* row = rows + i / 2 * STRIDE;
            float squares = 0.0f;
            for (int d = i % 2; d < D; d += 2) squares = fmaf(row[d], row[d], squares);
            squares += __shfl_xor_sync(0xffffffffu, squares, 1);
            float length = fmaxf(sqrtf(squares), LEAST), inverse = 1.0f / length;
            for (int d = i % 2; d < D; d += 2) row[d] *= inverse;
            if (i % 2 == 0) lengths[i / 2] = length;
        }
    }

    // The keys of tokens `first` on, of length 1, and their values. `head` is where the head's queries are.
    static __device__ __forceinline__ void load_keys(float* keys, float* values, float* lengths, const E* head, int channels,
                                                     const W& window, int first) {
        gather(keys, head + channels, 3 * channels, window, first, nullptr);
        gather(values, head + 2 * channels, 3 * channels, window, first, nullptr);
        __syncthreads();
        normalise(keys, lengths);
    }

    // The queries of tokens `first` on, of length 1, and the gradients of their results, from a head of each.
    static __device__ __forceinline__ void load_queries(float* queries, float* douts, float* lengths, const E* head, const float* bias,
                                                        const E* dout, int channels, const W& window, int first) {
        gather(queries, head, 3 * channels, window, first, bias);
        gather(douts, dout, channels, window, first, nullptr);
        __syncthreads();
        normalise(queries, lengths);
    }

    // dx = factor·(dx - x̂·(x̂·dx))/length; returns this thread's share of Σ x̂·dx.
    static __device__ __forceinline__ float through_lengths(float* dx, const float* unit, const float* lengths, float factor) {
        float total = 0.0f;
        for (int i = threadIdx.x; i < 2 * TILE; i += THREADS) {
            float along = 0.0f;
            const int at = i / 2 * STRIDE;
            for (int d = i % 2; d < D; d += 2) along = fmaf(unit[at + d], dx[at + d], along);
            total += along;
            along += __shfl_xor_sync(0xffffffffu, along, 1);
            float share = factor / lengths[i / 2];
            for (int d = i % 2; d < D; d += 2) dx[at + d] = (dx[at + d] - unit[at + d] * along) * share;
        }
        return total;
    }

    // Copies a matmul's result to shared memory.
    static __device__ __forceinline__ void put(float* to, const float (&x)[4][P::COLUMNS]) {
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int c = 0; c < P::COLUMNS; c++)
                if (P::column(c) < D) to[(4 * P::y() + i) * STRIDE + P::column(c)] = x[i][c];
    }

    // Copies it from there to the map.
    static __device__ __forceinline__ void scatter(E* head, int stride, const W& window, int first, const float* from) {
        for (int i = threadIdx.x; i < TILE * D; i += THREADS) {
            int row = i / D, c = i % D, place = window.place(first + row);
            if (place >= 0) head[(i64)place * stride + c] = from_float<E>(from[row * STRIDE + c]);
        }
    }

    // Turns dot products of unit rows into scores.
    static __device__ __forceinline__ float score(float cosine, float factor, const float* bias, const W& window, int query,
                                                  int key) {
        float s = fmaf(cosine, factor, bias[query * T + key]);
        return window.apart(window.side(query), window.side(key)) ? s + APART : s;
    }

    static __device__ __forceinline__ void add_columns(float (&sum)[OWN], const float* rows) {
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            int d = i * THREADS + threadIdx.x;
            for (int row = 0; d < D && row < TILE; row++) sum[i] += rows[row * STRIDE + d];
        }
    }
};

// Grid: (windows·H, pieces of queries).
template <typename E, int ROWS, int COLUMNS, int D, int TILE>
__global__ void __launch_bounds__(TILE* TILE / 16)
    plain_window_attention(const E* __restrict__ qkv, const float* __restrict__ q_bias, const float* __restrict__ v_bias,
                           const float* __restrict__ scales, const float* __restrict__ position_bias, E* __restrict__ out,
                           float* __restrict__ lse, int heads, int height, int width, int down, int right) {
    using P = PlainWindow<E, ROWS, COLUMNS, D, TILE>;
    constexpr int T = P::T;
    extern __shared__ float4 shared4[];
    float* queries = reinterpret_cast<float*>(shared4);
    float *keys = queries + P::PIECE, *values = keys + P::PIECE, *kept_scores = values + P::PIECE;
    float* lengths = kept_scores + P::SCORES;
    const int h = blockIdx.x % heads, channels = heads * D, stride = 3 * channels, first = blockIdx.y * TILE;
    const E* head = qkv + h * D;
    const float* bias = position_bias + (i64)h * T * T;
    const float factor = cosine_factor(scales[h]);
    typename P::W here(height, width, down, right);
    here.turn_to(blockIdx.x / heads);

    float o[4][P::COLUMNS] = {}, top[4], sum[4] = {};
#pragma unroll
    for (int i = 0; i < 4; i++) top[i] = __int_as_float(0xff800000);
    P::gather(queries, head, stride, here, first, q_bias + h * D);
    __syncthreads();
    P::normalise(queries, lengths);
    for (int key = 0; key < T; key += TILE) {
        __syncthreads();
        P::load_keys(keys, values, lengths, head, channels, here, key);
        __syncthreads();
        float s[4][4];
        P::scores(s, queries, keys);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int query = min(first + 4 * P::y() + i, T - 1);
            float m = top[i];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                int k = key + P::x() + P::SIDE * j;
                s[i][j] = k < T ? P::score(s[i][j], factor, bias, here, query, k) : -1e30f;
                m = fmaxf(m, s[i][j]);
            }
            m = P::row_max(m);
            float shrink = expf(top[i] - m);
            top[i] = m;
            sum[i] *= shrink;
#pragma unroll
            for (int c = 0; c < P::COLUMNS; c++) o[i][c] *= shrink;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                s[i][j] = expf(s[i][j] - m);
                sum[i] += s[i][j];
            }
        }
        P::keep(kept_scores, s);
        P::add_matmul(o, kept_scores, values);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float total = P::row_sum(sum[i]);
        int row = first + 4 * P::y() + i;
        if (P::x() == 0 && row < T) lse[(i64)blockIdx.x * T + row] = top[i] + logf(total);
        // Probabilities sum to 1, so that the bias of values comes out as it is.
#pragma unroll
        for (int c = 0; c < P::COLUMNS; c++)
            o[i][c] = o[i][c] / total + (P::column(c) < D ? v_bias[h * D + P::column(c)] : 0.0f);
    }
    __syncthreads();
    P::put(values, o);
    __syncthreads();
    P::scatter(out + h * D, channels, here, first, values);
}

// dQ, the sums of dS and those over tokens, and for plain_window_grad_keys each query's log-sum-exp and rowsum(P ∘ dP). A block has one
// head and one piece of the queries of `per` windows. Its sums of dS grow in bias_parts (blocks, H, T, T), where each thread finds what
// it left itself; all others go to rows of token_parts (blocks·pieces, 2C+H). Grid: (H, windows / per, pieces).
template <typename E, int ROWS, int COLUMNS, int D, int TILE>
__global__ void __launch_bounds__(TILE* TILE / 16)
    plain_window_grad_queries(const E* __restrict__ qkv, const float* __restrict__ q_bias, const float* __restrict__ scales,
                              const float* __restrict__ position_bias, const float* __restrict__ lse,
                              const E* __restrict__ dout, E* __restrict__ dqkv, float* __restrict__ log_sums,
                              float* __restrict__ deltas, float* bias_parts, float* __restrict__ token_parts, int heads,
                              int total, int per, int height, int width, int down, int right) {
    using P = PlainWindow<E, ROWS, COLUMNS, D, TILE>;
    constexpr int T = P::T;
    extern __shared__ float4 shared4[];
    float* queries = reinterpret_cast<float*>(shared4);
    float *douts = queries + P::PIECE, *keys = douts + P::PIECE, *values = keys + P::PIECE, *kept_scores = values + P::PIECE;
    float *lengths = kept_scores + P::SCORES, *unused = lengths + TILE;
    const int h = blockIdx.x, channels = heads * D, stride = 3 * channels, first = blockIdx.z * TILE;
    const E* head = qkv + h * D;
    const float* bias = position_bias + (i64)h * T * T;
    const float factor = cosine_factor(scales[h]);
    float* summed = bias_parts + ((i64)blockIdx.y * heads + h) * T * T;
    const int begin = blockIdx.y * per, last = min(begin + per, total);
    typename P::W here(height, width, down, right);
    float query_sums[P::OWN] = {}, value_sums[P::OWN] = {}, scale_sum = 0.0f;

    for (int window = begin; window < last; window++) {
        here.turn_to(window);
        __syncthreads();
        P::load_queries(queries, douts, lengths, head, q_bias + h * D, dout + h * D, channels, here, first);
        P::add_columns(value_sums, douts);
        const i64 stats = ((i64)window * heads + h) * T;

        // Probabilities, not yet divided by their sum, and dP of one piece of the keys.
        auto attend = [&](int key, float(&p)[4][4], float(&dp)[4][4]) {
            __syncthreads();
            P::load_keys(keys, values, unused, head, channels, here, key);
            __syncthreads();
            P::scores(p, queries, keys);
            P::scores(dp, douts, values);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int query = first + 4 * P::y() + i;
                const float log_sum = query < T ? lse[stats + query] : 0.0f;
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const int k = key + P::x() + P::SIDE * j;
                    const bool there = query < T && k < T;
                    p[i][j] = there ? expf(P::score(p[i][j], factor, bias, here, query, k) - log_sum) : 0.0f;
                }
            }
        };
        float p[4][4], ds[4][4], sum[4] = {}, delta[4] = {}, dq[4][P::COLUMNS] = {};
        for (int key = 0; key < T; key += TILE) {
            attend(key, p, ds);
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    sum[i] += p[i][j];
                    delta[i] = fmaf(p[i][j], ds[i][j], delta[i]);
                }
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int query = first + 4 * P::y() + i;
            const float all = P::row_sum(sum[i]);
            sum[i] = all > 0.0f ? 1.0f / all : 0.0f;
            delta[i] = P::row_sum(delta[i]) * sum[i];
            if (P::x() == 0 && query < T) {
                log_sums[stats + query] = lse[stats + query] + logf(all);
                deltas[stats + query] = delta[i];
            }
        }
        for (int key = 0; key < T; key += TILE) {
            attend(key, p, ds);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int query = first + 4 * P::y() + i;
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const int k = key + P::x() + P::SIDE * j;
                    ds[i][j] = p[i][j] * sum[i] * (ds[i][j] - delta[i]);
                    float* to = summed + (i64)query * T + k;
                    if (query < T && k < T) *to = window == begin ? ds[i][j] : *to + ds[i][j];
                }
            }
            P::keep(kept_scores, ds);
            P::add_matmul(dq, kept_scores, keys);
        }
        __syncthreads();
        P::put(values, dq);
        __syncthreads();
        scale_sum += P::through_lengths(values, queries, lengths, factor);
        __syncthreads();
        P::add_columns(query_sums, values);
        P::scatter(dqkv + h * D, stride, here, first, values);
    }

    float* row = token_parts + ((i64)blockIdx.y * P::PIECES + blockIdx.z) * (2 * channels + heads);
#pragma unroll
    for (int i = 0; i < P::OWN; i++) {
        int d = i * P::THREADS + threadIdx.x;
        if (d >= D) continue;
        row[h * D + d] = query_sums[i];
        row[channels + h * D + d] = value_sums[i];
    }
    // The threads' shares of the logit scale's, added in order.
    __syncthreads();
    queries[threadIdx.x] = scale_sum;
    __syncthreads();
    if (threadIdx.x > 0) return;
    float all = 0.0f;
    for (int i = 0; i < P::THREADS; i++) all += queries[i];
    row[2 * channels + h] = all * cosine_slope(scales[h]);
}

// dK and dV. Grid: (windows·H, pieces of keys).
template <typename E, int ROWS, int COLUMNS, int D, int TILE>
__global__ void __launch_bounds__(TILE* TILE / 16)
    plain_window_grad_keys(const E* __restrict__ qkv, const float* __restrict__ q_bias, const float* __restrict__ scales,
                           const float* __restrict__ position_bias, const float* __restrict__ log_sums,
                           const float* __restrict__ deltas, const E* __restrict__ dout, E* __restrict__ dqkv, int heads,
                           int height, int width, int down, int right) {
    using P = PlainWindow<E, ROWS, COLUMNS, D, TILE>;
    constexpr int T = P::T;
    extern __shared__ float4 shared4[];
    float* queries = reinterpret_cast<float*>(shared4);
    float *douts = queries + P::PIECE, *keys = douts + P::PIECE, *values = keys + P::PIECE, *kept_scores = values + P::PIECE;
    float *lengths = kept_scores + P::SCORES, *unused = lengths + TILE;
    const int h = blockIdx.x % heads, channels = heads * D, stride = 3 * channels, first = blockIdx.y * TILE;
    const E* head = qkv + h * D;
    const float* bias = position_bias + (i64)h * T * T;
    const float factor = cosine_factor(scales[h]);
    const i64 stats = (i64)blockIdx.x * T;
    typename P::W here(height, width, down, right);
    here.turn_to(blockIdx.x / heads);

    P::load_keys(keys, values, lengths, head, channels, here, first);
    float dk[4][P::COLUMNS] = {}, dv[4][P::COLUMNS] = {};
    for (int query = 0; query < T; query += TILE) {
        __syncthreads();
        P::load_queries(queries, douts, unused, head, q_bias + h * D, dout + h * D, channels, here, query);
        __syncthreads();
        float p[4][4], ds[4][4];
        P::scores(p, keys, queries);
        P::scores(ds, values, douts);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int q = query + P::x() + P::SIDE * j;
            const float log_sum = q < T ? log_sums[stats + q] : 0.0f, delta = q < T ? deltas[stats + q] : 0.0f;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int k = first + 4 * P::y() + i;
                p[i][j] = q < T && k < T ? expf(P::score(p[i][j], factor, bias, here, q, k) - log_sum) : 0.0f;
                ds[i][j] = p[i][j] * (ds[i][j] - delta);
            }
        }
        P::keep(kept_scores, p);
        P::add_matmul(dv, kept_scores, douts);
        P::keep(kept_scores, ds);
        P::add_matmul(dk, kept_scores, queries);
    }
    __syncthreads();
    P::put(queries, dk);
    P::put(douts, dv);
    __syncthreads();
    P::through_lengths(queries, keys, lengths, factor);
    __syncthreads();
    P::scatter(dqkv + channels + h * D, stride, here, first, queries);
    P::scatter(dqkv + 2 * channels + h * D, stride, here, first, douts);
}
