//! Sums over rows that steps leave in parts: one launch adds up those of many steps.
//!
//! Gradients of biases and norms are sums over all rows of a batch. The kernels that make them leave a row of partial sums a block,
//! and nobody needs the sums before the update, or the exchange. So they wait here until someone does, or until their parts
//! fill the memory there is for them.

use crate::action::{Address, PartialSum};
use graph::ALIGN;

/// Bytes of partial sums that wait at most, unless one step has more. Twice as many are used in turn, so that parts are
/// written while those before them are added up.
const MOST: usize = 8 << 20;

/// A range of memory, from the first byte to the last but one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Range {
    pub start: Address,
    pub end: Address,
}

impl Range {
    pub fn new(start: Address, bytes: usize) -> Self {
        Range { start, end: start + bytes as Address }
    }

    pub fn meets(&self, other: &Range) -> bool {
        self.start < other.end && other.start < self.end
    }
}

impl PartialSum {
    pub(crate) fn parts(&self) -> Range {
        let elements = self.rows.saturating_sub(1) * self.stride + self.columns;
        Range::new(self.parts, 4 * elements)
    }

    pub(crate) fn out(&self) -> Range {
        Range::new(self.out, 4 * self.columns)
    }

    pub(crate) fn start(&self) -> Option<Range> {
        Some(Range::new(self.start?, 4 * self.columns))
    }

    /// Bytes that are read and written.
    pub(crate) fn bytes(&self) -> usize {
        4 * self.columns * (self.rows + 1 + usize::from(self.start.is_some()))
    }
}

/// A sum that is yet to be made.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Waiting {
    pub sum: PartialSum,
    /// The step that has left its parts.
    pub step: usize,
    /// The value of the plan that it is.
    pub value: usize,
}

/// The sums that wait, and the memory of partial sums.
pub(crate) struct Sums {
    base: Address,
    /// Where the next parts go.
    at: usize,
    /// Bytes of the parts that wait.
    held: usize,
    /// The end of all that was ever used.
    pub used: usize,
    waiting: Vec<Waiting>,
}

impl Sums {
    /// With memory for parts from `base` on.
    pub fn at(base: Address) -> Self {
        Sums { base, at: 0, held: 0, used: 0, waiting: Vec::new() }
    }

    /// Whether so many bytes of parts can wait beside those that do.
    pub fn has_room(&self, bytes: usize) -> bool {
        self.waiting.is_empty() || self.held + bytes <= MOST
    }

    /// Memory for the parts of a step.
    pub fn take(&mut self, bytes: usize) -> Address {
        let bytes = bytes.next_multiple_of(ALIGN);
        if self.waiting.is_empty() {
            self.start_anew();
        }
        let address = self.base + self.at as Address;
        self.at += bytes;
        self.held += bytes;
        self.used = self.used.max(self.at);
        address
    }

    pub fn wait(&mut self, waiting: Waiting) {
        self.waiting.push(waiting);
    }

    /// Whether a sum that waits has to do with this memory.
    pub fn concern(&self, range: &Range) -> bool {
        let concerns =
            |w: &Waiting| w.sum.out().meets(range) || w.sum.start().is_some_and(|start| start.meets(range));
        self.waiting.iter().any(concerns)
    }

    /// Lets the sum that would have been `value` go on from `so_far` and be `sum`, each a value and its address. False if
    /// it doesn't wait any more.
    pub fn add_to(&mut self, value: usize, so_far: Address, (sum, out): (usize, Address)) -> bool {
        let found = self.waiting.iter_mut().find(|w| w.value == value && w.sum.start.is_none());
        let Some(waiting) = found else { return false };
        (waiting.sum.start, waiting.sum.out, waiting.value) = (Some(so_far), out, sum);
        true
    }

    /// All that wait, which are to be made now.
    pub fn take_all(&mut self) -> Vec<Waiting> {
        self.start_anew();
        std::mem::take(&mut self.waiting)
    }

    /// No parts are held any more; the next go behind the last ones, or, if there is little room left, to the beginning.
    fn start_anew(&mut self) {
        self.held = 0;
        if self.at > MOST {
            self.at = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BASE: Address = 1 << 30;

    fn waiting(value: usize, out: Address) -> Waiting {
        let sum = PartialSum { parts: BASE, rows: 4, stride: 8, columns: 8, start: None, out };
        Waiting { sum, step: value, value }
    }

    #[test]
    fn parts_that_wait_lie_apart() {
        let mut sums = Sums::at(BASE);
        let mut held: Vec<Range> = vec![];
        for i in 0..200 {
            let bytes = 1 + (i * 7919) % (3 << 20);
            if !sums.has_room(bytes) {
                assert!(sums.take_all().len() > 1, "two of these always fit");
                held.clear();
            }
            let range = Range::new(sums.take(bytes), bytes);
            assert!(
                range.start.is_multiple_of(ALIGN as u64) && !held.iter().any(|other| other.meets(&range))
            );
            held.push(range);
            sums.wait(waiting(i, 0));
            assert!(held.iter().map(|r| (r.end - r.start) as usize).sum::<usize>() <= MOST + 200 * ALIGN);
        }
        assert!(sums.used <= 2 * MOST + 200 * ALIGN);
    }

    #[test]
    fn a_step_with_more_than_there_is_room_for_waits_alone() {
        let mut sums = Sums::at(BASE);
        sums.take(100);
        sums.wait(waiting(0, 0));
        assert!(!sums.has_room(5 * MOST));
        sums.take_all();
        assert!(sums.has_room(5 * MOST));
        assert_eq!(sums.take(5 * MOST), BASE + ALIGN as Address);
        assert_eq!(sums.used, 5 * MOST + ALIGN);
        sums.wait(waiting(1, 0));
        assert!(!sums.has_room(1));
        sums.take_all();
        assert_eq!(sums.take(1), BASE);
    }

    #[test]
    fn parts_that_nobody_adds_up_take_no_room() {
        let mut sums = Sums::at(BASE);
        let ends = (0..100).map(|_| sums.take(1 << 20) + (1 << 20)).max();
        assert!(ends <= Some(BASE + 2 * MOST as Address));
    }

    #[test]
    fn a_sum_goes_on_from_what_is_there_once() {
        let mut sums = Sums::at(BASE);
        sums.wait(waiting(3, 4096));
        assert!(sums.concern(&Range::new(4096 + 31, 1)) && !sums.concern(&Range::new(4096 + 32, 64)));
        assert!(!sums.add_to(4, 8192, (5, 8192)));
        assert!(sums.add_to(3, 8192, (5, 8192)));
        assert!(!sums.add_to(3, 8192, (5, 8192)) && !sums.add_to(5, 8192, (6, 8192)));
        assert!(!sums.concern(&Range::new(4096, 32)) && sums.concern(&Range::new(8192, 1)));
        let [Waiting { sum, value: 5, step: 3 }] = sums.take_all()[..] else { panic!() };
        assert_eq!((sum.start, sum.out), (Some(8192), 8192));
    }
}
