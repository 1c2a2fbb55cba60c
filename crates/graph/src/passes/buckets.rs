//! Buckets: which parameters are updated together, and where they lie in flat buffers.

use super::differentiate::Gradients;
use crate::flat::{CHUNK, Flat, Piece, Stack, UNIT};
use crate::graph::Graph;
use crate::op::StateId;
use crate::settings::{ParamGroup, Settings, Zero};
use std::collections::{HashMap, HashSet};

/// Division of a flat buffer among ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Division {
    /// No division: each rank holds the whole.
    Whole,
    /// Into equal parts for so many ranks, wherever tensors end.
    Even(usize),
    /// Into equal parts for so many ranks, each tensor whole in one of them: for optimizers that work on matrices.
    Owners(usize),
}

/// Offsets of tensors of so many elements in a flat buffer, and its length.
pub fn arrange(counts: &[usize], division: Division) -> (Vec<usize>, usize) {
    let mut starts = vec![0; counts.len()];
    let parts = match division {
        Division::Whole => 1,
        Division::Even(ranks) | Division::Owners(ranks) => ranks,
    };
    if let Division::Owners(ranks) = division {
        // The largest first, each to whoever has least.
        let mut order: Vec<usize> = (0..counts.len()).collect();
        order.sort_by_key(|tensor| std::cmp::Reverse(counts[*tensor]));
        let mut filled = vec![0; ranks];
        let mut owners = vec![0; counts.len()];
        for tensor in order {
            let owner = (0..ranks).min_by_key(|rank| filled[*rank]).unwrap_or(0);
            owners[tensor] = owner;
            filled[owner] += counts[tensor].next_multiple_of(UNIT);
        }
        let part = filled.iter().max().copied().unwrap_or(0).next_multiple_of(CHUNK);
        let mut ends: Vec<usize> = (0..ranks).map(|rank| rank * part).collect();
        for tensor in 0..counts.len() {
            starts[tensor] = ends[owners[tensor]];
            ends[owners[tensor]] += counts[tensor].next_multiple_of(UNIT);
        }
        return (starts, parts * part);
    }
    let mut end: usize = 0;
    for (start, count) in starts.iter_mut().zip(counts) {
        *start = end;
        end += count.next_multiple_of(UNIT);
    }
    (starts, end.next_multiple_of(parts * CHUNK))
}

/// Number of matrices of each parameter that is updated as such: see [`matrices`](super::matrices()).
pub(super) type Matrices = HashMap<StateId, usize>;

/// What the parameters of a bucket have in common.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Kind {
    /// Flag: they are updated as matrices.
    pub matrices: bool,
    /// Flag: ranks divide them, and layers read copies in half precision.
    pub copied: bool,
    /// Flag: ranks divide parameters, but these are whole on every rank.
    pub small: bool,
}

/// Parameters that a bucket will hold.
pub(super) struct Cut {
    /// Parameters, in the order in which they lie.
    pub parameters: Vec<StateId>,
    pub flat: Flat,
    /// Parameters as matrices, if that is how they are updated.
    pub stacks: Vec<Stack>,
    pub kind: Kind,
}

/// Parameters that a bucket will hold, as they get ready.
struct List {
    parameters: Vec<StateId>,
    elements: usize,
    kind: Kind,
    /// Elements of all kinds that get ready before its first.
    before: usize,
    /// The place of the last in the order of gradients.
    last: usize,
}

/// Parameters of at most so many elements, and of at most one of [`SMALL_SHARE`] of all, are not worth gathering at stage 3.
const SMALL: usize = 100_000;
const SMALL_SHARE: usize = 256;

/// The trained parameters that stay whole where ranks divide parameters.
pub(super) fn small(graph: &Graph, gradients: &Gradients, settings: &Settings<'_>) -> HashSet<StateId> {
    if settings.stage() < Zero::Stage3 {
        return HashSet::new();
    }
    let count = |parameter: StateId| graph.state_type(parameter).shape.count();
    let mut parameters: Vec<StateId> = gradients.iter().map(|(parameter, _)| *parameter).collect();
    parameters.sort_unstable();
    let total: usize = parameters.iter().map(|parameter| count(*parameter)).sum();
    let most = settings.gathering.whole.unwrap_or(SMALL.min(total / SMALL_SHARE));
    let mut left = settings.gathering.whole_in_all.unwrap_or(usize::MAX);
    let mut fits = |parameter: &StateId| {
        let (elements, room) = (count(*parameter), left);
        let fits = elements <= most && elements <= room;
        left -= if fits { elements } else { 0 };
        fits
    };
    parameters.retain(|parameter| fits(parameter));
    parameters.into_iter().collect()
}

/// Divided buckets have at least so many partial sums for each rank, so that padding is little beside them.
const LEAST_CHUNKS: usize = 4;

/// Elements of buckets of a kind, between which they grow from both ends of the backward pass towards its middle: a bucket has at most as
/// many elements as get ready before it, and as many as get ready behind it.
///
/// What leaves last hides behind nothing, and neither does what the next forward pass reads first, which is the same; what
/// leaves first has nothing to wait for, and its parameters are read last. Towards the end each bucket has about half the elements of the one
/// before, and hides behind the making of the next where a network carries gradients twice as fast as they are made; each halving costs a
/// message at each end.
#[derive(Clone, Copy)]
struct Size {
    least: usize,
    most: usize,
}

impl Size {
    /// Checks whether a bucket takes so many more elements, with so many of all kinds behind them.
    fn has_room(self, list: &List, elements: usize, behind: usize) -> bool {
        let together = list.elements + elements;
        let at_both_ends = list.before.min(behind).max(self.least);
        // Neither it nor what would be left is worth a message of its own.
        let is_little = list.elements < self.least || elements + behind < self.least;
        together <= self.most && (together <= at_both_ends || is_little)
    }
}

/// From stage 2 on, the largest bucket is at most so many times the smallest.
const FROM_STAGE_2: usize = 4;

/// Cuts the trained parameters into buckets.
pub(super) struct Cutter<'a> {
    pub graph: &'a Graph,
    pub gradients: &'a Gradients,
    pub matrices: &'a Matrices,
    /// Parameters with copies in half precision.
    pub multiplied: &'a HashSet<StateId>,
    /// Parameters that are not worth gathering: see [`small`].
    pub small: &'a HashSet<StateId>,
    pub settings: &'a Settings<'a>,
}

impl Cutter<'_> {
    fn count(&self, parameter: StateId) -> usize {
        self.graph.state_type(parameter).shape.count()
    }

    fn total(&self) -> usize {
        self.gradients.iter().map(|(parameter, _)| self.count(*parameter)).sum()
    }

    fn kind(&self, parameter: StateId) -> Kind {
        let (stage, matrices) = (self.settings.stage(), self.matrices.contains_key(&parameter));
        let copied = stage > Zero::Stage0 && self.multiplied.contains(&parameter);
        Kind { matrices, copied, small: self.small.contains(&parameter) }
    }

    /// Elements of a bucket of a kind; a larger parameter has one of its own.
    fn size(&self, kind: Kind) -> Size {
        let (stage, ranks) = (self.settings.stage(), self.settings.mesh.shards().ranks());
        let bucket = self.settings.communication.bucket;
        if stage == Zero::Stage0 {
            return Size { least: bucket, most: bucket };
        }
        // Where a bucket's memory is free after it was sent, a few of them are to be less than all.
        let bucket = if stage > Zero::Stage1 { bucket.min(self.total() / 8) } else { bucket };
        // The one in use and the next.
        let live = self.settings.gathering.live.filter(|_| stage == Zero::Stage3);
        let bucket = live.map_or(bucket, |live| bucket.min(live / 2));
        // What is gathered ahead is at least one.
        let ahead = self.settings.gathering.ahead.filter(|ahead| stage == Zero::Stage3 && *ahead > 0);
        let bucket = ahead.map_or(bucket, |ahead| bucket.min(ahead));
        let of_kind = self.gradients.iter().filter(|(parameter, _)| self.kind(*parameter) == kind);
        let largest = of_kind.map(|(parameter, _)| self.count(*parameter)).max().unwrap_or(0);
        // Each owner is to have some matrices, or most of its part would be padding.
        let owned = if kind.matrices { LEAST_CHUNKS * ranks * largest } else { 0 };
        let least = (LEAST_CHUNKS * ranks * CHUNK).max(owned);
        // Buckets are smaller there already.
        let least = if stage > Zero::Stage1 { least.max(bucket / FROM_STAGE_2) } else { least };
        let most = bucket.max(least);
        // Without overlap no message hides behind anything. Where buckets leave in every micro-step, more messages cost more than the ends
        // of one have exposed.
        let hides = self.settings.communication.overlap;
        let in_each = stage > Zero::Stage1 && self.settings.accumulates;
        Size { least: if hides && !in_each { least } else { most }, most }
    }

    /// Gradients that get ready one after the other share a bucket until it is as large as [`Size`] allows there. Matrices have
    /// buckets of their own, and so have other kinds. Buckets come in the order in which they are complete.
    fn lists(&self) -> Vec<List> {
        let mut lists: Vec<List> = Vec::new();
        let mut sizes: Vec<(Kind, Size)> = Vec::new();
        let mut behind = self.total();
        let total = behind;
        for (last, (parameter, _)) in self.gradients.iter().enumerate() {
            let (elements, kind) = (self.count(*parameter), self.kind(*parameter));
            let before = total - behind;
            behind -= elements;
            let known = sizes.iter().find(|(of, _)| *of == kind).map(|(_, size)| *size);
            let size = known.unwrap_or_else(|| self.size(kind));
            if known.is_none() {
                sizes.push((kind, size));
            }
            let open = lists.iter_mut().rfind(|list| list.kind == kind);
            match open.filter(|list| size.has_room(list, elements, behind)) {
                Some(list) => {
                    list.parameters.push(*parameter);
                    (list.elements, list.last) = (list.elements + elements, last);
                }
                None => lists.push(List { parameters: vec![*parameter], elements, kind, before, last }),
            }
        }
        if self.settings.stage() > Zero::Stage0 {
            self.join_rest_of_matrices(&mut lists, &sizes);
        }
        lists.sort_by_key(|list| list.last);
        lists
    }

    /// A few matrices that are left over at the end would leave most owners with padding: they go with those before.
    fn join_rest_of_matrices(&self, lists: &mut Vec<List>, sizes: &[(Kind, Size)]) {
        for (kind, size) in sizes.iter().filter(|(kind, _)| kind.matrices) {
            let of_kind: Vec<usize> = (0..lists.len()).filter(|list| lists[*list].kind == *kind).collect();
            if let [.., before, rest] = of_kind[..]
                && lists[rest].elements < size.least / 2
            {
                let rest = lists.remove(rest);
                lists[before].parameters.extend(rest.parameters);
                (lists[before].elements, lists[before].last) =
                    (lists[before].elements + rest.elements, rest.last);
            }
        }
    }

    fn division(&self, kind: Kind) -> Division {
        match (self.settings.stage(), self.settings.mesh.shards().ranks()) {
            (Zero::Stage0, _) => Division::Whole,
            (_, ranks) if kind.matrices => Division::Owners(ranks),
            (_, ranks) => Division::Even(ranks),
        }
    }

    /// The buckets, in the order in which their gradients are complete.
    pub fn cut(&self) -> Vec<Cut> {
        let group = (self.settings.stage() > Zero::Stage0).then(|| self.settings.mesh.shards());
        let cut = self.lists().into_iter().map(|List { mut parameters, kind, .. }| {
            let division = self.division(kind);
            if let Division::Owners(_) = division {
                // Of each shape, every owner is to have as many.
                parameters.sort_by_key(|parameter| self.graph.state_type(*parameter).shape.0.clone());
            }
            let counts: Vec<usize> = parameters.iter().map(|parameter| self.count(*parameter)).collect();
            let (starts, elements) = arrange(&counts, division);
            let mut pieces: Vec<(StateId, Piece)> =
                parameters.into_iter().zip(starts).map(|(p, start)| (p, self.piece(p, start))).collect();
            pieces.sort_by_key(|(_, piece)| piece.start);
            let stacks = stacks(self.graph, &pieces, self.matrices);
            let (parameters, pieces) = pieces.into_iter().unzip();
            Cut { parameters, flat: Flat { elements, pieces, group, first: 0 }, stacks, kind }
        });
        cut.collect()
    }

    fn piece(&self, parameter: StateId, start: usize) -> Piece {
        let state = &self.graph.states[parameter.index()];
        let ParamGroup { lr_scale, decays } = (self.settings.group)(state);
        let weight_decay = if decays { self.settings.optimizer.weight_decay() } else { 0.0 };
        Piece { start, count: state.ty.shape.count(), lr_scale, weight_decay }
    }
}

/// The matrices that pieces of a flat buffer are, those of one shape together.
fn stacks(graph: &Graph, pieces: &[(StateId, Piece)], matrices: &Matrices) -> Vec<Stack> {
    let mut stacks: Vec<Stack> = vec![];
    for (parameter, piece) in pieces {
        let Some(parts) = matrices.get(parameter) else { continue };
        let shape = &graph.state_type(*parameter).shape;
        let (rows, columns) = (shape.0[0] / parts, shape.0[1..].iter().product());
        let starts = (0..*parts).map(|part| piece.start + part * rows * columns);
        match stacks.iter_mut().find(|stack| (stack.rows, stack.columns) == (rows, columns)) {
            Some(stack) => stack.starts.extend(starts),
            None => stacks.push(Stack { rows, columns, starts: starts.collect() }),
        }
    }
    stacks
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_for_owners_hold_whole_tensors() {
        let counts = [5000, 64, 3000, 1, 4000, 2500, 700, 0];
        for ranks in [1, 2, 3, 5] {
            let (starts, elements) = arrange(&counts, Division::Owners(ranks));
            assert!(elements.is_multiple_of(ranks * CHUNK), "{ranks}: {elements}");
            let part = elements / ranks;
            let mut ranges: Vec<(usize, usize)> = vec![];
            for (start, count) in starts.iter().zip(counts).filter(|(_, count)| *count > 0) {
                assert!(start.is_multiple_of(UNIT));
                assert_eq!(
                    start / part,
                    (start + count - 1) / part,
                    "{ranks}: {count} at {start} of parts of {part}"
                );
                ranges.push((*start, start + count));
            }
            ranges.sort_unstable();
            assert!(ranges.windows(2).all(|pair| pair[0].1 <= pair[1].0), "{ranks}: {ranges:?}");
        }
        // As balanced as the largest allows.
        assert_eq!(arrange(&counts, Division::Owners(3)).1, 3 * 3 * CHUNK);
    }

    #[test]
    fn buckets_grow_from_both_ends() {
        let size = Size { least: 8, most: 100 };
        let list = |before: usize, elements: usize| List {
            parameters: vec![],
            elements,
            kind: Kind::default(),
            before,
            last: 0,
        };
        // As many as are before it, as are behind it, as any may have.
        assert!(size.has_room(&list(40, 30), 10, 500) && !size.has_room(&list(40, 30), 11, 500));
        assert!(size.has_room(&list(500, 30), 10, 40) && !size.has_room(&list(500, 30), 11, 40));
        assert!(size.has_room(&list(500, 90), 10, 500) && !size.has_room(&list(500, 90), 11, 500));
        // The first and the last have the least there is, and a message is never of less.
        assert!(size.has_room(&list(0, 4), 4, 500) && !size.has_room(&list(0, 8), 1, 500));
        assert!(size.has_room(&list(0, 4), 50, 500) && !size.has_room(&list(0, 4), 97, 500));
        assert!(size.has_room(&list(500, 30), 4, 3) && !size.has_room(&list(500, 30), 4, 4));
        // Where both are the same, all but the last are as large.
        let same = Size { least: 100, most: 100 };
        assert!(same.has_room(&list(0, 90), 10, 0) && !same.has_room(&list(0, 90), 11, 500));
    }

    #[test]
    fn even_parts_end_at_borders() {
        let (starts, elements) = arrange(&[100, 5000, 3], Division::Even(4));
        assert_eq!((starts, elements), (vec![0, 128, 5184], 4 * CHUNK));
        assert_eq!(arrange(&[100, 5000, 3], Division::Whole).1, 3 * CHUNK);
        assert_eq!(arrange(&[], Division::Whole), (vec![], 0));
    }
}
