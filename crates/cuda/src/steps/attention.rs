//! Attention: which instance of which kernel, with how many warps and how much shared memory.
//!
//! Legend: B batch, H heads, T tokens, D head size, C = H·D; a tile is 16 tokens.

use super::rows::singles;
use super::{attention_hopper, attention_tf32};
use crate::action::{Action, Arg, Context, Facts, Kernel, Launch, Operand, PartialSum, Source, c_type};
use crate::error::CudaError;
use graph::op::AttentionDrop;
use graph::random::drop_threshold;
use graph::{DType, Op, Shape, Type};

/// Blocks that have working memory when a head's backward is cut into squares. No GPU has more multiprocessors.
const MAX_BLOCKS: usize = 256;
/// Up to so many tiles, every GPU's shared memory holds the backward of a head in one square.
const ALWAYS_ONE_SQUARE: usize = 4;

#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    pub(super) batch: usize,
    pub(super) tokens: usize,
    pub(super) heads: usize,
    pub(super) head: usize,
}

impl Sizes {
    fn of(qkv: &Shape, heads: usize) -> Self {
        let channels = qkv.0[2] / 3;
        Sizes { batch: qkv.0[0], tokens: qkv.0[1], heads, head: channels / heads }
    }

    fn tiles(&self) -> usize {
        self.tokens.div_ceil(16)
    }

    /// Queries, keys and values of a token.
    fn row(&self) -> usize {
        3 * self.heads * self.head
    }

    /// Of a head, for the kernels without matrix units.
    fn pieces(&self) -> usize {
        self.tokens.div_ceil(PIECE)
    }

    /// Sums over tokens that the backward kernels leave: one for every sample, or for every piece of one.
    fn sums(&self, dtype: DType, tf32: bool, facts: &Facts) -> usize {
        let of_sample = match Way::of(self, dtype, tf32, facts) {
            Way::Halves => 1,
            Way::Tf32 => attention_tf32::sums(self, facts),
            Way::Plain => self.pieces(),
        };
        self.batch * of_sample
    }

    /// Heads of all samples.
    pub(super) fn total(&self) -> usize {
        self.batch * self.heads
    }

    /// Bytes of a row of 16-bit elements in shared memory, as `Rows` has them.
    fn row_bytes(&self) -> usize {
        let units = self.head / 8;
        16 * if units.is_power_of_two() { units } else { units | 1 }
    }
}

pub fn actions(cx: &Context<'_>) -> Result<Vec<Action>, CudaError> {
    let (heads, drop, backward, sum) = match cx.op {
        Op::Attention { heads, drop } => (*heads, *drop, false, false),
        Op::AttentionGrad { heads, drop, sum } => (*heads, *drop, true, *sum),
        _ => return Err(cx.no_kernel()),
    };
    let sizes = Sizes::of(&cx.input(0).shape, heads);
    let dtype = cx.input(0).dtype;
    let Some(element) = c_type(dtype) else { return Err(cx.no_kernel()) };
    let hopper = match (drop, backward) {
        (Some(_), _) => None,
        (None, false) => attention_hopper::forward(cx, &sizes, element),
        (None, true) => attention_hopper::gradient(cx, &sizes, element, sum),
    };
    let launches = match (hopper, Way::of(&sizes, dtype, cx.tf32, cx.facts), backward) {
        (Some(launch), ..) => Some(vec![launch]),
        (None, Way::Halves, false) => forward(cx, &sizes, element, drop).map(|launch| vec![launch]),
        (None, Way::Halves, true) => gradient(cx, &sizes, element, drop, sum).map(|launch| vec![launch]),
        (None, Way::Tf32, false) => Some(vec![attention_tf32::forward(cx, &sizes, drop)]),
        (None, Way::Tf32, true) => Some(attention_tf32::gradient(cx, &sizes, drop, sum).to_vec()),
        (None, Way::Plain, false) => plain_forward(cx, &sizes, element, drop).map(|launch| vec![launch]),
        (None, Way::Plain, true) => plain_gradient(cx, &sizes, element, drop, sum),
    };
    let launches = launches.ok_or_else(|| unsupported(cx, &sizes))?;
    let mut actions: Vec<Action> = launches.into_iter().map(Action::Launch).collect();
    if sum {
        singles(cx, &cx.outputs[1..])?;
        let (rows, columns) = (sizes.sums(dtype, cx.tf32, cx.facts), sizes.row());
        let (parts, out) = (cx.parts, cx.output(1).address);
        actions.push(Action::Sum(PartialSum { parts, rows, stride: columns, columns, start: None, out }));
    }
    Ok(actions)
}

/// Bytes for the sums over tokens.
pub fn parts(op: &Op, inputs: &[Operand], facts: &Facts) -> usize {
    let Op::AttentionGrad { heads, sum: true, .. } = op else { return 0 };
    let sizes = Sizes::of(&inputs[0].shape, *heads);
    // Whether tf32 is asked for isn't known here, but it has fewer than f32.
    4 * sizes.sums(inputs[0].dtype, false, facts) * sizes.row()
}

/// Which kernels take a head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// 16-bit elements, by matrix units.
    Halves,
    /// f32, rounded to tf32 for matrix units.
    Tf32,
    /// Without matrix units.
    Plain,
}

impl Way {
    fn of(sizes: &Sizes, dtype: DType, tf32: bool, facts: &Facts) -> Self {
        if attention_tf32::takes(sizes, dtype, tf32, facts) {
            return Way::Tf32;
        }
        let least = match dtype {
            DType::Bf16 => (8, 0),
            DType::F16 => (7, 5),
            _ => return Way::Plain,
        };
        let fits = sizes.head.is_multiple_of(16) && sizes.head <= 128;
        if facts.capability >= least && fits { Way::Halves } else { Way::Plain }
    }
}

fn unsupported(cx: &Context<'_>, sizes: &Sizes) -> CudaError {
    let (major, minor) = cx.facts.capability;
    let op = format!(
        "{} with {} channels a head and {} tokens on compute capability {major}.{minor}",
        cx.op.name(),
        sizes.head,
        sizes.tokens
    );
    CudaError::NoKernel { layer: cx.layer.to_string(), op, types: cx.input(0).dtype.name().to_string() }
}

/// What every kernel takes last: header, site, threshold, what kept probabilities are multiplied by.
pub(super) fn drop_args(cx: &Context<'_>, drop: Option<AttentionDrop>) -> [Arg; 4] {
    let (site, threshold, scale) = match drop {
        Some(AttentionDrop { rate, site }) => (site, drop_threshold(rate), (1.0 / (1.0 - rate)) as f32),
        None => (0, 0, 1.0),
    };
    [Arg::Pointer(cx.header), Arg::U32(site), Arg::U32(threshold), Arg::F32(scale)]
}

/// How the forward of a head is cut.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Forward {
    warps: usize,
    /// Parts of the keys in shared memory at a time, as the kernel's `Parts` cuts them.
    parts: usize,
    /// Blocks that share the queries of a head.
    shares: usize,
    shared: usize,
}

impl Forward {
    fn choose(sizes: &Sizes, facts: &Facts) -> Option<Self> {
        let tiles = sizes.tiles();
        let count = tiles.div_ceil(4).min((tiles + 1) / 4).max(1);
        let part = tiles / count;
        let last = tiles - (count - 1) * part;
        let bytes = |parts: usize| 2 * 16 * ((parts - 1) * part + last) * sizes.row_bytes();
        let limit = facts.shared_per_block as usize;
        let parts = (1..=count).rev().find(|parts| bytes(*parts) <= limit)?;
        let shared = bytes(parts);
        // As many warps as the registers hold, shared among the blocks that the shared memory holds.
        let resident = match sizes.head {
            ..=64 => 16,
            65..=96 => 12,
            _ => 8,
        };
        let blocks = (limit / (shared + 1024)).max(1);
        let most = if tiles <= 8 { tiles } else { (resident / blocks).clamp(4, 16) };
        let rounds = tiles.div_ceil(most);
        let warps = tiles.div_ceil(rounds);
        let shares = if parts < count { rounds } else { 1 };
        Some(Forward { warps, parts, shares, shared })
    }

    fn kernel(&self, element: &str, sizes: &Sizes, drop: bool) -> Kernel {
        let (Sizes { tokens, head, .. }, Forward { warps, parts, .. }) = (sizes, self);
        Kernel::new(
            Source::Attention,
            format!("attention<{element}, {tokens}, {head}, {warps}, {parts}, {drop}>"),
        )
    }
}

fn forward(cx: &Context<'_>, sizes: &Sizes, element: &str, drop: Option<AttentionDrop>) -> Option<Launch> {
    let cut = Forward::choose(sizes, cx.facts)?;
    let mut args = vec![
        Arg::Pointer(cx.input(0).address),
        Arg::Pointer(cx.output(0).address),
        Arg::Pointer(cx.output(1).address),
        Arg::I32(sizes.heads as i32),
    ];
    args.extend(drop_args(cx, drop));
    Some(Launch {
        kernel: cut.kernel(element, sizes, drop.is_some()),
        grid: [sizes.total() as u32, cut.shares as u32, 1],
        block: 32 * cut.warps as u32,
        shared: cut.shared as u32,
        args,
    })
}

/// How the backward of a head is cut: into squares of `warps` by `warps` tiles.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Gradient {
    warps: usize,
    squares: usize,
    /// Sets of queries in shared memory: one that is computed, and with two another that is fetched.
    stages: usize,
    /// Blocks on a multiprocessor.
    resident: usize,
    shared: usize,
}

impl Gradient {
    fn choose(sizes: &Sizes, facts: &Facts) -> Option<Self> {
        let limit = facts.shared_per_block as usize;
        // A thread holds 3/2·D numbers through the queries, and D/2 more for a moment if there are several squares.
        let (one, several) = match sizes.head {
            ..=32 => (16, 16),
            33..=64 => (16, 12),
            65..=96 => (12, 8),
            _ => (8, 4),
        };
        let tiles = sizes.tiles();
        (1..=tiles).find_map(|squares| {
            let warps = tiles.div_ceil(squares);
            let most = if squares == 1 { one } else { several };
            if warps > most {
                return None;
            }
            // Blocks beside each other hide each other's fetches; one alone hides its own.
            let room = |stages: usize| limit / (Self::shared(sizes, warps, stages) + 1024).min(limit + 1);
            let (stages, resident) = match (room(1), room(2)) {
                (2.., _) if 2 * warps <= most => (1, room(1).min(most / warps)),
                (_, 1..) => (2, 1),
                (1.., _) => (1, 1),
                _ => return None,
            };
            Some(Gradient { warps, squares, stages, resident, shared: Self::shared(sizes, warps, stages) })
        })
    }

    /// As the kernel's `SHARED`.
    fn shared(sizes: &Sizes, warps: usize, stages: usize) -> usize {
        let side = 16 * warps;
        let scores = side * ((side / 8) | 1) * 16;
        let sums = 3 * warps * sizes.head * 4;
        (2 * stages + 1) * side * sizes.row_bytes() + scores.max(sums) + 2 * side * 4
    }

    fn blocks(&self, sizes: &Sizes, facts: &Facts) -> usize {
        let most = if self.squares == 1 { usize::MAX } else { MAX_BLOCKS };
        sizes.total().min(facts.processors as usize * self.resident).min(most)
    }

    #[cfg(test)]
    fn scratch(&self, blocks: usize, sizes: &Sizes) -> usize {
        if self.squares == 1 { 0 } else { blocks * self.squares * self.warps * 16 * sizes.head * 4 }
    }

    fn kernel(&self, element: &str, sizes: &Sizes, drop: bool, sum: bool) -> Kernel {
        let (Sizes { tokens, head, .. }, Gradient { warps, stages, resident, .. }) = (sizes, self);
        let cut = format!("{warps}, {stages}, {resident}");
        Kernel::new(
            Source::Attention,
            format!("attention_grad<{element}, {tokens}, {head}, {cut}, {drop}, {sum}>"),
        )
    }
}

fn gradient(
    cx: &Context<'_>,
    sizes: &Sizes,
    element: &str,
    drop: Option<AttentionDrop>,
    sum: bool,
) -> Option<Launch> {
    let cut = Gradient::choose(sizes, cx.facts)?;
    let mut args = Vec::from([0, 1, 2, 3].map(|i| Arg::Pointer(cx.input(i).address)));
    args.extend([
        Arg::Pointer(cx.output(0).address),
        Arg::Pointer(cx.scratch),
        Arg::Pointer(cx.parts),
        Arg::I32(sizes.total() as i32),
        Arg::I32(sizes.heads as i32),
    ]);
    args.extend(drop_args(cx, drop));
    Some(Launch {
        kernel: cut.kernel(element, sizes, drop.is_some(), sum),
        grid: [cut.blocks(sizes, cx.facts) as u32, 1, 1],
        block: 32 * cut.warps as u32,
        shared: cut.shared as u32,
        args,
    })
}

/// Tokens in a piece of the kernels without matrix units. A thread has 4×4 scores.
const PIECE: usize = 32;

/// `sum` is of backward kernels alone.
fn plain_kernel(which: &str, element: &str, sizes: &Sizes, drop: bool, sum: Option<bool>) -> Kernel {
    let Sizes { tokens, head, .. } = sizes;
    let sum = sum.map_or_else(String::new, |sum| format!(", {sum}"));
    Kernel::new(
        Source::Attention,
        format!("plain_{which}<{element}, {tokens}, {head}, {PIECE}, {drop}{sum}>"),
    )
}

/// A launch with `pieces` pieces of a head, as f32, and the scores of one pair of pieces in shared memory.
fn plain_launch(
    cx: &Context<'_>,
    sizes: &Sizes,
    kernel: Kernel,
    pieces: usize,
    args: Vec<Arg>,
) -> Option<Launch> {
    let stride = (sizes.head.div_ceil(4) | 1) * 4;
    let shared = (4 * PIECE * (pieces * stride + PIECE + 4)) as u32;
    let grid = [sizes.total() as u32, sizes.pieces() as u32, 1];
    let block = (PIECE * PIECE / 16) as u32;
    (shared <= cx.facts.shared_per_block).then_some(Launch { kernel, grid, block, shared, args })
}

fn plain_forward(
    cx: &Context<'_>,
    sizes: &Sizes,
    element: &str,
    drop: Option<AttentionDrop>,
) -> Option<Launch> {
    let kernel = plain_kernel("attention", element, sizes, drop.is_some(), None);
    let mut args =
        Vec::from([&cx.inputs[0], &cx.outputs[0], &cx.outputs[1]].map(|o| Arg::Pointer(o.address)));
    args.push(Arg::I32(sizes.heads as i32));
    args.extend(drop_args(cx, drop));
    plain_launch(cx, sizes, kernel, 3, args)
}

fn plain_gradient(
    cx: &Context<'_>,
    sizes: &Sizes,
    element: &str,
    drop: Option<AttentionDrop>,
    sum: bool,
) -> Option<Vec<Launch>> {
    let [qkv, out, lse, dout] = [0, 1, 2, 3].map(|i| Arg::Pointer(cx.input(i).address));
    let (dqkv, deltas) = (Arg::Pointer(cx.output(0).address), Arg::Pointer(cx.scratch));
    let heads = Arg::I32(sizes.heads as i32);
    let launch = |which: &str, args: &[Arg]| {
        let args = args.iter().copied().chain(drop_args(cx, drop)).collect();
        plain_launch(cx, sizes, plain_kernel(which, element, sizes, drop.is_some(), Some(sum)), 4, args)
    };
    let sums = Arg::Pointer(cx.parts);
    let queries = launch("attention_grad_queries", &[qkv, out, lse, dout, dqkv, deltas, sums, heads])?;
    let keys = launch("attention_grad_keys", &[qkv, lse, dout, dqkv, deltas, sums, heads])?;
    Some(vec![queries, keys])
}

/// rowsum(dO ∘ O) for the kernels without matrix units; for the others dQ of the heads under way, in f32, where a head may
/// be cut into squares. Which GPU it will be isn't known yet.
pub fn scratch(op: &Op, inputs: &[&Type], _outputs: &[&Type]) -> usize {
    let Op::AttentionGrad { heads, .. } = op else { return 0 };
    let sizes = Sizes::of(&inputs[0].shape, *heads);
    let sums = sizes.total() * sizes.tokens * 4;
    // `squares` times `warps` is less than the tiles and one more per square.
    let partial = sizes.total().min(MAX_BLOCKS) * 2 * sizes.tiles() * 16 * sizes.head * 4;
    if inputs[0].dtype == DType::F32 || sizes.tiles() <= ALWAYS_ONE_SQUARE { sums } else { sums.max(partial) }
}

/// The kernels without matrix units.
const PLAIN: [(&str, Option<bool>); 3] =
    [("attention", None), ("attention_grad_queries", Some(true)), ("attention_grad_keys", Some(true))];

/// Instances as they occur on a GPU, each with the least compute capability it needs (80 is 8.0).
pub fn kernels(facts: &Facts) -> Vec<(Kernel, u32)> {
    let mut kernels = Vec::new();
    for (tokens, head) in [(65, 64), (197, 64), (197, 32), (257, 80), (577, 64), (50, 128)] {
        let sizes = Sizes { batch: 1, tokens, heads: 1, head };
        // Seconds each: the types and dropout in one or two sizes stand for all.
        let (dropped, in_f16) = ([(197, 64), (257, 80)], [(197, 64), (577, 64)]);
        for drop in [false, true].into_iter().filter(|drop| !drop || dropped.contains(&(tokens, head))) {
            let types = [("bf16", 80), ("f16", 75)].into_iter();
            for (element, least) in types.filter(|t| t.0 == "bf16" || in_f16.contains(&(tokens, head))) {
                let forward = Forward::choose(&sizes, facts).map(|cut| cut.kernel(element, &sizes, drop));
                let gradient =
                    Gradient::choose(&sizes, facts).map(|cut| cut.kernel(element, &sizes, drop, true));
                kernels.extend([forward, gradient].into_iter().flatten().map(|kernel| (kernel, least)));
            }
            for (which, sum) in PLAIN.into_iter().filter(|_| [65, 197, 257].contains(&tokens)) {
                if tokens == 197 || !drop {
                    kernels.push((plain_kernel(which, "float", &sizes, drop, sum), 75));
                }
            }
        }
    }
    let odd = Sizes { batch: 1, tokens: 17, heads: 1, head: 24 };
    kernels.extend(PLAIN.map(|(which, sum)| (plain_kernel(which, "bf16", &odd, true, sum), 75)));
    kernels
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::action::Operand;

    fn facts(capability: (u32, u32), shared: u32) -> Facts {
        Facts { name: "test".into(), capability, processors: 100, shared_per_block: shared }
    }

    /// Every architecture that is compiled for.
    fn all_facts() -> Vec<Facts> {
        vec![
            facts((7, 5), 65_536),
            facts((8, 0), 166_912),
            facts((8, 6), 101_376),
            facts((8, 9), 101_376),
            Facts::h200(),
            facts((10, 0), 232_448),
            facts((12, 0), 101_376),
        ]
    }

    fn operand(dtype: DType, shape: &[usize]) -> Operand {
        Operand { address: 256, dtype, shape: Shape(shape.to_vec()) }
    }

    const DROP: Option<AttentionDrop> = Some(AttentionDrop { rate: 0.1, site: 3 });

    fn run(facts: &Facts, dtype: DType, sizes: [usize; 4], backward: bool) -> Result<Launch, CudaError> {
        run_with(facts, dtype, sizes, backward, if backward { DROP } else { None })
    }

    fn run_with(
        facts: &Facts,
        dtype: DType,
        [b, t, h, d]: [usize; 4],
        backward: bool,
        drop: Option<AttentionDrop>,
    ) -> Result<Launch, CudaError> {
        let (qkv, out) = (operand(dtype, &[b, t, 3 * h * d]), operand(dtype, &[b, t, h * d]));
        let lse = operand(DType::F32, &[b, h, t]);
        let (op, inputs, outputs) = if backward {
            let inputs = vec![qkv.clone(), out.clone(), lse, out];
            let sums = operand(DType::F32, &[3 * h * d]);
            (Op::AttentionGrad { heads: h, drop, sum: true }, inputs, vec![qkv, sums])
        } else {
            (Op::Attention { heads: h, drop }, vec![qkv], vec![out, lse])
        };
        let (layer, accumulate, tf32) = ("block", false, false);
        let (op, inputs, outputs) = (&op, &inputs[..], &outputs[..]);
        let (scratch, parts, header) = (512, 768, 1024);
        let cx = Context { op, layer, inputs, outputs, scratch, parts, header, accumulate, tf32, facts };
        match actions(&cx)?.remove(0) {
            Action::Launch(launch) => Ok(launch),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn vit_b_on_an_h200() {
        let vit_b = |backward, drop| {
            run_with(&Facts::h200(), DType::Bf16, [256, 197, 12, 64], backward, drop).unwrap()
        };
        let forward = vit_b(false, None);
        assert_eq!(forward.kernel.name, "attention_hopper<bf16, 197, 64, 1, 2, 3>");
        assert_eq!((forward.grid, forward.block, forward.shared), ([3072, 1, 1], 128, (2 * 208 + 128) * 128));
        let backward = vit_b(true, None);
        assert_eq!(backward.kernel.name, "attention_grad_hopper<bf16, 197, 64, 2, 2, true, 1, true>");
        assert_eq!((backward.grid, backward.block, backward.shared), ([132, 1, 1], 256, 217_984));
        // With dropout, as everywhere.
        let forward = vit_b(false, DROP);
        assert_eq!(forward.kernel.name, "attention<bf16, 197, 64, 4, 3, true>");
        assert_eq!((forward.grid, forward.block, forward.shared), ([3072, 1, 1], 128, 2 * 208 * 128));
        let backward = vit_b(true, DROP);
        assert_eq!(backward.kernel.name, "attention_grad<bf16, 197, 64, 13, 2, 1, true, true>");
        assert_eq!((backward.grid, backward.block), ([132, 1, 1], 416));
    }

    #[test]
    fn what_hopper_does_not_take_is_portable() {
        let newer = Facts { capability: (10, 0), ..Facts::h200() };
        for (facts, dtype, tokens, head) in [
            (&Facts::h200(), DType::Bf16, 257, 64),
            (&Facts::h200(), DType::F16, 197, 80),
            (&newer, DType::Bf16, 197, 64),
        ] {
            for backward in [false, true] {
                let launch = run_with(facts, dtype, [2, tokens, 2, head], backward, None).unwrap();
                assert_eq!(launch.kernel.source, Source::Attention, "{}", launch.kernel.name);
            }
        }
    }

    #[test]
    fn shared_memory_and_scratch_suffice_everywhere() {
        for facts in all_facts() {
            for head in (16..=128).step_by(16) {
                for tokens in [1, 5, 16, 50, 64, 65, 145, 196, 197, 257, 577, 1025, 4097] {
                    let sizes = Sizes { batch: 100, tokens, heads: 3, head };
                    let forward = Forward::choose(&sizes, &facts).unwrap();
                    assert!(
                        forward.shared <= facts.shared_per_block as usize,
                        "{facts:?} {sizes:?} {forward:?}"
                    );
                    assert!((1..=16).contains(&forward.warps), "{sizes:?} {forward:?}");
                    let gradient = Gradient::choose(&sizes, &facts).unwrap();
                    assert!(
                        gradient.shared <= facts.shared_per_block as usize,
                        "{facts:?} {sizes:?} {gradient:?}"
                    );
                    assert!(gradient.squares * gradient.warps >= sizes.tiles());
                    let ty = Type { dtype: DType::Bf16, shape: Shape(vec![100, tokens, 9 * head]) };
                    let asked = scratch(&Op::AttentionGrad { heads: 3, drop: None, sum: false }, &[&ty], &[]);
                    let needed = gradient.scratch(gradient.blocks(&sizes, &facts), &sizes);
                    assert!(needed <= asked, "{facts:?} {sizes:?} {gradient:?}: {needed} > {asked}");
                }
            }
        }
    }

    #[test]
    fn what_matrix_units_do_not_take_is_computed_without() {
        let odd = run(&Facts::h200(), DType::Bf16, [2, 33, 2, 24], false).unwrap();
        assert_eq!(odd.kernel.name, "plain_attention<bf16, 33, 24, 32, false>");
        assert_eq!((odd.grid, odd.block), ([4, 2, 1], 64));
        let turing = facts((7, 5), 65_536);
        let old = run(&turing, DType::Bf16, [2, 17, 2, 32], true).unwrap();
        assert_eq!(old.kernel.name, "plain_attention_grad_queries<bf16, 17, 32, 32, true, true>");
        assert!(
            run(&turing, DType::F16, [2, 17, 2, 32], true)
                .unwrap()
                .kernel
                .name
                .starts_with("attention_grad<f16")
        );
        let full = run(&Facts::h200(), DType::F32, [2, 17, 2, 32], false).unwrap();
        assert_eq!(full.kernel.name, "plain_attention<float, 17, 32, 32, false>");
    }

    #[test]
    fn sums_of_every_way_fit_their_memory() {
        for (facts, dtype) in all_facts().iter().zip([DType::F32, DType::Bf16].into_iter().cycle()) {
            for tokens in [1, 5, 64, 65, 197, 257, 577, 1025] {
                let sizes = Sizes { batch: 4, tokens, heads: 3, head: 64 };
                let most = sizes.sums(dtype, false, facts);
                assert!((4..=most).contains(&sizes.sums(dtype, true, facts)), "{sizes:?} {facts:?}");
                let op = Op::AttentionGrad { heads: 3, drop: None, sum: true };
                assert_eq!(parts(&op, &[operand(dtype, &[4, tokens, 576])], facts), 4 * 576 * most);
            }
        }
    }

    #[test]
    fn heads_that_no_kernel_takes_are_named() {
        let error = run(&facts((7, 5), 65_536), DType::F32, [2, 17, 2, 512], false).unwrap_err().to_string();
        assert!(error.contains("block") && error.contains("512 channels a head"), "{error}");
        assert!(error.contains("f32") && error.contains("7.5"), "{error}");
    }

    #[test]
    fn every_instance_is_listed_once() {
        for facts in all_facts() {
            let listed = kernels(&facts);
            let mut names: Vec<_> = listed.iter().map(|(kernel, _)| &kernel.name).collect();
            names.sort();
            names.dedup();
            assert_eq!(names.len(), listed.len());
        }
    }
}
