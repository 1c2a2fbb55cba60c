//! A GPU as the device of a rank. Everything is queued; results are read two steps later.

use crate::algorithms::algorithms;
use crate::assignment::{Assigned, assign};
use crate::device::{
    Account, BadValue, Benchmarks, CollectiveTime, Event, Hardware, Inputs, KernelTime, MemoryUse, Outcome,
    Plans, Prepared, Seat, Snapshot, Startup, States, StepTime, Times, Which,
};
use crate::error::DeviceError;
use crate::kernel_sampler::KernelSampler;
use config::{Precision, Resolved};

use crate::sensors::{Sampler, Sensors};
use comm::{Activity, Communicator, Name};
use cuda::{AlgorithmChoices, CudaError, Executor, Ticket};
use graph::graph::Phase;
use graph::run::EachPlan;
use graph::{Header, Plan, Program, StateId};
use std::borrow::Cow;
use std::collections::VecDeque;
use std::sync::Arc;

/// Steps in flight: one that runs, one that is queued, one whose results are read.
const DEPTH: usize = 3;

pub(crate) struct Gpu {
    executor: Executor,
    sampler: Sampler,
    world: Communicator,
    /// Evaluation was prepared, on all ranks.
    evaluates: bool,
    in_flight: VecDeque<Ticket>,
    /// The collectives of `last`, in the step whose outcome was taken last.
    exchanges: Vec<CollectiveTime>,
    /// Exposed and hidden seconds of communication, and exposed ones in the update, in the steps whose outcome was taken.
    communicated: [f64; 3],
    /// Flag: times are reported.
    timing: bool,
    line: Option<String>,
    kernels: KernelSampler,
    /// For whoever watches the rank.
    activity: Arc<Activity>,
    doing: EachPlan<Name>,
    /// Seconds on the GPU since the last reset, and runs: of forward and backward, and of the update.
    spent: [f64; 2],
    runs: [u64; 2],
}

impl Gpu {
    pub fn open(run: &Resolved, program: Program, seat: &Seat) -> Result<Self, DeviceError> {
        // Kernels may have to be compiled, and matmul algorithms measured.
        let _busy = seat.monitor.as_ref().map(|monitor| monitor.busy("opening the GPU"));
        let Assigned { device, communication: comm, line } = assign(seat)?;
        let tf32 = run.precision == Precision::Tf32;
        let (seed, deterministic) = (run.seed, run.deterministic);
        let options = cuda::Options { device, seed, deterministic, tf32, comm };
        let mut executor = Executor::new(program, options)?;
        let repeated = repeat(run, seat, &mut executor)?;
        decide(&seat.world, &mut executor, Executor::prepare)?;
        let line = [line, repeated].into_iter().flatten().reduce(|a, b| format!("{a}; {b}"));
        let exchanges = executor.collectives().to_vec();
        let activity = Arc::clone(seat.world.activity());
        let doing = EachPlan::of(|which| match which {
            Which::First | Which::Micro => activity.name("a micro-step on the GPU"),
            Which::Last => activity.name("a step on the GPU"),
            Which::Update => activity.name("an update on the GPU"),
            Which::Eval => activity.name("an evaluation on the GPU"),
        });
        let in_flight = VecDeque::with_capacity(DEPTH + 1);
        let (communicated, timing) = ([0.0; 3], true);
        let (spent, runs, kernels) = ([0.0; 2], [0; 2], KernelSampler::default());
        let (world, evaluates) = (seat.world.clone(), false);
        let sampler = Sampler::start(cuda::identity(device)?);
        Ok(Gpu {
            executor,
            sampler,
            world,
            evaluates,
            in_flight,
            exchanges,
            communicated,
            timing,
            line,
            kernels,
            activity,
            doing,
            spent,
            runs,
        })
    }

    /// Notes what the communication of the step took whose results were just read.
    fn note_communication(&mut self) {
        if !self.timing {
            return;
        }
        let times = self.executor.collective_times();
        for (exchange, call) in self.exchanges.iter_mut().zip(&times.calls) {
            (exchange.calls, exchange.seconds, exchange.exposed) =
                (call.calls.into(), call.seconds, call.exposed);
        }
        let parts = [times.exposed, times.hidden, times.exposed_in_update];
        self.communicated.iter_mut().zip(parts).for_each(|(sum, part)| *sum += part);
    }
}

/// Makes a continued run use the algorithms it used before; returns a line for the user where it can't.
fn repeat(run: &Resolved, seat: &Seat, executor: &mut Executor) -> Result<Option<String>, DeviceError> {
    let Some(folder) = run.resume.as_ref().filter(|_| seat.world.rank() == 0 && !run.deterministic) else {
        return Ok(None);
    };
    let Some(choices) = algorithms(folder)? else { return Ok(None) };
    let line = "algorithms are measured again: those of the run were chosen for";
    Ok((!executor.adopt(&choices)).then(|| format!("{line} another GPU or cuBLASLt ({})", choices.gpu)))
}

/// Lets rank 0 choose algorithms and sends them to the others: ranks on GPUs of one kind compute alike. All are prepared when
/// this returns.
fn decide(
    world: &Communicator,
    executor: &mut Executor,
    prepare: impl Fn(&mut Executor) -> Result<(), CudaError>,
) -> Result<(), DeviceError> {
    if world.size() == 1 {
        return Ok(prepare(executor)?);
    }
    let name = world.name("the choice of algorithms");
    let mut text = Vec::new();
    if world.rank() == 0 {
        prepare(executor)?;
        text = serde_json::to_vec(&executor.choices()).map_err(|e| DeviceError::Disagree(e.to_string()))?;
    }
    let text = world.broadcast_bytes(name, 0, text)?;
    if world.rank() > 0 {
        let choices: AlgorithmChoices =
            serde_json::from_slice(&text).map_err(|e| DeviceError::Disagree(e.to_string()))?;
        // One with another GPU measures for itself.
        executor.adopt(&choices);
        prepare(executor)?;
    }
    // Nobody captures while another still allocates.
    world.barrier(name)?;
    Ok(())
}

impl Plans for Gpu {
    fn program(&self) -> &Program {
        self.executor.program()
    }

    fn rebind(&mut self, program: Program) -> Result<(), DeviceError> {
        Ok(self.executor.rebind(program)?)
    }

    fn depth(&self) -> usize {
        DEPTH
    }

    fn load(&mut self, which: Which, batch: &Inputs<'_>) -> Result<(), DeviceError> {
        let finishes = self.executor.inputs(which).any(|name| name == "choices");
        if finishes {
            let comes = self.executor.inputs(which).any(|name| name == "pixels");
            if comes {
                self.executor.upload_u8(which, "pixels", batch.pixels)?;
            }
            self.executor.upload_i32(which, "choices", batch.choices)?;
        } else {
            self.executor.upload_f32(which, "images", batch.images)?;
        }
        self.executor.upload_i32(which, "labels", batch.labels)?;
        self.executor.upload_f32(which, "weights", batch.weights)?;
        let mixes = self.executor.inputs(which).any(|name| name == "mix");
        if mixes {
            self.executor.upload_i32(which, "partners", batch.partners)?;
            self.executor.upload_f32(which, "mix", batch.mix)?;
        }
        Ok(())
    }

    fn keeps_batches(&self) -> bool {
        true
    }

    fn run(&mut self, which: Which, header: &Header) -> Result<(), DeviceError> {
        self.activity.doing(self.doing[which]);
        self.executor.set_tracing(which != Which::Eval && self.kernels.samples())?;
        match which {
            Which::First | Which::Micro | Which::Last => self.runs[0] += 1,
            Which::Update => self.runs[1] += 1,
            Which::Eval => {}
        }
        Ok(self.executor.run(which, header)?)
    }

    fn end_step(&mut self) -> Result<(), DeviceError> {
        self.in_flight.push_back(self.executor.begin_readback()?);
        self.kernels.step_ended();
        Ok(())
    }

    fn outcome(&mut self) -> Result<Outcome, DeviceError> {
        let Some(ticket) = self.in_flight.pop_front() else {
            unreachable!("outcomes are asked for as often as steps are ended")
        };
        let numbers = self.executor.readback(ticket)?;
        self.note_communication();
        self.kernels.take_in(self.executor.take_traced()?);
        Ok(Outcome {
            stats: numbers.stats.map(f64::from),
            control: numbers.control.map(f64::from),
            scale: numbers.scale.map(|scale| scale.map(f64::from)),
        })
    }

    fn run_checked(&mut self, which: Which, header: &Header) -> Result<Option<BadValue>, DeviceError> {
        self.executor.clear_halt()?;
        Ok(self.executor.run_checked(which, header)?)
    }

    fn before_evaluation(&mut self) -> Result<(), DeviceError> {
        if std::mem::replace(&mut self.evaluates, true) {
            return Ok(());
        }
        decide(&self.world, &mut self.executor, |executor| executor.prepare_plan(Which::Eval))
    }

    fn finish(&mut self) {
        self.executor.finish();
    }
}

impl States<f32> for Gpu {
    fn output(&self, which: Which, name: &str) -> Result<Option<Cow<'_, [f32]>>, DeviceError> {
        Ok(self.executor.read_f32(which, name)?.map(Cow::Owned))
    }

    fn state(&self, id: StateId) -> Result<Cow<'_, [f32]>, DeviceError> {
        let mut values = vec![0.0; self.executor.held(id).len()];
        self.executor.state_f32(id, &mut values)?;
        Ok(Cow::Owned(values))
    }

    fn write_state(&mut self, id: StateId, values: &[f32]) -> Result<(), DeviceError> {
        Ok(self.executor.set_state_f32(id, values)?)
    }

    fn write_bytes(&mut self, id: StateId, bytes: &[u8]) -> Result<(), DeviceError> {
        Ok(self.executor.set_state_bytes(id, bytes)?)
    }

    fn reset_averages(&mut self) -> Result<(), DeviceError> {
        Ok(self.executor.reset_averages()?)
    }

    fn prepare_snapshots(&mut self, ids: &[StateId]) -> Result<Prepared, DeviceError> {
        let bytes = self.executor.prepare_snapshots(ids)?;
        Ok(bytes.map_or(Prepared::Beside, |bytes| Prepared::NoRoom { bytes }))
    }

    fn snapshot(&mut self) -> Result<Option<Box<dyn Snapshot<f32> + Send>>, DeviceError> {
        let snapshot = self.executor.snapshot()?;
        Ok(snapshot.map(|snapshot| Box::new(snapshot) as Box<dyn Snapshot<f32> + Send>))
    }
}

impl Snapshot<f32> for cuda::Snapshot {
    fn read(&mut self, index: usize) -> Result<&[f32], DeviceError> {
        Ok(cuda::Snapshot::read(self, index)?)
    }
}

impl Times for Gpu {
    fn take_account(&mut self) -> Account {
        // What can't be read is counted as idle, and the error comes with the next run.
        let EachPlan([first, micro, last, update, evaluation]) =
            self.executor.take_gpu_seconds().unwrap_or_default();
        let [exposed, hidden, in_update] = std::mem::take(&mut self.communicated);
        // The GPU waits within its plans.
        let compute = (first + micro + last - (exposed - in_update)).max(0.0);
        let update = (update - in_update).max(0.0);
        self.spent[0] += compute;
        self.spent[1] += update;
        Account { compute, update, evaluation, exposed, hidden, ..Account::default() }
    }

    fn collectives(&self) -> &[CollectiveTime] {
        &self.exchanges
    }

    /// The GPU notes its times down in any case, as that is part of its graphs.
    fn set_timing(&mut self, on: bool) {
        self.timing = on;
        if !on {
            self.exchanges.iter_mut().for_each(CollectiveTime::reset);
        }
    }

    fn set_tracing(&mut self, on: bool) {
        self.kernels.trace(on);
    }

    fn take_trace(&mut self, into: &mut Vec<Event>) {
        self.kernels.take_events(into);
    }

    /// Times by kind of step where some were sampled, else by plan.
    fn training_times(&self) -> Vec<StepTime> {
        if let Some(times) = self.kernels.times(self.spent, self.runs) {
            return times;
        }
        let program = self.executor.program();
        let row = |i: usize, op: &str, phase, plan: &Plan| {
            let (cost, runs) = (plan.cost(), self.runs[i] as f64);
            let (flops, bytes) = (cost.flops * runs, cost.bytes * runs);
            StepTime { op: op.to_string(), phase, is_matmul: i == 0, seconds: self.spent[i], flops, bytes }
        };
        vec![
            row(0, "forward and", Phase::Backward, &program.last),
            row(1, "optimizer", Phase::Update, &program.update),
        ]
    }

    fn reset_times(&mut self) {
        (self.spent, self.runs) = ([0.0; 2], [0; 2]);
    }

    fn sample_kernels(&mut self) {
        self.kernels.begin();
    }

    fn note_on_times(&self) -> Option<String> {
        self.kernels.note()
    }
}

impl Benchmarks for Gpu {
    fn profile(&mut self, header: &Header, repeats: usize) -> Result<Vec<KernelTime>, DeviceError> {
        let mut times = self.executor.profile(Which::Last, header, repeats)?;
        times.extend(self.executor.profile(Which::Update, header, repeats)?);
        Ok(times)
    }

    fn ceilings(&mut self) -> Result<Option<graph::Ceilings>, DeviceError> {
        Ok(Some(self.executor.ceilings()?))
    }

    fn memory(&self) -> Option<MemoryUse> {
        Some(self.executor.memory())
    }

    fn startup(&self) -> Option<&Startup> {
        Some(self.executor.startup())
    }
}

impl Hardware for Gpu {
    fn name(&self) -> String {
        format!("GPU {} ({})", self.executor.device(), self.executor.facts().name)
    }

    fn gpu(&self) -> Option<(usize, String)> {
        Some((self.executor.device(), self.executor.facts().name.clone()))
    }

    fn sensors(&self) -> Option<Sensors> {
        Some(self.sampler.latest())
    }

    fn says(&self) -> Option<&str> {
        self.line.as_deref()
    }

    fn choices(&self) -> Option<serde_json::Value> {
        let choices = self.executor.choices();
        serde_json::to_value(&choices).ok().filter(|_| !choices.algorithms.is_empty())
    }

    fn lose(&mut self) -> Result<(), DeviceError> {
        Ok(self.executor.lose()?)
    }

    fn spin(&mut self) -> Result<(), DeviceError> {
        Ok(self.executor.spin()?)
    }
}
