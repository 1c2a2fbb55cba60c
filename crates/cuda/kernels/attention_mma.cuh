// Tiles of attention for mma.sync: copies of rows to shared memory, tiles between registers and device memory.
//
// Legend: T tokens, D head size. A tile is 16 tokens, a unit 8 elements (16 bytes).
#pragma once

#include "matrix.cuh"

// Columns of a head of D, padded with zeros to a multiple of 16, the depth of one matmul instruction.
template <int D> constexpr int WIDE = ceil_div(D, 16) * 16;

// Starts to copy rows first..first+rows of a head; those from T on are zeros.
template <int T, int D, int ROWS, int THREADS, typename E>
__device__ __forceinline__ void copy_rows(u32 to, const E* head, int stride, int first) {
    constexpr int UNITS = WIDE<D> / 8, TOTAL = ROWS * UNITS;
#pragma unroll
    for (int i = 0; i < ceil_div(TOTAL, THREADS); i++) {
        int index = i * THREADS + threadIdx.x;
        int row = index / UNITS, unit = index % UNITS;
        if (TOTAL % THREADS == 0 || index < TOTAL) {
            bool real = first + row < T && (WIDE<D> == D || unit < D / 8);
            copy_unit(to + Rows<WIDE<D>>::at(row, unit), head + (real ? (i64)(first + row) * stride + unit * 8 : 0), real);
        }
    }
}

// A tile of a head as the left side of a matmul, straight from memory. Rows from T on are zeros.
template <int T, int D, typename E>
__device__ __forceinline__ void load_left(u32 (&a)[WIDE<D> / 16][4], const E* head, int stride, int first) {
    int lane = threadIdx.x % 32;
    int row = first + lane / 4, column = lane % 4 * 2;
    const E* low = head + (i64)row * stride + column;
    const E* high = low + 8 * (i64)stride;
#pragma unroll
    for (int k = 0; k < WIDE<D> / 16; k++) {
        const bool whole = 16 * k + 8 < D;
        a[k][0] = row < T ? *reinterpret_cast<const u32*>(low + 16 * k) : 0;
        a[k][1] = row + 8 < T ? *reinterpret_cast<const u32*>(high + 16 * k) : 0;
        a[k][2] = whole && row < T ? *reinterpret_cast<const u32*>(low + 16 * k + 8) : 0;
        a[k][3] = whole && row + 8 < T ? *reinterpret_cast<const u32*>(high + 16 * k + 8) : 0;
    }
}

// Writes a tile, rows g times `low` and rows g+8 times `high`, to rows first..T of a head.
template <int T, int D, typename E>
__device__ __forceinline__ void store_tile(E* head, int stride, int first, const float (&x)[WIDE<D> / 8][4], float low,
                                           float high) {
    int lane = threadIdx.x % 32, t = lane % 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int row = first + lane / 4 + 8 * half;
        float factor = half ? high : low;
        E* to = head + (i64)row * stride;
        u32 words[D / 8];
#pragma unroll
        for (int j = 0; j < D / 8; j++) words[j] = pack2<E>(x[j][2 * half] * factor, x[j][2 * half + 1] * factor);
#pragma unroll
        for (int j = 0; j + 4 <= D / 8; j += 4) {
            u32 w[4] = {words[j], words[j + 1], words[j + 2], words[j + 3]};
            transpose_words(w);
            if (row < T) *reinterpret_cast<uint4*>(to + (j + t) * 8) = make_uint4(w[0], w[1], w[2], w[3]);
        }
#pragma unroll
        for (int j = D / 8 / 4 * 4; j < D / 8; j++)
            if (row < T) *reinterpret_cast<u32*>(to + j * 8 + 2 * t) = words[j];
    }
}
