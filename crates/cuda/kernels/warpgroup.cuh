// What all matmuls of Hopper's warpgroups (wgmma) have around them. sm_90a only.
#pragma once
#include "common.cuh"

template <typename E> struct IsBf16 { static constexpr bool VALUE = false; };
template <> struct IsBf16<bf16> { static constexpr bool VALUE = true; };

// What this thread wrote to shared memory becomes visible to matmuls and the copy engine. A barrier must follow.
__device__ __forceinline__ void publish() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Matmuls run on their own: d must not be touched, nor registers of a left side changed, between wgmma_fence and the wait.
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
