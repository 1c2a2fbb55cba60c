// What the attention kernels share: instructions, copies to shared memory, words between lanes.
#pragma once

#include "common.cuh"

static constexpr float LOG2E = 1.4426950408889634f;

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// 1/√D.
template <int D> __device__ __forceinline__ float score_scale() { return rsqrtf((float)D); }

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// Four 8×8 matrices; lane 8i+r names row r of matrix i.
__device__ __forceinline__ void load_matrices(u32 (&x)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address)
                 : "memory");
}
__device__ __forceinline__ void load_transposed(u32 (&x)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address)
                 : "memory");
}

// Copies 16 bytes to shared memory, or writes zeros. Done once wait_copies was called.
__device__ __forceinline__ void copy_unit(u32 to, const void* from, bool real) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(real ? 16 : 0) : "memory");
#else
    uint4 x = real ? *reinterpret_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
#endif
}
// Copies are waited for in groups, in the order in which they were closed.
__device__ __forceinline__ void close_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Waits until at most `OPEN` groups are under way.
template <int OPEN> __device__ __forceinline__ void wait_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(OPEN) : "memory");
#endif
}

// Of four lanes side by side, lane t gets word t of each.
__device__ __forceinline__ void transpose_words(u32 (&w)[4]) {
    bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        u32 other = __shfl_xor_sync(0xffffffffu, odd ? w[i] : w[i + 1], 1);
        if (odd) w[i] = other;
        else w[i + 1] = other;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        u32 other = __shfl_xor_sync(0xffffffffu, upper ? w[i] : w[i + 2], 2);
        if (upper) w[i] = other;
        else w[i + 2] = other;
    }
}
