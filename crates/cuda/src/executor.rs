//! Binds a program to a GPU's memory and runs its plans there.
//!
//! Everything is put into streams: a call returns when the work is queued, and only reading results waits for it. The first run
//! of a plan is captured as a CUDA graph, which all further runs launch; they allocate nothing and wait for nothing.

mod calls;
mod checked;
mod exchanger;
mod list;
mod plans;
mod profile;
mod readback;
mod runs;
mod staging;
mod states;
mod times;

pub use exchanger::Exchange;
pub use plans::kernels_of;
pub use profile::ActionTime;
pub use readback::{Readback, Ticket};
pub use times::ExchangeTimes;

use crate::action::{Address, Facts};
use crate::bind::state_offsets;
use crate::driver::{Block, Context};
use crate::error::CudaError;
use crate::exchange::Marks;
use crate::libraries;
use crate::product::{Products, WORKSPACE};
use crate::tuner::Tuner;
use graph::{Header, Plan, Program, StateId};
use list::Streams;
use plans::{Base, FIXED, Needs, Plans, check_exchange};
use readback::Readbacks;
use runs::Runs;
use staging::Data;
use std::sync::Arc;

/// One of a program's plans.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    Micro,
    Last,
    Update,
    Eval,
}

/// What an executor works with.
#[derive(Clone)]
pub struct Options {
    /// The GPU's number.
    pub device: usize,
    /// For the parameters' first values.
    pub seed: u64,
    /// Takes the first algorithm for each product instead of the fastest measured, so that every run takes the same.
    pub deterministic: bool,
    /// Products of f32 may round their operands to tf32.
    pub tf32: bool,
    /// The other ranks, for programs that have collectives.
    pub comm: Option<Exchange>,
}

/// The header's memory: what `common.cuh` declares, and the word that holds back runs after a failed one.
const HEADER_BYTES: usize = 128;
const HALT: Address = 64;

/// The parts are dropped in this order, after the streams were waited for.
pub struct Executor {
    program: Program,
    plans: Plans,
    runs: Runs,
    readbacks: Readbacks,
    tuner: Tuner,
    products: Products,
    header: Block,
    state_block: Block,
    /// Of every state.
    states: Vec<Address>,
    streams: Streams,
    /// What was noted down since the last readback.
    timed: Marks,
    exchange_times: ExchangeTimes,
    /// Parameters were set, and their copies in half precision were not.
    stale: bool,
    facts: Facts,
    options: Options,
    context: Arc<Context>,
}

impl Executor {
    /// Allocates the arena and the states, all zero but the parameters, which start as their model says, their averages and
    /// copies, which start equal to them, and the loss scale.
    pub fn new(program: Program, options: Options) -> Result<Self, CudaError> {
        let facts = libraries::device(options.device)?;
        let context = Context::open(options.device)?;
        let needs = Needs::of(&program, &facts, options.tf32)?;
        let (offsets, state_bytes) = state_offsets(&program.states);
        needs.check(&context, &facts, state_bytes, FIXED)?;
        let streams = Streams::new(&context, options.comm.as_ref())?;
        check_exchange(&program, &streams)?;
        let state_block = Block::new(&context, state_bytes, "parameters, gradients and optimizer states")?;
        let states: Vec<Address> =
            offsets.iter().map(|offset| state_block.address + *offset as Address).collect();
        let header = Block::new(&context, HEADER_BYTES, "the header")?;
        streams.compute().zero(header.address, HEADER_BYTES)?;
        streams.compute().zero(state_block.address, state_bytes)?;
        states::initialise(&program, &states, options.seed, streams.compute())?;
        let products = Products::new(&context)?;
        let mut tuner = Tuner::new(&context, &facts, options.deterministic)?;
        let plans = Base {
            context: &context,
            facts: &facts,
            options: &options,
            streams: &streams,
            products: &products,
            tuner: &mut tuner,
            states: &states,
            header: header.address,
        }
        .plans(&program, &needs, None)?;
        let (runs, readbacks) = (Runs::new(&context)?, Readbacks::new(&context)?);
        let mut executor = Executor {
            program,
            plans,
            runs,
            readbacks,
            tuner,
            products,
            header,
            state_block,
            states,
            streams,
            timed: Marks::default(),
            exchange_times: ExchangeTimes::default(),
            stale: true,
            facts,
            options,
            context,
        };
        executor.reset_averages()?;
        executor.refresh()?;
        executor.synchronise()?;
        Ok(executor)
    }

    /// Goes on with other plans over the same states, such as those of another batch size. If they can't be bound,
    /// everything stays as it is.
    pub fn rebind(&mut self, program: Program) -> Result<(), CudaError> {
        let (ours, theirs) = (&self.program.states, &program.states);
        if let Some(other) = (0..ours.len().max(theirs.len())).find(|i| ours.get(*i) != theirs.get(*i)) {
            let state = theirs.get(other).or(ours.get(other));
            return Err(CudaError::OtherStates(state.map_or_else(String::new, |s| s.name.clone())));
        }
        check_exchange(&program, &self.streams)?;
        self.synchronise()?;
        let mut needs = Needs::of(&program, &self.facts, self.options.tf32)?;
        let arena = needs.arena;
        if arena <= self.plans.arena.bytes {
            needs.arena = 0;
        }
        needs.check(&self.context, &self.facts, 0, 0)?;
        needs.arena = arena;
        let old = Some(Arc::clone(&self.plans.arena));
        let mut base = Base {
            context: &self.context,
            facts: &self.facts,
            options: &self.options,
            streams: &self.streams,
            products: &self.products,
            tuner: &mut self.tuner,
            states: &self.states,
            header: self.header.address,
        };
        self.plans = base.plans(&program, &needs, old)?;
        self.program = program;
        Ok(())
    }

    pub fn program(&self) -> &Program {
        &self.program
    }

    /// What the GPU is.
    pub fn facts(&self) -> &Facts {
        &self.facts
    }

    /// Bytes allocated for the arena, for the states, and for what never changes: tables, header, workspace of products.
    pub fn allocated(&self) -> (usize, usize, usize) {
        let constant =
            self.plans.constants.bytes + self.plans.parts.bytes + self.header.bytes + 2 * WORKSPACE;
        (self.plans.arena.bytes, self.state_block.bytes, constant)
    }

    fn plan(&self, which: Which) -> &Plan {
        self.program.plans()[which as usize]
    }

    /// Names of a plan's inputs, each to be uploaded before it runs.
    pub fn inputs(&self, which: Which) -> impl Iterator<Item = &str> {
        let plan = self.plan(which);
        plan.inputs.iter().map(|value| plan.values[*value].name.as_str())
    }

    /// Sends an input of numbers on its way, for the next run of the plan. It is copied before this returns, and travels while
    /// earlier runs go on.
    pub fn upload_f32(&mut self, which: Which, name: &str, data: &[f32]) -> Result<(), CudaError> {
        self.context.enter()?;
        self.plans.staging.upload(which, name, Data::F32(data), &self.streams)
    }

    /// Sends an input of whole numbers, such as `labels`.
    pub fn upload_i32(&mut self, which: Which, name: &str, data: &[i32]) -> Result<(), CudaError> {
        self.context.enter()?;
        self.plans.staging.upload(which, name, Data::I32(data), &self.streams)
    }

    /// Sends an input of bytes, such as `pixels`.
    pub fn upload_u8(&mut self, which: Which, name: &str, data: &[u8]) -> Result<(), CudaError> {
        self.context.enter()?;
        self.plans.staging.upload(which, name, Data::U8(data), &self.streams)
    }

    /// Runs a plan from its first step to its last. Returns when that is queued; where ranks exchange through the host, when the
    /// last collective is done there.
    pub fn run(&mut self, which: Which, header: &Header) -> Result<(), CudaError> {
        self.begin(which, header)?;
        let list = self.plans.list(which, header.accumulate);
        list.launch(&self.products, &self.streams)?;
        self.note(which, header);
        self.runs.end(which, &self.streams)
    }

    /// Runs a plan action by action instead of as a graph: slower, but an error names the action.
    pub fn run_eagerly(&mut self, which: Which, header: &Header) -> Result<(), CudaError> {
        self.begin(which, header)?;
        let list = self.plans.list(which, header.accumulate);
        list.run_eagerly(&self.products, &self.streams)?;
        self.note(which, header);
        self.runs.end(which, &self.streams)
    }

    fn note(&mut self, which: Which, header: &Header) {
        let marks = self.plans.marks(which, header.accumulate);
        if marks.calls > 0 {
            self.timed = marks;
        }
    }

    /// Layer and bytes of the collectives of `last`, in their order.
    pub fn exchanges(&self) -> &[(String, usize)] {
        &self.plans.exchanges
    }

    /// Their times in the step whose numbers were read back last.
    pub fn exchange_times(&self) -> &ExchangeTimes {
        &self.exchange_times
    }

    /// All ranks come to a good end here. Who drops an executor without this breaks the exchange off, so that no other rank waits
    /// for it, nor it for another.
    pub fn finish(&mut self) {
        if let Some(exchanger) = &mut self.streams.exchanger {
            exchanger.finish();
        }
    }

    /// Queues what every run begins with: copies that are out of date, the header, the batch.
    fn begin(&mut self, which: Which, header: &Header) -> Result<(), CudaError> {
        self.context.enter()?;
        self.refresh()?;
        self.runs.begin(header, self.header.address, &self.streams)?;
        let Plans { staging, inputs, .. } = &mut self.plans;
        staging.take(which, &inputs[which as usize], &self.streams)
    }

    /// Waits for everything that was queued.
    pub fn synchronise(&self) -> Result<(), CudaError> {
        self.context.enter()?;
        self.streams.synchronise("waiting for the GPU")
    }

    /// Lets runs go on after one that failed.
    pub fn clear_halt(&mut self) -> Result<(), CudaError> {
        self.context.enter()?;
        self.streams.compute().zero(self.header.address + HALT, 4)
    }

    /// Seconds on the GPU of the runs that have ended since this was last asked, by plan in the order of [`Which`]. Waits for
    /// nothing.
    pub fn take_gpu_seconds(&mut self) -> Result<[f64; 4], CudaError> {
        self.context.enter()?;
        self.runs.take_seconds()
    }

    pub fn find_state(&self, name: &str) -> Option<StateId> {
        self.program.states.iter().position(|s| s.name == name).map(|i| StateId(i as u32))
    }
}

impl Drop for Executor {
    fn drop(&mut self) {
        if let Some(exchanger) = &self.streams.exchanger {
            exchanger.let_go();
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
