//! The plans of a program, bound to memory on the GPU, and all that goes when other plans take their place.

use super::list::{List, Preparer, Streams, collectives};
use super::readback::RING;
use super::staging::Staging;
use super::times::Times;
use super::{Options, Which};
use crate::action::{Action, Address, Constants, Facts, Kernel, Product};
use crate::bind::{Binder, Bound, Memory, Placed, Steps};
use crate::compile::{Arch, compile_all};
use crate::driver::{Block, Context, Pinned};
use crate::error::CudaError;
use crate::exchange::{Marks, check_ranks, host_places, timed};
use crate::modules::Modules;
use crate::product::{Products, WORKSPACE};
use crate::steps::{self, hopper};
use crate::tuner::Tuner;
use graph::plan::Place;
use graph::{DType, Lane, Op, Plan, Program};
use std::collections::BTreeSet;
use std::sync::Arc;

/// The parts are dropped in this order: what is launched before what it uses.
pub(super) struct Plans {
    /// Of (plan, accumulate).
    lists: [List; 6],
    /// Brings copies in half precision up to date.
    pub refresh: List,
    _modules: Modules,
    pub staging: Staging,
    /// Where collectives do their part that the host does.
    _host: Option<Pinned>,
    pub times: Option<Times>,
    /// What is noted down of each list.
    marks: Vec<Marks>,
    /// Layer and bytes of the collectives of `last`.
    pub exchanges: Vec<(String, usize)>,
    /// Where the inputs of each plan lie.
    pub inputs: [Vec<Address>; 4],
    pub arena: Arc<Block>,
    pub constants: Block,
    pub parts: Block,
}

/// What of the executor stays when plans change.
pub(super) struct Base<'a> {
    pub context: &'a Arc<Context>,
    pub facts: &'a Facts,
    pub options: &'a Options,
    pub streams: &'a Streams,
    pub products: &'a Products,
    pub tuner: &'a mut Tuner,
    pub states: &'a [Address],
    pub header: Address,
}

impl Plans {
    /// The list for a run; evaluation and update have nothing to accumulate.
    pub fn list(&mut self, which: Which, accumulate: bool) -> &mut List {
        &mut self.lists[number(which, accumulate)]
    }

    pub fn marks(&self, which: Which, accumulate: bool) -> Marks {
        self.marks[number(which, accumulate)]
    }
}

fn number(which: Which, accumulate: bool) -> usize {
    match which {
        Which::Micro => usize::from(accumulate),
        Which::Last => 2 + usize::from(accumulate),
        Which::Update => 4,
        Which::Eval => 5,
    }
}

/// In the order of [`number`].
fn plans(program: &Program) -> [(&Plan, bool); 6] {
    let Program { micro, last, update, eval, .. } = program;
    [(micro, false), (micro, true), (last, false), (last, true), (update, false), (eval, false)]
}

/// All lists of a program, without a GPU.
struct Lists {
    bound: Vec<Bound>,
    marks: Vec<Marks>,
    refresh: Vec<Action>,
    constants: Vec<u8>,
}

impl Lists {
    /// Bytes that times are noted down in.
    fn times(&self) -> usize {
        self.marks.iter().map(|marks| marks.bytes()).max().unwrap_or(0)
    }

    /// Bytes of partial sums.
    fn parts(&self) -> usize {
        self.bound.iter().map(|bound| bound.parts).max().unwrap_or(0)
    }

    /// Bytes that collectives need on the host.
    fn host(&self) -> usize {
        self.bound.iter().map(|bound| host_places(collectives(bound)).1).max().unwrap_or(0)
    }

    /// All that are launched, and those that `ours` says may make a product.
    fn kernels(&self, ours: impl Fn(&Product) -> Vec<Kernel>) -> BTreeSet<Kernel> {
        let placed = self.bound.iter().flat_map(|bound| bound.actions.iter().map(|p| &p.action));
        let used = placed.chain(&self.refresh).flat_map(|action| match action {
            Action::Launch(launch) => vec![launch.kernel.clone()],
            Action::Product(product) => ours(product),
            Action::Copy { .. } | Action::Zero { .. } | Action::Exchange(_) | Action::Sum(_) => vec![],
        });
        used.collect()
    }
}

fn bind_all(
    program: &Program,
    memory: Memory<'_>,
    constants: Address,
    times: Address,
    facts: &Facts,
    tf32: bool,
) -> Result<Lists, CudaError> {
    let mut constants = Constants::at(constants);
    let mut bind = |(plan, accumulate): (&Plan, bool)| {
        let bound = Binder { memory, accumulate, tf32, overlap: true, facts, maker: &Steps }
            .bind(plan, &mut constants)?;
        Ok::<_, CudaError>(timed(bound, times))
    };
    let (bound, marks) =
        plans(program).into_iter().map(&mut bind).collect::<Result<Vec<_>, _>>()?.into_iter().unzip();
    let refresh = refresh(program, memory.states, &mut constants)?;
    Ok(Lists { bound, marks, refresh, constants: constants.bytes().to_vec() })
}

/// The actions that make every copy in half precision equal to what it is a copy of.
fn refresh(
    program: &Program,
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
            pairs.push((addresses[of], addresses[index], state.ty.shape.count()));
        }
        if !pairs.is_empty() {
            actions.extend(steps::update::refresh_copies(&pairs, dtype, constants));
        }
    }
    Ok(actions)
}

/// The kernels that a program needs on a GPU, for whoever wants to compile them without one.
pub fn kernels_of(program: &Program, facts: &Facts, tf32: bool) -> Result<BTreeSet<Kernel>, CudaError> {
    let ours = |product: &Product| {
        let launches = hopper::candidates(product, facts).into_iter();
        launches.filter_map(|cut| Some(hopper::plain(product, cut, facts)?.kernel)).collect()
    };
    Ok(dry(program, facts, tf32)?.kernels(ours))
}

/// Binds to addresses that nothing has, to learn what is needed.
fn dry(program: &Program, facts: &Facts, tf32: bool) -> Result<Lists, CudaError> {
    let base = |bit: u32| (1 as Address) << bit;
    let (offsets, _) = crate::bind::state_offsets(&program.states);
    let states: Vec<Address> = offsets.iter().map(|offset| base(45) + *offset as Address).collect();
    let memory = Memory { arena: base(44), states: &states, header: base(46), parts: base(42) };
    bind_all(program, memory, base(47), base(43), facts, tf32)
}

/// Bytes on the GPU that plans need beside the states.
pub(super) struct Needs {
    pub arena: usize,
    pub constants: usize,
    pub parts: usize,
    pub staging: usize,
    pub times: usize,
}

impl Needs {
    pub fn of(program: &Program, facts: &Facts, tf32: bool) -> Result<Self, CudaError> {
        let lists = dry(program, facts, tf32)?;
        let (constants, parts, times) = (lists.constants.len(), lists.parts(), lists.times());
        Ok(Needs { arena: program.arena(), constants, parts, staging: Staging::bytes_for(program), times })
    }

    /// Refuses what doesn't fit, before anything is allocated. `states` and `workspace` are 0 if they are there already.
    pub fn check(
        &self,
        context: &Context,
        facts: &Facts,
        states: usize,
        workspace: usize,
    ) -> Result<(), CudaError> {
        let (free, total) = context.memory()?;
        let Needs { arena, constants, parts, staging, times } = *self;
        let other = constants + parts + times + workspace;
        let needed = arena + states + staging + other;
        if needed <= free {
            return Ok(());
        }
        let name = facts.name.clone();
        Err(CudaError::Memory { name, needed, arena, states, staging, other, free, total })
    }
}

/// Refuses a program whose collectives are among other ranks than there are.
pub(super) fn check_exchange(program: &Program, streams: &Streams) -> Result<(), CudaError> {
    let are = streams.exchanger.as_ref().map(|exchanger| exchanger.comm().size());
    program.plans().into_iter().try_for_each(|plan| check_ranks(plan, are))
}

/// The workspace is part of what is compared with the free memory.
pub(super) const FIXED: usize = 2 * WORKSPACE + 256;

impl Base<'_> {
    /// Allocates, compiles, chooses algorithms. An arena that is large enough is used again.
    pub fn plans(
        &mut self,
        program: &Program,
        needs: &Needs,
        arena: Option<Arc<Block>>,
    ) -> Result<Plans, CudaError> {
        let context = self.context;
        let fits = arena.filter(|block| block.bytes >= needs.arena);
        let arena = match fits {
            Some(block) => block,
            None => Arc::new(Block::new(context, needs.arena, "activations")?),
        };
        let constants = Block::new(context, needs.constants, "tables")?;
        let staging = Staging::new(context, program)?;
        let parts = Block::new(context, needs.parts, "partial sums")?;
        let (states, header) = (self.states, self.header);
        let memory = Memory { arena: arena.address, states, header, parts: parts.address };
        let tf32 = self.options.tf32;
        let times = Times::new(context, needs.times, RING)?;
        let noted = times.as_ref().map_or(0, |times| times.block.address);
        let lists = bind_all(program, memory, constants.address, noted, self.facts, tf32)?;
        if lists.constants.len() > constants.bytes || lists.parts() > parts.bytes {
            return Err(CudaError::Misuse("the kernels' tables depend on addresses".into()));
        }
        self.streams.compute().send_now(&lists.constants, constants.address)?;
        let kernels = lists.kernels(|product| self.tuner.kernels(product));
        let images = compile_all(&kernels, &Arch::of(self.facts.capability)?)?;
        let mut modules = Modules::load(context, &images)?;
        if !self.options.deterministic {
            fill_with_noise(&arena, self.streams)?;
        }
        let through_host = self.streams.exchanger.as_ref().is_some_and(|e| !e.is_on_device());
        let host = match lists.host() {
            bytes if bytes > 0 && through_host => Some(Pinned::new(context, bytes)?),
            _ => None,
        };
        let last = &lists.bound[number(Which::Last, false)];
        let exchanges = collectives(last).map(|call| (call.layer.clone(), call.bytes())).collect();
        let marks = lists.marks.clone();
        let mut preparer = Preparer {
            context,
            modules: &mut modules,
            products: self.products,
            tuner: &mut *self.tuner,
            streams: self.streams,
            scratch: &arena,
            host: host.as_ref(),
        };
        let mut prepared = Vec::with_capacity(6);
        for ((plan, accumulate), bound) in plans(program).into_iter().zip(lists.bound) {
            let name = format!("{}{}", plan.name, if accumulate { " (accumulating)" } else { "" });
            prepared.push(preparer.prepare(plan, &name, bound)?);
        }
        let placed = |action| Placed::new(action, Lane::Compute, (0, 0));
        let refresh = lists.refresh.into_iter().map(placed).collect();
        let refresh = Bound { actions: refresh, ..Bound::default() };
        let refresh = preparer.prepare(&Plan::default(), "copies in half precision", refresh)?;
        self.tuner.save();
        self.streams.synchronise("measuring products")?;
        let lists = prepared.try_into().map_err(|_| CudaError::Misuse("six plans were bound".into()))?;
        // Inputs are made by nobody, so that binding has moved none of them.
        let address = |plan: &Plan, value: &usize| match plan.values[*value].place {
            Place::Arena(offset) => memory.arena + offset as Address,
            Place::State(state) => memory.states[state.index()],
        };
        let inputs = program.plans().map(|plan| plan.inputs.iter().map(|v| address(plan, v)).collect());
        Ok(Plans {
            lists,
            refresh,
            _modules: modules,
            staging,
            _host: host,
            times,
            marks,
            exchanges,
            inputs,
            arena,
            constants,
            parts,
        })
    }
}

/// Numbers between -2 and 2 as bf16, and so as f32 and f16: products of zeros are faster than others, and would mislead.
fn fill_with_noise(block: &Block, streams: &Streams) -> Result<(), CudaError> {
    let mut state = 0x9E37_79B9_7F4A_7C15u64;
    let word = |_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        // Sign, exponent 123 to 126 or 127, some of the fraction.
        let random = (state >> 40) as u16;
        (random & 0x80ff) | 0x3e00 | (random & 0x0100)
    };
    let bytes: Vec<u8> = (0..1 << 20).map(word).flat_map(u16::to_le_bytes).collect();
    let mut filled = bytes.len().min(block.bytes);
    streams.compute().send_now(&bytes[..filled], block.address)?;
    while filled < block.bytes {
        let more = filled.min(block.bytes - filled);
        streams.compute().copy(block.address, block.address + filled as Address, more)?;
        filled += more;
    }
    Ok(())
}

/// How often a step may still be skipped before the loss scale is lowered, as a run starts.
pub(super) fn hysteresis(program: &Program) -> u64 {
    let of = |op: &Op| match op {
        Op::LossScale { hysteresis, .. } => Some(*hysteresis),
        _ => None,
    };
    program.update.steps.iter().find_map(|step| of(&step.op)).unwrap_or(1)
}
