//! Startup of ranks that are processes.

use super::{Member, StartError, spawn_control_thread};
use crate::activity::Activity;
use crate::communicator::Communicator;
use crate::control::client::{self, Client, JoinError};
use crate::control::coordinator::{self, Coordinator};
use crate::control::mesh::{self, PeerMesh};
use crate::control::{Hello, Limits, LocalRank, Monitor, Peer, ProcessControl, addresses, process};
use crate::cores;
use crate::engine::Engine;
use crate::launch::{Backend, MasterAddress, Place, environment, master_address};
use crate::tcp;
use std::net::TcpListener;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Default time for ranks to connect at the start: nodes of a job may start far apart.
const CONNECT_WITHIN: Duration = Duration::from_secs(60);

/// Runtime that must outlive the engine.
pub(super) enum Runtime {
    Nothing,
    #[cfg(feature = "mpi")]
    Mpi(crate::mpi::Mpi),
}

impl Runtime {
    /// Finalizes the runtime, once all ranks are done.
    pub fn finish(self) {}

    /// Leaves the runtime without finalizing it: other ranks may be gone, and finalizing waits for them.
    pub fn abandon(self) {
        match self {
            Runtime::Nothing => {}
            #[cfg(feature = "mpi")]
            Runtime::Mpi(mpi) => std::mem::forget(mpi),
        }
    }
}

/// State of this rank once all ranks have connected.
struct JoinedRun {
    peers: Vec<Peer>,
    secret: u64,
    monitor: Monitor,
    control: Arc<ProcessControl>,
}

/// Settings of a rank for connecting to the others.
struct Startup {
    place: Place,
    limits: Limits,
    print: fn(&str),
    patience: Duration,
    activity: Arc<Activity>,
}

pub(super) fn start(
    backend: Backend,
    place: Place,
    timeout: Option<Duration>,
    print: fn(&str),
) -> Result<Member, StartError> {
    let limits = Limits::new(timeout);
    let patience = timeout.unwrap_or(CONNECT_WITHIN);
    let startup = Startup { place, limits, print, patience, activity: Arc::default() };
    match backend {
        Backend::Mpi => over_mpi(startup),
        _ => over_tcp(startup),
    }
}

impl Startup {
    /// Error of this rank alone.
    fn problem(&self, line: impl std::fmt::Display) -> StartError {
        let Place { rank, host, .. } = &self.place;
        StartError { line: format!("rank {rank} (host {host}): {line}"), prints: true, code: 1 }
    }

    /// Error that every rank has.
    fn shared_problem(&self, line: String) -> StartError {
        StartError { line, prints: self.place.rank == 0, code: 1 }
    }

    fn hello(&self, addresses: Vec<String>) -> Hello {
        let Place { rank, world, host, .. } = &self.place;
        let peer = Peer {
            host: host.clone(),
            pid: std::process::id(),
            process: process::identity(),
            addresses,
            cores: cores::allowed(),
        };
        Hello { version: env!("CARGO_PKG_VERSION").to_string(), rank: *rank, world: *world, peer }
    }

    /// Connects to the control plane: rank 0 waits at the listener, the others connect to one of the places.
    fn join(
        &self,
        listener: Option<TcpListener>,
        places: &[String],
        hello: Hello,
    ) -> Result<JoinedRun, StartError> {
        let local = LocalRank::new(self.place.rank, Arc::clone(&self.activity));
        let control = ProcessControl::new(vec![local], self.limits, true, self.print)
            .map_err(|error| self.problem(error))?;
        let control = Arc::new(control);
        let monitor = Monitor::new(Arc::clone(&control), 0);
        let (peers, secret) = match listener {
            Some(listener) => {
                let assembled = coordinator::assemble(&listener, hello, self.patience)
                    .map_err(|line| StartError { line, prints: true, code: 3 })?;
                let (peers, secret) = (assembled.peers.clone(), assembled.secret);
                let coordinator = Coordinator::new(Arc::clone(&control), assembled);
                spawn_control_thread(move || coordinator.serve()).map_err(|error| self.problem(error))?;
                (peers, secret)
            }
            None => {
                let joined_run =
                    client::join(places, &hello, self.patience).map_err(|closed| match closed {
                        JoinError::Reported(line) => StartError { line, prints: false, code: 3 },
                        JoinError::Unreported(line) => StartError { line, prints: true, code: 3 },
                    })?;
                let (mut peers, secret) = (joined_run.peers.clone(), joined_run.secret);
                add_address(&mut peers[0], joined_run.coordinator_address());
                let client = Client::new(Arc::clone(&control), joined_run);
                spawn_control_thread(move || client.serve()).map_err(|error| self.problem(error))?;
                (peers, secret)
            }
        };
        Ok(JoinedRun { peers, secret, monitor, control })
    }

    fn member(self, engine: Arc<dyn Engine>, met: JoinedRun, runtime: Runtime) -> Member {
        let _ = met.control.locals[0].engine.set(Arc::clone(&engine));
        let world = Communicator::new(engine, Arc::clone(&self.activity));
        let cores = cores_of(&self.place, &met.peers);
        let place = placed(self.place, &met.peers);
        Member { world, monitor: met.monitor, place, cores, requested: None, runtime }
    }
}

/// Adds the address at which the coordinator was reached: it works for the mesh too.
fn add_address(coordinator: &mut Peer, address: Option<std::net::IpAddr>) {
    let port = coordinator
        .addresses
        .first()
        .and_then(|address| address.rsplit_once(':'))
        .map(|(_, port)| port.to_string());
    if let (Some(port), Some(address)) = (port, address.filter(|address| !address.is_loopback())) {
        coordinator.addresses.insert(0, client::host_port(address, &port));
    }
}

/// Counts the ranks on the same machine, if the launcher doesn't set the local rank.
fn placed(place: Place, peers: &[Peer]) -> Place {
    if Place::knows_locals(&environment) {
        return place;
    }
    let me = &peers[place.rank];
    let near = |other: &Peer| other.host == me.host && process::same_machine(&other.process, &me.process);
    let local_rank = peers[..place.rank].iter().filter(|other| near(other)).count();
    let local_world = peers.iter().filter(|other| near(other)).count();
    Place { local_rank, local_world: local_world.max(1), ..place }
}

/// Number of cores for this rank, beside the others on its machine, be they in containers of their own.
fn cores_of(place: &Place, peers: &[Peer]) -> usize {
    let me = &peers[place.rank];
    let near =
        |other: &&Peer| other.host == me.host && process::boot(&other.process) == process::boot(&me.process);
    let lists: Vec<&str> = peers.iter().filter(near).map(|peer| peer.cores.as_str()).collect();
    cores::share(&me.cores, &lists, cores::available())
}

fn over_tcp(startup: Startup) -> Result<Member, StartError> {
    let MasterAddress { host, port } =
        master_address(&startup.place, &environment).map_err(|line| startup.shared_problem(line))?;
    let rendezvous = match startup.place.rank {
        0 => Some(addresses::listen(port).map_err(|error| {
            startup.problem(format!("can't listen on port {port}: {error}; set MASTER_PORT to a free one"))
        })?),
        _ => None,
    };
    let listening = addresses::listen(0).and_then(|listener| {
        let places = mesh::places(&listener, &addresses::of_this_machine())?;
        Ok((listener, places))
    });
    let (listener, places) = listening.map_err(|error| startup.problem(error))?;
    let hub_place = if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") };
    let hello = startup.hello(places);
    let met = startup.join(rendezvous, &[hub_place], hello)?;
    let rank = startup.place.rank;
    let deadline = Instant::now() + startup.patience;
    let mesh = PeerMesh { rank, peers: &met.peers, secret: met.secret, deadline };
    let engine = met.monitor.run_part(|| {
        let streams = mesh.connect(&listener)?;
        tcp::engine(rank, streams).map_err(|error| error.to_string())
    });
    match engine {
        Ok(engine) => Ok(startup.member(engine, met, Runtime::Nothing)),
        Err(ended) => {
            let prints = ended.line.is_some();
            Err(StartError { line: ended.line.unwrap_or_default(), prints, code: ended.code })
        }
    }
}

#[cfg(not(feature = "mpi"))]
fn over_mpi(startup: Startup) -> Result<Member, StartError> {
    Err(startup.shared_problem("this vitesse was built without MPI".to_string()))
}

#[cfg(feature = "mpi")]
fn over_mpi(startup: Startup) -> Result<Member, StartError> {
    let mpi = crate::mpi::Mpi::init().map_err(|error| startup.problem(error))?;
    let (rank, world) = (mpi.rank(), mpi.size());
    if (rank, world) != (startup.place.rank, startup.place.world) {
        let Place { rank: exit_report, world: of, launcher, .. } = &startup.place;
        return Err(startup.shared_problem(format!(
            "{launcher} says rank {exit_report} of {of}, MPI says rank {rank} of {world}: MPI was started by another launcher \
             (under Slurm: srun --mpi=pmix, or --comm tcp)"
        )));
    }
    match join_over_mpi(&startup, &mpi) {
        Ok(met) => {
            let engine = mpi.engine();
            Ok(startup.member(engine, met, Runtime::Mpi(mpi)))
        }
        Err(refused) => {
            Runtime::Mpi(mpi).abandon();
            Err(refused)
        }
    }
}

/// Connects the ranks; MPI broadcasts the address of rank 0.
#[cfg(feature = "mpi")]
fn join_over_mpi(startup: &Startup, mpi: &crate::mpi::Mpi) -> Result<JoinedRun, StartError> {
    let failed =
        |error: &dyn std::fmt::Display| startup.problem(format!("can't connect to the other ranks: {error}"));
    let (mut rendezvous, mut places) = (None, Vec::new());
    if startup.place.rank == 0 {
        let listener = addresses::listen(0).map_err(|error| failed(&error))?;
        places = mesh::places(&listener, &addresses::of_this_machine()).map_err(|error| failed(&error))?;
        rendezvous = Some(listener);
    }
    // Not the run's own communicator: its calls are counted from the first of the run.
    let first = Communicator::new(mpi.engine(), Arc::default());
    let exit_report = first
        .broadcast_bytes(first.name("addresses of rank 0"), 0, places.join(" ").into_bytes())
        .map_err(|error| failed(&error))?;
    let places: Vec<String> =
        String::from_utf8_lossy(&exit_report).split_whitespace().map(str::to_string).collect();
    startup.join(rendezvous, &places, startup.hello(Vec::new()))
}
