// What the cross-entropies share: four sums of a block, Σ weight · (loss, 1, top-1 hit, top-5 hit).
#pragma once

#include "common.cuh"

constexpr int THREADS = 128;
constexpr int WARPS = THREADS / 32;

// Adds a row's loss, and what the rank of its label hits.
__device__ __forceinline__ void add_row(double (&sums)[4], float weight, float loss, int rank) {
    sums[0] += (double)weight * loss;
    sums[1] += weight;
    sums[2] += rank < 1 ? weight : 0.0f;
    sums[3] += rank < 5 ? weight : 0.0f;
}

// Adds the sums of a block's warps in order, to one line of parts (blocks, 4).
__device__ __forceinline__ void add_warps(const double (&of_warps)[WARPS][4], u32 thread, double* parts) {
    __syncthreads();
    if (thread >= 4) return;
    double sum = 0.0;
    for (int i = 0; i < WARPS; i++) sum += of_warps[i][thread];
    parts[blockIdx.x * 4 + thread] = sum;
}
