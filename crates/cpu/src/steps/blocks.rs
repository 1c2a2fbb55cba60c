//! Blocks of samples: the pieces that go from step to step.

use graph::{Op, Shape};
use std::ops::Range;

/// Rows a block has at least: as many as a matmul wants for packing a weight.
const ROWS: usize = 256;
/// Blocks there are at most; each has partial sums of its own.
const MOST: usize = 128;
/// Fewer blocks are not worth it, nor are values of fewer rows: those are cut otherwise.
const FEWEST: usize = 4;
const FEWEST_ROWS: usize = 2048;
/// Blocks of more rows than this are single large samples. Few of them would leave threads without work for long: there must be
/// twice as many as a machine has cores, or about that.
const TALL: usize = 512;
const FEWEST_TALL: usize = 32;

/// How the samples of a value (B,…,C) are cut into blocks: a function of B and the rows a sample has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Blocks {
    batch: usize,
    /// Samples in a block, a power of two.
    size: usize,
    /// Rows of a sample.
    sample: usize,
}

impl Blocks {
    /// None for values that have too few rows, or no rows of samples.
    pub fn of(shape: &Shape) -> Option<Self> {
        let batch = shape.0.first().copied().filter(|batch| shape.rank() > 2 && *batch > 0)?;
        Self::cut(batch, shape.rows() / batch)
    }

    /// Of so many samples, with so many rows each.
    pub fn cut(batch: usize, sample: usize) -> Option<Self> {
        if batch * sample < FEWEST_ROWS {
            return None;
        }
        let size = ROWS.div_ceil(sample).max(batch.div_ceil(MOST)).next_power_of_two();
        let blocks = Blocks { batch, size, sample };
        let fewest = if size * sample > TALL { FEWEST_TALL } else { FEWEST };
        (blocks.count() >= fewest).then_some(blocks)
    }

    pub fn count(&self) -> usize {
        self.batch.div_ceil(self.size)
    }

    pub fn batch(&self) -> usize {
        self.batch
    }

    /// Whether blocks of both have the same samples.
    pub fn same(&self, other: &Blocks) -> bool {
        (self.batch, self.size) == (other.batch, other.size)
    }

    pub fn samples(&self, block: usize) -> Range<usize> {
        block * self.size..((block + 1) * self.size).min(self.batch)
    }

    pub fn rows(&self, block: usize) -> Range<usize> {
        let Range { start, end } = self.samples(block);
        start * self.sample..end * self.sample
    }
}

/// Which operands of an op are rows of samples, the first axis of each being the batch. All others are shared by all samples.
pub(crate) struct Samples {
    pub inputs: fn(usize) -> bool,
    pub outputs: fn(usize) -> bool,
}

/// The operands of an op that are rows of samples, for ops that are cut into blocks.
pub(crate) fn samples(op: &Op) -> Samples {
    let all: fn(usize) -> bool = |_| true;
    let none: fn(usize) -> bool = |_| false;
    let first: fn(usize) -> bool = |i| i == 0;
    let (inputs, outputs) = match op {
        Op::Linear { .. } | Op::Attention { .. } | Op::WindowAttention { .. } | Op::Embed { .. } => {
            (first, all)
        }
        Op::LayerNorm { add: false, .. } | Op::LayerScale | Op::Prepend => (first, all),
        Op::LayerNorm { add: true, .. } | Op::NormAdd { .. } => ((|i| i < 2) as fn(usize) -> bool, all),
        Op::LinearGradX { .. } | Op::LayerScaleGrad { .. } => ((|i| i != 1) as fn(usize) -> bool, first),
        Op::LayerNormGrad { .. } | Op::NormAddGrad { .. } => ((|i| i != 3) as fn(usize) -> bool, first),
        Op::WindowAttentionGrad { .. } => ((|i| i == 0 || i > 4) as fn(usize) -> bool, first),
        Op::AttentionGrad { .. } | Op::GeluGrad { .. } | Op::SwiGluGrad { .. } => (all, first),
        Op::ColumnSum { .. } => (first, none),
        Op::Gelu | Op::Add | Op::Scale { .. } | Op::Drop { .. } | Op::Reshape { .. } => (all, all),
        Op::Patches { .. } | Op::Unpatches { .. } | Op::Pool { .. } | Op::PoolGrad { .. } => (all, all),
        Op::MergePatches | Op::SplitPatches { .. } | Op::SwiGlu => (all, all),
        _ => (none, none),
    };
    Samples { inputs, outputs }
}

/// Whether a step of this op does nothing outside of its pieces.
pub(crate) fn flows(op: &Op) -> bool {
    let sums = matches!(
        op,
        Op::LinearGradW { .. }
            | Op::EmbedGrad { .. }
            | Op::TokenSum { .. }
            | Op::CrossEntropy { .. }
            | Op::CrossEntropyGrad { .. }
            | Op::Seed { .. }
            | Op::Assign { .. }
            | Op::Accumulate
            | Op::PositionBias { .. }
            | Op::PositionBiasGrad { .. }
    );
    let updates = matches!(
        op,
        Op::SumSquares | Op::Clip { .. } | Op::Advance | Op::AdamW { .. } | Op::Sgd { .. } | Op::Ema { .. }
    );
    sums || updates || (samples(op).inputs)(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_cover_the_batch() {
        for (batch, tokens) in [(32, 65), (512, 65), (33, 64), (35, 3136), (32, 197), (1000, 65), (130, 16)] {
            let blocks = Blocks::of(&Shape(vec![batch, tokens, 192])).unwrap();
            let (mut next, mut row) = (0, 0);
            for block in 0..blocks.count() {
                let (samples, rows) = (blocks.samples(block), blocks.rows(block));
                assert_eq!((samples.start, rows.start), (next, row));
                assert!(!samples.is_empty() && rows.len() == samples.len() * tokens);
                assert!(rows.len() >= ROWS || block + 1 == blocks.count(), "{batch} of {tokens}");
                (next, row) = (samples.end, rows.end);
            }
            assert_eq!((next, row), (batch, batch * tokens));
            assert!((FEWEST..=MOST).contains(&blocks.count()));
        }
    }

    #[test]
    fn small_values_and_few_large_samples_have_none() {
        let few = [vec![3, 3136, 96], vec![8, 1025, 192], vec![31, 577, 192]];
        for shape in [vec![4096, 192], vec![31, 65, 192], vec![2048]].into_iter().chain(few) {
            assert_eq!(Blocks::of(&Shape(shape)), None);
        }
    }
}
