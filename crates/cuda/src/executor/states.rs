//! States and results, between the GPU and the host, as f32.

use super::plans::REFRESH;
use super::{Executor, Which};
use crate::action::Address;
use crate::driver::Stream;
use crate::error::CudaError;
use graph::fp8::Format;
use graph::plan::Place;
use graph::random::{Sequence, initial};
use graph::{DType, Held, Init, Program, Role, State, StateId, Type};
use half::{bf16, f16};
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::sync_channel;

/// Initial values of what this rank holds: parameters as in every other executor, and what else doesn't start at zero.
pub(super) fn initialise(
    program: &Program,
    rank: usize,
    addresses: &[Address],
    seed: u64,
    stream: &Stream,
) -> Result<(), CudaError> {
    let mut drawn = Vec::new();
    for (index, state) in program.states.iter().enumerate() {
        match state.role {
            Role::Parameter(init) => drawn.push((index, init)),
            _ => {
                if let Some(values) = program.first_values(state) {
                    let values: Vec<f32> = values.into_iter().map(|x| x as f32).collect();
                    stream.send_now(&to_bytes(&values, state.ty.dtype), addresses[index])?;
                }
            }
        }
    }
    // Each parameter has a sequence of its own, so that threads can share them out. Few are at hand at a time: the largest of a model of
    // billions have hundreds of megabytes.
    let next = AtomicUsize::new(0);
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get()).min(16);
    std::thread::scope(|scope| {
        let (send, receive) = sync_channel::<Vec<(usize, Vec<u8>)>>(2);
        for _ in 0..threads {
            let (send, next, drawn) = (send.clone(), &next, &drawn);
            scope.spawn(move || {
                while let Some((index, init)) = drawn.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let values = first_values(*init, seed, *index, program.states[*index].ty.shape.count());
                    if send.send(held_bytes(program, rank, *index, &values)).is_err() {
                        break;
                    }
                }
            });
        }
        drop(send);
        let written = receive.into_iter().flatten();
        written.into_iter().try_for_each(|(index, bytes)| stream.send_now(&bytes, addresses[index]))
    })
}

/// Elements of a state that a rank holds.
fn held(program: &Program, rank: usize, index: usize) -> Range<usize> {
    program.states[index].elements_of(&program.states, program.last.mesh, rank).0
}

/// Bytes that a rank keeps of a whole state: by state, its own part, and that of the copy of a tensor in a shard, which no rank could
/// make of what it holds.
fn held_bytes(program: &Program, rank: usize, index: usize, values: &[f32]) -> Vec<(usize, Vec<u8>)> {
    let State { name, ty, held: holds, .. } = &program.states[index];
    let mut bytes = vec![(index, to_bytes(&values[held(program, rank, index)], ty.dtype))];
    if let Held::Of { .. } = holds {
        let is_copy = |state: &State| state.copies() == Some(name);
        let copy = program.states.iter().position(is_copy);
        bytes.extend(copy.into_iter().flat_map(|copy| held_bytes(program, rank, copy, values)));
    }
    bytes
}

fn first_values(init: Init, seed: u64, index: usize, count: usize) -> Vec<f32> {
    let mut random = Sequence::new(seed, index as u32);
    (0..count).map(|_| initial(init, &mut random) as f32).collect()
}

pub(super) fn to_bytes(values: &[f32], dtype: DType) -> Vec<u8> {
    match dtype {
        DType::F64 => values.iter().flat_map(|x| f64::from(*x).to_le_bytes()).collect(),
        DType::F32 => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
        DType::Bf16 => values.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect(),
        DType::F16 => values.iter().flat_map(|x| f16::from_f32(*x).to_le_bytes()).collect(),
        DType::I32 => values.iter().flat_map(|x| (*x as i32).to_le_bytes()).collect(),
        DType::U8 => values.iter().map(|x| *x as u8).collect(),
        DType::E4M3 => values.iter().map(|x| Format::E4M3.encode(f64::from(*x))).collect(),
        DType::E5M2 => values.iter().map(|x| Format::E5M2.encode(f64::from(*x))).collect(),
    }
}

pub(super) fn from_bytes(bytes: &[u8], dtype: DType) -> Vec<f32> {
    fn each<const N: usize>(bytes: &[u8], number: impl Fn([u8; N]) -> f32) -> Vec<f32> {
        bytes.as_chunks::<N>().0.iter().map(|chunk| number(*chunk)).collect()
    }
    match dtype {
        DType::F64 => each(bytes, |b| f64::from_le_bytes(b) as f32),
        DType::F32 => each(bytes, f32::from_le_bytes),
        DType::Bf16 => each(bytes, |b| bf16::from_le_bytes(b).to_f32()),
        DType::F16 => each(bytes, |b| f16::from_le_bytes(b).to_f32()),
        DType::I32 => each(bytes, |b| i32::from_le_bytes(b) as f32),
        DType::U8 => each(bytes, |[b]| f32::from(b)),
        DType::E4M3 => each(bytes, |[b]| Format::E4M3.decode(b) as f32),
        DType::E5M2 => each(bytes, |[b]| Format::E5M2.decode(b) as f32),
    }
}

/// Adds numbers, each as the nearest f32.
pub(super) fn extend_from_bytes(values: &mut Vec<f32>, bytes: &[u8], dtype: DType) {
    match dtype {
        DType::F32 => values.extend(bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes))),
        _ => values.extend(from_bytes(bytes, dtype)),
    }
}

impl Executor {
    /// An input or output of the plan that ran last. Waits for it.
    pub fn read_f32(&self, which: Which, name: &str) -> Result<Option<Vec<f32>>, CudaError> {
        let plan = self.plan(which);
        let Some(value) = plan.find(name).map(|v| &plan.values[v]) else { return Ok(None) };
        let address = match value.place {
            Place::Arena(offset) => self.plans.arena.address + offset as Address,
            Place::State(state) => self.plans.states[state.index()],
        };
        self.fetch(address, &value.ty).map(Some)
    }

    pub(super) fn fetch(&self, address: Address, ty: &Type) -> Result<Vec<f32>, CudaError> {
        self.synchronise()?;
        let mut bytes = vec![0; ty.bytes()];
        self.streams.compute().fetch_now(address, &mut bytes)?;
        Ok(from_bytes(&bytes, ty.dtype))
    }

    /// Elements of a state that this rank holds: all, unless it is a tensor in a shard.
    pub fn held(&self, id: StateId) -> Range<usize> {
        held(&self.program, self.rank(), id.index())
    }

    fn rank(&self) -> usize {
        self.options.comm.as_ref().map_or(0, |comm| comm.rank())
    }

    /// Values of what this rank holds of a state, when all that was queued is done.
    pub fn state_f32(&self, id: StateId, to: &mut [f32]) -> Result<(), CudaError> {
        let (state, count) = (&self.program.states[id.index()], self.held(id).len());
        if count != to.len() {
            let why = format!("of state {} this rank holds {count} elements, not {}", state.name, to.len());
            return Err(CudaError::Misuse(why));
        }
        let ty = Type::new(state.ty.dtype, [count]);
        to.copy_from_slice(&self.fetch(self.plans.states[id.index()], &ty)?);
        Ok(())
    }

    /// Sets a state, of which this rank keeps what it holds. Copies in half precision follow before the next run.
    pub fn set_state_f32(&mut self, id: StateId, from: &[f32]) -> Result<(), CudaError> {
        let state = &self.program.states[id.index()];
        if state.ty.shape.count() != from.len() {
            let why = format!("state {} is {}, not of {} elements", state.name, state.ty, from.len());
            return Err(CudaError::Misuse(why));
        }
        self.synchronise()?;
        self.settle_snapshots()?;
        for (index, bytes) in held_bytes(&self.program, self.rank(), id.index(), from) {
            self.streams.compute().send_now(&bytes, self.plans.states[index])?;
        }
        self.stale = true;
        Ok(())
    }

    /// Sets a state of integers or bytes.
    pub fn set_state_bytes(&mut self, id: StateId, from: &[u8]) -> Result<(), CudaError> {
        let State { name, ty, .. } = &self.program.states[id.index()];
        if ty.bytes() != from.len() {
            return Err(CudaError::Misuse(format!("state {name} is {ty}, not of {} bytes", from.len())));
        }
        self.synchronise()?;
        self.settle_snapshots()?;
        self.streams.compute().send_now(from, self.plans.states[id.index()])
    }

    /// Makes every moving average equal to its parameter, after parameters were set from outside.
    pub fn reset_averages(&mut self) -> Result<(), CudaError> {
        self.synchronise()?;
        self.settle_snapshots()?;
        for (index, state) in self.program.states.iter().enumerate() {
            let Some(parameter) = state.averages().and_then(|name| self.find_state(name)) else { continue };
            let (here, wanted) = (self.held(parameter), self.held(StateId(index as u32)));
            if wanted.start < here.start || wanted.end > here.end {
                let why = format!("this rank averages {} elsewhere than it holds it", state.name);
                return Err(CudaError::Misuse(why));
            }
            let size = state.ty.dtype.bytes();
            let from = self.plans.states[parameter.index()] + ((wanted.start - here.start) * size) as Address;
            self.streams.compute().copy(from, self.plans.states[index], wanted.len() * size)?;
        }
        self.stale = true;
        Ok(())
    }

    /// Queues the refresh of copies in half precision, if they may be stale.
    pub(super) fn refresh(&mut self) -> Result<(), CudaError> {
        if std::mem::take(&mut self.stale) {
            self.plans.numbered(REFRESH)?.run_eagerly(&self.libraries, &self.streams, None)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_survive_every_type() {
        for dtype in DType::ALL {
            let values = [0.0, 1.0, 2.0, 96.0];
            let bytes = to_bytes(&values, dtype);
            assert_eq!(bytes.len(), 4 * dtype.bytes());
            assert_eq!(from_bytes(&bytes, dtype), values, "{dtype}");
        }
    }

    #[test]
    fn first_values_are_those_of_the_cpu() {
        let values = first_values(Init::TruncatedNormal { std: 0.02 }, 7, 3, 1000);
        let mut random = Sequence::new(7, 3);
        let first = (0.02 * random.normal()) as f32;
        assert_eq!((values[0], values.len()), (first, 1000));
    }
}
