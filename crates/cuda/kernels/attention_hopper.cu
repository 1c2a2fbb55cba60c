// Softmax attention for Hopper: a head's tokens in shared memory, products by warpgroups (wgmma). Without dropout, T ≤ 256,
// D 32 or 64, 16-bit elements. Without atomics. sm_90a only.
//
// Legend: B batch, H heads, T tokens, D head size, C = H·D. A tile is 64 tokens, what a warpgroup's product has as rows. A
// unit is 8 elements (16 bytes). qkv is (B,T,3C): queries, keys and values of a token lie side by side, head h at h·D of each.
#include "attention.cuh"


__host__ __device__ constexpr int round_up(int a, int b) { return ceil_div(a, b) * b; }

template <typename E> struct IsBf16 { static constexpr bool VALUE = false; };
template <> struct IsBf16<bf16> { static constexpr bool VALUE = true; };

// ---- Instructions ----

__device__ __forceinline__ void load_two_transposed(u32 (&x)[2], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
                 : "=r"(x[0]), "=r"(x[1])
                 : "r"(address)
                 : "memory");
}
__device__ __forceinline__ void store_matrices(u32 address, const u32 (&x)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(x[0]), "r"(x[1]),
                 "r"(x[2]), "r"(x[3])
                 : "memory");
}
__device__ __forceinline__ void store_two_matrices(u32 address, u32 x, u32 y) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1,%2};" ::"r"(address), "r"(x), "r"(y) : "memory");
}

// c += a·b for a 16×16 a and a 16×8 b.
template <typename E> __device__ __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    if constexpr (IsBf16<E>::VALUE)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// What this thread wrote to shared memory becomes visible to products. A barrier must follow.
__device__ __forceinline__ void publish() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- Products of a warpgroup ----

// Products run on their own: d must not be touched, nor registers of a left side changed, between open_products and the wait.
__device__ __forceinline__ void open_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void close_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int OPEN> __device__ __forceinline__ void wait_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(OPEN) : "memory");
}
// The compiler must not use results before the wait.
template <int N> __device__ __forceinline__ void arrived(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}

// Registers 0..n of a product's result, in its text and as its operands.
#define R4 "%0,%1,%2,%3"
#define R8 R4 ",%4,%5,%6,%7"
#define R12 R8 ",%8,%9,%10,%11"
#define R16 R12 ",%12,%13,%14,%15"
#define R20 R16 ",%16,%17,%18,%19"
#define R24 R20 ",%20,%21,%22,%23"
#define R28 R24 ",%24,%25,%26,%27"
#define R32 R28 ",%28,%29,%30,%31"
#define R36 R32 ",%32,%33,%34,%35"
#define R40 R36 ",%36,%37,%38,%39"
#define R44 R40 ",%40,%41,%42,%43"
#define R48 R44 ",%44,%45,%46,%47"
#define R52 R48 ",%48,%49,%50,%51"
#define R56 R52 ",%52,%53,%54,%55"
#define R60 R56 ",%56,%57,%58,%59"
#define R64 R60 ",%60,%61,%62,%63"
#define F4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define O4 F4(0)
#define O8 O4, F4(4)
#define O12 O8, F4(8)
#define O16 O12, F4(12)
#define O20 O16, F4(16)
#define O24 O20, F4(20)
#define O28 O24, F4(24)
#define O32 O28, F4(28)
#define O36 O32, F4(32)
#define O40 O36, F4(36)
#define O44 O40, F4(40)
#define O48 O44, F4(44)
#define O52 O48, F4(48)
#define O56 O52, F4(52)
#define O60 O56, F4(56)
#define O64 O60, F4(60)

#define SHARED_LEFT(N, REGS, OUTS, A, B, P, TA, TB)                                                                     \
    if constexpr (COLUMNS == N && IsBf16<E>::VALUE)                                                                     \
        asm volatile("{.reg .pred p; setp.ne.b32 p, " P ", 0; wgmma.mma_async.sync.aligned.m64n" #N                     \
                     "k16.f32.bf16.bf16 {" REGS "}, " A ", " B ", p, 1, 1, " TA ", " TB ";}"                            \
                     : OUTS                                                                                             \
                     : "l"(a), "l"(b), "r"((int)add), "n"((int)LEFT_TURNED), "n"((int)RIGHT_TURNED));                   \
    if constexpr (COLUMNS == N && !IsBf16<E>::VALUE)                                                                    \
    asm volatile("{.reg .pred p; setp.ne.b32 p, " P ", 0; wgmma.mma_async.sync.aligned.m64n" #N                         \
                 "k16.f32.f16.f16 {" REGS "}, " A ", " B ", p, 1, 1, " TA ", " TB ";}"                                  \
                 : OUTS                                                                                                 \
                 : "l"(a), "l"(b), "r"((int)add), "n"((int)LEFT_TURNED), "n"((int)RIGHT_TURNED))

#define REGISTER_LEFT(N, REGS, OUTS, A, B, P, TB)                                                                       \
    if constexpr (COLUMNS == N && IsBf16<E>::VALUE)                                                                     \
        asm volatile("{.reg .pred p; setp.ne.b32 p, " P ", 0; wgmma.mma_async.sync.aligned.m64n" #N                     \
                     "k16.f32.bf16.bf16 {" REGS "}, {" A "}, " B ", p, 1, 1, " TB ";}"                                  \
                     : OUTS                                                                                             \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add), "n"((int)RIGHT_TURNED));      \
    if constexpr (COLUMNS == N && !IsBf16<E>::VALUE)                                                                    \
    asm volatile("{.reg .pred p; setp.ne.b32 p, " P ", 0; wgmma.mma_async.sync.aligned.m64n" #N                         \
                 "k16.f32.f16.f16 {" REGS "}, {" A "}, " B ", p, 1, 1, " TB ";}"                                        \
                 : OUTS                                                                                                 \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add), "n"((int)RIGHT_TURNED))

// d = a·b, or d += a·b, for a 64×16 a and a 16×COLUMNS b in shared memory. A side is turned if what lies in a row of shared
// memory is a column of a, or a row of b. With w = warp%4, g = lane/4 and t = lane%4, a thread holds in d[4j..4j+4] rows 16w+g
// and 16w+g+8, columns 8j+2t and 8j+2t+1.
template <typename E, int COLUMNS, bool LEFT_TURNED, bool RIGHT_TURNED>
__device__ __forceinline__ void product(float* d, u64 a, u64 b, bool add) {
    SHARED_LEFT(8, R4, O4, "%4", "%5", "%6", "%7", "%8");
    SHARED_LEFT(16, R8, O8, "%8", "%9", "%10", "%11", "%12");
    SHARED_LEFT(24, R12, O12, "%12", "%13", "%14", "%15", "%16");
    SHARED_LEFT(32, R16, O16, "%16", "%17", "%18", "%19", "%20");
    SHARED_LEFT(40, R20, O20, "%20", "%21", "%22", "%23", "%24");
    SHARED_LEFT(48, R24, O24, "%24", "%25", "%26", "%27", "%28");
    SHARED_LEFT(56, R28, O28, "%28", "%29", "%30", "%31", "%32");
    SHARED_LEFT(64, R32, O32, "%32", "%33", "%34", "%35", "%36");
    SHARED_LEFT(72, R36, O36, "%36", "%37", "%38", "%39", "%40");
    SHARED_LEFT(80, R40, O40, "%40", "%41", "%42", "%43", "%44");
    SHARED_LEFT(88, R44, O44, "%44", "%45", "%46", "%47", "%48");
    SHARED_LEFT(96, R48, O48, "%48", "%49", "%50", "%51", "%52");
    SHARED_LEFT(104, R52, O52, "%52", "%53", "%54", "%55", "%56");
    SHARED_LEFT(112, R56, O56, "%56", "%57", "%58", "%59", "%60");
    SHARED_LEFT(120, R60, O60, "%60", "%61", "%62", "%63", "%64");
    SHARED_LEFT(128, R64, O64, "%64", "%65", "%66", "%67", "%68");
}
// As above, for an a in registers.
template <typename E, int COLUMNS, bool RIGHT_TURNED>
__device__ __forceinline__ void product(float* d, const u32 (&a)[4], u64 b, bool add) {
    REGISTER_LEFT(8, R4, O4, "%4,%5,%6,%7", "%8", "%9", "%10");
    REGISTER_LEFT(16, R8, O8, "%8,%9,%10,%11", "%12", "%13", "%14");
    REGISTER_LEFT(24, R12, O12, "%12,%13,%14,%15", "%16", "%17", "%18");
    REGISTER_LEFT(32, R16, O16, "%16,%17,%18,%19", "%20", "%21", "%22");
    REGISTER_LEFT(40, R20, O20, "%20,%21,%22,%23", "%24", "%25", "%26");
    REGISTER_LEFT(48, R24, O24, "%24,%25,%26,%27", "%28", "%29", "%30");
    REGISTER_LEFT(56, R28, O28, "%28,%29,%30,%31", "%32", "%33", "%34");
    REGISTER_LEFT(64, R32, O32, "%32,%33,%34,%35", "%36", "%37", "%38");
    REGISTER_LEFT(72, R36, O36, "%36,%37,%38,%39", "%40", "%41", "%42");
    REGISTER_LEFT(80, R40, O40, "%40,%41,%42,%43", "%44", "%45", "%46");
    REGISTER_LEFT(88, R44, O44, "%44,%45,%46,%47", "%48", "%49", "%50");
    REGISTER_LEFT(96, R48, O48, "%48,%49,%50,%51", "%52", "%53", "%54");
    REGISTER_LEFT(104, R52, O52, "%52,%53,%54,%55", "%56", "%57", "%58");
    REGISTER_LEFT(112, R56, O56, "%56,%57,%58,%59", "%60", "%61", "%62");
    REGISTER_LEFT(120, R60, O60, "%60,%61,%62,%63", "%64", "%65", "%66");
    REGISTER_LEFT(128, R64, O64, "%64,%65,%66,%67", "%68", "%69", "%70");
}

// ---- Rows in shared memory ----

// Rows of D elements, their units permuted as products expect it (a swizzle of as many bytes as a row has). They start at a
// multiple of 1024 bytes.
template <int D> struct Rows {
    static_assert(D == 32 || D == 64, "");
    static constexpr int UNITS = D / 8, BYTES = 2 * D;

    // Bytes from the first row.
    static __device__ __forceinline__ u32 at(int row, int unit) {
        return row * BYTES + ((unit ^ (D == 64 ? row & 7 : row / 2 & 3)) * 16);
    }
    // A product's side that starts at `address`, the start of a row whose number is a multiple of 8. Groups of 8 rows follow
    // each other.
    static __device__ __forceinline__ u64 side(u32 address) {
        constexpr u64 KIND = D == 64 ? 1 : 2;
        return (u64)(address >> 4) | 1ull << 16 | (u64)(8 * BYTES >> 4) << 32 | KIND << 62;
    }
};

// Starts to copy rows FIRST..END of a head; those from T on are zeros.
template <int T, int D, int FIRST, int END, int THREADS, typename E>
__device__ __forceinline__ void copy_rows(u32 to, const E* head, int stride) {
    // Rows that all threads copy at once: a multiple of 8, so that units are permuted alike.
    constexpr int UNITS = D / 8, STEP = THREADS / UNITS;
    const int row = FIRST + threadIdx.x / UNITS, unit = threadIdx.x % UNITS;
    const E* from = head + row * stride + unit * 8;
    to += Rows<D>::at(row, unit);
#pragma unroll
    for (int i = 0; i < ceil_div(END - FIRST, STEP); i++, from += STEP * stride) {
        bool real = FIRST + (i + 1) * STEP <= T || i * STEP + row < T;
        if (FIRST + (i + 1) * STEP <= END || i * STEP + row < END)
            copy_unit(to + i * STEP * Rows<D>::BYTES, real ? from : head, real);
    }
}

// ---- Tiles in registers ----

// A warp's 16 rows from `first` on as the left side of a product.
template <int D> __device__ __forceinline__ void load_left(u32 (&a)[D / 16][4], u32 rows, int first) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < D / 16; k++) load_matrices(a[k], rows + Rows<D>::at(first + lane % 16, 2 * k + lane / 16));
}
// As above, straight from memory. Rows from T on are zeros.
template <int T, int D, typename E>
__device__ __forceinline__ void load_left(u32 (&a)[D / 16][4], const E* head, int stride, int first) {
    int lane = threadIdx.x % 32;
    int row = first + lane / 4;
    const E* low = head + (i64)row * stride + lane % 4 * 2;
    const E* high = low + 8 * (i64)stride;
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
        a[k][0] = row < T ? *reinterpret_cast<const u32*>(low + 16 * k) : 0;
        a[k][1] = row + 8 < T ? *reinterpret_cast<const u32*>(high + 16 * k) : 0;
        a[k][2] = row < T ? *reinterpret_cast<const u32*>(low + 16 * k + 8) : 0;
        a[k][3] = row + 8 < T ? *reinterpret_cast<const u32*>(high + 16 * k + 8) : 0;
    }
}

// Results of N columns as left sides of next products; columns that aren't there are zeros.
template <typename E, int N>
__device__ __forceinline__ void as_left(u32 (&a)[ceil_div(N, 16)][4], const float (&x)[N / 2]) {
#pragma unroll
    for (int j = 0; j < 2 * ceil_div(N, 16); j++) {
        a[j / 2][j % 2 * 2] = 8 * j < N ? pack2<E>(x[4 * j % (N / 2)], x[4 * j % (N / 2) + 1]) : 0;
        a[j / 2][j % 2 * 2 + 1] = 8 * j < N ? pack2<E>(x[4 * j % (N / 2) + 2], x[4 * j % (N / 2) + 3]) : 0;
    }
}

// Writes a warp's 16 rows of a result, rows g times `low` and rows g+8 times `high`, to rows first..T of a head.
template <int T, int D, typename E>
__device__ __forceinline__ void store_rows(E* head, int stride, int first, const float (&x)[D / 2], float low, float high) {
    int lane = threadIdx.x % 32, t = lane % 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int row = first + lane / 4 + 8 * half;
        float factor = half ? high : low;
        E* to = head + (i64)row * stride;
#pragma unroll
        for (int j = 0; j < D / 8; j += 4) {
            u32 w[4];
#pragma unroll
            for (int i = 0; i < 4; i++)
                w[i] = pack2<E>(x[4 * (j + i) + 2 * half] * factor, x[4 * (j + i) + 2 * half + 1] * factor);
            transpose_words(w);
            if (row < T) *reinterpret_cast<uint4*>(to + (j + t) * 8) = make_uint4(w[0], w[1], w[2], w[3]);
        }
    }
}

// As above, by way of 16 rows of shared memory that only this warp uses: fewer instructions.
template <int T, int D, typename E>
__device__ __forceinline__ void store_rows_by(u32 rows, E* head, int stride, int first, const float (&x)[D / 2], float low,
                                              float high) {
    constexpr int UNITS = D / 8, STEP = 32 / UNITS;
    const int lane = threadIdx.x % 32, row = lane / UNITS, unit = lane % UNITS;
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
        const float* y = x + 8 * k;
        u32 words[4] = {pack2<E>(y[0] * low, y[1] * low), pack2<E>(y[2] * high, y[3] * high),
                        pack2<E>(y[4] * low, y[5] * low), pack2<E>(y[6] * high, y[7] * high)};
        store_matrices(rows + Rows<D>::at(lane % 16, 2 * k + lane / 16), words);
    }
    __syncwarp();
    E* to = head + (i64)(first + row) * stride + unit * 8;
#pragma unroll
    for (int i = 0; i < 16 / STEP; i++) {
        uint4 v;
        asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                     : "r"(rows + Rows<D>::at(i * STEP + row, unit))
                     : "memory");
        if (first + i * STEP + row < T) *reinterpret_cast<uint4*>(to + i * STEP * stride) = v;
    }
    __syncwarp();
}

// ---- Backward ----

// A head goes in two phases:
//   1. A warpgroup owns a tile of keys. For each part of the queries it computes Pᵀ and dSᵀ, adds Pᵀ·dO to dV and dSᵀ·Q to dK,
//      and leaves dSᵀ in shared memory.
//   2. A warpgroup owns a tile of queries, and computes dQ = dS·K.
// Blocks go through heads in turn. What phase 2 doesn't need of the next head is fetched while it runs. With STAGES = 2, the
// next keys are fetched while phase 1 runs. LEFT says that the left sides of Pᵀ and dPᵀ (keys and values) are in registers, SUM
// that the head's sums over its tokens are wanted.
template <typename E, int T, int D, int GROUPS, int STAGES, bool LEFT, bool SUM> struct Backward {
    static constexpr int THREADS = 128 * GROUPS;
    static constexpr int ROWS = round_up(T, 16), COLUMNS = round_up(T, 8);
    static constexpr int TILES = ceil_div(T, 64);
    // The last 8 queries join the part before them: then dSᵀ has them in rows of their own, TAIL, which are 16 bytes.
    static constexpr bool TAIL = COLUMNS % 64 == 8 && COLUMNS > 64;
    static constexpr int PARTS = TAIL ? COLUMNS / 64 : TILES;
    static constexpr int LAST = COLUMNS - (PARTS - 1) * 64;

    static constexpr int MATRIX = ROWS * Rows<D>::BYTES, SCORES = ROWS * 128;
    // dSᵀ, and when it is through the sums of the warps, and those of the last queries.
    static constexpr int WARPS = 4 * GROUPS, SUMS = (3 * WARPS + 1) * D * 4;
    static constexpr int SHARED_SCORES = PARTS * SCORES > SUMS ? PARTS * SCORES : SUMS;
    static constexpr int SMALL = (TAIL ? ROWS * 16 : 0) + 2 * ROWS * 4;
    // Values are there if there is room. Else they go straight to registers.
    static constexpr bool VALUES = (STAGES + 3) * MATRIX + SHARED_SCORES + SMALL <= 232448;
    static constexpr int SHARED = (STAGES + 2 + VALUES) * MATRIX + SHARED_SCORES + SMALL;
    static_assert(VALUES || LEFT, "no room for values");
    static_assert(GROUPS <= TILES, "a warpgroup without a tile");

    // Results leave by way of rows that nobody needs any more: dK and dV by this warp's values, dQ by its dSᵀ.
    static constexpr bool BY_VALUES = VALUES && LEFT, BY_SCORES = ROWS >= 64;

    // Rows of O that all threads hold a unit of, and how often.
    static constexpr int STEP = THREADS / Rows<D>::UNITS, OUTS = ceil_div(ROWS, STEP);
    static constexpr int LOG_SUMS = ceil_div(ROWS, THREADS);

    // Arguments.
    const E* qkv;
    const E* out;
    const float* lse;
    const E* dout;
    E* dqkv;
    float* sums;
    int total, heads;

    // Where things lie in shared memory. Products read rows of the last tile that aren't there, from what follows.
    u32 keys, values, queries, douts, scores, tail;
    float *log_sums, *deltas, *shared_sums;

    // This warp's share of the head's sums.
    ColumnSums<D> query_sums, key_sums, value_sums;
    float tail_sums[2];

    // Of the head that comes next.
    uint4 o[OUTS];
    float log_sum[LOG_SUMS];

    __device__ __forceinline__ int group() const { return __shfl_sync(0xffffffffu, threadIdx.x / 128, 0); }
    __device__ __forceinline__ int warp() const { return __shfl_sync(0xffffffffu, threadIdx.x / 32 % 4, 0); }
    __device__ __forceinline__ int stride() const { return 3 * heads * D; }
    __device__ __forceinline__ i64 packed(int head) const {
        return (i64)(head / heads) * T * stride() + head % heads * D;
    }
    __device__ __forceinline__ i64 plain(int head) const { return (i64)(head / heads) * T * heads * D + head % heads * D; }

    __device__ __forceinline__ void fetch_keys(int head, int stage) {
        if (head < total)
            copy_rows<T, D, 0, ROWS, THREADS>(keys + stage * MATRIX, qkv + packed(head) + heads * D, stride());
        close_copies();
    }
    // Queries, dO and values.
    __device__ __forceinline__ void fetch_others(int head) {
        if (head < total) {
            copy_rows<T, D, 0, ROWS, THREADS>(douts, dout + plain(head), heads * D);
            copy_rows<T, D, 0, ROWS, THREADS>(queries, qkv + packed(head), stride());
            if constexpr (VALUES) copy_rows<T, D, 0, ROWS, THREADS>(values, qkv + packed(head) + 2 * heads * D, stride());
        }
        close_copies();
    }
    // What goes to registers.
    __device__ __forceinline__ void fetch_rows(int head) {
        if (head >= total) return;
        const int first = threadIdx.x / Rows<D>::UNITS, unit = threadIdx.x % Rows<D>::UNITS;
        const E* from = out + plain(head) + first * heads * D + unit * 8;
#pragma unroll
        for (int i = 0; i < OUTS; i++, from += STEP * heads * D)
            o[i] = i * STEP + first < T ? *reinterpret_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int i = 0; i < LOG_SUMS; i++) {
            int row = i * THREADS + threadIdx.x;
            // A query that isn't there has probabilities 0.
            log_sum[i] = row < T ? lse[(i64)head * T + row] : __int_as_float(0x7f800000);
        }
    }

    // rowsum(dO ∘ O), by as many threads a row as it has units.
    __device__ __forceinline__ void sum_rows() {
        const int first = threadIdx.x / Rows<D>::UNITS, unit = threadIdx.x % Rows<D>::UNITS;
#pragma unroll
        for (int i = 0; i < OUTS; i++) {
            const int row = i * STEP + first;
            if ((i + 1) * STEP > ROWS && row >= ROWS) break;
            uint4 x = o[i], y;
            asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                         : "=r"(y.x), "=r"(y.y), "=r"(y.z), "=r"(y.w)
                         : "r"(douts + Rows<D>::at(first, unit) + i * STEP * Rows<D>::BYTES)
                         : "memory");
            float sum = 0.0f;
            add_products(sum, x.x, y.x);
            add_products(sum, x.y, y.y);
            add_products(sum, x.z, y.z);
            add_products(sum, x.w, y.w);
#pragma unroll
            for (int lane = 1; lane < Rows<D>::UNITS; lane *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lane);
            if (unit == 0) deltas[row] = sum;
        }
#pragma unroll
        for (int i = 0; i < LOG_SUMS; i++) {
            int row = i * THREADS + threadIdx.x;
            if (row < ROWS) log_sums[row] = log_sum[i] * -LOG2E;
        }
    }
    static __device__ __forceinline__ void add_products(float& sum, u32 x, u32 y) {
        float x0, x1, y0, y1;
        unpack2<E>(x, x0, x1);
        unpack2<E>(y, y0, y1);
        sum = fmaf(x0, y0, fmaf(x1, y1, sum));
    }

    // A tile of keys on its way through the queries.
    struct Tile {
        u32 k[D / 16][4], v[D / 16][4];
        float dk[D / 2], dv[D / 2];
    };

    // Part PART of the queries.
    template <int PART> __device__ __forceinline__ void pass(Tile& x, int tile, int head, u32 own_keys) {
        constexpr int N = PART < PARTS - 1 ? 64 : LAST;
        constexpr int STEPS = ceil_div(N, 16);
        const int lane = threadIdx.x % 32, t = lane % 4, query = 64 * PART, row = 64 * tile + 16 * warp();
        const bool there = row < T;
        const float scale = score_scale<D>() * LOG2E;
        const u32 some_queries = queries + query * Rows<D>::BYTES, some_douts = douts + query * Rows<D>::BYTES;

        float p[N / 2], ds[N / 2];
        open_products();
#pragma unroll
        for (int k = 0; k < D / 16; k++) {
            u64 right = Rows<D>::side(some_queries + 32 * k);
            if constexpr (LEFT) product<E, N, false>(p, x.k[k], right, k > 0);
            else product<E, N, false, false>(p, Rows<D>::side(own_keys + 64 * tile * Rows<D>::BYTES + 32 * k), right, k > 0);
        }
        close_products();
#pragma unroll
        for (int k = 0; k < D / 16; k++) {
            u64 right = Rows<D>::side(some_douts + 32 * k);
            if constexpr (LEFT) product<E, N, false>(ds, x.v[k], right, k > 0);
            else product<E, N, false, false>(ds, Rows<D>::side(values + 64 * tile * Rows<D>::BYTES + 32 * k), right, k > 0);
        }
        close_products();

        // Meanwhile, sums over rows.
        if (PART == 0 && tile < GROUPS) {
            sum_rows();
            __syncthreads();
        }

        // All but dPᵀ has arrived, also what the part before left under way.
        wait_products<1>();
        arrived(p);
        u32 left[STEPS][4], dleft[STEPS][4];
        if (there) {
#pragma unroll
            for (int j = 0; j < N / 8; j++) {
                float2 sum = *reinterpret_cast<const float2*>(log_sums + query + 8 * j + 2 * t);
#pragma unroll
                for (int i = 0; i < 4; i++) p[4 * j + i] = exp2_fast(fmaf(p[4 * j + i], scale, i % 2 ? sum.y : sum.x));
            }
        }
        as_left<E, N>(left, p);
        open_products();
#pragma unroll
        for (int k = 0; k < STEPS; k++)
            product<E, D, true>(x.dv, left[k], Rows<D>::side(some_douts + 16 * k * Rows<D>::BYTES), PART > 0 || k > 0);
        close_products();

        wait_products<1>();
        arrived(ds);
        if (there) {
#pragma unroll
            for (int j = 0; j < N / 8; j++) {
                float2 delta = *reinterpret_cast<const float2*>(deltas + query + 8 * j + 2 * t);
#pragma unroll
                for (int i = 0; i < 4; i++) ds[4 * j + i] = p[4 * j + i] * (ds[4 * j + i] - (i % 2 ? delta.y : delta.x));
            }
        }
        as_left<E, N>(dleft, ds);
        open_products();
#pragma unroll
        for (int k = 0; k < STEPS; k++)
            product<E, D, true>(x.dk, dleft[k], Rows<D>::side(some_queries + 16 * k * Rows<D>::BYTES), PART > 0 || k > 0);
        close_products();

        if (there) {
            const int own = row + lane % 16;
            const u32 block = scores + PART * SCORES;
#pragma unroll
            for (int k = 0; k < STEPS; k++) {
                if (k == 4) store_two_matrices(tail + own * 16, dleft[k][0], dleft[k][1]);
                else if (16 * k + 8 == N) store_two_matrices(block + Rows<64>::at(own, 2 * k), dleft[k][0], dleft[k][1]);
                else store_matrices(block + Rows<64>::at(own, 2 * k + lane / 16), dleft[k]);
            }
        }
    }

    // Parts from PART on.
    template <int PART> __device__ __forceinline__ void passes(Tile& x, int tile, int head, u32 own_keys) {
        pass<PART>(x, tile, head, own_keys);
        if constexpr (PART + 1 < PARTS) passes<PART + 1>(x, tile, head, own_keys);
    }

    __device__ __forceinline__ void keys_phase(int head, u32 own_keys) {
        const int lane = threadIdx.x % 32;
        const float scale = score_scale<D>();
        E* to = dqkv + packed(head) + heads * D;
#pragma unroll 1
        for (int tile = group(); tile < TILES; tile += GROUPS) {
            const int row = 64 * tile + 16 * warp();
            Tile x;
            if constexpr (LEFT) {
                load_left<D>(x.k, own_keys, row);
                if constexpr (VALUES) load_left<D>(x.v, values, row);
                else load_left<T, D>(x.v, qkv + packed(head) + 2 * heads * D, stride(), row);
            }
            passes<0>(x, tile, head, own_keys);
            // Keys that aren't there must not reach dQ.
            if constexpr (T < ROWS) {
                if (row < T && row + 16 > T) {
                    __syncwarp();
                    for (int i = lane; i < (ROWS - T) * (8 * PARTS + TAIL); i += 32) {
                        int unit = i / (ROWS - T), none = T + i % (ROWS - T);
                        u32 at = unit == 8 * PARTS ? tail + none * 16
                                                   : scores + unit / 8 * SCORES + Rows<64>::at(none, unit % 8);
                        asm volatile("st.shared.v4.u32 [%0], {%1,%1,%1,%1};" ::"r"(at), "r"(0) : "memory");
                    }
                }
            }
            wait_products<0>();
            arrived(x.dk);
            arrived(x.dv);
            if (row >= T) continue;
            if constexpr (SUM) {
                key_sums.template add<T>(row, [&](int j, int i) { return x.dk[4 * j + i]; });
                value_sums.template add<T>(row, [&](int j, int i) { return x.dv[4 * j + i]; });
            }
            if constexpr (BY_VALUES) {
                const u32 by = values + row * Rows<D>::BYTES;
                store_rows_by<T, D>(by, to, stride(), row, x.dk, scale, scale);
                store_rows_by<T, D>(by, to + heads * D, stride(), row, x.dv, 1.0f, 1.0f);
            } else {
                store_rows<T, D>(to, stride(), row, x.dk, scale, scale);
                store_rows<T, D>(to + heads * D, stride(), row, x.dv, 1.0f, 1.0f);
            }
        }
    }

    __device__ __forceinline__ void queries_phase(int head, u32 own_keys) {
        const int lane = threadIdx.x % 32;
        const float scale = score_scale<D>();
        E* to = dqkv + packed(head);
#pragma unroll 1
        for (int part = group(); part < PARTS; part += GROUPS) {
            float dq[D / 2];
            open_products();
#pragma unroll
            for (int k = 0; k < ROWS / 16; k++)
                product<E, D, true, true>(dq, Rows<64>::side(scores + part * SCORES + 16 * k * 128),
                                          Rows<D>::side(own_keys + 16 * k * Rows<D>::BYTES), k > 0);
            close_products();
            wait_products<0>();
            arrived(dq);
            const int row = 64 * part + 16 * warp();
            if constexpr (SUM) {
                if (row < T) query_sums.template add<T>(row, [&](int j, int i) { return dq[4 * j + i]; });
            }
            if constexpr (BY_SCORES) {
                // All four warps are through with this part of dSᵀ.
                asm volatile("bar.sync %0, 128;" ::"r"(1 + group()) : "memory");
                const u32 by = scores + part * SCORES + 16 * warp() * 128;
                if (row < T) store_rows_by<T, D>(by, to, stride(), row, dq, scale, scale);
            } else {
                if (row < T) store_rows<T, D>(to, stride(), row, dq, scale, scale);
            }
        }
        // dQᵀ = Kᵀ·dSᵀ of the last queries, by 16 channels a warp.
        if (TAIL && group() == PARTS % GROUPS && 16 * warp() < D) {
            float dq[4] = {};
#pragma unroll 4
            for (int k = 0; k < ROWS / 16; k++) {
                u32 a[4], b[2];
                load_transposed(a, own_keys + Rows<D>::at(16 * k + lane / 16 * 8 + lane % 8, 2 * warp() + lane / 8 % 2));
                load_two_transposed(b, tail + (16 * k + lane % 16) * 16);
                mma<E>(dq, a, b);
            }
            int channel = 16 * warp() + lane / 4;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int query = 64 * PARTS + lane % 4 * 2 + i % 2;
                if (query < T) to[(i64)query * stride() + channel + i / 2 * 8] = from_float<E>(dq[i] * scale);
                if (SUM && query < T) tail_sums[i / 2] += dq[i];
            }
            if constexpr (SUM) {
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    tail_sums[i] += __shfl_xor_sync(0xffffffffu, tail_sums[i], 1);
                    tail_sums[i] += __shfl_xor_sync(0xffffffffu, tail_sums[i], 2);
                }
            }
        }
    }

    __device__ __forceinline__ void clear_sums() {
        query_sums.clear();
        key_sums.clear();
        value_sums.clear();
        tail_sums[0] = tail_sums[1] = 0.0f;
    }

    // The sums over all tokens of a head, when nobody needs dSᵀ any more.
    __device__ __forceinline__ void store_sums(int head) {
        const int lane = threadIdx.x % 32;
        const float scale = score_scale<D>();
        float* own = shared_sums + (4 * group() + warp()) * 3 * D;
        float* tail_row = shared_sums + WARPS * 3 * D;
        __syncthreads();
        query_sums.store(own, scale);
        key_sums.store(own + D, scale);
        value_sums.store(own + 2 * D, 1.0f);
        // `warp` and `group` ask all lanes, so not where some are elsewhere.
        const int channel = 16 * warp() + lane / 4;
        if (TAIL && group() == PARTS % GROUPS && 16 * warp() < D) {
            if (lane % 4 == 0) {
                tail_row[channel] = tail_sums[0] * scale;
                tail_row[channel + 8] = tail_sums[1] * scale;
            }
        }
        __syncthreads();
        float* row = sums + (i64)(head / heads) * stride();
        if constexpr (TAIL) {
            for (int i = threadIdx.x; i < D; i += THREADS) shared_sums[i] += tail_row[i];
            __syncthreads();
        }
        add_column_sums<D, WARPS, THREADS>(shared_sums, row, heads, head % heads);
    }

    __device__ __forceinline__ void run() {
        int stage = 0;
        fetch_others(blockIdx.x);
        fetch_keys(blockIdx.x, 0);
        fetch_rows(blockIdx.x);
#pragma unroll 1
        for (int head = blockIdx.x; head < total; head += gridDim.x) {
            const int next = head + gridDim.x;
            const u32 own_keys = keys + stage * MATRIX;
            wait_copies<0>();
            publish();
            __syncthreads();
            if constexpr (STAGES == 2) fetch_keys(next, stage ^ 1);
            if constexpr (SUM) clear_sums();
            keys_phase(head, own_keys);
            publish();
            __syncthreads();
            fetch_others(next);
            fetch_rows(next);
            queries_phase(head, own_keys);
            if constexpr (SUM) store_sums(head);
            if constexpr (STAGES == 2) {
                stage ^= 1;
            } else {
                __syncthreads();
                fetch_keys(next, 0);
            }
        }
    }
};

// Grid: as many blocks as run at once. With SUM, a row of `sums` (B,3C) has the sums over a sample's tokens.
template <typename E, int T, int D, int GROUPS, int STAGES, bool LEFT, int RESIDENT, bool SUM>
__global__ void __launch_bounds__(128 * GROUPS, RESIDENT)
    attention_grad_hopper(const E* __restrict__ qkv, const E* __restrict__ out, const float* __restrict__ lse,
                          const E* __restrict__ dout, E* __restrict__ dqkv, float* __restrict__ sums, int total,
                          int heads) {
    using B = Backward<E, T, D, GROUPS, STAGES, LEFT, SUM>;
    extern __shared__ __align__(1024) u8 shared[];
    B b;
    b.qkv = qkv, b.out = out, b.lse = lse, b.dout = dout, b.dqkv = dqkv, b.sums = sums;
    b.total = total, b.heads = heads;
    b.keys = shared_address(shared);
    b.values = b.keys + STAGES * B::MATRIX;
    b.queries = b.values + B::VALUES * B::MATRIX;
    b.douts = b.queries + B::MATRIX;
    b.scores = b.douts + B::MATRIX;
    b.tail = b.scores + B::SHARED_SCORES;
    b.shared_sums = reinterpret_cast<float*>(shared + (b.scores - b.keys));
    b.log_sums = reinterpret_cast<float*>(shared + B::SHARED) - 2 * B::ROWS;
    b.deltas = b.log_sums + B::ROWS;
    b.run();
}

// ---- Forward ----

// A tile of queries on its way through the keys, which come in PARTS parts.
template <typename E, int T, int D, int PARTS> struct Forward {
    static constexpr int ROWS = round_up(T, 16), COLUMNS = round_up(T, 8), TILES = ceil_div(T, 64);
    static constexpr int PART = PARTS == 1 ? COLUMNS : round_up(ceil_div(COLUMNS, PARTS), 16);
    static constexpr int LAST = COLUMNS - (PARTS - 1) * PART;
    static_assert(LAST > 0, "too many parts");
    static constexpr int MATRIX = ROWS * Rows<D>::BYTES;

    u32 q[D / 16][4];
    float top[2], sum[2];
    float o[D / 2];

    // Starts q·kᵀ for N keys from AT on.
    template <int N> __device__ __forceinline__ void score(float (&s)[N / 2], u32 keys, int at) {
#pragma unroll
        for (int k = 0; k < D / 16; k++)
            product<E, N, false>(s, q[k], Rows<D>::side(keys + at * Rows<D>::BYTES + 32 * k), k > 0);
        close_products();
    }

    // From scores of N keys from AT on, which have arrived, to what is in proportion to probabilities.
    template <int N, int AT> __device__ __forceinline__ void soften(float (&s)[N / 2]) {
        const float scale = score_scale<D>() * LOG2E;
        const int t = threadIdx.x % 4;
        float shift[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float m = AT == 0 ? -1e30f : top[half];
#pragma unroll
            for (int j = 0; j < N / 8; j++)
#pragma unroll
                for (int i = 2 * half; i < 2 * half + 2; i++) {
                    if (AT + 8 * j + 8 > T && AT + 8 * j + 2 * t + i % 2 >= T) s[4 * j + i] = -1e30f;
                    m = fmaxf(m, s[4 * j + i]);
                }
            m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 1));
            m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 2));
            if constexpr (AT == 0) {
                sum[half] = 0.0f;
            } else {
                float shrink = exp2_fast((top[half] - m) * scale);
                sum[half] *= shrink;
#pragma unroll
                for (int j = 0; j < D / 8; j++) o[4 * j + 2 * half] *= shrink, o[4 * j + 2 * half + 1] *= shrink;
            }
            top[half] = m;
            shift[half] = -m * scale;
        }
#pragma unroll
        for (int i = 0; i < N / 2; i++) {
            s[i] = exp2_fast(fmaf(s[i], scale, shift[i / 2 % 2]));
            sum[i / 2 % 2] += s[i];
        }
    }
    // Starts to add up their values.
    template <int N, int AT> __device__ __forceinline__ void attend(const float (&s)[N / 2], u32 values) {
        u32 p[ceil_div(N, 16)][4];
        as_left<E, N>(p, s);
        open_products();
#pragma unroll
        for (int k = 0; k < ceil_div(N, 16); k++)
            product<E, D, true>(o, p[k], Rows<D>::side(values + (AT + 16 * k) * Rows<D>::BYTES), AT > 0 || k > 0);
        close_products();
    }

    // Goes through all parts from AT on. `s` has the scores of the first of them, under way. Values are there once `ready`
    // was called. A warp whose queries aren't `there` only takes part in products.
    template <int N, int AT, typename Ready>
    __device__ __forceinline__ void go(float (&s)[N / 2], bool there, u32 keys, u32 values, Ready ready) {
        wait_products<0>();
        arrived(s);
        if constexpr (AT == 0) ready();
        else arrived(o);
        if (there) soften<N, AT>(s);
        attend<N, AT>(s, values);
        if constexpr (AT + N < COLUMNS) {
            constexpr int NEXT = AT + N + PART < COLUMNS ? PART : LAST;
            float next[NEXT / 2];
            score<NEXT>(next, keys, AT + N);
            go<NEXT, AT + N>(next, there, keys, values, ready);
        }
    }
};

// One block for a head; each warpgroup goes through tiles of queries. Grid: B·H.
template <typename E, int T, int D, int GROUPS, int PARTS, int RESIDENT>
__global__ void __launch_bounds__(128 * GROUPS, RESIDENT)
    attention_hopper(const E* __restrict__ qkv, E* __restrict__ out, float* __restrict__ lse, int heads) {
    using F = Forward<E, T, D, PARTS>;
    extern __shared__ __align__(1024) u8 shared[];
    const int lane = threadIdx.x % 32, channels = heads * D, stride = 3 * channels;
    const int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32 % 4, 0);
    const int b = blockIdx.x / heads, h = blockIdx.x % heads;
    const E* head = qkv + (i64)b * T * stride + h * D;
    E* to = out + (i64)b * T * channels + h * D;
    const u32 keys = shared_address(shared), values = keys + F::MATRIX, queries = values + F::MATRIX;
    const u32 results = queries + GROUPS * 64 * Rows<D>::BYTES;

    // A warp fetches its own queries, and nobody else reads them.
    const int place = 64 * group + 16 * warp;
    auto fetch_queries = [&](int tile) {
        constexpr int UNITS = D / 8, STEP = 32 / UNITS;
        if (tile < F::TILES) {
#pragma unroll
            for (int i = 0; i < 16 / STEP; i++) {
                int row = i * STEP + lane / UNITS, unit = lane % UNITS, token = 64 * tile + 16 * warp + row;
                copy_unit(queries + Rows<D>::at(place + row, unit), token < T ? head + token * stride + unit * 8 : head,
                          token < T);
            }
        }
        close_copies();
    };

    copy_rows<T, D, 0, F::ROWS, 128 * GROUPS>(keys, head + channels, stride);
    fetch_queries(group);
    copy_rows<T, D, 0, F::ROWS, 128 * GROUPS>(values, head + 2 * channels, stride);
    close_copies();
#pragma unroll 1
    for (int tile = group; tile < F::TILES; tile += GROUPS) {
        const bool first = tile == group;
        const int row = 64 * tile + 16 * warp;
        if (first) {
            wait_copies<1>();
            publish();
            __syncthreads();
        } else {
            wait_copies<0>();
            __syncwarp();
        }
        F f;
        load_left<D>(f.q, queries, place);
        __syncwarp();
        fetch_queries(tile + GROUPS);

        constexpr int FIRST = PARTS == 1 ? F::LAST : F::PART;
        float s[FIRST / 2];
        open_products();
        f.template score<FIRST>(s, keys, 0);
        f.template go<FIRST, 0>(s, row < T, keys, values, [&] {
            if (!first) return;
            wait_copies<1>();
            publish();
            __syncthreads();
        });
        float factor[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float total = f.sum[half];
            total += __shfl_xor_sync(0xffffffffu, total, 1);
            total += __shfl_xor_sync(0xffffffffu, total, 2);
            factor[half] = 1.0f / total;
            int query = row + lane / 4 + 8 * half;
            if (lane % 4 == 0 && query < T)
                lse[(i64)blockIdx.x * T + query] = f.top[half] * score_scale<D>() + logf(total);
        }
        wait_products<0>();
        arrived(f.o);
        if (row < T) store_rows_by<T, D>(results + place * Rows<D>::BYTES, to, channels, row, f.o, factor[0], factor[1]);
    }
}
