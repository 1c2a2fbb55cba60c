// Resizing and pooling of channels-last images (B,h,w,C), and going back through them. A result is a weighted sum of neighbours
// along both axes, whatever the way of sampling and in either direction, so nothing is scattered.
#include "common.cuh"

constexpr int THREADS = 256;

// An axis of `len` pixels sampled by `out`. All but weights is exact, in whole numbers.
struct Axis {
    int len, out;
    bool average;

    __device__ __forceinline__ Axis(int len, int out, int average) : len(len), out(out), average(average) {}

    // Where result o lies among the pixels, in units of 1/(2·out) pixel: torch's `align_corners=False`.
    __device__ __forceinline__ int place(int o) const {
        return min(max((2 * o + 1) * len - out, 0), 2 * out * (len - 1));
    }
    // The pixels that result o is made of.
    __device__ __forceinline__ void sources(int o, int& first, int& end) const {
        if (average) {
            first = (int)((i64)o * len / out);
            end = (int)(((i64)(o + 1) * len + out - 1) / out);
        } else {
            first = place(o) / (2 * out);
            end = min(first + 2, len);
        }
    }
    // The results that pixel i is part of.
    __device__ __forceinline__ void results(int i, int& first, int& end) const {
        if (average) {
            first = (int)((i64)i * out / len);
            end = (int)(((i64)(i + 1) * out + len - 1) / len);
        } else {
            // Those whose place is more than i-1 and less than i+1; of the outermost pixels, all beyond them.
            int low = out * (2 * i - 1) - len, high = out * (2 * i + 3) - len;
            first = low <= 0 ? 0 : (low + 2 * len - 1) / (2 * len);
            end = i == len - 1 ? out : min((high + 2 * len - 1) / (2 * len), out);
        }
    }
};

// The weights of the pixels of one result.
struct Weights {
    int place, unit;
    float even, per_unit;

    __device__ __forceinline__ Weights(const Axis& axis, int o) {
        unit = 2 * axis.out;
        place = axis.place(o);
        per_unit = 1.0f / (float)unit;
        even = 0.0f;
        if (axis.average) {
            int first, end;
            axis.sources(o, first, end);
            even = 1.0f / (float)(end - first);
        }
    }
    __device__ __forceinline__ float of(int pixel) const {
        return even > 0.0f ? even : 1.0f - (float)abs(place - unit * pixel) * per_unit;
    }
};

// A block has a piece of a row of results: its first axis is (sample, row), its second the piece. A thread has V channels of one
// pixel there.
template <int V> struct Place {
    int sample, row, pixel, column;
    bool here;
    __device__ __forceinline__ Place(int height, int width, int columns) {
        sample = blockIdx.x / height;
        row = blockIdx.x % height;
        int vector = blockIdx.y * THREADS + threadIdx.x, across = columns / V;
        pixel = vector / across;
        column = vector % across * V;
        here = pixel < width;
    }
};

// x (B,height,width,C) → y (B,out_height,out_width,C)
template <typename X, typename Y, int V>
__global__ void __launch_bounds__(THREADS)
resize(const X* x, Y* y, int height, int width, int out_height, int out_width, int columns, int average) {
    Place<V> at(out_height, out_width, columns);
    if (!at.here) return;
    Axis down(height, out_height, average), across(width, out_width, average);
    Weights of_rows(down, at.row), of_pixels(across, at.pixel);
    int top, bottom, left, right;
    down.sources(at.row, top, bottom);
    across.sources(at.pixel, left, right);
    float sum[V] = {};
    for (int row = top; row < bottom; row++) {
        const X* from = x + (((i64)at.sample * height + row) * width) * columns + at.column;
        float of_row = of_rows.of(row);
#pragma unroll 4
        for (int pixel = left; pixel < right; pixel++) {
            float v[V], weight = of_row * of_pixels.of(pixel);
            Pack<X, V>::load(from + (i64)pixel * columns, v);
#pragma unroll
            for (int i = 0; i < V; i++) sum[i] = fmaf(weight, v[i], sum[i]);
        }
    }
    Pack<Y, V>::store(y + (((i64)at.sample * out_height + at.row) * out_width + at.pixel) * columns + at.column, sum);
}

// dy (B,out_height,out_width,C) → dx (B,height,width,C)
template <typename X, typename Y, int V>
__global__ void __launch_bounds__(THREADS)
resize_grad(const X* dy, Y* dx, int height, int width, int out_height, int out_width, int columns, int average) {
    Place<V> at(height, width, columns);
    if (!at.here) return;
    Axis down(height, out_height, average), across(width, out_width, average);
    int top, bottom, left, right;
    down.results(at.row, top, bottom);
    across.results(at.pixel, left, right);
    float sum[V] = {};
    for (int row = top; row < bottom; row++) {
        const X* from = dy + (((i64)at.sample * out_height + row) * out_width) * columns + at.column;
        float of_row = Weights(down, row).of(at.row);
#pragma unroll 4
        for (int pixel = left; pixel < right; pixel++) {
            float v[V], weight = of_row * Weights(across, pixel).of(at.pixel);
            Pack<X, V>::load(from + (i64)pixel * columns, v);
#pragma unroll
            for (int i = 0; i < V; i++) sum[i] = fmaf(weight, v[i], sum[i]);
        }
    }
    Pack<Y, V>::store(dx + (((i64)at.sample * height + at.row) * width + at.pixel) * columns + at.column, sum);
}
