//! Which pixels make an output pixel, with which weights.

use super::Interpolation;

/// The fraction bits of a weight. 8 more are a pixel, and 2 are for the sign and for overshoot.
pub(super) const BITS: u32 = 32 - 8 - 2;

/// For each output pixel along an axis a run of input pixels.
#[derive(Default)]
pub(super) struct Taps {
    /// First input pixel and number of weights.
    runs: Vec<(u32, u32)>,
    /// `stride` for each output pixel, of which its run says how many count.
    weights: Vec<i32>,
    stride: usize,
    exact: Vec<f64>,
}

impl Taps {
    /// Computes taps from the part `crop` (start, size) of `from` pixels to `to` pixels. Follows Pillow's precompute_coeffs to the
    /// letter, as rounding shows.
    pub(super) fn set(&mut self, from: usize, crop: (f64, f64), to: usize, how: Interpolation) {
        let scale = crop.1 / to as f64;
        let widening = scale.max(1.0);
        let support = how.support() * widening;
        self.stride = (support.ceil() as usize * 2 + 1).min(from);
        self.runs.clear();
        self.weights.clear();
        for i in 0..to {
            let centre = crop.0 + (i as f64 + 0.5) * scale;
            let first = (centre - support + 0.5).max(0.0) as usize;
            let last = ((centre + support + 0.5) as usize).min(from);
            let (first, last) = (first.min(from - 1), last.max(first + 1).min(from));

            self.exact.clear();
            let distance = |x: usize| (x as f64 - centre + 0.5) * (1.0 / widening);
            self.exact.extend((first..last).map(|x| how.weight(distance(x))));
            let sum: f64 = self.exact.iter().sum();
            let normalised = self.exact.iter().map(|w| if sum == 0.0 { *w } else { *w / sum });
            let start = self.weights.len();
            self.weights.extend(normalised.map(fixed_point));
            self.weights.resize(start + self.stride, 0);
            self.runs.push((first as u32, (last - first).min(self.stride) as u32));
        }
    }

    /// For each output pixel its first input pixel and the weights from there.
    #[inline(always)]
    pub(super) fn iter(&self) -> impl Iterator<Item = (usize, &[i32])> {
        let weights = self.weights.chunks_exact(self.stride.max(1));
        self.runs
            .iter()
            .zip(weights)
            .map(|(&(first, count), weights)| (first as usize, &weights[..count as usize]))
    }
}

fn fixed_point(weight: f64) -> i32 {
    // Away from zero at halves; `as` cuts towards zero.
    (weight * f64::from(1 << BITS) + 0.5_f64.copysign(weight)) as i32
}

impl Interpolation {
    fn support(self) -> f64 {
        match self {
            Interpolation::Bilinear => 1.0,
            Interpolation::Bicubic => 2.0,
        }
    }

    fn weight(self, x: f64) -> f64 {
        const A: f64 = -0.5;
        let x = x.abs();
        match self {
            Interpolation::Bilinear if x < 1.0 => 1.0 - x,
            Interpolation::Bicubic if x < 1.0 => ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0,
            Interpolation::Bicubic if x < 2.0 => (((x - 5.0) * x + 8.0) * x - 4.0) * A,
            _ => 0.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_add_up_to_one() {
        let mut taps = Taps::default();
        for how in [Interpolation::Bilinear, Interpolation::Bicubic] {
            for (from, to) in [(1, 1), (1, 7), (500, 224), (32, 224), (7, 1), (3, 2)] {
                taps.set(from, (0.0, from as f64), to, how);
                assert_eq!(taps.iter().count(), to);
                for (first, weights) in taps.iter() {
                    assert!(first + weights.len() <= from);
                    let sum = weights.iter().sum::<i32>();
                    let rounding = weights.len() as u32;
                    assert!(sum.abs_diff(1 << BITS) <= rounding, "{from} to {to}: {sum}");
                }
            }
        }
    }
}
