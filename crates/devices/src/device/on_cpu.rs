//! The CPU as a device. Everything is done when a run returns, and states lie in the host's memory.

use super::{
    Account, BadValue, Benchmarks, CollectiveTime, Event, Hardware, Inputs, Outcome, Plans, States, StepTime,
    Times, Which, planned,
};
use crate::error::DeviceError;
use crate::real::{self, Real};
use cpu::Executor;
use graph::{Header, Program, Role, StateId};
use std::borrow::Cow;

/// The first numbers of a state or output.
fn numbers<T: Real, const N: usize>(values: &[T]) -> [f64; N] {
    std::array::from_fn(|i| values.get(i).map_or(0.0, |x| x.to_f64()))
}

impl<T: Real> Plans for Executor<T> {
    fn program(&self) -> &Program {
        Executor::program(self)
    }

    fn rebind(&mut self, program: Program) -> Result<(), DeviceError> {
        Ok(Executor::rebind(self, program)?)
    }

    fn load(&mut self, which: Which, loaded: &Inputs<'_>) -> Result<(), DeviceError> {
        // Plans that were made for a GPU begin with bytes, or with none where a set lies there.
        if let Some(choices) = self.ints(which, "choices") {
            choices.copy_from_slice(loaded.choices);
            if let Some(pixels) = self.bytes(which, "pixels") {
                pixels.copy_from_slice(loaded.pixels);
            }
        } else {
            real::copy(loaded.images, planned(self.input(which, "images")));
        }
        planned(self.ints(which, "labels")).copy_from_slice(loaded.labels);
        real::copy(loaded.weights, planned(self.input(which, "weights")));
        if let Some(partners) = self.ints(which, "partners") {
            partners.copy_from_slice(loaded.partners);
        }
        if let Some(mix) = self.input(which, "mix") {
            real::copy(loaded.mix, mix);
        }
        Ok(())
    }

    fn run(&mut self, which: Which, header: &Header) -> Result<(), DeviceError> {
        Ok(Executor::run(self, which, header)?)
    }

    fn end_step(&mut self) -> Result<(), DeviceError> {
        Ok(())
    }

    fn outcome(&mut self) -> Result<Outcome, DeviceError> {
        let stats = numbers(&Executor::state(self, planned(Executor::find_state(self, "stats"))));
        let control = numbers(&planned(Executor::output(self, Which::Update, "control")));
        let scale =
            Executor::program(self).states.iter().position(|s| matches!(s.role, Role::LossScale { .. }));
        let scale = scale.map(|index| numbers(&Executor::state(self, StateId(index as u32))));
        Ok(Outcome { stats, control, scale })
    }

    fn run_checked(&mut self, which: Which, header: &Header) -> Result<Option<BadValue>, DeviceError> {
        Ok(Executor::run_checked(self, which, header)?)
    }
}

impl<T: Real> States<T> for Executor<T> {
    fn output(&self, which: Which, name: &str) -> Result<Option<Cow<'_, [T]>>, DeviceError> {
        Ok(Executor::output(self, which, name))
    }

    fn state(&self, id: StateId) -> Result<Cow<'_, [T]>, DeviceError> {
        Ok(Executor::state(self, id))
    }

    fn write_state(&mut self, id: StateId, values: &[T]) -> Result<(), DeviceError> {
        Executor::write_state(self, id, values);
        Ok(())
    }

    fn write_bytes(&mut self, id: StateId, bytes: &[u8]) -> Result<(), DeviceError> {
        Executor::write_bytes(self, id, bytes);
        Ok(())
    }

    fn reset_averages(&mut self) -> Result<(), DeviceError> {
        Executor::reset_averages(self);
        Ok(())
    }
}

impl<T: Real> Times for Executor<T> {
    fn take_account(&mut self) -> Account {
        Executor::take_account(self)
    }

    fn collectives(&self) -> &[CollectiveTime] {
        Executor::collectives(self)
    }

    fn forget_time(&mut self) {
        Executor::forget_time(self);
    }

    fn finish_collectives(&mut self) -> Result<&[CollectiveTime], DeviceError> {
        Ok(Executor::finish_collectives(self)?)
    }

    fn set_timing(&mut self, on: bool) {
        Executor::set_timing(self, on);
    }

    fn set_tracing(&mut self, on: bool) {
        Executor::set_tracing(self, on);
    }

    fn take_trace(&mut self, into: &mut Vec<Event>) {
        Executor::take_trace(self, into);
    }

    fn training_times(&self) -> Vec<StepTime> {
        Executor::training_times(self)
    }

    fn reset_times(&mut self) {
        Executor::reset_times(self);
    }
}

impl<T: Real> Benchmarks for Executor<T> {
    fn run_matmuls(&mut self, which: Which, header: &Header) -> Option<f64> {
        Some(Executor::run_matmuls(self, which, header))
    }
}

impl<T: Real> Hardware for Executor<T> {
    fn name(&self) -> String {
        "the CPU".to_string()
    }

    fn lose(&mut self) -> Result<(), DeviceError> {
        Err(DeviceError::Fault("gpu, on the CPU,".to_string()))
    }

    fn spin(&mut self) -> Result<(), DeviceError> {
        Err(DeviceError::Fault("spin, on the CPU,".to_string()))
    }

    fn set_slowdown(&mut self, factor: f64) {
        Executor::set_slowdown(self, factor);
    }
}
