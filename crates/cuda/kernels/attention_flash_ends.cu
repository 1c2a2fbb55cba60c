// What the gradient of attention over any number of tokens starts and ends with on Hopper: attention_flash_grad.cu. sm_90a only.
//
// Legend: B batch, H heads, T tokens, D head size, C = H·D.
#include "flash.cuh"

// Eight lanes take a row of a head. Grid: enough blocks of 256 threads for B·H·(T up to a multiple of BLOCK) rows.
template <typename E, int D>
__global__ void flash_grad_start(const E* __restrict__ out, const E* __restrict__ dout, const float* __restrict__ lse,
                                 u32* __restrict__ turns, float* __restrict__ log_sums, float* __restrict__ deltas, int tokens,
                                 int heads, int total, int turn_count) {
    const int padded = ceil_div(tokens, BLOCK) * BLOCK;
    const i64 index = (i64)blockIdx.x * 256 + threadIdx.x;
    if (index < turn_count) turns[index] = 0;
    const i64 row = index / 8;
    const int lane = index % 8, h = row % heads;
    const i64 rest = row / heads;
    const int token = rest % padded;
    const i64 sample = rest / padded;
    float sum = 0.0f;
    const bool there = sample * heads < total && token < tokens;
    if (there) {
        const i64 from = ((sample * tokens + token) * heads + h) * D;
#pragma unroll
        for (int i = 0; i < ceil_div(D, 64); i++) {
            const int unit = 8 * i + lane;
            if (D % 64 != 0 && unit >= D / 8) break;
            float x[8], y[8];
            Pack<E, 8>::load(out + from + 8 * unit, x);
            Pack<E, 8>::load(dout + from + 8 * unit, y);
#pragma unroll
            for (int j = 0; j < 8; j++) sum = fmaf(x[j], y[j], sum);
        }
    }
#pragma unroll
    for (int step = 1; step < 8; step *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (sample * heads < total && lane == 0) {
        const i64 head = sample * heads + h;
        deltas[head * padded + token] = sum;
        log_sums[head * padded + token] = there ? lse[head * tokens + token] * LOG2E : __int_as_float(0x7f800000);
    }
}

// A block brings dQ of BLOCK queries to its place, a warp 16 of them. Grid: B·H·⌈T/BLOCK⌉, 256 threads.
template <typename E, int D, int HALVES, bool SUM>
__global__ void flash_grad_end(const float* __restrict__ dq, E* __restrict__ dqkv, float* __restrict__ sums, int tokens,
                               int heads) {
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
