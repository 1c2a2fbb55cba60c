//! Errors of matmuls by three parts of bf16 against f64, beside those of f32's own.

use super::plain::PackedByVectors;
use super::tests::{Placed, has_bf16, has_tiles, made};
use crate::kernels::testing::noise;
use crate::matmul::{Matrix, blocks};

const SIZES: (usize, usize, usize) = (64, 96, 512);

/// Numbers of a side: at a row and a column, with noise in [-1, 1).
type Numbers = fn(usize, usize, f64) -> f64;

/// Largest and root mean square error of all elements, in units of 2⁻²⁴ · Σ|a·b|.
fn errors(c: &[f32], a: &Placed, b: &Placed) -> (f64, f64) {
    let (m, n, k) = SIZES;
    let (mut most, mut squares) = (0.0f64, 0.0);
    for (i, j) in (0..m).flat_map(|i| (0..n).map(move |j| (i, j))) {
        let terms = || (0..k).map(|x| f64::from(a.number(i, x)) * f64::from(b.number(x, j)));
        let (exact, size) = (terms().sum::<f64>(), terms().map(f64::abs).sum::<f64>());
        let error = (f64::from(c[i * n + j]) - exact).abs() / (size * 2f64.powi(-24));
        assert!(error.is_finite());
        (most, squares) = (most.max(error), squares + error * error);
    }
    (most, (squares / (m * n) as f64).sqrt())
}

fn side(seed: u64, (rows, cols): (usize, usize), numbers: Numbers) -> Placed {
    let noise = noise(seed, rows * cols, 1.0);
    Placed::new((rows, cols), false, |i, j| numbers(i, j, noise[i * cols + j]) as f32)
}

/// By tiles, by the CPU's if it has them.
fn by_tiles(a: &Placed, b: &Placed) -> Vec<f32> {
    let (m, n, _) = SIZES;
    let c = Placed::new((m, n), false, |_, _| 0.0);
    let make = if has_tiles() { made::<super::Amx> } else { made::<PackedByVectors> };
    let data = make(SIZES, &c, a, b, false);
    data.chunks_exact(n + 5).flat_map(|row| row[..n].to_vec()).collect()
}

/// By AVX-512 in f32.
fn by_vectors(a: &Placed, b: &Placed) -> Vec<f32> {
    let (m, n, _) = SIZES;
    let mut c = vec![0.0; m * n];
    // SAFETY: three arrays that hold as much, on a CPU with AVX-512.
    unsafe {
        let to = Matrix::rows(c.as_mut_ptr(), n);
        blocks::matmul(SIZES, to, a.matrix(), b.matrix(), false, None);
    }
    c
}

/// One multiply-add after the other.
fn by_a_loop(a: &Placed, b: &Placed) -> Vec<f32> {
    let (m, n, k) = SIZES;
    let element =
        |i: usize, j: usize| (0..k).fold(0.0f32, |sum, x| a.number(i, x).mul_add(b.number(x, j), sum));
    (0..m).flat_map(|i| (0..n).map(move |j| element(i, j))).collect()
}

/// 2 to the power of a whole number within ±`range`, by a hash of the place.
fn scale(i: usize, j: usize, range: usize) -> f64 {
    let hash = ((i * 0x9e37 + j * 0x79b9 + 0x7f4a) * 0x1ce4_e5b9) >> 13;
    2f64.powi((hash % (2 * range + 1)) as i32 - range as i32)
}

/// The error is that of f32 for numbers of any size, however much of their sum cancels.
#[test]
fn as_exact_as_f32() {
    if !has_bf16() {
        return eprintln!("not run: no AVX-512 BF16");
    }
    // The second half of a row of a is the first, turned round but for the last bits, and b repeats.
    let cancels: Numbers = |i, j, x| {
        let half = (((i * 37 + j % 256 * 101) % 1009) as f64 / 500.0 - 1.0) as f32;
        f64::from(half) * if j < 256 { 1.0 } else { -1.0 } + x * 1e-6
    };
    let repeats: Numbers = |i, j, _| ((i % 256 * 53 + j * 29) % 997) as f64 / 500.0 - 1.0;
    let cases: [(&str, Numbers, Numbers); 6] = [
        ("random", |_, _, x| x, |_, _, x| x),
        ("of one sign", |_, _, x| x.abs(), |_, _, x| 1.0 + x),
        ("of any size", |i, j, x| x * scale(i, j, 20), |i, j, x| x * scale(j, i, 20)),
        ("rows and columns of any size", |i, _, x| x * scale(i, 0, 50), |_, j, x| x * scale(j, 1, 50)),
        ("sums that cancel", cancels, repeats),
        (
            "many of one bit more than bf16",
            |_, _, x| if x < 0.0 { 1.0 + 2f64.powi(-8) } else { -1.0 },
            |_, _, x| {
                if x < 0.1 { 1.0 - 2f64.powi(-9) } else { 1.0 + 2f64.powi(-16) }
            },
        ),
    ];
    let (m, n, k) = SIZES;
    println!("errors in 2⁻²⁴ Σ|ab|, largest and root mean square: tiles, vectors, a loop");
    for (name, left, right) in cases {
        let (a, b) = (side(1, (m, k), left), side(2, (k, n), right));
        let [tiles, vectors, plain] =
            [by_tiles(&a, &b), by_vectors(&a, &b), by_a_loop(&a, &b)].map(|c| errors(&c, &a, &b));
        println!(
            "{name:<32} {:.3} {:.4}   {:.3} {:.4}   {:.3} {:.4}",
            tiles.0, tiles.1, vectors.0, vectors.1, plain.0, plain.1
        );
        assert!(tiles.0 <= 1.0 + vectors.0 && tiles.1 <= 1.05 * vectors.1 + 0.01, "{name}");
    }
}

/// What f32 can't hold makes what it makes of it there: something that is not finite, in the same elements.
#[test]
fn what_is_not_finite_stays_so() {
    if !has_bf16() {
        return eprintln!("not run: no AVX-512 BF16");
    }
    let (m, n, k) = SIZES;
    let (mut a, b) = (side(1, (m, k), |_, _, x| x), side(2, (k, n), |_, _, x| x));
    let odd = [
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
        f32::from_bits(0x7fff_ffff),
        f32::from_bits(0xff80_0001),
        f32::MAX,
    ];
    for (row, x) in odd.into_iter().enumerate() {
        a.data[3 * row * a.at.0 + 17 * row] = x;
    }
    let c = by_tiles(&a, &b);
    for (i, row) in c.chunks_exact(n).enumerate() {
        let is_odd = i % 3 == 0 && i / 3 < odd.len();
        assert!(row.iter().all(|c| c.is_finite() != is_odd), "row {i}: {row:?}");
    }
}

/// Parts of a number below 2⁻¹²⁶ are zero in tiles, as are sums: numbers lose their last bits below 2⁻¹⁰².
#[test]
fn tiny_numbers_lose_no_more_than_2_to_the_minus_126() {
    if !has_bf16() {
        return eprintln!("not run: no AVX-512 BF16");
    }
    let (m, n, k) = SIZES;
    let tiny = 2f64.powi(-126);
    for exponent in [-90, -100, -105, -110, -120, -126, -130, -149] {
        let noise = noise(1, m * k, 1.0);
        let a = Placed::new((m, k), false, |i, j| (noise[i * k + j] * 2f64.powi(exponent)) as f32);
        let b = side(2, (k, n), |_, _, x| x);
        let c = by_tiles(&a, &b);
        for (i, j) in (0..m).flat_map(|i| (0..n).map(move |j| (i, j))) {
            let terms = || (0..k).map(|x| f64::from(a.number(i, x)) * f64::from(b.number(x, j)));
            let (exact, size) = (terms().sum::<f64>(), terms().map(f64::abs).sum::<f64>());
            let error = (f64::from(c[i * n + j]) - exact).abs();
            let bound = 2.0 * 2f64.powi(-24) * size + (2 * k) as f64 * tiny;
            assert!(error <= bound, "2^{exponent}: {} should be {exact}", c[i * n + j]);
        }
    }
}
