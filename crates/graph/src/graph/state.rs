//! States: memory that outlives a plan, what it is for and where it lies.

use crate::mesh::{Group, Mesh};
use crate::op::StateId;
use crate::types::Type;
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// Initial values of a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Init {
    /// All 0.
    Zeros,
    /// All 1.
    Ones,
    /// All this value.
    Constant {
        /// The value.
        value: f64,
    },
    /// Normal, around 0.
    Normal {
        /// Standard deviation.
        std: f64,
    },
    /// Normal, cut at two absolute units as torch's `trunc_normal_` is by default.
    TruncatedNormal {
        /// Standard deviation before the cut.
        std: f64,
    },
    /// Uniform between -bound and bound.
    Uniform {
        /// Largest absolute value.
        bound: f64,
    },
}

/// Purpose of a state.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Learned; saved with the model.
    Parameter(Init),
    /// The sum of a parameter's gradients over a step.
    Gradient,
    /// Optimizer state.
    Moment,
    /// Moving average of the parameter it is named after: `X.ema` of `X`.
    Average,
    /// Sums of loss, count and hits over the micro-steps; largest values of operands in fp8.
    Statistic,
    /// Applied optimizer steps.
    Counter,
    /// One rank's share of f32 parameters that are in half precision elsewhere.
    Master,
    /// Copy in half precision of the parameter it is named after: `X.half` of `X`. Matmuls read it; the optimizer
    /// writes it with the parameter.
    Copy,
    /// Constant that the host fills before the first run and no plan changes: images, tables.
    Resident,
    /// Running moments of batch norm (3,C): mean, variance, batches seen.
    Running,
    /// Running moments as the step under way leaves them: `X.pending` of `X`, which `update` makes of it unless the step
    /// is skipped.
    Pending,
    /// (scale, good steps since it changed, skipped steps it still bears), which starts at this scale.
    LossScale {
        /// Scale of the first step.
        initial: f64,
    },
    /// Scale of an operand in fp8: (scale, largest values of the last steps). The scale starts at 1.
    Scale,
    /// A buffer of several tensors, each a state of its own that lies in it; or one rank's part of such a buffer.
    Flat,
}

impl Role {
    /// True for states that later steps depend on, which checkpoints hold and all ranks start with; false for those
    /// that are made anew in every step, derived from another state, or views of others.
    pub fn lasts(self) -> bool {
        match self {
            Role::Parameter(_) | Role::Moment | Role::Average | Role::Counter | Role::Master => true,
            Role::Running | Role::LossScale { .. } | Role::Scale => true,
            Role::Gradient | Role::Statistic | Role::Copy | Role::Resident | Role::Pending | Role::Flat => {
                false
            }
        }
    }

    /// Name for messages: `moment blocks.0.mlp.fc1.weight.m`.
    pub fn name(self) -> &'static str {
        match self {
            Role::Parameter(_) => "parameter",
            Role::Gradient => "gradient",
            Role::Moment => "moment",
            Role::Average => "average",
            Role::Statistic => "statistic",
            Role::Counter => "counter",
            Role::Master => "master copy",
            Role::Copy => "half-precision copy",
            Role::Resident => "table",
            Role::Running => "running statistic",
            Role::Pending => "running statistic of the step",
            Role::LossScale { .. } => "loss scale",
            Role::Scale => "scale of fp8",
            Role::Flat => "buffer",
        }
    }
}

/// Ending of the name of a parameter's copy in half precision.
pub const COPY: &str = ".half";

/// Ending of the name of a gradient's state.
pub const GRADIENT: &str = ".grad";

/// Ending of the name of running moments within a step.
pub const PENDING: &str = ".pending";

/// Ending of the name of a parameter's moving average.
pub const AVERAGE: &str = ".ema";

/// Memory that outlives a plan and is shared by all plans of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct State {
    /// Name, unique among the states of a program.
    pub name: String,
    /// Element type and shape.
    #[serde(flatten)]
    pub ty: Type,
    /// Purpose.
    pub role: Role,
    /// Place in memory. States may overlap: a flat buffer and the tensors in it.
    pub home: Home,
    /// What a rank holds of it.
    #[serde(default, skip_serializing_if = "Held::is_whole")]
    pub held: Held,
}

/// What a rank holds of a state. A plan is the same on all ranks: where a part lies follows from the rank's number when it is bound.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Held {
    /// All of it.
    #[default]
    Whole,
    /// One of the equal parts of a flat buffer that is nowhere whole: that of the rank's number in the group.
    Shard(Group),
    /// One of the equal parts of a flat buffer that begins at the home and is whole on every rank: the part lies in it. Whoever
    /// asks for bytes gets those of the buffer.
    Within(Group),
    /// Those elements of a tensor that the rank's shard has: of the flat buffer of `flat`, the tensor begins at element `start`.
    Of {
        /// The shard.
        flat: StateId,
        /// First element in the whole buffer.
        start: usize,
    },
}

impl Held {
    /// True for states that are whole on every rank.
    pub fn is_whole(&self) -> bool {
        *self == Held::Whole
    }
}

/// Place of a state: a memory and the byte in it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Home {
    /// Undecided: see [`settle`].
    #[default]
    Nowhere,
    /// Offset in the states' own memory on the device, for as long as the program runs.
    Own(usize),
    /// Offset in the arena, from the step that writes it to the end of the `update` that follows: others may lie there
    /// before and after.
    Arena(usize),
    /// Offset in the host's memory.
    Host(usize),
}

impl Home {
    /// Place that lies so many bytes further, if there is one.
    pub fn moved(self, bytes: isize) -> Option<Home> {
        let at = |offset: usize| offset.checked_add_signed(bytes);
        match self {
            Home::Nowhere => None,
            Home::Own(offset) => at(offset).map(Home::Own),
            Home::Arena(offset) => at(offset).map(Home::Arena),
            Home::Host(offset) => at(offset).map(Home::Host),
        }
    }
}

impl State {
    /// Compares all but the place in memory.
    pub fn is_like(&self, other: &State) -> bool {
        (&self.name, &self.ty, self.role) == (&other.name, &other.ty, other.role)
    }

    /// Bytes from its home on that it may be any of. A tensor in a shard has none: steps touch the shard.
    pub fn extent(&self) -> usize {
        match self.held {
            Held::Whole | Held::Shard(_) => self.ty.bytes(),
            Held::Within(group) => self.ty.bytes() * group.ranks(),
            Held::Of { .. } => 0,
        }
    }

    /// Elements that a rank holds, of all that the type has, and of a tensor in a shard where they begin there.
    pub fn elements_of(&self, states: &[State], mesh: Mesh, rank: usize) -> (Range<usize>, usize) {
        let all = (0..self.ty.shape.count(), 0);
        let Held::Of { flat, start } = self.held else { return all };
        let flat = &states[flat.index()];
        let Held::Shard(group) = flat.held else { return all };
        let count = flat.ty.shape.count();
        let first = mesh.place(rank, group).1 * count;
        let (from, to) = (start.max(first), (start + all.0.end).min(first + count));
        if from < to { (from - start..to - start, from - first) } else { (0..0, 0) }
    }

    /// Checks whether it is a tensor of this flat buffer, as a whole or in part.
    pub fn lies_in(&self, flat: &State, id: StateId) -> bool {
        self.overlaps(flat) || matches!(self.held, Held::Of { flat, .. } if flat == id)
    }

    /// Checks whether the two have bytes in common.
    pub fn overlaps(&self, other: &State) -> bool {
        let meet = |a: usize, b: usize| a < b + other.extent() && b < a + self.extent();
        match (self.home, other.home) {
            _ if self.extent() == 0 || other.extent() == 0 => false,
            (Home::Own(a), Home::Own(b))
            | (Home::Arena(a), Home::Arena(b))
            | (Home::Host(a), Home::Host(b)) => meet(a, b),
            _ => false,
        }
    }
}

/// Gives every state that has no home yet one in the states' own memory, behind all that lie there, in the order of their table.
pub fn settle(states: &mut [State]) {
    let mut end = own_bytes(states);
    for state in states.iter_mut().filter(|state| state.home == Home::Nowhere) {
        state.home = Home::Own(end);
        end += state.ty.bytes().next_multiple_of(ALIGN);
    }
}

/// Bytes of the states' own memory.
pub fn own_bytes(states: &[State]) -> usize {
    let end = |state: &State| match state.home {
        Home::Own(offset) => offset + state.extent().next_multiple_of(ALIGN),
        Home::Nowhere | Home::Arena(_) | Home::Host(_) => 0,
    };
    states.iter().map(end).max().unwrap_or(0)
}

/// Buffers start at cache-line pairs, as wide SIMD and copies between devices like them.
pub const ALIGN: usize = 128;

impl State {
    /// True for learned parameters.
    pub fn is_parameter(&self) -> bool {
        matches!(self.role, Role::Parameter(_))
    }

    /// The parameter that this is the half-precision copy of.
    pub fn copies(&self) -> Option<&str> {
        self.name.strip_suffix(COPY).filter(|_| self.role == Role::Copy)
    }

    /// The parameter, or the running moments, that this is the moving average of.
    pub fn averages(&self) -> Option<&str> {
        self.name.strip_suffix(AVERAGE).filter(|_| self.role == Role::Average)
    }
}
