// Resizing and pooling of channels-last images (B,h,w,C), and their gradients. A result is a weighted sum of neighbours
// along both axes, whatever the way of sampling and in either direction, so nothing is scattered.
#include "common.cuh"
#include "axis.cuh"

constexpr int THREADS = 256;

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
