//! A rank's handle to the control plane.

use super::diagnosis::{Cause, Diagnosis};
use super::panics;
use super::process_control::{ProcessControl, Report};
use crate::activity::{Activity, Name};
use crate::engine::Engine;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Time in which a diagnosis follows a rank's failure, if the coordinator is there.
const DIAGNOSED_WITHIN: Duration = Duration::from_secs(3);
/// Time in which the control thread has informed the others.
const INFORMED_WITHIN: Duration = Duration::from_secs(2);

/// A rank's handle to the control plane: reports its activity and failure, and gives the run's diagnosis. Cheap to clone.
#[derive(Clone)]
pub struct Monitor {
    control: Arc<ProcessControl>,
    /// Index among the ranks of this process.
    index: usize,
}

/// Exit code and message of a rank whose run failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExitReport {
    /// Exit code of the process: 1 if a restart would fail again, 3 if it might not.
    pub code: u8,
    /// Line to print, if this rank prints it.
    pub line: Option<String>,
}

/// Reason why a rank can't go on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    /// An error of its own, as one line.
    Own(String),
    /// Loss of the rank's device, as one line that names the rank: a restart may succeed.
    Device(String),
}

impl From<String> for Failure {
    fn from(line: String) -> Self {
        Failure::Own(line)
    }
}

impl Monitor {
    pub(crate) fn new(control: Arc<ProcessControl>, index: usize) -> Self {
        Monitor { control, index }
    }

    pub fn activity(&self) -> &Arc<Activity> {
        &self.control.locals[self.index].activity
    }

    pub fn doing(&self, name: Name) {
        self.activity().doing(name);
    }

    /// Marks host work of unknown length, such as reading a checkpoint: the rank doesn't count as stuck until the guard is dropped.
    pub fn busy(&self, what: &str) -> BusyGuard {
        let before = self.activity().turn_to(self.activity().name(what));
        self.control.locals[self.index].busy.fetch_add(1, Ordering::Relaxed);
        BusyGuard { monitor: self.clone(), before }
    }

    /// Registers the engine of another group of this rank, such as one of devices, to be aborted with the world's. Engines split off a
    /// registered one are aborted with it.
    pub fn abort_with_run(&self, engine: &Arc<dyn Engine>) {
        self.control.abort_with_run(self.index, engine);
    }

    /// Tells whether this rank prints to the user.
    pub fn prints(&self) -> bool {
        self.control.locals[self.index].rank == 0
    }

    /// Reports that this rank can't go on: all ranks end, and the first such line is the one that is printed.
    pub fn fail(&self, line: &str) {
        self.fail_for(Cause::of(self.activity().failure()), line);
    }

    fn fail_for(&self, cause: Cause, line: &str) {
        if self.control.served {
            return self.control.report(self.index, Report::Failed { cause, line: line.to_string() });
        }
        let code = if matches!(cause, Cause::Panic | Cause::Device) { 3 } else { 1 };
        self.control.set_diagnosis(&Diagnosis { rank: 0, line: line.to_string(), code }, true);
    }

    /// The run's diagnosis. Waits a moment for it: failed communication is noticed before its cause.
    pub fn diagnosis(&self) -> Option<Diagnosis> {
        self.control.wait_for_diagnosis(DIAGNOSED_WITHIN)
    }

    /// Reports that this rank ended without error. Every process stays until all ranks have: the others need rank 0, and srun and mpirun
    /// end a job whose first process has left with a code other than 0, as one that was stopped does.
    pub fn finish(&self) {
        self.control.report(self.index, Report::Finished);
        if self.control.locals.len() == 1 {
            self.control.wait_for_close(None);
        }
    }

    /// Runs the work of a rank and ends its run: without error, or with the line that reports the failure, be it of this rank or
    /// another. A panic is a failure like others.
    pub fn run<T, E: Into<Failure>>(&self, work: impl FnOnce() -> Result<T, E>) -> Result<T, ExitReport> {
        let result = match panics::caught(work) {
            Ok(Ok(value)) => {
                self.finish();
                // Another rank may have failed meanwhile.
                self.control.diagnosis().map_or(Ok(value), |diagnosis| Err(self.exit_report(diagnosis)))
            }
            Ok(Err(failure)) => Err(match failure.into() {
                Failure::Own(line) => self.give_up(Cause::of(self.activity().failure()), &line),
                Failure::Device(line) => self.give_up(Cause::Device, &line),
            }),
            Err(line) => Err(self.give_up(Cause::Panic, &line)),
        };
        self.control.rank_ended();
        result
    }

    /// Runs the first part of a rank's work; the run goes on after it.
    pub(crate) fn run_part<T>(&self, work: impl FnOnce() -> Result<T, String>) -> Result<T, ExitReport> {
        work().map_err(|line| {
            let ended = self.give_up(Cause::Communication, &line);
            self.control.rank_ended();
            ended
        })
    }

    fn give_up(&self, cause: Cause, line: &str) -> ExitReport {
        self.fail_for(cause, line);
        let diagnosis = self.diagnosis().unwrap_or_else(|| {
            // The coordinator is gone; nobody else can report it.
            let rank = self.control.locals[self.index].rank;
            let diagnosis = Diagnosis { rank, line: format!("rank {rank}: {line}"), code: 3 };
            self.control.set_diagnosis(&diagnosis, true);
            diagnosis
        });
        self.exit_report(diagnosis)
    }

    fn exit_report(&self, diagnosis: Diagnosis) -> ExitReport {
        let prints = self.index == 0 && self.control.claim_line();
        self.control.wait_for_close(Some(INFORMED_WITHIN));
        ExitReport { code: diagnosis.code, line: prints.then_some(diagnosis.line) }
    }
}

/// Guard of host work of unknown length; see [`Monitor::busy`].
pub struct BusyGuard {
    monitor: Monitor,
    before: u32,
}

impl Drop for BusyGuard {
    fn drop(&mut self) {
        self.monitor.activity().resume(self.before);
        self.monitor.control.locals[self.monitor.index].busy.fetch_sub(1, Ordering::Relaxed);
    }
}
