//! A GPU as the device of a rank. Everything is queued; results are read two steps later.

use crate::config::{Precision, Resolved};
use crate::device::{Account, BadValue, Device, Event, ExchangeTime, Outcome, StepTime, Which};
use crate::error::TrainError;
use comm::Communicator;
use cuda::{ActionTime, Executor, Ticket};
use data::LoadedBatch;
use graph::{Header, Program, StateId};
use std::borrow::Cow;
use std::collections::VecDeque;

/// Steps in flight: one that runs, one that is queued, one whose numbers are looked at.
const DEPTH: usize = 3;

pub(crate) struct Gpu {
    executor: Executor,
    in_flight: VecDeque<Ticket>,
}

impl Gpu {
    pub fn open(run: &Resolved, program: Program, world: &Communicator) -> Result<Self, TrainError> {
        if world.size() > 1 {
            let why = "several ranks on GPUs come with the exchange over NCCL, which is not there yet";
            return Err(TrainError::setting("ranks", world.size(), why));
        }
        let tf32 = run.precision == Precision::Tf32;
        let options = cuda::Options { device: 0, seed: run.seed, deterministic: false, tf32 };
        Ok(Gpu { executor: Executor::new(program, options)?, in_flight: VecDeque::with_capacity(DEPTH + 1) })
    }
}

fn plan(which: Which) -> cuda::Which {
    match which {
        Which::Micro => cuda::Which::Micro,
        Which::Last => cuda::Which::Last,
        Which::Update => cuda::Which::Update,
        Which::Eval => cuda::Which::Eval,
    }
}

impl Device<f32> for Gpu {
    fn program(&self) -> &Program {
        self.executor.program()
    }

    fn rebind(&mut self, program: Program) -> Result<(), TrainError> {
        Ok(self.executor.rebind(program)?)
    }

    fn depth(&self) -> usize {
        DEPTH
    }

    fn load(&mut self, which: Which, batch: &LoadedBatch) -> Result<(), TrainError> {
        let which = plan(which);
        let finishes = self.executor.inputs(which).any(|name| name == "choices");
        if finishes {
            let comes = self.executor.inputs(which).any(|name| name == "pixels");
            if comes {
                self.executor.upload_u8(which, "pixels", &batch.pixels)?;
            }
            self.executor.upload_i32(which, "choices", &batch.choices)?;
        } else {
            self.executor.upload_f32(which, "images", &batch.images)?;
        }
        self.executor.upload_i32(which, "labels", &batch.labels)?;
        self.executor.upload_f32(which, "weights", &batch.weights)?;
        let mixes = self.executor.inputs(which).any(|name| name == "mix");
        if mixes {
            self.executor.upload_i32(which, "partners", &batch.partners)?;
            self.executor.upload_f32(which, "mix", &batch.mix)?;
        }
        Ok(())
    }

    fn keeps_batches(&self) -> bool {
        true
    }

    fn run(&mut self, which: Which, header: &Header) -> Result<(), TrainError> {
        Ok(self.executor.run(plan(which), header)?)
    }

    fn end_step(&mut self) -> Result<(), TrainError> {
        self.in_flight.push_back(self.executor.begin_readback()?);
        Ok(())
    }

    fn outcome(&mut self) -> Result<Outcome, TrainError> {
        let Some(ticket) = self.in_flight.pop_front() else {
            unreachable!("outcomes are asked for as often as steps are ended")
        };
        let numbers = self.executor.readback(ticket)?;
        Ok(Outcome {
            stats: numbers.stats.map(f64::from),
            control: numbers.control.map(f64::from),
            scale: numbers.scale.map(|scale| scale.map(f64::from)),
        })
    }

    fn run_checked(&mut self, which: Which, header: &Header) -> Result<Option<BadValue>, TrainError> {
        self.executor.clear_halt()?;
        Ok(self.executor.run_checked(plan(which), header)?)
    }

    fn profile(&mut self, header: &Header, repeats: usize) -> Result<Vec<ActionTime>, TrainError> {
        let mut times = self.executor.profile(cuda::Which::Last, header, repeats)?;
        times.extend(self.executor.profile(cuda::Which::Update, header, repeats)?);
        Ok(times)
    }

    fn memory(&self) -> Option<(usize, usize, usize)> {
        Some(self.executor.allocated())
    }

    fn output(&self, which: Which, name: &str) -> Result<Option<Cow<'_, [f32]>>, TrainError> {
        Ok(self.executor.read_f32(plan(which), name)?.map(Cow::Owned))
    }

    fn state(&self, id: StateId) -> Result<Cow<'_, [f32]>, TrainError> {
        let count = self.executor.program().states[id.index()].ty.shape.count();
        let mut values = vec![0.0; count];
        self.executor.state_f32(id, &mut values)?;
        Ok(Cow::Owned(values))
    }

    fn write_state(&mut self, id: StateId, values: &[f32]) -> Result<(), TrainError> {
        Ok(self.executor.set_state_f32(id, values)?)
    }

    fn write_bytes(&mut self, id: StateId, bytes: &[u8]) -> Result<(), TrainError> {
        Ok(self.executor.set_state_bytes(id, bytes)?)
    }

    fn reset_averages(&mut self) -> Result<(), TrainError> {
        Ok(self.executor.reset_averages()?)
    }

    fn take_account(&mut self) -> Account {
        // What can't be read is counted as idle, and the error comes with the next run.
        let [micro, last, update, evaluation] = self.executor.take_gpu_seconds().unwrap_or_default();
        Account { compute: micro + last, update, evaluation, ..Account::default() }
    }

    fn exchanges(&self) -> &[ExchangeTime] {
        &[]
    }

    fn set_timing(&mut self, _on: bool) {}

    fn set_tracing(&mut self, _on: bool) {}

    fn take_trace(&mut self, _into: &mut Vec<Event>) {}

    fn training_times(&self) -> Vec<StepTime> {
        Vec::new()
    }

    fn reset_times(&mut self) {}
}
