// Tiles of attention for Hopper's warpgroups: matmuls (wgmma), rows in shared memory, tiles in registers. 16-bit elements. sm_90a only.
//
// A tile is 64 tokens, what a warpgroup's matmul has as rows. A unit is 8 elements (16 bytes).
#pragma once
#include "attention.cuh"
#include "warpgroup.cuh"

__host__ __device__ constexpr int round_up(int a, int b) { return ceil_div(a, b) * b; }

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

// ---- Matmuls of a warpgroup ----

// Registers 0..n of a matmul's result, in its text and as its operands.
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
#define R72 R64 ",%64,%65,%66,%67,%68,%69,%70,%71"
#define R80 R72 ",%72,%73,%74,%75,%76,%77,%78,%79"
#define R88 R80 ",%80,%81,%82,%83,%84,%85,%86,%87"
#define R96 R88 ",%88,%89,%90,%91,%92,%93,%94,%95"
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
#define O72 O64, F4(64), F4(68)
#define O80 O72, F4(72), F4(76)
#define O88 O80, F4(80), F4(84)
#define O96 O88, F4(88), F4(92)

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
__device__ __forceinline__ void wgmma(float* d, u64 a, u64 b, bool add) {
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
    SHARED_LEFT(144, R72, O72, "%72", "%73", "%74", "%75", "%76");
    SHARED_LEFT(160, R80, O80, "%80", "%81", "%82", "%83", "%84");
    SHARED_LEFT(176, R88, O88, "%88", "%89", "%90", "%91", "%92");
    SHARED_LEFT(192, R96, O96, "%96", "%97", "%98", "%99", "%100");
}
// As above, for an a in registers.
template <typename E, int COLUMNS, bool RIGHT_TURNED>
__device__ __forceinline__ void wgmma(float* d, const u32 (&a)[4], u64 b, bool add) {
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

// Rows of D elements, their units permuted as matmuls expect it (a swizzle of as many bytes as a row has). They start at a
// multiple of 1024 bytes.
template <int D> struct Rows {
    static_assert(D == 32 || D == 64, "");
    static constexpr int UNITS = D / 8, BYTES = 2 * D;

    // Bytes from the first row.
    static __device__ __forceinline__ u32 at(int row, int unit) {
        return row * BYTES + ((unit ^ (D == 64 ? row & 7 : row / 2 & 3)) * 16);
    }
    // A matmul's side that starts at `address`, the start of a row whose number is a multiple of 8. Groups of 8 rows follow
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

// A warp's 16 rows from `first` on as the left side of a matmul.
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

// Results of N columns as left sides of next matmuls; columns that aren't there are zeros.
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
