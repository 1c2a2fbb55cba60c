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
    /// As sent, with its escapes.
    pub path: String,
    /// Behind the question mark.
    pub query: String,
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
        host.ok_or_else(|| bad("no host"))?;
        let (path, query) = path.split_once('?').unwrap_or((path, ""));
        Ok(Request { method: method.into(), path: path.into(), query: query.into() })
    }

    /// A value of the query, without its escapes.
    pub fn asked(&self, name: &str) -> Option<String> {
        let pairs = self.query.split('&').filter_map(|pair| pair.split_once('='));
        pairs.filter(|(key, _)| *key == name).find_map(|(_, value)| unescaped(&value.replace('+', " ")))
    }
}

/// Text without its percent escapes; none if they are malformed or no text.
pub fn unescaped(text: &str) -> Option<String> {
    let mut pieces = text.split('%');
    let mut bytes = pieces.next().unwrap_or_default().as_bytes().to_vec();
    for piece in pieces {
        let digits = piece.get(..2).filter(|digits| digits.bytes().all(|byte| byte.is_ascii_hexdigit()))?;
        bytes.push(u8::from_str_radix(digits, 16).ok()?);
        bytes.extend_from_slice(&piece.as_bytes()[2..]);
    }
    String::from_utf8(bytes).ok()
}

/// Text as one part of a path, or as a value of a query.
pub fn escaped(text: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
    let mut out = String::new();
    for byte in text.bytes() {
        if plain(byte) { out.push(byte as char) } else { out.push_str(&format!("%{byte:02X}")) }
    }
    out
}

pub struct Response {
    status: u16,
    kind: &'static str,
    body: Arc<[u8]>,
    /// Where to ask instead.
    location: Option<String>,
}

impl Response {
    pub fn html(body: Arc<[u8]>) -> Response {
        Response { status: 200, kind: "text/html; charset=utf-8", body, location: None }
    }

    pub fn json(body: Arc<[u8]>) -> Response {
        Response { status: 200, kind: "application/json", body, location: None }
    }

    /// Returns whether it is what a page shows.
    pub fn is_data(&self) -> bool {
        self.status == 200 && self.kind == "application/json"
    }

    pub fn refusal(status: u16, line: &str) -> Response {
        let body = format!("{line}\n").into_bytes().into();
        Response { status, kind: "text/plain; charset=utf-8", body, location: None }
    }

    /// `location`: a path of this server.
    pub fn elsewhere(location: String) -> Response {
        Response {
            location: Some(location),
            ..Response::refusal(308, "the page is at its path with a slash at the end")
        }
    }

    pub fn write(&self, mut stream: &TcpStream) -> io::Result<()> {
        let reason = match self.status {
            200 => "OK",
            308 => "Permanent Redirect",
            400 => "Bad Request",
            403 => "Forbidden",
            404 => "Not Found",
            _ => "Method Not Allowed",
        };
        let allow = if self.status == 405 { "Allow: GET\r\n" } else { "" };
        let location = self.location.as_ref().map_or(String::new(), |path| format!("Location: {path}\r\n"));
        let head = format!(
            "HTTP/1.1 {} {reason}\r\nContent-Type: {}\r\nContent-Length: {}\r\nConnection: close\r\nCache-Control: no-store\r\n\
             X-Content-Type-Options: nosniff\r\nX-Frame-Options: DENY\r\nReferrer-Policy: no-referrer\r\n{allow}{location}\r\n",
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escapes_come_back_as_they_were() {
        for text in ["a", "runs/äöü 1%2F", "a&b=c?#/..", ""] {
            assert_eq!(unescaped(&escaped(text)).as_deref(), Some(text));
        }
        for bad in ["%", "%4", "%zz", "%ff", "a%+1"] {
            assert_eq!(unescaped(bad), None, "{bad}");
        }
        let request = Request::parse("GET /a?page=2&q=a+b%26 HTTP/1.1\r\nHost: a").unwrap();
        assert_eq!((request.path.as_str(), request.asked("q").as_deref()), ("/a", Some("a b&")));
        assert_eq!(request.asked("x"), None);
    }
}
