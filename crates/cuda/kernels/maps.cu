// Ops on channels-last maps (B,h,w,C) that only move tokens.
//
// Legend: B batch, h×w map, T tokens, C channels.
// A thread moves V channels at once: 8, or 1 where C is no multiple of 8.
#include "common.cuh"

constexpr int THREADS = 256;

template <typename X, typename Y, int V> __device__ __forceinline__ void move(const X* from, Y* to) {
    float v[V];
    Pack<X, V>::load(from, v);
    Pack<Y, V>::store(to, v);
}
template <typename Y, int V> __device__ __forceinline__ void clear(Y* to) {
    float zero[V] = {};
    Pack<Y, V>::store(to, zero);
}

// y (B,⌈h/2⌉,⌈w/2⌉,4C) of x (B,h,w,C): blocks of 2×2 tokens, down the columns first; zeros where the map ends. A thread has vector i of y.
template <typename X, typename Y, int V>
__global__ void __launch_bounds__(THREADS) merge_patches(const X* x, Y* y, int batch, int height, int width, int channels) {
    const int vectors = channels / V, rows = (height + 1) / 2, columns = (width + 1) / 2;
    i64 i = (i64)blockIdx.x * THREADS + threadIdx.x;
    if (i >= (i64)batch * rows * columns * 4 * vectors) return;
    const int vector = (int)(i % vectors);
    i64 rest = i / vectors;
    const int place = (int)(rest % 4);
    rest /= 4;
    const int column = (int)(rest % columns) * 2 + place / 2;
    rest /= columns;
    const int row = (int)(rest % rows) * 2 + place % 2;
    const i64 b = rest / rows;
    if (row >= height || column >= width) return clear<Y, V>(y + i * V);
    move<X, Y, V>(x + ((b * height + row) * width + column) * channels + vector * V, y + i * V);
}

// The transpose. A thread has vector i of y (B,h,w,C).
template <typename X, typename Y, int V>
__global__ void __launch_bounds__(THREADS) split_patches(const X* x, Y* y, int batch, int height, int width, int channels) {
    const int vectors = channels / V, rows = (height + 1) / 2, columns = (width + 1) / 2;
    i64 i = (i64)blockIdx.x * THREADS + threadIdx.x;
    if (i >= (i64)batch * height * width * vectors) return;
    const int vector = (int)(i % vectors);
    i64 rest = i / vectors;
    const int column = (int)(rest % width);
    rest /= width;
    const int row = (int)(rest % height);
    const i64 block = (rest / height * rows + row / 2) * columns + column / 2;
    const int place = column % 2 * 2 + row % 2;
    move<X, Y, V>(x + (block * 4 + place) * channels + vector * V, y + i * V);
}

// y (B,h·w,C): the last tokens of x (B,T,C). A thread has vector i of y.
template <typename X, typename Y, int V>
__global__ void __launch_bounds__(THREADS) grid(const X* x, Y* y, int batch, int tokens, int map, int channels) {
    const i64 i = ((i64)blockIdx.x * THREADS + threadIdx.x) * V, line = (i64)map * channels;
    if (i >= batch * line) return;
    move<X, Y, V>(x + i + (i / line + 1) * (tokens - map) * channels, y + i);
}

// The transpose: y (B,T,C) of x (B,h·w,C), 0 for the tokens before them. A thread has vector i of y.
template <typename X, typename Y, int V>
__global__ void __launch_bounds__(THREADS) ungrid(const X* x, Y* y, int batch, int tokens, int map, int channels) {
    const i64 i = ((i64)blockIdx.x * THREADS + threadIdx.x) * V, line = (i64)tokens * channels;
    if (i >= batch * line) return;
    const i64 b = i / line, before = (i64)(tokens - map) * channels;
    if (i - b * line < before) return clear<Y, V>(y + i);
    move<X, Y, V>(x + i - (b + 1) * before, y + i);
}
