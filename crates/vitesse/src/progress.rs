//! What a run shows while it runs: a bar on a terminal, plain lines elsewhere; on other ranks than the first, nothing, or lines
//! in a file of the rank's own.

use crate::commands::eval::pixels;
use crate::layout;
use crate::signals::Signals;
use crate::table::{self, count, megabytes, percentages};
use config::Device;
use config::Resolved;
use config::shares::Shares;
use files::folder_of;
use formats::checkpoint;
use graph::Program;
use indicatif::{ProgressBar, ProgressStyle};
use records::{MetricsLine, Parts};
use std::fs::File;
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use text::{many, printable};
use train::account::Step;
use train::balance::Straggler;
use train::run::Events;
use train::session::{Evaluation, StepResult};

/// Broken images are named up to this many; a summary counts them all.
const NAMED: usize = 20;

/// Columns that the bar takes with all that stands beside it.
const BESIDE_A_BAR: usize = 84;

/// Where lines go.
pub enum Voice {
    Silent,
    Terminal(ProgressBar),
    Lines,
    /// Opened when there is something to write: a run that is refused leaves none.
    File {
        path: PathBuf,
        /// Lines of the run so far stay.
        goes_on: bool,
        file: Option<File>,
    },
}

impl Voice {
    /// Of the rank that talks.
    pub fn aloud(run: &Resolved, quiet: bool) -> Self {
        if quiet {
            return Voice::Silent;
        }
        if !std::io::stdout().is_terminal() {
            return Voice::Lines;
        }
        // Both leave room for the numbers of long runs.
        let narrow = layout::narrower_than(BESIDE_A_BAR);
        let template = if narrow {
            "{bar:8} {pos}/{len} · {msg} · {eta}"
        } else {
            "{bar:16} {pos}/{len} · {msg} · {eta} left"
        };
        let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
        Voice::Terminal(ProgressBar::new(run.steps).with_style(style))
    }

    /// Of a rank that writes a log of its own.
    pub fn log(folder: &Path, rank: usize, goes_on: bool) -> Self {
        Voice::File { path: rank_log(folder, rank), goes_on, file: None }
    }

    fn line(&mut self, text: &str) {
        let text = printable::line(text);
        match self {
            Voice::Silent => {}
            Voice::Terminal(bar) => bar.suspend(|| println!("{text}")),
            Voice::Lines => println!("{text}"),
            // A log that can't be written must not end the run; that it can was checked at the start.
            Voice::File { path, goes_on, file } => {
                if file.is_none() {
                    *file = open(path, *goes_on).ok();
                }
                file.iter_mut().for_each(|file| drop(writeln!(file, "{text}")));
            }
        }
    }
}

/// The log of a rank.
pub fn rank_log(folder: &Path, rank: usize) -> PathBuf {
    folder.join(format!("rank-{rank}.log"))
}

fn open(path: &Path, goes_on: bool) -> std::io::Result<File> {
    std::fs::create_dir_all(folder_of(path))?;
    if goes_on { files::append(path) } else { File::create(path) }
}

impl Drop for Voice {
    fn drop(&mut self) {
        if let Voice::Terminal(bar) = self {
            bar.finish_and_clear();
        }
    }
}

pub struct Progress<'a> {
    voices: Vec<Voice>,
    signals: &'a Signals,
    steps: u64,
    every: u64,
    breakdown: bool,
    /// Of the steps since the last line.
    images: f64,
    account: Step,
    skipped: usize,
}

impl<'a> Progress<'a> {
    pub fn new(run: &Resolved, voices: Vec<Voice>, signals: &'a Signals) -> Self {
        let (steps, every, breakdown) = (run.steps, run.log_every, run.breakdown_lines);
        let account = Step::default();
        Progress { voices, signals, steps, every, breakdown, images: 0.0, account, skipped: 0 }
    }

    fn line(&mut self, text: String) {
        self.voices.iter_mut().for_each(|voice| voice.line(&text));
    }

    fn bars(&self) -> impl Iterator<Item = &ProgressBar> {
        self.voices.iter().filter_map(|voice| if let Voice::Terminal(bar) = voice { Some(bar) } else { None })
    }

    fn add(&mut self, step: &Step) {
        self.account.parts.resize(step.parts.len(), Parts::default());
        self.account.parts.iter_mut().zip(&step.parts).for_each(|(sum, parts)| *sum += *parts);
    }
}

impl Events for Progress<'_> {
    fn started(&mut self, run: &Resolved, program: &Program, progress: &checkpoint::Progress) {
        let parameters = program.states.iter().filter(|s| s.is_parameter()).map(|s| s.ty.shape.count()).sum();
        let cost = program.last.cost();
        self.line(format!(
            "{} · {} · {} · {}, {} px, {}",
            run.model,
            many(parameters, "parameter"),
            run.data.source,
            many(run.data.train_images(), "image"),
            run.network.image(),
            many(run.network.classes(), "class")
        ));
        let ranks = if run.world == 1 { String::new() } else { format!(" × {}", many(run.world, "rank")) };
        let device = match run.device {
            Device::Cpu => format!("{} · {:?}", table::device(run), cpu::kernels::level()),
            Device::Cuda => table::device(run),
        };
        self.line(format!(
            "batch {} × {}{ranks} · {} · {} · {:.1} GFLOP per micro-step · memory {} + {}",
            run.batch,
            run.accumulate,
            many(run.steps as usize, "step"),
            device,
            cost.flops / 1e9,
            megabytes(program.arena()),
            megabytes(program.state_bytes()),
        ));
        if let Some(images) = run.data.eval_images {
            self.line(format!(
                "evaluates on {} of {} (--eval-images all for all)",
                count(images),
                many(run.data.facts.test_images, "validation image")
            ));
        }
        if let Some(weight) = run.network.auxiliary_weight() {
            self.line(format!(
                "loss: of the main head, in training and evaluation; training also minimises {weight} × the auxiliary head's"
            ));
        }
        if progress.step > 0 {
            self.line(format!("going on after step {}", progress.step));
        }
        for bar in self.bars() {
            bar.set_position(progress.step);
            bar.reset_eta();
        }
    }

    fn stepped(&mut self, line: &MetricsLine, result: &StepResult, account: &Step) {
        let MetricsLine { step, epoch, .. } = *line;
        self.images += result.images;
        self.add(account);
        if let (false, Some(scale)) = (result.applied, result.loss_scale) {
            self.line(format!(
                "step {} left out: its gradients overflowed; the loss scale is {scale}",
                step + 1
            ));
        }
        let due = (step + 1).is_multiple_of(self.every);
        let (loss, rate) = (result.score.loss, table::rate(self.images / self.account.seconds()));
        let narrow = layout::narrower_than(BESIDE_A_BAR);
        for bar in self.bars() {
            bar.set_position(step + 1);
            bar.set_message(match narrow {
                true => format!("loss {loss:.4} · {rate} images/s"),
                false => format!("epoch {} · loss {loss:.4} · {rate} images/s", epoch + 1),
            });
        }
        if !due {
            return;
        }
        let (step, steps, lr) = (step + 1, self.steps, result.learning_rate);
        let text = format!(
            "epoch {} · step {step}/{steps} · loss {loss:.4} · lr {lr:.2e} · {rate} images/s{}",
            epoch + 1,
            line.log()
        );
        // On a terminal the bar says it all.
        for voice in self.voices.iter_mut().filter(|voice| !matches!(voice, Voice::Terminal(_))) {
            voice.line(&text);
        }
        if self.breakdown {
            let text = format!("  {}", percentages(&self.account.mean()));
            self.line(text);
        }
        self.images = 0.0;
        self.account.parts.clear();
    }

    fn evaluated(&mut self, step: u64, epoch: u64, score: &Evaluation) {
        self.line(match score {
            Evaluation::Images(score) => format!(
                "epoch {} · validation: loss {:.4} · top-1 {:.2}% · top-5 {:.2}%",
                epoch + 1,
                score.loss,
                100.0 * score.top1,
                100.0 * score.top5
            ),
            Evaluation::Pixels(score) => format!(
                "step {} · validation: loss {:.4} · {}",
                step + 1,
                score.loss,
                pixels::in_a_line(&score.confusion.scores())
            ),
        });
    }

    fn skipped(&mut self, problem: &str) {
        self.skipped += 1;
        if self.skipped <= NAMED {
            self.line(format!("left out: {problem}"));
        } else if self.skipped == NAMED + 1 {
            self.line("left out: further images are only counted".to_string());
        }
    }

    fn straggler(&mut self, straggler: &Straggler) {
        let Straggler { rank, slower, waiting } = straggler;
        self.line(format!(
            "rank {rank} is slow: an image takes it {slower:.1} times as long; the others wait {:.0}% of their time \
             (--balance gives it fewer images)",
            100.0 * waiting
        ));
    }

    fn divided(&mut self, shares: &Shares) {
        self.line(format!("images of a micro-step are divided by speed from here on: {shares}"));
    }

    fn noted(&mut self, line: &str) {
        self.line(line.to_string());
    }

    fn warned(&mut self, line: &str) {
        let line = &printable::line(line);
        for voice in &mut self.voices {
            match voice {
                Voice::Terminal(bar) => bar.suspend(|| eprintln!("vitesse: {line}")),
                Voice::Silent | Voice::Lines => eprintln!("vitesse: {line}"),
                Voice::File { .. } => voice.line(line),
            }
        }
    }

    fn traced(&mut self, file: &Path) {
        self.line(format!("trace in {}", file.display()));
    }

    fn stop(&self) -> Option<&'static str> {
        self.signals.came()
    }
}
