//! Reads of tensors that ranks divide: the flat buffer that they are in is gathered before the first of its users, and again for the backward
//! ops, ahead of its use.

use crate::flat::Views;
use crate::graph::{At, Graph, GraphError, Held, Node, Phase, ValueId};
use crate::op::{Op, StateId};
use crate::settings::Gathering;
use crate::types::Shape;
use std::collections::HashMap;

/// Uses of the tensors of one buffer in one part of a plan: it is gathered for all of them.
struct Gather {
    flat: StateId,
    /// Values read, with their first elements in the buffer.
    reads: Vec<(usize, ValueId)>,
    first: usize,
    last: usize,
    /// Elements of the whole buffer.
    elements: usize,
}

/// Gathers shards where the tensors in them are read.
///
/// A gather leaves when the buffer before it is first used: one is used while the next is on its way. Its memory is free between its last
/// forward use and the gather for its backward uses. `gathering` may have it otherwise.
pub fn shards(mut graph: Graph, gathering: &Gathering) -> Result<Graph, GraphError> {
    let reads: HashMap<ValueId, (StateId, usize)> =
        graph.nodes.iter().filter_map(|n| read(&graph, n)).collect();
    if reads.is_empty() {
        return Ok(graph);
    }
    let gathers = gathers(&graph, &reads, gathering);
    let turn = turn(&graph);
    let leaves = |at: usize| {
        let before = leaves(&gathers, at, gathering);
        if gathers[at].first >= turn { before.max(turn) } else { before }
    };
    let mut starts: HashMap<usize, Vec<usize>> = HashMap::new();
    for at in 0..gathers.len() {
        starts.entry(leaves(at)).or_default().push(at);
    }
    let nodes = std::mem::take(&mut graph.nodes);
    let mut gathered: Vec<HashMap<ValueId, ValueId>> = vec![HashMap::new(); gathers.len()];
    // What is read is in the plan from its start.
    let flats: Vec<ValueId> = gathers.iter().map(|gather| graph.read(gather.flat)).collect();
    for (index, mut node) in nodes.into_iter().enumerate() {
        for at in starts.remove(&index).unwrap_or_default() {
            let phase = if at > 0 && gathers[..at].iter().any(|g| g.flat == gathers[at].flat) {
                Phase::Recompute
            } else {
                Phase::Communication
            };
            gathered[at] = gathers[at].push(&mut graph, flats[at], phase)?;
        }
        for input in &mut node.inputs {
            let of = gathers.iter().zip(&gathered).filter(|(g, _)| (g.first..=g.last).contains(&index));
            if let Some(tensor) = of.filter_map(|(_, tensors)| tensors.get(input)).next_back() {
                *input = *tensor;
            }
        }
        if read(&graph, &node).is_none() {
            graph.nodes.push(node);
        }
    }
    Ok(graph)
}

/// The read of a tensor in a shard: its value, the shard, and its first element in the whole buffer.
fn read(graph: &Graph, node: &Node) -> Option<(ValueId, (StateId, usize))> {
    let Op::Read { state } = node.op else { return None };
    match graph.states[state.index()].held {
        Held::Of { flat, start } => Some((node.outputs[0], (flat, start))),
        _ => None,
    }
}

/// The node with which the backward ops begin.
fn turn(graph: &Graph) -> usize {
    graph.nodes.iter().position(|n| n.phase == Phase::Backward).unwrap_or(graph.nodes.len())
}

/// The node before which a buffer's gather leaves: that which first uses one of those before it, or itself where it may not be ahead.
fn leaves(gathers: &[Gather], at: usize, gathering: &Gathering) -> usize {
    let (mut ahead, mut leaves) = (gathers[at].elements, gathers[at].first);
    for before in (0..=at).rev() {
        // In use while those behind it are on their way; none is before the first.
        let used = before.checked_sub(1).map(|used| &gathers[used]);
        let start = used.map_or(0, |used| used.first);
        let live = ahead + used.map_or(0, |used| used.elements);
        // What was used before and stays for the backward pass.
        let stays = gathers[..before.saturating_sub(1)].iter().filter(|gather| gather.last >= start);
        let stays: usize = stays.map(|gather| gather.elements).sum();
        let one = before == at;
        let fits = gathering.ahead.map_or(one, |most| ahead <= most)
            && gathering.live.is_none_or(|most| live + stays <= most);
        if !fits {
            break;
        }
        leaves = start;
        ahead = live;
    }
    leaves
}

/// What is gathered, in the order of first uses.
fn gathers(graph: &Graph, reads: &HashMap<ValueId, (StateId, usize)>, gathering: &Gathering) -> Vec<Gather> {
    let turn = turn(graph);
    let mut gathers: Vec<(bool, Gather)> = vec![];
    for (index, node) in graph.nodes.iter().enumerate() {
        for (value, (flat, start)) in node.inputs.iter().filter_map(|v| Some((*v, *reads.get(v)?))) {
            let behind = index >= turn;
            let known = gathers.iter().position(|(of, gather)| *of == behind && gather.flat == flat);
            let at = known.unwrap_or_else(|| {
                let elements = whole(graph, flat);
                gathers.push((behind, Gather { flat, reads: vec![], first: index, last: index, elements }));
                gathers.len() - 1
            });
            let gather = &mut gathers[at].1;
            gather.last = index;
            if !gather.reads.contains(&(start, value)) {
                gather.reads.push((start, value));
            }
        }
    }
    let mut gathers: Vec<Gather> = gathers.into_iter().map(|(_, gather)| gather).collect();
    for gather in &mut gathers {
        gather.reads.sort_unstable_by_key(|(start, value)| (*start, value.0));
    }
    keep(&mut gathers, gathering);
    gathers
}

/// Elements of a buffer on all ranks together.
fn whole(graph: &Graph, flat: StateId) -> usize {
    let state = &graph.states[flat.index()];
    let ranks = if let Held::Shard(group) = state.held { group.ranks() } else { 1 };
    state.ty.shape.count() * ranks
}

/// What is used going forward and again going backward after at most `reuse` elements of others stays, as far as all that may be there at a
/// time has room for it beside the largest: by default, what is used last and first.
fn keep(gathers: &mut Vec<Gather>, gathering: &Gathering) {
    let reuse = gathering.reuse.unwrap_or(0);
    let largest = gathers.iter().map(|gather| gather.elements).max().unwrap_or(0);
    let again = |at: usize| (at + 1..gathers.len()).find(|next| gathers[*next].flat == gathers[at].flat);
    let pairs: Vec<(usize, usize)> = (0..gathers.len()).filter_map(|at| Some((at, again(at)?))).collect();
    let between = |(at, next): &(usize, usize)| {
        gathers[at + 1..*next].iter().map(|gather| gather.elements).sum::<usize>()
    };
    let mut stay: Vec<(usize, usize)> = pairs.into_iter().filter(|pair| between(pair) <= reuse).collect();
    stay.sort_by_key(between);
    let mut kept = 0;
    let mut has_room = |(at, _): &(usize, usize)| {
        kept += gathers[*at].elements;
        // What is used last and first at once takes no room beside itself.
        gathering.live.is_none_or(|most| kept + largest <= most || kept == gathers[*at].elements)
    };
    let rooms = stay.iter().position(|pair| !has_room(pair)).unwrap_or(stay.len());
    stay.truncate(rooms);
    stay.sort_unstable_by_key(|(_, next)| std::cmp::Reverse(*next));
    for (at, next) in stay {
        let next = gathers.remove(next);
        gathers[at].last = next.last;
        for read in next.reads {
            if !gathers[at].reads.contains(&read) {
                gathers[at].reads.push(read);
            }
        }
        gathers[at].reads.sort_unstable_by_key(|(start, value)| (*start, value.0));
    }
}

impl Gather {
    /// Adds the collective; returns the tensors in the place of those read.
    fn push(
        &self,
        graph: &mut Graph,
        flat: ValueId,
        phase: Phase,
    ) -> Result<HashMap<ValueId, ValueId>, GraphError> {
        let state = graph.states[self.flat.index()].clone();
        let Held::Shard(group) = state.held else { return Ok(HashMap::new()) };
        let shapes: Vec<Shape> = self.reads.iter().map(|(_, value)| graph.ty(*value).shape.clone()).collect();
        let starts = self.reads.iter().map(|(start, _)| *start).collect();
        let views = Some(Views { elements: state.ty.shape.count() * group.ranks(), starts, shapes });
        let at = At::named(&state.name, format!("all.{}", state.name), phase);
        let tensors = graph.push(Op::AllGather { group, views }, &[flat], &at)?;
        for ((_, value), tensor) in self.reads.iter().zip(&tensors) {
            let name = format!("all.{}", graph.name(*value));
            graph.rename(*tensor, &name);
        }
        Ok(self.reads.iter().map(|(_, value)| *value).zip(tensors).collect())
    }
}
