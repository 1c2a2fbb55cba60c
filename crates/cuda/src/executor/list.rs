//! A bound plan, ready to be played: every kernel found, every product's algorithm chosen.

use crate::action::{Action, Address, Product};
use crate::bind::{Bound, Placed};
use crate::driver::{Block, Context, Event, Graph, Stream};
use crate::error::CudaError;
use crate::launch::Ready;
use crate::modules::Modules;
use crate::product::{Algorithm, Choice, Products, describe};
use crate::tuner::{Bench, Tuner};
use graph::{Lane, Plan};
use std::sync::Arc;

/// One stream for each lane, in their order.
pub(super) struct Streams([Stream; 3]);

impl Streams {
    pub fn new(context: &Arc<Context>) -> Result<Self, CudaError> {
        Ok(Streams([Stream::new(context)?, Stream::new(context)?, Stream::new(context)?]))
    }

    pub fn of(&self, lane: Lane) -> &Stream {
        match lane {
            Lane::Compute => &self.0[0],
            Lane::Comm => &self.0[1],
            Lane::Copy => &self.0[2],
        }
    }

    pub fn compute(&self) -> &Stream {
        &self.0[0]
    }

    pub fn copy(&self) -> &Stream {
        &self.0[2]
    }

    pub fn synchronise(&self, doing: &str) -> Result<(), CudaError> {
        self.0.iter().try_for_each(|stream| stream.synchronise(|| doing.to_string()))
    }
}

pub(super) enum Work {
    Launch(Ready),
    Product(Product, Way),
    Copy { from: Address, to: Address, bytes: usize },
    Zero { at: Address, bytes: usize },
}

/// How a product is made.
pub(super) enum Way {
    Library(Algorithm),
    Own(Ready),
}

pub(super) struct Prepared {
    pub work: Work,
    pub lane: Lane,
    waits: Vec<usize>,
    /// Recorded after it, where another lane waits for it.
    signal: Option<Event>,
    pub step: usize,
    pub first: usize,
    /// A kernel's name or a product's shape, and the kernel's name if it is ours.
    pub what: String,
    pub layer: String,
}

/// Another lane's way into a list and back.
struct Branch {
    lane: Lane,
    end: Event,
}

pub(super) struct List {
    pub name: String,
    pub actions: Vec<Prepared>,
    /// Of every value of the plan.
    pub addresses: Vec<Address>,
    start: Event,
    branches: Vec<Branch>,
    /// Made when the list is first run.
    pub graph: Option<Graph>,
}

/// What preparing a list takes.
pub(super) struct Preparer<'a> {
    pub context: &'a Arc<Context>,
    pub modules: &'a mut Modules,
    pub products: &'a Products,
    pub tuner: &'a mut Tuner,
    pub streams: &'a Streams,
    /// Where products may write while they are measured.
    pub scratch: &'a Block,
}

impl Preparer<'_> {
    pub fn prepare(&mut self, plan: &Plan, name: &str, bound: Bound) -> Result<List, CudaError> {
        let waited: std::collections::HashSet<usize> =
            bound.actions.iter().flat_map(|placed| placed.waits.iter().copied()).collect();
        let mut actions = Vec::with_capacity(bound.actions.len());
        for (index, placed) in bound.actions.into_iter().enumerate() {
            let signal = waited.contains(&index).then(|| Event::new(self.context)).transpose()?;
            let layer = plan.steps.get(placed.step).map_or_else(String::new, |step| step.layer.clone());
            actions.push(self.action(placed, signal, layer)?);
        }
        let mut branches = Vec::new();
        for lane in [Lane::Comm, Lane::Copy] {
            if actions.iter().any(|action: &Prepared| action.lane == lane) {
                branches.push(Branch { lane, end: Event::new(self.context)? });
            }
        }
        let start = Event::new(self.context)?;
        Ok(List { name: name.to_string(), actions, addresses: bound.addresses, start, branches, graph: None })
    }

    fn action(
        &mut self,
        placed: Placed,
        signal: Option<Event>,
        layer: String,
    ) -> Result<Prepared, CudaError> {
        let Placed { action, lane, step, first, waits } = placed;
        let (work, what) = match action {
            Action::Launch(launch) => {
                let ready = Ready::new(&launch, self.modules)?;
                (Work::Launch(ready), launch.kernel.name)
            }
            Action::Product(product) => {
                let (products, stream, scratch) = (self.products, self.streams.compute(), self.scratch);
                let mut bench = Bench { products, modules: &mut *self.modules, stream, scratch };
                match self.tuner.choose(&product, &mut bench)? {
                    Choice::Library(algorithm) => {
                        (Work::Product(product, Way::Library(algorithm)), describe(&product))
                    }
                    Choice::Own(cut) => {
                        let launch = self.tuner.launch(&product, cut)?;
                        let what = format!("{} by {}", describe(&product), launch.kernel.name);
                        let ready = Ready::new(&launch, self.modules)?;
                        (Work::Product(product, Way::Own(ready)), what)
                    }
                }
            }
            Action::Copy { from, to, bytes } => (Work::Copy { from, to, bytes }, "copy".into()),
            Action::Zero { at, bytes } => (Work::Zero { at, bytes }, "zero".into()),
        };
        Ok(Prepared { work, lane, waits, signal, step, first, what, layer })
    }
}

impl Prepared {
    /// Puts the work into a stream, whichever lane it is of.
    pub fn start(&self, products: &Products, stream: &Stream) -> Result<(), CudaError> {
        match &self.work {
            Work::Launch(ready) | Work::Product(_, Way::Own(ready)) => {
                ready.start(stream, || format!("launching {} of {}", self.what, self.layer))
            }
            Work::Product(product, Way::Library(algorithm)) => {
                products.run(product, algorithm, stream).map_err(|error| match error {
                    CudaError::Product { doing, status } => {
                        CudaError::Product { doing: format!("{doing} of {}", self.layer), status }
                    }
                    other => other,
                })
            }
            Work::Copy { from, to, bytes } => stream.copy(*from, *to, *bytes),
            Work::Zero { at, bytes } => stream.zero(*at, *bytes),
        }
    }
}

impl List {
    /// Puts all actions into the streams of their lanes. Other lanes start after what the compute lane holds, and the
    /// compute lane goes on after them.
    pub fn play(&self, products: &Products, streams: &Streams) -> Result<(), CudaError> {
        if !self.branches.is_empty() {
            self.start.record(streams.compute())?;
        }
        for Branch { lane, .. } in &self.branches {
            streams.of(*lane).wait(&self.start)?;
        }
        for action in &self.actions {
            let stream = streams.of(action.lane);
            for signal in action.waits.iter().filter_map(|wait| self.actions[*wait].signal.as_ref()) {
                stream.wait(signal)?;
            }
            action.start(products, stream)?;
            if let Some(signal) = &action.signal {
                signal.record(stream)?;
            }
        }
        for Branch { lane, end } in &self.branches {
            end.record(streams.of(*lane))?;
            streams.compute().wait(end)?;
        }
        Ok(())
    }

    /// Launches the list as one graph.
    pub fn launch(&mut self, products: &Products, streams: &Streams) -> Result<(), CudaError> {
        if self.actions.is_empty() {
            return Ok(());
        }
        let graph = match self.graph.take() {
            Some(graph) => graph,
            None => streams.compute().capture(|| self.play(products, streams), &self.name)?,
        };
        let launched = streams.compute().launch(&graph, &self.name);
        self.graph = Some(graph);
        launched
    }
}
