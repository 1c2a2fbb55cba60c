// Sums over rows in a block.
#pragma once

#include "norm.cuh"

// Adds the sums of a block's threads, in order, and writes them to the part's row; rows lie `stride` apart. THREADS/W threads share W
// vectors of V columns.
template <int V, int W>
__device__ __forceinline__ void write_sums(const float (&sum)[V], int columns, const float* start, float* out, int stride) {
    constexpr int LANES = THREADS / W;
    __shared__ __align__(16) float sums[LANES][W * V];
    Pack<float, V>::store(&sums[threadIdx.x / W][threadIdx.x % W * V], sum);
    __syncthreads();
    int column = blockIdx.x * W * V + threadIdx.x;
    if (threadIdx.x >= W * V || column >= columns) return;
    float total = start ? start[column] : 0.0f;
#pragma unroll 8
    for (int lane = 0; lane < LANES; lane++) total += sums[lane][threadIdx.x];
    out[(i64)blockIdx.y * stride + column] = total;
}
