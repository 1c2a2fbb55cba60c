//! How long attention takes on the GPU, forward and backward, by length and head size, and in windows. `bench/attention.py` sets
//! PyTorch's beside it.
//!
//!     cargo run --release -p cuda --example attention [-- SHAPE ...]
//!
//! SHAPE is BATCH,HEADS,TOKENS,HEAD, with `,fp16` for half precision instead of bf16, `,drop` for dropout of a tenth, `,tuned` for
//! what the tuner chooses instead of our kernels; or
//! BATCH,SIDE,WINDOW,HEADS,window for shifted windows of heads of 32 on a square map. With `-`, shapes are read line by line and
//! measured as they come; `again` is the one before. A line of JSON for each: milliseconds of a layer's kernels (each many times
//! in a row, as one graph), those of each kernel, and TFLOP/s (4 and 10 FLOPs per pair of tokens and channel).

#[path = "../../cpu/tests/common/mod.rs"]
mod common;
#[allow(dead_code)]
#[path = "../tests/parity/rig.rs"]
mod rig;

use common::Draft;
use cpu::Which;
use cuda::CudaError;
use graph::op::AttentionDrop;
use graph::{DType, Op, Windows};
use rig::{Arithmetic, Gpu};
use std::io::BufRead;

/// Of ViTs at 224 to 1024 pixels, and lengths beyond.
const SHAPES: [&str; 8] = [
    "256,12,197,64",
    "64,12,577,64",
    "16,16,1025,64",
    "8,12,4097,64",
    "2,12,16385,64",
    "64,16,257,80",
    "32,16,257,88",
    "16,12,1025,128",
];

/// Of which medians are taken.
const RUNS: usize = 3;
/// Seconds of a run, of short kernels: as many in a row as `bench/attention.py` takes of PyTorch's.
const WINDOW: f64 = 0.006;

fn main() {
    let asked: Vec<String> = std::env::args().skip(1).collect();
    let mut case = None;
    let mut measure = |text: &str| {
        let measured = if text == "again" { Ok(()) } else { Case::new(text).map(|new| case = Some(new)) };
        match measured.and_then(|()| case.as_mut().map_or(Ok(String::new()), Case::measure)) {
            Ok(line) => println!("{line}"),
            Err(error) => println!("{{\"shape\": \"{text}\", \"error\": {:?}}}", error.to_string()),
        }
    };
    match asked.first().map(String::as_str) {
        Some("-") => std::io::stdin().lock().lines().map_while(Result::ok).for_each(|line| measure(&line)),
        Some(_) => asked.iter().for_each(|text| measure(text)),
        None => SHAPES.iter().for_each(|text| measure(text)),
    }
}

/// A graph of one attention.
struct Case {
    text: String,
    gpu: Gpu,
    /// Pairs of tokens, times channels.
    pairs: f64,
    warm: bool,
}

impl Case {
    fn new(text: &str) -> Result<Self, CudaError> {
        let Some((shape, words)) = parse(text) else {
            eprintln!("attention: '{text}' is not four numbers above 0, and words");
            std::process::exit(2)
        };
        let has = |word: &str| words.contains(&word);
        let mut draft = Draft::new(DType::F32, shape[0]);
        let (y, pairs) =
            if has("window") { windows(&mut draft, shape) } else { plain(&mut draft, shape, has("drop")) };
        let graph = draft.finish(y);
        let arithmetic = if has("fp16") { Arithmetic::Fp16 } else { Arithmetic::Bf16 };
        let mut gpu =
            if has("tuned") { Gpu::tuned(&graph, arithmetic) } else { Gpu::of_graph(&graph, arithmetic) }?;
        gpu.fill(Which::Last)?;
        Ok(Case { text: text.into(), gpu, pairs: pairs as f64, warm: false })
    }

    /// Milliseconds of the attention's actions, forward and backward: each some times in a row.
    fn measure(&mut self) -> Result<String, CudaError> {
        let mut kernels: Vec<String> = Vec::new();
        let mut totals = [vec![0.0; RUNS], vec![0.0; RUNS]];
        if !std::mem::replace(&mut self.warm, true) {
            self.gpu.executor.profile(cuda::Which::Last, &self.gpu.header, 3)?;
        }
        let actions = self.gpu.executor.profile(cuda::Which::Last, &self.gpu.header, 1)?;
        let mut before = 0;
        for step in actions.chunk_by(|a, b| a.step == b.step) {
            let range = before..before + step.len();
            before = range.end;
            let backward = match step[0].op.as_str() {
                "attention" | "window_attention" => false,
                "attention_grad" | "window_attention_grad" => true,
                _ => continue,
            };
            let seconds: f64 = step.iter().map(|action| action.seconds).sum();
            let asked = (range, ((WINDOW / seconds) as usize).clamp(1, 100), RUNS);
            let times = self.gpu.executor.repeat(cuda::Which::Last, &self.gpu.header, asked)?;
            let names = step.iter().flat_map(|action| action.what.split(" + "));
            let what = names.filter_map(|name| name.split('<').next()).collect::<Vec<_>>().join(" + ");
            kernels.push(format!("{what:?}: {:.4}", 1e3 * median(times.clone())));
            let total = &mut totals[usize::from(backward)];
            total.iter_mut().zip(times).for_each(|(sum, time)| *sum += 1e3 * time);
        }
        let [best_forward, best_backward] =
            totals.each_ref().map(|all| all.iter().copied().fold(f64::INFINITY, f64::min));
        let [forward, backward] = totals.map(median);
        Ok(format!(
            "{{\"shape\": {:?}, \"forward_ms\": {forward:.4}, \"backward_ms\": {backward:.4}, \
             \"best_forward_ms\": {best_forward:.4}, \"best_backward_ms\": {best_backward:.4}, \"forward_tflops\": {:.0}, \
             \"backward_tflops\": {:.0}, \"kernels\": {{{}}}}}",
            self.text,
            4.0 * self.pairs / forward / 1e9,
            10.0 * self.pairs / backward / 1e9,
            kernels.join(", ")
        ))
    }
}

/// Four numbers, and words behind them.
fn parse(text: &str) -> Option<([usize; 4], Vec<&str>)> {
    let parts: Vec<&str> = text.split(',').collect();
    let (numbers, words) = parts.split_at_checked(4)?;
    let numbers: Vec<usize> = numbers.iter().map(|n| n.parse().ok()).collect::<Option<_>>()?;
    let shape: [usize; 4] = numbers.try_into().ok()?;
    let known = words.iter().all(|word| ["fp16", "drop", "window", "tuned"].contains(word));
    (known && !shape.contains(&0)).then(|| (shape, words.to_vec()))
}

fn median(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    all.get(all.len() / 2).copied().unwrap_or(f64::NAN)
}

fn plain(draft: &mut Draft, [batch, heads, tokens, head]: [usize; 4], drop: bool) -> (graph::ValueId, usize) {
    let x = draft.parameter("x", [batch, tokens, 8], 1.0);
    let qkv = draft.linear(x, 3 * heads * head);
    let drop = drop.then(|| AttentionDrop { rate: 0.1, site: draft.site() });
    let y = draft.one(Op::Attention { heads, drop }, &[qkv]);
    (draft.linear(y, 8), batch * heads * tokens * tokens * head)
}

fn windows(draft: &mut Draft, [batch, side, window, heads]: [usize; 4]) -> (graph::ValueId, usize) {
    let windows = Windows { size: [window; 2], shift: [if window < side { window / 2 } else { 0 }; 2] };
    let (tokens, c) = (windows.tokens(), 32 * heads);
    let x = draft.parameter("x", [batch, side, side, 8], 1.0);
    let weight = draft.parameter("weight", [3 * c, 8], 0.25);
    let qkv = draft.one(Op::Linear { bias: false, gelu: false }, &[x, weight]);
    let (q_bias, v_bias) = (draft.parameter("q_bias", [c], 0.5), draft.parameter("v_bias", [c], 0.5));
    let scale = draft.parameter("logit_scale", [heads, 1, 1], 1.5);
    let bias = draft.parameter("bias", [heads, tokens, tokens], 1.0);
    let y = draft.one(Op::WindowAttention { heads, windows }, &[qkv, q_bias, v_bias, scale, bias]);
    let y = draft.linear(y, 8);
    let y = draft.one(Op::Reshape { shape: graph::Shape::from([batch, side * side, 8]) }, &[y]);
    (y, batch * windows.count([side; 2]) * tokens * tokens * c)
}
