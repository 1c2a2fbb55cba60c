//! Plans of a program bound to memory on the GPU, and what is replaced with them.

use super::behind::Behind;
use super::list::{List, Streams, collectives};
use super::readback::RING;
use super::staging::Staging;
use super::times::{NotesOfLists, Times};
use super::{Options, Which};
use crate::action::{Action, Address, Constants, Facts, Kernel, Matmul};
use crate::attention;
use crate::bind::{Addresses, Binder, Bound, Placed, Steps, state_addresses};
use crate::collectives::{all_done_at_the_end, check_ranks, host_places, timed};
use crate::convolution;
use crate::driver::{Block, Context, Pinned, prepare_lock};
use crate::error::CudaError;
use crate::matmul::{MathLibraries, WORKSPACE};
use crate::modules::Modules;
use crate::moves;
use crate::steps::{self, hopper};
use crate::tuner::{KnownAlgorithms, Tuner};
use graph::Home;
use graph::memory::Memory;
use graph::plan::Place;
use graph::run::CollectiveTime;
use graph::{DType, Lane, Plan, Program};
use std::collections::BTreeSet;
use std::sync::Arc;

/// Index of the list that refreshes copies in half precision, after those of plans.
pub(super) const REFRESH: usize = Which::ALL.len();

/// Number of lists: all plans, and [`REFRESH`].
const LISTS: usize = REFRESH + 1;

/// Bound plans. Fields are dropped in this order: graphs before what they use.
pub(super) struct Plans {
    /// Prepared lists of plans, and [`REFRESH`].
    pub lists: [Option<List>; LISTS],
    /// Lists that are not prepared yet.
    pub waiting: [Option<Bound>; LISTS],
    pub modules: Modules,
    pub staging: Staging,
    /// Host memory of collectives that run on the host.
    pub host: Option<Pinned>,
    pub times: Option<Times>,
    /// Collectives that lists leave under way.
    pub behind: Behind,
    /// The collectives that have times, in the order of those.
    pub collectives: Vec<CollectiveTime>,
    /// Addresses of each plan's inputs.
    pub inputs: [Vec<Address>; REFRESH],
    /// Address of each state.
    pub states: Vec<Address>,
    pub arena: Arc<Block>,
    pub constants: Block,
}

/// Parts of the executor that stay when plans change.
pub(super) struct Base<'a> {
    pub context: &'a Arc<Context>,
    pub facts: &'a Facts,
    pub options: &'a Options,
    pub streams: &'a Streams,
    pub libraries: &'a mut MathLibraries,
    pub tuner: &'a mut Tuner,
    /// Memory of the states.
    pub states: Address,
    pub header: Address,
}

impl Plans {
    /// List of a run, which must have been prepared.
    pub fn list(&mut self, which: Which) -> Result<&mut List, CudaError> {
        self.numbered(which as usize)
    }

    pub fn numbered(&mut self, number: usize) -> Result<&mut List, CudaError> {
        let missing = || CudaError::Misuse(format!("list {number} was not prepared"));
        self.lists[number].as_mut().ok_or_else(missing)
    }

    /// Prepared lists.
    pub fn prepared(&self) -> Vec<usize> {
        (0..self.lists.len()).filter(|number| self.lists[*number].is_some()).collect()
    }
}

/// Lists that a run needs first: evaluation comes later, and lists for several micro-steps only where there are some.
pub(super) fn first_lists(program: &Program) -> Vec<usize> {
    let training: &[Which] = match (program.last.steps.is_empty(), program.micro.steps.is_empty()) {
        (true, _) => &[Which::Eval],
        (false, true) => &[Which::Last, Which::Update],
        (false, false) => &Which::TRAINING,
    };
    [REFRESH].into_iter().chain(training.iter().map(|which| *which as usize)).collect()
}

/// All lists of a program, without a GPU.
pub(super) struct Lists {
    /// Lists of plans; the last is [`REFRESH`].
    pub bound: Vec<Bound>,
    notes: NotesOfLists,
    constants: Vec<u8>,
}

impl Lists {
    /// Bytes of workspace that the libraries may use, in the compute lane and in others.
    fn workspaces(&self) -> [usize; 2] {
        let mut most = [WORKSPACE; 2];
        for placed in self.bound.iter().flat_map(|bound| &bound.actions) {
            let bytes = match &placed.action {
                Action::Convolution(_) => convolution::WORKSPACE,
                Action::Attention(attention) => attention::workspace(&attention.attended),
                _ => 0,
            };
            let lane = &mut most[usize::from(placed.lane != Lane::Compute)];
            *lane = bytes.max(*lane);
        }
        most
    }

    /// Bytes that collectives need on the host.
    fn host(&self) -> usize {
        self.bound.iter().map(|bound| host_places(collectives(bound)).1).max().unwrap_or(0)
    }
}

/// All kernels of lists, those that `ours` names for matmuls, and those that every run begins with.
pub(super) fn kernels<'a>(
    lists: impl Iterator<Item = &'a Bound>,
    ours: impl Fn(&Matmul) -> Vec<Kernel>,
) -> BTreeSet<Kernel> {
    let used = lists.flat_map(|bound| bound.actions.iter()).flat_map(|placed| match &placed.action {
        Action::Launch(launch) => vec![launch.kernel.clone()],
        Action::Matmul(matmul) => ours(matmul),
        Action::Attention(attention) => {
            attention.own.iter().chain(&attention.after).map(|launch| launch.kernel.clone()).collect()
        }
        // Their times are noted down.
        Action::Collective(_) => vec![crate::collectives::clock()],
        Action::Convolution(_) | Action::Copy { .. } | Action::Zero { .. } | Action::Sum(_) => vec![],
    });
    used.chain([moves::kernel()]).collect()
}

/// GPU and rank that plans are bound for.
#[derive(Clone, Copy)]
pub(super) struct BindTarget<'a> {
    pub facts: &'a Facts,
    pub tf32: bool,
    /// This rank among the plans' ranks.
    pub rank: usize,
    /// True if collectives go into streams, where they may run on when a list has ended.
    pub enqueues: bool,
}

impl BindTarget<'_> {
    /// Addresses of what the rank holds of each state.
    fn states(&self, program: &Program, own: Address, arena: Address) -> Vec<Address> {
        state_addresses(&program.states, (program.last.mesh, self.rank), own, arena)
    }
}

fn bind_all(
    program: &Program,
    memory: Addresses<'_>,
    constants: Address,
    times: Address,
    to: BindTarget<'_>,
) -> Result<Lists, CudaError> {
    let BindTarget { facts, tf32, rank, enqueues } = to;
    let mut constants = Constants::at(constants);
    let (mut lists, mut notes) = (vec![], NotesOfLists::default());
    for which in Which::ALL {
        let plan = program.plan(which);
        let mut bound = Binder { memory, tf32, facts, maker: &Steps, rank }.bind(plan, &mut constants)?;
        if !enqueues {
            all_done_at_the_end(&mut bound);
        }
        // Evaluation is no part of a step's account.
        if which != Which::Eval {
            let (with_times, marks) = timed(bound, times + notes.bytes() as Address);
            bound = with_times;
            notes.push(which, marks);
        }
        lists.push(bound);
    }
    let placed = |action| Placed::new(action, Lane::Compute, (0, 0));
    let refresh = refresh(program, rank, memory.states, &mut constants)?.into_iter().map(placed).collect();
    lists.push(Bound { actions: refresh, ..Bound::default() });
    Ok(Lists { bound: lists, notes, constants: constants.bytes().to_vec() })
}

/// The collectives of a list whose times are recorded.
fn with_times<'a>(plan: &'a Plan, bound: &'a Bound) -> impl Iterator<Item = CollectiveTime> + 'a {
    bound.actions.iter().filter_map(|placed| match &placed.action {
        Action::Collective(call) if call.times.is_some() => {
            let kind = plan.steps[placed.step].op.name();
            Some(CollectiveTime::new(&call.layer, &kind, call.bytes(), call.group.ranks()))
        }
        _ => None,
    })
}

/// Actions that refresh every copy in half precision, of which this rank has what is copied: of others the host writes all.
fn refresh(
    program: &Program,
    rank: usize,
    addresses: &[Address],
    constants: &mut Constants,
) -> Result<Vec<Action>, CudaError> {
    let mut actions = Vec::new();
    for dtype in [DType::Bf16, DType::F16] {
        let mut pairs = Vec::new();
        for (index, state) in program.states.iter().enumerate().filter(|(_, s)| s.ty.dtype == dtype) {
            let Some(name) = state.copies() else { continue };
            let of = program.states.iter().position(|s| s.name == name && s.ty.dtype == DType::F32);
            let Some(of) = of else {
                let (layer, op) = (state.name.clone(), "a copy of what is not f32".to_string());
                return Err(CudaError::NoKernel { layer, op, types: String::new() });
            };
            let ([here, wanted], mesh) = ([of, index], program.last.mesh);
            let [here, wanted] =
                [here, wanted].map(|index| program.states[index].elements_of(&program.states, mesh, rank).0);
            if wanted.is_empty() || wanted.start < here.start || wanted.end > here.end {
                continue;
            }
            let first = ((wanted.start - here.start) * DType::F32.bytes()) as Address;
            pairs.push((addresses[of] + first, addresses[index], wanted.len()));
        }
        if !pairs.is_empty() {
            actions.extend(steps::update::refresh_copies(&pairs, dtype, constants));
        }
    }
    Ok(actions)
}

/// Kernels that a program needs on a GPU, to compile them without one.
pub fn kernels_of(program: &Program, facts: &Facts, tf32: bool) -> Result<BTreeSet<Kernel>, CudaError> {
    let ours = |matmul: &Matmul| {
        let launches = hopper::candidates(matmul, facts).into_iter();
        launches.filter_map(|cut| Some(hopper::plain(matmul, cut, facts)?.kernel)).collect()
    };
    Ok(kernels(dry(program, BindTarget { facts, tf32, rank: 0, enqueues: true })?.bound.iter(), ours))
}

/// Binds to fake addresses, to learn what is needed.
fn dry(program: &Program, to: BindTarget<'_>) -> Result<Lists, CudaError> {
    let base = |bit: u32| (1 as Address) << bit;
    let states = to.states(program, base(45), base(44));
    let memory = Addresses { arena: base(44), states: &states, header: base(46) };
    bind_all(program, memory, base(47), base(43), to)
}

/// Bytes of GPU memory that a program needs, known without a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryNeeds {
    pub arena: usize,
    /// Bytes of parameters, gradients and optimizer state.
    pub states: usize,
    /// Bytes of batch buffers.
    pub staging: usize,
    /// Bytes of the kernels' tables and of recorded times.
    pub tables: usize,
    /// Most bytes of workspace of matmuls and convolutions.
    pub workspace: usize,
    /// What arena and states are for.
    pub uses: Memory,
}

impl MemoryNeeds {
    pub fn of(program: &Program, facts: &Facts, tf32: bool) -> Result<Self, CudaError> {
        Ok(DryBinding::of(program, BindTarget { facts, tf32, rank: 0, enqueues: true })?.needs)
    }

    pub fn total(&self) -> usize {
        let MemoryNeeds { arena, states, staging, tables, workspace, .. } = *self;
        arena + states + staging + tables + workspace
    }

    /// Refuses a program that doesn't fit into the free bytes.
    pub fn check(&self, facts: &Facts, (free, total): (usize, usize)) -> Result<(), CudaError> {
        if self.total() <= free {
            return Ok(());
        }
        Err(CudaError::Memory { gpu: Box::new(facts.clone()), needs: Box::new(*self), free, total })
    }
}

/// A program bound to fake addresses, to learn what it needs.
pub(super) struct DryBinding {
    lists: Lists,
    pub needs: MemoryNeeds,
}

impl DryBinding {
    pub fn of(program: &Program, to: BindTarget<'_>) -> Result<Self, CudaError> {
        if let Some(state) = program.states.iter().find(|s| matches!(s.home, Home::Host(_) | Home::Nowhere)) {
            return Err(CudaError::Misuse(format!("state {} does not lie on the GPU", state.name)));
        }
        let lists = dry(program, to)?;
        let needs = MemoryNeeds {
            arena: program.arena(),
            states: program.state_bytes(),
            staging: Staging::bytes_for(program),
            tables: lists.constants.len() + lists.notes.bytes(),
            workspace: lists.workspaces().iter().sum::<usize>() + super::HEADER_BYTES,
            uses: program.memory(),
        };
        Ok(DryBinding { lists, needs })
    }

    /// Tells whether there is a convolution by cuDNN.
    pub fn convolves(&self) -> bool {
        let mut actions = self.lists.bound.iter().flat_map(|bound| &bound.actions);
        actions.any(|placed| matches!(placed.action, Action::Convolution(_)))
    }

    /// The kernels of some lists.
    pub fn kernels(&self, numbers: &[usize], known: &KnownAlgorithms) -> BTreeSet<Kernel> {
        kernels(numbers.iter().map(|number| &self.lists.bound[*number]), |matmul| known.kernels(matmul))
    }
}

/// Makes the groups that a program names, or refuses it if its collectives are for another number of ranks.
pub(super) fn check_collectives(program: &Program, streams: &Streams) -> Result<(), CudaError> {
    let are = streams.communicator.as_ref().map(|communicator| communicator.comm().size());
    program.plans().into_iter().try_for_each(|plan| check_ranks(plan, are))?;
    match &streams.communicator {
        Some(communicator) => communicator.prepare(program, streams.comm()),
        None => Ok(()),
    }
}

impl Base<'_> {
    /// Allocates, and binds to what was allocated. An arena that is large enough is used again. No list is prepared yet.
    pub fn plans(
        &mut self,
        program: &Program,
        dry: &DryBinding,
        arena: Option<Arc<Block>>,
    ) -> Result<Plans, CudaError> {
        let context = self.context;
        if dry.convolves() {
            let _alone = prepare_lock();
            self.libraries.cudnn()?;
        }
        let fits = arena.filter(|block| block.bytes >= dry.needs.arena);
        let arena = match fits {
            Some(block) => block,
            None => Arc::new(Block::new(context, dry.needs.arena, "activations")?),
        };
        let constants = Block::new(context, dry.lists.constants.len(), "tables")?;
        let staging = Staging::new(context, program)?;
        let target = self.options.target(self.facts);
        let states = target.states(program, self.states, arena.address);
        let memory = Addresses { arena: arena.address, states: &states, header: self.header };
        let times = Times::new(context, &dry.lists.notes, RING)?;
        let noted = times.as_ref().map_or(0, |times| times.block.address);
        let lists = bind_all(program, memory, constants.address, noted, target)?;
        if lists.constants.len() > constants.bytes {
            return Err(CudaError::Misuse("the kernels' tables depend on addresses".into()));
        }
        self.streams.compute().send_now(&lists.constants, constants.address)?;
        let through_host = self.streams.communicator.as_ref().is_some_and(|e| !e.is_on_device());
        let host = match lists.host() {
            bytes if bytes > 0 && through_host => Some(Pinned::new(context, bytes)?),
            _ => None,
        };
        let training = Which::TRAINING.map(|which| (program.plan(which), &lists.bound[which as usize]));
        let collectives = training.into_iter().flat_map(|(plan, bound)| with_times(plan, bound)).collect();
        // Inputs are made by nobody, so that binding has moved none of them.
        let address = |plan: &Plan, value: &usize| match plan.values[*value].place {
            Place::Arena(offset) => memory.arena + offset as Address,
            Place::State(state) => memory.states[state.index()],
        };
        let inputs = program.plans().map(|plan| plan.inputs.iter().map(|v| address(plan, v)).collect());
        let behind = Behind::new(context, &lists)?;
        let mut bound = lists.bound.into_iter();
        Ok(Plans {
            lists: [const { None }; LISTS],
            waiting: std::array::from_fn(|_| bound.next()),
            modules: Modules::new(context),
            staging,
            host,
            times,
            behind,
            collectives,
            inputs,
            states,
            arena,
            constants,
        })
    }
}
