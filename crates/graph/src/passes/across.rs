//! Waits across plans: a step of a later plan waits for what an earlier one has left under way, just where it touches the same bytes.
//! All else starts when the plan before has ended.

use crate::op::StateId;
use crate::plan::{Place, Plan, Step};
use crate::touched::Touched;

/// Steps of a plan that are still running when it ends.
struct Unfinished {
    /// A state that the step works on, by which others name it.
    state: StateId,
    touched: Touched,
    lane: crate::op::Lane,
}

/// Steps that plans leave, in order.
fn left(plans: &[&mut Plan]) -> Vec<Unfinished> {
    let mut all = vec![];
    for plan in plans {
        let touched = plan.touched();
        for (step, touched) in plan.steps.iter().zip(touched).filter(|(step, _)| step.left) {
            all.extend(state_of(plan, step).map(|state| Unfinished { state, touched, lane: step.lane }));
        }
    }
    all
}

/// The state that a step writes, or else one that it reads.
fn state_of(plan: &Plan, step: &Step) -> Option<StateId> {
    step.outputs.iter().chain(&step.inputs).find_map(|value| match plan.values[*value].place {
        Place::State(state) => Some(state),
        Place::Arena(_) => None,
    })
}

/// Lets steps wait for what any of the plans leaves, over one table of states. In a lane, the first that touches it waits, and those behind it
/// needn't; steps of the lane on which it is left come after it anyway.
pub fn across(plans: &mut [&mut Plan]) {
    let left = left(plans);
    for plan in plans.iter_mut().filter(|_| !left.is_empty()) {
        let touched = plan.touched();
        let clocks = plan.clocks();
        for of in &left {
            let mut waiting: Vec<usize> = vec![];
            for (step, touched) in touched.iter().enumerate() {
                let known =
                    waiting.iter().any(|before| *before == step || clocks.happens_before(*before, step));
                let in_order = plan.steps[step].lane == of.lane;
                if !known && !in_order && touched.conflicts(&of.touched) {
                    // Of steps that one launch makes, the first waits.
                    let first = plan.launch_of(step).start;
                    if !plan.steps[first].after.contains(&of.state) {
                        plan.steps[first].after.push(of.state);
                    }
                    waiting.extend([first, step]);
                }
            }
        }
    }
}
