//! Full mesh of TCP connections, one between every two ranks.

use super::messages::Peer;
use super::process::same_machine;
use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

/// Bytes that the two ends of a new connection send each other: the run's secret, the sender's rank and the receiver's.
const HANDSHAKE: usize = 24;
/// Timeout of an answer, which a thread of its own gives.
const ANSWER: Duration = Duration::from_secs(2);

pub(crate) struct PeerMesh<'a> {
    pub rank: usize,
    pub peers: &'a [Peer],
    pub secret: u64,
    pub deadline: Instant,
}

impl PeerMesh<'_> {
    /// Connects to every other rank: this one connects to those before it, and accepts those after it.
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
        let peer = &self.peers[other];
        let addresses = self.addresses(peer);
        let mut problem = "it sent no address".to_string();
        while Instant::now() < self.deadline {
            for address in &addresses {
                match self.attempt(address, other) {
                    Ok(stream) => return Ok(stream),
                    Err(error) => problem = format!("{address}: {error}"),
                }
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Err(format!("can't connect to rank {other} (host {}): {problem}", peer.host))
    }

    /// Addresses of a peer in the order to try: on the same machine loopback first, elsewhere never.
    fn addresses(&self, peer: &Peer) -> Vec<SocketAddr> {
        let near = same_machine(&peer.process, &self.peers[self.rank].process);
        let mut addresses: Vec<SocketAddr> =
            peer.addresses.iter().filter_map(|address| address.parse().ok()).collect();
        addresses.retain(|address| near || !address.ip().is_loopback());
        addresses.sort_by_key(|address| near && !address.ip().is_loopback());
        addresses
    }

    fn attempt(&self, address: &SocketAddr, other: usize) -> std::io::Result<TcpStream> {
        let mut stream = TcpStream::connect_timeout(address, ANSWER)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(ANSWER))?;
        stream.write_all(&self.handshake(self.rank, other))?;
        let mut answer = [0; HANDSHAKE];
        stream.read_exact(&mut answer)?;
        if answer != self.handshake(other, self.rank) {
            return Err(std::io::Error::other("another program answers there"));
        }
        stream.set_read_timeout(None)?;
        Ok(stream)
    }

    fn answer(&self, listener: &TcpListener) -> Result<Vec<TcpStream>, String> {
        let (first, world) = (self.rank + 1, self.peers.len());
        let mut streams: Vec<Option<TcpStream>> = (first..world).map(|_| None).collect();
        let failed = |error: std::io::Error| format!("can't accept connections: {error}");
        listener.set_nonblocking(true).map_err(failed)?;
        while let Some(missing) = streams.iter().position(Option::is_none) {
            if Instant::now() >= self.deadline {
                let (rank, host) = (first + missing, &self.peers[first + missing].host);
                return Err(format!("rank {rank} (host {host}) did not connect"));
            }
            match listener.accept() {
                // Whoever doesn't know the secret is not a rank.
                Ok((stream, _)) => {
                    if let Ok((rank, stream)) = self.accept_handshake(stream) {
                        streams[rank - first] = Some(stream);
                    }
                }
                Err(_) => std::thread::sleep(Duration::from_millis(2)),
            }
        }
        Ok(streams.into_iter().flatten().collect())
    }

    fn accept_handshake(&self, mut stream: TcpStream) -> std::io::Result<(usize, TcpStream)> {
        stream.set_nonblocking(false)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(ANSWER))?;
        let mut handshake = [0; HANDSHAKE];
        stream.read_exact(&mut handshake)?;
        let caller =
            (self.rank + 1..self.peers.len()).find(|other| self.handshake(*other, self.rank) == handshake);
        let caller = caller.ok_or_else(|| std::io::Error::other("not a rank"))?;
        stream.write_all(&self.handshake(self.rank, caller))?;
        stream.set_read_timeout(None)?;
        Ok((caller, stream))
    }

    fn handshake(&self, from: usize, to: usize) -> [u8; HANDSHAKE] {
        let mut bytes = [0; HANDSHAKE];
        for (part, number) in bytes.chunks_exact_mut(8).zip([self.secret, from as u64, to as u64]) {
            part.copy_from_slice(&number.to_le_bytes());
        }
        bytes
    }
}

/// Addresses at which a listener of this machine can be reached.
pub(crate) fn places(listener: &TcpListener, addresses: &[IpAddr]) -> std::io::Result<Vec<String>> {
    let port = listener.local_addr()?.port();
    Ok(addresses.iter().map(|address| SocketAddr::new(*address, port).to_string()).collect())
}
