//! The side of every rank but 0: comes to the hub, tells it what it does, and hears the verdict.

use super::clock::Clock;
use super::judge::{Limits, Seat, State, Verdict, judge_presence};
use super::link::{Link, wait_readable};
use super::office::{Office, Report};
use super::process;
use super::wire::{Hello, Message, Person};
use std::net::{IpAddr, SocketAddr, TcpStream, ToSocketAddrs};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How often a rank tells what it does: a lost rank is said to be lost where it last was heard of.
const BEAT: Duration = Duration::from_millis(100);
/// How often to look when a verdict is near.
const LOOK_AGAIN: Duration = Duration::from_millis(20);
/// One attempt to connect; the network may drop packets to an address that isn't meant for us.
const ATTEMPT: Duration = Duration::from_secs(2);
/// After a verdict rank 0 tells it and goes first: some launchers kill it as soon as another rank is gone.
const TOLD_WITHIN: Duration = Duration::from_millis(1500);
/// The hub gives up by itself when the others don't come; a guest waits for it to say so.
const HUB_MARGIN: Duration = Duration::from_secs(3);

pub(crate) fn beat_period(limits: &Limits) -> Duration {
    BEAT.min(limits.silence / 8)
}

/// How long a control thread may wait for something to happen.
pub(super) fn patience(seats: &[Seat], next_beat: Instant) -> Duration {
    let left = next_beat.saturating_duration_since(Instant::now());
    if seats.iter().any(Seat::is_in_trouble) { left.min(LOOK_AGAIN) } else { left }
}

pub(crate) fn joined(address: IpAddr, port: &str) -> String {
    match address {
        IpAddr::V4(v4) => format!("{v4}:{port}"),
        IpAddr::V6(v6) => format!("[{v6}]:{port}"),
    }
}

/// A rank that all others came to meet.
pub(crate) struct Welcomed {
    link: Link,
    pub people: Vec<Person>,
    pub secret: u64,
}

impl Welcomed {
    /// An address of rank 0 that works from here.
    pub fn hub_address(&self) -> Option<IpAddr> {
        self.link.peer()
    }
}

/// Why a rank did not get in.
pub(crate) enum Closed {
    /// The hub knows, and tells.
    Told(String),
    Alone(String),
}

/// Comes to the hub at one of `places` (`host:port`) and waits until all ranks did.
pub(crate) fn come(places: &[String], hello: &Hello, time: Duration) -> Result<Welcomed, Closed> {
    let deadline = Instant::now() + time;
    let stream = connect(places, deadline).map_err(|problem| {
        let (rank, host) = (hello.rank, &hello.person.host);
        let seconds = time.as_secs_f64();
        Closed::Alone(format!(
            "rank {rank} (host {host}) can't reach rank 0 at {} within {seconds:.0} s: {problem}",
            places.join(", ")
        ))
    })?;
    let nobody =
        |why: &str| Closed::Alone(format!("rank {} (host {}): {why}", hello.rank, hello.person.host));
    let mut link = Link::new(stream).map_err(|error| nobody(&error.to_string()))?;
    link.send(&Message::Hello(hello.clone()));
    let deadline = Instant::now() + time + HUB_MARGIN;
    while link.is_open() && Instant::now() < deadline {
        wait_readable(&[link.as_raw_fd()], Duration::from_millis(100));
        match link.receive().into_iter().next() {
            Some(Message::Welcome { secret, people }) if people.len() == hello.world => {
                return Ok(Welcomed { link, people, secret });
            }
            Some(Message::Refused(why)) => return Err(nobody(&format!("refused by rank 0: {why}"))),
            Some(Message::Verdict(verdict)) => return Err(Closed::Told(verdict.line)),
            Some(_) => return Err(nobody("what rank 0 says makes no sense")),
            None => {}
        }
    }
    match link.is_open() {
        true => Err(nobody("rank 0 does not answer")),
        false => {
            Err(nobody("rank 0 was lost while the ranks met, or something else listens where it should"))
        }
    }
}

/// Tries the places in turn until one answers: rank 0 may not be there yet.
fn connect(places: &[String], deadline: Instant) -> Result<TcpStream, String> {
    loop {
        let mut problem = "there is no address".to_string();
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

/// What the control thread of a rank other than 0 works on.
pub(crate) struct Guest {
    office: Arc<Office>,
    clock: Clock,
    /// Rank 0 and this rank.
    seats: [Seat; 2],
    hub: Person,
    link: Link,
}

impl Guest {
    pub fn new(office: Arc<Office>, welcomed: Welcomed) -> Self {
        let mut clock = Clock::new();
        let now = clock.tick();
        let seat = |rank: usize| Seat::new(rank, &welcomed.people[rank].host, welcomed.people[rank].pid, now);
        let seats = [seat(0), seat(office.locals[0].rank)];
        Guest { clock, seats, hub: welcomed.people[0].clone(), link: welcomed.link, office }
    }

    /// Until this rank left, or the run is over.
    pub fn serve(mut self) {
        let period = beat_period(&self.office.limits);
        let (mut next_beat, mut said) = (Instant::now(), Report::Working);
        loop {
            let left = patience(&self.seats, next_beat);
            match self.link.is_open() {
                true => wait_readable(&[self.office.ear(), self.link.as_raw_fd()], left),
                false => wait_readable(&[self.office.ear()], left),
            }
            self.office.listen();
            let now = self.clock.tick();
            let local = &self.office.locals[0];
            self.seats[1].hear(local.pulse.snapshot(), local.is_busy(), now);
            match self.hear(now) {
                Some(Heard::Verdict(verdict)) => return self.end(&verdict, false),
                Some(Heard::Farewell) => return self.office.close(),
                Some(Heard::Ask) => next_beat = Instant::now(),
                None => {}
            }
            self.say(&mut said, &mut next_beat, period);
            if !self.link.is_open() && said == Report::Left {
                return self.office.close();
            }
            if let Some(verdict) = judge_presence(&self.seats, &self.office.limits, now) {
                let first = self.seats[1].rank == 1;
                if first {
                    process::end(self.hub.pid, &self.hub.process);
                }
                return self.end(&verdict, first);
            }
        }
    }

    fn hear(&mut self, now: Duration) -> Option<Heard> {
        let (seat, mut heard) = (&mut self.seats[0], None);
        for message in self.link.receive() {
            match message {
                Message::Beat { snapshot, busy } => seat.hear(snapshot, busy, now),
                Message::Ask => heard = Some(Heard::Ask),
                Message::Verdict(verdict) => return Some(Heard::Verdict(verdict)),
                Message::Farewell => return Some(Heard::Farewell),
                _ => {}
            }
        }
        if !self.link.is_open() && seat.state == State::Here {
            seat.state = State::Gone { at: now };
        }
        heard
    }

    /// Beats, and what the rank reported.
    fn say(&mut self, said: &mut Report, next_beat: &mut Instant, period: Duration) {
        let snapshot = || self.seats[1].snapshot.clone();
        if Instant::now() >= *next_beat {
            *next_beat = Instant::now() + period;
            self.link.send(&Message::Beat { snapshot: snapshot(), busy: self.seats[1].busy });
        }
        let report = self.office.reported(0);
        if report != *said {
            let beat = Message::Beat { snapshot: snapshot(), busy: false };
            let message = match &report {
                Report::Working => beat.clone(),
                Report::Left => Message::Bye(snapshot()),
                Report::Failed { cause, line } => Message::Failed { cause: *cause, line: line.clone() },
            };
            self.link.send(&beat);
            self.link.send(&message);
            *said = report;
        }
        self.link.flush();
    }

    fn end(mut self, verdict: &Verdict, prints: bool) {
        self.office.decide(verdict, prints);
        self.link.send(&Message::Farewell);
        let since = Instant::now();
        self.office.conclude(|| {
            self.link.flush();
            self.link.receive();
            self.link.is_open() && !prints && since.elapsed() < TOLD_WITHIN
        });
    }
}

enum Heard {
    Ask,
    Verdict(Verdict),
    Farewell,
}
