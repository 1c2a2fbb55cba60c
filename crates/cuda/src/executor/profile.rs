//! Time of each action of a plan.

use super::list::ReadyWork;
use super::{Executor, Which};
use crate::action::Matrix;
use crate::driver::{Block, Event};
use crate::error::CudaError;
use crate::matmul::sizes;
use graph::Header;
use graph::plan::Plan;
use graph::run::KernelTime;

/// Work of the GPU before a run: so many times it zeroes so many bytes, about a millisecond. Otherwise it would wait for the host, whose
/// calls of libraries take longer than short kernels, and the marks would show that.
const AHEAD: (usize, usize) = (48, 64 << 20);

impl Executor {
    /// Runs a plan `repeats` times, one action after the other in one stream with a mark between, and returns the shortest time
    /// of each. States change as they do in so many runs.
    pub fn profile(
        &mut self,
        which: Which,
        header: &Header,
        repeats: usize,
    ) -> Result<Vec<KernelTime>, CudaError> {
        self.prepare_plan(which)?;
        let actions = self.plans.list(which)?.actions.len();
        let marks: Vec<Event> =
            (0..actions + 1).map(|_| Event::timed(&self.context)).collect::<Result<_, _>>()?;
        let mut best = vec![f64::INFINITY; actions];
        let zeroed = Block::new(&self.context, AHEAD.1, "profiling")?;
        for _ in 0..repeats.max(1) {
            self.begin(which, header)?;
            // What earlier lists have left under way would wait for the host.
            self.synchronise()?;
            let list = self.plans.list(which)?;
            let stream = self.streams.compute();
            (0..AHEAD.0).try_for_each(|_| stream.zero(zeroed.address, zeroed.bytes))?;
            marks[0].record(stream)?;
            for (index, mark) in marks[1..].iter().enumerate() {
                list.start_alone(index, &self.libraries, &self.streams)?;
                mark.record(stream)?;
            }
            self.runs.end(which, &self.streams)?;
            self.synchronise()?;
            for (best, pair) in best.iter_mut().zip(marks.windows(2)) {
                *best = best.min(pair[1].seconds_since(&pair[0])?);
            }
        }
        let plan = self.program.plan(which);
        let list = self.plans.list(which)?;
        let mut before = usize::MAX;
        let mut times = Vec::with_capacity(actions);
        for (action, seconds) in list.actions.iter().zip(best) {
            let is_first = std::mem::replace(&mut before, action.step) != action.step;
            let (flops, bytes) = work(plan, &action.work, action.first..action.step + 1, is_first);
            let step = &plan.steps[action.step];
            times.push(KernelTime {
                step: action.step,
                op: step.op.name(),
                layer: step.layer.clone(),
                phase: step.phase,
                what: action.what.clone(),
                seconds,
                flops,
                bytes,
            });
        }
        Ok(times)
    }

    /// Seconds of the actions of one step, by their numbers in the plan's profile: `count` times in a row as one graph, so that short kernels
    /// don't wait for the host, measured `runs` times. Counters that one of them sets for the next are set every time.
    pub fn repeat(
        &mut self,
        which: Which,
        header: &Header,
        (actions, count, runs): (std::ops::Range<usize>, usize, usize),
    ) -> Result<Vec<f64>, CudaError> {
        self.prepare_plan(which)?;
        let marks = [Event::timed(&self.context)?, Event::timed(&self.context)?];
        let mut times = Vec::with_capacity(runs);
        self.begin(which, header)?;
        let list = self.plans.list(which)?;
        let stream = self.streams.compute();
        let one = |index| list.start_alone(index, &self.libraries, &self.streams);
        let start = || (0..count).try_for_each(|_| actions.clone().try_for_each(one));
        let graph = stream.capture(start, "a repeated action")?;
        stream.launch(&graph, "a repeated action")?;
        for _ in 0..runs {
            marks[0].record(stream)?;
            stream.launch(&graph, "a repeated action")?;
            marks[1].record(stream)?;
            stream.synchronise(|| "repeating an action".into())?;
            times.push(marks[1].seconds_since(&marks[0])? / count as f64);
        }
        self.runs.end(which, &self.streams)?;
        self.synchronise()?;
        Ok(times)
    }
}

/// FLOPs and bytes of an action: a matmul's own; otherwise those of its steps, counted with the first action of them, since a plan
/// doesn't know how steps are cut.
pub(super) fn work(
    plan: &Plan,
    work: &ReadyWork,
    steps: std::ops::Range<usize>,
    is_first: bool,
) -> (f64, f64) {
    match work {
        ReadyWork::Matmul(matmul, _) => {
            let (m, n, k) = sizes(matmul);
            let size = |matrix: &Matrix| (matrix.rows * matrix.columns * matrix.dtype.bytes()) as f64;
            let written = size(&matmul.result) * if matmul.accumulate { 2.0 } else { 1.0 };
            (2.0 * m as f64 * n as f64 * k as f64, size(&matmul.left) + size(&matmul.right) + written)
        }
        ReadyWork::Copy { bytes, .. } => (0.0, 2.0 * *bytes as f64),
        ReadyWork::Zero { bytes, .. } => (0.0, *bytes as f64),
        ReadyWork::Launch(_) | ReadyWork::Convolution(..) | ReadyWork::Attention(..) if is_first => {
            let costs = plan.steps[steps].iter().map(|step| plan.cost_of(step));
            costs.fold((0.0, 0.0), |sum, cost| (sum.0 + cost.flops, sum.1 + cost.bytes))
        }
        ReadyWork::Launch(_)
        | ReadyWork::Convolution(..)
        | ReadyWork::Attention(..)
        | ReadyWork::Collective(_) => (0.0, 0.0),
    }
}
