// Matmuls of 16-bit elements by mma.sync: the instruction, rows in shared memory as it reads them, tiles in registers.
//
// A tile is 16 rows, a unit 8 elements (16 bytes).
#pragma once

#include "attention.cuh"

// ---- Instructions ----

// c += a·b for a 16×16 a and a 16×8 b. With g = lane/4 and t = lane%4, a thread holds of c rows g and g+8, columns 2t
// and 2t+1.
template <typename E> __device__ __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1);
template <> __device__ __forceinline__ void mma<bf16>(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                 "{%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    __trap();
#endif
}
template <> __device__ __forceinline__ void mma<f16>(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                 "{%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(b0));
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[2]), "r"(a[3]), "r"(b1));
#endif
}

// ---- Rows in shared memory ----

// Rows of D elements, laid out so that the 8 rows of a matrix lie in different banks: the units of a row are permuted
// where D is a power of two, and rows have an odd number of units elsewhere.
template <int D> struct Rows {
    static constexpr int UNITS = D / 8;
    static constexpr bool PERMUTED = (UNITS & (UNITS - 1)) == 0;
    static constexpr int STRIDE = PERMUTED ? UNITS : UNITS | 1;
    static constexpr int BYTES = 16 * STRIDE;

    // Bytes from the first row.
    static __device__ __forceinline__ u32 at(int row, int unit) {
        if constexpr (!PERMUTED) return row * BYTES + unit * 16;
        else if constexpr (UNITS >= 8) return row * BYTES + ((unit ^ (row & 7)) * 16);
        else return row * BYTES + ((unit ^ ((row / (8 / UNITS)) & (UNITS - 1))) * 16);
    }
};

// The right side of x·yᵀ: 16 rows of y from `row`, elements 16·k on. Words 0 and 1 are for rows 0..8, 2 and 3 for the rest.
template <int D> __device__ __forceinline__ void load_right_transposed(u32 (&b)[4], u32 rows, int row, int k) {
    int lane = threadIdx.x % 32;
    load_matrices(b, rows + Rows<D>::at(row + (lane / 16) * 8 + lane % 8, 2 * k + (lane / 8) % 2));
}
// The right side of x·y: 16 rows of y from `row`, columns 16·n on. Words 0 and 1 are for columns 0..8, 2 and 3 for the rest.
template <int D> __device__ __forceinline__ void load_right(u32 (&b)[4], u32 rows, int row, int n) {
    int lane = threadIdx.x % 32;
    load_transposed(b, rows + Rows<D>::at(row + lane % 16, 2 * n + lane / 16));
}

// Results of two neighbouring 16×8 tiles as the left side of a next matmul.
template <typename E>
__device__ __forceinline__ void as_left(u32 (&a)[4], const float (&x)[4], const float (&y)[4]) {
    a[0] = pack2<E>(x[0], x[1]);
    a[1] = pack2<E>(x[2], x[3]);
    a[2] = pack2<E>(y[0], y[1]);
    a[3] = pack2<E>(y[2], y[3]);
}
