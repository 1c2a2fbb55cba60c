// Hopper's (sm_90a) matmuls of warpgroups, barriers of shared memory and copy engine.
#pragma once
#include "pipeline.cuh"

constexpr int DEPTH = 64;  // of K in a stage: 128 bytes in half precision

// --- wgmma

#define R0 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define R1 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define R2 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define R3 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define R4 "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define R5 "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define R6 "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define R7 "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D16(i) D4(i), D4(i + 4), D4(i + 8), D4(i + 12)
#define MULTIPLY_128(TYPE)                                                                                      \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %66, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE \
                 " {" R0 ", " R1 ", " R2 ", " R3 "}, %64, %65, p, 1, 1, %67, %68; }" \
                 : D16(0), D16(16), D16(32), D16(48) \
                 : "l"(left), "l"(right), "r"(add), "n"((int)LEFT_ROWS), "n"((int)RIGHT_ROWS))
#define MULTIPLY_192(TYPE)                                                                                      \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %98, 0; wgmma.mma_async.sync.aligned.m64n192k16.f32." TYPE "." TYPE \
                 " {" R0 ", " R1 ", " R2 ", " R3 ", " R4 ", " R5 "}, %96, %97, p, 1, 1, %99, %100; }" \
                 : D16(0), D16(16), D16(32), D16(48), D16(64), D16(80) \
                 : "l"(left), "l"(right), "r"(add), "n"((int)LEFT_ROWS), "n"((int)RIGHT_ROWS))
#define MULTIPLY_256(TYPE)                                                                                      \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %130, 0; wgmma.mma_async.sync.aligned.m64n256k16.f32." TYPE "." TYPE \
                 " {" R0 ", " R1 ", " R2 ", " R3 ", " R4 ", " R5 ", " R6 ", " R7 "}, %128, %129, p, 1, 1, %131, %132; }" \
                 : D16(0), D16(16), D16(32), D16(48), D16(64), D16(80), D16(96), D16(112) \
                 : "l"(left), "l"(right), "r"(add), "n"((int)LEFT_ROWS), "n"((int)RIGHT_ROWS))

// d (64 × N over a warpgroup) = left (64 × 16) · right (16 × N) (+ d if `add`), operands by their descriptors. RIGHT_ROWS: rows of
// K lie in memory, strips of 64 columns of them; else columns of K. LEFT_ROWS: as much of the left side, which is transposed.
template <typename T, int N, bool LEFT_ROWS, bool RIGHT_ROWS>
__device__ __forceinline__ void multiply(float (&d)[N / 2], u64 left, u64 right, int add) {
    constexpr bool BF16 = IsBf16<T>::VALUE;
    if constexpr (N == 128) {
        if constexpr (BF16) MULTIPLY_128("bf16"); else MULTIPLY_128("f16");
    } else if constexpr (N == 192) {
        if constexpr (BF16) MULTIPLY_192("bf16"); else MULTIPLY_192("f16");
    } else {
        static_assert(N == 256, "");
        if constexpr (BF16) MULTIPLY_256("bf16"); else MULTIPLY_256("f16");
    }
}
// Swizzled by 128 bytes; `strip` bytes between strips of 64 elements (of no meaning where K is contiguous), 1024 between
// groups of 8 rows.
__device__ __forceinline__ u64 descriptor(u32 address, u32 strip) {
    return (u64)((address & 0x3ffff) >> 4) | (u64)(strip >> 4) << 16 | (u64)(1024 >> 4) << 32 | 1ull << 62;
}
