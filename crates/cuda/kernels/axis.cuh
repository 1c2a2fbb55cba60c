// Axis of resized images.
#pragma once

// An axis of `len` pixels sampled by `out`. All but weights is exact, in whole numbers.
struct Axis {
    int len, out;
    bool average;

    __device__ __forceinline__ Axis(int len, int out, int average) : len(len), out(out), average(average) {}

    // Position of result o among the pixels, in units of 1/(2·out) pixel: torch's `align_corners=False`.
    __device__ __forceinline__ int place(int o) const {
        return min(max((2 * o + 1) * len - out, 0), 2 * out * (len - 1));
    }
    // The pixels that result o is made of.
    __device__ __forceinline__ void sources(int o, int& first, int& end) const {
        if (average) {
            first = (int)((i64)o * len / out);
            end = (int)(((i64)(o + 1) * len + out - 1) / out);
        } else {
            first = place(o) / (2 * out);
            end = min(first + 2, len);
        }
    }
    // The results that pixel i is part of.
    __device__ __forceinline__ void results(int i, int& first, int& end) const {
        if (average) {
            first = (int)((i64)i * out / len);
            end = (int)(((i64)(i + 1) * out + len - 1) / len);
        } else {
            // Those whose place is more than i-1 and less than i+1; of the outermost pixels, all beyond them.
            int low = out * (2 * i - 1) - len, high = out * (2 * i + 3) - len;
            first = low <= 0 ? 0 : (low + 2 * len - 1) / (2 * len);
            end = i == len - 1 ? out : min((high + 2 * len - 1) / (2 * len), out);
        }
    }
    // The first result that lies at pixel i or beyond it; of the first pixel, the first of all.
    __device__ __forceinline__ int begin(int i) const {
        if (i >= len) return out;
        return i <= 0 ? 0 : (int)((u32)(out * (2 * i + 1) + len - 1) / (u32)(2 * len));
    }
};

// The pixels of an axis that a result is made of, without average: the first, and the share of the next.
struct Between {
    int first;
    float share;
    __device__ __forceinline__ Between(const Axis& axis, int o) : Between(axis, o, axis.place(o) / (2 * axis.out)) {}
    __device__ __forceinline__ Between(const Axis& axis, int o, int first) : first(first) {
        int unit = 2 * axis.out;
        share = (float)(axis.place(o) - unit * first) * (1.0f / (float)unit);
    }
    // None is read beyond the last, of which the share is 0 then.
    __device__ __forceinline__ int next(const Axis& axis) const { return min(first + 1, axis.len - 1); }
};

__device__ __forceinline__ float mix(float a, float b, float share) { return fmaf(share, b - a, a); }

// The weights of the pixels of one result.
struct Weights {
    int place, unit;
    float even, per_unit;

    __device__ __forceinline__ Weights(const Axis& axis, int o) {
        unit = 2 * axis.out;
        place = axis.place(o);
        per_unit = 1.0f / (float)unit;
        even = 0.0f;
        if (axis.average) {
            int first, end;
            axis.sources(o, first, end);
            even = 1.0f / (float)(end - first);
        }
    }
    __device__ __forceinline__ float of(int pixel) const {
        return even > 0.0f ? even : 1.0f - (float)abs(place - unit * pixel) * per_unit;
    }
};
