//! Ops that move rows between images, patches and tokens.
//!
//! Legend: B batch, N patches, T tokens, C channels. A sample's tokens are one line of T·C elements.

use super::rows::{THREADS, launch, pointer, singles, typed};
use crate::action::{Action, Address, Arg, Kernel, Operand, Source, StepContext};
use crate::error::CudaError;
use graph::op::Pooling;
use graph::{Op, Shape, Type};

/// Vectors that a thread cuts out of an image.
const VECTORS: usize = 4;
/// Blocks that embed a batch: eight per multiprocessor of an H200.
const EMBED_BLOCKS: usize = 1056;
/// Parts of a batch at most; their sums are added by single threads.
const EMBED_PARTS: usize = 16;
/// Samples that a thread reads at once, so the fewest that are worth a part.
const EMBED_SAMPLES: usize = 4;

pub fn actions(cx: &StepContext<'_>) -> Result<Vec<Action>, CudaError> {
    match *cx.op {
        Op::Patches { patch } => patches(cx, "patches", cx.input(0), patch),
        Op::Unpatches { patch, .. } => patches(cx, "unpatches", cx.output(0), patch),
        Op::Embed { class_token } => embed(cx, class_token),
        Op::EmbedGrad { class_token } => embed_grad(cx, class_token),
        Op::Prepend => prepend(cx),
        Op::TokenSum { start, .. } => token_sum(cx, start),
        Op::Pool { kind } => pool(cx, kind),
        Op::PoolGrad { kind, .. } => pool_grad(cx, kind),
        _ => Err(cx.no_kernel()),
    }
}

pub fn scratch(op: &Op, inputs: &[&Type], _outputs: &[&Type]) -> usize {
    match op {
        Op::EmbedGrad { .. } => {
            let cut = BatchTiling::of(&inputs[0].shape);
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
fn patches(
    cx: &StepContext<'_>,
    kernel: &str,
    image: &Operand,
    patch: usize,
) -> Result<Vec<Action>, CudaError> {
    let [batch, channels, height, width] = image.shape.0[..] else { return Err(cx.no_kernel()) };
    let (from, to) = (cx.input(0), cx.output(0));
    let types = [typed(cx, from)?, typed(cx, to)?].join(", ");
    let name = format!("{kernel}<{types}, {channels}, {height}, {width}, {patch}>");
    let pieces = (channels * height * width).div_ceil(VECTORS * THREADS * vector_of(patch));
    Ok(vec![launch(Source::Tokens, name, [pieces, batch, 1], THREADS, vec![pointer(from), pointer(to)])])
}

/// Tiling of a batch of lines of tokens (B, T, C).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct BatchTiling {
    batch: usize,
    line: usize,
    channels: usize,
    /// Blocks along the line.
    across: usize,
    parts: usize,
    /// Samples of a part.
    per: usize,
}

impl BatchTiling {
    fn of(tokens: &Shape) -> Self {
        let (batch, channels) = (tokens.0.first().copied().unwrap_or(1), tokens.last());
        let line = tokens.count() / batch.max(1);
        let across = line.div_ceil(THREADS * vector_of(channels)).max(1);
        let most = batch.div_ceil(EMBED_SAMPLES).clamp(1, EMBED_PARTS);
        let per = batch.div_ceil((EMBED_BLOCKS.div_ceil(across)).clamp(1, most)).max(1);
        BatchTiling { batch, line, channels, across, parts: batch.div_ceil(per).max(1), per }
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

fn embed(cx: &StepContext<'_>, class_token: bool) -> Result<Vec<Action>, CudaError> {
    let first = usize::from(class_token);
    let (patches, tokens) = (cx.input(0), cx.output(0));
    singles(cx, &cx.inputs[1..])?;
    let cut = BatchTiling::of(&tokens.shape);
    let vector = vector_of(cut.channels);
    let name = format!("embed<{}, {}, {vector}>", typed(cx, patches)?, typed(cx, tokens)?);
    let class = if class_token { cx.input(1).address } else { 0 };
    let mut args = vec![pointer(patches), Arg::Pointer(class), pointer(cx.input(1 + first)), pointer(tokens)];
    args.extend(cut.sizes(class_token));
    Ok(vec![launch(Source::Tokens, name, cut.grid(), THREADS, args)])
}

fn embed_grad(cx: &StepContext<'_>, class_token: bool) -> Result<Vec<Action>, CudaError> {
    let first = usize::from(class_token);
    let (dtokens, dpatches) = (cx.input(0), cx.output(0));
    singles(cx, &cx.outputs[1..])?;
    let cut = BatchTiling::of(&dtokens.shape);
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

/// Copies each operand to its place in every sample; a prefix is the same in all of them.
fn prepend(cx: &StepContext<'_>) -> Result<Vec<Action>, CudaError> {
    let (x, y) = (cx.input(0), cx.output(0));
    let [batch, tokens, channels] = y.shape.0[..] else { return Err(cx.no_kernel()) };
    singles(cx, &cx.inputs[1..])?;
    let (line, vector) = (tokens * channels, vector_of(channels));
    let mut at = 0;
    let mut place = |from: &Operand, stride: usize, count: usize| {
        let name = format!("copy_lines<{}, {}, {vector}>", typed(cx, from)?, typed(cx, y)?);
        let to = y.address + (at * y.dtype.bytes()) as Address;
        at += count;
        let args = vec![
            pointer(from),
            Arg::Pointer(to),
            Arg::I64(stride as i64),
            Arg::I64(line as i64),
            Arg::I32(count as i32),
        ];
        let grid = [count.div_ceil(THREADS * vector), batch, 1];
        Ok(launch(Source::Tokens, name, grid, THREADS, args))
    };
    let prefixes = cx.inputs[1..].iter().map(|prefix| place(prefix, 0, prefix.shape.count()));
    let mut actions = prefixes.collect::<Result<Vec<_>, CudaError>>()?;
    let own = x.shape.count() / batch.max(1);
    actions.push(place(x, own, own)?);
    Ok(actions)
}

fn token_sum(cx: &StepContext<'_>, start: usize) -> Result<Vec<Action>, CudaError> {
    let (x, sum) = (cx.input(0), cx.output(0));
    let [batch, tokens, channels] = x.shape.0[..] else { return Err(cx.no_kernel()) };
    singles(cx, cx.outputs)?;
    let (count, vector) = (sum.shape.count(), vector_of(channels));
    let name = format!("token_sum<{}, {vector}>", typed(cx, x)?);
    let from = x.address + (start * channels * x.dtype.bytes()) as Address;
    let args = vec![
        Arg::Pointer(from),
        pointer(sum),
        Arg::I32(batch as i32),
        Arg::I64((tokens * channels) as i64),
        Arg::I32(count as i32),
    ];
    Ok(vec![launch(Source::Tokens, name, [count.div_ceil(32 * vector), 1, 1], THREADS, args)])
}

/// Number of a sample's tokens that are pooled, and the weight of each.
fn taken(kind: Pooling, tokens: usize) -> [Arg; 2] {
    match kind {
        Pooling::First => [Arg::I32(1), Arg::F32(1.0)],
        Pooling::Mean => [Arg::I32(tokens as i32), Arg::F32((1.0 / tokens as f64) as f32)],
    }
}

fn pool(cx: &StepContext<'_>, kind: Pooling) -> Result<Vec<Action>, CudaError> {
    let (x, y) = (cx.input(0), cx.output(0));
    let [batch, tokens, channels] = x.shape.0[..] else { return Err(cx.no_kernel()) };
    let vector = vector_of(channels);
    let name = format!("pool<{}, {}, {vector}>", typed(cx, x)?, typed(cx, y)?);
    let mut args = vec![pointer(x), pointer(y), Arg::I32(tokens as i32), Arg::I32(channels as i32)];
    args.extend(taken(kind, tokens));
    Ok(vec![launch(Source::Tokens, name, [batch, channels.div_ceil(32 * vector), 1], THREADS, args)])
}

fn pool_grad(cx: &StepContext<'_>, kind: Pooling) -> Result<Vec<Action>, CudaError> {
    let (dy, dx) = (cx.input(0), cx.output(0));
    let [batch, tokens, channels] = dx.shape.0[..] else { return Err(cx.no_kernel()) };
    let name = format!("pool_grad<{}, {}, {}>", typed(cx, dy)?, typed(cx, dx)?, vector_of(channels));
    let rows = batch * tokens;
    let mut args = vec![pointer(dy), pointer(dx)];
    args.extend([rows, tokens, channels].map(|n| Arg::I32(n as i32)));
    args.extend(taken(kind, tokens));
    Ok(vec![launch(Source::Tokens, name, [rows.div_ceil(THREADS / 32), 1, 1], THREADS, args)])
}

/// Representative instances, each with the compute capability that it needs.
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
                format!("copy_lines<float, {t}, {v}>"),
                format!("copy_lines<{t}, {t}, {v}>"),
                format!("copy_lines<{t}, float, {v}>"),
                format!("token_sum<{t}, {v}>"),
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

#[cfg(test)]
mod tests {
    use super::super::testing::*;
    use super::*;

    #[test]
    fn a_cut_covers_every_sample_and_channel_once() {
        for [batch, tokens, channels] in
            [[256, 197, 768], [128, 65, 192], [1, 2, 24], [3, 5, 10], [4096, 197, 192]]
        {
            let cut = BatchTiling::of(&Shape::from([batch, tokens, channels]));
            assert_eq!(cut.line, tokens * channels);
            assert!(cut.across * THREADS * vector_of(channels) >= cut.line, "{cut:?}");
            assert!((cut.parts - 1) * cut.per < batch && batch <= cut.parts * cut.per, "{cut:?}");
            assert!(cut.parts <= EMBED_PARTS);
        }
    }

    #[test]
    fn the_class_tokens_gradient_is_that_of_its_position() {
        let op = Op::EmbedGrad { class_token: true };
        let outputs = ["bf16[128,64,192]", "f32[1,1,192]", "f32[1,65,192]"];
        let actions = step(op.clone(), &["f32[128,65,192]"], &outputs).unwrap();
        assert_eq!(names(&actions), ["embed_grad<float, bf16, 4>", "embed_grad_sums"]);
        let [first, second] = launches(&actions)[..] else { unreachable!("two launches") };
        assert_eq!(first.args[3..], [128, 65 * 192, 192, 8].map(Arg::I32));
        assert_eq!(second.args[4], Arg::Pointer((2 << 32) + (1 << 20)));
        assert_eq!(second.args[5], Arg::Pointer((2 << 32) + (2 << 20)));
        let tokens = "f32[128,65,192]".parse().unwrap();
        assert_eq!(scratch(&op, &[&tokens], &[]), 4 * first.grid[1] as usize * 65 * 192);
    }

    #[test]
    fn prefixes_lie_before_every_sample() {
        let inputs = ["f32[2,9,8]", "f32[1,1,8]", "f32[1,4,8]"];
        let actions = step(Op::Prepend, &inputs, &["f32[2,14,8]"]).unwrap();
        let places: Vec<_> = launches(&actions).iter().map(|launch| launch.args[1..].to_vec()).collect();
        let place = |at: u64, stride, count| {
            vec![Arg::Pointer((2 << 32) + 4 * at), Arg::I64(stride), Arg::I64(112), Arg::I32(count)]
        };
        assert_eq!(places, [place(0, 0, 8), place(8, 0, 32), place(40, 72, 72)]);
        let op = Op::TokenSum { start: 1, tokens: 4 };
        let actions = step(op, &["bf16[2,14,8]"], &["f32[1,4,8]"]).unwrap();
        assert_eq!(names(&actions), ["token_sum<bf16, 4>"]);
        assert_eq!(launches(&actions)[0].args[0], Arg::Pointer((1 << 32) + 16));
    }

    #[test]
    fn patches_know_their_image() {
        let op = Op::Patches { patch: 16 };
        let actions = step(op, &["f32[2,3,224,224]"], &["bf16[2,196,768]"]).unwrap();
        assert_eq!(names(&actions), ["patches<float, bf16, 3, 224, 224, 16>"]);
        assert_eq!(launches(&actions)[0].grid, [37, 2, 1]);
        let op = Op::Unpatches { patch: 5, channels: 1, height: 10, width: 15 };
        let actions = step(op, &["f32[2,6,25]"], &["f32[2,1,10,15]"]).unwrap();
        assert_eq!(names(&actions), ["unpatches<float, float, 1, 10, 15, 5>"]);
    }

    #[test]
    fn pools_take_the_first_token_or_all() {
        let pooled = |kind| {
            let (pool, grad) = (Op::Pool { kind }, Op::PoolGrad { kind, tokens: 5 });
            let forward = step(pool, &["f32[3,5,8]"], &["bf16[3,8]"]).unwrap();
            let backward = step(grad, &["bf16[3,8]"], &["f32[3,5,8]"]).unwrap();
            assert_eq!(launches(&backward)[0].grid, [2, 1, 1]);
            assert_eq!(launches(&forward)[0].args[4..], launches(&backward)[0].args[5..]);
            launches(&forward)[0].args[4..].to_vec()
        };
        assert_eq!(pooled(Pooling::First), [Arg::I32(1), Arg::F32(1.0)]);
        assert_eq!(pooled(Pooling::Mean), [Arg::I32(5), Arg::F32(0.2)]);
    }

    #[test]
    fn positions_are_f32() {
        let op = Op::Embed { class_token: false };
        assert!(step(op.clone(), &["bf16[2,4,8]", "f32[1,4,8]"], &["f32[2,4,8]"]).is_ok());
        assert!(step(op, &["bf16[2,4,8]", "bf16[1,4,8]"], &["f32[2,4,8]"]).is_err());
    }
}
