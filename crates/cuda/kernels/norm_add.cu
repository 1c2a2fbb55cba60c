// The residual after a norm, out = shortcut + keep·norm(y), and its gradient. All arithmetic is in f32.
//
// Legend: rows M, columns C. Y is the type of the branch, S and O those of the residual stream before and after.
#include "norm.cuh"

// Factor of the norm of a row's sample: 0, or 1/(1-rate), which is `kept`.
template <bool DROP>
__device__ __forceinline__ float path_factor(const Header* header, int row, int sample_rows, u32 site, u32 threshold, float kept) {
    if constexpr (!DROP) return 1.0f;
    return Stream(header, site, row / sample_rows).words(0, 0).x < threshold ? 0.0f : kept;
}

// With HALF, out once more as H.
template <typename Y, typename S, typename O, typename H, int C, bool DROP, bool HALF>
__global__ void __launch_bounds__(THREADS)
norm_add(const Y* y, const S* shortcut, const float* gamma, const float* beta, O* out, H* half, float* mean, float* rstd,
         int rows, float eps, const Header* header, int sample_rows, u32 site, u32 threshold, float kept) {
    constexpr int LANES = lanes_of(C, 16);
    using L = Slice<C, LANES>;
    constexpr int V = L::V;
    const int row = blockIdx.x * (THREADS / LANES) + threadIdx.x / LANES;
    const bool here = row < rows;
    const i64 base = (i64)row * C;

    float v[L::VECTORS][V] = {}, r[L::VECTORS][V] = {};
#pragma unroll
    for (int k = 0; k < L::VECTORS; k++)
        if (here && L::has(k)) Pack<Y, V>::load(y + base + L::column(k), v[k]);
#pragma unroll
    for (int k = 0; k < L::VECTORS; k++)
        if (here && L::has(k)) Pack<S, V>::load(shortcut + base + L::column(k), r[k]);

    float total[1] = {};
#pragma unroll
    for (int k = 0; k < L::VECTORS; k++)
#pragma unroll
        for (int i = 0; i < V; i++) total[0] += v[k][i];
    row_sums<LANES>(total);
    const float m = total[0] * (1.0f / C);
    // A second pass, since E[x²] - E[x]² cancels.
    float squares[1] = {};
#pragma unroll
    for (int k = 0; k < L::VECTORS; k++)
#pragma unroll
        for (int i = 0; i < V; i++)
            if (L::has(k)) squares[0] += (v[k][i] - m) * (v[k][i] - m);
    row_sums<LANES>(squares);
    const float s = 1.0f / sqrtf(squares[0] * (1.0f / C) + eps);

    if (!here) return;
    if (threadIdx.x % LANES == 0) {
        mean[row] = m;
        rstd[row] = s;
    }
    const float factor = path_factor<DROP>(header, row, sample_rows, site, threshold, kept);
#pragma unroll
    for (int k = 0; k < L::VECTORS; k++) {
        if (!L::has(k)) continue;
        float g[V], b[V];
        Pack<float, V>::load(gamma + L::column(k), g);
        Pack<float, V>::load(beta + L::column(k), b);
#pragma unroll
        for (int i = 0; i < V; i++) v[k][i] = fmaf(fmaf((v[k][i] - m) * s, g[i], b[i]), factor, r[k][i]);
        Pack<O, V>::store(out + base + L::column(k), v[k]);
        if constexpr (HALF) Pack<H, V>::store(half + base + L::column(k), v[k]);
    }
}

// dy, and a row of partial sums (dgamma, dbeta) for each block. D is the type of dout, that of the stream.
template <typename Y, typename D, int C, bool DROP>
__global__ void __launch_bounds__(THREADS, 2)
norm_add_grad(const Y* y, const float* mean, const float* rstd, const float* gamma, const D* dout, Y* dy, float* parts, int rows,
              const Header* header, int sample_rows, u32 site, u32 threshold, float kept) {
    constexpr int LANES = lanes_of(C, backward_columns(C)), GROUPS = THREADS / LANES, SUMS = 2;
    using L = Slice<C, LANES>;
    constexpr int V = L::V;
    // First gamma, in the end the partial sums of the groups.
    __shared__ __align__(16) float shared[GROUPS * C];
    for (int i = threadIdx.x; i < C; i += THREADS) shared[i] = gamma[i];
    const int group = threadIdx.x / LANES;
    __syncthreads();

    float column_sums[SUMS][L::VECTORS][V] = {};
    for (int first = blockIdx.x * GROUPS; first < rows; first += gridDim.x * GROUPS) {
        const int row = first + group;
        const bool here = row < rows;
        const i64 base = (i64)row * C;
        float v[L::VECTORS][V] = {}, d[L::VECTORS][V] = {};
#pragma unroll
        for (int k = 0; k < L::VECTORS; k++)
            if (here && L::has(k)) Pack<Y, V>::load(y + base + L::column(k), v[k]);
#pragma unroll
        for (int k = 0; k < L::VECTORS; k++)
            if (here && L::has(k)) Pack<D, V>::load(dout + base + L::column(k), d[k]);
        const float m = here ? mean[row] : 0.0f, s = here ? rstd[row] : 0.0f;
        const float factor = path_factor<DROP>(header, here ? row : 0, sample_rows, site, threshold, kept);

        // v becomes ŷ, d becomes dout·factor·gamma.
        float sums[2] = {};
#pragma unroll
        for (int k = 0; k < L::VECTORS; k++) {
            float g[V] = {};
            if (L::has(k)) Pack<float, V>::load(shared + L::column(k), g);
#pragma unroll
            for (int i = 0; i < V; i++) {
                v[k][i] = (v[k][i] - m) * s;
                d[k][i] *= factor;
                column_sums[0][k][i] = fmaf(d[k][i], v[k][i], column_sums[0][k][i]);
                column_sums[1][k][i] += d[k][i];
                d[k][i] *= g[i];
                sums[0] += d[k][i];
                sums[1] = fmaf(d[k][i], v[k][i], sums[1]);
            }
        }
        row_sums<LANES>(sums);
        const float g_mean = sums[0] * (1.0f / C), gx_mean = sums[1] * (1.0f / C);
#pragma unroll
        for (int k = 0; k < L::VECTORS; k++) {
            if (!here || !L::has(k)) continue;
#pragma unroll
            for (int i = 0; i < V; i++) v[k][i] = s * (d[k][i] - g_mean - v[k][i] * gx_mean);
            Pack<Y, V>::store(dy + base + L::column(k), v[k]);
        }
    }

    // The groups' sums, added in order.
#pragma unroll
    for (int of = 0; of < SUMS; of++) {
        __syncthreads();
#pragma unroll
        for (int k = 0; k < L::VECTORS; k++)
            if (L::has(k)) Pack<float, V>::store(shared + group * C + L::column(k), column_sums[of][k]);
        __syncthreads();
        for (int column = threadIdx.x; column < C; column += THREADS) {
            float sum = 0.0f;
#pragma unroll 8
            for (int g = 0; g < GROUPS; g++) sum += shared[g * C + column];
            parts[((i64)blockIdx.x * SUMS + of) * C + column] = sum;
        }
    }
}
