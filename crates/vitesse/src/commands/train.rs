//! `vitesse train`: finds out which ranks there are, runs those of this process, and prints what the first has to say.

pub mod supervise;

use crate::args::TrainArgs;
use crate::commands::eval::pixels;
use crate::progress::{Progress, Voice, rank_log};
use crate::say;
use crate::signals::Signals;

use crate::table;
use anyhow::bail;
use comm::launch::environment;
use comm::supervisor::{Reporter, SUPERVISOR};
use comm::{ExitReport, Failure, Member, Place, Start};
use config::outputs::{self, Output};
use config::sets::{self, Sets};
use config::{Raw, Record, Resolved};
use serde_json::json;
use std::ops::Range;
use std::path::Path;
use std::process::ExitCode;
use study::serve::{Server, Shows};
use text::{many, printable};
use train::continuation;
use train::run::{Stopped, Summary};
use train::session::Evaluation;

pub fn run(args: TrainArgs) -> anyhow::Result<ExitCode> {
    let typed = with_files(args.settings.0);
    supervise::check_min_ranks(&typed)?;
    if supervise::wanted(&typed) {
        let words: Vec<_> = std::env::args_os().collect();
        return supervise::run(&typed, &words);
    }
    let signals = Signals::catch()?;
    let rank = Place::find(&environment).map_or(0, |place| place.rank);
    let reporter = Reporter::connect(rank, environment(SUPERVISOR).as_deref());
    let code = match start(&typed, &signals, &tell) {
        Ok(Ok(done)) => {
            done.print(typed.json);
            // As a shell reports a program that a signal ended, so that batch systems see the run is not finished.
            let code = u8::from(done.tell_failures());
            done.summary.stopped.map_or(code, |_| signals.exit_code())
        }
        Ok(Err(ExitReport { code, line })) => {
            line.iter().for_each(|line| tell(line));
            code
        }
        Err(error) => {
            reporter.end(1);
            return Err(error);
        }
    };
    reporter.end(code);
    Ok(ExitCode::from(code))
}

/// Flags over the settings file, and the ranks of before where a run continues. A file that can't be read is reported when the run
/// is prepared, once for all ranks.
fn with_files(flags: Raw) -> Raw {
    continuation::ranks_as_before(flags.clone().with_files().unwrap_or(flags))
}

/// What says why a run ended, at once.
type Tell<'a> = &'a (dyn Fn(&str) + Sync);

/// The ranks of this process, from what was typed to how they ended.
fn start(typed: &Raw, signals: &Signals, tell: Tell<'_>) -> anyhow::Result<Result<Done, ExitReport>> {
    let timeout = typed.timeout.map(|timeout| timeout.0);
    let options = comm::Options { comm: typed.comm, ranks: typed.ranks, timeout };
    Ok(match comm::start(&options, self::tell) {
        Ok(Start::Process(member)) => member.run(|member| {
            let prepared = prepare(typed, member.place.world, member.cores, Some(member));
            let (run, sets) = prepared.map_err(|error| Failure::Own(one_line(error)))?;
            rank(typed, run, sets, member, signals)
        }),
        Ok(Start::Threads(members)) => {
            let cores = members.first().map_or(1, |member| member.cores);
            let (run, sets) = prepare(typed, members.len(), cores, None)?;
            threads(typed, &run, &sets, members, signals, tell)
        }
        Err(refused) => Err(ExitReport { code: refused.code, line: refused.prints.then_some(refused.line) }),
    })
}

fn tell(line: &str) {
    eprintln!("vitesse: {}", printable::line(line));
}

fn one_line(error: anyhow::Error) -> String {
    say::one_line(&error)
}

#[cfg(test)]
mod property;

/// What a rank's run came to.
struct Done {
    rank: usize,
    run: Resolved,
    summary: Summary,
}

/// The run of one rank.
fn rank(typed: &Raw, run: Resolved, sets: Sets, member: &Member, signals: &Signals) -> Result<Done, Failure> {
    let rank = member.place.rank;
    let mut voices = Vec::new();
    if rank == 0 {
        voices.push(Voice::aloud(&run, typed.json));
    }
    if let Some(folder) = &typed.rank_logs {
        voices.push(Voice::log(folder, rank, run.resume.is_some()));
    }
    let page = if rank == 0 { live_page(typed, &run)? } else { None };
    let mut progress = Progress::new(&run, voices, signals);
    let summary = train::run::train(run.clone(), sets, member, &mut progress);
    if let Some(page) = page {
        page.finish();
    }
    let summary = summary.map_err(|error| match error.loses_device() {
        true => Failure::Device(printable::line(&error.to_string())),
        false => Failure::Own(printable::line(&error.to_string())),
    })?;
    Ok(Done { rank, run, summary })
}

/// Serves the run's folder for as long as it lives, if that was asked for.
fn live_page(typed: &Raw, run: &Resolved) -> Result<Option<Server>, String> {
    let Some(address) = &typed.serve else { return Ok(None) };
    let Some(folder) = run.out.clone() else { return Ok(None) };
    let server = Server::start(address.clone().unwrap_or_default(), Shows::One(folder));
    let server = server.map_err(|error| format!("--serve {error}"))?;
    eprintln!("live page: {}", server.url());
    Ok(Some(server))
}

/// All ranks, on threads of this process; the first one's end is that of the run.
fn threads(
    typed: &Raw,
    run: &Resolved,
    sets: &Sets,
    members: Vec<Member>,
    signals: &Signals,
    tell: Tell<'_>,
) -> Result<Done, ExitReport> {
    let work = |member: Member| member.run(|m| rank(typed, run.clone(), sets.clone(), m, signals));
    let mut members = members.into_iter();
    let Some(first) = members.next() else {
        unreachable!("a run has a rank");
    };
    std::thread::scope(|scope| {
        let others: Vec<_> = members.map(|member| scope.spawn(|| work(member))).collect();
        let done = work(first).map_err(|ended| {
            // Now: a rank that hangs would keep this thread waiting, until the whole process is ended.
            ended.line.iter().for_each(|line| tell(line));
            ExitReport { line: None, ..ended }
        });
        // Whoever panicked was caught, and told the others.
        others.into_iter().for_each(|other| drop(other.join()));
        done
    })
}

/// What is to be run, on which data. Ranks that are processes of their own read for themselves what they can; what only lies
/// where the first rank is, they get from it.
fn prepare(
    typed: &Raw,
    world: usize,
    cores: usize,
    member: Option<&Member>,
) -> anyhow::Result<(Resolved, Sets)> {
    let typed = typed.clone().with_files()?;
    let mut raw = continuation::settings(typed.clone(), world, member)?;
    if raw.threads.is_none() && world > 1 {
        raw.threads = Some(cores);
    }
    let (mut run, sets) = sets::resolve(&raw, world)?;
    run.typed = Some(Record::of(&typed, &std::env::current_dir().unwrap_or_default()));
    let ranks = member.map_or(0..world, |member| member.place.rank..member.place.rank + 1);
    check_outputs(&typed, &run, ranks)?;
    Ok((run, sets))
}

/// Refuses what can't be written, before anything is. The first rank writes all but the others' logs.
fn check_outputs(typed: &Raw, run: &Resolved, ranks: Range<usize>) -> anyhow::Result<()> {
    let first = ranks.start == 0;
    if typed.hostfile.is_some() && !supervise::calls_mpirun(typed) {
        bail!("--hostfile is for mpirun, which vitesse calls for --comm mpi with --ranks and no launcher");
    }
    // A run that goes on writes its own files again.
    let force = typed.force || typed.resume.is_some() || run.resume.is_some();
    outputs::check("rank-logs", typed.rank_logs.as_deref(), Output::Folder)?;
    for log in typed.rank_logs.iter().flat_map(|folder| ranks.clone().map(|rank| rank_log(folder, rank))) {
        files::output::free(&log, force)
            .map_err(|why| anyhow::anyhow!("--rank-logs: {} {why}", log.display()))?;
    }
    outputs::check("trace", run.trace.as_deref().filter(|_| first), Output::File { force })?;
    let out = run.out.as_deref().filter(|_| first && run.resume.is_none());
    Ok(outputs::check("out", out, Output::Folder)?)
}

impl Done {
    /// Says what could not be written, and whether there was any.
    fn tell_failures(&self) -> bool {
        let failures = &self.summary.failures;
        if self.rank != 0 || failures.is_empty() {
            return false;
        }
        let failures = printable::line(&failures.join("; "));
        eprintln!("vitesse: the run is done, but not all of it could be written: {failures}");
        true
    }

    fn print(&self, as_json: bool) {
        match &self.summary.stopped {
            _ if self.rank != 0 => {}
            _ if as_json => println!("{}", json!(record(&self.summary))),
            Some(stopped) => print_stop(stopped),
            None => print_summary(&self.summary, &self.run),
        }
    }
}

fn print_stop(stopped: &Stopped) {
    let Stopped { why, step, checkpoint } = stopped;
    match checkpoint {
        Some(path) => {
            let run = path.parent().and_then(Path::parent).unwrap_or(path);
            println!("stopped by {why} after {}; saved {}", many(*step as usize, "step"), path.display());
            println!("to go on: vitesse train --resume {}", run.display());
        }
        None => println!(
            "stopped by {why} after {}; nothing is saved: there is no --out, or --no-checkpoints",
            many(*step as usize, "step")
        ),
    }
}

fn print_summary(summary: &Summary, run: &Resolved) {
    let Some(score) = &summary.score else {
        return println!("the run was finished before: there is nothing left to do");
    };
    println!();
    let rate = table::rate(summary.images_per_second());
    if let Evaluation::Pixels(score) = score {
        pixels::print_classes(&score.confusion.by_class(), &run.class_names);
    }
    let (what, merit) = match score {
        Evaluation::Images(score) => ("accuracy", score.top1),
        Evaluation::Pixels(score) => ("mean IoU", score.confusion.scores().mean_iou),
    };
    println!(
        "validation {what} {:.2}% · {rate} images/s · {:.1} s of training, {:.1} s of evaluation",
        100.0 * merit,
        summary.training_seconds,
        summary.evaluation_seconds
    );
    if summary.skipped > 0 {
        println!("left out, as they could not be read: {}", many(summary.skipped as usize, "image"));
    }
    if let Some(path) = &summary.weights {
        println!("weights in {}", path.display());
    }
    if run.breakdown && run.account {
        println!("where the time went:");
        if summary.ranks.len() > 1 {
            table::print_ranks(&summary.ranks);
            table::print_collectives(&summary.collectives, summary.ranks.len(), summary.steps);
            println!("of rank 0:");
        }
        let rows = rows(summary);
        table::print_account(&rows, summary.training_seconds, None);
        if let Some(note) = &summary.note_on_times {
            println!("  ({note})");
        }
    }
}

/// The first rank's time by kind of step.
fn rows(summary: &Summary) -> Vec<table::Row> {
    let data = summary.ranks.first().map_or(0.0, |parts| parts.data);
    table::account(&summary.times, summary.training_seconds, data)
}

/// The summary as `--json` prints it.
fn record(summary: &Summary) -> records::Summary {
    let best = summary.best.map(|best| best.merit);
    let evaluation = match &summary.score {
        Some(Evaluation::Pixels(score)) => {
            let scores = score.confusion.scores();
            records::Evaluation {
                eval_miou: Some(scores.mean_iou),
                eval_pixel_accuracy: Some(scores.pixel_accuracy),
                eval_mean_accuracy: Some(scores.mean_accuracy),
                eval_iou: Some(score.confusion.by_class().iter().map(|class| class.iou).collect()),
                best_miou: best,
                ..records::Evaluation::default()
            }
        }
        Some(Evaluation::Images(score)) => records::Evaluation {
            eval_top1: Some(score.top1),
            eval_top5: Some(score.top5),
            best_top1: best,
            ..records::Evaluation::default()
        },
        None => records::Evaluation::default(),
    };
    records::Summary {
        steps: summary.steps,
        images: summary.images,
        eval_loss: summary.score.as_ref().map(Evaluation::loss),
        skipped_images: summary.skipped,
        stopped: summary.stopped.as_ref().map(|stopped| stopped.why.to_string()),
        images_per_second: summary.images_per_second(),
        training_seconds: summary.training_seconds,
        evaluation_seconds: summary.evaluation_seconds,
        weights: summary.weights.clone(),
        failures: summary.failures.clone(),
        seconds: rows(summary).into_iter().map(|row| (row.name, row.seconds.into())).collect(),
        note_on_seconds: summary.note_on_times.clone(),
        memory_bytes: Some(summary.memory_bytes as u64),
        ranks: summary.ranks.clone(),
        collectives: summary.collectives.clone(),
        evaluation,
        schema: records::Schema::CURRENT,
    }
}
