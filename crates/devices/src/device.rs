//! What runs the plans of a rank: the CPU's executor, or a GPU's.
//!
//! A device is a few small traits, by who uses them: the loop runs [`Plans`], checkpoints and weights go through [`States`], the
//! account, traces and closing table ask for [`Times`], benchmarks for [`Benchmarks`], logs and faults for [`Hardware`].
//!
//! Nothing here assumes that states and outputs lie in the host's memory, or that a step is done when [`Plans::run`]
//! returns. What a step came to is asked for later, in order; [`Plans::depth`] says how much later.

mod on_cpu;

use crate::error::DeviceError;
use crate::memory_advice::check_host;
use crate::real::Real;
use crate::sensors::Sensors;
use comm::{Backend, Communicator, Member, Monitor};
use config::{Device as Chosen, Resolved};
use cpu::Executor;
use data::Batch;
pub use graph::bad::{BadValue, Origin};
pub use graph::run::{Account, CollectiveTime, Event, KernelTime, MemoryUse, Startup, StepTime, Which};
use graph::{Header, Program, StateId};
use std::borrow::Cow;

/// The rank that a device is opened for.
#[derive(Clone)]
pub struct Seat {
    pub world: Communicator,
    pub monitor: Option<Monitor>,
    /// Among the ranks of the same machine.
    pub local_rank: usize,
    /// What was typed after --comm.
    pub requested: Option<Backend>,
}

impl Seat {
    pub fn alone() -> Self {
        Seat { world: Communicator::solo(), monitor: None, local_rank: 0, requested: None }
    }

    pub fn of(member: &Member) -> Self {
        let Member { world, monitor, place, requested, .. } = member;
        let (world, monitor) = (world.clone(), Some(monitor.clone()));
        Seat { world, monitor, local_rank: place.local_rank, requested: *requested }
    }
}

/// What a step left on the device.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Outcome {
    /// The state `stats`: sums of losses, samples, and hits among the first and the first five.
    pub stats: [f64; 4],
    /// The output `control` of `update`: factor of the gradients, whether they were applied, their norm.
    pub control: [f64; 3],
    /// The state of [`graph::Role::LossScale`] after the step: scale, good steps since it changed, skipped steps it still bears.
    pub scale: Option<[f64; 3]>,
}

/// A batch as a plan takes it; lists that it doesn't have are empty. Labels and weights are of images or of pixels.
#[derive(Clone, Copy, Debug, Default)]
pub struct Inputs<'a> {
    pub images: &'a [f32],
    /// What a device makes images of, with the choices; see [`data::Finish`].
    pub pixels: &'a [u8],
    pub choices: &'a [i32],
    pub labels: &'a [i32],
    pub weights: &'a [f32],
    pub partners: &'a [i32],
    pub mix: &'a [f32],
}

impl<'a> From<&'a Batch> for Inputs<'a> {
    fn from(batch: &'a Batch) -> Self {
        let Batch { images, pixels, choices, labels, weights, partners, mix, .. } = batch;
        Inputs { images, pixels, choices, labels, weights, partners, mix }
    }
}

/// Running the plans of a program.
pub trait Plans: Send {
    fn program(&self) -> &Program;

    /// Goes on with other plans over the same states. Nothing is in flight.
    fn rebind(&mut self, program: Program) -> Result<(), DeviceError>;

    /// Steps that may be in flight: ended by [`end_step`](Plans::end_step), their outcome not taken yet. With 1, a step is
    /// waited for before the next is begun.
    fn depth(&self) -> usize {
        1
    }

    /// Puts a batch into the inputs of a plan, for its next run. A plan may reuse the memory of its inputs, so this is done
    /// before every run; what of the batch is not copied yet when this returns, the device has a copy of.
    fn load(&mut self, which: Which, batch: &Inputs<'_>) -> Result<(), DeviceError>;

    /// Returns whether a plan can run again with the batch it was given last.
    fn keeps_batches(&self) -> bool {
        false
    }

    /// Runs a plan, or queues it behind what was queued before.
    fn run(&mut self, which: Which, header: &Header) -> Result<(), DeviceError>;

    /// `update` was queued: what the step came to will be asked for.
    fn end_step(&mut self) -> Result<(), DeviceError>;

    /// Waits for the oldest step whose outcome was not taken yet. From here on, times, collectives and events are its own.
    fn outcome(&mut self) -> Result<Outcome, DeviceError>;

    /// Runs a plan with a look at every value, and names the first that is not finite. Nothing is in flight.
    fn run_checked(&mut self, which: Which, header: &Header) -> Result<Option<BadValue>, DeviceError>;

    /// All ranks are about to evaluate.
    fn before_evaluation(&mut self) -> Result<(), DeviceError> {
        Ok(())
    }

    /// All ranks come to a good end here: their devices needn't break anything off.
    fn finish(&mut self) {}
}

/// What the host reads and writes: states, and outputs of plans. `T` is what the host sees: of values in another precision, the
/// nearest.
pub trait States<T: Real>: Plans {
    /// An output of the plan that was queued last; waits for it.
    fn output(&self, which: Which, name: &str) -> Result<Option<Cow<'_, [T]>>, DeviceError>;

    fn find_state(&self, name: &str) -> Option<StateId> {
        let states = &self.program().states;
        states.iter().position(|state| state.name == name).map(|index| StateId(index as u32))
    }

    /// A state after all that was queued: where it lies, or a copy.
    fn state(&self, id: StateId) -> Result<Cow<'_, [T]>, DeviceError>;

    /// Sets a state; what is derived from it ([`graph::Role::Copy`]) follows before the next run.
    fn write_state(&mut self, id: StateId, values: &[T]) -> Result<(), DeviceError>;

    /// Sets a state of [`graph::Role::Resident`] to what these bytes are.
    fn write_bytes(&mut self, id: StateId, bytes: &[u8]) -> Result<(), DeviceError>;

    /// Makes every moving average equal to its parameter: for whoever sets parameters from outside.
    fn reset_averages(&mut self) -> Result<(), DeviceError>;

    /// Gets ready to take snapshots of these states, on devices that do so by themselves.
    fn prepare_snapshots(&mut self, _ids: &[StateId]) -> Result<Prepared, DeviceError> {
        Ok(Prepared::No)
    }

    /// Takes a snapshot of the states it was prepared for, as they are after all that was queued; `None` if it was not.
    fn snapshot(&mut self) -> Result<Option<Box<dyn Snapshot<T> + Send>>, DeviceError> {
        Ok(None)
    }
}

/// How a device takes snapshots of states.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Prepared {
    /// Not at all: the host copies what it [reads](States::state).
    No,
    /// While steps are in flight, and go on.
    Beside,
    /// Not either: there is no room for a copy of so many bytes, and whoever reads states has training wait.
    NoRoom { bytes: usize },
}

/// States as they were at one moment, for another thread to read while training goes on.
pub trait Snapshot<T> {
    /// What this rank holds of a state, by its place among those that the snapshot is of. Each is read once, in that order.
    fn read(&mut self, index: usize) -> Result<&[T], DeviceError>;
}

/// Where the time of a run went.
pub trait Times {
    /// Where the time of the steps went whose outcome was taken since this was last asked.
    fn take_account(&mut self) -> Account;

    /// The collectives of the plans that train, as they ran in the step whose outcome was taken last.
    fn collectives(&self) -> &[CollectiveTime];

    /// Forgets the time of what was run since that was asked, which is no step: an evaluation. Collectives of training that it
    /// waited for count in the next step.
    fn forget_time(&mut self) {
        self.take_account();
    }

    /// Waits for the collectives that the last update has left under way. Returns those of the plans that train as they ran since the last
    /// step that was accounted for; nothing on devices that leave such collectives out.
    fn finish_collectives(&mut self) -> Result<&[CollectiveTime], DeviceError> {
        Ok(&[])
    }

    /// Measures times, or stops: they are measured from the start.
    fn set_timing(&mut self, on: bool);

    /// Remembers every step and collective, or stops, for a trace; needs timing.
    fn set_tracing(&mut self, on: bool);

    /// Adds what happened in the steps whose outcome was taken since this was last asked.
    fn take_trace(&mut self, into: &mut Vec<Event>);

    /// Where the time of training went since the last reset, by kind of step, longest first.
    fn training_times(&self) -> Vec<StepTime>;

    fn reset_times(&mut self);

    /// Samples the times of single kernels in a few of the next steps, on devices that have no other way to tell them.
    fn sample_kernels(&mut self) {}

    /// What to know of the times of kinds of steps, and of traces.
    fn note_on_times(&self) -> Option<String> {
        None
    }
}

/// What a benchmark asks for, where a device can tell.
pub trait Benchmarks {
    /// The time of every kernel and matmul of a step. States change as they do in so many steps.
    fn profile(&mut self, _header: &Header, _repeats: usize) -> Result<Vec<KernelTime>, DeviceError> {
        Ok(Vec::new())
    }

    /// Its measured ceilings, on devices that have a way of their own to tell. Nothing is in flight.
    fn ceilings(&mut self) -> Result<Option<graph::Ceilings>, DeviceError> {
        Ok(None)
    }

    /// Seconds of the plan's matmuls alone, where they can be run so. Results are garbage.
    fn run_matmuls(&mut self, _which: Which, _header: &Header) -> Option<f64> {
        None
    }

    /// Bytes allocated on the device.
    fn memory(&self) -> Option<MemoryUse> {
        None
    }

    /// Where the time went until the device could be used.
    fn startup(&self) -> Option<&Startup> {
        None
    }
}

/// The machine that a device is.
pub trait Hardware {
    /// What to call it.
    fn name(&self) -> String;

    /// Number and name of the GPU that it is.
    fn gpu(&self) -> Option<(usize, String)> {
        None
    }

    /// What the GPU's sensors said last, where it has some. Waits for nothing.
    fn sensors(&self) -> Option<Sensors> {
        None
    }

    /// What to tell the user of how it works with other ranks'.
    fn says(&self) -> Option<&str> {
        None
    }

    /// The algorithms of matmuls and attention, where they were measured, in the device's own terms: for a run that goes on to repeat.
    fn choices(&self) -> Option<serde_json::Value> {
        None
    }

    /// Breaks the device, to see what comes of that.
    fn lose(&mut self) -> Result<(), DeviceError>;

    /// Gives the device work that never ends, to see what comes of that.
    fn spin(&mut self) -> Result<(), DeviceError>;

    /// Takes `factor` times as long to compute from now on, for tests of unequal ranks.
    fn set_slowdown(&mut self, _factor: f64) {}
}

/// One rank's executor.
pub trait Device<T: Real>: Plans + States<T> + Times + Benchmarks + Hardware {}

impl<T: Real, D: Plans + States<T> + Times + Benchmarks + Hardware> Device<T> for D {}

/// Opens the device of a rank. What is missing on this machine, or in this build, is said here and not when a run is
/// resolved, so that a run can be planned and explained elsewhere.
pub fn open<T: Real>(
    run: &Resolved,
    program: Program,
    seat: &Seat,
) -> Result<Box<dyn Device<T>>, DeviceError> {
    match run.device {
        Chosen::Cpu => {
            if seat.requested == Some(Backend::Nccl) {
                let why = "NCCL is for GPUs: choose --device cuda, or leave out --comm";
                return Err(DeviceError::setting("comm", Backend::Nccl, why));
            }
            check_host(&program)?;
            let options =
                cpu::Options { threads: run.threads, seed: run.seed, comm: Some(seat.world.clone()) };
            Ok(Box::new(Executor::<T>::new(program, options)?))
        }
        Chosen::Cuda => {
            cuda_available().map_err(|why| DeviceError::setting("device", run.device, why))?;
            T::on_cuda(run, program, seat)
        }
    }
}

/// Begins to open the device that a run will want, while its plans are still being made. To be kept until it is open.
pub fn warm(run: &Resolved, seat: &Seat) -> Option<cuda::Warm> {
    (run.device == Chosen::Cuda).then(|| cuda::warm(seat.local_rank))
}

/// Why no GPU can be used, if none can.
pub fn cuda_available() -> Result<(), String> {
    cuda::available().map_err(|error| error.to_string())
}

/// What plans of a run are made for.
pub fn target(run: &Resolved) -> Box<dyn graph::Target> {
    match run.device {
        Chosen::Cpu => Box::new(cpu::Target { threads: run.threads }),
        Chosen::Cuda => Box::new(cuda::Target::of(run.gpu, run.precision.half().is_some())),
    }
}

/// What `compile` puts into every program; no input can take it out.
pub fn planned<T>(part: Option<T>) -> T {
    part.unwrap_or_else(|| unreachable!("every program has a batch, logits, statistics and a control"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::program::program;
    use config::Raw;

    /// A run on a GPU can be resolved and planned anywhere; where there is none, one line ends it when it starts.
    #[test]
    fn a_gpu_that_is_not_there_is_told_when_it_is_opened() {
        let raw = Raw { device: Some(Chosen::Cuda), ..Raw::default() };
        let run = raw.resolve_without_data(1).unwrap();
        let program = program::<f32>(&run, run.batch).unwrap();
        if let Err(why) = cuda_available() {
            let refused = open::<f32>(&run, program, &Seat::alone()).err().unwrap().to_string();
            assert_eq!(refused, format!("--device cuda: {why}"));
        }
    }

    /// Tables and images that stay on a device are written as bytes, on every device.
    #[test]
    fn the_cpu_takes_states_as_bytes() {
        let run = Raw::default().resolve_without_data(1).unwrap();
        let program = program::<f32>(&run, run.batch).unwrap();
        let mut device = open::<f32>(&run, program, &Seat::alone()).unwrap();
        let bias = device.find_state("head.bias").unwrap();
        let values: Vec<f32> = (0..device.state(bias).unwrap().len()).map(|i| 0.5 * i as f32).collect();
        let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_ne_bytes()).collect();
        device.write_bytes(bias, &bytes).unwrap();
        assert_eq!(*device.state(bias).unwrap(), values);
    }

    #[test]
    fn nccl_is_refused_without_gpus() {
        let run = Raw::default().resolve_without_data(1).unwrap();
        let program = program::<f32>(&run, run.batch).unwrap();
        let seat = Seat { requested: Some(Backend::Nccl), ..Seat::alone() };
        let refused = open::<f32>(&run, program, &seat).err().unwrap().to_string();
        assert_eq!(refused, "--comm nccl: NCCL is for GPUs: choose --device cuda, or leave out --comm");
    }
}
