//! Binds a program to memory and runs its plans.

mod bind;
mod checked;
mod flow;
mod times;
mod walk;

pub(crate) use bind::{Bound, Operand};
pub use flow::LINGER;
pub use graph::bad::{BadValue, Origin};
pub use times::StepTime;

use crate::account::Clock;
use crate::error::CpuError;
use crate::kernels::Float;
use crate::memory::{Block, View};
use crate::pool::Pool;
use crate::slow::Slowdown;
use bind::{BoundPlan, Memory, check_dtype};
use comm::Communicator;
use graph::plan::{Home, Place, Plan, PlanValue, homes};
use graph::random::{Sequence, initial};
use graph::{DType, Header, Init, Program, Role, State, StateId};

/// One of a program's plans.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    Micro,
    Last,
    Update,
    Eval,
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

/// What an executor works with.
#[derive(Clone)]
pub struct Options {
    pub threads: usize,
    /// For the parameters' first values.
    pub seed: u64,
    /// The other ranks, for plans with collectives.
    pub comm: Option<Communicator>,
}

impl Options {
    /// Without other ranks.
    pub fn alone(threads: usize, seed: u64) -> Self {
        Options { threads, seed, comm: None }
    }
}

pub struct Executor<T: Float> {
    program: Program,
    plans: [BoundPlan<T>; 4],
    states: Vec<View<T>>,
    arena: Block,
    state_block: Block,
    pool: Pool,
    comm: Option<Communicator>,
    clock: Clock,
    /// Where the time went in plans that others took the place of.
    past: Vec<StepTime>,
    slowdown: Option<Slowdown>,
}

impl<T: Float> Executor<T> {
    /// Allocates the arena and the states, all zero but the parameters, which start as their model says, the running
    /// variances, which start at one, and their averages, which start equal to them.
    pub fn new(program: Program, options: Options) -> Result<Self, CpuError> {
        let Options { threads, seed, comm } = options;
        let pool = Pool::new(threads).map_err(|source| CpuError::Threads { threads, source })?;
        let arena = arena_of(&program)?;
        let state_block = allocate_states::<T>(&program.states)?;
        let states = state_views(&program.states, &state_block, &arena);
        let plans = Memory { arena: &arena, states: &states, comm: comm.as_ref(), threads: pool.threads() }
            .bind_all(&program)?;
        let clock = Clock::new();
        let mut executor = Executor {
            program,
            plans,
            states,
            arena,
            state_block,
            pool,
            comm,
            clock,
            past: vec![],
            slowdown: None,
        };
        executor.initialise(seed);
        Ok(executor)
    }

    /// Goes on with other plans over the same states, such as those of another batch size. If they can't be bound,
    /// everything stays as it is.
    pub fn rebind(&mut self, program: Program) -> Result<(), CpuError> {
        let (ours, theirs) = (&self.program.states, &program.states);
        if let Some(other) = (0..ours.len().max(theirs.len())).find(|i| ours.get(*i) != theirs.get(*i)) {
            let state = theirs.get(other).or(ours.get(other));
            return Err(CpuError::OtherStates(state.map_or_else(String::new, |s| s.name.clone())));
        }
        let arena = arena_of(&program)?;
        let states = state_views(&program.states, &self.state_block, &arena);
        let (comm, threads) = (self.comm.as_ref(), self.pool.threads());
        let memory = Memory { arena: &arena, states: &states, comm, threads };
        let plans = memory.bind_all(&program)?;
        self.past = self.training_times();
        (self.plans, self.states) = (plans, states);
        (self.program, self.arena) = (program, arena);
        Ok(())
    }

    /// Takes `factor` times as long to compute from now on, for tests of unequal ranks.
    pub fn set_slowdown(&mut self, factor: f64) {
        self.slowdown = Slowdown::by(factor);
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

    /// Refuses to add to gradients that were not kept.
    fn check_sums(&self, header: &Header) -> Result<(), CpuError> {
        if header.accumulate && !self.program.accumulates() { Err(CpuError::OneMicroStep) } else { Ok(()) }
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
            _ if !value.ty.dtype.is_float() || value.ty.dtype.is_half() => None,
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
        for (i, state) in self.program.states.iter().enumerate().filter(|(_, s)| s.role == Role::Running) {
            let channels = state.ty.shape.last();
            // SAFETY: `&mut self`, and states don't overlap.
            unsafe { self.states[i].part(channels..2 * channels).write() }.fill(T::ONE);
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
}

fn arena_of(program: &Program) -> Result<Block, CpuError> {
    let bytes = program.arena();
    Block::new(bytes).ok_or(CpuError::Memory { what: "activations", bytes })
}

fn allocate_states<T: Float>(states: &[State]) -> Result<Block, CpuError> {
    states.iter().try_for_each(|state| check_dtype::<T>(&state.name, &state.ty))?;
    let (what, bytes) = ("parameters, gradients and optimizer states", homes(states).1);
    Block::new(bytes).ok_or(CpuError::Memory { what, bytes })
}

fn state_views<T: Float>(states: &[State], own: &Block, arena: &Block) -> Vec<View<T>> {
    let view = |(state, home): (&State, Home)| match home {
        Home::Own(offset) => own.view(offset, state.ty.shape.count()),
        Home::Arena(offset) => arena.view(offset, state.ty.shape.count()),
    };
    states.iter().zip(homes(states).0).map(view).collect()
}

fn fill<T: Float>(values: &mut [T], init: Init, mut random: Sequence) {
    for value in values {
        *value = T::from_f64(initial(init, &mut random));
    }
}
