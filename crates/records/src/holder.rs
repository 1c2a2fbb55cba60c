//! `.lock` of a run's folder: the process that works there.

use serde::{Deserialize, Serialize};
use std::fs;
use std::path::Path;

/// What a lock says of its holder.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Holder {
    /// Counter that the holder renews; the first member, and always of one length: it is renewed in its place.
    pub beat: String,
    pub host: String,
    pub pid: u32,
    /// This boot of this machine, and the pid namespace: a pid means something within these alone.
    pub machine: String,
    /// When the process started, as the kernel counts.
    pub started: String,
}

impl Holder {
    /// Name of the file in a run's folder.
    pub const FILE: &str = ".lock";

    /// This process.
    pub fn me(beat: String) -> Self {
        let pid = std::process::id();
        let started = process_started(pid).unwrap_or_default();
        Holder { beat, host: host(), pid, machine: machine(), started }
    }

    pub fn parse(text: &str) -> Option<Self> {
        serde_json::from_str(text).ok()
    }

    /// The holder of a folder's lock; none if there is no lock, or it can't be read.
    pub fn of(folder: &Path) -> Option<Self> {
        Self::parse(&fs::read_to_string(folder.join(Self::FILE)).ok()?)
    }

    /// Returns whether its process lives; none if that can't be told from here.
    pub fn lives(&self) -> Option<bool> {
        let here = !self.machine.is_empty() && self.machine == machine();
        here.then(|| process_started(self.pid).as_ref() == Some(&self.started))
    }
}

/// Name of this machine.
pub fn host() -> String {
    system("/proc/sys/kernel/hostname")
}

/// Empty where the system doesn't tell.
fn machine() -> String {
    let boot = system("/proc/sys/kernel/random/boot_id");
    match fs::read_link("/proc/self/ns/pid") {
        Ok(namespace) if !boot.is_empty() => format!("{} {boot} {}", host(), namespace.display()),
        _ => String::new(),
    }
}

fn system(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default().trim().to_string()
}

/// When a process started; none if there is none of this pid, or it has ended and only its exit code is left.
pub fn process_started(pid: u32) -> Option<String> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The program's name comes before, in parentheses, and may hold anything.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let ended = matches!(*fields.first()?, "Z" | "X");
    fields.get(19).filter(|_| !ended).map(|text| text.to_string())
}
