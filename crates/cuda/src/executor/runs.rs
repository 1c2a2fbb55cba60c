//! Runs under way: their headers, and the start and end of each on the GPU.

use super::Which;
use super::list::Streams;
use crate::action::Address;
use crate::driver::{Context, Event, Pinned};
use crate::error::CudaError;
use crate::moves::Move;
use graph::Header;
use graph::run::EachPlan;
use std::sync::Arc;

/// Most runs that the host may be ahead of the GPU.
const AHEAD: usize = 64;

/// Bytes of a header as `common.cuh` declares it, and stride of headers.
const HEADER_BYTES: usize = 40;
const HEADER_STRIDE: usize = 64;

struct RunSlot {
    began: Event,
    ended: Event,
    /// Plan that ran here, until its time was read.
    ran: Option<Which>,
}

pub(super) struct Runs {
    slots: Vec<RunSlot>,
    headers: Pinned,
    /// Header on the GPU.
    sent: Option<[u8; HEADER_BYTES]>,
    next: usize,
    seconds: EachPlan<f64>,
}

impl Runs {
    pub fn new(context: &Arc<Context>) -> Result<Self, CudaError> {
        let slot = |_| {
            Ok::<_, CudaError>(RunSlot {
                began: Event::timed(context)?,
                ended: Event::timed(context)?,
                ran: None,
            })
        };
        let slots = (0..AHEAD).map(slot).collect::<Result<_, _>>()?;
        let headers = Pinned::new(context, AHEAD * HEADER_STRIDE)?;
        Ok(Runs { slots, headers, sent: None, next: 0, seconds: EachPlan::default() })
    }

    /// Begins a run; one that fails before its end leaves nothing behind. Waits only for the run so many before. Returns the move of its
    /// header to the GPU, if it isn't there already.
    pub fn begin(
        &mut self,
        header: &Header,
        to: Address,
        streams: &Streams,
    ) -> Result<Option<Move>, CudaError> {
        self.settle(self.next, Some(streams))?;
        self.slots[self.next].began.record(streams.compute())?;
        let bytes = header_bytes(header);
        if self.sent == Some(bytes) {
            return Ok(None);
        }
        let offset = self.next * HEADER_STRIDE;
        // SAFETY: the run that last used this slot has ended.
        unsafe { self.headers.bytes_mut(offset, HEADER_BYTES) }.copy_from_slice(&bytes);
        let from = self.headers.address(offset) as Address;
        Ok(Some(Move { from, to, bytes: HEADER_BYTES }))
    }

    /// Records that the header was sent and the run has begun.
    pub fn sent(&mut self, header: &Header) {
        self.sent = Some(header_bytes(header));
    }

    pub fn end(&mut self, which: Which, streams: &Streams) -> Result<(), CudaError> {
        let slot = &mut self.slots[self.next];
        slot.ended.record(streams.compute())?;
        slot.ran = Some(which);
        self.next = (self.next + 1) % AHEAD;
        Ok(())
    }

    /// Reads the time of a run if it is over; returns whether it was. With streams it waits for the run.
    fn settle(&mut self, slot: usize, wait: Option<&Streams>) -> Result<bool, CudaError> {
        let RunSlot { began, ended, ran } = &mut self.slots[slot];
        let Some(which) = *ran else { return Ok(true) };
        if let Some(streams) = wait {
            streams.wait_for(ended, || format!("running {which:?}"))?;
        } else if !ended.is_done()? {
            return Ok(false);
        }
        self.seconds[which] += ended.seconds_since(began)?;
        *ran = None;
        Ok(true)
    }

    /// Seconds on the GPU of the runs that ended since the last call, by plan.
    pub fn take_seconds(&mut self) -> Result<EachPlan<f64>, CudaError> {
        for age in 0..AHEAD {
            if !self.settle((self.next + age) % AHEAD, None)? {
                break;
            }
        }
        Ok(std::mem::take(&mut self.seconds))
    }
}

fn header_bytes(header: &Header) -> [u8; HEADER_BYTES] {
    let Header { seed, step, first_sample, learning_rate, nominal } = *header;
    let words = [seed, step, first_sample, learning_rate.to_bits(), nominal.to_bits()];
    let mut bytes = [0; HEADER_BYTES];
    for (to, word) in bytes.chunks_exact_mut(8).zip(words) {
        to.copy_from_slice(&word.to_le_bytes());
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_lie_as_the_kernels_read_them() {
        let header = Header { seed: 1, step: 2, first_sample: 3, learning_rate: 0.5, nominal: 64.0 };
        let bytes = header_bytes(&header);
        assert_eq!((bytes[0], bytes[8], bytes[16]), (1, 2, 3));
        assert_eq!(bytes[24..32], 0.5f64.to_le_bytes());
        assert_eq!(bytes[32..], 64f64.to_le_bytes());
    }
}
