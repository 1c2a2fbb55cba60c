//! Ops that move rows between images, patches and tokens.
//!
//! Legend: B batch, N patches, T tokens, C channels. A sample's tokens are one line of T·C elements.

use super::rows::{THREADS, launch, pointer, singles, typed};
use crate::action::{Action, Arg, Context, Kernel, Operand, Source};
use crate::error::CudaError;
use graph::op::Pooling;
use graph::{Op, Shape, Type};

/// Vectors that a thread cuts out of an image.
const VECTORS: usize = 4;
/// Blocks that embed a batch: eight for each processor of an H200.
const EMBED_BLOCKS: usize = 1056;
/// Parts of a batch at most; their sums are added by single threads.
const EMBED_PARTS: usize = 16;
/// Samples that a thread reads at once, so the fewest that are worth a part.
const EMBED_SAMPLES: usize = 4;

pub fn actions(cx: &Context<'_>) -> Result<Vec<Action>, CudaError> {
    match *cx.op {
        Op::Patches { patch } => patches(cx, "patches", cx.input(0), patch),
        Op::Unpatches { patch, .. } => patches(cx, "unpatches", cx.output(0), patch),
        Op::Embed { class_token } => embed(cx, class_token),
        Op::EmbedGrad { class_token } => embed_grad(cx, class_token),
        Op::Pool { kind } => pool(cx, kind),
        Op::PoolGrad { kind, .. } => pool_grad(cx, kind),
        _ => Err(cx.no_kernel()),
    }
}

pub fn scratch(op: &Op, inputs: &[&Type], _outputs: &[&Type]) -> usize {
    match op {
        Op::EmbedGrad { .. } => {
            let cut = BatchCut::of(&inputs[0].shape);
            4 * cut.parts * cut.line
        }
        _ => 0,
    }
}

/// Elements that a thread moves at once.
fn vector_of(columns: usize) -> usize {
    if columns.is_multiple_of(4) { 4 } else { 1 }
}

/// Patches and their inverse differ in the direction alone.
fn patches(cx: &Context<'_>, kernel: &str, image: &Operand, patch: usize) -> Result<Vec<Action>, CudaError> {
    let [batch, channels, height, width] = image.shape.0[..] else { return Err(cx.no_kernel()) };
    let (from, to) = (cx.input(0), cx.output(0));
    let types = [typed(cx, from)?, typed(cx, to)?].join(", ");
    let name = format!("{kernel}<{types}, {channels}, {height}, {width}, {patch}>");
    let pieces = (channels * height * width).div_ceil(VECTORS * THREADS * vector_of(patch));
    Ok(vec![launch(Source::Tokens, name, [pieces, batch, 1], THREADS, vec![pointer(from), pointer(to)])])
}

/// How a batch of lines of tokens (B, T, C) is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct BatchCut {
    batch: usize,
    line: usize,
    channels: usize,
    /// Blocks along the line.
    across: usize,
    parts: usize,
    /// Samples of a part.
    per: usize,
}

impl BatchCut {
    fn of(tokens: &Shape) -> Self {
        let (batch, channels) = (tokens.0.first().copied().unwrap_or(1), tokens.last());
        let line = tokens.count() / batch.max(1);
        let across = line.div_ceil(THREADS * vector_of(channels)).max(1);
        let most = batch.div_ceil(EMBED_SAMPLES).clamp(1, EMBED_PARTS);
        let per = batch.div_ceil((EMBED_BLOCKS.div_ceil(across)).clamp(1, most)).max(1);
        BatchCut { batch, line, channels, across, parts: batch.div_ceil(per).max(1), per }
    }

    fn grid(self) -> [usize; 3] {
        [self.across, self.parts, 1]
    }

    /// batch, line, head, per, as both kernels take them.
    fn sizes(self, class_token: bool) -> [Arg; 4] {
        let head = if class_token { self.channels } else { 0 };
        [self.batch, self.line, head, self.per].map(|n| Arg::I32(n as i32))
    }
}

fn embed(cx: &Context<'_>, class_token: bool) -> Result<Vec<Action>, CudaError> {
    let first = usize::from(class_token);
    let (patches, tokens) = (cx.input(0), cx.output(0));
    singles(cx, &cx.inputs[1..])?;
    let cut = BatchCut::of(&tokens.shape);
    let vector = vector_of(cut.channels);
    let name = format!("embed<{}, {}, {vector}>", typed(cx, patches)?, typed(cx, tokens)?);
    let class = if class_token { cx.input(1).address } else { 0 };
    let mut args = vec![pointer(patches), Arg::Pointer(class), pointer(cx.input(1 + first)), pointer(tokens)];
    args.extend(cut.sizes(class_token));
    Ok(vec![launch(Source::Tokens, name, cut.grid(), THREADS, args)])
}

fn embed_grad(cx: &Context<'_>, class_token: bool) -> Result<Vec<Action>, CudaError> {
    let first = usize::from(class_token);
    let (dtokens, dpatches) = (cx.input(0), cx.output(0));
    singles(cx, &cx.outputs[1..])?;
    let cut = BatchCut::of(&dtokens.shape);
    let vector = vector_of(cut.channels);
    let name = format!("embed_grad<{}, {}, {vector}>", typed(cx, dtokens)?, typed(cx, dpatches)?);
    let sizes = cut.sizes(class_token);
    let mut args = vec![pointer(dtokens), pointer(dpatches), Arg::Pointer(cx.scratch)];
    args.extend(sizes);
    let class = if class_token { cx.output(1).address } else { 0 };
    let sums = vec![
        Arg::Pointer(cx.scratch),
        Arg::I32(cut.parts as i32),
        Arg::I32(cut.line as i32),
        sizes[2],
        Arg::Pointer(class),
        pointer(cx.output(1 + first)),
    ];
    let across = [cut.line.div_ceil(THREADS), 1, 1];
    Ok(vec![
        launch(Source::Tokens, name, cut.grid(), THREADS, args),
        launch(Source::Tokens, "embed_grad_sums".into(), across, THREADS, sums),
    ])
}

/// How many of a sample's tokens are taken, and the share of each.
fn taken(kind: Pooling, tokens: usize) -> [Arg; 2] {
    match kind {
        Pooling::First => [Arg::I32(1), Arg::F32(1.0)],
        Pooling::Mean => [Arg::I32(tokens as i32), Arg::F32((1.0 / tokens as f64) as f32)],
    }
}

fn pool(cx: &Context<'_>, kind: Pooling) -> Result<Vec<Action>, CudaError> {
    let (x, y) = (cx.input(0), cx.output(0));
    let [batch, tokens, channels] = x.shape.0[..] else { return Err(cx.no_kernel()) };
    let vector = vector_of(channels);
    let name = format!("pool<{}, {}, {vector}>", typed(cx, x)?, typed(cx, y)?);
    let mut args = vec![pointer(x), pointer(y), Arg::I32(tokens as i32), Arg::I32(channels as i32)];
    args.extend(taken(kind, tokens));
    Ok(vec![launch(Source::Tokens, name, [batch, channels.div_ceil(32 * vector), 1], THREADS, args)])
}

fn pool_grad(cx: &Context<'_>, kind: Pooling) -> Result<Vec<Action>, CudaError> {
    let (dy, dx) = (cx.input(0), cx.output(0));
    let [batch, tokens, channels] = dx.shape.0[..] else { return Err(cx.no_kernel()) };
    let name = format!("pool_grad<{}, {}, {}>", typed(cx, dy)?, typed(cx, dx)?, vector_of(channels));
    let rows = batch * tokens;
    let mut args = vec![pointer(dy), pointer(dx)];
    args.extend([rows, tokens, channels].map(|n| Arg::I32(n as i32)));
    args.extend(taken(kind, tokens));
    Ok(vec![launch(Source::Tokens, name, [rows.div_ceil(THREADS / 32), 1, 1], THREADS, args)])
}

/// Instances that stand for all, and the compute capability that each needs.
pub fn kernels() -> Vec<(Kernel, u32)> {
    let mut names = vec!["embed_grad_sums".to_string()];
    for t in ["float", "bf16", "f16"] {
        names.extend([
            format!("patches<float, {t}, 3, 224, 224, 16>"),
            format!("patches<float, {t}, 3, 32, 32, 4>"),
            format!("patches<float, {t}, 1, 10, 15, 5>"),
            format!("unpatches<{t}, float, 3, 224, 224, 16>"),
        ]);
        for v in [1, 4] {
            names.extend([
                format!("embed<{t}, float, {v}>"),
                format!("embed<{t}, {t}, {v}>"),
                format!("embed_grad<float, {t}, {v}>"),
                format!("embed_grad<{t}, {t}, {v}>"),
                format!("pool<float, {t}, {v}>"),
                format!("pool<{t}, {t}, {v}>"),
                format!("pool_grad<{t}, float, {v}>"),
                format!("pool_grad<{t}, {t}, {v}>"),
            ]);
        }
    }
    names.sort();
    names.dedup();
    names.into_iter().map(|name| (Kernel::new(Source::Tokens, name), 75)).collect()
}
