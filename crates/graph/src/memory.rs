//! Memory of a rank, by what it is for: what lasts, and what fills the arena when it is fullest.

use crate::graph::{ALIGN, Held, Home, Role, State};
use crate::op::{Lane, Op, StateId};
use crate::plan::{Place, Plan, Step};
use crate::program::Program;
use std::fmt;
use std::ops::Range;

/// Purpose of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Use {
    /// Parameters, or this rank's part of them.
    Parameters,
    /// Copies of parameters in half precision.
    Copies,
    /// Gradients of parameters: sums, which last over micro-steps or lie in the arena when it is fullest.
    Gradients,
    /// What the optimizer keeps.
    Moments,
    /// Moving averages.
    Averages,
    /// Statistics, counters, running moments of batch norm, tables and images that stay on the device.
    Others,
    /// Values between forward and backward.
    Activations,
    /// Gradients that are made where they are sent from, until they have left.
    Sent,
    /// Parameters of other ranks, gathered for a while.
    Gathered,
    /// Working memory of steps.
    Scratch,
    /// Bytes of the arena that nothing needs when it is fullest.
    Free,
}

impl Use {
    /// All of them, in the order of a table.
    pub const ALL: [Use; 11] = [
        Use::Parameters,
        Use::Copies,
        Use::Gradients,
        Use::Moments,
        Use::Averages,
        Use::Others,
        Use::Activations,
        Use::Sent,
        Use::Gathered,
        Use::Scratch,
        Use::Free,
    ];

    /// Name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Use::Parameters => "parameters",
            Use::Copies => "half-precision copies",
            Use::Gradients => "gradients",
            Use::Moments => "moments",
            Use::Averages => "averages",
            Use::Others => "other states",
            Use::Activations => "activations",
            Use::Sent => "gradients under way",
            Use::Gathered => "gathered parameters",
            Use::Scratch => "working memory",
            Use::Free => "unused at the peak",
        }
    }

    fn of(role: Role) -> Use {
        match role {
            Role::Parameter(_) | Role::Master => Use::Parameters,
            Role::Copy => Use::Copies,
            Role::Gradient => Use::Gradients,
            Role::Moment => Use::Moments,
            Role::Average => Use::Averages,
            _ => Use::Others,
        }
    }
}

/// Bytes of a rank by their purpose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    uses: [usize; Use::ALL.len()],
    states: usize,
}

impl Memory {
    /// Bytes for a purpose.
    pub fn of(&self, what: Use) -> usize {
        self.uses[what as usize]
    }

    fn add(&mut self, what: Use, bytes: usize) {
        self.uses[what as usize] += bytes;
    }

    /// Bytes of the states' own memory.
    pub fn states(&self) -> usize {
        self.states
    }

    /// All bytes: those of arena and states.
    pub fn total(&self) -> usize {
        self.uses.iter().sum()
    }

    /// An arena of so many bytes, and no states.
    pub fn of_arena(bytes: usize) -> Memory {
        let mut memory = Memory::default();
        memory.add(Use::Activations, bytes);
        memory
    }
}

/// What memory is for, largest first, but for what is less than a thousandth: `moments 13.7 GiB, parameters 6.9 GiB`.
impl fmt::Display for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let least = (self.total() / 1000).max(1);
        let mut uses: Vec<Use> = Use::ALL.into_iter().filter(|what| self.of(*what) >= least).collect();
        uses.sort_by_key(|what| std::cmp::Reverse(self.of(*what)));
        let parts: Vec<String> =
            uses.iter().map(|what| format!("{} {}", what.name(), size(self.of(*what)))).collect();
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
    /// Memory of each rank. It adds up to [`Program::bytes`].
    pub fn memory(&self) -> Memory {
        let mut memory = Memory { states: self.state_bytes(), ..Memory::default() };
        for (what, bytes) in self.state_uses() {
            memory.add(what, bytes);
        }
        // What buffers are aligned to.
        memory.add(Use::Others, self.state_bytes() - memory.total());
        let plan = self.plans().into_iter().rev().max_by_key(|plan| plan.arena);
        let mut free = self.arena();
        for (what, bytes) in plan.map(fullest).unwrap_or_default() {
            memory.add(what, bytes);
            free = free.saturating_sub(bytes);
        }
        memory.add(Use::Free, free);
        memory
    }

    /// Bytes of the states' own memory, each once: those of flat buffers, and of what lies in none.
    fn state_uses(&self) -> Vec<(Use, usize)> {
        let states = &self.states;
        let flats: Vec<usize> = (0..states.len()).filter(|index| is_buffer(&states[*index])).collect();
        let holds = |flat: usize, state: &State| state.lies_in(&states[flat], StateId(flat as u32));
        let mut uses = vec![];
        for (index, state) in states.iter().enumerate() {
            let own = matches!(state.home, Home::Own(_));
            let is_view = matches!(state.held, Held::Within(_) | Held::Of { .. });
            if !own || is_view {
                continue;
            }
            let bytes = state.extent().next_multiple_of(ALIGN);
            if is_buffer(state) {
                let member = states.iter().find(|other| other.role != Role::Flat && holds(index, other));
                uses.push((member.map_or(Use::Others, |member| Use::of(member.role)), bytes));
            } else if !flats.iter().any(|flat| holds(*flat, state)) {
                uses.push((Use::of(state.role), bytes));
            }
        }
        uses
    }
}

/// A flat buffer that has memory of its own.
fn is_buffer(state: &State) -> bool {
    state.role == Role::Flat && matches!(state.held, Held::Whole | Held::Shard(_))
}

/// Bytes of the arena that are in use from a step to a step.
struct Lease {
    bytes: Range<usize>,
    what: Use,
    steps: Range<usize>,
}

/// Bytes of the arena by purpose, at the step at which the most of it is in use.
fn fullest(plan: &Plan) -> Vec<(Use, usize)> {
    let leases = leases(plan);
    let at =
        |step: usize| -> Vec<&Lease> { leases.iter().filter(|lease| lease.steps.contains(&step)).collect() };
    let covered = |step: &usize| covered(&at(*step)).iter().map(|(_, bytes)| bytes).sum::<usize>();
    let step = (0..plan.steps.len()).max_by_key(covered);
    step.map(|step| self::covered(&at(step))).unwrap_or_default()
}

/// Bytes that leases cover, each once: where several lie, by the purpose that says most.
fn covered(leases: &[&Lease]) -> Vec<(Use, usize)> {
    let mut borders: Vec<usize> = leases.iter().flat_map(|l| [l.bytes.start, l.bytes.end]).collect();
    borders.sort_unstable();
    borders.dedup();
    let mut sorted: Vec<&&Lease> = leases.iter().collect();
    sorted.sort_unstable_by_key(|lease| lease.bytes.start);
    let (mut open, mut next): (Vec<&Lease>, usize) = (vec![], 0);
    let mut found = vec![];
    for pair in borders.windows(2) {
        while let Some(lease) = sorted.get(next).filter(|lease| lease.bytes.start <= pair[0]) {
            open.push(lease);
            next += 1;
        }
        open.retain(|lease| lease.bytes.end > pair[0]);
        let special = |lease: &&&Lease| lease.what != Use::Activations;
        if let Some(lease) = open.iter().find(special).or(open.first()) {
            found.push((lease.what, pair[1] - pair[0]));
        }
    }
    found
}

/// The last step at which what a step touches may still be in use: of a collective, the one before whoever waits for it, or for one after it.
fn lasts(plan: &Plan, at: usize) -> usize {
    let steps = &plan.steps;
    if steps[at].lane != Lane::Comm {
        return at;
    }
    let known =
        |step: &usize| steps[*step].waits.iter().any(|wait| *wait >= at && steps[*wait].lane == Lane::Comm);
    let after = (at + 1..steps.len()).filter(|step| steps[*step].lane != Lane::Comm).find(known);
    after.unwrap_or(steps.len()).max(at + 1) - 1
}

/// Every use of the arena.
fn leases(plan: &Plan) -> Vec<Lease> {
    let end = plan.steps.len();
    let mut made = vec![0; plan.values.len()];
    let mut used = vec![0; plan.values.len()];
    for (at, step) in plan.steps.iter().enumerate() {
        let last = lasts(plan, at);
        step.outputs.iter().for_each(|value| (made[*value], used[*value]) = (at, last));
        step.inputs.iter().for_each(|value| used[*value] = used[*value].max(last));
    }
    plan.outputs.iter().for_each(|value| used[*value] = end);
    let mut leases = vec![];
    for (index, value) in plan.values.iter().enumerate() {
        let steps = made[index]..used[index] + 1;
        match value.place {
            Place::Arena(offset) => {
                let bytes = offset..offset + value.ty.bytes();
                leases.push(Lease { bytes, what: Use::Activations, steps });
            }
            Place::State(id) => leases.extend(in_state(&plan.states[id.index()], made[index]..end)),
        }
    }
    for (at, step) in plan.steps.iter().enumerate() {
        if let Op::Assign { state } = step.op {
            leases.extend(in_state(&plan.states[state.index()], at..end));
        }
        for range in step.scratch.iter().chain(&step.parts) {
            let bytes = range.offset..range.offset + range.bytes;
            leases.push(Lease { bytes, what: Use::Scratch, steps: at..at + 1 });
        }
        leases.extend(message(plan, at, step, &made, &used));
    }
    leases
}

/// The lease of a state that lies in the arena.
fn in_state(state: &State, steps: Range<usize>) -> Option<Lease> {
    let Home::Arena(offset) = state.home else { return None };
    let what = if state.role == Role::Flat { Use::Gradients } else { Use::of(state.role) };
    Some(Lease { bytes: offset..offset + state.extent(), what, steps })
}

/// The lease of a message of several tensors, with the padding between them: gathered parameters until their last use, gradients from the
/// first that is made.
fn message(plan: &Plan, at: usize, step: &Step, made: &[usize], used: &[usize]) -> Option<Lease> {
    let (first, views) = plan.message(step)?;
    let value = &plan.values[first];
    let Place::Arena(offset) = value.place else { return None };
    let size = value.ty.dtype.bytes();
    let start = offset.saturating_sub(views.around(size).0);
    let (what, steps) = match step.op {
        Op::AllGather { .. } => {
            let last = step.outputs.iter().map(|value| used[*value]).max().unwrap_or(at);
            (Use::Gathered, at..last + 1)
        }
        _ => {
            let first = step.inputs.iter().map(|value| made[*value]).min().unwrap_or(at);
            (Use::Sent, first..lasts(plan, at) + 1)
        }
    };
    Some(Lease { bytes: start..start + views.elements * size, what, steps })
}
