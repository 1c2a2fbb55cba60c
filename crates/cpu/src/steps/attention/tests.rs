//! Attention against plain loops in double precision, for odd lengths and head sizes, with and without dropout.

use super::{Head, Sizes, tiled, untiled};
use crate::kernels::Float;
use crate::kernels::testing::{at_every_level, noise};
use crate::memory::Block;
use crate::steps::random::{mask_row, stream};
use graph::Header;
use graph::op::AttentionDrop;
use graph::random::drop_threshold;

/// Tolerance of single precision, relative to the norm of a tensor: that of the parity tests of every device.
const SINGLE: f64 = 1e-4;
const DOUBLE: f64 = 1e-13;

const HEADER: Header = Header { seed: 5, step: 3, first_sample: 7, learning_rate: 0.0, nominal: 1.0 };

/// Method by which a head is computed.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    Untiled,
    Tiled,
}

/// One sample's input and the gradient of its output, by shape.
struct Case {
    sizes: Sizes,
    drop: Option<AttentionDrop>,
    qkv: Vec<f64>,
    dout: Vec<f64>,
}

/// Output, logarithms of sums, and gradient of the input.
type Results = [Vec<f64>; 3];

impl Case {
    fn new(tokens: usize, head: usize, heads: usize, dropout: bool) -> Self {
        let sizes = Sizes { tokens, channels: heads * head, heads, head };
        let drop = dropout.then_some(AttentionDrop { rate: 0.3, site: 4 });
        let wide = tokens * heads * head;
        Case { sizes, drop, qkv: noise(1, 3 * wide, 1.5), dout: noise(2, wide, 1.0) }
    }

    fn heads(&self) -> impl Iterator<Item = Head<'static>> {
        let (sizes, drop) = (self.sizes, self.drop);
        (0..sizes.heads).map(move |h| Head { header: &HEADER, matmuls_only: false, sizes, b: 0, h, drop })
    }

    fn run<T: Float>(&self, way: Way) -> Results {
        let (forward, backward) = match way {
            Way::Untiled => (untiled::forward_elements(&self.sizes), untiled::backward_elements(&self.sizes)),
            Way::Tiled => (tiled::forward_elements(&self.sizes), tiled::backward_elements(&self.sizes)),
        };
        let (t, c) = (self.sizes.tokens, self.sizes.channels);
        let counts = [3 * t * c, t * c, self.sizes.heads * t, t * c, 3 * t * c, forward.max(backward)];
        let bytes = counts.iter().sum::<usize>() * size_of::<T>();
        let block = Block::new(bytes).unwrap();
        let starts = (0..counts.len()).map(|i| counts[..i].iter().sum::<usize>() * size_of::<T>());
        let views: Vec<_> = starts.zip(counts).map(|(at, n)| block.view::<T>(at, n)).collect();
        let [qkv, out, lse, dout, dqkv, scratch] = views[..] else { unreachable!() };
        let fill = |view: crate::memory::View<T>, values: &[f64]| {
            // SAFETY: nothing else is under way.
            let to = unsafe { view.write() };
            to.iter_mut().zip(values).for_each(|(x, y)| *x = T::from_f64(*y));
        };
        fill(qkv, &self.qkv);
        fill(dout, &self.dout);
        // What a step finds in its scratch is anything.
        fill(scratch, &vec![f64::NAN; scratch.len()]);
        for head in self.heads() {
            // SAFETY: views of one block that don't overlap, one head after the other.
            unsafe {
                match way {
                    Way::Untiled => untiled::forward(&head, qkv, out, lse, scratch.part(0..forward)),
                    Way::Tiled => tiled::forward(&head, qkv, out, lse, scratch.part(0..forward)),
                }
                let inputs = [qkv, out, lse, dout];
                match way {
                    Way::Untiled => untiled::backward(&head, inputs, dqkv, scratch.part(0..backward)),
                    Way::Tiled => tiled::backward(&head, inputs, dqkv, scratch.part(0..backward)),
                }
            }
        }
        // SAFETY: nothing is under way any more.
        [out, lse, dqkv].map(|view| unsafe { view.read() }.iter().map(|x| x.to_f64()).collect())
    }

    /// Reference in plain loops.
    fn reference(&self) -> Results {
        let Sizes { tokens: t, channels: c, head: d, .. } = self.sizes;
        let Case { qkv, dout, .. } = self;
        let mut results = [vec![0.0; t * c], vec![0.0; self.sizes.heads * t], vec![0.0; 3 * t * c]];
        let [out, lses, dqkv] = &mut results;
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        for head in self.heads() {
            let at = |which: usize, token: usize| (3 * token + which) * c + head.h * d;
            let of = |which: usize, token: usize| &qkv[at(which, token)..][..d];
            for i in 0..t {
                let scores: Vec<f64> = (0..t).map(|j| dot(of(0, i), of(1, j)) * self.sizes.scale()).collect();
                let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let lse = max + scores.iter().map(|s| (s - max).exp()).sum::<f64>().ln();
                let mut mask = vec![1.0; t];
                if let Some(AttentionDrop { rate, site }) = self.drop {
                    let (stream, token) = (stream(&HEADER, site, 0), (head.h * t + i) as u32);
                    mask_row(&stream, token, drop_threshold(rate), 1.0 / (1.0 - rate), &mut mask);
                }
                let p: Vec<f64> = scores.iter().map(|s| (s - lse).exp()).collect();
                let (row, o) = (i * c + head.h * d, lses.len() / self.sizes.heads * head.h + i);
                lses[o] = lse;
                for j in 0..t {
                    (0..d).for_each(|x| out[row + x] += p[j] * mask[j] * of(2, j)[x]);
                }
                let dout = &dout[row..][..d];
                let delta = dot(dout, &out[row..][..d]);
                for j in 0..t {
                    let ds = p[j] * (mask[j] * dot(dout, of(2, j)) - delta) * self.sizes.scale();
                    for x in 0..d {
                        dqkv[at(0, i) + x] += ds * of(1, j)[x];
                        dqkv[at(1, j) + x] += ds * of(0, i)[x];
                        dqkv[at(2, j) + x] += p[j] * mask[j] * dout[x];
                    }
                }
            }
        }
        results
    }

    fn check<T: Float>(&self, way: Way, wanted: &Results, tolerance: f64) {
        let found = self.run::<T>(way);
        let Sizes { tokens, head, .. } = self.sizes;
        for (name, (found, wanted)) in ["out", "lse", "dqkv"].iter().zip(found.iter().zip(wanted)) {
            let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
            let off = norm(&mut found.iter().zip(wanted).map(|(a, b)| a - b));
            let error = off / norm(&mut wanted.iter().copied());
            let what = format!("{name} of {tokens} tokens, heads of {head}, {:?}, {way:?}", self.drop);
            assert!(error < tolerance, "{what}: off by {error:.1e}");
        }
    }
}

/// Around borders of vectors, tiles and ranges, each length with some of the head sizes.
#[test]
fn any_length_and_head_size() {
    let lengths = [1, 2, 7, 8, 9, 16, 17, 31, 48, 49, 65, 127, 128, 129, 192, 193, 197];
    for (i, tokens) in lengths.into_iter().enumerate() {
        for head in [8, 16, 24, 40, 64, 72, 80, 88, 104, 112, 128].into_iter().skip(i % 5).step_by(5) {
            let case = Case::new(tokens, head, 1, (i + head / 8) % 2 == 0);
            let wanted = case.reference();
            at_every_level(|_| {
                for way in [Way::Untiled, Way::Tiled] {
                    case.check::<f32>(way, &wanted, SINGLE);
                }
            });
        }
    }
}

#[test]
fn long_and_odd_lengths() {
    for (tokens, head, heads, dropout) in [
        (257, 40, 1, true),
        (362, 16, 1, false),
        (363, 8, 2, true),
        (384, 24, 1, true),
        (385, 8, 2, false),
        (577, 32, 1, true),
        (600, 16, 1, false),
        (1025, 8, 1, false),
    ] {
        let case = Case::new(tokens, head, heads, dropout);
        let way = if case.sizes.is_tiled() { Way::Tiled } else { Way::Untiled };
        assert_eq!(way == Way::Tiled, tokens > 362);
        let wanted = case.reference();
        at_every_level(|_| case.check::<f32>(way, &wanted, SINGLE));
        case.check::<f64>(way, &wanted, DOUBLE);
    }
}

/// Both ways in double precision, where rounding hides nothing.
#[test]
fn both_ways_are_exact_in_double_precision() {
    for tokens in [1, 5, 40, 130, 200, 391] {
        let case = Case::new(tokens, 20, 2, tokens % 2 == 0);
        let wanted = case.reference();
        for way in [Way::Untiled, Way::Tiled] {
            case.check::<f64>(way, &wanted, DOUBLE);
        }
    }
}

/// Scratch has as many rows as there are tokens, and tiles: it grows with neither tokens × tokens, nor a tile with tokens.
#[test]
fn scratch_is_linear_in_tokens() {
    let elements = |tokens: usize| {
        let sizes = Sizes { tokens, channels: 768, heads: 12, head: 64 };
        (sizes.forward_elements(), sizes.backward_elements())
    };
    let tile = |sizes: (usize, usize), tokens: usize| {
        (sizes.0 - tokens * (2 * 64 + 2), sizes.1 - tokens * (3 * 64 + 1))
    };
    let small = tile(elements(400), 400);
    for tokens in [800, 4096, 16_384, 65_536] {
        assert_eq!(tile(elements(tokens), tokens), small, "{tokens} tokens");
    }
}

#[test]
fn a_nan_spoils_its_own_rows_alone() {
    let mut case = Case::new(400, 16, 1, false);
    case.qkv[5 * 48 + 3] = f64::NAN;
    for results in [case.run::<f32>(Way::Tiled), case.run::<f64>(Way::Tiled)] {
        for (token, row) in results[0].chunks_exact(16).enumerate() {
            assert_eq!(row.iter().all(|x| x.is_nan()), token == 5, "token {token}");
            assert_eq!(results[1][token].is_nan(), token == 5);
        }
    }
}
