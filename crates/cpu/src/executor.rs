//! Binds a program to memory and runs its plans.

mod bind;
mod checked;
mod flow;
mod made;
mod operand;
mod states;
mod times;
mod unfinished;
mod walk;

pub(crate) use bind::Bound;
pub use flow::LINGER;
pub use graph::bad::{BadValue, Origin};
pub use graph::run::{StepTime, Which};
pub(crate) use operand::Operand;

use crate::account::Clock;
use crate::error::CpuError;
use crate::kernels::{self, Float};
use crate::memory::{Block, View};
use crate::pool::Pool;
use crate::slow::Slowdown;
use bind::{BoundPlan, PlanMemory};
use calls::PlanCommunicators;
use comm::Communicator;
use graph::graph::own_bytes;
use graph::plan::{Plan, PlanValue};
use graph::{DType, Held, Home, Program, State};
use made::Made;
use operand::check_dtype;
use unfinished::Unfinished;

/// Inputs that the host fills before a plan runs.
pub struct Batch<'a, T> {
    pub images: &'a mut [T],
    pub labels: &'a mut [i32],
    pub weights: &'a mut [T],
    /// The second labels, in plans of mixed samples.
    pub partners: Option<&'a mut [i32]>,
    /// The first label's share, in plans of mixed samples.
    pub mix: Option<&'a mut [T]>,
}

/// Resources of an executor.
#[derive(Clone)]
pub struct Options {
    pub threads: usize,
    /// Seed of the parameters' initial values.
    pub seed: u64,
    /// The other ranks, for plans with collectives.
    pub comm: Option<Communicator>,
}

impl Options {
    /// Options of a single rank.
    pub fn alone(threads: usize, seed: u64) -> Self {
        Options { threads, seed, comm: None }
    }
}

pub struct Executor<T: Float> {
    program: Program,
    plans: [BoundPlan<T>; 5],
    /// Before the memory that it works in, which is given back after it.
    unfinished: Unfinished,
    states: Vec<View<u8>>,
    arena: Block,
    state_block: Block,
    /// Memory that steps borrow, one at a time.
    borrowed: Option<Block>,
    /// States were written: copies of them are made anew before the next run.
    stale: bool,
    pool: Pool,
    groups: Option<PlanCommunicators>,
    /// Collectives of the step under way.
    made: Made,
    clock: Clock,
    /// Times of plans that were replaced.
    past: Vec<StepTime>,
    slowdown: Option<Slowdown>,
}

impl<T: Float> Executor<T> {
    /// Allocates the arena and the states, all zero but the parameters, which start as their model says, the running
    /// variances, which start at one, and their averages, which start equal to them.
    pub fn new(program: Program, options: Options) -> Result<Self, CpuError> {
        let Options { threads, seed, comm } = options;
        kernels::check_level()?;
        let pool = Pool::new(threads).map_err(|source| CpuError::Threads { threads, source })?;
        let arena = arena_of(&program)?;
        let state_block = allocate_states::<T>(&program.states)?;
        let groups = comm.map(|world| groups(PlanCommunicators::new(world), &program)).transpose()?;
        let rank = groups.as_ref().map_or(0, |groups| groups.world().rank());
        let states = state_views(&program, rank, &state_block, &arena);
        let memory =
            PlanMemory { arena: &arena, states: &states, groups: groups.as_ref(), threads: pool.threads() };
        let (mut plans, borrowed) = memory.bind_all(&program)?;
        let world = groups.as_ref().map(|groups| groups.world().clone());
        let (clock, unfinished) = (Clock::new(), Unfinished::of(world, &mut plans, &states));
        let made = Made::of(&plans);
        let mut executor = Executor {
            program,
            plans,
            unfinished,
            states,
            arena,
            state_block,
            borrowed,
            stale: true,
            pool,
            groups,
            made,
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
        self.unfinished.finish();
        let arena = arena_of(&program)?;
        let states = state_views(&program, self.rank(), &self.state_block, &arena);
        self.groups = self.groups.take().map(|known| groups(known, &program)).transpose()?;
        let (groups, threads) = (self.groups.as_ref(), self.pool.threads());
        let memory = PlanMemory { arena: &arena, states: &states, groups, threads };
        let (mut plans, borrowed) = memory.bind_all(&program)?;
        let world = groups.map(|groups| groups.world().clone());
        (self.unfinished, self.made) = (Unfinished::of(world, &mut plans, &states), Made::of(&plans));
        self.past = self.training_times();
        (self.plans, self.states, self.borrowed) = (plans, states, borrowed);
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

    /// Number of this rank.
    pub fn rank(&self) -> usize {
        self.groups.as_ref().map_or(0, |groups| groups.world().rank())
    }

    pub fn threads(&self) -> usize {
        self.pool.threads()
    }

    /// Bytes allocated for the arena and for the states.
    pub fn allocated(&self) -> (usize, usize) {
        (self.arena.bytes(), self.state_block.bytes())
    }

    /// Bytes allocated beside those: for numbers that are stored in another precision than is computed in, and for working
    /// memory that a plan made by hand or for another device doesn't have. 0 for plans in the executor's own type.
    pub fn borrowed(&self) -> usize {
        self.borrowed.as_ref().map_or(0, Block::bytes)
    }

    /// Prepares a run of a plan; refuses one that adds to gradients that are not kept.
    pub(crate) fn begin(&mut self, which: Which) -> Result<(), CpuError> {
        if which == Which::Micro && self.program.micro.steps.is_empty() {
            return Err(CpuError::OneMicroStep);
        }
        self.refresh();
        Ok(())
    }

    fn operand(&self, which: Which, name: &str) -> Option<&PlanValue> {
        let plan = self.plan(which);
        plan.find(name).map(|v| &plan.values[v])
    }

    pub(crate) fn plan(&self, which: Which) -> &Plan {
        self.program.plan(which)
    }

    /// Images, labels and weights of a plan's batch, to be filled before it runs.
    pub fn batch(&mut self, which: Which) -> Option<Batch<'_, T>> {
        let (images, weights) = (self.own_view(which, "images")?, self.own_view(which, "weights")?);
        let labels = self.ints_view(which, "labels")?;
        let (partners, mix) = (self.ints_view(which, "partners"), self.own_view(which, "mix"));
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

    /// An input in double precision, to be filled before the plan runs.
    pub fn doubles(&mut self, which: Which, name: &str) -> Option<&mut [f64]> {
        let value = self.operand(which, name).filter(|value| value.ty.dtype == DType::F64)?;
        // SAFETY: `&mut self` for as long as the slice lives.
        Some(unsafe { self.stored(value).cast(value.ty.shape.count()).write() })
    }

    /// An input of bytes, such as `pixels`, to be filled before the plan runs.
    pub fn bytes(&mut self, which: Which, name: &str) -> Option<&mut [u8]> {
        let value = self.operand(which, name).filter(|value| value.ty.dtype == DType::U8)?;
        // SAFETY: `&mut self` for as long as the slice lives.
        Some(unsafe { self.stored(value).write() })
    }

    fn ints_view(&self, which: Which, name: &str) -> Option<View<i32>> {
        let value = self.operand(which, name).filter(|v| v.ty.dtype == DType::I32)?;
        Some(self.stored(value).cast(value.ty.shape.count()))
    }
}

fn arena_of(program: &Program) -> Result<Block, CpuError> {
    let bytes = program.arena();
    Block::new(bytes).ok_or(CpuError::Memory { what: "activations", bytes })
}

fn allocate_states<T: Float>(states: &[State]) -> Result<Block, CpuError> {
    states.iter().try_for_each(|state| check_dtype::<T>(&state.name, &state.ty))?;
    // The host's memory is this executor's own: a plan that tells them apart is for a device.
    if let Some(state) = states.iter().find(|state| matches!(state.home, Home::Host(_) | Home::Nowhere)) {
        return Err(CpuError::Home(state.name.clone()));
    }
    let (what, bytes) = ("parameters, gradients and optimizer states", own_bytes(states));
    Block::new(bytes).ok_or(CpuError::Memory { what, bytes })
}

/// The bytes of every state that a rank holds.
fn state_views(program: &Program, rank: usize, own: &Block, arena: &Block) -> Vec<View<u8>> {
    let (states, mesh) = (&program.states, program.last.mesh);
    let view = |state: &State| {
        let (elements, from) = state.elements_of(states, mesh, rank);
        let size = state.ty.dtype.bytes();
        let ahead = match state.held {
            Held::Whole | Held::Shard(_) => 0,
            Held::Within(group) => mesh.place(rank, group).1 * state.ty.bytes(),
            Held::Of { .. } => from * size,
        };
        match state.home {
            Home::Own(offset) => own.view(offset + ahead, elements.len() * size),
            Home::Arena(offset) => arena.view(offset + ahead, elements.len() * size),
            Home::Host(_) | Home::Nowhere => View::EMPTY,
        }
    };
    states.iter().map(view).collect()
}

/// Communicators of all groups that the plans name.
fn groups(mut groups: PlanCommunicators, program: &Program) -> Result<PlanCommunicators, CpuError> {
    groups.prepare(program.plans())?;
    Ok(groups)
}
