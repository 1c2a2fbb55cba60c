//! Times attention by tokens and head size: `cargo run --release -p cpu --example attention [threads [tokens [head size [rounds]]]]`.
//!
//! For each shape, forward and backward: GFLOP/s, by the processors' time where there is one thread, of the step, of its matmuls
//! alone, and of the `gemm` crate at the same tile shapes (one thread), operands in the cache; the step's rate as a share of
//! `gemm`'s; and the scratch of all threads. All take turns, since a busy machine is another one every second; figures are
//! medians.

use cpu::{Executor, Options, Which};
use graph::build::Linear;
use graph::op::Pooling;
use graph::{
    Builder, DType, Graph, Header, Init, Key, Model, Optimizer, ParamGroup, Settings, Target, compile,
};

const HEADS: usize = 4;

fn main() {
    let number = |i: usize| std::env::args().nth(i).map(|n| n.parse::<usize>().expect("a number"));
    let threads = number(1).unwrap_or(1);
    println!(
        "{threads} threads\n{:>7} {:>5} {:>9}  GFLOP/s: step, its matmuls alone, `gemm` alone, step's share of `gemm`",
        "tokens", "head", "scratch"
    );
    let tokens = number(2).map_or(vec![65, 197, 257, 363, 577, 1025, 2305, 4097], |tokens| vec![tokens]);
    let heads = number(3).map_or(vec![64, 72, 80, 88, 128], |head| vec![head]);
    for &tokens in &tokens {
        for &head in &heads {
            run(threads, tokens, head, number(4).unwrap_or(9));
        }
    }
}

/// Attention over a parameter, and a head that costs nothing.
fn graph(batch: usize, tokens: usize, head: usize, training: bool) -> Graph {
    let mut b = Builder::new(DType::F32, training);
    let targets = b.targets([batch], false);
    let qkv = b.parameter("qkv", [batch, tokens, 3 * HEADS * head], Init::Normal { std: 1.0 });
    let y = b.attention(qkv, HEADS, 0.0);
    let y = b.pool(y, Pooling::Mean);
    let weight = Init::Normal { std: 0.02 };
    let logits = b.linear(y, Linear { name: "head", out: 1, weight, bias: Init::Zeros });
    let (loss, stats) = b.weighted_losses(logits, &[], targets, 0.0);
    b.finish(&[loss, stats, logits]).expect("the graph is sound")
}

fn executor(threads: usize, batch: usize, tokens: usize, head: usize) -> Executor<f32> {
    let target = cpu::Target { threads };
    let settings = Settings {
        group: &|_| ParamGroup { lr_scale: 1.0, decays: false },
        ..Settings::plain(Optimizer::Sgd { momentum: 0.0, nesterov: false, weight_decay: 0.0 }, &target)
    };
    let graph = |training| graph(batch, tokens, head, training);
    let model = Model { train: graph(true), eval: graph(false), key: Key::default() };
    let program = compile(model, &settings).expect("the graph compiles");
    Executor::<f32>::new(program, Options::alone(threads, 1)).expect("it fits")
}

/// Inputs of a plan, which the other one may have written over.
fn fill(executor: &mut Executor<f32>, which: Which) {
    executor.labels(which).expect("labels").fill(0);
    executor.input(which, "weights").expect("weights").fill(1.0);
}

fn run(threads: usize, tokens: usize, head: usize, rounds: usize) {
    let batch = (1024 / tokens).max(1);
    let mut executor = executor(threads, batch, tokens, head);
    let header = Header { seed: 1, step: 0, first_sample: 0, learning_rate: 0.0, nominal: 1.0 };
    let mut tiles = Tiles::new(tokens, head);
    // Seconds of forward and backward: of the steps, of their matmuls alone, and of `gemm` for as many heads.
    let mut samples: [[Vec<f64>; 3]; 2] = Default::default();
    for round in 0..=rounds {
        let mut steps = |which| {
            fill(&mut executor, which);
            seconds(threads, || executor.run(which, &header).expect("it runs"))
        };
        let step = [steps(Which::Eval), steps(Which::Last)];
        let mut matmuls = |which| seconds(threads, || executor.run_matmuls(which, &header));
        let alone = [matmuls(Which::Eval), matmuls(Which::Last)];
        let heads = 0..batch * HEADS;
        let forward = seconds(1, || heads.clone().for_each(|_| tiles.forward()));
        let gemm = [forward, seconds(1, || heads.clone().for_each(|_| tiles.backward()))];
        if round > 0 {
            // The rest of a plan is a few rows.
            for (j, [forward, both]) in [step, alone].into_iter().enumerate() {
                samples[0][j].push(forward);
                samples[1][j].push(both - forward);
            }
            samples.iter_mut().zip(gemm).for_each(|(samples, seconds)| samples[2].push(seconds));
        }
    }
    let flops = (batch * HEADS * tokens * tokens * head) as f64 * 2.0;
    print!("{tokens:>7} {head:>5} {:>6.1} MB", cpu_scratch(threads, batch, tokens, head));
    for ((name, matmuls), samples) in [("forward", 2.0), ("backward", 5.0)].into_iter().zip(&mut samples) {
        let mut median = |i: usize| {
            samples[i].sort_by(f64::total_cmp);
            samples[i][rounds / 2]
        };
        let [step, alone] = [median(0), median(1)].map(|seconds| matmuls * flops / seconds / 1e9);
        let gemm = threads as f64 * matmuls * flops / median(2) / 1e9;
        print!("   {name} {step:>6.1} {alone:>6.1} {gemm:>6.1} {:>4.0}%", 100.0 * step / gemm);
    }
    println!();
}

/// The matmuls of a head by the `gemm` crate, at the tiles that a step has; operands are those of one tile, and so in the cache.
struct Tiles {
    tokens: usize,
    head: usize,
    /// A side of queries or keys, another, a tile of scores, and a result.
    rows: [Vec<f32>; 2],
    scores: Vec<f32>,
    result: Vec<f32>,
}

impl Tiles {
    fn new(tokens: usize, head: usize) -> Self {
        let [forward, backward] = cpu::attention_tiles(tokens);
        let most = [forward.0, forward.1, backward.0, backward.1].into_iter().max().unwrap_or(0);
        let rows = || vec![0.5; most * head];
        Tiles { tokens, head, rows: [rows(), rows()], scores: vec![0.5; most * most], result: rows() }
    }

    /// Runs `task(queries, keys)` for every tile, as many as it has.
    fn each(&mut self, (queries, keys): (usize, usize), task: impl Fn(&mut Self, usize, usize)) {
        let tokens = self.tokens;
        for first in (0..tokens).step_by(keys) {
            for top in (0..tokens).step_by(queries) {
                task(self, queries.min(tokens - top), keys.min(tokens - first));
            }
        }
    }

    fn forward(&mut self) {
        self.each(cpu::attention_tiles(self.tokens)[0], |tiles, queries, keys| {
            tiles.scores(queries, keys);
            tiles.sums(queries, keys);
        });
    }

    fn backward(&mut self) {
        self.each(cpu::attention_tiles(self.tokens)[1], |tiles, queries, keys| {
            tiles.scores(queries, keys);
            tiles.scores(queries, keys);
            tiles.sums(queries, keys);
            tiles.sums_of_keys(queries, keys);
            tiles.sums_of_keys(queries, keys);
        });
    }

    /// (queries, D) · (D, keys), by rows: turned over, `gemm` would be slower.
    fn scores(&mut self, queries: usize, keys: usize) {
        let ([a, b], d) = (&self.rows, self.head);
        gemm((queries, keys, d), (&mut self.scores, keys), (a, d, 1), (b, keys, 1));
    }

    /// (queries, keys) · (keys, D).
    fn sums(&mut self, queries: usize, keys: usize) {
        let ([b, _], d) = (&self.rows, self.head);
        gemm((queries, d, keys), (&mut self.result, d), (&self.scores, keys, 1), (b, d, 1));
    }

    /// (queries, keys)ᵀ · (queries, D).
    fn sums_of_keys(&mut self, queries: usize, keys: usize) {
        let ([b, _], d) = (&self.rows, self.head);
        gemm((keys, d, queries), (&mut self.result, d), (&self.scores, 1, keys), (b, d, 1));
    }
}

/// c (M,N) = a (M,K) · b (K,N); c has rows as long as said, a and b have strides for rows and columns.
fn gemm(
    (m, n, k): (usize, usize, usize),
    c: (&mut [f32], usize),
    a: (&[f32], usize, usize),
    b: (&[f32], usize, usize),
) {
    let last = |rows: usize, cols: usize, x: (&[f32], usize, usize)| (rows - 1) * x.1 + (cols - 1) * x.2;
    assert!(c.0.len() > (m - 1) * c.1 + n - 1 && a.0.len() > last(m, k, a) && b.0.len() > last(k, n, b));
    let stride = |x: usize| x as isize;
    let none = gemm::Parallelism::None;
    // SAFETY: all of them are in bounds by the assertion, and c is apart from the others.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            c.0.as_mut_ptr(),
            1,
            stride(c.1),
            false,
            a.0.as_ptr(),
            stride(a.2),
            stride(a.1),
            b.0.as_ptr(),
            stride(b.2),
            stride(b.1),
            1.0,
            1.0,
            false,
            false,
            false,
            none,
        );
    }
}

/// Megabytes of scratch of the largest step.
fn cpu_scratch(threads: usize, batch: usize, tokens: usize, head: usize) -> f64 {
    let graph = graph(batch, tokens, head, true);
    let target = cpu::Target { threads };
    (0..graph.nodes.len()).map(|node| target.scratch(&graph, node)).max().unwrap_or(0) as f64 / 1e6
}

/// Seconds of a call: those that the thread ran, if it is one.
fn seconds<R>(threads: usize, call: impl FnOnce() -> R) -> f64 {
    let (wall, before) = (std::time::Instant::now(), processor_seconds());
    call();
    if threads == 1 { processor_seconds() - before } else { wall.elapsed().as_secs_f64() }
}

/// Of this thread so far.
fn processor_seconds() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the struct is ours.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}
