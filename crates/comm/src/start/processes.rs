//! Ranks that are processes.

use super::{Member, Refused, watch_with};
use crate::communicator::Communicator;
use crate::control::guest::{self, Closed, Guest};
use crate::control::hub::{self, Hub};
use crate::control::mesh::{self, Mesh};
use crate::control::{Hello, Limits, Local, Office, Person, Watch, addresses, process};
use crate::engine::Engine;
use crate::launch::{Choice, Meeting, Place, environment, meeting};
use crate::pulse::Pulse;
use crate::tcp;
use std::net::TcpListener;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long ranks wait for each other at the start, unless told: nodes of a job may start far apart.
const MEET_WITHIN: Duration = Duration::from_secs(60);

/// What must stay for as long as the engine works.
pub(super) enum Runtime {
    Nothing,
    #[cfg(feature = "mpi")]
    Mpi(crate::mpi::Mpi),
}

impl Runtime {
    /// All ranks are done.
    pub fn finish(self) {}

    /// Others may be gone: to wait for them would be to wait for ever.
    pub fn abandon(self) {
        match self {
            Runtime::Nothing => {}
            #[cfg(feature = "mpi")]
            Runtime::Mpi(mpi) => std::mem::forget(mpi),
        }
    }
}

/// Who is where, once all ranks met.
struct Met {
    people: Vec<Person>,
    secret: u64,
    watch: Watch,
    office: Arc<Office>,
}

struct Setting {
    place: Place,
    limits: Limits,
    patience: Duration,
    pulse: Arc<Pulse>,
}

pub(super) fn start(choice: Choice, place: Place, timeout: Option<Duration>) -> Result<Member, Refused> {
    let limits = Limits::new(timeout);
    let patience = timeout.unwrap_or(MEET_WITHIN);
    let setting = Setting { place, limits, patience, pulse: Arc::default() };
    match choice {
        Choice::Mpi => over_mpi(setting),
        _ => over_tcp(setting),
    }
}

impl Setting {
    /// About this rank alone.
    fn problem(&self, line: impl std::fmt::Display) -> Refused {
        let Place { rank, host, .. } = &self.place;
        Refused { line: format!("rank {rank} (host {host}): {line}"), prints: true, code: 1 }
    }

    /// The same on every rank.
    fn shared_problem(&self, line: String) -> Refused {
        Refused { line, prints: self.place.rank == 0, code: 1 }
    }

    fn hello(&self, addresses: Vec<String>) -> Hello {
        let Place { rank, world, host, .. } = &self.place;
        let person =
            Person { host: host.clone(), pid: std::process::id(), process: process::identity(), addresses };
        Hello { version: env!("CARGO_PKG_VERSION").to_string(), rank: *rank, world: *world, person }
    }

    /// Rank 0 waits at the listener, the others come to one of the places; then all are watched.
    fn meet(&self, listener: Option<TcpListener>, places: &[String], hello: Hello) -> Result<Met, Refused> {
        let local = Local::new(self.place.rank, Arc::clone(&self.pulse));
        let office = Office::new(vec![local], self.limits, true).map_err(|error| self.problem(error))?;
        let office = Arc::new(office);
        let watch = Watch::new(Arc::clone(&office), 0);
        let (people, secret) = match listener {
            Some(listener) => {
                let gathered = hub::gather(&listener, hello, self.patience).map_err(|line| Refused {
                    line,
                    prints: true,
                    code: 3,
                })?;
                let (people, secret) = (gathered.people.clone(), gathered.secret);
                let hub = Hub::new(Arc::clone(&office), gathered);
                watch_with(move || hub.serve()).map_err(|error| self.problem(error))?;
                (people, secret)
            }
            None => {
                let welcomed = guest::come(places, &hello, self.patience).map_err(|closed| match closed {
                    Closed::Told(line) => Refused { line, prints: false, code: 3 },
                    Closed::Alone(line) => Refused { line, prints: true, code: 3 },
                })?;
                let (mut people, secret) = (welcomed.people.clone(), welcomed.secret);
                reach_hub(&mut people[0], welcomed.hub_address());
                let guest = Guest::new(Arc::clone(&office), welcomed);
                watch_with(move || guest.serve()).map_err(|error| self.problem(error))?;
                (people, secret)
            }
        };
        Ok(Met { people, secret, watch, office })
    }

    fn member(self, engine: Arc<dyn Engine>, met: Met, runtime: Runtime) -> Member {
        let _ = met.office.locals[0].engine.set(Arc::clone(&engine));
        let world = Communicator::new(engine, Arc::clone(&self.pulse));
        let place = placed(self.place, &met.people);
        Member { world, watch: met.watch, place, asked: None, runtime }
    }
}

/// The address at which the hub was reached works for the mesh too.
fn reach_hub(hub: &mut Person, address: Option<std::net::IpAddr>) {
    let port =
        hub.addresses.first().and_then(|address| address.rsplit_once(':')).map(|(_, port)| port.to_string());
    if let (Some(port), Some(address)) = (port, address.filter(|address| !address.is_loopback())) {
        hub.addresses.insert(0, guest::joined(address, &port));
    }
}

/// Where the launcher doesn't tell, the ranks on the same machine are counted.
fn placed(place: Place, people: &[Person]) -> Place {
    if Place::knows_locals(&environment) {
        return place;
    }
    let me = &people[place.rank];
    let near = |other: &Person| other.host == me.host && process::same_machine(&other.process, &me.process);
    let local_rank = people[..place.rank].iter().filter(|other| near(other)).count();
    let local_world = people.iter().filter(|other| near(other)).count();
    Place { local_rank, local_world: local_world.max(1), ..place }
}

fn over_tcp(setting: Setting) -> Result<Member, Refused> {
    let Meeting { host, port } =
        meeting(&setting.place, &environment).map_err(|line| setting.shared_problem(line))?;
    let door = match setting.place.rank {
        0 => Some(addresses::listen(port).map_err(|error| {
            setting.problem(format!("can't listen on port {port}: {error}; set MASTER_PORT to a free one"))
        })?),
        _ => None,
    };
    let listening = addresses::listen(0).and_then(|listener| {
        let places = mesh::places(&listener, &addresses::of_this_machine())?;
        Ok((listener, places))
    });
    let (listener, places) = listening.map_err(|error| setting.problem(error))?;
    let hub_place = if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") };
    let hello = setting.hello(places);
    let met = setting.meet(door, &[hub_place], hello)?;
    let rank = setting.place.rank;
    let deadline = Instant::now() + setting.patience;
    let mesh = Mesh { rank, people: &met.people, secret: met.secret, deadline };
    let engine = met.watch.run_part(|| {
        let streams = mesh.connect(&listener)?;
        tcp::engine(rank, streams).map_err(|error| error.to_string())
    });
    match engine {
        Ok(engine) => Ok(setting.member(engine, met, Runtime::Nothing)),
        Err(ended) => {
            let prints = ended.line.is_some();
            Err(Refused { line: ended.line.unwrap_or_default(), prints, code: ended.code })
        }
    }
}

#[cfg(not(feature = "mpi"))]
fn over_mpi(setting: Setting) -> Result<Member, Refused> {
    Err(setting.shared_problem("this vitesse was built without MPI".to_string()))
}

#[cfg(feature = "mpi")]
fn over_mpi(setting: Setting) -> Result<Member, Refused> {
    let mpi = crate::mpi::Mpi::init().map_err(|error| setting.problem(error))?;
    let (rank, world) = (mpi.rank(), mpi.size());
    if (rank, world) != (setting.place.rank, setting.place.world) {
        let Place { rank: told, world: of, launcher, .. } = &setting.place;
        return Err(setting.shared_problem(format!(
            "{launcher} says rank {told} of {of}, MPI says rank {rank} of {world}: MPI was started by something else \
             (under Slurm: srun --mpi=pmix, or --comm tcp)"
        )));
    }
    match meet_over_mpi(&setting, &mpi) {
        Ok(met) => {
            let engine = mpi.engine();
            Ok(setting.member(engine, met, Runtime::Mpi(mpi)))
        }
        Err(refused) => {
            Runtime::Mpi(mpi).abandon();
            Err(refused)
        }
    }
}

/// MPI itself tells the ranks where rank 0 listens.
#[cfg(feature = "mpi")]
fn meet_over_mpi(setting: &Setting, mpi: &crate::mpi::Mpi) -> Result<Met, Refused> {
    let failed = |error: &dyn std::fmt::Display| setting.problem(format!("can't meet the others: {error}"));
    let (mut door, mut places) = (None, Vec::new());
    if setting.place.rank == 0 {
        let listener = addresses::listen(0).map_err(|error| failed(&error))?;
        places = mesh::places(&listener, &addresses::of_this_machine()).map_err(|error| failed(&error))?;
        door = Some(listener);
    }
    // Not the run's own communicator: its calls are counted from the first of the run.
    let first = Communicator::new(mpi.engine(), Arc::default());
    let told = first
        .broadcast_bytes(first.name("addresses of rank 0"), 0, places.join(" ").into_bytes())
        .map_err(|error| failed(&error))?;
    let places: Vec<String> = String::from_utf8_lossy(&told).split_whitespace().map(str::to_string).collect();
    setting.meet(door, &places, setting.hello(Vec::new()))
}
