//! What a checkpoint is written from: states as they were at one moment.

use devices::device::{Device, Snapshot};
use devices::{DeviceError, Real};
use graph::StateId;
use std::borrow::Cow;

pub(super) enum Source<T> {
    /// States where they lie; none is in flight until they were read.
    Live,
    Host(HostCopy<T>),
    Device(Box<dyn Snapshot<T> + Send>),
}

/// Copies of states in the host's memory, one after the other.
pub(super) struct HostCopy<T> {
    pub values: Vec<T>,
    ends: Vec<usize>,
}

impl<T: Real> HostCopy<T> {
    /// Copies states into memory that is kept for this.
    pub fn of(device: &dyn Device<T>, ids: &[StateId], mut values: Vec<T>) -> Result<Self, DeviceError> {
        values.clear();
        let mut ends = Vec::with_capacity(ids.len());
        for id in ids {
            values.extend_from_slice(&device.state(*id)?);
            ends.push(values.len());
        }
        Ok(HostCopy { values, ends })
    }
}

impl<T: Real> Snapshot<T> for HostCopy<T> {
    fn read(&mut self, index: usize) -> Result<&[T], DeviceError> {
        let start = if index == 0 { 0 } else { self.ends[index - 1] };
        Ok(&self.values[start..self.ends[index]])
    }
}

/// States that are read where they lie.
pub(super) struct Live<'d, T: Real> {
    device: &'d dyn Device<T>,
    ids: Vec<StateId>,
    values: Cow<'d, [T]>,
}

impl<'d, T: Real> Live<'d, T> {
    pub fn of(device: &'d dyn Device<T>, ids: Vec<StateId>) -> Self {
        Live { device, ids, values: Cow::Borrowed(&[]) }
    }
}

impl<T: Real> Snapshot<T> for Live<'_, T> {
    fn read(&mut self, index: usize) -> Result<&[T], DeviceError> {
        self.values = self.device.state(self.ids[index])?;
        Ok(&self.values)
    }
}
