// LayerScale and SwiGLU, and their gradients: products of a branch with a parameter for each column or with a gate. All arithmetic
// is in f32.
//
// Legend: rows M, columns C; a gated row has 2H columns. V is how many columns a thread has of a row.
#include "sums.cuh"

// ---- LayerScale ---------------------------------------------------------------------------------------------------

// y = gamma·x. A thread has two vectors of V elements, THREADS vectors apart.
template <typename T, int C, int V>
__global__ void __launch_bounds__(THREADS) layer_scale(const T* x, const float* gamma, T* y, i64 vectors) {
    constexpr int U = 2;
    i64 first = (i64)blockIdx.x * U * THREADS + threadIdx.x;
    float v[U][V];
#pragma unroll
    for (int u = 0; u < U; u++) {
        i64 vector = first + u * THREADS;
        if (vector < vectors) Pack<T, V>::load(x + vector * V, v[u]);
    }
#pragma unroll
    for (int u = 0; u < U; u++) {
        i64 vector = first + u * THREADS;
        if (vector >= vectors) continue;
        const float* g = gamma + (int)(vector % (C / V)) * V;
#pragma unroll
        for (int i = 0; i < V; i++) v[u][i] *= g[i];
        Pack<T, V>::store(y + vector * V, v[u]);
    }
}

// dx = gamma·dy; the sums of x·dy over the part's rows, with SUM those of dx. D is the type of dy.
template <typename T, typename D, int V, int W, int U, bool SUM>
__global__ void __launch_bounds__(THREADS)
layer_scale_grad(const T* x, const float* gamma, const D* dy, T* dx, int rows, int columns, int per, float* dgamma, float* sums) {
    constexpr int LANES = THREADS / W;
    int column = (blockIdx.x * W + threadIdx.x % W) * V;
    int first = blockIdx.y * per + threadIdx.x / W, last = min((int)(blockIdx.y + 1) * per, rows);
    float g[V] = {}, of_gamma[V] = {}, of_dx[V] = {};
    if (column < columns)
#pragma unroll
        for (int i = 0; i < V; i++) g[i] = gamma[column + i];
    for (int row = first; row < last && column < columns; row += U * LANES) {
        float v[U][V], d[U][V];
#pragma unroll
        for (int u = 0; u < U; u++) {
            if (row + u * LANES >= last) continue;
            i64 at = (i64)(row + u * LANES) * columns + column;
            Pack<T, V>::load(x + at, v[u]);
            Pack<D, V>::load(dy + at, d[u]);
        }
#pragma unroll
        for (int u = 0; u < U; u++) {
            if (row + u * LANES >= last) continue;
#pragma unroll
            for (int i = 0; i < V; i++) {
                of_gamma[i] = fmaf(v[u][i], d[u][i], of_gamma[i]);
                d[u][i] *= g[i];
                if constexpr (SUM) of_dx[i] += d[u][i];
            }
            Pack<T, V>::store(dx + (i64)(row + u * LANES) * columns + column, d[u]);
        }
    }
    write_sums<V, W>(of_gamma, columns, nullptr, dgamma, columns);
    if constexpr (SUM) {
        __syncthreads();
        write_sums<V, W>(of_dx, columns, nullptr, sums, columns);
    }
}

// ---- SwiGLU -------------------------------------------------------------------------------------------------------

template <typename T> __device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }
template <> __device__ __forceinline__ float sigmoid<float>(float x) { return 1.0f / (1.0f + expf(-x)); }

// y = silu(a)·b for the first half a and the second half b of each row of x. A thread has one vector of y.
template <typename T, int H, int V>
__global__ void __launch_bounds__(THREADS) swiglu(const T* x, T* y, i64 vectors) {
    i64 vector = (i64)blockIdx.x * THREADS + threadIdx.x;
    if (vector >= vectors) return;
    i64 row = vector / (H / V);
    const T* at = x + row * 2 * H + (int)(vector % (H / V)) * V;
    float gate[V], value[V];
    Pack<T, V>::load(at, gate);
    Pack<T, V>::load(at + H, value);
#pragma unroll
    for (int i = 0; i < V; i++) value[i] *= gate[i] * sigmoid<T>(gate[i]);
    Pack<T, V>::store(y + vector * V, value);
}

// dx of both halves; with SUM the sums over the part's rows of each, side by side in a row of 2H.
template <typename T, int V, int W, int U, bool SUM>
__global__ void __launch_bounds__(THREADS)
swiglu_grad(const T* x, const T* dy, T* dx, int rows, int half, int per, float* sums) {
    constexpr int LANES = THREADS / W;
    int column = (blockIdx.x * W + threadIdx.x % W) * V;
    int first = blockIdx.y * per + threadIdx.x / W, last = min((int)(blockIdx.y + 1) * per, rows);
    float of_gate[V] = {}, of_value[V] = {};
    for (int row = first; row < last && column < half; row += U * LANES) {
        float gate[U][V], value[U][V], d[U][V];
#pragma unroll
        for (int u = 0; u < U; u++) {
            if (row + u * LANES >= last) continue;
            i64 at = (i64)(row + u * LANES) * 2 * half + column;
            Pack<T, V>::load(x + at, gate[u]);
            Pack<T, V>::load(x + at + half, value[u]);
            Pack<T, V>::load(dy + (i64)(row + u * LANES) * half + column, d[u]);
        }
#pragma unroll
        for (int u = 0; u < U; u++) {
            if (row + u * LANES >= last) continue;
            i64 at = (i64)(row + u * LANES) * 2 * half + column;
#pragma unroll
            for (int i = 0; i < V; i++) {
                float open = sigmoid<T>(gate[u][i]), slope = open * fmaf(gate[u][i], 1.0f - open, 1.0f);
                value[u][i] *= d[u][i] * slope;
                gate[u][i] *= d[u][i] * open;
                if constexpr (SUM) of_gate[i] += value[u][i], of_value[i] += gate[u][i];
            }
            Pack<T, V>::store(dx + at, value[u]);
            Pack<T, V>::store(dx + at + half, gate[u]);
        }
    }
    if constexpr (SUM) {
        write_sums<V, W>(of_gate, half, nullptr, sums, 2 * half);
        __syncthreads();
        write_sums<V, W>(of_value, half, nullptr, sums + half, 2 * half);
    }
}
