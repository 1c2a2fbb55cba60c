//! Tensors one after the other in a flat buffer, which a rank holds as a whole or in part.
//!
//! Parameters, their gradients, moments, averages and half-precision copies lie in such buffers, at the same elements of each. What
//! works on all elements alike (optimizers, norms, collectives) works on the buffer; a tensor is a view into it.

use crate::mesh::Group;
use crate::types::Shape;
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// Sums over a buffer are made of f64 partial sums, one for every so many elements, added in order. The borders are fixed and a
/// rank's part begins and ends at one, so that sums have the same bits however a buffer is divided.
pub const CHUNK: usize = 2048;

/// Tensors begin at multiples of so many elements: 128 bytes, even of half-precision copies.
pub const UNIT: usize = 64;

/// A tensor in a flat buffer, and how it is trained. In texts: `[start,count,lr_scale,weight_decay]`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(from = "(usize, usize, f64, f64)", into = "(usize, usize, f64, f64)")]
pub struct Piece {
    /// First element.
    pub start: usize,
    /// Number of elements.
    pub count: usize,
    /// Factor of the learning rate.
    pub lr_scale: f64,
    /// Weight decay.
    pub weight_decay: f64,
}

impl Piece {
    /// Range of elements in the whole buffer.
    pub fn range(&self) -> Range<usize> {
        self.start..self.start + self.count
    }
}

impl From<(usize, usize, f64, f64)> for Piece {
    fn from((start, count, lr_scale, weight_decay): (usize, usize, f64, f64)) -> Self {
        Piece { start, count, lr_scale, weight_decay }
    }
}

impl From<Piece> for (usize, usize, f64, f64) {
    fn from(Piece { start, count, lr_scale, weight_decay }: Piece) -> Self {
        (start, count, lr_scale, weight_decay)
    }
}

/// Matrices of one shape in a flat buffer, each within one of its tensors. In texts: `[rows,columns,[start, …]]`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "(usize, usize, Vec<usize>)", into = "(usize, usize, Vec<usize>)")]
pub struct Stack {
    /// Rows of each.
    pub rows: usize,
    /// Columns of each.
    pub columns: usize,
    /// First elements of the matrices in the whole buffer, in order.
    pub starts: Vec<usize>,
}

impl Stack {
    /// Elements of each matrix.
    pub fn count(&self) -> usize {
        self.rows * self.columns
    }
}

impl From<(usize, usize, Vec<usize>)> for Stack {
    fn from((rows, columns, starts): (usize, usize, Vec<usize>)) -> Self {
        Stack { rows, columns, starts }
    }
}

impl From<Stack> for (usize, usize, Vec<usize>) {
    fn from(Stack { rows, columns, starts }: Stack) -> Self {
        (rows, columns, starts)
    }
}

/// Tensors in a flat buffer that a collective sends or receives as one message.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Views {
    /// Elements of the buffer, with padding.
    pub elements: usize,
    /// First element of each tensor, in order.
    pub starts: Vec<usize>,
    /// Shape of each tensor.
    pub shapes: Vec<Shape>,
}

impl Views {
    /// Checks that tensors are in order, disjoint and inside a buffer that so many ranks can divide.
    pub fn check(&self, ranks: usize) -> Result<(), String> {
        let Views { elements, starts, shapes } = self;
        if starts.is_empty() || starts.len() != shapes.len() {
            return Err(format!("has {} first elements for {} shapes", starts.len(), shapes.len()));
        }
        if ranks == 0 || !elements.is_multiple_of(ranks) {
            return Err(format!("{elements} elements don't divide among {ranks} ranks"));
        }
        let mut end = 0;
        for (start, shape) in starts.iter().zip(shapes) {
            if *start < end || start + shape.count() > *elements {
                return Err(format!("{shape} at element {start} doesn't fit in a buffer of {elements}"));
            }
            end = start + shape.count();
        }
        Ok(())
    }

    /// Bytes of the buffer before, and from there on of, the first tensor, of elements of so many bytes.
    pub fn around(&self, size: usize) -> (usize, usize) {
        let before = self.starts.first().copied().unwrap_or(0) * size;
        (before, self.elements * size - before)
    }
}

/// Content of a flat buffer. Elements that belong to no piece are padding, which nobody reads.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Flat {
    /// Elements of the whole buffer, with padding.
    pub elements: usize,
    /// Pieces, in order and disjoint.
    pub pieces: Vec<Piece>,
    /// The ranks that hold a part of the buffer each, all of one length; without, each rank holds the whole.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<Group>,
    /// The element of the whole buffer that a rank's part begins with. Executors set it: a plan is the same on all ranks.
    #[serde(skip)]
    pub first: usize,
}

/// Elements of a tensor between two borders.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// The number of its tensor.
    pub piece: usize,
    /// The partial sum that it is in.
    pub chunk: usize,
    /// First element in the whole buffer.
    pub start: usize,
    /// Number of elements.
    pub count: usize,
}

/// One matrix of a [`Stack`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InStack {
    /// The number of its tensor.
    pub piece: usize,
    /// The number of its stack.
    pub stack: usize,
    /// Number in the stack, among those of the rank.
    pub number: usize,
    /// First element in the rank's memory.
    pub start: usize,
    /// Number of elements.
    pub count: usize,
}

impl Flat {
    /// Elements that a rank holds.
    pub fn held(&self) -> usize {
        self.elements / self.group.map_or(1, Group::ranks)
    }

    /// Part of the buffer that the rank of this number in the group holds.
    pub fn part(&self, rank: usize) -> Flat {
        Flat { first: rank * self.held(), ..self.clone() }
    }

    /// Partial sums over the whole buffer.
    pub fn chunks(&self) -> usize {
        self.elements.div_ceil(CHUNK)
    }

    /// The tensors of the whole buffer, cut at the borders of partial sums.
    pub fn segments(&self) -> impl Iterator<Item = Segment> {
        self.pieces.iter().enumerate().flat_map(|(piece, of)| {
            let Range { start, end } = of.range();
            let chunks = start / CHUNK..end.div_ceil(CHUNK).max(start / CHUNK);
            chunks.filter(move |_| start < end).map(move |chunk| {
                let from = start.max(chunk * CHUNK);
                Segment { piece, chunk, start: from, count: end.min((chunk + 1) * CHUNK) - from }
            })
        })
    }

    /// Segments that this rank holds, each with its number among all.
    pub fn held_segments(&self) -> impl Iterator<Item = (usize, Segment)> {
        let held = self.first..self.first + self.held();
        self.segments().enumerate().filter(move |(_, segment)| held.contains(&segment.start))
    }

    /// The tensors that have elements in a range of what this rank holds: their numbers, and the elements in the rank's memory.
    pub fn within(&self, range: Range<usize>) -> impl Iterator<Item = (usize, Range<usize>)> {
        let whole = self.first + range.start..self.first + range.end;
        let from = self.pieces.partition_point(|piece| piece.range().end <= whole.start);
        let pieces = self.pieces.iter().enumerate().skip(from);
        pieces.take_while(move |(_, piece)| piece.start < whole.end).filter_map(move |(number, piece)| {
            let (start, end) = (piece.start.max(whole.start), piece.range().end.min(whole.end));
            (start < end).then(|| (number, start - self.first..end - self.first))
        })
    }

    /// The matrices of stacks that this rank holds in the order of their elements, each with its tensor, its stack and its number among
    /// those of the rank there; or what is wrong with them: together they must be the tensors, and no rank may hold one in part.
    pub fn matrices(&self, stacks: &[Stack]) -> Result<Vec<InStack>, String> {
        let mut all: Vec<InStack> = vec![];
        for (stack, of) in stacks.iter().enumerate() {
            all.extend(of.starts.iter().enumerate().map(|(number, start)| {
                let piece = self.pieces.partition_point(|piece| piece.start <= *start).saturating_sub(1);
                InStack { piece, stack, number, start: *start, count: of.count() }
            }));
        }
        all.sort_by_key(|matrix| matrix.start);
        let mut next = 0;
        for (piece, of) in self.pieces.iter().enumerate() {
            let mut end = of.start;
            while let Some(matrix) = all.get(next).filter(|m| m.piece == piece && m.start == end) {
                (end, next) = (end + matrix.count.max(1), next + 1);
            }
            if end != of.range().end {
                return Err(format!("no matrices make up piece {:?}", of.range()));
            }
        }
        if next != all.len() {
            return Err("a matrix lies in no piece".into());
        }
        let held = self.held();
        if let Some(cut) = all.iter().find(|m| m.start / held != (m.start + m.count.max(1) - 1) / held) {
            return Err(format!("a matrix at element {} is of two ranks", cut.start));
        }
        // Those of this rank, by their places in its memory and in its own stacks.
        all.retain(|matrix| matrix.start / held == self.first / held);
        let mut numbers = vec![0; stacks.len()];
        for matrix in &mut all {
            (matrix.number, matrix.start) = (numbers[matrix.stack], matrix.start - self.first);
            numbers[matrix.stack] += 1;
        }
        Ok(all)
    }

    /// Most matrices of a stack that a rank holds: as many directions each has, of which some may be of no matrix.
    pub fn most(&self, stack: &Stack) -> usize {
        let owners = stack.starts.iter().map(|start| start / self.held().max(1));
        let mut counts = vec![0; self.group.map_or(1, Group::ranks)];
        owners.for_each(|owner| counts.get_mut(owner).into_iter().for_each(|count| *count += 1));
        counts.into_iter().max().unwrap_or(0)
    }

    /// Checks that pieces are in order, disjoint and inside the buffer.
    pub fn check(&self) -> Result<(), String> {
        let ranks = self.group.map_or(1, Group::ranks);
        let mut end = 0;
        for piece in &self.pieces {
            if piece.start < end || piece.range().end > self.elements {
                return Err(format!(
                    "{} elements have no place for piece {:?}",
                    self.elements,
                    piece.range()
                ));
            }
            end = piece.range().end;
        }
        match self.elements.is_multiple_of(ranks * if ranks > 1 { CHUNK } else { 1 }) {
            true => Ok(()),
            false => Err(format!("{} elements don't divide among {ranks} ranks at borders", self.elements)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::Mesh;

    fn flat(pieces: &[(usize, usize)], elements: usize) -> Flat {
        let pieces = pieces.iter().map(|(start, count)| Piece::from((*start, *count, 1.0, 0.0)));
        Flat { elements, pieces: pieces.collect(), ..Flat::default() }
    }

    #[test]
    fn segments_are_cut_at_borders_and_cover_the_tensors() {
        let flat = flat(&[(0, 100), (128, 5000), (5184, 0), (5184, 7)], 3 * CHUNK);
        let segments: Vec<Segment> = flat.segments().collect();
        let of = |piece: usize| segments.iter().filter(|s| s.piece == piece).collect::<Vec<_>>();
        assert_eq!(of(0), [&Segment { piece: 0, chunk: 0, start: 0, count: 100 }]);
        assert_eq!(
            of(1).iter().map(|s| (s.chunk, s.count)).collect::<Vec<_>>(),
            [(0, 1920), (1, 2048), (2, 1032)]
        );
        assert!(of(2).is_empty());
        assert_eq!(of(3), [&Segment { piece: 3, chunk: 2, start: 5184, count: 7 }]);
        assert_eq!((flat.chunks(), flat.check()), (3, Ok(())));
    }

    #[test]
    fn parts_of_ranks_hold_every_segment_once() {
        let group = Mesh::of_data(3).world();
        let flat = Flat { group: Some(group), ..flat(&[(0, 3000), (3008, 2100), (5120, 1000)], 3 * CHUNK) };
        flat.check().unwrap();
        let all: Vec<(usize, Segment)> = flat.segments().enumerate().collect();
        let held: Vec<_> =
            (0..3).flat_map(|rank| flat.part(rank).held_segments().collect::<Vec<_>>()).collect();
        let mut sorted = held.clone();
        sorted.sort_by_key(|(number, _)| *number);
        assert_eq!(sorted, all);
        // The same elements, tensor by tensor, in a rank's own memory.
        let second = flat.part(1);
        let within: Vec<_> = second.within(0..CHUNK).collect();
        assert_eq!(within, [(0, 0..952), (1, 960..2048)]);
        assert_eq!(second.within(955..960).count(), 0);
        assert_eq!(second.within(950..970).collect::<Vec<_>>(), [(0, 950..952), (1, 960..970)]);
    }

    #[test]
    fn what_cannot_be_divided_or_placed_is_refused() {
        let group = Some(Mesh::of_data(2).world());
        assert!(flat(&[(0, 10), (5, 10)], 64).check().is_err());
        assert!(flat(&[(0, 65)], 64).check().is_err());
        assert!(Flat { group, ..flat(&[(0, 65)], 3 * CHUNK) }.check().is_err());
        assert!(Flat { group, ..flat(&[(0, 65)], 4 * CHUNK) }.check().is_ok());
    }

    #[test]
    fn matrices_make_up_the_tensors() {
        let of = flat(&[(0, 12), (64, 4), (128, 6)], CHUNK);
        let stack = |rows, columns, starts: &[usize]| Stack { rows, columns, starts: starts.to_vec() };
        let stacks = [stack(2, 2, &[0, 4, 8, 64]), stack(2, 3, &[128])];
        let found = of.matrices(&stacks).unwrap();
        let places: Vec<_> = found.iter().map(|m| (m.piece, m.stack, m.number, m.start)).collect();
        assert_eq!(places, [(0, 0, 0, 0), (0, 0, 1, 4), (0, 0, 2, 8), (1, 0, 3, 64), (2, 1, 0, 128)]);
        assert!(of.matrices(&stacks[..1]).is_err(), "a tensor without");
        assert!(of.matrices(&[stack(2, 2, &[0, 4, 64]), stacks[1].clone()]).is_err(), "a gap");
        assert!(of.matrices(&[stack(2, 2, &[0, 4, 8, 12, 64]), stacks[1].clone()]).is_err(), "padding");
        // Each rank has its own, and room for as many as any has.
        let group = Some(Mesh::of_data(2).world());
        let divided = Flat { group, elements: 2 * CHUNK, ..flat(&[(0, 12), (64, 4), (CHUNK, 4)], 2 * CHUNK) };
        let stacks = [stack(2, 2, &[0, 4, 8, 64, CHUNK])];
        let of = |rank: usize| {
            let found = divided.part(rank).matrices(&stacks).unwrap();
            found.iter().map(|m| (m.piece, m.number, m.start)).collect::<Vec<_>>()
        };
        assert_eq!(of(0), [(0, 0, 0), (0, 1, 4), (0, 2, 8), (1, 3, 64)]);
        assert_eq!(of(1), [(2, 0, 0)]);
        assert_eq!(divided.most(&stacks[0]), 4);
        let cut = Flat { group, ..flat(&[(CHUNK - 64, 128)], 2 * CHUNK) };
        assert!(cut.matrices(&[stack(8, 16, &[CHUNK - 64])]).is_err(), "of two ranks");
    }
}
