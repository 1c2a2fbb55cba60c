//! How long attention takes on the GPU, forward and backward, by length and head size. `bench/attention.py` sets PyTorch's beside it.
//!
//!     cargo run --release -p cuda --example attention [-- BATCH,HEADS,TOKENS,HEAD ...]
//!
//! A line of JSON for each: milliseconds of all kernels of a layer, and TFLOP/s (4 and 10 FLOPs per pair of tokens and channel).

#[path = "../../cpu/tests/common/mod.rs"]
mod common;
#[allow(dead_code)]
#[path = "../tests/parity/rig.rs"]
mod rig;

use common::Draft;
use cpu::Which;
use cuda::CudaError;
use graph::{DType, Op};
use rig::{Arithmetic, Gpu};

/// Of ViTs at 224 to 1024 pixels, and lengths beyond.
const SHAPES: [[usize; 4]; 8] = [
    [256, 12, 197, 64],
    [64, 12, 577, 64],
    [16, 16, 1025, 64],
    [8, 12, 4097, 64],
    [2, 12, 16_385, 64],
    [64, 16, 257, 80],
    [32, 16, 257, 88],
    [16, 12, 1025, 128],
];

fn main() {
    let asked: Vec<[usize; 4]> = std::env::args().skip(1).map(|text| shape(&text)).collect();
    for shape in if asked.is_empty() { SHAPES.to_vec() } else { asked } {
        match times(shape) {
            Ok(line) => println!("{line}"),
            Err(error) => eprintln!("{shape:?}: {error}"),
        }
    }
}

fn shape(text: &str) -> [usize; 4] {
    let numbers: Option<Vec<usize>> = text.split(',').map(|number| number.parse().ok()).collect();
    numbers.and_then(|numbers| numbers.try_into().ok()).unwrap_or_else(|| {
        eprintln!("attention: '{text}' is not BATCH,HEADS,TOKENS,HEAD");
        std::process::exit(2)
    })
}

fn times([batch, heads, tokens, head]: [usize; 4]) -> Result<String, CudaError> {
    let mut draft = Draft::new(DType::F32, batch);
    let x = draft.parameter("x", [batch, tokens, 8], 1.0);
    let qkv = draft.linear(x, 3 * heads * head);
    let y = draft.one(Op::Attention { heads, drop: None }, &[qkv]);
    let y = draft.linear(y, 8);
    let graph = draft.finish(y);
    let mut gpu = Gpu::of_graph(&graph, Arithmetic::Bf16)?;
    gpu.fill(Which::Last)?;
    let actions = gpu.executor.profile(cuda::Which::Last, &gpu.header, 20)?;
    let of = |op: &str| 1e3 * actions.iter().filter(|a| a.op == op).map(|a| a.seconds).sum::<f64>();
    let (forward, backward) = (of("attention"), of("attention_grad"));
    let pairs = (batch * heads * tokens * tokens * head) as f64;
    Ok(format!(
        "{{\"shape\": [{batch}, {heads}, {tokens}, {head}], \"forward_ms\": {forward:.4}, \"backward_ms\": {backward:.4}, \
         \"forward_tflops\": {:.0}, \"backward_tflops\": {:.0}}}",
        4.0 * pairs / forward / 1e9,
        10.0 * pairs / backward / 1e9
    ))
}
