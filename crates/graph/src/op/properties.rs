//! What passes and executors ask of an op.

use super::{Lane, Op};

impl Op {
    /// The name in plan texts, and the attributes beside it.
    pub fn name_and_attributes(&self) -> (String, serde_json::Map<String, serde_json::Value>) {
        match serde_json::to_value(self) {
            Ok(serde_json::Value::Object(mut map)) => match map.shift_remove("op") {
                Some(serde_json::Value::String(name)) => (name, map),
                _ => unreachable!("ops are tagged by name"),
            },
            _ => unreachable!("ops serialise to objects"),
        }
    }

    pub fn name(&self) -> String {
        self.name_and_attributes().0
    }

    pub fn lane(&self) -> Lane {
        match self {
            Op::AllReduce { .. } | Op::ReduceScatter { .. } | Op::AllGather { .. } => Lane::Comm,
            _ => Lane::Compute,
        }
    }

    /// Pairs (input, output) of which the output may be written over the input. An executor that finds the two in
    /// different places copies first and then works in place, so that `place` is free to decide.
    pub fn in_place(&self, inputs: usize) -> impl Iterator<Item = (usize, usize)> + use<> {
        let few: &'static [(usize, usize)] = match self {
            Op::Accumulate | Op::Advance | Op::LossScale { .. } | Op::Reshape { .. } => &[(0, 0)],
            Op::Ema { .. } => &[(0, 0)],
            Op::RunningMoments { .. } if inputs == 3 => &[(1, 0)],
            Op::RunningMoments { .. } => &[(0, 0)],
            Op::LinearGradW { accumulate: true, .. } | Op::ConvGradW { accumulate: true, .. } => &[(2, 0)],
            Op::ColumnSum { accumulate: true } => &[(1, 0)],
            Op::AdamW { .. } | Op::Lamb { .. } if inputs == 7 => &[(0, 0), (2, 1), (3, 2), (6, 3)],
            Op::AdamW { .. } | Op::Lamb { .. } => &[(0, 0), (2, 1), (3, 2)],
            Op::Sgd { .. } if inputs == 6 => &[(0, 0), (2, 1), (5, 2)],
            Op::Sgd { .. } => &[(0, 0), (2, 1)],
            _ => &[],
        };
        let many = match self {
            Op::AllReduce { .. } => 0..inputs,
            Op::Unpack { over: true, .. } => 1..inputs,
            Op::Commit => 1..1 + inputs / 2,
            _ => 0..0,
        };
        let first = many.start;
        few.iter().copied().chain(many.map(move |input| (input, input - first)))
    }

    /// The input that `output` may be written over, if any.
    pub fn overwritten_by(&self, inputs: usize, output: usize) -> Option<usize> {
        self.in_place(inputs).find(|pair| pair.1 == output).map(|pair| pair.0)
    }

    /// Whether this goes on, in place, with sums that are there: the one kind of step that may write a state once more.
    pub fn completes_sums(&self) -> bool {
        matches!(self, Op::AllReduce { .. } | Op::Unpack { over: true, .. })
    }

    /// How many ranks take part, for a collective.
    pub fn ranks(&self) -> Option<usize> {
        match self {
            Op::AllReduce { ranks, .. } | Op::ReduceScatter { ranks, .. } | Op::AllGather { ranks } => {
                Some(*ranks)
            }
            _ => None,
        }
    }

    /// Whether an executor may find halves and singles among the operands: see `passes::precision`.
    pub fn mixes_types(&self) -> bool {
        matches!(
            self,
            Op::Patches { .. }
                | Op::Linear { .. }
                | Op::LinearGradX { .. }
                | Op::LinearGradW { .. }
                | Op::ColumnSum { .. }
                | Op::GeluGrad { .. }
                | Op::Embed { .. }
                | Op::EmbedGrad { .. }
                | Op::LayerNorm { .. }
                | Op::LayerNormGrad { .. }
                | Op::Drop { .. }
                | Op::Add
                | Op::CrossEntropyGrad { .. }
                | Op::ResizedCrossEntropyGrad { .. }
                | Op::WindowAttention { .. }
                | Op::WindowAttentionGrad { .. }
                | Op::NormAdd { .. }
                | Op::NormAddGrad { .. }
                | Op::MergePatches
                | Op::SplitPatches { .. }
                | Op::Conv { .. }
                | Op::ConvGradX { .. }
                | Op::ConvGradW { .. }
                | Op::BatchNorm { .. }
                | Op::BatchNormSums { .. }
                | Op::BatchNormGrad { .. }
                | Op::Resize { .. }
                | Op::ResizeGrad { .. }
        )
    }

    /// Whether a step may run at the same time as the one before it, whose memory it leaves alone: weight gradients, which
    /// an executor may make together.
    pub fn runs_beside(&self, before: &Op) -> bool {
        matches!((before, self), (Op::LinearGradW { .. }, Op::LinearGradW { .. }))
    }

    /// Whether the op is a matrix product (what "products alone" in the benchmarks means).
    pub fn is_product(&self) -> bool {
        matches!(
            self,
            Op::Linear { .. }
                | Op::LinearGradX { .. }
                | Op::LinearGradW { .. }
                | Op::Conv { .. }
                | Op::ConvGradX { .. }
                | Op::ConvGradW { .. }
        )
    }
}
