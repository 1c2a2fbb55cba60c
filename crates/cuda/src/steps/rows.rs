//! Elementwise and row-wise ops, and sums over rows.
//!
//! Sums over rows are split into parts, whose number depends on the shape only. Each part is summed into a row of partial sums, which
//! `sum_parts` adds in order, for many sums at once. Legend: M rows, C columns.

mod sums;

pub(super) use sums::ColumnTiling;
use sums::sum_columns;
pub use sums::{column_parts, sum_parts};

use crate::action::{Action, Address, Arg, Kernel, Launch, Operand, PartialSum, Source, StepContext, c_type};
use crate::error::CudaError;
use graph::op::Per;
use graph::random::drop_threshold;
use graph::{DType, Op, Shape};

/// Threads of a block.
pub(super) const THREADS: usize = 256;
/// Vectors that a thread of an elementwise kernel has.
const VECTORS: usize = 2;
/// Blocks of a layer norm's backward pass: two per multiprocessor of an H200.
const NORM_PARTS: usize = 264;
/// Columns a layer norm can have: a block's shared memory holds a row.
const NORM_COLUMNS: usize = 12_288;

pub fn actions(cx: &StepContext<'_>) -> Result<Vec<Action>, CudaError> {
    match *cx.op {
        Op::Gelu => {
            same_types(cx, &[cx.input(0), cx.output(0)])?;
            Ok(vec![gelu(cx.input(0), cx.output(0))])
        }
        Op::GeluGrad { bias } => gelu_grad_step(cx, bias),
        Op::ColumnSum { accumulate } => {
            typed(cx, cx.input(0))?;
            singles(cx, &cx.inputs[1..])?;
            singles(cx, cx.outputs)?;
            let start = accumulate.then(|| cx.input(1).address);
            Ok(sum_columns(cx.input(0), start, cx.output(0).address, cx.parts))
        }
        Op::LayerNorm { eps, add } => layer_norm(cx, eps, add),
        Op::LayerNormGrad { add, sum, half } => layer_norm_grad(cx, add, sum, half),
        Op::Drop { rate, site, per } => drop(cx, rate, site, per),
        Op::Add => Ok(vec![add(cx, cx.input(0), cx.input(1), cx.output(0))?]),
        Op::Scale { factor } => scale(cx, factor),
        Op::Accumulate => accumulate(cx),
        // A reshape costs nothing where it works in place.
        Op::Assign { .. } | Op::Reshape { .. } => Ok(copy(cx.input(0), cx.output(0).address)),
        Op::Cast { .. } => cast(cx),
        Op::Pack { .. } => pack(cx),
        Op::Unpack { .. } => unpack(cx),
        _ => Err(cx.no_kernel()),
    }
}

/// Bytes for the partial sums of a step.
pub fn parts(op: &Op, inputs: &[Operand]) -> usize {
    let shape = &inputs[0].shape;
    match op {
        Op::ColumnSum { .. } | Op::GeluGrad { bias: true } => column_parts(shape),
        Op::LayerNormGrad { sum, .. } => 4 * norm_parts(shape) * norm_sums(*sum) * shape.last(),
        _ => 0,
    }
}

// ---- what the modules of kernels share ----------------------------------------------------------------------------

pub(super) fn launch(source: Source, name: String, grid: [usize; 3], block: usize, args: Vec<Arg>) -> Action {
    let grid = grid.map(|n| n as u32);
    Action::Launch(Launch { kernel: Kernel::new(source, name), grid, block: block as u32, shared: 0, args })
}

pub(super) fn pointer(operand: &Operand) -> Arg {
    Arg::Pointer(operand.address)
}

/// Name of an operand's type in the kernels, or the error that there is none.
pub(super) fn typed(cx: &StepContext<'_>, operand: &Operand) -> Result<&'static str, CudaError> {
    c_type(operand.dtype).ok_or_else(|| cx.no_kernel())
}

/// Refuses operands that are not f32.
pub(super) fn singles(cx: &StepContext<'_>, operands: &[Operand]) -> Result<(), CudaError> {
    if operands.iter().all(|o| o.dtype == DType::F32) { Ok(()) } else { Err(cx.no_kernel()) }
}

/// Refuses operands of different types, or of one without kernels.
fn same_types(cx: &StepContext<'_>, operands: &[&Operand]) -> Result<(), CudaError> {
    let same = operands.iter().all(|o| o.dtype == operands[0].dtype && c_type(o.dtype).is_some());
    if same { Ok(()) } else { Err(cx.no_kernel()) }
}

/// Elements that 16 bytes of the widest type hold.
pub(super) fn vector_of(dtypes: &[DType]) -> usize {
    16 / dtypes.iter().map(|d| d.bytes()).max().unwrap_or(16)
}

/// The grid of an elementwise kernel.
fn pieces(count: usize, vector: usize) -> [usize; 3] {
    [count.div_ceil(VECTORS * THREADS * vector), 1, 1]
}

/// Name of a type that callers have checked.
fn checked(dtype: DType) -> &'static str {
    c_type(dtype).unwrap_or("void")
}

// ---- elementwise --------------------------------------------------------------------------------------------------

/// y = gelu(pre), of one type that has kernels.
pub fn gelu(pre: &Operand, y: &Operand) -> Action {
    let count = y.shape.count();
    let args = vec![pointer(pre), pointer(y), Arg::I64(count as i64)];
    let grid = pieces(count, vector_of(&[pre.dtype]));
    launch(Source::Rows, format!("gelu<{}>", checked(pre.dtype)), grid, THREADS, args)
}

pub(super) fn add(cx: &StepContext<'_>, a: &Operand, b: &Operand, y: &Operand) -> Result<Action, CudaError> {
    let name = format!("add<{}, {}, {}>", typed(cx, a)?, typed(cx, b)?, typed(cx, y)?);
    let count = y.shape.count();
    let args = vec![pointer(a), pointer(b), pointer(y), Arg::I64(count as i64)];
    let grid = pieces(count, vector_of(&[a.dtype, b.dtype, y.dtype]));
    Ok(launch(Source::Rows, name, grid, THREADS, args))
}

fn scale(cx: &StepContext<'_>, factor: f64) -> Result<Vec<Action>, CudaError> {
    let (x, y) = (cx.input(0), cx.output(0));
    let name = format!("scale<{}, {}>", typed(cx, x)?, typed(cx, y)?);
    let count = y.shape.count();
    let args = vec![pointer(x), pointer(y), Arg::F32(factor as f32), Arg::I64(count as i64)];
    Ok(vec![launch(Source::Rows, name, pieces(count, vector_of(&[x.dtype, y.dtype])), THREADS, args)])
}

fn accumulate(cx: &StepContext<'_>) -> Result<Vec<Action>, CudaError> {
    singles(cx, cx.inputs)?;
    singles(cx, cx.outputs)?;
    let (so_far, x, sum) = (cx.input(0), cx.input(1), cx.output(0));
    Ok(vec![add(cx, so_far, x, sum)?])
}

fn copy(from: &Operand, to: Address) -> Vec<Action> {
    let bytes = from.shape.count() * from.dtype.bytes();
    if from.address == to || bytes == 0 {
        return Vec::new();
    }
    vec![Action::Copy { from: from.address, to, bytes }]
}

fn drop(cx: &StepContext<'_>, rate: f64, site: u32, per: Per) -> Result<Vec<Action>, CudaError> {
    let (x, y) = (cx.input(0), cx.output(0));
    let (x_type, y_type) = (typed(cx, x)?, typed(cx, y)?);
    let (rows, columns) = (x.shape.rows(), x.shape.last());
    let samples = x.shape.0.first().copied().unwrap_or(1);
    let draw = [Arg::U32(site), Arg::U32(drop_threshold(rate)), Arg::F32((1.0 / (1.0 - rate)) as f32)];
    let operands = [pointer(x), pointer(y), Arg::Pointer(cx.header)];
    let (name, grid, sizes) = match per {
        Per::Element => {
            let vectors = rows * columns / norm_vector(columns);
            let tokens = rows / samples.max(1);
            let sizes = vec![Arg::I64(rows as i64), Arg::I32(tokens as i32)];
            let name = format!("drop_elements<{x_type}, {y_type}, {columns}>");
            (name, [vectors.div_ceil(THREADS), 1, 1], sizes)
        }
        Per::Channel => return super::channels::drop(cx, rate, site),
        Per::Sample => {
            let size = x.shape.count() / samples.max(1);
            let most = vector_of(&[x.dtype, y.dtype]);
            let vector = if size.is_multiple_of(most) { most } else { 1 };
            let name = format!("drop_samples<{x_type}, {y_type}, {vector}>");
            (name, [samples, size.div_ceil(THREADS * vector), 1], vec![Arg::I64(size as i64)])
        }
    };
    let args = operands.into_iter().chain(sizes).chain(draw).collect();
    Ok(vec![launch(Source::Rows, name, grid, THREADS, args)])
}

// ---- between types ------------------------------------------------------------------------------------------------

/// Copies `count` elements to another place, as its type has them.
pub(super) fn convert(
    cx: &StepContext<'_>,
    (from, from_type): (Address, DType),
    (to, to_type): (Address, DType),
    count: usize,
) -> Result<Vec<Action>, CudaError> {
    if count == 0 {
        return Ok(Vec::new());
    }
    if from_type == to_type {
        return Ok(vec![Action::Copy { from, to, bytes: count * from_type.bytes() }]);
    }
    let (Some(x), Some(y)) = (c_type(from_type), c_type(to_type)) else { return Err(cx.no_kernel()) };
    // Values inside a flat buffer start anywhere.
    let aligned = from.is_multiple_of(16) && to.is_multiple_of(16);
    let vector = if aligned { vector_of(&[from_type, to_type]) } else { 1 };
    let args = vec![Arg::Pointer(from), Arg::Pointer(to), Arg::I64(count as i64)];
    let name = format!("cast<{x}, {y}, {vector}>");
    Ok(vec![launch(Source::Rows, name, pieces(count, vector), THREADS, args)])
}

fn cast(cx: &StepContext<'_>) -> Result<Vec<Action>, CudaError> {
    let (x, y) = (cx.input(0), cx.output(0));
    convert(cx, (x.address, x.dtype), (y.address, y.dtype), y.shape.count())
}

fn pack(cx: &StepContext<'_>) -> Result<Vec<Action>, CudaError> {
    let flat = cx.output(0);
    let place = |at: usize| flat.address + (at * flat.dtype.bytes()) as Address;
    let (mut actions, mut at) = (Vec::new(), 0);
    for value in cx.inputs {
        let count = value.shape.count();
        actions.extend(convert(cx, (value.address, value.dtype), (place(at), flat.dtype), count)?);
        at += count;
    }
    let left = flat.shape.count().saturating_sub(at);
    if left > 0 {
        actions.push(Action::Zero { at: place(at), bytes: left * flat.dtype.bytes() });
    }
    Ok(actions)
}

fn unpack(cx: &StepContext<'_>) -> Result<Vec<Action>, CudaError> {
    let flat = cx.input(0);
    let (mut actions, mut at) = (Vec::new(), 0);
    for value in cx.outputs {
        let (count, from) = (value.shape.count(), flat.address + (at * flat.dtype.bytes()) as Address);
        actions.extend(convert(cx, (from, flat.dtype), (value.address, value.dtype), count)?);
        at += count;
    }
    Ok(actions)
}

/// dx = dy·gelu'(pre), and bias_sums (C), in f32, its sum over rows. pre, dy and dx are of one type that has kernels; dy may
/// lie where dx lies.
pub fn gelu_grad(
    pre: &Operand,
    dy: Address,
    dx: &Operand,
    bias_sums: Address,
    parts: Address,
) -> Vec<Action> {
    let (rows, columns, cut) = (dx.shape.rows(), dx.shape.last(), ColumnTiling::of(&dx.shape));
    let arguments = cut.arguments(ColumnTiling::vector(&dx.shape, dx.dtype), 2);
    let name = format!("gelu_grad_sums<{}, {arguments}>", checked(dx.dtype));
    let whole = cut.parts == 1;
    let args = vec![
        pointer(pre),
        Arg::Pointer(dy),
        pointer(dx),
        Arg::I32(rows as i32),
        Arg::I32(columns as i32),
        Arg::I32(cut.per as i32),
        Arg::Pointer(if whole { bias_sums } else { parts }),
    ];
    let mut actions = vec![launch(Source::Rows, name, [cut.across, cut.parts, 1], THREADS, args)];
    if !whole {
        let (rows, stride, out) = (cut.parts, columns, bias_sums);
        actions.push(Action::Sum(PartialSum { parts, rows, stride, columns, start: None, out }));
    }
    actions
}

fn gelu_grad_step(cx: &StepContext<'_>, bias: bool) -> Result<Vec<Action>, CudaError> {
    let (pre, dy, dx) = (cx.input(0), cx.input(1), cx.output(0));
    same_types(cx, &[pre, dy, dx])?;
    if bias {
        singles(cx, &cx.outputs[1..])?;
        return Ok(gelu_grad(pre, dy.address, dx, cx.output(1).address, cx.parts));
    }
    let count = dx.shape.count();
    let args = vec![pointer(pre), pointer(dy), pointer(dx), Arg::I64(count as i64)];
    let name = format!("gelu_grad<{}>", checked(dx.dtype));
    Ok(vec![launch(Source::Rows, name, pieces(count, vector_of(&[dx.dtype])), THREADS, args)])
}

// ---- layer norm ---------------------------------------------------------------------------------------------------

/// Vector width, `vector_of` in norm.cuh.
fn norm_vector(columns: usize) -> usize {
    if columns.is_multiple_of(4) { 4 } else { 1 }
}

/// Rows that a block has at a time. As `lanes_of` in norm.cuh: a row has a power of two of threads, each of at most `most` columns.
pub(super) fn norm_rows(columns: usize, most: usize) -> usize {
    THREADS / columns.div_ceil(most).next_power_of_two().clamp(4, THREADS)
}

/// Columns of a thread, forward and backward: see `rows.cu`.
pub(super) const FORWARD: usize = 16;
fn backward(columns: usize) -> usize {
    if columns <= 32 * 12 { 12 } else { 24 }
}

/// Blocks of the backward pass, each with a row of partial sums.
pub(super) fn norm_parts(shape: &Shape) -> usize {
    shape.rows().div_ceil(norm_rows(shape.last(), backward(shape.last()))).clamp(1, NORM_PARTS)
}

fn layer_norm(cx: &StepContext<'_>, eps: f64, add: bool) -> Result<Vec<Action>, CudaError> {
    let first = usize::from(add);
    let (x, r, y) = (cx.input(0), cx.input(first), cx.output(first));
    singles(cx, &cx.inputs[1 + first..])?;
    singles(cx, &cx.outputs[1 + first..])?;
    let (rows, columns) = (x.shape.rows(), x.shape.last());
    if columns > NORM_COLUMNS || (add && cx.output(0).dtype != x.dtype) {
        return Err(cx.no_kernel());
    }
    let types = [x, r, y].map(|o| typed(cx, o));
    let [x_type, r_type, y_type] = types;
    let name = format!("layer_norm<{}, {}, {}, {columns}, {add}>", x_type?, r_type?, y_type?);
    let args = vec![
        pointer(x),
        pointer(r),
        pointer(cx.input(1 + first)),
        pointer(cx.input(2 + first)),
        pointer(cx.output(0)),
        pointer(y),
        pointer(cx.output(1 + first)),
        pointer(cx.output(2 + first)),
        Arg::I32(rows as i32),
        Arg::F32(eps as f32),
    ];
    let grid = [rows.div_ceil(norm_rows(columns, FORWARD)), 1, 1];
    Ok(vec![launch(Source::Rows, name, grid, THREADS, args)])
}

/// Sums over rows that the backward pass makes: dγ, dβ, with `sum` that of dx.
fn norm_sums(sum: bool) -> usize {
    if sum { 3 } else { 2 }
}

fn layer_norm_grad(
    cx: &StepContext<'_>,
    add: bool,
    sum: bool,
    half: Option<DType>,
) -> Result<Vec<Action>, CudaError> {
    let (x, dy, dx) = (cx.input(0), cx.input(4), cx.output(0));
    let more = if add { cx.input(5) } else { x };
    let sums = &cx.outputs[1..1 + norm_sums(sum)];
    let copy = if half.is_some() { cx.output(1 + sums.len()) } else { dx };
    singles(cx, &cx.inputs[1..4])?;
    singles(cx, sums)?;
    let (rows, columns) = (x.shape.rows(), x.shape.last());
    if columns > NORM_COLUMNS || more.dtype != x.dtype || dx.dtype != x.dtype {
        return Err(cx.no_kernel());
    }
    let types = [typed(cx, x)?, typed(cx, dy)?, typed(cx, copy)?].join(", ");
    let name = format!("layer_norm_grad<{types}, {columns}, {add}, {}, {sum}>", half.is_some());
    let parts = norm_parts(&x.shape);
    let args = vec![
        pointer(x),
        pointer(cx.input(1)),
        pointer(cx.input(2)),
        pointer(cx.input(3)),
        pointer(dy),
        pointer(more),
        pointer(dx),
        pointer(copy),
        Arg::Pointer(cx.parts),
        Arg::I32(rows as i32),
    ];
    let mut actions = vec![launch(Source::Rows, name, [parts, 1, 1], THREADS, args)];
    actions.extend(sums.iter().enumerate().map(|(i, out)| {
        let (first, stride) = (cx.parts + 4 * (i * columns) as Address, sums.len() * columns);
        Action::Sum(PartialSum { parts: first, rows: parts, stride, columns, start: None, out: out.address })
    }));
    Ok(actions)
}

/// Representative instances, each with the compute capability that it needs.
pub fn kernels() -> Vec<(Kernel, u32)> {
    let mut names = vec!["sum_parts".to_string(), "add<float, bf16, float>".into()];
    for t in ["float", "bf16", "f16"] {
        let vector = if t == "float" { 4 } else { 8 };
        names.extend([
            format!("gelu<{t}>"),
            format!("gelu_grad<{t}>"),
            format!("add<{t}, {t}, {t}>"),
            format!("scale<{t}, {t}>"),
            format!("cast<float, {t}, 4>"),
            format!("cast<{t}, float, 1>"),
            format!("drop_elements<{t}, {t}, 768>"),
            format!("drop_elements<{t}, {t}, 10>"),
            format!("drop_samples<{t}, {t}, {vector}>"),
            format!("column_sum<{t}, {vector}, {}, 4>", 256 / vector),
            format!("column_sum<{t}, 1, 32, 4>"),
            format!("gelu_grad_sums<{t}, {vector}, {}, 2>", 64 / vector),
            format!("gelu_grad_sums<{t}, 1, 8, 2>"),
            format!("layer_norm<{t}, {t}, {t}, 768, false>"),
            format!("layer_norm<float, {t}, {t}, 192, true>"),
            format!("layer_norm<float, {t}, {t}, 1280, true>"),
            format!("layer_norm<{t}, {t}, {t}, 10, true>"),
            format!("layer_norm_grad<{t}, {t}, {t}, 768, true, false, true>"),
            format!("layer_norm_grad<float, {t}, {t}, 192, true, true, true>"),
            format!("layer_norm_grad<float, {t}, {t}, 1280, false, true, false>"),
            format!("layer_norm_grad<{t}, {t}, {t}, 10, false, false, true>"),
        ]);
    }
    names.into_iter().map(|name| (Kernel::new(Source::Rows, name), 75)).collect()
}

#[cfg(test)]
#[path = "rows_tests.rs"]
mod tests;
