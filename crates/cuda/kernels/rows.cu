// Row-wise and elementwise ops. All arithmetic is in f32. Results don't depend on the GPU's number of multiprocessors.
//
// Legend: rows M, columns C. X is the type of the residual stream; branches may be of another type.
#include "sums.cuh"

// ---- elementwise --------------------------------------------------------------------------------------------------

template <typename A, typename B, typename Y> __device__ constexpr int width_of() {
    constexpr int most = sizeof(A) > sizeof(B) ? sizeof(A) : sizeof(B);
    return 16 / (most > (int)sizeof(Y) ? most : (int)sizeof(Y));
}

// y = f(a, b). A thread has two vectors of V elements, and reads both before it writes: y may lie where a or b lies.
template <int V, typename A, typename B, typename Y, typename F>
__device__ __forceinline__ void map2(const A* a, const B* b, Y* y, i64 n, F f) {
    constexpr int U = 2;
    i64 first = ((i64)blockIdx.x * U * THREADS + threadIdx.x) * V;
    float s[U][V], t[U][V];
#pragma unroll
    for (int u = 0; u < U; u++) {
        i64 at = first + u * THREADS * V;
        if (at + V > n) continue;
        Pack<A, V>::load(a + at, s[u]);
        Pack<B, V>::load(b + at, t[u]);
    }
#pragma unroll
    for (int u = 0; u < U; u++) {
        i64 at = first + u * THREADS * V;
        if (at + V <= n) {
#pragma unroll
            for (int i = 0; i < V; i++) s[u][i] = f(s[u][i], t[u][i]);
            Pack<Y, V>::store(y + at, s[u]);
        } else {
            for (i64 i = at; i < n; i++) y[i] = from_float<Y>(f(to_float(a[i]), to_float(b[i])));
        }
    }
}

// y = f(a)
template <int V, typename A, typename Y, typename F>
__device__ __forceinline__ void map(const A* a, Y* y, i64 n, F f) {
    constexpr int U = 2;
    i64 first = ((i64)blockIdx.x * U * THREADS + threadIdx.x) * V;
    float s[U][V];
#pragma unroll
    for (int u = 0; u < U; u++) {
        i64 at = first + u * THREADS * V;
        if (at + V <= n) Pack<A, V>::load(a + at, s[u]);
    }
#pragma unroll
    for (int u = 0; u < U; u++) {
        i64 at = first + u * THREADS * V;
        if (at + V <= n) {
#pragma unroll
            for (int i = 0; i < V; i++) s[u][i] = f(s[u][i]);
            Pack<Y, V>::store(y + at, s[u]);
        } else {
            for (i64 i = at; i < n; i++) y[i] = from_float<Y>(f(to_float(a[i])));
        }
    }
}

template <typename A, typename B, typename Y>
__global__ void __launch_bounds__(THREADS) add(const A* a, const B* b, Y* y, i64 n) {
    map2<width_of<A, B, Y>()>(a, b, y, n, [](float a, float b) { return a + b; });
}

template <typename X, typename Y>
__global__ void __launch_bounds__(THREADS) scale(const X* x, Y* y, float factor, i64 n) {
    map<width_of<X, X, Y>()>(x, y, n, [factor](float x) { return x * factor; });
}

// V is 1 where one of the two is not aligned.
template <typename X, typename Y, int V> __global__ void __launch_bounds__(THREADS) cast(const X* x, Y* y, i64 n) {
    map<V>(x, y, n, [](float x) { return x; });
}

// ---- GELU ---------------------------------------------------------------------------------------------------------

__device__ __forceinline__ float fast_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float fast_reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

constexpr float SQRT_HALF = 0.70710678f;
constexpr float DENSITY_AT_0 = 0.39894228f;

// Tail of the normal distribution beyond |x|, and e^(-x²/2). Abramowitz and Stegun 7.1.26, to 1e-7: far below the
// rounding of half precision.
__device__ __forceinline__ void normal_tail(float x, float& tail, float& bell) {
    float t = fast_reciprocal(fmaf(0.3275911f * SQRT_HALF, fabsf(x), 1.0f));
    bell = fast_exp2(x * x * -0.72134752f);
    float p = fmaf(t, 0.5f * 1.061405429f, 0.5f * -1.453152027f);
    p = fmaf(t, p, 0.5f * 1.421413741f);
    p = fmaf(t, p, 0.5f * -0.284496736f);
    p = fmaf(t, p, 0.5f * 0.254829592f);
    tail = p * t * bell;
}

// x·Φ(x), as exact as T needs.
template <typename T> __device__ __forceinline__ float gelu_of(float x) {
    float tail, bell;
    normal_tail(x, tail, bell);
    return fmaxf(x, 0.0f) - fabsf(x) * tail;
}
template <> __device__ __forceinline__ float gelu_of<float>(float x) {
    return x * 0.5f * (1.0f + erff(x * SQRT_HALF));
}

// Φ(x) + x·φ(x)
template <typename T> __device__ __forceinline__ float gelu_slope(float x) {
    float tail, bell;
    normal_tail(x, tail, bell);
    float cdf = 0.5f + copysignf(0.5f - tail, x);
    return fmaf(x * DENSITY_AT_0, bell, cdf);
}
template <> __device__ __forceinline__ float gelu_slope<float>(float x) {
    float cdf = 0.5f * (1.0f + erff(x * SQRT_HALF));
    return fmaf(x * DENSITY_AT_0, expf(-0.5f * x * x), cdf);
}

template <typename T> __global__ void __launch_bounds__(THREADS) gelu(const T* x, T* y, i64 n) {
    map<width_of<T, T, T>()>(x, y, n, [](float x) { return gelu_of<T>(x); });
}

// dy and dx may be the same.
template <typename T> __global__ void __launch_bounds__(THREADS) gelu_grad(const T* pre, const T* dy, T* dx, i64 n) {
    map2<width_of<T, T, T>()>(pre, dy, dx, n, [](float pre, float dy) { return dy * gelu_slope<T>(pre); });
}

// ---- sums over rows -----------------------------------------------------------------------------------------------
//
// A block has W vectors of V columns side by side, and THREADS/W rows of a part of `per` rows at a time; a thread reads U of
// its rows before it works on them. The block writes one row of sums. Where there is more than one part, `sum_parts` adds them.

template <typename X, int V, int W, int U>
__global__ void __launch_bounds__(THREADS)
column_sum(const X* x, int rows, int columns, int per, const float* start, float* out) {
    constexpr int LANES = THREADS / W;
    int column = (blockIdx.x * W + threadIdx.x % W) * V;
    int first = blockIdx.y * per + threadIdx.x / W, last = min((int)(blockIdx.y + 1) * per, rows);
    float sum[V] = {};
    for (int row = first; row < last && column < columns; row += U * LANES) {
        float v[U][V] = {};
#pragma unroll
        for (int u = 0; u < U; u++)
            if (row + u * LANES < last) Pack<X, V>::load(x + (i64)(row + u * LANES) * columns + column, v[u]);
#pragma unroll
        for (int u = 0; u < U; u++)
#pragma unroll
            for (int i = 0; i < V; i++) sum[i] += v[u][i];
    }
    write_sums<V, W>(sum, columns, start, out, columns);
}

// dx = dy·gelu'(pre), and its sums over rows. dy and dx may be the same.
template <typename T, int V, int W, int U>
__global__ void __launch_bounds__(THREADS)
gelu_grad_sums(const T* pre, const T* dy, T* dx, int rows, int columns, int per, float* out) {
    constexpr int LANES = THREADS / W;
    int column = (blockIdx.x * W + threadIdx.x % W) * V;
    int first = blockIdx.y * per + threadIdx.x / W, last = min((int)(blockIdx.y + 1) * per, rows);
    float sum[V] = {};
    for (int row = first; row < last && column < columns; row += U * LANES) {
        float x[U][V], d[U][V];
#pragma unroll
        for (int u = 0; u < U; u++) {
            if (row + u * LANES >= last) continue;
            i64 at = (i64)(row + u * LANES) * columns + column;
            Pack<T, V>::load(pre + at, x[u]);
            Pack<T, V>::load(dy + at, d[u]);
        }
#pragma unroll
        for (int u = 0; u < U; u++) {
            if (row + u * LANES >= last) continue;
#pragma unroll
            for (int i = 0; i < V; i++) {
                d[u][i] *= gelu_slope<T>(x[u][i]);
                sum[i] += d[u][i];
            }
            Pack<T, V>::store(dx + (i64)(row + u * LANES) * columns + column, d[u]);
        }
    }
    write_sums<V, W>(sum, columns, nullptr, out, columns);
}

// Some columns of partial sums (rows, stride) that become one sum. The host writes it.
struct PartialSum {
    const float* parts;
    // Initial value of the sum; null is 0.
    const float* start;
    float* out;
    int rows, stride, columns;
    // The block that has its first columns.
    int block;
};

// Columns from which on a sum is wide.
constexpr int WIDE_SUM = 16384;

// Adds up the partial sums of many sums, each row by row in the same order. A block has 32 columns of one of them; of a wide one
// 1024, a thread each.
__global__ void __launch_bounds__(1024) sum_parts(const PartialSum* sums, int count) {
    __shared__ float shared[32][33];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, own = 0;
    for (int i = 1; i < count; i += 32) {
        bool begun = i + lane < count && sums[i + lane].block <= (int)blockIdx.x;
        own += __popc(__ballot_sync(0xffffffffu, begun));
    }
    const PartialSum s = sums[own];
    if (s.columns >= WIDE_SUM) {
        const int column = (blockIdx.x - s.block) * 1024 + threadIdx.x;
        if (column >= s.columns) return;
        float sum = s.start ? s.start[column] : 0.0f;
#pragma unroll 8
        for (int row = 0; row < s.rows; row++) sum += s.parts[(i64)row * s.stride + column];
        s.out[column] = sum;
        return;
    }
    int first = (blockIdx.x - s.block) * 32;
    float sum = 0.0f;
    if (first + lane < s.columns)
#pragma unroll 8
        for (int row = warp; row < s.rows; row += 32) sum += s.parts[(i64)row * s.stride + first + lane];
    shared[warp][lane] = sum;
    __syncthreads();
    // Each warp adds up one column.
    int column = first + warp;
    sum = warp_sum(shared[lane][warp]);
    if (lane > 0 || column >= s.columns) return;
    s.out[column] = s.start ? s.start[column] + sum : sum;
}

// ---- layer norm ---------------------------------------------------------------------------------------------------

// y = layer_norm(x), or with ADD sum = x + r, y = layer_norm(sum).
template <typename X, typename R, typename Y, int C, bool ADD>
__global__ void __launch_bounds__(THREADS)
layer_norm(const X* x, const R* r, const float* gamma, const float* beta, X* sum, Y* y, float* mean, float* rstd, int rows,
           float eps) {
    constexpr int LANES = lanes_of(C, 16);
    using S = Slice<C, LANES>;
    constexpr int V = S::V;
    int row = blockIdx.x * (THREADS / LANES) + threadIdx.x / LANES;
    bool here = row < rows;
    i64 base = (i64)row * C;

    float v[S::VECTORS][V] = {};
#pragma unroll
    for (int k = 0; k < S::VECTORS; k++)
        if (here && S::has(k)) Pack<X, V>::load(x + base + S::column(k), v[k]);
    if constexpr (ADD) {
        float w[S::VECTORS][V] = {};
#pragma unroll
        for (int k = 0; k < S::VECTORS; k++)
            if (here && S::has(k)) Pack<R, V>::load(r + base + S::column(k), w[k]);
#pragma unroll
        for (int k = 0; k < S::VECTORS; k++) {
            // Normalises the rounded sum, since the backward pass reads no other.
#pragma unroll
            for (int i = 0; i < V; i++) v[k][i] = to_float(from_float<X>(v[k][i] + w[k][i]));
            if (here && S::has(k)) Pack<X, V>::store(sum + base + S::column(k), v[k]);
        }
    }

    float total[1] = {};
#pragma unroll
    for (int k = 0; k < S::VECTORS; k++)
#pragma unroll
        for (int i = 0; i < V; i++) total[0] += v[k][i];
    row_sums<LANES>(total);
    float m = total[0] * (1.0f / C);

    // A second pass, since E[x²] - E[x]² cancels.
    float squares[1] = {};
#pragma unroll
    for (int k = 0; k < S::VECTORS; k++)
#pragma unroll
        for (int i = 0; i < V; i++)
            if (S::has(k)) squares[0] += (v[k][i] - m) * (v[k][i] - m);
    row_sums<LANES>(squares);
    float s = 1.0f / sqrtf(squares[0] * (1.0f / C) + eps);

    if (here && threadIdx.x % LANES == 0) {
        mean[row] = m;
        rstd[row] = s;
    }
#pragma unroll
    for (int k = 0; k < S::VECTORS; k++) {
        if (!here || !S::has(k)) continue;
        float g[V], b[V];
        Pack<float, V>::load(gamma + S::column(k), g);
        Pack<float, V>::load(beta + S::column(k), b);
#pragma unroll
        for (int i = 0; i < V; i++) v[k][i] = fmaf((v[k][i] - m) * s, g[i], b[i]);
        Pack<Y, V>::store(y + base + S::column(k), v[k]);
    }
}

// dx = the gradient through layer_norm (with ADD, plus `more`), with HALF once more as H; a row of partial sums (dgamma,
// dbeta, with SUM those of dx) for each block.
template <typename X, typename DY, typename H, int C, bool ADD, bool HALF, bool SUM>
__global__ void __launch_bounds__(THREADS, 2)
layer_norm_grad(const X* x, const float* mean, const float* rstd, const float* gamma, const DY* dy, const X* more, X* dx,
                H* half, float* parts, int rows) {
    constexpr int LANES = lanes_of(C, backward_columns(C)), GROUPS = THREADS / LANES, SUMS = SUM ? 3 : 2;
    using S = Slice<C, LANES>;
    constexpr int V = S::V;
    // Registers don't hold the sums of dx beside the others. A thread keeps its own in shared memory, if that does.
    constexpr bool ASIDE = SUM && (GROUPS + 1) * C * 4 <= 48 << 10;
    // First gamma, in the end the partial sums of the groups.
    __shared__ __align__(16) float shared[(GROUPS + ASIDE) * C];
    for (int i = threadIdx.x; i < C; i += THREADS) shared[i] = gamma[i];
    int group = threadIdx.x / LANES;
    float* aside = shared + C + group * C;
    if constexpr (ASIDE) {
        float zero[V] = {};
#pragma unroll
        for (int k = 0; k < S::VECTORS; k++)
            if (S::has(k)) Pack<float, V>::store(aside + S::column(k), zero);
    }
    __syncthreads();

    struct Row {
        float v[S::VECTORS][V], d[S::VECTORS][V], a[S::VECTORS][V], m, s;
    };
    auto read = [&](int row, Row& to) {
        to = {};
        if (row >= rows) return;
        i64 base = (i64)row * C;
#pragma unroll
        for (int k = 0; k < S::VECTORS; k++)
            if (S::has(k)) Pack<X, V>::load(x + base + S::column(k), to.v[k]);
#pragma unroll
        for (int k = 0; k < S::VECTORS; k++)
            if (S::has(k)) Pack<DY, V>::load(dy + base + S::column(k), to.d[k]);
        if constexpr (ADD) {
#pragma unroll
            for (int k = 0; k < S::VECTORS; k++)
                if (S::has(k)) Pack<X, V>::load(more + base + S::column(k), to.a[k]);
        }
        to.m = mean[row], to.s = rstd[row];
    };
    // The next row is loaded while this one is computed, where registers hold both.
    constexpr bool AHEAD = S::VECTORS * V <= 12;
    Row next;
    if constexpr (AHEAD) read(blockIdx.x * GROUPS + group, next);

    float column_sums[ASIDE ? 2 : SUMS][S::VECTORS][V] = {};
    float (&dgamma)[S::VECTORS][V] = column_sums[0], (&dbeta)[S::VECTORS][V] = column_sums[1];
    for (int first = blockIdx.x * GROUPS; first < rows; first += gridDim.x * GROUPS) {
        int row = first + group;
        bool here = row < rows;
        i64 base = (i64)row * C;
        Row now;
        if constexpr (AHEAD) {
            now = next;
            read(row + gridDim.x * GROUPS, next);
        } else {
            read(row, now);
        }
        float (&v)[S::VECTORS][V] = now.v, (&d)[S::VECTORS][V] = now.d, (&a)[S::VECTORS][V] = now.a;
        float m = now.m, s = now.s;

        // v becomes x̂, d becomes dy·gamma.
        float sums[2] = {};
#pragma unroll
        for (int k = 0; k < S::VECTORS; k++) {
            float g[V] = {};
            if (S::has(k)) Pack<float, V>::load(shared + S::column(k), g);
#pragma unroll
            for (int i = 0; i < V; i++) {
                v[k][i] = (v[k][i] - m) * s;
                dgamma[k][i] = fmaf(d[k][i], v[k][i], dgamma[k][i]);
                dbeta[k][i] += d[k][i];
                d[k][i] *= g[i];
                sums[0] += d[k][i];
                sums[1] = fmaf(d[k][i], v[k][i], sums[1]);
            }
        }
        row_sums<LANES>(sums);
        float g_mean = sums[0] * (1.0f / C), gx_mean = sums[1] * (1.0f / C);
#pragma unroll
        for (int k = 0; k < S::VECTORS; k++) {
            if (!here || !S::has(k)) continue;
#pragma unroll
            for (int i = 0; i < V; i++) v[k][i] = fmaf(s, d[k][i] - g_mean - v[k][i] * gx_mean, a[k][i]);
            Pack<X, V>::store(dx + base + S::column(k), v[k]);
            if constexpr (HALF) Pack<H, V>::store(half + base + S::column(k), v[k]);
            if constexpr (ASIDE) {
                float sum[V];
                Pack<float, V>::load(aside + S::column(k), sum);
#pragma unroll
                for (int i = 0; i < V; i++) sum[i] += v[k][i];
                Pack<float, V>::store(aside + S::column(k), sum);
            } else if constexpr (SUM) {
#pragma unroll
                for (int i = 0; i < V; i++) column_sums[SUMS - 1][k][i] += v[k][i];
            }
        }
    }

    // The groups' sums, added in order.
    auto add_up = [&](const float* sums, int of) {
        __syncthreads();
        for (int column = threadIdx.x; column < C; column += THREADS) {
            float sum = 0.0f;
#pragma unroll 8
            for (int g = 0; g < GROUPS; g++) sum += sums[g * C + column];
            parts[((i64)blockIdx.x * SUMS + of) * C + column] = sum;
        }
    };
    if constexpr (ASIDE) add_up(shared + C, 2);
#pragma unroll
    for (int of = 0; of < (ASIDE ? 2 : SUMS); of++) {
        __syncthreads();
#pragma unroll
        for (int k = 0; k < S::VECTORS; k++)
            if (S::has(k)) Pack<float, V>::store(shared + group * C + S::column(k), column_sums[of][k]);
        add_up(shared, of);
    }
}

// ---- dropout ------------------------------------------------------------------------------------------------------

// A draw for every element; a sample has `tokens` rows of C.
template <typename X, typename Y, int C>
__global__ void __launch_bounds__(THREADS)
drop_elements(const X* x, Y* y, const Header* header, i64 rows, int tokens, u32 site, u32 threshold, float kept) {
    constexpr int V = vector_of(C);
    i64 vector = (i64)blockIdx.x * THREADS + threadIdx.x;
    i64 row = vector / (C / V);
    if (row >= rows) return;
    u32 channel = (u32)(vector % (C / V)) * V;
    float v[V];
    Pack<X, V>::load(x + vector * V, v);
    Stream stream(header, site, (u64)row / tokens);
    uint4 drawn = stream.words((u32)((u64)row % tokens), channel / 4);
    u32 words[4] = {drawn.x, drawn.y, drawn.z, drawn.w};
    if constexpr (V == 4) {
#pragma unroll
        for (int i = 0; i < 4; i++) v[i] = words[i] < threshold ? 0.0f : v[i] * kept;
    } else {
        u32 part = channel % 4;
        u32 word = part == 0 ? drawn.x : part == 1 ? drawn.y : part == 2 ? drawn.z : drawn.w;
        v[0] = word < threshold ? 0.0f : v[0] * kept;
    }
    Pack<Y, V>::store(y + vector * V, v);
}

// A draw for every sample of `size` elements. The grid is (samples, pieces).
template <typename X, typename Y, int V>
__global__ void __launch_bounds__(THREADS)
drop_samples(const X* x, Y* y, const Header* header, i64 size, u32 site, u32 threshold, float kept) {
    i64 at = ((i64)blockIdx.y * THREADS + threadIdx.x) * V;
    if (at >= size) return;
    at += blockIdx.x * size;
    float v[V];
    Pack<X, V>::load(x + at, v);
    bool dropped = Stream(header, site, blockIdx.x).words(0, 0).x < threshold;
#pragma unroll
    for (int i = 0; i < V; i++) v[i] = dropped ? 0.0f : v[i] * kept;
    Pack<Y, V>::store(y + at, v);
}
