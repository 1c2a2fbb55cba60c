//! The HTTP side of a download.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::sync::Arc;
use std::thread::sleep;

use ureq::http::{Response, StatusCode, header};
use ureq::tls::{PemItem, RootCerts, TlsConfig, parse_pem};
use ureq::{Agent, Body};

use super::{Archive, Patience, Progress};
use crate::error::shown;

pub(super) struct Client<'a> {
    agent: Agent,
    url: String,
    archive: &'a Archive<'a>,
    patience: Patience,
}

/// Why an attempt brought less than the rest of the archive.
enum Failure {
    /// Worth another attempt.
    Passing(String),
    Final(String),
}

impl<'a> Client<'a> {
    pub fn new(archive: &'a Archive, patience: Patience) -> Result<Self, String> {
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .tls_config(TlsConfig::builder().root_certs(root_certificates()?).build())
            .timeout_resolve(Some(patience.connect))
            .timeout_connect(Some(patience.connect))
            .timeout_recv_response(Some(patience.silence))
            .timeout_per_read(Some(patience.silence))
            .user_agent(concat!("vitesse/", env!("CARGO_PKG_VERSION")))
            .build();
        let url = format!("{}/{}", archive.base_url.trim_end_matches('/'), archive.name);
        Ok(Self { agent: config.new_agent(), url, archive, patience })
    }

    /// Downloads what a file lacks. An attempt that fails after it brought something is not counted.
    pub fn complete(&self, part: &mut File, progress: Progress) -> Result<(), String> {
        let length =
            |part: &File| part.metadata().map(|about| about.len()).map_err(|error| self.cannot(error));
        let (mut failures, mut most) = (0, length(part)?);
        loop {
            let before = length(part)?;
            if before == self.archive.bytes {
                return Ok(());
            }
            let problem = match self.attempt(part, before, progress) {
                Ok(()) => continue,
                Err(Failure::Final(problem)) => return Err(self.cannot(problem)),
                Err(Failure::Passing(problem)) => problem,
            };
            // Compared with the most there ever was: a server that always starts over brings nothing new.
            let kept = length(part)?;
            failures = if kept > most { 1 } else { failures + 1 };
            most = most.max(kept);
            if failures >= self.patience.attempts {
                let attempts = format!("{failures} attempts; {kept} bytes are kept for the next run");
                return Err(self.cannot(format!("{problem} ({attempts})")));
            }
            sleep(self.patience.pause * 2u32.saturating_pow(failures - 1));
        }
    }

    fn cannot(&self, problem: impl ToString) -> String {
        format!("cannot download {}: {}", self.url, problem.to_string())
    }

    /// Asks for what comes after the first `have` bytes of the archive, and adds it to them.
    fn attempt(&self, part: &mut File, have: u64, progress: Progress) -> Result<(), Failure> {
        if have > self.archive.bytes {
            return start_over(part);
        }
        let mut request = self.agent.get(&self.url);
        if have > 0 {
            request = request.header(header::RANGE, format!("bytes={have}-"));
        }
        let response = request.call().map_err(not_asked)?;
        let begin = match response.status() {
            StatusCode::PARTIAL_CONTENT => match content_range(&response) {
                Some(range) if range != (have, self.archive.bytes) => {
                    start_over(part)?;
                    let (begin, total) = range;
                    return Err(Failure::Passing(format!(
                        "asked for byte {have}, the server sent {begin} of {total}"
                    )));
                }
                _ => have,
            },
            StatusCode::OK => 0,
            StatusCode::RANGE_NOT_SATISFIABLE if have > 0 => {
                start_over(part)?;
                return Err(Failure::Passing(format!("the server has no byte {have}")));
            }
            status => return Err(refused(status)),
        };
        self.receive(response, part, begin, progress)
    }

    /// Writes a body from `begin` on, over anything that was there.
    fn receive(
        &self,
        response: Response<Body>,
        part: &mut File,
        begin: u64,
        progress: Progress,
    ) -> Result<(), Failure> {
        let total = self.archive.bytes;
        if let Some(rest) =
            response.body().content_length().filter(|rest| begin.checked_add(*rest) != Some(total))
        {
            let problem =
                format!("the server has {} bytes of it, the archive {total}", begin.saturating_add(rest));
            return Err(Failure::Final(problem));
        }
        part.set_len(begin).and_then(|()| part.seek(SeekFrom::Start(begin))).map_err(on_disk)?;
        let mut body = response.into_body().into_reader();
        let mut buffer = vec![0; 1 << 16];
        let mut done = begin;
        progress(done, Some(total));
        while done < total {
            let count = match body.read(&mut buffer) {
                Ok(0) => {
                    return Err(Failure::Passing(format!("the connection ended at byte {done} of {total}")));
                }
                Ok(count) => count,
                Err(error) => return Err(Failure::Passing(shown(error))),
            };
            if done + count as u64 > total {
                return Err(Failure::Final(format!("the server sends more than {total} bytes")));
            }
            part.write_all(&buffer[..count]).map_err(on_disk)?;
            done += count as u64;
            progress(done, Some(total));
        }
        Ok(())
    }
}

/// Why no server could be asked.
fn not_asked(error: ureq::Error) -> Failure {
    match &error {
        ureq::Error::BadUri(_) | ureq::Error::Http(_) => Failure::Final(shown(error)),
        // A certificate that is not trusted now will not be in a second.
        ureq::Error::Io(inner) if inner.kind() == io::ErrorKind::InvalidData => Failure::Final(shown(error)),
        _ => Failure::Passing(shown(error)),
    }
}

fn start_over(part: &mut File) -> Result<(), Failure> {
    part.set_len(0).map_err(on_disk)
}

fn on_disk(error: io::Error) -> Failure {
    Failure::Final(format!("cannot write: {error}"))
}

fn refused(status: StatusCode) -> Failure {
    let problem = format!("the server answered {status}");
    let passing = status.is_server_error()
        || [StatusCode::TOO_MANY_REQUESTS, StatusCode::REQUEST_TIMEOUT].contains(&status);
    if passing { Failure::Passing(problem) } else { Failure::Final(problem) }
}

/// First byte and total length of a partial answer: `bytes 100-199/200`.
fn content_range(response: &Response<Body>) -> Option<(u64, u64)> {
    let range = response.headers().get(header::CONTENT_RANGE)?.to_str().ok()?.strip_prefix("bytes ")?;
    let (begin, rest) = range.split_once('-')?;
    let (_, total) = rest.split_once('/')?;
    Some((begin.parse().ok()?, total.parse().ok()?))
}

/// The certificates built into the program, or those of the file that `SSL_CERT_FILE` names, as other programs take it.
fn root_certificates() -> Result<RootCerts, String> {
    let Some(path) = std::env::var_os("SSL_CERT_FILE").filter(|path| !path.is_empty()) else {
        return Ok(RootCerts::WebPki);
    };
    let cannot = |error: String| format!("cannot use SSL_CERT_FILE={}: {error}", path.display());
    let pem = std::fs::read(&path).map_err(|error| cannot(error.to_string()))?;
    let certificates = parse_pem(&pem).filter_map(|item| match item {
        Ok(PemItem::Certificate(certificate)) => Some(Ok(certificate)),
        Ok(_) => None,
        Err(error) => Some(Err(cannot(shown(error)))),
    });
    Ok(RootCerts::Specific(Arc::new(certificates.collect::<Result<_, _>>()?)))
}
