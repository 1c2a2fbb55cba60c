//! Transfer between this rank and one other: at most one frame each way.

use super::fault;
use crate::engine::CommError;
use std::io::{ErrorKind, IoSlice, Read};
use std::net::TcpStream;
use std::os::fd::AsRawFd;

/// Bytes of a frame's header: the number of the round and the length of what follows.
const HEAD: usize = 16;

#[derive(Default)]
pub(super) struct Flow {
    out: Option<Frame>,
    into: Option<Frame>,
}

struct Frame {
    head: [u8; HEAD],
    address: *mut u8,
    len: usize,
    /// Bytes done, the header's included.
    at: usize,
}

// SAFETY: the caller that fills a flow vouches for the addresses until the transfer is over, on whichever thread it is.
unsafe impl Send for Flow {}

impl Frame {
    fn is_over(&self) -> bool {
        self.at == HEAD + self.len
    }

    /// Bytes left of the header.
    fn head_left(&self) -> usize {
        HEAD.saturating_sub(self.at)
    }

    fn body_at(&self) -> usize {
        self.at.saturating_sub(HEAD)
    }
}

fn head(sequence: u64, len: usize) -> [u8; HEAD] {
    let mut head = [0; HEAD];
    head[..8].copy_from_slice(&sequence.to_le_bytes());
    head[8..].copy_from_slice(&(len as u64).to_le_bytes());
    head
}

impl Flow {
    pub fn clear(&mut self) {
        *self = Flow::default();
    }

    /// # Safety
    /// `len` bytes from `from` are readable until the flow is done or cleared.
    pub unsafe fn send(&mut self, sequence: u64, from: *const u8, len: usize) {
        self.out = Some(Frame { head: head(sequence, len), address: from.cast_mut(), len, at: 0 });
    }

    /// # Safety
    /// `len` bytes from `into` are writable, and used by nobody else, until the flow is done or cleared.
    pub unsafe fn receive(&mut self, into: *mut u8, len: usize) {
        self.into = Some(Frame { head: [0; HEAD], address: into, len, at: 0 });
    }

    pub fn is_done(&self) -> bool {
        [&self.out, &self.into].into_iter().flatten().all(Frame::is_over)
    }

    /// Events to poll for.
    pub fn events(&self) -> libc::c_short {
        let pending = |frame: &Option<Frame>| frame.as_ref().is_some_and(|frame| !frame.is_over());
        let out = if pending(&self.out) { libc::POLLOUT } else { 0 };
        let into = if pending(&self.into) { libc::POLLIN } else { 0 };
        out | into
    }

    /// Transfers what it can without blocking; returns whether anything was.
    pub fn step(&mut self, stream: &TcpStream, rank: usize, sequence: u64) -> Result<bool, CommError> {
        let lost = |why: String| CommError::Lost { rank, why };
        let (mut stream, mut moved) = (stream, false);
        if let Some(frame) = self.out.as_mut().filter(|frame| !frame.is_over()) {
            let start = frame.body_at();
            // SAFETY: readable, by the promise of `send`.
            let body = unsafe {
                std::slice::from_raw_parts(frame.address.add(start).cast_const(), frame.len - start)
            };
            let left = &frame.head[HEAD - frame.head_left()..];
            match send(stream, &[IoSlice::new(left), IoSlice::new(body)]) {
                Ok(bytes) => {
                    frame.at += bytes;
                    moved |= bytes > 0;
                }
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
                Err(e) => return Err(lost(format!("can't send to it: {e}"))),
            }
        }
        if let Some(frame) = self.into.as_mut().filter(|frame| !frame.is_over()) {
            let in_head = frame.head_left() > 0;
            let buffer = if in_head {
                &mut frame.head[frame.at..]
            } else {
                let start = frame.body_at();
                // SAFETY: writable, by the promise of `receive`.
                unsafe { std::slice::from_raw_parts_mut(frame.address.add(start), frame.len - start) }
            };
            match stream.read(buffer) {
                Ok(0) => return Err(lost("it closed the connection".to_string())),
                Ok(bytes) => {
                    frame.at += bytes;
                    moved = true;
                    if in_head && frame.head_left() == 0 && frame.head != head(sequence, frame.len) {
                        return Err(stray(&frame.head, rank, sequence, frame.len));
                    }
                }
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
                Err(e) => return Err(lost(format!("can't receive from it: {e}"))),
            }
        }
        Ok(moved)
    }
}

/// Sends what can be sent. To a lost rank this is an error; `write_vectored` would end the process by SIGPIPE instead, where
/// that is not ignored.
fn send(stream: &TcpStream, parts: &[IoSlice<'_>]) -> std::io::Result<usize> {
    // SAFETY: all zeros are an empty message.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = parts.as_ptr().cast_mut().cast();
    message.msg_iovlen = parts.len() as _;
    // SAFETY: an `IoSlice` is an iovec; the message and what it points to live through the call, which only reads them.
    let sent = unsafe { libc::sendmsg(stream.as_raw_fd(), &message, libc::MSG_NOSIGNAL) };
    usize::try_from(sent).map_err(|_| std::io::Error::last_os_error())
}

/// Error of an unexpected frame: signatures are compared before, so it is a foreign sender or a bug.
fn stray(head: &[u8; HEAD], rank: usize, sequence: u64, len: usize) -> CommError {
    let word = |at: usize| {
        let mut word = [0; 8];
        word.copy_from_slice(&head[at..at + 8]);
        u64::from_le_bytes(word)
    };
    fault(format!(
        "rank {rank} sent {} bytes of round {} where {len} of round {sequence} were expected",
        word(8),
        word(0)
    ))
}
