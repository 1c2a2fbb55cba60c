//! Attention in shifted windows: choice of kernels, distribution of windows over blocks, and memory of the sums over them.
//!
//! Legend: H heads, T tokens of a window, D head size, C = H·D; a tile is 16 tokens. Queries of a window are cut into pieces. A block has
//! one head and one piece of some windows that follow each other; how many depends on the shapes alone.

use super::rows::singles;
use super::windows_plain;
use crate::action::{
    Action, Address, Arg, Facts, Kernel, Launch, Operand, PartialSum, Source, StepContext, c_type,
};
use crate::error::CudaError;
use graph::{DType, Op, Shape, Type, Windows};

/// Blocks of the forward pass: two rounds of what an H200 holds.
const FORWARD_BLOCKS: usize = 1056;
/// Warps of a backward pass on a multiprocessor that its registers hold, for heads of up to 32 channels; for wider ones.
const RESIDENT: (usize, usize) = (12, 8);
/// Multiprocessors that backward passes are cut for.
const PROCESSORS: usize = 132;
/// Bytes of partial sums of the position bias, unless those of one share of the windows are more.
const BIAS_PARTS: usize = 64 << 20;

#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    /// Windows of the batch.
    pub(super) total: usize,
    map: [usize; 2],
    pub(super) heads: usize,
    pub(super) head: usize,
    pub(super) windows: Windows,
}

impl Sizes {
    fn of(qkv: &Shape, heads: usize, windows: Windows) -> Option<Self> {
        let [batch, height, width, channels] = qkv.0[..] else { return None };
        let map = [height, width];
        Some(Sizes { total: batch * windows.count(map), map, heads, head: channels / 3 / heads, windows })
    }

    pub(super) fn tokens(&self) -> usize {
        self.windows.tokens()
    }

    fn channels(&self) -> usize {
        self.heads * self.head
    }

    /// First template arguments of all kernels: element type, rows and columns of a window, head size.
    pub(super) fn instance(&self, element: &str) -> String {
        let [rows, columns] = self.windows.size;
        format!("{element}, {rows}, {columns}, {}", self.head)
    }

    /// Last arguments of all kernels: rows and columns of the map, and its shift.
    pub(super) fn map_args(&self) -> [Arg; 4] {
        let [height, width] = self.map;
        let [down, right] = self.windows.shift;
        [height, width, down, right].map(|n| Arg::I32(n as i32))
    }

    /// Windows of a block, and blocks that share those of the batch, so that there are about `blocks` with `pieces` for each head.
    fn share(&self, blocks: usize, pieces: usize) -> (usize, usize) {
        let per = self.total.div_ceil((blocks / (self.heads * pieces)).clamp(1, self.total.max(1))).max(1);
        (per, self.total.div_ceil(per).max(1))
    }

    fn tiles(&self) -> usize {
        self.tokens().div_ceil(16)
    }

    /// Pieces of the queries, and of the keys, for tensor cores: the kernels' `Squares`.
    fn squares(&self) -> usize {
        self.tiles().div_ceil(4)
    }

    /// Warps of a block, each with a tile.
    fn warps(&self) -> usize {
        self.tiles().div_ceil(self.squares())
    }

    /// Bytes of a piece of 16-bit rows in shared memory, as `Rows` has them.
    fn piece_bytes(&self) -> usize {
        let units = self.head / 8;
        16 * self.warps() * 16 * if units.is_power_of_two() { units } else { units | 1 }
    }
}

pub fn actions(cx: &StepContext<'_>) -> Result<Vec<Action>, CudaError> {
    let (heads, windows, backward) = match *cx.op {
        Op::WindowAttention { heads, windows } => (heads, windows, false),
        Op::WindowAttentionGrad { heads, windows } => (heads, windows, true),
        _ => return Err(cx.no_kernel()),
    };
    let (qkv, parameters) = (cx.input(0), &cx.inputs[1..5]);
    let (Some(sizes), Some(element)) = (Sizes::of(&qkv.shape, heads, windows), c_type(qkv.dtype)) else {
        return Err(cx.no_kernel());
    };
    singles(cx, parameters)?;
    let alike = if backward { vec![cx.input(5), cx.input(7), cx.output(0)] } else { vec![cx.output(0)] };
    if alike.iter().any(|operand| operand.dtype != qkv.dtype) {
        return Err(cx.no_kernel());
    }
    let way = WindowKernels::of(&sizes, qkv.dtype, cx.facts);
    if !backward {
        let launch = match way {
            WindowKernels::HalfPrecision(_) => Some(forward(cx, &sizes, element)),
            WindowKernels::Plain => windows_plain::forward(cx, &sizes, element),
        };
        return Ok(vec![Action::Launch(launch.ok_or_else(|| unsupported(cx, &sizes))?)]);
    }
    singles(cx, &cx.outputs[1..])?;
    let parts = Parts::of(&sizes, way);
    let launches = match way {
        WindowKernels::HalfPrecision(Backward::Square { stages, resident }) => {
            Some(vec![square(cx, &sizes, element, &parts, stages, resident)])
        }
        WindowKernels::HalfPrecision(Backward::Wide) => Some(wide(cx, &sizes, element, &parts)),
        WindowKernels::Plain => windows_plain::gradient(cx, &sizes, element, &parts),
    };
    let launches = launches.ok_or_else(|| unsupported(cx, &sizes))?;
    let sums = parts.sums(cx.parts, &sizes, &cx.outputs[1..]);
    Ok(launches.into_iter().map(Action::Launch).chain(sums.map(Action::Sum)).collect())
}

fn unsupported(cx: &StepContext<'_>, sizes: &Sizes) -> CudaError {
    let ((major, minor), [rows, columns]) = (cx.facts.capability, sizes.windows.size);
    let op = format!(
        "{} with {} channels a head in windows of {rows}×{columns} on compute capability {major}.{minor}",
        cx.op.name(),
        sizes.head
    );
    CudaError::NoKernel { layer: cx.layer.to_string(), op, types: cx.input(0).dtype.name().to_string() }
}

/// Kernels for a head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WindowKernels {
    /// 16-bit elements by tensor cores.
    HalfPrecision(Backward),
    /// Without tensor cores.
    Plain,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Backward {
    /// A window is one square. Stages are windows in shared memory: one that is computed, and with two another that is fetched.
    Square { stages: usize, resident: usize },
    /// A window is several squares.
    Wide,
}

impl WindowKernels {
    fn of(sizes: &Sizes, dtype: DType, facts: &Facts) -> Self {
        let least = match dtype {
            DType::Bf16 => (8, 0),
            DType::F16 => (7, 5),
            _ => return WindowKernels::Plain,
        };
        let fits = sizes.head.is_multiple_of(16) && sizes.head <= 64 && facts.capability >= least;
        let backward =
            if sizes.squares() == 1 { Backward::square(sizes, facts) } else { Backward::wide(sizes, facts) };
        match backward.filter(|_| fits) {
            Some(backward) => WindowKernels::HalfPrecision(backward),
            None => WindowKernels::Plain,
        }
    }
}

impl Backward {
    fn square(sizes: &Sizes, facts: &Facts) -> Option<Self> {
        let limit = facts.shared_per_block as usize;
        let room = |stages: usize| limit / (square_shared(sizes, stages) + 1024).min(limit + 1);
        let warps = if sizes.head <= 32 { RESIDENT.0 } else { RESIDENT.1 };
        let stages = [2, 1].into_iter().find(|stages| room(*stages) > 0)?;
        Some(Backward::Square { stages, resident: room(stages).min(warps / sizes.warps()) })
    }

    fn wide(sizes: &Sizes, facts: &Facts) -> Option<Self> {
        (wide_shared(sizes, 3) <= facts.shared_per_block as usize).then_some(Backward::Wide)
    }
}

/// Bytes of shared memory, the kernel's `SHARED`.
fn square_shared(sizes: &Sizes, stages: usize) -> usize {
    let side = 16 * sizes.warps();
    let scores = side * ((side / 8) | 1) * 16;
    stages * 4 * sizes.piece_bytes() + 2 * scores + side * side * 4 + side * 4
}

/// One piece and all of them, of two matrices each, and so many numbers for each token.
fn wide_shared(sizes: &Sizes, numbers: usize) -> usize {
    let (pieces, side) = (sizes.squares(), 16 * sizes.warps());
    (2 + 2 * pieces) * sizes.piece_bytes() + numbers * pieces * side * 4
}

fn launch(
    source: Source,
    name: String,
    grid: [usize; 3],
    sizes: &Sizes,
    shared: usize,
    args: Vec<Arg>,
) -> Launch {
    let (kernel, grid) = (Kernel::new(source, name), grid.map(|n| n as u32));
    Launch { kernel, grid, block: 32 * sizes.warps() as u32, shared: shared as u32, args }
}

pub(super) fn addresses(operands: &[&Operand]) -> Vec<Arg> {
    operands.iter().map(|operand| Arg::Pointer(operand.address)).collect()
}

fn forward(cx: &StepContext<'_>, sizes: &Sizes, element: &str) -> Launch {
    let pieces = sizes.squares();
    let (per, shares) = sizes.share(FORWARD_BLOCKS, pieces);
    let mut args = addresses(&[0, 1, 2, 3, 4].map(|i| cx.input(i)));
    args.extend(addresses(&[cx.output(0), cx.output(1)]));
    args.extend([sizes.heads, sizes.total, per].map(|n| Arg::I32(n as i32)));
    args.extend(sizes.map_args());
    let shared = 6 * sizes.piece_bytes() + 4 * 16 * sizes.warps();
    let name = format!("window_attention<{}>", sizes.instance(element));
    launch(Source::Windows, name, [sizes.heads, shares, pieces], sizes, shared, args)
}

/// The partial sums of a gradient: those of the position bias (shares, H·T²), and behind them those over tokens
/// (shares·pieces, 2C+H): of both biases, and of the logit scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Parts {
    /// Windows of a block.
    pub(super) per: usize,
    /// Blocks that share the windows.
    pub(super) shares: usize,
    pub(super) pieces: usize,
    bias: usize,
    tokens: usize,
}

impl Parts {
    fn of(sizes: &Sizes, way: WindowKernels) -> Self {
        let (pieces, blocks) = match way {
            WindowKernels::HalfPrecision(Backward::Square { .. }) => {
                (1, PROCESSORS * (RESIDENT.0 / sizes.warps()))
            }
            WindowKernels::HalfPrecision(Backward::Wide) => (sizes.squares(), PROCESSORS * 3),
            WindowKernels::Plain => (windows_plain::pieces(sizes), PROCESSORS * 8),
        };
        let bias = sizes.heads * sizes.tokens() * sizes.tokens();
        let most = (BIAS_PARTS / (4 * bias)).max(1) * sizes.heads * pieces;
        let (per, shares) = sizes.share(blocks.min(most), pieces);
        Parts { per, shares, pieces, bias, tokens: 2 * sizes.channels() + sizes.heads }
    }

    fn bytes(&self) -> usize {
        4 * self.shares * (self.bias + self.pieces * self.tokens)
    }

    /// Offset of the sums over tokens.
    fn behind(&self, parts: Address) -> Address {
        parts + (4 * self.shares * self.bias) as Address
    }

    pub(super) fn pointers(&self, parts: Address) -> [Arg; 2] {
        [Arg::Pointer(parts), Arg::Pointer(self.behind(parts))]
    }

    /// Partial sums of the outputs: biases of queries and values, logit scale, position bias.
    fn sums<'a>(
        &self,
        parts: Address,
        sizes: &Sizes,
        outputs: &'a [Operand],
    ) -> impl Iterator<Item = PartialSum> + use<'a> {
        let (c, behind, own) = (sizes.channels(), self.behind(parts), *self);
        outputs.iter().enumerate().map(move |(i, out)| {
            let (rows, stride, columns) = (own.shares * own.pieces, own.tokens, out.shape.count());
            let (start, out) = (None, out.address);
            match i {
                3 => PartialSum { parts, rows: own.shares, stride: own.bias, columns, start, out },
                _ => PartialSum { parts: behind + (4 * i * c) as Address, rows, stride, columns, start, out },
            }
        })
    }
}

/// Bytes for the partial sums.
pub fn parts(op: &Op, inputs: &[Operand], facts: &Facts) -> usize {
    let Op::WindowAttentionGrad { heads, windows } = op else { return 0 };
    let sizes = Sizes::of(&inputs[0].shape, *heads, *windows);
    sizes.map_or(0, |sizes| Parts::of(&sizes, WindowKernels::of(&sizes, inputs[0].dtype, facts)).bytes())
}

/// Two numbers for every query, which one kernel leaves for the next. Which GPU it will be, and so whether one kernel does it, isn't
/// known yet.
pub fn scratch(op: &Op, inputs: &[&Type]) -> usize {
    let Op::WindowAttentionGrad { heads, windows } = op else { return 0 };
    Sizes::of(&inputs[0].shape, *heads, *windows).map_or(0, |sizes| 2 * stats_bytes(&sizes))
}

/// Bytes of one number per query.
pub(super) fn stats_bytes(sizes: &Sizes) -> usize {
    4 * sizes.total * sizes.heads * sizes.tokens()
}

/// First arguments of all gradient kernels: qkv, bias of queries, logit scale, position bias.
pub(super) fn gradient_args(cx: &StepContext<'_>) -> Vec<Arg> {
    addresses(&[0, 1, 3, 4].map(|i| cx.input(i)))
}

fn square(
    cx: &StepContext<'_>,
    sizes: &Sizes,
    element: &str,
    parts: &Parts,
    stages: usize,
    resident: usize,
) -> Launch {
    let mut args = gradient_args(cx);
    args.extend(addresses(&[cx.input(6), cx.input(7), cx.output(0)]));
    args.extend(parts.pointers(cx.parts));
    args.extend([sizes.heads, sizes.total, parts.per].map(|n| Arg::I32(n as i32)));
    args.extend(sizes.map_args());
    let name = format!("window_attention_grad<{}, {stages}, {resident}>", sizes.instance(element));
    let grid = [sizes.heads, parts.shares, 1];
    launch(Source::WindowsGrad, name, grid, sizes, square_shared(sizes, stages), args)
}

fn wide(cx: &StepContext<'_>, sizes: &Sizes, element: &str, parts: &Parts) -> Vec<Launch> {
    let instance = sizes.instance(element);
    let (lse, dout, dqkv) = (cx.input(6), cx.input(7), cx.output(0));
    let stats = [cx.scratch, cx.scratch + stats_bytes(sizes) as Address].map(Arg::Pointer);
    let shared_by = |per: usize| [sizes.heads, sizes.total, per].map(|n| Arg::I32(n as i32));

    let mut queries = gradient_args(cx);
    queries.extend(addresses(&[lse, dout, dqkv]));
    queries.extend(stats);
    queries.extend(parts.pointers(cx.parts));
    queries.extend(shared_by(parts.per));
    queries.extend(sizes.map_args());

    let (per, shares) = sizes.share(FORWARD_BLOCKS, parts.pieces);
    let mut keys = gradient_args(cx);
    keys.extend(stats);
    keys.extend(addresses(&[dout, dqkv]));
    keys.extend(shared_by(per));
    keys.extend(sizes.map_args());

    let make = |which: &str, shares: usize, numbers: usize, args: Vec<Arg>| {
        let name = format!("window_grad_{which}<{instance}>");
        let grid = [sizes.heads, shares, parts.pieces];
        launch(Source::WindowsWide, name, grid, sizes, wide_shared(sizes, numbers), args)
    };
    vec![make("queries", parts.shares, 1, queries), make("keys", shares, 3, keys)]
}

/// Instances as they occur on a GPU, each with the least compute capability it needs (80 is 8.0). Seconds each, so that a few stand for
/// all.
pub fn kernels(facts: &Facts) -> Vec<(Kernel, u32)> {
    let (element, dtype, least) =
        if facts.capability < (8, 0) { ("f16", DType::F16, 75) } else { ("bf16", DType::Bf16, 80) };
    let mut kernels = Vec::new();
    for (side, head) in [(8, 32), (16, 32)] {
        let windows = Windows { size: [side; 2], shift: [0; 2] };
        let sizes = Sizes { total: 1, map: [side; 2], heads: 1, head, windows };
        let instance = sizes.instance(element);
        kernels.push(Kernel::new(Source::Windows, format!("window_attention<{instance}>")));
        match WindowKernels::of(&sizes, dtype, facts) {
            WindowKernels::HalfPrecision(Backward::Square { stages, resident }) => {
                let name = format!("window_attention_grad<{instance}, {stages}, {resident}>");
                kernels.push(Kernel::new(Source::WindowsGrad, name));
            }
            WindowKernels::HalfPrecision(Backward::Wide) => {
                kernels.extend(["queries", "keys"].map(|which| {
                    Kernel::new(Source::WindowsWide, format!("window_grad_{which}<{instance}>"))
                }))
            }
            WindowKernels::Plain => {}
        }
    }
    kernels.into_iter().map(|kernel| (kernel, least)).collect()
}

#[cfg(test)]
#[path = "windows_tests.rs"]
mod tests;
