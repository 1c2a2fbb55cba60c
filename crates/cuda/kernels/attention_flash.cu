// Softmax attention over any number of tokens for Hopper, in the manner of FlashAttention-3. sm_90a only.
//
// Legend: B batch, H heads, T tokens, D head size, C = H·D. qkv is (B,T,3C): queries, keys and values of a token lie side by
// side, head h at h·D of each.
#include "flash.cuh"

// A block has GROUPS warpgroups with a tile of 64 queries each, and a warp that fetches. They go through keys and values together,
// KEYS at a time; the last are TAIL, up to a multiple of 16. Scores of the next keys are computed while those before become
// probabilities. Warpgroups start their matmuls in turns, so that one's exponentials run beside another's matmuls.
//
// With WHOLE, where heads fill the GPU evenly and their keys fit into the stages, a block has all queries of a head: keys and values
// are fetched once. The next queries are fetched beside those before, and results take their own queries' place.
template <typename E, int D, int GROUPS, int KEYS, int TAIL, int STAGES, bool WHOLE, bool DROP> struct Flash {
    using S = Strips<D>;
    static constexpr int QUERY_TILE = S::tile(64), KEY_TILE = S::tile(KEYS);
    static constexpr int AT_KEYS = 2 * GROUPS * QUERY_TILE, BARRIERS = AT_KEYS + 2 * STAGES * KEY_TILE;
    static constexpr int SETS = WHOLE ? 2 : 1, KEY_BARRIERS = 2 * SETS * GROUPS;
    static constexpr int SHARED = BARRIERS + 8 * (KEY_BARRIERS + 4 * STAGES);
    static constexpr bool TURNS = GROUPS > 1;

    const TensorMap* out_map;
    float* lse;
    Drops drops;
    int tokens, heads, items;
    u32 shared;

    // A round is a tile of queries for every warpgroup.
    static __device__ __forceinline__ int set(u32 round) { return WHOLE ? (int)(round & 1) * GROUPS : 0; }
    static __device__ __forceinline__ u32 parity(u32 round) { return WHOLE ? round >> 1 & 1 : round & 1; }
    __device__ __forceinline__ u32 queries(int group, u32 round) const { return shared + (set(round) + group) * QUERY_TILE; }
    // Where results wait for the copy engine.
    __device__ __forceinline__ u32 results(int group, u32 round) const { return queries(WHOLE ? group : GROUPS + group, round); }
    __device__ __forceinline__ u32 keys(int stage) const { return shared + AT_KEYS + stage * KEY_TILE; }
    __device__ __forceinline__ u32 values(int stage) const { return keys(STAGES + stage); }
    __device__ __forceinline__ u32 barrier(int i) const { return shared + BARRIERS + 8 * i; }
    __device__ __forceinline__ u32 queries_full(int group, u32 round) const { return barrier(set(round) + group); }
    __device__ __forceinline__ u32 queries_empty(int group, u32 round) const { return barrier(SETS * GROUPS + set(round) + group); }
    __device__ __forceinline__ u32 keys_full(int stage) const { return barrier(KEY_BARRIERS + stage); }
    __device__ __forceinline__ u32 keys_empty(int stage) const { return barrier(KEY_BARRIERS + STAGES + stage); }
    __device__ __forceinline__ u32 values_full(int stage) const { return barrier(KEY_BARRIERS + 2 * STAGES + stage); }
    __device__ __forceinline__ u32 values_empty(int stage) const { return barrier(KEY_BARRIERS + 3 * STAGES + stage); }

    // Queries of a head are cut into tiles for GROUPS warpgroups each.
    __device__ __forceinline__ int cuts() const { return ceil_div(tokens, 64 * GROUPS); }
    __device__ __forceinline__ int key_tiles() const { return ceil_div(tokens, KEYS); }
    // The order of a head's cuts changes from round to round: else a block might have the last one, which may have fewer tiles, in
    // every round or in none.
    __device__ __forceinline__ int first_query(int item) const {
        return (item + item / cuts() * cuts() / (int)gridDim.x) % cuts() * 64 * GROUPS;
    }

    __device__ __forceinline__ void init() {
        for (int i = 0; i < GROUPS * SETS; i++)
            barrier_init(queries_full(i % GROUPS, i / GROUPS), 1), barrier_init(queries_empty(i % GROUPS, i / GROUPS), 4);
        for (int i = 0; i < STAGES; i++) {
            barrier_init(keys_full(i), 1), barrier_init(keys_empty(i), 4 * GROUPS);
            barrier_init(values_full(i), 1), barrier_init(values_empty(i), 4 * GROUPS);
        }
    }

    // By one thread, as all that fetches.
    __device__ __forceinline__ void fetch_queries(const TensorMap& query_map, u32 round, int first, int sample, int h) {
        for (int g = 0; g < GROUPS; g++) {
            barrier_wait(queries_empty(g, round), parity(round) ^ 1);
            if (first + 64 * g >= tokens) {
                barrier_arrive(queries_full(g, round));
                continue;
            }
            barrier_expect(queries_full(g, round), QUERY_TILE);
            load_rows<D, 64>(queries(g, round), query_map, h, first + 64 * g, sample, queries_full(g, round));
        }
    }
    // Keys come before queries: these wait for the queries before, which are needed longer than the first keys.
    __device__ __forceinline__ void fetch(const TensorMap& query_map, const TensorMap& key_map) {
        Ring<STAGES> at(0);
        u32 round = 0;
        for (int item = blockIdx.x; item < items; item += gridDim.x, round++) {
            const int head = WHOLE ? item : item / cuts(), sample = head / heads, h = head % heads;
            const int tiles = key_tiles();
            Ring<STAGES> behind = at;
            for (int tile = 0; tile <= tiles; tile++) {
                if (tile < tiles) {
                    barrier_wait(keys_empty(at.stage), at.parity ^ 1);
                    barrier_expect(keys_full(at.stage), KEY_TILE);
                    load_rows<D, KEYS>(keys(at.stage), key_map, heads + h, tile * KEYS, sample, keys_full(at.stage));
                    at.next();
                }
                if (tile == 0) fetch_queries(query_map, round, WHOLE ? 0 : first_query(item), sample, h);
                else {
                    barrier_wait(values_empty(behind.stage), behind.parity ^ 1);
                    barrier_expect(values_full(behind.stage), KEY_TILE);
                    load_rows<D, KEYS>(values(behind.stage), key_map, 2 * heads + h, (tile - 1) * KEYS, sample,
                                       values_full(behind.stage));
                    behind.next();
                }
            }
            for (int cut = 1; WHOLE && cut < cuts(); cut++) fetch_queries(query_map, ++round, cut * 64 * GROUPS, sample, h);
        }
    }

    __device__ __forceinline__ void take_turn(int group) {
        if constexpr (TURNS) asm volatile("bar.sync %0, 256;" ::"r"(1 + group) : "memory");
    }
    __device__ __forceinline__ void pass_turn(int group) {
        if constexpr (TURNS) asm volatile("bar.arrive %0, 256;" ::"r"(1 + (group + 1) % GROUPS) : "memory");
    }

    // Turns scores into unnormalised probabilities; `shrink` rescales the sums so far.
    template <bool FIRST, int N>
    __device__ __forceinline__ void soften(float (&s)[N], float (&top)[2], float (&sum)[2], float (&shrink)[2]) {
        const float scale = score_scale<D>() * LOG2E;
        float shift[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float m = FIRST ? -1e30f : top[half];
#pragma unroll
            for (int j = 0; j < N / 4; j++) m = fmaxf(m, fmaxf(s[4 * j + 2 * half], s[4 * j + 2 * half + 1]));
            m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 1));
            m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 2));
            shrink[half] = FIRST ? 0.0f : exp2_fast((top[half] - m) * scale);
            sum[half] = FIRST ? 0.0f : sum[half] * shrink[half];
            top[half] = m;
            shift[half] = -m * scale;
        }
#pragma unroll
        for (int i = 0; i < N; i++) {
            s[i] = exp2_fast(fmaf(s[i], scale, shift[i / 2 % 2]));
            sum[i / 2 % 2] += s[i];
        }
    }

    // Keys from T on, in the last tile.
    __device__ __forceinline__ void mask(float (&s)[TAIL / 2]) const {
        const int left = tokens - (key_tiles() - 1) * KEYS;
        if (left == TAIL) return;
#pragma unroll
        for (int i = TAIL / 2 - 8; i < TAIL / 2; i++)
            if (i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2 >= left) s[i] = -1e30f;
    }

    template <int N> __device__ __forceinline__ void score(float (&s)[N], u32 queries, int stage) const {
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < S::STEPS; k++)
            wgmma<E, 2 * N, false, false>(s, S::template side<64>(queries, k),
                                            S::template side<KEYS>(keys(stage), k), k > 0);
        wgmma_commit();
    }
    template <int N> __device__ __forceinline__ void attend(float (&o)[D / 2], const u32 (&p)[N][4], int stage, bool add) const {
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < N; k++)
            wgmma<E, D, true>(o, p[k], S::template turned<KEYS>(values(stage) + 16 * k * 128), add || k > 0);
        wgmma_commit();
    }

    // A thread's part of its tile of queries, and where it is: round, head, first row of its warp, whether keys and values are free
    // after it. With DROP, the position of their draws.
    struct Tile {
        float o[D / 2], top[2], sum[2];
        u32 p[KEYS / 16][4];
        u32 round;
        int head, row;
        bool last;
        Stream stream;
        u32 token;

        __device__ __forceinline__ Tile(u32 round, int head, int row, bool last, const Stream& stream, u32 token)
            : round(round), head(head), row(row), last(last), stream(stream), token(token) {}
    };

    // The first tile of keys, N of them.
    template <int N> __device__ __forceinline__ void begin(Tile& x, u32 (&p)[N / 16][4], int group, const Ring<STAGES>& at) {
        float s[N / 2], shrink[2];
        barrier_wait(keys_full(at.stage), at.parity);
        take_turn(group);
        score(s, queries(group, x.round), at.stage);
        pass_turn(group);
        KeptTiles<N> kept;
        if constexpr (DROP) kept.draw(x.stream, x.token, 0, drops.threshold);
        wgmma_wait<0>();
        arrived(s);
        leave(keys_empty(at.stage), x.last);
        if constexpr (N == TAIL) {
            if (key_tiles() == 1) mask(s);
        }
        soften<true>(s, x.top, x.sum, shrink);
        if constexpr (DROP) kept.apply(s);
        as_left<E, N>(p, s);
    }

    // The values of the tile before, and N keys of the next, number `tile`; the last if LAST.
    template <int N, bool LAST>
    __device__ __forceinline__ void pass(Tile& x, u32 (&p)[N / 16][4], int group, int tile, const Ring<STAGES>& at,
                                         const Ring<STAGES>& behind) {
        float s[N / 2], shrink[2];
        barrier_wait(keys_full(at.stage), at.parity);
        take_turn(group);
        score(s, queries(group, x.round), at.stage);
        barrier_wait(values_full(behind.stage), behind.parity);
        attend(x.o, x.p, behind.stage, tile > 1);
        pass_turn(group);
        KeptTiles<N> kept;
        if constexpr (DROP) kept.draw(x.stream, x.token, tile * (KEYS / 16), drops.threshold);
        wgmma_wait<1>();
        arrived(s);
        leave(keys_empty(at.stage), x.last);
        if constexpr (LAST) mask(s);
        soften<false>(s, x.top, x.sum, shrink);
        if constexpr (DROP) kept.apply(s);
        wgmma_wait<0>();
        arrived(x.o);
        leave(values_empty(behind.stage), x.last);
#pragma unroll
        for (int i = 0; i < D / 2; i++) x.o[i] *= shrink[i / 2 % 2];
        as_left<E, N>(p, s);
    }

    // The last values, and what comes of them.
    __device__ __forceinline__ void finish(Tile& x, const u32 (&p)[TAIL / 16][4], int group, const Ring<STAGES>& behind, bool add) {
        const int lane = threadIdx.x % 32;
        barrier_wait(values_full(behind.stage), behind.parity);
        attend(x.o, p, behind.stage, add);
        float factor[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float total = x.sum[half];
            total += __shfl_xor_sync(0xffffffffu, total, 1);
            total += __shfl_xor_sync(0xffffffffu, total, 2);
            factor[half] = (DROP ? drops.keep_scale : 1.0f) / total;
            const int query = x.row + lane / 4 + 8 * half;
            if (lane % 4 == 0 && query < tokens)
                lse[(i64)x.head * tokens + query] = x.top[half] * score_scale<D>() + logf(total);
        }
        wgmma_wait<0>();
        arrived(x.o);
        leave(values_empty(behind.stage), x.last);
        const u32 to = results(group, x.round) + threadIdx.x / 32 % 4 * 16 * 128;
        // With WHOLE, all warps are through with the queries that are overwritten; else, what was staged before is.
        if constexpr (WHOLE) asm volatile("bar.sync %0, 128;" ::"r"(8 + group) : "memory");
        else await_staged();
        stage_rows<E, D, 64>(to, x.o, factor[0], factor[1]);
        publish();
        __syncwarp();
        if (lane == 0 && x.row < tokens) {
            store_staged<D, 64>(to, *out_map, x.head % heads, x.row, x.head / heads);
            stores_commit();
        }
    }

    // Keys or values that nobody needs after this.
    static __device__ __forceinline__ void leave(u32 barrier, bool last) {
        if (!WHOLE || last) warp_arrive(barrier);
    }
    // The first scores of a round are there. With WHOLE, results of the round before are on their way by now, from where its queries
    // were: the next may come there.
    __device__ __forceinline__ void leave_before(int group, u32 round) {
        if (!WHOLE || round == 0) return;
        await_staged();
        warp_arrive(queries_empty(group, round - 1));
    }
    // A round in which a warpgroup has no queries: nothing to do but to let the others' tiles by.
    __device__ __forceinline__ void let_by(int group, u32 round, bool last, Ring<STAGES>& at) {
        barrier_wait(queries_full(group, round), parity(round));
        const int tiles = key_tiles();
        Ring<STAGES> behind = at;
        for (int tile = 0; tile < tiles; tile++, at.next(), behind.next()) {
            take_turn(group);
            pass_turn(group);
            barrier_wait(keys_full(at.stage), at.parity);
            leave(keys_empty(at.stage), last);
            barrier_wait(values_full(behind.stage), behind.parity);
            leave(values_empty(behind.stage), last);
        }
        leave_before(group, round);
        if (!WHOLE) warp_arrive(queries_empty(group, round));
    }
    __device__ __forceinline__ void attend_tile(Tile& x, int group, Ring<STAGES>& at) {
        const int tiles = key_tiles();
        u32 p[TAIL / 16][4];
        barrier_wait(queries_full(group, x.round), parity(x.round));
        if (tiles == 1) {
            begin<TAIL>(x, p, group, at);
            leave_before(group, x.round);
            if (!WHOLE) warp_arrive(queries_empty(group, x.round));
            finish(x, p, group, at, false);
            at.next();
            return;
        }
        begin<KEYS>(x, x.p, group, at);
        leave_before(group, x.round);
        Ring<STAGES> behind = at;
        at.next();
#pragma unroll 1
        for (int tile = 1; tile < tiles - 1; tile++) {
            pass<KEYS, false>(x, x.p, group, tile, at, behind);
            at.next();
            behind.next();
        }
        pass<TAIL, true>(x, p, group, tiles - 1, at, behind);
        if (!WHOLE) warp_arrive(queries_empty(group, x.round));
        finish(x, p, group, at, true);
        at.next();
    }

    __device__ __forceinline__ void consume(int group) {
        const int warp = threadIdx.x / 32 % 4;
        Ring<STAGES> at(0);
        u32 round = 0;
        if (TURNS && group == GROUPS - 1) pass_turn(group);
        for (int item = blockIdx.x; item < items; item += gridDim.x) {
            const Ring<STAGES> start = at;
            const int head = WHOLE ? item : item / cuts(), rounds = WHOLE ? cuts() : 1;
            for (int cut = 0; cut < rounds; cut++, round++) {
                at = start;
                const int first = (WHOLE ? cut * 64 * GROUPS : first_query(item)) + 64 * group;
                if (first >= tokens) {
                    let_by(group, round, cut + 1 == rounds, at);
                    continue;
                }
                const int row = first + 16 * warp;
                const u32 token = head % heads * tokens + row + threadIdx.x % 32 / 4;
                Tile x(round, head, row, cut + 1 == rounds, draws<DROP>(drops.header, drops.site, head / heads), token);
                attend_tile(x, group, at);
            }
        }
        // The turn that nobody takes.
        if (TURNS && group == 0) take_turn(group);
        await_staged();
    }
};

// Grid: as many blocks as run at once. The maps are of qkv as (B,T,3H,D), tiles of 64 and of KEYS rows, and of the result as
// (B,T,H,D), tiles of 16 rows.
template <typename E, int D, int GROUPS, int KEYS, int TAIL, int STAGES, bool WHOLE, bool DROP>
__global__ void __launch_bounds__(128 * GROUPS + 128, 1)
    attention_flash(const __grid_constant__ TensorMap query_map, const __grid_constant__ TensorMap key_map,
                    const __grid_constant__ TensorMap out_map, float* __restrict__ lse, int tokens, int heads, int items,
                    const Header* __restrict__ header, u32 site, u32 threshold, float keep_scale) {
    extern __shared__ __align__(1024) u8 shared[];
    Flash<E, D, GROUPS, KEYS, TAIL, STAGES, WHOLE, DROP> f;
    f.drops.header = header, f.drops.site = site, f.drops.threshold = threshold, f.drops.keep_scale = keep_scale;
    f.out_map = &out_map, f.lse = lse, f.tokens = tokens, f.heads = heads, f.items = items;
    f.shared = shared_address(shared);
    const int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
    if (threadIdx.x == 0) f.init();
    publish();
    __syncthreads();
    if (group == GROUPS) {
        if constexpr (GROUPS > 1) fewer_registers<GROUPS == 3 ? 32 : 24>();
        if (threadIdx.x == 128 * GROUPS) f.fetch(query_map, key_map);
    } else {
        // Of one, every thread has the most that there are.
        if constexpr (GROUPS > 1) more_registers<GROUPS == 3 ? 160 : 240>();
        f.consume(group);
    }
}
