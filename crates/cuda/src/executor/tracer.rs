//! Start and end of each action of a run, by events before and after it in its lane's stream.
//!
//! A traced run is not a graph: its actions are enqueued one by one, so that small ones may wait for the host.

use super::list::Mark;
use super::profile::work;
use super::{Executor, Which};
use crate::driver::{Context, Event, Stream};
use crate::error::CudaError;
use graph::Lane;
use graph::graph::Phase;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// One action of a run.
#[derive(Clone, Debug)]
pub struct Traced {
    pub which: Which,
    pub op: String,
    pub layer: String,
    pub phase: Phase,
    /// A kernel's name or a matmul's shape.
    pub what: String,
    pub lane: Lane,
    pub start: Instant,
    pub end: Instant,
    pub flops: f64,
    /// Least bytes that must be moved.
    pub bytes: f64,
}

impl Traced {
    pub fn seconds(&self) -> f64 {
        self.end.saturating_duration_since(self.start).as_secs_f64()
    }
}

/// Events before and after each action of a list.
pub(super) struct ActionEvents(Vec<[Event; 2]>);

impl Mark for ActionEvents {
    fn before(&self, action: usize, stream: &Stream, _: bool) -> Result<(), CudaError> {
        self.0[action][0].record(stream)
    }

    fn after(&self, action: usize, stream: &Stream) -> Result<(), CudaError> {
        self.0[action][1].record(stream)
    }
}

/// Runs that were traced, until they are over.
pub(super) struct Tracer {
    pub on: bool,
    /// One moment by the host's and the GPU's clock.
    origin: Event,
    at: Instant,
    runs: VecDeque<(Which, ActionEvents)>,
}

impl Tracer {
    fn new(context: &Arc<Context>, stream: &Stream) -> Result<Self, CudaError> {
        let origin = Event::timed(context)?;
        origin.record(stream)?;
        origin.synchronise(|| "comparing clocks".into())?;
        Ok(Tracer { on: true, origin, at: Instant::now(), runs: VecDeque::new() })
    }

    pub fn marks(context: &Arc<Context>, actions: usize) -> Result<ActionEvents, CudaError> {
        let pair = |_| Ok([Event::timed(context)?, Event::timed(context)?]);
        Ok(ActionEvents((0..actions).map(pair).collect::<Result<_, CudaError>>()?))
    }

    pub fn keep(&mut self, which: Which, marks: ActionEvents) {
        self.runs.push_back((which, marks));
    }

    /// The oldest run, if it is over.
    fn take(&mut self) -> Result<Option<(Which, ActionEvents)>, CudaError> {
        let Some((_, marks)) = self.runs.front() else { return Ok(None) };
        for [_, end] in &marks.0 {
            if !end.is_done()? {
                return Ok(None);
            }
        }
        Ok(self.runs.pop_front())
    }

    fn moment(&self, event: &Event) -> Result<Instant, CudaError> {
        let seconds = event.seconds_since(&self.origin)?;
        Ok(self.at + Duration::from_secs_f64(seconds.max(0.0)))
    }
}

impl Executor {
    /// Sets whether runs are traced from now on. Waits for the GPU at the first call.
    pub fn set_tracing(&mut self, on: bool) -> Result<(), CudaError> {
        match &mut self.tracer {
            Some(tracer) => tracer.on = on,
            None if on => {
                self.context.enter()?;
                self.tracer = Some(Tracer::new(&self.context, self.streams.compute())?);
            }
            None => {}
        }
        Ok(())
    }

    /// Actions of each traced run that ended since the last call.
    pub fn take_traced(&mut self) -> Result<Vec<Vec<Traced>>, CudaError> {
        let mut runs = Vec::new();
        let Some(tracer) = &mut self.tracer else { return Ok(runs) };
        while let Some((which, marks)) = tracer.take()? {
            let mut traced = Vec::with_capacity(marks.0.len());
            let plan = self.program.plan(which);
            let mut before = usize::MAX;
            for (action, [start, end]) in self.plans.list(which)?.actions.iter().zip(&marks.0) {
                let is_first = std::mem::replace(&mut before, action.step) != action.step;
                let (flops, bytes) = work(plan, &action.work, action.first..action.step + 1, is_first);
                let step = &plan.steps[action.step];
                let (start, end) = (tracer.moment(start)?, tracer.moment(end)?);
                let (op, layer, phase) = (step.op.name(), step.layer.clone(), step.phase);
                let (what, lane) = (action.what.clone(), action.lane);
                traced.push(Traced { which, op, layer, phase, what, lane, start, end, flops, bytes });
            }
            runs.push(traced);
        }
        Ok(runs)
    }
}
