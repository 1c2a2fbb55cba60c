//! A bound plan, ready to run: every kernel loaded, every matmul's algorithm chosen.

use super::behind::Behind;
use super::calls::{PreparedCall, bring_back};
use super::communicator::{GpuComm, GpuCommunicator};
use crate::action::{
    Action, Address, Attention, AttentionForward, CollectiveCall, Convolution, Launch, Matmul,
};
use crate::attention;
use crate::bind::{Bound, Placed};
use crate::collectives::{Stage, host_places, stages, stages_on_device};
use crate::convolution;
use crate::cudnn::CudnnPlan;
use crate::driver::{Block, Context, Event, Graph, Pinned, Stream, prepare_lock};
use crate::error::CudaError;
use crate::launch::Ready;
use crate::matmul::{CublasAlgorithm, MathLibraries, MatmulImpl, describe};
use crate::modules::Modules;
use crate::tuner::{AttentionImpl, Bench, Tuner};
use graph::{Lane, Plan};
use std::collections::HashSet;
use std::sync::Arc;
use std::time::Instant;

/// Streams: one for each lane, and one for results from the host; and the communicator of the comm lane,
/// which is dropped before the streams.
pub(super) struct Streams {
    pub communicator: Option<GpuCommunicator>,
    streams: [Stream; 5],
}

impl Streams {
    pub fn new(context: &Arc<Context>, comm: Option<&GpuComm>) -> Result<Self, CudaError> {
        let stream = || Stream::new(context);
        let mut streams =
            Streams { communicator: None, streams: [stream()?, stream()?, stream()?, stream()?, stream()?] };
        if let Some(comm) = comm {
            streams.communicator = Some(GpuCommunicator::open(comm, context, streams.comm())?);
        }
        Ok(streams)
    }

    pub fn of(&self, lane: Lane) -> &Stream {
        match lane {
            Lane::Compute => &self.streams[0],
            Lane::Comm => &self.streams[1],
            Lane::Copy => &self.streams[2],
            Lane::Side => &self.streams[4],
        }
    }

    pub fn compute(&self) -> &Stream {
        self.of(Lane::Compute)
    }

    pub fn comm(&self) -> &Stream {
        self.of(Lane::Comm)
    }

    pub fn copy(&self) -> &Stream {
        self.of(Lane::Copy)
    }

    /// Stream for results of collectives that ran on the host.
    pub fn back(&self) -> &Stream {
        &self.streams[3]
    }

    /// Waits for all streams, as long as no other rank is known to be lost.
    pub fn synchronise(&self, doing: &str) -> Result<(), CudaError> {
        if let Some(communicator) = &self.communicator {
            self.streams.iter().try_for_each(|stream| communicator.wait_until(|| stream.is_done()))?;
        }
        self.drain(doing)
    }

    /// Waits for all streams, whatever happens.
    pub fn drain(&self, doing: &str) -> Result<(), CudaError> {
        self.streams.iter().try_for_each(|stream| stream.synchronise(|| doing.to_string()))
    }

    /// Waits for an event, as long as no other rank is known to be lost.
    pub fn wait_for(&self, event: &Event, doing: impl FnOnce() -> String) -> Result<(), CudaError> {
        if let Some(communicator) = &self.communicator {
            communicator.wait_until(|| event.is_done())?;
        }
        event.synchronise(doing)
    }
}

pub(super) enum ReadyWork {
    Launch(Ready),
    Matmul(Matmul, MatmulRun),
    Convolution(Convolution, Arc<CudnnPlan>),
    /// cuDNN's plan with the launches after it, or our launches alone.
    Attention(Option<(AttentionForward, Arc<CudnnPlan>)>, Vec<Ready>),
    Zero {
        at: Address,
        bytes: usize,
    },
    Collective(Box<PreparedCall>),
    Copy {
        from: Address,
        to: Address,
        bytes: usize,
    },
}

/// Implementation of a matmul.
pub(super) enum MatmulRun {
    Library(CublasAlgorithm),
    Own(Ready),
}

pub(super) struct Prepared {
    pub work: ReadyWork,
    pub lane: Lane,
    waits: Vec<usize>,
    /// Event after it, if another lane waits for it.
    signal: Option<Event>,
    /// Events of collectives that earlier lists have left under way.
    after: Vec<Arc<Event>>,
    /// Event after it, if it is left under way.
    pub left: Option<Arc<Event>>,
    pub step: usize,
    pub first: usize,
    /// Values of the plan that are complete when it is done.
    pub results: Vec<usize>,
    /// A kernel's name or a matmul's shape, and the kernel's name if it is ours.
    pub what: String,
    pub layer: String,
}

/// Observer of every action as it is enqueued.
pub(super) trait Mark {
    /// Called before an action, which begins its lane or waits for others if `waits`.
    fn before(&self, action: usize, stream: &Stream, waits: bool) -> Result<(), CudaError>;
    fn after(&self, action: usize, stream: &Stream) -> Result<(), CudaError>;
}

/// Events at which another lane forks from the compute lane and joins it.
struct Branch {
    lane: Lane,
    end: Event,
}

pub(super) struct List {
    pub name: String,
    /// Event of the end of the graph, for what is launched behind it.
    pub ended: Event,
    pub actions: Vec<Prepared>,
    /// Address of every value of the plan.
    pub addresses: Vec<Address>,
    start: Event,
    branches: Vec<Branch>,
    /// Stages in order: one, unless collectives run on the host or are left under way. Stretches have graphs, captured when they
    /// are first run.
    stages: Vec<(Stage, Option<Graph>)>,
    /// The collectives, by their place among the actions.
    calls: Vec<usize>,
}

/// Resources for the preparation of a list.
pub(super) struct Preparer<'a> {
    pub context: &'a Arc<Context>,
    pub modules: &'a mut Modules,
    pub libraries: &'a MathLibraries,
    pub tuner: &'a mut Tuner,
    pub streams: &'a Streams,
    /// Memory for results of matmuls while they are measured.
    pub scratch: &'a Block,
    /// Workspace for that.
    pub workspace: &'a Block,
    /// Host memory for collectives that run on the host.
    pub host: Option<&'a Pinned>,
    /// Collectives that lists leave under way.
    pub behind: &'a Behind,
}

impl Preparer<'_> {
    pub fn prepare(&mut self, plan: &Plan, name: &str, bound: Bound) -> Result<List, CudaError> {
        let waited: HashSet<usize> =
            bound.actions.iter().flat_map(|placed| placed.waits.iter().copied()).collect();
        let stages =
            if self.host.is_some() { stages(&bound.actions) } else { stages_on_device(&bound.actions) };
        let (places, _) = host_places(collectives(&bound));
        let mut places = places.into_iter();
        let mut calls = Vec::new();
        let mut actions = Vec::with_capacity(bound.actions.len());
        for (index, placed) in bound.actions.into_iter().enumerate() {
            let signal = waited.contains(&index).then(|| Event::new(self.context)).transpose()?;
            let layer = plan.steps.get(placed.step).map_or_else(String::new, |step| step.layer.clone());
            let place = match placed.action {
                Action::Collective(_) => {
                    calls.push(index);
                    places.next()
                }
                _ => None,
            };
            actions.push(self.action(placed, signal, layer, place)?);
        }
        let mut branches = Vec::new();
        for lane in [Lane::Side, Lane::Comm, Lane::Copy] {
            if actions.iter().any(|action: &Prepared| action.lane == lane) {
                branches.push(Branch { lane, end: Event::new(self.context)? });
            }
        }
        // Of one communicator all calls are in one order, on all ranks.
        let behind =
            |index: &&usize| stages.iter().any(|s| matches!(s, Stage::Behind(of) if of.contains(index)));
        if let Some(first) = calls.iter().find(|index| !behind(index)) {
            actions[*first].after = self.behind.all();
        }
        let (start, ended) = (Event::new(self.context)?, Event::new(self.context)?);
        let stages = stages.into_iter().map(|stage| (stage, None)).collect();
        let (name, addresses) = (name.to_string(), bound.addresses);
        Ok(List { name, ended, actions, addresses, start, branches, stages, calls })
    }

    fn action(
        &mut self,
        placed: Placed,
        signal: Option<Event>,
        layer: String,
        place: Option<(usize, usize)>,
    ) -> Result<Prepared, CudaError> {
        let Placed { action, lane, step, first, waits, results, left, after } = placed;
        let (left, after) = (self.behind.of(&left), self.behind.touching(&after));
        let (work, what) = match action {
            Action::Launch(launch) => {
                (ReadyWork::Launch(Ready::new(&launch, self.modules)?), launch.kernel.name)
            }
            Action::Matmul(matmul) => {
                let (libraries, stream) = (self.libraries, self.streams.compute());
                let (scratch, workspace) = (self.scratch, self.workspace);
                let mut bench = Bench { libraries, modules: &mut *self.modules, stream, scratch, workspace };
                match self.tuner.choose(&matmul, &mut bench)? {
                    MatmulImpl::Library(algorithm) => {
                        (ReadyWork::Matmul(matmul, MatmulRun::Library(algorithm)), describe(&matmul))
                    }
                    MatmulImpl::Own(cut) => {
                        let launch = self.tuner.launch(&matmul, cut)?;
                        let what = format!("{} by {}", describe(&matmul), launch.kernel.name);
                        let ready = Ready::new(&launch, self.modules)?;
                        (ReadyWork::Matmul(matmul, MatmulRun::Own(ready)), what)
                    }
                }
            }
            Action::Convolution(conv) => {
                let (libraries, stream) = (self.libraries, self.streams.compute());
                let (scratch, workspace) = (self.scratch, self.workspace);
                let bench = Bench { libraries, modules: &mut *self.modules, stream, scratch, workspace };
                let algorithm = self.tuner.convolution(&conv, &bench)?;
                (ReadyWork::Convolution(conv, algorithm), convolution::describe(&conv))
            }
            Action::Attention(attention) => self.attention(*attention)?,
            Action::Copy { from, to, bytes } => (ReadyWork::Copy { from, to, bytes }, "copy".into()),
            Action::Zero { at, bytes } => (ReadyWork::Zero { at, bytes }, "zero".into()),
            Action::Sum(_) => return Err(CudaError::Misuse(format!("{layer}: a sum that was left waiting"))),
            Action::Collective(call) => {
                let lost = || CudaError::Misuse(format!("{layer}: no group is {}", call.group));
                let comm = self.streams.communicator()?.group(call.group).ok_or_else(lost)?;
                let host = self.host.zip(place).map(|(memory, (from, into))| (memory, from, into));
                let calling = PreparedCall::new(&call, host, comm, self.context, self.modules)?;
                (ReadyWork::Collective(Box::new(calling)), call.collective.name().into())
            }
        };
        Ok(Prepared { work, lane, waits, signal, after, left, step, first, results, what, layer })
    }

    fn attention(&mut self, attention: Attention) -> Result<(ReadyWork, String), CudaError> {
        let (libraries, stream) = (self.libraries, self.streams.compute());
        let (scratch, workspace) = (self.scratch, self.workspace);
        let mut bench = Bench { libraries, modules: &mut *self.modules, stream, scratch, workspace };
        let attending = self.tuner.attention(&attention, &mut bench)?;
        let Attention { attended, own, after } = attention;
        let mut ready = |launches: &[Launch]| {
            launches.iter().map(|launch| Ready::new(launch, self.modules)).collect::<Result<Vec<_>, _>>()
        };
        Ok(match attending {
            AttentionImpl::Own => {
                let names: Vec<&str> = own.iter().map(|launch| launch.kernel.name.as_str()).collect();
                (ReadyWork::Attention(None, ready(&own)?), names.join(" + "))
            }
            AttentionImpl::Library(algorithm) => {
                let what =
                    format!("{} by cuDNN's engine {}", attention::describe(&attended), algorithm.engine);
                (ReadyWork::Attention(Some((attended, algorithm)), ready(after.as_slice())?), what)
            }
        })
    }
}

/// The collectives of a bound plan.
pub(super) fn collectives(bound: &Bound) -> impl Iterator<Item = &CollectiveCall> {
    bound.actions.iter().filter_map(|placed| match &placed.action {
        Action::Collective(call) => Some(call),
        _ => None,
    })
}

impl Prepared {
    /// Enqueues the work on a stream, whichever lane it is of.
    fn start(&self, libraries: &MathLibraries, streams: &Streams, stream: &Stream) -> Result<(), CudaError> {
        match &self.work {
            ReadyWork::Launch(ready) | ReadyWork::Matmul(_, MatmulRun::Own(ready)) => {
                ready.start(stream, || format!("launching {} of {}", self.what, self.layer))
            }
            ReadyWork::Matmul(matmul, MatmulRun::Library(algorithm)) => libraries
                .run(matmul, algorithm, stream, self.lane != Lane::Compute)
                .map_err(|error| match error {
                    CudaError::Matmul { doing, status } => {
                        CudaError::Matmul { doing: format!("{doing} of {}", self.layer), status }
                    }
                    other => other,
                }),
            ReadyWork::Convolution(conv, algorithm) => {
                libraries.convolve(conv, algorithm, stream, self.lane != Lane::Compute)
            }
            ReadyWork::Attention(by_cudnn, launches) => {
                if let Some((attended, algorithm)) = by_cudnn {
                    libraries.attend(attended, algorithm, stream, self.lane != Lane::Compute)?;
                }
                let doing = || format!("launching {} of {}", self.what, self.layer);
                launches.iter().try_for_each(|ready| ready.start(stream, doing))
            }
            ReadyWork::Copy { from, to, bytes } => stream.copy(*from, *to, *bytes),
            ReadyWork::Zero { at, bytes } => stream.zero(*at, *bytes),
            // Of the comm lane, in whose stream NCCL has its calls.
            ReadyWork::Collective(calling) => calling.enqueue(streams),
        }
    }
}

impl List {
    /// Enqueues some actions on the streams of their lanes, which are under capture or not. Other lanes start after what the compute
    /// lane holds, and the compute lane goes on after them.
    fn play(
        &self,
        which: &[usize],
        libraries: &MathLibraries,
        streams: &Streams,
        (marks, capturing): (Option<&dyn Mark>, bool),
    ) -> Result<(), CudaError> {
        let branches =
            || self.branches.iter().filter(|b| which.iter().any(|i| self.actions[*i].lane == b.lane));
        if branches().next().is_some() {
            self.start.record(streams.compute())?;
        }
        for Branch { lane, .. } in branches() {
            streams.of(*lane).wait(&self.start)?;
        }
        let mut begun: HashSet<Lane> = HashSet::new();
        for index in which {
            let action = &self.actions[*index];
            let stream = streams.of(action.lane);
            // What came in an earlier stretch is done: the compute lane has waited for it, and others for that.
            let here = action.waits.iter().filter(|wait| which.binary_search(wait).is_ok());
            let mut waits = begun.insert(action.lane);
            for signal in here.filter_map(|wait| self.actions[*wait].signal.as_ref()) {
                stream.wait(signal)?;
                waits = true;
            }
            if let Some(marks) = marks {
                marks.before(*index, stream, waits)?;
            }
            for event in &action.after {
                if capturing { stream.wait_in_graph(event)? } else { stream.wait(event)? }
            }
            action.start(libraries, streams, stream)?;
            if let Some(marks) = marks {
                marks.after(*index, stream)?;
            }
            if let Some(signal) = &action.signal {
                signal.record(stream)?;
            }
        }
        for Branch { lane, end } in branches() {
            end.record(streams.of(*lane))?;
            streams.compute().wait(end)?;
        }
        Ok(())
    }

    pub fn call(&self, index: usize) -> Result<&PreparedCall, CudaError> {
        match &self.actions[index].work {
            ReadyWork::Collective(calling) => Ok(calling),
            _ => Err(CudaError::Misuse(format!("action {index} of {} is no collective", self.name))),
        }
    }

    /// Waits until a collective that runs on the host is back.
    fn bring_back(&self, index: usize, streams: &Streams) -> Result<(), CudaError> {
        let calls: Vec<&PreparedCall> = self.calls.iter().map(|i| self.call(*i)).collect::<Result<_, _>>()?;
        let number = self.calls.iter().position(|i| *i == index).unwrap_or(0);
        bring_back(&calls, number, streams)
    }

    /// Starts one action in the compute lane, after all before it.
    pub fn start_alone(
        &self,
        index: usize,
        libraries: &MathLibraries,
        streams: &Streams,
    ) -> Result<(), CudaError> {
        match &self.actions[index].work {
            ReadyWork::Collective(calling) if streams.communicator()?.is_on_device() => {
                calling.enqueue_alone(streams)
            }
            ReadyWork::Collective(calling) => {
                calling.leave(streams)?;
                self.bring_back(index, streams)
            }
            _ => self.actions[index].start(libraries, streams, streams.compute()),
        }
    }

    /// Runs the list action by action, with events around each if some are given.
    pub fn run_eagerly(
        &self,
        libraries: &MathLibraries,
        streams: &Streams,
        marks: Option<&dyn Mark>,
    ) -> Result<(), CudaError> {
        let mut calls = self.calls.iter().copied().peekable();
        self.stages.iter().try_for_each(|(stage, _)| match stage {
            Stage::Stretch(which) => self.play(which, libraries, streams, (marks, false)),
            Stage::Behind(which) => self.start_behind(which, streams, marks),
            Stage::Leave(index) => {
                // Through the host a collective begins when the compute lane has come to it, and ends when its result is back.
                marks.map_or(Ok(()), |marks| marks.before(*index, streams.compute(), true))?;
                self.call(*index)?.leave(streams)
            }
            Stage::Return(index) => {
                self.bring_back(*index, streams)?;
                // With it come all before it.
                while let (Some(call), Some(marks)) = (calls.next_if(|call| call <= index), marks) {
                    marks.after(call, streams.back())?;
                }
                Ok(())
            }
        })
    }

    /// Captures the list as one graph, with an observer of its actions. Not where collectives run on the host.
    pub fn capture(
        &self,
        libraries: &MathLibraries,
        streams: &Streams,
        mark: &dyn Mark,
    ) -> Result<Graph, CudaError> {
        let by_host = |(stage, _): &(Stage, _)| matches!(stage, Stage::Leave(_) | Stage::Return(_));
        if self.stages.iter().any(by_host) {
            let why = format!("{} is no one graph: the host does its collectives", self.name);
            return Err(CudaError::Misuse(why));
        }
        // What a run leaves under way is in the graph here.
        let all: Vec<usize> = (0..self.actions.len()).collect();
        let play = || self.play(&all, libraries, streams, (Some(mark), true));
        streams.compute().capture(play, &self.name)
    }

    /// Runs the list as one graph; or, where collectives run on the host, as one for each stretch between them. Then it returns when
    /// the last of them is on its way back. Returns the seconds of capturing, if it was not captured before.
    pub fn launch(&mut self, libraries: &MathLibraries, streams: &Streams) -> Result<f64, CudaError> {
        let mut capturing = 0.0;
        for number in 0..self.stages.len() {
            match &self.stages[number] {
                (Stage::Stretch(which), None) if !which.is_empty() => {
                    let began = Instant::now();
                    let play = || self.play(which, libraries, streams, (None, true));
                    // Not with NCCL, whose calls may wait for those of other threads.
                    let on_device = streams.communicator.as_ref().is_some_and(|e| e.is_on_device());
                    let _alone = (!on_device).then(prepare_lock);
                    self.stages[number].1 = Some(streams.compute().capture(play, &self.name)?);
                    capturing += began.elapsed().as_secs_f64();
                }
                (Stage::Leave(index), _) => self.call(*index)?.leave(streams)?,
                (Stage::Behind(which), _) => self.start_behind(which, streams, None)?,
                (Stage::Return(index), _) => self.bring_back(*index, streams)?,
                _ => {}
            }
            if let Some(graph) = &self.stages[number].1 {
                streams.compute().launch(graph, &self.name)?;
            }
        }
        Ok(capturing)
    }
}
