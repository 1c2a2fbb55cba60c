//! Binds a program to memory and runs its plans.

mod checked;

pub use checked::{BadValue, Origin};

use crate::kernels::Float;
use crate::memory::{Block, View};
use crate::pool::Pool;
use crate::steps;
use graph::graph::Phase;
use graph::passes::ALIGN;
use graph::plan::{Place, Plan, PlanValue, Step};
use graph::random::Sequence;
use graph::{DType, Header, Init, Op, Program, Role, Shape, State, StateId, Type};
use std::time::Instant;

#[derive(Debug, thiserror::Error)]
pub enum CpuError {
    #[error("{layer}: the CPU executor has no kernel for {op}")]
    NoKernel { layer: String, op: String },
    #[error("{name} is {ty}, but this executor computes in {computes}")]
    DType { name: String, ty: Type, computes: DType },
    #[error("can't start {threads} threads: {source}")]
    Threads { threads: usize, source: std::io::Error },
}

/// One of a program's plans.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    Micro,
    Last,
    Update,
    Eval,
}

/// A value of a bound plan: where it is and how it is shaped. Labels are integers, everything else is `T`.
pub(crate) struct Operand<T> {
    pub data: View<T>,
    pub ints: View<i32>,
    pub shape: Shape,
}

/// A step with its operands' addresses.
pub(crate) struct Bound<T> {
    pub op: Op,
    pub inputs: Vec<Operand<T>>,
    pub outputs: Vec<Operand<T>>,
    pub scratch: View<u8>,
    nanoseconds: u64,
}

/// What the host fills before a plan runs.
pub struct Batch<'a, T> {
    pub images: &'a mut [T],
    pub labels: &'a mut [i32],
    pub weights: &'a mut [T],
    /// The second labels, in plans of mixed samples.
    pub partners: Option<&'a mut [i32]>,
    /// The first label's share, in plans of mixed samples.
    pub mix: Option<&'a mut [T]>,
}

/// Time spent in the steps of one kind.
#[derive(Clone, Debug, PartialEq)]
pub struct StepTime {
    pub op: String,
    pub phase: Phase,
    pub is_product: bool,
    pub seconds: f64,
    pub flops: f64,
    pub bytes: f64,
}

pub struct Executor<T: Float> {
    program: Program,
    plans: [Vec<Bound<T>>; 4],
    runs: [u64; 4],
    states: Vec<View<T>>,
    arena: Block,
    state_block: Block,
    pool: Pool,
}

impl<T: Float> Executor<T> {
    /// Allocates the arena and the states, all zero but the parameters, which start as their model says, and their
    /// averages, which start equal to them.
    pub fn new(program: Program, threads: usize, seed: u64) -> Result<Self, CpuError> {
        let pool = Pool::new(threads).map_err(|source| CpuError::Threads { threads, source })?;
        let arena = Block::new(program.arena());
        let mut offsets = Vec::with_capacity(program.states.len());
        let mut bytes = 0;
        for state in &program.states {
            check_dtype::<T>(&state.name, &state.ty)?;
            offsets.push(bytes);
            bytes += state.ty.bytes().next_multiple_of(ALIGN);
        }
        let state_block = Block::new(bytes);
        let view = |(state, offset): (&State, &usize)| state_block.view(*offset, state.ty.shape.count());
        let states: Vec<View<T>> = program.states.iter().zip(&offsets).map(view).collect();
        let bind = |plan| bind(plan, &arena, &states);
        let [micro, last, update, eval] = program.plans();
        let plans = [bind(micro)?, bind(last)?, bind(update)?, bind(eval)?];
        let mut executor = Executor { program, plans, runs: [0; 4], states, arena, state_block, pool };
        executor.initialise(seed);
        Ok(executor)
    }

    pub fn program(&self) -> &Program {
        &self.program
    }

    pub fn threads(&self) -> usize {
        self.pool.threads()
    }

    /// Bytes allocated for the arena and for the states.
    pub fn allocated(&self) -> (usize, usize) {
        (self.arena.bytes(), self.state_block.bytes())
    }

    /// Runs a plan from its first step to its last.
    pub fn run(&mut self, which: Which, header: &Header) {
        self.runs[which as usize] += 1;
        for index in 0..self.plans[which as usize].len() {
            let start = Instant::now();
            self.run_step(which, index, header);
            self.plans[which as usize][index].nanoseconds += start.elapsed().as_nanos() as u64;
        }
    }

    fn run_step(&mut self, which: Which, index: usize, header: &Header) {
        let step = &self.plans[which as usize][index];
        // SAFETY: the plan gives each step its own outputs and scratch and orders every reader after its writer;
        // `&mut self` keeps the host away.
        unsafe { steps::run(&steps::Context { pool: &self.pool, header, step, products_only: false }) };
    }

    /// Runs only the matrix products of a plan (those inside attention too), without epilogues, and returns the
    /// seconds they take: the ceiling the whole plan is measured against. Results are garbage.
    pub fn run_products(&mut self, which: Which, header: &Header) -> f64 {
        let start = Instant::now();
        for step in &self.plans[which as usize] {
            let attention = matches!(step.op, Op::Attention { .. } | Op::AttentionGrad { .. });
            if step.op.is_product() || attention {
                let context = steps::Context { pool: &self.pool, header, step, products_only: true };
                // SAFETY: as in `run`.
                unsafe { steps::run(&context) };
            }
        }
        start.elapsed().as_secs_f64()
    }

    fn operand(&self, which: Which, name: &str) -> Option<&PlanValue> {
        let plan = self.plan(which);
        plan.find(name).map(|v| &plan.values[v])
    }

    fn plan(&self, which: Which) -> &Plan {
        self.program.plans()[which as usize]
    }

    /// An input of a plan, to be filled before it runs.
    pub fn input(&mut self, which: Which, name: &str) -> Option<&mut [T]> {
        self.output_view(which, name).map(|view| {
            // SAFETY: `&mut self` for as long as the slice lives.
            unsafe { view.write() }
        })
    }

    /// Images, labels and weights of a plan's batch, to be filled before it runs.
    pub fn batch(&mut self, which: Which) -> Option<Batch<'_, T>> {
        let (images, weights) = (self.output_view(which, "images")?, self.output_view(which, "weights")?);
        let labels = self.ints_view(which, "labels")?;
        let (partners, mix) = (self.ints_view(which, "partners"), self.output_view(which, "mix"));
        // SAFETY: the inputs of a plan don't overlap, and `&mut self` lives as long as the slices.
        Some(unsafe {
            Batch {
                images: images.write(),
                labels: labels.write(),
                weights: weights.write(),
                partners: partners.map(|view| view.write()),
                mix: mix.map(|view| view.write()),
            }
        })
    }

    /// The labels of a plan, to be filled before it runs.
    pub fn labels(&mut self, which: Which) -> Option<&mut [i32]> {
        self.ints(which, "labels")
    }

    /// An input of whole numbers, such as `labels`, to be filled before the plan runs.
    pub fn ints(&mut self, which: Which, name: &str) -> Option<&mut [i32]> {
        // SAFETY: `&mut self` for as long as the slice lives.
        self.ints_view(which, name).map(|view| unsafe { view.write() })
    }

    fn ints_view(&self, which: Which, name: &str) -> Option<View<i32>> {
        let value = self.operand(which, name).filter(|v| v.ty.dtype == DType::I32)?;
        let Place::Arena(offset) = value.place else { return None };
        Some(self.arena.view(offset, value.ty.shape.count()))
    }

    /// An output of the plan that ran last.
    pub fn output(&self, which: Which, name: &str) -> Option<&[T]> {
        self.output_view(which, name).map(|view| {
            // SAFETY: nothing runs while `&self` is held, since `run` takes `&mut self`.
            unsafe { view.read() }
        })
    }

    fn output_view(&self, which: Which, name: &str) -> Option<View<T>> {
        self.view_of(self.operand(which, name)?)
    }

    /// Where a value of floats lies.
    fn view_of(&self, value: &PlanValue) -> Option<View<T>> {
        match value.place {
            _ if !value.ty.dtype.is_float() => None,
            Place::Arena(offset) => Some(self.arena.view(offset, value.ty.shape.count())),
            Place::State(state) => Some(self.states[state.index()]),
        }
    }

    pub fn find_state(&self, name: &str) -> Option<StateId> {
        self.program.states.iter().position(|s| s.name == name).map(|i| StateId(i as u32))
    }

    pub fn state(&self, id: StateId) -> &[T] {
        // SAFETY: nothing runs while `&self` is held.
        unsafe { self.states[id.index()].read() }
    }

    pub fn state_mut(&mut self, id: StateId) -> &mut [T] {
        // SAFETY: `&mut self` for as long as the slice lives.
        unsafe { self.states[id.index()].write() }
    }

    fn initialise(&mut self, seed: u64) {
        for (i, state) in self.program.states.iter().enumerate() {
            if let Role::Parameter(init) = state.role {
                // SAFETY: `&mut self`, and states don't overlap.
                let values = unsafe { self.states[i].write() };
                fill(values, init, Sequence::new(seed, i as u32));
            }
        }
        self.reset_averages();
    }

    /// Makes every moving average equal to its parameter: for whoever sets parameters from outside.
    pub fn reset_averages(&mut self) {
        for (i, state) in self.program.states.iter().enumerate() {
            if let Some(parameter) = state.averages().and_then(|name| self.find_state(name)) {
                // SAFETY: `&mut self`, and states don't overlap.
                unsafe { self.states[i].write().copy_from_slice(self.states[parameter.index()].read()) };
            }
        }
    }

    /// Forgets the times measured so far.
    pub fn reset_times(&mut self) {
        self.runs = [0; 4];
        self.plans.iter_mut().flatten().for_each(|step| step.nanoseconds = 0);
    }

    /// Where the time of training (everything but `eval`) went since the last reset, by kind of step, longest first.
    pub fn training_times(&self) -> Vec<StepTime> {
        let mut times: Vec<StepTime> = Vec::new();
        for which in [Which::Micro, Which::Last, Which::Update] {
            let (plan, runs) = (self.plan(which), self.runs[which as usize]);
            for (step, bound) in plan.steps.iter().zip(&self.plans[which as usize]) {
                add_time(&mut times, plan, step, bound.nanoseconds as f64 / 1e9, runs as f64);
            }
        }
        times.retain(|t| t.seconds > 0.0);
        times.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
        times
    }
}

fn add_time(times: &mut Vec<StepTime>, plan: &Plan, step: &Step, seconds: f64, runs: f64) {
    let (op, phase, is_product) = (step.op.name(), step.phase, step.op.is_product());
    let index = times.iter().position(|t| t.op == op && t.phase == phase).unwrap_or_else(|| {
        times.push(StepTime { op, phase, is_product, seconds: 0.0, flops: 0.0, bytes: 0.0 });
        times.len() - 1
    });
    let cost = plan.cost_of(step);
    times[index].seconds += seconds;
    times[index].flops += cost.flops * runs;
    times[index].bytes += cost.bytes * runs;
}

fn check_dtype<T: Float>(name: &str, ty: &Type) -> Result<(), CpuError> {
    let computes = if size_of::<T>() == 8 { DType::F64 } else { DType::F32 };
    if ty.dtype == computes || ty.dtype == DType::I32 {
        return Ok(());
    }
    Err(CpuError::DType { name: name.to_string(), ty: ty.clone(), computes })
}

fn bind<T: Float>(plan: &Plan, arena: &Block, states: &[View<T>]) -> Result<Vec<Bound<T>>, CpuError> {
    let operand = |index: &usize| {
        let value = &plan.values[*index];
        check_dtype::<T>(&value.name, &value.ty)?;
        let (shape, count) = (value.ty.shape.clone(), value.ty.shape.count());
        let (data, ints) = match (value.place, value.ty.dtype) {
            (Place::Arena(offset), DType::I32) => (View::EMPTY, arena.view(offset, count)),
            (Place::Arena(offset), _) => (arena.view(offset, count), View::EMPTY),
            (Place::State(state), _) => (states[state.index()], View::EMPTY),
        };
        Ok(Operand { data, ints, shape })
    };
    let bound = plan.steps.iter().map(|step| {
        if !steps::supports(&step.op, step.inputs.len()) {
            return Err(CpuError::NoKernel { layer: step.layer.clone(), op: step.op.name() });
        }
        let mut outputs: Vec<Operand<T>> = step.outputs.iter().map(operand).collect::<Result<_, _>>()?;
        if let Op::Assign { state } = step.op {
            let shape = plan.states[state.index()].ty.shape.clone();
            outputs.push(Operand { data: states[state.index()], ints: View::EMPTY, shape });
        }
        let scratch = step.scratch.map_or(View::EMPTY, |s| arena.view(s.offset, s.bytes));
        let inputs = step.inputs.iter().map(operand).collect::<Result<_, _>>()?;
        Ok(Bound { op: step.op.clone(), inputs, outputs, scratch, nanoseconds: 0 })
    });
    bound.collect()
}

fn fill<T: Float>(values: &mut [T], init: Init, mut random: Sequence) {
    for value in values {
        *value = T::from_f64(match init {
            Init::Zeros => 0.0,
            Init::Ones => 1.0,
            Init::Normal { std } => std * random.normal(),
            Init::TruncatedNormal { std } => loop {
                let draw = std * random.normal();
                if draw.abs() <= 2.0 {
                    break draw;
                }
            },
            Init::Uniform { bound } => bound * (2.0 * random.uniform() - 1.0),
        });
    }
}
