//! What becomes of faults that were asked for ([`files::fault`]).

use crate::error::TrainError;
use comm::Communicator;
use config::sets::{ImageSets, Sets};
use data::segment::{MaskedSet, Pair};
use data::{DataError, Dataset, Image};
use devices::{Device, Real};
use files::fault::{Fault, Kind, VARIABLE};
use std::sync::Arc;
use std::time::Duration;

/// Makes a fault happen, if this is its step.
pub fn strike<T: Real>(
    fault: &Fault,
    step: u64,
    world: &Communicator,
    device: &mut dyn Device<T>,
) -> Result<(), TrainError> {
    match fault.kind {
        Kind::Slow(factor) => device.set_slowdown(factor),
        Kind::Data(_) | Kind::Kill { .. } | Kind::Disk { .. } => {}
        _ if step != fault.step => {}
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

/// The sets that a rank reads from, slowed down if the fault says so.
pub fn spoil(fault: &Fault, sets: Sets) -> Sets {
    let Kind::Data(delay) = fault.kind else { return sets };
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
