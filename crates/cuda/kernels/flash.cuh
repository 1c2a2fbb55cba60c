// Tiles of attention over any number of tokens for Hopper: a pipeline of copies by tensor maps, matmuls of warpgroups. Head sizes
// that 8 divides, up to 128; 16-bit elements. sm_90a only.
//
// Legend: B batch, H heads, T tokens, D head size, C = H·D. A strip is 64 columns of a tile: rows of 128 bytes, swizzled. What a
// head has not (tokens from T on, columns from D on) is zeros: the copy engine writes them.
#pragma once
#include "attention_tiles.cuh"
#include "pipeline.cuh"

// Tokens of a block's keys, and of one row of partial column sums.
constexpr int BLOCK = 128;

// What dropout takes: where draws begin, and what kept probabilities are multiplied by.
struct Drops {
    const Header* header;
    u32 site, threshold;
    float keep_scale;
};

// Which keys of N stay, for this thread's two queries: eight bits for every 16 of them, as KeptKeys has them.
template <int N> struct KeptTiles {
    static constexpr int TILES = N / 16, WORDS = ceil_div(TILES, 4);
    u32 words[WORDS];

    // Of a tile of queries whose first row's draws `token` names, and keys from tile `first` on.
    __device__ __forceinline__ void draw(const Stream& stream, u32 token, int first, u32 threshold) {
#pragma unroll
        for (int w = 0; w < WORDS; w++) {
            words[w] = 0;
#pragma unroll 2
            for (int i = 0; i < 4 && 4 * w + i < TILES; i++)
                words[w] |= KeptKeys(stream, token, first + 4 * w + i, threshold).bits << (8 * i);
        }
    }
    // What goes becomes 0.
    __device__ __forceinline__ void apply(float (&s)[N / 2]) const {
        const int lane = threadIdx.x % 32, t = lane % 4;
#pragma unroll
        for (int w = 0; w < WORDS; w++)
#pragma unroll
            for (int side = 0; side < 2; side++) {
                const u32 stay = __shfl_sync(0xffffffffu, words[w], (lane & ~3) | (2 * side + t / 2)) >> (2 * (t % 2));
#pragma unroll
                for (int i = 0; i < 16; i++) {
                    const int tile = 4 * w + i / 4, e = i % 4;
                    if (tile < TILES && !(stay >> (8 * (i / 4) + 4 * (e / 2) + e % 2) & 1)) s[8 * tile + 4 * side + e] = 0.0f;
                }
            }
    }
};

template <int D> struct Strips {
    static_assert(D % 8 == 0 && D <= 128, "");
    static constexpr int COUNT = ceil_div(D, 64);
    // Of a matmul that sums over the head.
    static constexpr int STEPS = ceil_div(D, 16);

    // Bytes of a tile, and of one of its strips.
    static __host__ __device__ constexpr int strip(int rows) { return rows * 128; }
    static __host__ __device__ constexpr int tile(int rows) { return COUNT * rows * 128; }

    // Elements 16·k on of a tile of ROWS rows, from the row at `address` on: a side whose rows lie in memory as they are summed.
    template <int ROWS> static __device__ __forceinline__ u64 side(u32 address, int k) {
        return Rows<64>::side(address + k / 4 * strip(ROWS) + k % 4 * 32);
    }
    // 16 rows of a tile of ROWS, all columns: a side that is summed over rows.
    template <int ROWS> static __device__ __forceinline__ u64 turned(u32 address) {
        return (u64)(address >> 4) | (u64)(strip(ROWS) >> 4) << 16 | 64ull << 32 | 1ull << 62;
    }
};

// A tile of a head's rows from `token` on, ROWS at once, to shared memory; head `head` of `sample`.
template <int D, int ROWS>
__device__ __forceinline__ void load_rows(u32 to, const TensorMap& map, int head, int token, int sample, u32 barrier) {
#pragma unroll
    for (int i = 0; i < Strips<D>::COUNT; i++)
        load_tile(to + i * Strips<D>::strip(ROWS), map, 64 * i, head, token, sample, barrier);
}

// All lanes of a warp are through with what the barrier guards.
__device__ __forceinline__ void warp_arrive(u32 barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
}

template <int COUNT> __device__ __forceinline__ void fewer_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT> __device__ __forceinline__ void more_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// Leaves a warp's 16 rows of a result, rows g times `low` and rows g+8 times `high`, in a tile of ROWS rows, from the row at `to`
// on.
template <typename E, int D, int ROWS>
__device__ __forceinline__ void stage_rows(u32 to, const float (&x)[D / 2], float low, float high) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < Strips<D>::STEPS; k++) {
        u32 words[4] = {};
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (16 * k + 8 * (i / 2) < D) {
                const float factor = i % 2 ? high : low;
                words[i] = pack2<E>(x[8 * k + 2 * i] * factor, x[8 * k + 2 * i + 1] * factor);
            }
        store_matrices(to + k / 4 * Strips<D>::strip(ROWS) + Rows<64>::at(lane % 16, k % 4 * 2 + lane / 16), words);
    }
}
// Starts to bring what a warp staged to a head's rows from `token` on. By one thread, once all lanes have published.
template <int D, int ROWS>
__device__ __forceinline__ void store_staged(u32 from, const TensorMap& map, int head, int token, int sample) {
#pragma unroll
    for (int i = 0; i < Strips<D>::COUNT; i++)
        store_tile(from + i * Strips<D>::strip(ROWS), map, 64 * i, head, token, sample);
}
// Until the copy engine has read what this warp staged.
__device__ __forceinline__ void await_staged() {
    if (threadIdx.x % 32 == 0) stores_wait_read<0>();
    __syncwarp();
}

// Writes a warp's 16 rows of a result, rows g times `low` and rows g+8 times `high`, to rows first..tokens of a head.
template <int D, typename E>
__device__ __forceinline__ void store_head_rows(E* head, int stride, int first, int tokens, const float (&x)[D / 2], float low,
                                                float high) {
    const int lane = threadIdx.x % 32, t = lane % 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = first + lane / 4 + 8 * half;
        const float factor = half ? high : low;
        E* to = head + (i64)row * stride;
#pragma unroll
        for (int j = 0; j + 4 <= D / 8; j += 4) {
            u32 w[4];
#pragma unroll
            for (int i = 0; i < 4; i++)
                w[i] = pack2<E>(x[4 * (j + i) + 2 * half] * factor, x[4 * (j + i) + 2 * half + 1] * factor);
            transpose_words(w);
            if (row < tokens) *reinterpret_cast<uint4*>(to + (j + t) * 8) = make_uint4(w[0], w[1], w[2], w[3]);
        }
#pragma unroll
        for (int j = D / 8 / 4 * 4; j < D / 8; j++)
            if (row < tokens)
                *reinterpret_cast<u32*>(to + j * 8 + 2 * t) =
                    pack2<E>(x[4 * j + 2 * half] * factor, x[4 * j + 2 * half + 1] * factor);
    }
}
