//! A rank that trains, on the CPU or on a GPU, on the same drawn samples.

use super::common::{self, CLASSES, Rig, Tensors};
use comm::Communicator;
use cuda::{Executor, GpuComm, Options};
use graph::random::Sequence;
use graph::{Header, Program, Role, State, StateId};
use std::ops::Range;

/// What a rank does in a run: a plan.
pub use graph::run::Which as Part;

pub trait Rank {
    /// Loads the samples from `header.first_sample` on, and runs a plan with them.
    fn run(&mut self, part: Part, header: &Header);

    fn program(&self) -> &Program;

    /// Elements of a state that this rank holds, and their values.
    fn held(&mut self, id: StateId) -> (Range<usize>, Vec<f64>);

    /// An output of the plan that ran last.
    fn output(&mut self, part: Part, name: &str) -> Vec<f64>;

    /// Bytes of arena and states.
    fn allocated(&self) -> (usize, usize);

    fn tensors(&mut self, which: &dyn Fn(&State) -> bool) -> Tensors;

    /// Gradients and statistics.
    fn sums(&mut self) -> Tensors {
        self.tensors(&|state| matches!(state.role, Role::Gradient | Role::Statistic))
    }
}

pub struct OnCpu(Rig<f32>);

impl OnCpu {
    pub fn new(program: Program, comm: Option<Communicator>) -> Self {
        OnCpu(Rig::among(program, 1, comm))
    }
}

impl Rank for OnCpu {
    fn run(&mut self, part: Part, header: &Header) {
        self.0.header = *header;
        if part != Part::Update {
            self.0.fill(part);
        }
        self.0.run(part);
    }

    fn program(&self) -> &Program {
        self.0.executor.program()
    }

    fn held(&mut self, id: StateId) -> (Range<usize>, Vec<f64>) {
        let values = self.0.executor.state(id).iter().map(|x| f64::from(*x)).collect();
        (self.0.executor.held(id), values)
    }

    fn output(&mut self, part: Part, name: &str) -> Vec<f64> {
        self.0.executor.output(part, name).unwrap().iter().map(|x| f64::from(*x)).collect()
    }

    fn allocated(&self) -> (usize, usize) {
        self.0.executor.allocated()
    }

    fn tensors(&mut self, which: &dyn Fn(&State) -> bool) -> Tensors {
        self.0.tensors(which)
    }
}

pub struct OnGpu {
    pub executor: Executor,
    batch: usize,
}

impl OnGpu {
    /// All on one GPU; ranks exchange through the host.
    pub fn new(program: Program, comm: Option<Communicator>) -> Self {
        Self::over(program, comm.map(GpuComm::Host))
    }

    /// All on one GPU, with this communication.
    pub fn over(program: Program, comm: Option<GpuComm>) -> Self {
        let labels = program.last.find("labels").unwrap();
        let batch = program.last.values[labels].ty.shape.count();
        let options = Options { device: 0, seed: common::SEED, deterministic: true, tf32: false, comm };
        OnGpu { executor: Executor::new(program, options).unwrap(), batch }
    }

    /// The batch of `Rig::fill`.
    pub fn fill(&mut self, which: cuda::Which, first: u64) {
        let draws = |b: usize| Sequence::new(first + b as u64, 77);
        let labels: Vec<i32> =
            (0..self.batch).map(|b| (draws(b).uniform() * CLASSES as f64) as i32).collect();
        let plan = self.executor.program().plan(which).clone();
        let images = plan.find("images").unwrap();
        let size = plan.values[images].ty.shape.count() / self.batch;
        let mut values = Vec::with_capacity(self.batch * size);
        for b in 0..self.batch {
            let mut random = draws(b);
            values.extend((0..size).map(|_| random.normal() as f32));
        }
        self.executor.upload_i32(which, "labels", &labels).unwrap();
        self.executor.upload_f32(which, "weights", &vec![1.0; self.batch]).unwrap();
        self.executor.upload_f32(which, "images", &values).unwrap();
    }
}

impl Rank for OnGpu {
    fn run(&mut self, part: Part, header: &Header) {
        if part != Part::Update {
            self.fill(part, header.first_sample);
        }
        self.executor.run(part, header).unwrap();
    }

    fn program(&self) -> &Program {
        self.executor.program()
    }

    fn held(&mut self, id: StateId) -> (Range<usize>, Vec<f64>) {
        let held = self.executor.held(id);
        let mut values = vec![0.0; held.len()];
        self.executor.state_f32(id, &mut values).unwrap();
        (held, values.into_iter().map(f64::from).collect())
    }

    fn output(&mut self, part: Part, name: &str) -> Vec<f64> {
        self.executor.read_f32(part, name).unwrap().unwrap().into_iter().map(f64::from).collect()
    }

    fn allocated(&self) -> (usize, usize) {
        let memory = self.executor.memory();
        (memory.arena, memory.states)
    }

    fn tensors(&mut self, which: &dyn Fn(&State) -> bool) -> Tensors {
        let states = self.executor.program().states.clone();
        let mut tensors: Tensors = vec![];
        for (i, state) in states.iter().enumerate().filter(|(_, s)| which(s)) {
            let mut values = vec![0.0; state.ty.shape.count()];
            self.executor.state_f32(StateId(i as u32), &mut values).unwrap();
            tensors.push((state.name.clone(), values.into_iter().map(f64::from).collect()));
        }
        tensors.sort_by(|a, b| a.0.cmp(&b.0));
        tensors
    }
}
