//! Bytes of a program's memory by what they are for.

use crate::graph::{Home, Role, State};
use crate::program::Program;
use std::fmt;

/// What bytes of memory are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// Parameters in full precision.
    Parameters,
    /// Copies of parameters in half precision.
    Copies,
    /// Sums of gradients. Those of a single micro-step lie in the arena and count there.
    Gradients,
    /// Moments of the optimizer.
    Moments,
    /// Moving averages of parameters.
    Averages,
    /// All other states: statistics, running moments, scales, tables.
    Others,
    /// The arena: what doesn't outlive a step.
    Activations,
}

impl Kind {
    /// Every kind, in the order in which they are told.
    pub const ALL: [Kind; 7] = [
        Kind::Parameters,
        Kind::Copies,
        Kind::Gradients,
        Kind::Moments,
        Kind::Averages,
        Kind::Others,
        Kind::Activations,
    ];

    /// Name in messages.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Parameters => "parameters",
            Kind::Copies => "half-precision copies",
            Kind::Gradients => "gradients",
            Kind::Moments => "moments",
            Kind::Averages => "averages",
            Kind::Others => "other states",
            Kind::Activations => "activations",
        }
    }

    fn of(role: Role) -> Option<Kind> {
        Some(match role {
            Role::Parameter(_) | Role::Master => Kind::Parameters,
            Role::Copy => Kind::Copies,
            Role::Gradient => Kind::Gradients,
            Role::Moment => Kind::Moments,
            Role::Average => Kind::Averages,
            Role::Flat => return None,
            _ => Kind::Others,
        })
    }
}

/// Bytes of each kind on a rank; their sum is arena and states.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bytes([usize; Kind::ALL.len()]);

impl Bytes {
    /// Bytes of one kind.
    pub fn of(&self, kind: Kind) -> usize {
        self.0[kind as usize]
    }

    /// Bytes of an arena alone.
    pub fn of_arena(bytes: usize) -> Bytes {
        let mut of = Bytes::default();
        of.0[Kind::Activations as usize] = bytes;
        of
    }

    /// Bytes of the states' own memory.
    pub fn states(&self) -> usize {
        self.total() - self.of(Kind::Activations)
    }

    /// All bytes.
    pub fn total(&self) -> usize {
        self.0.iter().sum()
    }
}

/// The kinds that there are, largest first: `parameters 6.9 GiB, moments 13.7 GiB`.
impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut kinds: Vec<Kind> = Kind::ALL.into_iter().filter(|kind| self.of(*kind) > 0).collect();
        kinds.sort_by_key(|kind| std::cmp::Reverse(self.of(*kind)));
        let parts: Vec<String> =
            kinds.iter().map(|kind| format!("{} {}", kind.name(), size(self.of(*kind)))).collect();
        f.write_str(&parts.join(", "))
    }
}

/// Bytes in units of 1024: "1.50 GiB".
pub fn size(bytes: usize) -> String {
    match bytes as f64 / f64::from(1 << 20) {
        mib if mib < 1024.0 => format!("{mib:.1} MiB"),
        mib => format!("{:.2} GiB", mib / 1024.0),
    }
}

impl Program {
    /// Bytes of arena and states on each rank, by kind.
    pub fn kinds(&self) -> Bytes {
        let mut bytes = Bytes::default();
        let mut own: Vec<(usize, usize, usize)> = Vec::new();
        for (index, state) in self.states.iter().enumerate() {
            if let (Home::Own(offset), extent @ 1..) = (state.home, state.extent()) {
                own.push((offset, usize::MAX - extent, index));
            }
        }
        own.sort_unstable();
        // Buffers, and tensors outside of any: each has the memory up to the next, padding included.
        let (mut outer, mut end): (Vec<(usize, usize)>, usize) = (Vec::new(), 0);
        for (offset, _, index) in own {
            if outer.is_empty() || offset >= end {
                outer.push((if outer.is_empty() { 0 } else { offset }, index));
            }
            end = end.max(offset + self.states[index].extent());
        }
        let borders = outer.iter().skip(1).map(|(offset, _)| *offset).chain([self.state_bytes()]);
        for ((offset, index), next) in outer.iter().zip(borders) {
            bytes.0[kind_of(&self.states, *index) as usize] += next - offset;
        }
        bytes.0[Kind::Activations as usize] = self.arena();
        bytes
    }
}

/// Kind of a state, a buffer's by the tensors in it.
fn kind_of(states: &[State], index: usize) -> Kind {
    let flat = &states[index];
    let id = crate::StateId(index as u32);
    let inside =
        || states.iter().filter(|state| state.lies_in(flat, id)).find_map(|state| Kind::of(state.role));
    Kind::of(flat.role).or_else(inside).unwrap_or(Kind::Others)
}
