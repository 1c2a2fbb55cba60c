//! Attention by Hopper's warpgroups: heads of up to 256 tokens, without dropout.
//!
//! Legend: T tokens, D head size; a tile is 64 tokens.

use super::attention::Sizes;
use crate::action::{Arg, Facts, Kernel, Launch, Source, StepContext};
use graph::DType;

/// Tells whether these kernels support such heads.
pub(super) fn takes(sizes: &Sizes, dtype: DType, facts: &Facts) -> bool {
    facts.capability == (9, 0)
        && facts.shared_per_block as usize >= SHARED_PER_BLOCK
        && matches!(dtype, DType::Bf16 | DType::F16)
        && matches!(sizes.head, 32 | 64)
        && sizes.tokens <= 256
}

/// Tiling of a head's forward pass.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Forward {
    /// Warpgroups of a block.
    groups: usize,
    /// Number of parts of the keys. A matmul has up to 128 columns.
    parts: usize,
    /// Blocks on a multiprocessor, as the registers allow.
    resident: usize,
    shared: usize,
}

impl Forward {
    fn choose(sizes: &Sizes) -> Self {
        let columns = sizes.tokens.next_multiple_of(8);
        let parts = if columns <= 128 { 1 } else { 2 };
        let resident = match columns {
            ..=80 => 4,
            81..=208 => 3,
            _ => 2,
        };
        let groups = 1;
        // Keys and values; queries and results of a tile.
        let shared = (2 * sizes.tokens.next_multiple_of(16) + 128 * groups) * 2 * sizes.head;
        Forward { groups, parts, resident, shared }
    }

    fn kernel(&self, element: &str, sizes: &Sizes) -> Kernel {
        let (Sizes { tokens, head, .. }, Forward { groups, parts, resident, .. }) = (sizes, self);
        Kernel::new(
            Source::AttentionHopper,
            format!("attention_hopper<{element}, {tokens}, {head}, {groups}, {parts}, {resident}>"),
        )
    }
}

pub(super) fn forward(cx: &StepContext<'_>, sizes: &Sizes, element: &str) -> Option<Launch> {
    let cut = Forward::choose(sizes);
    let [qkv, out, lse] =
        [&cx.inputs[0], &cx.outputs[0], &cx.outputs[1]].map(|operand| Arg::Pointer(operand.address));
    (cut.shared <= cx.facts.shared_per_block as usize).then(|| Launch {
        kernel: cut.kernel(element, sizes),
        grid: [sizes.total() as u32, 1, 1],
        block: 128 * cut.groups as u32,
        shared: cut.shared as u32,
        args: vec![qkv, out, lse, Arg::I32(sizes.heads as i32)],
    })
}

/// Tiling of a head's backward pass.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Gradient {
    /// Warpgroups of a block.
    groups: usize,
    /// Heads whose keys are in shared memory: with two, the next one's are fetched early.
    stages: usize,
    /// True if keys and values go through registers into matmuls.
    left: bool,
    /// Blocks on a multiprocessor.
    resident: usize,
    shared: usize,
}

impl Gradient {
    fn choose(sizes: &Sizes, limit: usize) -> Option<Self> {
        let cut = |groups, stages, resident| {
            let shared = Self::shared(sizes, stages, limit);
            let fits = resident * (shared + 1024) <= limit + 1024;
            // As measured: with three blocks beside each other registers are dearer than reading keys from shared memory.
            let left = resident < 3;
            fits.then_some(Gradient { groups, stages, left, resident, shared })
        };
        if sizes.tokens <= 128 {
            return cut(1, 1, 3).or_else(|| cut(1, 1, 2)).or_else(|| cut(1, 1, 1));
        }
        // Two sets of keys leave no room for anything else from 209 tokens on.
        if sizes.tokens <= 208 { cut(2, 2, 1) } else { cut(2, 1, 1) }
    }

    /// Bytes of shared memory, the kernel's `SHARED`, which is made for an H200's `limit`.
    fn shared(sizes: &Sizes, stages: usize, limit: usize) -> usize {
        let (rows, columns) = (sizes.tokens.next_multiple_of(16), sizes.tokens.next_multiple_of(8));
        let tail = columns % 64 == 8 && columns > 64;
        let parts = if tail { columns / 64 } else { columns.div_ceil(64) };
        let matrix = rows * 2 * sizes.head;
        let small = if tail { rows * 16 } else { 0 } + 2 * rows * 4;
        let groups = if sizes.tokens <= 128 { 1 } else { 2 };
        let scores = (parts * rows * 128).max((3 * 4 * groups + 1) * sizes.head * 4);
        let whole = (stages + 3) * matrix + scores + small;
        if whole <= limit { whole } else { whole - matrix }
    }

    fn kernel(&self, element: &str, sizes: &Sizes, sum: bool) -> Kernel {
        let Sizes { tokens, head, .. } = sizes;
        let Gradient { groups, stages, left, resident, .. } = self;
        let cut = format!("{groups}, {stages}, {left}, {resident}, {sum}");
        Kernel::new(
            Source::AttentionHopperGrad,
            format!("attention_grad_hopper<{element}, {tokens}, {head}, {cut}>"),
        )
    }
}

/// Shared memory of a block on every GPU of compute capability 9.0, as the kernels have it.
const SHARED_PER_BLOCK: usize = 232_448;

pub(super) fn gradient(cx: &StepContext<'_>, sizes: &Sizes, element: &str, sum: bool) -> Option<Launch> {
    let cut = Gradient::choose(sizes, SHARED_PER_BLOCK)?;
    let mut args = Vec::from([0, 1, 2, 3].map(|i| Arg::Pointer(cx.input(i).address)));
    args.extend([
        Arg::Pointer(cx.output(0).address),
        Arg::Pointer(cx.parts),
        Arg::I32(sizes.total() as i32),
        Arg::I32(sizes.heads as i32),
    ]);
    let blocks = sizes.total().min(cx.facts.processors as usize * cut.resident);
    Some(Launch {
        kernel: cut.kernel(element, sizes, sum),
        grid: [blocks as u32, 1, 1],
        block: 128 * cut.groups as u32,
        shared: cut.shared as u32,
        args,
    })
}

/// Instances that occur on a Hopper GPU, for `sm_90a` only; none for others.
pub fn kernels(facts: &Facts) -> Vec<(Kernel, u32)> {
    let mut kernels = Vec::new();
    for (tokens, head) in [(5, 64), (65, 64), (65, 32), (145, 64), (197, 64), (197, 32), (256, 64)] {
        let sizes = Sizes { batch: 1, tokens, heads: 1, head };
        for (element, dtype) in [("bf16", DType::Bf16), ("f16", DType::F16)] {
            if takes(&sizes, dtype, facts) {
                kernels.push((Forward::choose(&sizes).kernel(element, &sizes), 90));
                let cut = Gradient::choose(&sizes, SHARED_PER_BLOCK);
                kernels.extend(cut.map(|cut| (cut.kernel(element, &sizes, true), 90)));
            }
        }
    }
    kernels
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_head_fits_an_h200() {
        for head in [32, 64] {
            for tokens in 1..=256 {
                let sizes = Sizes { batch: 1, tokens, heads: 1, head };
                let forward = Forward::choose(&sizes);
                assert!(forward.resident * (forward.shared + 1024) <= SHARED_PER_BLOCK + 1024, "{sizes:?}");
                let gradient = Gradient::choose(&sizes, SHARED_PER_BLOCK).unwrap();
                assert!(gradient.shared <= SHARED_PER_BLOCK, "{sizes:?} {gradient:?}");
            }
        }
    }

    #[test]
    fn other_gpus_have_none() {
        assert!(kernels(&Facts { capability: (10, 0), ..Facts::h200() }).is_empty());
        assert_eq!(kernels(&Facts::h200()).len(), 28);
    }
}
