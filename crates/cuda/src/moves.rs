//! Copies into and out of a run: inputs, the header, numbers for the host. All that are due at one time are
//! moved by one launch, but for what is large. A copy for each would have the GPU change to its copy engine and back, and wait both times.

use crate::action::{Address, Arg, Kernel, Launch, Source};
use crate::driver::Stream;
use crate::error::CudaError;
use crate::launch::Ready;
use crate::modules::Modules;

/// Most moves that one launch of the kernel takes.
const MOST: usize = 6;
const THREADS: usize = 256;
/// Bytes that a thread moves before there are more blocks, and the most blocks.
const BYTES: usize = 64;
const BLOCKS: usize = 1056;
/// Bytes from which on the copy engine is faster in spite of the switch.
const LARGE: usize = 8 << 20;

/// Copy of bytes, either side of which may be pinned host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Move {
    pub from: Address,
    pub to: Address,
    pub bytes: usize,
}

pub fn kernel() -> Kernel {
    Kernel::new(Source::Moves, "moves")
}

/// Puts moves into a stream.
///
/// # Safety
/// The host leaves its side of them alone until the stream has come past this.
pub(crate) unsafe fn start(moves: &[Move], modules: &mut Modules, stream: &Stream) -> Result<(), CudaError> {
    let doing = |moves: &[Move]| {
        let bytes: usize = moves.iter().map(|m| m.bytes).sum();
        format!("moving {bytes} bytes")
    };
    let (large, small): (Vec<Move>, Vec<Move>) = moves.iter().partition(|m| m.bytes > LARGE);
    large.iter().try_for_each(|m| stream.copy(m.from, m.to, m.bytes))?;
    small.chunks(MOST).try_for_each(|some| Ready::new(&launch(some), modules)?.start(stream, || doing(some)))
}

fn launch(moves: &[Move]) -> Launch {
    let most = moves.iter().map(|m| m.bytes).max().unwrap_or(0);
    let blocks = most.div_ceil(THREADS * BYTES).clamp(1, BLOCKS);
    let none = Move { from: 0, to: 0, bytes: 0 };
    let all: [Move; MOST] = std::array::from_fn(|i| moves.get(i).copied().unwrap_or(none));
    let args = |m: Move| [Arg::Pointer(m.from), Arg::Pointer(m.to), Arg::I64(m.bytes as i64)];
    Launch {
        kernel: kernel(),
        grid: [blocks as u32, moves.len() as u32, 1],
        block: THREADS as u32,
        shared: 0,
        args: all.into_iter().flat_map(args).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_launch_has_a_row_of_blocks_for_each() {
        let moves = [Move { from: 1, to: 2, bytes: 40 }, Move { from: 3, to: 4, bytes: 1 << 20 }];
        let Launch { grid, args, .. } = launch(&moves);
        assert_eq!(grid, [64, 2, 1]);
        assert_eq!(args[3..6], [Arg::Pointer(3), Arg::Pointer(4), Arg::I64(1 << 20)]);
        assert_eq!((args.len(), args[17]), (3 * MOST, Arg::I64(0)));
        assert_eq!(launch(&[Move { bytes: 1 << 40, ..moves[0] }]).grid, [BLOCKS as u32, 1, 1]);
    }
}
