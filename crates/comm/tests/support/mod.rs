//! What the tests of all engines share.

#![allow(dead_code)]

pub mod plain;
pub mod suite;

use comm::{Activity, Communicator, Engine};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;

/// A way to make the engines of so many ranks, all in this process.
pub type Way = fn(usize) -> Vec<Arc<dyn Engine>>;

pub const WAYS: [(&str, Way); 2] = [("threads", comm::threads::group), ("tcp", mesh)];

pub const RANKS: [usize; 6] = [1, 2, 3, 4, 7, 8];

/// Runs the body on a thread for each rank. A rank that fails drops its communicator, so the others fail too rather than wait.
pub fn on_all<R: Send>(way: Way, ranks: usize, body: impl Fn(Communicator) -> R + Sync) -> Vec<R> {
    std::thread::scope(|scope| {
        let body = &body;
        let start = |engine| scope.spawn(move || body(Communicator::new(engine, Arc::new(Activity::new()))));
        let threads: Vec<_> = way(ranks).into_iter().map(start).collect();
        let ends: Vec<_> = threads.into_iter().map(std::thread::ScopedJoinHandle::join).collect();
        ends.into_iter().map(|end| end.unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    })
}

/// Engines over sockets of this machine.
fn mesh(ranks: usize) -> Vec<Arc<dyn Engine>> {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut streams: Vec<Vec<Option<TcpStream>>> =
        (0..ranks).map(|_| (0..ranks).map(|_| None).collect()).collect();
    for (low, high) in (0..ranks).flat_map(|high| (0..high).map(move |low| (low, high))) {
        streams[low][high] = Some(TcpStream::connect(listener.local_addr().unwrap()).unwrap());
        streams[high][low] = Some(listener.accept().unwrap().0);
    }
    streams.into_iter().enumerate().map(|(rank, streams)| comm::tcp::engine(rank, streams).unwrap()).collect()
}
