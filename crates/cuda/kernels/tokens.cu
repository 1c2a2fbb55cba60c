// Ops between images, patches and tokens.
//
// Legend: B batch, T tokens, N patches, C channels; with a class token T = N + 1, otherwise T = N. V is how many elements a
// thread moves at once: 4, or 1 where rows are not a multiple of 4.
#include "common.cuh"

constexpr int THREADS = 256;

template <typename T, int V> __device__ __forceinline__ void store_zero(T* to) {
    float zero[V] = {};
    Pack<T, V>::store(to, zero);
}

// ---- images and patches -------------------------------------------------------------------------------------------

// Image (CHANNELS, HEIGHT, WIDTH), rows (N, CHANNELS·P·P). Everything is known at compile time, so that no index costs a
// division.
template <int CHANNELS, int HEIGHT, int WIDTH, int P> struct Cut {
    static constexpr int V = P % 4 == 0 ? 4 : 1;
    static constexpr int PIXELS = CHANNELS * HEIGHT * WIDTH;
    // Position in the image of element `at` of the rows.
    static __device__ __forceinline__ int pixel(int at) {
        constexpr int FEATURES = CHANNELS * P * P, ACROSS = WIDTH / P;
        int n = at / FEATURES, f = at % FEATURES;
        int channel = f / (P * P), dy = f / P % P, dx = f % P;
        return (channel * HEIGHT + n / ACROSS * P + dy) * WIDTH + n % ACROSS * P + dx;
    }
};

// Moves what a block has of an image's elements, in the order of the rows. `from_at` and `to_at` give the position of an element.
template <typename G, typename X, typename Y, typename From, typename To>
__device__ __forceinline__ void move_elements(const X* from, Y* to, From from_at, To to_at) {
    constexpr int V = G::V, U = 4;
    from += (i64)blockIdx.y * G::PIXELS;
    to += (i64)blockIdx.y * G::PIXELS;
    int first = (blockIdx.x * U * THREADS + threadIdx.x) * V;
    float v[U][V];
#pragma unroll
    for (int u = 0; u < U; u++) {
        int at = first + u * THREADS * V;
        if (at < G::PIXELS) Pack<X, V>::load(from + from_at(at), v[u]);
    }
#pragma unroll
    for (int u = 0; u < U; u++) {
        int at = first + u * THREADS * V;
        if (at < G::PIXELS) Pack<Y, V>::store(to + to_at(at), v[u]);
    }
}

// The grid is (pieces of an image, B). Threads go along the rows: these are written in order, and P pixels are read in order.
template <typename X, typename Y, int CHANNELS, int HEIGHT, int WIDTH, int P>
__global__ void __launch_bounds__(THREADS) patches(const X* images, Y* rows) {
    using G = Cut<CHANNELS, HEIGHT, WIDTH, P>;
    move_elements<G>(images, rows, G::pixel, [](int at) { return at; });
}

template <typename X, typename Y, int CHANNELS, int HEIGHT, int WIDTH, int P>
__global__ void __launch_bounds__(THREADS) unpatches(const X* rows, Y* images) {
    using G = Cut<CHANNELS, HEIGHT, WIDTH, P>;
    move_elements<G>(rows, images, [](int at) { return at; }, G::pixel);
}

// ---- patches and tokens -------------------------------------------------------------------------------------------
//
// A sample's tokens are one line of T·C elements, of which the first `head` (C or 0) are the class token. A thread has a
// vector of that line, for `per` samples. The grid is (pieces of the line, parts of the batch).

// class_token may be null if head is 0.
template <typename P, typename X, int V>
__global__ void __launch_bounds__(THREADS)
embed(const P* patches, const float* class_token, const float* positions, X* tokens, int batch, int line, int head, int per) {
    constexpr int U = 4;
    int at = (blockIdx.x * THREADS + threadIdx.x) * V;
    if (at >= line) return;
    int first = blockIdx.y * per, last = min(first + per, batch);
    float position[V];
    Pack<float, V>::load(positions + at, position);
    if (at < head) {
        float token[V];
        Pack<float, V>::load(class_token + at, token);
#pragma unroll
        for (int i = 0; i < V; i++) token[i] += position[i];
        for (int b = first; b < last; b++) Pack<X, V>::store(tokens + (i64)b * line + at, token);
        return;
    }
    for (int b = first; b < last; b += U) {
        float v[U][V];
#pragma unroll
        for (int u = 0; u < U; u++)
            if (b + u < last) Pack<P, V>::load(patches + (i64)(b + u) * (line - head) + at - head, v[u]);
#pragma unroll
        for (int u = 0; u < U; u++) {
            if (b + u >= last) continue;
#pragma unroll
            for (int i = 0; i < V; i++) v[u][i] += position[i];
            Pack<X, V>::store(tokens + (i64)(b + u) * line + at, v[u]);
        }
    }
}

// Writes dpatches, and for each part of the batch the sum of its lines.
template <typename X, typename P, int V>
__global__ void __launch_bounds__(THREADS)
embed_grad(const X* dtokens, P* dpatches, float* parts, int batch, int line, int head, int per) {
    constexpr int U = 4;
    int at = (blockIdx.x * THREADS + threadIdx.x) * V;
    if (at >= line) return;
    int first = blockIdx.y * per, last = min(first + per, batch);
    float sum[V] = {};
    for (int b = first; b < last; b += U) {
        float v[U][V] = {};
#pragma unroll
        for (int u = 0; u < U; u++)
            if (b + u < last) Pack<X, V>::load(dtokens + (i64)(b + u) * line + at, v[u]);
#pragma unroll
        for (int u = 0; u < U; u++) {
#pragma unroll
            for (int i = 0; i < V; i++) sum[i] += v[u][i];
            if (b + u < last && at >= head) Pack<P, V>::store(dpatches + (i64)(b + u) * (line - head) + at - head, v[u]);
        }
    }
    Pack<float, V>::store(parts + (i64)blockIdx.y * line + at, sum);
}

// Adds the parts of embed_grad. The class token's gradient is that of the first position.
__global__ void __launch_bounds__(THREADS)
embed_grad_sums(const float* parts, int count, int line, int head, float* dclass, float* dpositions) {
    int at = blockIdx.x * THREADS + threadIdx.x;
    if (at >= line) return;
    float sum = 0.0f;
#pragma unroll 16
    for (int part = 0; part < count; part++) sum += parts[(i64)part * line + at];
    dpositions[at] = sum;
    if (at < head) dclass[at] = sum;
}

// `count` elements of each line, `to_line` apart, of lines that are `from_line` apart, or with 0 of the same one. The grid is (pieces
// of a line, lines).
template <typename A, typename B, int V>
__global__ void __launch_bounds__(THREADS) copy_lines(const A* from, B* to, i64 from_line, i64 to_line, int count) {
    int at = (blockIdx.x * THREADS + threadIdx.x) * V;
    if (at >= count) return;
    float v[V];
    Pack<A, V>::load(from + blockIdx.y * from_line + at, v);
    Pack<B, V>::store(to + blockIdx.y * to_line + at, v);
}

// The sum over a batch of the first `count` elements of lines that are `line` apart. Eight threads share a sum.
template <typename X, int V>
__global__ void __launch_bounds__(THREADS) token_sum(const X* x, float* out, int batch, i64 line, int count) {
    constexpr int LANES = THREADS / 32;
    __shared__ __align__(16) float sums[LANES][32 * V];
    int lane = threadIdx.x / 32, at = (blockIdx.x * 32 + threadIdx.x % 32) * V;
    float sum[V] = {};
    if (at < count) {
#pragma unroll 4
        for (int b = lane; b < batch; b += LANES) {
            float v[V];
            Pack<X, V>::load(x + b * line + at, v);
#pragma unroll
            for (int i = 0; i < V; i++) sum[i] += v[i];
        }
    }
    Pack<float, V>::store(&sums[lane][threadIdx.x % 32 * V], sum);
    __syncthreads();
    at = blockIdx.x * 32 * V + threadIdx.x;
    if (threadIdx.x >= 32 * V || at >= count) return;
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < LANES; i++) total += sums[i][threadIdx.x];
    out[at] = total;
}

// ---- tokens and vectors -------------------------------------------------------------------------------------------

// y = share · the sum of the first `taken` of a sample's `tokens` tokens. The grid is (B, pieces of 32 vectors); eight threads
// share a sum.
template <typename X, typename Y, int V>
__global__ void __launch_bounds__(THREADS) pool(const X* x, Y* y, int tokens, int channels, int taken, float share) {
    constexpr int LANES = THREADS / 32;
    __shared__ __align__(16) float sums[LANES][32 * V];
    int lane = threadIdx.x / 32, channel = (blockIdx.y * 32 + threadIdx.x % 32) * V;
    x += (i64)blockIdx.x * tokens * channels + channel;
    float sum[V] = {};
    if (channel < channels) {
#pragma unroll 4
        for (int t = lane; t < taken; t += LANES) {
            float v[V];
            Pack<X, V>::load(x + (i64)t * channels, v);
#pragma unroll
            for (int i = 0; i < V; i++) sum[i] += v[i];
        }
    }
    Pack<float, V>::store(&sums[lane][threadIdx.x % 32 * V], sum);
    __syncthreads();
    channel = blockIdx.y * 32 * V + threadIdx.x;
    if (threadIdx.x >= 32 * V || channel >= channels) return;
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < LANES; i++) total += sums[i][threadIdx.x];
    y[(i64)blockIdx.x * channels + channel] = from_float<Y>(total * share);
}

// dx = share · dy in the first `taken` tokens of a sample, 0 in the others. A warp for each token.
template <typename Y, typename X, int V>
__global__ void __launch_bounds__(THREADS)
pool_grad(const Y* dy, X* dx, int rows, int tokens, int channels, int taken, float share) {
    int row = blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
    if (row >= rows) return;
    int sample = row / tokens;
    bool some = row - sample * tokens < taken;
    for (int channel = threadIdx.x % 32 * V; channel < channels; channel += 32 * V) {
        X* to = dx + (i64)row * channels + channel;
        if (!some) {
            store_zero<X, V>(to);
            continue;
        }
        float v[V];
        Pack<Y, V>::load(dy + (i64)sample * channels + channel, v);
#pragma unroll
        for (int i = 0; i < V; i++) v[i] *= share;
        Pack<X, V>::store(to, v);
    }
}
