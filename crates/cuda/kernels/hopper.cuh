// What Hopper (sm_90a) multiplies and copies with: barriers of shared memory, the copy engine, products of warpgroups.
#pragma once
#include "warpgroup.cuh"

// As cuTensorMapEncodeTiled makes it.
struct alignas(64) TensorMap { u64 opaque[16]; };

constexpr int DEPTH = 64;  // of K in a stage: 128 bytes of halves

// --- barriers of shared memory

__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_arrive_at(u32 barrier, u32 block) {
    asm volatile("{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; mbarrier.arrive.shared::cluster.b64 _, [there]; }"
                 ::"r"(barrier), "r"(block) : "memory");
}
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    asm volatile("{ .reg .pred p; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @p bra DONE; bra AGAIN; DONE: }"
                 ::"r"(barrier), "r"(parity) : "memory");
}
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release; barrier.cluster.wait.acquire;" ::: "memory");
}

// --- the copy engine

// x counts elements of a row, y rows.
__device__ __forceinline__ void load_tile(u32 to, const TensorMap& map, int x, int y, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
                 ::"r"(to), "l"(&map), "r"(x), "r"(y), "r"(barrier) : "memory");
}
// To the same place of every block of the cluster; each one's own barrier is told.
__device__ __forceinline__ void load_tile_to_all(u32 to, const TensorMap& map, int x, int y, u32 barrier, u16 blocks) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
                 " [%0], [%1, {%2, %3}], [%4], %5;"
                 ::"r"(to), "l"(&map), "r"(x), "r"(y), "r"(barrier), "h"(blocks) : "memory");
}
__device__ __forceinline__ void store_tile(u32 from, const TensorMap& map, int x, int y) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];"
                 ::"l"(&map), "r"(x), "r"(y), "r"(from) : "memory");
}
__device__ __forceinline__ void stores_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until at most PENDING of this thread's groups of stores still read shared memory.
template <int PENDING> __device__ __forceinline__ void stores_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}
__device__ __forceinline__ void stores_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

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

// Where in the ring of stages.
template <int STAGES> struct Ring {
    int stage;
    u32 parity;
    __device__ __forceinline__ Ring(u32 step) : stage(step % STAGES), parity(step / STAGES & 1) {}
    __device__ __forceinline__ void next() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};
