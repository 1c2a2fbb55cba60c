//! A model bound to an executor and its data: one optimizer step, one evaluation.

use crate::config::{Facts, Geometry, Raw, Resolved, Source};
use crate::error::TrainError;
use crate::weights;
use cpu::{Executor, Which};
use data::{Dataset, Filler, Sampler, Split, Synthetic};
use graph::{DType, Header, Program, Settings, State, compile};
use models::names::{Tensor, Weights};
use std::time::Instant;

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
    train_set: Synthetic,
    test_set: Synthetic,
    sampler: Sampler,
    filler: Filler,
    indices: Vec<usize>,
    data_seconds: f64,
}

/// Opens the data that was asked for, to say what it holds.
pub fn facts(raw: &Raw) -> Result<Facts, TrainError> {
    match raw.source()? {
        Source::Synthetic => Facts::synthetic(raw),
        other => Err(TrainError::setting("data", other, "not connected yet")),
    }
}

/// Settings that resolve but that nothing here carries out yet: refused rather than ignored.
fn connected(run: &Resolved) -> Result<(), TrainError> {
    let refuse = |flag, value: String| Err(TrainError::setting(flag, value, "not connected yet"));
    let plain = vec![0.5; run.vit.channels];
    let (augmentation, groups) = (&run.augmentation, &run.groups);
    let normalisation = [&augmentation.mean, &augmentation.std];
    match run {
        _ if run.data.source != Source::Synthetic => refuse("data", run.data.source.to_string()),
        _ if run.world != 1 => refuse("ranks", run.world.to_string()),
        _ if !augmentation.is_none() => refuse("augment", String::new()),
        _ if normalisation != [&plain; 2] => refuse("mean", String::new()),
        _ if augmentation.eval != Geometry::Resize => refuse("eval-resize", String::new()),
        _ if !groups.lr_scale.is_empty() => refuse("lr-scale", groups.lr_scale[0].to_string()),
        Resolved { ema: Some(decay), .. } => refuse("ema", decay.to_string()),
        Resolved { resume: Some(folder), .. } => refuse("resume", folder.display().to_string()),
        Resolved { new_head: true, .. } => refuse("new-head", String::new()),
        _ if run.checkpoint_every != run.steps_per_epoch => {
            refuse("checkpoint-every", run.checkpoint_every.to_string())
        }
        _ => match groups.layer_decay {
            Some(decay) => refuse("layer-decay", decay.to_string()),
            None => Ok(()),
        },
    }
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
        decays: &|state| run.group(&state.name).decays,
        scratch: &cpu::scratch(run.threads),
    };
    let model = run.vit.build(run.batch, run.label_smoothing, DType::F32)?;
    Ok(compile(model, &settings)?)
}

impl Session {
    pub fn new(run: Resolved) -> Result<Self, TrainError> {
        connected(&run)?;
        let executor = Executor::new(program(&run)?, run.threads, run.seed)?;
        let train_set = Synthetic::new(run.synthetic(Split::Train))?;
        let test_set = Synthetic::new(run.synthetic(Split::Test))?;
        let sampler = Sampler { len: train_set.len(), seed: run.seed, shuffle: true };
        let filler = Filler::new(run.vit.image);
        let indices = Vec::with_capacity(run.batch);
        let data_seconds = 0.0;
        let mut session =
            Session { run, executor, train_set, test_set, sampler, filler, indices, data_seconds };
        if let Some(path) = &session.run.init {
            let weights = weights::load_for(path, &session.run.vit)?;
            session.load(&weights);
        }
        Ok(session)
    }

    pub fn resolved(&self) -> &Resolved {
        &self.run
    }

    pub fn executor(&self) -> &Executor<f32> {
        &self.executor
    }

    /// Seconds spent on filling training batches so far.
    pub fn data_seconds(&self) -> f64 {
        self.data_seconds
    }

    /// One optimizer step over `accumulate` micro-batches.
    pub fn step(&mut self, step: u64) -> Result<StepResult, TrainError> {
        let (batch, accumulate) = (self.run.batch, self.run.accumulate);
        let learning_rate = self.run.schedule.at(step);
        let nominal = self.run.global_batch() as f64;
        let header =
            Header { seed: self.run.seed, step, first_sample: 0, learning_rate, nominal, accumulate: false };
        for micro in 0..accumulate {
            let which = if micro + 1 == accumulate { Which::Last } else { Which::Micro };
            let first = micro * batch;
            self.load_batch(which, step, first)?;
            let header = Header { first_sample: first as u64, accumulate: micro > 0, ..header };
            self.executor.run(which, &header);
        }
        self.executor.run(Which::Update, &header);
        let control = planned(self.executor.output(Which::Update, "control"));
        let (applied, gradient_norm) = (control[1] != 0.0, f64::from(control[2]));
        let score = Score::of(self.stats());
        Ok(StepResult { score, learning_rate, gradient_norm, applied })
    }

    /// Fills a training plan with samples `first`.. of the step; a short last batch is padded with weight 0.
    fn load_batch(&mut self, which: Which, step: u64, first: usize) -> Result<(), TrainError> {
        let start = Instant::now();
        let (epoch, in_epoch) = (step / self.run.steps_per_epoch, step % self.run.steps_per_epoch);
        let from = (in_epoch as usize * self.run.global_batch() + first).min(self.sampler.len);
        let to = (from + self.run.batch).min(self.sampler.len);
        self.indices.clear();
        self.indices.extend((from..to).map(|position| self.sampler.index(epoch, position)));
        let result = self.fill(which, true);
        self.data_seconds += start.elapsed().as_secs_f64();
        result
    }

    fn fill(&mut self, which: Which, training: bool) -> Result<(), TrainError> {
        let set: &dyn Dataset = if training { &self.train_set } else { &self.test_set };
        let batch = planned(self.executor.batch(which));
        let (images, labels, weights) = (batch.images, batch.labels, batch.weights);
        Ok(self.filler.fill(set, &self.indices, self.run.batch, images, labels, weights)?)
    }

    fn stats(&self) -> [f64; 4] {
        let stats = self.executor.state(planned(self.executor.find_state("stats")));
        std::array::from_fn(|i| f64::from(stats[i]))
    }

    /// Scores the held-out set; `each` sees the indices and logits of every batch.
    pub fn evaluate(&mut self, mut each: impl FnMut(&[usize], &[f32])) -> Result<Score, TrainError> {
        let header = Header {
            seed: 0,
            step: 0,
            first_sample: 0,
            learning_rate: 0.0,
            nominal: self.run.batch as f64,
            accumulate: false,
        };
        let mut sums = [0.0; 4];
        for from in (0..self.test_set.len()).step_by(self.run.batch) {
            let to = (from + self.run.batch).min(self.test_set.len());
            self.indices.clear();
            self.indices.extend(from..to);
            self.fill(Which::Eval, false)?;
            self.executor.run(Which::Eval, &header);
            let stats = planned(self.executor.output(Which::Eval, "loss.stats"));
            sums.iter_mut().zip(stats).for_each(|(sum, x)| *sum += f64::from(*x));
            let logits = planned(self.executor.output(Which::Eval, "head"));
            each(&self.indices, &logits[..self.indices.len() * self.run.vit.classes]);
        }
        Ok(Score::of(sums))
    }

    pub fn test_set(&self) -> &dyn Dataset {
        &self.test_set
    }

    /// The parameters under their canonical names.
    pub fn weights(&self) -> Weights {
        let parameters = self.executor.program().states.iter().filter(|s| s.is_parameter());
        let tensor = |state: &State| {
            let data = self.executor.find_state(&state.name).map(|id| self.executor.state(id).to_vec());
            (state.name.clone(), Tensor { shape: state.ty.shape.0.clone(), data: data.unwrap_or_default() })
        };
        parameters.map(tensor).collect()
    }

    /// Sets the parameters; `weights` were checked against this model when they were read.
    fn load(&mut self, weights: &Weights) {
        for (name, tensor) in weights {
            if let Some(id) = self.executor.find_state(name) {
                self.executor.state_mut(id).copy_from_slice(&tensor.data);
            }
        }
    }
}
