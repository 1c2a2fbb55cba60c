// Cross-entropy with PyTorch's label smoothing: the target is (1-ε)·onehot + ε/K, where a mixed sample has two labels that
// share the one. A warp for each row of K logits.
#include "loss.cuh"

// Target of a row: `mix` of the label and 1 - `mix` of its partner.
struct Target {
    int label, partner;
    float mix;

    __device__ __forceinline__ Target(const int* labels, const int* partners, const float* mixes, int row) {
        label = labels[row];
        partner = partners ? partners[row] : label;
        mix = partners ? mixes[row] : 1.0f;
    }
    __device__ __forceinline__ bool within(int classes) const {
        return (u32)label < (u32)classes && (u32)partner < (u32)classes;
    }
    // The class with the larger share, which is what a hit is.
    __device__ __forceinline__ int main() const { return mix < 0.5f ? partner : label; }
    __device__ __forceinline__ float share(int k) const {
        return (k == label ? mix : 0.0f) + (k == partner ? 1.0f - mix : 0.0f);
    }
};

// The logits' max, and Σ exp(logit - max).
template <typename L> __device__ __forceinline__ void softmax_of(const L* logits, int classes, float& max, float& sum) {
    int lane = threadIdx.x % 32;
    max = __int_as_float(0xff800000);
#pragma unroll 8
    for (int k = lane; k < classes; k += 32) max = fmaxf(max, to_float(logits[k]));
    max = warp_max(max);
    sum = 0.0f;
#pragma unroll 8
    for (int k = lane; k < classes; k += 32) sum += expf(to_float(logits[k]) - max);
    sum = warp_sum(sum);
}

// The loss, and how many classes rank before the main label: those of a greater logit, or of an equal one and a lower index.
// NaN among the logits makes the loss NaN and ranks the label last; so does a label that is no class.
template <typename L>
__device__ __forceinline__ void row_loss(const L* logits, int classes, Target target, float smoothing, float& loss, int& rank) {
    loss = __int_as_float(0x7fc00000);
    rank = classes - 1;
    if (!target.within(classes)) return;
    float max, sum;
    softmax_of(logits, classes, max, sum);

    int lane = threadIdx.x % 32, label = target.main();
    float at_label = to_float(logits[label]), total = 0.0f, before = 0.0f;
    bool nan = false;
#pragma unroll 8
    for (int k = lane; k < classes; k += 32) {
        float x = to_float(logits[k]);
        total += x - max;
        before += x > at_label || (x == at_label && k < label) ? 1.0f : 0.0f;
        nan |= x != x;
    }
    total = warp_sum(total);
    before = warp_sum(before);
    if (__any_sync(0xffffffffu, nan)) return;

    // A logit without a share must not take part: 0·∞ would make NaN of a masked class. Without smoothing, nor must the mean.
    float expected = 0.0f;
    if (target.mix != 0.0f) expected += target.mix * (to_float(logits[target.label]) - max);
    if (target.mix != 1.0f) expected += (1.0f - target.mix) * (to_float(logits[target.partner]) - max);
    if (smoothing != 0.0f) expected = (1.0f - smoothing) * expected + smoothing * (total / classes);
    loss = logf(sum) - expected;
    rank = (int)before;
}

// Adds the sums of a block's warps, which all lanes have, in order: one line of parts (blocks, 4).
__device__ __forceinline__ void write_part(const double (&sums)[4], double* parts) {
    __shared__ double of_warps[WARPS][4];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (lane < 4) of_warps[warp][lane] = lane == 0 ? sums[0] : lane == 1 ? sums[1] : lane == 2 ? sums[2] : sums[3];
    add_warps(of_warps, threadIdx.x, parts);
}

// Σ weight · (loss, 1, top-1 hit, top-5 hit) over every gridDim.x-th group of rows, to one line of parts (blocks, 4).
// Rows without weight may hold anything. partners and mixes are null if nothing is mixed.
template <typename L>
__global__ void __launch_bounds__(THREADS)
cross_entropy(const L* logits, const int* labels, const float* weights, const int* partners, const float* mixes, double* parts,
              int rows, int classes, float smoothing) {
    int warp = threadIdx.x / 32;
    double sums[4] = {};
    for (i64 row = (i64)blockIdx.x * WARPS + warp; row < rows; row += (i64)gridDim.x * WARPS) {
        float weight = weights[row];
        if (weight == 0.0f) continue;
        float loss;
        int rank;
        row_loss(logits + row * classes, classes, Target(labels, partners, mixes, row), smoothing, loss, rank);
        add_row(sums, weight, loss, rank);
    }
    write_part(sums, parts);
}

// Adds the parts in order. One block; each of four warps has one of the sums.
__global__ void __launch_bounds__(THREADS)
cross_entropy_sums(const double* parts, int count, const Header* header, float* loss, float* stats) {
    int of = threadIdx.x / 32, lane = threadIdx.x % 32;
    double sum = 0.0;
#pragma unroll 8
    for (int part = lane; part < count; part += 32) sum += parts[part * 4 + of];
#pragma unroll
    for (int i = 16; i > 0; i /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, i);
    if (lane > 0) return;
    stats[of] = (float)sum;
    if (of == 0) loss[0] = (float)(sum / header->nominal);
}

// dlogits = dloss · weight / nominal · (softmax(logits) - target); 0 in rows without weight.
template <typename L, typename D>
__global__ void __launch_bounds__(THREADS)
cross_entropy_grad(const L* logits, const int* labels, const float* weights, const int* partners, const float* mixes,
                   const float* dloss, const Header* header, D* dlogits, int rows, int classes, float smoothing) {
    int row = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    logits += (i64)row * classes;
    dlogits += (i64)row * classes;
    float weight = weights[row];
    if (weight == 0.0f) {
        for (int k = lane; k < classes; k += 32) dlogits[k] = from_float<D>(0.0f);
        return;
    }
    float max, sum;
    softmax_of(logits, classes, max, sum);
    Target target(labels, partners, mixes, row);
    float factor = (float)((double)dloss[0] * weight / header->nominal);
    float inverse = 1.0f / sum, spread = smoothing / classes;
#pragma unroll 4
    for (int k = lane; k < classes; k += 32) {
        float wanted = spread + (1.0f - smoothing) * target.share(k);
        dlogits[k] = from_float<D>(factor * (expf(to_float(logits[k]) - max) * inverse - wanted));
    }
}

// ---- pixels -------------------------------------------------------------------------------------------------------
//
// Kernels for many rows with one label and at most 32·N classes each: a row is read once, into a warp's registers.

// A row's logits, its max, and exp(logit - max) with their sum.
template <typename L, int N> struct Pixel {
    float x[N], e[N], max, sum;
    __device__ __forceinline__ Pixel(const L* logits, int classes) {
        int lane = threadIdx.x % 32;
        max = __int_as_float(0xff800000);
#pragma unroll
        for (int n = 0; n < N; n++) {
            int k = 32 * n + lane;
            x[n] = k < classes ? to_float(logits[k]) : __int_as_float(0xff800000);
        }
#pragma unroll
        for (int n = 0; n < N; n++) max = fmaxf(max, x[n]);
        max = warp_max(max);
        sum = 0.0f;
#pragma unroll
        for (int n = 0; n < N; n++) {
            e[n] = 32 * n + lane < classes ? expf(x[n] - max) : 0.0f;
            sum += e[n];
        }
        sum = warp_sum(sum);
    }
    // One of the logits, which all lanes get.
    __device__ __forceinline__ float at(int k) const {
        float own = 0.0f;
#pragma unroll
        for (int n = 0; n < N; n++)
            if (k / 32 == n) own = x[n];
        return __shfl_sync(0xffffffffu, own, k % 32);
    }
};

// Computes what `cross_entropy` does.
template <typename L, int N>
__global__ void __launch_bounds__(THREADS)
pixel_loss(const L* logits, const int* labels, const float* weights, double* parts, int rows, int classes, float smoothing) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    double sums[4] = {};
    for (i64 row = (i64)blockIdx.x * WARPS + warp; row < rows; row += (i64)gridDim.x * WARPS) {
        float weight = weights[row];
        if (weight == 0.0f) continue;
        int label = labels[row], rank = classes - 1;
        float loss = __int_as_float(0x7fc00000);
        if ((u32)label < (u32)classes) {
            Pixel<L, N> pixel(logits + row * classes, classes);
            float own = pixel.at(label), total = 0.0f;
            int before = 0;
#pragma unroll
            for (int n = 0; n < N; n++) {
                int k = 32 * n + lane;
                bool first = k < classes && (pixel.x[n] > own || (pixel.x[n] == own && k < label));
                before += __popc(__ballot_sync(0xffffffffu, first));
                if (k < classes) total += pixel.x[n] - pixel.max;
            }
            float expected = own - pixel.max;
            // Without smoothing the mean must not take part: 0·∞ would make NaN of a masked class.
            if (smoothing != 0.0f) expected = (1.0f - smoothing) * expected + smoothing * (warp_sum(total) / classes);
            loss = logf(pixel.sum) - expected;
            // NaN among the logits is in the sum too.
            if (loss == loss) rank = before;
        }
        add_row(sums, weight, loss, rank);
    }
    write_part(sums, parts);
}

// Computes what `cross_entropy_grad` does; a warp has every gridDim.x-th group of rows.
template <typename L, typename D, int N>
__global__ void __launch_bounds__(THREADS)
pixel_grad(const L* logits, const int* labels, const float* weights, const float* dloss, const Header* header, D* dlogits,
           int rows, int classes, float smoothing) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    double of_weight = (double)dloss[0] / header->nominal;
    float spread = smoothing / classes;
    for (i64 row = (i64)blockIdx.x * WARPS + warp; row < rows; row += (i64)gridDim.x * WARPS) {
        D* out = dlogits + row * classes;
        float weight = weights[row];
        if (weight == 0.0f) {
            for (int k = lane; k < classes; k += 32) out[k] = from_float<D>(0.0f);
            continue;
        }
        Pixel<L, N> pixel(logits + row * classes, classes);
        int label = labels[row];
        float factor = (float)(of_weight * weight), inverse = 1.0f / pixel.sum;
#pragma unroll
        for (int n = 0; n < N; n++) {
            int k = 32 * n + lane;
            float wanted = spread + (k == label ? 1.0f - smoothing : 0.0f);
            if (k < classes) out[k] = from_float<D>(factor * (pixel.e[n] * inverse - wanted));
        }
    }
}

// The gradient of the loss with respect to itself: 1, or the loss scale if there is one.
template <typename T> __global__ void seed(const float* loss_scale, T* dloss) {
    dloss[0] = from_float<T>(loss_scale ? loss_scale[0] : 1.0f);
}
