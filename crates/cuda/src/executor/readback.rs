//! Readback of each step's few numbers without stopping the GPU.

use super::plans::{Plans, REFRESH};
use super::{Executor, Which};
use crate::action::Address;
use crate::driver::{Context, Event, Pinned};
use crate::error::CudaError;
use crate::moves::{self, Move};
use graph::plan::Place;
use graph::{DType, Role};
use std::sync::Arc;

/// Most steps in flight before the oldest numbers are lost.
pub(super) const RING: usize = 4;
const SLOT_BYTES: usize = 64;
/// Offset of the control, after the statistics.
const CONTROL: usize = 32;
/// Offset of the loss scale, after that.
const SCALE: usize = 48;

/// Handle to a readback.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket(u64);

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Readback {
    /// Σ weight × (loss, 1, top-1 hit, top-5 hit).
    pub stats: [f32; 4],
    /// (factor for every gradient, 1 or 0 for apply or skip, gradient norm).
    pub control: [f32; 3],
    /// (loss scale, good steps since it changed, skipped steps it still bears).
    pub scale: Option<[f32; 3]>,
}

pub(super) struct Readbacks {
    host: Pinned,
    arrived: Vec<Event>,
    next: u64,
}

impl Readbacks {
    pub fn new(context: &Arc<Context>) -> Result<Self, CudaError> {
        let arrived = (0..RING).map(|_| Event::new(context)).collect::<Result<_, _>>()?;
        Ok(Readbacks { host: Pinned::new(context, RING * SLOT_BYTES)?, arrived, next: 0 })
    }
}

impl Executor {
    fn loss_scale(&self) -> Option<usize> {
        self.program.states.iter().position(|s| matches!(s.role, Role::LossScale { .. }))
    }

    /// Queues a copy of the state `stats` and of `update`'s output `control`, after the runs queued so far.
    pub fn begin_readback(&mut self) -> Result<Ticket, CudaError> {
        self.context.enter()?;
        self.ready(&[REFRESH])?;
        let stats = self.find_state("stats").filter(|id| {
            let ty = &self.program.states[id.index()].ty;
            (ty.dtype, ty.shape.count()) == (DType::F32, 4)
        });
        let update = self.plan(Which::Update);
        let control = update.find("control").map(|v| &update.values[v]);
        let control = control.filter(|v| (v.ty.dtype, v.ty.shape.count()) == (DType::F32, 3));
        let (Some(stats), Some(control)) = (stats, control) else {
            return Err(CudaError::Misuse("the program has no statistics of training".into()));
        };
        let stats = self.plans.states[stats.index()];
        let control = match control.place {
            Place::Arena(offset) => self.plans.arena.address + offset as Address,
            Place::State(state) => self.plans.states[state.index()],
        };
        let scale = self.loss_scale().map(|index| self.plans.states[index]);
        let ticket = Ticket(self.readbacks.next);
        self.readbacks.next += 1;
        let slot = (ticket.0 % RING as u64) as usize;
        let (host, stream) = (&self.readbacks.host, self.streams.compute());
        let to = |offset: usize| host.address(slot * SLOT_BYTES + offset) as Address;
        let mut moves = vec![
            Move { from: stats, to: to(0), bytes: 16 },
            Move { from: control, to: to(CONTROL), bytes: 12 },
        ];
        moves.extend(scale.map(|scale| Move { from: scale, to: to(SCALE), bytes: 12 }));
        let Plans { times, modules, .. } = &mut self.plans;
        if let Some(times) = times {
            times.runs[slot] = std::mem::take(&mut self.timed);
            let to = times.host.address(slot * times.bytes) as Address;
            moves.push(Move { from: times.block.address, to, bytes: times.bytes });
        }
        // SAFETY: the host reads a slot only after its event, and this ticket's number makes older ones invalid.
        unsafe { moves::start(&moves, modules, stream) }?;
        self.readbacks.arrived[slot].record(stream)?;
        Ok(ticket)
    }

    /// Numbers of a ticket; waits for them, and for nothing that was queued later.
    pub fn readback(&mut self, ticket: Ticket) -> Result<Readback, CudaError> {
        self.context.enter()?;
        let Readbacks { host, arrived, next } = &self.readbacks;
        if ticket.0 >= *next || ticket.0 + (RING as u64) < *next {
            return Err(CudaError::Misuse(format!("the numbers of step {} were overwritten", ticket.0)));
        }
        let slot = (ticket.0 % RING as u64) as usize;
        self.streams.wait_for(&arrived[slot], || "waiting for a step's numbers".into())?;
        if let Some(times) = &self.plans.times {
            // SAFETY: as below.
            let bytes = unsafe { times.host.bytes(slot * times.bytes, times.bytes) };
            self.collective_times = times.notes.settle(bytes, &times.runs[slot]);
        }
        // SAFETY: they have arrived, and nothing newer goes to this slot while `&mut self` is held.
        let bytes = unsafe { host.bytes(slot * SLOT_BYTES, SLOT_BYTES) };
        let number = |i: usize| bytes[i..].first_chunk().map_or(0.0, |chunk| f32::from_le_bytes(*chunk));
        Ok(Readback {
            stats: std::array::from_fn(|i| number(4 * i)),
            control: std::array::from_fn(|i| number(CONTROL + 4 * i)),
            scale: self.loss_scale().map(|_| std::array::from_fn(|i| number(SCALE + 4 * i))),
        })
    }
}
