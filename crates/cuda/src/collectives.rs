//! Collectives as actions, and the order in which a thread runs a list with some. Needs no GPU.

use crate::action::{Action, Address, Arg, CollectiveCall, Kernel, Launch, Operand, Source, StepContext};
use crate::bind::{Bound, Placed};
use crate::error::CudaError;
use comm::ElementType;
use graph::{ALIGN, Lane, Plan, StateId};

/// Makes the action of a collective. Adjacent operands, and tensors of one message, are communicated as one range.
pub(crate) fn collective(
    cx: &StepContext<'_>,
    inputs: Vec<&str>,
    outputs: Vec<&str>,
) -> Result<Vec<Action>, CudaError> {
    let collective = calls::collective(cx.op).ok_or_else(|| cx.no_kernel())?;
    let group = cx.op.group().ok_or_else(|| cx.no_kernel())?;
    let dtype = cx.input(0).dtype;
    let kind = calls::element_type(dtype).ok_or_else(|| cx.no_kernel())?;
    let places = |operands: &[Operand]| -> Vec<(Address, usize)> {
        operands.iter().map(|operand| (operand.address, operand.shape.count())).collect()
    };
    let ranges = calls::ranges(cx.op, &places(cx.inputs), &places(cx.outputs), dtype.bytes());
    let (send, receive) = ranges.map_err(|apart| {
        let (names, at) = match apart {
            calls::Apart::Inputs(at) => (&inputs, at),
            calls::Apart::Outputs(at) => (&outputs, at),
        };
        let (first, second) = (names[at].to_string(), names[at + 1].to_string());
        CudaError::Scattered { layer: cx.layer.to_string(), op: cx.op.name(), first, second }
    })?;
    let [send, receive] = [send, receive].map(|calls::Range { address, len }| (address, len));
    let layer = cx.layer.to_string();
    Ok(vec![Action::Collective(CollectiveCall {
        group,
        collective,
        kind,
        send,
        receive,
        layer,
        times: None,
    })])
}

/// Refuses a plan whose collectives are for another number of ranks.
pub(crate) fn check_ranks(plan: &Plan, are: Option<usize>) -> Result<(), CudaError> {
    let needs = plan.mesh.ranks();
    match plan.collectives().next().filter(|_| Some(needs) != are) {
        Some((step, _)) => {
            Err(CudaError::Ranks { layer: step.layer.clone(), op: step.op.name(), needs, are })
        }
        None => Ok(()),
    }
}

/// Numbers of a list's collectives and of the places where the compute lane waits for some.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TimeNotes {
    pub calls: usize,
    pub waits: usize,
}

/// Bytes of one interval: start and end.
const MARK: Address = 16;

impl TimeNotes {
    pub fn bytes(self) -> usize {
        (self.calls + self.waits) * MARK as usize
    }
}

/// Kernel that records the time.
pub fn clock() -> Kernel {
    Kernel::new(Source::Clock, "note_time")
}

pub(crate) fn note_time(to: Address) -> Launch {
    Launch { kernel: clock(), grid: [1; 3], block: 1, shared: 0, args: vec![Arg::Pointer(to)] }
}

/// Adds actions to a list that record times from `at` on: first start and end of every collective, then of every place where the
/// compute lane waits for collectives, of this list or left by an earlier one, the start and end of the wait. The end of a list with
/// collectives is such a place. Those that are left when a list ends have no time in it.
pub(crate) fn timed(bound: Bound, at: Address) -> (Bound, TimeNotes) {
    let is_call: Vec<bool> = bound.actions.iter().map(|p| is_call(p) && p.left.is_empty()).collect();
    let mut marks = TimeNotes { calls: is_call.iter().filter(|call| **call).count(), waits: 0 };
    if marks.calls == 0 && bound.actions.iter().all(|placed| placed.after.is_empty()) {
        return (bound, marks);
    }
    let (mut calls, mut last_call) = (0, None);
    let mut moved: Vec<usize> = Vec::with_capacity(is_call.len());
    let mut actions: Vec<Placed> = Vec::with_capacity(is_call.len() + 2);
    let mut note = |actions: &mut Vec<Placed>, like: &Placed, waits: Vec<usize>, after: Vec<StateId>| {
        let from = at + (marks.calls + marks.waits) as Address * MARK;
        marks.waits += 1;
        for (place, waits, after) in [(from, vec![], vec![]), (from + MARK / 2, waits, after)] {
            let action = Action::Launch(note_time(place));
            let steps = (like.first, like.step);
            actions.push(Placed { waits, after, ..Placed::new(action, Lane::Compute, steps) });
        }
    };
    for (index, mut placed) in bound.actions.into_iter().enumerate() {
        let waits_for_call = placed.waits.iter().any(|wait| is_call[*wait]);
        placed.waits.iter_mut().for_each(|wait| *wait = moved[*wait]);
        if placed.lane == Lane::Compute && (waits_for_call || !placed.after.is_empty()) {
            let (waits, after) = (std::mem::take(&mut placed.waits), std::mem::take(&mut placed.after));
            note(&mut actions, &placed, waits, after);
        }
        moved.push(actions.len());
        if let Action::Collective(call) = &mut placed.action
            && is_call[index]
        {
            call.times = Some(at + calls * MARK);
            calls += 1;
            last_call = Some(actions.len());
        }
        debug_assert_eq!(moved[index], actions.len());
        actions.push(placed);
    }
    // Collectives are done in order, so the last implies the others.
    if let (Some(last), Some(call)) = (actions.last().cloned(), last_call) {
        note(&mut actions, &last, vec![call], vec![]);
    }
    (Bound { actions, ..bound }, marks)
}

pub(crate) fn is_call(placed: &Placed) -> bool {
    matches!(placed.action, Action::Collective(_))
}

/// Lets nothing be under way when a list ends, and no list wait for another: for collectives that the host runs.
pub(crate) fn all_done_at_the_end(bound: &mut Bound) {
    for placed in &mut bound.actions {
        placed.left.clear();
        placed.after.clear();
    }
}

/// Collectives of a list that are launched behind it and may still run when it has ended: those that a plan leaves, unless another action
/// of the list needs them.
fn left_behind(actions: &[Placed]) -> Vec<usize> {
    let is_left = |index: &usize| is_call(&actions[*index]) && !actions[*index].left.is_empty();
    let mut left: Vec<usize> = (0..actions.len()).filter(is_left).collect();
    let needs = |other: &Placed, index: usize| {
        let calls = match (&other.action, &actions[index].action) {
            (Action::Collective(call), Action::Collective(earlier)) => depends(call, earlier),
            _ => false,
        };
        calls || other.waits.contains(&index)
    };
    // One that stays may need others.
    while let Some(at) = left.iter().rposition(|index| {
        let stay = (index + 1..actions.len()).filter(|other| !left.contains(other));
        stay.into_iter().any(|other| needs(&actions[other], *index))
    }) {
        left.remove(at);
    }
    left
}

/// Stages of a list whose collectives are in its graph: all of it, and what it leaves under way.
pub(crate) fn stages_on_device(actions: &[Placed]) -> Vec<Stage> {
    let left = left_behind(actions);
    let here = (0..actions.len()).filter(|index| left.binary_search(index).is_err()).collect();
    let behind = (!left.is_empty()).then_some(Stage::Behind(left));
    [Stage::Stretch(here)].into_iter().chain(behind).collect()
}

/// Next work of the thread that runs a list. Where ranks communicate through the host's memory, a list runs in stretches
/// between the points at which the host has something to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Launches these actions, after all that was launched before them.
    Stretch(Vec<usize>),
    /// Starts the copy of a collective's data to the host, after all that was launched so far.
    Leave(usize),
    /// Runs the collective and all before it, as their data arrives on the host. What is launched from here on starts when their
    /// results are back on the GPU.
    Return(usize),
    /// Launches these collectives on the comm lane's stream, after all before them. Nobody waits for them but actions of later lists.
    Behind(Vec<usize>),
}

/// Stages of a list whose collectives run on the host. As the thread runs a collective only where its result is needed, all is
/// launched by then that may run beside it.
pub(crate) fn stages(actions: &[Placed]) -> Vec<Stage> {
    let mut stages = Vec::new();
    let mut stretch: Vec<usize> = Vec::new();
    let is_call = |index: usize| matches!(actions[index].action, Action::Collective(_));
    let close = |stages: &mut Vec<Stage>, stretch: &mut Vec<usize>| {
        if !stretch.is_empty() {
            stages.push(Stage::Stretch(std::mem::take(stretch)));
        }
    };
    // The last collective that left, and the last that returned.
    let (mut left, mut returned) = (None, None);
    for (index, placed) in actions.iter().enumerate() {
        if let Action::Collective(call) = &placed.action {
            close(&mut stages, &mut stretch);
            // What an earlier one brings must be there before this one takes it along.
            let away = |at: &usize| returned.is_none_or(|returned| *at > returned);
            let needs = (0..index).filter(away).filter(|at| match &actions[*at].action {
                Action::Collective(earlier) => depends(call, earlier),
                _ => false,
            });
            if let Some(needs) = needs.max() {
                stages.push(Stage::Return(needs));
                returned = Some(needs);
            }
            stages.push(Stage::Leave(index));
            left = Some(index);
            continue;
        }
        let needs = placed.waits.iter().copied().filter(|wait| is_call(*wait)).max();
        if needs > returned {
            close(&mut stages, &mut stretch);
            stages.extend(needs.map(Stage::Return));
            returned = needs;
        }
        stretch.push(index);
    }
    close(&mut stages, &mut stretch);
    if left > returned {
        stages.extend(left.map(Stage::Return));
    }
    stages
}

/// Tells whether a collective reads or writes what an earlier one writes, or writes what that one reads.
fn depends(call: &CollectiveCall, earlier: &CollectiveCall) -> bool {
    let range = |(start, elements): (Address, usize), kind: ElementType| {
        start..start + (elements * kind.bytes()) as Address
    };
    let meet = |a: std::ops::Range<Address>, b: std::ops::Range<Address>| a.start < b.end && b.start < a.end;
    let (send, receive) = (range(call.send, call.kind), range(call.receive, call.kind));
    let (sent, received) = (range(earlier.send, earlier.kind), range(earlier.receive, earlier.kind));
    meet(send, received.clone()) || meet(receive.clone(), received) || meet(receive, sent)
}

/// Offsets of the collectives' data in host memory, of what each sends and receives; and the bytes
/// of all.
pub(crate) fn host_places<'a>(
    calls: impl Iterator<Item = &'a CollectiveCall>,
) -> (Vec<(usize, usize)>, usize) {
    let mut bytes = 0;
    let mut room = |elements: usize, kind: ElementType| {
        let offset = bytes;
        bytes += (elements * kind.bytes()).next_multiple_of(ALIGN);
        offset
    };
    let place = |call: &CollectiveCall| {
        if call.send.0 == call.receive.0 {
            let both = room(call.send.1.max(call.receive.1), call.kind);
            return (both, both);
        }
        (room(call.send.1, call.kind), room(call.receive.1, call.kind))
    };
    let places = calls.map(place).collect();
    (places, bytes)
}

#[cfg(test)]
#[path = "collectives_tests.rs"]
mod tests;
