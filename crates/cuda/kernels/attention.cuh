// Shared by the attention kernels: instructions, copies to shared memory, words between lanes.
#pragma once

#include "common.cuh"

static constexpr float LOG2E = 1.4426950408889634f;

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// 1/√D.
template <int D> __device__ __forceinline__ float score_scale() { return rsqrtf((float)D); }

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

// ---- Dropout ----

// Without dropout nobody reads the header.
template <bool DROP> __device__ __forceinline__ Stream draws(const Header* header, u32 site, u64 sample) {
    if constexpr (DROP) return Stream(header, site, sample);
    Header none = {};
    return Stream(&none, site, sample);
}

// Mask of kept keys among four, as bits.
__device__ __forceinline__ u32 kept(const Stream& stream, u32 token, u32 block, u32 threshold) {
    uint4 w = stream.words(token, block);
    return (u32)(w.x >= threshold) | (u32)(w.y >= threshold) << 1 | (u32)(w.z >= threshold) << 2 |
           (u32)(w.w >= threshold) << 3;
}

// Which keys of a tile stay for queries g and g+8, the first of which `token` names. Four threads draw a block each.
struct KeptKeys {
    u32 bits;
    __device__ __forceinline__ KeptKeys(const Stream& stream, u32 token, int tile, u32 threshold) {
        u32 block = tile * 4 + threadIdx.x % 4;
        bits = kept(stream, token, block, threshold) | kept(stream, token + 8, block, threshold) << 4;
    }
    // Of the first or the second eight keys: bit 4·(i/2) + i%2 for element i of this thread's.
    __device__ __forceinline__ u32 of_side(int side) const {
        int lane = threadIdx.x % 32, t = lane % 4;
        return __shfl_sync(0xffffffffu, bits, (lane & ~3) | (2 * side + t / 2)) >> (2 * (t % 2));
    }
};

// Which elements of a 16×8 tile of Pᵀ stay, of queries whose draws `token` names from the first on: bit i for element i of this
// thread. Four threads that hold keys of the same blocks draw one block each.
__device__ __forceinline__ u32 kept_transposed(const Stream& stream, u32 token, int key_tile, u32 threshold) {
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, own = g % 4;
    u32 block = key_tile * 4 + 2 * (own % 2) + g / 4;
    u32 bits = kept(stream, token + 2 * t + own / 2, block, threshold) << (4 * own);
    bits |= __shfl_xor_sync(0xffffffffu, bits, 4);
    bits |= __shfl_xor_sync(0xffffffffu, bits, 8);
    bits >>= own;
    return (bits & 1) | (bits >> 8 & 1) << 1 | (bits >> 4 & 1) << 2 | (bits >> 12 & 1) << 3;
}

// ---- Softmax ----

__host__ __device__ constexpr int at_least_1(int x) { return x < 1 ? 1 : x; }

// Tiling of the keys: parts of PART tiles, of which a thread holds the scores, and a last one of LAST tiles.
template <int T> struct Parts {
    static constexpr int TILES = ceil_div(T, 16);
    static constexpr int COUNT = at_least_1((TILES + 1) / 4);
    static constexpr int PART = TILES / COUNT;
    static constexpr int LAST = TILES - (COUNT - 1) * PART;
};

// A tile of queries goes through N tiles of keys from tile `first` on, of which the first REAL keys are there: scores become what
// is in proportion to probabilities, and sums so far shrink to their scale. A thread holds of s and o rows g and g+8 (g = lane/4),
// columns 8j+2t and 8j+2t+1 (t = lane%4). `token` names row g's draws.
template <int D, int N, int REAL, bool DROP, int UNITS>
__device__ __forceinline__ void soften(float (&s)[2 * N][4], float (&o)[UNITS][4], float (&top)[2], float (&sum)[2], int first,
                                       const Stream& stream, u32 token, u32 threshold) {
    const float scale = score_scale<D>() * LOG2E;
    float shift[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float m = top[half];
#pragma unroll
        for (int j = 0; j < 2 * N; j++)
            if (8 * j < REAL) m = fmaxf(m, fmaxf(s[j][2 * half], s[j][2 * half + 1]));
        m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 1));
        m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 2));
        float shrink = exp2_fast((top[half] - m) * scale);
        top[half] = m;
        shift[half] = -m * scale;
        sum[half] *= shrink;
#pragma unroll
        for (int j = 0; j < UNITS; j++) o[j][2 * half] *= shrink, o[j][2 * half + 1] *= shrink;
    }
#pragma unroll
    for (int j = 0; j < 2 * N; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            s[j][i] = 8 * j < REAL ? exp2_fast(fmaf(s[j][i], scale, shift[i / 2])) : 0.0f;
            sum[i / 2] += s[j][i];
        }

    if constexpr (DROP) {
#pragma unroll
        for (int j = 0; j < N; j++) {
            KeptKeys keys(stream, token, first + j, threshold);
#pragma unroll
            for (int side = 0; side < 2; side++) {
                u32 stay = keys.of_side(side);
#pragma unroll
                for (int i = 0; i < 4; i++)
                    if (!(stay >> (4 * (i / 2) + i % 2) & 1)) s[2 * j + side][i] = 0.0f;
            }
        }
    }
}

// What is left to do when all keys came by: factors that make results of rows g and g+8 those of probabilities, and of each row,
// as far as there are T, the logarithm of its sum.
template <int T, int D>
__device__ __forceinline__ void finish_rows(float (&factor)[2], const float (&top)[2], const float (&sum)[2], float* lse, int first,
                                            float keep_scale) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float total = sum[half];
        total += __shfl_xor_sync(0xffffffffu, total, 1);
        total += __shfl_xor_sync(0xffffffffu, total, 2);
        factor[half] = keep_scale / total;
        int row = first + lane / 4 + 8 * half;
        if (lane % 4 == 0 && row < T) lse[row] = top[half] * score_scale<D>() + logf(total);
    }
}

// ---- Column sums ----

// Of 2·HALF numbers in each of two lanes STEP apart, each lane gets the sums of one half.
template <int HALF, int STEP, int N> __device__ __forceinline__ void share_sums(float (&x)[N]) {
    const bool upper = threadIdx.x & STEP;
#pragma unroll
    for (int i = 0; i < HALF; i++) {
        float other = __shfl_xor_sync(0xffffffffu, upper ? x[i] : x[i + HALF], STEP);
        x[i] = (upper ? x[i + HALF] : x[i]) + other;
    }
}

// The sums over rows of results of D columns, as a warp comes by them: 16 rows at a time, of which a thread has rows g and g+8,
// columns 8j+2t and 8j+2t+1 (g = lane/4, t = lane%4). The eight threads of equal t have an eighth of their sums each.
template <int D> struct ColumnSums {
    static constexpr int OWN = ceil_div(D / 4, 8), ALL = 8 * OWN;
    float own[OWN];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < OWN; i++) own[i] = 0.0f;
    }

    // x(j, i) is element i of columns 8j on, in the tensor cores' layout. Rows from T on count nothing.
    template <int T, typename X> __device__ __forceinline__ void add(int first, X x) {
        const int row = first + threadIdx.x % 32 / 4;
        add_rows(T % 16 == 0 || row < T, T % 16 == 0 || row + 8 < T, x);
    }
    template <typename X> __device__ __forceinline__ void add_to(int tokens, int first, X x) {
        const int row = first + threadIdx.x % 32 / 4;
        add_rows(row < tokens, row + 8 < tokens, x);
    }
    // `low` and `high` say whether this thread's rows count.
    template <typename X> __device__ __forceinline__ void add_rows(bool low, bool high, X x) {
        float sum[ALL];
#pragma unroll
        for (int i = 0; i < ALL; i++)
            sum[i] = i < D / 4 ? (low ? x(i / 2, i % 2) : 0.0f) + (high ? x(i / 2, i % 2 + 2) : 0.0f) : 0.0f;
        share_sums<ALL / 2, 16>(sum);
        share_sums<ALL / 4, 8>(sum);
        share_sums<ALL / 8, 4>(sum);
#pragma unroll
        for (int i = 0; i < OWN; i++) own[i] += sum[i];
    }

    // To D numbers, each times `factor`.
    __device__ __forceinline__ void store(float* to, float factor) const {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            int pair = g * OWN + i;
            if (ALL == D / 4 || pair < D / 4) to[pair / 2 * 8 + 2 * t + pair % 2] = own[i] * factor;
        }
    }
};

// What warps have stored of a head's dQ, dK and dV (WARPS rows of 3·D sums), added in order to its columns of a row of qkv.
template <int D, int WARPS, int THREADS>
__device__ __forceinline__ void add_column_sums(const float* from, float* row, int heads, int h) {
    for (int i = threadIdx.x; i < 3 * D; i += THREADS) {
        float sum = 0.0f;
#pragma unroll
        for (int warp = 0; warp < WARPS; warp++) sum += from[warp * 3 * D + i];
        row[i / D * heads * D + h * D + i % D] = sum;
    }
}
