//! Random graphs that keep two lanes busy: elementwise ops, products and collectives over a few shapes, values used
//! several times, states that are read, accumulated and assigned, and states in the arena that are only written, or only read.

use graph::ALIGN;
use graph::graph::{At, Node, Phase};
use graph::op::Reduction;
use graph::{DType, Graph, Home, Init, Mesh, Op, Role, Shape, StateId, Type, ValueId};
use testing::Random;

const RANKS: usize = 2;
const SUM: Reduction = Reduction::Sum;
/// A matrix, the same flat, and a shard of that.
const SHAPES: [&[usize]; 3] = [&[8, 16], &[128], &[64]];
const WEIGHT: [usize; 2] = [16, 16];

pub fn random_graph(seed: u64) -> Graph {
    let (rng, mut graph) = (Random::seeded(seed), Graph::default());
    graph.mesh = Mesh::of_data(RANKS);
    let mut maker = Maker { rng, graph, pool: vec![], states: vec![], anew: vec![] };
    maker.borders();
    for i in 0..6 + maker.rng.below(30) {
        maker.node(i);
    }
    maker.assign_the_rest();
    maker.choose_outputs();
    maker.graph.check().unwrap_or_else(|e| panic!("seed {seed}: {e}"));
    maker.graph
}

/// Bytes of scratch for a node: none for most, so that some steps have it and some don't.
pub fn random_scratch(seed: u64) -> impl Fn(&Graph, usize) -> usize {
    move |_, node| {
        let mut rng = Random::seeded(seed ^ ((node as u64) << 32));
        if rng.once_in(4) { 1 + rng.below(700) } else { 0 }
    }
}

struct Maker {
    rng: Random,
    graph: Graph,
    /// Values that may still be used.
    pool: Vec<ValueId>,
    /// States not assigned yet, each with the value that is to be.
    states: Vec<(StateId, Option<ValueId>)>,
    /// States in the arena that nobody has written yet, nor will read.
    anew: Vec<StateId>,
}

impl Maker {
    fn borders(&mut self) {
        for (i, shape) in SHAPES.iter().enumerate() {
            let ty = Type::new(DType::F32, Shape(shape.to_vec()));
            let x = self.graph.add_value(&format!("x{i}"), ty.clone());
            let (op, layer) = (Op::Input, format!("x{i}"));
            let node = Node { op, inputs: vec![], outputs: vec![x], layer, phase: Phase::Forward };
            self.graph.nodes.push(node);
            self.pool.push(x);
            for copy in 0..2 {
                let state = self.graph.add_state(format!("s{i}.{copy}"), ty.clone(), Role::Gradient);
                self.states.push((state, None));
                let read = self.graph.read(state);
                self.pool.push(read);
            }
        }
        self.states_in_arena();
        let ty = Type::new(DType::F32, WEIGHT);
        let weight = self.graph.add_state("weight", ty, Role::Parameter(Init::Zeros));
        self.graph.read(weight);
    }

    fn states_in_arena(&mut self) {
        let mut offset = 0;
        for (i, shape) in SHAPES.iter().enumerate() {
            let ty = Type::new(DType::F32, Shape(shape.to_vec()));
            for written in [true, false] {
                let name = format!("{}{i}", if written { "anew" } else { "found" });
                let state = self.graph.add_state(name, ty.clone(), Role::Gradient);
                self.graph.states[state.index()].home = Home::Arena(offset);
                offset += ty.bytes().next_multiple_of(ALIGN);
                if written {
                    self.anew.push(state);
                } else if self.rng.once_in(3) {
                    let read = self.graph.read(state);
                    self.pool.push(read);
                }
            }
        }
    }

    fn of_shape(&mut self, shape: &[usize]) -> Option<ValueId> {
        let fits = |v: &&ValueId| self.graph.ty(**v).shape.0 == shape;
        let list: Vec<ValueId> = self.pool.iter().filter(fits).copied().collect();
        // The later the likelier, and still the early ones are used again much later.
        let recent = if self.rng.once_in(2) { &list[list.len().saturating_sub(4)..] } else { &list[..] };
        (!recent.is_empty()).then(|| *self.rng.pick(recent))
    }

    fn node(&mut self, i: usize) {
        let shape = SHAPES[self.rng.below(SHAPES.len())];
        let (Some(x), Some(y)) = (self.of_shape(shape), self.of_shape(shape)) else { return };
        let shapes = vec![Shape::from([8, 16])];
        let weight = self.graph.find("weight").expect("every graph has the weight");
        let (op, inputs) = match (self.rng.below(9), shape.len(), shape[0]) {
            (0, ..) => (Op::Add, vec![x, y]),
            (1, ..) => (Op::Scale { factor: 0.5 }, vec![x]),
            (2, ..) => (Op::Accumulate, vec![x, y]),
            (3 | 4, ..) => (Op::AllReduce { reduction: SUM, group: Mesh::of_data(RANKS).world() }, vec![x]),
            (5 | 6, 2, _) => (Op::Linear { bias: false, gelu: self.rng.once_in(2) }, vec![x, weight]),
            (5 | 6, _, 128) => (
                Op::ReduceScatter { reduction: SUM, group: Mesh::of_data(RANKS).world(), views: None },
                vec![x],
            ),
            (5 | 6, ..) => (Op::AllGather { group: Mesh::of_data(RANKS).world(), views: None }, vec![x]),
            (7, 2, _) => (Op::Pack { align: 64, to: None }, vec![x]),
            (7, _, 128) => (Op::Unpack { shapes, to: None, over: false }, vec![x]),
            (7, ..) => (Op::Gelu, vec![x]),
            _ if self.rng.once_in(2) => return self.write_anew(),
            _ => return self.assign(),
        };
        let at = At::new(&format!("n{i}"), Phase::Forward);
        let outputs = self.graph.push(op, &inputs, &at).expect("shapes fit by construction");
        self.pool.extend(outputs);
    }

    /// Decides the new value of a state, often by an op that may work in place; the assign itself comes now or later.
    fn assign(&mut self) {
        if self.states.is_empty() {
            return;
        }
        let index = self.rng.below(self.states.len());
        let state = self.states[index].0;
        let (old, shape) = (self.graph.read(state), self.graph.state_type(state).shape.0.clone());
        let at = At::new(&format!("new.{}", state.0), Phase::Update);
        let Some(x) = self.of_shape(&shape) else { return };
        let (op, inputs) = match self.rng.below(4) {
            0 => (Op::AllReduce { reduction: SUM, group: Mesh::of_data(RANKS).world() }, vec![old]),
            1 => (Op::Add, vec![old, x]),
            _ => (Op::Accumulate, vec![old, x]),
        };
        let mut value = self.graph.push(op, &inputs, &at).expect("shapes fit by construction")[0];
        // As gradients are: summed, then exchanged, in the state's own memory where nobody needs the sum any more.
        if self.rng.once_in(2) {
            self.pool.extend(self.rng.once_in(3).then_some(value));
            let op = Op::AllReduce { reduction: SUM, group: Mesh::of_data(RANKS).world() };
            value = self.graph.push(op, &[value], &at).expect("shapes fit by construction")[0];
        }
        self.pool.push(value);
        self.states[index].1 = Some(value);
        if self.rng.once_in(2) {
            self.finish_state(index);
        }
    }

    /// Puts a value into a state that is not read: one that is there, or a new one, perhaps exchanged.
    fn write_anew(&mut self) {
        let Some(state) = self.anew.pop() else { return };
        let shape = self.graph.state_type(state).shape.0.clone();
        let Some(mut value) = self.of_shape(&shape) else { return };
        let at = At::new(&format!("anew.{}", state.0), Phase::Backward);
        for op in [Op::Gelu, Op::AllReduce { reduction: SUM, group: Mesh::of_data(RANKS).world() }] {
            if !self.rng.once_in(3) {
                value = self.graph.push(op, &[value], &at).expect("shapes fit by construction")[0];
                self.pool.extend(self.rng.once_in(3).then_some(value));
            }
        }
        self.graph.assign(state, value, Phase::Backward).expect("types fit by construction");
    }

    /// After its assign a state's old content may not be used any more.
    fn finish_state(&mut self, index: usize) {
        let (state, value) = self.states.swap_remove(index);
        let old = self.graph.read(state);
        self.pool.retain(|v| *v != old);
        if let Some(value) = value {
            self.graph.assign(state, value, Phase::Update).expect("types fit by construction");
        }
    }

    fn assign_the_rest(&mut self) {
        while let Some(last) = self.states.len().checked_sub(1) {
            self.finish_state(last);
        }
    }

    fn choose_outputs(&mut self) {
        for _ in 0..1 + self.rng.below(3) {
            let value = *self.rng.pick(&self.pool);
            if !self.graph.outputs.contains(&value) {
                self.graph.outputs.push(value);
            }
        }
        if self.rng.once_in(2) {
            self.graph.prune();
        }
    }
}
