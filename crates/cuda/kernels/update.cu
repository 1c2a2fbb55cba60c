// Update: gradient norm, clipping, optimizers. The numerics are those of crates/cpu/src/kernels/optimize.rs, operation by
// operation: the intrinsics keep the compiler from fusing what is rounded in between there.
#include "common.cuh"

// One parameter, or a rank's part of one, and what belongs to it. `steps/update.rs` writes these tables; a null pointer is something
// that isn't there.
struct Tensor {
    float* w;
    const float* g;
    float* m;
    float* v;
    void* copy; // of w, in half precision
    float* average;
    double2* norms; // of all segments of its flat buffer: sums of squares of w and of its update
    double lr_scale;
    double weight_decay;
    u32 first_segment, segments; // all of its own, of other ranks too
};

// Work of one block: some elements of a tensor, which are a segment of its flat buffer.
struct Piece {
    u32 tensor, first, count, segment;
};

constexpr int THREADS = 256;
// Of the kernels that finish a sum.
constexpr int WIDE = 1024;

template <int N> struct Width {
    static constexpr int value = N;
};

// Calls `at` for every element of a piece: four at a time, and one at a time for what is left at the tensor's end.
template <typename F> __device__ __forceinline__ void each(const Piece& piece, F at) {
    u64 first = piece.first, fours = first + piece.count / 4 * 4;
    for (u64 i = first + 4 * threadIdx.x; i < fours; i += 4 * THREADS) at(Width<4>{}, i);
    if (threadIdx.x < piece.count % 4) at(Width<1>{}, fours + threadIdx.x);
}

// ---- sums -----------------------------------------------------------------------------------------------------------

// The sum over all threads of a block, for its first thread.
template <int COUNT> __device__ __forceinline__ double block_sum(double x) {
    __shared__ double sums[COUNT / 32];
    for (int lane = 16; lane > 0; lane /= 2) x += __shfl_xor_sync(0xffffffffu, x, lane);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
    __syncthreads();
    if (threadIdx.x < 32) {
        x = threadIdx.x < COUNT / 32 ? sums[threadIdx.x] : 0.0;
        for (int lane = 16; lane > 0; lane /= 2) x += __shfl_xor_sync(0xffffffffu, x, lane);
    }
    __syncthreads();
    return x;
}

// Number of elements that may be summed in single precision.
template <int N> __device__ __forceinline__ double few_squares(const float (&x)[N]) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < N; i++) sum = __fmaf_rn(x[i], x[i], sum);
    return sum;
}

// A tensor's elements in a chunk of a flat buffer.
struct Squares {
    const float* x;
    u64 count;
};

// A chunk: which partial sum it is, and which of the table's elements are in it.
struct Chunk {
    u32 number, first, count, unused;
};

// A warp for every chunk: chunks end at fixed elements, so that their sums don't depend on how a buffer is divided.
__global__ void __launch_bounds__(THREADS) sum_squares(const Squares* squares, const Chunk* chunks, u32 count, double* partials) {
    u32 warp = blockIdx.x * (THREADS / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp >= count) return;
    const Chunk chunk = chunks[warp];
    constexpr int N = 4, STRIDE = N * 32, AHEAD = 8;
    double sum = 0.0;
    for (u32 s = chunk.first; s < chunk.first + chunk.count; s++) {
        const float* x = squares[s].x;
        u32 elements = (u32)squares[s].count, packs = elements / N * N;
        u32 i = N * lane;
        for (; i + (AHEAD - 1) * STRIDE < packs; i += AHEAD * STRIDE) {
            float values[AHEAD][N];
#pragma unroll
            for (int k = 0; k < AHEAD; k++) Pack<float, N>::load(x + i + k * STRIDE, values[k]);
#pragma unroll
            for (int k = 0; k < AHEAD; k++) sum += few_squares(values[k]);
        }
        for (; i < packs; i += STRIDE) {
            float values[N];
            Pack<float, N>::load(x + i, values);
            sum += few_squares(values);
        }
        if (lane < elements - packs) {
            float value[1] = {x[packs + lane]};
            sum += few_squares(value);
        }
    }
    for (int other = 16; other > 0; other /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, other);
    if (lane == 0) partials[chunk.number] = sum;
}

__device__ __forceinline__ float partials_sum(const double* partials, u32 count) {
    double sum = 0.0;
    for (u32 i = threadIdx.x; i < count; i += WIDE) sum += partials[i];
    return (float)block_sum<WIDE>(sum);
}

// ---- what decides over a step ------------------------------------------------------------------------------------------

// `scale` is the loss scale, or null. A step that is skipped without one is a failure: it raises `halt`, and no later step is
// applied until the host has seen to it.
__device__ __forceinline__ void decide(
    float squares, const float* stats, const float* scale, const Header* header, u32* halt, double max_norm, float* control) {
    double actual = stats[1];
    // Gradients were divided by the nominal count; what a partial batch lacks is made up for here.
    double correction = header->nominal / actual;
    double loss_scale = scale ? scale[0] : 1.0;
    double norm = sqrt((double)squares) / loss_scale * correction;
    double clip = fmin(max_norm / (norm + 1e-6), 1.0);
    bool apply = isfinite(norm) && actual > 0.0;
    if (!scale) {
        bool halted = *halt != 0;
        if (!apply) *halt = 1;
        apply = apply && !halted;
    }
    control[0] = apply ? (float)(correction * clip / loss_scale) : 0.0f;
    control[1] = apply ? 1.0f : 0.0f;
    control[2] = (float)norm;
}

__global__ void __launch_bounds__(WIDE) clip(
    const double* partials, u32 count, const float* stats, const float* scale, const Header* header, u32* halt, double max_norm,
    float* control) {
    float sum = partials_sum(partials, count);
    if (threadIdx.x == 0) decide(sum, stats, scale, header, halt, max_norm, control);
}

__global__ void advance(const float* before, const float* control, float* applied) { *applied = *before + control[1]; }

// Both.
__global__ void __launch_bounds__(WIDE) clip_advance(
    const double* partials, u32 count, const float* stats, const float* scale, const Header* header, u32* halt, double max_norm,
    float* control, const float* before, float* applied) {
    float sum = partials_sum(partials, count);
    if (threadIdx.x != 0) return;
    decide(sum, stats, scale, header, halt, max_norm, control);
    *applied = *before + control[1];
}

// state = (scale, good steps since it changed, skipped steps it still bears).
__global__ void loss_scale(const float* state, const float* control, float window, float hysteresis, float least, float* out) {
    float scale = state[0], good = state[1], borne = state[2];
    if (control[1] == 0.0f) {
        if (borne > 1.0f) borne -= 1.0f;
        else scale = fmaxf(scale / 2.0f, least);
        good = 0.0f;
    } else {
        good += 1.0f;
        if (good >= window) scale *= 2.0f, good = 0.0f, borne = hysteresis;
    }
    out[0] = scale;
    out[1] = good;
    out[2] = borne;
}

// ---- optimizers: one launch for all parameters, in place, nothing if control says so -------------------------------------

__device__ __forceinline__ double power(double x, u32 n) {
    double y = 1.0;
    for (; n > 0; n /= 2, x *= x)
        if (n % 2) y *= x;
    return y;
}

// Updates what follows from w: its moving average, and its copy.
template <typename Half, int N>
__device__ __forceinline__ void store_w(const Tensor& t, u64 i, const float (&w)[N], float take) {
    Pack<float, N>::store(t.w + i, w);
    if (t.copy) Pack<Half, N>::store((Half*)t.copy + i, w);
    if (t.average) {
        float average[N];
        Pack<float, N>::load(t.average + i, average);
#pragma unroll
        for (int k = 0; k < N; k++) average[k] = __fmaf_rn(__fsub_rn(w[k], average[k]), take, average[k]);
        Pack<float, N>::store(t.average + i, average);
    }
}

// What AdamW and LAMB read of N parameters: these, their gradients and moments.
template <int N>
__device__ __forceinline__ void load_all(const Tensor& t, u64 i, float (&w)[N], float (&g)[N], float (&m)[N], float (&v)[N]) {
    Pack<float, N>::load(t.w + i, w);
    Pack<float, N>::load(t.g + i, g);
    Pack<float, N>::load(t.m + i, m);
    Pack<float, N>::load(t.v + i, v);
}

// The moments that AdamW and LAMB share.
struct Moments {
    float factor, keep1, take1, keep2, take2;
    __device__ __forceinline__ Moments(const float* control, double beta1, double beta2)
        : factor(control[0]), keep1(beta1), take1(1.0 - beta1), keep2(beta2), take2(1.0 - beta2) {}
    __device__ __forceinline__ void move(float g, float& m, float& v) const {
        g = __fmul_rn(g, factor);
        m = __fmaf_rn(m, keep1, __fmul_rn(g, take1));
        v = __fmaf_rn(v, keep2, __fmul_rn(__fmul_rn(g, g), take2));
    }
};

template <typename Half>
__global__ void __launch_bounds__(THREADS) adamw(
    const Tensor* tensors, const Piece* pieces, const Header* header, const float* control, const float* applied, double average_take,
    double beta1, double beta2, double eps_) {
    Piece piece = pieces[blockIdx.x];
    const Tensor t = tensors[piece.tensor];
    if (control[1] == 0.0f) return;
    __shared__ float of_step[3];
    if (threadIdx.x == 0) {
        u32 n = (u32)*applied;
        double lr = header->learning_rate * t.lr_scale;
        of_step[0] = (float)(1.0 - lr * t.weight_decay);
        of_step[1] = (float)(lr / (1.0 - power(beta1, n)));
        of_step[2] = (float)(1.0 / sqrt(1.0 - power(beta2, n)));
    }
    __syncthreads();
    const float decay = of_step[0], step = of_step[1], unbias = of_step[2];
    const float eps = (float)eps_, take = (float)average_take;
    const Moments moments(control, beta1, beta2);
    each(piece, [&](auto width, u64 i) {
        constexpr int N = decltype(width)::value;
        float w[N], g[N], m[N], v[N];
        load_all(t, i, w, g, m, v);
#pragma unroll
        for (int k = 0; k < N; k++) {
            moments.move(g[k], m[k], v[k]);
            float denominator = __fmaf_rn(__fsqrt_rn(v[k]), unbias, eps);
            w[k] = __fsub_rn(__fmul_rn(w[k], decay), __fmul_rn(step, __fdiv_rn(m[k], denominator)));
        }
        Pack<float, N>::store(t.m + i, m);
        Pack<float, N>::store(t.v + i, v);
        store_w<Half, N>(t, i, w, take);
    });
}

// The momentum is `m`.
template <typename Half>
__global__ void __launch_bounds__(THREADS) sgd(
    const Tensor* tensors, const Piece* pieces, const Header* header, const float* control, const float* applied, double average_take,
    double momentum, u32 nesterov) {
    Piece piece = pieces[blockIdx.x];
    const Tensor t = tensors[piece.tensor];
    if (control[1] == 0.0f) return;
    const bool first = *applied == 1.0f;
    const float factor = control[0], lr = (float)(header->learning_rate * t.lr_scale), weight_decay = (float)t.weight_decay;
    const float keep = first ? 0.0f : (float)momentum, take = (float)average_take;
    // Nesterov's direction is g + momentum·buffer, the plain one 0·g + 1·buffer.
    const float of_g = nesterov ? 1.0f : 0.0f, of_buffer = nesterov ? (float)momentum : 1.0f;
    each(piece, [&](auto width, u64 i) {
        constexpr int N = decltype(width)::value;
        float w[N], g[N], m[N];
        Pack<float, N>::load(t.w + i, w);
        Pack<float, N>::load(t.g + i, g);
        Pack<float, N>::load(t.m + i, m);
#pragma unroll
        for (int k = 0; k < N; k++) {
            float d = __fmaf_rn(w[k], weight_decay, __fmul_rn(g[k], factor));
            m[k] = __fmaf_rn(m[k], keep, d);
            w[k] = __fsub_rn(w[k], __fmul_rn(lr, __fmaf_rn(m[k], of_buffer, __fmul_rn(of_g, d))));
        }
        Pack<float, N>::store(t.m + i, m);
        store_w<Half, N>(t, i, w, take);
    });
}

__device__ __forceinline__ float lamb_update(float w, float m, float v, float eps, float weight_decay) {
    return __fmaf_rn(w, weight_decay, __fdiv_rn(m, __fadd_rn(__fsqrt_rn(v), eps)));
}

// Moves the moments; `norms` gets Σ w² and Σ update² of each piece.
__global__ void __launch_bounds__(THREADS) lamb_moments(
    const Tensor* tensors, const Piece* pieces, const float* control, double beta1, double beta2, double eps_) {
    Piece piece = pieces[blockIdx.x];
    const Tensor t = tensors[piece.tensor];
    if (control[1] == 0.0f) return;
    const float eps = (float)eps_, weight_decay = (float)t.weight_decay;
    const Moments moments(control, beta1, beta2);
    double w_squares = 0.0, u_squares = 0.0;
    each(piece, [&](auto width, u64 i) {
        constexpr int N = decltype(width)::value;
        float w[N], g[N], m[N], v[N], update[N];
        load_all(t, i, w, g, m, v);
#pragma unroll
        for (int k = 0; k < N; k++) {
            moments.move(g[k], m[k], v[k]);
            update[k] = lamb_update(w[k], m[k], v[k], eps, weight_decay);
        }
        Pack<float, N>::store(t.m + i, m);
        Pack<float, N>::store(t.v + i, v);
        w_squares += few_squares(w);
        u_squares += few_squares(update);
    });
    w_squares = block_sum<THREADS>(w_squares);
    u_squares = block_sum<THREADS>(u_squares);
    if (threadIdx.x == 0) t.norms[piece.segment] = make_double2(w_squares, u_squares);
}

// A block for every tensor: the step size times the trust ratio ‖w‖/‖update‖.
__global__ void __launch_bounds__(THREADS) lamb_steps(
    const Tensor* tensors, const Header* header, const float* control, const float* applied, double beta1, double beta2,
    double min_coeff, double max_coeff, float* steps) {
    const Tensor t = tensors[blockIdx.x];
    if (control[1] == 0.0f) return;
    double w = 0.0, u = 0.0;
    for (u32 i = threadIdx.x; i < t.segments; i += THREADS) {
        double2 of_segment = t.norms[t.first_segment + i];
        w += of_segment.x;
        u += of_segment.y;
    }
    w = block_sum<THREADS>(w);
    u = block_sum<THREADS>(u);
    if (threadIdx.x != 0) return;
    double trust = 1.0;
    if (w != 0.0 && u != 0.0) {
        trust = sqrt(w) / sqrt(u);
        trust = trust < min_coeff ? min_coeff : trust > max_coeff ? max_coeff : trust;
    }
    u32 n = (u32)*applied;
    double lr = header->learning_rate * t.lr_scale;
    steps[blockIdx.x] = (float)(lr * sqrt(1.0 - power(beta2, n)) / (1.0 - power(beta1, n)) * trust);
}

template <typename Half>
__global__ void __launch_bounds__(THREADS) lamb_apply(
    const Tensor* tensors, const Piece* pieces, const float* control, double average_take, double eps_, const float* steps) {
    Piece piece = pieces[blockIdx.x];
    const Tensor t = tensors[piece.tensor];
    if (control[1] == 0.0f) return;
    const float step = steps[piece.tensor], eps = (float)eps_, weight_decay = (float)t.weight_decay, take = (float)average_take;
    each(piece, [&](auto width, u64 i) {
        constexpr int N = decltype(width)::value;
        float w[N], m[N], v[N];
        Pack<float, N>::load(t.w + i, w);
        Pack<float, N>::load(t.m + i, m);
        Pack<float, N>::load(t.v + i, v);
#pragma unroll
        for (int k = 0; k < N; k++)
            w[k] = __fsub_rn(w[k], __fmul_rn(step, lamb_update(w[k], m[k], v[k], eps, weight_decay)));
        store_w<Half, N>(t, i, w, take);
    });
}

// ---- Muon ----------------------------------------------------------------------------------------------------------------

// As `each`, four elements at a time or one: matrices may begin anywhere.
template <int N, typename F> __device__ __forceinline__ void each_of(const Piece& piece, F at) {
    if constexpr (N == 4) {
        each(piece, at);
    } else {
        for (u64 i = piece.first + threadIdx.x; i < (u64)piece.first + piece.count; i += THREADS) at(Width<1>{}, i);
    }
}

// Moves the momentum `m`; the direction to orthogonalise goes to `copy`: zeros if the step is skipped.
template <typename T, int WIDTH>
__global__ void __launch_bounds__(THREADS) muon_momentum(
    const Tensor* tensors, const Piece* pieces, const float* control, double momentum, u32 nesterov) {
    Piece piece = pieces[blockIdx.x];
    const Tensor t = tensors[piece.tensor];
    const bool skipped = control[1] == 0.0f;
    const float factor = control[0], keep = (float)momentum, take = (float)(1.0 - momentum);
    const float of_m = nesterov ? keep : 1.0f, of_g = nesterov ? take : 0.0f;
    each_of<WIDTH>(piece, [&](auto width, u64 i) {
        constexpr int N = decltype(width)::value;
        float g[N], m[N], direction[N];
        if (skipped) {
#pragma unroll
            for (int k = 0; k < N; k++) direction[k] = 0.0f;
            Pack<T, N>::store((T*)t.copy + i, direction);
            return;
        }
        Pack<float, N>::load(t.g + i, g);
        Pack<float, N>::load(t.m + i, m);
#pragma unroll
        for (int k = 0; k < N; k++) {
            g[k] = __fmul_rn(g[k], factor);
            m[k] = __fmaf_rn(m[k], keep, __fmul_rn(g[k], take));
            direction[k] = __fmaf_rn(m[k], of_m, __fmul_rn(g[k], of_g));
        }
        Pack<float, N>::store(t.m + i, m);
        Pack<T, N>::store((T*)t.copy + i, direction);
    });
}

// The direction comes from `v`. The table's `lr_scale` has the matrix's step in it, and its `weight_decay` is relative to that.
template <typename Half, typename T, int WIDTH>
__global__ void __launch_bounds__(THREADS) muon_apply(
    const Tensor* tensors, const Piece* pieces, const Header* header, const float* control, double average_take) {
    Piece piece = pieces[blockIdx.x];
    const Tensor t = tensors[piece.tensor];
    if (control[1] == 0.0f) return;
    const double lr = header->learning_rate * t.lr_scale;
    const float keep = (float)(1.0 - lr * t.weight_decay), step = (float)lr, take = (float)average_take;
    each_of<WIDTH>(piece, [&](auto width, u64 i) {
        constexpr int N = decltype(width)::value;
        float w[N], direction[N];
        Pack<float, N>::load(t.w + i, w);
        Pack<T, N>::load((const T*)t.v + i, direction);
#pragma unroll
        for (int k = 0; k < N; k++) w[k] = __fsub_rn(__fmul_rn(w[k], keep), __fmul_rn(step, direction[k]));
        store_w<Half, N>(t, i, w, take);
    });
}

// Gram matrices over their traces, and the roots of these. Each block sums up the trace for itself.
template <typename T>
__global__ void __launch_bounds__(THREADS) unit_trace(const T* gram, T* out, float* norms, u32 n, double eps) {
    const u64 elements = (u64)n * n;
    const T* from = gram + blockIdx.y * elements;
    double trace = 0.0;
    for (u32 i = threadIdx.x; i < n; i += THREADS) trace += to_float(from[(u64)i * n + i]);
    trace = block_sum<THREADS>(trace);
    __shared__ double norm;
    if (threadIdx.x == 0) {
        norm = fmax(sqrt(trace), eps);
        if (blockIdx.x == 0) norms[blockIdx.y] = (float)norm;
    }
    __syncthreads();
    const float factor = (float)(1.0 / (norm * norm));
    T* to = out + blockIdx.y * elements;
    for (u64 i = (u64)blockIdx.x * THREADS + threadIdx.x; i < elements; i += (u64)gridDim.x * THREADS)
        to[i] = from_float<T>(__fmul_rn(to_float(from[i]), factor));
}

// a + b·A + c·A², over the norm if there is one.
template <typename T>
__global__ void __launch_bounds__(THREADS) newton_schulz(
    const T* gram, const T* square, const float* norms, T* out, u32 n, double a_, double b_, double c_) {
    const u64 elements = (u64)n * n, matrix = blockIdx.y * elements;
    const double norm = norms ? norms[blockIdx.y] : 1.0;
    const float a = (float)(a_ / norm), b = (float)(b_ / norm), c = (float)(c_ / norm);
    for (u64 i = (u64)blockIdx.x * THREADS + threadIdx.x; i < elements; i += (u64)gridDim.x * THREADS) {
        float y = __fmaf_rn(to_float(gram[matrix + i]), b, __fmul_rn(to_float(square[matrix + i]), c));
        if (i / n == i % n) y = __fadd_rn(y, a);
        out[matrix + i] = from_float<T>(y);
    }
}

// Refreshes the copies of all parameters.
template <typename Half> __global__ void __launch_bounds__(THREADS) copies(const Tensor* tensors, const Piece* pieces) {
    Piece piece = pieces[blockIdx.x];
    const Tensor t = tensors[piece.tensor];
    each(piece, [&](auto width, u64 i) {
        constexpr int N = decltype(width)::value;
        float w[N];
        Pack<float, N>::load(t.w + i, w);
        Pack<Half, N>::store((Half*)t.copy + i, w);
    });
}
