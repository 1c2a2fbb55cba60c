//! Connections of a sub-group, made with the help of those of the whole group.

use super::{TcpTransport, fault};
use crate::engine::CommError;
use crate::transport::Transport;
use std::hash::{BuildHasher, RandomState};
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

/// Time for the ranks of a split to connect: all call it at about the same time, so a network that takes longer is broken.
const PATIENCE: Duration = Duration::from_secs(30);

/// Bytes that a rank sends to the others: the port on which it listens, and a secret that a peer must know.
const ENDPOINT: usize = 16;
/// Bytes that a rank sends on connecting: that secret, and its rank.
const HANDSHAKE: usize = 16;

fn words(a: u64, b: u64) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&a.to_le_bytes());
    bytes[8..].copy_from_slice(&b.to_le_bytes());
    bytes
}

fn word(bytes: &[u8], index: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[index * 8..][..8]);
    u64::from_le_bytes(word)
}

/// Connects this rank to the other `members`; lower ones connect to higher ones. Returns its rank among them too.
pub(super) fn connect(
    mesh: &TcpTransport,
    members: &[usize],
    number: u64,
) -> Result<(usize, Vec<Option<TcpStream>>), CommError> {
    let failed = |what: &str, e: std::io::Error| fault(format!("can't {what} for a sub-group: {e}"));
    let place = members.iter().position(|&rank| rank == mesh.rank).unwrap_or(0);
    let listener = listen(mesh).map_err(|e| failed("listen", e))?;
    let port = listener.local_addr().map_err(|e| failed("listen", e))?.port();
    let secret = RandomState::new().hash_one((number, mesh.rank));

    let mut endpoints = vec![0; mesh.size() * ENDPOINT];
    endpoints[mesh.rank * ENDPOINT..][..ENDPOINT].copy_from_slice(&words(u64::from(port), secret));
    let parts: Vec<_> = (0..mesh.size()).map(|rank| rank * ENDPOINT..(rank + 1) * ENDPOINT).collect();
    // SAFETY: an endpoint for each rank.
    unsafe { mesh.all_gather(endpoints.as_mut_ptr(), &parts) }?;

    let mut streams: Vec<Option<TcpStream>> = members.iter().map(|_| None).collect();
    for (at, &rank) in members.iter().enumerate().skip(place + 1) {
        let lost = |e: std::io::Error| CommError::Lost { rank, why: format!("can't connect to it: {e}") };
        let Some(stream) = &mesh.sockets.streams[rank] else { continue };
        let endpoint = &endpoints[rank * ENDPOINT..][..ENDPOINT];
        let address = SocketAddr::new(stream.peer_addr().map_err(lost)?.ip(), word(endpoint, 0) as u16);
        let mut stream = TcpStream::connect_timeout(&address, PATIENCE).map_err(lost)?;
        stream.write_all(&words(word(endpoint, 1), place as u64)).map_err(lost)?;
        streams[at] = Some(stream);
    }
    let until = Instant::now() + PATIENCE;
    while let Some(missing) = (0..place).find(|&at| streams[at].is_none()) {
        mesh.sockets.check()?;
        if Instant::now() > until {
            let why = format!("it did not connect within {} s", PATIENCE.as_secs());
            return Err(CommError::Lost { rank: members[missing], why });
        }
        match listener.accept() {
            Ok((stream, _)) => {
                // A foreign or broken connection is not the rank's, which may still connect.
                if let Some((at, stream)) = accept_handshake(stream, secret)
                    && at < place
                {
                    streams[at] = Some(stream);
                }
            }
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
                std::thread::sleep(Duration::from_micros(200));
            }
            Err(e) => return Err(failed("accept a connection", e)),
        }
    }
    Ok((place, streams))
}

/// Listens on the address at which the others reach this rank already, or on any if that differs from rank to rank.
fn listen(mesh: &TcpTransport) -> std::io::Result<TcpListener> {
    let mut own: Option<IpAddr> = None;
    for stream in mesh.sockets.streams.iter().flatten() {
        let address = stream.local_addr()?.ip();
        let anywhere = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
        own = Some(if own.is_none_or(|own| own == address) { address } else { anywhere });
    }
    let listener = TcpListener::bind((own.unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST)), 0))?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Reads the rank of a peer that connected, if it knows the secret.
fn accept_handshake(mut stream: TcpStream, secret: u64) -> Option<(usize, TcpStream)> {
    let mut handshake = [0; HANDSHAKE];
    stream.set_nonblocking(false).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(5))).ok()?;
    stream.read_exact(&mut handshake).ok()?;
    (word(&handshake, 0) == secret).then(|| (word(&handshake, 1) as usize, stream))
}
