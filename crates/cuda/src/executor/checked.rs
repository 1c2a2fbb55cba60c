//! A run that checks every value and names the first that is not finite. Far too slow to train with; made for the step
//! that has just failed.

use super::{Executor, Which};
use crate::action::Address;
use crate::error::CudaError;
use graph::bad::{BadValue, Origin, is_looked_at, states_read};
use graph::plan::{PlanValue, Step};
use graph::{Header, State, Type};

impl Executor {
    /// Runs a plan like [`run`](Executor::run), and returns the first value that is not finite: an input or state to begin with, then the
    /// results of each step. It stops there, unless the plan has collectives, which other ranks wait for.
    pub fn run_checked(&mut self, which: Which, header: &Header) -> Result<Option<BadValue>, CudaError> {
        self.begin(which, header)?;
        self.runs.end(which, &self.streams)?;
        // What earlier lists have left under way is there, too.
        self.synchronise()?;
        let addresses = self.plans.list(which)?.addresses.clone();
        let goes_on = self.plan(which).collectives().next().is_some();
        let mut first = self.bad_before(which, &addresses)?;
        let actions = self.plans.list(which)?.actions.len();
        for index in 0..actions {
            if first.is_some() && !goes_on {
                break;
            }
            let list = self.plans.list(which)?;
            let action = &list.actions[index];
            list.start_alone(index, &self.libraries, &self.streams)?;
            if first.is_some() || action.results.is_empty() {
                continue;
            }
            let doing = format!("computing {} of {}", action.what, action.layer);
            let results = action.results.clone();
            self.streams.synchronise(&doing)?;
            first = self.bad_among(which, &results, &addresses)?;
        }
        Ok(first)
    }

    fn bad_among(
        &self,
        which: Which,
        results: &[usize],
        addresses: &[Address],
    ) -> Result<Option<BadValue>, CudaError> {
        let plan = self.plan(which);
        for value in results {
            let Some(maker) = plan.steps.iter().find(|step| step.outputs.contains(value)) else { continue };
            let result = maker.outputs.iter().position(|output| output == value).unwrap_or(0);
            if !is_looked_at(plan, maker, result) {
                continue;
            }
            let Step { layer, op, phase, .. } = maker;
            let origin = || Origin::Step { layer: layer.clone(), op: op.name(), phase: *phase };
            let PlanValue { name, ty, .. } = &plan.values[*value];
            if let Some(bad) = self.bad((name, ty), addresses[*value], origin)? {
                return Ok(Some(bad));
            }
        }
        Ok(None)
    }

    fn bad_before(&self, which: Which, addresses: &[Address]) -> Result<Option<BadValue>, CudaError> {
        let plan = self.plan(which);
        for value in &plan.inputs {
            let PlanValue { name, ty, .. } = &plan.values[*value];
            if let Some(bad) = self.bad((name, ty), addresses[*value], || Origin::Input)? {
                return Ok(Some(bad));
            }
        }
        for id in states_read(plan) {
            let State { name, ty, role, .. } = &plan.states[id.index()];
            let address = self.plans.states[id.index()];
            let held = self.held(id);
            let ty = &Type::new(ty.dtype, [held.len()]);
            if let Some(bad) = self.bad((name, ty), address, || Origin::State(*role))? {
                return Ok(Some(BadValue { index: held.start + bad.index, ..bad }));
            }
        }
        Ok(None)
    }

    fn bad(
        &self,
        (name, ty): (&str, &Type),
        address: Address,
        origin: impl Fn() -> Origin,
    ) -> Result<Option<BadValue>, CudaError> {
        if !ty.dtype.is_float() {
            return Ok(None);
        }
        let elements = self.fetch(address, ty)?;
        let Some(index) = elements.iter().position(|x| !x.is_finite()) else { return Ok(None) };
        let (name, found) = (name.to_string(), f64::from(elements[index]));
        Ok(Some(BadValue { origin: origin(), value: name, index, found }))
    }
}
