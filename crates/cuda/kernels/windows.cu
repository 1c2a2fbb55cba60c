// Scaled cosine attention in shifted windows on the tensor cores, without atomics. Nothing is rolled, padded, cut or masked in memory.
//
// Legend: B batch, h×w map, H heads, T tokens of a window, D head size, C = H·D. qkv is (B,h,w,3C), without biases; the position bias
// (H,T,T). Queries and keys keep their lengths in matmuls, and scores are divided by them: so nothing is rounded twice.
#include "windows_tiles.cuh"

static constexpr float LN2 = 0.6931471805599453f;

// A block has one head and one piece of the queries of `per` windows, and goes through the pieces of their keys; the next one is
// fetched meanwhile. Grid: (H, windows of the batch / per, pieces).
template <typename E, int ROWS, int COLUMNS, int D>
__global__ void __launch_bounds__(Squares<ROWS* COLUMNS>::THREADS, D <= 32 ? 16 / Squares<ROWS * COLUMNS>::WARPS : 1)
    window_attention(const E* __restrict__ qkv, const float* __restrict__ q_bias, const float* __restrict__ v_bias,
                     const float* __restrict__ scales, const float* __restrict__ position_bias, E* __restrict__ out,
                     float* __restrict__ lse, int heads, int total, int per, int height, int width, int down, int right) {
    using W = Windows<ROWS, COLUMNS>;
    constexpr int T = W::T, SIDE = Squares<T>::SIDE, COUNT = Squares<T>::COUNT, N = SIDE / 16;
    constexpr int BYTES = SIDE * Rows<D>::BYTES;
    extern __shared__ uint4 shared[];
    const u32 stages = shared_address(shared);
    float* key_scales = reinterpret_cast<float*>(reinterpret_cast<u8*>(shared) + 6 * BYTES);

    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int h = blockIdx.x, channels = heads * D, stride = 3 * channels;
    const int piece = blockIdx.z * SIDE, first = piece + 16 * (threadIdx.x / 32);
    const E* head = qkv + h * D;
    const float* bias_of_head = position_bias + (i64)h * T * T;
    const float factor = cosine_factor(scales[h]) * LOG2E;
    const int last = min(((int)blockIdx.y + 1) * per, total);
    W here(height, width, down, right), ahead = here;

    auto fetch = [&](int window, int part, int stage) {
        const u32 to = stages + stage * 3 * BYTES;
        ahead.turn_to(window);
        if (COUNT == 1) {
            each_unit<D, SIDE>(ahead, 0, [&](u32 at, int place, int element) {
                copy_place(to + at, head, place, stride, element);
                copy_place(to + BYTES + at, head + channels, place, stride, element);
                copy_place(to + 2 * BYTES + at, head + 2 * channels, place, stride, element);
            });
        } else {
            each_unit<D, SIDE>(ahead, part * SIDE, [&](u32 at, int place, int element) {
                copy_place(to + BYTES + at, head + channels, place, stride, element);
                copy_place(to + 2 * BYTES + at, head + 2 * channels, place, stride, element);
            });
            if (part == 0)
                each_unit<D, SIDE>(ahead, piece,
                                   [&](u32 at, int place, int element) { copy_place(to + at, head, place, stride, element); });
        }
    };

    int window = blockIdx.y * per, part = 0, stage = 0;
    if (window < last) fetch(window, 0, 0);
    close_copies();
    float bias[2 * N][4];
    if constexpr (COUNT == 1) load_bias<T, N>(bias, bias_of_head, first, 0);

    QueryTile<E, D> queries;
    float o[D / 8][4], top[2], sum[2], scale[2];
    while (window < last) {
        const bool end = COUNT == 1 || part == COUNT - 1;
        const u32 rows = stages + stage * 3 * BYTES;
        wait_copies<0>();
        __syncthreads();
        if (window + end < last) fetch(window + end, end ? 0 : part + 1, stage ^ 1);
        close_copies();
        float of_key = row_scale<E, D, false>(rows + BYTES, threadIdx.x / 2, nullptr);
        if (threadIdx.x % 2 == 0) key_scales[threadIdx.x / 2] = of_key;
        if (part == 0) {
            here.turn_to(window);
            queries.load(rows, first - piece, q_bias + h * D);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                scale[i] = queries.scale[i] * factor;
                top[i] = __int_as_float(0xff800000);
                sum[i] = 0.0f;
            }
#pragma unroll
            for (int j = 0; j < D / 8; j++) o[j][0] = o[j][1] = o[j][2] = o[j][3] = 0.0f;
        }
        if constexpr (COUNT > 1) load_bias<T, N>(bias, bias_of_head, first, part * SIDE);
        __syncthreads();

        float s[2 * N][4];
        multiply_rows<E, D, N>(s, queries.q, rows + BYTES, 0);
        to_scores<N>(s, bias, scale, key_scales, here, first, part * SIDE);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float m = top[i];
#pragma unroll
            for (int j = 0; j < 2 * N; j++) m = fmaxf(m, fmaxf(s[j][2 * i], s[j][2 * i + 1]));
            m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 1));
            m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 2));
            if constexpr (COUNT > 1) {
                float shrink = exp2_fast(top[i] - m);
                sum[i] *= shrink;
#pragma unroll
                for (int j = 0; j < D / 8; j++) o[j][2 * i] *= shrink, o[j][2 * i + 1] *= shrink;
            }
            top[i] = m;
#pragma unroll
            for (int j = 0; j < 2 * N; j++)
#pragma unroll
                for (int e = 2 * i; e < 2 * i + 2; e++) {
                    s[j][e] = exp2_fast(s[j][e] - m);
                    sum[i] += s[j][e];
                }
        }
#pragma unroll
        for (int j = 0; j < N; j++) {
            u32 p[4];
            as_left<E>(p, s[2 * j], s[2 * j + 1]);
            add_rows<E, D>(o, p, rows + 2 * BYTES, 16 * j);
        }

        if (end) {
            int places[2];
            float inverse[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                int token = first + g + 8 * i;
                float all = quad_sum(sum[i]);
                inverse[i] = 1.0f / all;
                places[i] = here.place(token);
                if (t == 0 && token < T) lse[((i64)window * heads + h) * T + token] = (top[i] + log2f(all)) * LN2;
            }
            // Probabilities sum to 1, so that the bias of values comes out as it is.
#pragma unroll
            for (int j = 0; j < D / 8; j++) {
                float2 b = *reinterpret_cast<const float2*>(v_bias + h * D + 8 * j + 2 * t);
#pragma unroll
                for (int e = 0; e < 4; e++) o[j][e] = fmaf(o[j][e], inverse[e / 2], e % 2 ? b.y : b.x);
            }
            store_places<D>(out + h * D, channels, places, o);
        }
        window += end;
        part = end ? 0 : part + 1;
        stage ^= 1;
    }
}
