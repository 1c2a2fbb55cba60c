//! A live page over the folder of a run or a study while it goes on. A small HTTP server that only answers GET for two known paths,
//! on the loopback by default, and nothing that another site's page could reach through a borrowed name. It takes less than 5%
//! of one core, whoever asks (`budget`).

mod budget;
mod http;
mod live;
mod run;
mod study;

pub use budget::Clock;
use budget::{Kept, Pace, RealClock};
use http::{Request, Response};
use live::Live;
use std::io::{self, ErrorKind};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// Where a page is served when nobody says otherwise.
pub const DEFAULT: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 8420);

/// Connections at a time; more are closed at once.
const CONNECTIONS: usize = 16;

#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    #[error("{address}: {source}; the live page needs another address")]
    Bind { address: SocketAddr, source: io::Error },
    #[error("the live page: {0}")]
    Thread(io::Error),
}

/// Serves until it is stopped or dropped.
pub struct Server {
    address: SocketAddr,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    address: SocketAddr,
    clock: Arc<dyn Clock>,
    live: Mutex<(Kept, Live)>,
    open: AtomicUsize,
}

/// The page is the same for all; its fonts are worth drawing once.
static PAGE: LazyLock<Arc<[u8]>> = LazyLock::new(|| live::page().into_bytes().into());

impl Server {
    /// Port 0 takes any that is free. The folder may come into being later.
    pub fn start(address: SocketAddr, folder: &Path) -> Result<Server, ServeError> {
        Self::start_by(address, folder, Arc::new(RealClock::start()))
    }

    /// With a clock that says when what is shown is old.
    pub fn start_by(address: SocketAddr, folder: &Path, clock: Arc<dyn Clock>) -> Result<Server, ServeError> {
        let bind = |source| ServeError::Bind { address, source };
        let listener = TcpListener::bind(address).map_err(bind)?;
        let address = listener.local_addr().map_err(bind)?;
        let stop = Arc::new(AtomicBool::new(false));
        let live = Mutex::new((Kept::default(), Live::new(folder.to_path_buf())));
        let shared = Arc::new(Shared { address, clock, live, open: AtomicUsize::new(0) });
        let stopped = stop.clone();
        let accept = move || listen(&listener, &stopped, &shared);
        let thread = std::thread::Builder::new().name("live page".into()).spawn(accept);
        Ok(Server { address, stop, thread: Some(thread.map_err(ServeError::Thread)?) })
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// For people, to be opened in a browser.
    pub fn url(&self) -> String {
        format!("http://{}/", reachable(self.address))
    }

    /// Ends the server; no connection is accepted afterwards.
    pub fn stop(self) {}
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        // Wakes the thread that waits for a connection.
        drop(TcpStream::connect_timeout(&reachable(self.address), Duration::from_secs(1)));
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// An address to connect to: what listens everywhere listens on the loopback, too.
fn reachable(address: SocketAddr) -> SocketAddr {
    let ip = match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    };
    SocketAddr::new(ip, address.port())
}

fn listen(listener: &TcpListener, stop: &AtomicBool, shared: &Arc<Shared>) {
    let mut pace = Pace::start(&*shared.clock);
    loop {
        let accepted = listener.accept();
        if stop.load(Ordering::Acquire) {
            return;
        }
        let Ok((stream, _)) = accepted else {
            // Out of descriptors, say: it passes.
            std::thread::sleep(Duration::from_millis(100));
            continue;
        };
        pace.next(&*shared.clock);
        if shared.open.fetch_add(1, Ordering::AcqRel) >= CONNECTIONS {
            shared.open.fetch_sub(1, Ordering::AcqRel);
            continue;
        }
        let own = shared.clone();
        let answered = std::thread::Builder::new().spawn(move || {
            // Whoever leaves early has no answer to miss.
            let _ = answer(&stream, &own);
            own.open.fetch_sub(1, Ordering::AcqRel);
        });
        if answered.is_err() {
            shared.open.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

fn answer(stream: &TcpStream, shared: &Shared) -> io::Result<()> {
    let response = match Request::read(stream) {
        Ok(request) => respond(&request, shared),
        Err(refused) if refused.kind() == ErrorKind::InvalidData => Response::refusal(400, "bad request"),
        Err(error) => return Err(error),
    };
    response.write(stream)
}

fn respond(request: &Request, shared: &Shared) -> Response {
    if !host_is_ours(&request.host, shared.address) {
        return Response::refusal(403, "this server answers to its own address only");
    }
    if request.method != "GET" {
        return Response::refusal(405, "only GET");
    }
    match request.path.as_str() {
        "/" => Response::html(Arc::clone(&PAGE)),
        "/live.json" => {
            // A panic while drawing must not end the page for good.
            let mut shown = shared.live.lock().unwrap_or_else(PoisonError::into_inner);
            let (kept, live) = &mut *shown;
            Response::json(kept.answer(&*shared.clock, || live.json()))
        }
        _ => Response::refusal(404, "not found"),
    }
}

/// A page of another site may give its own name this address (DNS rebinding), but its browser still sends that name. So only
/// addresses are accepted, "localhost", and on a server for others the machine's own name.
fn host_is_ours(host: &str, bound: SocketAddr) -> bool {
    let (name, port) = match host.rsplit_once(':') {
        Some((name, port)) if !port.ends_with(']') => (name, port.parse().ok()),
        _ => (host, Some(80)),
    };
    if port != Some(bound.port()) {
        return false;
    }
    let name = name.strip_prefix('[').and_then(|name| name.strip_suffix(']')).unwrap_or(name);
    let local = name.eq_ignore_ascii_case("localhost");
    match (name.parse::<IpAddr>(), bound.ip()) {
        (Ok(ip), bound) if bound.is_unspecified() => ip.is_loopback() || !ip.is_unspecified(),
        (Ok(ip), bound) => ip == bound,
        (Err(_), bound) if bound.is_loopback() => local,
        (Err(_), _) => local || own_name().is_some_and(|own| own.eq_ignore_ascii_case(name)),
    }
}

fn own_name() -> Option<String> {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").ok()?;
    Some(name.trim().to_string()).filter(|name| !name.is_empty())
}

/// Tells a study's folder from a run's.
fn is_study(folder: &Path) -> bool {
    ["study.json", "results.json"].iter().any(|name| folder.join(name).is_file())
}

fn named(folder: &Path) -> String {
    let whole: PathBuf = std::path::absolute(folder).unwrap_or_else(|_| folder.to_path_buf());
    whole.file_name().map_or_else(|| whole.display().to_string(), |name| name.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_own_addresses_are_hosts() {
        let bound: SocketAddr = "127.0.0.1:8420".parse().unwrap();
        for host in ["127.0.0.1:8420", "localhost:8420", "LOCALHOST:8420"] {
            assert!(host_is_ours(host, bound), "{host}");
        }
        for host in [
            "evil.example:8420",
            "127.0.0.1",
            "127.0.0.1:80",
            "127.0.0.1.evil.example:8420",
            "",
            "localhost",
            "[::1]:8420",
        ] {
            assert!(!host_is_ours(host, bound), "{host}");
        }
        let six: SocketAddr = "[::1]:8420".parse().unwrap();
        assert!(host_is_ours("[::1]:8420", six) && !host_is_ours("::1", six));
        let everywhere: SocketAddr = "0.0.0.0:8420".parse().unwrap();
        assert!(host_is_ours("10.0.0.7:8420", everywhere) && !host_is_ours("evil.example:8420", everywhere));
    }
}
