//! The child of a supervised run: started, told of signals, waited for, and ended where it hangs.

use crate::signals::asking;
use anyhow::Context;
use comm::supervisor::{Seen, Watcher};
use signal_hook::flag;
use std::fs;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How often the child is looked at.
const LOOK: Duration = Duration::from_millis(20);
/// Time for mpirun to end after rank 0 failed. It ends the other ranks, unless it can't reach one of their hosts.
const AFTER_FAILURE: Duration = Duration::from_secs(3);
/// Time for mpirun to end after rank 0 ended well: other ranks may have more to free.
const AFTER_SUCCESS: Duration = Duration::from_secs(30);
/// Time for what mpirun left behind to be gone after it was killed.
const KILLED: Duration = Duration::from_secs(1);

/// Signals that came for the child.
pub struct Forwarded {
    came: Vec<(i32, Arc<AtomicBool>)>,
    /// Of these, those that were sent on.
    sent: Vec<AtomicBool>,
}

impl Forwarded {
    pub fn catch() -> std::io::Result<Self> {
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
                send(child, *signal);
            }
        }
    }

    /// A signal that came.
    pub fn any(&self) -> Option<i32> {
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

fn send(child: &Child, signal: i32) {
    // SAFETY: a signal to a child that was not waited for yet, so that its number is still its own.
    unsafe { libc::kill(child.id() as libc::pid_t, signal) };
}

/// How long rank 0 may let its supervisor wait.
pub struct Patience {
    /// For its first sign of life; without, mpirun may take as long as it likes.
    pub start: Option<Duration>,
    /// Between two heartbeats.
    pub silence: Duration,
}

/// Makes what a killed mpirun leaves behind on this machine children of this process, so that they can be ended.
pub fn adopt_orphans() {
    // SAFETY: changes only who becomes the parent of orphans among this process's descendants.
    unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1) };
}

/// Starts a process that ends with this one.
pub fn start(command: &mut Command) -> anyhow::Result<Child> {
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
    command.spawn().with_context(|| format!("can't start {program}"))
}

/// Starts a run, passes signals on to it, and waits for its end.
pub fn watch(mut command: Command, signals: &Forwarded) -> anyhow::Result<ExitStatus> {
    let mut child = start(&mut command)?;
    loop {
        if let Some(status) = child.try_wait().context("can't wait for the run")? {
            return Ok(status);
        }
        signals.pass_on(&child);
        std::thread::sleep(LOOK);
    }
}

/// Starts ranks by mpirun as [`watch`] does, and ends mpirun if it doesn't end with its ranks. Says whether rank 0 was heard of, too.
pub fn watch_mpirun(
    mut command: Command,
    signals: &Forwarded,
    mut watcher: Watcher,
    patience: &Patience,
) -> anyhow::Result<(ExitStatus, bool)> {
    let started = Instant::now();
    let mut child = start(&mut command)?;
    let mut heard = false;
    let status = loop {
        if let Some(status) = child.try_wait().context("can't wait for mpirun")? {
            break status;
        }
        signals.pass_on(&child);
        let seen = watcher.look();
        heard |= seen != Seen::Nothing;
        if let Some((code, why)) = hangs(seen, started, patience) {
            eprintln!("vitesse: {why}; mpirun still runs and is ended");
            // Asked to end, it would only say that it tries to.
            child.kill().context("can't end mpirun")?;
            child.wait().context("can't wait for mpirun")?;
            break ExitStatus::from_raw(i32::from(code) << 8);
        }
        std::thread::sleep(LOOK);
    };
    end_orphans();
    Ok((status, heard))
}

/// The exit code of a run whose mpirun should have ended by now, and why it should.
fn hangs(seen: Seen, started: Instant, patience: &Patience) -> Option<(u8, String)> {
    match seen {
        Seen::Nothing => {
            let limit = patience.start.filter(|limit| started.elapsed() > *limit)?;
            Some((3, format!("rank 0 has not started within {:.0} s", limit.as_secs_f64())))
        }
        Seen::Running(last) if last.elapsed() > patience.silence => {
            Some((3, format!("rank 0 sent no heartbeat for {:.0} s", patience.silence.as_secs_f64())))
        }
        Seen::Running(_) => None,
        Seen::Ended(at, code) => {
            // Codes above 128 are runs that were asked to stop, and did.
            let well = code.is_some_and(|code| code == 0 || code > 128);
            let limit = if well { AFTER_SUCCESS } else { AFTER_FAILURE };
            let late = at.elapsed() > limit;
            late.then(|| (code.unwrap_or(3), format!("rank 0 ended {:.0} s ago", limit.as_secs_f64())))
        }
    }
}

/// Kills what is left of a child that has ended: ranks on this machine, and connections to other hosts.
pub fn end_orphans() {
    let begun = Instant::now();
    loop {
        let orphans = children();
        if orphans.is_empty() || begun.elapsed() > KILLED {
            return;
        }
        for pid in orphans {
            // SAFETY: signals and waits for children of this process, whose numbers are their own until they are waited for.
            unsafe {
                libc::kill(pid, libc::SIGKILL);
                libc::waitpid(pid, std::ptr::null_mut(), libc::WNOHANG);
            }
        }
        std::thread::sleep(LOOK);
    }
}

/// The children of this process.
fn children() -> Vec<libc::pid_t> {
    let tasks = fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let lists = tasks.filter_map(|task| fs::read_to_string(task.path().join("children")).ok());
    let numbers = lists.flat_map(|list| list.split_whitespace().map(str::parse).collect::<Vec<_>>());
    numbers.flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mpirun_hangs_when_rank_0_is_gone_silent_or_never_came() {
        let ago = |seconds: u64| Instant::now() - Duration::from_secs(seconds);
        let patience = Patience { start: Some(Duration::from_secs(60)), silence: Duration::from_secs(20) };
        let code = |seen, started| hangs(seen, started, &patience).map(|(code, _)| code);
        assert_eq!(code(Seen::Nothing, ago(59)), None);
        assert_eq!(code(Seen::Nothing, ago(61)), Some(3));
        let forever = Patience { start: None, ..patience };
        assert!(hangs(Seen::Nothing, ago(1000), &forever).is_none(), "a network may not let rank 0 through");
        assert_eq!(code(Seen::Running(ago(19)), ago(1000)), None);
        assert_eq!(code(Seen::Running(ago(21)), ago(1000)), Some(3));
        assert_eq!(code(Seen::Ended(ago(2), Some(3)), ago(1000)), None);
        assert_eq!(code(Seen::Ended(ago(4), Some(1)), ago(1000)), Some(1));
        assert_eq!(code(Seen::Ended(ago(4), None), ago(1000)), Some(3), "it was killed");
        assert_eq!(code(Seen::Ended(ago(4), Some(0)), ago(1000)), None);
        assert_eq!(code(Seen::Ended(ago(31), Some(0)), ago(1000)), Some(0));
    }
}
