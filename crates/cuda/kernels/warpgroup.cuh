// Fences, commits and waits of Hopper's warpgroup matmuls (wgmma). sm_90a only.
#pragma once
#include "common.cuh"

template <typename E> struct IsBf16 { static constexpr bool VALUE = false; };
template <> struct IsBf16<bf16> { static constexpr bool VALUE = true; };

// Makes this thread's writes to shared memory visible to matmuls and the copy engine. A barrier must follow.
__device__ __forceinline__ void publish() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Matmuls are asynchronous: d must not be touched, nor registers of a left side changed, between wgmma_fence and the wait.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int OPEN> __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(OPEN) : "memory");
}
// The compiler must not use results before the wait.
template <int N> __device__ __forceinline__ void arrived(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}
