//! A model bound to an executor and its data: one optimizer step, one evaluation.

use crate::checkpoint::{Checkpoint, Expected, Progress};
use crate::config::Resolved;
use crate::error::TrainError;
use crate::sets::Sets;
use crate::stored::weights_file;
use crate::tensors::Entry;
use crate::weights;
use cpu::{BadValue, Executor, Which};
use data::loader::in_order;
use data::{Dataset, LoadedBatch, Loader, LoaderSettings, Request, Sampler, Skipped};
use graph::{AVERAGE, DType, Header, Loss, Program, Role, Settings, State, compile, inference};
use models::names::{Tensor, Weights};
use std::sync::Arc;
use std::time::Instant;

/// Batches under way: enough that a slow image doesn't stop the step, few enough that memory stays small.
const DEPTH: usize = 4;

/// Loss and hits over some samples.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Score {
    pub loss: f64,
    pub top1: f64,
    pub top5: f64,
    pub samples: f64,
}

impl Score {
    /// From the sums that `cross_entropy` gives.
    fn of(sums: [f64; 4]) -> Self {
        let [loss, samples, top1, top5] = sums;
        Score { loss: loss / samples, top1: top1 / samples, top5: top5 / samples, samples }
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepResult {
    pub score: Score,
    pub learning_rate: f64,
    pub gradient_norm: f64,
    /// False if the gradient was not finite and nothing was changed.
    pub applied: bool,
}

pub struct Session {
    run: Resolved,
    executor: Executor<f32>,
    sets: Sets,
    /// Reads ahead for the steps from here on.
    ahead: Option<Ahead>,
    data_seconds: f64,
    skipped: Vec<Skipped>,
}

struct Ahead {
    next_step: u64,
    loader: Loader,
}

/// What `compile` puts into every program; no input can take it out.
fn planned<T>(part: Option<T>) -> T {
    part.unwrap_or_else(|| unreachable!("every program has a batch, logits, statistics and a control"))
}

/// Compiles the plans of a run.
pub fn program(run: &Resolved) -> Result<Program, TrainError> {
    let settings = Settings {
        optimizer: run.optimizer,
        max_grad_norm: run.clip,
        recompute: run.recompute,
        group: &|state| run.group(&state.name),
        ema: run.ema,
        scratch: &cpu::scratch(run.threads),
    };
    let loss = Loss { smoothing: run.label_smoothing, mixed: run.augmentation.mixes() };
    let model = run.vit.build(run.batch, loss, DType::F32)?;
    Ok(compile(model, &settings)?)
}

/// What a checkpoint keeps: all that the next step depends on.
fn lasts(state: &State) -> bool {
    !matches!(state.role, Role::Gradient | Role::Statistic)
}

impl Session {
    /// A run on the data it was resolved for; weights start as the model says, or as `--init` does.
    pub fn new(mut run: Resolved, sets: Sets) -> Result<Self, TrainError> {
        run.class_names = sets.train.class_names().to_vec();
        let executor = Executor::new(program(&run)?, run.threads, run.seed)?;
        let mut session =
            Session { run, executor, sets, ahead: None, data_seconds: 0.0, skipped: Vec::new() };
        // A continued run takes its weights from a checkpoint.
        if session.run.resume.is_none() {
            session.load_init()?;
        }
        Ok(session)
    }

    /// Starts from the weights of `--init`, if there are any.
    pub(crate) fn load_init(&mut self) -> Result<(), TrainError> {
        if let Some(path) = &self.run.init {
            let weights = weights::load_for(&weights_file(path)?, &self.run.vit, self.run.new_head)?;
            self.load_weights(&weights);
        }
        Ok(())
    }

    /// For judging weights only: no memory for gradients.
    pub fn for_evaluation(mut run: Resolved, sets: Sets, weights: &Weights) -> Result<Self, TrainError> {
        run.ema = None;
        let model = run.vit.build(run.batch, Loss::default(), DType::F32)?;
        let program = inference(model, &cpu::scratch(run.threads))?;
        let executor = Executor::new(program, run.threads, run.seed)?;
        let mut session =
            Session { run, executor, sets, ahead: None, data_seconds: 0.0, skipped: Vec::new() };
        session.load_weights(weights);
        Ok(session)
    }

    pub fn resolved(&self) -> &Resolved {
        &self.run
    }

    pub fn executor(&self) -> &Executor<f32> {
        &self.executor
    }

    /// Seconds that training waited for its batches and copied them.
    pub fn data_seconds(&self) -> f64 {
        self.data_seconds
    }

    /// Images that could not be read since the last call.
    pub fn take_skipped(&mut self) -> Vec<Skipped> {
        std::mem::take(&mut self.skipped)
    }

    /// One optimizer step over `accumulate` micro-batches.
    pub fn step(&mut self, step: u64) -> Result<StepResult, TrainError> {
        let mut ahead = match self.ahead.take().filter(|ahead| ahead.next_step == step) {
            Some(ahead) => ahead,
            None => Ahead { next_step: step, loader: self.training_loader(step, self.run.data.workers)? },
        };
        for micro in 0..self.run.accumulate {
            let (which, header) = self.micro(step, micro);
            let start = Instant::now();
            self.load(which, &mut ahead.loader)?;
            self.data_seconds += start.elapsed().as_secs_f64();
            self.executor.run(which, &header);
        }
        ahead.next_step += 1;
        self.ahead = Some(ahead);
        let header = self.header(step);
        self.executor.run(Which::Update, &header);
        let control = planned(self.executor.output(Which::Update, "control"));
        let (applied, gradient_norm) = (control[1] != 0.0, f64::from(control[2]));
        let (score, learning_rate) = (Score::of(self.stats()), header.learning_rate);
        Ok(StepResult { score, learning_rate, gradient_norm, applied })
    }

    /// Goes once more through a step that was just skipped, whose parameters are still those it started with, and names
    /// the first value that is not finite. There is none if only the sum of the gradients' squares overflowed.
    pub fn first_bad_value(&mut self, step: u64) -> Result<Option<BadValue>, TrainError> {
        let mut loader = self.training_loader(step, 0)?;
        for micro in 0..self.run.accumulate {
            let (which, header) = self.micro(step, micro);
            self.load(which, &mut loader)?;
            let bad = self.executor.run_checked(which, &header);
            if bad.is_some() {
                return Ok(bad);
            }
        }
        Ok(None)
    }

    fn header(&self, step: u64) -> Header {
        let (seed, learning_rate) = (self.run.seed, self.run.schedule.at(step));
        let nominal = self.run.global_batch() as f64;
        Header { seed, step, first_sample: 0, learning_rate, nominal, accumulate: false }
    }

    /// The plan of a micro-step, and what it is told.
    fn micro(&self, step: u64, micro: usize) -> (Which, Header) {
        let which = if micro + 1 == self.run.accumulate { Which::Last } else { Which::Micro };
        let first_sample = (micro * self.run.batch) as u64;
        (which, Header { first_sample, accumulate: micro > 0, ..self.header(step) })
    }

    /// Reads the micro-batches of all steps from `step` on.
    fn training_loader(&self, step: u64, workers: usize) -> Result<Loader, TrainError> {
        let (set, transform) = (Arc::clone(&self.sets.train), self.run.augmentation.training(&self.run.vit));
        let sampler = Sampler { len: set.len(), seed: self.run.seed, shuffle: true };
        Ok(Loader::new(set, transform, self.loading(sampler, workers), requests(&self.run, step))?)
    }

    fn loading(&self, sampler: Sampler, workers: usize) -> LoaderSettings {
        let (batch, skip_bad) = (self.run.batch, self.run.data.skip_bad_images);
        LoaderSettings { sampler, batch, workers, depth: DEPTH, skip_bad }
    }

    /// Copies the next batch into a plan. A plan may reuse the memory of its inputs, so this is done before every run.
    fn load(&mut self, which: Which, loader: &mut Loader) -> Result<(), TrainError> {
        let Some(loaded) = loader.next_batch()? else {
            unreachable!("the loader is asked for as many batches as it was told of")
        };
        self.skipped.extend_from_slice(&loaded.skipped);
        fill(&mut self.executor, which, loaded);
        Ok(())
    }

    fn stats(&self) -> [f64; 4] {
        let stats = self.executor.state(planned(self.executor.find_state("stats")));
        std::array::from_fn(|i| f64::from(stats[i]))
    }

    /// Scores the held-out set; `each` sees every batch and its logits, those of padding left out.
    pub fn evaluate(&mut self, mut each: impl FnMut(&LoadedBatch, &[f32])) -> Result<Score, TrainError> {
        let set = Arc::clone(&self.sets.test);
        let transform = self.run.augmentation.evaluation(&self.run.vit);
        let sampler = Sampler { len: set.len(), seed: 0, shuffle: false };
        let settings = self.loading(sampler, self.run.data.workers);
        let requests = in_order(set.len(), self.run.batch);
        let mut loader = Loader::new(set, transform, settings, requests)?;
        let nominal = self.run.batch as f64;
        let header =
            Header { seed: 0, step: 0, first_sample: 0, learning_rate: 0.0, nominal, accumulate: false };
        let mut sums = [0.0; 4];
        while let Some(batch) = loader.next_batch()? {
            self.skipped.extend_from_slice(&batch.skipped);
            fill(&mut self.executor, Which::Eval, batch);
            self.executor.run(Which::Eval, &header);
            let stats = planned(self.executor.output(Which::Eval, "loss.stats"));
            sums.iter_mut().zip(stats).for_each(|(sum, x)| *sum += f64::from(*x));
            let logits = planned(self.executor.output(Which::Eval, "head"));
            each(batch, &logits[..batch.request.count * self.run.vit.classes]);
        }
        Ok(Score::of(sums))
    }

    pub fn test_set(&self) -> &dyn Dataset {
        &*self.sets.test
    }

    /// The parameters under their canonical names; with averages, those, since they are what is evaluated.
    pub fn weights(&self) -> Weights {
        let values = |name: &str| self.executor.find_state(name).map(|id| self.executor.state(id).to_vec());
        let tensor = |state: &State| {
            let data = values(&format!("{}{AVERAGE}", state.name)).or_else(|| values(&state.name));
            (state.name.clone(), Tensor { shape: state.ty.shape.0.clone(), data: data.unwrap_or_default() })
        };
        let parameters = self.executor.program().states.iter().filter(|s| s.is_parameter());
        parameters.map(tensor).collect()
    }

    /// Sets the parameters that `weights` has; they were checked against this model when they were read.
    fn load_weights(&mut self, weights: &Weights) {
        for (name, tensor) in weights {
            if let Some(id) = self.executor.find_state(name) {
                self.executor.state_mut(id).copy_from_slice(&tensor.data);
            }
        }
        self.executor.reset_averages();
    }

    /// What a checkpoint keeps, where it lies.
    pub fn lasting(&self) -> Vec<Entry<'_>> {
        let states = self.executor.program().states.iter().filter(|state| lasts(state));
        states
            .map(|state| Entry {
                name: &state.name,
                shape: &state.ty.shape.0,
                values: self.executor.find_state(&state.name).map_or(&[][..], |id| self.executor.state(id)),
            })
            .collect()
    }

    /// Goes on where a checkpoint was made.
    pub fn restore(&mut self, checkpoint: Checkpoint) -> Result<Progress, TrainError> {
        let states: Vec<State> =
            self.executor.program().states.iter().filter(|state| lasts(state)).cloned().collect();
        let expected: Vec<Expected<'_>> =
            states.iter().map(|s| Expected { name: &s.name, shape: &s.ty.shape.0 }).collect();
        self.ahead = None;
        checkpoint.restore(&expected, |name, values| {
            if let Some(id) = self.executor.find_state(name) {
                self.executor.state_mut(id).copy_from_slice(values);
            }
        })
    }
}

/// The micro-batches of every step from `step` to the last, one after the other; of `step` itself in any case.
fn requests(run: &Resolved, step: u64) -> impl Iterator<Item = Request> + Send + 'static {
    let (batch, accumulate, global) = (run.batch, run.accumulate, run.global_batch());
    let (per_epoch, images) = (run.steps_per_epoch, run.data.train_images());
    (step..run.steps.max(step + 1)).flat_map(move |step| {
        let (epoch, in_epoch) = (step / per_epoch, (step % per_epoch) as usize);
        (0..accumulate).map(move |micro| {
            let first = (in_epoch * global + micro * batch).min(images);
            Request { epoch, first, count: batch.min(images - first) }
        })
    })
}

fn fill(executor: &mut Executor<f32>, which: Which, loaded: &LoadedBatch) {
    let batch = planned(executor.batch(which));
    batch.images.copy_from_slice(&loaded.images);
    batch.labels.copy_from_slice(&loaded.labels);
    batch.weights.copy_from_slice(&loaded.weights);
    if let Some(partners) = batch.partners {
        partners.copy_from_slice(&loaded.partners);
    }
    if let Some(mix) = batch.mix {
        mix.copy_from_slice(&loaded.mix);
    }
}
