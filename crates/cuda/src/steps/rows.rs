//! Ops that treat elements or rows alone, or sum over rows.
//!
//! Sums over rows are cut into parts, whose number depends on the shape alone. Each part is summed into a row of the scratch, and
//! `sum_parts` adds these in order. Legend: M rows, C columns.

use crate::action::{Action, Address, Arg, Context, Kernel, Launch, Operand, Source, c_type};
use crate::error::CudaError;
use graph::op::Per;
use graph::random::drop_threshold;
use graph::{DType, Op, Shape, Type};

/// Threads of a block.
pub(super) const THREADS: usize = 256;
/// Vectors that a thread of an elementwise kernel has.
const VECTORS: usize = 2;
/// Blocks that sum columns: four for each processor of an H200.
const COLUMN_BLOCKS: usize = 528;
/// Rows that are worth a part of their own.
const PART_ROWS: usize = 64;
/// Up to this many rows one part does it, and a second launch is saved.
const FEW_ROWS: usize = 512;
/// Blocks of a layer norm's backward pass: two for each processor of an H200.
const NORM_PARTS: usize = 264;
/// Columns a layer norm can have: a block's shared memory holds a row.
const NORM_COLUMNS: usize = 12_288;

pub fn actions(cx: &Context<'_>) -> Result<Vec<Action>, CudaError> {
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
            let start = if accumulate && cx.accumulate { cx.input(1).address } else { 0 };
            Ok(sum_columns(cx.input(0), start, cx.output(0).address, cx.scratch))
        }
        Op::LayerNorm { eps, add } => layer_norm(cx, eps, add),
        Op::LayerNormGrad { add, half } => layer_norm_grad(cx, add, half),
        Op::Drop { rate, site, per } => drop(cx, rate, site, per),
        Op::Add => Ok(vec![add(cx, cx.input(0), cx.input(1), cx.output(0))?]),
        Op::Scale { factor } => scale(cx, factor),
        Op::Accumulate => accumulate(cx),
        Op::Assign { .. } => Ok(copy(cx.input(0), cx.output(0).address)),
        Op::Cast { .. } => cast(cx),
        Op::Pack { .. } => pack(cx),
        Op::Unpack { .. } => unpack(cx),
        _ => Err(cx.no_kernel()),
    }
}

pub fn scratch(op: &Op, inputs: &[&Type], _outputs: &[&Type]) -> usize {
    let shape = &inputs[0].shape;
    match op {
        Op::ColumnSum { .. } => column_sum_scratch(shape),
        Op::GeluGrad { bias: true } => gelu_grad_scratch(shape),
        Op::LayerNormGrad { .. } => 4 * norm_parts(shape) * 2 * shape.last(),
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

/// The operand's type in the kernels, or the error that there is none.
pub(super) fn typed(cx: &Context<'_>, operand: &Operand) -> Result<&'static str, CudaError> {
    c_type(operand.dtype).ok_or_else(|| cx.no_kernel())
}

/// Refuses operands that are not f32.
pub(super) fn singles(cx: &Context<'_>, operands: &[Operand]) -> Result<(), CudaError> {
    if operands.iter().all(|o| o.dtype == DType::F32) { Ok(()) } else { Err(cx.no_kernel()) }
}

/// Refuses operands of different types, or of one without kernels.
fn same_types(cx: &Context<'_>, operands: &[&Operand]) -> Result<(), CudaError> {
    let same = operands.iter().all(|o| o.dtype == operands[0].dtype && c_type(o.dtype).is_some());
    if same { Ok(()) } else { Err(cx.no_kernel()) }
}

/// Elements that 16 bytes of the widest type hold.
fn vector_of(dtypes: &[DType]) -> usize {
    16 / dtypes.iter().map(|d| d.bytes()).max().unwrap_or(16)
}

/// The grid of an elementwise kernel.
fn pieces(count: usize, vector: usize) -> [usize; 3] {
    [count.div_ceil(VECTORS * THREADS * vector), 1, 1]
}

/// For functions whose callers have checked the type.
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

fn add(cx: &Context<'_>, a: &Operand, b: &Operand, y: &Operand) -> Result<Action, CudaError> {
    let name = format!("add<{}, {}, {}>", typed(cx, a)?, typed(cx, b)?, typed(cx, y)?);
    let count = y.shape.count();
    let args = vec![pointer(a), pointer(b), pointer(y), Arg::I64(count as i64)];
    let grid = pieces(count, vector_of(&[a.dtype, b.dtype, y.dtype]));
    Ok(launch(Source::Rows, name, grid, THREADS, args))
}

fn scale(cx: &Context<'_>, factor: f64) -> Result<Vec<Action>, CudaError> {
    let (x, y) = (cx.input(0), cx.output(0));
    let name = format!("scale<{}, {}>", typed(cx, x)?, typed(cx, y)?);
    let count = y.shape.count();
    let args = vec![pointer(x), pointer(y), Arg::F32(factor as f32), Arg::I64(count as i64)];
    Ok(vec![launch(Source::Rows, name, pieces(count, vector_of(&[x.dtype, y.dtype])), THREADS, args)])
}

/// The first micro-step overwrites, the others add.
fn accumulate(cx: &Context<'_>) -> Result<Vec<Action>, CudaError> {
    singles(cx, cx.inputs)?;
    singles(cx, cx.outputs)?;
    let (so_far, x, sum) = (cx.input(0), cx.input(1), cx.output(0));
    if cx.accumulate { Ok(vec![add(cx, so_far, x, sum)?]) } else { Ok(copy(x, sum.address)) }
}

fn copy(from: &Operand, to: Address) -> Vec<Action> {
    let bytes = from.shape.count() * from.dtype.bytes();
    if from.address == to || bytes == 0 {
        return Vec::new();
    }
    vec![Action::Copy { from: from.address, to, bytes }]
}

fn drop(cx: &Context<'_>, rate: f64, site: u32, per: Per) -> Result<Vec<Action>, CudaError> {
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
        Per::Channel => return Err(cx.no_kernel()),
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
fn convert(
    cx: &Context<'_>,
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

fn cast(cx: &Context<'_>) -> Result<Vec<Action>, CudaError> {
    let (x, y) = (cx.input(0), cx.output(0));
    convert(cx, (x.address, x.dtype), (y.address, y.dtype), y.shape.count())
}

fn pack(cx: &Context<'_>) -> Result<Vec<Action>, CudaError> {
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

fn unpack(cx: &Context<'_>) -> Result<Vec<Action>, CudaError> {
    let flat = cx.input(0);
    let (mut actions, mut at) = (Vec::new(), 0);
    for value in cx.outputs {
        let (count, from) = (value.shape.count(), flat.address + (at * flat.dtype.bytes()) as Address);
        actions.extend(convert(cx, (from, flat.dtype), (value.address, value.dtype), count)?);
        at += count;
    }
    Ok(actions)
}

// ---- sums over rows -----------------------------------------------------------------------------------------------

/// How a matrix (rows, columns) is cut to be summed over its rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ColumnCut {
    /// Columns of a block.
    span: usize,
    /// Blocks side by side.
    across: usize,
    parts: usize,
    /// Rows of a part.
    per: usize,
}

impl ColumnCut {
    fn of(shape: &Shape) -> Self {
        let (rows, columns) = (shape.rows(), shape.last());
        let (wide, few) = (columns.is_multiple_of(8), rows <= FEW_ROWS);
        let span = match (wide, few) {
            (true, true) => 64,
            (false, true) => 8,
            (false, false) => 32,
            // The span that leaves the fewest threads idle; of equals, the widest.
            (true, false) => {
                *[256, 128, 64, 32].iter().min_by_key(|&&span| columns.next_multiple_of(span)).unwrap_or(&256)
            }
        };
        let across = columns.div_ceil(span);
        let most = if few { 1 } else { rows.div_ceil(PART_ROWS) };
        let per = rows.div_ceil((COLUMN_BLOCKS / across).clamp(1, most)).max(1);
        ColumnCut { span, across, parts: rows.div_ceil(per).max(1), per }
    }

    /// Elements that a thread has of a row.
    fn vector(shape: &Shape, dtype: DType) -> usize {
        if shape.last().is_multiple_of(8) { vector_of(&[dtype]) } else { 1 }
    }

    fn scratch(self, columns: usize) -> usize {
        if self.parts == 1 { 0 } else { 4 * self.parts * columns }
    }

    /// Template arguments after the type.
    fn arguments(self, vector: usize, rows_at_once: usize) -> String {
        format!("{vector}, {}, {rows_at_once}", self.span / vector)
    }
}

/// Bytes of scratch of [`column_sum`] for an x of this shape.
pub fn column_sum_scratch(shape: &Shape) -> usize {
    ColumnCut::of(shape).scratch(shape.last())
}

/// out (C), in f32, becomes the sum over the rows of x, or grows by it. x is of a type that has kernels.
pub fn column_sum(x: &Operand, out: Address, accumulate: bool, scratch: Address) -> Vec<Action> {
    sum_columns(x, if accumulate { out } else { 0 }, out, scratch)
}

/// out = start + the sum over the rows of x; no start is 0.
fn sum_columns(x: &Operand, start: Address, out: Address, scratch: Address) -> Vec<Action> {
    let (rows, columns, cut) = (x.shape.rows(), x.shape.last(), ColumnCut::of(&x.shape));
    let arguments = cut.arguments(ColumnCut::vector(&x.shape, x.dtype), 4);
    let name = format!("column_sum<{}, {arguments}>", checked(x.dtype));
    let whole = cut.parts == 1;
    let (first_start, first_out) = if whole { (start, out) } else { (0, scratch) };
    let args = vec![
        pointer(x),
        Arg::I32(rows as i32),
        Arg::I32(columns as i32),
        Arg::I32(cut.per as i32),
        Arg::Pointer(first_start),
        Arg::Pointer(first_out),
    ];
    let mut actions = vec![launch(Source::Rows, name, [cut.across, cut.parts, 1], THREADS, args)];
    if !whole {
        actions.push(sum_parts(scratch, cut.parts, columns, start, [out, 0], columns));
    }
    actions
}

/// Adds rows of partial sums; columns from `split` on go to the second place.
fn sum_parts(
    parts: Address,
    rows: usize,
    columns: usize,
    start: Address,
    out: [Address; 2],
    split: usize,
) -> Action {
    let args = vec![
        Arg::Pointer(parts),
        Arg::I32(rows as i32),
        Arg::I32(columns as i32),
        Arg::Pointer(start),
        Arg::Pointer(out[0]),
        Arg::Pointer(out[1]),
        Arg::I32(split as i32),
    ];
    launch(Source::Rows, "sum_parts".into(), [columns.div_ceil(32), 1, 1], 1024, args)
}

/// Bytes of scratch of [`gelu_grad`] for a dx of this shape.
pub fn gelu_grad_scratch(shape: &Shape) -> usize {
    column_sum_scratch(shape)
}

/// dx = dy·gelu'(pre), and bias_sums (C), in f32, its sum over rows. pre, dy and dx are of one type that has kernels; dy may
/// lie where dx lies.
pub fn gelu_grad(
    pre: &Operand,
    dy: Address,
    dx: &Operand,
    bias_sums: Address,
    scratch: Address,
) -> Vec<Action> {
    let (rows, columns, cut) = (dx.shape.rows(), dx.shape.last(), ColumnCut::of(&dx.shape));
    let arguments = cut.arguments(ColumnCut::vector(&dx.shape, dx.dtype), 2);
    let name = format!("gelu_grad_sums<{}, {arguments}>", checked(dx.dtype));
    let whole = cut.parts == 1;
    let args = vec![
        pointer(pre),
        Arg::Pointer(dy),
        pointer(dx),
        Arg::I32(rows as i32),
        Arg::I32(columns as i32),
        Arg::I32(cut.per as i32),
        Arg::Pointer(if whole { bias_sums } else { scratch }),
    ];
    let mut actions = vec![launch(Source::Rows, name, [cut.across, cut.parts, 1], THREADS, args)];
    if !whole {
        actions.push(sum_parts(scratch, cut.parts, columns, 0, [bias_sums, 0], columns));
    }
    actions
}

fn gelu_grad_step(cx: &Context<'_>, bias: bool) -> Result<Vec<Action>, CudaError> {
    let (pre, dy, dx) = (cx.input(0), cx.input(1), cx.output(0));
    same_types(cx, &[pre, dy, dx])?;
    if bias {
        singles(cx, &cx.outputs[1..])?;
        return Ok(gelu_grad(pre, dy.address, dx, cx.output(1).address, cx.scratch));
    }
    let count = dx.shape.count();
    let args = vec![pointer(pre), pointer(dy), pointer(dx), Arg::I64(count as i64)];
    let name = format!("gelu_grad<{}>", checked(dx.dtype));
    Ok(vec![launch(Source::Rows, name, pieces(count, vector_of(&[dx.dtype])), THREADS, args)])
}

// ---- layer norm ---------------------------------------------------------------------------------------------------

/// As `vector_of` in rows.cu.
fn norm_vector(columns: usize) -> usize {
    if columns.is_multiple_of(4) { 4 } else { 1 }
}

/// Rows that a block has at a time. As `lanes_of` in rows.cu: a row has a power of two of threads, each of at most `most` columns.
fn norm_rows(columns: usize, most: usize) -> usize {
    THREADS / columns.div_ceil(most).next_power_of_two().clamp(4, THREADS)
}

/// Columns of a thread, forward and backward.
const FORWARD: usize = 16;
const BACKWARD: usize = 24;

/// Blocks of the backward pass, each with a row of partial sums.
fn norm_parts(shape: &Shape) -> usize {
    shape.rows().div_ceil(norm_rows(shape.last(), BACKWARD)).clamp(1, NORM_PARTS)
}

fn layer_norm(cx: &Context<'_>, eps: f64, add: bool) -> Result<Vec<Action>, CudaError> {
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

fn layer_norm_grad(cx: &Context<'_>, add: bool, half: Option<DType>) -> Result<Vec<Action>, CudaError> {
    let (x, dy, dx) = (cx.input(0), cx.input(4), cx.output(0));
    let more = if add { cx.input(5) } else { x };
    let copy = if half.is_some() { cx.output(3) } else { dx };
    singles(cx, &cx.inputs[1..4])?;
    singles(cx, &cx.outputs[1..3])?;
    let (rows, columns) = (x.shape.rows(), x.shape.last());
    if columns > NORM_COLUMNS || more.dtype != x.dtype || dx.dtype != x.dtype {
        return Err(cx.no_kernel());
    }
    let types = [typed(cx, x)?, typed(cx, dy)?, typed(cx, copy)?].join(", ");
    let name = format!("layer_norm_grad<{types}, {columns}, {add}, {}>", half.is_some());
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
        Arg::Pointer(cx.scratch),
        Arg::I32(rows as i32),
    ];
    let out = [cx.output(1).address, cx.output(2).address];
    Ok(vec![
        launch(Source::Rows, name, [parts, 1, 1], THREADS, args),
        sum_parts(cx.scratch, parts, 2 * columns, 0, out, columns),
    ])
}

/// Instances that stand for all, and the compute capability that each needs.
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
            format!("layer_norm_grad<{t}, {t}, {t}, 768, true, false>"),
            format!("layer_norm_grad<float, {t}, {t}, 192, true, true>"),
            format!("layer_norm_grad<float, {t}, {t}, 1280, false, true>"),
            format!("layer_norm_grad<{t}, {t}, {t}, 10, false, false>"),
        ]);
    }
    names.into_iter().map(|name| (Kernel::new(Source::Rows, name), 75)).collect()
}

#[cfg(test)]
pub(super) mod testing {
    use super::*;
    use crate::action::Facts;

    /// Values such as "bf16[4,8]", 1 MiB apart, from an address on.
    pub fn operands(from: Address, types: &[&str]) -> Vec<Operand> {
        let of = |(i, text): (usize, &&str)| {
            let Type { dtype, shape } = text.parse().unwrap();
            Operand { address: from + ((i as Address) << 20), dtype, shape }
        };
        types.iter().enumerate().map(of).collect()
    }

    pub const SCRATCH: Address = 7 << 32;

    /// The actions of a step whose inputs start at 1 << 32 and outputs at 2 << 32.
    pub fn step(
        op: Op,
        inputs: &[&str],
        outputs: &[&str],
        accumulate: bool,
    ) -> Result<Vec<Action>, CudaError> {
        let (inputs, outputs) = (operands(1 << 32, inputs), operands(2 << 32, outputs));
        step_on(op, &inputs, &outputs, accumulate)
    }

    pub fn step_on(
        op: Op,
        inputs: &[Operand],
        outputs: &[Operand],
        accumulate: bool,
    ) -> Result<Vec<Action>, CudaError> {
        let facts = Facts::h200();
        let (layer, header, tf32) = ("blocks.0", 9 << 32, false);
        let cx = Context {
            op: &op,
            layer,
            inputs,
            outputs,
            scratch: SCRATCH,
            header,
            accumulate,
            tf32,
            facts: &facts,
        };
        super::super::actions(&cx)
    }

    pub fn launches(actions: &[Action]) -> Vec<&Launch> {
        let mut launches = Vec::new();
        for action in actions {
            if let Action::Launch(launch) = action {
                launches.push(launch);
            }
        }
        launches
    }

    pub fn names(actions: &[Action]) -> Vec<&str> {
        launches(actions).iter().map(|launch| launch.kernel.name.as_str()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::testing::*;
    use super::*;

    #[test]
    fn a_cut_covers_every_row_and_column_once() {
        for rows in [1, 3, 128, 512, 513, 8320, 50432, 1_000_000] {
            for columns in [1, 10, 24, 96, 192, 576, 768, 1000, 1001, 1280, 2304, 3072, 20_000] {
                let cut = ColumnCut::of(&Shape::from([rows, columns]));
                let once = |n: usize, of: usize, total: usize| (n - 1) * of < total && total <= n * of;
                assert!(once(cut.across, cut.span, columns), "{rows}×{columns}: {cut:?}");
                assert!(once(cut.parts, cut.per, rows), "{rows}×{columns}: {cut:?}");
                assert!(cut.across * cut.parts <= COLUMN_BLOCKS.max(cut.across), "{rows}×{columns}: {cut:?}");
                assert!(cut.span <= THREADS);
            }
        }
    }

    #[test]
    fn partial_sums_fit_their_scratch() {
        let x = Type::new(DType::Bf16, [50432, 3072]);
        let bytes = scratch(&Op::ColumnSum { accumulate: false }, &[&x], &[]);
        let op = Op::ColumnSum { accumulate: false };
        let actions = step(op, &["bf16[50432,3072]"], &["f32[3072]"], false).unwrap();
        assert_eq!(names(&actions), ["column_sum<bf16, 8, 32, 4>", "sum_parts"]);
        let grid = launches(&actions)[0].grid;
        assert_eq!(grid, [12, 44, 1]);
        assert_eq!(bytes, 4 * grid[1] as usize * 3072);
        assert_eq!(launches(&actions)[1].args[1], Arg::I32(44));

        let x = Type::new(DType::F32, [8320, 192]);
        let norm = Op::LayerNormGrad { add: false, half: None };
        let inputs = ["f32[8320,192]", "f32[8320]", "f32[8320]", "f32[192]", "f32[8320,192]"];
        let actions = step(norm.clone(), &inputs, &["f32[8320,192]", "f32[192]", "f32[192]"], false).unwrap();
        let grid = launches(&actions)[0].grid;
        assert_eq!(grid, [260, 1, 1]);
        assert_eq!(scratch(&norm, &[&x], &[]), 4 * 260 * 2 * 192);
        assert_eq!(launches(&actions)[1].grid, [12, 1, 1]);
    }

    #[test]
    fn few_rows_are_summed_by_one_launch() {
        for (x, sums) in [("f32[256,1000]", "f32[1000]"), ("bf16[3,10]", "f32[10]")] {
            let op = Op::ColumnSum { accumulate: false };
            let actions = step(op.clone(), &[x], &[sums], false).unwrap();
            assert_eq!(actions.len(), 1, "{x}");
            assert_eq!(scratch(&op, &[&x.parse().unwrap()], &[]), 0);
            assert_eq!(launches(&actions)[0].args[5], Arg::Pointer(2 << 32));
        }
    }

    #[test]
    fn sums_start_from_what_is_there_only_if_told() {
        let start = |accumulate| {
            let op = Op::ColumnSum { accumulate: true };
            let actions = step(op, &["bf16[8320,768]", "f32[768]"], &["f32[768]"], accumulate).unwrap();
            assert_eq!(launches(&actions)[0].args[4], Arg::Pointer(0));
            launches(&actions)[1].args[3]
        };
        assert_eq!(start(true), Arg::Pointer((1 << 32) + (1 << 20)));
        assert_eq!(start(false), Arg::Pointer(0));
    }

    #[test]
    fn the_first_micro_step_overwrites() {
        let accumulate = |inputs: &[Operand], outputs: &[Operand], accumulate| {
            step_on(Op::Accumulate, inputs, outputs, accumulate).unwrap()
        };
        let (inputs, outputs) = (operands(1 << 32, &["f32[3,5]"; 2]), operands(2 << 32, &["f32[3,5]"]));
        let copy = Action::Copy { from: (1 << 32) + (1 << 20), to: 2 << 32, bytes: 60 };
        assert_eq!(accumulate(&inputs, &outputs, false), [copy]);
        assert_eq!(accumulate(&inputs, &inputs[1..], false), []);
        assert_eq!(names(&accumulate(&inputs, &outputs, true)), ["add<float, float, float>"]);
    }

    #[test]
    fn a_layer_norm_has_threads_for_every_row() {
        for (columns, forward, backward) in
            [(10, 64, 64), (24, 64, 64), (96, 32, 64), (192, 16, 32), (768, 4, 8), (1024, 4, 4), (1280, 2, 4)]
        {
            assert_eq!(
                (norm_rows(columns, FORWARD), norm_rows(columns, BACKWARD)),
                (forward, backward),
                "{columns}"
            );
            // The backward pass keeps a row of every group in shared memory.
            assert!(4 * backward * columns <= 48 << 10);
        }
        assert_eq!(norm_rows(NORM_COLUMNS, BACKWARD), 1);
        let op = Op::LayerNorm { eps: 1e-6, add: true };
        let inputs = ["f32[3,7,768]", "bf16[3,7,768]", "f32[768]", "f32[768]"];
        let outputs = ["f32[3,7,768]", "bf16[3,7,768]", "f32[3,7]", "f32[3,7]"];
        let actions = step(op, &inputs, &outputs, false).unwrap();
        assert_eq!(names(&actions), ["layer_norm<float, bf16, bf16, 768, true>"]);
        assert_eq!(launches(&actions)[0].grid, [6, 1, 1]);
    }

    #[test]
    fn types_without_a_kernel_are_refused() {
        let refused = |op, inputs: &[&str], outputs: &[&str]| step(op, inputs, outputs, false).unwrap_err();
        let error = refused(Op::Gelu, &["f64[4,8]"], &["f64[4,8]"]).to_string();
        assert_eq!(error, "blocks.0: the CUDA executor has no kernel for gelu of f64");
        refused(Op::Gelu, &["f32[4,8]"], &["bf16[4,8]"]);
        refused(Op::Accumulate, &["bf16[4]", "bf16[4]"], &["bf16[4]"]);
        refused(Op::Cast { to: DType::I32 }, &["f32[4]"], &["i32[4]"]);
        refused(Op::ColumnSum { accumulate: false }, &["bf16[4,8]"], &["bf16[8]"]);
        let norm = Op::LayerNorm { eps: 1e-6, add: false };
        refused(norm.clone(), &["f32[4,8]", "bf16[8]", "f32[8]"], &["f32[4,8]", "f32[4]", "f32[4]"]);
        let wide = ["f32[4,99999]", "f32[99999]", "f32[99999]"];
        refused(norm, &wide, &["f32[4,99999]", "f32[4]", "f32[4]"]);
    }

    #[test]
    fn packed_values_lie_end_to_end() {
        let op = Op::Pack { align: 8, to: Some(DType::Bf16) };
        let actions = step(op, &["f32[3]", "f32[2,4]"], &["bf16[16]"], false).unwrap();
        // The second starts at 6 bytes, where vectors can't be written.
        assert_eq!(names(&actions), ["cast<float, bf16, 4>", "cast<float, bf16, 1>"]);
        assert_eq!(launches(&actions)[1].args[1], Arg::Pointer((2 << 32) + 6));
        assert_eq!(actions[2], Action::Zero { at: (2 << 32) + 22, bytes: 10 });

        let op = Op::Unpack { shapes: vec![Shape::from([3]), Shape::from([4])], to: None, over: false };
        let actions = step(op, &["f32[8]"], &["f32[3]", "f32[4]"], false).unwrap();
        let second = Action::Copy { from: (1 << 32) + 12, to: (2 << 32) + (1 << 20), bytes: 16 };
        assert_eq!(actions[1], second);
    }

    #[test]
    fn draws_are_by_sample_and_token() {
        let op = Op::Drop { rate: 0.5, site: 3, per: Per::Element };
        let actions = step(op.clone(), &["bf16[2,65,192]"], &["bf16[2,65,192]"], false).unwrap();
        assert_eq!(names(&actions), ["drop_elements<bf16, bf16, 192>"]);
        assert_eq!(launches(&actions)[0].args[3..5], [Arg::I64(130), Arg::I32(65)]);
        let actions = step(op, &["bf16[6,10]"], &["bf16[6,10]"], false).unwrap();
        assert_eq!(launches(&actions)[0].args[3..5], [Arg::I64(6), Arg::I32(1)]);
        let op = Op::Drop { rate: 0.25, site: 3, per: Per::Sample };
        let actions = step(op, &["f32[2,65,192]"], &["f32[2,65,192]"], false).unwrap();
        assert_eq!(launches(&actions)[0].grid, [2, 13, 1]);
        let draw = [Arg::U32(3), Arg::U32(1 << 30), Arg::F32(1.0 / 0.75)];
        assert_eq!(launches(&actions)[0].args[4..], draw);
    }
}
