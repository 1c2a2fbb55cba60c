//! Batch norm: moments and sums of parts of the rows, then one launch that joins them; the norm and its gradient in one pass each.
//!
//! Legend: M rows (pixels of a batch), C channels.

use super::rows::{THREADS, launch, pointer, singles, typed, vector_of};
use crate::action::{Action, Arg, Kernel, Operand, Source, StepContext};
use crate::error::CudaError;
use graph::{DType, Op, Shape, Type};

/// Blocks that fill a large GPU: eight per multiprocessor of an H200.
const BLOCKS: usize = 1056;
/// Most rows of a thread. With f32, 64 terms lose less than a digit; the number of such parts doesn't matter.
const SUMMED_ROWS: usize = 64;
/// Most rows of a thread where nothing is summed.
const NORMED_ROWS: usize = 16;
/// Columns of a block that joins parts.
const JOINED: usize = 32;

pub fn actions(cx: &StepContext<'_>) -> Result<Vec<Action>, CudaError> {
    match *cx.op {
        Op::Moments => moments(cx),
        Op::JoinMoments => join_moments(cx),
        Op::BatchNorm { eps, relu, running } => batch_norm(cx, eps, relu, running),
        Op::BatchNormSums { eps, relu } => sums(cx, eps, relu),
        Op::BatchNormGrad { eps, relu } => grad(cx, eps, relu),
        Op::RunningMoments { momentum } => running_moments(cx, momentum),
        Op::Commit => commit(cx),
        _ => Err(cx.no_kernel()),
    }
}

/// Bytes of working memory: two doubles for each part and channel.
pub fn scratch(op: &Op, inputs: &[&Type]) -> usize {
    let Type { dtype, shape } = inputs[0];
    match op {
        Op::Moments | Op::BatchNormSums { .. } => {
            RowTiling::of(shape, *dtype, SUMMED_ROWS).parts * 2 * shape.last() * size_of::<f64>()
        }
        _ => 0,
    }
}

/// Tiling of rows of channels into blocks. Depends on shape and type only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct RowTiling {
    /// Channels of a thread, and threads side by side.
    vector: usize,
    wide: usize,
    /// Blocks side by side, and below each other.
    across: usize,
    parts: usize,
    /// Rows of a block.
    per: usize,
}

impl RowTiling {
    fn of(shape: &Shape, dtype: DType, most: usize) -> Self {
        let (rows, columns) = (shape.rows(), shape.last());
        let full = vector_of(&[dtype]);
        let vector = if columns.is_multiple_of(full) { full } else { 1 };
        // The width that leaves the fewest threads idle; of equals, the widest.
        let idle = |wide: &&usize| columns.next_multiple_of(vector * **wide);
        let wide = [32, 16, 8].iter().min_by_key(idle).copied().unwrap_or(32);
        let across = columns.div_ceil(vector * wide);
        let lanes = THREADS / wide;
        let per = rows.div_ceil((BLOCKS / across).max(1)).next_multiple_of(lanes).clamp(lanes, most * lanes);
        RowTiling { vector, wide, across, parts: rows.div_ceil(per).max(1), per }
    }

    fn grid(&self) -> [usize; 3] {
        [self.across, self.parts, 1]
    }

    /// A kernel's name with its template arguments.
    fn name(&self, kernel: &str, dtype: &str) -> String {
        format!("{kernel}<{dtype}, {}, {}>", self.vector, self.wide)
    }
}

/// Arguments of all kernels: rows, columns, rows of a block.
fn sizes(x: &Operand, cut: &RowTiling) -> [Arg; 3] {
    [x.shape.rows(), x.shape.last(), cut.per].map(|n| Arg::I32(n as i32))
}

fn of_block(name: String, grid: [usize; 3], args: Vec<Arg>) -> Action {
    launch(Source::BatchNorm, name, grid, THREADS, args)
}

/// Launch of one thread per element.
fn each(name: &str, count: usize, args: Vec<Arg>) -> Action {
    of_block(name.into(), [count.div_ceil(THREADS), 1, 1], args)
}

fn joined(name: &str, columns: usize, args: Vec<Arg>) -> Action {
    launch(Source::BatchNorm, name.into(), [columns.div_ceil(JOINED), 1, 1], 1024, args)
}

fn moments(cx: &StepContext<'_>) -> Result<Vec<Action>, CudaError> {
    let (x, out) = (cx.input(0), cx.output(0));
    singles(cx, cx.outputs)?;
    let cut = RowTiling::of(&x.shape, x.dtype, SUMMED_ROWS);
    let [rows, columns, per] = sizes(x, &cut);
    let parts = Arg::Pointer(cx.scratch);
    let first = of_block(
        cut.name("moments_parts", typed(cx, x)?),
        cut.grid(),
        vec![pointer(x), rows, columns, per, parts],
    );
    let args = vec![parts, Arg::I32(cut.parts as i32), rows, per, columns, pointer(out)];
    Ok(vec![first, joined("moments_join", x.shape.last(), args)])
}

fn join_moments(cx: &StepContext<'_>) -> Result<Vec<Action>, CudaError> {
    singles(cx, cx.inputs)?;
    singles(cx, cx.outputs)?;
    let (parts, out) = (cx.input(0), cx.output(0));
    let (count, columns) = (parts.shape.rows() / 3, parts.shape.last());
    let args = vec![pointer(parts), Arg::I32(count as i32), Arg::I32(columns as i32), pointer(out)];
    Ok(vec![each("join_moments", columns, args)])
}

/// Refuses statistics and parameters that are not f32, and maps of different types.
fn check(cx: &StepContext<'_>, maps: &[&Operand]) -> Result<&'static str, CudaError> {
    singles(cx, &cx.inputs[1..4])?;
    if maps.iter().any(|map| map.dtype != maps[0].dtype) {
        return Err(cx.no_kernel());
    }
    typed(cx, maps[0])
}

fn batch_norm(cx: &StepContext<'_>, eps: f64, relu: bool, running: bool) -> Result<Vec<Action>, CudaError> {
    let (x, y) = (cx.input(0), cx.output(0));
    let name = check(cx, &[x, y])?;
    let cut = RowTiling::of(&x.shape, x.dtype, NORMED_ROWS);
    let mut args: Vec<Arg> = cx.inputs.iter().map(pointer).collect();
    args.push(pointer(y));
    args.extend(sizes(x, &cut));
    args.extend([Arg::F32(eps as f32), Arg::I32(relu.into()), Arg::I32(running.into())]);
    Ok(vec![of_block(cut.name("batch_norm", name), cut.grid(), args)])
}

fn sums(cx: &StepContext<'_>, eps: f64, relu: bool) -> Result<Vec<Action>, CudaError> {
    let (x, dy, out) = (cx.input(0), cx.input(4), cx.output(0));
    singles(cx, cx.outputs)?;
    let name = check(cx, &[x, dy])?;
    let cut = RowTiling::of(&x.shape, x.dtype, SUMMED_ROWS);
    let (parts, eps) = (Arg::Pointer(cx.scratch), Arg::F32(eps as f32));
    let mut args: Vec<Arg> = cx.inputs.iter().map(pointer).collect();
    args.extend(sizes(x, &cut));
    args.extend([eps, Arg::I32(relu.into()), parts]);
    let first = of_block(cut.name("norm_sums_parts", name), cut.grid(), args);
    let columns = x.shape.last();
    let count = Arg::I32(cut.parts as i32);
    let args = vec![parts, count, pointer(cx.input(1)), Arg::I32(columns as i32), eps, pointer(out)];
    Ok(vec![first, joined("norm_sums_join", columns, args)])
}

fn grad(cx: &StepContext<'_>, eps: f64, relu: bool) -> Result<Vec<Action>, CudaError> {
    let (x, dy, dx) = (cx.input(0), cx.input(4), cx.output(0));
    singles(cx, &cx.inputs[5..])?;
    let name = check(cx, &[x, dy, dx])?;
    let cut = RowTiling::of(&x.shape, x.dtype, NORMED_ROWS);
    let mut args: Vec<Arg> = cx.inputs.iter().map(pointer).collect();
    args.push(pointer(dx));
    args.extend(sizes(x, &cut));
    args.extend([Arg::F32(eps as f32), Arg::I32(relu.into())]);
    Ok(vec![of_block(cut.name("batch_norm_grad", name), cut.grid(), args)])
}

fn running_moments(cx: &StepContext<'_>, momentum: f64) -> Result<Vec<Action>, CudaError> {
    singles(cx, cx.inputs)?;
    singles(cx, cx.outputs)?;
    let columns = cx.input(0).shape.last();
    let args = vec![
        pointer(cx.input(0)),
        pointer(cx.input(1)),
        pointer(cx.output(0)),
        Arg::I32(columns as i32),
        Arg::F64(momentum),
    ];
    Ok(vec![each("running_moments", columns, args)])
}

fn commit(cx: &StepContext<'_>) -> Result<Vec<Action>, CudaError> {
    singles(cx, cx.inputs)?;
    singles(cx, cx.outputs)?;
    let count = cx.outputs.len();
    let one = |i: usize| {
        let (before, after, out) = (cx.input(1 + i), cx.input(1 + count + i), cx.output(i));
        let n = out.shape.count();
        let args =
            vec![pointer(cx.input(0)), pointer(before), pointer(after), pointer(out), Arg::I32(n as i32)];
        each("commit", n, args)
    };
    Ok((0..count).map(one).collect())
}

/// Representative instances, each with the compute capability that it needs.
pub fn kernels() -> Vec<(Kernel, u32)> {
    let plain = ["moments_join", "join_moments", "norm_sums_join", "running_moments", "commit"];
    let mut names: Vec<String> = plain.map(String::from).into();
    for types in ["float, 4, 32", "bf16, 8, 32", "f16, 8, 8", "bf16, 1, 32"] {
        let kernels = ["moments_parts", "batch_norm", "norm_sums_parts", "batch_norm_grad"];
        names.extend(kernels.map(|kernel| format!("{kernel}<{types}>")));
    }
    names.into_iter().map(|name| (Kernel::new(Source::BatchNorm, name), 75)).collect()
}

#[cfg(test)]
mod tests {
    use super::super::testing::*;
    use super::*;

    #[test]
    fn blocks_cover_all_rows_and_threads_sum_few() {
        for (rows, columns) in [(1, 1), (8, 512), (288, 512), (2048, 3072), (131_072, 512), (2_097_152, 150)]
        {
            let shape = Shape::from([rows, columns]);
            for (dtype, most) in [(DType::Bf16, SUMMED_ROWS), (DType::F32, NORMED_ROWS)] {
                let cut = RowTiling::of(&shape, dtype, most);
                let lanes = THREADS / cut.wide;
                assert!(cut.parts * cut.per >= rows && (cut.parts - 1) * cut.per < rows, "{cut:?}");
                assert!(cut.per <= most * lanes && cut.per.is_multiple_of(lanes), "{cut:?}");
                assert!(cut.across * cut.wide * cut.vector >= columns && cut.parts < 65_536, "{cut:?}");
                assert!(columns.is_multiple_of(cut.vector) && cut.vector * cut.wide <= THREADS);
            }
        }
        let cut = RowTiling::of(&Shape::from([8, 128, 128, 512]), DType::Bf16, SUMMED_ROWS);
        assert_eq!((cut.vector, cut.wide, cut.across, cut.parts, cut.per), (8, 32, 2, 512, 256));
    }

    #[test]
    fn statistics_are_f32_and_parts_fit_their_scratch() {
        let (x, moments) = ("bf16[8,128,128,512]", "f32[3,512]");
        let actions = step(Op::Moments, &[x], &[moments]).unwrap();
        assert_eq!(names(&actions), ["moments_parts<bf16, 8, 32>", "moments_join"]);
        assert_eq!(launches(&actions)[1].grid, [16, 1, 1]);
        assert_eq!(scratch(&Op::Moments, &[&x.parse().unwrap()]), 512 * 2 * 512 * 8);
        assert!(step(Op::Moments, &[x], &["bf16[3,512]"]).is_err());
        let norm = Op::BatchNorm { eps: 1e-5, relu: true, running: false };
        let inputs = [x, moments, "f32[512]", "f32[512]"];
        assert_eq!(names(&step(norm.clone(), &inputs, &[x]).unwrap()), ["batch_norm<bf16, 8, 32>"]);
        assert!(step(norm, &[x, moments, "bf16[512]", "f32[512]"], &[x]).is_err());
    }

    #[test]
    fn a_commit_takes_each_pair() {
        let inputs = ["f32[3]", "f32[3,8]", "f32[3,300]", "f32[3,8]", "f32[3,300]"];
        let actions = step(Op::Commit, &inputs, &["f32[3,8]", "f32[3,300]"]).unwrap();
        let at = |i: u64| Arg::Pointer((1 << 32) + (i << 20));
        let second = launches(&actions)[1];
        assert_eq!((second.grid[0], &second.args[..3]), (4, &[at(0), at(2), at(4)][..]));
    }
}
