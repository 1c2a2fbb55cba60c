//! Connections between every two ranks, for the exchange.

use super::process::same_machine;
use super::wire::Person;
use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

/// What the two ends of a new connection say to each other: a number that only these ranks know, who calls, and whom.
const GREETING: usize = 24;
/// An answer takes no longer, as a thread of its own gives it.
const ANSWER: Duration = Duration::from_secs(2);

pub(crate) struct Mesh<'a> {
    pub rank: usize,
    pub people: &'a [Person],
    pub secret: u64,
    pub deadline: Instant,
}

impl Mesh<'_> {
    /// A connection to every other rank: this one calls those before it, and is called by those after it.
    pub fn connect(&self, listener: &TcpListener) -> Result<Vec<Option<TcpStream>>, String> {
        std::thread::scope(|scope| {
            let answering = scope.spawn(|| self.answer(listener));
            let mut streams: Vec<Option<TcpStream>> = Vec::new();
            for other in 0..self.rank {
                streams.push(Some(self.call(other)?));
            }
            streams.push(None);
            let answered = answering.join().unwrap_or_else(|_| Err("a thread was lost".to_string()))?;
            streams.extend(answered.into_iter().map(Some));
            Ok(streams)
        })
    }

    fn call(&self, other: usize) -> Result<TcpStream, String> {
        let person = &self.people[other];
        let addresses = self.addresses(person);
        let mut problem = "it has no address".to_string();
        while Instant::now() < self.deadline {
            for address in &addresses {
                match self.attempt(address, other) {
                    Ok(stream) => return Ok(stream),
                    Err(error) => problem = format!("{address}: {error}"),
                }
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Err(format!("can't connect to rank {other} (host {}): {problem}", person.host))
    }

    /// On the same machine its own address comes first, elsewhere it leads nowhere.
    fn addresses(&self, person: &Person) -> Vec<SocketAddr> {
        let near = same_machine(&person.process, &self.people[self.rank].process);
        let mut addresses: Vec<SocketAddr> =
            person.addresses.iter().filter_map(|address| address.parse().ok()).collect();
        addresses.retain(|address| near || !address.ip().is_loopback());
        addresses.sort_by_key(|address| near && !address.ip().is_loopback());
        addresses
    }

    fn attempt(&self, address: &SocketAddr, other: usize) -> std::io::Result<TcpStream> {
        let mut stream = TcpStream::connect_timeout(address, ANSWER)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(ANSWER))?;
        stream.write_all(&self.greeting(self.rank, other))?;
        let mut answer = [0; GREETING];
        stream.read_exact(&mut answer)?;
        if answer != self.greeting(other, self.rank) {
            return Err(std::io::Error::other("something else answers there"));
        }
        stream.set_read_timeout(None)?;
        Ok(stream)
    }

    fn answer(&self, listener: &TcpListener) -> Result<Vec<TcpStream>, String> {
        let (first, world) = (self.rank + 1, self.people.len());
        let mut streams: Vec<Option<TcpStream>> = (first..world).map(|_| None).collect();
        let failed = |error: std::io::Error| format!("can't be connected to: {error}");
        listener.set_nonblocking(true).map_err(failed)?;
        while let Some(missing) = streams.iter().position(Option::is_none) {
            if Instant::now() >= self.deadline {
                let (rank, host) = (first + missing, &self.people[first + missing].host);
                return Err(format!("rank {rank} (host {host}) did not connect"));
            }
            match listener.accept() {
                // Whoever doesn't know the number is no rank.
                Ok((stream, _)) => {
                    if let Ok((rank, stream)) = self.greeted(stream) {
                        streams[rank - first] = Some(stream);
                    }
                }
                Err(_) => std::thread::sleep(Duration::from_millis(2)),
            }
        }
        Ok(streams.into_iter().flatten().collect())
    }

    fn greeted(&self, mut stream: TcpStream) -> std::io::Result<(usize, TcpStream)> {
        stream.set_nonblocking(false)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(ANSWER))?;
        let mut greeting = [0; GREETING];
        stream.read_exact(&mut greeting)?;
        let caller =
            (self.rank + 1..self.people.len()).find(|other| self.greeting(*other, self.rank) == greeting);
        let caller = caller.ok_or_else(|| std::io::Error::other("no rank"))?;
        stream.write_all(&self.greeting(self.rank, caller))?;
        stream.set_read_timeout(None)?;
        Ok((caller, stream))
    }

    fn greeting(&self, from: usize, to: usize) -> [u8; GREETING] {
        let mut bytes = [0; GREETING];
        for (part, number) in bytes.chunks_exact_mut(8).zip([self.secret, from as u64, to as u64]) {
            part.copy_from_slice(&number.to_le_bytes());
        }
        bytes
    }
}

/// Where a listener of this machine can be called.
pub(crate) fn places(listener: &TcpListener, addresses: &[IpAddr]) -> std::io::Result<Vec<String>> {
    let port = listener.local_addr()?.port();
    Ok(addresses.iter().map(|address| SocketAddr::new(*address, port).to_string()).collect())
}
