//! Brings the ranks of a run together.

mod processes;

use crate::communicator::Communicator;
use crate::control::hub::Hub;
use crate::control::{Ended, Failure, Limits, Local, Office, Watch};
use crate::engine::Engine;
use crate::launch::{Built, Choice, Launcher, Place, decide, environment};
use crate::pulse::Pulse;
use crate::solo::Solo;
use crate::threads;
use processes::Runtime;
use std::sync::Arc;
use std::time::Duration;

/// What the user asked for; the rest is found.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Options {
    pub comm: Option<Choice>,
    pub ranks: Option<usize>,
    /// How long a rank may be silent or stuck, and how long ranks wait for each other at the start.
    pub timeout: Option<Duration>,
}

/// The ranks of this process.
pub enum Start {
    /// All ranks of the run, each to be taken to a thread of its own.
    Threads(Vec<Member>),
    /// One of several processes.
    Process(Member),
}

/// A rank.
pub struct Member {
    pub world: Communicator,
    pub watch: Watch,
    pub place: Place,
    /// What the user asked for. The world is that, but for NCCL, which is for whoever opens the GPUs.
    pub asked: Option<Choice>,
    /// Ended after everything else, and only if all went well.
    runtime: Runtime,
}

/// Why there is no run, as one line.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{line}")]
pub struct Refused {
    pub line: String,
    /// Whether it is up to this process to tell.
    pub prints: bool,
    /// For the process: 1 if it would end so again, 3 if it might not.
    pub code: u8,
}

impl Refused {
    fn everywhere(line: String) -> Self {
        Refused { line, prints: true, code: 1 }
    }
}

impl Member {
    /// Does the rank's work, and ends its run: see [`Watch::run`].
    pub fn run<T, E: Into<Failure>>(self, work: impl FnOnce(&Member) -> Result<T, E>) -> Result<T, Ended> {
        let result = self.watch.run(|| work(&self));
        let Member { world, runtime, .. } = self;
        drop(world);
        match &result {
            Ok(_) => runtime.finish(),
            Err(_) => runtime.abandon(),
        }
        result
    }
}

/// Finds the other ranks, and connects to them.
pub fn start(options: &Options) -> Result<Start, Refused> {
    let place = Place::find(&environment).map_err(Refused::everywhere)?;
    let built = Built { mpi: crate::HAS_MPI };
    let choice = decide(options.comm, options.ranks, &place, built, &environment)
        .map_err(|line| Refused { line, prints: place.rank == 0, code: 1 })?;
    let limits = Limits::new(options.timeout);
    match choice {
        Choice::Threads => threads(options.ranks.unwrap_or(1), limits, options.comm),
        Choice::Tcp if place.world == 1 => threads(1, limits, options.comm),
        Choice::Mpi if place.launcher == Launcher::Nothing => Err(Refused::everywhere(
            "--comm mpi is for ranks that mpirun started: mpirun -n 4 vitesse train".to_string(),
        )),
        choice => {
            let member = processes::start(choice, place, options.timeout)?;
            Ok(Start::Process(Member { asked: options.comm, ..member }))
        }
    }
}

fn threads(world: usize, limits: Limits, asked: Option<Choice>) -> Result<Start, Refused> {
    let engines: Vec<Arc<dyn Engine>> = if world == 1 { vec![Arc::new(Solo)] } else { threads::group(world) };
    let pulses: Vec<Arc<Pulse>> = engines.iter().map(|_| Arc::default()).collect();
    let locals = pulses.iter().zip(&engines).enumerate().map(|(rank, (pulse, engine))| {
        let local = Local::new(rank, Arc::clone(pulse));
        let _ = local.engine.set(Arc::clone(engine));
        local
    });
    let failed = |error: std::io::Error| Refused::everywhere(format!("can't watch the ranks: {error}"));
    let office = Arc::new(Office::new(locals.collect(), limits, world > 1).map_err(failed)?);
    if world > 1 {
        let hub = Hub::of_threads(Arc::clone(&office), &Place::thread(0, world).host);
        watch_with(move || hub.serve()).map_err(failed)?;
    }
    let member = |(rank, (engine, pulse))| Member {
        world: Communicator::new(engine, pulse),
        watch: Watch::new(Arc::clone(&office), rank),
        place: Place::thread(rank, world),
        asked,
        runtime: Runtime::Nothing,
    };
    Ok(Start::Threads(engines.into_iter().zip(pulses).enumerate().map(member).collect()))
}

fn watch_with(serve: impl FnOnce() + Send + 'static) -> std::io::Result<()> {
    std::thread::Builder::new().name("vitesse-watch".to_string()).spawn(serve).map(|_| ())
}
