//! Attention without tensor cores: f32, and what the other kernels don't support.
//!
//! Legend: T tokens, D head size.

use super::attention::{Sizes, Variant, drop_args};
use crate::action::{Arg, Kernel, Launch, Source, StepContext};

/// Tokens in a piece. A thread has 4×4 scores.
const PIECE: usize = 32;

/// Number of pieces of a head.
pub(super) fn pieces(sizes: &Sizes) -> usize {
    sizes.tokens.div_ceil(PIECE)
}

/// Name of a kernel's instance; `sum` is for backward kernels only.
fn kernel(which: &str, element: &str, sizes: &Sizes, drop: bool, sum: Option<bool>) -> Kernel {
    let Sizes { tokens, head, .. } = sizes;
    let sum = sum.map_or_else(String::new, |sum| format!(", {sum}"));
    Kernel::new(
        Source::AttentionPlain,
        format!("plain_{which}<{element}, {tokens}, {head}, {PIECE}, {drop}{sum}>"),
    )
}

/// A launch with `held` pieces of a head, as f32, and the scores of one pair of pieces in shared memory.
fn launch_of(
    cx: &StepContext<'_>,
    sizes: &Sizes,
    kernel: Kernel,
    held: usize,
    args: Vec<Arg>,
) -> Option<Launch> {
    let stride = (sizes.head.div_ceil(4) | 1) * 4;
    let shared = (4 * PIECE * (held * stride + PIECE + 4)) as u32;
    let grid = [sizes.total() as u32, pieces(sizes) as u32, 1];
    let block = (PIECE * PIECE / 16) as u32;
    (shared <= cx.facts.shared_per_block).then_some(Launch { kernel, grid, block, shared, args })
}

pub(super) fn forward(cx: &StepContext<'_>, sizes: &Sizes, variant: Variant<'_>) -> Option<Launch> {
    let Variant { element, drop } = variant;
    let kernel = kernel("attention", element, sizes, drop.is_some(), None);
    let mut args =
        Vec::from([&cx.inputs[0], &cx.outputs[0], &cx.outputs[1]].map(|o| Arg::Pointer(o.address)));
    args.push(Arg::I32(sizes.heads as i32));
    args.extend(drop_args(cx, drop));
    launch_of(cx, sizes, kernel, 3, args)
}

pub(super) fn gradient(
    cx: &StepContext<'_>,
    sizes: &Sizes,
    variant: Variant<'_>,
    sum: bool,
) -> Option<Vec<Launch>> {
    let Variant { element, drop } = variant;
    let [qkv, out, lse, dout] = [0, 1, 2, 3].map(|i| Arg::Pointer(cx.input(i).address));
    let (dqkv, deltas) = (Arg::Pointer(cx.output(0).address), Arg::Pointer(cx.scratch));
    let heads = Arg::I32(sizes.heads as i32);
    let launch = |which: &str, args: &[Arg]| {
        let args = args.iter().copied().chain(drop_args(cx, drop)).collect();
        launch_of(cx, sizes, kernel(which, element, sizes, drop.is_some(), Some(sum)), 4, args)
    };
    let sums = Arg::Pointer(cx.parts);
    let queries = launch("attention_grad_queries", &[qkv, out, lse, dout, dqkv, deltas, sums, heads])?;
    let keys = launch("attention_grad_keys", &[qkv, lse, dout, dqkv, deltas, sums, heads])?;
    Some(vec![queries, keys])
}

const KERNELS: [(&str, Option<bool>); 3] =
    [("attention", None), ("attention_grad_queries", Some(true)), ("attention_grad_keys", Some(true))];

/// Representative instances, each with the compute capability that it needs.
pub fn kernels() -> Vec<(Kernel, u32)> {
    let sizes = |tokens, head| Sizes { batch: 1, tokens, heads: 1, head };
    let mut kernels = Vec::new();
    for (element, tokens, head, drop) in [
        ("float", 65, 64, false),
        ("float", 197, 64, false),
        ("float", 197, 64, true),
        ("float", 257, 80, false),
        ("bf16", 17, 20, true),
    ] {
        kernels.extend(
            KERNELS.map(|(which, sum)| (kernel(which, element, &sizes(tokens, head), drop, sum), 75)),
        );
    }
    kernels
}
