//! A run that looks at every value, to name the first that is not finite. Far too slow to train with; made for the step
//! that has just failed.

use super::{Executor, Which};
use crate::error::CpuError;
use crate::kernels::Float;
use graph::bad::{BadValue, Origin, is_looked_at, states_read};
use graph::{Header, StateId};

impl<T: Float> Executor<T> {
    /// Runs a plan like [`run`](Executor::run), but stops at the first value that is not finite: an input or state to
    /// begin with, then the results of each step. A plan with collectives goes on to its end all the same, since the other
    /// ranks take part in them.
    pub fn run_checked(&mut self, which: Which, header: &Header) -> Result<Option<BadValue>, CpuError> {
        self.begin(which)?;
        let goes_on = !self.plans[which as usize].calls.is_empty();
        let mut first = self.bad_before(which);
        for index in 0..self.plans[which as usize].steps.len() {
            if first.is_some() && !goes_on {
                break;
            }
            self.run_step(which, index, header)?;
            if first.is_none() {
                first = self.bad_after(which, index);
            }
        }
        Ok(first)
    }

    fn bad_after(&self, which: Which, index: usize) -> Option<BadValue> {
        let plan = self.plan(which);
        let step = &plan.steps[index];
        let origin = || Origin::Step { layer: step.layer.clone(), op: step.op.name(), phase: step.phase };
        let results = (0..step.outputs.len()).filter(|result| is_looked_at(plan, step, *result));
        results.map(|result| step.outputs[result]).find_map(|value| self.bad_value(which, value, origin))
    }

    fn bad_before(&self, which: Which) -> Option<BadValue> {
        let plan = self.plan(which);
        let input = |value: &usize| self.bad_value(which, *value, || Origin::Input);
        let state = |id: StateId| {
            let graph::State { name, role, .. } = &plan.states[id.index()];
            let found = bad(name, &self.state(id), || Origin::State(*role));
            let first = self.held(id).start;
            found.map(|bad| BadValue { index: first + bad.index, ..bad })
        };
        plan.inputs.iter().find_map(input).or_else(|| states_read(plan).into_iter().find_map(state))
    }

    fn bad_value(&self, which: Which, value: usize, origin: impl Fn() -> Origin) -> Option<BadValue> {
        let value = &self.plan(which).values[value];
        bad(&value.name, &self.floats(value)?, origin)
    }
}

fn bad<T: Float>(name: &str, elements: &[T], origin: impl Fn() -> Origin) -> Option<BadValue> {
    let index = elements.iter().position(|x| !x.to_f64().is_finite())?;
    Some(BadValue { origin: origin(), value: name.to_string(), index, found: elements[index].to_f64() })
}
