use super::plain::{ORDER, PackedByVectors, Plain, parts};
use super::*;
use crate::kernels::testing::*;
use crate::kernels::{Level, best};

/// A matrix of m × n in rows or columns that are longer than it needs.
pub struct Placed {
    pub data: Vec<f32>,
    pub at: (usize, usize),
}

impl Placed {
    pub fn new((m, n): (usize, usize), by_columns: bool, numbers: impl Fn(usize, usize) -> f32) -> Self {
        let stride = if by_columns { m } else { n } + 5;
        let at = if by_columns { (1, stride) } else { (stride, 1) };
        let mut data = vec![-7.0; stride * if by_columns { n } else { m }];
        (0..m).for_each(|i| (0..n).for_each(|j| data[i * at.0 + j * at.1] = numbers(i, j)));
        Placed { data, at }
    }

    fn noise(seed: u64, (m, n): (usize, usize), by_columns: bool) -> Self {
        let numbers = narrow(&noise(seed, m * n, 1.0));
        Placed::new((m, n), by_columns, |i, j| numbers[i * n + j])
    }

    pub fn matrix(&self) -> Matrix<f32> {
        Matrix { ptr: self.data.as_ptr().cast_mut(), row_stride: self.at.0, col_stride: self.at.1 }
    }

    pub fn number(&self, i: usize, j: usize) -> f32 {
        self.data[i * self.at.0 + j * self.at.1]
    }
}

/// c + a·b or a·b, with what lies between the rows of c.
pub fn made<E: Engine>(
    (m, n, k): (usize, usize, usize),
    c: &Placed,
    a: &Placed,
    b: &Placed,
    add: bool,
) -> Vec<f32> {
    let mut data = c.data.clone();
    let to = Matrix { ptr: data.as_mut_ptr(), ..c.matrix() };
    // SAFETY: three arrays that hold as much; engines that the CPU has.
    unsafe { matmul::<E>((m, n, k), to, a.matrix(), b.matrix(), add) };
    data
}

pub fn has_bf16() -> bool {
    is_x86_feature_detected!("avx512bf16") && is_x86_feature_detected!("avx512dq")
}

pub fn has_tiles() -> bool {
    best(Level::Amx) == Level::Amx
}

/// In and beside whole tiles, blocks, steps, ranges of k, and rows that are packed.
const SIZES: [(usize, usize, usize); 13] = [
    (32, 32, 32),
    (1, 1, 1),
    (16, 48, 64),
    (17, 33, 65),
    (48, 16, 31),
    (70, 45, 200),
    (33, 200, 33),
    (15, 20, 650),
    (300, 10, 600),
    (600, 10, 40),
    (50, 66, 128),
    (31, 15, 96),
    (80, 80, 160),
];

fn each_case(mut check: impl FnMut(&str, (usize, usize, usize), [&Placed; 3], bool)) {
    for (m, n, k) in SIZES {
        for flags in 0..8 {
            let (a, b) = (Placed::noise(1, (m, k), flags & 1 > 0), Placed::noise(2, (k, n), flags & 2 > 0));
            let c = Placed::noise(3, (m, n), false);
            let name = format!("{m}×{n}×{k}, flags {flags}");
            check(&name, (m, n, k), [&c, &a, &b], flags & 4 > 0);
        }
    }
}

/// The numbers of an element as they are defined, without packing, blocks and cuts.
fn element(c: f32, a: &[f32], b: &[f32]) -> f32 {
    let mut sum = c;
    for (a, b) in a.chunks(STEP).zip(b.chunks(STEP)) {
        let part = |x: &[f32], k: usize, part: usize| {
            f32::from_bits(u32::from(x.get(k).map_or(0, |x| parts(*x)[part])) << 16)
        };
        for (left, right) in ORDER {
            let sums = [0, TILE].map(|half| {
                let terms = (half..half + TILE).map(|k| part(a, k, left) * part(b, k, right));
                terms.fold(0.0, |sum: f32, x| sum + x)
            });
            sum += sums[0] + sums[1];
        }
    }
    sum
}

#[test]
fn elements_are_what_they_are_defined_as() {
    each_case(|name, (m, n, k), [c, a, b], add| {
        let got = made::<Plain>((m, n, k), c, a, b, add);
        let mut want = c.data.clone();
        for (i, j) in (0..m).flat_map(|i| (0..n).map(move |j| (i, j))) {
            let (row, col): (Vec<_>, Vec<_>) = (0..k).map(|x| (a.number(i, x), b.number(x, j))).unzip();
            want[i * c.at.0 + j] = element(if add { c.number(i, j) } else { 0.0 }, &row, &col);
        }
        assert!(got == want, "{name}");
    });
}

#[test]
fn packing_by_vectors_changes_nothing() {
    if !has_bf16() {
        return eprintln!("not run: no AVX-512 BF16");
    }
    each_case(|name, sizes, [c, a, b], add| {
        assert!(made::<PackedByVectors>(sizes, c, a, b, add) == made::<Plain>(sizes, c, a, b, add), "{name}");
    });
}

#[test]
fn tiles_make_the_numbers_of_plain_loops() {
    if !has_tiles() {
        return eprintln!("not run: no AMX");
    }
    each_case(|name, sizes, [c, a, b], add| {
        assert!(made::<Amx>(sizes, c, a, b, add) == made::<Plain>(sizes, c, a, b, add), "{name}");
    });
}
