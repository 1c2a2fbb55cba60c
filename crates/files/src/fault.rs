//! Faults made on purpose, to see that a run ends as it should: `VITESSE_FAULT=KIND:rank=R:step=S`.
//!
//! * `panic`: the rank panics before the step.
//! * `hang`: it stops working, while its process lives on.
//! * `order`: it calls a collective that the others don't.
//! * `gpu`: its GPU runs into a trap, and fails from then on.
//! * `spin`: its GPU runs a kernel that never ends.
//! * `slow:rank=R:factor=F`: from the first step on it takes F times as long to compute (`rank=all`: every rank).
//! * `data:rank=R:ms=M`: every training image takes a thread of its loader M milliseconds longer to read.
//! * `kill:operation=N`: the process is killed before the Nth operation on the files of a run.
//! * `disk:operation=N`: that operation fails, as on a full disk.

use std::io;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The environment variable that asks for faults.
pub const VARIABLE: &str = "VITESSE_FAULT";
/// The environment variable in which a supervisor tells a run how often it was started again.
pub const RESTART: &str = "VITESSE_RESTART";

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    Panic,
    Hang,
    Order,
    Gpu,
    Spin,
    Slow(f64),
    Data(Duration),
    Kill { operation: u64 },
    Disk { operation: u64 },
}

/// A fault of one rank, and the step of those that have one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Fault {
    pub kind: Kind,
    pub step: u64,
}

impl Fault {
    /// What this rank is to suffer, or the text that is no fault. Several faults are separated by commas; the last that fits
    /// counts. A run that was started again is spared.
    pub fn from_environment(rank: usize) -> Result<Option<Self>, String> {
        let restarted = std::env::var(RESTART).is_ok_and(|again| again != "0");
        let Some(text) = std::env::var(VARIABLE).ok().filter(|_| !restarted) else { return Ok(None) };
        let mut found = None;
        for one in text.split(',') {
            let (fault, ranks) = parse(one).ok_or_else(|| one.to_string())?;
            if ranks.is_none_or(|r| r == rank) {
                found = Some(fault);
            }
        }
        Ok(found)
    }
}

/// Every operation on the files of a run asks here first.
pub fn file_operation() -> io::Result<()> {
    static FAULT: OnceLock<Option<Kind>> = OnceLock::new();
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let of_files = |kind: &Kind| matches!(kind, Kind::Kill { .. } | Kind::Disk { .. });
    // What is no fault is refused where the ranks read theirs. Files of a run are rank 0's.
    let fault =
        FAULT.get_or_init(|| Fault::from_environment(0).ok().flatten().map(|f| f.kind).filter(of_files));
    let Some(fault) = fault else { return Ok(()) };
    let count = COUNT.fetch_add(1, Ordering::Relaxed) + 1;
    match *fault {
        Kind::Kill { operation } if count == operation => {
            // SAFETY: a signal to this process itself, which nothing can catch.
            unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
            Ok(())
        }
        Kind::Disk { operation } if count == operation => Err(io::Error::from_raw_os_error(libc::ENOSPC)),
        _ => Ok(()),
    }
}

/// The fault and the rank that it is for, none for all.
fn parse(text: &str) -> Option<(Fault, Option<usize>)> {
    let mut words = text.split(':');
    let kind = words.next()?;
    let (mut rank, mut step, mut factor, mut delay) = (None, 0, 2.0, Duration::from_millis(1));
    let mut operation = 1;
    for word in words {
        match word.split_once('=')? {
            ("rank", "all") => rank = None,
            ("rank", value) => rank = Some(value.parse().ok()?),
            ("step", value) => step = value.parse().ok()?,
            ("operation", value) => operation = value.parse().ok()?,
            ("factor", value) => factor = value.parse().ok().filter(|f| *f >= 1.0)?,
            ("ms", value) => delay = Duration::try_from_secs_f64(value.parse::<f64>().ok()? / 1e3).ok()?,
            _ => return None,
        }
    }
    let kind = match kind {
        "panic" => Kind::Panic,
        "hang" => Kind::Hang,
        "order" => Kind::Order,
        "gpu" => Kind::Gpu,
        "spin" => Kind::Spin,
        "slow" => Kind::Slow(factor),
        "data" => Kind::Data(delay),
        "kill" => Kind::Kill { operation },
        "disk" => Kind::Disk { operation },
        _ => return None,
    };
    Some((Fault { kind, step }, rank))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_read() {
        let fault = |kind, step| Fault { kind, step };
        assert_eq!(parse("panic:rank=2:step=7"), Some((fault(Kind::Panic, 7), Some(2))));
        assert_eq!(parse("gpu:step=3"), Some((fault(Kind::Gpu, 3), None)));
        assert_eq!(parse("spin:rank=1"), Some((fault(Kind::Spin, 0), Some(1))));
        let slow_data = Some((fault(Kind::Data(Duration::from_micros(2500)), 0), None));
        assert_eq!(parse("data:rank=all:ms=2.5"), slow_data);
        assert!(parse("data:ms=-1").is_none());
        assert_eq!(parse("kill:operation=9"), Some((fault(Kind::Kill { operation: 9 }, 0), None)));
        assert_eq!(parse("slow:rank=all:factor=2.5"), Some((fault(Kind::Slow(2.5), 0), None)));
        assert!(
            ["", "panik", "panic:rank", "panic:rank=x", "slow:factor=0.5"].iter().all(|t| parse(t).is_none())
        );
    }
}
