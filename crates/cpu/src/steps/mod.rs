//! Each op on the thread pool: how it is cut into pieces, and which kernel runs on a piece.
//!
//! How an op is cut depends on its shapes alone, never on the number of threads. Values of many rows are cut into blocks of
//! samples (`blocks.rs`), the same for every op, so that a block can go from step to step. Outside of its pieces, a step's function
//! writes nothing, and reads nothing that it doesn't read inside of each.

mod attention;
mod batch_norm;
mod blocks;
mod channels;
mod context;
mod conv;
mod convert;
mod fp8;
mod linear;
mod loss;
mod maps;
mod muon;
mod position_bias;
mod prepare;
mod random;
mod reduce;
mod resize;
mod resized_loss;
mod rows;
mod table;
mod tokens;
mod update;
mod windows;

pub use attention::tiles as attention_tiles;
pub(crate) use blocks::{Blocks, samples};
pub(crate) use context::{Context, Cut, Phase, Share, Team};
pub(crate) use convert::{load, store};
pub use table::Target;
pub(crate) use table::{Kernel, Types, kernel};

use crate::kernels::Float;

/// Elements a piece of an elementwise op has: enough to outweigh the hand-over, few enough to share out.
const PIECE: usize = 1 << 15;

/// Rows a piece of a row-wise op has.
pub(crate) fn row_piece(cols: usize) -> usize {
    (PIECE / cols.max(1)).max(1)
}

/// Runs one step.
///
/// # Safety
/// Nothing else touches the step's operands and scratch meanwhile, but for inputs that others only read; outputs
/// overlap inputs only where the op may work in place.
pub(crate) unsafe fn run<T: Float>(cx: &Context<'_, T>) {
    // SAFETY: passed on to the caller; wide numbers are the step's own while it runs.
    unsafe {
        convert::widen(cx);
        cx.step.kernel.run(cx);
        convert::round(cx);
    }
}
