//! Startup: finds this process's ranks and connects them to the others.

mod processes;

use crate::activity::Activity;
use crate::communicator::Communicator;
use crate::control::coordinator::Coordinator;
use crate::control::{ExitReport, Failure, Limits, LocalRank, Monitor, ProcessControl};
use crate::cores;
use crate::engine::Engine;
use crate::launch::{Backend, Built, Launcher, Place, choose_backend, environment};
use crate::solo::Solo;
use crate::threads;
use processes::Runtime;
use std::sync::Arc;
use std::time::Duration;

/// Options of the user; the rest comes from the launcher.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Options {
    pub comm: Option<Backend>,
    pub ranks: Option<usize>,
    /// Longest time without heartbeat or progress of a rank, and for ranks to connect at the start.
    pub timeout: Option<Duration>,
}

/// Ranks of this process.
pub enum Start {
    /// All ranks of the run, each to be moved to a thread of its own.
    Threads(Vec<Member>),
    /// The one rank of this process, among several processes.
    Process(Member),
}

/// A rank of this process.
pub struct Member {
    pub world: Communicator,
    pub monitor: Monitor,
    pub place: Place,
    /// Number of cores for this rank, beside those of the other ranks of its machine.
    pub cores: usize,
    /// Backend that the user asked for. The world uses it, except NCCL, for which a group is made when GPUs are opened.
    pub requested: Option<Backend>,
    /// Finalized last, and only if the run succeeded.
    runtime: Runtime,
}

/// Reason why the run can't start, as one line.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{line}")]
pub struct StartError {
    pub line: String,
    /// True if this process prints the line.
    pub prints: bool,
    /// Exit code of the process: 1 if a restart would fail again, 3 if it might not.
    pub code: u8,
}

impl StartError {
    fn everywhere(line: String) -> Self {
        StartError { line, prints: true, code: 1 }
    }
}

impl Member {
    /// Runs the rank's work and ends its run: see [`Monitor::run`].
    pub fn run<T, E: Into<Failure>>(
        self,
        work: impl FnOnce(&Member) -> Result<T, E>,
    ) -> Result<T, ExitReport> {
        let result = self.monitor.run(|| work(&self));
        let Member { world, runtime, .. } = self;
        drop(world);
        match &result {
            Ok(_) => runtime.finish(),
            Err(_) => runtime.abandon(),
        }
        result
    }
}

/// Finds the other ranks and connects to them. `print` prints a line for the user from a control thread, where a rank's own thread is
/// stuck and can't.
pub fn start(options: &Options, print: fn(&str)) -> Result<Start, StartError> {
    let place = Place::find(&environment).map_err(StartError::everywhere)?;
    let built = Built { mpi: crate::HAS_MPI };
    let backend = choose_backend(options.comm, options.ranks, &place, built, &environment)
        .map_err(|line| StartError { line, prints: place.rank == 0, code: 1 })?;
    let limits = Limits::new(options.timeout);
    match backend {
        Backend::Threads => threads(options.ranks.unwrap_or(1), limits, options.comm, print),
        Backend::Tcp if place.world == 1 => threads(1, limits, options.comm, print),
        Backend::Mpi if place.launcher == Launcher::Nothing => {
            Err(StartError::everywhere("--comm mpi needs mpirun: mpirun -n 4 vitesse train".to_string()))
        }
        backend => {
            let member = processes::start(backend, place, options.timeout, print)?;
            Ok(Start::Process(Member { requested: options.comm, ..member }))
        }
    }
}

fn threads(
    world: usize,
    limits: Limits,
    requested: Option<Backend>,
    print: fn(&str),
) -> Result<Start, StartError> {
    let engines: Vec<Arc<dyn Engine>> = if world == 1 { vec![Arc::new(Solo)] } else { threads::group(world) };
    let activities: Vec<Arc<Activity>> = engines.iter().map(|_| Arc::default()).collect();
    let locals = activities.iter().zip(&engines).enumerate().map(|(rank, (activity, engine))| {
        let local = LocalRank::new(rank, Arc::clone(activity));
        let _ = local.engine.set(Arc::clone(engine));
        local
    });
    let failed = |error: std::io::Error| StartError::everywhere(format!("can't monitor the ranks: {error}"));
    let control = Arc::new(ProcessControl::new(locals.collect(), limits, world > 1, print).map_err(failed)?);
    if world > 1 {
        let coordinator = Coordinator::of_threads(Arc::clone(&control), &Place::thread(0, world).host);
        spawn_control_thread(move || coordinator.serve()).map_err(failed)?;
    }
    let member = |(rank, (engine, activity))| Member {
        world: Communicator::new(engine, activity),
        monitor: Monitor::new(Arc::clone(&control), rank),
        place: Place::thread(rank, world),
        cores: (cores::available() / world).max(1),
        requested,
        runtime: Runtime::Nothing,
    };
    Ok(Start::Threads(engines.into_iter().zip(activities).enumerate().map(member).collect()))
}

fn spawn_control_thread(serve: impl FnOnce() + Send + 'static) -> std::io::Result<()> {
    std::thread::Builder::new().name("vitesse-monitor".to_string()).spawn(serve).map(|_| ())
}
