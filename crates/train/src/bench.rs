//! Benchmarks of a training step on random data: the whole step, and its matrix products alone.

use crate::config::Resolved;
use crate::error::TrainError;
use crate::session::program;
use comm::Communicator;
use cpu::{Executor, Options, StepTime, Which};
use graph::Header;
use graph::random::Sequence;
use std::time::Instant;

/// What ranks do together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    Step,
    /// A step without the account of its time.
    Untimed,
    Products,
    End,
}

impl Turn {
    const ALL: [Turn; 4] = [Turn::Step, Turn::Untimed, Turn::Products, Turn::End];
}

/// One rank of a benchmark.
pub struct StepBench {
    world: Communicator,
    executor: Executor<f32>,
    header: Header,
    images: Vec<f32>,
    classes: usize,
}

impl StepBench {
    pub fn new(run: &Resolved, world: Communicator) -> Result<Self, TrainError> {
        let options = Options { threads: run.threads, seed: run.seed, comm: Some(world.clone()) };
        let executor = Executor::new(program::<f32>(run, run.batch)?, options)?;
        let mut random = Sequence::new(run.seed, u32::MAX);
        let count = run.batch * run.vit.channels * run.vit.image * run.vit.image;
        let images = (0..count).map(|_| random.normal() as f32).collect();
        let (seed, nominal) = (run.seed, run.nominal());
        let header =
            Header { seed, step: 0, first_sample: 0, learning_rate: 1e-4, nominal, accumulate: false };
        Ok(StepBench { world, executor, header, images, classes: run.vit.classes })
    }

    pub fn executor(&self) -> &Executor<f32> {
        &self.executor
    }

    /// The plan may reuse the memory of its inputs, so they are filled before every step.
    fn fill(&mut self) {
        if let Some(batch) = self.executor.batch(Which::Last) {
            batch.images.copy_from_slice(&self.images);
            batch.labels.iter_mut().enumerate().for_each(|(i, label)| *label = (i % self.classes) as i32);
            batch.weights.fill(1.0);
        }
    }

    /// Seconds of one forward, backward, exchange and update.
    fn step(&mut self) -> Result<f64, TrainError> {
        self.fill();
        let start = Instant::now();
        self.executor.run(Which::Last, &self.header)?;
        self.executor.run(Which::Update, &self.header)?;
        self.header.step += 1;
        Ok(start.elapsed().as_secs_f64())
    }

    /// A turn of all ranks; the seconds it took here.
    pub fn take(&mut self, turn: Turn) -> Result<f64, TrainError> {
        match turn {
            Turn::Step => self.step(),
            Turn::Untimed => {
                self.executor.set_timing(false);
                let seconds = self.step();
                self.executor.set_timing(true);
                seconds
            }
            Turn::Products => Ok(self.products()),
            Turn::End => Ok(0.0),
        }
    }

    /// What the first rank wants done next, on every rank.
    pub fn told(&self, mine: Turn) -> Result<Turn, TrainError> {
        let mut turn = [mine as u8];
        self.world.broadcast(self.world.name("the next turn"), 0, &mut turn)?;
        Ok(Turn::ALL[usize::from(turn[0]).min(Turn::ALL.len() - 1)])
    }

    /// Seconds of the step's matrix products alone.
    fn products(&mut self) -> f64 {
        self.executor.run_products(Which::Last, &self.header)
    }

    pub fn reset_times(&mut self) {
        self.executor.reset_times();
    }

    pub fn times(&self) -> Vec<StepTime> {
        self.executor.training_times()
    }
}
