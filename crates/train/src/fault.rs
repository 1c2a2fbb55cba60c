//! What becomes of faults that were asked for ([`files::fault`]).

use crate::error::TrainError;
use comm::Communicator;
use config::sets::Sets;
use data::{DataError, Dataset, Layer, Sample};
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
        Kind::Spin => device.spin()?,
    }
    Ok(())
}

/// The sets that a rank reads from, slowed down if the fault says so.
pub fn spoil(fault: &Fault, sets: Sets) -> Sets {
    let Kind::Data(delay) = fault.kind else { return sets };
    Sets { train: Arc::new(Slow { set: sets.train, delay }), ..sets }
}

/// A set on a slow disk.
struct Slow {
    set: Arc<dyn Dataset>,
    delay: Duration,
}

impl Layer for Slow {
    fn below(&self) -> &dyn Dataset {
        &*self.set
    }

    fn read_below(&self, index: usize, out: &mut Sample) -> Result<(), DataError> {
        std::thread::sleep(self.delay);
        self.set.read(index, out)
    }
}
