//! Benchmarks of a training step on random data: the whole step, and its matrix products alone.

use crate::config::Resolved;
use crate::error::TrainError;
use crate::session::program;
use cpu::{Executor, StepTime, Which};
use graph::Header;
use graph::random::Sequence;
use std::time::Instant;

pub struct StepBench {
    executor: Executor<f32>,
    header: Header,
    images: Vec<f32>,
    classes: usize,
}

impl StepBench {
    pub fn new(run: &Resolved) -> Result<Self, TrainError> {
        let executor = Executor::new(program(run)?, run.threads, run.seed)?;
        let mut random = Sequence::new(run.seed, u32::MAX);
        let count = run.batch * run.vit.channels * run.vit.image * run.vit.image;
        let images = (0..count).map(|_| random.normal() as f32).collect();
        let (seed, nominal) = (run.seed, run.batch as f64);
        let header =
            Header { seed, step: 0, first_sample: 0, learning_rate: 1e-4, nominal, accumulate: false };
        Ok(StepBench { executor, header, images, classes: run.vit.classes })
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

    /// Seconds of one forward, backward and update.
    pub fn step(&mut self) -> f64 {
        self.fill();
        let start = Instant::now();
        self.executor.run(Which::Last, &self.header);
        self.executor.run(Which::Update, &self.header);
        self.header.step += 1;
        start.elapsed().as_secs_f64()
    }

    /// Seconds of the step's matrix products alone.
    pub fn products(&mut self) -> f64 {
        self.executor.run_products(Which::Last, &self.header)
    }

    pub fn reset_times(&mut self) {
        self.executor.reset_times();
    }

    pub fn times(&self) -> Vec<StepTime> {
        self.executor.training_times()
    }
}
