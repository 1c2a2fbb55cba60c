//! Attention of all lengths and head sizes, in half precision.

use super::common::Draft;
use super::common::arithmetic::TOLERANCES;
use super::compare::{compare_all, distance_or_nan};
use super::rig::{Arithmetic, Gpu};
use super::{Body, body, reference};
use cuda::{AttentionBy, CudaError};
use graph::op::AttentionDrop;
use graph::{DType, Op, ValueId};

/// One attention over `tokens` after a layer with a bias; behind it a layer whose gradients differ from token to token.
fn one(d: &mut Draft, tokens: usize, head: usize, heads: usize, rate: f64) -> ValueId {
    let width = 3 * head * heads;
    // In bf16, sums over a very wide layer's channels are further off than what is tested here.
    let qkv = if width > 8192 {
        d.parameter("x", [2, tokens, width], 1.0)
    } else {
        let x = d.parameter("x", [2, tokens, 8], 1.0);
        d.linear(x, width)
    };
    let site = d.site();
    let drop = (rate > 0.0).then_some(AttentionDrop { rate, site });
    let y = d.one(Op::Attention { heads, drop }, &[qkv]);
    let y = d.linear(y, 16);
    let y = d.one(Op::Gelu, &[y]);
    d.squeeze(y)
}

/// Several at once: most of a graph's time goes into its start.
fn all(name: &str, cases: Vec<(usize, usize, usize)>, rate: f64) -> (String, Body) {
    let build = move |d: &mut Draft| {
        let mut sum: Option<ValueId> = None;
        for (tokens, head, heads) in &cases {
            let y = one(d, *tokens, *head, *heads, rate);
            sum = Some(sum.map_or(y, |sum| d.one(Op::Add, &[sum, y])));
        }
        sum.unwrap()
    };
    (format!("attention, {name}, drop {rate}"), body(build))
}

/// Every length from `first` to `last`, a few at a time.
fn lengths(first: usize, last: usize, head: usize) -> impl Iterator<Item = (String, Body)> {
    (first..=last).step_by(25).map(move |from| {
        let to = (from + 24).min(last);
        all(&format!("{from} to {to} tokens, D {head}"), (from..=to).map(|t| (t, head, 1)).collect(), 0.0)
    })
}

fn is_half(arithmetic: Arithmetic) -> bool {
    matches!(arithmetic, Arithmetic::Bf16 | Arithmetic::Fp16)
}

#[test]
#[ignore = "needs a GPU"]
fn every_length() {
    let odd = [601, 769, 1000, 1025, 1535, 2049];
    let above = [32, 64, 80, 128].into_iter().flat_map(move |head| {
        odd.map(|tokens| all(&format!("{tokens} tokens, D {head}"), vec![(tokens, head, 1)], 0.0))
    });
    let dropped = [(577, 64), (1025, 64), (769, 80), (1025, 128)]
        .map(|(tokens, head)| all(&format!("{tokens} tokens, D {head}"), vec![(tokens, head, 1)], 0.3));
    compare_all(lengths(1, 600, 80).chain(lengths(257, 600, 64)).chain(above).chain(dropped), is_half);
}

/// Heads that are wholly in shared memory: a kernel of its own for every length.
#[test]
#[ignore = "needs a GPU"]
fn every_length_of_short_heads() {
    compare_all(lengths(1, 256, 64), |arithmetic| arithmetic == Arithmetic::Bf16);
}

#[test]
#[ignore = "needs a GPU"]
fn every_head_size() {
    let sizes = |rate: f64| {
        [65, 200, 321].into_iter().map(move |tokens| {
            let cases = (8..=128).step_by(8).map(|head| (tokens, head, 3)).collect();
            all(&format!("{tokens} tokens, all head sizes"), cases, rate)
        })
    };
    // More heads than twice a GPU's multiprocessors: blocks go from one head to the next. Blocks of keys that share one sum of
    // dQ, or some of several.
    let many = [(50, 16, 200), (65, 8, 320), (129, 8, 150), (50, 72, 150), (65, 72, 150)];
    let many = many.into_iter().chain([(300, 64, 70), (300, 72, 70), (1025, 64, 20), (600, 128, 30)]);
    // A block of threads has whole heads, one or several; the last block of keys short or not. Long heads, in one copy of dQ or
    // several.
    let many = many.chain([(197, 128, 65), (257, 88, 66), (257, 128, 130), (321, 112, 66), (129, 120, 132)]);
    let many = many.chain([(700, 128, 66), (641, 120, 66), (1030, 128, 3), (150, 88, 3)]);
    let many = many.map(|case| all(&format!("{case:?}"), vec![case], 0.0));
    compare_all(sizes(0.0).chain(sizes(0.3)).chain(many), is_half);
}

/// Heads that fill a GPU, around the borders of tiles: blocks have several heads, one after the other, and keys are fetched once a head
/// or for every block of queries.
#[test]
#[ignore = "needs a GPU"]
fn many_heads_around_borders() {
    let whole =
        [(193, 72, 66), (197, 128, 132), (223, 80, 66), (224, 40, 66), (225, 104, 66), (256, 128, 66)];
    let cut = [(192, 72, 66), (197, 80, 80), (128, 128, 70), (127, 96, 70), (64, 112, 140), (257, 112, 66)];
    let long = [(319, 128, 34), (384, 88, 34), (385, 64, 40), (448, 56, 40), (449, 96, 34), (513, 72, 34)];
    let cases =
        whole.into_iter().chain(cut).chain(long).map(|case| all(&format!("{case:?}"), vec![case], 0.0));
    let dropped = [(300, 64, 70), (197, 72, 66), (257, 128, 45)];
    let dropped = dropped.into_iter().map(|case| all(&format!("{case:?}"), vec![case], 0.3));
    compare_all(cases.chain(dropped), is_half);
}

/// Few heads, around the borders of tiles: blocks of one warpgroup or two forward, several copies of dQ backward.
#[test]
#[ignore = "needs a GPU"]
fn few_heads_around_borders() {
    let small =
        [(63, 64, 6), (64, 32, 6), (129, 64, 6), (197, 64, 6), (256, 32, 8), (257, 80, 8), (576, 64, 6)];
    let two = [(577, 72, 10), (640, 64, 12), (961, 128, 6), (1024, 96, 6), (1025, 64, 6), (1025, 128, 6)];
    let cases = small.into_iter().chain(two).map(|case| all(&format!("{case:?}"), vec![case], 0.0));
    let dropped =
        [(197, 64, 6), (641, 128, 8)].into_iter().map(|case| all(&format!("{case:?}"), vec![case], 0.3));
    compare_all(cases.chain(dropped), is_half);
}

/// Whoever makes which pass: sums of exponentials are the same to both.
const MADE: [AttentionBy; 5] = [
    AttentionBy::CUDNN,
    AttentionBy { forward: Some(0), backward: None },
    AttentionBy { forward: None, backward: Some(0) },
    AttentionBy { forward: Some(1), backward: None },
    AttentionBy { forward: None, backward: Some(1) },
];

fn made_by(by: AttentionBy, build: &Body, arithmetic: Arithmetic) -> Result<Gpu, CudaError> {
    let mut gpu = Gpu::of_graph(&build(DType::F32), arithmetic)?;
    gpu.executor.set_attention_by(by);
    Ok(gpu)
}

#[test]
#[ignore = "needs a GPU"]
fn cudnn_agrees() {
    let short = [(1, 8, 3), (50, 16, 4), (65, 72, 3), (197, 64, 12), (257, 80, 2)].to_vec();
    let long = [(577, 64, 12), (321, 104, 3), (1025, 128, 3), (200, 32, 5)].to_vec();
    let mut compared = 0;
    for (name, build) in [all("short", short, 0.0), all("long", long, 0.0)] {
        let want = reference(&build(DType::F64));
        for (arithmetic, tolerance) in TOLERANCES.into_iter().filter(|(a, _)| is_half(*a)) {
            for by in MADE {
                let got = made_by(by, &build, arithmetic).and_then(|mut gpu| gpu.gradients()).unwrap();
                let (error, what) = distance_or_nan(&got, &want);
                println!("{name} in {arithmetic:?}, {by:?}: {error:.1e} of {tolerance:.0e} ({what})");
                assert!(error <= tolerance, "{name} in {arithmetic:?}, {by:?}: {error:e} at {what}");
                compared += 1;
            }
        }
    }
    assert_eq!(compared, 2 * 2 * MADE.len());
}

#[test]
#[ignore = "needs a GPU"]
fn cudnn_repeats() {
    for (tokens, head, heads) in [(197, 64, 12), (577, 64, 12), (1025, 80, 12), (1025, 128, 12)] {
        let (name, build) = all(&format!("{tokens} tokens, D {head}"), vec![(tokens, head, heads)], 0.0);
        for by in MADE {
            let mut gpu = made_by(by, &build, Arithmetic::Bf16).unwrap();
            let first = gpu.gradients().unwrap();
            for _ in 0..7 {
                assert!(first == gpu.gradients().unwrap(), "{name}, {by:?}");
            }
        }
    }
}

/// What was measured to be fastest, from shapes where our kernels are to others.
#[test]
#[ignore = "needs a GPU"]
fn the_fastest_agrees() {
    let (name, build) = all("tuned", [(197, 64, 6), (577, 64, 6), (1025, 128, 6)].to_vec(), 0.0);
    let want = reference(&build(DType::F64));
    for (arithmetic, tolerance) in TOLERANCES.into_iter().filter(|(a, _)| is_half(*a)) {
        let mut gpu = Gpu::tuned(&build(DType::F32), arithmetic).unwrap();
        let (error, what) = distance_or_nan(&gpu.gradients().unwrap(), &want);
        assert!(error <= tolerance, "{name} in {arithmetic:?}: {error:e} at {what}");
        let choices = gpu.executor.choices();
        let chosen: Vec<_> = choices.algorithms.iter().filter(|(key, _)| key.contains("attention")).collect();
        println!("{arithmetic:?}: {chosen:#?}");
        assert_eq!(chosen.len(), 6);
    }
}

/// The same bits in every run, though blocks take turns at sums.
#[test]
#[ignore = "needs a GPU"]
fn sums_over_keys_repeat() {
    for (tokens, head, heads) in [
        (577, 64, 12),
        (2049, 64, 12),
        (1025, 80, 12),
        (1025, 128, 12),
        (577, 64, 70),
        (1025, 128, 70),
        (257, 128, 66),
        (197, 72, 66),
        (321, 112, 66),
    ] {
        for rate in [0.0, 0.1] {
            let (name, build) = all(&format!("{tokens} tokens, D {head}"), vec![(tokens, head, heads)], rate);
            let gradients =
                || Gpu::of_graph(&build(DType::F32), Arithmetic::Bf16).unwrap().gradients().unwrap();
            let first = gradients();
            for _ in 0..3 {
                assert!(first == gradients(), "{name}");
            }
        }
    }
}
