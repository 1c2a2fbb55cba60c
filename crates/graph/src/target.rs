//! Description of a device for the compiler, which knows no device itself.

use crate::graph::Graph;
use crate::op::{Lane, Op};

/// Device that plans are made for.
pub trait Target {
    /// Bytes of working memory that a node's step needs while it runs.
    fn scratch(&self, graph: &Graph, node: usize) -> usize;

    /// Number of steps after its last use for which memory is not reused, if there is room: steps that run at the same
    /// time would wait for it.
    fn linger(&self) -> usize {
        0
    }

    /// Rule for weight gradients that one launch makes.
    fn batching(&self) -> Batching {
        Batching::NONE
    }

    /// The lane of an op's steps, which may be one beside its own.
    fn lane(&self, op: &Op) -> Lane {
        op.lane()
    }

    /// The partial sums that a node's step leaves, if it leaves any.
    fn partial(&self, _graph: &Graph, _node: usize) -> Option<Partial> {
        None
    }

    /// Limits of deferring partial sums.
    fn deferred(&self) -> Deferred {
        Deferred::default()
    }

    /// Number of the next steps on a lane that one launch makes, the first of them included.
    fn launch(&self, next: &[&Op]) -> usize {
        let beside = next.windows(2).take_while(|pair| pair[1].runs_beside(pair[0])).count();
        (1 + beside).min(self.batching().most)
    }
}

/// Partial sums that a step leaves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Partial {
    /// Bytes of all partial sums.
    pub bytes: usize,
    /// Results that they belong to, each with the offset of its first part.
    pub results: Vec<(usize, usize)>,
}

/// Limits of deferring partial sums.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Deferred {
    /// Bytes of partial sums that may wait, unless one step leaves more.
    pub most: usize,
    /// Number of steps after that for which they are not overwritten: they are added up beside those steps.
    pub stays: usize,
}

/// Rule for weight gradients, each too small for the device, that one launch makes where they can follow each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Batching {
    /// Largest number of weight gradients in a launch.
    pub most: usize,
    /// Elements of one that is small.
    pub small: usize,
    /// Multiplications of one that is short.
    pub short: usize,
    /// Elements of all that are made together.
    pub together: usize,
    /// Divisor of the columns of all operands.
    pub unit: usize,
    /// Number of steps for which what they read is not overwritten: they are made beside those steps.
    pub stays: usize,
}

impl Batching {
    /// Each by itself.
    pub const NONE: Batching = Batching { most: 1, small: 0, short: 0, together: 0, unit: 1, stays: 0 };
}

/// A device of which only the working memory is known.
impl<F: Fn(&Graph, usize) -> usize> Target for F {
    fn scratch(&self, graph: &Graph, node: usize) -> usize {
        self(graph, node)
    }
}
