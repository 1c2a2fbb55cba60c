//! Reading and preparing neighbours of the global order, whatever they are labelled with.

use super::crew::{Problem, caught};
use super::{Batch, Request};
use crate::{DataError, Dataset, Sample, Sampler, Skipped};
use std::sync::Arc;

/// Most samples that are prepared together.
const GROUP: usize = 2;

/// Transforms the samples of a task and copies them into batches. Holds the samples of one group; one for each thread.
pub(super) trait Prepare: Send {
    /// Returns whether samples are mixed with their neighbours, so that a group is needed even if a request holds a part of it.
    fn mixes(&self) -> bool {
        false
    }

    /// Returns whether images have to be read: not those that lie on a device.
    fn reads(&self) -> bool {
        true
    }

    /// Takes note of the image that a slot of the group is for, before it is read.
    fn begin(&mut self, _slot: usize, _index: usize, _set: &dyn Dataset) {}

    /// Transforms a sample that was read, with the draws of its position.
    fn prepare(&mut self, slot: usize, draw: Draw, sample: &Sample) -> Result<(), DataError>;

    /// Ends a group; `complete` if all of its slots have a sample.
    fn end(&mut self, _complete: bool) {}

    /// Copies a slot to its position's place in the batch; or makes that a place without a sample, if the image is bad.
    fn deliver(&mut self, slot: usize, good: bool, request: Request, position: usize, batch: &mut Batch);
}

/// Seed and position that the draws of one sample depend on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Draw {
    pub(super) seed: u64,
    pub(super) epoch: u64,
    pub(super) position: usize,
}

/// Makes the samples of batches, group by group; one for each thread.
pub(super) struct Maker {
    set: Arc<dyn Dataset>,
    sampler: Sampler,
    skip_bad: bool,
    group: usize,
    prepare: Box<dyn Prepare>,
    sample: Sample,
    slots: [Slot; GROUP],
    /// Number of the image that is being prepared, to be named if that panics.
    reading: usize,
}

#[derive(Default)]
struct Slot {
    index: usize,
    state: State,
}

#[derive(Default)]
enum State {
    /// Neither asked for nor needed.
    #[default]
    Absent,
    Ready,
    /// Error, with the image's name.
    Bad(DataError, String),
}

impl Maker {
    pub(super) fn new(
        set: Arc<dyn Dataset>,
        prepare: Box<dyn Prepare>,
        group: usize,
        sampler: Sampler,
        skip_bad: bool,
    ) -> Self {
        let (sample, slots) = Default::default();
        Self { set, sampler, skip_bad, group: group.clamp(1, GROUP), prepare, sample, slots, reading: 0 }
    }

    /// Prepares the samples of a group that the request needs.
    pub(super) fn make(&mut self, request: Request, group: usize) -> Result<(), Problem> {
        caught(|| self.make_all(request, group)).map_err(|message| {
            let problem = format!("preparing image {}: {message}", self.reading);
            (group * self.group, DataError::Worker { problem })
        })
    }

    fn make_all(&mut self, request: Request, group: usize) {
        let mixes = self.prepare.mixes();
        for slot in 0..self.group {
            let position = group * self.group + slot;
            let needed = request.holds(position) || mixes && position < self.sampler.len;
            self.slots[slot].state =
                if needed { self.make_one(slot, request.epoch, position) } else { State::Absent };
        }
        let ready = |slot: &Slot| matches!(slot.state, State::Ready);
        self.prepare.end(self.slots[..self.group].iter().all(ready));
    }

    fn make_one(&mut self, slot: usize, epoch: u64, position: usize) -> State {
        let index = self.sampler.index(epoch, position);
        (self.reading, self.slots[slot].index) = (index, index);
        self.prepare.begin(slot, index, &*self.set);
        match self.read(slot, Draw { seed: self.sampler.seed, epoch, position }) {
            Ok(()) => State::Ready,
            Err(error) => State::Bad(error, self.set.name(index)),
        }
    }

    fn read(&mut self, slot: usize, draw: Draw) -> Result<(), DataError> {
        let index = self.slots[slot].index;
        if self.prepare.reads() {
            self.set.read(index, &mut self.sample)?;
        }
        self.prepare.prepare(slot, draw, &self.sample).map_err(|error| {
            let image = self.set.name(index);
            DataError::Image { image, problem: error.to_string() }
        })
    }

    /// Copies into the batch what the request asks of the group. Fails where an image is bad and none may be skipped.
    pub(super) fn deliver(
        &mut self,
        request: Request,
        group: usize,
        batch: &mut Batch,
    ) -> Result<(), Problem> {
        for slot in 0..self.group {
            let position = group * self.group + slot;
            if !request.holds(position) {
                continue;
            }
            let index = self.slots[slot].index;
            let good = match std::mem::take(&mut self.slots[slot].state) {
                State::Ready => true,
                State::Bad(error, _) if !self.skip_bad => return Err((position, error)),
                State::Bad(error, name) => {
                    batch.skipped.push(Skipped { index, name, problem: error.to_string() });
                    false
                }
                State::Absent => continue,
            };
            self.prepare.deliver(slot, good, request, position, batch);
            batch.indices[position - request.first] = index;
        }
        Ok(())
    }
}
