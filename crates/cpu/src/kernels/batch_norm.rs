//! Batch norm on rows of channels (..,C). What is the same for all rows is a row itself, so that loops run along the
//! channels.

use super::float::Float;
use super::level::simd;

/// Rows that are summed in the numbers' own precision before the sums go on in double precision: with f32, 64 terms lose less
/// than a digit, and it is no matter how many such blocks there are.
pub const BLOCK: usize = 64;

simd! {
    /// sums += Σ (x-shift), squares += Σ (x-shift)² over the rows of `x`; `block` has room for two rows.
    ///
    /// A shift near the mean (any row of the same values) keeps the sums as small as the spread, so that nothing is left to
    /// cancel when the variance is taken from them.
    pub fn shifted_sums<T, FMA>(x: &[T], shift: &[T], sums: &mut [f64], squares: &mut [f64], block: &mut [T]) {
        let cols = shift.len();
        let (first, second) = block.split_at_mut(cols);
        for rows in x.chunks(BLOCK * cols) {
            first.fill(T::ZERO);
            second.fill(T::ZERO);
            for row in rows.chunks_exact(cols) {
                for (((&x, &shift), first), second) in
                    row.iter().zip(shift).zip(first.iter_mut()).zip(second.iter_mut())
                {
                    let d = x - shift;
                    *first += d;
                    *second = d.mul_add::<FMA>(d, *second);
                }
            }
            widen(first, sums);
            widen(second, squares);
        }
    }

    /// y = (x-mean)·scale + shift, and 0 where that is negative with `relu`.
    pub fn batch_norm<T, FMA>(x: &[T], mean: &[T], scale: &[T], shift: &[T], relu: bool, y: &mut [T]) {
        let cols = mean.len();
        for (x, y) in x.chunks_exact(cols).zip(y.chunks_exact_mut(cols)) {
            for ((((&x, y), &mean), &scale), &shift) in x.iter().zip(y).zip(mean).zip(scale).zip(shift) {
                let value = normed::<T, FMA>(x, mean, scale, shift);
                // In this order what is no number stays none.
                *y = if relu && value < T::ZERO { T::ZERO } else { value };
            }
        }
    }

    /// sums += Σ dy, products += Σ dy·(x-mean), with dy before the ReLU; `block` has room for two rows.
    pub fn batch_norm_sums<T, FMA>(
        x: &[T], dy: &[T], mean: &[T], scale: &[T], shift: &[T], relu: bool,
        sums: &mut [f64], products: &mut [f64], block: &mut [T],
    ) {
        let cols = mean.len();
        let (first, second) = block.split_at_mut(cols);
        for (x, dy) in x.chunks(BLOCK * cols).zip(dy.chunks(BLOCK * cols)) {
            first.fill(T::ZERO);
            second.fill(T::ZERO);
            for (x, dy) in x.chunks_exact(cols).zip(dy.chunks_exact(cols)) {
                for c in 0..cols {
                    let dy = before_relu::<T, FMA>(x[c], dy[c], mean[c], scale[c], shift[c], relu);
                    first[c] += dy;
                    second[c] = dy.mul_add::<FMA>(x[c] - mean[c], second[c]);
                }
            }
            widen(first, sums);
            widen(second, products);
        }
    }

    /// dx = scale·(dy - of_sum - (x-mean)·of_product), with dy as it is before the ReLU.
    pub fn batch_norm_grad<T, FMA>(
        x: &[T], dy: &[T], mean: &[T], scale: &[T], shift: &[T], relu: bool,
        of_sum: &[T], of_product: &[T], dx: &mut [T],
    ) {
        let cols = mean.len();
        let rows = x.chunks_exact(cols).zip(dy.chunks_exact(cols)).zip(dx.chunks_exact_mut(cols));
        for ((x, dy), dx) in rows {
            for c in 0..cols {
                let dy = before_relu::<T, FMA>(x[c], dy[c], mean[c], scale[c], shift[c], relu);
                dx[c] = scale[c] * ((dy - of_sum[c]) - (x[c] - mean[c]) * of_product[c]);
            }
        }
    }
}

#[inline(always)]
fn normed<T: Float, const FMA: bool>(x: T, mean: T, scale: T, shift: T) -> T {
    (x - mean).mul_add::<FMA>(scale, shift)
}

/// The gradient before the ReLU: none where its result is 0.
#[inline(always)]
fn before_relu<T: Float, const FMA: bool>(x: T, dy: T, mean: T, scale: T, shift: T, relu: bool) -> T {
    if relu && normed::<T, FMA>(x, mean, scale, shift) <= T::ZERO { T::ZERO } else { dy }
}

#[inline(always)]
fn widen<T: Float>(block: &[T], sums: &mut [f64]) {
    for (sum, &x) in sums.iter_mut().zip(block) {
        *sum += x.to_f64();
    }
}

/// Mean, Σ (x-mean)² and count of some values.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Moments {
    pub mean: f64,
    pub squares: f64,
    pub count: f64,
}

impl Moments {
    /// Moments of both together; the distance of the two means is added expressly.
    pub fn join(self, other: Moments) -> Moments {
        let count = self.count + other.count;
        if count == 0.0 {
            return self;
        }
        let (apart, share) = (other.mean - self.mean, other.count / count);
        Moments {
            mean: self.mean + apart * share,
            squares: self.squares + other.squares + apart * apart * self.count * share,
            count,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::*;
    use super::*;

    /// The moments of a column as a batch norm makes them, from parts of `part` rows.
    fn moments(x: &[f32], cols: usize, part: usize) -> Vec<Moments> {
        let mut all = vec![Moments::default(); cols];
        let (mut sums, mut squares, mut block) = (vec![0.0; cols], vec![0.0; cols], vec![0f32; 2 * cols]);
        for rows in x.chunks(part * cols) {
            sums.fill(0.0);
            squares.fill(0.0);
            let (shift, count) = (&rows[..cols], (rows.len() / cols) as f64);
            shifted_sums(rows, shift, &mut sums, &mut squares, &mut block);
            for c in 0..cols {
                let (mean, squares) = (sums[c] / count, squares[c] - sums[c] * sums[c] / count);
                let of_part = Moments { mean: f64::from(shift[c]) + mean, squares, count };
                all[c] = all[c].join(of_part);
            }
        }
        all
    }

    /// 8 images of 128×128: variances to 1e-5 even where the mean is a thousand times the spread.
    #[test]
    fn moments_of_many_pixels_keep_their_digits() {
        at_every_level(|level| {
            let (rows, cols) = (8 * 128 * 128, 5);
            let mut x = narrow(&noise(1, rows * cols, 1.0));
            let means = [0.0, 1.0, -30.0, 1000.0, 0.0];
            x.iter_mut().enumerate().for_each(|(i, x)| *x += means[i % cols] as f32);
            for row in x.chunks_exact_mut(cols) {
                row[4] = 0.1;
            }
            let got = moments(&x, cols, rows / 16);
            for (c, got) in got.iter().enumerate() {
                let column = || x.iter().skip(c).step_by(cols).map(|x| f64::from(*x));
                let mean = column().sum::<f64>() / rows as f64;
                let squares: f64 = column().map(|x| (x - mean).powi(2)).sum();
                let off = |a: f64, b: f64| (a - b).abs();
                assert_eq!(got.count, rows as f64);
                assert!(off(got.mean, mean) < 1e-6 * mean.abs().max(0.1), "{level:?}: mean {c}");
                assert!(off(got.squares, squares) <= 1e-5 * squares + 1e-9, "{level:?}: squares {c}");
            }
        });
    }

    #[test]
    fn joined_moments_are_those_of_all() {
        let x = noise(2, 1000, 2.0);
        let of = |x: &[f64]| {
            let count = x.len() as f64;
            let mean = x.iter().sum::<f64>() / count;
            Moments { mean, squares: x.iter().map(|x| (x - mean).powi(2)).sum(), count }
        };
        let parts = [&x[..1], &x[1..300], &x[300..300], &x[300..]]
            .map(|part| if part.is_empty() { Moments::default() } else { of(part) });
        let joined = parts.into_iter().fold(Moments::default(), Moments::join);
        let whole = of(&x);
        assert_close(&[joined.mean, joined.squares], &[whole.mean, whole.squares], 1e-13, "joined");
        assert_eq!(joined.count, 1000.0);
    }

    #[test]
    fn what_is_no_number_passes_the_relu() {
        at_every_level(|_| {
            let x = [f32::NAN, -1.0, 1.0];
            let mut y = [0f32; 3];
            batch_norm(&x, &[0.0; 3], &[1.0; 3], &[0.0; 3], true, &mut y);
            assert!(y[0].is_nan() && y[1..] == [0.0, 1.0]);
        });
    }
}
