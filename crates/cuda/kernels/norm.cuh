// Normalised rows: their distribution over the threads of a block.
#pragma once

#include "common.cuh"

constexpr int THREADS = 256;

// LANES threads share a row; each has every LANES-th vector of V columns in registers. A block has THREADS/LANES rows at a
// time. V is 4: vectors of f32 and of half precision then lie side by side, lane by lane.

__device__ constexpr int vector_of(int columns) { return columns % 4 == 0 ? 4 : 1; }

// Threads for a row, at most `most` columns each where a block is enough for that.
__device__ constexpr int lanes_of(int columns, int most) {
    int lanes = 4;
    while (lanes < THREADS && lanes * most < columns) lanes *= 2;
    return lanes;
}

// Columns of a thread in the backward pass: as few as a warp for a row allows, since less is left to be added up then, and at most
// what fits into registers.
__device__ constexpr int backward_columns(int columns) { return columns <= 32 * 12 ? 12 : 24; }

// The sums over the threads of a row. With more than a warp a row, every thread of the block must come here.
template <int LANES, int N> __device__ __forceinline__ void row_sums(float (&x)[N]) {
#pragma unroll
    for (int lane = (LANES < 32 ? LANES : 32) / 2; lane > 0; lane /= 2)
#pragma unroll
        for (int n = 0; n < N; n++) x[n] += __shfl_xor_sync(0xffffffffu, x[n], lane);
    if constexpr (LANES > 32) {
        constexpr int WARPS = LANES / 32;
        __shared__ float sums[THREADS / 32][N];
        int warp = threadIdx.x / 32;
        __syncthreads();
        if (threadIdx.x % 32 == 0)
            for (int n = 0; n < N; n++) sums[warp][n] = x[n];
        __syncthreads();
#pragma unroll
        for (int n = 0; n < N; n++) {
            x[n] = 0.0f;
#pragma unroll
            for (int i = 0; i < WARPS; i++) x[n] += sums[warp / WARPS * WARPS + i][n];
        }
    }
}

// A thread's part of a row of C columns.
template <int C, int LANES> struct Slice {
    static constexpr int V = vector_of(C);
    static constexpr int VECTORS = (C + LANES * V - 1) / (LANES * V);
    static constexpr bool FULL = C % (LANES * V) == 0;
    static __device__ __forceinline__ int column(int vector) { return (vector * LANES + threadIdx.x % LANES) * V; }
    static __device__ __forceinline__ bool has(int vector) { return FULL || column(vector) < C; }
};
