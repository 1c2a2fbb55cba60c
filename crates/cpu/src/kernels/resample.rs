//! Resizing along one axis at a time: a result is a weighted sum of neighbours, whatever the way of sampling and in either
//! direction.

use super::float::Float;
use super::level::simd;
use graph::op::Sampling;

/// An axis of `len` pixels sampled by `out`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Axis {
    pub sampling: Sampling,
    pub len: usize,
    pub out: usize,
}

impl Axis {
    /// The pixels that result `o` is made of, from the first on, and the weight of the first; what they lack to 1 is shared
    /// among the others.
    pub fn sources(&self, o: usize) -> (usize, usize, f64) {
        let (len, out) = (self.len, self.out);
        match self.sampling {
            Sampling::Bilinear => {
                let at = ((o as f64 + 0.5) * (len as f64 / out as f64) - 0.5).max(0.0);
                let first = (at as usize).min(len - 1);
                let count = if first + 1 < len { 2 } else { 1 };
                (first, count, if count == 1 { 1.0 } else { 1.0 - (at - first as f64) })
            }
            Sampling::Average => {
                let (first, end) = (o * len / out, ((o + 1) * len).div_ceil(out));
                (first, end - first, 1.0 / (end - first) as f64)
            }
        }
    }

    /// An upper bound of the weights of all results, which are as many in both directions.
    pub fn most_weights(&self) -> usize {
        self.len + 3 * self.out
    }
}

/// Neighbours that make each result, and their weights.
pub struct Taps<'a, T> {
    /// Entries of results: the first neighbour and where its weights begin; one entry more, where the last ones end.
    entries: &'a [[u32; 2]],
    weights: &'a [T],
}

impl<'a, T: Float> Taps<'a, T> {
    /// Taps of sampling an axis; `weights` has room for [`Axis::most_weights`], `entries` for the results and one more.
    pub fn forward(axis: Axis, entries: &'a mut [[u32; 2]], weights: &'a mut [T]) -> Self {
        let mut begin = 0;
        for (o, entry) in entries[..axis.out].iter_mut().enumerate() {
            let (first, count, weight) = axis.sources(o);
            *entry = [first as u32, begin as u32];
            weights[begin] = T::from_f64(weight);
            let rest = (1.0 - weight) / (count.max(2) - 1) as f64;
            weights[begin + 1..begin + count].fill(T::from_f64(rest));
            begin += count;
        }
        entries[axis.out] = [0, begin as u32];
        Taps { entries: &entries[..=axis.out], weights: &weights[..begin] }
    }

    /// Taps of the transpose: for each pixel of the axis, the results that it is part of.
    pub fn backward(axis: Axis, entries: &'a mut [[u32; 2]], weights: &'a mut [T]) -> Self {
        let (mut begin, mut first) = (0, 0);
        for (i, entry) in entries[..axis.len].iter_mut().enumerate() {
            // Sources move to the right with the results, and so do the results that a pixel is part of.
            let ends_before = |o: usize| {
                let (start, count, _) = axis.sources(o);
                start + count <= i
            };
            while first < axis.out && ends_before(first) {
                first += 1;
            }
            *entry = [first as u32, begin as u32];
            for o in first..axis.out {
                let (start, count, weight) = axis.sources(o);
                if start > i {
                    break;
                }
                let rest = (1.0 - weight) / (count.max(2) - 1) as f64;
                weights[begin] = T::from_f64(if start == i { weight } else { rest });
                begin += 1;
            }
        }
        entries[axis.len] = [0, begin as u32];
        Taps { entries: &entries[..=axis.len], weights: &weights[..begin] }
    }

    /// Taps that `forward` or `backward` left in tables of so many results.
    pub fn of_tables(results: usize, entries: &'a [[u32; 2]], weights: &'a [T]) -> Self {
        Taps { entries: &entries[..=results], weights: &weights[..entries[results][1] as usize] }
    }

    /// The first neighbour of a result, and the weights from there on.
    pub fn of(&self, result: usize) -> (usize, &[T]) {
        let [first, begin] = self.entries[result];
        (first as usize, &self.weights[begin as usize..self.entries[result + 1][1] as usize])
    }

    /// `out[r] = Σ weight · row[neighbour]` for every result, each `cols` wide.
    pub fn along(&self, row: &[T], cols: usize, out: &mut [T]) {
        along(row, self.entries, self.weights, cols, out);
    }
}

simd! {
    /// out = x·weight, or += with `add`.
    pub fn weigh<T, FMA>(x: &[T], weight: T, add: bool, out: &mut [T]) {
        assert_eq!(x.len(), out.len(), "weigh: lengths differ");
        if add {
            for (out, &x) in out.iter_mut().zip(x) {
                *out = x.mul_add::<FMA>(weight, *out);
            }
        } else {
            for (out, &x) in out.iter_mut().zip(x) {
                *out = x * weight;
            }
        }
    }

    fn along<T, FMA>(row: &[T], entries: &[[u32; 2]], weights: &[T], cols: usize, out: &mut [T]) {
        for (pair, out) in entries.windows(2).zip(out.chunks_exact_mut(cols)) {
            let ([first, begin], [_, end]) = (pair[0], pair[1]);
            out.fill(T::ZERO);
            let weights = &weights[begin as usize..end as usize];
            let pixels = row[first as usize * cols..].chunks_exact(cols);
            for (&weight, pixel) in weights.iter().zip(pixels) {
                for (out, &x) in out.iter_mut().zip(pixel) {
                    *out = x.mul_add::<FMA>(weight, *out);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::*;
    use super::*;

    fn matrix(axis: Axis, backward: bool) -> Vec<Vec<f64>> {
        let mut entries = vec![[0; 2]; axis.len.max(axis.out) + 1];
        let mut weights = vec![0.0; axis.most_weights()];
        let (taps, results, width) = match backward {
            false => (Taps::forward(axis, &mut entries, &mut weights), axis.out, axis.len),
            true => (Taps::backward(axis, &mut entries, &mut weights), axis.len, axis.out),
        };
        let row = |r: usize| {
            let mut row = vec![0.0; width];
            let (first, weights) = taps.of(r);
            row[first.min(width)..].iter_mut().zip(weights).for_each(|(x, w)| *x = *w);
            row
        };
        (0..results).map(row).collect()
    }

    #[test]
    fn backward_is_the_transpose_and_weights_sum_to_one() {
        for sampling in [Sampling::Bilinear, Sampling::Average] {
            for (len, out) in [
                (1, 1),
                (1, 6),
                (2, 3),
                (3, 2),
                (5, 5),
                (7, 3),
                (16, 6),
                (4, 16),
                (16, 4),
                (13, 50),
                (50, 13),
            ] {
                let axis = Axis { sampling, len, out };
                let (there, back) = (matrix(axis, false), matrix(axis, true));
                for (o, row) in there.iter().enumerate() {
                    assert!((row.iter().sum::<f64>() - 1.0).abs() < 1e-12, "{axis:?}: {row:?}");
                    for i in 0..len {
                        assert_eq!(row[i], back[i][o], "{axis:?} at {o}, {i}");
                    }
                }
            }
        }
    }

    #[test]
    fn published_weights() {
        // torch.nn.functional.interpolate([0, 1, 2], size=6 or 2), adaptive_avg_pool1d(range(7), 3).
        let sample = |sampling, x: &[f64], out| {
            let rows = matrix(Axis { sampling, len: x.len(), out }, false);
            rows.iter().map(|row| weighted_sum(row, x)).collect::<Vec<_>>()
        };
        let up = sample(Sampling::Bilinear, &[0.0, 1.0, 2.0], 6);
        assert_close(&up, &[0.0, 0.25, 0.75, 1.25, 1.75, 2.0], 1e-12, "up");
        assert_close(&sample(Sampling::Bilinear, &[0.0, 1.0, 2.0], 2), &[0.25, 1.75], 1e-12, "down");
        let seven: Vec<f64> = (0..7).map(f64::from).collect();
        assert_close(&sample(Sampling::Average, &seven, 3), &[1.0, 3.0, 5.0], 1e-12, "bins");
    }
}
