//! The bytes that steps touch.

use crate::flat::Views;
use crate::graph::Home;
use crate::op::{Lane, Op};
use crate::plan::{Place, Plan, ScratchRange, Step};
use std::ops::Range;

/// Bytes of one memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bytes {
    memory: MemoryKind,
    range: Range<usize>,
}

/// Kind of memory that values and states lie in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryKind {
    /// The one that values of a plan share.
    Arena,
    /// The states' own.
    Own,
    /// The host's.
    Host,
}

impl Bytes {
    /// Range of so many bytes at a place, if that is decided.
    pub fn at(home: Home, bytes: usize) -> Option<Self> {
        let (memory, start) = match home {
            Home::Arena(offset) => (MemoryKind::Arena, offset),
            Home::Own(offset) => (MemoryKind::Own, offset),
            Home::Host(offset) => (MemoryKind::Host, offset),
            Home::Nowhere => return None,
        };
        Some(Bytes { memory, range: start..start + bytes })
    }

    /// Checks whether the two have bytes in common.
    pub fn meets(&self, other: &Bytes) -> bool {
        let (a, b) = (&self.range, &other.range);
        self.memory == other.memory && a.start < b.end && b.start < a.end
    }
}

/// Bytes that a step reads and writes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Touched {
    /// Bytes it reads.
    pub reads: Vec<Bytes>,
    /// Bytes it writes.
    pub writes: Vec<Bytes>,
}

impl Touched {
    /// Checks whether the two must not run at the same time.
    pub fn conflicts(&self, other: &Touched) -> bool {
        let meet = |a: &[Bytes], b: &[Bytes]| a.iter().any(|a| b.iter().any(|b| a.meets(b)));
        meet(&self.writes, &other.writes)
            || meet(&self.writes, &other.reads)
            || meet(&self.reads, &other.writes)
    }
}

impl Plan {
    /// Bytes of a value.
    fn bytes_of(&self, value: usize) -> Option<Bytes> {
        match self.values[value].place {
            Place::Arena(offset) => Bytes::at(Home::Arena(offset), self.values[value].ty.bytes()),
            Place::State(id) => Bytes::at(self.states[id.index()].home, self.states[id.index()].extent()),
        }
    }

    /// The first of the tensors that lie in one message, and all of them.
    pub(crate) fn message<'a>(&self, step: &'a Step) -> Option<(usize, &'a Views)> {
        let views = step.op.views()?;
        let values = if matches!(step.op, Op::AllGather { .. }) { &step.outputs } else { &step.inputs };
        Some((*values.first()?, views))
    }

    /// Bytes that every step reads and writes.
    pub fn touched(&self) -> Vec<Touched> {
        let arena =
            |offset: usize, bytes: usize| Bytes { memory: MemoryKind::Arena, range: offset..offset + bytes };
        let state = |index: usize| Bytes::at(self.states[index].home, self.states[index].extent());
        let value = |value: &usize| self.bytes_of(*value);
        let range = |range: &ScratchRange| arena(range.offset, range.bytes);
        let mut parts: Vec<Option<Bytes>> = vec![None; self.values.len()];
        let touched = self.steps.iter().map(|step| {
            let assigned = match step.op {
                Op::Assign { state: id } => state(id.index()),
                _ => None,
            };
            let left = step.parts.as_ref().map(range);
            let mut touched = Touched {
                reads: step.inputs.iter().filter_map(value).collect(),
                writes: step.outputs.iter().filter_map(value).chain(assigned).collect(),
            };
            if step.lane == Lane::Comm {
                // Between values of one message lies padding, which comes back as anything.
                let ends: Vec<Bytes> = touched.writes.clone();
                let apart = |pair: &[Bytes]| {
                    pair[0].memory == pair[1].memory && pair[0].range.end < pair[1].range.start
                };
                let padding = ends.windows(2).filter(|pair| apart(pair));
                touched.writes.extend(padding.map(|pair| Bytes {
                    memory: pair[0].memory,
                    range: pair[0].range.end..pair[1].range.start,
                }));
            }
            if let Some((value, views)) = self.message(step) {
                let size = self.values[value].ty.dtype.bytes();
                let whole = self.bytes_of(value).map(|Bytes { memory, range }| {
                    let start = range.start.saturating_sub(views.around(size).0);
                    Bytes { memory, range: start..start + views.elements * size }
                });
                let gathers = step.outputs.contains(&value);
                if gathers { &mut touched.writes } else { &mut touched.reads }.extend(whole);
            }
            touched.writes.extend(step.scratch.as_ref().map(range).into_iter().chain(left.clone()));
            if let Op::AddUp { .. } = step.op {
                touched.reads.extend(step.inputs.iter().filter_map(|value| parts[*value].clone()));
            }
            step.outputs.iter().for_each(|value| parts[*value] = left.clone());
            touched
        });
        touched.collect()
    }
}
