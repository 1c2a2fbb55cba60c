//! Blocks of samples: the pieces that go from step to step.

use graph::{Op, Shape};
use std::ops::Range;

/// Rows a block has at least: as many as a matmul wants for packing a weight.
const ROWS: usize = 256;
/// Rows of a part at most, or about that: what one step leaves of it in a core's cache, the next finds there.
const PART_ROWS: usize = 512;
/// Blocks there are at most: a thread looks at all of them for the one that is to come next.
const MOST: usize = 128;
/// Fewer blocks are not worth it, nor are values of fewer rows: those are cut otherwise.
const FEWEST: usize = 4;
const FEWEST_ROWS: usize = 1024;

/// Cut of the samples of a value (B,…,C): into blocks of samples, and the rows of a block into parts. A function of B
/// and the rows a sample has. Sums over rows have a partial sum for each part; whether blocks go from step to step as
/// wholes, or parts are shared out step by step, changes no result.
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

    /// Cuts so many samples, with so many rows each.
    pub fn cut(batch: usize, sample: usize) -> Option<Self> {
        if batch * sample < FEWEST_ROWS {
            return None;
        }
        let size = ROWS.div_ceil(sample).max(batch.div_ceil(MOST)).next_power_of_two();
        let blocks = Blocks { batch, size, sample };
        (blocks.count() * blocks.parts() >= FEWEST).then_some(blocks)
    }

    pub fn count(&self) -> usize {
        self.batch.div_ceil(self.size)
    }

    pub fn batch(&self) -> usize {
        self.batch
    }

    /// Samples in a block, but for the last.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Parts of each block.
    pub fn parts(&self) -> usize {
        (self.size * self.sample).div_ceil(PART_ROWS)
    }

    /// Parts of all blocks, numbered one block after the other.
    pub fn all_parts(&self) -> usize {
        self.count() * self.parts()
    }

    /// Checks whether blocks of both have the same samples.
    pub fn same(&self, other: &Blocks) -> bool {
        (self.batch, self.size) == (other.batch, other.size)
    }

    /// Decides whether so many threads carry blocks from step to step. Where blocks are large, a few of them would
    /// leave threads without work for long; their parts are enough for all.
    pub fn carried_by(&self, threads: usize) -> bool {
        self.parts() == 1 || self.count() >= 2 * threads
    }

    pub fn samples(&self, block: usize) -> Range<usize> {
        block * self.size..((block + 1) * self.size).min(self.batch)
    }

    /// The rows of a part.
    pub fn rows(&self, part: usize) -> Range<usize> {
        self.share(part, self.sample)
    }

    /// Share of a part in things of which each sample has so many.
    pub fn share(&self, part: usize, of_sample: usize) -> Range<usize> {
        let (samples, parts) = (self.samples(part / self.parts()), self.parts());
        let at = |number: usize| samples.start * of_sample + samples.len() * of_sample * number / parts;
        at(part % parts)..at(part % parts + 1)
    }
}

/// Operands of an op that are rows of samples, the first axis of each being the batch. All others are shared by all
/// samples.
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
        Op::Conv { .. } | Op::ConvGradX { .. } | Op::BatchNorm { .. } => (first, all),
        Op::Moments => (first, none),
        Op::BatchNormSums { .. } => ((|i| i == 0 || i == 4) as fn(usize) -> bool, none),
        Op::BatchNormGrad { .. } => ((|i| i == 0 || i == 4) as fn(usize) -> bool, first),
        Op::LayerNorm { add: true, .. } | Op::NormAdd { .. } => ((|i| i < 2) as fn(usize) -> bool, all),
        Op::LinearGradX { .. } | Op::LayerScaleGrad { .. } => ((|i| i != 1) as fn(usize) -> bool, first),
        Op::LayerNormGrad { .. } | Op::NormAddGrad { .. } => ((|i| i != 3) as fn(usize) -> bool, first),
        Op::WindowAttentionGrad { .. } => ((|i| i == 0 || i > 4) as fn(usize) -> bool, first),
        Op::AttentionGrad { .. } | Op::GeluGrad { .. } | Op::SwiGluGrad { .. } => (all, first),
        Op::ColumnSum { .. } => (first, none),
        Op::Gelu | Op::Add | Op::Scale { .. } | Op::Drop { .. } | Op::Reshape { .. } => (all, all),
        Op::Patches { .. } | Op::Unpatches { .. } | Op::Pool { .. } | Op::PoolGrad { .. } => (all, all),
        Op::MergePatches | Op::SplitPatches { .. } | Op::SwiGlu => (all, all),
        Op::Resize { .. } | Op::ResizeGrad { .. } | Op::Concat | Op::Slice { .. } => (all, all),
        Op::Grid { .. } | Op::Ungrid { .. } => (all, all),
        _ => (none, none),
    };
    Samples { inputs, outputs }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_and_their_parts_cover_the_batch() {
        for (batch, tokens) in
            [(32, 65), (512, 65), (33, 64), (35, 3136), (32, 197), (1000, 65), (130, 16), (3, 577)]
        {
            let blocks = Blocks::of(&Shape(vec![batch, tokens, 192])).unwrap();
            let (mut next, mut row, mut heads) = (0, 0, 0);
            for block in 0..blocks.count() {
                let samples = blocks.samples(block);
                assert!(samples.start == next && !samples.is_empty());
                next = samples.end;
                for part in block * blocks.parts()..(block + 1) * blocks.parts() {
                    let (rows, items) = (blocks.rows(part), blocks.share(part, 3));
                    assert_eq!((rows.start, items.start), (row, heads));
                    assert!(rows.len() >= ROWS || block + 1 == blocks.count(), "{batch} of {tokens}");
                    assert!(rows.len() <= PART_ROWS, "{batch} of {tokens}");
                    (row, heads) = (rows.end, items.end);
                }
                assert_eq!((row, heads), (next * tokens, next * 3));
            }
            assert_eq!(next, batch);
            assert!(blocks.count() <= MOST && blocks.all_parts() >= FEWEST);
        }
    }

    #[test]
    fn small_values_have_none() {
        for shape in [vec![4096, 192], vec![15, 65, 192], vec![2048], vec![1, 1536, 8]] {
            assert_eq!(Blocks::of(&Shape(shape)), None);
        }
    }

    #[test]
    fn few_large_samples_are_carried_by_few_threads_alone() {
        let blocks = |batch: usize, rows: usize| Blocks::of(&Shape(vec![batch, rows, 8])).unwrap();
        assert!(blocks(16, 4096).carried_by(8) && !blocks(16, 4096).carried_by(9));
        assert!(!blocks(1, 4096).carried_by(1));
        // Of samples that are no larger than a part, there is nothing smaller to share out.
        assert!(blocks(8, 197).carried_by(16));
    }
}
