//! Runs that start again by themselves, and ranks that mpirun starts: the run is a child of this process.

use crate::signals::{asking, asks};
use anyhow::{Context, bail};
use comm::launch::environment;
use comm::{Backend, Launcher, Place};
use config::Raw;
use formats::checkpoint::{Checkpoint, Checkpoints};
use signal_hook::flag;
use std::ffi::OsString;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, ExitCode, ExitStatus};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use study::child::signal_name;
use study::serve::{TOKEN_VARIABLE, Token};
use train::{continuation, record};

/// Whether the run is to be a child of this process.
pub fn wanted(typed: &Raw) -> bool {
    typed.max_restarts.is_some() || calls_mpirun(typed)
}

/// Whether ranks over MPI were asked for without a launcher: vitesse then calls it.
pub fn calls_mpirun(typed: &Raw) -> bool {
    let alone = Place::find(&environment).is_ok_and(|place| place.launcher == Launcher::Nothing);
    alone && typed.comm == Some(Backend::Mpi) && typed.ranks.is_some()
}

/// Starts the run as it was typed, and again from its last checkpoint when a rank was lost.
pub fn run(typed: &Raw, words: &[OsString]) -> anyhow::Result<ExitCode> {
    let restarts = typed.max_restarts.unwrap_or(0);
    let folder = continuation::folder(typed).or(typed.out.clone());
    check(typed, folder.as_deref())?;
    let signals = Forwarded::catch()?;
    // The live page keeps its URL when the run starts again.
    let token = typed.serve.as_ref().map(|_| Token::find()).transpose().map_err(anyhow::Error::msg)?;
    let mut again = 0;
    loop {
        let mut child = command(typed, words, again > 0)?;
        child.env(record::RESTART, again.to_string());
        if let Some(token) = &token {
            child.env(TOKEN_VARIABLE, token.text());
        }
        let status = watch(child, &signals)?;
        match after(status, signals.any()) {
            Next::End(code) => return Ok(ExitCode::from(code)),
            Next::Again { code, why } if again == restarts => {
                if restarts > 0 {
                    eprintln!("vitesse: {why}; no restart is left after {restarts}");
                }
                return Ok(ExitCode::from(code));
            }
            Next::Again { why, .. } => {
                again += 1;
                let from = folder.as_deref().and_then(last_step);
                let from = from.map_or("the beginning".to_string(), |step| format!("step {step}"));
                eprintln!("vitesse: {why}; restart {again} of {restarts} from {from}");
                // Ports and memory of the lost ranks are free a moment later.
                std::thread::sleep(Duration::from_millis(500));
                if let Some(signal) = signals.any() {
                    return Ok(ExitCode::from(128 + signal as u8));
                }
            }
        }
    }
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

/// Whether ranks can be started by mpirun, as far as that can be told before.
pub fn may_call_mpirun() -> anyhow::Result<()> {
    if !comm::HAS_MPI {
        bail!("--comm mpi: {}", comm::launch::NO_MPI);
    }
    let (root, open_mpi) = (is_root(), mpirun_version()?.contains("Open MPI"));
    if root && open_mpi && !root_may(&|name| std::env::var(name).ok()) {
        bail!(
            "--comm mpi: mpirun refuses to run as root; set OMPI_ALLOW_RUN_AS_ROOT=1 and OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 if this is \
             meant, or become another user"
        );
    }
    Ok(())
}

/// Whether Open MPI was told, and told again, that root may use it: by the variables of its fourth or of its fifth version.
fn root_may(var: &dyn Fn(&str) -> Option<String>) -> bool {
    let set = |name: String| var(&name).is_some_and(|value| value == "1");
    ["OMPI", "PRTE"].iter().any(|mpi| {
        let name = format!("{mpi}_ALLOW_RUN_AS_ROOT");
        set(format!("{name}_CONFIRM")) && set(name)
    })
}

fn is_root() -> bool {
    // SAFETY: only asks.
    unsafe { libc::geteuid() == 0 }
}

fn mpirun_version() -> anyhow::Result<String> {
    let version = Command::new("mpirun").arg("--version").output();
    let version = version.context("--comm mpi needs mpirun, which can't be started")?;
    Ok(String::from_utf8_lossy(&version.stdout).into_owned())
}

fn last_step(folder: &Path) -> Option<u64> {
    let latest = Checkpoints::of_run(folder, 1).latest().ok()?;
    Some(Checkpoint::open(&latest).ok()?.progress.step)
}

/// The command of a child: as typed, and again going on with what the first one left. So nothing that was asked for is lost with it.
fn command(typed: &Raw, words: &[OsString], again: bool) -> anyhow::Result<Command> {
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
    let ranks = typed.ranks.unwrap_or(1);
    let mut command = mpirun(ranks, typed.hostfile.as_deref())?;
    command.arg(program).args(words);
    Ok(command)
}

/// mpirun for ranks that have threads of their own.
fn mpirun(ranks: usize, hostfile: Option<&Path>) -> anyhow::Result<Command> {
    let version = mpirun_version()?;
    let mut command = Command::new("mpirun");
    command.args(["-n", &ranks.to_string()]);
    if let Some(file) = hostfile {
        command.arg("--hostfile").arg(file);
    }
    if version.contains("Open MPI") {
        // It would tie all threads of a rank to one core.
        command.args(["--bind-to", "none"]);
        if hostfile.is_none() {
            command.arg("--oversubscribe");
        }
    }
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

/// Signals that came for the child.
struct Forwarded {
    came: Vec<(i32, Arc<AtomicBool>)>,
    /// Of these, those that were sent on.
    sent: Vec<AtomicBool>,
}

impl Forwarded {
    fn catch() -> std::io::Result<Self> {
        let came: Vec<_> = asking().map(|signal| (signal, Arc::new(AtomicBool::new(false)))).collect();
        for (signal, flag) in &came {
            flag::register(*signal, Arc::clone(flag))?;
        }
        let sent = came.iter().map(|_| AtomicBool::new(false)).collect();
        Ok(Forwarded { came, sent })
    }

    fn pass_on(&self, child: &Child) {
        for ((signal, came), sent) in self.came.iter().zip(&self.sent) {
            if came.swap(false, Ordering::Relaxed) {
                sent.store(true, Ordering::Relaxed);
                // SAFETY: a signal to a child that was not waited for yet, so that its number is still its own.
                unsafe { libc::kill(child.id() as libc::pid_t, *signal) };
            }
        }
    }

    /// A signal that came.
    fn any(&self) -> Option<i32> {
        let seen = |came: &AtomicBool, sent: &AtomicBool| {
            came.load(Ordering::Relaxed) || sent.load(Ordering::Relaxed)
        };
        self.came
            .iter()
            .zip(&self.sent)
            .find(|((_, came), sent)| seen(came, sent))
            .map(|((signal, _), _)| *signal)
    }
}

/// Starts a child, passes signals on to it, and waits for its end.
fn watch(mut command: Command, signals: &Forwarded) -> anyhow::Result<ExitStatus> {
    // A group of its own: Ctrl-C comes once, from here, and not also from the terminal.
    command.process_group(0);
    let me = std::process::id();
    // SAFETY: between fork and exec only calls that are safe there are made: prctl and getppid; an error is only built.
    unsafe {
        command.pre_exec(move || {
            let asked = libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM);
            // Had the parent ended before, no signal would come.
            let orphan = libc::getppid() as u32 != me;
            if asked != 0 || orphan { Err(std::io::ErrorKind::NotFound.into()) } else { Ok(()) }
        });
    }
    let program = command.get_program().to_string_lossy().into_owned();
    let mut child = command.spawn().with_context(|| format!("can't start {program}"))?;
    loop {
        if let Some(status) = child.try_wait().context("can't wait for the run")? {
            return Ok(status);
        }
        signals.pass_on(&child);
        std::thread::sleep(Duration::from_millis(20));
    }
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
        let command = command(&args(line), &words(line), again).unwrap();
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
        let found = command(&args(line), &words(line), false).unwrap();
        assert_eq!(found.get_program(), "mpirun");
        let child = child(line, false);
        assert!(child.starts_with("-n 3 --hostfile hosts "), "{child}");
        assert!(child.ends_with(" train --ranks 3 --comm mpi --out a"), "{child}");
    }

    #[test]
    fn root_has_to_be_allowed_twice() {
        let with = |set: &[(&str, &str)]| {
            root_may(&|name: &str| set.iter().find(|(known, _)| *known == name).map(|(_, v)| v.to_string()))
        };
        let (once, again) = (("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"));
        assert!(!with(&[]) && !with(&[once]) && !with(&[again]) && with(&[once, again]));
        assert!(!with(&[("OMPI_ALLOW_RUN_AS_ROOT", "0"), again]));
        assert!(with(&[("PRTE_ALLOW_RUN_AS_ROOT", "1"), ("PRTE_ALLOW_RUN_AS_ROOT_CONFIRM", "1")]));
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
        assert_eq!(after(ExitStatus::from_raw(3 << 8), Some(SIGINT)), Next::End(3), "it was asked to stop");
    }
}
