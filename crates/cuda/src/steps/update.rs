//! The update: gradient norm, clipping, optimizers. All parameters of a plan are updated by one launch.

use crate::action::{Action, Address, Arg, Constants, Context, Kernel, Launch, Operand, Source, c_type};
use crate::error::CudaError;
use graph::passes::ALIGN;
use graph::{DType, Op, Type};

// As update.cu has them.
const PIECE: usize = 2048;
const THREADS: u32 = 256;
const WIDE: u32 = 1024;

/// About how many partial sums of squares there are at most.
const PARTIALS: usize = 4096;

/// Where, beside the header, a failed step leaves the word that keeps later ones from being applied.
pub const HALT: Address = 64;

/// The kernels' instances, each with the compute capability it needs.
pub fn kernels() -> Vec<(Kernel, u32)> {
    let plain =
        ["sum_partials", "clip", "advance", "norm_clip_advance", "loss_scale", "lamb_moments", "lamb_steps"];
    let mut names: Vec<String> = plain.map(String::from).into();
    names.extend(["float", "bf16", "f16"].map(|t| format!("sum_squares<{t}>")));
    for half in ["bf16", "f16"] {
        names.extend(["adamw", "sgd", "lamb_apply", "copies"].map(|kernel| format!("{kernel}<{half}>")));
    }
    names.into_iter().map(|name| (Kernel::new(Source::Update, name), 75)).collect()
}

/// One step that is no optimizer.
pub fn actions(cx: &Context<'_>) -> Result<Vec<Action>, CudaError> {
    if *cx.op == Op::SumSquares {
        let mut norm = Norm::of(cx)?;
        norm.actions.push(launch("sum_partials", 1, WIDE, norm.sum_args(cx)));
        return Ok(norm.actions);
    }
    all_single(cx)?;
    let one = |kernel, args| Ok(vec![launch(kernel, 1, 1, args)]);
    match *cx.op {
        Op::Clip { .. } => one("clip", [vec![pointer(cx.input(0))], clip_args(cx)].concat()),
        Op::Advance => {
            one("advance", vec![pointer(cx.input(0)), pointer(cx.input(1)), pointer(cx.output(0))])
        }
        Op::LossScale { window, hysteresis, min } => {
            let settings = [window as f32, hysteresis as f32, min as f32].map(Arg::F32);
            let ends = ([pointer(cx.input(0)), pointer(cx.input(1))], [pointer(cx.output(0))]);
            one("loss_scale", [&ends.0[..], &settings, &ends.1].concat())
        }
        _ => Err(cx.no_kernel()),
    }
}

/// The steps `sum_squares`, `clip` and `advance` of a plan: with one launch less for each where they follow from each other.
pub fn norm_clip_advance(
    norm: &Context<'_>,
    clip: &Context<'_>,
    advance: &Context<'_>,
) -> Result<Vec<Action>, CudaError> {
    let follow =
        clip.input(0).address == norm.output(0).address && advance.input(1).address == clip.output(0).address;
    if !follow {
        return Ok([actions(norm)?, actions(clip)?, actions(advance)?].concat());
    }
    all_single(clip)?;
    all_single(advance)?;
    let mut sum = Norm::of(norm)?;
    let ends = vec![pointer(advance.input(0)), pointer(advance.output(0))];
    let args = [sum.sum_args(norm), clip_args(clip), ends].concat();
    sum.actions.push(launch("norm_clip_advance", 1, WIDE, args));
    Ok(sum.actions)
}

/// Bytes of working memory. LAMB's lies among the constants: a plan lets its steps share memory, but they become one here.
pub fn scratch(op: &Op, inputs: &[&Type], _outputs: &[&Type]) -> usize {
    match op {
        Op::SumSquares => {
            let total = inputs.iter().map(|ty| padded(ty.dtype, ty.shape.count())).sum::<usize>();
            (total.div_ceil(per_partial(total)) + inputs.len()) * size_of::<f64>()
        }
        _ => 0,
    }
}

fn launch(kernel: &str, grid: usize, block: u32, args: Vec<Arg>) -> Action {
    let kernel = Kernel::new(Source::Update, kernel);
    Action::Launch(Launch { kernel, grid: [grid as u32, 1, 1], block, shared: 0, args })
}

fn pointer(operand: &Operand) -> Arg {
    Arg::Pointer(operand.address)
}

fn all_single(cx: &Context<'_>) -> Result<(), CudaError> {
    let single = cx.inputs.iter().chain(cx.outputs).all(|o| o.dtype == DType::F32);
    if single { Ok(()) } else { Err(cx.no_kernel()) }
}

/// Of `clip`, all but the sum of squares.
fn clip_args(cx: &Context<'_>) -> Vec<Arg> {
    let Op::Clip { max_norm, .. } = *cx.op else { return vec![] };
    vec![
        pointer(cx.input(1)),
        Arg::Pointer(cx.inputs.get(2).map_or(0, |scale| scale.address)),
        Arg::Pointer(cx.header),
        Arg::Pointer(cx.header + HALT),
        Arg::F64(max_norm.unwrap_or(f64::INFINITY)),
        pointer(cx.output(0)),
    ]
}

// ---- the sum of squares ----------------------------------------------------------------------------------------------

/// Launches that leave partial sums of squares in scratch, and how many of those there are.
struct Norm {
    actions: Vec<Action>,
    partials: usize,
}

impl Norm {
    fn of(cx: &Context<'_>) -> Result<Self, CudaError> {
        if cx.output(0).dtype != DType::F32 {
            return Err(cx.no_kernel());
        }
        let per_partial = per_partial(cx.inputs.iter().map(|x| padded(x.dtype, x.shape.count())).sum());
        let mut norm = Norm { actions: vec![], partials: 0 };
        for run in runs(cx.inputs) {
            let dtype = c_type(run.dtype).ok_or_else(|| cx.no_kernel())?;
            let blocks = run.count.div_ceil(per_partial);
            let sums = cx.scratch + (norm.partials * size_of::<f64>()) as Address;
            let sizes = [run.count, per_partial].map(|n| Arg::I64(n as i64));
            let args = [&[Arg::Pointer(run.address)], &sizes[..], &[Arg::Pointer(sums)]].concat();
            norm.actions.push(launch(&format!("sum_squares<{dtype}>"), blocks, THREADS, args));
            norm.partials += blocks;
        }
        Ok(norm)
    }

    fn sum_args(&self, cx: &Context<'_>) -> Vec<Arg> {
        vec![Arg::Pointer(cx.scratch), Arg::U32(self.partials as u32), pointer(cx.output(0))]
    }
}

/// Elements that one block sums, if there are `total`.
fn per_partial(total: usize) -> usize {
    total.div_ceil(PARTIALS).max(1).next_multiple_of(PIECE)
}

/// Elements until the next tensor may start.
fn padded(dtype: DType, count: usize) -> usize {
    (count * dtype.bytes()).next_multiple_of(ALIGN) / dtype.bytes()
}

/// Tensors side by side, as one range. What lies between them is zero.
#[derive(Debug, PartialEq)]
struct Run {
    address: Address,
    dtype: DType,
    count: usize,
}

fn runs(tensors: &[Operand]) -> Vec<Run> {
    let mut sorted: Vec<&Operand> = tensors.iter().filter(|x| x.shape.count() > 0).collect();
    sorted.sort_by_key(|x| x.address);
    let mut runs: Vec<Run> = vec![];
    for Operand { address, dtype, shape } in sorted {
        let so_far = runs.last().map(|run| padded(run.dtype, run.count));
        match runs.last_mut().zip(so_far) {
            Some((run, n)) if run.dtype == *dtype && run.address + (n * dtype.bytes()) as u64 == *address => {
                run.count = n + shape.count();
            }
            _ => runs.push(Run { address: *address, dtype: *dtype, count: shape.count() }),
        }
    }
    runs
}

// ---- optimizers --------------------------------------------------------------------------------------------------------

/// A row of the kernels' table of tensors. Address 0 is something that isn't there.
#[derive(Clone, Debug, Default, PartialEq)]
struct Tensor {
    w: Address,
    g: Address,
    m: Address,
    v: Address,
    copy: Address,
    average: Address,
    lr_scale: f64,
    weight_decay: f64,
    count: usize,
}

/// What a launch has in common for all its tensors.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Rule {
    AdamW { beta1: f64, beta2: f64, eps: f64 },
    Sgd { momentum: f64, nesterov: bool },
    Lamb { beta1: f64, beta2: f64, eps: f64, min_coeff: f64, max_coeff: f64 },
}

/// One optimizer step, with the moving average of its parameter.
struct Parameter {
    tensor: Tensor,
    rule: Rule,
    /// Type of the copy.
    half: Option<DType>,
    /// Of the average.
    decay: Option<f64>,
    header: Address,
    control: Address,
    applied: Address,
    /// Let outputs start as what they update, where they lie elsewhere.
    copies: Vec<Action>,
    /// (first byte, end, whether it is written).
    ranges: Vec<(Address, Address, bool)>,
}

impl Parameter {
    fn of(cx: &Context<'_>) -> Result<Self, CudaError> {
        let (rule, weight_decay, lr_scale, moments) = match *cx.op {
            Op::AdamW { beta1, beta2, eps, weight_decay, lr_scale } => {
                (Rule::AdamW { beta1, beta2, eps }, weight_decay, lr_scale, 2)
            }
            Op::Sgd { momentum, nesterov, weight_decay, lr_scale } => {
                (Rule::Sgd { momentum, nesterov }, weight_decay, lr_scale, 1)
            }
            Op::Lamb { beta1, beta2, eps, weight_decay, min_coeff, max_coeff, lr_scale } => {
                (Rule::Lamb { beta1, beta2, eps, min_coeff, max_coeff }, weight_decay, lr_scale, 2)
            }
            _ => return Err(cx.no_kernel()),
        };
        // w, g, the moments, control, applied [, copy] → w, the moments [, copy].
        let half = cx.inputs.get(moments + 4).map(|copy| copy.dtype);
        let types = cx.inputs[..moments + 4].iter().all(|o| o.dtype == DType::F32);
        if !types || half.is_some_and(|dtype| !dtype.is_half()) {
            return Err(cx.no_kernel());
        }
        let g = cx.input(1);
        let tensor = Tensor {
            w: cx.output(0).address,
            g: g.address,
            m: cx.output(1).address,
            v: if moments == 2 { cx.output(2).address } else { 0 },
            copy: half.map_or(0, |_| cx.output(moments + 1).address),
            average: 0,
            lr_scale,
            weight_decay,
            count: g.shape.count(),
        };
        let mut parameter = Parameter {
            tensor,
            rule,
            half,
            decay: None,
            header: cx.header,
            control: cx.input(moments + 2).address,
            applied: cx.input(moments + 3).address,
            copies: vec![],
            ranges: vec![range(g, false)],
        };
        parameter.work_in_place(cx);
        Ok(parameter)
    }

    fn add_average(&mut self, cx: &Context<'_>, decay: f64) -> Result<(), CudaError> {
        if cx.input(2).address != self.control || self.decay.is_some() {
            return Err(cx.no_kernel());
        }
        all_single(cx)?;
        self.decay = Some(decay);
        self.tensor.average = cx.output(0).address;
        self.work_in_place(cx);
        Ok(())
    }

    fn work_in_place(&mut self, cx: &Context<'_>) {
        for (input, output) in cx.op.in_place(cx.inputs.len()) {
            let (old, new) = (cx.input(input), cx.output(output));
            self.ranges.push(range(new, true));
            if old.address != new.address {
                self.ranges.push(range(old, false));
                let bytes = new.shape.count() * new.dtype.bytes();
                self.copies.push(Action::Copy { from: old.address, to: new.address, bytes });
            }
        }
    }
}

fn range(operand: &Operand, written: bool) -> (Address, Address, bool) {
    let bytes = operand.shape.count() * operand.dtype.bytes();
    (operand.address, operand.address + bytes as Address, written)
}

/// All optimizer and average steps of a plan, in program order.
///
/// They become one launch (three for LAMB), or as many as there are sets of betas and the like. What they read must still be
/// there at the last of them, and nobody may need what they write before.
pub fn optimizers(steps: &[Context<'_>], constants: &mut Constants) -> Result<Vec<Action>, CudaError> {
    let mut parameters: Vec<Parameter> = vec![];
    for cx in steps {
        match *cx.op {
            Op::Ema { decay } => {
                let of = |p: &&mut Parameter| p.tensor.w == cx.input(1).address;
                let parameter = parameters.iter_mut().rev().find(of).ok_or_else(|| cx.no_kernel())?;
                parameter.add_average(cx, decay)?;
            }
            _ => parameters.push(Parameter::of(cx)?),
        }
    }
    // Steps that reuse each other's memory have to run one after the other.
    let together = if apart(&parameters) { parameters.len().max(1) } else { 1 };
    let mut actions = vec![];
    for parameters in parameters.chunks(together) {
        actions.extend(parameters.iter().flat_map(|p| p.copies.iter().cloned()));
        for group in Group::all(parameters) {
            actions.extend(group.actions(constants));
        }
    }
    Ok(actions)
}

/// Whether nothing that one parameter's update writes is touched by another's.
fn apart(parameters: &[Parameter]) -> bool {
    let mut ranges: Vec<_> = parameters.iter().flat_map(|p| p.ranges.iter().copied()).collect();
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

/// Parameters that one launch can update.
struct Group<'a> {
    first: &'a Parameter,
    half: Option<DType>,
    decay: Option<f64>,
    tensors: Vec<Tensor>,
}

impl<'a> Group<'a> {
    fn all(parameters: &'a [Parameter]) -> Vec<Self> {
        let mut groups: Vec<Group<'a>> = vec![];
        for p in parameters {
            match groups.iter_mut().find(|group| group.takes(p)) {
                Some(group) => {
                    group.half = group.half.or(p.half);
                    group.decay = group.decay.or(p.decay);
                    group.tensors.push(p.tensor.clone());
                }
                None => {
                    let Parameter { half, decay, .. } = *p;
                    groups.push(Group { first: p, half, decay, tensors: vec![p.tensor.clone()] });
                }
            }
        }
        groups
    }

    fn takes(&self, p: &Parameter) -> bool {
        let reads = |p: &Parameter| (p.header, p.control, p.applied);
        self.first.rule == p.rule
            && reads(self.first) == reads(p)
            && (self.half.is_none() || p.half.is_none() || self.half == p.half)
            && (self.decay.is_none() || p.decay.is_none() || self.decay == p.decay)
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
            Rule::Lamb { beta1, beta2, eps, min_coeff, max_coeff } => {
                // Two sums for each piece, then a step size for each tensor.
                let norms = Arg::Pointer(constants.put(&vec![0; blocks * 2 * size_of::<f64>()]));
                let steps = Arg::Pointer(constants.put(&vec![0; self.tensors.len() * size_of::<f32>()]));
                let [beta1, beta2, eps, min, max] = [beta1, beta2, eps, min_coeff, max_coeff].map(Arg::F64);
                let moments = vec![tensors, pieces, control, beta1, beta2, eps, norms];
                let sizes = vec![tensors, header, control, applied, beta1, beta2, min, max, norms, steps];
                let apply = vec![tensors, pieces, control, take, eps, steps];
                vec![
                    launch("lamb_moments", blocks, THREADS, moments),
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
    let row = |&(w, copy, count): &(Address, Address, usize)| Tensor { w, copy, count, ..Tensor::default() };
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
            let own = t.count.div_ceil(PIECE);
            let numbers = [t.w, t.g, t.m, t.v, t.copy, t.average];
            rows.extend(numbers.iter().flat_map(|n| n.to_le_bytes()));
            rows.extend([t.lr_scale, t.weight_decay].iter().flat_map(|n| n.to_le_bytes()));
            rows.extend((t.count as u64).to_le_bytes());
            rows.extend([blocks, own].iter().flat_map(|n| (*n as u32).to_le_bytes()));
            pieces.extend((0..own).flat_map(|i| [index, i]).flat_map(|n| (n as u32).to_le_bytes()));
            blocks += own;
        }
        let [tensors, pieces] = [rows, pieces].map(|table| Arg::Pointer(constants.put(&table)));
        Tables { tensors, pieces, blocks }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::action::Facts;
    use graph::Shape;

    const BASE: Address = 1 << 20;
    const HEADER: Address = 0x1000;
    const ADAMW: Op = Op::AdamW { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.1, lr_scale: 1.0 };

    fn operand(address: Address, dtype: DType, count: usize) -> Operand {
        Operand { address, dtype, shape: Shape::from([count]) }
    }

    fn single(address: Address, count: usize) -> Operand {
        operand(address, DType::F32, count)
    }

    struct Step {
        op: Op,
        inputs: Vec<Operand>,
        outputs: Vec<Operand>,
    }

    /// How far apart the tensors of a step lie, and the steps.
    const PART: Address = 0x100_0000;
    const APART: Address = 0x1_0000_0000;

    /// A step of AdamW or LAMB on memory from `at` on, in place, with a copy if it has a type.
    fn step(op: Op, at: Address, count: usize, half: Option<DType>) -> Step {
        let place = |i: u64| single(at + i * PART, count);
        let copy = half.map(|dtype| operand(at + 4 * PART, dtype, count));
        let mut inputs = vec![place(0), place(1), place(2), place(3), single(0x2000, 3), single(0x3000, 1)];
        inputs.extend(copy.clone());
        let mut outputs = vec![place(0), place(2), place(3)];
        outputs.extend(copy);
        Step { op, inputs, outputs }
    }

    fn average(of: &Step, decay: f64) -> Step {
        let place = single(of.outputs[0].address + 5 * PART, of.outputs[0].shape.count());
        let inputs = vec![place.clone(), of.outputs[0].clone(), single(0x2000, 3)];
        Step { op: Op::Ema { decay }, inputs, outputs: vec![place] }
    }

    fn contexts<R>(steps: &[Step], f: impl FnOnce(&[Context<'_>]) -> R) -> R {
        let facts = &Facts::h200();
        let (scratch, header, accumulate, tf32) = (0x8000, HEADER, false, false);
        let context = steps.iter().map(|Step { op, inputs, outputs }| Context {
            op,
            layer: "",
            inputs,
            outputs,
            scratch,
            parts: 0,
            header,
            accumulate,
            tf32,
            facts,
        });
        f(&context.collect::<Vec<_>>())
    }

    fn merged(steps: &[Step]) -> (Vec<Action>, Constants) {
        let mut constants = Constants::at(BASE);
        let actions = contexts(steps, |steps| optimizers(steps, &mut constants)).expect("there are kernels");
        (actions, constants)
    }

    fn launches(actions: &[Action]) -> Vec<&Launch> {
        let launches =
            actions.iter().map(|action| if let Action::Launch(l) = action { Some(l) } else { None });
        launches.flatten().collect()
    }

    fn names(actions: &[Action]) -> Vec<&str> {
        launches(actions).iter().map(|l| l.kernel.name.as_str()).collect()
    }

    /// The words of a table that lies at `arg`.
    fn words<const N: usize>(constants: &Constants, arg: Arg, count: usize) -> Vec<[u64; N]> {
        let Arg::Pointer(address) = arg else { panic!("{arg:?} is no table") };
        let start = (address - BASE) as usize;
        let bytes = &constants.bytes()[start..start + count * N * 8];
        let word = |b: &[u8]| u64::from_le_bytes(b.try_into().expect("eight bytes"));
        bytes.chunks(8 * N).map(|row| std::array::from_fn(|i| word(&row[8 * i..8 * i + 8]))).collect()
    }

    fn adamw_step(address: Address, count: usize) -> Step {
        step(ADAMW, address, count, Some(DType::Bf16))
    }

    #[test]
    fn pieces_cover_every_element_once() {
        let counts = [1, 5, 192, 193, 4096, 4097, 589_824];
        let steps: Vec<Step> =
            counts.iter().enumerate().map(|(i, n)| adamw_step((i as u64 + 1) * APART, *n)).collect();
        let (actions, constants) = merged(&steps);
        let [launch] = launches(&actions)[..] else { panic!("one launch") };
        let blocks = launch.grid[0] as usize;
        let tensors = words::<10>(&constants, launch.args[0], counts.len());
        let mut covered = vec![0; counts.len()];
        for (block, [piece]) in words::<1>(&constants, launch.args[1], blocks).into_iter().enumerate() {
            let (tensor, index) = (piece as u32 as usize, (piece >> 32) as usize);
            let (first, own) = (tensors[tensor][9] as u32 as usize, (tensors[tensor][9] >> 32) as usize);
            assert_eq!((block - first, own), (index, counts[tensor].div_ceil(PIECE)));
            assert_eq!(covered[tensor], index * PIECE);
            covered[tensor] = counts[tensor].min((index + 1) * PIECE);
        }
        assert_eq!(covered, counts);
        let rows = tensors.iter().map(|row| row[8] as usize).collect::<Vec<_>>();
        assert_eq!(rows, counts);
    }

    #[test]
    fn a_row_has_what_belongs_to_a_parameter() {
        let of = adamw_step(APART, 100);
        let average = average(&of, 0.99);
        let places = |i: u64| APART + i * PART;
        let (actions, constants) = merged(&[of, average]);
        let launch = launches(&actions)[0];
        assert_eq!(actions.len(), 1);
        let row = words::<10>(&constants, launch.args[0], 1)[0];
        assert_eq!(row[..6], [0, 1, 2, 3, 4, 5].map(places));
        assert_eq!(row[6..9], [1f64.to_bits(), 0.1f64.to_bits(), 100]);
        assert_eq!(launch.args[2..5], [HEADER, 0x2000, 0x3000].map(Arg::Pointer));
        assert_eq!(launch.args[5], Arg::F64(1.0 - 0.99));
    }

    #[test]
    fn parameter_groups_share_a_launch_and_other_rules_do_not() {
        let decay = |weight_decay, lr_scale| Op::AdamW {
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay,
            lr_scale,
        };
        let steps = |ops: [Op; 3], half: [Option<DType>; 3]| -> Vec<Step> {
            (1..).zip(ops).zip(half).map(|((i, op), half)| step(op, i * APART, 10, half)).collect()
        };
        let (bf16, f16) = (Some(DType::Bf16), Some(DType::F16));
        let groups = [decay(0.1, 1.0), decay(0.0, 1.0), decay(0.1, 0.5)];
        assert_eq!(names(&merged(&steps(groups.clone(), [None, bf16, None])).0), ["adamw<bf16>"]);
        assert_eq!(
            names(&merged(&steps(groups.clone(), [None, f16, bf16])).0),
            ["adamw<f16>", "adamw<bf16>"]
        );
        let other = Op::AdamW { beta1: 0.8, beta2: 0.999, eps: 1e-8, weight_decay: 0.1, lr_scale: 1.0 };
        let (actions, _) = merged(&steps([ADAMW, other, ADAMW], [None; 3]));
        assert_eq!(launches(&actions).iter().map(|l| l.grid[0]).collect::<Vec<_>>(), [2, 1]);
        let lamb = |weight_decay| Op::Lamb {
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-6,
            weight_decay,
            min_coeff: 0.01,
            max_coeff: 10.0,
            lr_scale: 1.0,
        };
        let (actions, _) = merged(&steps([lamb(0.1), lamb(0.0), lamb(0.1)], [f16; 3]));
        assert_eq!(names(&actions), ["lamb_moments", "lamb_steps", "lamb_apply<f16>"]);
    }

    #[test]
    fn outputs_elsewhere_start_as_copies() {
        let mut moved = adamw_step(APART, 10);
        moved.outputs[1].address = 3 * APART;
        moved.outputs[3].address = 4 * APART;
        let (actions, _) = merged(&[moved, adamw_step(2 * APART, 10)]);
        let copy = |from, to, bytes| Action::Copy { from, to, bytes };
        let copies = [copy(APART + 2 * PART, 3 * APART, 40), copy(APART + 4 * PART, 4 * APART, 20)];
        assert_eq!(actions[..2], copies);
        assert_eq!(names(&actions[2..]), ["adamw<bf16>"]);
    }

    #[test]
    fn steps_that_reuse_memory_stay_apart() {
        let (mut a, mut b) = (adamw_step(APART, 100), adamw_step(2 * APART, 100));
        (a.outputs[0].address, b.outputs[0].address) = (3 * APART, 3 * APART + 128);
        let (actions, _) = merged(&[a, b]);
        let kinds = actions.iter().map(|a| matches!(a, Action::Copy { .. })).collect::<Vec<_>>();
        assert_eq!(kinds, [true, false, true, false]);
    }

    #[test]
    fn averages_need_their_parameter() {
        let of = adamw_step(APART, 10);
        let alone = [average(&of, 0.9)];
        let mut constants = Constants::at(BASE);
        assert!(contexts(&alone, |steps| optimizers(steps, &mut constants)).is_err());
    }

    #[test]
    fn neighbours_are_one_run() {
        let tensors =
            [single(1024 + 256, 7), single(1024, 33), single(4096, 32), operand(4096 + 128, DType::F16, 9)];
        let run = |address, dtype, count| Run { address, dtype, count };
        let want = [run(1024, DType::F32, 64 + 7), run(4096, DType::F32, 32), run(4096 + 128, DType::F16, 9)];
        assert_eq!(runs(&tensors), want);
    }

    fn norm(counts: &[usize], gap: usize) -> Step {
        let mut at = BASE;
        let mut place = |n: &usize| {
            let operand = single(at, *n);
            at += (padded(DType::F32, *n) * 4 + gap) as u64;
            operand
        };
        Step {
            op: Op::SumSquares,
            inputs: counts.iter().map(&mut place).collect(),
            outputs: vec![single(0x4000, 1)],
        }
    }

    #[test]
    fn partial_sums_fit_the_scratch() {
        for counts in [&[1][..], &[4096; 9], &[590_000; 150], &[1, 5, 4097, 7_000_001]] {
            for gap in [0, ALIGN] {
                let step = norm(counts, gap);
                let types: Vec<Type> =
                    step.inputs.iter().map(|x| Type::new(x.dtype, x.shape.clone())).collect();
                let bytes = scratch(&step.op, &types.iter().collect::<Vec<_>>(), &[]);
                let actions = contexts(&[step], |steps| actions(&steps[0])).expect("there are kernels");
                assert_eq!(actions.len(), if gap == 0 { 2 } else { counts.len() + 1 });
                let launches = launches(&actions);
                let (sum, squares) = launches.split_last().expect("at least a sum");
                let partials: u32 = squares.iter().map(|l| l.grid[0]).sum();
                assert_eq!(sum.args[1], Arg::U32(partials));
                assert!(partials as usize * 8 <= bytes && partials as usize <= PARTIALS + counts.len());
            }
        }
    }

    #[test]
    fn norm_clip_and_advance_are_one_launch_after_the_squares() {
        let clip = Op::Clip { max_norm: Some(1.0), scaled: false };
        let steps = [
            norm(&[100, 200], 0),
            Step {
                op: clip,
                inputs: vec![single(0x4000, 1), single(0x5000, 4)],
                outputs: vec![single(0x2000, 3)],
            },
            Step {
                op: Op::Advance,
                inputs: vec![single(0x3000, 1), single(0x2000, 3)],
                outputs: vec![single(0x3000, 1)],
            },
        ];
        let fused = contexts(&steps, |steps| norm_clip_advance(&steps[0], &steps[1], &steps[2]));
        let fused = fused.expect("there are kernels");
        assert_eq!(names(&fused), ["sum_squares<float>", "norm_clip_advance"]);
        let launch = launches(&fused)[1];
        let pointers = [0x5000, 0, HEADER, HEADER + HALT].map(Arg::Pointer);
        assert_eq!(launch.args[3..7], pointers);
        let single: Vec<Action> =
            contexts(&steps, |steps| steps.iter().flat_map(|cx| actions(cx).expect("kernel")).collect());
        assert_eq!(names(&single), ["sum_squares<float>", "sum_partials", "clip", "advance"]);
    }

    #[test]
    fn every_launch_is_of_a_listed_kernel() {
        let known: Vec<String> = kernels().into_iter().map(|(kernel, _)| kernel.name).collect();
        let mut constants = Constants::at(BASE);
        let mut actions = refresh_copies(&[(APART, 2 * APART, 5000)], DType::F16, &mut constants);
        assert_eq!(launches(&actions)[0].grid[0] as usize, 5000usize.div_ceil(PIECE));
        let scale = Op::LossScale { window: 1000, hysteresis: 2, min: 1.0 };
        let ends = vec![single(0x6000, 3), single(0x2000, 3)];
        let scale = Step { op: scale, inputs: ends, outputs: vec![single(0x6000, 3)] };
        actions.extend(contexts(&[scale], |steps| super::actions(&steps[0])).expect("there is a kernel"));
        actions.extend(merged(&[adamw_step(APART, 10)]).0);
        assert!(names(&actions).iter().all(|name| known.iter().any(|k| k == name)), "{:?}", names(&actions));
    }
}
