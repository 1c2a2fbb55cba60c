//! Faults made on purpose, to see that a run ends as it should: `VITESSE_FAULT=KIND:rank=R:step=S`.
//!
//! * `panic`: the rank panics before the step.
//! * `hang`: it stops working, while its process lives on.
//! * `order`: it calls a collective that the others don't.
//! * `gpu`: its GPU runs into a trap, and fails from then on.
//! * `slow:rank=R:factor=F`: from the first step on it takes F times as long to compute (`rank=all`: every rank).
//! * `data:rank=R:ms=M`: every training image takes a thread of its loader M milliseconds longer to read.
//! * `kill:operation=N`: the process is killed before the Nth operation on the files of a run.
//! * `disk:operation=N`: that operation fails, as on a full disk.

use crate::device::Device;
use crate::error::TrainError;
use crate::real::Real;
use crate::record::RESTART;
use crate::sets::{ImageSets, Sets};
use comm::Communicator;
use data::segment::{MaskedSet, Pair};
use data::{DataError, Dataset, Image};
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

const VARIABLE: &str = "VITESSE_FAULT";

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Panic,
    Hang,
    Order,
    Gpu,
    Slow(f64),
    Data(Duration),
    Kill { operation: u64 },
    Disk { operation: u64 },
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Fault {
    kind: Kind,
    step: u64,
}

impl Fault {
    /// What this rank is to suffer. Several faults are separated by commas; the last that fits counts. A run that was started
    /// again is spared.
    pub fn from_environment(rank: usize) -> Result<Option<Self>, TrainError> {
        let restarted = std::env::var(RESTART).is_ok_and(|again| again != "0");
        let Some(text) = std::env::var(VARIABLE).ok().filter(|_| !restarted) else { return Ok(None) };
        let mut found = None;
        for one in text.split(',') {
            let (fault, ranks) = parse(one).ok_or_else(|| TrainError::Fault(one.to_string()))?;
            if ranks.is_none_or(|r| r == rank) {
                found = Some(fault);
            }
        }
        Ok(found)
    }

    pub fn strike<T: Real>(
        &self,
        step: u64,
        world: &Communicator,
        device: &mut dyn Device<T>,
    ) -> Result<(), TrainError> {
        match self.kind {
            Kind::Slow(factor) => device.set_slowdown(factor),
            Kind::Data(_) | Kind::Kill { .. } | Kind::Disk { .. } => {}
            _ if step != self.step => {}
            Kind::Panic => panic!("{VARIABLE} asks for it"),
            Kind::Hang => loop {
                std::thread::sleep(std::time::Duration::from_secs(1));
            },
            Kind::Order => {
                world.barrier(world.name("a collective out of order"))?;
            }
            Kind::Gpu => device.lose()?,
        }
        Ok(())
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

impl Fault {
    /// What the rank reads from.
    pub fn spoil(&self, sets: Sets) -> Sets {
        let Kind::Data(delay) = self.kind else { return sets };
        match sets {
            Sets::Images(sets) => {
                Sets::Images(ImageSets { train: Arc::new(Slow { set: sets.train, delay }), ..sets })
            }
            Sets::Masked(mut sets) => {
                sets.train = Arc::new(Slow { set: sets.train, delay });
                Sets::Masked(sets)
            }
        }
    }
}

/// A set on a slow disk.
struct Slow<S: ?Sized> {
    set: Arc<S>,
    delay: Duration,
}

impl MaskedSet for Slow<dyn MaskedSet> {
    fn len(&self) -> usize {
        self.set.len()
    }

    fn class_names(&self) -> &[String] {
        self.set.class_names()
    }

    fn channels(&self) -> usize {
        self.set.channels()
    }

    fn name(&self, index: usize) -> String {
        self.set.name(index)
    }

    fn read(&self, index: usize, out: &mut Pair) -> Result<(), DataError> {
        std::thread::sleep(self.delay);
        self.set.read(index, out)
    }
}

impl Dataset for Slow<dyn Dataset> {
    fn len(&self) -> usize {
        self.set.len()
    }

    fn class_names(&self) -> &[String] {
        self.set.class_names()
    }

    fn channels(&self) -> usize {
        self.set.channels()
    }

    fn label(&self, index: usize) -> usize {
        self.set.label(index)
    }

    fn name(&self, index: usize) -> String {
        self.set.name(index)
    }

    fn read(&self, index: usize, out: &mut Image) -> Result<(), DataError> {
        std::thread::sleep(self.delay);
        self.set.read(index, out)
    }

    fn size(&self) -> Option<(usize, usize)> {
        self.set.size()
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
