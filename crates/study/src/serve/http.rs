//! As much of HTTP as a page and its data need: requests without a body, answers that end the connection.

use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A request is read, and an answer taken, within this.
const PATIENCE: Duration = Duration::from_secs(3);
/// A request's line and headers have no more bytes than this.
const LONGEST: usize = 8 * 1024;

pub struct Request {
    pub method: String,
    pub path: String,
    pub host: String,
}

fn bad(what: &str) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, what.to_string())
}

impl Request {
    /// What is malformed is `InvalidData`.
    pub fn read(mut stream: &TcpStream) -> io::Result<Request> {
        let deadline = Instant::now() + PATIENCE;
        let mut bytes = vec![];
        let mut piece = [0; 1024];
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(ErrorKind::TimedOut.into());
            }
            stream.set_read_timeout(Some(left))?;
            let n = stream.read(&mut piece)?;
            if n == 0 {
                return Err(ErrorKind::UnexpectedEof.into());
            }
            bytes.extend_from_slice(&piece[..n]);
            if let Some(end) = bytes.windows(4).position(|four| four == b"\r\n\r\n") {
                let head = std::str::from_utf8(&bytes[..end]).map_err(|_| bad("not text"))?;
                return if end + 4 == bytes.len() { Request::parse(head) } else { Err(bad("has a body")) };
            }
            if bytes.len() > LONGEST {
                return Err(bad("too long"));
            }
        }
    }

    fn parse(head: &str) -> io::Result<Request> {
        let mut lines = head.split("\r\n");
        let words: Vec<&str> = lines.next().unwrap_or_default().split(' ').collect();
        let [method, path, version] = words[..] else { return Err(bad("no request line")) };
        if !matches!(version, "HTTP/1.1" | "HTTP/1.0") || !path.starts_with('/') {
            return Err(bad("no request line"));
        }
        let mut host = None;
        for line in lines {
            let (name, value) = line.split_once(':').ok_or_else(|| bad("no header"))?;
            let value = value.trim();
            if name.eq_ignore_ascii_case("host") && host.replace(value.to_string()).is_some() {
                return Err(bad("two hosts"));
            }
            let body = name.eq_ignore_ascii_case("transfer-encoding")
                || name.eq_ignore_ascii_case("content-length") && value != "0";
            if body {
                return Err(bad("has a body"));
            }
        }
        let host = host.ok_or_else(|| bad("no host"))?;
        Ok(Request { method: method.into(), path: path.into(), host })
    }
}

pub struct Response {
    status: u16,
    kind: &'static str,
    body: Arc<[u8]>,
}

impl Response {
    pub fn html(body: Arc<[u8]>) -> Response {
        Response { status: 200, kind: "text/html; charset=utf-8", body }
    }

    pub fn json(body: Arc<[u8]>) -> Response {
        Response { status: 200, kind: "application/json", body }
    }

    pub fn refusal(status: u16, line: &str) -> Response {
        Response { status, kind: "text/plain; charset=utf-8", body: format!("{line}\n").into_bytes().into() }
    }

    pub fn write(&self, mut stream: &TcpStream) -> io::Result<()> {
        let reason = match self.status {
            200 => "OK",
            400 => "Bad Request",
            403 => "Forbidden",
            404 => "Not Found",
            _ => "Method Not Allowed",
        };
        let allow = if self.status == 405 { "Allow: GET\r\n" } else { "" };
        let head = format!(
            "HTTP/1.1 {} {reason}\r\nContent-Type: {}\r\nContent-Length: {}\r\nConnection: close\r\nCache-Control: no-store\r\n\
             X-Content-Type-Options: nosniff\r\nX-Frame-Options: DENY\r\nReferrer-Policy: no-referrer\r\n{allow}\r\n",
            self.status,
            self.kind,
            self.body.len()
        );
        stream.set_write_timeout(Some(PATIENCE))?;
        stream.write_all(head.as_bytes())?;
        stream.write_all(&self.body)?;
        stream.flush()
    }
}
