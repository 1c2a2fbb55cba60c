//! Control thread of rank 0: connects the ranks, receives their heartbeats, diagnoses failures, and sends the diagnosis to all.

use super::clock::Clock;
use super::connection::{Connection, wait_readable};
use super::diagnosis::{Diagnosis, RankState, RankStatus, diagnose};
use super::messages::{Hello, Message, Peer};
use super::process;
use super::process_control::{ProcessControl, Report};
use super::{client, ranks};
use std::hash::{BuildHasher, Hasher};
use std::net::TcpListener;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Time in which a new connection must identify itself as a rank.
const HELLO_WITHIN: Duration = Duration::from_secs(5);
/// Time in which clients acknowledge a diagnosis; those that haven't by then won't.
const HEARD_WITHIN: Duration = Duration::from_millis(200);

/// Connections to all ranks, once every rank has joined.
pub(crate) struct AssembledRanks {
    /// One per rank; rank 0 has none to itself.
    connections: Vec<Option<Connection>>,
    pub peers: Vec<Peer>,
    pub secret: u64,
}

/// Waits until every rank has connected, and tells each who the others are.
pub(crate) fn assemble(listener: &TcpListener, me: Hello, time: Duration) -> Result<AssembledRanks, String> {
    listener.set_nonblocking(true).map_err(|error| format!("can't listen for the other ranks: {error}"))?;
    let mut rendezvous = Rendezvous::new(me);
    let deadline = Instant::now() + time;
    while !rendezvous.missing().is_empty() {
        if Instant::now() >= deadline {
            return Err(rendezvous.close(time));
        }
        let mut descriptors = vec![listener.as_raw_fd()];
        descriptors.extend(rendezvous.coming.iter().map(|(connection, _)| connection.as_raw_fd()));
        descriptors.extend(rendezvous.connections.iter().flatten().map(Connection::as_raw_fd));
        wait_readable(&descriptors, Duration::from_millis(100));
        while let Ok((stream, _)) = listener.accept() {
            rendezvous
                .coming
                .extend(Connection::new(stream).ok().map(|connection| (connection, Instant::now())));
        }
        rendezvous.admit();
        if let Some(lost) = rendezvous.lost() {
            let line = format!("{lost} while the ranks connected");
            rendezvous.broadcast_failure(&line);
            return Err(line);
        }
    }
    Ok(rendezvous.welcome())
}

/// Admission of ranks at the start of a run.
struct Rendezvous {
    me: Hello,
    /// Connections that have not identified themselves yet.
    coming: Vec<(Connection, Instant)>,
    connections: Vec<Option<Connection>>,
    peers: Vec<Option<Peer>>,
    refused: Vec<String>,
}

impl Rendezvous {
    fn new(me: Hello) -> Self {
        let mut peers = vec![None; me.world];
        peers[0] = Some(me.peer.clone());
        let connections = (0..me.world).map(|_| None).collect();
        Rendezvous { me, coming: Vec::new(), connections, peers, refused: Vec::new() }
    }

    fn missing(&self) -> Vec<usize> {
        (0..self.me.world).filter(|rank| self.peers[*rank].is_none()).collect()
    }

    fn admit(&mut self) {
        for (mut connection, since) in std::mem::take(&mut self.coming) {
            match connection.receive().into_iter().next() {
                Some(Message::Hello(hello)) => match self.problem(&hello) {
                    Some(why) => {
                        connection.send(&Message::Refused(why.clone()));
                        self.refused
                            .push(format!("refused a connection from host {}: {why}", hello.peer.host));
                    }
                    None => self.admit_rank(hello, connection),
                },
                None if connection.is_open() && since.elapsed() < HELLO_WITHIN => {
                    self.coming.push((connection, since))
                }
                // Not a rank: something else that scans ports.
                _ => {}
            }
        }
    }

    fn admit_rank(&mut self, hello: Hello, connection: Connection) {
        let mut peer = hello.peer;
        // The address it connected from is reachable, at least from here.
        let port = peer.addresses.first().and_then(|address| address.rsplit_once(':')).map(|(_, port)| port);
        if let (Some(port), Some(address)) =
            (port, connection.peer_address().filter(|address| !address.is_loopback()))
        {
            peer.addresses.insert(0, client::host_port(address, port));
        }
        self.peers[hello.rank] = Some(peer);
        self.connections[hello.rank] = Some(connection);
    }

    fn problem(&self, hello: &Hello) -> Option<String> {
        let me = &self.me;
        let (rank, world) = (hello.rank, hello.world);
        if hello.version != me.version {
            return Some(format!("rank {rank} runs vitesse {}, rank 0 runs {}", hello.version, me.version));
        }
        if world != me.world || rank >= world {
            return Some(format!("rank {rank} has a world size of {world}, rank 0 of {}", me.world));
        }
        let taken = self.peers[rank].as_ref()?;
        let Peer { host, pid, .. } = taken;
        Some(format!("rank {rank} is connected already (host {host}, pid {pid})"))
    }

    /// Reports a rank that connected and was lost again.
    fn lost(&mut self) -> Option<String> {
        let gone = |connection: &mut Option<Connection>| {
            connection.as_mut().is_some_and(|l| l.receive().is_empty() && !l.is_open())
        };
        let rank = self.connections.iter_mut().position(gone)?;
        let Peer { host, pid, .. } = self.peers[rank].clone().unwrap_or_default();
        Some(format!("rank {rank} (host {host}, pid {pid}) was lost"))
    }

    fn close(&mut self, time: Duration) -> String {
        let missing = self.missing();
        let mut line = format!("{} of {} did not connect", ranks(&missing), self.me.world);
        line += &format!(" to host {} within {:.0} s", self.me.peer.host, time.as_secs_f64());
        if let Some(refused) = self.refused.last() {
            line += &format!(" ({refused})");
        }
        self.broadcast_failure(&line);
        line
    }

    fn broadcast_failure(&mut self, line: &str) {
        let diagnosis = Diagnosis { rank: 0, line: line.to_string(), code: 3 };
        for connection in self.connections.iter_mut().flatten() {
            connection.send(&Message::Diagnosis(diagnosis.clone()));
        }
    }

    fn welcome(mut self) -> AssembledRanks {
        let peers: Vec<Peer> = self.peers.into_iter().flatten().collect();
        let secret = std::hash::RandomState::new().build_hasher().finish();
        let welcome = Message::Welcome { secret, peers: peers.clone() };
        for connection in self.connections.iter_mut().flatten() {
            connection.send(&welcome);
        }
        AssembledRanks { connections: self.connections, peers, secret }
    }
}

/// State of the control thread of rank 0, or of ranks that are threads.
pub(crate) struct Coordinator {
    control: Arc<ProcessControl>,
    clock: Clock,
    statuses: Vec<RankStatus>,
    connections: Vec<Option<Connection>>,
    peers: Vec<Peer>,
}

impl Coordinator {
    pub fn new(control: Arc<ProcessControl>, assembled: AssembledRanks) -> Self {
        let mut clock = Clock::new();
        let now = clock.tick();
        let peers = assembled.peers;
        let statuses =
            peers.iter().enumerate().map(|(rank, p)| RankStatus::new(rank, &p.host, p.pid, now)).collect();
        Coordinator { control, clock, statuses, connections: assembled.connections, peers }
    }

    /// Makes the coordinator of ranks that are threads of this process.
    pub fn of_threads(control: Arc<ProcessControl>, host: &str) -> Self {
        let world = control.locals.len();
        let pid = std::process::id();
        let peer = Peer { host: host.to_string(), pid, ..Peer::default() };
        let connections = (0..world).map(|_| None).collect();
        Coordinator::new(control, AssembledRanks { connections, peers: vec![peer; world], secret: 0 })
    }

    /// Runs until all ranks have finished, or one has failed.
    pub fn serve(mut self) {
        let period = client::heartbeat_period(&self.control.limits);
        let mut next_heartbeat = Instant::now();
        loop {
            let mut descriptors: Vec<RawFd> = vec![self.control.wake_fd()];
            descriptors
                .extend(self.connections.iter().flatten().filter(|l| l.is_open()).map(Connection::as_raw_fd));
            wait_readable(&descriptors, client::patience(&self.statuses, next_heartbeat));
            self.control.clear_wakeups();
            let now = self.clock.tick();
            let calm = !self.statuses.iter().any(RankStatus::is_in_trouble);
            self.read_clients(now);
            self.read_local_ranks(now);
            if calm && self.statuses.iter().any(RankStatus::is_in_trouble) {
                self.send(&Message::HeartbeatRequest);
            }
            if Instant::now() >= next_heartbeat {
                next_heartbeat = Instant::now() + period;
                self.send_heartbeats();
            }
            if let Some(diagnosis) = diagnose(&self.statuses, &self.control.limits, now) {
                return self.end(&diagnosis, now);
            }
            if self.statuses.iter().all(|status| status.state == RankState::Finished) {
                // Not before: a launcher may end the rest of a job once one process has left it, and rank 0 may still be saving.
                self.send(&Message::Acknowledged);
                return self.control.close();
            }
        }
    }

    fn read_clients(&mut self, now: Duration) {
        for (status, connection) in self.statuses.iter_mut().zip(&mut self.connections) {
            let Some(connection) = connection.as_mut().filter(|connection| connection.is_open()) else {
                continue;
            };
            for message in connection.receive() {
                match message {
                    Message::Heartbeat { snapshot, busy } => status.record(snapshot, busy, now),
                    Message::Failed { cause, line } => {
                        status.state = RankState::Failed { at: now, cause, line }
                    }
                    Message::Finished(snapshot) => {
                        status.record(snapshot, false, now);
                        status.state = RankState::Finished;
                    }
                    _ => {}
                }
            }
            if !connection.is_open() && status.state == RankState::Running {
                status.state = RankState::Lost { at: now };
            }
        }
    }

    fn read_local_ranks(&mut self, now: Duration) {
        for (index, local) in self.control.locals.iter().enumerate() {
            let status = &mut self.statuses[local.rank];
            if status.state != RankState::Running {
                continue;
            }
            status.record(local.activity.snapshot(), local.is_busy(), now);
            match self.control.reported(index) {
                Report::Working => {}
                Report::Finished => status.state = RankState::Finished,
                Report::Failed { cause, line } => status.state = RankState::Failed { at: now, cause, line },
            }
        }
    }

    /// Sends rank 0's activity to the clients, which report it if rank 0 is lost.
    fn send_heartbeats(&mut self) {
        let status = &self.statuses[0];
        self.send(&Message::Heartbeat { snapshot: status.snapshot.clone(), busy: status.busy });
    }

    fn send(&mut self, message: &Message) {
        for connection in self.connections.iter_mut().flatten() {
            connection.send(message);
        }
    }

    fn end(mut self, diagnosis: &Diagnosis, now: Duration) {
        self.send(&Message::Diagnosis(diagnosis.clone()));
        self.end_silent(now);
        self.control.set_diagnosis(diagnosis, true);
        let since = Instant::now();
        let Coordinator { control, mut connections, .. } = self;
        // Rank 0 doesn't wait for the others to exit, nor they for it: mpirun kills it once they are gone, and it has yet to print.
        let mut unaware: Vec<&mut Connection> = connections.iter_mut().flatten().collect();
        control.conclude(|| {
            unaware.retain_mut(|connection| {
                connection.flush();
                !connection.receive().contains(&Message::Acknowledged) && connection.is_open()
            });
            !unaware.is_empty() && since.elapsed() < HEARD_WITHIN
        });
    }

    /// Kills stopped processes, which can't receive the diagnosis.
    fn end_silent(&self, now: Duration) {
        let silent = |status: &&RankStatus| {
            status.state == RankState::Running && now >= status.last_heartbeat + self.control.limits.silence
        };
        for status in
            self.statuses.iter().filter(silent).filter(|status| self.connections[status.rank].is_some())
        {
            process::kill_stopped(status.pid, &self.peers[status.rank].process);
        }
    }
}
