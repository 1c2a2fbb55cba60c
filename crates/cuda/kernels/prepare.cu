// Conversion of bytes to a model's input: window, mirror, resize, normalise, erase, mix. Bit for bit what data::Finish makes of the
// same numbers, which that module documents.
//
// Pixels (P, HEIGHT, WIDTH, CHANNELS), images (B, CHANNELS, SIZE, SIZE). ROW is how many numbers a row of taps has, or 0 if
// nothing is resized. The grid is (CHANNELS, bands of rows, B): a block makes `band` rows of one channel of one image.
#include "common.cuh"

constexpr int THREADS = 256;
// The fraction bits of a tap's weight.
constexpr int BITS = 22;
constexpr int CHOICES = 34, SIDE = 14;

// One sample, before it is mixed.
struct Sample {
    const u8* image;
    int row_x, resized_x, start_x;
    int row_y, resized_y, start_y;
    int right, below, flip;
    int left, top, width, height;
    __device__ __forceinline__ Sample(const int* choices, const u8* pixels, int bytes) {
        image = pixels + (i64)choices[0] * bytes;
        row_x = choices[1], resized_x = choices[2], start_x = choices[3];
        row_y = choices[4], resized_y = choices[5], start_y = choices[6];
        right = choices[7], below = choices[8], flip = choices[9];
        left = choices[10], top = choices[11], width = choices[12], height = choices[13];
    }
    // The column of the resized image that is seen at column x, maybe outside of it.
    template <int SIZE> __device__ __forceinline__ int column(int x) const {
        return (flip ? SIZE - 1 - x : x) + right;
    }
    __device__ __forceinline__ bool erased(int x, int y) const {
        return x >= left && x < left + width && y >= top && y < top + height;
    }
};

__device__ __forceinline__ u32 to_byte(int sum) { return (u32)min(max(sum >> BITS, 0), 255); }

template <int CHANNELS, int SIZE, int HEIGHT, int WIDTH, int ROW> struct Shape {
    static constexpr int V = SIZE % 4 == 0 ? 4 : 1;
    static constexpr int LINE = (SIZE + 3) / 4 * 4;
    static constexpr int BYTES = CHANNELS * HEIGHT * WIDTH;
    static constexpr int NARROWED = HEIGHT * LINE;

    // Resizes the rows that the rows first..last of the output are made of: as many columns as that has, in its order.
    static __device__ __forceinline__ void
    narrow(const Sample& s, const int* __restrict__ taps, int channel, int first, int last, u8* narrowed) {
        int low = max(first + s.below, 0), high = min(last - 1 + s.below, s.resized_y - 1);
        if (low > high) return;
        const int* begin = taps + (i64)(s.row_y + low) * ROW;
        const int* end = taps + (i64)(s.row_y + high) * ROW;
        int top = s.start_y + begin[0], rows = s.start_y + end[0] + end[1] - top;
        for (int i = threadIdx.x; i < rows * SIZE; i += THREADS) {
            int y = top + i / SIZE, x = i % SIZE, from = s.column<SIZE>(x);
            u32 byte = 0;
            if (from >= 0 && from < s.resized_x) {
                const int* tap = taps + (i64)(s.row_x + from) * ROW;
                const u8* pixel = s.image + (y * WIDTH + s.start_x + tap[0]) * CHANNELS + channel;
                int sum = 1 << (BITS - 1), count = tap[1];
                for (int k = 0; k < count; k++) sum += (int)pixel[k * CHANNELS] * tap[2 + k];
                byte = to_byte(sum);
            }
            narrowed[y * LINE + x] = (u8)byte;
        }
    }

    // V pixels from (x, y) on, normalised and erased.
    static __device__ __forceinline__ void pixels(
        const Sample& s, const int* __restrict__ taps, int channel, int x, int y, const u8* narrowed, const float* level,
        float (&out)[V]) {
        int from = y + s.below;
        bool inside = from >= 0 && from < s.resized_y;
        u32 bytes[V] = {};
        if (inside && ROW > 0) {
            const int* tap = taps + (i64)(s.row_y + from) * ROW;
            const u8* column = narrowed + (s.start_y + tap[0]) * LINE + x;
            int count = tap[1], sums[V];
#pragma unroll
            for (int i = 0; i < V; i++) sums[i] = 1 << (BITS - 1);
            for (int k = 0; k < count; k++) {
                int weight = tap[2 + k];
                if constexpr (V == 4) {
                    u32 word = *reinterpret_cast<const u32*>(column + k * LINE);
#pragma unroll
                    for (int i = 0; i < V; i++) sums[i] += (int)(word >> 8 * i & 255u) * weight;
                } else {
                    sums[0] += (int)column[k * LINE] * weight;
                }
            }
#pragma unroll
            for (int i = 0; i < V; i++) bytes[i] = to_byte(sums[i]);
        } else if (inside) {
            const u8* line = s.image + ((s.start_y + from) * WIDTH + s.start_x) * CHANNELS + channel;
#pragma unroll
            for (int i = 0; i < V; i++) {
                int column = s.column<SIZE>(x + i);
                if (column >= 0 && column < s.resized_x) bytes[i] = line[column * CHANNELS];
            }
        }
#pragma unroll
        for (int i = 0; i < V; i++) out[i] = s.erased(x + i, y) ? 0.0f : level[bytes[i]];
    }
};

template <int CHANNELS, int SIZE, int HEIGHT, int WIDTH, int ROW>
__global__ void __launch_bounds__(THREADS)
prepare(const u8* __restrict__ all, const int* __restrict__ choices, const float* __restrict__ levels,
        const int* __restrict__ taps, float* __restrict__ images, int band) {
    using G = Shape<CHANNELS, SIZE, HEIGHT, WIDTH, ROW>;
    constexpr int V = G::V, ACROSS = SIZE / V;
    __shared__ float level[256];
    extern __shared__ __align__(16) u8 narrowed[];
    int channel = blockIdx.x, first = blockIdx.y * band, last = min(first + band, SIZE);
    choices += (i64)blockIdx.z * CHOICES;
    images += ((i64)blockIdx.z * CHANNELS + channel) * SIZE * SIZE;

    Sample own(choices, all, G::BYTES), partner(choices + SIDE, all, G::BYTES);
    const int* mix = choices + 2 * SIDE;
    int kind = mix[0], left = mix[2], top = mix[3], width = mix[4], height = mix[5];
    float lambda = __int_as_float(mix[1]), rest = __fsub_rn(1.0f, lambda);
    for (int i = threadIdx.x; i < 256; i += THREADS) level[i] = levels[channel * 256 + i];
    if constexpr (ROW > 0) {
        G::narrow(own, taps, channel, first, last, narrowed);
        if (kind != 0) G::narrow(partner, taps, channel, first, last, narrowed + G::NARROWED);
    }
    __syncthreads();

    for (int i = threadIdx.x; i < (last - first) * ACROSS; i += THREADS) {
        int y = first + i / ACROSS, x = i % ACROSS * V;
        float v[V];
        G::pixels(own, taps, channel, x, y, narrowed, level, v);
        if (kind != 0) {
            float w[V];
            G::pixels(partner, taps, channel, x, y, narrowed + G::NARROWED, level, w);
#pragma unroll
            for (int j = 0; j < V; j++) {
                // As on the host, which rounds both products.
                float blend = __fadd_rn(__fmul_rn(lambda, v[j]), __fmul_rn(rest, w[j]));
                bool patch = x + j >= left && x + j < left + width && y >= top && y < top + height;
                v[j] = kind == 1 ? blend : patch ? w[j] : v[j];
            }
        }
        Pack<float, V>::store(images + y * SIZE + x, v);
    }
}
