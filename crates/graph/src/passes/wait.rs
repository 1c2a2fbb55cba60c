//! Says what each step waits for, from the bytes that steps touch.
//!
//! Memory was given out for the order in which steps are issued: to be placed beside each other costs no memory that way, and a step
//! of another lane waits just where it would read or write what another has not finished with.

use crate::clocks::Clocks;
use crate::op::Lane;
use crate::plan::Plan;

/// Sets the waits of a plan whose values have their places.
pub fn wait(plan: &mut Plan) {
    let touched = plan.touched();
    let mut clocks = Clocks::default();
    let mut start = 0;
    while start < plan.steps.len() {
        // Steps that are launched together wait together, and are waited for together.
        let launch = plan.launch(start);
        let lane = plan.steps[start].lane;
        let mut needs: Vec<usize> = Vec::new();
        for before in (0..start).rev().filter(|before| plan.steps[*before].lane != lane) {
            let conflicts = |step: usize| touched[step].conflicts(&touched[before]);
            if !clocks.knows(lane, before) && launch.clone().any(conflicts) {
                needs.push(plan.launch_of(before).end - 1);
            }
        }
        // Where a collective stands in the program is when it may leave, on every executor: without overlap, that is the end.
        if lane == Lane::Comm {
            for of in [Lane::Compute, Lane::Side] {
                needs.extend((0..start).rev().find(|before| plan.steps[*before].lane == of));
            }
        }
        needs.sort_unstable();
        needs.dedup();
        for step in launch.clone() {
            let beside = plan.beside(step);
            plan.steps[step].waits = clocks.push(lane, &needs, beside);
            needs.clear();
        }
        start = launch.end;
    }
}
