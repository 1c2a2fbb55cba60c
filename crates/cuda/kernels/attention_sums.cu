// Sums that cuDNN's attention doesn't compute: the gradients of the biases of queries, keys and values.
//
// Legend: B batch, T tokens, C channels (heads times head size). dqkv is (B,T,3C), dout (B,T,C).
#include "common.cuh"

// Sums over `piece` tokens at a time, a row of `sums` (B·⌈T/piece⌉,3C) for each. Over a row of probabilities, P sums to 1 and dS
// to 0, so that dV sums to what dO does, and dK to nothing; dQ is read. Eight lanes have 64 columns, 32 rows at a time.
// Grid: (B·⌈T/piece⌉, ⌈C/64⌉), 256 threads.
template <typename E>
__global__ void __launch_bounds__(256)
    attention_sums(const E* __restrict__ dqkv, const E* __restrict__ dout, float* __restrict__ sums, int tokens, int channels,
                   int piece) {
    constexpr int ROWS = 32;
    __shared__ float all[2][ROWS][64 + 1];
    const int pieces = (tokens + piece - 1) / piece, sample = blockIdx.x / pieces, first = blockIdx.x % pieces * piece;
    const int lane = threadIdx.x % 8, row = threadIdx.x / 8, column = blockIdx.y * 64 + 8 * lane;
    const int last = min(tokens, first + piece);
    float q[8] = {}, v[8] = {};
    if (column < channels)
#pragma unroll 4
        for (int token = first + row; token < last; token += ROWS) {
            const i64 at = (i64)sample * tokens + token;
            float x[8], y[8];
            Pack<E, 8>::load(dqkv + at * 3 * channels + column, x);
            Pack<E, 8>::load(dout + at * channels + column, y);
#pragma unroll
            for (int i = 0; i < 8; i++) q[i] += x[i], v[i] += y[i];
        }
#pragma unroll
    for (int i = 0; i < 8; i++) all[0][row][8 * lane + i] = q[i], all[1][row][8 * lane + i] = v[i];
    __syncthreads();
    const int which = threadIdx.x / 64, of = blockIdx.y * 64 + threadIdx.x % 64;
    if (which > 2 || of >= channels) return;
    // Queries, keys, values.
    float sum = 0.0f;
    if (which != 1)
        for (int r = 0; r < ROWS; r++) sum += all[which / 2][r][threadIdx.x % 64];
    sums[(i64)blockIdx.x * 3 * channels + which * channels + of] = sum;
}
