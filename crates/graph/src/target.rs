//! What a device tells the compiler, which knows no device itself.

use crate::graph::Graph;

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
