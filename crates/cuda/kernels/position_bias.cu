// The continuous position bias: a small network from the offset between two tokens of a window to one number a head, spread over all pairs
// of tokens; and its gradients. All in f32.
//
// Legend: N width of the hidden layer, H heads, T tokens of a window, K offsets between them. As graph::windows::Offsets has them.
#include "common.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32;

// Offsets in a window of ROWS×COLUMNS, measured against the window of pre-training.
template <int ROWS, int COLUMNS> struct Offsets {
    static constexpr int T = ROWS * COLUMNS, ACROSS = 2 * COLUMNS - 1, K = (2 * ROWS - 1) * ACROSS;

    static __device__ __forceinline__ float coordinate(int apart, int side, int pretrained) {
        float scaled = (float)(apart - (side - 1)) / (float)max(pretrained - 1, 1) * 8.0f;
        return copysignf(log2f(fabsf(scaled) + 1.0f) / 3.0f, scaled);
    }
    static __device__ __forceinline__ float2 coordinates(int number, int pretrained_rows, int pretrained_columns) {
        return make_float2(coordinate(number / ACROSS, ROWS, pretrained_rows),
                           coordinate(number % ACROSS, COLUMNS, pretrained_columns));
    }
};

__device__ __forceinline__ float hidden(float2 w, float b, float2 at) {
    return fmaxf(fmaf(w.x, at.x, fmaf(w.y, at.y, b)), 0.0f);
}

// 16·sigmoid(w2·hidden), by a warp.
__device__ __forceinline__ float bias_of(const float2* w1, const float* b1, const float* w2, int n, float2 at) {
    float z = 0.0f;
    for (int c = threadIdx.x % 32; c < n; c += 32) z = fmaf(hidden(w1[c], b1[c], at), w2[c], z);
    return 16.0f / (1.0f + expf(-warp_sum(z)));
}

// A block has the queries of one row of a window, for one head. Grid: (H, ROWS).
template <int ROWS, int COLUMNS>
__global__ void __launch_bounds__(THREADS)
position_bias(const float* w1, const float* b1, const float* w2, float* bias, int n, int pretrained_rows, int pretrained_columns) {
    using O = Offsets<ROWS, COLUMNS>;
    // Of the offsets that these queries have: ROWS of rows, all of columns.
    __shared__ float table[ROWS * O::ACROSS];
    const int h = blockIdx.x, row = blockIdx.y, warp = threadIdx.x / 32;
    for (int i = warp; i < ROWS * O::ACROSS; i += WARPS) {
        float2 at = O::coordinates(row * O::ACROSS + i, pretrained_rows, pretrained_columns);
        float value = bias_of(reinterpret_cast<const float2*>(w1), b1, w2 + (i64)h * n, n, at);
        if (threadIdx.x % 32 == 0) table[i] = value;
    }
    __syncthreads();
    bias += ((i64)h * O::T + row * COLUMNS) * O::T;
    for (int i = threadIdx.x; i < COLUMNS * O::T; i += THREADS) {
        int query = i / O::T, key = i % O::T;
        int rows_apart = ROWS - 1 - key / COLUMNS, columns_apart = query + COLUMNS - 1 - key % COLUMNS;
        bias[i] = table[rows_apart * O::ACROSS + columns_apart];
    }
}

// dtable (H,K): the sum of dbias over all pairs of an offset, through 16·sigmoid. A warp has one offset of one head. Grid: (H, ⌈K/8⌉).
template <int ROWS, int COLUMNS>
__global__ void __launch_bounds__(THREADS)
position_bias_grad_table(const float* w1, const float* b1, const float* w2, const float* dbias, float* dtable, int n,
                         int pretrained_rows, int pretrained_columns) {
    using O = Offsets<ROWS, COLUMNS>;
    const int h = blockIdx.x, number = blockIdx.y * WARPS + threadIdx.x / 32;
    if (number >= O::K) return;
    // Queries of these pairs are a rectangle of the window; keys lie that much further.
    const int down = number / O::ACROSS - (ROWS - 1), right = number % O::ACROSS - (COLUMNS - 1);
    const int rows = ROWS - abs(down), columns = COLUMNS - abs(right);
    const int first_row = max(down, 0), first_column = max(right, 0);
    dbias += (i64)h * O::T * O::T;
    float sum = 0.0f;
    for (int i = threadIdx.x % 32; i < rows * columns; i += 32) {
        int row = first_row + i / columns, column = first_column + i % columns;
        int query = row * COLUMNS + column, key = (row - down) * COLUMNS + column - right;
        sum += dbias[query * O::T + key];
    }
    sum = warp_sum(sum);
    float2 at = O::coordinates(number, pretrained_rows, pretrained_columns);
    float value = bias_of(reinterpret_cast<const float2*>(w1), b1, w2 + (i64)h * n, n, at);
    if (threadIdx.x % 32 == 0) dtable[(i64)h * O::K + number] = sum * value * (1.0f - value * (1.0f / 16.0f));
}

// A block has 32 channels of the hidden layer, and for y < H the gradient of head y's weights, for y = H that of the first layer. Its warps
// share the offsets, and their sums are added in order. Grid: (⌈N/32⌉, H+1).
template <int ROWS, int COLUMNS>
__global__ void __launch_bounds__(THREADS)
position_bias_grad(const float* w1, const float* b1, const float* w2, const float* dtable, float* dw1, float* db1, float* dw2,
                   int n, int heads, int pretrained_rows, int pretrained_columns) {
    using O = Offsets<ROWS, COLUMNS>;
    __shared__ float sums[WARPS][3][32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, channel = blockIdx.x * 32 + lane, h = blockIdx.y;
    const bool there = channel < n;
    const float2 w = there ? reinterpret_cast<const float2*>(w1)[channel] : make_float2(0.0f, 0.0f);
    const float b = there ? b1[channel] : 0.0f;
    float sum[3] = {};
    for (int k = warp; k < O::K; k += WARPS) {
        float2 at = O::coordinates(k, pretrained_rows, pretrained_columns);
        float x = hidden(w, b, at);
        if (h < heads) {
            sum[0] = fmaf(dtable[(i64)h * O::K + k], x, sum[0]);
            continue;
        }
        float d = 0.0f;
        for (int i = 0; i < heads; i++) d = fmaf(dtable[(i64)i * O::K + k], there ? w2[(i64)i * n + channel] : 0.0f, d);
        d = x > 0.0f ? d : 0.0f;
        sum[0] = fmaf(d, at.x, sum[0]);
        sum[1] = fmaf(d, at.y, sum[1]);
        sum[2] += d;
    }
#pragma unroll
    for (int i = 0; i < 3; i++) sums[warp][i][lane] = sum[i];
    __syncthreads();
    if (warp > 0 || !there) return;
#pragma unroll
    for (int i = 0; i < 3; i++) {
        float all = 0.0f;
#pragma unroll
        for (int from = 0; from < WARPS; from++) all += sums[from][i][lane];
        sum[i] = all;
    }
    if (h < heads) {
        dw2[(i64)h * n + channel] = sum[0];
        return;
    }
    dw1[2 * channel] = sum[0];
    dw1[2 * channel + 1] = sum[1];
    db1[channel] = sum[2];
}
