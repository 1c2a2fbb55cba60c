//! What options of `vitesse train` come to on this machine.

use crate::{args, say};
use config::sets::Opened;
use config::{Device, Part, Precision};
use config::{Facts as DataFacts, Raw, Resolved};
use cpu::ceilings;
use devices::program::program;
use std::collections::HashMap;
use std::path::Path;
use study::grid::{Facts, Resolve};

/// Of the machine's ceiling for products, what a step reaches; what starting and ending a run takes.
const REACHED: f64 = 0.75;
const STARTING: f64 = 0.5;

pub struct Here {
    gpus: usize,
    /// What was found in data sets that were opened before.
    found: HashMap<String, Option<DataFacts>>,
    /// Operations a second of one core.
    flops: Option<f64>,
    only_plan: bool,
    /// What running the study would need beside.
    pub missing: Vec<String>,
}

impl Here {
    /// `only_plan`: data that isn't there may be planned for, if it is the same everywhere.
    pub fn new(only_plan: bool) -> Self {
        Here { gpus: gpus().len(), found: HashMap::new(), flops: None, only_plan, missing: vec![] }
    }

    /// What is known of the data: by opening it, or for a plan by what was published of it.
    fn found(&mut self, raw: &Raw) -> anyhow::Result<Option<DataFacts>> {
        let error = match Opened::of(raw) {
            Ok(opened) => return Ok(opened.found()),
            Err(error) => error,
        };
        let source = raw.source()?;
        let there = source.path().is_some_and(Path::exists);
        match source.published().filter(|_| self.only_plan && !there) {
            Some(facts) => {
                let get = format!(
                    "`vitesse data get {} {}`",
                    source.set(),
                    source.path().unwrap_or(Path::new("DIR")).display()
                );
                let how = if source.set().parse::<data::Downloadable>().is_ok() {
                    format!("; {get} downloads it")
                } else {
                    String::new()
                };
                self.missing.push(format!(
                    "--data {source} is not there: counts are those of the published set{how}"
                ));
                Ok(Some(facts))
            }
            None => Err(error.into()),
        }
    }

    fn resolved(&mut self, options: &[String], ranks: usize) -> anyhow::Result<Resolved> {
        let command: Vec<String> =
            ["vitesse", "train"].map(str::to_string).into_iter().chain(options.iter().cloned()).collect();
        let raw: Raw = args::typed_for_train(&command)?.with_files()?;
        // As runs of a study are started.
        let raw = Raw { eval_images: raw.eval_images.or(Some(Part::All)), ..raw };
        let name = format!("{:?} {:?} {:?}", raw.source()?, raw.channels, raw.skip_bad_images);
        let found = match self.found.get(&name) {
            Some(found) => *found,
            None => {
                let found = self.found(&raw)?;
                self.found.insert(name, found);
                found
            }
        };
        let facts = found.map_or_else(|| DataFacts::synthetic(&raw), Ok)?;
        Ok(raw.resolve(&facts, ranks)?)
    }

    /// Seconds of a run, by the operations of its steps; none for GPUs, whose speed is not known here. A model that can't be built for
    /// such a batch is refused.
    fn estimate(&mut self, run: &Resolved) -> anyhow::Result<Option<f64>> {
        if run.device != Device::Cpu {
            return Ok(None);
        }
        // Which ranks share a host is known when they start, and changes no operation.
        let alike = Resolved { shard_group: None, ..run.clone() };
        let program = match run.precision {
            Precision::Fp64 => program::<f64>(&alike, run.batch),
            _ => program::<f32>(&alike, run.batch),
        };
        let program = program?;
        let flops = match self.flops {
            Some(flops) => flops,
            None => *self.flops.insert(ceilings::measure(1)?.flops),
        };
        let shared = (cores() as f64 / (run.world * run.threads) as f64).min(1.0);
        let halved = if run.precision == Precision::Fp64 { 0.5 } else { 1.0 };
        let rate = flops * REACHED * run.threads as f64 * shared * halved;
        let steps = run.steps as f64 * run.accumulate as f64 * program.last.cost().flops;
        let batches = run.data.eval_images() as f64 / (run.batch * run.world) as f64;
        let evaluating = run.evaluations() as f64 * batches * program.eval.cost().flops;
        Ok(Some(STARTING + (steps + evaluating) / rate))
    }
}

impl Resolve for Here {
    fn facts(&mut self, options: &[String], ranks: usize) -> Result<Facts, String> {
        let run = self.resolved(options, ranks).map_err(|error| say::one_line(&error))?;
        Ok(Facts {
            task: run.task().noun().to_string(),
            data: run.data.source.to_string(),
            image_size: run.network.image(),
            loader_threads: run.data.workers,
            batch_per_rank: run.batch,
            accumulation: run.accumulate,
            model: run.model.clone(),
            optimizer: run.optimizer.name().to_string(),
            precision: run.precision.to_string(),
            device: run.device.to_string(),
            images_of_set: run.data.facts.train_images as u64,
            images_per_epoch: run.data.train_images() as u64,
            epochs: run.epochs,
            steps: run.steps,
            estimate: self.estimate(&run).map_err(|error| say::one_line(&error))?,
        })
    }

    fn cores(&self) -> usize {
        cores()
    }

    fn gpus(&self) -> usize {
        self.gpus
    }
}

pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

pub fn gpus() -> Vec<String> {
    cuda::devices().map_or_else(|_| vec![], |gpus| gpus.into_iter().map(|gpu| gpu.name).collect())
}
