//! `vitesse train`.

use crate::args::TrainArgs;
use crate::table::{self, count, megabytes};
use serde_json::json;
use train::run::{Events, Summary};
use train::session::{Score, StepResult};
use train::{Resolved, Session, session};

pub fn run(args: TrainArgs) -> anyhow::Result<()> {
    let as_json = args.json;
    let raw = args.raw()?;
    let run = raw.resolve(&session::facts(&raw)?, 1)?;
    let breakdown = run.breakdown;
    let mut lines = Lines::new(&run, as_json);
    let summary = train::run::train(run, &mut lines)?;
    if as_json {
        println!("{}", summary_json(&summary));
    } else {
        print_summary(&summary, breakdown);
    }
    Ok(())
}

/// Plain lines, a few a run.
struct Lines {
    quiet: bool,
    steps: u64,
    every: u64,
    images: f64,
    seconds: f64,
}

impl Lines {
    fn new(run: &Resolved, quiet: bool) -> Self {
        Lines { quiet, steps: run.steps, every: run.log_every, images: 0.0, seconds: 0.0 }
    }
}

impl Events for Lines {
    fn started(&mut self, session: &Session) {
        if self.quiet {
            return;
        }
        let (run, program) = (session.resolved(), session.executor().program());
        let parameters = program.states.iter().filter(|s| s.is_parameter()).map(|s| s.ty.shape.count()).sum();
        let cost = program.last.cost();
        println!(
            "{} · {} parameters · synthetic set of {} images, {} px, {} classes",
            run.model,
            count(parameters),
            count(run.data.train_images()),
            run.vit.image,
            run.vit.classes
        );
        println!(
            "batch {} × {} · {} steps · {} threads · {:?} · {:.1} GFLOP a micro-step · memory {} + {}",
            run.batch,
            run.accumulate,
            count(run.steps as usize),
            run.threads,
            cpu::kernels::level(),
            cost.flops / 1e9,
            megabytes(program.arena()),
            megabytes(program.state_bytes()),
        );
    }

    fn stepped(&mut self, step: u64, epoch: u64, result: &StepResult, images_per_second: f64) {
        self.images += result.score.samples;
        self.seconds += result.score.samples / images_per_second;
        if self.quiet || !(step + 1).is_multiple_of(self.every) {
            return;
        }
        println!(
            "epoch {} · step {}/{} · loss {:.4} · lr {:.2e} · {:.0} images/s",
            epoch + 1,
            step + 1,
            self.steps,
            result.score.loss,
            result.learning_rate,
            self.images / self.seconds
        );
        (self.images, self.seconds) = (0.0, 0.0);
    }

    fn evaluated(&mut self, _step: u64, epoch: u64, score: &Score) {
        if !self.quiet {
            println!(
                "epoch {} · held out: loss {:.4} · top-1 {:.2}% · top-5 {:.2}%",
                epoch + 1,
                score.loss,
                100.0 * score.top1,
                100.0 * score.top5
            );
        }
    }
}

fn print_summary(summary: &Summary, breakdown: bool) {
    println!();
    println!(
        "held-out accuracy {:.2}% · {:.0} images/s · {:.1} s of training, {:.1} s of evaluation",
        100.0 * summary.score.top1,
        summary.images_per_second(),
        summary.training_seconds,
        summary.evaluation_seconds
    );
    if let Some(path) = &summary.weights {
        println!("weights in {}", path.display());
    }
    if breakdown {
        println!("where the time went:");
        let rows = table::account(&summary.times, summary.training_seconds, summary.data_seconds);
        table::print_account(&rows, summary.training_seconds, None);
    }
}

fn summary_json(summary: &Summary) -> serde_json::Value {
    let rows = table::account(&summary.times, summary.training_seconds, summary.data_seconds);
    let time: serde_json::Map<_, _> = rows.into_iter().map(|r| (r.name, r.seconds.into())).collect();
    json!({
        "steps": summary.steps,
        "images": summary.images,
        "eval_loss": summary.score.loss,
        "eval_top1": summary.score.top1,
        "eval_top5": summary.score.top5,
        "images_per_second": summary.images_per_second(),
        "training_seconds": summary.training_seconds,
        "evaluation_seconds": summary.evaluation_seconds,
        "weights": summary.weights,
        "seconds": time,
    })
}
