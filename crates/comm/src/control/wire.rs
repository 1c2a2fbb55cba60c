//! What ranks say to each other beside the exchange: a line of text for each message, its fields apart by tabs.

use super::judge::{Cause, Verdict};
use crate::call::Collective;
use crate::element::Reduction;
use crate::pulse::{At, Snapshot};
use std::sync::Arc;

/// What a rank says of itself when it comes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Hello {
    pub version: String,
    pub rank: usize,
    pub world: usize,
    pub person: Person,
}

/// What the others are told of a rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Person {
    pub host: String,
    pub pid: u32,
    /// Machine, process namespace and start of the process: see [`super::process`].
    pub process: String,
    /// Where it listens for the mesh, as `address:port`.
    pub addresses: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Message {
    Hello(Hello),
    Refused(String),
    /// All are here: a number that only they know, and who they are.
    Welcome {
        secret: u64,
        people: Vec<Person>,
    },
    Beat {
        snapshot: Snapshot,
        busy: bool,
    },
    /// A beat is wanted now.
    Ask,
    Failed {
        cause: Cause,
        line: String,
    },
    /// The rank ended in good order; with its last snapshot.
    Bye(Snapshot),
    Farewell,
    Verdict(Verdict),
}

const MAGIC: &str = "vitesse-ranks-1";

impl Message {
    pub fn encode(&self) -> String {
        let fields = match self {
            Message::Hello(hello) => {
                let numbers = [hello.rank.to_string(), hello.world.to_string()];
                let mut fields = vec![MAGIC.to_string(), hello.version.clone()];
                fields.extend(numbers);
                fields.extend(person_fields(&hello.person));
                fields
            }
            Message::Refused(why) => vec!["refused".to_string(), why.clone()],
            Message::Welcome { secret, people } => {
                let mut fields = vec!["welcome".to_string(), secret.to_string()];
                fields.extend(people.iter().flat_map(person_fields));
                fields
            }
            Message::Beat { snapshot, busy } => {
                let mut fields = vec!["beat".to_string(), u8::from(*busy).to_string()];
                fields.extend(snapshot_fields(snapshot));
                fields
            }
            Message::Failed { cause, line } => vec!["failed".to_string(), cause_text(*cause), line.clone()],
            Message::Bye(snapshot) => {
                let mut fields = vec!["bye".to_string()];
                fields.extend(snapshot_fields(snapshot));
                fields
            }
            Message::Farewell => vec!["farewell".to_string()],
            Message::Ask => vec!["ask".to_string()],
            Message::Verdict(verdict) => vec![
                "verdict".to_string(),
                verdict.rank.to_string(),
                verdict.code.to_string(),
                verdict.line.clone(),
            ],
        };
        let escaped: Vec<String> = fields.iter().map(|field| escape(field)).collect();
        escaped.join("\t") + "\n"
    }

    /// Nothing for what no rank of this version would say.
    pub fn decode(line: &str) -> Option<Self> {
        let fields: Vec<String> = line.trim_end_matches('\n').split('\t').map(unescape).collect();
        let (first, rest) = fields.split_first()?;
        match (first.as_str(), rest) {
            (MAGIC, [version, rank, world, person @ ..]) => Some(Message::Hello(Hello {
                version: version.clone(),
                rank: rank.parse().ok()?,
                world: world.parse().ok()?,
                person: person_of(person)?,
            })),
            ("refused", [why]) => Some(Message::Refused(why.clone())),
            ("welcome", [secret, people @ ..]) => Some(Message::Welcome {
                secret: secret.parse().ok()?,
                people: people.chunks(PERSON).map(person_of).collect::<Option<_>>()?,
            }),
            ("beat", [busy, snapshot @ ..]) => {
                Some(Message::Beat { busy: busy == "1", snapshot: snapshot_of(snapshot)? })
            }
            ("failed", [cause, line]) => {
                Some(Message::Failed { cause: cause_of(cause)?, line: line.clone() })
            }
            ("bye", snapshot) => Some(Message::Bye(snapshot_of(snapshot)?)),
            ("farewell", []) => Some(Message::Farewell),
            ("ask", []) => Some(Message::Ask),
            ("verdict", [rank, code, line]) => Some(Message::Verdict(Verdict {
                rank: rank.parse().ok()?,
                code: code.parse().ok()?,
                line: line.clone(),
            })),
            _ => None,
        }
    }
}

/// Fields of a person.
const PERSON: usize = 4;

fn person_fields(person: &Person) -> [String; PERSON] {
    [person.host.clone(), person.pid.to_string(), person.process.clone(), person.addresses.join(" ")]
}

fn person_of(fields: &[String]) -> Option<Person> {
    let [host, pid, process, addresses] = fields else { return None };
    Some(Person {
        host: host.clone(),
        pid: pid.parse().ok()?,
        process: process.clone(),
        addresses: addresses.split_whitespace().map(str::to_string).collect(),
    })
}

fn snapshot_fields(snapshot: &Snapshot) -> Vec<String> {
    let inside = u8::from(snapshot.at.is_some());
    let mut fields = vec![
        snapshot.doing.to_string(),
        snapshot.progress.to_string(),
        snapshot.entered.to_string(),
        snapshot.digest.to_string(),
        snapshot.milestone.to_string(),
        inside.to_string(),
    ];
    if let Some(last) = &snapshot.last {
        fields.extend([last.collective.to_string(), last.name.to_string(), last.bytes.to_string()]);
    }
    fields
}

fn snapshot_of(fields: &[String]) -> Option<Snapshot> {
    let [doing, progress, entered, digest, milestone, inside, call @ ..] = fields else { return None };
    let entered = entered.parse().ok()?;
    let last = match call {
        [] => None,
        [collective, name, bytes] => Some(At {
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
        at: last.clone().filter(|_| inside == "1"),
        last,
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
        Cause::Exchange => "exchange".to_string(),
        Cause::Aborted => "aborted".to_string(),
    }
}

fn cause_of(text: &str) -> Option<Cause> {
    Some(match text {
        "own" => Cause::Own,
        "panic" => Cause::Panic,
        "device" => Cause::Device,
        "mismatch" => Cause::Mismatch,
        "exchange" => Cause::Exchange,
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
        let at =
            At { sequence: 137, collective: "all_reduce", name: Arc::from("blocks.7\tx"), bytes: 1_800_000 };
        Snapshot {
            progress: 9,
            doing: Arc::from("backward of a\nb\\t"),
            at: Some(at.clone()),
            last: Some(at),
            entered: 137,
            digest: u64::MAX,
            milestone: 5,
        }
    }

    #[test]
    fn every_message_comes_back_as_it_was_said() {
        let person = Person {
            host: "node 1".to_string(),
            pid: 71,
            process: "a/b/c".to_string(),
            addresses: vec!["10.0.0.1:80".to_string(), "[::1]:80".to_string()],
        };
        let hello = Hello { version: "0.1.0".to_string(), rank: 1, world: 2, person: person.clone() };
        let outside = Snapshot { at: None, ..snapshot() };
        let first = Snapshot { at: None, last: None, entered: 0, ..snapshot() };
        let messages = [
            Message::Hello(hello),
            Message::Refused("no\troom".to_string()),
            Message::Welcome { secret: 7, people: vec![person, Person::default()] },
            Message::Beat { snapshot: snapshot(), busy: true },
            Message::Beat { snapshot: outside, busy: false },
            Message::Beat { snapshot: first, busy: false },
            Message::Failed { cause: Cause::Device, line: "GPU 0".to_string() },
            Message::Failed { cause: Cause::Lost(3), line: "a\\b".to_string() },
            Message::Bye(snapshot()),
            Message::Farewell,
            Message::Ask,
            Message::Verdict(Verdict { rank: 2, line: "lost".to_string(), code: 3 }),
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
