//! Upload of batches to the GPU.
//!
//! The host writes a batch into one of two pinned buffers, and the copy stream copies it to a buffer beside the arena
//! while the step before still runs: a plan may use its inputs' memory for other things, so only when it starts are they put
//! there.

use super::Which;
use super::list::Streams;
use crate::action::Address;
use crate::driver::{Block, Context, Event, Pinned};
use crate::error::CudaError;
use crate::moves::Move;
use graph::ALIGN;
use graph::{DType, Plan, Program};
use half::{bf16, f16};
use std::sync::Arc;

/// An input and its place in the buffers.
#[derive(Clone, Debug, PartialEq)]
struct InputSlot {
    name: String,
    offset: usize,
    count: usize,
    dtype: DType,
}

impl InputSlot {
    fn bytes(&self) -> usize {
        self.count * self.dtype.bytes()
    }
}

/// The inputs of a plan, one after the other.
fn layout(plan: &Plan) -> (Vec<InputSlot>, usize) {
    let mut bytes = 0;
    let slot = |value: &usize| {
        let value = &plan.values[*value];
        let (offset, count) = (bytes, value.ty.shape.count());
        bytes += value.ty.bytes().next_multiple_of(ALIGN);
        InputSlot { name: value.name.clone(), offset, count, dtype: value.ty.dtype }
    };
    (plan.inputs.iter().map(slot).collect(), bytes)
}

pub(super) struct Staging {
    layouts: [Vec<InputSlot>; Which::ALL.len()],
    /// Pinned buffers, each with the event of the GPU's having read it.
    host: [(Pinned, Event); 2],
    device: Block,
    /// Event of the last batch's arrival in the arena.
    taken: Event,
    turn: usize,
    /// True while a batch is being filled in.
    open: bool,
    /// Plan whose batch the device buffer holds, and which of its inputs.
    holds: Option<(Which, Vec<bool>)>,
}

/// Source of an input's values.
pub(super) enum Data<'a> {
    F32(&'a [f32]),
    I32(&'a [i32]),
    U8(&'a [u8]),
}

impl Data<'_> {
    fn len(&self) -> usize {
        match self {
            Data::F32(data) => data.len(),
            Data::I32(data) => data.len(),
            Data::U8(data) => data.len(),
        }
    }

    /// Writes numbers as `dtype`; false if they can't be.
    fn write(&self, dtype: DType, to: &mut [u8]) -> bool {
        match (self, dtype) {
            (Data::F32(data), DType::F32) => put(data, to, |x| x.to_le_bytes()),
            (Data::F32(data), DType::Bf16) => put(data, to, |x| bf16::from_f32(x).to_le_bytes()),
            (Data::F32(data), DType::F16) => put(data, to, |x| f16::from_f32(x).to_le_bytes()),
            (Data::I32(data), DType::I32) => put(data, to, |x| x.to_le_bytes()),
            (Data::U8(data), DType::U8) => to.copy_from_slice(data),
            _ => return false,
        }
        true
    }
}

fn put<T: Copy, const N: usize>(data: &[T], to: &mut [u8], bytes: impl Fn(T) -> [u8; N]) {
    for (x, to) in data.iter().zip(to.chunks_exact_mut(N)) {
        to.copy_from_slice(&bytes(*x));
    }
}

impl Staging {
    pub fn bytes_for(program: &Program) -> usize {
        program.plans().into_iter().map(|plan| layout(plan).1).max().unwrap_or(0)
    }

    pub fn new(context: &Arc<Context>, program: &Program) -> Result<Self, CudaError> {
        let bytes = Self::bytes_for(program);
        let side = || Ok::<_, CudaError>((Pinned::new(context, bytes)?, Event::new(context)?));
        Ok(Staging {
            layouts: program.plans().map(|plan| layout(plan).0),
            host: [side()?, side()?],
            device: Block::new(context, bytes, "batches")?,
            taken: Event::new(context)?,
            turn: 0,
            open: false,
            holds: None,
        })
    }

    pub fn device_bytes(&self) -> usize {
        self.device.bytes
    }

    /// Starts the upload of one input. The first of a batch may wait until the batch before the last has left the host.
    pub fn upload(
        &mut self,
        which: Which,
        name: &str,
        data: Data<'_>,
        streams: &Streams,
    ) -> Result<(), CudaError> {
        let slots = &self.layouts[which as usize];
        let wrong = |why: String| CudaError::Misuse(format!("input {name} of {which:?} {why}"));
        let Some(index) = slots.iter().position(|slot| slot.name == name) else {
            return Err(wrong("doesn't exist".into()));
        };
        let slot = slots[index].clone();
        if slot.count != data.len() {
            return Err(wrong(format!("has {} elements, but {} were given", slot.count, data.len())));
        }
        let inputs = slots.len();
        let other = self.holds.as_ref().is_some_and(|(holder, _)| *holder != which);
        if !self.open || other {
            self.begin(streams)?;
            self.holds = Some((which, vec![false; inputs]));
        }
        let host = &mut self.host[self.turn].0;
        // SAFETY: `begin` has waited until the GPU was done with this side; an input given twice is written while the first
        // is perhaps still being read, but then it is sent again.
        let to = unsafe { host.bytes_mut(slot.offset, slot.bytes()) };
        if !data.write(slot.dtype, to) {
            return Err(wrong(format!("is of {}", slot.dtype)));
        }
        let (from, to) = (host.address(slot.offset), self.device.address + slot.offset as Address);
        // SAFETY: `begin` waits for this copy before the memory is written for another batch.
        unsafe { streams.copy().send(from, to, slot.bytes()) }?;
        if let Some((_, filled)) = &mut self.holds {
            filled[index] = true;
        }
        Ok(())
    }

    fn begin(&mut self, streams: &Streams) -> Result<(), CudaError> {
        if std::mem::replace(&mut self.open, true) {
            // The batch before was given up.
            self.host[self.turn].1.record(streams.copy())?;
        }
        self.turn = 1 - self.turn;
        streams.wait_for(&self.host[self.turn].1, || "sending a batch to the GPU".into())?;
        streams.copy().wait(&self.taken)
    }

    /// Moves of the batch into the inputs of the plan that is about to run: the one that was uploaded since the last run, or
    /// that of the last run again.
    pub fn take(
        &mut self,
        which: Which,
        addresses: &[Address],
        streams: &Streams,
    ) -> Result<Vec<Move>, CudaError> {
        let slots = &self.layouts[which as usize];
        if slots.is_empty() {
            return Ok(Vec::new());
        }
        let whole = |(holder, filled): &(Which, Vec<bool>)| {
            self.layouts[*holder as usize] == *slots && filled.iter().all(|filled| *filled)
        };
        if !self.holds.as_ref().is_some_and(whole) {
            return Err(CudaError::Misuse(format!("the inputs of {which:?} were not uploaded")));
        }
        if std::mem::take(&mut self.open) {
            let sent = &self.host[self.turn].1;
            sent.record(streams.copy())?;
            streams.compute().wait(sent)?;
        }
        let from = |slot: &InputSlot| self.device.address + slot.offset as Address;
        let taken = slots.iter().zip(addresses);
        Ok(taken.map(|(slot, to)| Move { from: from(slot), to: *to, bytes: slot.bytes() }).collect())
    }

    /// Records that the batch is in place, in the order of the compute stream.
    pub fn taken(&self, streams: &Streams) -> Result<(), CudaError> {
        self.taken.record(streams.compute())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_written_as_the_plan_has_them() {
        let mut bytes = [0; 8];
        assert!(Data::F32(&[1.0, -2.0]).write(DType::F32, &mut bytes));
        assert_eq!(bytes[4..], (-2f32).to_le_bytes());
        assert!(Data::F32(&[1.0, -2.0]).write(DType::Bf16, &mut bytes[..4]));
        assert_eq!(bytes[..4], [0x80, 0x3f, 0x00, 0xc0]);
        assert!(!Data::F32(&[1.0]).write(DType::I32, &mut bytes[..4]));
        assert!(!Data::I32(&[1]).write(DType::F32, &mut bytes[..4]));
        assert!(Data::U8(&[7, 9]).write(DType::U8, &mut bytes[..2]) && bytes[..2] == [7, 9]);
        assert!(!Data::U8(&[1]).write(DType::I32, &mut bytes[..1]));
    }
}
