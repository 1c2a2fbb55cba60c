//! The captured graph of a plan, and the time of each step in it.

use super::list::{List, Mark};
use super::{Executor, Which};
use crate::driver::{Context, Event, Node, Stream};
use crate::error::CudaError;
use graph::{Header, Lane};
use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;

/// An action of a captured plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Captured {
    /// First and last of the steps that it is part of.
    pub first: usize,
    pub step: usize,
    pub lane: Lane,
    /// Actions that it directly depends on in the driver's graph.
    pub after: Vec<usize>,
}

/// Times of a run with events in its graph.
#[derive(Clone, Debug, PartialEq)]
pub struct TimedSteps {
    /// Seconds of every step of the plan, from the end of the one before on its lane, or of what it waited for; of steps that are launched
    /// together, with the last.
    pub seconds: Vec<f64>,
    /// Seconds from the first event to the last.
    pub total: f64,
    /// Shortest seconds of the graph without events, by the host's clock.
    pub unmarked: f64,
}

/// Records the dependencies of streams while they are captured.
#[derive(Default)]
struct Listener {
    /// Nodes that end an action.
    ends: RefCell<HashMap<Node, usize>>,
    after: RefCell<HashMap<usize, Vec<usize>>>,
}

impl Mark for Listener {
    fn before(&self, action: usize, stream: &Stream, _: bool) -> Result<(), CudaError> {
        let ends = self.ends.borrow();
        let mut after: Vec<usize> =
            stream.captured_last()?.iter().filter_map(|node| ends.get(node).copied()).collect();
        after.sort_unstable();
        self.after.borrow_mut().insert(action, after);
        Ok(())
    }

    fn after(&self, action: usize, stream: &Stream) -> Result<(), CudaError> {
        let last = stream.captured_last()?;
        self.ends.borrow_mut().extend(last.into_iter().map(|node| (node, action)));
        Ok(())
    }
}

/// Events in the graph: after every action, and before those that wait for another lane or begin one.
struct Clock {
    before: Vec<Event>,
    after: Vec<Event>,
    /// True if the one before was recorded.
    waited: RefCell<Vec<bool>>,
}

impl Clock {
    fn new(context: &Arc<Context>, actions: usize) -> Result<Self, CudaError> {
        let events = || (0..actions).map(|_| Event::timed(context)).collect::<Result<Vec<_>, _>>();
        Ok(Clock { before: events()?, after: events()?, waited: RefCell::new(vec![false; actions]) })
    }
}

impl Mark for Clock {
    fn before(&self, action: usize, stream: &Stream, waits: bool) -> Result<(), CudaError> {
        self.waited.borrow_mut()[action] = waits;
        if waits { self.before[action].record_in_graph(stream) } else { Ok(()) }
    }

    fn after(&self, action: usize, stream: &Stream) -> Result<(), CudaError> {
        self.after[action].record_in_graph(stream)
    }
}

impl Executor {
    /// Actions of a plan's captured graph.
    pub fn captured(&mut self, which: Which) -> Result<Vec<Captured>, CudaError> {
        self.context.enter()?;
        self.prepare_plan(which)?;
        let list = self.plans.list(which)?;
        let listener = Listener::default();
        list.capture(&self.libraries, &self.streams, &listener)?;
        let after = listener.after.into_inner();
        let of = |(index, action): (usize, &super::list::Prepared)| Captured {
            first: action.first,
            step: action.step,
            lane: action.lane,
            after: after.get(&index).cloned().unwrap_or_default(),
        };
        Ok(list.actions.iter().enumerate().map(of).collect())
    }

    /// Times of every step of a plan in its graph, beside the steps of other lanes. States change as they do in
    /// some runs.
    pub fn time_steps(&mut self, which: Which, header: &Header) -> Result<TimedSteps, CudaError> {
        const RUNS: usize = 12;
        let mut unmarked = f64::INFINITY;
        for _ in 0..RUNS {
            self.synchronise()?;
            self.run(which, header)?;
            self.synchronise()?;
            let began = std::time::Instant::now();
            self.plans.list(which)?.launch(&self.libraries, &self.streams)?;
            self.synchronise()?;
            unmarked = unmarked.min(began.elapsed().as_secs_f64());
        }
        let list: &List = self.plans.list(which)?;
        let clock = Clock::new(&self.context, list.actions.len())?;
        let graph = list.capture(&self.libraries, &self.streams, &clock)?;
        for _ in 0..RUNS {
            self.streams.compute().launch(&graph, "a plan with marks")?;
            self.streams.synchronise("timing the steps of a plan")?;
        }
        let steps = self.plan(which).steps.len();
        let list = self.plans.list(which)?;
        clock.read(list, steps, unmarked)
    }
}

impl Clock {
    fn read(&self, list: &List, steps: usize, unmarked: f64) -> Result<TimedSteps, CudaError> {
        let waited = self.waited.borrow();
        let (mut seconds, mut total) = (vec![0.0; steps], 0.0f64);
        let mut last: HashMap<Lane, usize> = HashMap::new();
        let Some(origin) = self.before.first() else { return Ok(TimedSteps { seconds, total, unmarked }) };
        for (index, action) in list.actions.iter().enumerate() {
            let start = match last.insert(action.lane, index) {
                Some(before) if !waited[index] => &self.after[before],
                _ => &self.before[index],
            };
            seconds[action.step] += self.after[index].seconds_since(start)?;
            total = total.max(self.after[index].seconds_since(origin)?);
        }
        Ok(TimedSteps { seconds, total, unmarked })
    }
}
