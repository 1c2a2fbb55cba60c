//! The bytes that steps touch.

use crate::op::Op;
use crate::plan::{Home, Place, Plan, ScratchRange, homes};
use std::ops::Range;

/// Bytes of the arena or of the states' own memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bytes {
    in_arena: bool,
    range: Range<usize>,
}

impl Bytes {
    fn new(home: Home, bytes: usize) -> Self {
        let (in_arena, start) = match home {
            Home::Arena(offset) => (true, offset),
            Home::Own(offset) => (false, offset),
        };
        Bytes { in_arena, range: start..start + bytes }
    }

    fn meets(&self, other: &Bytes) -> bool {
        let (a, b) = (&self.range, &other.range);
        self.in_arena == other.in_arena && a.start < b.end && b.start < a.end
    }
}

/// What a step does to memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Touched {
    pub reads: Vec<Bytes>,
    pub writes: Vec<Bytes>,
}

impl Touched {
    /// Whether the two must not run at the same time.
    pub fn conflicts(&self, other: &Touched) -> bool {
        let meet = |a: &[Bytes], b: &[Bytes]| a.iter().any(|a| b.iter().any(|b| a.meets(b)));
        meet(&self.writes, &other.writes)
            || meet(&self.writes, &other.reads)
            || meet(&self.reads, &other.writes)
    }
}

impl Plan {
    /// What every step does to memory.
    pub fn touched(&self) -> Vec<Touched> {
        let homes = homes(&self.states).0;
        let state = |index: usize| Bytes::new(homes[index], self.states[index].ty.bytes());
        let value = |value: &usize| match self.values[*value].place {
            Place::Arena(offset) => Bytes::new(Home::Arena(offset), self.values[*value].ty.bytes()),
            Place::State(id) => state(id.index()),
        };
        let range = |range: &ScratchRange| Bytes::new(Home::Arena(range.offset), range.bytes);
        let mut parts: Vec<Option<Bytes>> = vec![None; self.values.len()];
        let touched = self.steps.iter().map(|step| {
            let assigned = match step.op {
                Op::Assign { state: id } => Some(state(id.index())),
                _ => None,
            };
            let left = step.parts.as_ref().map(range);
            let mut touched = Touched {
                reads: step.inputs.iter().map(value).collect(),
                writes: step.outputs.iter().map(value).chain(assigned).collect(),
            };
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
