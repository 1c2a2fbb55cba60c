//! Properties of ops that passes and executors read.

use super::slots::Description;
use super::{Lane, Op};
use crate::flat::{Flat, Views};
use crate::mesh::{Group, Mesh};
use crate::types::{DType, Type};

impl Op {
    /// The name in plan texts, and the attributes beside it.
    pub fn name_and_attributes(&self) -> (String, serde_json::Map<String, serde_json::Value>) {
        let mut attributes = match serde_json::to_value(self) {
            Ok(serde_json::Value::Object(map)) => map,
            _ => serde_json::Map::new(),
        };
        match attributes.shift_remove("op") {
            Some(serde_json::Value::String(name)) => (name, attributes),
            // An op whose attributes have no serial form: no text of a plan is parsed to this.
            _ => (format!("{self:?}"), attributes),
        }
    }

    /// The name in plan texts.
    pub fn name(&self) -> String {
        self.name_and_attributes().0
    }

    /// The queue that its steps run on.
    pub fn lane(&self) -> Lane {
        self.describe(0).lane
    }

    /// Pairs (input, output) of which the output may be written over the input.
    pub fn in_place(&self, inputs: usize) -> impl Iterator<Item = (usize, usize)> + use<> {
        let results = self.describe(inputs).results.into_iter().enumerate();
        results.filter_map(|(output, slot)| Some((slot.over?, output)))
    }

    /// The input that `output` may be written over, if any.
    pub fn overwritten_by(&self, inputs: usize, output: usize) -> Option<usize> {
        self.in_place(inputs).find(|pair| pair.1 == output).map(|pair| pair.0)
    }

    /// True for ops that continue sums in place: the one kind of step that may write a state once more.
    pub fn completes_sums(&self) -> bool {
        matches!(self, Op::AllReduce { .. } | Op::Unpack { over: true, .. })
    }

    /// The ranks that take part, for a collective.
    pub fn group(&self) -> Option<Group> {
        match self {
            Op::AllReduce { group, .. } | Op::ReduceScatter { group, .. } | Op::AllGather { group, .. } => {
                Some(*group)
            }
            _ => None,
        }
    }

    /// The tensors that lie in one message, if that is more than its operands or results: of a reduce-scatter its operands, of an
    /// all-gather its results.
    pub fn views(&self) -> Option<&Views> {
        match self {
            Op::ReduceScatter { views, .. } | Op::AllGather { views, .. } => views.as_ref(),
            _ => None,
        }
    }

    /// The flat buffers that it works over.
    pub fn flats(&self) -> Vec<Flat> {
        self.clone().flats_mut().to_vec()
    }

    fn flats_mut(&mut self) -> &mut [Flat] {
        match self {
            Op::SumSquares { flats } => flats,
            Op::AdamW { flat, .. }
            | Op::Sgd { flat, .. }
            | Op::LambMoments { flat, .. }
            | Op::LambApply { flat, .. }
            | Op::MuonMomentum { flat, .. }
            | Op::MuonApply { flat, .. } => std::slice::from_mut(flat),
            _ => &mut [],
        }
    }

    /// Op as the rank of this number runs it: over its part of flat buffers that ranks divide.
    pub fn on_rank(&self, mesh: Mesh, rank: usize) -> Op {
        let mut op = self.clone();
        for flat in op.flats_mut() {
            if let Some(group) = flat.group {
                *flat = flat.part(mesh.place(rank, group).1);
            }
        }
        op
    }

    /// Checks whether a step may run at the same time as the one before it, if one launch makes both: weight gradients.
    pub fn runs_beside(&self, before: &Op) -> bool {
        matches!((before, self), (Op::LinearGradW { .. }, Op::LinearGradW { .. }))
    }

    /// Number of leading operands of a row-wise op that have its rows; the others are parameters. 0 for an op whose
    /// first result depends on more than the same row.
    pub fn row_operands(&self, inputs: usize) -> usize {
        let Description { operands, results, .. } = self.describe(inputs);
        match results.first() {
            Some(result) if result.has_rows() => operands.iter().take_while(|slot| slot.has_rows()).count(),
            _ => 0,
        }
    }

    /// True for matmuls and convolutions (what "matmuls alone" in the benchmarks means).
    pub fn is_matmul(&self) -> bool {
        self.describe(0).multiplies
    }

    /// The types of the outputs, or what is wrong with the inputs.
    pub fn infer(&self, inputs: &[&Type]) -> Result<Vec<Type>, String> {
        self.typed(inputs.len())?.infer(inputs)
    }

    /// The types of the outputs of a step whose dtypes were declared: those, where this op may give them.
    pub fn infer_as(&self, inputs: &[&Type], declared: &[DType]) -> Result<Vec<Type>, String> {
        self.typed(inputs.len())?.infer_as(inputs, declared)
    }

    fn typed(&self, inputs: usize) -> Result<Description, String> {
        match self {
            Op::Input | Op::Read { .. } => Err("takes its type from the graph".into()),
            _ => Ok(self.describe(inputs)),
        }
    }

    /// The name of output `i` in a layer called `stem`.
    pub fn output_name(&self, inputs: usize, stem: &str, i: usize) -> String {
        match self.describe(inputs).results.get(i).map(|slot| slot.name) {
            Some("#") if i > 0 => format!("{stem}.{i}"),
            None | Some("" | "#") => stem.to_string(),
            Some(suffix) => format!("{stem}.{suffix}"),
        }
    }
}
