//! Muon's part of an update: momentum, its orthogonalisation by Newton–Schulz iterations, the parameters.

use super::layout::Bucket;
use super::update::{Step, Updated, at_bucket};
use crate::flat::Stack;
use crate::graph::{At, Graph, GraphError, Phase, ValueId};
use crate::op::Op;
use crate::types::DType;

/// Coefficients of the quintic and iterations as published (Jordan et al., 2024): singular values between 1/100 and 1 end up between
/// about 0.7 and 1.2.
const COEFFICIENTS: [f64; 3] = [3.4445, -4.7750, 2.0315];
const ITERATIONS: usize = 5;

/// Norms below this are taken for it.
const EPS: f64 = 1e-7;

/// Root mean square of an update's elements over √(1/max(rows, columns)), as published (Liu et al., 2025): that of AdamW's updates,
/// whose learning rate and weight decay carry over.
const RMS: f64 = 0.2;

impl Step<'_> {
    /// The update of a bucket of matrices; returns the parameters as updated.
    pub(super) fn muon(
        &self,
        graph: &mut Graph,
        bucket: &Bucket,
        gradient: ValueId,
        (momentum, nesterov): (f64, bool),
    ) -> Result<Updated, GraphError> {
        // bf16 has the range of f32, which fp16 has not.
        let to = self.settings.mixed.map(|_| DType::Bf16);
        let (flat, stacks) = (bucket.flat.clone(), bucket.stacks.clone());
        let at = at_bucket(graph, bucket);
        let op = Op::MuonMomentum { momentum, nesterov, to, stacks, flat };
        let mut inputs = vec![gradient];
        inputs.extend(bucket.moments.iter().map(|moment| graph.read(*moment)));
        inputs.push(self.control);
        let outputs = graph.push(op, &inputs, &at)?;
        for (state, value) in bucket.moments.iter().zip(&outputs) {
            graph.assign(*state, *value, Phase::Update)?;
        }
        let mut inputs = vec![graph.read(bucket.parameter), self.control];
        for (stack, direction) in bucket.stacks.iter().zip(&outputs[bucket.moments.len()..]) {
            inputs.push(orthogonalise(graph, *direction, stack, &at)?);
        }
        inputs.extend(bucket.copy.map(|copy| graph.read(copy)));
        let (flat, stacks) = (bucket.flat.clone(), bucket.stacks.clone());
        let outputs = graph.push(Op::MuonApply { rms: RMS, stacks, flat }, &inputs, &at)?;
        for (state, value) in std::iter::once(&bucket.parameter).chain(&bucket.copy).zip(&outputs) {
            graph.assign(*state, *value, Phase::Update)?;
        }
        Ok((outputs[0], bucket.copy.and(outputs.last().copied())))
    }
}

/// X ← (a + b·A + c·A²)·X with A = X·Xᵀ a few times over, after X was divided by its norm; by the smaller of X·Xᵀ and Xᵀ·X.
///
/// The norm is the root of A's trace, and X is divided by it in the first iteration's last matmul: no pass over X is spent on it.
fn orthogonalise(graph: &mut Graph, x: ValueId, stack: &Stack, at: &At) -> Result<ValueId, GraphError> {
    let tall = stack.rows > stack.columns;
    let named = |suffix: &str| At { name: format!("{}.{suffix}", at.name), ..at.clone() };
    let matmul = |left_transposed, right_transposed| Op::Matmul { left_transposed, right_transposed };
    let mut x = x;
    for iteration in 0..ITERATIONS {
        let mut gram = graph.push(matmul(tall, !tall), &[x, x], &named("gram"))?[0];
        let mut norm = None;
        if iteration == 0 {
            let scaled = graph.push(Op::UnitTrace { eps: EPS }, &[gram], &named("unit"))?;
            (gram, norm) = (scaled[0], Some(scaled[1]));
        }
        let square = graph.push(matmul(false, false), &[gram, gram], &named("square"))?[0];
        let inputs: Vec<ValueId> = [gram, square].into_iter().chain(norm).collect();
        let quintic = Op::NewtonSchulz { coefficients: COEFFICIENTS };
        let factor = graph.push(quintic, &inputs, &named("factor"))?[0];
        let sides = if tall { [x, factor] } else { [factor, x] };
        x = graph.push(matmul(false, false), &sides, &named("direction"))?[0];
    }
    Ok(x)
}
