// Matmuls on Hopper (sm_90a only) with a fused epilogue: bias, GELU, or the gradient of one.
//
// result (M,N) = left (M,K) · right, left row-major, right either (N,K) row-major (a weight, transposed) or (K,N) row-major.
// Blocks stay: each walks over tiles of the result. One warp asks the copy engine for the operands, 64 of K at a time, into a
// ring of stages; two warpgroups multiply. In turns (PINGPONG) each has a tile of its own, so that one multiplies while the
// other finishes its tile; together, each has half of the tile's rows.
//
// Shared memory: stages (left tile, right tile), per warpgroup a ring of pieces (64 rows × 64 columns) that are stored or loaded,
// a row of bias or of column sums, barriers. Tiles and pieces have rows of 128 bytes, their 16-byte units swizzled by row & 7.
#include "hopper.cuh"

enum Epilogue {
    PLAIN,      // first = matmul + bias
    GELU,       // first = matmul + bias, second = GELU(matmul + bias) of the unrounded sum
    GELU_GRAD,  // second = matmul ∘ GELU'(first); partial[i] = sums over the columns of its i-th HALVES·64 rows
};

constexpr int PIECE = 64 * 64 * 2;  // bytes

// --- warpgroups

// Threads of one warpgroup, 0 or 1.
__device__ __forceinline__ void group_sync(int group) { asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory"); }
// Warpgroups take turns: one waits for its turn, the other gives it.
__device__ __forceinline__ void turn_wait(int group) { asm volatile("bar.sync %0, 256;" ::"r"(3 + group) : "memory"); }
__device__ __forceinline__ void turn_give(int group) { asm volatile("bar.arrive %0, 256;" ::"r"(3 + group) : "memory"); }

// --- between registers and swizzled pieces: four 8 × 8 matrices

__device__ __forceinline__ void write_matrices(u32 to, const u32 (&x)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"(to), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
}
__device__ __forceinline__ void read_matrices(u32 from, u32 (&x)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(from) : "memory");
}
template <typename T> __device__ __forceinline__ u32 halves(float low, float high) { return pack2<T>(low, high); }
template <> __device__ __forceinline__ u32 halves<f16>(float low, float high) {
    u32 y;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}

// --- GELU, of eight at a time: a step is taken for all before the next, so that none waits for the one before.

#define EACH _Pragma("unroll") for (int i = 0; i < 8; i++)

// GELU(x) = max(x, 0) - |x|·Φ(-|x|), Φ(-a) = 2^P(a): relative error 8e-5 up to a = 4, absolute error 1e-8 beyond.
__device__ __forceinline__ void gelu(const float (&x)[8], float (&y)[8]) {
    EACH y[i] = fmaf(fabsf(x[i]), -3.293743e-4f, 5.9133093e-3f);
    EACH y[i] = fmaf(fabsf(x[i]), y[i], -4.8524898e-2f);
    EACH y[i] = fmaf(fabsf(x[i]), y[i], -0.46373683f);
    EACH y[i] = fmaf(fabsf(x[i]), y[i], -1.1493489f);
    EACH y[i] = fmaf(fabsf(x[i]), y[i], -1.00011f);
    EACH y[i] = exp2_fast(y[i]);
    EACH y[i] = fmaf(-fabsf(x[i]), y[i], fmaxf(x[i], 0.0f));
}
// d · GELU'(x). GELU'(x) = Φ(x) + x·φ(x) is h = e^(-x²/2)·Q(|x|) for negative x, 1 - h otherwise: absolute error 2e-5.
__device__ __forceinline__ void through_gelu(float (&d)[8], const float (&x)[8]) {
    float e[8], q[8];
    EACH e[i] = x[i] * -0.72134752f;
    EACH e[i] *= x[i];
    EACH q[i] = fmaf(fabsf(x[i]), -8.675542e-5f, 1.4745522e-3f);
    EACH e[i] = exp2_fast(e[i]);
    EACH q[i] = fmaf(fabsf(x[i]), q[i], -1.0631471e-2f);
    EACH q[i] = fmaf(fabsf(x[i]), q[i], 4.3843262e-2f);
    EACH q[i] = fmaf(fabsf(x[i]), q[i], -0.12028231f);
    EACH q[i] = fmaf(fabsf(x[i]), q[i], 0.2456626f);
    EACH q[i] = fmaf(fabsf(x[i]), q[i], -0.7973203f);
    EACH q[i] = fmaf(fabsf(x[i]), q[i], 0.499988f);
    EACH q[i] = fmaf(-e[i], q[i], 0.5f);
    EACH q[i] = 0.5f + copysignf(q[i], x[i]);
    EACH d[i] *= q[i];
}

// --- tiles, in groups of `group` rows of tiles: down a group's first column, then its second...

struct Tiles {
    int down, across, group;
    __device__ __forceinline__ int count() const { return down * across; }
    __device__ __forceinline__ void at(int tile, int& row, int& column) const {
        int first = tile / (group * across) * group, within = tile % (group * across);
        int high = min(group, down - first);
        row = first + within % high;
        column = within / high;
    }
};

// One lane of each pair keeps the first half of what both have, the other the second, added up.
template <int KEPT>
__device__ __forceinline__ void fold(const float (&from)[2 * KEPT], float (&to)[KEPT], int lane, int other) {
    const bool high = lane & other;
#pragma unroll
    for (int i = 0; i < KEPT; i++) {
        // Selected as words: a choice between two elements would become an address, and the array would move to local memory.
        const u32 low = __float_as_uint(from[i]), upper = __float_as_uint(from[i + KEPT]);
        const u32 keep = high ? upper : low, give = high ? low : upper;
        to[i] = __uint_as_float(keep) + __shfl_xor_sync(0xffffffffu, __uint_as_float(give), other);
    }
}

// The sums of columns 8·(i/2) + 2·(lane%4) + i%2 over lanes with the same lane % 4: one to each lane, in both halves of a warp.
__device__ __forceinline__ float add_lanes(const float (&sum)[4], int lane, int& column) {
    float two[2], one[1];
    fold<2>(sum, two, lane, 4);
    fold<1>(two, one, lane, 8);
    column = (lane >> 2 & 1) * 8 + 2 * (lane & 3) + (lane >> 3 & 1);
    return one[0] + __shfl_xor_sync(0xffffffffu, one[0], 16);
}

// RIGHT_ROWS: right is (K,N). HALVES: 64-row parts of a warpgroup's tile. N: columns of a tile. Blocks of a cluster (along M)
// share the right operand's tiles.
template <typename T, int EPILOGUE, bool RIGHT_ROWS, bool PINGPONG, int HALVES, int N, int STAGES, int CLUSTER>
struct Matmul {
    static constexpr int M = HALVES * 64 * (PINGPONG ? 1 : 2);
    static constexpr int LEFT_BYTES = M * DEPTH * 2, RIGHT_BYTES = N * DEPTH * 2, STAGE_BYTES = LEFT_BYTES + RIGHT_BYTES;
    // Pieces under way, two of a kind with GELU's two results; with GELU_GRAD all pieces of 64 columns.
    static constexpr int SLOTS = EPILOGUE == GELU_GRAD ? 4 / HALVES : 2;
    static constexpr int SLOT_BYTES = EPILOGUE == GELU_GRAD ? HALVES * PIECE : EPILOGUE == GELU ? 2 * PIECE : PIECE;
    static constexpr int STRIPS = N / 64;
    static constexpr int AT_PIECES = STAGES * STAGE_BYTES;
    static constexpr int AT_ROW = AT_PIECES + 2 * SLOTS * SLOT_BYTES;
    static constexpr int AT_BARRIERS = AT_ROW + 2048;
    static constexpr int SHARED = AT_BARRIERS + 256;
    static_assert(SHARED <= 232448, "more shared memory than a block can have");
    static_assert(2 * STAGES * 8 + 2 * SLOTS * 8 <= 256, "");

    u32 memory;
    u8* generic;
    Tiles tiles;
    int rows, columns, steps;

    __device__ __forceinline__ u32 full(int stage) const { return memory + AT_BARRIERS + 8 * stage; }
    __device__ __forceinline__ u32 empty(int stage) const { return full(STAGES + stage); }
    __device__ __forceinline__ u32 arrived(int group, int slot) const { return full(2 * STAGES + group * SLOTS + slot); }
    // A warpgroup's row: the bias of its tile, or column sums of its warps.
    __device__ __forceinline__ float* row_of(int group) const { return reinterpret_cast<float*>(generic + AT_ROW) + group * 256; }
    // First row and column of a block's tile.
    __device__ __forceinline__ void place(int tile, int rank, int& m, int& n) const {
        tiles.at(tile, m, n);
        m = (m * CLUSTER + rank) * M;
        n *= N;
    }

    __device__ __forceinline__ void load(const TensorMap& left, const TensorMap& right, int cluster, int clusters, int rank) {
        Ring<STAGES> ring(0);
        for (int tile = cluster; tile < tiles.count(); tile += clusters) {
            int m, n;
            place(tile, rank, m, n);
#pragma unroll 1
            for (int step = 0; step < steps; step++, ring.next()) {
                u32 to = memory + ring.stage * STAGE_BYTES, barrier = full(ring.stage);
                barrier_wait(empty(ring.stage), ring.parity ^ 1);
                barrier_expect(barrier, STAGE_BYTES);
                load_tile(to, left, step * DEPTH, m, barrier);
                to += LEFT_BYTES;
                if constexpr (RIGHT_ROWS) {
                    // Strips of 64 columns; a cluster's blocks each bring some rows of each.
                    constexpr int PART = DEPTH / CLUSTER;
#pragma unroll
                    for (int strip = 0; strip < N / 64; strip++)
                        share(to + strip * 8192 + rank * PART * 128, right, n + strip * 64, step * DEPTH + rank * PART, barrier);
                } else {
                    constexpr int PART = N / CLUSTER;
                    share(to + rank * PART * 128, right, step * DEPTH, n + rank * PART, barrier);
                }
            }
        }
    }
    __device__ __forceinline__ void share(u32 to, const TensorMap& map, int x, int y, u32 barrier) {
        if constexpr (CLUSTER == 1) load_tile(to, map, x, y, barrier);
        else load_tile_to_all(to, map, x, y, barrier, (1 << CLUSTER) - 1);
    }

    __device__ __forceinline__ void release(int stage, int lane) {
        if constexpr (CLUSTER == 1) {
            if (lane == 0) barrier_arrive(empty(stage));
        } else if (lane < CLUSTER) {
            barrier_arrive_at(empty(stage), lane);
        }
    }

    // In turns: a parity tells a stage's round from the one before only, so a warpgroup looks at the stages when the other has
    // seen all of its own.
    __device__ __forceinline__ void accumulate(float (&d)[HALVES][N / 2], Ring<STAGES> ring, int group, int lane, bool last) {
        constexpr int STRIP = RIGHT_ROWS ? DEPTH * 128 : 16, K16 = RIGHT_ROWS ? 16 * 128 : 32;
        int before = 0;
        if constexpr (PINGPONG) turn_wait(group);
        for (int step = 0; step < steps; step++) {
            u32 at = memory + ring.stage * STAGE_BYTES;
            u64 left = descriptor(at + (PINGPONG ? 0 : group * HALVES * 8192), 16), right = descriptor(at + LEFT_BYTES, STRIP);
            barrier_wait(full(ring.stage), ring.parity);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < DEPTH / 16; k++)
#pragma unroll
                for (int half = 0; half < HALVES; half++)
                    multiply<T, N, false, RIGHT_ROWS>(d[half], left + (half * 8192 + k * 32) / 16, right + k * K16 / 16, step | k);
            wgmma_commit();
            // The step before is done: its stage can be filled again.
            wgmma_wait<1>();
            if (step > 0) release(before, lane);
            before = ring.stage;
            ring.next();
        }
        if (PINGPONG && !last) turn_give(1 - group);
        wgmma_wait<0>();
        release(before, lane);
#pragma unroll
        for (int half = 0; half < HALVES; half++) ::arrived(d[half]);
    }

    // A thread of the warpgroups that multiply.
    struct Thread {
        int group, thread, warp, lane;
        u32 pieces;  // where the group's slots lie
        u32 row;     // in a piece, the start of this lane's row of the matrices that a warp moves at once
        bool leader;
        u32 count;  // slots used so far
        __device__ __forceinline__ Thread(u32 memory) {
            group = threadIdx.x / 128 - 1, thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
            pieces = memory + AT_PIECES + group * SLOTS * SLOT_BYTES;
            row = (warp * 16 + (lane & 15)) * 128;
            leader = thread == 0, count = 0;
        }
        // This lane's 16 bytes of the matrices of 16 columns.
        __device__ __forceinline__ u32 in_piece(int part) const { return row + (((part * 2 + (lane >> 4)) ^ (lane & 7)) << 4); }
    };

    // PLAIN and GELU: writes the results, piece by piece.
    __device__ __forceinline__ void finish(const float (&d)[HALVES][N / 2], const TensorMap& first, const TensorMap& second,
                                           Thread& t, int m, int n) {
        // Of the 16 columns that come next.
        const float* row = row_of(t.group) + 2 * (t.lane & 3);
        float2 bias[2] = {*reinterpret_cast<const float2*>(row), *reinterpret_cast<const float2*>(row + 8)};
#pragma unroll
        for (int piece = 0; piece < STRIPS * HALVES; piece++, t.count++) {
            const int strip = piece / HALVES, half = piece % HALVES;
            const u32 at = t.pieces + t.count % SLOTS * SLOT_BYTES;
            // 16 columns at a time: pairs of them in rows of this lane and 8 below, in 8 columns, then in the next 8.
#pragma unroll
            for (int part = 0; part < 4; part++) {
                float x[8], y[8];
                u32 packed[4];
                EACH x[i] = d[half][strip * 32 + part * 8 + i] + (i % 2 ? bias[i / 4].y : bias[i / 4].x);
                const int next = part < 3 ? strip * 64 + part * 16 + 16 : (piece + 1) / HALVES % STRIPS * 64;
#pragma unroll
                for (int i = 0; i < 2; i++) bias[i] = *reinterpret_cast<const float2*>(row + next + i * 8);
#pragma unroll
                for (int i = 0; i < 4; i++) packed[i] = halves<T>(x[2 * i], x[2 * i + 1]);
                write_matrices(at + t.in_piece(part), packed);
                if constexpr (EPILOGUE == GELU) {
                    gelu(x, y);
#pragma unroll
                    for (int i = 0; i < 4; i++) packed[i] = halves<T>(y[2 * i], y[2 * i + 1]);
                    write_matrices(at + PIECE + t.in_piece(part), packed);
                }
            }
            publish();
            // The piece before is stored: the next one may take its slot.
            if (t.leader) stores_wait_read<0>();
            group_sync(t.group);
            if (t.leader) {
                const int x = n + strip * 64, y = m + half * 64;
                store_tile(at, first, x, y);
                if constexpr (EPILOGUE == GELU) store_tile(at + PIECE, second, x, y);
                stores_commit();
            }
            __syncwarp();
        }
    }

    // GELU_GRAD: the GELU's input is loaded to, and the result stored from, the same place.
    __device__ __forceinline__ void bring(const TensorMap& first, const Thread& t, u32 slot, int x, int m) {
        barrier_expect(arrived(t.group, slot), SLOT_BYTES);
#pragma unroll
        for (int half = 0; half < HALVES; half++)
            load_tile(t.pieces + slot * SLOT_BYTES + half * PIECE, first, x, m + half * 64, arrived(t.group, slot));
    }
    __device__ __forceinline__ void finish_grad(float (&d)[HALVES][N / 2], const TensorMap& first, const TensorMap& second,
                                                float* partial, Thread& t, int m, int n) {
        float* row = row_of(t.group);
#pragma unroll
        for (int strip = 0; strip < STRIPS; strip++, t.count++) {
            const u32 slot = t.count % SLOTS, at = t.pieces + slot * SLOT_BYTES;
            barrier_wait(arrived(t.group, slot), t.count / SLOTS & 1);
#pragma unroll
            for (int part = 0; part < 4; part++) {
                float sum[4] = {};
#pragma unroll
                for (int half = 0; half < HALVES; half++) {
                    float x[8], y[8];
                    u32 packed[4];
                    read_matrices(at + half * PIECE + t.in_piece(part), packed);
                    EACH y[i] = d[half][strip * 32 + part * 8 + i];
#pragma unroll
                    for (int i = 0; i < 4; i++) unpack2<T>(packed[i], x[2 * i], x[2 * i + 1]);
                    through_gelu(y, x);
                    EACH sum[i / 4 * 2 + i % 2] += y[i];
#pragma unroll
                    for (int i = 0; i < 4; i++) packed[i] = halves<T>(y[2 * i], y[2 * i + 1]);
                    write_matrices(at + half * PIECE + t.in_piece(part), packed);
                }
                int column;
                const float both = add_lanes(sum, t.lane, column);
                if (t.lane < 16) row[t.warp * 64 + part * 16 + column] = both;
                // By now the strip before is stored: one that waits for its slot may be loaded.
                if (part == 1 && strip > 0 && strip - 1 + SLOTS < STRIPS && t.leader) {
                    stores_wait_read<0>();
                    bring(first, t, (t.count - 1) % SLOTS, n + (strip - 1 + SLOTS) * 64, m);
                }
                __syncwarp();
            }
            publish();
            group_sync(t.group);
            if (t.leader) {
#pragma unroll
                for (int half = 0; half < HALVES; half++) store_tile(at + half * PIECE, second, n + strip * 64, m + half * 64);
                stores_commit();
            }
            __syncwarp();
            const int i = t.thread, column = n + strip * 64 + i;
            if (i < 64 && column < columns && m < rows)
                partial[(i64)(m / (HALVES * 64)) * columns + column] = (row[i] + row[64 + i]) + (row[128 + i] + row[192 + i]);
            group_sync(t.group);
        }
    }

    __device__ __forceinline__ void consume(const TensorMap& first, const TensorMap& second, const T* bias, float* partial,
                                            int cluster, int clusters, int rank) {
        Thread t(memory);
        if (PINGPONG && t.group == 1 && cluster < tiles.count()) turn_give(0);

        for (int turn = 0, tile = cluster; tile < tiles.count(); tile += clusters, turn++) {
            if (PINGPONG && turn % 2 != t.group) continue;
            int m, n;
            place(tile, rank, m, n);
            if (!PINGPONG) m += t.group * HALVES * 64;
            float d[HALVES][N / 2];
            if constexpr (EPILOGUE == GELU_GRAD) {
                if (t.leader) {
                    stores_wait_read<0>();
#pragma unroll
                    for (int strip = 0; strip < STRIPS && strip < SLOTS; strip++)
                        bring(first, t, (t.count + strip) % SLOTS, n + strip * 64, m);
                }
                __syncwarp();
            } else {
                float* row = row_of(t.group);
                for (int i = t.thread; i < N; i += 128) row[i] = bias && n + i < columns ? to_float(bias[n + i]) : 0.0f;
            }
            accumulate(d, Ring<STAGES>((u32)turn * steps), t.group, t.lane, tile + clusters >= tiles.count());
            if constexpr (EPILOGUE == GELU_GRAD) finish_grad(d, first, second, partial, t, m, n);
            else group_sync(t.group), finish(d, first, second, t, m, n);
        }
        if (t.leader) stores_wait();
    }
};

// bias may be null. Grid: as many blocks as multiprocessors (a multiple of CLUSTER), 384 threads each.
template <typename T, int EPILOGUE, bool RIGHT_ROWS, bool PINGPONG, int HALVES, int N, int STAGES, int CLUSTER>
__global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(384, 1)
    matmul(const __grid_constant__ TensorMap left, const __grid_constant__ TensorMap right,
            const __grid_constant__ TensorMap first, const __grid_constant__ TensorMap second, const T* bias, float* partial,
            int rows, int columns, int depth, int group) {
    using P = Matmul<T, EPILOGUE, RIGHT_ROWS, PINGPONG, HALVES, N, STAGES, CLUSTER>;
    extern __shared__ __align__(1024) u8 memory[];
    P p;
    p.generic = memory;
    p.memory = shared_address(memory);
    p.tiles.down = (rows + P::M * CLUSTER - 1) / (P::M * CLUSTER);
    p.tiles.across = (columns + N - 1) / N;
    p.tiles.group = group;
    p.rows = rows, p.columns = columns, p.steps = (depth + DEPTH - 1) / DEPTH;
    const int rank = CLUSTER == 1 ? 0 : blockIdx.x % CLUSTER, cluster = blockIdx.x / CLUSTER, clusters = gridDim.x / CLUSTER;

    if (threadIdx.x == 0) {
        if (p.memory % 1024 != 0) asm volatile("trap;");
        for (int stage = 0; stage < STAGES; stage++) {
            barrier_init(p.full(stage), 1);
            barrier_init(p.empty(stage), 4 * CLUSTER * (PINGPONG ? 1 : 2));
        }
        for (int slot = 0; slot < 2 * P::SLOTS; slot++) barrier_init(p.arrived(0, slot), 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        publish();
    }
    __syncthreads();
    if constexpr (CLUSTER > 1) cluster_sync();

    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x == 0) p.load(left, right, cluster, clusters, rank);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        p.consume(first, second, bias, partial, cluster, clusters, rank);
    }
    // The other blocks of the cluster write and signal here until they are done.
    if constexpr (CLUSTER > 1) {
        __syncwarp();
        cluster_sync();
    }
}
