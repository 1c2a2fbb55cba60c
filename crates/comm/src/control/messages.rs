//! Messages of the control plane: one line of text each, its fields separated by tabs.

use super::diagnosis::{Cause, Diagnosis};
use crate::activity::{CallInfo, Snapshot};
use crate::call::Collective;
use crate::element::Reduction;
use std::sync::Arc;

/// First message of a rank to the coordinator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Hello {
    pub version: String,
    pub rank: usize,
    pub world: usize,
    pub peer: Peer,
}

/// Host, process and addresses of a rank, as the others know them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Peer {
    pub host: String,
    pub pid: u32,
    /// Machine, process namespace and start of the process: see [`super::process`].
    pub process: String,
    /// Addresses at which it listens for the mesh, as `address:port`.
    pub addresses: Vec<String>,
    /// Cores on which it may run: see [`crate::cores`].
    pub cores: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Message {
    Hello(Hello),
    Refused(String),
    /// All ranks have joined: the run's secret, and who they are.
    Welcome {
        secret: u64,
        peers: Vec<Peer>,
    },
    Heartbeat {
        snapshot: Snapshot,
        busy: bool,
    },
    /// Request for a heartbeat at once.
    HeartbeatRequest,
    Failed {
        cause: Cause,
        line: String,
    },
    /// The rank ended without error; with its last snapshot.
    Finished(Snapshot),
    Acknowledged,
    Diagnosis(Diagnosis),
}

const MAGIC: &str = "vitesse-ranks-2";

impl Message {
    pub fn encode(&self) -> String {
        let fields = match self {
            Message::Hello(hello) => {
                let numbers = [hello.rank.to_string(), hello.world.to_string()];
                let mut fields = vec![MAGIC.to_string(), hello.version.clone()];
                fields.extend(numbers);
                fields.extend(peer_fields(&hello.peer));
                fields
            }
            Message::Refused(why) => vec!["refused".to_string(), why.clone()],
            Message::Welcome { secret, peers } => {
                let mut fields = vec!["welcome".to_string(), secret.to_string()];
                fields.extend(peers.iter().flat_map(peer_fields));
                fields
            }
            Message::Heartbeat { snapshot, busy } => {
                let mut fields = vec!["beat".to_string(), u8::from(*busy).to_string()];
                fields.extend(snapshot_fields(snapshot));
                fields
            }
            Message::Failed { cause, line } => vec!["failed".to_string(), cause_text(*cause), line.clone()],
            Message::Finished(snapshot) => {
                let mut fields = vec!["bye".to_string()];
                fields.extend(snapshot_fields(snapshot));
                fields
            }
            Message::Acknowledged => vec!["farewell".to_string()],
            Message::HeartbeatRequest => vec!["ask".to_string()],
            Message::Diagnosis(diagnosis) => vec![
                "verdict".to_string(),
                diagnosis.rank.to_string(),
                diagnosis.code.to_string(),
                diagnosis.line.clone(),
            ],
        };
        let escaped: Vec<String> = fields.iter().map(|field| escape(field)).collect();
        escaped.join("\t") + "\n"
    }

    /// Parses a line; `None` for what no rank of this version would send.
    pub fn decode(line: &str) -> Option<Self> {
        let fields: Vec<String> = line.trim_end_matches('\n').split('\t').map(unescape).collect();
        let (first, rest) = fields.split_first()?;
        match (first.as_str(), rest) {
            (MAGIC, [version, rank, world, peer @ ..]) => Some(Message::Hello(Hello {
                version: version.clone(),
                rank: rank.parse().ok()?,
                world: world.parse().ok()?,
                peer: peer_of(peer)?,
            })),
            ("refused", [why]) => Some(Message::Refused(why.clone())),
            ("welcome", [secret, peers @ ..]) => Some(Message::Welcome {
                secret: secret.parse().ok()?,
                peers: peers.chunks(PEER_FIELDS).map(peer_of).collect::<Option<_>>()?,
            }),
            ("beat", [busy, snapshot @ ..]) => {
                Some(Message::Heartbeat { busy: busy == "1", snapshot: snapshot_of(snapshot)? })
            }
            ("failed", [cause, line]) => {
                Some(Message::Failed { cause: cause_of(cause)?, line: line.clone() })
            }
            ("bye", snapshot) => Some(Message::Finished(snapshot_of(snapshot)?)),
            ("farewell", []) => Some(Message::Acknowledged),
            ("ask", []) => Some(Message::HeartbeatRequest),
            ("verdict", [rank, code, line]) => Some(Message::Diagnosis(Diagnosis {
                rank: rank.parse().ok()?,
                code: code.parse().ok()?,
                line: line.clone(),
            })),
            _ => None,
        }
    }
}

/// Number of fields of a peer.
const PEER_FIELDS: usize = 5;

fn peer_fields(peer: &Peer) -> [String; PEER_FIELDS] {
    let addresses = peer.addresses.join(" ");
    [peer.host.clone(), peer.pid.to_string(), peer.process.clone(), addresses, peer.cores.clone()]
}

fn peer_of(fields: &[String]) -> Option<Peer> {
    let [host, pid, process, addresses, cores] = fields else { return None };
    Some(Peer {
        host: host.clone(),
        pid: pid.parse().ok()?,
        process: process.clone(),
        addresses: addresses.split_whitespace().map(str::to_string).collect(),
        cores: cores.clone(),
    })
}

fn snapshot_fields(snapshot: &Snapshot) -> Vec<String> {
    let inside = u8::from(snapshot.current_call.is_some());
    let mut fields = vec![
        snapshot.doing.to_string(),
        snapshot.progress.to_string(),
        snapshot.entered.to_string(),
        snapshot.digest.to_string(),
        snapshot.milestone.to_string(),
        inside.to_string(),
        u8::from(snapshot.awaits_device).to_string(),
    ];
    if let Some(last) = &snapshot.last_call {
        fields.extend([last.collective.to_string(), last.name.to_string(), last.bytes.to_string()]);
    }
    fields
}

fn snapshot_of(fields: &[String]) -> Option<Snapshot> {
    let [doing, progress, entered, digest, milestone, inside, awaits_device, call @ ..] = fields else {
        return None;
    };
    let entered = entered.parse().ok()?;
    let last = match call {
        [] => None,
        [collective, name, bytes] => Some(CallInfo {
            sequence: entered,
            collective: collective_of(collective)?,
            name: Arc::from(name.as_str()),
            bytes: bytes.parse().ok()?,
        }),
        _ => return None,
    };
    Some(Snapshot {
        progress: progress.parse().ok()?,
        doing: Arc::from(doing.as_str()),
        awaits_device: awaits_device == "1",
        current_call: last.clone().filter(|_| inside == "1"),
        last_call: last,
        entered,
        digest: digest.parse().ok()?,
        milestone: milestone.parse().ok()?,
    })
}

fn collective_of(name: &str) -> Option<&'static str> {
    let all = [
        Collective::AllReduce(Reduction::Sum),
        Collective::ReduceScatter(Reduction::Sum),
        Collective::AllGather,
        Collective::AllToAll(None),
        Collective::Broadcast { root: 0 },
        Collective::Barrier,
    ];
    all.iter().map(Collective::name).find(|known| *known == name)
}

fn cause_text(cause: Cause) -> String {
    match cause {
        Cause::Own => "own".to_string(),
        Cause::Panic => "panic".to_string(),
        Cause::Device => "device".to_string(),
        Cause::Mismatch => "mismatch".to_string(),
        Cause::Lost(rank) => format!("lost {rank}"),
        Cause::Communication => "exchange".to_string(),
        Cause::Aborted => "aborted".to_string(),
    }
}

fn cause_of(text: &str) -> Option<Cause> {
    Some(match text {
        "own" => Cause::Own,
        "panic" => Cause::Panic,
        "device" => Cause::Device,
        "mismatch" => Cause::Mismatch,
        "exchange" => Cause::Communication,
        "aborted" => Cause::Aborted,
        other => Cause::Lost(other.strip_prefix("lost ")?.parse().ok()?),
    })
}

fn escape(text: &str) -> String {
    text.replace('\\', "\\\\").replace('\t', "\\t").replace('\n', "\\n").replace('\r', "\\r")
}

fn unescape(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    let mut letters = text.chars();
    while let Some(letter) = letters.next() {
        match letter {
            '\\' => match letters.next() {
                Some('t') => plain.push('\t'),
                Some('n') => plain.push('\n'),
                Some('r') => plain.push('\r'),
                Some(other) => plain.push(other),
                None => plain.push('\\'),
            },
            other => plain.push(other),
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    fn snapshot() -> Snapshot {
        let at = CallInfo {
            sequence: 137,
            collective: "all_reduce",
            name: Arc::from("blocks.7\tx"),
            bytes: 1_800_000,
        };
        Snapshot {
            progress: 9,
            doing: Arc::from("backward of a\nb\\t"),
            awaits_device: false,
            current_call: Some(at.clone()),
            last_call: Some(at),
            entered: 137,
            digest: u64::MAX,
            milestone: 5,
        }
    }

    #[test]
    fn every_message_comes_back_as_it_was_said() {
        let peer = Peer {
            host: "node 1".to_string(),
            pid: 71,
            process: "a/b/c".to_string(),
            addresses: vec!["10.0.0.1:80".to_string(), "[::1]:80".to_string()],
            cores: "0-3,8".to_string(),
        };
        let hello = Hello { version: "0.1.0".to_string(), rank: 1, world: 2, peer: peer.clone() };
        let outside = Snapshot { current_call: None, awaits_device: true, ..snapshot() };
        let first = Snapshot { current_call: None, last_call: None, entered: 0, ..snapshot() };
        let messages = [
            Message::Hello(hello),
            Message::Refused("no\troom".to_string()),
            Message::Welcome { secret: 7, peers: vec![peer, Peer::default()] },
            Message::Heartbeat { snapshot: snapshot(), busy: true },
            Message::Heartbeat { snapshot: outside, busy: false },
            Message::Heartbeat { snapshot: first, busy: false },
            Message::Failed { cause: Cause::Device, line: "GPU 0".to_string() },
            Message::Failed { cause: Cause::Lost(3), line: "a\\b".to_string() },
            Message::Finished(snapshot()),
            Message::Acknowledged,
            Message::HeartbeatRequest,
            Message::Diagnosis(Diagnosis { rank: 2, line: "lost".to_string(), code: 3 }),
        ];
        for message in messages {
            let text = message.encode();
            assert_eq!(text.matches('\n').count(), 1, "{text}");
            assert_eq!(Message::decode(&text), Some(message), "{text}");
        }
    }

    #[test]
    fn what_no_rank_would_say_is_no_message() {
        for text in ["", "GET / HTTP/1.1", "beat\t1", "verdict\tx\t1\tline", "bye", "welcome\t1\thost"] {
            assert_eq!(Message::decode(text), None, "{text}");
        }
    }
}
