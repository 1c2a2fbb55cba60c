// Positions of a window's tokens in a feature map, as in graph::Windows: all of it is computed from indices.
#pragma once

#include "common.cuh"

// Added to scores of masked pairs of tokens.
static constexpr float APART = -100.0f;

// Maps of height×width tokens, rolled up and left by (down, right) and cut into windows of ROWS×COLUMNS; and one of the windows.
template <int ROWS, int COLUMNS> struct Windows {
    static constexpr int T = ROWS * COLUMNS;
    int height, width, down, right;
    // Windows of a map along its sides.
    int tall, wide;
    // Of the window at hand: its image's first token, the rolled map's row and column it begins at, and by which of `side`'s
    // bits its tokens are parted.
    int image, row, column, parted;

    __device__ __forceinline__ Windows(int height, int width, int down, int right)
        : height(height), width(width), down(down), right(right), tall((height + ROWS - 1) / ROWS),
          wide((width + COLUMNS - 1) / COLUMNS) {}

    // Turns to a window, numbered through the batch.
    __device__ __forceinline__ void turn_to(int window) {
        int of_image = window % (tall * wide);
        image = window / (tall * wide) * height * width;
        int i = of_image / wide, j = of_image % wide;
        row = i * ROWS;
        column = j * COLUMNS;
        parted = (down > 0 && i + 1 == tall ? 2 : 0) | (right > 0 && j + 1 == wide ? 1 : 0);
    }

    // Position of token t in the batch of maps, in tokens; -1 for padding, and for what is not a token of a window.
    __device__ __forceinline__ int place(int t) const {
        int r = row + t / COLUMNS, c = column + t % COLUMNS;
        if (t >= T || r >= height || c >= width) return -1;
        r += down;
        c += right;
        r -= r >= height ? height : 0;
        c -= c >= width ? width : 0;
        return image + r * width + c;
    }

    // On which side of the map's seams token t would be in the last windows: 2 for rows, 1 for columns.
    __device__ __forceinline__ int side(int t) const {
        return (t / COLUMNS + down >= ROWS ? 2 : 0) | (t % COLUMNS + right >= COLUMNS ? 1 : 0);
    }
    // True if two tokens, of these sides, are masked from each other in the current window.
    __device__ __forceinline__ bool apart(int side, int other) const { return ((side ^ other) & parted) != 0; }
};

// The factor of the cosine, and its slope along the logit scale.
__device__ __forceinline__ float cosine_factor(float logit_scale) { return expf(fminf(logit_scale, 4.605170186f)); }
__device__ __forceinline__ float cosine_slope(float logit_scale) {
    return logit_scale > 4.605170186f ? 0.0f : expf(logit_scale);
}
