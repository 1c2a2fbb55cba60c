//! A matrix transposed, so that a matmul finds its right side by rows.

use super::level::simd;

/// Side of the square blocks: a cache line of f32.
const SIDE: usize = 16;

simd! {
    /// `out` (cols, rows) = the transpose of `rows` × `cols` elements whose rows start `stride` apart in `x`.
    pub fn transpose<T, FMA>(x: &[T], rows: usize, cols: usize, stride: usize, out: &mut [T]) {
        assert!(cols <= stride && out.len() == rows * cols, "transpose: shapes differ");
        assert!(rows == 0 || x.len() >= (rows - 1) * stride + cols, "transpose: too short");
        let (whole_rows, whole_cols) = (rows - rows % SIDE, cols - cols % SIDE);
        for r in (0..whole_rows).step_by(SIDE) {
            for c in (0..whole_cols).step_by(SIDE) {
                let mut block = [[T::ZERO; SIDE]; SIDE];
                for (i, line) in block.iter_mut().enumerate() {
                    line.copy_from_slice(&x[(r + i) * stride + c..][..SIDE]);
                }
                for j in 0..SIDE {
                    let line: [T; SIDE] = std::array::from_fn(|i| block[i][j]);
                    out[(c + j) * rows + r..][..SIDE].copy_from_slice(&line);
                }
            }
            for c in whole_cols..cols {
                for i in r..r + SIDE {
                    out[c * rows + i] = x[i * stride + c];
                }
            }
        }
        for r in whole_rows..rows {
            for c in 0..cols {
                out[c * rows + r] = x[r * stride + c];
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::level::forced::at_every_level;
    use super::*;

    #[test]
    fn rows_become_columns() {
        at_every_level(|level| {
            for (rows, cols, stride) in [(1, 1, 1), (5, 3, 7), (16, 16, 16), (65, 64, 576), (197, 64, 100)] {
                let x: Vec<f32> = (0..rows * stride).map(|i| i as f32).collect();
                let mut out = vec![0.0; rows * cols];
                transpose(&x, rows, cols, stride, &mut out);
                for r in 0..rows {
                    for c in 0..cols {
                        assert_eq!(out[c * rows + r], x[r * stride + c], "{rows}×{cols} {level:?}");
                    }
                }
            }
        });
    }
}
