//! Context of a running step: its operands, and the threads that run its pieces.

use crate::executor::{Bound, Operand};
use crate::kernels::Float;
use crate::memory::View;
use crate::pool::Pool;
use graph::{Header, Shape};
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::blocks::Blocks;

/// Context of a running step.
pub(crate) struct Context<'a, T> {
    pub team: Team<'a>,
    pub header: &'a Header,
    pub step: &'a Bound<T>,
    /// Flag for benchmarks: leave out all but the matmuls.
    pub matmuls_only: bool,
}

/// Threads that run the pieces of a step. Since a step's function does nothing outside of them, one call of it runs
/// all, or some, or none.
pub(crate) enum Team<'a> {
    /// All threads together, one phase after the other.
    All(&'a Pool),
    /// One thread, which has these pieces of one phase. It may have others of the same phase next, and then `moment` is the same:
    /// what the phase reads of what all samples share is as it was.
    One { share: Share, thread: usize, threads: usize, moment: Option<u64> },
    /// No threads: the phases are written down.
    Survey { phases: Mutex<Vec<Phase>>, threads: usize },
}

/// Some pieces of one phase of a step.
pub(crate) struct Share {
    phase: usize,
    pieces: Range<usize>,
    /// Phases that the step's function has come to so far.
    seen: AtomicUsize,
}

impl Share {
    pub fn new(phase: usize, pieces: Range<usize>) -> Self {
        Share { phase, pieces, seen: AtomicUsize::new(0) }
    }
}

/// Pieces of a step that don't depend on each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Phase {
    pub pieces: usize,
    pub cut: Cut,
}

/// Operands that a piece touches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cut {
    /// Any of them.
    Anyhow,
    /// Operands of its block's samples, those that all samples share for reading, and scratch; so many pieces are one
    /// block.
    Blocks { blocks: Blocks, pieces: usize },
    /// Scratch, and what all samples share.
    Shared,
}

impl<T: Float> Context<'_, T> {
    pub(super) fn input(&self, i: usize) -> &Operand<T> {
        &self.step.inputs[i]
    }

    pub(super) fn output(&self, i: usize) -> &Operand<T> {
        &self.step.outputs[i]
    }

    /// The step's scratch as elements of `U`.
    pub(super) fn scratch<U>(&self) -> View<U> {
        let bytes = self.step.scratch;
        bytes.cast(bytes.len() / size_of::<U>())
    }

    pub(super) fn threads(&self) -> usize {
        match &self.team {
            Team::All(pool) => pool.threads(),
            Team::One { threads, .. } | Team::Survey { threads, .. } => *threads,
        }
    }

    /// A number that stands for the content of what all samples share, if the thread may have more pieces that read it.
    pub(super) fn moment(&self) -> Option<u64> {
        match self.team {
            Team::One { moment, .. } => moment,
            _ => None,
        }
    }

    /// Calls `task(piece, thread)` for every piece in `0..pieces`, in any order, on any thread. A piece may touch all of the
    /// step's operands.
    pub(super) fn each(&self, pieces: usize, task: impl Fn(usize, usize) + Sync) {
        self.phase(Phase { pieces, cut: Cut::Anyhow }, task);
    }

    /// Calls `task(range, thread)` for ranges of at most `size` that cover `0..len`; else as [`Context::each`].
    pub(super) fn ranges(&self, len: usize, size: usize, task: impl Fn(Range<usize>, usize) + Sync) {
        let size = size.max(1);
        self.each(len.div_ceil(size), |piece, thread| {
            task(piece * size..((piece + 1) * size).min(len), thread);
        });
    }

    /// Calls `task(piece, thread)` for `each` pieces of every block. A piece touches the rows of its block's samples, reads
    /// what all samples share, and writes scratch that no other piece touches.
    pub(super) fn by_block(&self, blocks: Blocks, each: usize, task: impl Fn(usize, usize) + Sync) {
        let cut = Cut::Blocks { blocks, pieces: each };
        self.phase(Phase { pieces: blocks.count() * each, cut }, task);
    }

    /// Calls `task(rows, thread)` for ranges that cover the rows of a value of `shape`: parts of blocks of samples, or if it has
    /// too few rows for that, ranges of `size` rows.
    pub(super) fn by_rows(&self, shape: &Shape, size: usize, task: impl Fn(Range<usize>, usize) + Sync) {
        match Blocks::of(shape) {
            Some(blocks) => {
                self.by_block(blocks, blocks.parts(), |part, thread| task(blocks.rows(part), thread));
            }
            None => self.ranges(shape.rows(), size, task),
        }
    }

    /// Calls `task(sample, thread)` for every sample of a value of `shape`, whose pieces touch nothing of other samples.
    pub(super) fn by_sample(&self, shape: &Shape, task: impl Fn(usize, usize) + Sync) {
        self.by_sample_pieces(shape, 1, task);
    }

    /// Calls `task(piece, thread)` for `each` pieces of every sample of a value of `shape`, numbered one sample after the other, which
    /// touch nothing of other samples.
    pub(super) fn by_sample_pieces(&self, shape: &Shape, each: usize, task: impl Fn(usize, usize) + Sync) {
        let pieces = shape.0[0] * each;
        match Blocks::of(shape) {
            Some(blocks) => self.by_block(blocks, blocks.size() * each, |piece, thread| {
                // The last block may have fewer samples.
                if piece < pieces {
                    task(piece, thread);
                }
            }),
            None => self.each(pieces, task),
        }
    }

    /// Runs pieces like [`Context::each`], for pieces that touch scratch and what all samples share: before phases that
    /// use what they leave in the scratch, or after phases that left sums there.
    pub(super) fn shared(&self, pieces: usize, task: impl Fn(usize, usize) + Sync) {
        self.phase(Phase { pieces, cut: Cut::Shared }, task);
    }

    fn phase(&self, phase: Phase, task: impl Fn(usize, usize) + Sync) {
        match &self.team {
            Team::All(pool) => pool.each(phase.pieces, task),
            Team::One { share, thread, .. } => {
                if share.seen.fetch_add(1, Ordering::Relaxed) == share.phase {
                    share.pieces.clone().for_each(|piece| task(piece, *thread));
                }
            }
            Team::Survey { phases, .. } => {
                phases.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push(phase);
            }
        }
    }
}
