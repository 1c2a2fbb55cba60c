// Batch norm: moments of channels over all rows, the norm with its ReLU, and the gradient through both.
//
// Legend: rows M (pixels of a batch), columns C (channels). A block has W vectors of V columns side by side and THREADS/W rows of
// its `per` rows at a time; what is the same for all rows a thread has in registers. A thread sums few rows (64 at most, see
// steps/batch_norm.rs) in f32; sums of threads and of blocks are doubles, added in a fixed order.
#include "common.cuh"

constexpr int THREADS = 256;
// Rows that a thread reads before it works on them.
constexpr int U = 4;

// The rows and columns of a thread.
template <int V, int W> struct Part {
    static constexpr int LANES = THREADS / W;
    int column, first, last;
    __device__ __forceinline__ Part(int rows, int per) {
        column = (blockIdx.x * W + threadIdx.x % W) * V;
        first = blockIdx.y * per + threadIdx.x / W;
        last = min((int)(blockIdx.y + 1) * per, rows);
    }
};

// Values that are the same for all rows, of V columns.
template <int V> struct Coefficients {
    // scale is γ/σ, shift β.
    float mean[V], scale[V], shift[V], rstd[V], count[V];
    // `running` moments have a variance where others have a sum of squares.
    __device__ __forceinline__ Coefficients(const float* moments, const float* gamma, const float* beta, int column, int columns,
                                            float eps, bool running) {
        float squares[V];
        Pack<float, V>::load(moments + column, mean);
        Pack<float, V>::load(moments + columns + column, squares);
        Pack<float, V>::load(moments + 2 * columns + column, count);
        Pack<float, V>::load(gamma + column, scale);
        Pack<float, V>::load(beta + column, shift);
#pragma unroll
        for (int i = 0; i < V; i++) {
            rstd[i] = 1.0f / sqrtf((running ? squares[i] : squares[i] / count[i]) + eps);
            scale[i] *= rstd[i];
        }
    }
    __device__ __forceinline__ float normed(float x, int i) const { return fmaf(x - mean[i], scale[i], shift[i]); }
    // The gradient before the ReLU: none where its result is 0.
    __device__ __forceinline__ float before(float dy, float x, int i, bool relu) const {
        return relu && normed(x, i) <= 0.0f ? 0.0f : dy;
    }
};

// Adds what the threads of a block have of two sums, in order; `finish` gets a column and its sums.
template <int V, int W, typename F>
__device__ __forceinline__ void add_lanes(const float (&one)[V], const float (&two)[V], int columns, F finish) {
    constexpr int LANES = THREADS / W;
    __shared__ __align__(16) float sums[2][LANES][W * V];
    Pack<float, V>::store(&sums[0][threadIdx.x / W][threadIdx.x % W * V], one);
    Pack<float, V>::store(&sums[1][threadIdx.x / W][threadIdx.x % W * V], two);
    __syncthreads();
    int column = blockIdx.x * W * V + threadIdx.x;
    if (threadIdx.x >= W * V || column >= columns) return;
    double first = 0.0, second = 0.0;
#pragma unroll 8
    for (int lane = 0; lane < LANES; lane++) {
        first += (double)sums[0][lane][threadIdx.x];
        second += (double)sums[1][lane][threadIdx.x];
    }
    finish(column, first, second);
}

// Values in the next U rows of a thread, as far as there are so many.
template <typename X, int V, int W>
__device__ __forceinline__ void load_values(const Part<V, W>& part, int row, int columns, const X* x, float (&v)[U][V]) {
#pragma unroll
    for (int u = 0; u < U; u++)
        if (row + u * part.LANES < part.last)
            Pack<X, V>::load(x + (i64)(row + u * part.LANES) * columns + part.column, v[u]);
}

// ---- moments ------------------------------------------------------------------------------------------------------

struct Moments {
    double mean, squares, count;
    // Combines both: the term from the distance of the two means is added explicitly.
    __device__ __forceinline__ void join(const Moments& other) {
        double both = count + other.count;
        if (both == 0.0) return;
        double apart = other.mean - mean, share = other.count / both;
        squares += other.squares + apart * apart * count * share;
        mean += apart * share;
        count = both;
    }
    __device__ __forceinline__ void write(float* out, int column, int columns) const {
        out[column] = (float)mean;
        // Rounding may leave a little less than nothing of a column that is constant; NaN stays NaN.
        out[columns + column] = squares < 0.0 ? 0.0f : (float)squares;
        out[2 * columns + column] = (float)count;
    }
};

// Mean and Σ (x-mean)² of each block's rows, to parts (blocks, 2, C). Sums are of x less the block's first row: nothing is left
// to cancel when the variance is taken from them.
template <typename X, int V, int W>
__global__ void __launch_bounds__(THREADS)
moments_parts(const X* x, int rows, int columns, int per, double* parts) {
    Part<V, W> part(rows, per);
    i64 start = (i64)blockIdx.y * per;
    float shift[V] = {}, sum[V] = {}, squares[V] = {};
    if (part.column < columns) Pack<X, V>::load(x + start * columns + part.column, shift);
    for (int row = part.first; row < part.last && part.column < columns; row += U * part.LANES) {
        float v[U][V];
        load_values<X>(part, row, columns, x, v);
#pragma unroll
        for (int u = 0; u < U; u++) {
            if (row + u * part.LANES >= part.last) continue;
#pragma unroll
            for (int i = 0; i < V; i++) {
                float d = v[u][i] - shift[i];
                sum[i] += d;
                squares[i] = fmaf(d, d, squares[i]);
            }
        }
    }
    double count = part.last - start;
    add_lanes<V, W>(sum, squares, columns, [&](int column, double sum, double squares) {
        double* out = parts + (i64)blockIdx.y * 2 * columns + column;
        out[0] = (double)to_float(x[start * columns + column]) + sum / count;
        out[columns] = squares - sum * sum / count;
    });
}

// Joins them in order: each of 32 warps every 32nd, then all of these. A block has 32 columns.
__global__ void __launch_bounds__(1024)
moments_join(const double* parts, int count, int rows, int per, int columns, float* out) {
    __shared__ Moments of_warps[32][32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, column = blockIdx.x * 32 + lane;
    Moments all = {0.0, 0.0, 0.0};
    if (column < columns) {
#pragma unroll 4
        for (int part = warp; part < count; part += 32) {
            const double* from = parts + (i64)part * 2 * columns + column;
            all.join({from[0], from[columns], (double)min(per, rows - part * per)});
        }
    }
    of_warps[warp][lane] = all;
    __syncthreads();
    if (warp > 0 || column >= columns) return;
    for (int i = 1; i < 32; i++) all.join(of_warps[i][lane]);
    all.write(out, column, columns);
}

// Moments of several parts, one below the other (3·count, C), in their order.
__global__ void __launch_bounds__(THREADS) join_moments(const float* parts, int count, int columns, float* out) {
    int column = blockIdx.x * THREADS + threadIdx.x;
    if (column >= columns) return;
    Moments all = {0.0, 0.0, 0.0};
    for (int part = 0; part < count; part++) {
        const float* from = parts + (i64)part * 3 * columns + column;
        all.join({(double)from[0], (double)from[columns], (double)from[2 * columns]});
    }
    all.write(out, column, columns);
}

// ---- the norm -----------------------------------------------------------------------------------------------------

// y = (x-mean)·γ/σ + β, and 0 where that is negative with `relu`.
template <typename X, int V, int W>
__global__ void __launch_bounds__(THREADS)
batch_norm(const X* x, const float* moments, const float* gamma, const float* beta, X* y, int rows, int columns, int per,
           float eps, int relu, int running) {
    Part<V, W> part(rows, per);
    if (part.column >= columns) return;
    Coefficients<V> of(moments, gamma, beta, part.column, columns, eps, running);
    for (int row = part.first; row < part.last; row += U * part.LANES) {
        float v[U][V];
        load_values<X>(part, row, columns, x, v);
#pragma unroll
        for (int u = 0; u < U; u++) {
            if (row + u * part.LANES >= part.last) continue;
#pragma unroll
            for (int i = 0; i < V; i++) {
                float value = of.normed(v[u][i], i);
                // In this order NaN stays NaN.
                v[u][i] = relu && value < 0.0f ? 0.0f : value;
            }
            Pack<X, V>::store(y + (i64)(row + u * part.LANES) * columns + part.column, v[u]);
        }
    }
}

// ---- its gradient -------------------------------------------------------------------------------------------------

// Values and their gradients in the next U rows of a thread, as far as there are so many.
template <typename X, int V, int W>
__device__ __forceinline__ void load_both(const Part<V, W>& part, int row, int columns, const X* x, const X* dy, float (&v)[U][V],
                                          float (&d)[U][V]) {
#pragma unroll
    for (int u = 0; u < U; u++) {
        if (row + u * part.LANES >= part.last) continue;
        i64 at = (i64)(row + u * part.LANES) * columns + part.column;
        Pack<X, V>::load(x + at, v[u]);
        Pack<X, V>::load(dy + at, d[u]);
    }
}

// Σ dy and Σ dy·(x-mean) of each block's rows, with dy as it is before the ReLU, to parts (blocks, 2, C).
template <typename X, int V, int W>
__global__ void __launch_bounds__(THREADS)
norm_sums_parts(const X* x, const float* moments, const float* gamma, const float* beta, const X* dy, int rows, int columns,
                int per, float eps, int relu, double* parts) {
    Part<V, W> part(rows, per);
    float sum[V] = {}, product[V] = {};
    if (part.column < columns) {
        Coefficients<V> of(moments, gamma, beta, part.column, columns, eps, false);
        for (int row = part.first; row < part.last; row += U * part.LANES) {
            float v[U][V], d[U][V];
            load_both<X>(part, row, columns, x, dy, v, d);
#pragma unroll
            for (int u = 0; u < U; u++) {
                if (row + u * part.LANES >= part.last) continue;
#pragma unroll
                for (int i = 0; i < V; i++) {
                    float before = of.before(d[u][i], v[u][i], i, relu);
                    sum[i] += before;
                    product[i] = fmaf(before, v[u][i] - of.mean[i], product[i]);
                }
            }
        }
    }
    add_lanes<V, W>(sum, product, columns, [&](int column, double sum, double product) {
        double* out = parts + (i64)blockIdx.y * 2 * columns + column;
        out[0] = sum;
        out[columns] = product;
    });
}

// Adds them in order, as `moments_join` does: (2,C) is Σ dy and Σ dy·x̂.
__global__ void __launch_bounds__(1024)
norm_sums_join(const double* parts, int count, const float* moments, int columns, float eps, float* out) {
    __shared__ double of_warps[2][32][32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, column = blockIdx.x * 32 + lane;
    double sum = 0.0, product = 0.0;
    if (column < columns) {
#pragma unroll 4
        for (int part = warp; part < count; part += 32) {
            const double* from = parts + (i64)part * 2 * columns + column;
            sum += from[0];
            product += from[columns];
        }
    }
    of_warps[0][warp][lane] = sum;
    of_warps[1][warp][lane] = product;
    __syncthreads();
    if (warp > 0 || column >= columns) return;
    for (int i = 1; i < 32; i++) {
        sum += of_warps[0][i][lane];
        product += of_warps[1][i][lane];
    }
    double variance = (double)moments[columns + column] / (double)moments[2 * columns + column];
    out[column] = (float)sum;
    out[columns + column] = (float)(product / sqrt(variance + (double)eps));
}

// dx = γ/σ·(dy - Σ dy/count - x̂·Σ dy·x̂/count), with dy as it is before the ReLU.
template <typename X, int V, int W>
__global__ void __launch_bounds__(THREADS)
batch_norm_grad(const X* x, const float* moments, const float* gamma, const float* beta, const X* dy, const float* sums, X* dx,
                int rows, int columns, int per, float eps, int relu) {
    Part<V, W> part(rows, per);
    if (part.column >= columns) return;
    Coefficients<V> of(moments, gamma, beta, part.column, columns, eps, false);
    float of_sum[V], of_product[V];
    Pack<float, V>::load(sums + part.column, of_sum);
    Pack<float, V>::load(sums + columns + part.column, of_product);
#pragma unroll
    for (int i = 0; i < V; i++) {
        of_sum[i] /= of.count[i];
        of_product[i] = of_product[i] / of.count[i] * of.rstd[i];
    }
    for (int row = part.first; row < part.last; row += U * part.LANES) {
        float v[U][V], d[U][V];
        load_both<X>(part, row, columns, x, dy, v, d);
#pragma unroll
        for (int u = 0; u < U; u++) {
            if (row + u * part.LANES >= part.last) continue;
#pragma unroll
            for (int i = 0; i < V; i++) {
                float before = of.before(d[u][i], v[u][i], i, relu);
                d[u][i] = of.scale[i] * ((before - of_sum[i]) - (v[u][i] - of.mean[i]) * of_product[i]);
            }
            Pack<X, V>::store(dx + (i64)(row + u * part.LANES) * columns + part.column, d[u]);
        }
    }
}

// ---- running moments ----------------------------------------------------------------------------------------------

// torch's: the variance that the running one follows is the unbiased one. `from` and `out` may be the same.
__global__ void __launch_bounds__(THREADS)
running_moments(const float* from, const float* moments, float* out, int columns, double momentum) {
    int column = blockIdx.x * THREADS + threadIdx.x;
    if (column >= columns) return;
    double squares = moments[columns + column], count = moments[2 * columns + column];
    double now[2] = {moments[column], squares / (count - 1.0)};
    for (int row = 0; row < 2; row++) {
        int at = row * columns + column;
        out[at] = (float)((1.0 - momentum) * (double)from[at] + momentum * now[row]);
    }
    out[2 * columns + column] = from[2 * columns + column] + 1.0f;
}

// A value as it is to be, or as it was if the step is skipped. `before` and `out` may be the same.
__global__ void __launch_bounds__(THREADS)
commit(const float* control, const float* before, const float* after, float* out, int count) {
    int at = blockIdx.x * THREADS + threadIdx.x;
    if (at < count) out[at] = control[1] != 0.0f ? after[at] : before[at];
}
