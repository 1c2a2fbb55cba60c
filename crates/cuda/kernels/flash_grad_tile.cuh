// What a warpgroup of attention_flash_grad.cu has, and its steps: matmuls of its keys and values, dQ to its place, dK and dV to theirs.
#pragma once
#include "flash_grad.cuh"

// FlashGradPipeline says what the parameters are.
template <typename E, int D, int HALVES, bool AHEAD, bool LATER, bool LONE, bool COPIES, bool WHOLE, bool DROP, bool SUM>
struct FlashGradTile : FlashGradPipeline<E, D, HALVES, AHEAD, LATER, LONE, COPIES, WHOLE, DROP, SUM> {
    using Base = FlashGradPipeline<E, D, HALVES, AHEAD, LATER, LONE, COPIES, WHOLE, DROP, SUM>;
    using typename Base::S, typename Base::Item;
    using Base::QUERIES, Base::SCORES, Base::FLOATS, Base::COLUMNS, Base::BEHIND, Base::AT_SUMS, Base::result_map, Base::result,
        Base::scratch, Base::drops, Base::sums, Base::tokens, Base::heads, Base::total, Base::shared_bytes, Base::shared,
        Base::key_tiles, Base::query_tiles, Base::keys, Base::values, Base::queries, Base::douts, Base::scores, Base::scores_full,
        Base::turn, Base::added, Base::parity, Base::copy, Base::before;

    // Steps of keys and values, of 16 channels, that registers hold: Sᵀ and dPᵀ read shared memory at its full rate otherwise. As
    // many as registers are free for; draws take those.
    static constexpr int HELD_KEYS = HALVES == 2 && !DROP ? 1 : 0;
    static constexpr int HELD_VALUES = DROP ? 0 : HALVES == 2 ? S::STEPS : WHOLE && D > 112 ? 5 : 0;
    static constexpr int SOME_KEYS = HELD_KEYS > 0 ? HELD_KEYS : 1, SOME_VALUES = HELD_VALUES > 0 ? HELD_VALUES : 1;

    // A thread's part of its tile of keys.
    struct Tile {
        float dk[D / 2], dv[D / 2];
        float s[32], dq[COLUMNS / 2];
        // With WHOLE and SUM, dS of this thread's two keys, summed over queries.
        float ds_sums[2];
        // This warpgroup's keys and values, as left sides of the first steps of matmuls.
        u32 keys[SOME_KEYS][4], values[SOME_VALUES][4];
    };

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

    // Brings the first STEPS of this warpgroup's 64 rows of the tile at `from` into registers.
    template <int STEPS, int N> __device__ __forceinline__ void hold(u32 (&x)[N][4], int group, u32 from) const {
        const int lane = threadIdx.x % 32, row = 64 * group + threadIdx.x / 32 % 4 * 16 + lane % 16;
#pragma unroll
        for (int k = 0; k < STEPS; k++)
            load_matrices(x[k], from + k / 4 * S::strip(BLOCK) + Rows<64>::at(row, k % 4 * 2 + lane / 16));
    }
    // Multiplies keys or values at `left`, of which registers hold the first STEPS, by 64 queries.
    template <int STEPS, int N>
    __device__ __forceinline__ void meet(float (&to)[32], const u32 (&held)[N][4], u32 left, u32 right) const {
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < S::STEPS; k++)
            if (k < STEPS) wgmma<E, 64, false>(to, held[k < STEPS ? k : 0], S::template side<QUERIES>(right, k), k > 0);
            else wgmma<E, 64, false, false>(to, S::template side<BLOCK>(left, k), S::template side<QUERIES>(right, k), k > 0);
    }
    __device__ __forceinline__ void score(float (&s)[32], const Tile& x, int group, int round, u32 count, int half) const {
        meet<HELD_KEYS>(s, x.keys, keys(round) + 64 * group * 128, queries(count) + half * 64 * 128);
        wgmma_commit();
    }
    __device__ __forceinline__ void start_values(float (&ds)[32], const Tile& x, int group, const Place& at, int half) const {
        meet<HELD_VALUES>(ds, x.values, values(at.round) + 64 * group * 128, douts(at.count) + half * 64 * 128);
        wgmma_commit();
    }

    // Starts this warpgroup's share of dQ of a tile whose scores are there.
    __device__ __forceinline__ void start_queries(float (&dq)[COLUMNS / 2], int group, int round, u32 count) const {
        const u32 left = scores(count) + (HALVES == 2 ? group * SCORES : 0);
        const u32 right = keys(round) + (HALVES == 2 ? 0 : group * S::strip(BLOCK));
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < BLOCK / 16; k++)
            wgmma<E, COLUMNS, true, true>(dq, Rows<64>::side(left + 16 * k * 128),
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
    __device__ __forceinline__ void add_queries(const float (&dq)[COLUMNS / 2], int group, const Item& item, int tile, u32 count) const {
        const int thread = threadIdx.x % 128;
        float* to = scratch.dq + (((i64)copy(item) * total + item.head) * query_tiles() + tile) * FLOATS +
                    group * (HALVES == 2 ? 64 * D : 4096) + 4 * thread;
        barrier_wait(turn(count), parity(count));
#pragma unroll
        for (int i = 0; i < COLUMNS / 8; i++) {
            if (HALVES == 1 && group == 1 && i >= (D - 64) / 8) break;
            if (LONE && HALVES == 2 && tile * QUERIES + 64 * group >= tokens) break;
            const float* y = dq + 4 * i;
            asm volatile("{ .reg .pred p; setp.ne.b32 p, %5, 0; @p red.relaxed.gpu.global.add.v4.f32 [%0], {%1,%2,%3,%4};"
                         " @!p st.global.v4.f32 [%0], {%1,%2,%3,%4}; }" ::"l"(to + 512 * i), "f"(y[0]), "f"(y[1]), "f"(y[2]),
                         "f"(y[3]), "r"(before(item))
                         : "memory");
        }
        warp_arrive(added(count));
    }

    // Where a warp leaves its rows of dK, for the copy engine to bring to their place: with BEHIND in scores that it will write
    // itself, since keys are still needed; else in its keys. Those of dV take the place of its values.
    __device__ __forceinline__ u32 staged_keys(int row, const Place& at) const {
        return (BEHIND ? scores(at.count + 1) : keys(at.round)) + row * 128;
    }
    // The sums of dV over these keys, of which a warp has 16 from `token` on.
    __device__ __forceinline__ void store_sums(const Tile& x, const Place& at, int token) const {
        float* all = reinterpret_cast<float*>(shared_bytes + (BEHIND ? AT_SUMS : scores(at.count) - shared));
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
        const u32 to_keys = staged_keys(row, at), to_values = values(at.round) + row * 128;
        // Both warpgroups are through with what is overwritten.
        if constexpr (BEHIND) barrier_wait(scores_full(at.count), parity(at.count));
        else asm volatile("bar.sync 1, 256;" ::: "memory");
        const float scale = score_scale<D>(), keep_scale = DROP ? drops.keep_scale : 1.0f;
        stage_rows<E, D, BLOCK>(to_keys, x.dk, scale, scale);
        stage_rows<E, D, BLOCK>(to_values, x.dv, keep_scale, keep_scale);
        publish();
        __syncwarp();
        if constexpr (DROP && SUM) store_sums(x, at, token);
        if (threadIdx.x % 32 != 0 || token >= tokens) return;
        const int sample = at.item.head / heads, h = at.item.head % heads;
        store_staged<D, BLOCK>(to_keys, *result_map, heads + h, token, sample);
        store_staged<D, BLOCK>(to_values, *result_map, 2 * heads + h, token, sample);
        stores_commit();
    }
};
