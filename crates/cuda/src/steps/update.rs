//! The update: gradient norm, clipping, optimizers. All parameters of a plan are updated by one launch.

use crate::action::{Action, Address, Arg, Constants, Context, Kernel, Launch, Operand, Source, c_type};
use crate::error::CudaError;
use graph::{DType, Op, Type};

// As update.cu has them.
const PIECE: usize = 2048;
const THREADS: u32 = 256;
const WIDE: u32 = 1024;

/// About how many partial sums of squares there are at most.
const PARTIALS: usize = 1024;

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

/// One step that is neither an optimizer nor a sum of squares.
pub fn actions(cx: &Context<'_>) -> Result<Vec<Action>, CudaError> {
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

/// A sum of squares, and the steps that follow it: with one launch less for each where they are `clip` and `advance`, and
/// follow from each other.
pub fn norm(steps: &[Context<'_>], constants: &mut Constants) -> Result<Vec<Action>, CudaError> {
    let Some((squares, rest)) = steps.split_first() else { return Ok(vec![]) };
    let mut sum = Norm::of(squares, constants)?;
    match rest {
        [clip, advance]
            if clip.input(0).address == squares.output(0).address
                && advance.input(1).address == clip.output(0).address =>
        {
            all_single(clip)?;
            all_single(advance)?;
            let ends = vec![pointer(advance.input(0)), pointer(advance.output(0))];
            let args = [sum.sum_args(squares), clip_args(clip), ends].concat();
            sum.actions.push(launch("norm_clip_advance", 1, WIDE, args));
        }
        others => {
            sum.actions.push(launch("sum_partials", 1, WIDE, sum.sum_args(squares)));
            for other in others {
                sum.actions.extend(actions(other)?);
            }
        }
    }
    Ok(sum.actions)
}

/// Bytes of working memory. LAMB's lies among the constants: a plan lets its steps share memory, but they become one here.
pub fn scratch(op: &Op, inputs: &[&Type], _outputs: &[&Type]) -> usize {
    match op {
        Op::SumSquares => {
            let total = inputs.iter().map(|ty| ty.shape.count()).sum::<usize>();
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
    fn of(cx: &Context<'_>, constants: &mut Constants) -> Result<Self, CudaError> {
        if cx.output(0).dtype != DType::F32 {
            return Err(cx.no_kernel());
        }
        let per_partial = per_partial(cx.inputs.iter().map(|x| x.shape.count()).sum());
        let mut norm = Norm { actions: vec![], partials: 0 };
        let runs = runs(cx.inputs);
        for dtype in DType::ALL {
            let pieces = runs.iter().filter(|run| run.dtype == dtype).flat_map(|run| run.pieces(per_partial));
            let table: Vec<[u64; 2]> = pieces.collect();
            if table.is_empty() {
                continue;
            }
            let sums = cx.scratch + (norm.partials * size_of::<f64>()) as Address;
            let bytes: Vec<u8> = table.iter().flatten().flat_map(|n| n.to_le_bytes()).collect();
            let args = vec![Arg::Pointer(constants.put(&bytes)), Arg::Pointer(sums)];
            let kernel = format!("sum_squares<{}>", c_type(dtype).ok_or_else(|| cx.no_kernel())?);
            norm.actions.push(launch(&kernel, table.len(), THREADS, args));
            norm.partials += table.len();
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

/// Tensors with nothing between them, as one range.
#[derive(Debug, PartialEq)]
struct Run {
    address: Address,
    dtype: DType,
    count: usize,
}

impl Run {
    fn end(&self) -> Address {
        self.address + (self.count * self.dtype.bytes()) as Address
    }

    /// As the kernel's table has them: the address and the elements of each.
    fn pieces(&self, size: usize) -> impl Iterator<Item = [u64; 2]> {
        let at = |first: usize| self.address + (first * self.dtype.bytes()) as Address;
        (0..self.count).step_by(size).map(move |first| [at(first), size.min(self.count - first) as u64])
    }
}

/// What lies between two tensors, if they end before a border, is anything.
fn runs(tensors: &[Operand]) -> Vec<Run> {
    let mut sorted: Vec<&Operand> = tensors.iter().filter(|x| x.shape.count() > 0).collect();
    sorted.sort_by_key(|x| x.address);
    let mut runs: Vec<Run> = vec![];
    for Operand { address, dtype, shape } in sorted {
        match runs.last_mut().filter(|run| run.dtype == *dtype && run.end() == *address) {
            Some(run) => run.count += shape.count(),
            None => runs.push(Run { address: *address, dtype: *dtype, count: shape.count() }),
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
#[path = "update_tests.rs"]
mod tests;
