// The gradient of softmax attention over any number of tokens for Hopper, in the manner of FlashAttention-3, with the same bits in
// every run. sm_90a only.
//
// Legend: B batch, H heads, T tokens, D head size, C = H·D. qkv is (B,T,3C): queries, keys and values of a token lie side by
// side, head h at h·D of each.
//
// flash_grad_start (attention_flash_ends.cu) has computed rowsum(dO ∘ O), and the sums of dK and dV over tokens; those of dV with
// dropout are left to this kernel. dQ is left as f32
// sums in the order of registers, and flash_grad_end brings it to its place.
#include "flash_grad.cuh"

// Work of a warpgroup on the items that its pipeline brings. FlashGradPipeline says what the parameters are.
template <typename E, int D, int HALVES, bool AHEAD, bool LATER, bool LONE, bool COPIES, bool WHOLE, bool BULK, bool DROP, bool SUM>
struct FlashGrad : FlashGradPipeline<E, D, HALVES, AHEAD, LATER, LONE, COPIES, WHOLE, BULK, DROP, SUM> {
    using Base = FlashGradPipeline<E, D, HALVES, AHEAD, LATER, LONE, COPIES, WHOLE, BULK, DROP, SUM>;
    using typename Base::S, typename Base::Item;
    using Base::QUERIES, Base::SCORES, Base::FLOATS, Base::COLUMNS, Base::LATE, Base::AT_SCORES, Base::AT_STAGED,
        Base::AT_SUMS, Base::STAGED, Base::result_map, Base::result, Base::scratch, Base::drops, Base::sums, Base::tokens,
        Base::heads, Base::total, Base::shared_bytes, Base::shared, Base::key_tiles, Base::query_tiles, Base::keys,
        Base::values, Base::queries, Base::douts, Base::scores, Base::log_sums, Base::deltas, Base::keys_empty,
        Base::queries_full, Base::queries_empty, Base::scores_full, Base::turn, Base::added, Base::staged_full,
        Base::staged_empty, Base::parity, Base::next_item, Base::copy, Base::before;

    // A thread's part of its tile of keys.
    struct Tile {
        float dk[D / 2], dv[D / 2];
        float s[32], dq[COLUMNS / 2];
        // With WHOLE and SUM, dS of this thread's two keys, summed over queries.
        float ds_sums[2];
    };

    // Waits until the copy engine has read what was staged of tile `count`.
    __device__ __forceinline__ void await_added(int group, u32 count) const { barrier_wait(staged_empty(group), count & 1); }
    // Leaves this warpgroup's share of dQ for the copy engine.
    __device__ __forceinline__ void stage_queries(const Tile& x, int group, u32 count) const {
        if (count > 0) await_added(group, count - 1);
        const u32 to = shared + AT_STAGED + group * STAGED + 16 * (threadIdx.x % 128);
#pragma unroll
        for (int i = 0; i < COLUMNS / 8; i++) {
            const float* y = x.dq + 4 * i;
            asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(to + 2048 * i), "f"(y[0]), "f"(y[1]), "f"(y[2]), "f"(y[3])
                         : "memory");
        }
        publish();
        warp_arrive(staged_full(group));
    }

    // Where a warpgroup is: the number of its item, the tile of queries, how many tiles it had before this one. The item
    // before and the one after.
    struct Place {
        Item item, before, next;
        int round, tile, tiles;
        u32 count;

        __device__ __forceinline__ bool first() const { return tile == 0; }
        __device__ __forceinline__ bool last() const { return tile == tiles - 1; }
        __device__ __forceinline__ int round_before() const { return round - first(); }
        __device__ __forceinline__ int round_next() const { return round + last(); }
        __device__ __forceinline__ bool more() const { return !last() || next.head >= 0; }
    };

    __device__ __forceinline__ void score(float (&s)[32], int group, int round, u32 count, int half) const {
        const u32 left = keys(round) + 64 * group * 128, right = queries(count) + half * 64 * 128;
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < S::STEPS; k++)
            wgmma<E, 64, false, false>(s, S::template side<BLOCK>(left, k), S::template side<QUERIES>(right, k), k > 0);
    }

    // Starts this warpgroup's share of dQ of a tile whose scores are there.
    __device__ __forceinline__ void start_queries(Tile& x, int group, int round, u32 count) const {
        const u32 left = scores(count) + (HALVES == 2 ? group * SCORES : 0);
        const u32 right = keys(round) + (HALVES == 2 ? 0 : group * S::strip(BLOCK));
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < BLOCK / 16; k++)
            wgmma<E, COLUMNS, true, true>(x.dq, Rows<64>::side(left + 16 * k * 128),
                                            S::template turned<BLOCK>(right + 16 * k * 128), k > 0 || WHOLE);
        wgmma_commit();
    }
    // This thread's numbers of a tile of dQ in the block's own memory.
    __device__ __forceinline__ float* own_queries(int group, int tile) const {
        return scratch.dq + ((i64)blockIdx.x * query_tiles() + tile) * FLOATS + group * 4096 + 4 * (threadIdx.x % 128);
    }
    // What the items before left of dQ; zeros for the first. In this place and no earlier, when registers are free.
    __device__ __forceinline__ void load_queries(Tile& x, int group, const Place& at) const {
        const float* from = own_queries(group, at.tile);
#pragma unroll
        for (int i = 0; i < COLUMNS / 8; i++) {
            float* y = x.dq + 4 * i;
            const bool there = at.item.keys > 0 && (D == 128 || group == 0 || i < (D - 64) / 8);
            asm volatile("{ .reg .pred p; setp.ne.b32 p, %5, 0; mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0;"
                         " @p ld.global.cg.v4.f32 {%0,%1,%2,%3}, [%4]; }"
                         : "=f"(y[0]), "=f"(y[1]), "=f"(y[2]), "=f"(y[3])
                         : "l"(from + 512 * i), "r"((int)there)
                         : "memory");
        }
    }
    // Leaves dQ for the next item, or brings it to its place.
    __device__ __forceinline__ void store_queries(const Tile& x, int group, const Place& at) const {
        if (at.item.keys + 1 < key_tiles()) {
            float* to = own_queries(group, at.tile);
#pragma unroll
            for (int i = 0; i < COLUMNS / 8; i++) {
                if (group == 1 && i >= (D - 64) / 8) break;
                __stcg(reinterpret_cast<float4*>(to + 512 * i),
                       make_float4(x.dq[4 * i], x.dq[4 * i + 1], x.dq[4 * i + 2], x.dq[4 * i + 3]));
            }
            return;
        }
        const float scale = score_scale<D>();
        const int row = at.tile * QUERIES + threadIdx.x / 32 % 4 * 16;
        E* to = result + (i64)(at.item.head / heads) * tokens * 3 * heads * D + at.item.head % heads * D;
        if (group == 0) {
            store_head_rows<64>(to, 3 * heads * D, row, tokens, x.dq, scale, scale);
        } else {
            constexpr int REST = D > 64 ? D - 64 : 8;
            store_head_rows<REST>(to + 64, 3 * heads * D, row, tokens, reinterpret_cast<const float(&)[REST / 2]>(x.dq), scale,
                                  scale);
        }
    }
    // Adds it to what items before left.
    __device__ __forceinline__ void add_queries(Tile& x, int group, const Item& item, int tile, u32 count) const {
        const int thread = threadIdx.x % 128;
        float* to = scratch.dq + (((i64)copy(item) * total + item.head) * query_tiles() + tile) * FLOATS +
                    group * (HALVES == 2 ? 64 * D : 4096) + 4 * thread;
        barrier_wait(turn(count), parity(count));
#pragma unroll
        for (int i = 0; i < COLUMNS / 8; i++) {
            if (HALVES == 1 && group == 1 && i >= (D - 64) / 8) break;
            if (LONE && HALVES == 2 && tile * QUERIES + 64 * group >= tokens) break;
            const float *y = x.dq + 4 * i;
            asm volatile("{ .reg .pred p; setp.ne.b32 p, %5, 0; @p red.relaxed.gpu.global.add.v4.f32 [%0], {%1,%2,%3,%4};"
                         " @!p st.global.v4.f32 [%0], {%1,%2,%3,%4}; }" ::"l"(to + 512 * i), "f"(y[0]), "f"(y[1]), "f"(y[2]),
                         "f"(y[3]), "r"(before(item))
                         : "memory");
        }
        warp_arrive(added(count));
    }

    // Half HALF of a tile of queries. The scores of a first half are there, those of a second are
    // under way; `next` is where those after are.
    template <int HALF, bool LAST>
    __device__ __forceinline__ void step(Tile& x, int group, Place& at) const {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, t = lane % 4;
        const float scale = score_scale<D>() * LOG2E;
        const u32 some_queries = queries(at.count) + HALF * 64 * 128, some_douts = douts(at.count) + HALF * 64 * 128;

        float ds[32];
        float(&p)[32] = x.s;
        if constexpr (!AHEAD && HALF == 0) {
            barrier_wait(queries_full(at.count), parity(at.count));
            score(x.s, group, at.round, at.count, 0);
            wgmma_commit();
        }
        const int key = at.item.keys * BLOCK + 64 * group + 16 * warp + lane / 4;
        const u32 own_values = values(at.round) + 64 * group * 128;
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < S::STEPS; k++)
            wgmma<E, 64, false, false>(ds, S::template side<BLOCK>(own_values, k), S::template side<QUERIES>(some_douts, k),
                                         k > 0);
        wgmma_commit();
        if constexpr (LATER && HALF == 0) {
            if (at.count > 0) barrier_wait(scores_full(at.count - 1), parity(at.count - 1));
            start_queries(x, group, at.round_before(), at.count - 1);
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
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const float2 sum = *reinterpret_cast<const float2*>(log_sums(at.count) + 64 * HALF + 8 * j + 2 * t);
#pragma unroll
            for (int i = 0; i < 4; i++) p[4 * j + i] = exp2_fast(fmaf(p[4 * j + i], scale, i % 2 ? -sum.y : -sum.x));
        }
        if (at.item.keys * BLOCK + BLOCK > tokens) {
            // Keys that aren't there.
#pragma unroll
            for (int i = 0; i < 32; i++)
                if (key + i / 2 % 2 * 8 >= tokens) p[i] = 0.0f;
        }
        u32 left[4][4], dleft[4][4];
        as_left<E, 64>(left, p);
        if constexpr (DROP) {
#pragma unroll
            for (int i = 0; i < 16; i++)
                left[i / 4][i % 4] &= (stay >> (2 * i) & 1 ? 0xffffu : 0) | (stay >> (2 * i) & 2 ? 0xffff0000u : 0);
        }
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
                ds[4 * j + i] = p[4 * j + i] * (ds[4 * j + i] - (i % 2 ? delta.y : delta.x));
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
            score(x.s, group, at.round, at.count, HALF + 1);
            wgmma_commit();
        } else {
            // The keys of the item before are left alone, by their dQ and by the copy engine: the next ones take their place.
            if (!BULK && at.first() && at.round > 0) warp_arrive(keys_empty(at.round - 1));
            if (!BULK && at.last() && !next_item(at.round + 1, at.next)) at.next.head = -1;
            if constexpr (BULK) {
                // dQ is there; dK may be under way.
                wgmma_wait<1>();
                arrived(x.dq);
                if (at.last()) warp_arrive(keys_empty(at.round));
                stage_queries(x, group, at.count);
                wgmma_wait<0>();
                arrived(x.dk);
                arrived(x.dv);
                return;
            }
            if constexpr (AHEAD) {
                if (at.more()) barrier_wait(queries_full(at.count + 1), parity(at.count + 1));
                score(x.s, group, at.round_next(), at.count + 1, 0);
                wgmma_commit();
            }
            // dQ of this tile, or with LATER of the one before, is there; what was started after it may be under way.
            wgmma_wait<LATER ? 2 : WHOLE && !AHEAD ? 0 : 1>();
            arrived(x.dq);
            if constexpr (WHOLE) store_queries(x, group, at);
            else if constexpr (!LATER) add_queries(x, group, at.item, at.tile, at.count);
            else if (at.count > 0) add_before(x, group, at);
            // No matmul may be under way where a loop begins again.
            wgmma_wait<0>();
            if constexpr (AHEAD) arrived(x.s);
            arrived(x.dk);
            arrived(x.dv);
        }
    }

    __device__ __forceinline__ void start_queries_now(Tile& x, int group, const Place& at) const {
        barrier_wait(scores_full(at.count), parity(at.count));
        start_queries(x, group, at.round, at.count);
    }

    // A tile of queries for a warpgroup that has no keys in this block: its share of dQ alone.
    __device__ __forceinline__ void help(Tile& x, int group, Place& at) const {
        const int lane = threadIdx.x % 32, row = 64 * group + threadIdx.x / 32 % 4 * 16 + lane % 16;
        const u32 none[4] = {};
        if (LATER && at.count > 0) {
            barrier_wait(scores_full(at.count - 1), parity(at.count - 1));
            start_queries(x, group, at.round_before(), at.count - 1);
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
            else add_queries(x, group, at.item, at.tile, at.count);
        }
        if (!at.last()) return;
        if (!next_item(at.round + 1, at.next)) at.next.head = -1;
        if constexpr (AHEAD) {
            if (at.more()) barrier_wait(queries_full(at.count + 1), parity(at.count + 1));
            score(x.s, group, at.round_next(), at.count + 1, 0);
            wgmma_commit();
            wgmma_wait<0>();
            arrived(x.s);
        }
    }

    __device__ __forceinline__ void add_before(Tile& x, int group, const Place& at) const {
        add_queries(x, group, at.before, at.first() ? at.tiles - 1 : at.tile - 1, at.count - 1);
    }

    // Where a warp leaves its rows of dK, for the copy engine to bring to their place: with LATER in scores that it will write
    // itself, since keys are still needed; else in its keys. Those of dV take the place of its values.
    __device__ __forceinline__ u32 staged_keys(int row, const Place& at) const {
        return (LATER ? scores(at.count + 1) : keys(at.round)) + row * 128;
    }
    // The sums of dV over these keys, of which a warp has 16 from `token` on.
    __device__ __forceinline__ void store_sums(const Tile& x, const Place& at, int token) const {
        float* all = reinterpret_cast<float*>(shared_bytes + (LATER ? AT_SUMS : scores(at.count) - shared));
        ColumnSums<D> column_sums;
        column_sums.clear();
        column_sums.add_to(tokens, token, [&](int j, int i) { return x.dv[4 * j + i]; });
        // Nobody reads those of the item before any more.
        asm volatile("bar.sync 2, 256;" ::: "memory");
        column_sums.store(all + threadIdx.x / 32 * D, drops.keep_scale);
        asm volatile("bar.sync 2, 256;" ::: "memory");
        float* row = sums + (((i64)(at.item.head / heads) * key_tiles() + at.item.keys) * 3 + 2) * heads * D + at.item.head % heads * D;
        for (int i = threadIdx.x; i < D; i += 256) {
            float sum = 0.0f;
#pragma unroll
            for (int w = 0; w < 8; w++) sum += all[w * D + i];
            row[i] = sum;
        }
    }
    // The sums of dQ over all queries that come of these keys: a row of `sums`, as those of dV are for each tile of keys. All keys are
    // still there, and scores of the tile before aren't needed any more.
    __device__ __forceinline__ void store_query_sums(Tile& x, int group, const Place& at) const {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        float* by_key = reinterpret_cast<float*>(shared_bytes + (scores(at.count + 1) - shared));
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float sum = x.ds_sums[half];
            sum += __shfl_xor_sync(0xffffffffu, sum, 1);
            sum += __shfl_xor_sync(0xffffffffu, sum, 2);
            if (lane % 4 == 0) by_key[16 * warp + lane / 4 + 8 * half] = sum;
            x.ds_sums[half] = 0.0f;
        }
        asm volatile("bar.sync 2, 256;" ::: "memory");
        // Two columns of every fourth key.
        const int column = 2 * (8 * warp + lane / 4), strip = column / 64, unit = column % 64 / 8;
        const u8* from = shared_bytes + (keys(at.round) - shared) + strip * S::strip(BLOCK) + column % 8 * 2;
        float sum[2] = {};
        if (column < D) {
#pragma unroll 8
            for (int key = lane % 4; key < BLOCK; key += 4) {
                float a, b;
                unpack2<E>(*reinterpret_cast<const u32*>(from + key * 128 + (unit ^ key % 8) * 16), a, b);
                sum[0] = fmaf(by_key[key], a, sum[0]), sum[1] = fmaf(by_key[key], b, sum[1]);
            }
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 1);
            sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 2);
        }
        if (column < D && lane % 4 < 2) {
            float* row = sums + ((i64)(at.item.head / heads) * key_tiles() + at.item.keys) * 3 * heads * D + at.item.head % heads * D;
            row[column + lane % 4] = (lane % 4 ? sum[1] : sum[0]) * score_scale<D>();
        }
    }
    __device__ __forceinline__ void store(Tile& x, int group, const Place& at) const {
        if constexpr (WHOLE && SUM) store_query_sums(x, group, at);
        const int row = 64 * group + threadIdx.x / 32 % 4 * 16, token = at.item.keys * BLOCK + row;
        // With BULK, where dQ and scores are staged otherwise: keys and values are being replaced.
        constexpr int KEY_ROWS = BULK ? 16 : BLOCK;
        const u32 to_keys = BULK ? shared + AT_STAGED + row * 256 : staged_keys(row, at);
        const u32 to_values = (BULK ? shared + AT_SCORES : values(at.round)) + row * 128;
        if constexpr (BULK) await_added(group, at.count);
        // Both warpgroups are through with what is overwritten.
        if constexpr (LATER) barrier_wait(scores_full(at.count), parity(at.count));
        else asm volatile("bar.sync 1, 256;" ::: "memory");
        const float scale = score_scale<D>(), keep_scale = DROP ? drops.keep_scale : 1.0f;
        stage_rows<E, D, KEY_ROWS>(to_keys, x.dk, scale, scale);
        stage_rows<E, D, BLOCK>(to_values, x.dv, keep_scale, keep_scale);
        publish();
        __syncwarp();
        if constexpr (DROP && SUM) store_sums(x, at, token);
        if (threadIdx.x % 32 != 0 || token >= tokens) return;
        const int sample = at.item.head / heads, h = at.item.head % heads;
        store_staged<D, KEY_ROWS>(to_keys, *result_map, heads + h, token, sample);
        store_staged<D, BLOCK>(to_values, *result_map, 2 * heads + h, token, sample);
        stores_commit();
    }

    __device__ __forceinline__ void consume(int group) {
        Tile x;
        if constexpr (WHOLE && SUM) x.ds_sums[0] = x.ds_sums[1] = 0.0f;
        Place at;
        at.round = at.tile = 0, at.tiles = query_tiles(), at.count = 0;
        if (!next_item(0, at.item)) return;
        at.before = at.next = at.item;
        if constexpr (AHEAD) {
            barrier_wait(queries_full(0), 0);
            score(x.s, group, 0, 0, 0);
            wgmma_commit();
            wgmma_wait<0>();
            arrived(x.s);
        }
#pragma unroll 1
        while (at.item.head >= 0) {
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
            if (BULK && at.last() && !next_item(at.round + 1, at.next)) at.next.head = -1;
            at.before = at.item;
            at.count++;
            if (at.last()) at.tile = 0, at.round++, at.item = at.next;
            else at.tile++;
        }
        if constexpr (LATER) {
            barrier_wait(scores_full(at.count - 1), parity(at.count - 1));
            start_queries(x, group, at.round - 1, at.count - 1);
            wgmma_wait<0>();
            arrived(x.dq);
            add_before(x, group, at);
        }
        await_staged();
    }
};

// Grid: as many blocks as run at once. The maps are of qkv as (B,T,3H,D), tiles of BLOCK and of 64·HALVES rows, and of dO as
// (B,T,H,D); that of the result, as qkv, of tiles of 16 rows.
template <typename E, int D, int HALVES, bool AHEAD, bool LATER, bool LONE, bool COPIES, bool WHOLE, bool BULK, bool DROP, bool SUM>
__global__ void __launch_bounds__(384, 1)
    flash_grad(const __grid_constant__ TensorMap key_map, const __grid_constant__ TensorMap query_map,
               const __grid_constant__ TensorMap dout_map, const __grid_constant__ TensorMap result_map,
               u32* turns, float* __restrict__ log_sums, float* __restrict__ deltas, float* dq, int tokens, int heads, int total,
               int group_heads, int copies, float* sums, E* result, const Header* __restrict__ header, u32 site, u32 threshold,
               float keep_scale) {
    extern __shared__ __align__(1024) u8 shared[];
    FlashGrad<E, D, HALVES, AHEAD, LATER, LONE, COPIES, WHOLE, BULK, DROP, SUM> f;
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
        if (BULK && threadIdx.x == 288) f.add_staged();
        if (!WHOLE && !BULK && threadIdx.x == 288) f.await_turns();
        if (!WHOLE && !BULK && threadIdx.x == 320) f.pass_turns();
    } else {
        more_registers<240>();
        f.consume(group);
    }
}
