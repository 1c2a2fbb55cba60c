//! A rank's side of the control.

use super::judge::{Cause, Verdict};
use super::office::{Office, Report};
use super::panics;
use crate::engine::Engine;
use crate::pulse::{Name, Pulse};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// A verdict comes this soon after the failure of a rank, if whoever judges is there.
const VERDICT_WITHIN: Duration = Duration::from_secs(3);
/// The control thread has done its part this soon.
const TOLD_WITHIN: Duration = Duration::from_secs(2);

/// What a rank says of itself to the others, and hears of them. Cheap to clone.
#[derive(Clone)]
pub struct Watch {
    office: Arc<Office>,
    /// Among the ranks of this process.
    seat: usize,
}

/// How a rank's run ended, if not well.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ended {
    /// For the process: 1 if it would end so again, 3 if it might not.
    pub code: u8,
    /// What to print, if it is up to this rank.
    pub line: Option<String>,
}

/// Why a rank can't go on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    /// As one line.
    Own(String),
    /// What the rank computes on was lost, as one line that names the rank: it may go better another time.
    Device(String),
}

impl From<String> for Failure {
    fn from(line: String) -> Self {
        Failure::Own(line)
    }
}

impl Watch {
    pub(crate) fn new(office: Arc<Office>, seat: usize) -> Self {
        Watch { office, seat }
    }

    pub fn pulse(&self) -> &Arc<Pulse> {
        &self.office.locals[self.seat].pulse
    }

    pub fn doing(&self, name: Name) {
        self.pulse().doing(name);
    }

    /// Work of the host of unknown length, for which the others should wait: it isn't stuck meanwhile.
    pub fn busy(&self, what: &str) -> Busy {
        let before = self.pulse().turn_to(self.pulse().name(what));
        self.office.locals[self.seat].busy.fetch_add(1, Ordering::Relaxed);
        Busy { watch: self.clone(), before }
    }

    /// The engine of another group that this rank is in, of devices for example, is broken off with the world's if the run is.
    /// Engines that were split off one that is known end with that.
    pub fn ends(&self, engine: &Arc<dyn Engine>) {
        self.office.ends(self.seat, engine);
    }

    /// Whether this rank talks to the user.
    pub fn prints(&self) -> bool {
        self.office.locals[self.seat].rank == 0
    }

    /// This rank can't go on: all end, and the first such line is the one that is told.
    pub fn fail(&self, line: &str) {
        self.fail_for(Cause::of(self.pulse().broken()), line);
    }

    fn fail_for(&self, cause: Cause, line: &str) {
        if self.office.served {
            return self.office.report(self.seat, Report::Failed { cause, line: line.to_string() });
        }
        let code = if matches!(cause, Cause::Panic | Cause::Device) { 3 } else { 1 };
        self.office.decide(&Verdict { rank: 0, line: line.to_string(), code }, true);
    }

    /// Why the run ends. Waits a moment for it: a failed exchange is noticed before its cause.
    pub fn verdict(&self) -> Option<Verdict> {
        self.office.wait_for_verdict(VERDICT_WITHIN)
    }

    /// The run ended in good order. Rank 0 stays until all have, as they need it.
    pub fn leave(&self) {
        self.office.report(self.seat, Report::Left);
        if self.office.locals.len() == 1 {
            self.office.wait_for_close(None);
        }
    }

    /// Does the work of a rank, and ends its run with it: in good order, or with the line that tells what happened, be it
    /// here or elsewhere. A panic is a failure like others.
    pub fn run<T, E: Into<Failure>>(&self, work: impl FnOnce() -> Result<T, E>) -> Result<T, Ended> {
        let result = match panics::caught(work) {
            Ok(Ok(value)) => {
                self.leave();
                // Another rank may have failed meanwhile.
                self.office.verdict().map_or(Ok(value), |verdict| Err(self.told(verdict)))
            }
            Ok(Err(failure)) => Err(match failure.into() {
                Failure::Own(line) => self.given_up(Cause::of(self.pulse().broken()), &line),
                Failure::Device(line) => self.given_up(Cause::Device, &line),
            }),
            Err(line) => Err(self.given_up(Cause::Panic, &line)),
        };
        self.office.end();
        result
    }

    /// The same for the first part of a rank's work: the run goes on after it.
    pub(crate) fn run_part<T>(&self, work: impl FnOnce() -> Result<T, String>) -> Result<T, Ended> {
        work().map_err(|line| {
            let ended = self.given_up(Cause::Exchange, &line);
            self.office.end();
            ended
        })
    }

    fn given_up(&self, cause: Cause, line: &str) -> Ended {
        self.fail_for(cause, line);
        let verdict = self.verdict().unwrap_or_else(|| {
            // Nobody is there to judge; nobody else can tell.
            let rank = self.office.locals[self.seat].rank;
            let verdict = Verdict { rank, line: format!("rank {rank}: {line}"), code: 3 };
            self.office.decide(&verdict, true);
            verdict
        });
        self.told(verdict)
    }

    fn told(&self, verdict: Verdict) -> Ended {
        let prints = self.seat == 0 && self.office.claim_line();
        self.office.wait_for_close(Some(TOLD_WITHIN));
        Ended { code: verdict.code, line: prints.then_some(verdict.line) }
    }
}

/// While it lives, the others wait for what the rank does.
pub struct Busy {
    watch: Watch,
    before: u32,
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.watch.pulse().resume(self.before);
        self.watch.office.locals[self.watch.seat].busy.fetch_sub(1, Ordering::Relaxed);
    }
}
