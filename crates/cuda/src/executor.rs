//! Binds a program to a GPU's memory and runs its plans there.
//!
//! All work is enqueued on streams: a call returns when the work is queued, and only reading results waits for it. The first run
//! of a plan is captured as a CUDA graph, which all further runs launch; they allocate nothing and wait for nothing.

mod behind;
mod calls;
mod captured;
mod ceilings;
mod checked;
mod communicator;
mod list;
mod plans;
mod prepare;
mod profile;
mod readback;
mod runs;
mod snapshot;
mod staging;
mod states;
mod times;
mod tracer;

pub use captured::{Captured, TimedSteps};
pub use communicator::GpuComm;
use graph::memory::Memory;
use graph::run::{CollectiveTime, EachPlan};
pub use graph::run::{KernelTime, Kernels, MemoryUse, Startup, Which};
pub use plans::{MemoryNeeds, kernels_of};
pub use readback::{Readback, Ticket};
pub use snapshot::Snapshot;
pub use times::{CallTime, CollectiveTimes};
pub use tracer::Traced;

use crate::action::{Address, Facts, Launch};
use crate::compile::{Arch, Compiling, Failing, failing};
use crate::driver::{Block, Context};
use crate::error::CudaError;
use crate::launch::Ready;
use crate::libraries;
use crate::matmul::MathLibraries;
use crate::moves::{self, Move};
use crate::tuner::{AlgorithmChoices, AttentionBy, KnownAlgorithms, Tuner};
use graph::{Header, Plan, Program, StateId};
use list::Streams;
use plans::{Base, DryBinding, Plans, REFRESH, check_collectives, first_lists};
use prepare::compilers;
use readback::Readbacks;
use runs::Runs;
use snapshot::Snapshots;
use staging::Data;
use std::sync::Arc;
use std::time::Instant;
use tracer::Tracer;

/// Options of an executor.
#[derive(Clone)]
pub struct Options {
    /// The GPU's number.
    pub device: usize,
    /// Seed of the parameters' initial values.
    pub seed: u64,
    /// Uses the first algorithm for each matmul instead of the fastest measured, so that every run uses the same.
    pub deterministic: bool,
    /// Allows matmuls of f32 to round their operands to tf32.
    pub tf32: bool,
    /// Communication with other ranks, for programs with collectives.
    pub comm: Option<GpuComm>,
}

impl Options {
    /// GPU and rank that plans are bound for.
    fn target<'a>(&self, facts: &'a Facts) -> plans::BindTarget<'a> {
        let rank = self.comm.as_ref().map_or(0, |comm| comm.rank());
        let enqueues = matches!(self.comm, Some(GpuComm::Nccl { .. }));
        plans::BindTarget { facts, tf32: self.tf32, rank, enqueues }
    }
}

/// Bytes of the header: what `common.cuh` declares, and the word that stops runs after a failed one.
const HEADER_BYTES: usize = 128;
const HALT: Address = 64;

/// Executor of a program on a GPU. Fields are dropped in this order, after the streams were waited for.
pub struct Executor {
    program: Program,
    /// Kernels of the lists that a run begins with, until the first is prepared.
    compiling: Option<Compiling>,
    startup: Startup,
    /// Tracer, once it was used.
    tracer: Option<Tracer>,
    plans: Plans,
    runs: Runs,
    readbacks: Readbacks,
    /// Copies of states, once it was prepared for them.
    snapshots: Option<Snapshots>,
    tuner: Tuner,
    libraries: MathLibraries,
    header: Block,
    state_block: Arc<Block>,
    streams: Streams,
    /// Runs of each plan since the last readback.
    timed: EachPlan<u32>,
    collective_times: CollectiveTimes,
    /// True if parameters were set, and their copies in half precision are stale.
    stale: bool,
    facts: Facts,
    options: Options,
    context: Arc<Context>,
}

/// Parts of an executor that stay when plans change. A macro, so that the executor's other fields can be borrowed beside them.
macro_rules! base {
    ($executor:ident) => {
        Base {
            context: &$executor.context,
            facts: &$executor.facts,
            options: &$executor.options,
            streams: &$executor.streams,
            libraries: &mut $executor.libraries,
            tuner: &mut $executor.tuner,
            states: $executor.state_block.address,
            header: $executor.header.address,
        }
    };
}

impl Executor {
    /// Allocates the arena and the states, all zero but the parameters, which start as their model says, their averages and
    /// copies, which start equal to them, and the loss scale. Kernels are still being compiled when this returns.
    pub fn new(program: Program, options: Options) -> Result<Self, CudaError> {
        let (mut startup, began) = (Startup::default(), Instant::now());
        let facts = libraries::device(options.device)?;
        let began = startup.lap("libraries", began);
        let dry = DryBinding::of(&program, options.target(&facts))?;
        if dry.convolves() {
            libraries::cudnn()?;
        }
        let known = KnownAlgorithms::read(&facts, options.deterministic);
        let first = dry.kernels(&first_lists(&program), &known);
        let compiling = Some(Compiling::start(&first, &Arch::of(facts.capability)?, compilers())?);
        let began = startup.lap("binding", began);
        let context = Context::open(options.device)?;
        dry.needs.check(&facts, context.memory()?)?;
        let began = startup.lap("context", began);
        let streams = Streams::new(&context, options.comm.as_ref())?;
        check_collectives(&program, &streams)?;
        let mut libraries = MathLibraries::new(&context, options.deterministic)?;
        let mut tuner = Tuner::new(&context, known)?;
        let began = startup.lap("streams and cuBLASLt", began);
        let state_bytes = program.state_bytes();
        let state_block = Block::new(&context, state_bytes, "parameters, gradients and optimizer states")?;
        let state_block = Arc::new(state_block);
        let header = Block::new(&context, HEADER_BYTES, "the header")?;
        streams.compute().zero(header.address, HEADER_BYTES)?;
        streams.compute().zero(state_block.address, state_bytes)?;
        let plans = Base {
            context: &context,
            facts: &facts,
            options: &options,
            streams: &streams,
            libraries: &mut libraries,
            tuner: &mut tuner,
            states: state_block.address,
            header: header.address,
        }
        .plans(&program, &dry, None)?;
        let (runs, readbacks) = (Runs::new(&context)?, Readbacks::new(&context)?);
        let began = startup.lap("allocation", began);
        let rank = options.target(&facts).rank;
        states::initialise(&program, rank, &plans.states, options.seed, streams.compute())?;
        startup.lap("first values", began);
        let mut executor = Executor {
            program,
            compiling,
            startup,
            tracer: None,
            plans,
            runs,
            readbacks,
            snapshots: None,
            tuner,
            libraries,
            header,
            state_block,
            streams,
            timed: EachPlan::default(),
            collective_times: CollectiveTimes::default(),
            stale: true,
            facts,
            options,
            context,
        };
        executor.reset_averages()?;
        Ok(executor)
    }

    /// Prepares the lists that a run begins with. Without this, a list is prepared when it is first run.
    pub fn prepare(&mut self) -> Result<(), CudaError> {
        self.ready(&first_lists(&self.program))
    }

    /// Prepares one plan's list.
    pub fn prepare_plan(&mut self, which: Which) -> Result<(), CudaError> {
        self.ready(&[REFRESH, which as usize])
    }

    fn ready(&mut self, numbers: &[usize]) -> Result<(), CudaError> {
        if numbers.iter().all(|number| self.plans.lists[*number].is_some()) {
            return Ok(());
        }
        let compiling = self.compiling.take();
        let mut base = base!(self);
        base.prepare(&self.program, &mut self.plans, numbers, compiling, &mut self.startup)
    }

    /// Algorithms chosen so far.
    pub fn choices(&self) -> AlgorithmChoices {
        self.tuner.choices()
    }

    /// Adopts recorded algorithms for matmuls without one; returns whether they apply to this GPU and these
    /// libraries.
    pub fn adopt(&mut self, choices: &AlgorithmChoices) -> bool {
        self.tuner.known.adopt(choices)
    }

    /// Sets the implementation of attention for lists that were not prepared yet, without measuring.
    pub fn set_attention_by(&mut self, by: AttentionBy) {
        self.tuner.known.attention_by = Some(by);
    }

    /// Breakdown of the startup time.
    pub fn startup(&self) -> &Startup {
        &self.startup
    }

    /// Replaces the plans over the same states, for example by those of another batch size. If they can't be bound,
    /// nothing changes.
    pub fn rebind(&mut self, program: Program) -> Result<(), CudaError> {
        let (ours, theirs) = (&self.program.states, &program.states);
        if let Some(other) = (0..ours.len().max(theirs.len())).find(|i| ours.get(*i) != theirs.get(*i)) {
            let state = theirs.get(other).or(ours.get(other));
            return Err(CudaError::OtherStates(state.map_or_else(String::new, |s| s.name.clone())));
        }
        check_collectives(&program, &self.streams)?;
        self.synchronise()?;
        let dry = DryBinding::of(&program, self.options.target(&self.facts))?;
        let fits = dry.needs.arena <= self.plans.arena.bytes;
        let arena = if fits { 0 } else { dry.needs.arena };
        // Until all is there, what goes stays; but states and workspace are there already.
        MemoryNeeds { arena, states: 0, workspace: 0, uses: Memory::of_arena(arena), ..dry.needs }
            .check(&self.facts, self.context.memory()?)?;
        let old = Some(Arc::clone(&self.plans.arena));
        let mut base = base!(self);
        let mut plans = base.plans(&program, &dry, old)?;
        // A run doesn't stop in the middle for what it had.
        let prepared = self.plans.prepared();
        base.prepare(&program, &mut plans, &prepared, None, &mut self.startup)?;
        self.plans = plans;
        self.program = program;
        // What was traced of the old plans can't be told any more.
        self.tracer = None;
        Ok(())
    }

    pub fn program(&self) -> &Program {
        &self.program
    }

    /// The GPU's number.
    pub fn device(&self) -> usize {
        self.options.device
    }

    /// Makes the GPU trap: from then on every call fails, as after a hardware fault. For tests.
    pub fn lose(&mut self) -> Result<(), CudaError> {
        self.fail(Failing::Trap)
    }

    /// Gives the GPU a kernel that never ends. For tests.
    pub fn spin(&mut self) -> Result<(), CudaError> {
        self.fail(Failing::Spin)
    }

    fn fail(&mut self, how: Failing) -> Result<(), CudaError> {
        self.context.enter()?;
        let (kernel, image) = failing(how, &Arch::of(self.facts.capability)?)?;
        self.plans.modules.add(&[image])?;
        let launch = Launch { kernel, grid: [1; 3], block: 1, shared: 0, args: vec![] };
        Ready::new(&launch, &mut self.plans.modules)?
            .start(self.streams.compute(), || format!("launching a {how:?}"))
    }

    /// Properties of the GPU.
    pub fn facts(&self) -> &Facts {
        &self.facts
    }

    /// Current allocations on the GPU.
    pub fn memory(&self) -> MemoryUse {
        let times = self.plans.times.as_ref().map_or(0, |times| times.block.bytes);
        MemoryUse {
            arena: self.plans.arena.bytes,
            states: self.state_block.bytes,
            staging: self.plans.staging.device_bytes(),
            tables: self.plans.constants.bytes + times + self.header.bytes,
            workspace: self.libraries.workspace_bytes(),
            copies: self.snapshots.as_ref().map_or(0, |snapshots| snapshots.bytes),
        }
    }

    /// Free and total bytes of the GPU's memory.
    pub fn free_memory(&self) -> Result<(usize, usize), CudaError> {
        self.context.memory()
    }

    fn plan(&self, which: Which) -> &Plan {
        self.program.plan(which)
    }

    /// Names of a plan's inputs, each to be uploaded before it runs.
    pub fn inputs(&self, which: Which) -> impl Iterator<Item = &str> {
        let plan = self.plan(which);
        plan.inputs.iter().map(|value| plan.values[*value].name.as_str())
    }

    /// Starts the upload of an input of floats for the next run of the plan. It is copied before this returns, and transferred while
    /// earlier runs go on.
    pub fn upload_f32(&mut self, which: Which, name: &str, data: &[f32]) -> Result<(), CudaError> {
        self.context.enter()?;
        self.plans.staging.upload(which, name, Data::F32(data), &self.streams)
    }

    /// Starts the upload of an input of integers, such as `labels`.
    pub fn upload_i32(&mut self, which: Which, name: &str, data: &[i32]) -> Result<(), CudaError> {
        self.context.enter()?;
        self.plans.staging.upload(which, name, Data::I32(data), &self.streams)
    }

    /// Starts the upload of an input of bytes, such as `pixels`.
    pub fn upload_u8(&mut self, which: Which, name: &str, data: &[u8]) -> Result<(), CudaError> {
        self.context.enter()?;
        self.plans.staging.upload(which, name, Data::U8(data), &self.streams)
    }

    /// Runs a plan. Returns when it is queued; where ranks communicate through the host, when the
    /// last collective is done there.
    pub fn run(&mut self, which: Which, header: &Header) -> Result<(), CudaError> {
        self.begin(which, header)?;
        let list = self.plans.list(which)?;
        match self.tracer.as_mut().filter(|tracer| tracer.on) {
            Some(tracer) => {
                let marks = Tracer::marks(&self.context, list.actions.len())?;
                list.run_eagerly(&self.libraries, &self.streams, Some(&marks))?;
                tracer.keep(which, marks);
            }
            None => {
                let capturing = list.launch(&self.libraries, &self.streams)?;
                if capturing > 0.0 {
                    self.startup.add("capturing", capturing);
                }
            }
        }
        self.timed[which] += 1;
        self.runs.end(which, &self.streams)
    }

    /// Runs a plan action by action instead of as a graph: slower, but an error names the action.
    pub fn run_eagerly(&mut self, which: Which, header: &Header) -> Result<(), CudaError> {
        self.begin(which, header)?;
        let list = self.plans.list(which)?;
        list.run_eagerly(&self.libraries, &self.streams, None)?;
        self.timed[which] += 1;
        self.runs.end(which, &self.streams)
    }

    /// The collectives of the plans of training whose times are known, in the order of [`CollectiveTimes::calls`]: all but those that a
    /// plan leaves under way.
    pub fn collectives(&self) -> &[CollectiveTime] {
        &self.plans.collectives
    }

    /// Times of the collectives in the step that was read back last.
    pub fn collective_times(&self) -> &CollectiveTimes {
        &self.collective_times
    }

    /// Ends the run without error, on all ranks, when all that was queued is done. Dropping an executor without this aborts
    /// communication, so that no other rank waits for it, nor it for another.
    pub fn finish(&mut self) {
        // What waits for a rank that is lost would wait for ever: then communication is aborted after all.
        let done = self.synchronise();
        if let (Ok(()), Some(communicator)) = (done, &mut self.streams.communicator) {
            communicator.finish();
        }
    }

    /// Queues what every run begins with: copies that are out of date, the header, the batch.
    fn begin(&mut self, which: Which, header: &Header) -> Result<(), CudaError> {
        self.context.enter()?;
        if which == Which::Micro && self.program.micro.steps.is_empty() {
            let why = "the plans are for steps of one micro-step: nothing can be added to its gradients";
            return Err(CudaError::Misuse(why.into()));
        }
        self.prepare_plan(which)?;
        self.refresh()?;
        if which == Which::Update {
            self.settle_snapshots()?;
        }
        let own = self.runs.begin(header, self.header.address, &self.streams)?;
        let Plans { staging, inputs, modules, .. } = &mut self.plans;
        let batch = staging.take(which, &inputs[which as usize], &self.streams)?;
        let moves: Vec<Move> = batch.iter().copied().chain(own).collect();
        // SAFETY: the header's slot is written again only when this run has ended.
        unsafe { moves::start(&moves, modules, self.streams.compute()) }?;
        self.runs.sent(header);
        // The next batch waits for this one, and for no run without.
        if batch.is_empty() { Ok(()) } else { staging.taken(&self.streams) }
    }

    /// Waits for everything that was queued.
    pub fn synchronise(&self) -> Result<(), CudaError> {
        self.context.enter()?;
        self.streams.synchronise("waiting for the GPU")
    }

    /// Allows runs after one that failed.
    pub fn clear_halt(&mut self) -> Result<(), CudaError> {
        self.context.enter()?;
        self.streams.compute().zero(self.header.address + HALT, 4)
    }

    /// Seconds on the GPU of the runs that have ended since the last call, by plan. Never waits.
    pub fn take_gpu_seconds(&mut self) -> Result<EachPlan<f64>, CudaError> {
        self.context.enter()?;
        self.runs.take_seconds()
    }

    pub fn find_state(&self, name: &str) -> Option<StateId> {
        self.program.states.iter().position(|s| s.name == name).map(|i| StateId(i as u32))
    }
}

impl Drop for Executor {
    fn drop(&mut self) {
        if let Some(communicator) = &self.streams.communicator {
            communicator.let_go();
        }
        // Nothing may be freed that the GPU still works with.
        let _ = self.context.enter().and_then(|()| self.streams.drain("ending"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn executors_may_change_threads() {
        fn is_send<T: Send>() {}
        is_send::<Executor>();
    }
}
