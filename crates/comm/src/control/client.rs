//! Control thread of every rank but 0: connects to the coordinator, sends it heartbeats, and receives the diagnosis.

use super::clock::Clock;
use super::connection::{Connection, wait_readable};
use super::diagnosis::{Diagnosis, Limits, RankState, RankStatus, diagnose_presence};
use super::messages::{Hello, Message, Peer};
use super::process;
use super::process_control::{ProcessControl, Report};
use std::net::{IpAddr, SocketAddr, TcpStream, ToSocketAddrs};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Period of heartbeats: a lost rank is reported in the activity of its last one.
const HEARTBEAT: Duration = Duration::from_millis(100);
/// Period of checks while a diagnosis is near.
const LOOK_AGAIN: Duration = Duration::from_millis(20);
/// Timeout of one attempt to connect: the network may drop packets to an address that this machine can't reach.
const ATTEMPT: Duration = Duration::from_secs(2);
/// Wait after a diagnosis, so that rank 0 prints it and exits first: some launchers kill it as soon as another rank is gone.
const PRINTED_WITHIN: Duration = Duration::from_millis(1500);
/// Extra time to wait for the coordinator, which reports by itself when ranks don't connect.
const HUB_MARGIN: Duration = Duration::from_secs(3);

pub(crate) fn heartbeat_period(limits: &Limits) -> Duration {
    HEARTBEAT.min(limits.silence / 8)
}

/// Longest time that a control thread may sleep.
pub(super) fn patience(statuses: &[RankStatus], next_heartbeat: Instant) -> Duration {
    let left = next_heartbeat.saturating_duration_since(Instant::now());
    if statuses.iter().any(RankStatus::is_in_trouble) { left.min(LOOK_AGAIN) } else { left }
}

pub(crate) fn host_port(address: IpAddr, port: &str) -> String {
    match address {
        IpAddr::V4(v4) => format!("{v4}:{port}"),
        IpAddr::V6(v6) => format!("[{v6}]:{port}"),
    }
}

/// Connection to the coordinator, once all ranks have joined.
pub(crate) struct Joined {
    connection: Connection,
    pub peers: Vec<Peer>,
    pub secret: u64,
}

impl Joined {
    /// Address of rank 0 that is reachable from here.
    pub fn coordinator_address(&self) -> Option<IpAddr> {
        self.connection.peer_address()
    }
}

/// Reason why a rank could not join.
pub(crate) enum JoinError {
    /// The coordinator knows it, and prints it.
    Reported(String),
    /// Only this rank knows it.
    Unreported(String),
}

/// Connects to the coordinator at one of `places` (`host:port`) and waits until all ranks have.
pub(crate) fn join(places: &[String], hello: &Hello, time: Duration) -> Result<Joined, JoinError> {
    let deadline = Instant::now() + time;
    let stream = connect(places, deadline).map_err(|problem| {
        let (rank, host) = (hello.rank, &hello.peer.host);
        let seconds = time.as_secs_f64();
        JoinError::Unreported(format!(
            "rank {rank} (host {host}) can't reach rank 0 at {} within {seconds:.0} s: {problem}",
            places.join(", ")
        ))
    })?;
    let nobody =
        |why: &str| JoinError::Unreported(format!("rank {} (host {}): {why}", hello.rank, hello.peer.host));
    let mut connection = Connection::new(stream).map_err(|error| nobody(&error.to_string()))?;
    connection.send(&Message::Hello(hello.clone()));
    let deadline = Instant::now() + time + HUB_MARGIN;
    while connection.is_open() && Instant::now() < deadline {
        wait_readable(&[connection.as_raw_fd()], Duration::from_millis(100));
        match connection.receive().into_iter().next() {
            Some(Message::Welcome { secret, peers }) if peers.len() == hello.world => {
                return Ok(Joined { connection, peers, secret });
            }
            Some(Message::Refused(why)) => return Err(nobody(&format!("refused by rank 0: {why}"))),
            Some(Message::Diagnosis(diagnosis)) => return Err(JoinError::Reported(diagnosis.line)),
            Some(_) => return Err(nobody("unexpected answer from rank 0")),
            None => {}
        }
    }
    match connection.is_open() {
        true => Err(nobody("rank 0 does not answer")),
        false => {
            Err(nobody("rank 0 was lost while the ranks connected, or another program listens on its port"))
        }
    }
}

/// Tries the places in turn until one answers: rank 0 may not have started yet.
fn connect(places: &[String], deadline: Instant) -> Result<TcpStream, String> {
    loop {
        let mut problem = "no address was given".to_string();
        for place in places {
            match place.to_socket_addrs() {
                Ok(addresses) => {
                    for address in addresses {
                        match attempt(&address, deadline) {
                            Ok(stream) => return Ok(stream),
                            Err(error) => problem = error.to_string(),
                        }
                    }
                }
                Err(error) => problem = error.to_string(),
            }
        }
        if Instant::now() >= deadline {
            return Err(problem);
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn attempt(address: &SocketAddr, deadline: Instant) -> std::io::Result<TcpStream> {
    let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(50));
    TcpStream::connect_timeout(address, left.min(ATTEMPT))
}

/// State of the control thread of a rank other than 0.
pub(crate) struct Client {
    control: Arc<ProcessControl>,
    clock: Clock,
    /// Status of rank 0 and of this rank.
    statuses: [RankStatus; 2],
    coordinator: Peer,
    connection: Connection,
}

impl Client {
    pub fn new(control: Arc<ProcessControl>, joined_run: Joined) -> Self {
        let mut clock = Clock::new();
        let now = clock.tick();
        let status = |rank: usize| {
            RankStatus::new(rank, &joined_run.peers[rank].host, joined_run.peers[rank].pid, now)
        };
        let statuses = [status(0), status(control.locals[0].rank)];
        Client {
            clock,
            statuses,
            coordinator: joined_run.peers[0].clone(),
            connection: joined_run.connection,
            control,
        }
    }

    /// Runs until this rank has finished, or the run is over.
    pub fn serve(mut self) {
        let period = heartbeat_period(&self.control.limits);
        let (mut next_heartbeat, mut said) = (Instant::now(), Report::Working);
        loop {
            let left = patience(&self.statuses, next_heartbeat);
            match self.connection.is_open() {
                true => wait_readable(&[self.control.wake_fd(), self.connection.as_raw_fd()], left),
                false => wait_readable(&[self.control.wake_fd()], left),
            }
            self.control.clear_wakeups();
            let now = self.clock.tick();
            let local = &self.control.locals[0];
            self.statuses[1].record(local.activity.snapshot(), local.is_busy(), now);
            match self.record(now) {
                Some(Event::Diagnosis(diagnosis)) => return self.end(&diagnosis, false),
                Some(Event::Acknowledged) => return self.control.close(),
                Some(Event::HeartbeatRequest) => next_heartbeat = Instant::now(),
                None => {}
            }
            self.say(&mut said, &mut next_heartbeat, period);
            if !self.connection.is_open() && said == Report::Finished {
                return self.control.close();
            }
            if let Some(diagnosis) = diagnose_presence(&self.statuses, &self.control.limits, now) {
                let first = self.statuses[1].rank == 1;
                if first {
                    process::kill_stopped(self.coordinator.pid, &self.coordinator.process);
                }
                return self.end(&diagnosis, first);
            }
        }
    }

    fn record(&mut self, now: Duration) -> Option<Event> {
        let (status, mut last_heartbeat) = (&mut self.statuses[0], None);
        for message in self.connection.receive() {
            match message {
                Message::Heartbeat { snapshot, busy } => status.record(snapshot, busy, now),
                Message::HeartbeatRequest => last_heartbeat = Some(Event::HeartbeatRequest),
                Message::Diagnosis(diagnosis) => return Some(Event::Diagnosis(diagnosis)),
                Message::Acknowledged => return Some(Event::Acknowledged),
                _ => {}
            }
        }
        if !self.connection.is_open() && status.state == RankState::Running {
            status.state = RankState::Lost { at: now };
        }
        last_heartbeat
    }

    /// Sends heartbeats, and what the rank reported.
    fn say(&mut self, said: &mut Report, next_heartbeat: &mut Instant, period: Duration) {
        let snapshot = || self.statuses[1].snapshot.clone();
        if Instant::now() >= *next_heartbeat {
            *next_heartbeat = Instant::now() + period;
            self.connection.send(&Message::Heartbeat { snapshot: snapshot(), busy: self.statuses[1].busy });
        }
        let report = self.control.reported(0);
        if report != *said {
            let advance = Message::Heartbeat { snapshot: snapshot(), busy: false };
            let message = match &report {
                Report::Working => advance.clone(),
                Report::Finished => Message::Finished(snapshot()),
                Report::Failed { cause, line } => Message::Failed { cause: *cause, line: line.clone() },
            };
            self.connection.send(&advance);
            self.connection.send(&message);
            *said = report;
        }
        self.connection.flush();
    }

    fn end(mut self, diagnosis: &Diagnosis, prints: bool) {
        self.control.set_diagnosis(diagnosis, prints);
        self.connection.send(&Message::Acknowledged);
        let since = Instant::now();
        self.control.conclude(|| {
            self.connection.flush();
            self.connection.receive();
            self.connection.is_open() && !prints && since.elapsed() < PRINTED_WITHIN
        });
    }
}

enum Event {
    HeartbeatRequest,
    Diagnosis(Diagnosis),
    Acknowledged,
}
