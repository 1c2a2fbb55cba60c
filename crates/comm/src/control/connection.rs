//! Non-blocking connection between the control threads of two ranks, in whole messages.

use super::messages::Message;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsRawFd, RawFd};
use std::time::Duration;

/// Limit of unread input, longer than any message of the largest world; more than this is not a message.
const LONGEST: usize = 16 << 20;
/// Limit of unsent output: messages for a rank that doesn't read are dropped beyond this, as it is stopped and will time out.
const MOST_UNSENT: usize = 16 << 20;

pub(crate) struct Connection {
    stream: TcpStream,
    input: Vec<u8>,
    output: Vec<u8>,
    open: bool,
}

impl Connection {
    pub fn new(stream: TcpStream) -> std::io::Result<Self> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        Ok(Connection { stream, input: Vec::new(), output: Vec::new(), open: true })
    }

    pub fn is_open(&self) -> bool {
        self.open
    }

    pub fn peer_address(&self) -> Option<std::net::IpAddr> {
        self.stream.peer_addr().ok().map(|address| address.ip().to_canonical())
    }

    pub fn send(&mut self, message: &Message) {
        if self.open && self.output.len() < MOST_UNSENT {
            self.output.extend(message.encode().into_bytes());
        }
        self.flush();
    }

    /// Sends as much as the network accepts without blocking.
    pub fn flush(&mut self) {
        while self.open && !self.output.is_empty() {
            match self.stream.write(&self.output) {
                Ok(sent) => drop(self.output.drain(..sent)),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                // What the other end sent before it closed can still be read.
                Err(_) => self.output.clear(),
            }
        }
    }

    /// Receives the messages that have arrived. When the other end is gone, the connection is closed after its last message.
    pub fn receive(&mut self) -> Vec<Message> {
        let mut bytes = [0; 4096];
        while self.open {
            match self.stream.read(&mut bytes) {
                Ok(0) => self.open = false,
                Ok(count) => self.input.extend(&bytes[..count]),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(_) => self.open = false,
            }
            if self.input.len() > LONGEST {
                self.open = false;
            }
        }
        let mut messages = Vec::new();
        while let Some(end) = self.input.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = self.input.drain(..=end).collect();
            match Message::decode(&String::from_utf8_lossy(&line)) {
                Some(message) => messages.push(message),
                None => self.open = false,
            }
        }
        messages
    }
}

impl AsRawFd for Connection {
    fn as_raw_fd(&self) -> RawFd {
        self.stream.as_raw_fd()
    }
}

/// Waits until one of the descriptors can be read, or the time is over.
pub(crate) fn wait_readable(descriptors: &[RawFd], time: Duration) {
    let mut polled: Vec<libc::pollfd> =
        descriptors.iter().map(|fd| libc::pollfd { fd: *fd, events: libc::POLLIN, revents: 0 }).collect();
    let milliseconds = time.as_millis().min(1000) as i32;
    // SAFETY: pointer and length are those of the vector, which outlives the call. A failure (a signal) is a short wait.
    unsafe { libc::poll(polled.as_mut_ptr(), polled.len() as libc::nfds_t, milliseconds.max(1)) };
}
