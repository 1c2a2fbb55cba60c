//! Timeline of a plan from the duration of each of its steps.
//!
//! Nothing is measured here. Lanes run their steps in order, a step starts when those it waits for are done, and the plan ends
//! with its last step: given a run's own durations, the timeline is that run's, and given others (a slower link, a faster
//! device) it is what would happen.

use crate::op::{Lane, StateId};
use crate::plan::{Place, Plan, Step};

/// Time span of a step, in seconds from the plan's start.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Span {
    /// Start.
    pub start: f64,
    /// End.
    pub end: f64,
}

/// Time spans of a plan's steps.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Timeline {
    /// Spans, in the order of the plan's steps.
    pub spans: Vec<Span>,
    lanes: Vec<Lane>,
    /// Flags of steps that may still run when the plan has ended.
    left: Vec<bool>,
    began: f64,
}

/// Replays a plan whose steps, collectives among them, take so many seconds each. Steps without a duration take none.
pub fn replay(plan: &Plan, seconds: &[f64]) -> Timeline {
    replay_all(&[(plan, seconds)]).pop().unwrap_or_default()
}

/// Replays plans one after the other, on one clock. A plan starts when the one before has ended, but for what that has left under
/// way: its lane goes on, and steps that touch what it does wait for it.
pub fn replay_all(plans: &[(&Plan, &[f64])]) -> Vec<Timeline> {
    let mut ends = [0.0f64; Lane::ALL.len()];
    // When what was left is done, by the states that it works on.
    let mut left: Vec<(&Plan, &Step, f64)> = vec![];
    let mut timelines = vec![];
    for (plan, seconds) in plans {
        let began = timelines.last().map_or(0.0, Timeline::end);
        let timeline = one(plan, seconds, began, &mut ends, &left);
        let steps = plan.steps.iter().zip(&timeline.spans);
        left.extend(steps.filter(|(step, _)| step.left).map(|(step, span)| (*plan, step, span.end)));
        timelines.push(timeline);
    }
    timelines
}

/// Checks whether a step reads or writes a state.
fn works_on(plan: &Plan, step: &Step, state: StateId) -> bool {
    let values = step.outputs.iter().chain(&step.inputs);
    values.into_iter().any(|value| plan.values[*value].place == Place::State(state))
}

/// Replays a plan that begins then, on lanes that are free by `ends`.
fn one(
    plan: &Plan,
    seconds: &[f64],
    began: f64,
    ends: &mut [f64; Lane::ALL.len()],
    left: &[(&Plan, &Step, f64)],
) -> Timeline {
    ends.iter_mut().for_each(|end| *end = end.max(began));
    // Where the last step that ran alone, or the first of those beside each other, started on each lane.
    let mut starts = *ends;
    let mut timeline = Timeline { began, ..Timeline::default() };
    for (index, step) in plan.steps.iter().enumerate() {
        let lane = Lane::ALL.iter().position(|lane| *lane == step.lane).unwrap_or(0);
        let beside = plan.beside(index);
        let needs = step.waits.iter().map(|wait| timeline.spans[*wait].end);
        let names = |(plan, of, _): &&(&Plan, &Step, f64)| step.after.iter().any(|s| works_on(plan, of, *s));
        let needs = needs.chain(left.iter().filter(names).map(|(_, _, end)| *end));
        let start = needs.fold(if beside { starts[lane] } else { ends[lane] }, f64::max);
        let end = start + seconds.get(index).copied().unwrap_or(0.0);
        (starts[lane], ends[lane]) = (start, ends[lane].max(end));
        timeline.spans.push(Span { start, end });
        timeline.lanes.push(step.lane);
        timeline.left.push(step.left);
    }
    timeline
}

impl Timeline {
    /// End of the plan, on the clock of all that were replayed.
    pub fn end(&self) -> f64 {
        let spans = self.spans.iter().zip(&self.left).filter(|(_, left)| !**left);
        spans.map(|(span, _)| span.end).fold(self.began, f64::max)
    }

    /// Duration of the plan.
    pub fn seconds(&self) -> f64 {
        self.end() - self.began
    }

    /// Seconds in which a lane has a step to run.
    pub fn busy(&self, lane: Lane) -> f64 {
        let mut until = self.began;
        let mut busy = 0.0;
        for (span, _) in self.spans.iter().zip(&self.lanes).filter(|(_, of)| **of == lane) {
            busy += (span.end - span.start.max(until)).max(0.0);
            until = until.max(span.end);
        }
        busy
    }

    /// Seconds in which the compute lane runs nothing: what communication and copies cost a step.
    pub fn exposed(&self) -> f64 {
        self.seconds() - self.busy(Lane::Compute)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::program::Program;

    /// Two matmuls' worth of backward, each with a bucket behind it, and an update that needs both.
    const PLAN: &str = "plan last batch=1 height=1 width=1 mesh=data:2 arena=4096
input x f32[8] @0
0 compute a f32[8] @128 = gelu(x) ; backward a
1 comm a.all f32[8] @256 = all_reduce(a) reduction=\"sum\" group=\"data:2\" wait=0 ; communication a
2 compute b f32[8] @384 = gelu(x) ; backward b
3 comm b.all f32[8] @512 = all_reduce(b) reduction=\"sum\" group=\"data:2\" wait=2 ; communication b
4 compute c f32[8] @640 = add(a.all, b.all) wait=1,3 ; update c
output c
";

    #[test]
    fn lanes_run_beside_each_other_and_wait() {
        let plan: Plan = PLAN.parse().unwrap();
        plan.check().unwrap();
        // Communication hides behind b but for its last bucket.
        let timeline = replay(&plan, &[1.0, 1.5, 2.0, 0.5, 1.0]);
        let starts: Vec<f64> = timeline.spans.iter().map(|span| span.start).collect();
        assert_eq!(starts, [0.0, 1.0, 1.0, 3.0, 3.5]);
        assert_eq!((timeline.seconds(), timeline.busy(Lane::Comm), timeline.exposed()), (4.5, 2.0, 0.5));
        // A slow link: the second bucket waits for the first.
        let slow = replay(&plan, &[1.0, 4.0, 2.0, 4.0, 1.0]);
        assert_eq!((slow.spans[3].start, slow.seconds(), slow.exposed()), (5.0, 10.0, 6.0));
        assert_eq!(replay(&plan, &[]).seconds(), 0.0);
    }

    /// Steps left running hide behind the next plan, up to the step that needs them.
    #[test]
    fn plans_go_on_beside_what_was_left() {
        let states = "state w f32[8] \"flat\" own@0\nstate s f32[4] \"master\" own@128\n";
        let update = format!(
            "plan update batch=1 height=1 width=1 mesh=data:2 arena=0\n{states}\
            0 comm $w = all_gather($s) group=\"data:2\" left ; update w\n"
        );
        let last = format!(
            "plan last batch=1 height=1 width=1 mesh=data:2 arena=4096\n{states}input x f32[8] @0\n\
            0 compute a f32[8] @128 = gelu(x) ; forward a\n\
            1 compute b f32[8] @256 = add(a, $w) ; forward b\noutput b\n"
        );
        let update: Plan = update.parse().unwrap();
        let mut plans = [update, last.parse().unwrap()];
        let [update, last] = &mut plans;
        crate::passes::across(&mut [update, last]);
        assert_eq!((last.steps[0].after.len(), last.steps[1].after.clone()), (0, vec![StateId(0)]));
        let program = Program {
            update: plans[0].clone(),
            last: plans[1].clone(),
            states: plans[0].states.clone(),
            ..Program::default()
        };
        program.check().unwrap();
        let timelines = replay_all(&[(&plans[0], &[3.0]), (&plans[1], &[2.0, 1.0])]);
        assert_eq!((timelines[0].seconds(), timelines[0].spans[0].end), (0.0, 3.0));
        assert_eq!(
            (timelines[1].spans[0].start, timelines[1].spans[1].start, timelines[1].end()),
            (0.0, 3.0, 4.0)
        );
        // Forgotten, it is an error; so is a step that is left and computes, or works in the arena.
        let mut forgot = program.clone();
        forgot.last.steps[1].after.clear();
        let why = "step 1 (add, b): touches what all_gather of w may be working on still";
        assert_eq!(forgot.check().unwrap_err().to_string(), why);
        plans[1].steps[0].left = true;
        let why = "step 0 (gelu, a): is left when the plan has ended, but computes";
        assert_eq!(plans[1].check().unwrap_err().to_string(), why);
        let arena: Plan =
            "plan update batch=1 height=1 width=1 mesh=data:2 arena=128\nstate w f32[8] \"flat\" own@0\n\
            input s f32[4] @0\n0 comm $w = all_gather(s) group=\"data:2\" left ; update w\n"
                .parse()
                .unwrap();
        let why = "step 0 (all_gather, w): is left when the plan has ended, but works in the arena, which the next plan has then";
        assert_eq!(arena.check().unwrap_err().to_string(), why);
        assert_eq!(arena.to_string().parse::<Plan>().unwrap(), arena);
    }

    #[test]
    fn weight_gradients_beside_each_other_start_together() {
        let text = "plan micro batch=1 height=1 width=1 arena=65536
input x f32[8,4] @0
0 compute a f32[4,4] @1024 = linear_grad_w(x, x) shape=[4,4] ; backward a
1 compute b f32[4,4] @2048 = linear_grad_w(x, x) shape=[4,4] joined ; backward b
2 compute c f32[4,4] @3072 = add(a, b) ; backward c
output c
";
        let timeline = replay(&text.parse().unwrap(), &[2.0, 3.0, 1.0]);
        assert_eq!(timeline.spans[1].start, 0.0);
        assert_eq!((timeline.seconds(), timeline.busy(Lane::Compute)), (4.0, 4.0));
    }
}
