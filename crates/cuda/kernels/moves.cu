// Copies of ranges of memory, of the GPU or pinned host memory, in one launch.
#include "common.cuh"

struct Move {
    const u8* from;
    u8* to;
    i64 bytes;
};

// Four units at a time, each thread.
__device__ __forceinline__ void move(const Move& m) {
    const i64 first = (i64)blockIdx.x * blockDim.x + threadIdx.x, all = (i64)gridDim.x * blockDim.x;
    i64 whole = 0;
    if (((u64)m.from | (u64)m.to) % 16 == 0) {
        whole = m.bytes / 16;
        const uint4* from = reinterpret_cast<const uint4*>(m.from);
        uint4* to = reinterpret_cast<uint4*>(m.to);
        i64 i = first;
        for (; i + 3 * all < whole; i += 4 * all) {
            uint4 x[4];
#pragma unroll
            for (int k = 0; k < 4; k++) x[k] = from[i + k * all];
#pragma unroll
            for (int k = 0; k < 4; k++) to[i + k * all] = x[k];
        }
        for (; i < whole; i += all) to[i] = from[i];
    }
    for (i64 i = 16 * whole + first; i < m.bytes; i += all) m.to[i] = m.from[i];
}

// Grid: any number of blocks × the number of moves, up to six.
__global__ void moves(const u8* f0, u8* t0, i64 n0, const u8* f1, u8* t1, i64 n1, const u8* f2, u8* t2, i64 n2, const u8* f3,
                      u8* t3, i64 n3, const u8* f4, u8* t4, i64 n4, const u8* f5, u8* t5, i64 n5) {
    switch (blockIdx.y) {
        case 0: return move({f0, t0, n0});
        case 1: return move({f1, t1, n1});
        case 2: return move({f2, t2, n2});
        case 3: return move({f3, t3, n3});
        case 4: return move({f4, t4, n4});
        default: return move({f5, t5, n5});
    }
}
