//! Ops that only move channels, and dropout of channels.

use super::rows::{THREADS, launch, pointer, typed, vector_of};
use crate::action::{Action, Address, Arg, Kernel, Operand, Source, StepContext};
use crate::error::CudaError;
use graph::Op;
use graph::random::drop_threshold;

/// Rows that a thread of `drop_channels` has.
const ROWS: usize = 8;

pub fn actions(cx: &StepContext<'_>) -> Result<Vec<Action>, CudaError> {
    match *cx.op {
        Op::Concat => concat(cx),
        Op::Slice { start, channels } => slice(cx, start, channels),
        _ => Err(cx.no_kernel()),
    }
}

/// Some columns of a matrix: address of the first, their bytes, and the stride of rows in bytes.
#[derive(Clone, Copy)]
struct Columns {
    address: Address,
    bytes: usize,
    stride: usize,
}

impl Columns {
    fn of(operand: &Operand, start: usize, columns: usize) -> Self {
        let bytes = operand.dtype.bytes();
        let address = operand.address + (start * bytes) as Address;
        Columns { address, bytes: columns * bytes, stride: operand.shape.last() * bytes }
    }
}

fn concat(cx: &StepContext<'_>) -> Result<Vec<Action>, CudaError> {
    let (y, mut start, mut actions) = (cx.output(0), 0, Vec::new());
    for part in cx.inputs {
        let columns = part.shape.last();
        let (from, to) = (Columns::of(part, 0, columns), Columns::of(y, start, columns));
        if part.dtype != y.dtype {
            return Err(cx.no_kernel());
        }
        actions.push(copy(cx, from, to, y.shape.rows())?);
        start += columns;
    }
    Ok(actions)
}

fn slice(cx: &StepContext<'_>, start: usize, channels: usize) -> Result<Vec<Action>, CudaError> {
    let (x, y) = (cx.input(0), cx.output(0));
    if x.dtype != y.dtype {
        return Err(cx.no_kernel());
    }
    let (from, to) = (Columns::of(x, start, channels), Columns::of(y, 0, channels));
    Ok(vec![copy(cx, from, to, y.shape.rows())?])
}

/// Copies by the widest units that all borders allow.
fn copy(cx: &StepContext<'_>, from: Columns, to: Columns, rows: usize) -> Result<Action, CudaError> {
    let fits = |unit: usize| {
        let borders = [from.bytes, from.stride, to.stride, from.address as usize, to.address as usize];
        borders.iter().all(|border| border.is_multiple_of(unit))
    };
    let units = [(16, "uint4"), (8, "uint2"), (4, "u32"), (2, "u16")];
    let (unit, name) = units.into_iter().find(|(unit, _)| fits(*unit)).ok_or_else(|| cx.no_kernel())?;
    let (width, count) = (from.bytes / unit, rows * from.bytes / unit);
    let count = u32::try_from(count).map_err(|_| cx.no_kernel())?;
    let args = vec![
        Arg::Pointer(from.address),
        Arg::I32((from.stride / unit) as i32),
        Arg::Pointer(to.address),
        Arg::I32((to.stride / unit) as i32),
        Arg::U32(width as u32),
        Arg::U32(count),
    ];
    let grid = [(count as usize).div_ceil(THREADS), 1, 1];
    Ok(launch(Source::Channels, format!("copy_columns<{name}>"), grid, THREADS, args))
}

/// Drops whole channels of a sample.
pub fn drop(cx: &StepContext<'_>, rate: f64, site: u32) -> Result<Vec<Action>, CudaError> {
    let (x, y) = (cx.input(0), cx.output(0));
    let (samples, columns) = (x.shape.0.first().copied().unwrap_or(1), x.shape.last());
    let rows = x.shape.rows() / samples.max(1);
    let most = vector_of(&[x.dtype, y.dtype]);
    let vector = if columns.is_multiple_of(most) { most } else { 1 };
    let across = columns.div_ceil(vector);
    let wide = across.min(THREADS);
    let per = THREADS / wide * ROWS;
    let args = vec![
        pointer(x),
        pointer(y),
        Arg::Pointer(cx.header),
        Arg::I32(rows as i32),
        Arg::I32(columns as i32),
        Arg::U32(site),
        Arg::U32(drop_threshold(rate)),
        Arg::F32((1.0 / (1.0 - rate)) as f32),
    ];
    let name = format!("drop_channels<{}, {}, {vector}>", typed(cx, x)?, typed(cx, y)?);
    let grid = [rows.div_ceil(per), across.div_ceil(wide), samples];
    Ok(vec![launch(Source::Channels, name, grid, THREADS, args)])
}

/// Representative instances, each with the compute capability that it needs.
pub fn kernels() -> Vec<(Kernel, u32)> {
    let units = ["uint4", "uint2", "u32", "u16"].map(|unit| format!("copy_columns<{unit}>"));
    let drops = ["float, float, 4", "bf16, bf16, 8", "f16, f16, 8", "bf16, bf16, 1"];
    let drops = drops.map(|types| format!("drop_channels<{types}>"));
    units.into_iter().chain(drops).map(|name| (Kernel::new(Source::Channels, name), 75)).collect()
}

#[cfg(test)]
mod tests {
    use super::super::testing::*;
    use super::*;
    use graph::op::Per;

    #[test]
    fn channels_are_copied_by_the_widest_units() {
        let parts = ["bf16[2,4,4,512]", "bf16[2,4,4,12]", "bf16[2,4,4,3]"];
        let actions = step(Op::Concat, &parts, &["bf16[2,4,4,527]"]).unwrap();
        assert_eq!(names(&actions), ["copy_columns<u16>"; 3]);
        let parts = ["bf16[2,4,4,512]", "bf16[2,4,4,1024]"];
        let actions = step(Op::Concat, &parts, &["bf16[2,4,4,1536]"]).unwrap();
        assert_eq!(names(&actions), ["copy_columns<uint4>"; 2]);
        let second = launches(&actions)[1];
        assert_eq!(second.args[2], Arg::Pointer((2 << 32) + 1024));
        assert_eq!(second.args[3..], [Arg::I32(192), Arg::U32(128), Arg::U32(32 * 128)]);
        let op = Op::Slice { start: 6, channels: 4 };
        let actions = step(op, &["f32[2,4,4,12]"], &["f32[2,4,4,4]"]).unwrap();
        assert_eq!(names(&actions), ["copy_columns<uint2>"]);
        assert_eq!(launches(&actions)[0].args[0], Arg::Pointer((1 << 32) + 24));
    }

    #[test]
    fn blocks_of_a_dropout_cover_all_channels() {
        let op = Op::Drop { rate: 0.1, site: 3, per: Per::Channel };
        let grid = |ty: &str| launches(&step(op.clone(), &[ty], &[ty]).unwrap())[0].grid;
        assert_eq!(grid("bf16[8,128,128,512]"), [16_384 / 32, 1, 8]);
        assert_eq!(grid("bf16[2,4,4,5]"), [1, 1, 2]);
        assert_eq!(grid("f32[2,16,4,2048]"), [8, 2, 2]);
    }
}
