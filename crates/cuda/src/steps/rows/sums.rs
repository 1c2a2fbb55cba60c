//! Sums over rows: tiling of a matrix, partial sums, and the launch that adds those of many sums.

use super::{THREADS, checked, launch, pointer, vector_of};
use crate::action::{Action, Address, Arg, Constants, Operand, PartialSum, Source};
use graph::{DType, Shape};

/// Blocks that sum columns: four per multiprocessor of an H200.
pub(super) const COLUMN_BLOCKS: usize = 528;
/// Fewest rows of a part.
const PART_ROWS: usize = 64;
/// Most rows of a single part, which saves a second launch.
const FEW_ROWS: usize = 512;

/// Tiling of a matrix (rows, columns) for sums over its rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::steps) struct ColumnTiling {
    /// Columns of a block.
    pub span: usize,
    /// Blocks side by side.
    pub across: usize,
    pub parts: usize,
    /// Rows of a part.
    pub per: usize,
}

impl ColumnTiling {
    pub fn of(shape: &Shape) -> Self {
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
        ColumnTiling { span, across, parts: rows.div_ceil(per).max(1), per }
    }

    /// Elements that a thread has of a row.
    pub fn vector(shape: &Shape, dtype: DType) -> usize {
        if shape.last().is_multiple_of(8) { vector_of(&[dtype]) } else { 1 }
    }

    /// Bytes of partial sums.
    pub fn bytes(self, columns: usize) -> usize {
        if self.parts == 1 { 0 } else { 4 * self.parts * columns }
    }

    /// Template arguments after the type.
    pub fn arguments(self, vector: usize, rows_at_once: usize) -> String {
        format!("{vector}, {}, {rows_at_once}", self.span / vector)
    }
}

/// Bytes for the partial sums of a matrix of this shape over its rows.
pub fn column_parts(shape: &Shape) -> usize {
    ColumnTiling::of(shape).bytes(shape.last())
}

/// out = start + the sum over the rows of x.
pub(super) fn sum_columns(x: &Operand, start: Option<Address>, out: Address, parts: Address) -> Vec<Action> {
    let (rows, columns, cut) = (x.shape.rows(), x.shape.last(), ColumnTiling::of(&x.shape));
    let arguments = cut.arguments(ColumnTiling::vector(&x.shape, x.dtype), 4);
    let name = format!("column_sum<{}, {arguments}>", checked(x.dtype));
    let whole = cut.parts == 1;
    let (first_start, first_out) = if whole { (start.unwrap_or(0), out) } else { (0, parts) };
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
        let (rows, stride) = (cut.parts, columns);
        actions.push(Action::Sum(PartialSum { parts, rows, stride, columns, start, out }));
    }
    actions
}

/// Words of a row of `sum_parts`'s table: parts, start, out, rows, stride, columns, first block.
pub(super) const SUM_BYTES: usize = 40;
/// Columns of a block of `sum_parts`.
const SUM_COLUMNS: usize = 32;
/// Columns from which on a thread has one to itself, the kernel's `WIDE_SUM`.
const WIDE_SUM: usize = 16_384;

/// One launch that makes all these sums.
pub fn sum_parts(sums: &[PartialSum], constants: &mut Constants) -> Action {
    let (mut table, mut blocks) = (Vec::with_capacity(sums.len() * SUM_BYTES), 0);
    for sum in sums {
        let PartialSum { parts, rows, stride, columns, start, out } = *sum;
        [parts, start.unwrap_or(0), out].iter().for_each(|word| table.extend(word.to_le_bytes()));
        let sizes = [rows, stride, columns, blocks].map(|n| n as i32);
        sizes.iter().for_each(|n| table.extend(n.to_le_bytes()));
        blocks += columns.div_ceil(if columns >= WIDE_SUM { 1024 } else { SUM_COLUMNS });
    }
    let args = vec![Arg::Pointer(constants.put(&table)), Arg::I32(sums.len() as i32)];
    launch(Source::Rows, "sum_parts".into(), [blocks, 1, 1], 1024, args)
}
