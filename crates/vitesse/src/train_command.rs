//! `vitesse train`.

use crate::args::{self, TrainArgs};
use crate::progress::Progress;
use crate::signals::Signals;
use crate::table;
use serde_json::json;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use train::record;
use train::run::{Stopped, Summary};
use train::{Raw, sets};

pub fn run(args: TrainArgs) -> anyhow::Result<ExitCode> {
    let as_json = args.json;
    let raw = match args.run.resumes(args.output.out.as_deref()) {
        Some(folder) => continued(args, folder)?,
        None => args.raw()?,
    };
    let (run, sets) = sets::resolve(&raw, 1)?;
    let (breakdown, signals) = (run.breakdown, Signals::catch()?);
    let mut progress = Progress::new(&run, as_json, &signals);
    let summary = train::run::train(run, sets, &mut progress)?;
    drop(progress);
    match (as_json, &summary.stopped) {
        (true, _) => println!("{}", summary_json(&summary)),
        (false, Some(stopped)) => print_stop(stopped),
        (false, None) => print_summary(&summary, breakdown),
    }
    // As a shell reports a program that a signal ended, so that batch systems see the run is not finished.
    Ok(summary.stopped.map_or(ExitCode::SUCCESS, |_| signals.exit_code()))
}

/// A continued run is told again what it was told at its start; what is typed now comes on top.
fn continued(args: TrainArgs, folder: PathBuf) -> anyhow::Result<Raw> {
    let typed = args.raw()?;
    let launches = record::launches(&folder)?;
    let Some(first) = launches.first() else { return Ok(typed) };
    let before = args::train_args(&first.command)?;
    let earlier = before.raw_within(&first.folder)?;
    Ok(Raw { resume: Some(Some(folder.clone())), out: Some(folder), ..typed.or(earlier) })
}

fn print_stop(stopped: &Stopped) {
    let Stopped { why, step, checkpoint } = stopped;
    match checkpoint {
        Some(path) => {
            let run = path.parent().and_then(Path::parent).unwrap_or(path);
            println!("stopped by {why} after {step} steps; saved {}", path.display());
            println!("to go on: vitesse train --resume {}", run.display());
        }
        None => println!("stopped by {why} after {step} steps; nothing is saved, as there is no --out"),
    }
}

fn print_summary(summary: &Summary, breakdown: bool) {
    let Some(score) = &summary.score else {
        return println!("the run was finished before: there is nothing left to do");
    };
    println!();
    println!(
        "held-out accuracy {:.2}% · {:.0} images/s · {:.1} s of training, {:.1} s of evaluation",
        100.0 * score.top1,
        summary.images_per_second(),
        summary.training_seconds,
        summary.evaluation_seconds
    );
    if summary.skipped > 0 {
        println!("{} images could not be read and were left out", table::count(summary.skipped as usize));
    }
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
        "eval_loss": summary.score.map(|score| score.loss),
        "eval_top1": summary.score.map(|score| score.top1),
        "eval_top5": summary.score.map(|score| score.top5),
        "best_top1": summary.best.map(|best| best.top1),
        "skipped_images": summary.skipped,
        "stopped": summary.stopped.as_ref().map(|stopped| stopped.why),
        "images_per_second": summary.images_per_second(),
        "training_seconds": summary.training_seconds,
        "evaluation_seconds": summary.evaluation_seconds,
        "weights": summary.weights,
        "seconds": time,
    })
}
