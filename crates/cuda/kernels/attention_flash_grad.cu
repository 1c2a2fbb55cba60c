// The gradient of softmax attention over any number of tokens for Hopper, in the manner of FlashAttention-3, with the same bits in
// every run. sm_90a only.
//
// Legend: B batch, H heads, T tokens, D head size, C = H·D. qkv is (B,T,3C): queries, keys and values of a token lie side by
// side, head h at h·D of each.
//
// flash_grad_start (attention_flash_ends.cu) has computed rowsum(dO ∘ O), and the sums of dK and dV over tokens; those of dV with
// dropout are left to this kernel. dQ is left as f32 sums in the order of registers, and flash_grad_end brings it to its place.
#include "flash_grad_tile.cuh"

// Work of a warpgroup on the items that its pipeline brings. FlashGradPipeline says what the parameters are.
template <typename E, int D, int HALVES, bool AHEAD, bool LATER, bool LONE, bool COPIES, bool WHOLE, bool DROP, bool SUM>
struct FlashGrad : FlashGradTile<E, D, HALVES, AHEAD, LATER, LONE, COPIES, WHOLE, DROP, SUM> {
    using Base = FlashGradTile<E, D, HALVES, AHEAD, LATER, LONE, COPIES, WHOLE, DROP, SUM>;
    using typename Base::S, typename Base::Item, typename Base::Tile, typename Base::Place;
    using Base::QUERIES, Base::SCORES, Base::COLUMNS, Base::LATE, Base::HELD_KEYS, Base::HELD_VALUES, Base::drops, Base::tokens,
        Base::heads, Base::query_tiles, Base::keys, Base::values, Base::queries, Base::douts, Base::scores, Base::log_sums,
        Base::deltas, Base::keys_empty, Base::queries_full, Base::queries_empty, Base::scores_full, Base::parity,
        Base::next_item, Base::hold, Base::score, Base::start_values, Base::start_queries, Base::load_queries,
        Base::store_queries, Base::add_queries, Base::store;

    // Where registers are short, P in 16 bits is all that is kept of it.
    static constexpr bool PACKED = WHOLE && D > 112;

    // Scores of this thread's keys, from `key` on, to probabilities; `sums` are those of its queries.
    __device__ __forceinline__ void to_probabilities(float (&p)[32], const float* sums, float scale, int key, const Item& item) const {
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const float2 sum = *reinterpret_cast<const float2*>(sums + 8 * j);
#pragma unroll
            for (int i = 0; i < 4; i++) p[4 * j + i] = exp2_fast(fmaf(p[4 * j + i], scale, i % 2 ? -sum.y : -sum.x));
        }
        if (item.keys * BLOCK + BLOCK > tokens) {
            // Keys that aren't there.
#pragma unroll
            for (int i = 0; i < 32; i++)
                if (key + i / 2 % 2 * 8 >= tokens) p[i] = 0.0f;
        }
    }
    // What was there need not be kept: registers are free.
    template <int N> static __device__ __forceinline__ void forget(float (&x)[N]) {
        float none[N];
#pragma unroll
        for (int i = 0; i < N; i++) x[i] = none[i];
    }
    // Registers have 16 bits of each from here on, and not what they were made of.
    static __device__ __forceinline__ void pin(u32 (&left)[4][4]) {
#pragma unroll
        for (int i = 0; i < 16; i++) asm volatile("" : "+r"(left[i / 4][i % 4])::"memory");
    }
    // Number i of column j, as as_left leaves it.
    static __device__ __forceinline__ float unpacked(const u32 (&left)[4][4], int j, int i) {
        float low, high;
        unpack2<E>(left[j / 2][j % 2 * 2 + i / 2], low, high);
        return i % 2 ? high : low;
    }

    // Half HALF of a tile of queries. The scores of a first half are there, those of a second are under way.
    template <int HALF, bool LAST>
    __device__ __forceinline__ void step(Tile& x, int group, Place& at) const {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, t = lane % 4;
        const float scale = score_scale<D>() * LOG2E;
        const u32 some_queries = queries(at.count) + HALF * 64 * 128, some_douts = douts(at.count) + HALF * 64 * 128;

        float ds[32];
        float(&p)[32] = x.s;
        if constexpr (!AHEAD && HALF == 0) forget(p);
        if constexpr (!LATER) forget(x.dq);
        if constexpr (!AHEAD && HALF == 0) {
            barrier_wait(queries_full(at.count), parity(at.count));
            score(x.s, x, group, at.round, at.count, 0);
        }
        const int key = at.item.keys * BLOCK + 64 * group + 16 * warp + lane / 4;
        start_values(ds, x, group, at, HALF);
        if constexpr (LATER && HALF == 0) {
            if (at.count > 0) barrier_wait(scores_full(at.count - 1), parity(at.count - 1));
            start_queries(x.dq, group, at.round_before(), at.count - 1);
        }
        // Four bits for every eight queries.
        u32 stay = 0;
        if constexpr (DROP) {
            const Stream stream = draws<true>(drops.header, drops.site, at.item.head / heads);
            const u32 token = at.item.head % heads * tokens + at.tile * QUERIES + 64 * HALF;
#pragma unroll 4
            for (int j = 0; j < 8; j++) stay |= kept_transposed(stream, token + 8 * j, key / 16, drops.threshold) << (4 * j);
        }
        if constexpr (HALF > 0 || !AHEAD) {
            wgmma_wait<LATER && HALF == 0 ? 2 : 1>();
            arrived(p);
        }
        to_probabilities(p, log_sums(at.count) + 64 * HALF + 2 * t, scale, key, at.item);
        u32 left[4][4], dleft[4][4];
        as_left<E, 64>(left, p);
        if constexpr (DROP) {
#pragma unroll
            for (int i = 0; i < 16; i++)
                left[i / 4][i % 4] &= (stay >> (2 * i) & 1 ? 0xffffu : 0) | (stay >> (2 * i) & 2 ? 0xffff0000u : 0);
        }
        if constexpr (PACKED) pin(left);
        const bool add = at.tile > 0 || HALF > 0;
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; k++)
            wgmma<E, D, true>(x.dv, left[k], S::template turned<QUERIES>(some_douts + 16 * k * 128), add || k > 0);
        wgmma_commit();

        // Where these are the last scores of a tile, dQ of the tile before must have come too: its scores are free then.
        wgmma_wait<LATER && HALF == 0 && !LAST ? 2 : 1>();
        arrived(ds);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const float2 delta = *reinterpret_cast<const float2*>(deltas(at.count) + 64 * HALF + 8 * j + 2 * t);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                if constexpr (DROP) ds[4 * j + i] = stay >> (4 * j + i) & 1 ? ds[4 * j + i] * drops.keep_scale : 0.0f;
                const float some = PACKED ? unpacked(left, j, i) : p[4 * j + i];
                ds[4 * j + i] = some * (ds[4 * j + i] - (i % 2 ? delta.y : delta.x));
                if constexpr (WHOLE && SUM) x.ds_sums[i / 2] += ds[4 * j + i];
            }
        }
        as_left<E, 64>(dleft, ds);
        if constexpr (WHOLE && !LATE) load_queries(x, group, at);
        if (HALF == 0 && at.first()) await_staged();
        const u32 to = scores(at.count) + HALF * SCORES;
#pragma unroll
        for (int k = 0; k < 4; k++)
            store_matrices(to + Rows<64>::at(64 * group + 16 * warp + lane % 16, 2 * k + lane / 16), dleft[k]);
        if constexpr (LAST) {
            publish();
            warp_arrive(scores_full(at.count));
        }
        // Without next scores under way, dK runs while dQ is added up.
        if constexpr (!LATER && !AHEAD && !WHOLE) start_queries_now(x, group, at);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; k++)
            wgmma<E, D, true>(x.dk, dleft[k], S::template turned<QUERIES>(some_queries + 16 * k * 128), add || k > 0);
        wgmma_commit();
        if constexpr (WHOLE && LATE) load_queries(x, group, at);
        if constexpr (!LATER && (AHEAD || WHOLE)) start_queries_now(x, group, at);

        if constexpr (!LAST) {
            score(x.s, x, group, at.round, at.count, HALF + 1);
        } else {
            // The keys of the item before are left alone, by their dQ and by the copy engine: the next ones take their place.
            if (at.first() && at.round > 0) warp_arrive(keys_empty(at.round - 1));
            if (at.last() && !next_item(at.round + 1, at.next)) at.next.head = -1;
            if constexpr (AHEAD) {
                start_next(x, group, at);
            }
            // dQ of this tile, or with LATER of the one before, is there; what was started after it may be under way.
            wgmma_wait<LATER ? 2 : WHOLE && !AHEAD ? 0 : 1>();
            arrived(x.dq);
            if constexpr (WHOLE) store_queries(x, group, at);
            else if constexpr (!LATER) add_queries(x.dq, group, at.item, at.tile, at.count);
            else if (at.count > 0) add_before(x, group, at);
            // No matmul may be under way where a loop begins again.
            wgmma_wait<0>();
            if constexpr (AHEAD) arrived(x.s);
            arrived(x.dk);
            arrived(x.dv);
        }
    }

    // Scores of the queries after these, with AHEAD.
    __device__ __forceinline__ void start_next(Tile& x, int group, const Place& at) const {
        if (at.more()) barrier_wait(queries_full(at.count + 1), parity(at.count + 1));
        if (at.last()) hold<HELD_KEYS>(x.keys, group, keys(at.round + 1));
        score(x.s, x, group, at.round_next(), at.count + 1, 0);
    }
    __device__ __forceinline__ void start_queries_now(Tile& x, int group, const Place& at) const {
        barrier_wait(scores_full(at.count), parity(at.count));
        start_queries(x.dq, group, at.round, at.count);
    }

    // A tile of queries for a warpgroup that has no keys in this block: its share of dQ alone.
    __device__ __forceinline__ void help(Tile& x, int group, Place& at) const {
        const int lane = threadIdx.x % 32, row = 64 * group + threadIdx.x / 32 % 4 * 16 + lane % 16;
        const u32 none[4] = {};
        if (LATER && at.count > 0) {
            barrier_wait(scores_full(at.count - 1), parity(at.count - 1));
            start_queries(x.dq, group, at.round_before(), at.count - 1);
            wgmma_wait<0>();
            arrived(x.dq);
        }
        if (at.first()) await_staged();
        if constexpr (WHOLE) load_queries(x, group, at);
#pragma unroll
        for (int i = 0; i < 4 * HALVES; i++)
            store_matrices(scores(at.count) + i / 4 * SCORES + Rows<64>::at(row, i % 4 * 2 + lane / 16), none);
        publish();
        warp_arrive(scores_full(at.count));
        if (at.first() && at.round > 0) warp_arrive(keys_empty(at.round - 1));
        if constexpr (LATER) {
            if (at.count > 0) add_before(x, group, at);
        } else {
            start_queries_now(x, group, at);
            wgmma_wait<0>();
            arrived(x.dq);
            if constexpr (WHOLE) store_queries(x, group, at);
            else add_queries(x.dq, group, at.item, at.tile, at.count);
        }
        if (!at.last()) return;
        if (!next_item(at.round + 1, at.next)) at.next.head = -1;
        if constexpr (AHEAD) {
            start_next(x, group, at);
            wgmma_wait<0>();
            arrived(x.s);
        }
    }

    __device__ __forceinline__ void add_before(Tile& x, int group, const Place& at) const {
        add_queries(x.dq, group, at.before, at.first() ? at.tiles - 1 : at.tile - 1, at.count - 1);
    }

    // A tile of queries where dQ of the one before runs beside its exponentials. P in 16 bits is all that is kept of it.
    template <bool FIRST> __device__ __forceinline__ void step_late(Tile& x, int group, Place& at) const {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, t = lane % 4;
        const float scale = score_scale<D>() * LOG2E;
        float s[32], dq[COLUMNS / 2];
        barrier_wait(queries_full(at.count), parity(at.count));
        score(s, x, group, at.round, at.count, 0);
        if constexpr (!FIRST) {
            barrier_wait(scores_full(at.count - 1), parity(at.count - 1));
            start_queries(dq, group, at.round, at.count - 1);
        }
        wgmma_wait<FIRST ? 0 : 1>();
        arrived(s);
        const int key = at.item.keys * BLOCK + 64 * group + 16 * warp + lane / 4;
        to_probabilities(s, log_sums(at.count) + 2 * t, scale, key, at.item);
        u32 left[4][4], dleft[4][4];
        as_left<E, 64>(left, s);
        pin(left);
        if constexpr (!FIRST) {
            wgmma_wait<0>();
            arrived(dq);
            add_queries(dq, group, at.item, at.tile - 1, at.count - 1);
        }
        start_values(s, x, group, at, 0);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; k++)
            wgmma<E, D, true>(x.dv, left[k], S::template turned<QUERIES>(douts(at.count) + 16 * k * 128), !FIRST || k > 0);
        wgmma_commit();
        wgmma_wait<1>();
        arrived(s);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const float2 delta = *reinterpret_cast<const float2*>(deltas(at.count) + 8 * j + 2 * t);
#pragma unroll
            for (int i = 0; i < 4; i++) s[4 * j + i] = unpacked(left, j, i) * (s[4 * j + i] - (i % 2 ? delta.y : delta.x));
        }
        as_left<E, 64>(dleft, s);
        if constexpr (FIRST) await_staged();
#pragma unroll
        for (int k = 0; k < 4; k++)
            store_matrices(scores(at.count) + Rows<64>::at(64 * group + 16 * warp + lane % 16, 2 * k + lane / 16), dleft[k]);
        publish();
        warp_arrive(scores_full(at.count));
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; k++)
            wgmma<E, D, true>(x.dk, dleft[k], S::template turned<QUERIES>(queries(at.count) + 16 * k * 128), !FIRST || k > 0);
        wgmma_commit();
        if (FIRST && at.round > 0) warp_arrive(keys_empty(at.round - 1));
        wgmma_wait<0>();
        arrived(x.dk);
        arrived(x.dv);
        warp_arrive(queries_empty(at.count));
    }
    __device__ __forceinline__ void consume_late(int group) {
        Tile x;
        Place at;
        at.round = at.tile = 0, at.tiles = query_tiles(), at.count = 0;
        if (!next_item(0, at.item)) return;
#pragma unroll 1
        while (at.item.head >= 0) {
            step_late<true>(x, group, at);
#pragma unroll 1
            while (!at.last()) {
                at.tile++, at.count++;
                step_late<false>(x, group, at);
            }
            float dq[COLUMNS / 2];
            barrier_wait(scores_full(at.count), parity(at.count));
            start_queries(dq, group, at.round, at.count);
            wgmma_wait<0>();
            arrived(dq);
            add_queries(dq, group, at.item, at.tile, at.count);
            store(x, group, at);
            if (!next_item(at.round + 1, at.item)) at.item.head = -1;
            at.count++, at.tile = 0, at.round++;
        }
        await_staged();
    }

    __device__ __forceinline__ void consume(int group) {
        if constexpr (LATER && HALVES == 1) return consume_late(group);
        Tile x;
        if constexpr (WHOLE && SUM) x.ds_sums[0] = x.ds_sums[1] = 0.0f;
        Place at;
        at.round = at.tile = 0, at.tiles = query_tiles(), at.count = 0;
        if (!next_item(0, at.item)) return;
        at.before = at.next = at.item;
        if constexpr (AHEAD) {
            barrier_wait(queries_full(0), 0);
            hold<HELD_KEYS>(x.keys, group, keys(0));
            score(x.s, x, group, 0, 0, 0);
            wgmma_wait<0>();
            arrived(x.s);
        }
#pragma unroll 1
        while (at.item.head >= 0) {
            if (at.first()) hold<HELD_VALUES>(x.values, group, values(at.round));
            if (LONE && at.item.keys * BLOCK + 64 * group >= tokens) {
                help(x, group, at);
            } else if (HALVES == 1 || LONE && at.last()) {
                step<0, true>(x, group, at);
            } else {
                step<0, false>(x, group, at);
                step<HALVES - 1, true>(x, group, at);
            }
            warp_arrive(queries_empty(at.count));
            if (at.last()) store(x, group, at);
            at.before = at.item;
            at.count++;
            if (at.last()) at.tile = 0, at.round++, at.item = at.next;
            else at.tile++;
        }
        if constexpr (LATER) {
            barrier_wait(scores_full(at.count - 1), parity(at.count - 1));
            start_queries(x.dq, group, at.round - 1, at.count - 1);
            wgmma_wait<0>();
            arrived(x.dq);
            add_before(x, group, at);
        }
        await_staged();
    }
};

// Grid: as many blocks as run at once. The maps are of qkv as (B,T,3H,D), tiles of BLOCK and of 64·HALVES rows, and of dO as
// (B,T,H,D); that of the result, as qkv, of tiles of 16 rows.
template <typename E, int D, int HALVES, bool AHEAD, bool LATER, bool LONE, bool COPIES, bool WHOLE, bool DROP, bool SUM>
__global__ void __launch_bounds__(384, 1)
    flash_grad(const __grid_constant__ TensorMap key_map, const __grid_constant__ TensorMap query_map,
               const __grid_constant__ TensorMap dout_map, const __grid_constant__ TensorMap result_map,
               u32* turns, float* __restrict__ log_sums, float* __restrict__ deltas, float* dq, int tokens, int heads, int total,
               int group_heads, int copies, float* sums, E* result, const Header* __restrict__ header, u32 site, u32 threshold,
               float keep_scale) {
    extern __shared__ __align__(1024) u8 shared[];
    FlashGrad<E, D, HALVES, AHEAD, LATER, LONE, COPIES, WHOLE, DROP, SUM> f;
    f.drops.header = header, f.drops.site = site, f.drops.threshold = threshold, f.drops.keep_scale = keep_scale;
    f.sums = sums;
    f.result_map = &result_map, f.result = result;
    f.scratch.turns = turns, f.scratch.log_sums = log_sums, f.scratch.deltas = deltas, f.scratch.dq = dq;
    f.tokens = tokens, f.heads = heads, f.total = total, f.group_heads = group_heads, f.copies = copies;
    f.shared_bytes = shared, f.shared = shared_address(shared);
    const int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
    if (threadIdx.x == 0) f.init();
    publish();
    __syncthreads();
    if (group == 2) {
        fewer_registers<24>();
        if (threadIdx.x == 256) f.fetch(key_map, query_map, dout_map);
        if (!WHOLE && threadIdx.x == 288) f.await_turns();
        if (!WHOLE && threadIdx.x == 320) f.pass_turns();
    } else {
        more_registers<240>();
        f.consume(group);
    }
}
