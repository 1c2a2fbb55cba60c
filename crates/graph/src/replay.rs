//! What a plan comes to: a timeline from how long each of its steps takes.
//!
//! Nothing is measured here. Lanes run their steps in order, a step starts when those it waits for are done, and the plan ends
//! with its last step: given a run's own durations, the timeline is that run's, and given others (a slower link, a faster
//! device) it is what would happen.

use crate::op::Lane;
use crate::plan::Plan;

/// When a step starts and ends, in seconds from the plan's start.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Span {
    /// When it starts.
    pub start: f64,
    /// When it is done.
    pub end: f64,
}

/// When every step of a plan runs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Timeline {
    /// In the order of the plan's steps.
    pub spans: Vec<Span>,
    lanes: Vec<Lane>,
}

/// Replays a plan whose steps, collectives among them, take so many seconds each. Steps without a duration take none.
pub fn replay(plan: &Plan, seconds: &[f64]) -> Timeline {
    let mut ends = [0.0f64; Lane::ALL.len()];
    // Where the last step that ran alone, or the first of those beside each other, started on each lane.
    let mut starts = [0.0f64; Lane::ALL.len()];
    let mut timeline = Timeline::default();
    for (index, step) in plan.steps.iter().enumerate() {
        let lane = Lane::ALL.iter().position(|lane| *lane == step.lane).unwrap_or(0);
        let beside = plan.beside(index);
        let needs = step.waits.iter().map(|wait| timeline.spans[*wait].end);
        let start = needs.fold(if beside { starts[lane] } else { ends[lane] }, f64::max);
        let end = start + seconds.get(index).copied().unwrap_or(0.0);
        (starts[lane], ends[lane]) = (start, ends[lane].max(end));
        timeline.spans.push(Span { start, end });
        timeline.lanes.push(step.lane);
    }
    timeline
}

impl Timeline {
    /// When the plan is done.
    pub fn seconds(&self) -> f64 {
        self.spans.iter().map(|span| span.end).fold(0.0, f64::max)
    }

    /// Seconds in which a lane has a step to run.
    pub fn busy(&self, lane: Lane) -> f64 {
        let mut until = 0.0f64;
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

    /// Two matmuls' worth of backward, each with a bucket behind it, and an update that needs both.
    const PLAN: &str = "plan last batch=1 height=1 width=1 mesh=data:2 arena=4096
input x f32[8] @0
0 compute a f32[8] @128 = gelu(x) ; backward a
1 comm a.all f32[8] @256 = all_reduce(a) reduction=\"sum\" group=\"data:2\" wait=0 ; exchange a
2 compute b f32[8] @384 = gelu(x) ; backward b
3 comm b.all f32[8] @512 = all_reduce(b) reduction=\"sum\" group=\"data:2\" wait=2 ; exchange b
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
