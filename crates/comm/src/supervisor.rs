//! Connection between rank 0 and the process that started mpirun.
//!
//! mpirun may hang when it can't reach a host any more, though all ranks have ended. So rank 0 tells the supervisor by itself that it
//! runs, and how it ends. Without this connection, over a network that doesn't let it through, the supervisor only knows mpirun's end.

use crate::control::{addresses, mesh};
use std::hash::{BuildHasher, Hasher};
use std::io::{self, ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream, ToSocketAddrs};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Environment variable with a secret and the addresses of the supervisor, separated by commas.
pub const SUPERVISOR: &str = "VITESSE_SUPERVISOR";

/// Period of rank 0's heartbeats.
const HEARTBEAT: Duration = Duration::from_millis(500);
/// Timeout of one attempt to connect.
const ATTEMPT: Duration = Duration::from_secs(2);
/// Byte of a heartbeat.
const ALIVE: u8 = b'.';
/// Byte before the exit code.
const END: u8 = b'e';

/// State of rank 0, as far as the supervisor knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seen {
    /// It has not connected.
    Nothing,
    /// It sent its last heartbeat at this time.
    Running(Instant),
    /// It ended at this time, with this exit code unless it was killed.
    Ended(Instant, Option<u8>),
}

/// Connections that have not proven yet to be rank 0's.
const MOST_STRANGERS: usize = 16;

/// A connection, and what it sent that was not taken in yet.
struct Caller {
    stream: TcpStream,
    bytes: Vec<u8>,
}

impl Caller {
    /// Reads what has come; false once nothing more will.
    fn read(&mut self) -> bool {
        let mut bytes = [0; 64];
        match self.stream.read(&mut bytes) {
            Ok(0) => false,
            Ok(count) => {
                self.bytes.extend_from_slice(&bytes[..count]);
                true
            }
            Err(error) => error.kind() == ErrorKind::WouldBlock,
        }
    }
}

/// The supervisor's end of the connection.
pub struct Watcher {
    listener: TcpListener,
    secret: [u8; 8],
    strangers: Vec<Caller>,
    rank_0: Option<Caller>,
    seen: Seen,
}

impl Watcher {
    pub fn listen() -> io::Result<Self> {
        let listener = addresses::listen(0)?;
        listener.set_nonblocking(true)?;
        let secret = std::hash::RandomState::new().build_hasher().finish().to_le_bytes();
        Ok(Watcher { listener, secret, strangers: Vec::new(), rank_0: None, seen: Seen::Nothing })
    }

    /// Value of [`SUPERVISOR`] for rank 0.
    pub fn address(&self) -> io::Result<String> {
        let places = mesh::places(&self.listener, &addresses::of_this_machine())?;
        Ok(format!("{},{}", u64::from_le_bytes(self.secret), places.join(",")))
    }

    /// Takes in what rank 0 has sent since.
    pub fn look(&mut self) -> Seen {
        if self.rank_0.is_none() {
            self.find_rank_0();
        }
        let Some(caller) = &mut self.rank_0 else { return self.seen };
        let open = caller.read();
        let code = caller.bytes.iter().position(|byte| *byte == END).and_then(|at| caller.bytes.get(at + 1));
        self.seen = match (code, self.seen) {
            (Some(code), _) => Seen::Ended(Instant::now(), Some(*code)),
            (None, _) if !open => Seen::Ended(Instant::now(), None),
            (None, _) if caller.bytes.contains(&ALIVE) => Seen::Running(Instant::now()),
            (None, seen) => seen,
        };
        caller.bytes.retain(|byte| *byte != ALIVE);
        if let Seen::Ended(..) = self.seen {
            self.rank_0 = None;
        }
        self.seen
    }

    /// Rank 0 is the caller that knows the secret.
    fn find_rank_0(&mut self) {
        while let Ok((stream, _)) = self.listener.accept() {
            if self.strangers.len() < MOST_STRANGERS && stream.set_nonblocking(true).is_ok() {
                self.strangers.push(Caller { stream, bytes: Vec::new() });
            }
        }
        self.strangers.retain_mut(Caller::read);
        self.strangers.retain(|caller| self.secret.starts_with(&caller.bytes[..caller.bytes.len().min(8)]));
        if let Some(at) = self.strangers.iter().position(|caller| caller.bytes.starts_with(&self.secret)) {
            let mut caller = self.strangers.swap_remove(at);
            caller.bytes.drain(..self.secret.len());
            (self.rank_0, self.seen) = (Some(caller), Seen::Running(Instant::now()));
        }
    }
}

/// Rank 0's end of the connection. It is closed when the process ends, however it does.
#[derive(Clone, Default)]
pub struct Reporter(Option<Arc<Mutex<TcpStream>>>);

impl Reporter {
    /// Connects to the supervisor that [`SUPERVISOR`] names, if this is rank 0 and there is one.
    pub fn connect(rank: usize, supervisor: Option<&str>) -> Self {
        let stream = supervisor.filter(|_| rank == 0).and_then(stream_to);
        let reporter = Reporter(stream.map(|stream| Arc::new(Mutex::new(stream))));
        if let Some(stream) = reporter.0.clone() {
            let beat = move || {
                while send(&stream, &[ALIVE]).is_ok() {
                    std::thread::sleep(HEARTBEAT);
                }
            };
            // Without it the supervisor believes this rank lost, and it would be.
            if std::thread::Builder::new().name("vitesse-heartbeat".to_string()).spawn(beat).is_err() {
                return Reporter(None);
            }
        }
        reporter
    }

    /// Tells the exit code of this process, which ends now.
    pub fn end(&self, code: u8) {
        if let Some(stream) = &self.0 {
            // A supervisor that is gone needs no word.
            let _ = send(stream, &[END, code]);
        }
    }
}

fn send(stream: &Mutex<TcpStream>, bytes: &[u8]) -> io::Result<()> {
    stream.lock().unwrap_or_else(PoisonError::into_inner).write_all(bytes)
}

fn stream_to(supervisor: &str) -> Option<TcpStream> {
    let (secret, places) = supervisor.split_once(',')?;
    let secret: u64 = secret.parse().ok()?;
    let addresses = places.split(',').filter_map(|place| place.to_socket_addrs().ok()).flatten();
    let mut stream =
        addresses.into_iter().find_map(|address| TcpStream::connect_timeout(&address, ATTEMPT).ok())?;
    let _ = stream.set_nodelay(true);
    stream.set_write_timeout(Some(ATTEMPT)).ok()?;
    stream.write_all(&secret.to_le_bytes()).ok()?;
    Some(stream)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn eventually(watcher: &mut Watcher, is_so: impl Fn(Seen) -> bool) {
        let deadline = Instant::now() + Duration::from_secs(20);
        while !is_so(watcher.look()) {
            assert!(Instant::now() < deadline, "{:?}", watcher.look());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn the_supervisor_hears_of_life_and_end() {
        let mut watcher = Watcher::listen().unwrap();
        assert_eq!(watcher.look(), Seen::Nothing);
        let address = watcher.address().unwrap();
        assert!(Reporter::connect(1, Some(&address)).0.is_none(), "only rank 0 tells");
        let reporter = Reporter::connect(0, Some(&address));
        eventually(&mut watcher, |seen| matches!(seen, Seen::Running(_)));
        let Seen::Running(first) = watcher.look() else { panic!("it runs") };
        eventually(&mut watcher, |seen| matches!(seen, Seen::Running(last) if last > first));
        reporter.end(3);
        eventually(&mut watcher, |seen| matches!(seen, Seen::Ended(_, Some(3))));
    }

    #[test]
    fn a_killed_rank_has_no_exit_code_and_a_stranger_is_not_heard() {
        let mut watcher = Watcher::listen().unwrap();
        let address = watcher.address().unwrap();
        let (secret, places) = address.split_once(',').unwrap();
        let wrong = secret.parse::<u64>().unwrap() ^ 1;
        let mut stranger = stream_to(&format!("{wrong},{places}")).unwrap();
        stranger.write_all(&[ALIVE, END, 0]).unwrap();
        let mut silent = stream_to(&address).unwrap();
        eventually(&mut watcher, |seen| matches!(seen, Seen::Running(_)));
        silent.write_all(&[ALIVE]).unwrap();
        drop(silent);
        eventually(&mut watcher, |seen| matches!(seen, Seen::Ended(_, None)));
    }
}
