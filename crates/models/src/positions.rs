//! Moves a position embedding to another image size.
//!
//! T tokens, C channels. The same numbers as timm's `resample_abs_pos_embed`, which is PyTorch's
//! `interpolate(mode="bicubic", antialias=True)`: separable, with a kernel that widens when the grid shrinks.

use crate::names::Tensor;

#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum PositionsError {
    #[error("the position embedding is {shape:?}, not [1, tokens, channels]")]
    Shape { shape: Vec<usize> },
    #[error("the position embedding is {shape:?} but holds {values} values")]
    Torn { shape: Vec<usize>, values: usize },
    #[error("the position embedding {shape:?} is for {patches} patches, which is not a square grid")]
    NotSquare { shape: Vec<usize>, patches: usize },
    #[error("cannot resize the position embedding {shape:?} to a grid of {grid}x{grid} patches")]
    Grid { shape: Vec<usize>, grid: usize },
}

/// Resamples the patch positions of a `[1, T, C]` embedding to a square grid of `to_grid` patches a side.
/// The class token's position, if there is one, comes first and is copied.
pub fn resize_positions(pos: &Tensor, class_token: bool, to_grid: usize) -> Result<Tensor, PositionsError> {
    let shape = || pos.shape.clone();
    let &[1, tokens, channels @ (1..)] = pos.shape.as_slice() else {
        return Err(PositionsError::Shape { shape: shape() });
    };
    if !pos.is_whole() {
        return Err(PositionsError::Torn { shape: shape(), values: pos.data.len() });
    }
    let prefix = usize::from(class_token);
    let patches = tokens.saturating_sub(prefix);
    let from_grid = patches.isqrt();
    if patches == 0 || from_grid * from_grid != patches {
        return Err(PositionsError::NotSquare { shape: shape(), patches });
    }
    if to_grid == from_grid {
        return Ok(pos.clone());
    }
    let to_tokens = to_grid.checked_mul(to_grid).and_then(|patches| patches.checked_add(prefix));
    let fits = |tokens: &usize| tokens.checked_mul(channels).is_some();
    let to_tokens = to_tokens.filter(|tokens| to_grid > 0 && fits(tokens));
    let to_tokens = to_tokens.ok_or_else(|| PositionsError::Grid { shape: shape(), grid: to_grid })?;

    let (class, grid) = pos.data.split_at(prefix * channels);
    let taps = cubic_taps(from_grid, to_grid);
    let across = resample_axis(grid, from_grid, channels, &taps);
    let down = resample_axis(&across, from_grid, to_grid * channels, &taps);
    Ok(Tensor { shape: vec![1, to_tokens, channels], data: [class, &down].concat() })
}

/// The inputs that one output is a weighted sum of.
struct Taps {
    first: usize,
    weights: Vec<f32>,
}

/// Weights of cubic interpolation in f64, which agree with PyTorch's f64 to the last digits; its f32 weights are off by
/// some 1e-6.
fn cubic_taps(from: usize, to: usize) -> Vec<Taps> {
    let scale = from as f64 / to as f64;
    let stretch = scale.max(1.0);
    let support = 2.0 * stretch;
    let taps_of = |i: usize| {
        let centre = scale * (i as f64 + 0.5);
        // A cast from f64 truncates, and takes negatives to zero.
        let first = (centre - support + 0.5) as usize;
        let end = ((centre + support + 0.5) as usize).min(from);
        let raw: Vec<f64> = (first..end).map(|j| cubic((j as f64 + 0.5 - centre) / stretch)).collect();
        let total: f64 = raw.iter().sum();
        Taps { first, weights: raw.iter().map(|weight| (weight / total) as f32).collect() }
    };
    (0..to).map(taps_of).collect()
}

/// Keys' cubic convolution with a = -0.5, as in Pillow (PyTorch's bicubic without antialias has -0.75).
fn cubic(x: f64) -> f64 {
    const A: f64 = -0.5;
    match x.abs() {
        x if x < 1.0 => ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0,
        x if x < 2.0 => (((x - 5.0) * x + 8.0) * x - 4.0) * A,
        _ => 0.0,
    }
}

/// Resamples the middle axis of `[outer, from, inner]`.
fn resample_axis(input: &[f32], from: usize, inner: usize, taps: &[Taps]) -> Vec<f32> {
    let outer = input.len() / (from * inner);
    let mut output = vec![0.0; outer * taps.len() * inner];
    for (slab, out_slab) in input.chunks_exact(from * inner).zip(output.chunks_exact_mut(taps.len() * inner))
    {
        for (taps, out_row) in taps.iter().zip(out_slab.chunks_exact_mut(inner)) {
            for (weight, row) in taps.weights.iter().zip(slab[taps.first * inner..].chunks_exact(inner)) {
                for (out, value) in out_row.iter_mut().zip(row) {
                    *out += weight * value;
                }
            }
        }
    }
    output
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `[1, T, 2]`, each value from its place.
    fn waves(grid: usize, prefix: usize) -> Tensor {
        let tokens = grid * grid + prefix;
        let value = |t: usize| ((t * t) as f64 * 0.37 + 1.0).sin() as f32;
        Tensor { shape: vec![1, tokens, 2], data: (0..tokens * 2).map(value).collect() }
    }

    // import torch
    // from timm.layers import resample_abs_pos_embed
    // for grid, to, prefix in [(4, 7, 1), (7, 4, 1), (14, 3, 0), (3, 8, 0), (2, 1, 1), (1, 3, 1),
    //                          (14, 24, 1)]:
    //     t = torch.arange((grid * grid + prefix) * 2, dtype=torch.float64)
    //     pos = torch.sin(t * t * 0.37 + 1).float().reshape(1, -1, 2)
    //     out = resample_abs_pos_embed(pos, [to, to], num_prefix_tokens=prefix).flatten()
    //     n = len(out)
    //     print(grid, to, prefix, [round(out[i].item(), 7) for i in (0, 3, n // 3, n // 2, n - 4, n - 1)],
    //           out.double().abs().sum().item())
    #[rustfmt::skip]
    const TIMM: [(usize, usize, usize, [f32; 6], f64); 7] = [
        (4, 7, 1, [0.841471, -1.0974736, 0.8086121, -1.3324379, 0.4528478, 1.2436371], 57.71243428438902),
        (7, 4, 1, [0.841471, -0.1587226, 0.361964, 0.3643212, 0.0310452, 0.1583061], 10.986575226299465),
        (14, 3, 0, [0.3435255, 0.1626181, 0.0953188, -0.0538089, -0.0700046, 0.0458932], 1.7233041147701442),
        (3, 8, 0, [0.8378288, 0.9783192, 0.3178961, 0.8585839, 0.9916195, 0.9156491], 79.51474141795188),
        (2, 1, 1, [0.841471, -0.4542465, 0.979908, 0.438728, 0.841471, -0.4542465], 2.7143535017967224),
        (1, 3, 1, [0.841471, -0.9277759, 0.6143743, 0.6143743, 0.6143743, -0.9277759], 15.70073026418686),
        (14, 24, 1, [0.841471, -0.9264173, 0.7648397, -0.0090978, -0.1286559, 1.1608158], 577.8341957442681),
    ];

    #[test]
    fn resizes_as_timm_does() {
        for (grid, to, prefix, values, total) in TIMM {
            let resized = resize_positions(&waves(grid, prefix), prefix == 1, to).unwrap();
            assert_eq!(resized.shape, [1, to * to + prefix, 2]);
            let n = resized.data.len();
            for (i, value) in [0, 3, n / 3, n / 2, n - 4, n - 1].into_iter().zip(values) {
                let ours = resized.data[i];
                assert!((ours - value).abs() < 2e-6, "{grid} to {to}: [{i}] is {ours}, not {value}");
            }
            let ours: f64 = resized.data.iter().map(|&value| f64::from(value).abs()).sum();
            assert!((ours - total).abs() < 1e-7 * n as f64, "{grid} to {to}: sums to {ours}, not {total}");
        }
    }

    #[test]
    fn the_same_grid_is_left_alone() {
        assert_eq!(resize_positions(&waves(5, 1), true, 5), Ok(waves(5, 1)));
    }

    #[test]
    fn what_is_not_a_square_grid_is_refused() {
        let refused = |shape: &[usize], class_token, to| {
            let pos = Tensor { shape: shape.to_vec(), data: vec![0.0; 20] };
            resize_positions(&pos, class_token, to).unwrap_err().to_string()
        };
        assert_eq!(
            refused(&[1, 10, 2], false, 4),
            "the position embedding [1, 10, 2] is for 10 patches, which is not a square grid"
        );
        assert_eq!(
            refused(&[1, 10, 2], true, 0),
            "cannot resize the position embedding [1, 10, 2] to a grid of 0x0 patches"
        );
        assert!(refused(&[1, 10, 2], true, 1 << 32).starts_with("cannot resize"));
        assert!(refused(&[1, 1, 20], true, 4).contains("for 0 patches"));
        assert!(refused(&[10, 2], false, 4).ends_with("not [1, tokens, channels]"));
        assert!(refused(&[1, 1 << 60, 0], false, 4).ends_with("not [1, tokens, channels]"));
        assert!(refused(&[1, 1 << 60, 1 << 60], false, 4).ends_with("but holds 20 values"));
    }
}
