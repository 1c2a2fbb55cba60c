// Ops that treat all pixels of a channel alike, or only move channels. Legend: rows M (pixels of a batch), columns C (channels).
#include "common.cuh"

constexpr int THREADS = 256;
// Rows that a thread of `drop_channels` has.
constexpr int ROWS = 8;

// y = x + bias; x and y may be the same, and bias null.
template <typename X, typename B, typename Y, int V>
__global__ void __launch_bounds__(THREADS) add_bias(const X* x, const B* bias, Y* y, i64 rows, int columns) {
    i64 at = ((i64)blockIdx.x * THREADS + threadIdx.x) * V;
    if (at >= rows * columns) return;
    float v[V], b[V] = {};
    Pack<X, V>::load(x + at, v);
    if (bias) Pack<B, V>::load(bias + at % columns, b);
#pragma unroll
    for (int i = 0; i < V; i++) v[i] += b[i];
    Pack<Y, V>::store(y + at, v);
}

// One draw for every channel of a sample, that of its first pixel. The grid is (pieces of a sample's rows, pieces of the channels,
// samples).
template <typename X, typename Y, int V>
__global__ void __launch_bounds__(THREADS)
drop_channels(const X* x, Y* y, const Header* header, int rows, int columns, u32 site, u32 threshold, float kept) {
    // The threads of a warp have neighbouring channels, its lanes beyond them other rows.
    int across = (columns + V - 1) / V, wide = min(across, THREADS), lanes = THREADS / wide;
    int column = (blockIdx.y * wide + threadIdx.x % wide) * V, lane = threadIdx.x / wide;
    if (column >= columns || lane >= lanes) return;
    Stream stream(header, site, blockIdx.z);
    float factor[V];
#pragma unroll
    for (int i = 0; i < V; i += 4) {
        uint4 drawn = stream.words(0, (column + i) / 4);
        u32 words[4] = {drawn.x, drawn.y, drawn.z, drawn.w};
        if constexpr (V % 4 == 0) {
#pragma unroll
            for (int j = 0; j < 4; j++) factor[i + j] = words[j] < threshold ? 0.0f : kept;
        } else {
            int part = column % 4;
            u32 word = part == 0 ? words[0] : part == 1 ? words[1] : part == 2 ? words[2] : words[3];
            factor[0] = word < threshold ? 0.0f : kept;
        }
    }
    i64 first = (i64)blockIdx.z * rows;
    int start = blockIdx.x * lanes * ROWS + lane;
#pragma unroll 4
    for (int k = 0; k < ROWS; k++) {
        int row = start + k * lanes;
        if (row >= rows) return;
        float v[V];
        Pack<X, V>::load(x + (first + row) * columns + column, v);
#pragma unroll
        for (int i = 0; i < V; i++) v[i] = factor[i] == 0.0f ? 0.0f : v[i] * factor[i];
        Pack<Y, V>::store(y + (first + row) * columns + column, v);
    }
}

// Copies `width` units of each of `count`/width rows; units are as wide as all borders allow, strides are in units.
template <typename T>
__global__ void __launch_bounds__(THREADS)
copy_columns(const T* from, int from_stride, T* to, int to_stride, u32 width, u32 count) {
    u32 at = blockIdx.x * THREADS + threadIdx.x;
    if (at >= count) return;
    u32 row = at / width, column = at % width;
    to[(i64)row * to_stride + column] = from[(i64)row * from_stride + column];
}
