//! Attention of f32 values by tensor cores, whose operands are rounded to tf32: where a run asks for tf32, from Ampere on.
//!
//! Legend: T tokens, D head size; a tile is 16 tokens.

use super::attention::{Sizes, drop_args};
use crate::action::{Arg, Facts, Kernel, Launch, Source, StepContext};
use graph::DType;
use graph::op::AttentionDrop;

/// Tells whether these kernels support such heads. Larger ones don't fit a thread's registers.
pub(super) fn takes(sizes: &Sizes, dtype: DType, tf32: bool, facts: &Facts) -> bool {
    let fits = sizes.head.is_multiple_of(16) && sizes.head <= 80;
    tf32 && dtype == DType::F32 && facts.capability >= (8, 0) && fits
}

/// Tiling of a head: a warp has a tile of one side's tokens, and loops over those of the other.
#[derive(Clone, Copy, Debug, PartialEq)]
struct HeadTiling {
    warps: usize,
    /// Blocks that share a head.
    blocks: usize,
    /// Parts of the other side in shared memory: one that is worked on, and with two another that is fetched.
    stages: usize,
    /// Blocks on a multiprocessor, as the registers allow.
    resident: usize,
    shared: usize,
}

impl HeadTiling {
    fn choose(sizes: &Sizes, backward: bool, facts: &Facts) -> Self {
        // Warps that registers hold, and of those one block's.
        let (all, most) = match (backward, sizes.head) {
            (false, ..=64) => (16, 8),
            (true, ..=64) | (false, _) => (12, 6),
            (true, _) => (8, 4),
        };
        let tiles = sizes.tokens.div_ceil(16);
        let blocks = tiles.div_ceil(most);
        let warps = tiles.div_ceil(blocks);
        // As the kernels' `Parts` cuts the other side.
        let parts = tiles.div_ceil(4).min((tiles + 1) / 4).max(1);
        let last = tiles - (parts - 1) * (tiles / parts);
        let stage = 2 * 16 * last * ((sizes.head / 4) | 1) * 16;
        let resident = all / warps;
        let stages =
            if parts > 1 && resident * (2 * stage + 1024) <= facts.shared_per_block as usize { 2 } else { 1 };
        HeadTiling { warps, blocks, stages, resident, shared: stages * stage }
    }

    fn launch(&self, sizes: &Sizes, kernel: Kernel, args: Vec<Arg>) -> Launch {
        Launch {
            kernel,
            grid: [sizes.total() as u32, self.blocks as u32, 1],
            block: 32 * self.warps as u32,
            shared: self.shared as u32,
            args,
        }
    }

    /// Name of a kernel's instance; `sum` is for backward kernels only.
    fn kernel(&self, which: &str, sizes: &Sizes, drop: bool, sum: Option<bool>) -> Kernel {
        let (Sizes { tokens, head, .. }, HeadTiling { warps, stages, resident, .. }) = (sizes, self);
        let sum = sum.map_or_else(String::new, |sum| format!(", {sum}"));
        Kernel::new(
            Source::AttentionTf32,
            format!("{which}<{tokens}, {head}, {warps}, {stages}, {resident}, {drop}{sum}>"),
        )
    }
}

const FORWARD: &str = "attention_tf32";
const QUERIES: &str = "attention_tf32_grad_queries";
const KEYS: &str = "attention_tf32_grad_keys";

/// Sums over tokens that the backward kernels leave of a sample.
pub(super) fn sums(sizes: &Sizes, facts: &Facts) -> usize {
    HeadTiling::choose(sizes, true, facts).blocks
}

pub(super) fn forward(cx: &StepContext<'_>, sizes: &Sizes, drop: Option<AttentionDrop>) -> Launch {
    let cut = HeadTiling::choose(sizes, false, cx.facts);
    let mut args =
        Vec::from([&cx.inputs[0], &cx.outputs[0], &cx.outputs[1]].map(|o| Arg::Pointer(o.address)));
    args.push(Arg::I32(sizes.heads as i32));
    args.extend(drop_args(cx, drop));
    cut.launch(sizes, cut.kernel(FORWARD, sizes, drop.is_some(), None), args)
}

/// dQ, then dK and dV.
pub(super) fn gradient(
    cx: &StepContext<'_>,
    sizes: &Sizes,
    drop: Option<AttentionDrop>,
    sum: bool,
) -> [Launch; 2] {
    let cut = HeadTiling::choose(sizes, true, cx.facts);
    let [qkv, out, lse, dout] = [0, 1, 2, 3].map(|i| Arg::Pointer(cx.input(i).address));
    let (dqkv, heads) = (Arg::Pointer(cx.output(0).address), Arg::I32(sizes.heads as i32));
    let (deltas, sums) = (Arg::Pointer(cx.scratch), Arg::Pointer(cx.parts));
    let launch = |which: &str, args: &[Arg]| {
        let args = args.iter().copied().chain(drop_args(cx, drop)).collect();
        cut.launch(sizes, cut.kernel(which, sizes, drop.is_some(), Some(sum)), args)
    };
    [
        launch(QUERIES, &[qkv, out, lse, dout, dqkv, deltas, sums, heads]),
        launch(KEYS, &[qkv, lse, dout, dqkv, deltas, sums, heads]),
    ]
}

/// Instances that occur on a GPU, each with the least compute capability it needs (80 is 8.0).
pub fn kernels(facts: &Facts) -> Vec<(Kernel, u32)> {
    let mut kernels = Vec::new();
    for (tokens, head, drop) in [
        (65, 64, false),
        (197, 64, false),
        (197, 64, true),
        (197, 32, false),
        (257, 80, true),
        (577, 64, false),
    ] {
        let sizes = Sizes { batch: 1, tokens, heads: 1, head };
        let (forward, backward) =
            (HeadTiling::choose(&sizes, false, facts), HeadTiling::choose(&sizes, true, facts));
        kernels.push((forward.kernel(FORWARD, &sizes, drop, None), 80));
        let gradients = [QUERIES, KEYS].map(|which| (backward.kernel(which, &sizes, drop, Some(true)), 80));
        kernels.extend(gradients);
    }
    kernels
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_memory_suffices_from_ampere_on() {
        for shared_per_block in [166_912, 101_376, 232_448] {
            let facts = Facts { shared_per_block, ..Facts::h200() };
            for head in [16, 32, 48, 64, 80] {
                for tokens in [1, 5, 16, 50, 64, 65, 145, 196, 197, 257, 577, 1025, 4097] {
                    let sizes = Sizes { batch: 3, tokens, heads: 3, head };
                    for backward in [false, true] {
                        let cut = HeadTiling::choose(&sizes, backward, &facts);
                        assert!(cut.shared <= shared_per_block as usize, "{sizes:?} {cut:?}");
                        assert!(
                            16 * cut.warps * cut.blocks >= tokens && cut.resident > 0,
                            "{sizes:?} {cut:?}"
                        );
                        assert!(16 * cut.warps * (cut.blocks - 1) < tokens, "{sizes:?} {cut:?}");
                        // Sums go by way of two rows for each warp.
                        assert!(cut.shared >= 2 * cut.warps * head * 4, "{sizes:?} {cut:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn vit_b_on_an_h200() {
        let sizes = Sizes { batch: 64, tokens: 197, heads: 12, head: 64 };
        let forward = HeadTiling::choose(&sizes, false, &Facts::h200());
        let stage = 2 * 80 * 17 * 16;
        assert_eq!(forward, HeadTiling { warps: 7, blocks: 2, stages: 2, resident: 2, shared: 2 * stage });
        let backward = HeadTiling::choose(&sizes, true, &Facts::h200());
        assert_eq!(backward, HeadTiling { warps: 5, blocks: 3, stages: 2, resident: 2, shared: 2 * stage });
    }

    #[test]
    fn only_tf32_runs_take_them() {
        let sizes = Sizes { batch: 1, tokens: 65, heads: 3, head: 64 };
        let h200 = Facts::h200();
        assert!(takes(&sizes, DType::F32, true, &h200));
        assert!(!takes(&sizes, DType::F32, false, &h200) && !takes(&sizes, DType::Bf16, true, &h200));
        let turing = Facts { capability: (7, 5), ..h200.clone() };
        assert!(!takes(&sizes, DType::F32, true, &turing));
        assert!(!takes(&Sizes { head: 24, ..sizes }, DType::F32, true, &h200));
    }
}
