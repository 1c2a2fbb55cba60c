// Items, memory and barriers of the gradient of attention on Hopper, and the three warps that feed its warpgroups:
// attention_flash_grad.cu, where the legend is.
#pragma once
#include "flash.cuh"

// Memory between the kernels, for every head.
struct FlashScratch {
    // A number of the next item, then for each tile of queries how many tiles of keys were added to each copy of its dQ.
    u32* turns;
    // log-sum-exp times log2(e) and rowsum(dO ∘ O), for a multiple of BLOCK tokens; of those not there, infinity and 0.
    float *log_sums, *deltas;
    float* dq;
};

// An item is a tile of BLOCK keys of a head, 64 for each of two warpgroups, that goes through the queries, 64·HALVES at a time. A
// warpgroup computes Pᵀ and dSᵀ of its keys, adds Pᵀ·dO to dV and dSᵀ·Q to dK, leaves dSᵀ in shared memory, and computes its share of
// dQ = dS·K: 64 queries with two HALVES, else a strip of columns. It adds that to what items of keys before left, once these have:
// the order of sums is that of keys. With COPIES, where heads are few, so that items of one run at the same time, there are several
// of dQ, 2 to the `copies`, for keys in turn: an item waits for the one as many before. flash_grad_end adds them up. With LATER, dQ
// is computed while the next queries become probabilities. With LONE, the last BLOCK tokens are no more than 64: one warpgroup has
// no keys there, and the last tile of queries has one half.
//
// With WHOLE, where heads fill the GPU evenly and are short, a block has all items of a head, one after the other. dQ goes on from
// what the item before left in the block's own memory, which stays in the L2 cache, and the last item brings it to its place:
// no turns, no flash_grad_end. SUM then asks for the sums of dQ over queries: those of dS, times the keys.
//
// Three warps do other things: one fetches, one waits for items before, one tells those after. Items are taken in turn; those of a
// head are as far apart as `group` heads, so that one rarely waits for the one before.
template <typename E, int D, int HALVES, bool AHEAD, bool LATER, bool LONE, bool COPIES, bool WHOLE, bool DROP, bool SUM>
struct FlashGradPipeline {
    using S = Strips<D>;
    static_assert(HALVES == 2 ? D <= 64 : D > 64, "");
    static_assert(HALVES == 2 || !LATER || !AHEAD && !LONE && !WHOLE && !DROP, "");
    static_assert(DROP || WHOLE || !SUM, "");
    static_assert(!WHOLE || HALVES == 1 && !COPIES && !DROP, "");
    static constexpr int QUERIES = 64 * HALVES, STAGES = 2;
    static constexpr int KEY_TILE = S::tile(BLOCK), QUERY_TILE = S::tile(QUERIES);
    static constexpr int SCORES = BLOCK * 128;
    // From the start of shared memory.
    static constexpr int AT_QUERIES = 4 * KEY_TILE, AT_SCORES = AT_QUERIES + 2 * STAGES * QUERY_TILE;
    static constexpr int AT_ROWS = AT_SCORES + 2 * HALVES * SCORES;
    static constexpr int AT_BARRIERS = AT_ROWS + STAGES * 2 * QUERIES * 4, AT_ITEMS = AT_BARRIERS + 16 * 8;
    // Whether dQ of an item's last queries is computed beside the next item's.
    static constexpr bool BEHIND = LATER && HALVES == 2;
    // With BEHIND and SUM, for sums of warps; otherwise scores have room for them.
    static constexpr int AT_SUMS = AT_ITEMS + 16, SHARED = AT_SUMS + (BEHIND && SUM ? 8 * D * 4 : 0);
    // Columns of dQ that a warpgroup has: with a lone half one strip, of which the last may be zeros.
    static constexpr int COLUMNS = HALVES == 2 ? D : 64;
    static constexpr int FLOATS = QUERIES * D;
    // With WHOLE, whether registers for what is there of dQ are free once dK is under way, and no earlier.
    static constexpr bool LATE = D > 96;

    const TensorMap* result_map;
    E* result;
    FlashScratch scratch;
    Drops drops;
    float* sums;
    int tokens, heads, total, group_heads, copies;
    u8* shared_bytes;
    u32 shared;

    __device__ __forceinline__ int key_tiles() const { return ceil_div(tokens, BLOCK); }
    __device__ __forceinline__ int query_tiles() const { return ceil_div(tokens, QUERIES); }

    __device__ __forceinline__ u32 keys(int i) const { return shared + 2 * (i & 1) * KEY_TILE; }
    __device__ __forceinline__ u32 values(int i) const { return keys(i) + KEY_TILE; }
    __device__ __forceinline__ u32 queries(u32 i) const { return shared + AT_QUERIES + 2 * (i & 1) * QUERY_TILE; }
    __device__ __forceinline__ u32 douts(u32 i) const { return queries(i) + QUERY_TILE; }
    __device__ __forceinline__ u32 scores(u32 i) const { return shared + AT_SCORES + (i & 1) * HALVES * SCORES; }
    __device__ __forceinline__ float* log_sums(u32 i) const {
        return reinterpret_cast<float*>(shared_bytes + AT_ROWS) + (i & 1) * 2 * QUERIES;
    }
    __device__ __forceinline__ float* deltas(u32 i) const { return log_sums(i) + QUERIES; }
    __device__ __forceinline__ u32 barrier(int i) const { return shared + AT_BARRIERS + 8 * i; }
    __device__ __forceinline__ u32 keys_full(int i) const { return barrier(i & 1); }
    __device__ __forceinline__ u32 keys_empty(int i) const { return barrier(2 + (i & 1)); }
    __device__ __forceinline__ u32 queries_full(u32 i) const { return barrier(4 + (i & 1)); }
    __device__ __forceinline__ u32 queries_empty(u32 i) const { return barrier(6 + (i & 1)); }
    __device__ __forceinline__ u32 scores_full(u32 i) const { return barrier(8 + (i & 1)); }
    __device__ __forceinline__ u32 turn(u32 i) const { return barrier(10 + (i & 1)); }
    __device__ __forceinline__ u32 added(u32 i) const { return barrier(12 + (i & 1)); }
    __device__ __forceinline__ u32 told(u32 i) const { return barrier(14 + (i & 1)); }
    __device__ __forceinline__ volatile int* item_at(int i) const {
        return reinterpret_cast<volatile int*>(shared_bytes + AT_ITEMS) + (i & 1);
    }
    static __device__ __forceinline__ u32 parity(u32 i) { return i >> 1 & 1; }

    struct Item {
        int head, keys;
    };
    // Heads come in groups, a group's first tiles of keys first.
    __device__ __forceinline__ bool find(int number, Item& item) const {
        const int tiles = key_tiles();
        if (number >= total * tiles) return false;
        if constexpr (WHOLE) {
            item.head = number / tiles, item.keys = number % tiles;
            return true;
        }
        const int group = number / (group_heads * tiles), rest = number - group * group_heads * tiles;
        const int size = min(group_heads, total - group * group_heads);
        item.keys = rest / size;
        item.head = group * group_heads + rest % size;
        return true;
    }
    // Item of round `i`, once it is fetched. The caller must arrive at keys_empty before the place is used again.
    __device__ __forceinline__ bool next_item(int i, Item& item) const {
        barrier_wait(keys_full(i), parity(i));
        return find(*item_at(i), item);
    }

    __device__ __forceinline__ void init() {
        for (int i = 0; i < 2; i++) {
            barrier_init(keys_full(i), 1), barrier_init(keys_empty(i), WHOLE ? 8 : 8 + 2);
            barrier_init(queries_full(i), 1), barrier_init(queries_empty(i), 8);
            barrier_init(scores_full(i), 8);
            barrier_init(turn(i), 1), barrier_init(added(i), 8), barrier_init(told(i), 1);
        }
    }

    // By one thread.
    __device__ __forceinline__ void fetch(const TensorMap& key_map, const TensorMap& query_map, const TensorMap& dout_map) {
        const int tiles = query_tiles(), padded = key_tiles() * BLOCK;
        u32 count = 0;
        int head = 0;
        for (int round = 0;; round++) {
            const int part = WHOLE ? round % key_tiles() : 0;
            if (part == 0) head = atomicAdd(scratch.turns, 1);
            const int number = WHOLE ? head * key_tiles() + part : head;
            Item item;
            const bool there = find(number, item);
            barrier_wait(keys_empty(round), parity(round) ^ 1);
            *item_at(round) = number;
            if (!there) {
                barrier_arrive(keys_full(round));
                break;
            }
            const int sample = item.head / heads, h = item.head % heads;
            barrier_expect(keys_full(round), 2 * KEY_TILE);
            load_rows<D, BLOCK>(keys(round), key_map, heads + h, item.keys * BLOCK, sample, keys_full(round));
            load_rows<D, BLOCK>(values(round), key_map, 2 * heads + h, item.keys * BLOCK, sample, keys_full(round));
            for (int tile = 0; tile < tiles; tile++, count++) {
                const u32 full = queries_full(count);
                barrier_wait(queries_empty(count), parity(count) ^ 1);
                barrier_expect(full, 2 * QUERY_TILE + 2 * QUERIES * 4);
                load_rows<D, QUERIES>(queries(count), query_map, h, tile * QUERIES, sample, full);
                load_rows<D, QUERIES>(douts(count), dout_map, h, tile * QUERIES, sample, full);
                const i64 row = (i64)item.head * padded + tile * QUERIES;
                load_bytes(shared_address(log_sums(count)), scratch.log_sums + row, QUERIES * 4, full);
                load_bytes(shared_address(deltas(count)), scratch.deltas + row, QUERIES * 4, full);
            }
        }
    }

    // Which copy of dQ is an item's, and how many keys are added to it before.
    __device__ __forceinline__ int copy(const Item& item) const { return COPIES ? item.keys & ((1 << copies) - 1) : 0; }
    __device__ __forceinline__ int before(const Item& item) const { return COPIES ? item.keys >> copies : item.keys; }
    __device__ __forceinline__ u32* turns_of(const Item& item) const {
        return scratch.turns + 32 + (((i64)copy(item) * total + item.head) * query_tiles());
    }

    // By one thread: lets the warpgroups add to dQ when all keys before have been added.
    __device__ __forceinline__ void await_turns() {
        const int tiles = query_tiles();
        u32 count = 0;
        Item item;
        for (int round = 0; next_item(round, item); round++) {
            barrier_arrive(keys_empty(round));
            const u32* turns = turns_of(item);
            for (int tile = 0; tile < tiles; tile++, count++) {
                // No warpgroup may be two tiles ahead of those after.
                if (count > 1) barrier_wait(told(count), parity(count - 2));
                if (before(item) > 0) {
                    u32 done;
                    do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(done) : "l"(turns + tile) : "memory");
                    while (done < (u32)before(item));
                }
                barrier_arrive(turn(count));
            }
        }
    }
    // By one thread: signals that these keys have been added.
    __device__ __forceinline__ void pass_turns() {
        const int tiles = query_tiles();
        u32 count = 0;
        Item item;
        for (int round = 0; next_item(round, item); round++) {
            barrier_arrive(keys_empty(round));
            u32* turns = turns_of(item);
            for (int tile = 0; tile < tiles; tile++, count++) {
                barrier_wait(added(count), parity(count));
                asm volatile("fence.acq_rel.gpu;" ::: "memory");
                asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(turns + tile), "r"(before(item) + 1) : "memory");
                barrier_arrive(told(count));
            }
        }
    }
};
