//! Attention by cuDNN, which finds its fused kernels by the pattern of plain operations: matmuls, the softmax's pieces, and in
//! the backward pass what they turn into.
//!
//! Legend: B batch, H heads, T tokens, D head size. cuDNN names axes (B,H,T,D) whatever their order in memory, which strides
//! give. Log-sum-exps are natural logarithms of scaled scores, (B,H,T), f32, as in our kernels, so that either pass may
//! be cuDNN's and the other ours.
//!
//! The backward pass is described without a sum of dQ in memory. Engines then leave dS of all heads there and multiply it by the keys
//! in the end, in one order. With such a sum they would add to it in the order in which blocks come.

use crate::action::{Address, AttentionForward};
use crate::cudnn::{Cudnn, CudnnGraph, CudnnPlan, Descriptor, HeuristicMode, Proposals, named, tensor};
use crate::driver::Stream;
use crate::error::CudaError;
use cudarc::cudnn::sys::{
    self, cudnnBackendAttributeName_t as Name, cudnnBackendAttributeType_t as Kind,
    cudnnBackendDescriptorType_t as Of, cudnnBackendNumericalNote_t as Note,
    cudnnPointwiseMode_t as Pointwise, cudnnReduceTensorOp_t as Reduce,
};
use graph::DType;
use std::ffi::c_void;

/// Largest workspace of attention: dS of all heads, which grows with the square of the tokens. It is small where heads are
/// few, which is where cuDNN is ahead.
pub const WORKSPACE: usize = 512 << 20;

/// Most bytes that the engines use beside dS.
const BESIDE: usize = 4096;

/// Workspace that engines may use: dS of all heads in whole tiles.
pub fn workspace(attended: &AttentionForward) -> usize {
    let AttentionForward { batch, tokens, heads, .. } = *attended;
    let pairs = tokens.next_multiple_of(64) * tokens.next_multiple_of(128);
    match attended.gradient {
        Some(_) => batch * heads * pairs * 2 + BESIDE,
        None => BESIDE,
    }
}

pub fn proposals(library: &Cudnn, attended: &AttentionForward) -> Result<Proposals, CudaError> {
    let doing = |error| named(error, || format!("looking for an algorithm for {}", describe(attended)));
    let problem = sketch(attended).and_then(|s| CudnnGraph::new(library.handle, s.operations, s.parts));
    library.proposals(problem.map_err(doing)?, HeuristicMode::Fast).map_err(doing)
}

/// Makes a proposal ready to run. Refuses it if its results differ from run to run, or if it needs more than [`workspace`].
pub fn algorithm(
    library: &Cudnn,
    attended: &AttentionForward,
    proposals: &Proposals,
    place: usize,
) -> Result<CudnnPlan, CudaError> {
    let unwanted = [
        Note::CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC,
        Note::CUDNN_NUMERICAL_NOTE_REDUCED_PRECISION_REDUCTION,
        Note::CUDNN_NUMERICAL_NOTE_DOWN_CONVERT_INPUTS,
    ];
    let is_wanted = |notes: &[i32]| !unwanted.iter().any(|note| notes.contains(&(*note as i32)));
    library.algorithm(proposals, place, workspace(attended), is_wanted)
}

/// Enqueues it on a stream.
pub fn run(
    library: &Cudnn,
    attended: &AttentionForward,
    algorithm: &CudnnPlan,
    stream: &Stream,
    workspace: Address,
) -> Result<(), CudaError> {
    let mut scale = scale(attended);
    let mut one = 1f32;
    let part = |number: usize| (number * attended.heads * attended.head * attended.dtype.bytes()) as Address;
    let mut on_gpu = vec![
        (Q, attended.qkv),
        (K, attended.qkv + part(1)),
        (V, attended.qkv + part(2)),
        (OUT, attended.out),
        (LOG_SUMS, attended.log_sums),
    ];
    let mut on_host = vec![(SCALE, &raw mut scale)];
    if let Some(gradient) = &attended.gradient {
        on_gpu.extend([
            (DOUT, gradient.dout),
            (DELTAS, gradient.deltas),
            (DQ, gradient.dqkv),
            (DK, gradient.dqkv + part(1)),
            (DV, gradient.dqkv + part(2)),
        ]);
        on_host.push((ONE, &raw mut one));
    }
    let mut operands: Vec<(i64, *mut c_void)> =
        on_gpu.into_iter().map(|(id, address)| (id, address as *mut c_void)).collect();
    operands.extend(on_host.into_iter().map(|(id, number)| (id, number.cast())));
    library.run(algorithm, &operands, stream, workspace, || describe(attended))
}

/// Describes attention for messages, such as `attention of 8×12 heads of 4097×128 bf16`.
pub fn describe(attended: &AttentionForward) -> String {
    let AttentionForward { batch, tokens, heads, head, dtype, .. } = attended;
    let of = if attended.gradient.is_some() { "the gradient of attention" } else { "attention" };
    format!("{of} of {batch}×{heads} heads of {tokens}×{head} {dtype}")
}

fn scale(attended: &AttentionForward) -> f32 {
    (1.0 / (attended.head as f64).sqrt()) as f32
}

// What operands are known by.
const Q: i64 = 1;
const K: i64 = 2;
const V: i64 = 3;
const OUT: i64 = 4;
const LOG_SUMS: i64 = 5;
const SCALE: i64 = 6;
const DOUT: i64 = 7;
const ONE: i64 = 8;
const DELTAS: i64 = 9;
const DQ: i64 = 10;
const DK: i64 = 11;
const DV: i64 = 12;
/// First id of intermediate values.
const VIRTUAL: i64 = 100;

/// Builder of a graph of operations; tensors are known by their index among the parts.
struct GraphBuilder {
    sizes: [usize; 4],
    dtype: DType,
    /// Scalars on the host, by their ids.
    numbers: Vec<(i64, usize)>,
    parts: Vec<Descriptor>,
    operations: Vec<Descriptor>,
}

fn sketch(attended: &AttentionForward) -> Result<GraphBuilder, CudaError> {
    let AttentionForward { batch, tokens, heads, head, dtype, .. } = *attended;
    let sizes = [batch, heads, tokens, head];
    let mut sketch =
        GraphBuilder { sizes, dtype, numbers: Vec::new(), parts: Vec::new(), operations: Vec::new() };
    match attended.gradient {
        None => sketch.forward()?,
        Some(_) => sketch.backward()?,
    }
    Ok(sketch)
}

impl GraphBuilder {
    fn forward(&mut self) -> Result<(), CudaError> {
        let (q, k, v) = (self.packed(Q, 3)?, self.turned(K)?, self.packed(V, 3)?);
        let (out, log_sums) = (self.packed(OUT, 1)?, self.row(LOG_SUMS)?);
        let scores = self.scores(q, k)?;
        let top = self.reduce(Reduce::CUDNN_REDUCE_TENSOR_MAX, scores)?;
        let below = self.square_of(Pointwise::CUDNN_POINTWISE_SUB, scores, top)?;
        let exps = self.square(DType::F32)?;
        self.pointwise(Pointwise::CUDNN_POINTWISE_EXP, below, None, exps)?;
        let sum = self.reduce(Reduce::CUDNN_REDUCE_TENSOR_ADD, exps)?;
        let log = self.virtual_row()?;
        self.pointwise(Pointwise::CUDNN_POINTWISE_LOG, sum, None, log)?;
        self.pointwise(Pointwise::CUDNN_POINTWISE_ADD, top, Some(log), log_sums)?;
        let probabilities = self.square(self.dtype)?;
        self.pointwise(Pointwise::CUDNN_POINTWISE_DIV, exps, Some(sum), probabilities)?;
        self.matmul(probabilities, v, out)
    }

    fn backward(&mut self) -> Result<(), CudaError> {
        let (q, k, v) = (self.packed(Q, 3)?, self.turned(K)?, self.turned(V)?);
        let (out, dout, log_sums) = (self.packed(OUT, 1)?, self.packed(DOUT, 1)?, self.row(LOG_SUMS)?);
        let [dq, dk, dv] = [self.packed(DQ, 3)?, self.packed(DK, 3)?, self.packed(DV, 3)?];
        // rowsum(dO ∘ O)
        let [b, h, t, d] = self.sizes;
        let both = self.passing(DType::F32, [b, h, t, d], [h * t * d, t * d, d, 1])?;
        self.pointwise(Pointwise::CUDNN_POINTWISE_MUL, dout, Some(out), both)?;
        let (sums, one, deltas) =
            (self.reduce(Reduce::CUDNN_REDUCE_TENSOR_ADD, both)?, self.number(ONE)?, self.row(DELTAS)?);
        self.pointwise(Pointwise::CUDNN_POINTWISE_MUL, sums, Some(one), deltas)?;
        // P, and dV = Pᵀ·dO
        let scores = self.scores(q, k)?;
        let below = self.square_of(Pointwise::CUDNN_POINTWISE_SUB, scores, log_sums)?;
        let probabilities = self.square(DType::F32)?;
        self.pointwise(Pointwise::CUDNN_POINTWISE_EXP, below, None, probabilities)?;
        let turned = self.turned_square(probabilities)?;
        self.matmul(turned, dout, dv)?;
        // dS = P ∘ (dO·Vᵀ - rowsum), dK = dSᵀ·Q, dQ = dS·K
        let dp = self.square(DType::F32)?;
        self.matmul(dout, v, dp)?;
        let less = self.square_of(Pointwise::CUDNN_POINTWISE_SUB, dp, deltas)?;
        let ds = self.square_of(Pointwise::CUDNN_POINTWISE_MUL, less, probabilities)?;
        let (scale, scaled) = (self.number(SCALE)?, self.square(self.dtype)?);
        self.pointwise(Pointwise::CUDNN_POINTWISE_MUL, ds, Some(scale), scaled)?;
        let turned = self.turned_square(scaled)?;
        self.matmul(turned, q, dk)?;
        let row = 3 * h * d;
        let keys = self.passing(self.dtype, [b, h, t, d], [t * row, d, row, 1])?;
        self.reshape(k, keys)?;
        self.matmul(scaled, keys, dq)
    }

    /// Scaled scores of queries and keys.
    fn scores(&mut self, q: usize, k: usize) -> Result<usize, CudaError> {
        let plain = self.square(DType::F32)?;
        self.matmul(q, k, plain)?;
        let scale = self.number(SCALE)?;
        self.square_of(Pointwise::CUDNN_POINTWISE_MUL, plain, scale)
    }

    fn add(&mut self, part: Descriptor) -> Result<usize, CudaError> {
        self.parts.push(part.finished()?);
        Ok(self.parts.len() - 1)
    }

    /// Rows of one of `side` tensors that lie side by side.
    fn packed(&mut self, id: i64, side: usize) -> Result<usize, CudaError> {
        let [b, h, t, d] = self.sizes;
        let row = side * h * d;
        self.add(tensor(id, self.dtype, [b, h, t, d], [t * row, d, row, 1])?)
    }

    /// Rows of keys or values, with axes (B,H,D,T).
    fn turned(&mut self, id: i64) -> Result<usize, CudaError> {
        let [b, h, t, d] = self.sizes;
        let row = 3 * h * d;
        self.add(tensor(id, self.dtype, [b, h, d, t], [t * row, d, 1, row])?)
    }

    /// One number per query.
    fn row(&mut self, id: i64) -> Result<usize, CudaError> {
        let [b, h, t, _] = self.sizes;
        self.add(tensor(id, DType::F32, [b, h, t, 1], [h * t, t, 1, 1])?)
    }

    /// Scalar on the host. It may be used more than once.
    fn number(&mut self, id: i64) -> Result<usize, CudaError> {
        if let Some((_, there)) = self.numbers.iter().find(|(of, _)| *of == id) {
            return Ok(*there);
        }
        let by_value = Name::CUDNN_ATTR_TENSOR_IS_BY_VALUE;
        let number = tensor(id, DType::F32, [1; 4], [1; 4])?;
        let number = self.add(number.with(by_value, Kind::CUDNN_TYPE_BOOLEAN, &[true])?)?;
        self.numbers.push((id, number));
        Ok(number)
    }

    /// Virtual tensor: an intermediate value without memory.
    fn passing(&mut self, dtype: DType, axes: [usize; 4], strides: [usize; 4]) -> Result<usize, CudaError> {
        let id = VIRTUAL + self.parts.len() as i64;
        let value = tensor(id, dtype, axes, strides)?;
        self.add(value.with(Name::CUDNN_ATTR_TENSOR_IS_VIRTUAL, Kind::CUDNN_TYPE_BOOLEAN, &[true])?)
    }

    fn square(&mut self, dtype: DType) -> Result<usize, CudaError> {
        let [b, h, t, _] = self.sizes;
        self.passing(dtype, [b, h, t, t], [h * t * t, t * t, t, 1])
    }

    fn virtual_row(&mut self) -> Result<usize, CudaError> {
        let [b, h, t, _] = self.sizes;
        self.passing(DType::F32, [b, h, t, 1], [h * t, t, 1, 1])
    }

    /// Transposes scores so that keys are rows, rounded.
    fn turned_square(&mut self, square: usize) -> Result<usize, CudaError> {
        let [b, h, t, _] = self.sizes;
        let turned = self.passing(self.dtype, [b, h, t, t], [h * t * t, t * t, 1, t])?;
        self.reshape(square, turned)?;
        Ok(turned)
    }

    fn square_of(&mut self, mode: Pointwise, x: usize, y: usize) -> Result<usize, CudaError> {
        let result = self.square(DType::F32)?;
        self.pointwise(mode, x, Some(y), result)?;
        Ok(result)
    }

    fn pointwise(
        &mut self,
        mode: Pointwise,
        x: usize,
        other: Option<usize>,
        result: usize,
    ) -> Result<(), CudaError> {
        let of = Descriptor::new(Of::CUDNN_BACKEND_POINTWISE_DESCRIPTOR)?
            .with(Name::CUDNN_ATTR_POINTWISE_MODE, Kind::CUDNN_TYPE_POINTWISE_MODE, &[mode])?
            .with(Name::CUDNN_ATTR_POINTWISE_MATH_PREC, Kind::CUDNN_TYPE_DATA_TYPE, &[F32])?;
        let of = self.add(of)?;
        let part = |i: usize| [&self.parts[i]];
        let mut operation = Descriptor::new(Of::CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR)?
            .with_parts(Name::CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, &part(of))?
            .with_parts(Name::CUDNN_ATTR_OPERATION_POINTWISE_XDESC, &part(x))?
            .with_parts(Name::CUDNN_ATTR_OPERATION_POINTWISE_YDESC, &part(result))?;
        if let Some(other) = other {
            operation = operation.with_parts(Name::CUDNN_ATTR_OPERATION_POINTWISE_BDESC, &part(other))?;
        }
        self.operations.push(operation.finished()?);
        Ok(())
    }

    /// Reduces over the last axis.
    fn reduce(&mut self, by: Reduce, x: usize) -> Result<usize, CudaError> {
        let of = Descriptor::new(Of::CUDNN_BACKEND_REDUCTION_DESCRIPTOR)?
            .with(Name::CUDNN_ATTR_REDUCTION_COMP_TYPE, Kind::CUDNN_TYPE_DATA_TYPE, &[F32])?
            .with(Name::CUDNN_ATTR_REDUCTION_OPERATOR, Kind::CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, &[by])?;
        let (of, result) = (self.add(of)?, self.virtual_row()?);
        let operation = Descriptor::new(Of::CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR)?
            .with_parts(Name::CUDNN_ATTR_OPERATION_REDUCTION_DESC, &[&self.parts[of]])?
            .with_parts(Name::CUDNN_ATTR_OPERATION_REDUCTION_XDESC, &[&self.parts[x]])?
            .with_parts(Name::CUDNN_ATTR_OPERATION_REDUCTION_YDESC, &[&self.parts[result]])?;
        self.operations.push(operation.finished()?);
        Ok(result)
    }

    fn matmul(&mut self, left: usize, right: usize, result: usize) -> Result<(), CudaError> {
        let of = Descriptor::new(Of::CUDNN_BACKEND_MATMUL_DESCRIPTOR)?.with(
            Name::CUDNN_ATTR_MATMUL_COMP_TYPE,
            Kind::CUDNN_TYPE_DATA_TYPE,
            &[F32],
        )?;
        let of = self.add(of)?;
        let operation = Descriptor::new(Of::CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR)?
            .with_parts(Name::CUDNN_ATTR_OPERATION_MATMUL_DESC, &[&self.parts[of]])?
            .with_parts(Name::CUDNN_ATTR_OPERATION_MATMUL_ADESC, &[&self.parts[left]])?
            .with_parts(Name::CUDNN_ATTR_OPERATION_MATMUL_BDESC, &[&self.parts[right]])?
            .with_parts(Name::CUDNN_ATTR_OPERATION_MATMUL_CDESC, &[&self.parts[result]])?;
        self.operations.push(operation.finished()?);
        Ok(())
    }

    fn reshape(&mut self, x: usize, result: usize) -> Result<(), CudaError> {
        let operation = Descriptor::new(Of::CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR)?
            .with_parts(Name::CUDNN_ATTR_OPERATION_RESHAPE_XDESC, &[&self.parts[x]])?
            .with_parts(Name::CUDNN_ATTR_OPERATION_RESHAPE_YDESC, &[&self.parts[result]])?;
        self.operations.push(operation.finished()?);
        Ok(())
    }
}

const F32: sys::cudnnDataType_t = sys::cudnnDataType_t::CUDNN_DATA_FLOAT;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::action::AttentionBackward;
    use crate::libraries;

    fn attended(batch: usize, tokens: usize, backward: bool) -> AttentionForward {
        let gradient =
            backward.then_some(AttentionBackward { dout: 1 << 24, dqkv: 2 << 24, deltas: 3 << 24 });
        let (heads, head, dtype) = (12, 64, DType::Bf16);
        AttentionForward {
            batch,
            tokens,
            heads,
            head,
            dtype,
            qkv: 1 << 20,
            out: 2 << 20,
            log_sums: 3 << 20,
            gradient,
        }
    }

    #[test]
    fn working_memory_is_that_of_all_scores_in_whole_tiles() {
        assert_eq!(workspace(&attended(1, 1025, true)), 12 * 1088 * 1152 * 2 + BESIDE);
        assert_eq!(workspace(&attended(8, 4097, false)), BESIDE);
        assert!(workspace(&attended(1, 4097, true)) <= WORKSPACE);
        assert!(workspace(&attended(2, 4097, true)) > WORKSPACE);
    }

    #[test]
    fn descriptions_name_the_pass_and_the_heads() {
        assert_eq!(describe(&attended(8, 577, false)), "attention of 8×12 heads of 577×64 bf16");
        assert_eq!(describe(&attended(1, 50, true)), "the gradient of attention of 1×12 heads of 50×64 bf16");
    }

    /// Descriptors need cuDNN, but no GPU.
    #[test]
    fn cudnn_takes_the_descriptions() {
        if libraries::cudnn().is_err() {
            return;
        }
        let forward = sketch(&attended(2, 65, false)).unwrap();
        let backward = sketch(&attended(2, 65, true)).unwrap();
        assert_eq!([forward.operations.len(), backward.operations.len()], [10, 17]);
        // One that doesn't fit is refused, so that they are looked at.
        let mut wrong = forward;
        let (square, row) = (wrong.square(DType::F32).unwrap(), wrong.virtual_row().unwrap());
        assert!(wrong.matmul(row, square, row).is_err());
    }
}
