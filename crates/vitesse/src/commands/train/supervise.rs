//! Runs that start again by themselves, and ranks that mpirun starts: the run is a child of this process.

mod child;
mod hosts;
mod mpirun;

use crate::signals::asks;
use anyhow::{Context, bail, ensure};
use child::{Forwarded, Patience, watch, watch_mpirun};
use comm::launch::environment;
use comm::supervisor::{SUPERVISOR, Watcher};
use comm::{Backend, Launcher, Place};
use config::{Raw, ShardGroup};
use formats::checkpoint::{Checkpoint, Checkpoints};
use graph::Zero;
use hosts::{Hosts, Left};
pub use mpirun::may_call_mpirun;
use std::ffi::OsString;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, ExitCode, ExitStatus};
use std::time::Duration;
use study::child::signal_name;
use study::serve::{TOKEN_VARIABLE, Token};
use train::{continuation, record};

/// Time beyond `--timeout` after which a silent rank 0 is lost: the ranks themselves notice first.
const MARGIN: Duration = Duration::from_secs(10);
/// Default of `--timeout` for heartbeats.
const SILENCE: Duration = Duration::from_secs(10);
/// Largest number of a signal on Linux; exit codes above 128 and this are no signals.
const LAST_SIGNAL: i32 = 64;
/// Time for mpirun to start rank 0, where it is known that rank 0 can be heard.
const STARTS: Duration = Duration::from_secs(60);

/// Returns whether the run is to be a child of this process.
pub fn wanted(typed: &Raw) -> bool {
    typed.max_restarts.is_some() || calls_mpirun(typed)
}

/// Returns whether ranks over MPI were asked for without a launcher: vitesse then calls it.
pub fn calls_mpirun(typed: &Raw) -> bool {
    let alone = Place::find(&environment).is_ok_and(|place| place.launcher == Launcher::Nothing);
    alone && typed.comm == Some(Backend::Mpi) && typed.ranks.is_some()
}

/// Starts the run as it was typed, and again from its last checkpoint when a rank was lost.
pub fn run(typed: &Raw, words: &[OsString]) -> anyhow::Result<ExitCode> {
    let restarts = typed.max_restarts.unwrap_or(0);
    let folder = continuation::folder(typed).or(typed.out.clone());
    check(typed, folder.as_deref())?;
    let hosts = hosts_of(typed, folder.as_deref())?;
    // The live page keeps its URL when the run starts again.
    let token = typed.serve.as_ref().map(|_| Token::find()).transpose().map_err(anyhow::Error::msg)?;
    let signals = Forwarded::catch()?;
    let mut run = Run { typed, words, token, again: 0, left: None, signals, heard: false };
    loop {
        let status = run.launch()?;
        let (code, why) = match after(status, run.signals.any()) {
            Next::End(code) => return Ok(ExitCode::from(code)),
            Next::Again { code, why } if run.again == restarts => {
                if restarts > 0 {
                    eprintln!("vitesse: {why}; no restart is left after {restarts}");
                }
                return Ok(ExitCode::from(code));
            }
            Next::Again { code, why } => (code, why),
        };
        run.again += 1;
        run.left = match hosts.as_ref().map(Hosts::left).transpose() {
            Ok(left) => left,
            Err(reason) => {
                eprintln!("vitesse: {why}; {reason:#}");
                return Ok(ExitCode::from(code));
            }
        };
        let from = folder.as_deref().and_then(last_step);
        let from = from.map_or("the beginning".to_string(), |step| format!("step {step}"));
        let without = without_hosts(run.left.as_ref(), typed.ranks);
        eprintln!("vitesse: {why}; restart {} of {restarts} from {from}{without}", run.again);
        // Ports and memory of the lost ranks are free a moment later.
        std::thread::sleep(Duration::from_millis(500));
        if let Some(signal) = run.signals.any() {
            return Ok(ExitCode::from(128 + signal as u8));
        }
    }
}

/// A supervised run.
struct Run<'a> {
    typed: &'a Raw,
    words: &'a [OsString],
    /// Token of the live page, if there is one.
    token: Option<Token>,
    /// Restarts so far.
    again: u32,
    /// Ranks and hosts that are left, once a rank was lost.
    left: Option<Left>,
    signals: Forwarded,
    /// Flag: rank 0 of an earlier launch was heard.
    heard: bool,
}

impl Run<'_> {
    /// Starts the run, and waits for its end.
    fn launch(&mut self) -> anyhow::Result<ExitStatus> {
        let mut command = command(self.typed, self.words, self.again > 0, self.left.as_ref())?;
        command.env(record::RESTART, self.again.to_string());
        if let Some(token) = &self.token {
            command.env(TOKEN_VARIABLE, token.text());
        }
        if !calls_mpirun(self.typed) {
            return watch(command, &self.signals);
        }
        child::adopt_orphans();
        let watcher = Watcher::listen().context("can't listen for rank 0")?;
        command.env(SUPERVISOR, watcher.address().context("can't listen for rank 0")?);
        let timeout = self.typed.timeout.map(|timeout| timeout.0);
        let silence = timeout.unwrap_or(SILENCE) + MARGIN;
        let start = self.heard.then(|| timeout.unwrap_or(STARTS).max(STARTS));
        let (status, heard) = watch_mpirun(command, &self.signals, watcher, &Patience { start, silence })?;
        self.heard |= heard;
        Ok(status)
    }
}

/// The hosts that a run may lose.
fn hosts_of(typed: &Raw, folder: Option<&Path>) -> anyhow::Result<Option<Hosts>> {
    let (Some(least), Some(file), Some(folder)) = (typed.min_ranks, &typed.hostfile, folder) else {
        return Ok(None);
    };
    let group = match typed.shard_group {
        Some(ShardGroup::Ranks(ranks)) if ranks > 0 && typed.zero != Some(Zero::Stage0) => ranks,
        _ => 1,
    };
    Hosts::read(file, folder, typed.ranks.unwrap_or(1), least, group).map(Some)
}

/// What is said of a restart that leaves out hosts.
fn without_hosts(left: Option<&Left>, ranks: Option<usize>) -> String {
    match left {
        Some(left) if !left.lost.is_empty() => {
            let all = ranks.unwrap_or(left.ranks);
            format!(" with {} of {}: {}", left.ranks, text::many(all, "rank"), hosts::silent(&left.lost))
        }
        _ => String::new(),
    }
}

/// Refuses `--min-ranks` where no host can be left out.
pub fn check_min_ranks(typed: &Raw) -> anyhow::Result<()> {
    let Some(least) = typed.min_ranks else { return Ok(()) };
    ensure!(least > 0, "--min-ranks 0: must be at least 1");
    let place = Place::find(&environment).map_err(anyhow::Error::msg)?;
    if place.launcher != Launcher::Nothing {
        ensure!(least <= place.world, "--min-ranks {least}: {} started {}", place.launcher, place.world);
        return Ok(());
    }
    if typed.max_restarts.is_none() || typed.hostfile.is_none() || !calls_mpirun(typed) {
        bail!(
            "--min-ranks {least} is for runs that go on without a lost host: it needs --max-restarts, --ranks, --comm mpi and --hostfile"
        );
    }
    let ranks = typed.ranks.unwrap_or(1);
    ensure!(least <= ranks, "--min-ranks {least} is more than --ranks {ranks}");
    Ok(())
}

fn check(typed: &Raw, folder: Option<&Path>) -> anyhow::Result<()> {
    let place = Place::find(&environment).map_err(anyhow::Error::msg)?;
    if place.launcher != Launcher::Nothing && !place.is_lone_task() {
        bail!(
            "--max-restarts under {}: the launcher ends the whole job with a rank; \
             start `vitesse train --comm mpi --ranks {} --max-restarts …`, and vitesse calls mpirun itself",
            place.launcher,
            place.world
        );
    }
    if typed.max_restarts.is_some() && folder.is_none() {
        bail!("--max-restarts needs --out: without it there are no checkpoints to go on from");
    }
    if calls_mpirun(typed) { may_call_mpirun() } else { Ok(()) }
}

fn last_step(folder: &Path) -> Option<u64> {
    let latest = Checkpoints::of_run(folder, 1).latest().ok()?;
    Some(Checkpoint::open(&latest).ok()?.progress.step)
}

/// The command of a child: as typed, and again going on with what the first one left. So nothing that was asked for is lost with it.
fn command(typed: &Raw, words: &[OsString], again: bool, left: Option<&Left>) -> anyhow::Result<Command> {
    let program = std::env::current_exe().context("can't find this program")?;
    let mut words = without(words.get(1..).unwrap_or_default(), &["--max-restarts", "--hostfile"]);
    if again {
        // That was for the lock which the first child found.
        words.retain(|word| word != "--force");
        words.extend(typed.resume.is_none().then(|| "--resume=auto".into()));
    }
    if !calls_mpirun(typed) {
        let mut command = Command::new(program);
        command.args(words);
        return Ok(command);
    }
    let (ranks, hostfile) = match left {
        Some(left) => {
            words = without(&words, &["--ranks"]);
            words.push(format!("--ranks={}", left.ranks).into());
            (left.ranks, Some(left.file.as_path()))
        }
        None => (typed.ranks.unwrap_or(1), typed.hostfile.as_deref()),
    };
    let mut command = mpirun::mpirun(ranks, hostfile)?;
    command.arg(program).args(words);
    Ok(command)
}

/// Words without some flags and their values.
fn without(words: &[OsString], flags: &[&str]) -> Vec<OsString> {
    let mut kept = Vec::new();
    let mut words = words.iter();
    while let Some(word) = words.next() {
        let text = word.to_string_lossy();
        if flags.iter().any(|flag| text == *flag) {
            words.next();
        } else if !flags.iter().any(|flag| text.starts_with(&format!("{flag}="))) {
            kept.push(word.clone());
        }
    }
    kept
}

#[derive(Debug, PartialEq)]
enum Next {
    End(u8),
    Again { code: u8, why: String },
}

/// What the end of a child means. Codes above 128 are signals: of a rank, where mpirun tells, or of a run that was asked to stop.
fn after(status: ExitStatus, asked: Option<i32>) -> Next {
    let code = status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0));
    let code = u8::try_from(code).unwrap_or(1);
    let signal = i32::from(code) - 128;
    if asked.is_some() {
        return Next::End(code);
    }
    match code {
        3 => Next::Again { code, why: "a rank was lost".to_string() },
        101 => Next::Again { code, why: "the run panicked".to_string() },
        // As of Open MPI's mpirun that could not start its daemons, which may be otherwise the next time.
        code if signal > LAST_SIGNAL => {
            Next::Again { code, why: format!("the run ended with exit code {code}") }
        }
        129.. if !asks(signal) => {
            Next::Again { code, why: format!("the run was ended by {}", signal_name(signal)) }
        }
        code => Next::End(code),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};

    fn words(line: &str) -> Vec<OsString> {
        line.split(' ').map(OsString::from).collect()
    }

    fn args(line: &str) -> Raw {
        let words: Vec<String> = line.split(' ').map(str::to_string).collect();
        crate::args::typed_for_train(&words).unwrap()
    }

    /// The words of the child's command after its program.
    fn child(line: &str, again: bool) -> String {
        let command = command(&args(line), &words(line), again, None).unwrap();
        let words: Vec<String> = command.get_args().map(|word| word.to_string_lossy().into_owned()).collect();
        words.join(" ")
    }

    #[test]
    fn a_child_does_what_was_typed_but_for_the_restarts() {
        let line = "vitesse train --ranks 2 --max-restarts 3 --out runs/a --epochs 2";
        assert_eq!(child(line, false), "train --ranks 2 --out runs/a --epochs 2");
        assert_eq!(child("vitesse train --max-restarts=3 --out a --force", false), "train --out a --force");
    }

    #[test]
    fn a_restart_is_told_all_that_the_first_child_was() {
        let all = "--ranks 2 --out runs/a --timeout=5m --json --serve --rank-logs logs --trace t.json";
        assert_eq!(
            child(&format!("vitesse train {all} --max-restarts 3"), true),
            format!("train {all} --resume=auto")
        );
        assert_eq!(
            child("vitesse train --out a --force --max-restarts 3", true),
            "train --out a --resume=auto"
        );
        for resume in ["--resume runs/a", "--resume=auto --out runs/a"] {
            let continued = format!("vitesse train {resume} --epochs 9 --max-restarts 3");
            assert_eq!(child(&continued, true), format!("train {resume} --epochs 9"));
        }
    }

    #[test]
    fn mpirun_is_called_where_no_launcher_was() {
        let line = "vitesse train --ranks 3 --comm mpi --max-restarts 1 --hostfile hosts --out a";
        testing::need!(testing::tools::mpirun());
        let found = command(&args(line), &words(line), false, None).unwrap();
        assert_eq!(found.get_program(), "mpirun");
        let child = child(line, false);
        assert!(child.starts_with("-n 3 --hostfile hosts "), "{child}");
        assert!(child.ends_with(" train --ranks 3 --comm mpi --out a"), "{child}");
        let line =
            "vitesse train --ranks 3 --comm mpi --max-restarts 1 --min-ranks 2 --hostfile hosts --out a";
        let left = Left { ranks: 2, file: "a.hosts".into(), lost: vec!["c".to_string()] };
        let again = command(&args(line), &words(line), true, Some(&left)).unwrap();
        let again: Vec<_> = again.get_args().map(|word| word.to_string_lossy().into_owned()).collect();
        let again = again.join(" ");
        assert!(again.starts_with("-n 2 --hostfile a.hosts "), "{again}");
        assert!(
            again.ends_with(" train --comm mpi --min-ranks 2 --out a --resume=auto --ranks=2"),
            "{again}"
        );
        assert_eq!(without_hosts(Some(&left), Some(3)), " with 2 of 3 ranks: host c does not answer");
    }

    #[test]
    fn only_what_may_not_happen_again_is_tried_again() {
        let ended = |code: i32| after(ExitStatus::from_raw(code << 8), None);
        let killed = |signal: i32| after(ExitStatus::from_raw(signal), None);
        for code in [0, 1, 2, 128 + SIGTERM, 128 + SIGUSR1, 128 + SIGINT, 128 + SIGHUP] {
            assert_eq!(ended(code), Next::End(code as u8));
        }
        assert_eq!(killed(SIGTERM), Next::End(143));
        assert!(matches!(ended(3), Next::Again { code: 3, .. }));
        assert!(matches!(ended(101), Next::Again { code: 101, .. }));
        assert!(matches!(ended(137), Next::Again { code: 137, .. }), "as mpirun tells of a killed rank");
        assert!(matches!(killed(libc::SIGKILL), Next::Again { code: 137, why } if why.contains("SIGKILL")));
        let exit = "the run ended with exit code 213".to_string();
        assert_eq!(ended(213), Next::Again { code: 213, why: exit }, "mpirun could not start a daemon");
        assert_eq!(after(ExitStatus::from_raw(3 << 8), Some(SIGINT)), Next::End(3), "it was asked to stop");
    }
}
