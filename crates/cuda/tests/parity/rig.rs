//! A program on the GPU, fed with the same batches as the CPU's rig.

pub use super::common::arithmetic::Arithmetic;
use super::common::{self, CLASSES, Rig, Tensors, adamw, settings, smoothed, with_drawn_head};
use cpu::Which;
use cuda::{CudaError, Executor, Options};
use graph::random::Sequence;
use graph::{
    DType, Graph, Header, Key, Model, Optimizer, Program, Recompute, Role, Settings, State, StateId, compile,
};
use models::vit::Vit;

pub struct Gpu {
    pub executor: Executor,
    pub header: Header,
    scale: f64,
    /// The weight of each sample of the batch in the loss.
    pub weights: Vec<f32>,
    /// Labels are drawn from so many.
    pub classes: usize,
}

/// Compiles for a GPU.
pub fn program(model: Model, arithmetic: Arithmetic, optimizer: Optimizer, recompute: Recompute) -> Program {
    program_for(model, arithmetic, optimizer, recompute, false)
}

fn program_for(
    model: Model,
    arithmetic: Arithmetic,
    optimizer: Optimizer,
    recompute: Recompute,
    accumulates: bool,
) -> Program {
    let loss_scale = arithmetic.loss_scale();
    let mixed = arithmetic.mixed();
    let target = cuda::Target::of(0, mixed.is_some());
    let settings = Settings { optimizer, recompute, mixed, loss_scale, accumulates, ..settings(&target) };
    let program = compile(model, &settings).unwrap();
    program.plans().into_iter().for_each(|plan| plan.check().unwrap());
    program
}

impl Gpu {
    pub fn of_graph(graph: &Graph, arithmetic: Arithmetic) -> Result<Self, CudaError> {
        Self::with(graph, arithmetic, Recompute::None)
    }

    pub fn recomputing(graph: &Graph, arithmetic: Arithmetic) -> Result<Self, CudaError> {
        Self::with(graph, arithmetic, Recompute::Full)
    }

    /// With the fastest algorithms, as measured here.
    pub fn tuned(graph: &Graph, arithmetic: Arithmetic) -> Result<Self, CudaError> {
        let model = Model { train: graph.clone(), eval: graph.clone(), key: Key::default() };
        let program = program(model, arithmetic, adamw(), Recompute::None);
        Self::with_options(program, arithmetic, false)
    }

    /// With gradients of their own memory, for steps of several micro-steps.
    pub fn accumulating(
        model: Model,
        arithmetic: Arithmetic,
        optimizer: Optimizer,
        recompute: Recompute,
    ) -> Result<Self, CudaError> {
        Self::of_program(program_for(model, arithmetic, optimizer, recompute, true), arithmetic)
    }

    fn with(graph: &Graph, arithmetic: Arithmetic, recompute: Recompute) -> Result<Self, CudaError> {
        let model = Model { train: graph.clone(), eval: graph.clone(), key: Key::default() };
        Self::new(model, arithmetic, adamw(), recompute)
    }

    pub fn new(
        model: Model,
        arithmetic: Arithmetic,
        optimizer: Optimizer,
        recompute: Recompute,
    ) -> Result<Self, CudaError> {
        Self::of_program(program(model, arithmetic, optimizer, recompute), arithmetic)
    }

    fn of_program(program: Program, arithmetic: Arithmetic) -> Result<Self, CudaError> {
        Self::with_options(program, arithmetic, true)
    }

    fn with_options(
        program: Program,
        arithmetic: Arithmetic,
        deterministic: bool,
    ) -> Result<Self, CudaError> {
        let labels = program.last.find("labels").unwrap();
        let batch = program.last.values[labels].ty.shape.count();
        let options = Options {
            device: 0,
            seed: common::SEED,
            deterministic,
            tf32: arithmetic == Arithmetic::Tf32,
            comm: None,
        };
        let executor = Executor::new(program, options)?;
        let (nominal, learning_rate) = (batch as f64, 1e-3);
        let header = Header { seed: 5, step: 3, first_sample: 0, learning_rate, nominal };
        let (scale, weights) = (arithmetic.scale().unwrap_or(1.0), vec![1.0; batch]);
        Ok(Gpu { executor, header, scale, weights, classes: CLASSES })
    }

    /// The batch of `Rig::fill`.
    pub fn fill(&mut self, which: Which) -> Result<(), CudaError> {
        let (first, batch) = (self.header.first_sample, self.weights.len());
        let classes = self.classes as f64;
        let draws = |b: usize, site: u32| Sequence::new(first + b as u64, site);
        let class = |b: usize, site: u32| (draws(b, site).uniform() * classes) as i32;
        let labels: Vec<i32> = (0..batch).map(|b| class(b, 77)).collect();
        self.executor.upload_i32(which, "labels", &labels)?;
        self.executor.upload_f32(which, "weights", &self.weights)?;
        let plan = self.executor.program().plan(which).clone();
        if plan.find("partners").is_some() {
            let partners: Vec<i32> = (0..batch).map(|b| class(b, 78)).collect();
            let mix: Vec<f32> = (0..batch).map(|b| draws(b, 79).uniform() as f32).collect();
            self.executor.upload_i32(which, "partners", &partners)?;
            self.executor.upload_f32(which, "mix", &mix)?;
        }
        if let Some(images) = plan.find("images").filter(|v| plan.inputs.contains(v)) {
            let size = plan.values[images].ty.shape.count() / batch;
            let mut values = Vec::with_capacity(batch * size);
            for b in 0..batch {
                let mut random = draws(b, 77);
                values.extend((0..size).map(|_| random.normal() as f32));
            }
            self.executor.upload_f32(which, "images", &values)?;
        }
        Ok(())
    }

    pub fn run(&mut self, which: Which) -> Result<(), CudaError> {
        self.executor.run(which, &self.header)
    }

    /// One pass forward and backward: statistics and gradients, without the loss scale.
    pub fn gradients(&mut self) -> Result<Tensors, CudaError> {
        self.fill(Which::Last)?;
        self.run(Which::Last)?;
        let scale = self.scale;
        let mut tensors = self.tensors(|s| matches!(s.role, Role::Gradient | Role::Statistic));
        for (_, values) in tensors.iter_mut().filter(|(name, _)| name != "stats") {
            values.iter_mut().for_each(|x| *x /= scale);
        }
        Ok(tensors)
    }

    pub fn state(&mut self, id: StateId) -> Vec<f32> {
        let count = self.executor.program().states[id.index()].ty.shape.count();
        let mut values = vec![0.0; count];
        self.executor.state_f32(id, &mut values).unwrap();
        values
    }

    pub fn tensors(&mut self, which: impl Fn(&State) -> bool) -> Tensors {
        let states = self.executor.program().states.clone();
        let mut tensors: Tensors = vec![];
        for (i, state) in states.iter().enumerate().filter(|(_, s)| which(s)) {
            let values = self.state(StateId(i as u32));
            tensors.push((state.name.clone(), values.into_iter().map(f64::from).collect()));
        }
        tensors.sort_by(|a, b| a.0.cmp(&b.0));
        tensors
    }
}

/// What an update writes and both devices have.
fn kept(state: &State) -> bool {
    matches!(state.role, Role::Parameter(_) | Role::Moment)
}

const BATCH: usize = 4;

fn model(vit: &Vit, dtype: DType) -> Model {
    with_drawn_head(vit.build(BATCH, smoothed(), dtype).unwrap())
}

/// Three steps of two micro-batches each.
fn steps(mut micro: impl FnMut(u64, u64, Which)) {
    for step in 0..3 {
        micro(step, 0, Which::First);
        micro(step, 1, Which::Last);
    }
}

pub fn trained_on_cpu(vit: &Vit, optimizer: Optimizer) -> Tensors {
    let target = cpu::Target { threads: 2 };
    let settings = Settings { optimizer, accumulates: true, ..settings(&target) };
    let mut rig = Rig::<f64>::new(common::compiled_with(model(vit, DType::F64), &settings), 2);
    rig.header.nominal = 2.0 * BATCH as f64;
    steps(|step, micro, which| {
        (rig.header.step, rig.header.first_sample) = (step, BATCH as u64 * micro);
        rig.fill(which);
        rig.run(which);
        if which == Which::Last {
            rig.run(Which::Update);
        }
    });
    rig.tensors(kept)
}

pub fn trained_on_gpu(vit: &Vit, optimizer: Optimizer, arithmetic: Arithmetic) -> Tensors {
    let mut gpu = Gpu::accumulating(model(vit, DType::F32), arithmetic, optimizer, Recompute::None).unwrap();
    gpu.header.nominal = 2.0 * BATCH as f64;
    steps(|step, micro, which| {
        (gpu.header.step, gpu.header.first_sample) = (step, BATCH as u64 * micro);
        gpu.fill(which).unwrap();
        gpu.run(which).unwrap();
        if which == Which::Last {
            gpu.run(Which::Update).unwrap();
        }
    });
    gpu.tensors(kept)
}

/// Ten batches, over and over.
fn header(header: Header, step: u64, batch: usize) -> Header {
    Header { step, first_sample: (step % 10) * batch as u64, learning_rate: 2e-4, ..header }
}

pub fn losses_on_cpu<T: cpu::Float>(vit: &Vit, batch: usize, count: u64) -> Vec<f64> {
    let model = vit.build(batch, smoothed(), common::dtype::<T>()).unwrap();
    let mut rig = Rig::<T>::new(common::compiled_model(model, Recompute::None, adamw(), 8), 8);
    let mut losses = vec![];
    for step in 0..count {
        rig.header = header(rig.header, step, batch);
        rig.step();
        losses.push(rig.state("stats").unwrap()[0] / batch as f64);
    }
    losses
}

pub fn losses_on_gpu(vit: &Vit, batch: usize, count: u64, arithmetic: Arithmetic) -> Vec<f64> {
    let model = vit.build(batch, smoothed(), DType::F32).unwrap();
    let mut gpu = Gpu::new(model, arithmetic, adamw(), Recompute::None).unwrap();
    let stats = gpu.executor.find_state("stats").unwrap();
    let mut losses = vec![];
    for step in 0..count {
        gpu.header = header(gpu.header, step, batch);
        gpu.fill(Which::Last).unwrap();
        gpu.run(Which::Last).unwrap();
        gpu.run(Which::Update).unwrap();
        losses.push(f64::from(gpu.state(stats)[0]) / batch as f64);
    }
    losses
}
