// Cross-entropy of pixels whose logits (B,h,w,K) are resized on the way, bilinearly: what is resized is never in memory. As loss.cu
// has it otherwise. These take any sizes; resized_loss_cells.cu has those for logits that are enlarged.
//
// Legend: results are the pixels that have labels, (B,h',w').
#include "common.cuh"
#include "axis.cuh"
#include "loss.cuh"

// Σ weight · (loss, 1, top-1 hit, top-5 hit) over every gridDim.x-th group of results, to one line of parts (blocks, 4); and the
// log-sum-exp of each result. A warp for each, which has at most 32·N classes in registers. Results without weight may have any
// label.
template <typename L, int N>
__global__ void __launch_bounds__(THREADS)
resized_loss(const L* logits, const int* labels, const float* weights, float* lse, double* parts, int samples, int height,
             int width, int out_height, int out_width, int classes, float smoothing) {
    const float infinity = __int_as_float(0x7f800000);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Axis down(height, out_height, 0), across(width, out_width, 0);
    int results = samples * out_height * out_width;
    double sums[4] = {};
    for (int at = blockIdx.x * WARPS + warp; at < results; at += gridDim.x * WARPS) {
        float weight = weights[at];
        if (weight == 0.0f) {
            if (lane == 0) lse[at] = 0.0f;
            continue;
        }
        int row = at / out_width % out_height, sample = at / out_width / out_height;
        Between rows(down, row), columns(across, at % out_width);
        const L* image = logits + (i64)sample * height * width * classes;
        const L* corners[4];
        for (int i = 0; i < 4; i++) {
            int y = i < 2 ? rows.first : rows.next(down), x = i % 2 == 0 ? columns.first : columns.next(across);
            corners[i] = image + ((i64)y * width + x) * classes;
        }
        float x[N], max = -infinity;
#pragma unroll
        for (int n = 0; n < N; n++) {
            int k = 32 * n + lane;
            x[n] = -infinity;
            if (k >= classes) continue;
            float top = mix(to_float(corners[0][k]), to_float(corners[1][k]), columns.share);
            float bottom = mix(to_float(corners[2][k]), to_float(corners[3][k]), columns.share);
            x[n] = mix(top, bottom, rows.share);
        }
#pragma unroll
        for (int n = 0; n < N; n++) max = fmaxf(max, x[n]);
        max = warp_max(max);
        int label = labels[at], rank = classes - 1, before = 0;
        float sum = 0.0f, total = 0.0f, own = 0.0f;
#pragma unroll
        for (int n = 0; n < N; n++) {
            int k = 32 * n + lane;
            if (k < classes) {
                sum += expf(x[n] - max);
                total += x[n] - max;
            }
            if (label / 32 == n) own = x[n];
        }
        sum = warp_sum(sum);
        own = __shfl_sync(0xffffffffu, own, label % 32);
#pragma unroll
        for (int n = 0; n < N; n++) {
            int k = 32 * n + lane;
            bool first = k < classes && (x[n] > own || (x[n] == own && k < label));
            before += __popc(__ballot_sync(0xffffffffu, first));
        }
        float expected = own - max;
        if (smoothing != 0.0f) expected = (1.0f - smoothing) * expected + smoothing * (warp_sum(total) / classes);
        float loss = logf(sum) - expected;
        // A label that is no class has no loss.
        if ((u32)label >= (u32)classes) loss = __int_as_float(0x7fc00000);
        // NaN among the logits is in the sum too.
        if (loss == loss) rank = before;
        if (lane == 0) lse[at] = max + logf(sum);
        add_row(sums, weight, loss, rank);
    }
    __shared__ double of_warps[WARPS][4];
    if (lane < 4) of_warps[warp][lane] = lane == 0 ? sums[0] : lane == 1 ? sums[1] : lane == 2 ? sums[2] : sums[3];
    add_warps(of_warps, threadIdx.x, parts);
}

// Values of a result that a thread of the gradient needs, beside its row's.
struct Result {
    // Of the gradient, all but the softmax; log-sum-exp, in powers of two; the share of the next pixel.
    float factor, lse, share;
    // The label, and whether the result lies before the block's pixel.
    int label_and_side;
};

constexpr float LOG2_E = 1.44269504f;
// Results of a row that a block looks at together.
constexpr int CHUNK = 64;

// dlogits (B,h,w,K): for each pixel of the logits, the results that it is part of, in order. A block has one pixel, a thread one of
// its classes. All that these results are made of are the pixel and its eight neighbours, which a thread has in registers.
template <typename L, typename D>
__global__ void __launch_bounds__(1024)
resized_loss_grad(const L* logits, const int* labels, const float* weights, const float* lse, const float* dloss,
                  const Header* header, D* dlogits, int height, int width, int out_height, int out_width, int classes,
                  float smoothing) {
    __shared__ __align__(16) Result results[CHUNK];
    int pixel = blockIdx.x % width, row = blockIdx.x / width % height, sample = blockIdx.x / width / height;
    int k = threadIdx.x;
    Axis down(height, out_height, 0), across(width, out_width, 0);
    float near[3][3] = {};
    for (int y = 0; y < 3; y++)
        for (int x = 0; x < 3; x++) {
            int of_row = min(max(row + y - 1, 0), height - 1), of_pixel = min(max(pixel + x - 1, 0), width - 1);
            i64 at = (((i64)sample * height + of_row) * width + of_pixel) * classes + k;
            if (k < classes) near[y][x] = to_float(logits[at]) * LOG2_E;
        }
    int top, bottom, left, right;
    down.results(row, top, bottom);
    across.results(pixel, left, right);
    double of_weight = (double)dloss[0] / header->nominal;
    float spread = smoothing / classes, sharp = 1.0f - smoothing, sum = 0.0f;
    for (int o = top; o < bottom; o++) {
        Between rows(down, o);
        bool above = rows.first < row;
        float of_row = Weights(down, o).of(row), column[3];
#pragma unroll
        for (int x = 0; x < 3; x++)
            column[x] = mix(above ? near[0][x] : near[1][x], above ? near[1][x] : near[2][x], rows.share);
        float before = column[1] - column[0], after = column[2] - column[1];
        i64 start = ((i64)sample * out_height + o) * out_width;
        for (int first = left; first < right; first += CHUNK) {
            int count = min(CHUNK, right - first);
            __syncthreads();
            for (int i = threadIdx.x; i < count; i += blockDim.x) {
                Between columns(across, first + i);
                i64 at = start + first + i;
                Result result;
                result.factor = (float)(of_weight * weights[at]) * of_row * Weights(across, first + i).of(pixel);
                result.lse = lse[at] * LOG2_E;
                result.share = columns.share;
                result.label_and_side = 2 * labels[at] + (columns.first < pixel);
                results[i] = result;
            }
            __syncthreads();
#pragma unroll 4
            for (int i = 0; i < count; i++) {
                Result result = results[i];
                if (result.factor == 0.0f) continue;
                bool side = result.label_and_side & 1;
                float x = fmaf(result.share, side ? before : after, side ? column[0] : column[1]);
                float wanted = result.label_and_side >> 1 == k ? sharp + spread : spread;
                sum = fmaf(result.factor, exp2f(x - result.lse) - wanted, sum);
            }
        }
    }
    if (k < classes) dlogits[(i64)blockIdx.x * classes + k] = from_float<D>(sum);
}
