//! The backward pass of attention by Hopper's warpgroups where heads are few: `attention_sides.cu`.
//!
//! Legend: T tokens, D head size. A side is 64 keys or queries of a head, a block of threads' own.

use super::attention::{Sizes, Variant, drop_args};
use super::attention_flash::{self, PROCESSORS, map, start, start_kernel, strips};
use super::attention_hopper;
use crate::action::{Address, Arg, Facts, Kernel, Launch, Source, StepContext, c_type};
use graph::DType;

/// Tokens of a side, and of one row of partial column sums: the kernels' `SIDE`.
pub(super) const SIDE: usize = 64;
/// Rows that a warp has of a result.
const STORED: usize = 16;
/// Most pairs of tiles of keys and queries, over all heads.
const MOST_PAIRS: usize = 14_000;

/// Tells whether these kernels are the fastest for such heads.
pub(super) fn takes(sizes: &Sizes, dtype: DType, drop: bool, facts: &Facts) -> bool {
    let resident = !drop && attention_hopper::takes(sizes, dtype, facts);
    attention_flash::takes(sizes, dtype, facts) && are_few(sizes, resident)
}

/// Chosen by measurements on an H200: with more heads, or longer ones, two matmuls more cost more than blocks that wait for each other. Short
/// heads that fit in shared memory are faster there from half a GPU of them on.
fn are_few(sizes: &Sizes, resident: bool) -> bool {
    let pairs = sizes.total() * pieces(sizes) * pieces(sizes);
    sizes.total() <= (if resident { PROCESSORS / 2 } else { PROCESSORS }) && pairs <= MOST_PAIRS
}

/// Rows of partial column sums for a sample.
pub(super) fn pieces(sizes: &Sizes) -> usize {
    sizes.tokens.div_ceil(SIDE)
}

/// Bytes of log-sum-exps, and of rowsum(dO ∘ O).
fn rows_bytes(sizes: &Sizes) -> usize {
    (4 * sizes.total() * pieces(sizes) * SIDE).next_multiple_of(256)
}

/// Bytes of working memory for heads that these kernels may take.
pub(super) fn scratch(sizes: &Sizes, dtype: DType, drop: bool) -> usize {
    if takes(sizes, dtype, drop, &Facts::h200()) { 2 * rows_bytes(sizes) } else { 0 }
}

fn stages(sizes: &Sizes) -> usize {
    if sizes.head <= 64 { 3 } else { 2 }
}

/// Bytes of shared memory, the kernel's `SHARED`.
fn shared(sizes: &Sizes, sum: bool) -> usize {
    let (stages, tile) = (stages(sizes), strips(sizes) * SIDE * 128);
    let sums = if sum { 4 * sizes.head * 4 } else { 0 };
    2 * tile + stages * 2 * tile + stages * 2 * SIDE * 4 + sums + (1 + 2 * stages) * 8
}

/// Blocks on a multiprocessor, as registers allow.
fn resident(sizes: &Sizes, drop: bool) -> usize {
    if sizes.head <= 64 && !drop { 3 } else { 2 }
}

fn kernel(element: &str, sizes: &Sizes, drop: bool, sum: bool) -> Kernel {
    let resident = resident(sizes, drop);
    let tail = ((sizes.tokens - 1) % SIDE + 1).next_multiple_of(16);
    let name = format!("sides_grad<{element}, {}, {tail}, {resident}, {drop}, {sum}>", sizes.head);
    Kernel::new(Source::AttentionSides, name)
}

pub(super) fn gradient(cx: &StepContext<'_>, sizes: &Sizes, variant: Variant<'_>, sum: bool) -> Vec<Launch> {
    let Variant { element, drop } = variant;
    let number = |n: usize| Arg::I32(n as i32);
    let [log_sums, deltas] =
        [0, rows_bytes(sizes)].map(|offset| Arg::Pointer(cx.scratch + offset as Address));
    let mut args = vec![
        map(cx.input(0), sizes, 3 * sizes.heads, SIDE),
        map(cx.input(3), sizes, sizes.heads, SIDE),
        map(cx.output(0), sizes, 3 * sizes.heads, STORED),
    ];
    args.extend([log_sums, deltas, Arg::Pointer(cx.parts), number(sizes.tokens), number(sizes.heads)]);
    args.extend(drop_args(cx, drop));
    let main = Launch {
        kernel: kernel(element, sizes, drop.is_some(), sum),
        grid: [2 * (sizes.total() * pieces(sizes)) as u32, 1, 1],
        block: 128,
        shared: shared(sizes, sum) as u32,
        args,
    };
    vec![start(cx, sizes, (element, SIDE, sum), [log_sums, log_sums, deltas], 0), main]
}

/// Instances that occur on a Hopper GPU, for `sm_90a` only; none for others.
pub fn kernels(facts: &Facts) -> Vec<(Kernel, u32)> {
    let mut kernels = Vec::new();
    for (tokens, head, dtype) in [(577, 64, DType::Bf16), (257, 80, DType::F16), (257, 128, DType::Bf16)] {
        let sizes = Sizes { batch: 1, tokens, heads: 12, head };
        let Some(element) = c_type(dtype).filter(|_| takes(&sizes, dtype, false, facts)) else { continue };
        kernels.push((start_kernel(element, &sizes, SIDE, true), 90));
        kernels.extend([false, true].map(|drop| (kernel(element, &sizes, drop, true), 90)));
    }
    kernels
}

#[cfg(test)]
mod tests {
    use super::*;

    fn takes_heads(batch: usize, heads: usize, tokens: usize, head: usize, drop: bool) -> bool {
        takes(&Sizes { batch, tokens, heads, head }, DType::Bf16, drop, &Facts::h200())
    }

    #[test]
    fn few_heads_are_taken_as_measured() {
        let few = |batch, heads, tokens, head| takes_heads(batch, heads, tokens, head, false);
        assert!([197, 577, 1025, 2049].iter().all(|tokens| few(1, 12, *tokens, 64)));
        assert!(
            [few(8, 12, 577, 64), few(4, 12, 1025, 64), few(8, 16, 257, 80), few(2, 12, 1025, 128)]
                == [true; 4]
        );
        // Long heads, and many.
        assert!(
            [few(1, 12, 4097, 64), few(2, 12, 4097, 64), few(64, 12, 577, 64), few(16, 16, 257, 80)]
                == [false; 4]
        );
        // Short ones that fit in shared memory, but with dropout.
        assert!(few(4, 12, 197, 64) && !few(8, 12, 197, 64) && takes_heads(8, 12, 197, 64, true));
    }

    #[test]
    fn every_block_finds_room() {
        for head in (8..=128).step_by(8) {
            for drop in [false, true] {
                let sizes = Sizes { batch: 1, tokens: 577, heads: 12, head };
                let bytes = resident(&sizes, drop) * (shared(&sizes, true) + 1024);
                assert!(bytes <= 233_472, "{head}: {bytes}");
            }
        }
    }

    #[test]
    fn other_gpus_have_none() {
        assert!(kernels(&Facts { capability: (10, 0), ..Facts::h200() }).is_empty());
        assert_eq!(kernels(&Facts::h200()).len(), 9);
    }
}
