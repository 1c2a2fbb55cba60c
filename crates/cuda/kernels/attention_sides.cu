// The gradient of softmax attention where heads are few, for Hopper: no memory between blocks, and so no order among them. sm_90a only.
//
// Legend: B batch, H heads, T tokens, D head size, C = H·D. qkv is (B,T,3C): queries, keys and values of a token lie side by
// side, head h at h·D of each.
//
// A block is a warpgroup that owns 64 tokens of a head, as one of two sides. On the side of keys it goes through the queries for dK and
// dV, on the side of queries through the keys for dQ: seven matmuls for a pair of tiles where flash_grad has five, but twice the blocks of
// half the tokens, two or three on a multiprocessor, and nothing to be added up. The last tile that it goes through has TAIL tokens, up to
// a multiple of 16. flash_grad_start (attention_flash_ends.cu) has computed rowsum(dO ∘ O), and the sums of dK and dV over tokens; those
// of dV with dropout are left to this kernel.
#include "flash.cuh"

constexpr int SIDE = 64;

template <typename E, int D, int TAIL, int RESIDENT, bool DROP, bool SUM> struct Sides {
    using S = Strips<D>;
    static constexpr int STAGES = D <= 64 ? 3 : 2, TILE = S::tile(SIDE);
    // Steps of what the block owns, of 16 channels, that registers hold, of each of the two: matmuls of two sides in shared memory
    // read it at its full rate. Where the block owns keys, as many as registers are free for: of 255, or of 168 with three blocks on a
    // multiprocessor.
    static constexpr int ROOM = (DROP ? 116 : 156) - D, FREE = RESIDENT == 3 ? 2 : ROOM > 0 ? ROOM / 4 : 0;
    static constexpr int MORE = FREE - S::STEPS, HELD_VALUES = MORE > 0 ? S::STEPS : FREE;
    static constexpr int HELD_KEYS = MORE > S::STEPS ? S::STEPS : MORE > 0 ? MORE : 0;
    template <bool KEYS, int I> static constexpr int HELD = !KEYS ? S::STEPS : I == 0 ? HELD_KEYS : HELD_VALUES;
    // From the start of shared memory: what the block owns (keys and values, or queries and dO), what it goes through (the others), and
    // of the latter, where these are queries, log-sum-exps and rowsum(dO ∘ O).
    static constexpr int AT_STAGES = 2 * TILE, AT_ROWS = AT_STAGES + STAGES * 2 * TILE;
    static constexpr int AT_SUMS = AT_ROWS + STAGES * 2 * SIDE * 4, AT_BARRIERS = AT_SUMS + (SUM ? 4 * D * 4 : 0);
    static constexpr int SHARED = AT_BARRIERS + (1 + 2 * STAGES) * 8;

    const TensorMap *qkv_map, *dout_map, *result_map;
    const float *log_sums, *deltas;
    float* sums;
    Drops drops;
    int tokens, heads;
    u8* shared_bytes;
    u32 shared;

    // The block's head and its first token.
    int head, first;

    __device__ __forceinline__ int tiles() const { return ceil_div(tokens, SIDE); }
    // Among the rows of log_sums and deltas, which are for a multiple of SIDE tokens.
    __device__ __forceinline__ i64 row_of(int token) const { return (i64)head * tiles() * SIDE + token; }

    __device__ __forceinline__ u32 own(int i) const { return shared + i * TILE; }
    __device__ __forceinline__ u32 other(const Ring<STAGES>& at, int i) const { return shared + AT_STAGES + (2 * at.stage + i) * TILE; }
    __device__ __forceinline__ float* rows(const Ring<STAGES>& at) const {
        return reinterpret_cast<float*>(shared_bytes + AT_ROWS) + at.stage * 2 * SIDE;
    }
    __device__ __forceinline__ u32 own_full() const { return shared + AT_BARRIERS; }
    __device__ __forceinline__ u32 full(const Ring<STAGES>& at) const { return own_full() + 8 * (1 + at.stage); }
    __device__ __forceinline__ u32 empty(const Ring<STAGES>& at) const { return own_full() + 8 * (1 + STAGES + at.stage); }

    __device__ __forceinline__ void init() {
        barrier_init(own_full(), 1);
        for (int i = 0; i < STAGES; i++) barrier_init(full(Ring<STAGES>(i)), 1), barrier_init(empty(Ring<STAGES>(i)), 4);
    }

    // By one thread, as all that fetches. KEYS: the block owns keys.
    template <bool KEYS> __device__ __forceinline__ void fetch_own() {
        const int sample = head / heads, h = head % heads;
        barrier_expect(own_full(), 2 * TILE);
        load_rows<D, SIDE>(own(0), *qkv_map, KEYS ? heads + h : h, first, sample, own_full());
        load_rows<D, SIDE>(own(1), KEYS ? *qkv_map : *dout_map, KEYS ? 2 * heads + h : h, first, sample, own_full());
    }
    template <bool KEYS> __device__ __forceinline__ void fetch(int tile) {
        if (tile >= tiles()) return;
        const Ring<STAGES> at(tile);
        const int sample = head / heads, h = head % heads;
        barrier_wait(empty(at), at.parity ^ 1);
        barrier_expect(full(at), 2 * TILE + (KEYS ? 2 * SIDE * 4 : 0));
        load_rows<D, SIDE>(other(at, 0), *qkv_map, KEYS ? h : heads + h, tile * SIDE, sample, full(at));
        load_rows<D, SIDE>(other(at, 1), KEYS ? *dout_map : *qkv_map, KEYS ? h : 2 * heads + h, tile * SIDE, sample, full(at));
        if constexpr (KEYS) {
            load_bytes(shared_address(rows(at)), log_sums + row_of(tile * SIDE), SIDE * 4, full(at));
            load_bytes(shared_address(rows(at) + SIDE), deltas + row_of(tile * SIDE), SIDE * 4, full(at));
        }
    }

    // The first steps of what the block owns, as left sides of matmuls.
    template <bool KEYS> struct Held {
        u32 x[HELD<KEYS, 0> > 0 ? HELD<KEYS, 0> : 1][4], y[HELD<KEYS, 1> > 0 ? HELD<KEYS, 1> : 1][4];
    };
    template <bool KEYS> __device__ __forceinline__ void hold(Held<KEYS>& held) const {
        const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane % 16;
        barrier_wait(own_full(), 0);
#pragma unroll
        for (int k = 0; k < S::STEPS; k++) {
            const u32 from = k / 4 * S::strip(SIDE) + Rows<64>::at(row, k % 4 * 2 + lane / 16);
            if (k < HELD<KEYS, 0>) load_matrices(held.x[k < HELD<KEYS, 0> ? k : 0], own(0) + from);
            if (k < HELD<KEYS, 1>) load_matrices(held.y[k < HELD<KEYS, 1> ? k : 0], own(1) + from);
        }
    }
    // What the block owns, of which registers hold the first STEPS, times the first N tokens of what it goes through.
    template <int N, int STEPS, int COUNT>
    __device__ __forceinline__ void meet(float (&to)[N / 2], const u32 (&held)[COUNT][4], const Ring<STAGES>& at, int i) const {
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < S::STEPS; k++) {
            const u64 right = S::template side<SIDE>(other(at, i), k);
            if (k < STEPS) wgmma<E, N, false>(to, held[k < STEPS ? k : 0], right, k > 0);
            else wgmma<E, N, false, false>(to, S::template side<SIDE>(own(i), k), right, k > 0);
        }
        wgmma_commit();
    }
    // Adds `left` times 16·N tokens of what the block goes through.
    template <int N>
    __device__ __forceinline__ void gather(float (&to)[D / 2], const u32 (&left)[N][4], const Ring<STAGES>& at, int i, bool add) const {
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < N; k++)
            wgmma<E, D, true>(to, left[k], S::template turned<SIDE>(other(at, i) + 16 * k * 128), add || k > 0);
        wgmma_commit();
    }
    // Waits for a tile, having asked for the one that takes the place of the tile before it.
    template <bool KEYS> __device__ __forceinline__ void await(int tile, const Ring<STAGES>& at) {
        if (tile > 0 && threadIdx.x == 0) fetch<KEYS>(tile - 1 + STAGES);
        __syncwarp();
        barrier_wait(full(at), at.parity);
    }

    // With PACKED, P in 16 bits is all that registers have of it from here on.
    static constexpr bool PACKED = !DROP;
    template <int N> static __device__ __forceinline__ void pin(u32 (&left)[N][4]) {
#pragma unroll
        for (int i = 0; i < 4 * N; i++) asm volatile("" : "+r"(left[i / 4][i % 4])::"memory");
    }
    // Number i of column j, as as_left leaves it.
    template <int N> static __device__ __forceinline__ float unpacked(const u32 (&left)[N][4], int j, int i) {
        float low, high;
        unpack2<E>(left[j / 2][j % 2 * 2 + i / 2], low, high);
        return i % 2 ? high : low;
    }

    // What a tile of N queries adds to dK and dV of this warp's keys, from `row` on.
    template <int N>
    __device__ __forceinline__ void step_keys(float (&dk)[D / 2], float (&dv)[D / 2], const Held<true>& held, int tile, int row,
                                              const Stream& stream) {
        const int t = threadIdx.x % 4;
        const float scale = score_scale<D>() * LOG2E;
        const Ring<STAGES> at(tile);
        await<true>(tile, at);
        float p[N / 2], ds[N / 2];
        meet<N, HELD<true, 0>>(p, held.x, at, 0);
        meet<N, HELD<true, 1>>(ds, held.y, at, 1);
        // Four bits for every eight queries.
        u32 stay = 0;
        if constexpr (DROP) {
            const u32 token = head % heads * tokens + tile * SIDE;
#pragma unroll 4
            for (int j = 0; j < N / 8; j++) stay |= kept_transposed(stream, token + 8 * j, row / 16, drops.threshold) << (4 * j);
        }
        wgmma_wait<1>();
        arrived(p);
        const float* log_sum = rows(at) + 2 * t;
        // Of keys that aren't there, nothing is stored.
        const bool there = row < tokens;
#pragma unroll
        for (int j = 0; j < N / 8; j++) {
            if (!there) break;
            const float2 sum = *reinterpret_cast<const float2*>(log_sum + 8 * j);
#pragma unroll
            for (int i = 0; i < 4; i++) p[4 * j + i] = exp2_fast(fmaf(p[4 * j + i], scale, i % 2 ? -sum.y : -sum.x));
        }
        u32 left[N / 16][4], dleft[N / 16][4];
        as_left<E, N>(left, p);
        if constexpr (DROP) {
#pragma unroll
            for (int i = 0; i < N / 4; i++)
                left[i / 4][i % 4] &= (stay >> (2 * i) & 1 ? 0xffffu : 0) | (stay >> (2 * i) & 2 ? 0xffff0000u : 0);
        }
        if constexpr (PACKED) pin(left);
        gather(dv, left, at, 1, tile > 0);
        wgmma_wait<1>();
        arrived(ds);
#pragma unroll
        for (int j = 0; j < N / 8; j++) {
            if (!there) break;
            const float2 delta = *reinterpret_cast<const float2*>(log_sum + SIDE + 8 * j);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float& x = ds[4 * j + i];
                if constexpr (DROP) x = stay >> (4 * j + i) & 1 ? x * drops.keep_scale : 0.0f;
                x = (PACKED ? unpacked(left, j, i) : p[4 * j + i]) * (x - (i % 2 ? delta.y : delta.x));
            }
        }
        as_left<E, N>(dleft, ds);
        gather(dk, dleft, at, 0, tile > 0);
        wgmma_wait<0>();
        arrived(dk);
        arrived(dv);
        warp_arrive(empty(at));
    }
    // dK and dV of 64 keys.
    __device__ __forceinline__ void keys_side() {
        const int warp = threadIdx.x / 32, row = first + 16 * warp;
        const Stream stream = draws<DROP>(drops.header, drops.site, head / heads);
        float dk[D / 2], dv[D / 2];
        Held<true> held;
        hold<true>(held);
#pragma unroll 1
        for (int tile = 0; tile < tiles() - 1; tile++) step_keys<SIDE>(dk, dv, held, tile, row, stream);
        step_keys<TAIL>(dk, dv, held, tiles() - 1, row, stream);
        const float scale = score_scale<D>(), keep_scale = DROP ? drops.keep_scale : 1.0f;
        // All warps are through with what is overwritten.
        __syncthreads();
        stage_rows<E, D, SIDE>(own(0) + 16 * warp * 128, dk, scale, scale);
        stage_rows<E, D, SIDE>(own(1) + 16 * warp * 128, dv, keep_scale, keep_scale);
        publish();
        __syncwarp();
        if (threadIdx.x % 32 == 0 && row < tokens) {
            store_staged<D, SIDE>(own(0) + 16 * warp * 128, *result_map, heads + head % heads, row, head / heads);
            store_staged<D, SIDE>(own(1) + 16 * warp * 128, *result_map, 2 * heads + head % heads, row, head / heads);
            stores_commit();
        }
        if constexpr (SUM && DROP) store_sums(dv, 2, row, keep_scale);
        await_staged();
    }

    // What a tile of N keys adds to dQ of this warp's queries, from `row` on; -log-sum-exps and rowsum(dO ∘ O) of this thread's two. Keys
    // that aren't there, in the LAST tile, must not count.
    template <int N, bool LAST>
    __device__ __forceinline__ void step_queries(float (&dq)[D / 2], const Held<false>& held, const float (&log_sum)[2],
                                                 const float (&delta)[2], int tile, int row, const Stream& stream) {
        const int lane = threadIdx.x % 32;
        const float scale = score_scale<D>() * LOG2E;
        const Ring<STAGES> at(tile);
        await<false>(tile, at);
        float p[N / 2], ds[N / 2];
        meet<N, HELD<false, 0>>(p, held.x, at, 0);
        meet<N, HELD<false, 1>>(ds, held.y, at, 1);
        KeptTiles<N> kept;
        if constexpr (DROP) kept.draw(stream, head % heads * tokens + row + lane / 4, tile * (SIDE / 16), drops.threshold);
        wgmma_wait<1>();
        arrived(p);
#pragma unroll
        for (int i = 0; i < N / 2; i++) p[i] = exp2_fast(fmaf(p[i], scale, log_sum[i / 2 % 2]));
        if constexpr (LAST) {
#pragma unroll
            for (int i = 0; i < N / 2; i++)
                if (tile * SIDE + i / 4 * 8 + 2 * (lane % 4) + i % 2 >= tokens) p[i] = 0.0f;
        }
        wgmma_wait<0>();
        arrived(ds);
        if constexpr (DROP) kept.apply(ds);
#pragma unroll
        for (int i = 0; i < N / 2; i++) ds[i] = p[i] * ((DROP ? ds[i] * drops.keep_scale : ds[i]) - delta[i / 2 % 2]);
        u32 left[N / 16][4];
        as_left<E, N>(left, ds);
        gather(dq, left, at, 0, tile > 0);
        wgmma_wait<0>();
        arrived(dq);
        warp_arrive(empty(at));
    }
    // dQ of 64 queries.
    __device__ __forceinline__ void queries_side() {
        const int warp = threadIdx.x / 32, row = first + 16 * warp;
        const Stream stream = draws<DROP>(drops.header, drops.site, head / heads);
        float log_sum[2], delta[2], dq[D / 2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int token = row + threadIdx.x % 32 / 4 + 8 * half;
            log_sum[half] = token < tokens ? -log_sums[row_of(token)] : -__int_as_float(0x7f800000);
            delta[half] = token < tokens ? deltas[row_of(token)] : 0.0f;
        }
        Held<false> held;
        hold<false>(held);
#pragma unroll 1
        for (int tile = 0; tile < tiles() - 1; tile++) step_queries<SIDE, false>(dq, held, log_sum, delta, tile, row, stream);
        step_queries<TAIL, true>(dq, held, log_sum, delta, tiles() - 1, row, stream);
        const float scale = score_scale<D>();
        __syncthreads();
        stage_rows<E, D, SIDE>(own(0) + 16 * warp * 128, dq, scale, scale);
        publish();
        __syncwarp();
        if (threadIdx.x % 32 == 0 && row < tokens) {
            store_staged<D, SIDE>(own(0) + 16 * warp * 128, *result_map, head % heads, row, head / heads);
            stores_commit();
        }
        if constexpr (SUM) store_sums(dq, 0, row, scale);
        await_staged();
    }

    // Sums over the block's tokens, of which a warp has 16 from `token` on: part `part` of its row of `sums`.
    __device__ __forceinline__ void store_sums(const float (&x)[D / 2], int part, int token, float factor) const {
        float* all = reinterpret_cast<float*>(shared_bytes + AT_SUMS);
        ColumnSums<D> column_sums;
        column_sums.clear();
        column_sums.add_to(tokens, token, [&](int j, int i) { return x[4 * j + i]; });
        column_sums.store(all + threadIdx.x / 32 * D, factor);
        __syncthreads();
        float* row = sums + (((i64)(head / heads) * tiles() + first / SIDE) * 3 + part) * heads * D + head % heads * D;
        for (int i = threadIdx.x; i < D; i += 128) row[i] = all[i] + all[D + i] + all[2 * D + i] + all[3 * D + i];
    }

    template <bool KEYS> __device__ __forceinline__ void run() {
        if (threadIdx.x == 0) {
            fetch_own<KEYS>();
            for (int tile = 0; tile < STAGES; tile++) fetch<KEYS>(tile);
        }
        if constexpr (KEYS) keys_side();
        else queries_side();
    }
};

// Grid: 2·B·H·⌈T/64⌉, the sides of keys first, which take longer; 128 threads. The maps are of qkv as (B,T,3H,D) and of dO as
// (B,T,H,D), tiles of 64 rows; that of the result, as qkv, of 16 rows. With SUM, a row of `sums` (B·⌈T/64⌉,3C) for every 64 tokens.
template <typename E, int D, int TAIL, int RESIDENT, bool DROP, bool SUM>
__global__ void __launch_bounds__(128, RESIDENT)
    sides_grad(const __grid_constant__ TensorMap qkv_map, const __grid_constant__ TensorMap dout_map,
               const __grid_constant__ TensorMap result_map, const float* log_sums, const float* deltas, float* sums, int tokens,
               int heads, const Header* __restrict__ header, u32 site, u32 threshold, float keep_scale) {
    extern __shared__ __align__(1024) u8 shared[];
    Sides<E, D, TAIL, RESIDENT, DROP, SUM> f;
    f.drops.header = header, f.drops.site = site, f.drops.threshold = threshold, f.drops.keep_scale = keep_scale;
    f.qkv_map = &qkv_map, f.dout_map = &dout_map, f.result_map = &result_map;
    f.log_sums = log_sums, f.deltas = deltas, f.sums = sums, f.tokens = tokens, f.heads = heads;
    f.shared_bytes = shared, f.shared = shared_address(shared);
    const int tiles = f.tiles(), half = gridDim.x / 2;
    const bool keys = blockIdx.x < half;
    const int item = keys ? blockIdx.x : blockIdx.x - half;
    f.head = item / tiles, f.first = item % tiles * SIDE;
    if (threadIdx.x == 0) f.init();
    publish();
    __syncthreads();
    if (keys) f.template run<true>();
    else f.template run<false>();
}
