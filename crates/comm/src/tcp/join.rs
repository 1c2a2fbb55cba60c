//! New connections among some of the ranks, made with the help of those that are there.

use super::{Tcp, fault};
use crate::engine::CommError;
use crate::transport::Transport;
use std::hash::{BuildHasher, RandomState};
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

/// Ranks come to a split at about the same time, as all call it; a network that takes longer than this is broken.
const PATIENCE: Duration = Duration::from_secs(30);

/// What a rank tells the others: where it listens, and a number that whoever connects must know.
const CARD: usize = 16;
/// What a rank that connects says: that number, and who it is.
const GREETING: usize = 16;

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

/// Connects this rank with the other `members`, of which those with lower places connect to those with higher ones. Returns its
/// place among them too.
pub(super) fn connect(
    mesh: &Tcp,
    members: &[usize],
    number: u64,
) -> Result<(usize, Vec<Option<TcpStream>>), CommError> {
    let failed = |what: &str, e: std::io::Error| fault(format!("can't {what} for a part of the group: {e}"));
    let place = members.iter().position(|&rank| rank == mesh.rank).unwrap_or(0);
    let listener = listen(mesh).map_err(|e| failed("listen", e))?;
    let port = listener.local_addr().map_err(|e| failed("listen", e))?.port();
    let secret = RandomState::new().hash_one((number, mesh.rank));

    let mut cards = vec![0; mesh.size() * CARD];
    cards[mesh.rank * CARD..][..CARD].copy_from_slice(&words(u64::from(port), secret));
    let parts: Vec<_> = (0..mesh.size()).map(|rank| rank * CARD..(rank + 1) * CARD).collect();
    // SAFETY: a card for each rank.
    unsafe { mesh.all_gather(cards.as_mut_ptr(), &parts) }?;

    let mut streams: Vec<Option<TcpStream>> = members.iter().map(|_| None).collect();
    for (at, &rank) in members.iter().enumerate().skip(place + 1) {
        let lost = |e: std::io::Error| CommError::Lost { rank, why: format!("can't connect to it: {e}") };
        let Some(stream) = &mesh.links.streams[rank] else { continue };
        let card = &cards[rank * CARD..][..CARD];
        let address = SocketAddr::new(stream.peer_addr().map_err(lost)?.ip(), word(card, 0) as u16);
        let mut stream = TcpStream::connect_timeout(&address, PATIENCE).map_err(lost)?;
        stream.write_all(&words(word(card, 1), place as u64)).map_err(lost)?;
        streams[at] = Some(stream);
    }
    let until = Instant::now() + PATIENCE;
    while let Some(missing) = (0..place).find(|&at| streams[at].is_none()) {
        mesh.links.check()?;
        if Instant::now() > until {
            let why = format!("it did not connect within {} s", PATIENCE.as_secs());
            return Err(CommError::Lost { rank: members[missing], why });
        }
        match listener.accept() {
            Ok((stream, _)) => {
                // A stranger, or a connection that broke: neither is the rank's, which may still come.
                if let Some((at, stream)) = greeted(stream, secret)
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

/// Where the others reach this rank already, or anywhere if that differs from rank to rank.
fn listen(mesh: &Tcp) -> std::io::Result<TcpListener> {
    let mut own: Option<IpAddr> = None;
    for stream in mesh.links.streams.iter().flatten() {
        let address = stream.local_addr()?.ip();
        let anywhere = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
        own = Some(if own.is_none_or(|own| own == address) { address } else { anywhere });
    }
    let listener = TcpListener::bind((own.unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST)), 0))?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// The place of whoever connected, if it knows the secret.
fn greeted(mut stream: TcpStream, secret: u64) -> Option<(usize, TcpStream)> {
    let mut greeting = [0; GREETING];
    stream.set_nonblocking(false).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(5))).ok()?;
    stream.read_exact(&mut greeting).ok()?;
    (word(&greeting, 0) == secret).then(|| (word(&greeting, 1) as usize, stream))
}
