//! Update: gradient norm, clipping, optimizers. One launch updates all parameters of a plan.

mod control;
mod muon;

pub use control::{actions, norm};

use crate::action::{Action, Address, Arg, Constants, Kernel, Launch, Operand, Source, StepContext};
use crate::error::CudaError;
use graph::flat::{CHUNK, Flat, Piece, Segment};
use graph::{DType, Op};
use std::mem::discriminant;
use std::ops::Range;

// As update.cu has them.
pub(super) const THREADS: u32 = 256;
const WIDE: u32 = 1024;
const WARPS: usize = THREADS as usize / 32;

/// Where, beside the header, a failed step leaves the word that keeps later ones from being applied.
pub const HALT: Address = 64;

/// The kernels' instances, each with the compute capability it needs.
pub fn kernels() -> Vec<(Kernel, u32)> {
    let plain =
        ["sum_squares", "clip", "advance", "clip_advance", "loss_scale", "lamb_moments", "lamb_steps"];
    let mut names: Vec<String> = plain.map(String::from).into();
    for half in ["bf16", "f16"] {
        names.extend(["adamw", "sgd", "lamb_apply", "copies"].map(|kernel| format!("{kernel}<{half}>")));
    }
    names.extend(muon::names());
    names.into_iter().map(|name| (Kernel::new(Source::Update, name), 75)).collect()
}

/// A launch of [`THREADS`] threads a block over two axes of blocks.
pub(super) fn launch_many(kernel: &str, [x, y]: [usize; 2], args: Vec<Arg>) -> Action {
    let kernel = Kernel::new(Source::Update, kernel);
    Action::Launch(Launch { kernel, grid: [x as u32, y as u32, 1], block: THREADS, shared: 0, args })
}

fn launch(kernel: &str, grid: usize, block: u32, args: Vec<Arg>) -> Action {
    let kernel = Kernel::new(Source::Update, kernel);
    Action::Launch(Launch { kernel, grid: [grid as u32, 1, 1], block, shared: 0, args })
}

fn pointer(operand: &Operand) -> Arg {
    Arg::Pointer(operand.address)
}

fn all_single(cx: &StepContext<'_>) -> Result<(), CudaError> {
    let single = cx.inputs.iter().chain(cx.outputs).all(|o| o.dtype == DType::F32);
    if single { Ok(()) } else { Err(cx.no_kernel()) }
}

// ---- optimizers --------------------------------------------------------------------------------------------------------

/// A row of the kernels' table of tensors: a tensor, or this rank's part of one. Address 0 is something that isn't there.
#[derive(Clone, Debug, Default, PartialEq)]
struct Tensor {
    w: Address,
    g: Address,
    m: Address,
    v: Address,
    copy: Address,
    average: Address,
    /// Sums of squares of all segments of its buffer, and which of those are the tensor's.
    norms: Address,
    segments: Range<usize>,
    lr_scale: f64,
    weight_decay: f64,
    /// What blocks do of it: its first element, elements, and number of the segment.
    pieces: Vec<[usize; 3]>,
}

/// What a launch has in common for all its tensors.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Rule {
    AdamW { beta1: f64, beta2: f64, eps: f64 },
    Sgd { momentum: f64, nesterov: bool },
    LambMoments { beta1: f64, beta2: f64, eps: f64 },
    LambApply { beta1: f64, beta2: f64, eps: f64, min_coeff: f64, max_coeff: f64 },
    MuonMomentum { momentum: f64, nesterov: bool, form: muon::Form },
    MuonApply { form: muon::Form },
}

/// One optimizer step, with the moving average of its parameters.
struct Buffer {
    tensors: Vec<Tensor>,
    rule: Rule,
    /// Where its parameters lie.
    w: Address,
    /// Type of the copy.
    half: Option<DType>,
    /// Of the average.
    decay: Option<f64>,
    header: Address,
    control: Address,
    applied: Address,
    /// Let outputs start as what they update, where they lie elsewhere; zeros for sums that are other ranks'.
    before: Vec<Action>,
    /// (first byte, end, whether it is written).
    ranges: Vec<(Address, Address, bool)>,
}

/// Where an optimizer's operands lie, and which of them are control and copy.
struct Operands {
    w: Address,
    g: Address,
    m: Address,
    v: Address,
    norms: Address,
    control: usize,
    copy: Option<(Address, DType)>,
    /// Operands that are only read.
    read: Vec<usize>,
}

impl Buffer {
    fn of(cx: &StepContext<'_>) -> Result<Self, CudaError> {
        let (input, output) = (|i: usize| cx.input(i).address, |i: usize| cx.output(i).address);
        // The copy is the operand after control and applied steps, and the last result.
        let copy = |control: usize| {
            let operand = cx.inputs.get(control + 2)?;
            Some((cx.outputs.last()?.address, operand.dtype))
        };
        let (rule, flat, at) = match cx.op {
            Op::AdamW { beta1, beta2, eps, flat } => {
                let at = Operands {
                    w: output(0),
                    g: input(1),
                    m: output(1),
                    v: output(2),
                    norms: 0,
                    control: 4,
                    copy: copy(4),
                    read: vec![1],
                };
                (Rule::AdamW { beta1: *beta1, beta2: *beta2, eps: *eps }, flat, at)
            }
            Op::Sgd { momentum, nesterov, flat } => {
                let (w, g, m, copy) = (output(0), input(1), output(1), copy(3));
                let at = Operands { w, g, m, v: 0, norms: 0, control: 3, copy, read: vec![1] };
                (Rule::Sgd { momentum: *momentum, nesterov: *nesterov }, flat, at)
            }
            Op::LambMoments { beta1, beta2, eps, flat } => {
                let (w, g, m, v, norms) = (input(0), input(1), output(0), output(1), output(2));
                let at = Operands { w, g, m, v, norms, control: 4, copy: None, read: vec![0, 1] };
                (Rule::LambMoments { beta1: *beta1, beta2: *beta2, eps: *eps }, flat, at)
            }
            Op::LambApply { beta1, beta2, eps, min_coeff, max_coeff, flat } => {
                let (w, m, v, norms, copy) = (output(0), input(1), input(2), input(3), copy(4));
                let at = Operands { w, g: 0, m, v, norms, control: 4, copy, read: vec![1, 2, 3] };
                let (min_coeff, max_coeff) = (*min_coeff, *max_coeff);
                let rule = Rule::LambApply { beta1: *beta1, beta2: *beta2, eps: *eps, min_coeff, max_coeff };
                (rule, flat, at)
            }
            _ => return Err(cx.no_kernel()),
        };
        let half = at.copy.map(|(_, dtype)| dtype);
        let numbers = cx.inputs[..at.control + 2].iter().filter(|o| o.address != at.norms);
        if !numbers.clone().all(|o| o.dtype == DType::F32) || half.is_some_and(|dtype| !dtype.is_half()) {
            return Err(cx.no_kernel());
        }
        let mut buffer = Buffer {
            tensors: tensors(flat, &at),
            rule,
            w: at.w,
            half,
            decay: None,
            header: cx.header,
            control: cx.input(at.control).address,
            applied: cx.input(at.control + 1).address,
            before: vec![],
            ranges: at.read.iter().map(|operand| range(cx.input(*operand), false)).collect(),
        };
        if let Op::LambMoments { flat, .. } = cx.op {
            buffer.ranges.push(range(cx.output(2), true));
            if flat.group.is_some() {
                let bytes = cx.output(2).shape.count() * size_of::<f64>();
                buffer.before.push(Action::Zero { at: at.norms, bytes });
            }
        }
        buffer.work_in_place(cx);
        Ok(buffer)
    }

    fn add_average(&mut self, cx: &StepContext<'_>, decay: f64) -> Result<(), CudaError> {
        if cx.input(2).address != self.control || self.decay.is_some() {
            return Err(cx.no_kernel());
        }
        all_single(cx)?;
        self.decay = Some(decay);
        for tensor in &mut self.tensors {
            tensor.average = cx.output(0).address + (tensor.w - self.w);
        }
        self.work_in_place(cx);
        Ok(())
    }

    fn work_in_place(&mut self, cx: &StepContext<'_>) {
        for (input, output) in cx.op.in_place(cx.inputs.len()) {
            let (old, new) = (cx.input(input), cx.output(output));
            self.ranges.push(range(new, true));
            if old.address != new.address {
                self.ranges.push(range(old, false));
                let bytes = new.shape.count() * new.dtype.bytes();
                self.before.push(Action::Copy { from: old.address, to: new.address, bytes });
            }
        }
    }
}

/// The tensors of a flat buffer that this rank holds something of.
fn tensors(flat: &Flat, at: &Operands) -> Vec<Tensor> {
    let all: Vec<Segment> = flat.segments().collect();
    let held: Vec<(usize, Segment)> = flat.held_segments().collect();
    let tensor = |(number, range): (usize, Range<usize>)| {
        let Piece { lr_scale, weight_decay, .. } = flat.pieces[number];
        let place = |base: Address, size: usize| match base {
            0 => 0,
            base => base + (range.start * size) as Address,
        };
        let [w, g, m, v] = [at.w, at.g, at.m, at.v].map(|base| place(base, size_of::<f32>()));
        let copy = at.copy.map_or(0, |(copy, dtype)| place(copy, dtype.bytes()));
        let of = |segments: &[Segment], piece: usize| segments.partition_point(|s| s.piece < piece);
        let own = held.iter().filter(|(_, segment)| segment.piece == number);
        let piece =
            |(segment, of): &(usize, Segment)| [of.start - flat.first - range.start, of.count, *segment];
        Tensor {
            w,
            g,
            m,
            v,
            copy,
            average: 0,
            norms: at.norms,
            segments: of(&all, number)..of(&all, number + 1),
            lr_scale,
            weight_decay,
            pieces: own.map(piece).collect(),
        }
    };
    flat.within(0..flat.held()).map(tensor).collect()
}

fn range(operand: &Operand, written: bool) -> (Address, Address, bool) {
    let bytes = operand.shape.count() * operand.dtype.bytes();
    (operand.address, operand.address + bytes as Address, written)
}

/// All optimizer and average steps of a plan, in program order.
///
/// They become one launch (three for LAMB), or as many as there are sets of betas and the like. What they read must still be
/// there at the last of them, and nobody may need what they write before.
pub fn optimizers(steps: &[StepContext<'_>], constants: &mut Constants) -> Result<Vec<Action>, CudaError> {
    let mut buffers: Vec<Buffer> = vec![];
    for cx in steps {
        match *cx.op {
            Op::Ema { decay } => {
                let of = |b: &&mut Buffer| b.w == cx.input(1).address;
                let buffer = buffers.iter_mut().rev().find(of).ok_or_else(|| cx.no_kernel())?;
                buffer.add_average(cx, decay)?;
            }
            _ => buffers.push(match muon::buffer(cx)? {
                Some(buffer) => buffer,
                None => Buffer::of(cx)?,
            }),
        }
    }
    let mut actions = vec![];
    // The halves of LAMB come one after the other.
    for of_kind in buffers.chunk_by(|a, b| discriminant(&a.rule) == discriminant(&b.rule)) {
        // Steps that reuse each other's memory have to run one after the other.
        let together = if apart(of_kind) { of_kind.len().max(1) } else { 1 };
        for buffers in of_kind.chunks(together) {
            actions.extend(buffers.iter().flat_map(|b| b.before.iter().cloned()));
            for group in MergedStep::all(buffers) {
                actions.extend(group.actions(constants));
            }
        }
    }
    Ok(actions)
}

/// Tells whether no step touches what another one writes.
fn apart(buffers: &[Buffer]) -> bool {
    let mut ranges: Vec<_> = buffers.iter().flat_map(|b| b.ranges.iter().copied()).collect();
    ranges.sort();
    let (mut touched, mut written) = (0, 0);
    for (start, end, writes) in ranges {
        if start < written || (writes && start < touched) {
            return false;
        }
        touched = touched.max(end);
        written = if writes { written.max(end) } else { written };
    }
    true
}

/// Steps that one launch can make.
struct MergedStep<'a> {
    first: &'a Buffer,
    half: Option<DType>,
    decay: Option<f64>,
    tensors: Vec<Tensor>,
}

impl<'a> MergedStep<'a> {
    fn all(buffers: &'a [Buffer]) -> Vec<Self> {
        let mut groups: Vec<MergedStep<'a>> = vec![];
        for buffer in buffers {
            match groups.iter_mut().find(|group| group.takes(buffer)) {
                Some(group) => {
                    group.half = group.half.or(buffer.half);
                    group.decay = group.decay.or(buffer.decay);
                    group.tensors.extend(buffer.tensors.iter().cloned());
                }
                None => {
                    let Buffer { half, decay, .. } = *buffer;
                    groups.push(MergedStep { first: buffer, half, decay, tensors: buffer.tensors.clone() });
                }
            }
        }
        groups
    }

    fn takes(&self, other: &Buffer) -> bool {
        let reads = |b: &Buffer| (b.header, b.control, b.applied);
        self.first.rule == other.rule
            && reads(self.first) == reads(other)
            && (self.half.is_none() || other.half.is_none() || self.half == other.half)
            && (self.decay.is_none() || other.decay.is_none() || self.decay == other.decay)
    }

    fn actions(&self, constants: &mut Constants) -> Vec<Action> {
        let Tables { tensors, pieces, blocks } = Tables::put(&self.tensors, constants);
        if blocks == 0 {
            return vec![];
        }
        let half = half_name(self.half);
        let take = Arg::F64(self.decay.map_or(0.0, |decay| 1.0 - decay));
        let [header, control, applied] =
            [self.first.header, self.first.control, self.first.applied].map(Arg::Pointer);
        let common = vec![tensors, pieces, header, control, applied, take];
        match self.first.rule {
            Rule::AdamW { beta1, beta2, eps } => {
                let args = [common, [beta1, beta2, eps].map(Arg::F64).into()].concat();
                vec![launch(&format!("adamw<{half}>"), blocks, THREADS, args)]
            }
            Rule::Sgd { momentum, nesterov } => {
                let args = [common, vec![Arg::F64(momentum), Arg::U32(nesterov.into())]].concat();
                vec![launch(&format!("sgd<{half}>"), blocks, THREADS, args)]
            }
            Rule::LambMoments { beta1, beta2, eps } => {
                let [beta1, beta2, eps] = [beta1, beta2, eps].map(Arg::F64);
                let moments = vec![tensors, pieces, control, beta1, beta2, eps];
                vec![launch("lamb_moments", blocks, THREADS, moments)]
            }
            Rule::MuonMomentum { momentum, nesterov, form } => {
                vec![muon::momentum([tensors, pieces], blocks, control, (momentum, nesterov, form))]
            }
            Rule::MuonApply { form } => {
                vec![muon::apply([tensors, pieces], blocks, [header, control, take], half, form)]
            }
            Rule::LambApply { beta1, beta2, eps, min_coeff, max_coeff } => {
                // A step size for each tensor.
                let steps = Arg::Pointer(constants.put(&vec![0; self.tensors.len() * size_of::<f32>()]));
                let [beta1, beta2, eps, min, max] = [beta1, beta2, eps, min_coeff, max_coeff].map(Arg::F64);
                let sizes = vec![tensors, header, control, applied, beta1, beta2, min, max, steps];
                let apply = vec![tensors, pieces, control, take, eps, steps];
                vec![
                    launch("lamb_steps", self.tensors.len(), THREADS, sizes),
                    launch(&format!("lamb_apply<{half}>"), blocks, THREADS, apply),
                ]
            }
        }
    }
}

/// The type that kernels are instantiated for. Without copies it doesn't matter.
fn half_name(half: Option<DType>) -> &'static str {
    if half == Some(DType::F16) { "f16" } else { "bf16" }
}

/// Makes the copies of all parameters anew: (parameter in f32, copy, elements).
pub fn refresh_copies(
    pairs: &[(Address, Address, usize)],
    dtype: DType,
    constants: &mut Constants,
) -> Vec<Action> {
    let row = |&(w, copy, count): &(Address, Address, usize)| {
        let pieces = (0..count).step_by(CHUNK).map(|first| [first, CHUNK.min(count - first), 0]).collect();
        Tensor { w, copy, pieces, ..Tensor::default() }
    };
    let tensors: Vec<Tensor> = pairs.iter().map(row).collect();
    let Tables { tensors, pieces, blocks } = Tables::put(&tensors, constants);
    if blocks == 0 {
        return vec![];
    }
    vec![launch(&format!("copies<{}>", half_name(Some(dtype))), blocks, THREADS, vec![tensors, pieces])]
}

/// `Tensor` and `Piece` of update.cu: what there is to update, and what each block does of it.
struct Tables {
    tensors: Arg,
    pieces: Arg,
    blocks: usize,
}

impl Tables {
    fn put(tensors: &[Tensor], constants: &mut Constants) -> Self {
        let (mut rows, mut pieces): (Vec<u8>, Vec<u8>) = (vec![], vec![]);
        let mut blocks = 0;
        for (index, t) in tensors.iter().enumerate() {
            let numbers = [t.w, t.g, t.m, t.v, t.copy, t.average, t.norms];
            rows.extend(numbers.iter().flat_map(|n| n.to_le_bytes()));
            rows.extend([t.lr_scale, t.weight_decay].iter().flat_map(|n| n.to_le_bytes()));
            rows.extend([t.segments.start, t.segments.len()].iter().flat_map(|n| (*n as u32).to_le_bytes()));
            let row = |[first, count, segment]: &[usize; 3]| [index, *first, *count, *segment];
            pieces.extend(t.pieces.iter().flat_map(row).flat_map(|n| (n as u32).to_le_bytes()));
            blocks += t.pieces.len();
        }
        let [tensors, pieces] = [rows, pieces].map(|table| Arg::Pointer(constants.put(&table)));
        Tables { tensors, pieces, blocks }
    }
}

#[cfg(test)]
#[path = "update_tests.rs"]
mod tests;
