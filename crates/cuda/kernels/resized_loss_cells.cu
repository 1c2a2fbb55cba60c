// The loss of resized_loss.cu for logits that are enlarged, a cell at a time.
//
// Legend: results are the pixels that have labels, (B,h',w'). A cell is what lies between four neighbours among the pixels of the
// logits: all results in it are made of these four. It has the number of its upper left pixel. Those of the last row and of the last
// column have results of share 0.
#include "common.cuh"
#include "axis.cuh"
#include "loss.cuh"

constexpr float LOG2_E = 1.44269504f, LN_2 = 0.69314718f;
constexpr u32 ALL = 0xffffffffu;

__device__ __forceinline__ float fast_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Warps of a block that lie beside each other; the others are below them.
constexpr int BESIDE = 2;
// Pixels that a warp reads at once.
constexpr int AHEAD = 4;

// The logits of a pixel are kept as powers of two, less their peak: what is mixed of four is then at most 0, and none of a result's
// exponentials overflows. A class that there is not has none.
constexpr float NOTHING = -1e30f;
// A sum of exponentials may be less than this if the four pixels differ very much; then the result's own peak has to be found.
constexpr float TINY = 1e-20f;

// Next smaller float.
__device__ __forceinline__ float just_below(float x) {
    int bits = __float_as_int(x);
    return __int_as_float(x == 0.0f ? 0x80000001 : bits + (bits < 0 ? 1 : -1));
}

// Counts one more if x > limit, by one instruction that is done or not.
__device__ __forceinline__ void count_above(int& count, float x, float limit) {
    asm("{ .reg .pred p; setp.gt.f32 p, %1, %2; @p add.s32 %0, %0, 1; }" : "+r"(count) : "f"(x), "f"(limit));
}

// A column of results in a cell.
struct Column {
    const float *top_left, *top_right, *bottom_left, *bottom_right;
    float share;

    // What results are mixed of: at the top, and how much more there is at the bottom.
    __device__ __forceinline__ void ends(float tl, float tr, float bl, float br, float& top, float& more) const {
        top = mix(tl, tr, share);
        more = mix(bl, br, share) - top;
    }
    // Class k of a result.
    __device__ __forceinline__ float at(int k, float of_row) const {
        float top, more;
        ends(top_left[k], top_right[k], bottom_left[k], bottom_right[k], top, more);
        return fmaf(of_row, more, top);
    }
};

// The logits of a tile of results in shared memory, (cells + 1, columns, K) and padding, with the peak and the mean of each pixel.
struct Tile {
    float *logits, *peaks, *means;
    int cells, columns, quads, stride;

    __device__ __forceinline__ Tile(float4* memory, int cells, int columns, int classes) : cells(cells), columns(columns) {
        int pixels = (cells + 1) * columns;
        quads = (classes + 3) / 4;
        // An odd number of float4, so that neighbours lie in different banks.
        stride = (quads | 1) * 4;
        logits = reinterpret_cast<float*>(memory);
        peaks = logits + pixels * stride;
        means = peaks + pixels;
    }

    // Reads `count` pixels of each row from (y, left) on; of at most three rows, of which the one after the last is the last.
    template <typename L, int N>
    __device__ __forceinline__ void fill(const L* image, int height, int width, int y, int left, int count, int classes, bool mean) {
        int warp = threadIdx.x / 32, lane = threadIdx.x % 32, all = (cells + 1) * count;
        for (int first = warp; first < all; first += WARPS * AHEAD) {
            float x[AHEAD][N];
#pragma unroll
            for (int u = 0; u < AHEAD; u++) {
                int i = first + u * WARPS, row = (i >= count) + (i >= 2 * count);
                const L* from = image + ((i64)min(y + row, height - 1) * width + left + i - row * count) * classes;
#pragma unroll
                for (int n = 0; n < N; n++) {
                    int k = 32 * n + lane;
                    x[u][n] = i < all && k < classes ? to_float(from[k]) : NOTHING;
                }
            }
#pragma unroll
            for (int u = 0; u < AHEAD; u++) {
                int i = first + u * WARPS, row = (i >= count) + (i >= 2 * count);
                if (i >= all) break;
                float peak = NOTHING, total = 0.0f;
#pragma unroll
                for (int n = 0; n < N; n++) peak = fmaxf(peak, x[u][n]);
                peak = warp_max(peak);
                int at = row * columns + i - row * count;
#pragma unroll
                for (int n = 0; n < N; n++) {
                    int k = 32 * n + lane;
                    x[u][n] = (x[u][n] - peak) * LOG2_E;
                    if (k < 4 * quads) logits[at * stride + k] = x[u][n];
                    if (k < classes) total += x[u][n];
                }
                if (mean) total = warp_sum(total) / classes;
                if (lane == 0) peaks[at] = peak, means[at] = total;
            }
        }
    }
};

// Σ weight · (loss, 1, top-1 hit, top-5 hit) over every gridDim.x-th tile of results, to one line of parts (blocks, 4); and the
// log-sum-exp of each result. A tile is `cells` rows of cells, one or two, and 32·BESIDE columns of results, made of at most
// `columns` pixels of a row, of up to 32·N classes. A thread has R results of a column at once, and goes through their classes.
// Results without weight may have any label.
template <typename L, int N, int R>
__global__ void __launch_bounds__(THREADS, N <= 5 ? 5 : 4)
resized_loss_tiles(const L* logits, const int* labels, const float* weights, float* lse, double* parts, int samples, int height,
                   int width, int out_height, int out_width, int classes, float smoothing, int cells, int columns) {
    extern __shared__ float4 shared4[];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Tile tile(shared4, cells, columns, classes);
    Axis down(height, out_height, 0), across(width, out_width, 0);
    int beside = (out_width + 32 * BESIDE - 1) / (32 * BESIDE), strips = (height + cells - 1) / cells;
    double sums[4] = {};
    for (int of = blockIdx.x; of < beside * strips * samples; of += gridDim.x) {
        int start = of % beside * 32 * BESIDE, y = of / beside % strips * cells, sample = of / beside / strips;
        int left = Between(across, start).first;
        int right = Between(across, min(start + 32 * BESIDE, out_width) - 1).next(across);
        const L* image = logits + (i64)sample * height * width * classes;
        __syncthreads();
        tile.fill<L, N>(image, height, width, y, left, right - left + 1, classes, smoothing != 0.0f);
        __syncthreads();
        int of_lane = start + 32 * (warp % BESIDE) + lane, o = min(of_lane, out_width - 1);
        Between pixels(across, o);
        for (int i = 0, group = 0; i < cells; i++) {
            int begin = down.begin(y + i), end = down.begin(y + i + 1);
            int top_left = i * columns + pixels.first - left, top_right = i * columns + pixels.next(across) - left;
            for (int first = begin; first < end; first += R, group++) {
                if (group % (WARPS / BESIDE) != warp / BESIDE) continue;
                i64 at = ((i64)sample * out_height + first) * out_width + o;
                float weight[R], of_row[R];
                int label[R];
                bool any = false;
#pragma unroll
                for (int r = 0; r < R; r++) {
                    bool here = first + r < end && of_lane < out_width;
                    weight[r] = here ? weights[at + (i64)r * out_width] : 0.0f;
                    label[r] = here ? labels[at + (i64)r * out_width] : 0;
                    of_row[r] = Between(down, min(first + r, end - 1), y + i).share;
                    any |= weight[r] != 0.0f;
                    if (here && weight[r] == 0.0f) lse[at + (i64)r * out_width] = 0.0f;
                }
                if (!__any_sync(ALL, any)) continue;

                Column column;
                column.top_left = tile.logits + top_left * tile.stride;
                column.top_right = tile.logits + top_right * tile.stride;
                column.bottom_left = column.top_left + columns * tile.stride;
                column.bottom_right = column.top_right + columns * tile.stride;
                column.share = pixels.share;
                float own[R], not_less[R], sum[R];
                int before[R];
#pragma unroll
                for (int r = 0; r < R; r++) {
                    own[r] = column.at((u32)label[r] < (u32)classes ? label[r] : 0, of_row[r]);
                    not_less[r] = just_below(own[r]);
                    sum[r] = 0.0f;
                    before[r] = 0;
                }
                const float4* tl = reinterpret_cast<const float4*>(column.top_left);
                const float4* tr = reinterpret_cast<const float4*>(column.top_right);
                const float4* bl = reinterpret_cast<const float4*>(column.bottom_left);
                const float4* br = reinterpret_cast<const float4*>(column.bottom_right);
#pragma unroll 1
                for (int quad = 0; quad < tile.quads; quad++) {
                    float4 a = tl[quad], b = tr[quad], c = bl[quad], d = br[quad];
                    float top[4], more[4];
                    column.ends(a.x, b.x, c.x, d.x, top[0], more[0]);
                    column.ends(a.y, b.y, c.y, d.y, top[1], more[1]);
                    column.ends(a.z, b.z, c.z, d.z, top[2], more[2]);
                    column.ends(a.w, b.w, c.w, d.w, top[3], more[3]);
#pragma unroll
                    for (int r = 0; r < R; r++) {
                        // Of classes with equal logits the first ranks first. Those beside the label are looked at again below.
                        float limit = 4 * quad + 3 < label[r] ? not_less[r] : own[r];
#pragma unroll
                        for (int j = 0; j < 4; j++) {
                            float x = fmaf(of_row[r], more[j], top[j]);
                            sum[r] += fast_exp2(x);
                            count_above(before[r], x, limit);
                        }
                    }
                }
                float top_peak, more_peak, top_mean, more_mean;
                const float *peak = tile.peaks, *mean = tile.means;
                int bottom_left = top_left + columns, bottom_right = top_right + columns;
                column.ends(peak[top_left], peak[top_right], peak[bottom_left], peak[bottom_right], top_peak, more_peak);
                column.ends(mean[top_left], mean[top_right], mean[bottom_left], mean[bottom_right], top_mean, more_mean);
#pragma unroll
                for (int r = 0; r < R; r++) {
                    if (weight[r] == 0.0f) continue;
                    bool within = (u32)label[r] < (u32)classes;
#pragma unroll 1
                    for (int k = within ? label[r] / 4 * 4 : label[r]; k < label[r]; k++)
                        before[r] += column.at(k, of_row[r]) == own[r];
                    float of_sum = 0.0f;
                    if (sum[r] < TINY) {
                        of_sum = NOTHING;
#pragma unroll 1
                        for (int k = 0; k < classes; k++) of_sum = fmaxf(of_sum, column.at(k, of_row[r]));
                        sum[r] = 0.0f;
#pragma unroll 1
                        for (int k = 0; k < classes; k++) sum[r] += fast_exp2(column.at(k, of_row[r]) - of_sum);
                    }
                    float log_sum = fmaf(LN_2, of_sum, logf(sum[r])), expected = own[r];
                    if (smoothing != 0.0f)
                        expected = (1.0f - smoothing) * own[r] + smoothing * fmaf(of_row[r], more_mean, top_mean);
                    float loss = log_sum - LN_2 * expected;
                    // A label that is no class has no loss.
                    if (!within) loss = __int_as_float(0x7fc00000);
                    // NaN among the logits is in the sum too.
                    int rank = loss == loss ? before[r] : classes - 1;
                    lse[at + (i64)r * out_width] = fmaf(of_row[r], more_peak, top_peak) + log_sum;
                    add_row(sums, weight[r], loss, rank);
                }
            }
        }
    }
    __shared__ double of_warps[WARPS][4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
#pragma unroll
        for (int other = 16; other > 0; other /= 2) sums[i] += __shfl_xor_sync(ALL, sums[i], other);
        if (lane == 0) of_warps[warp][i] = sums[i];
    }
    add_warps(of_warps, threadIdx.x, parts);
}

// Warps of a block of the gradient, each with a row of cells: at most so many.
constexpr int ROWS = 8;

// A lane's classes of a pixel.
template <typename L, int N>
__device__ __forceinline__ void read(const L* pixel, int classes, float (&x)[N]) {
#pragma unroll
    for (int n = 0; n < N; n++) {
        int k = 32 * n + threadIdx.x % 32;
        x[n] = k < classes ? to_float(pixel[k]) : 0.0f;
    }
}

// dlogits (B,h,w,K), each a sum over the four cells around it. A warp goes along `steps` + 1 cells of a row, a lane has every 32nd
// class. What the results of a cell add to its four pixels is summed in registers: A pixel gets
// what was kept of the cell before, and through shared memory what the warp above has for it. The first cell of each warp, and the
// first row of each block, are also the last of another; they write nothing, but at the image's edges. Results are read
// 1 << shift of a row at a time, a lane for each.
template <typename L, typename D, int N>
__global__ void __launch_bounds__(32 * ROWS, N <= 5 ? 2 : 1)
resized_loss_grad_cells(const L* logits, const int* labels, const float* weights, const float* lse, const float* dloss,
                        const Header* header, D* dlogits, int height, int width, int out_height, int out_width, int classes,
                        float smoothing, int steps, int shift) {
    // Of a result: log-sum-exp in powers of two, the share of the next pixel, the gradient of the loss, the label.
    __shared__ float4 results[ROWS][32];
    __shared__ float from_above[2][ROWS][32 * N];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, sample = blockIdx.z;
    int row = blockIdx.y * (blockDim.x / 32 - 1) + warp, first = blockIdx.x * steps;
    Axis down(height, out_height, 0), across(width, out_width, 0);
    const L* upper = logits + ((i64)sample * height + min(row, height - 1)) * width * classes;
    const L* lower = logits + ((i64)sample * height + min(row + 1, height - 1)) * width * classes;
    int top = down.begin(row), bottom = down.begin(row + 1);
    double of_weight = (double)dloss[0] / header->nominal;
    float spread = smoothing / classes, sharp = 1.0f - smoothing;

    // The logits at the corners, in powers of two; those of the pixels after; and the gradients of the upper and of the lower pixel
    // from the cell before.
    float tl[N], bl[N], tr[N], br[N], upper_next[N], lower_next[N], upper_kept[N], lower_kept[N];
    int second = min(first + 1, width - 1);
    read<L, N>(upper + (i64)first * classes, classes, tr);
    read<L, N>(lower + (i64)first * classes, classes, br);
    read<L, N>(upper + (i64)second * classes, classes, upper_next);
    read<L, N>(lower + (i64)second * classes, classes, lower_next);
#pragma unroll
    for (int n = 0; n < N; n++) {
        tr[n] *= LOG2_E, br[n] *= LOG2_E;
        upper_kept[n] = lower_kept[n] = 0.0f;
    }
    int right = across.begin(first);
    for (int step = 0; step <= steps && first + step < width; step++) {
        int pixel = first + step, after = min(pixel + 2, width - 1);
#pragma unroll
        for (int n = 0; n < N; n++) {
            tl[n] = tr[n], bl[n] = br[n];
            tr[n] = upper_next[n] * LOG2_E, br[n] = lower_next[n] * LOG2_E;
        }
        // Read ahead: they come while the cell is summed.
        read<L, N>(upper + (i64)after * classes, classes, upper_next);
        read<L, N>(lower + (i64)after * classes, classes, lower_next);
        // Sums over the cell's results, [1] times the share of the next pixel; `weighed` times that of the next row, too. What a row
        // of results adds to this is the difference of what `plain` is after it and before it, times the row's share.
        float plain[2][N], weighed[2][N], last_share = 0.0f;
#pragma unroll
        for (int n = 0; n < N; n++) plain[0][n] = plain[1][n] = weighed[0][n] = weighed[1][n] = 0.0f;
        int left = right;
        right = across.begin(pixel + 1);
        for (int o = top; o < bottom; o += 32 >> shift) {
            for (int p = left; p < right; p += 1 << shift) {
                int y = o + (lane >> shift), x = p + (lane & ((1 << shift) - 1));
                // One that is not there, or has no weight, adds 0.
                float4 result = make_float4(__int_as_float(0x7f800000), 0.0f, 0.0f, __int_as_float(-1));
                float of_row = 0.0f;
                if (y < bottom && x < right) {
                    i64 at = ((i64)sample * out_height + y) * out_width + x;
                    float weight = weights[at], log_sum = lse[at];
                    int label = labels[at];
                    of_row = Between(down, y, row).share;
                    if (weight != 0.0f) {
                        result.x = log_sum * LOG2_E;
                        result.y = Between(across, x, pixel).share;
                        result.z = (float)(of_weight * weight);
                        result.w = __int_as_float(label);
                    }
                }
                if (!__any_sync(ALL, result.z != 0.0f)) continue;
                __syncwarp();
                results[warp][lane] = result;
                __syncwarp();
                int rows = min(32 >> shift, bottom - o), count = min(1 << shift, right - p);
                for (int i = 0; i < rows; i++) {
                    float share = __shfl_sync(ALL, of_row, i << shift), less = last_share - share;
                    float start[N], more[N];
                    last_share = share;
#pragma unroll
                    for (int n = 0; n < N; n++) {
                        start[n] = mix(tl[n], bl[n], share);
                        more[n] = mix(tr[n], br[n], share) - start[n];
                        weighed[0][n] = fmaf(less, plain[0][n], weighed[0][n]);
                        weighed[1][n] = fmaf(less, plain[1][n], weighed[1][n]);
                    }
                    const float4* of = results[warp] + (i << shift);
                    // By two: 1 << shift is even, and what is not there adds nothing.
                    for (int j = 0; j < count; j += 2) {
#pragma unroll
                        for (int u = 0; u < 2; u++) {
                            float4 result = of[j + u];
                            float factor = result.z, to_next = result.z * result.y;
                            int label = __float_as_int(result.w) - lane;
#pragma unroll
                            for (int n = 0; n < N; n++) {
                                float e = fast_exp2(fmaf(result.y, more[n], start[n]) - result.x);
                                if (label == 32 * n) e -= sharp;
                                plain[0][n] = fmaf(factor, e, plain[0][n]);
                                plain[1][n] = fmaf(to_next, e, plain[1][n]);
                            }
                        }
                    }
                    if (spread != 0.0f) {
                        float total = 0.0f, to_next = 0.0f;
#pragma unroll 1
                        for (int j = 0; j < count; j++) total += of[j].z, to_next = fmaf(of[j].z, of[j].y, to_next);
#pragma unroll
                        for (int n = 0; n < N; n++) {
                            plain[0][n] = fmaf(-spread, total, plain[0][n]);
                            plain[1][n] = fmaf(-spread, to_next, plain[1][n]);
                        }
                    }
                }
            }
        }
        bool whole_column = step > 0 || pixel == 0, whole_row = warp > 0 || row == 0;
#pragma unroll
        for (int n = 0; n < N; n++) {
            float lower_left = fmaf(last_share, plain[0][n], weighed[0][n]);
            float lower_right = fmaf(last_share, plain[1][n], weighed[1][n]);
            lower_left -= lower_right;
            float to_upper = plain[0][n] - plain[1][n] - lower_left + upper_kept[n];
            float to_lower = lower_left + lower_kept[n];
            upper_kept[n] = plain[1][n] - lower_right;
            lower_kept[n] = lower_right;
            from_above[step & 1][warp][32 * n + lane] = to_lower;
            // The upper left pixel's; no longer needed but here.
            plain[0][n] = to_upper;
        }
        // Two steps have a place each: none is written while a warp still reads it, a barrier lies between.
        __syncthreads();
        if (!whole_column || !whole_row || row >= height) continue;
        D* to = dlogits + (((i64)sample * height + row) * width + pixel) * classes;
#pragma unroll
        for (int n = 0; n < N; n++) {
            int k = 32 * n + lane;
            float above = warp > 0 ? from_above[step & 1][max(warp - 1, 0)][k] : 0.0f;
            if (k < classes) to[k] = from_float<D>(plain[0][n] + above);
        }
    }
}
