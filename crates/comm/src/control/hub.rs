//! Rank 0's side: gathers the ranks, hears what they do, judges, and tells the verdict.

use super::clock::Clock;
use super::judge::{Seat, State, Verdict, judge};
use super::link::{Link, wait_readable};
use super::office::{Office, Report};
use super::process;
use super::wire::{Hello, Message, Person};
use super::{guest, ranks};
use std::hash::{BuildHasher, Hasher};
use std::net::TcpListener;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A connection that hasn't said who it is by then is no rank.
const HELLO_WITHIN: Duration = Duration::from_secs(5);
/// After a verdict, guests that haven't said by then that they heard it won't.
const HEARD_WITHIN: Duration = Duration::from_millis(200);

/// The ranks, once all are here.
pub(crate) struct Gathered {
    /// By rank; rank 0 has none.
    links: Vec<Option<Link>>,
    pub people: Vec<Person>,
    pub secret: u64,
}

/// Waits until every rank came, and welcomes them.
pub(crate) fn gather(listener: &TcpListener, me: Hello, time: Duration) -> Result<Gathered, String> {
    listener.set_nonblocking(true).map_err(|error| format!("can't listen for the other ranks: {error}"))?;
    let mut door = Door::new(me);
    let deadline = Instant::now() + time;
    while !door.missing().is_empty() {
        if Instant::now() >= deadline {
            return Err(door.close(time));
        }
        let mut descriptors = vec![listener.as_raw_fd()];
        descriptors.extend(door.coming.iter().map(|(link, _)| link.as_raw_fd()));
        descriptors.extend(door.links.iter().flatten().map(Link::as_raw_fd));
        wait_readable(&descriptors, Duration::from_millis(100));
        while let Ok((stream, _)) = listener.accept() {
            door.coming.extend(Link::new(stream).ok().map(|link| (link, Instant::now())));
        }
        door.admit();
        if let Some(lost) = door.lost() {
            let line = format!("{lost} while the ranks met");
            door.tell_all(&line);
            return Err(line);
        }
    }
    Ok(door.welcome())
}

/// Where ranks come in.
struct Door {
    me: Hello,
    /// Connections that didn't say yet who they are.
    coming: Vec<(Link, Instant)>,
    links: Vec<Option<Link>>,
    people: Vec<Option<Person>>,
    refused: Vec<String>,
}

impl Door {
    fn new(me: Hello) -> Self {
        let mut people = vec![None; me.world];
        people[0] = Some(me.person.clone());
        let links = (0..me.world).map(|_| None).collect();
        Door { me, coming: Vec::new(), links, people, refused: Vec::new() }
    }

    fn missing(&self) -> Vec<usize> {
        (0..self.me.world).filter(|rank| self.people[*rank].is_none()).collect()
    }

    fn admit(&mut self) {
        for (mut link, since) in std::mem::take(&mut self.coming) {
            match link.receive().into_iter().next() {
                Some(Message::Hello(hello)) => match self.problem(&hello) {
                    Some(why) => {
                        link.send(&Message::Refused(why.clone()));
                        self.refused.push(format!("refused one from host {}: {why}", hello.person.host));
                    }
                    None => self.seat(hello, link),
                },
                None if link.is_open() && since.elapsed() < HELLO_WITHIN => self.coming.push((link, since)),
                // No rank: something else that tries ports.
                _ => {}
            }
        }
    }

    fn seat(&mut self, hello: Hello, link: Link) {
        let mut person = hello.person;
        // The address it came from is one that works, at least from here.
        let port =
            person.addresses.first().and_then(|address| address.rsplit_once(':')).map(|(_, port)| port);
        if let (Some(port), Some(peer)) = (port, link.peer().filter(|peer| !peer.is_loopback())) {
            person.addresses.insert(0, guest::joined(peer, port));
        }
        self.people[hello.rank] = Some(person);
        self.links[hello.rank] = Some(link);
    }

    fn problem(&self, hello: &Hello) -> Option<String> {
        let me = &self.me;
        let (rank, world) = (hello.rank, hello.world);
        if hello.version != me.version {
            return Some(format!("rank {rank} is vitesse {}, rank 0 is {}", hello.version, me.version));
        }
        if world != me.world || rank >= world {
            return Some(format!("rank {rank} is one of {world} ranks, rank 0 one of {}", me.world));
        }
        let taken = self.people[rank].as_ref()?;
        let Person { host, pid, .. } = taken;
        Some(format!("there is a rank {rank} already (host {host}, pid {pid})"))
    }

    /// A rank that came and went.
    fn lost(&mut self) -> Option<String> {
        let gone =
            |link: &mut Option<Link>| link.as_mut().is_some_and(|l| l.receive().is_empty() && !l.is_open());
        let rank = self.links.iter_mut().position(gone)?;
        let Person { host, pid, .. } = self.people[rank].clone().unwrap_or_default();
        Some(format!("rank {rank} (host {host}, pid {pid}) was lost"))
    }

    fn close(&mut self, time: Duration) -> String {
        let missing = self.missing();
        let mut line = format!("{} of {} did not come", ranks(&missing), self.me.world);
        line += &format!(" to host {} within {:.0} s", self.me.person.host, time.as_secs_f64());
        if let Some(refused) = self.refused.last() {
            line += &format!(" ({refused})");
        }
        self.tell_all(&line);
        line
    }

    fn tell_all(&mut self, line: &str) {
        let verdict = Verdict { rank: 0, line: line.to_string(), code: 3 };
        for link in self.links.iter_mut().flatten() {
            link.send(&Message::Verdict(verdict.clone()));
        }
    }

    fn welcome(mut self) -> Gathered {
        let people: Vec<Person> = self.people.into_iter().flatten().collect();
        let secret = std::hash::RandomState::new().build_hasher().finish();
        let welcome = Message::Welcome { secret, people: people.clone() };
        for link in self.links.iter_mut().flatten() {
            link.send(&welcome);
        }
        Gathered { links: self.links, people, secret }
    }
}

/// What the control thread of rank 0, or of ranks that are threads, works on.
pub(crate) struct Hub {
    office: Arc<Office>,
    clock: Clock,
    seats: Vec<Seat>,
    links: Vec<Option<Link>>,
    people: Vec<Person>,
}

impl Hub {
    pub fn new(office: Arc<Office>, gathered: Gathered) -> Self {
        let mut clock = Clock::new();
        let now = clock.tick();
        let people = gathered.people;
        let seats = people.iter().enumerate().map(|(rank, p)| Seat::new(rank, &p.host, p.pid, now)).collect();
        Hub { office, clock, seats, links: gathered.links, people }
    }

    /// A hub of ranks that are threads of this process.
    pub fn of_threads(office: Arc<Office>, host: &str) -> Self {
        let world = office.locals.len();
        let pid = std::process::id();
        let person = Person { host: host.to_string(), pid, ..Person::default() };
        let links = (0..world).map(|_| None).collect();
        Hub::new(office, Gathered { links, people: vec![person; world], secret: 0 })
    }

    /// Until all ranks left, or one failed.
    pub fn serve(mut self) {
        let period = guest::beat_period(&self.office.limits);
        let mut next_beat = Instant::now();
        loop {
            let mut descriptors: Vec<RawFd> = vec![self.office.ear()];
            descriptors.extend(self.links.iter().flatten().filter(|l| l.is_open()).map(Link::as_raw_fd));
            wait_readable(&descriptors, guest::patience(&self.seats, next_beat));
            self.office.listen();
            let now = self.clock.tick();
            let calm = !self.seats.iter().any(Seat::is_in_trouble);
            self.hear_guests(now);
            self.hear_locals(now);
            if calm && self.seats.iter().any(Seat::is_in_trouble) {
                self.send(&Message::Ask);
            }
            if Instant::now() >= next_beat {
                next_beat = Instant::now() + period;
                self.send_beats();
            }
            if let Some(verdict) = judge(&self.seats, &self.office.limits, now) {
                return self.end(&verdict, now);
            }
            if self.seats.iter().all(|seat| seat.state == State::Left) {
                return self.office.close();
            }
        }
    }

    fn hear_guests(&mut self, now: Duration) {
        for (seat, link) in self.seats.iter_mut().zip(&mut self.links) {
            let Some(link) = link.as_mut().filter(|link| link.is_open()) else { continue };
            for message in link.receive() {
                match message {
                    Message::Beat { snapshot, busy } => seat.hear(snapshot, busy, now),
                    Message::Failed { cause, line } => seat.state = State::Failed { at: now, cause, line },
                    Message::Bye(snapshot) => {
                        seat.hear(snapshot, false, now);
                        seat.state = State::Left;
                        link.send(&Message::Farewell);
                    }
                    _ => {}
                }
            }
            if !link.is_open() && seat.state == State::Here {
                seat.state = State::Gone { at: now };
            }
        }
    }

    fn hear_locals(&mut self, now: Duration) {
        for (index, local) in self.office.locals.iter().enumerate() {
            let seat = &mut self.seats[local.rank];
            if seat.state != State::Here {
                continue;
            }
            seat.hear(local.pulse.snapshot(), local.is_busy(), now);
            match self.office.reported(index) {
                Report::Working => {}
                Report::Left => seat.state = State::Left,
                Report::Failed { cause, line } => seat.state = State::Failed { at: now, cause, line },
            }
        }
    }

    /// Guests hear what rank 0 does, to be able to tell if it goes.
    fn send_beats(&mut self) {
        let seat = &self.seats[0];
        self.send(&Message::Beat { snapshot: seat.snapshot.clone(), busy: seat.busy });
    }

    fn send(&mut self, message: &Message) {
        for link in self.links.iter_mut().flatten() {
            link.send(message);
        }
    }

    fn end(mut self, verdict: &Verdict, now: Duration) {
        self.send(&Message::Verdict(verdict.clone()));
        self.end_silent(now);
        self.office.decide(verdict, true);
        let since = Instant::now();
        let Hub { office, mut links, .. } = self;
        // Rank 0 doesn't wait for the others' end, nor they for its: mpirun kills it once they go, and it has yet to tell.
        let mut unaware: Vec<&mut Link> = links.iter_mut().flatten().collect();
        office.conclude(|| {
            unaware.retain_mut(|link| {
                link.flush();
                !link.receive().contains(&Message::Farewell) && link.is_open()
            });
            !unaware.is_empty() && since.elapsed() < HEARD_WITHIN
        });
    }

    /// A stopped process doesn't hear the verdict.
    fn end_silent(&self, now: Duration) {
        let silent =
            |seat: &&Seat| seat.state == State::Here && now >= seat.heard + self.office.limits.silence;
        for seat in self.seats.iter().filter(silent).filter(|seat| self.links[seat.rank].is_some()) {
            process::end(seat.pid, &self.people[seat.rank].process);
        }
    }
}
