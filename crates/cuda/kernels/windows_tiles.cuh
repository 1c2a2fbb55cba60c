// Shared by the kernels of window attention on tensor cores: rows gathered from the map, their lengths, tiles, sums.
//
// Legend: T tokens of a window, D head size, C channels. A tile is 16 tokens; with g = lane/4 and t = lane%4 a thread has its rows
// g and g+8, and of 8 columns j on 8j+2t and 8j+2t+1.
#pragma once

#include "matrix.cuh"
#include "windows.cuh"

// Queries and keys of a window are cut into COUNT pieces of SIDE tokens each, a tile for every warp of a block.
template <int T> struct Squares {
    static constexpr int TILES = ceil_div(T, 16), COUNT = ceil_div(TILES, 4), WARPS = ceil_div(TILES, COUNT);
    static constexpr int SIDE = 16 * WARPS, THREADS = 32 * WARPS;
};

// copy(bytes from the first row, place in the map, element) for every unit of SIDE rows, of tokens `first` on.
template <int D, int SIDE, typename W, typename F>
__device__ __forceinline__ void each_unit(const W& window, int first, F copy) {
    constexpr int UNITS = D / 8, THREADS = 2 * SIDE;
#pragma unroll
    for (int i = 0; i < D / 16; i++) {
        int index = i * THREADS + threadIdx.x, row = index / UNITS, unit = index % UNITS;
        copy(Rows<D>::at(row, unit), window.place(first + row), 8 * unit);
    }
}

// Starts to copy a unit of the row of a place, or zeros.
template <typename E> __device__ __forceinline__ void copy_place(u32 to, const E* head, int place, int stride, int element) {
    copy_unit(to, head + (place < 0 ? 0 : (i64)place * stride + element), place >= 0);
}

// 16 rows from `first` on as the left side of a matmul.
template <int D> __device__ __forceinline__ void left_of(u32 (&a)[D / 16][4], u32 rows, int first) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < D / 16; k++)
        load_matrices(a[k], rows + Rows<D>::at(first + lane / 8 % 2 * 8 + lane % 8, 2 * k + lane / 16));
}

__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// 1/length; 0 for a row of zeros: padding, or what half precision rounded to 0.
__device__ __forceinline__ float inverse_length(float squares) { return squares > 1e-24f ? rsqrtf(squares) : 0.0f; }

// Elements 2i and 2i+1 of columns 8j on, of a tile as the left side of a matmul; i is 0 for row g, 1 for row g+8.
template <typename E, int D>
__device__ __forceinline__ void pair_of(const u32 (&a)[D / 16][4], int j, int i, float& x, float& y) {
    unpack2<E>(a[j / 2][j % 2 * 2 + i], x, y);
}

// 1/length of rows g and g+8 of a tile.
template <typename E, int D> __device__ __forceinline__ void tile_scales(const u32 (&a)[D / 16][4], float (&scale)[2]) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float squares = 0.0f;
#pragma unroll
        for (int j = 0; j < D / 8; j++) {
            float x, y;
            pair_of<E, D>(a, j, i, x, y);
            squares = fmaf(x, x, fmaf(y, y, squares));
        }
        scale[i] = inverse_length(quad_sum(squares));
    }
}

// 1/length of row `row`, by two threads. With a bias, which is added to the row first.
template <typename E, int D, bool BIAS>
__device__ __forceinline__ float row_scale(u32 rows, int row, const float* bias) {
    const int half = threadIdx.x % 2;
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < D / 16; i++) {
        const int unit = half * (D / 16) + i;
        const u32 at = rows + Rows<D>::at(row, unit);
        u32 words[4];
        asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                     : "r"(at)
                     : "memory");
#pragma unroll
        for (int w = 0; w < 4; w++) {
            float x, y;
            unpack2<E>(words[w], x, y);
            if constexpr (BIAS) {
                words[w] = pack2<E>(x + bias[8 * unit + 2 * w], y + bias[8 * unit + 2 * w + 1]);
                unpack2<E>(words[w], x, y);
            }
            squares = fmaf(x, x, fmaf(y, y, squares));
        }
        if constexpr (BIAS)
            asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(words[0]), "r"(words[1]), "r"(words[2]),
                         "r"(words[3])
                         : "memory");
    }
    squares += __shfl_xor_sync(0xffffffffu, squares, 1);
    return inverse_length(squares);
}

// A tile of queries with their bias, and 1/length of its rows.
template <typename E, int D> struct QueryTile {
    u32 q[D / 16][4];
    float scale[2];

    __device__ __forceinline__ void load(u32 rows, int first, const float* bias) {
        const int t = threadIdx.x % 4;
        left_of<D>(q, rows, first);
#pragma unroll
        for (int j = 0; j < D / 8; j++) {
            float2 b = *reinterpret_cast<const float2*>(bias + 8 * j + 2 * t);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float x, y;
                pair_of<E, D>(q, j, i, x, y);
                q[j / 2][j % 2 * 2 + i] = pack2<E>(x + b.x, y + b.y);
            }
        }
        tile_scales<E, D>(q, scale);
    }

    // Writes them back.
    __device__ __forceinline__ void keep(u32 rows, int first) const {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
        for (int j = 0; j < D / 8; j++)
#pragma unroll
            for (int i = 0; i < 2; i++)
                asm volatile("st.shared.u32 [%0], %1;" ::"r"(rows + Rows<D>::at(first + g + 8 * i, j) + 4 * t),
                             "r"(q[j / 2][j % 2 * 2 + i])
                             : "memory");
    }
};

// Score of a key beyond T.
static constexpr float LOWEST = -1e30f;

// The position bias of a tile of queries and N tiles of keys, times log2 e.
template <int T, int N>
__device__ __forceinline__ void load_bias(float (&b)[2 * N][4], const float* bias, int first_query, int first_key) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int j = 0; j < 2 * N; j++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int row = min(first_query + g + 8 * i, T - 1), column = first_key + 8 * j + 2 * t;
            const float* at = bias + row * T + column;
            if constexpr (T % 2 == 0) {
                float2 v = column < T ? *reinterpret_cast<const float2*>(at) : make_float2(0.0f, 0.0f);
                b[j][2 * i] = v.x, b[j][2 * i + 1] = v.y;
            } else {
                b[j][2 * i] = column < T ? at[0] : 0.0f;
                b[j][2 * i + 1] = column + 1 < T ? at[1] : 0.0f;
            }
#pragma unroll
            for (int e = 0; e < 2; e++)
                b[j][2 * i + e] = T % 16 == 0 || column + e < T ? b[j][2 * i + e] * LOG2E : LOWEST;
        }
}

// Turns dot products of queries and keys into scores, in powers of two. `scale` is the factor of rows g and g+8.
template <int N, typename W>
__device__ __forceinline__ void to_scores(float (&s)[2 * N][4], const float (&bias)[2 * N][4], const float (&scale)[2],
                                          const float* key_scales, const W& window, int first_query, int first_key) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int j = 0; j < 2 * N; j++) {
        float2 k = *reinterpret_cast<const float2*>(key_scales + 8 * j + 2 * t);
#pragma unroll
        for (int i = 0; i < 4; i++) s[j][i] = fmaf(s[j][i] * (i % 2 ? k.y : k.x), scale[i / 2], bias[j][i]);
    }
    if (window.parted) {
        int low = window.side(first_query + g), high = window.side(first_query + g + 8);
#pragma unroll
        for (int j = 0; j < 2 * N; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int key = window.side(first_key + 8 * j + 2 * t + i % 2);
                if (window.apart(i / 2 ? high : low, key)) s[j][i] += APART * LOG2E;
            }
    }
}

// The log-sum-exps of rows g and g+8, in powers of two. A query that isn't there has probabilities 0.
template <int T> __device__ __forceinline__ void load_log_sums(float (&log_sums)[2], const float* lse, int first) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int row = first + threadIdx.x % 32 / 4 + 8 * i;
        log_sums[i] = row < T ? lse[row] * LOG2E : __int_as_float(0x7f800000);
    }
}
__device__ __forceinline__ float inverse_sum(float sum) { return sum > 0.0f ? 1.0f / sum : 0.0f; }

// c = a·bᵀ for a tile and N tiles of rows from `row` on.
template <typename E, int D, int N>
__device__ __forceinline__ void multiply_rows(float (&c)[2 * N][4], const u32 (&a)[D / 16][4], u32 rows, int row) {
#pragma unroll
    for (int j = 0; j < 2 * N; j++) c[j][0] = c[j][1] = c[j][2] = c[j][3] = 0.0f;
#pragma unroll
    for (int j = 0; j < N; j++)
#pragma unroll
        for (int k = 0; k < D / 16; k++) {
            u32 b[4];
            load_right_transposed<D>(b, rows, row + 16 * j, k);
            mma<E>(c[2 * j], a[k], b[0], b[1]);
            mma<E>(c[2 * j + 1], a[k], b[2], b[3]);
        }
}

// c += a·b for a 16×16 a and 16 rows from `row` on.
template <typename E, int D>
__device__ __forceinline__ void add_rows(float (&c)[D / 8][4], const u32 (&a)[4], u32 rows, int row) {
#pragma unroll
    for (int n = 0; n < D / 16; n++) {
        u32 b[4];
        load_right<D>(b, rows, row, n);
        mma<E>(c[2 * n], a, b[0], b[1]);
        mma<E>(c[2 * n + 1], a, b[2], b[3]);
    }
}

// Turns the gradient of unit rows, before the factor of the cosine, into that of the rows x, of which `scale` is 1/length. Returns this
// thread's share of Σ unit·gradient.
template <typename E, int D>
__device__ __forceinline__ float through_lengths(float (&dx)[D / 8][4], const u32 (&x)[D / 16][4], const float (&scale)[2],
                                                 float factor) {
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float along = 0.0f;
#pragma unroll
        for (int j = 0; j < D / 8; j++) {
            float x0, x1;
            pair_of<E, D>(x, j, i, x0, x1);
            along = fmaf(x0, dx[j][2 * i], fmaf(x1, dx[j][2 * i + 1], along));
        }
        along *= scale[i];
        total += along;
        // Of a unit row and of x: x̂·(x̂·dx̂) = x·scale·along.
        along = quad_sum(along) * scale[i];
#pragma unroll
        for (int j = 0; j < D / 8; j++) {
            float x0, x1;
            pair_of<E, D>(x, j, i, x0, x1);
            dx[j][2 * i] = (dx[j][2 * i] - x0 * along) * (scale[i] * factor);
            dx[j][2 * i + 1] = (dx[j][2 * i + 1] - x1 * along) * (scale[i] * factor);
        }
    }
    return total;
}

// Writes rows g and g+8 of a tile, in columns of one head, to these places of a map.
template <int D, typename E>
__device__ __forceinline__ void store_places(E* head, int stride, const int (&places)[2], const float (&x)[D / 8][4]) {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        E* to = head + (i64)places[i] * stride;
        u32 words[D / 8];
#pragma unroll
        for (int j = 0; j < D / 8; j++) words[j] = pack2<E>(x[j][2 * i], x[j][2 * i + 1]);
#pragma unroll
        for (int j = 0; j + 4 <= D / 8; j += 4) {
            u32 w[4] = {words[j], words[j + 1], words[j + 2], words[j + 3]};
            transpose_words(w);
            if (places[i] >= 0) *reinterpret_cast<uint4*>(to + (j + t) * 8) = make_uint4(w[0], w[1], w[2], w[3]);
        }
#pragma unroll
        for (int j = D / 8 / 4 * 4; j < D / 8; j++)
            if (places[i] >= 0) *reinterpret_cast<u32*>(to + j * 8 + 2 * t) = words[j];
    }
}

// The sums that a block leaves beside those of the position bias: over the tokens that its warps went through.
template <typename E, int D> struct TokenSums {
    ColumnSums<D> queries, values;
    float scale;

    __device__ __forceinline__ void clear() {
        queries.clear();
        values.clear();
        scale = 0.0f;
    }

    __device__ __forceinline__ void add(const float (&dq)[D / 8][4], const u32 (&dout)[D / 16][4], float along) {
        queries.template add<16>(0, [&](int j, int i) { return dq[j][i]; });
        values.template add<16>(0, [&](int j, int i) {
            float x, y;
            pair_of<E, D>(dout, j, i / 2, x, y);
            return i % 2 ? y : x;
        });
        scale += along;
    }

    // Writes a row (bias of queries C, bias of values C, logit scale H), through shared memory that is free by now.
    template <int WARPS>
    __device__ __forceinline__ void leave(float* shared, float* row, int heads, int h, float slope) {
        constexpr int OWN = 2 * D + 1;
        float* own = shared + threadIdx.x / 32 * OWN;
        __syncthreads();
        queries.store(own, 1.0f);
        values.store(own + D, 1.0f);
        scale = warp_sum(scale);
        if (threadIdx.x % 32 == 0) own[2 * D] = scale * slope;
        __syncthreads();
        for (int i = threadIdx.x; i < OWN; i += 32 * WARPS) {
            float sum = 0.0f;
#pragma unroll
            for (int warp = 0; warp < WARPS; warp++) sum += shared[warp * OWN + i];
            row[i < 2 * D ? i / D * heads * D + h * D + i % D : 2 * heads * D + h] = sum;
        }
    }
};
