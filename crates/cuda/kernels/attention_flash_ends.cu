// First and last kernels of the gradient of attention over any number of tokens on Hopper: attention_flash_grad.cu. sm_90a only.
//
// Legend: B batch, H heads, T tokens, D head size, C = H·D.
#include "flash.cuh"

template <typename E> __device__ __forceinline__ void unpack8(const uint4& v, float (&x)[8]) {
    unpack2<E>(v.x, x[0], x[1]);
    unpack2<E>(v.y, x[2], x[3]);
    unpack2<E>(v.z, x[4], x[5]);
    unpack2<E>(v.w, x[6], x[7]);
}

// A block has ROWS rows of a head, eight lanes have one at a time. With SUM also this block's share of the sums over tokens of
// dK and dV, a row of `sums` (B·⌈T/ROWS⌉,3C) for every ROWS tokens: over a row of probabilities, P sums to 1 and dS to 0, so
// that dV sums to what dO does, and dK to nothing. Grid: B·⌈T/ROWS⌉·H, 256 threads for every 64 columns.
template <typename E, int D, int ROWS, bool SUM>
__global__ void __launch_bounds__(256 * ceil_div(D, 64)) flash_grad_start(const E* __restrict__ out, const E* __restrict__ dout,
                                                        const float* __restrict__ lse, u32* __restrict__ turns,
                                                        float* __restrict__ log_sums, float* __restrict__ deltas,
                                                        float* __restrict__ sums, int tokens, int heads, int turn_count) {
    constexpr int UNITS = ceil_div(D, 64), THREADS = 256 * UNITS, AT_ONCE = THREADS / 8, ROUNDS = ROWS / AT_ONCE;
    const i64 index = (i64)blockIdx.x * THREADS + threadIdx.x;
    if (index < turn_count) turns[index] = 0;
    const int lane = threadIdx.x % 8, h = blockIdx.x % heads, piece = blockIdx.x / heads, pieces = ceil_div(tokens, ROWS);
    const int sample = piece / pieces, first = piece % pieces * ROWS + threadIdx.x / 8;
    const i64 head = (i64)sample * heads + h;
    uint4 x[ROUNDS][UNITS], y[ROUNDS][UNITS];
    float log_sum[ROUNDS];
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) {
        const int token = first + AT_ONCE * r;
        log_sum[r] = token < tokens ? lse[head * tokens + token] * LOG2E : __int_as_float(0x7f800000);
#pragma unroll
        for (int i = 0; i < UNITS; i++) {
            const i64 from = (((i64)sample * tokens + token) * heads + h) * D + 64 * i + 8 * lane;
            const bool there = token < tokens && (D % 64 == 0 || 64 * i + 8 * lane < D);
            x[r][i] = y[r][i] = make_uint4(0, 0, 0, 0);
            if (there) {
                x[r][i] = *reinterpret_cast<const uint4*>(out + from);
                y[r][i] = *reinterpret_cast<const uint4*>(dout + from);
            }
        }
    }
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < UNITS; i++) {
            float a[8], b[8];
            unpack8<E>(x[r][i], a);
            unpack8<E>(y[r][i], b);
#pragma unroll
            for (int j = 0; j < 8; j++) sum = fmaf(a[j], b[j], sum);
        }
#pragma unroll
        for (int step = 1; step < 8; step *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
        if (lane == 0) {
            const i64 to = head * pieces * ROWS + first + AT_ONCE * r;
            deltas[to] = sum;
            log_sums[to] = log_sum[r];
        }
    }
    if constexpr (SUM) {
        constexpr int WARPS = THREADS / 32;
        __shared__ __align__(16) float all[WARPS * 64 * UNITS];
#pragma unroll
        for (int i = 0; i < UNITS; i++) {
            float sum[8], b[8];
            unpack8<E>(y[0][i], sum);
#pragma unroll
            for (int r = 1; r < ROUNDS; r++) {
                unpack8<E>(y[r][i], b);
#pragma unroll
                for (int j = 0; j < 8; j++) sum[j] += b[j];
            }
#pragma unroll
            for (int j = 0; j < 8; j++) {
                sum[j] += __shfl_xor_sync(0xffffffffu, sum[j], 8);
                sum[j] += __shfl_xor_sync(0xffffffffu, sum[j], 16);
            }
            if (threadIdx.x % 32 < 8)
                Pack<float, 8>::store(all + threadIdx.x / 32 * 64 * UNITS + 64 * i + 8 * lane, sum);
        }
        __syncthreads();
        float* row = sums + (i64)piece * 3 * heads * D + heads * D + h * D;
        for (int i = threadIdx.x; i < D; i += THREADS) {
            float sum = 0.0f;
#pragma unroll
            for (int w = 0; w < WARPS; w++) sum += all[w * 64 * UNITS + i];
            row[i] = 0.0f;
            row[heads * D + i] = sum;
        }
    }
}

// A block brings dQ of BLOCK queries to its place, a warp 16 of them: the sum of `copies`, in their order, `stride` numbers apart.
// Grid: B·H·⌈T/BLOCK⌉, 256 threads.
template <typename E, int D, int HALVES, bool SUM>
__global__ void flash_grad_end(const float* __restrict__ dq, E* __restrict__ dqkv, float* __restrict__ sums, int tokens,
                               int heads, int copies, i64 stride) {
    constexpr int QUERIES = 64 * HALVES;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, blocks = ceil_div(tokens, BLOCK);
    const int head = blockIdx.x / blocks, block = blockIdx.x % blocks, sample = head / heads, h = head % heads;
    const int row = block * BLOCK + 16 * warp, tile = row / QUERIES;
    __shared__ float all[SUM ? 8 * D : 1];
    float x[D / 2];
    const float* from = dq + ((i64)head * ceil_div(tokens, QUERIES) + tile) * QUERIES * D +
                        (HALVES == 2 ? warp / 4 * 64 * D : 0) + 4 * (warp % 4 * 32 + lane);
#pragma unroll
    for (int j = 0; j < D / 8; j++) {
        const float4 y = row < tokens ? *reinterpret_cast<const float4*>(from + 512 * j) : make_float4(0, 0, 0, 0);
        x[4 * j] = y.x, x[4 * j + 1] = y.y, x[4 * j + 2] = y.z, x[4 * j + 3] = y.w;
    }
#pragma unroll 2
    for (int copy = 1; copy < copies; copy++) {
        from += stride;
#pragma unroll
        for (int j = 0; j < D / 8; j++) {
            if (row >= tokens) break;
            const float4 y = *reinterpret_cast<const float4*>(from + 512 * j);
            x[4 * j] += y.x, x[4 * j + 1] += y.y, x[4 * j + 2] += y.z, x[4 * j + 3] += y.w;
        }
    }
    const float scale = score_scale<D>();
    store_head_rows<D>(dqkv + (i64)sample * tokens * 3 * heads * D + h * D, 3 * heads * D, row, tokens, x, scale, scale);
    if constexpr (SUM) {
        ColumnSums<D> column_sums;
        column_sums.clear();
        column_sums.add_to(tokens, row, [&](int j, int i) { return x[4 * j + i]; });
        column_sums.store(all + warp * D, scale);
        __syncthreads();
        float* to = sums + ((i64)sample * blocks + block) * 3 * heads * D + h * D;
        for (int i = threadIdx.x; i < D; i += 256) {
            float sum = 0.0f;
#pragma unroll
            for (int w = 0; w < 8; w++) sum += all[w * D + i];
            to[i] = sum;
        }
    }
}
