//! What a device tells the compiler, which knows no device itself.

use crate::graph::Graph;
use crate::op::{Lane, Op};

/// What plans are made for.
pub trait Target {
    /// Bytes of working memory that a node's step needs while it runs.
    fn scratch(&self, graph: &Graph, node: usize) -> usize;

    /// For so many steps after its last use, memory is better left alone, if there is room: later steps are under way by then, and
    /// would wait for it.
    fn linger(&self) -> usize {
        0
    }

    /// Which weight gradients are made together.
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

    /// How long partial sums may wait.
    fn deferred(&self) -> Deferred {
        Deferred::default()
    }

    /// How many of the steps that come next on a lane one launch makes, the first of them included.
    fn launch(&self, next: &[&Op]) -> usize {
        let beside = next.windows(2).take_while(|pair| pair[1].runs_beside(pair[0])).count();
        (1 + beside).min(self.batching().most)
    }
}

/// Partial sums that a step leaves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Partial {
    /// Of all of them.
    pub bytes: usize,
    /// The results that they are of, each with the offset of its first part.
    pub results: Vec<(usize, usize)>,
}

/// How long partial sums wait to be added up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Deferred {
    /// Until there are more bytes of them, unless one step leaves more.
    pub most: usize,
    /// For so many steps after that, they are left alone: they are added up beside those steps.
    pub stays: usize,
}

/// Which weight gradients, each too small for the device, are made together where they can follow each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Batching {
    /// How many at most.
    pub most: usize,
    /// Elements of one that is small.
    pub small: usize,
    /// Multiplications of one that is short.
    pub short: usize,
    /// Elements of all that are made together.
    pub together: usize,
    /// What divides the columns of all operands.
    pub unit: usize,
    /// For so many steps, what they read is left alone: they are made beside those steps.
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
