//! Attention in windows without tensor cores: f32, and what the other kernels don't support.
//!
//! Legend: T tokens of a window, D head size.

use super::windows::{Parts, Sizes, addresses, gradient_args, stats_bytes};
use crate::action::{Address, Arg, Kernel, Launch, Source, StepContext};

/// Tokens in a piece. A thread has 4×4 scores.
const PIECE: usize = 32;

/// Number of pieces of a window's queries, and of its keys.
pub(super) fn pieces(sizes: &Sizes) -> usize {
    sizes.tokens().div_ceil(PIECE)
}

/// A launch with `held` pieces of a head, as f32, the scores of one pair of pieces, and lengths of rows in shared memory.
fn launch_of(
    cx: &StepContext<'_>,
    sizes: &Sizes,
    name: String,
    grid: [usize; 3],
    held: usize,
    args: Vec<Arg>,
) -> Option<Launch> {
    let stride = (sizes.head.div_ceil(4) | 1) * 4;
    let shared = 4 * (held * PIECE * stride + PIECE * (PIECE + 4) + 2 * PIECE);
    let kernel = Kernel::new(Source::WindowsPlain, name);
    let (block, shared) = ((PIECE * PIECE / 16) as u32, shared as u32);
    let launch = Launch { kernel, grid: grid.map(|n| n as u32), block, shared, args };
    (shared <= cx.facts.shared_per_block).then_some(launch)
}

fn name(which: &str, sizes: &Sizes, element: &str) -> String {
    format!("plain_window_{which}<{}, {PIECE}>", sizes.instance(element))
}

pub(super) fn forward(cx: &StepContext<'_>, sizes: &Sizes, element: &str) -> Option<Launch> {
    let mut args = addresses(&[0, 1, 2, 3, 4].map(|i| cx.input(i)));
    args.extend(addresses(&[cx.output(0), cx.output(1)]));
    args.push(Arg::I32(sizes.heads as i32));
    args.extend(sizes.map_args());
    let grid = [sizes.total * sizes.heads, pieces(sizes), 1];
    launch_of(cx, sizes, name("attention", sizes, element), grid, 3, args)
}

pub(super) fn gradient(
    cx: &StepContext<'_>,
    sizes: &Sizes,
    element: &str,
    parts: &Parts,
) -> Option<Vec<Launch>> {
    let (lse, dout, dqkv) = (cx.input(6), cx.input(7), cx.output(0));
    let stats = [cx.scratch, cx.scratch + stats_bytes(sizes) as Address].map(Arg::Pointer);

    let mut queries = gradient_args(cx);
    queries.extend(addresses(&[lse, dout, dqkv]));
    queries.extend(stats);
    queries.extend(parts.pointers(cx.parts));
    queries.extend([sizes.heads, sizes.total, parts.per].map(|n| Arg::I32(n as i32)));
    queries.extend(sizes.map_args());
    let grid = [sizes.heads, parts.shares, parts.pieces];
    let queries = launch_of(cx, sizes, name("grad_queries", sizes, element), grid, 4, queries)?;

    let mut keys = gradient_args(cx);
    keys.extend(stats);
    keys.extend(addresses(&[dout, dqkv]));
    keys.push(Arg::I32(sizes.heads as i32));
    keys.extend(sizes.map_args());
    let grid = [sizes.total * sizes.heads, parts.pieces, 1];
    Some(vec![queries, launch_of(cx, sizes, name("grad_keys", sizes, element), grid, 4, keys)?])
}

/// Representative instances, each with the compute capability that it needs.
pub fn kernels() -> Vec<(Kernel, u32)> {
    let names = [
        "plain_window_attention<float, 8, 8, 32, 32>",
        "plain_window_grad_queries<float, 8, 8, 32, 32>",
        "plain_window_grad_keys<float, 8, 8, 32, 32>",
        "plain_window_grad_queries<bf16, 3, 5, 10, 32>",
    ];
    names.into_iter().map(|name| (Kernel::new(Source::WindowsPlain, name), 75)).collect()
}
