// Matmuls of pieces of rows in f32, without tensor cores.
#pragma once

#include "attention.cuh"

// Matmuls of TILE×D pieces in shared memory as f32, by TILE/4 × TILE/4 threads. Thread (x, y) has of a result rows 4y to
// 4y+3, and columns x, x+SIDE, … of scores.
template <int D, int TILE> struct Plain {
    static constexpr int SIDE = TILE / 4, THREADS = SIDE * SIDE;
    // Rows are whole float4s, an odd number of them, so that rows lie in different banks.
    static constexpr int STRIDE = (ceil_div(D, 4) | 1) * 4, SCORES_STRIDE = TILE + 4;
    static constexpr int PIECE = TILE * STRIDE, SCORES = TILE * SCORES_STRIDE;
    // A thread's columns of a row of D come in runs of VECTOR.
    static constexpr int VECTOR = D % (4 * SIDE) == 0 ? 4 : D % (2 * SIDE) == 0 ? 2 : 1;
    static constexpr int COLUMNS = ceil_div(D, SIDE * VECTOR) * VECTOR;

    static __device__ __forceinline__ int x() { return threadIdx.x % SIDE; }
    static __device__ __forceinline__ int y() { return threadIdx.x / SIDE; }
    static __device__ __forceinline__ int column(int c) { return c / VECTOR * SIDE * VECTOR + x() * VECTOR + c % VECTOR; }

    // Rows from T on, and columns from D on, are zeros.
    template <int T, typename E>
    static __device__ __forceinline__ void load(float* to, const E* head, int stride, int first) {
        constexpr int FOURS = ceil_div(D, 4);
        for (int i = threadIdx.x; i < TILE * FOURS; i += THREADS) {
            int row = i / FOURS, c = i % FOURS * 4;
            float v[4] = {};
            if (first + row < T) {
                const E* from = head + (i64)(first + row) * stride + c;
                if constexpr (D % 4 == 0) {
                    Pack<E, 4>::load(from, v);
                } else {
#pragma unroll
                    for (int j = 0; j < 4; j++) v[j] = c + j < D ? to_float(from[j]) : 0.0f;
                }
            }
            Pack<float, 4>::store(to + row * STRIDE + c, v);
        }
    }

    // a·bᵀ.
    static __device__ __forceinline__ void scores(float (&s)[4][4], const float* a, const float* b) {
#pragma unroll
        for (int i = 0; i < 4; i++) s[i][0] = s[i][1] = s[i][2] = s[i][3] = 0.0f;
#pragma unroll 2
        for (int d = 0; d < D; d += 4) {
            float u[4][4], w[4][4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                Pack<float, 4>::load(a + (4 * y() + i) * STRIDE + d, u[i]);
                Pack<float, 4>::load(b + (x() + SIDE * i) * STRIDE + d, w[i]);
            }
#pragma unroll
            for (int e = 0; e < 4; e++)
#pragma unroll
                for (int i = 0; i < 4; i++)
#pragma unroll
                    for (int j = 0; j < 4; j++) s[i][j] = fmaf(u[i][e], w[j][e], s[i][j]);
        }
    }

    // Leaves scores for `add_matmul`. The threads that share rows are of one warp.
    static __device__ __forceinline__ void keep(float* to, const float (&s)[4][4]) {
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) to[(4 * y() + i) * SCORES_STRIDE + x() + SIDE * j] = s[i][j];
        __syncwarp();
    }

    // sum += p·b.
    static __device__ __forceinline__ void add_matmul(float (&sum)[4][COLUMNS], const float* p, const float* b) {
#pragma unroll 2
        for (int k = 0; k < TILE; k += 4) {
            float u[4][4];
#pragma unroll
            for (int i = 0; i < 4; i++) Pack<float, 4>::load(p + (4 * y() + i) * SCORES_STRIDE + k, u[i]);
#pragma unroll
            for (int e = 0; e < 4; e++) {
                float w[COLUMNS];
#pragma unroll
                for (int c = 0; c < COLUMNS; c += VECTOR) {
                    const float* from = b + (k + e) * STRIDE + column(c);
                    if constexpr (VECTOR == 4) {
                        float4 v = *reinterpret_cast<const float4*>(from);
                        w[c] = v.x, w[c + 1] = v.y, w[c + 2] = v.z, w[c + 3] = v.w;
                    } else if constexpr (VECTOR == 2) {
                        float2 v = *reinterpret_cast<const float2*>(from);
                        w[c] = v.x, w[c + 1] = v.y;
                    } else {
                        w[c] = column(c) < D ? *from : 0.0f;
                    }
                }
#pragma unroll
                for (int i = 0; i < 4; i++)
#pragma unroll
                    for (int c = 0; c < COLUMNS; c++) sum[i][c] = fmaf(u[i][e], w[c], sum[i][c]);
            }
        }
    }

    template <int T, typename E>
    static __device__ __forceinline__ void store(E* head, int stride, int first, const float (&sum)[4][COLUMNS],
                                                 const float (&factor)[4]) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int row = first + 4 * y() + i;
#pragma unroll
            for (int c = 0; c < COLUMNS; c++)
                if (row < T && column(c) < D) head[(i64)row * stride + column(c)] = from_float<E>(sum[i][c] * factor[i]);
        }
    }

    // Sums over rows, first..T, of what `store` writes, through a piece of shared memory that is free by now.
    template <int T>
    static __device__ __forceinline__ void store_sums(float* to, float* by, int first, const float (&sum)[4][COLUMNS],
                                                      float factor) {
        __syncthreads();
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            float own = 0.0f;
#pragma unroll
            for (int i = 0; i < 4; i++) own += first + 4 * y() + i < T ? sum[i][c] : 0.0f;
            if (column(c) < D) by[y() * STRIDE + column(c)] = own;
        }
        __syncthreads();
        for (int d = threadIdx.x; d < D; d += THREADS) {
            float total = 0.0f;
#pragma unroll
            for (int i = 0; i < SIDE; i++) total += by[i * STRIDE + d];
            to[d] = total * factor;
        }
    }

    static __device__ __forceinline__ float row_sum(float v) {
#pragma unroll
        for (int lane = SIDE / 2; lane > 0; lane /= 2) v += __shfl_xor_sync(0xffffffffu, v, lane);
        return v;
    }
    static __device__ __forceinline__ float row_max(float v) {
#pragma unroll
        for (int lane = SIDE / 2; lane > 0; lane /= 2) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, lane));
        return v;
    }
};
