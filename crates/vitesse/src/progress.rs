//! What a run shows while it runs: a bar on a terminal, plain lines elsewhere.

use crate::signals::Signals;
use crate::table::{count, megabytes};
use data::Skipped;
use indicatif::{ProgressBar, ProgressStyle};
use std::io::IsTerminal;
use train::checkpoint;
use train::run::Events;
use train::session::{Score, StepResult};
use train::{Resolved, Session};

/// Broken images are named up to this many; a summary counts them all.
const NAMED: usize = 20;

pub struct Progress<'a> {
    quiet: bool,
    bar: Option<ProgressBar>,
    signals: &'a Signals,
    steps: u64,
    every: u64,
    /// Of the steps since the last line.
    images: f64,
    seconds: f64,
    skipped: usize,
}

impl<'a> Progress<'a> {
    pub fn new(run: &Resolved, quiet: bool, signals: &'a Signals) -> Self {
        let bar = (!quiet && std::io::stdout().is_terminal()).then(|| {
            let bar = ProgressBar::new(run.steps);
            let template = "{bar:16} {pos}/{len} · {msg} · {eta} left";
            bar.with_style(
                ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar()),
            )
        });
        let (steps, every) = (run.steps, run.log_every);
        Progress { quiet, bar, signals, steps, every, images: 0.0, seconds: 0.0, skipped: 0 }
    }

    fn line(&self, text: String) {
        match &self.bar {
            _ if self.quiet => {}
            Some(bar) => bar.suspend(|| println!("{text}")),
            None => println!("{text}"),
        }
    }
}

impl Drop for Progress<'_> {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

impl Events for Progress<'_> {
    fn started(&mut self, session: &Session, progress: &checkpoint::Progress) {
        let (run, program) = (session.resolved(), session.executor().program());
        let parameters = program.states.iter().filter(|s| s.is_parameter()).map(|s| s.ty.shape.count()).sum();
        let cost = program.last.cost();
        self.line(format!(
            "{} · {} parameters · {} · {} images, {} px, {} classes",
            run.model,
            count(parameters),
            run.data.source,
            count(run.data.train_images()),
            run.vit.image,
            run.vit.classes
        ));
        self.line(format!(
            "batch {} × {} · {} steps · {} threads · {:?} · {:.1} GFLOP a micro-step · memory {} + {}",
            run.batch,
            run.accumulate,
            count(run.steps as usize),
            run.threads,
            cpu::kernels::level(),
            cost.flops / 1e9,
            megabytes(program.arena()),
            megabytes(program.state_bytes()),
        ));
        if progress.step > 0 {
            self.line(format!("going on after step {}", progress.step));
        }
        if let Some(bar) = &self.bar {
            bar.set_position(progress.step);
            bar.reset_eta();
        }
    }

    fn stepped(&mut self, step: u64, epoch: u64, result: &StepResult, images_per_second: f64) {
        self.images += result.score.samples;
        self.seconds += result.score.samples / images_per_second;
        let due = (step + 1).is_multiple_of(self.every);
        let (loss, rate) = (result.score.loss, self.images / self.seconds);
        if let Some(bar) = &self.bar {
            bar.set_position(step + 1);
            bar.set_message(format!("epoch {} · loss {loss:.4} · {rate:.0} images/s", epoch + 1));
        } else if due && !self.quiet {
            println!(
                "epoch {} · step {}/{} · loss {loss:.4} · lr {:.2e} · {rate:.0} images/s",
                epoch + 1,
                step + 1,
                self.steps,
                result.learning_rate
            );
        }
        if due {
            (self.images, self.seconds) = (0.0, 0.0);
        }
    }

    fn evaluated(&mut self, _step: u64, epoch: u64, score: &Score) {
        self.line(format!(
            "epoch {} · held out: loss {:.4} · top-1 {:.2}% · top-5 {:.2}%",
            epoch + 1,
            score.loss,
            100.0 * score.top1,
            100.0 * score.top5
        ));
    }

    fn skipped(&mut self, skipped: &Skipped) {
        self.skipped += 1;
        if self.skipped <= NAMED {
            self.line(format!("left out: {}", skipped.problem));
        } else if self.skipped == NAMED + 1 {
            self.line("left out: further images are only counted".to_string());
        }
    }

    fn stop(&self) -> Option<&'static str> {
        self.signals.came()
    }
}
