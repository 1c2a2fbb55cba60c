// Gradients of weights on Hopper (sm_90a only): up to four matmuls left (K,M)ᵀ · right (K,N) → f32 (M,N) in one launch,
// all of one K.
//
// Small results have too few tiles for all multiprocessors, and K is long. So a cluster of blocks shares a tile, each with its part of
// K: one warp asks the copy engine for the operands, 64 of K at a time, into a ring of stages, and each of GROUPS warpgroups
// multiplies for 64 rows of the tile. Then every block leaves its sums in shared memory, where the stages were, and adds up its
// share of the tile's columns from all blocks of the cluster, in their order.
#include "hopper.cuh"

struct Weight {
    float* out;
    int rows, columns, adds;
};

// CLUSTER: blocks to a tile.
template <typename T, int GROUPS, int N, int STAGES, int CLUSTER> struct Weights {
    static constexpr int M = GROUPS * 64, THREADS = GROUPS * 128;  // that multiply
    static constexpr int STRIP = DEPTH * 128;                       // bytes of 64 columns
    static constexpr int LEFT_BYTES = GROUPS * STRIP, STAGE_BYTES = LEFT_BYTES + N / 64 * STRIP;
    static constexpr int AT_BARRIERS = STAGES * STAGE_BYTES, SHARED = AT_BARRIERS + 128;
    // Four columns' sums of a thread lie together: two of 8 columns in each of two rows.
    static constexpr int FOURS = N / 8, SHARE = FOURS / CLUSTER;
    static_assert(FOURS % CLUSTER == 0 && M * N * 4 <= AT_BARRIERS && SHARED <= 232448 && 2 * STAGES * 8 <= 128, "");

    u32 memory;
    int steps, first;

    __device__ __forceinline__ u32 full(int stage) const { return memory + AT_BARRIERS + 8 * stage; }
    __device__ __forceinline__ u32 empty(int stage) const { return full(STAGES + stage); }

    __device__ __forceinline__ void load(const TensorMap& left, const TensorMap& right, int m, int n) const {
        Ring<STAGES> ring(0);
#pragma unroll 1
        for (int step = 0; step < steps; step++, ring.next()) {
            const u32 to = memory + ring.stage * STAGE_BYTES, barrier = full(ring.stage);
            const int k = (first + step) * DEPTH;
            barrier_wait(empty(ring.stage), ring.parity ^ 1);
            barrier_expect(barrier, STAGE_BYTES);
#pragma unroll
            for (int strip = 0; strip < GROUPS; strip++) load_tile(to + strip * STRIP, left, m + strip * 64, k, barrier);
#pragma unroll
            for (int strip = 0; strip < N / 64; strip++)
                load_tile(to + LEFT_BYTES + strip * STRIP, right, n + strip * 64, k, barrier);
        }
    }

    __device__ __forceinline__ void accumulate(float (&d)[N / 2], int group, int lane) const {
        Ring<STAGES> ring(0);
        int before = 0;
        for (int step = 0; step < steps; step++) {
            const u32 at = memory + ring.stage * STAGE_BYTES;
            const u64 left = descriptor(at + group * STRIP, STRIP), right = descriptor(at + LEFT_BYTES, STRIP);
            barrier_wait(full(ring.stage), ring.parity);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < DEPTH / 16; k++)
                multiply<T, N, true, true>(d, left + k * (16 * 128 / 16), right + k * (16 * 128 / 16), step | k);
            wgmma_commit();
            // The step before is done: its stage can be filled again.
            wgmma_wait<1>();
            if (step > 0 && lane == 0) barrier_arrive(empty(before));
            before = ring.stage;
            ring.next();
        }
        wgmma_wait<0>();
        arrived(d);
    }

    __device__ __forceinline__ void leave(const float (&d)[N / 2], int thread) const {
        // All warpgroups are done with the stages.
        asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory");
#pragma unroll
        for (int i = 0; i < FOURS; i++)
            asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(place(i, thread)), "f"(d[4 * i]), "f"(d[4 * i + 1]),
                         "f"(d[4 * i + 2]), "f"(d[4 * i + 3]) : "memory");
    }
    __device__ __forceinline__ u32 place(int four, int thread) const { return memory + (four * THREADS + thread) * 16; }

    // Adds up the sums of the cluster's blocks.
    __device__ __forceinline__ float4 sum(int four, int thread) const {
        float4 parts[CLUSTER];
#pragma unroll
        for (int block = 0; block < CLUSTER; block++) {
            float4& x = parts[block];
            asm volatile("{ .reg .b32 there; mapa.shared::cluster.u32 there, %4, %5;"
                         " ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there]; }"
                         : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(place(four, thread)), "r"(block) : "memory");
        }
        float4 sum = parts[0];
#pragma unroll
        for (int block = 1; block < CLUSTER; block++)
            sum.x += parts[block].x, sum.y += parts[block].y, sum.z += parts[block].z, sum.w += parts[block].w;
        return sum;
    }

    // Of columns n and n + 1 in rows m and m + 8.
    static __device__ __forceinline__ void write(const Weight& weight, float4 x, int m, int n) {
        if (n >= weight.columns) return;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = m + 8 * half;
            if (row >= weight.rows) return;
            float2* out = reinterpret_cast<float2*>(weight.out + (i64)row * weight.columns + n);
            float2 y = half ? make_float2(x.z, x.w) : make_float2(x.x, x.y);
            if (weight.adds) y.x += out->x, y.y += out->y;
            *out = y;
        }
    }
};

// Grid: CLUSTER blocks for each tile of all matmuls, the matmuls one after the other; those there are not have no rows.
template <typename T, int GROUPS, int N, int STAGES, int CLUSTER>
__global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(GROUPS * 128 + 128, 1)
    weights(const __grid_constant__ TensorMap left0, const __grid_constant__ TensorMap right0,
            const __grid_constant__ TensorMap left1, const __grid_constant__ TensorMap right1,
            const __grid_constant__ TensorMap left2, const __grid_constant__ TensorMap right2,
            const __grid_constant__ TensorMap left3, const __grid_constant__ TensorMap right3, float* out0, float* out1,
            float* out2, float* out3, int rows0, int rows1, int rows2, int rows3, int columns0, int columns1, int columns2,
            int columns3, int depth, int adds) {
    using W = Weights<T, GROUPS, N, STAGES, CLUSTER>;
    extern __shared__ __align__(1024) u8 memory[];
    const int rank = CLUSTER == 1 ? 0 : blockIdx.x % CLUSTER, group = threadIdx.x / 128 - 1;
    const TensorMap* lefts[4] = {&left0, &left1, &left2, &left3};
    const TensorMap* rights[4] = {&right0, &right1, &right2, &right3};
    const Weight all[4] = {{out0, rows0, columns0, adds & 1}, {out1, rows1, columns1, adds >> 1 & 1},
                           {out2, rows2, columns2, adds >> 2 & 1}, {out3, rows3, columns3, adds >> 3 & 1}};
    const TensorMap *left = lefts[0], *right = rights[0];
    Weight weight = all[0];
    int tile = blockIdx.x / CLUSTER, across = (weight.columns + N - 1) / N;
    bool later = true;
#pragma unroll
    for (int i = 1; i < 4; i++) {
        const int tiles = (weight.rows + W::M - 1) / W::M * across;
        later = later && tile >= tiles;
        if (later) {
            tile -= tiles;
            left = lefts[i], right = rights[i], weight = all[i], across = (weight.columns + N - 1) / N;
        }
    }
    const int m = tile / across * W::M, n = tile % across * N;
    W w;
    w.memory = shared_address(memory);
    const int steps = (depth + DEPTH - 1) / DEPTH;
    w.first = rank * steps / CLUSTER;
    w.steps = (rank + 1) * steps / CLUSTER - w.first;

    if (threadIdx.x == 0) {
        if (w.memory % 1024 != 0) asm volatile("trap;");
        for (int stage = 0; stage < STAGES; stage++) {
            barrier_init(w.full(stage), 1);
            barrier_init(w.empty(stage), 4 * GROUPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        publish();
    }
    __syncthreads();

    // A thread's sums: rows of the tile, columns of each 8.
    const int thread = threadIdx.x - 128, lane = threadIdx.x % 32;
    const int row = m + group * 64 + (thread % 128) / 32 * 16 + lane / 4, column = n + 2 * (lane % 4);
    if (group < 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x == 0) w.load(*left, *right, m, n);
        __syncwarp();
        if constexpr (CLUSTER > 1) cluster_sync(), cluster_sync();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 160;");
        float d[N / 2];
        w.accumulate(d, group, lane);
        if constexpr (CLUSTER > 1) {
            w.leave(d, thread);
            cluster_sync();
#pragma unroll
            for (int i = 0; i < W::SHARE; i++) {
                const int four = rank * W::SHARE + i;
                W::write(weight, w.sum(four, thread), row, column + 8 * four);
            }
            // The others may still read here.
            cluster_sync();
        } else {
#pragma unroll
            for (int i = 0; i < W::FOURS; i++)
                W::write(weight, make_float4(d[4 * i], d[4 * i + 1], d[4 * i + 2], d[4 * i + 3]), row, column + 8 * i);
        }
    }
}
