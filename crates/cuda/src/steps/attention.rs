//! Attention: choice of kernel and instance, number of warps and shared memory.
//!
//! Legend: B batch, H heads, T tokens, D head size, C = H·D; a tile is 16 tokens.

use super::rows::singles;
use super::{attention_flash, attention_hopper, attention_plain, attention_sides, attention_tf32};
use crate::action::{
    Action, Arg, Attention, AttentionBackward, AttentionForward, Facts, Kernel, Launch, Operand, PartialSum,
    Source, StepContext, c_type,
};
use crate::attention;
use crate::error::CudaError;
use graph::op::AttentionDrop;
use graph::random::drop_threshold;
use graph::{DType, Op, Shape, Type};

/// Blocks with scratch memory when a head's backward is tiled into squares. No GPU has more multiprocessors.
const MAX_BLOCKS: usize = 256;
/// Most tiles of a head whose backward fits any GPU's shared memory in one square.
const ALWAYS_ONE_SQUARE: usize = 4;

/// Attention's element type, as kernels name it, and its dropout.
#[derive(Clone, Copy)]
pub(super) struct Variant<'a> {
    pub(super) element: &'a str,
    pub(super) drop: Option<AttentionDrop>,
}

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

    /// Number of partial sums over tokens that the backward kernels leave: one per sample, or per piece of one.
    fn sums(&self, way: KernelFamily, facts: &Facts) -> usize {
        let of_sample = match way {
            KernelFamily::Resident | KernelFamily::HalfPrecision => 1,
            KernelFamily::Flash => attention_flash::pieces(self),
            KernelFamily::Sides => attention_sides::pieces(self),
            KernelFamily::Tf32 => attention_tf32::sums(self, facts),
            KernelFamily::Plain => attention_plain::pieces(self),
        };
        self.batch * of_sample
    }

    /// Heads of all samples.
    pub(super) fn total(&self) -> usize {
        self.batch * self.heads
    }

    /// Head size padded with zeros, the portable kernels' `WIDE`.
    fn wide(&self) -> usize {
        self.head.next_multiple_of(16)
    }

    /// Bytes of a row of 16-bit elements in shared memory, as `Rows` has them.
    fn row_bytes(&self) -> usize {
        let units = self.wide() / 8;
        16 * if units.is_power_of_two() { units } else { units | 1 }
    }
}

pub fn actions(cx: &StepContext<'_>) -> Result<Vec<Action>, CudaError> {
    let (heads, drop, backward, sum) = match cx.op {
        Op::Attention { heads, drop } => (*heads, *drop, false, false),
        Op::AttentionGrad { heads, drop, sum } => (*heads, *drop, true, *sum),
        _ => return Err(cx.no_kernel()),
    };
    let sizes = Sizes::of(&cx.input(0).shape, heads);
    let dtype = cx.input(0).dtype;
    let Some(element) = c_type(dtype) else { return Err(cx.no_kernel()) };
    let variant = Variant { element, drop };
    let way = KernelFamily::of(&sizes, dtype, cx.tf32, drop.is_some(), backward, cx.facts);
    let one = |launch: Option<Launch>| launch.map(|launch| vec![launch]);
    let launches = match (way, backward) {
        (KernelFamily::Resident, false) => one(attention_hopper::forward(cx, &sizes, element)),
        (KernelFamily::Resident, true) => one(attention_hopper::gradient(cx, &sizes, element, sum)),
        (KernelFamily::Flash, false) => Some(vec![attention_flash::forward(cx, &sizes, variant)]),
        (KernelFamily::Flash, true) => Some(attention_flash::gradient(cx, &sizes, variant, sum)),
        (KernelFamily::Sides, _) => Some(attention_sides::gradient(cx, &sizes, variant, sum)),
        (KernelFamily::HalfPrecision, false) => one(forward(cx, &sizes, variant)),
        (KernelFamily::HalfPrecision, true) => one(gradient(cx, &sizes, variant, sum)),
        (KernelFamily::Tf32, false) => Some(vec![attention_tf32::forward(cx, &sizes, drop)]),
        (KernelFamily::Tf32, true) => Some(attention_tf32::gradient(cx, &sizes, drop, sum).to_vec()),
        (KernelFamily::Plain, false) => one(attention_plain::forward(cx, &sizes, variant)),
        (KernelFamily::Plain, true) => attention_plain::gradient(cx, &sizes, variant, sum),
    };
    let own = launches.ok_or_else(|| unsupported(cx, &sizes))?;
    let mut actions: Vec<Action> = match drop.map_or_else(|| attended(cx, &sizes, backward), |_| None) {
        Some(attended) => {
            let after = sum.then(|| sums_after(cx, &sizes, way, element));
            vec![Action::Attention(Box::new(Attention { attended, own, after }))]
        }
        None => own.into_iter().map(Action::Launch).collect(),
    };
    if sum {
        singles(cx, &cx.outputs[1..])?;
        let (rows, columns) = (sizes.sums(way, cx.facts), sizes.row());
        let (parts, out) = (cx.parts, cx.output(1).address);
        actions.push(Action::Sum(PartialSum { parts, rows, stride: columns, columns, start: None, out }));
    }
    Ok(actions)
}

/// Attention for cuDNN, if it supports such heads within its workspace.
fn attended(cx: &StepContext<'_>, sizes: &Sizes, backward: bool) -> Option<AttentionForward> {
    let Sizes { batch, tokens, heads, head } = *sizes;
    let dtype = cx.input(0).dtype;
    let address = |operand: &Operand| operand.address;
    let [out, log_sums] =
        if backward { [1, 2].map(|i| address(cx.input(i))) } else { [0, 1].map(|i| address(cx.output(i))) };
    let gradient =
        || AttentionBackward { dout: address(cx.input(3)), dqkv: address(cx.output(0)), deltas: cx.scratch };
    let gradient = backward.then(gradient);
    let qkv = address(cx.input(0));
    let attended = AttentionForward { batch, tokens, heads, head, dtype, qkv, out, log_sums, gradient };
    let takes = cx.facts.capability >= (8, 0) && dtype.is_half() && head.is_multiple_of(8) && head <= 128;
    // As measured: where heads fill a Hopper GPU, our backward pass is faster. To find that again would take time and memory.
    let hopeless = backward && cx.facts.capability == (9, 0) && sizes.total() >= cx.facts.processors as usize;
    let fits = attention::workspace(&attended) <= attention::WORKSPACE;
    (takes && fits && !hopeless).then_some(attended)
}

/// Sums over tokens of cuDNN's results, in as many rows as our kernels leave.
fn sums_after(cx: &StepContext<'_>, sizes: &Sizes, way: KernelFamily, element: &str) -> Launch {
    let piece = match way {
        KernelFamily::Flash => attention_flash::BLOCK,
        KernelFamily::Sides => attention_sides::SIDE,
        _ => sizes.tokens,
    };
    let channels = sizes.heads * sizes.head;
    let [dqkv, dout] = [cx.output(0), cx.input(3)].map(|operand| Arg::Pointer(operand.address));
    let mut args = vec![dqkv, dout, Arg::Pointer(cx.parts)];
    args.extend([sizes.tokens, channels, piece].map(|n| Arg::I32(n as i32)));
    Launch {
        kernel: Kernel::new(Source::AttentionSums, format!("attention_sums<{element}>")),
        grid: [sizes.sums(way, cx.facts) as u32, channels.div_ceil(64) as u32, 1],
        block: 256,
        shared: 0,
        args,
    }
}

/// Bytes for the sums over tokens.
pub fn parts(op: &Op, inputs: &[Operand], facts: &Facts) -> usize {
    let Op::AttentionGrad { heads, drop, sum: true } = op else { return 0 };
    let sizes = Sizes::of(&inputs[0].shape, *heads);
    // Whether tf32 is asked for isn't known here, but it has fewer than f32.
    let way = KernelFamily::of(&sizes, inputs[0].dtype, false, drop.is_some(), true, facts);
    4 * sizes.sums(way, facts) * sizes.row()
}

/// Kernels for a head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum KernelFamily {
    /// Half precision by Hopper's warpgroups, a whole head in shared memory.
    Resident,
    /// Half precision by Hopper's warpgroups, any number of tokens.
    Flash,
    /// The same where heads are few, backward only.
    Sides,
    /// Half precision by tensor cores.
    HalfPrecision,
    /// f32, rounded to tf32 for tensor cores.
    Tf32,
    /// Without tensor cores.
    Plain,
}

impl KernelFamily {
    fn of(sizes: &Sizes, dtype: DType, tf32: bool, drop: bool, backward: bool, facts: &Facts) -> Self {
        if backward && attention_sides::takes(sizes, dtype, drop, facts) {
            return KernelFamily::Sides;
        }
        // Forward, few heads are faster in pieces, on more multiprocessors.
        let whole = backward || attention_flash::few(sizes).is_none();
        if !drop && whole && attention_hopper::takes(sizes, dtype, facts) {
            return KernelFamily::Resident;
        }
        if attention_flash::takes(sizes, dtype, facts) {
            return KernelFamily::Flash;
        }
        if attention_tf32::takes(sizes, dtype, tf32, facts) {
            return KernelFamily::Tf32;
        }
        let least = match dtype {
            DType::Bf16 => (8, 0),
            DType::F16 => (7, 5),
            _ => return KernelFamily::Plain,
        };
        let fits = sizes.head.is_multiple_of(8) && sizes.head <= 128;
        if facts.capability >= least && fits { KernelFamily::HalfPrecision } else { KernelFamily::Plain }
    }
}

fn unsupported(cx: &StepContext<'_>, sizes: &Sizes) -> CudaError {
    let (major, minor) = cx.facts.capability;
    let op = format!(
        "{} with {} channels a head and {} tokens on compute capability {major}.{minor}",
        cx.op.name(),
        sizes.head,
        sizes.tokens
    );
    CudaError::NoKernel { layer: cx.layer.to_string(), op, types: cx.input(0).dtype.name().to_string() }
}

/// Last arguments of every kernel: header, site, threshold, factor of kept probabilities.
pub(super) fn drop_args(cx: &StepContext<'_>, drop: Option<AttentionDrop>) -> [Arg; 4] {
    let (site, threshold, scale) = match drop {
        Some(AttentionDrop { rate, site }) => (site, drop_threshold(rate), (1.0 / (1.0 - rate)) as f32),
        None => (0, 0, 1.0),
    };
    [Arg::Pointer(cx.header), Arg::U32(site), Arg::U32(threshold), Arg::F32(scale)]
}

/// Tiling of a head's forward pass.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Forward {
    warps: usize,
    /// Parts of the keys in shared memory at a time, the kernel's `Parts`.
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

fn forward(cx: &StepContext<'_>, sizes: &Sizes, variant: Variant<'_>) -> Option<Launch> {
    let Variant { element, drop } = variant;
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

/// Tiling of a head's backward pass into squares of `warps` by `warps` tiles.
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

    /// Bytes of shared memory, the kernel's `SHARED`.
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
        if self.squares == 1 { 0 } else { blocks * self.squares * self.warps * 16 * sizes.wide() * 4 }
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

fn gradient(cx: &StepContext<'_>, sizes: &Sizes, variant: Variant<'_>, sum: bool) -> Option<Launch> {
    let Variant { element, drop } = variant;
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

/// rowsum(dO ∘ O) for the kernels without tensor cores; for the others dQ in f32, of the heads under way where a head may be cut
/// into squares, of all where any number of tokens is taken. Which GPU it will be isn't known yet.
pub fn scratch(op: &Op, inputs: &[&Type], _outputs: &[&Type]) -> usize {
    let Op::AttentionGrad { heads, drop, .. } = op else { return 0 };
    let sizes = Sizes::of(&inputs[0].shape, *heads);
    let sums = sizes.total() * sizes.tokens * 4;
    // `squares` times `warps` is less than the tiles and one more per square.
    let partial = sizes.total().min(MAX_BLOCKS) * 2 * sizes.tiles() * 16 * sizes.wide() * 4;
    let dtype = inputs[0].dtype;
    let squares = if dtype == DType::F32 || sizes.tiles() <= ALWAYS_ONE_SQUARE { 0 } else { partial };
    let resident = drop.is_none() && attention_hopper::takes(&sizes, dtype, &Facts::h200());
    let sides = attention_sides::scratch(&sizes, dtype, drop.is_some());
    let flash =
        if resident || sides > 0 { 0 } else { attention_flash::scratch(&sizes, dtype, drop.is_some()) };
    sums.max(squares).max(flash).max(sides)
}

/// Instances that occur on a GPU, each with the least compute capability it needs (80 is 8.0).
pub fn kernels(facts: &Facts) -> Vec<(Kernel, u32)> {
    let sums = |element: &str| Kernel::new(Source::AttentionSums, format!("attention_sums<{element}>"));
    let mut kernels = vec![(sums("bf16"), 80), (sums("f16"), 80)];
    for (tokens, head) in [(65, 64), (197, 64), (197, 32), (257, 88), (577, 64), (50, 128)] {
        let sizes = Sizes { batch: 1, tokens, heads: 1, head };
        // Seconds each: the types and dropout in one or two sizes stand for all.
        let (dropped, in_f16) = ([(197, 64), (257, 88)], [(197, 64), (577, 64)]);
        for drop in [false, true].into_iter().filter(|drop| !drop || dropped.contains(&(tokens, head))) {
            let types = [("bf16", 80), ("f16", 75)].into_iter();
            for (element, least) in types.filter(|t| t.0 == "bf16" || in_f16.contains(&(tokens, head))) {
                let forward = Forward::choose(&sizes, facts).map(|cut| cut.kernel(element, &sizes, drop));
                let gradient =
                    Gradient::choose(&sizes, facts).map(|cut| cut.kernel(element, &sizes, drop, true));
                kernels.extend([forward, gradient].into_iter().flatten().map(|kernel| (kernel, least)));
            }
        }
    }
    kernels
}

#[cfg(test)]
#[path = "attention_tests.rs"]
mod tests;
