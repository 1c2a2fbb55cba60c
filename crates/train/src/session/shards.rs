//! States that ranks divide. Files have whole tensors: rank 0 gets the parts of one tensor after the other from the ranks that hold them,
//! and gives every rank the whole, of which it keeps its part. Nobody has more than a tensor beside what training takes.

use crate::error::TrainError;
use comm::{CommError, Communicator, Counts};
use devices::Real;
use devices::device::Device;
use graph::{Held, Program, StateId};
use std::borrow::Cow;
use std::ops::Range;

/// Tells whether ranks hold parts of a state.
pub(crate) fn is_divided(program: &Program, id: StateId) -> bool {
    matches!(program.states[id.index()].held, Held::Of { .. })
}

/// Elements of a state that each rank gives, so that together they are all: of several ranks that hold the same, the first gives it.
pub(crate) fn given(program: &Program, id: StateId) -> Vec<Range<usize>> {
    let (states, mesh) = (&program.states, program.last.mesh);
    let mut given: Vec<Range<usize>> = Vec::with_capacity(mesh.ranks());
    for rank in 0..mesh.ranks() {
        let held = states[id.index()].elements_of(states, mesh, rank).0;
        given.push(if given.contains(&held) { 0..0 } else { held });
    }
    given
}

/// Collects a tensor on rank 0 from the parts that ranks give; `mine` is what this rank holds of it. All ranks call this. On other ranks
/// nothing comes of it.
pub(crate) fn gather<T: Real>(
    world: &Communicator,
    name: &str,
    given: &[Range<usize>],
    mine: &[T],
) -> Result<Vec<T>, CommError> {
    let (rank, ranks) = (world.rank(), world.size());
    let mine = if given[rank].is_empty() { &[] } else { mine };
    let mut counts = Counts { send: vec![0; ranks], receive: vec![0; ranks] };
    counts.send[0] = mine.len();
    if rank == 0 {
        counts.receive = given.iter().map(Range::len).collect();
    }
    let mut parts = vec![T::ZERO; counts.receive.iter().sum()];
    world.all_to_all_parts(world.name(name), counts, mine, &mut parts)?;
    if rank > 0 {
        return Ok(parts);
    }
    let mut whole = vec![T::ZERO; parts.len()];
    let mut rest = &parts[..];
    for range in given {
        let (part, after) = rest.split_at(range.len());
        whole[range.clone()].copy_from_slice(part);
        rest = after;
    }
    Ok(whole)
}

/// The number that says that no more tensors come.
const NONE: u64 = u64::MAX;

/// Gives every rank a tensor that ranks divide; called on rank 0 while the others [take](take_all).
pub(crate) fn give<T: Real>(
    world: &Communicator,
    program: &Program,
    id: StateId,
    values: &[T],
) -> Result<(), CommError> {
    world.broadcast(world.name(COMES), 0, &mut [u64::from(id.0)])?;
    let name = world.name(&program.states[id.index()].name);
    world.broadcast(name, 0, &mut values.to_vec()).map(drop)
}

const COMES: &str = "which tensor comes next";

/// On rank 0: no more tensors come. On others: takes the tensors that rank 0 gives, until none comes.
pub(crate) fn take_all<T: Real>(world: &Communicator, device: &mut dyn Device<T>) -> Result<(), TrainError> {
    loop {
        let mut number = [NONE];
        world.broadcast(world.name(COMES), 0, &mut number)?;
        if number[0] == NONE {
            return Ok(());
        }
        let id = StateId(number[0] as u32);
        let state = &device.program().states[id.index()];
        let (name, mut values) = (world.name(&state.name), vec![T::ZERO; state.ty.shape.count()]);
        world.broadcast(name, 0, &mut values)?;
        device.write_state(id, &values)?;
    }
}

/// A state, whole: on rank 0, where ranks divide it; all ranks call this then.
pub(crate) fn whole<'d, T: Real>(
    world: &Communicator,
    device: &'d dyn Device<T>,
    id: StateId,
) -> Result<Cow<'d, [T]>, TrainError> {
    let (program, mine) = (device.program(), device.state(id)?);
    if world.size() == 1 || !is_divided(program, id) {
        return Ok(mine);
    }
    let name = &program.states[id.index()].name;
    Ok(Cow::Owned(gather(world, name, &given(program, id), &mine)?))
}
