//! Live pages over the folders of runs and studies, while they go on and later. A small HTTP server that only answers GET for paths that begin
//! with its `token`, on the loopback by default. It takes less than 5% of one core, whoever asks (`budget`).

mod budget;
mod facts;
mod folder;
mod http;
mod live;
mod run;
mod runs;
mod site;
mod state;
mod study;
mod token;

pub use budget::Clock;
use budget::{Pace, RealClock};
use http::{Request, Response};
pub use site::Shows;
use site::Site;
use std::fmt;
use std::io::{self, ErrorKind};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
pub use token::{Token, VARIABLE as TOKEN_VARIABLE};

/// Connections at a time; more are closed at once.
const CONNECTIONS: usize = 16;
/// Whoever asked within this time is still looking, and is waited for at the end for so long.
const LOOKING: Duration = Duration::from_secs(5);

#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    #[error("{address}: the live page can't be served there: {source}")]
    Bind { address: String, source: io::Error },
    #[error(
        "{address}: something is served there already: give the live page another port, or 0 for any that is free"
    )]
    InUse { address: String },
    #[error("{0}")]
    Token(String),
    #[error("the live page: {0}")]
    Thread(io::Error),
}

/// Serves until it is stopped or dropped.
pub struct Server {
    address: SocketAddr,
    token: Token,
    stop: Arc<AtomicBool>,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    site: Site,
    clock: Arc<dyn Clock>,
    open: AtomicUsize,
    /// Requests that were answered, and when the last one was, in milliseconds since the start.
    answered: AtomicU64,
    last: AtomicU64,
    start: Instant,
}

impl Server {
    /// Serves at the first of the addresses that can be had. Port 0 takes any that is free.
    pub fn start(address: impl ToSocketAddrs + fmt::Display, shows: Shows) -> Result<Server, ServeError> {
        let token = Token::find().map_err(ServeError::Token)?;
        Self::start_by(address, shows, token, Arc::new(RealClock::start()))
    }

    /// With a clock that says when what is shown is old.
    pub fn start_by(
        address: impl ToSocketAddrs + fmt::Display,
        shows: Shows,
        token: Token,
        clock: Arc<dyn Clock>,
    ) -> Result<Server, ServeError> {
        let listener = TcpListener::bind(&address).map_err(|source| match source.kind() {
            ErrorKind::AddrInUse => ServeError::InUse { address: address.to_string() },
            _ => ServeError::Bind { address: address.to_string(), source },
        })?;
        let address = listener.local_addr().map_err(ServeError::Thread)?;
        let stop = Arc::new(AtomicBool::new(false));
        let shared = Arc::new(Shared {
            site: Site::new(shows, token.clone(), clock.clone()),
            clock,
            open: AtomicUsize::new(0),
            answered: AtomicU64::new(0),
            last: AtomicU64::new(0),
            start: Instant::now(),
        });
        let (stopped, own) = (stop.clone(), shared.clone());
        let accept = move || listen(&listener, &stopped, &own);
        let thread = std::thread::Builder::new().name("live page".into()).spawn(accept);
        let thread = Some(thread.map_err(ServeError::Thread)?);
        Ok(Server { address, token, stop, shared, thread })
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Path that every path of this server begins with.
    pub fn path(&self) -> String {
        format!("/{}/", self.token.text())
    }

    /// For people, to be opened in a browser. What listens everywhere is there for other machines, which know this one by its name.
    pub fn url(&self) -> String {
        let host = records::host();
        match self.address.ip().is_unspecified() && !host.is_empty() {
            true => format!("http://{host}:{}{}", self.address.port(), self.path()),
            false => format!("http://{}{}", self.address, self.path()),
        }
    }

    /// Ends the server; no connection is accepted afterwards.
    pub fn stop(self) {}

    /// Ends the server when whoever is looking has seen how the run ended: a moment later, or at once if nobody is.
    pub fn finish(self) {
        let shared = &self.shared;
        let last = Duration::from_millis(shared.last.load(Ordering::Acquire));
        let nobody = shared.answered.load(Ordering::Acquire) == 0;
        if nobody || shared.start.elapsed().saturating_sub(last) > LOOKING {
            return;
        }
        shared.site.draw_anew();
        let (seen, since) = (shared.answered.load(Ordering::Acquire), Instant::now());
        while shared.answered.load(Ordering::Acquire) == seen && since.elapsed() < LOOKING {
            std::thread::sleep(Duration::from_millis(20));
        }
    }
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
        Ok(request) => shared.site.respond(&request),
        Err(refused) if refused.kind() == ErrorKind::InvalidData => Response::refusal(400, "bad request"),
        Err(error) => return Err(error),
    };
    response.write(stream)?;
    if response.is_data() {
        shared.last.store(shared.start.elapsed().as_millis() as u64, Ordering::Release);
        shared.answered.fetch_add(1, Ordering::AcqRel);
    }
    Ok(())
}
