//! What the gradient tests share: small graphs whose operands are parameters, and a rig that runs them.
//!
//! Legend: B batch, T tokens, C channels, K classes.
#![allow(dead_code)]

pub mod arithmetic;
pub mod optimizers;
pub mod random;
pub mod ranks;
pub mod slopes;
pub mod written;

use comm::Communicator;
use cpu::{Executor, Float, Options, Which};
use graph::graph::{At, Node, Phase, settle};
use graph::op::Pooling;
use graph::passes::{differentiate, fuse, narrow, place, schedule};
use graph::random::Sequence;
use graph::{
    DType, Graph, Header, Init, Key, Loss, Model, Op, Optimizer, Plan, Program, Recompute, Role, Settings,
    Target,
};
use graph::{Shape, State, StateId, Type, ValueId, compile};
use models::swin::Swin;
use models::vit::{Pool, Vit};

pub const CLASSES: usize = 5;
pub const EPS: f64 = 1e-5;
pub const SEED: u64 = 11;

pub fn dtype<T: Float>() -> DType {
    if size_of::<T>() == 8 { DType::F64 } else { DType::F32 }
}

fn input(graph: &mut Graph, name: &str, ty: Type) -> ValueId {
    let value = graph.add_value(name, ty);
    let (layer, phase) = (name.to_string(), Phase::Forward);
    graph.nodes.push(Node { op: Op::Input, inputs: vec![], outputs: vec![value], layer, phase });
    value
}

/// A graph in the making. Every operand is a parameter, so that its gradient is there to be checked.
pub struct Draft {
    graph: Graph,
    dtype: DType,
    labels: ValueId,
    weights: ValueId,
    batch: usize,
    nodes: usize,
    sites: u32,
}

impl Draft {
    pub fn new(dtype: DType, batch: usize) -> Self {
        Self::labelled(dtype, &[batch])
    }

    /// With a label for each pixel of images (B,h,w).
    pub fn of_pixels(dtype: DType, images: [usize; 3]) -> Self {
        Self::labelled(dtype, &images)
    }

    fn labelled(dtype: DType, axes: &[usize]) -> Self {
        let (mut graph, batch, shape) = (Graph::default(), axes[0], Shape(axes.to_vec()));
        let labels = input(&mut graph, "labels", Type { dtype: DType::I32, shape: shape.clone() });
        let weights = input(&mut graph, "weights", Type { dtype, shape });
        Draft { graph, dtype, labels, weights, batch, nodes: 0, sites: 0 }
    }

    /// Drawn from a normal distribution; the name is made unique by a number.
    pub fn parameter(&mut self, name: &str, shape: impl Into<Shape>, std: f64) -> ValueId {
        let name = format!("{name}.{}", self.graph.states.len());
        let role = Role::Parameter(Init::Normal { std });
        let state = self.graph.add_state(name, Type::new(self.dtype, shape), role);
        self.graph.read(state)
    }

    pub fn batch(&self) -> usize {
        self.batch
    }

    pub fn shape(&self, x: ValueId) -> Vec<usize> {
        self.graph.ty(x).shape.0.clone()
    }

    pub fn all(&mut self, op: Op, inputs: &[ValueId]) -> Vec<ValueId> {
        self.nodes += 1;
        let layer = format!("{}.{}", op.name(), self.nodes);
        self.graph.push(op, inputs, &At::new(&layer, Phase::Forward)).unwrap()
    }

    pub fn one(&mut self, op: Op, inputs: &[ValueId]) -> ValueId {
        self.all(op, inputs)[0]
    }

    /// A number for a random op of its own.
    pub fn site(&mut self) -> u32 {
        self.sites += 1;
        self.sites
    }

    /// What full recompute keeps.
    pub fn border(&mut self, x: ValueId) {
        self.graph.borders.insert(x);
    }

    pub fn linear(&mut self, x: ValueId, out: usize) -> ValueId {
        let inner = *self.shape(x).last().unwrap();
        let w = self.parameter("weight", [out, inner], (1.0 / inner as f64).sqrt());
        let b = self.parameter("bias", [out], 0.5);
        self.one(Op::Linear { bias: true, gelu: false }, &[x, w, b])
    }

    pub fn layer_norm(&mut self, x: ValueId) -> ValueId {
        let width = *self.shape(x).last().unwrap();
        let (gamma, beta) = (self.parameter("gamma", [width], 1.0), self.parameter("beta", [width], 0.5));
        self.one(Op::LayerNorm { eps: EPS, add: false }, &[x, gamma, beta])
    }

    /// Tokens (B,T,C) → (B,C) such that every element has a slope of its own: positions, GELU, mean.
    pub fn squeeze(&mut self, tokens: ValueId) -> ValueId {
        let [_, t, c] = self.shape(tokens)[..] else { panic!("tokens have three axes") };
        let positions = self.parameter("positions", [1, t, c], 1.0);
        let x = self.one(Op::Embed { class_token: false }, &[tokens, positions]);
        let x = self.one(Op::Gelu, &[x]);
        self.one(Op::Pool { kind: Pooling::Mean }, &[x])
    }

    /// Ends the graph in the loss of (B,T,C) or (B,C).
    pub fn finish(mut self, x: ValueId) -> Graph {
        let x = if self.shape(x).len() == 3 { self.squeeze(x) } else { x };
        let logits = self.linear(x, CLASSES);
        self.finish_logits(logits, 0.1)
    }

    pub fn finish_logits(self, logits: ValueId, smoothing: f64) -> Graph {
        self.finish_loss(logits, Loss { smoothing, mixed: false })
    }

    /// Ends the graph in the loss of logits (B,h,w,K) that are resized to the labels' size on the way.
    pub fn finish_resized(mut self, logits: ValueId, smoothing: f64) -> Graph {
        let (inputs, at) = ([logits, self.labels, self.weights], At::new("loss", Phase::Forward));
        let op = Op::ResizedCrossEntropy { smoothing };
        self.graph.outputs = self.graph.push(op, &inputs, &at).unwrap();
        self.graph.check().unwrap();
        self.graph
    }

    pub fn finish_loss(mut self, logits: ValueId, Loss { smoothing, mixed }: Loss) -> Graph {
        let mut inputs = vec![logits, self.labels, self.weights];
        if mixed {
            inputs.push(input(&mut self.graph, "partners", Type::new(DType::I32, [self.batch])));
            inputs.push(input(&mut self.graph, "mix", Type::new(self.dtype, [self.batch])));
        }
        let at = At::new("loss", Phase::Forward);
        self.graph.outputs = self.graph.push(Op::CrossEntropy { smoothing, mixed }, &inputs, &at).unwrap();
        self.graph.check().unwrap();
        self.graph
    }
}

/// A ViT of three blocks, all its rates alike.
pub fn small_vit(rates: f64) -> Vit {
    Vit {
        image: 16,
        patch: 4,
        channels: 3,
        classes: CLASSES,
        width: 24,
        depth: 3,
        heads: 3,
        mlp: 48,
        pool: Pool::ClassToken,
        dropout: rates,
        attention_dropout: rates,
        drop_path: rates,
        norm_eps: 1e-6,
    }
}

/// A Swin V2 of all four stages, shifted windows among them.
pub fn small_swin(image: usize) -> Swin {
    Swin {
        image: [image, image],
        channels: 3,
        classes: CLASSES,
        width: 12,
        depths: [1, 2, 1, 1],
        heads: [1, 2, 2, 4],
        window: 4,
        pretrained: None,
        trained: None,
        dropout: 0.1,
        drop_path: 0.2,
    }
}

/// The loss of the tests' models.
pub fn smoothed() -> Loss {
    Loss { smoothing: 0.1, mixed: false }
}

pub fn adamw() -> Optimizer {
    Optimizer::AdamW { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.05 }
}

/// Compiles as training does.
pub fn compiled(graph: &Graph, recompute: Recompute, threads: usize) -> Program {
    let model = Model { train: graph.clone(), eval: graph.clone(), key: Key::default() };
    compiled_model(model, recompute, adamw(), threads)
}

pub fn compiled_model(model: Model, recompute: Recompute, optimizer: Optimizer, threads: usize) -> Program {
    let target = cpu::Target { threads };
    compiled_with(model, &Settings { optimizer, recompute, ..settings(&target) })
}

/// One group for all, clipped, nothing averaged.
pub fn settings(target: &dyn Target) -> Settings<'_> {
    Settings { max_grad_norm: Some(1.0), ..Settings::plain(adamw(), target) }
}

pub fn compiled_with(model: Model, settings: &Settings<'_>) -> Program {
    checked(compile(model, settings).unwrap())
}

/// Lets a model's head start at random rather than at zero, which would leave all gradients but its own zero.
pub fn with_drawn_head(mut model: Model) -> Model {
    for state in model.train.states.iter_mut().chain(&mut model.eval.states) {
        if state.name.starts_with("head.") {
            state.role = Role::Parameter(Init::Normal { std: 0.2 });
        }
    }
    model
}

/// `differentiate` with as few passes around it as one asks for. Gradients are assigned rather than added up, so that
/// `peephole` has no part in it either.
pub fn by_hand(graph: &Graph, narrowed: bool, fused: bool, threads: usize) -> Program {
    let graph = if narrowed { narrow(graph.clone()).unwrap() } else { graph.clone() };
    let mut eval = if fused { fuse(graph) } else { graph };
    let (loss, stats) = (eval.find("loss").unwrap(), eval.find("loss.stats").unwrap());
    let (mut train, gradients) = differentiate(eval.clone(), loss, &|_| true).unwrap();
    let ty = train.ty(stats).clone();
    let state = train.add_state("stats", ty, Role::Statistic);
    train.assign(state, stats, Phase::Backward).unwrap();
    for (parameter, gradient) in gradients {
        let State { name, ty, .. } = train.states[parameter.index()].clone();
        let state = train.add_state(format!("{name}.grad"), ty, Role::Gradient);
        train.assign(state, gradient, Phase::Backward).unwrap();
    }
    train.outputs.clear();
    settle(&mut train.states);
    let states = train.states.clone();
    eval.states = states.clone();
    let plan = |graph: &Graph| {
        graph.check().unwrap();
        let target = cpu::Target { threads };
        place(graph, &schedule(graph, &target), "by hand", Key::default(), &target)
    };
    let last = plan(&train);
    let update = Plan { states: states.clone(), ..Plan::default() };
    let (first, micro, eval) = (last.clone(), update.clone(), plan(&eval));
    checked(Program { first, micro, last, update, eval, states, ..Program::default() })
}

fn checked(program: Program) -> Program {
    for plan in program.plans() {
        plan.check().unwrap_or_else(|error| panic!("{}: {error}", plan.name));
    }
    program
}

/// Named tensors, in double precision.
pub type Tensors = Vec<(String, Vec<f64>)>;

/// A program bound to memory, with a batch that depends on the samples' numbers alone.
pub struct Rig<T: Float> {
    pub executor: Executor<T>,
    pub header: Header,
    /// The weight of each sample of the batch in the loss.
    pub weights: Vec<f64>,
    /// Labels are drawn from so many.
    pub classes: usize,
    /// The plan of a step's only micro-batch.
    pub only: Which,
}

impl<T: Float> Rig<T> {
    /// Parameters start as drawn for their number, whatever the program around them.
    pub fn new(program: Program, threads: usize) -> Self {
        Self::among(program, threads, None)
    }

    /// One of several ranks.
    pub fn among(program: Program, threads: usize, comm: Option<Communicator>) -> Self {
        let mut executor = Executor::new(program, Options { threads, seed: SEED, comm }).unwrap();
        let batch = executor.labels(Which::Last).unwrap().len();
        let (nominal, learning_rate) = (batch as f64, 1e-3);
        let header = Header { seed: 5, step: 3, first_sample: 0, learning_rate, nominal };
        Rig { executor, header, weights: vec![1.0; batch], classes: CLASSES, only: Which::Last }
    }

    /// Fills the inputs of a plan; they share the arena with everything else, so every run needs it anew.
    pub fn fill(&mut self, which: Which) {
        let (first, classes) = (self.header.first_sample, self.classes as f64);
        let draws = |b: usize| Sequence::new(first + b as u64, 77);
        for (b, label) in self.executor.labels(which).unwrap().iter_mut().enumerate() {
            *label = (draws(b).uniform() * classes) as i32;
        }
        let second = |b: usize| Sequence::new(first + b as u64, 78);
        for (b, partner) in self.executor.ints(which, "partners").into_iter().flatten().enumerate() {
            *partner = (second(b).uniform() * classes) as i32;
        }
        self.put(which, "mix", |b| Sequence::new(first + b as u64, 79).uniform());
        let weights = std::mem::take(&mut self.weights);
        assert!(self.put(which, "weights", |b| weights[b]));
        self.weights = weights;
        let plan = self.executor.program().plan(which);
        if let Some(images) = plan.find("images") {
            let size = plan.values[images].ty.shape.count() / self.weights.len();
            let mut random = draws(0);
            self.put(which, "images", |i| {
                if i % size == 0 {
                    random = draws(i / size);
                }
                random.normal()
            });
        }
    }

    /// Fills an input with what is drawn for each element in turn, if there is one of that name.
    fn put(&mut self, which: Which, name: &str, mut draw: impl FnMut(usize) -> f64) -> bool {
        if let Some(input) = self.executor.input(which, name) {
            input.iter_mut().enumerate().for_each(|(i, x)| *x = T::from_f64(draw(i)));
            return true;
        }
        let plan = self.executor.program().plan(which);
        let Some(value) = plan.find(name) else { return false };
        let count = plan.values[value].ty.shape.count();
        let values: Vec<T> = (0..count).map(|i| T::from_f64(draw(i))).collect();
        self.executor.write_input(which, name, &values)
    }

    pub fn run(&mut self, which: Which) {
        self.executor.run(which, &self.header).unwrap();
    }

    /// The loss of the forward ops alone.
    pub fn loss(&mut self) -> f64 {
        self.fill(Which::Eval);
        self.run(Which::Eval);
        self.executor.output(Which::Eval, "loss").unwrap()[0].to_f64()
    }

    /// One pass forward and backward: statistics and gradients.
    pub fn gradients(&mut self) -> Tensors {
        self.fill(self.only);
        self.run(self.only);
        self.tensors(|s| matches!(s.role, Role::Gradient | Role::Statistic))
    }

    /// One optimizer step of one batch.
    pub fn step(&mut self) {
        self.fill(self.only);
        self.run(self.only);
        self.run(Which::Update);
    }

    /// The states asked for, by name.
    pub fn tensors(&self, which: impl Fn(&State) -> bool) -> Tensors {
        // Flat buffers are their tensors, and padding.
        let wanted = |state: &State| state.role != Role::Flat && which(state);
        let states = self.executor.program().states.iter().enumerate().filter(|(_, s)| wanted(s));
        let mut tensors: Tensors = states
            .map(|(i, s)| {
                let values = self.executor.state(StateId(i as u32));
                (s.name.clone(), values.iter().map(|x| x.to_f64()).collect())
            })
            .collect();
        tensors.sort_by(|a, b| a.0.cmp(&b.0));
        tensors
    }

    pub fn state(&self, name: &str) -> Option<Vec<f64>> {
        let id = self.executor.find_state(name)?;
        Some(self.executor.state(id).iter().map(|x| x.to_f64()).collect())
    }

    pub fn has(&self, op: impl Fn(&Op) -> bool) -> bool {
        self.executor.program().last.steps.iter().any(|s| op(&s.op))
    }
}

/// A move of parameters: each named one by its vector.
pub type Direction<'a> = &'a [(StateId, Vec<f64>)];

impl Rig<f64> {
    /// The derivative of the loss along a direction, by central differences of fourth order.
    pub fn slope(&mut self, direction: Direction<'_>, h: f64) -> f64 {
        let start: Vec<Vec<f64>> =
            direction.iter().map(|(id, _)| self.executor.state(*id).to_vec()).collect();
        let mut loss_at = |distance: f64| {
            for ((id, along), start) in direction.iter().zip(&start) {
                let values = self.executor.state_mut(*id).unwrap().iter_mut().zip(start.iter().zip(along));
                values.for_each(|(x, (start, along))| *x = start + distance * along);
            }
            self.loss()
        };
        let near = loss_at(h) - loss_at(-h);
        let far = loss_at(2.0 * h) - loss_at(-2.0 * h);
        loss_at(0.0);
        (8.0 * near - far) / (12.0 * h)
    }

    /// The parameters with their analytic gradients; none where no path leads to the loss.
    pub fn parameter_gradients(&mut self) -> Vec<(State, StateId, Option<Vec<f64>>)> {
        self.gradients();
        let states = self.executor.program().states.clone().into_iter().enumerate();
        let parameters = states.filter(|(_, s)| s.is_parameter());
        parameters
            .map(|(i, s)| {
                let gradient = self.state(&format!("{}.grad", s.name));
                (s, StateId(i as u32), gradient)
            })
            .collect()
    }
}

pub fn norm(values: &[f64]) -> f64 {
    values.iter().map(|x| x * x).sum::<f64>().sqrt()
}

/// Of gradients, that is: statistics count samples and pixels, and are no measure for those.
pub fn norm_of_all(tensors: &Tensors) -> f64 {
    let gradients = tensors.iter().filter(|(name, _)| name != "stats");
    gradients.map(|(_, x)| norm(x).powi(2)).sum::<f64>().sqrt()
}

/// The largest difference of two tensors of the same name, relative to the tensor's norm. A tensor of almost no norm
/// (in exact arithmetic, of none) is held against a small part of the norm of all.
pub fn distance(a: &Tensors, b: &Tensors) -> (f64, String) {
    let names = |t: &Tensors| t.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
    assert_eq!(names(a), names(b));
    let least = 1e-3 * norm_of_all(b);
    let mut worst = (0.0, String::new());
    for ((name, a), (_, b)) in a.iter().zip(b) {
        let difference: Vec<f64> = a.iter().zip(b).map(|(a, b)| a - b).collect();
        let error = norm(&difference) / norm(b).max(least);
        assert!(error.is_finite(), "{name} is not finite");
        if error > worst.0 {
            worst = (error, name.clone());
        }
    }
    worst
}
