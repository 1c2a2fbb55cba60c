// Types and helpers that every kernel shares. No header of the CUDA toolkit is needed: NVRTC alone compiles these.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct bf16 { u16 bits; };
struct f16 { u16 bits; };

// Values that change from step to step; the host writes them before a plan runs.
struct Header {
    u64 seed;
    u64 step;
    u64 first_sample;
    double learning_rate;
    double nominal;
};

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) { return __uint_as_float((u32)x.bits << 16); }
__device__ __forceinline__ float to_float(f16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}

template <typename T> __device__ __forceinline__ T from_float(float x);
template <> __device__ __forceinline__ float from_float<float>(float x) { return x; }
template <> __device__ __forceinline__ f16 from_float<f16>(float x) {
    f16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}
template <> __device__ __forceinline__ bf16 from_float<bf16>(float x) {
    bf16 y;
#if __CUDA_ARCH__ >= 900
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
#else
    // Rounds to nearest, ties to even; NaN stays NaN.
    u32 bits = __float_as_uint(x);
    u32 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    y.bits = (x != x) ? (u16)0x7fff : (u16)rounded;
#endif
    return y;
}

// Two numbers in one word, the first in the low half.
template <typename T> __device__ __forceinline__ u32 pack2(float low, float high) {
    return (u32)from_float<T>(low).bits | ((u32)from_float<T>(high).bits << 16);
}
#if __CUDA_ARCH__ >= 800
template <> __device__ __forceinline__ u32 pack2<bf16>(float low, float high) {
    u32 y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}
#endif

template <typename T> __device__ __forceinline__ void unpack2(u32 both, float& low, float& high) {
    T a, b;
    a.bits = (u16)both;
    b.bits = (u16)(both >> 16);
    low = to_float(a);
    high = to_float(b);
}

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// N consecutive elements, read and written by the widest accesses that fit. The address must be aligned to them.
template <typename T, int N> struct Pack;
template <int N> struct Pack<float, N> {
    static __device__ __forceinline__ void load(const float* from, float (&x)[N]) {
        if constexpr (N % 4 == 0) {
#pragma unroll
            for (int i = 0; i < N / 4; i++) {
                float4 v = reinterpret_cast<const float4*>(from)[i];
                x[4 * i] = v.x, x[4 * i + 1] = v.y, x[4 * i + 2] = v.z, x[4 * i + 3] = v.w;
            }
        } else {
#pragma unroll
            for (int i = 0; i < N; i++) x[i] = from[i];
        }
    }
    static __device__ __forceinline__ void store(float* to, const float (&x)[N]) {
        if constexpr (N % 4 == 0) {
#pragma unroll
            for (int i = 0; i < N / 4; i++)
                reinterpret_cast<float4*>(to)[i] = make_float4(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
        } else {
#pragma unroll
            for (int i = 0; i < N; i++) to[i] = x[i];
        }
    }
};
template <typename T, int N> struct Pack {
    static __device__ __forceinline__ void load(const T* from, float (&x)[N]) {
        if constexpr (N % 8 == 0) {
#pragma unroll
            for (int i = 0; i < N / 8; i++) {
                uint4 v = reinterpret_cast<const uint4*>(from)[i];
                unpack2<T>(v.x, x[8 * i], x[8 * i + 1]);
                unpack2<T>(v.y, x[8 * i + 2], x[8 * i + 3]);
                unpack2<T>(v.z, x[8 * i + 4], x[8 * i + 5]);
                unpack2<T>(v.w, x[8 * i + 6], x[8 * i + 7]);
            }
        } else if constexpr (N % 4 == 0) {
#pragma unroll
            for (int i = 0; i < N / 4; i++) {
                uint2 v = reinterpret_cast<const uint2*>(from)[i];
                unpack2<T>(v.x, x[4 * i], x[4 * i + 1]);
                unpack2<T>(v.y, x[4 * i + 2], x[4 * i + 3]);
            }
        } else {
#pragma unroll
            for (int i = 0; i < N; i++) x[i] = to_float(from[i]);
        }
    }
    static __device__ __forceinline__ void store(T* to, const float (&x)[N]) {
        if constexpr (N % 8 == 0) {
#pragma unroll
            for (int i = 0; i < N / 8; i++) {
                uint4 v;
                v.x = pack2<T>(x[8 * i], x[8 * i + 1]);
                v.y = pack2<T>(x[8 * i + 2], x[8 * i + 3]);
                v.z = pack2<T>(x[8 * i + 4], x[8 * i + 5]);
                v.w = pack2<T>(x[8 * i + 6], x[8 * i + 7]);
                reinterpret_cast<uint4*>(to)[i] = v;
            }
        } else if constexpr (N % 4 == 0) {
#pragma unroll
            for (int i = 0; i < N / 4; i++) {
                uint2 v;
                v.x = pack2<T>(x[4 * i], x[4 * i + 1]);
                v.y = pack2<T>(x[4 * i + 2], x[4 * i + 3]);
                reinterpret_cast<uint2*>(to)[i] = v;
            }
        } else {
#pragma unroll
            for (int i = 0; i < N; i++) to[i] = from_float<T>(x[i]);
        }
    }
};

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2) x += __shfl_xor_sync(0xffffffffu, x, lane);
    return x;
}
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, lane));
    return x;
}

// Philox 4x32-10, as in graph::random.
__device__ __forceinline__ uint4 philox(uint4 c, u32 k0, u32 k1) {
#pragma unroll
    for (int round = 0; round < 10; round++) {
        u32 h0 = __umulhi(0xD2511F53u, c.x), l0 = 0xD2511F53u * c.x;
        u32 h1 = __umulhi(0xCD9E8D57u, c.z), l1 = 0xCD9E8D57u * c.z;
        c = make_uint4(h1 ^ c.y ^ k0, l1, h0 ^ c.w ^ k1, l0);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return c;
}

// Random draws of one op for one sample, as in graph::random::Stream.
struct Stream {
    u32 k0, k1, site, sample;
    __device__ __forceinline__ Stream(const Header* header, u32 site, u64 sample_in_batch) : site(site) {
        u64 number = header->first_sample + sample_in_batch;
        u64 high = number >> 32;
        u64 key = header->seed ^ (header->step * 0x9E3779B97F4A7C15ull) ^ ((high << 48) | (high >> 16));
        k0 = (u32)key;
        k1 = (u32)(key >> 32);
        sample = (u32)number;
    }
    // Four words for channels 4·block to 4·block+3 of a token.
    __device__ __forceinline__ uint4 words(u32 token, u32 block) const {
        return philox(make_uint4(block, token, sample, site), k0, k1);
    }
};
