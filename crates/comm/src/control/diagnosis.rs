//! Diagnosis of a failed run from each rank's last heartbeat. No sockets, threads or clocks here: time is an argument.

use super::phrases::{call, list, ranks};
use crate::activity::{Activity, CallInfo, Snapshot};
use crate::engine::CommError;
use std::sync::Arc;
use std::time::Duration;

/// Time limits after which a rank has failed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Longest time without a heartbeat.
    pub silence: Duration,
    /// Longest time without progress while other ranks wait.
    pub stuck: Duration,
}

impl Limits {
    pub fn new(timeout: Option<Duration>) -> Self {
        let of = |seconds| timeout.unwrap_or(Duration::from_secs(seconds));
        Limits { silence: of(10), stuck: of(120) }
    }
}

/// Time after a rank's failure in which others may fail for the same reason.
const SETTLE: Duration = Duration::from_millis(400);
/// Time after the loss of a rank in which the others, which are asked at once, answer. mpirun kills them soon after.
const LOST_SETTLE: Duration = Duration::from_millis(120);
/// Time after failed communication in which the loss of the responsible rank shows, if it does.
const COMMUNICATION_SETTLE: Duration = Duration::from_millis(1200);

/// Age up to which a heartbeat shows what the rank does now.
const FRESH: Duration = Duration::from_secs(2);

/// Cause of a rank's failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cause {
    /// Its own error: input, files, configuration.
    Own,
    Panic,
    /// Its device was lost.
    Device,
    /// Ranks called different collectives.
    Mismatch,
    /// Communication failed for the loss of a rank.
    Lost(usize),
    /// Communication failed.
    Communication,
    /// Communication was aborted for the failure of another rank.
    Aborted,
}

impl Cause {
    /// Cause of an error on a rank whose communication failed with `failure`, if it did.
    pub fn of(failure: Option<&CommError>) -> Self {
        match failure {
            None => Cause::Own,
            Some(CommError::Mismatch { .. } | CommError::Misuse(_)) => Cause::Mismatch,
            Some(CommError::Lost { rank, .. }) => Cause::Lost(*rank),
            Some(CommError::Engine { .. }) => Cause::Communication,
            Some(CommError::Aborted(_)) => Cause::Aborted,
        }
    }

    fn is_root(self) -> bool {
        matches!(self, Cause::Own | Cause::Panic | Cause::Device)
    }

    /// Priority among failures that follow from another: the most informative one first.
    fn order(self) -> u8 {
        match self {
            Cause::Own | Cause::Panic | Cause::Device => 0,
            Cause::Mismatch => 1,
            Cause::Lost(_) => 2,
            Cause::Communication => 3,
            Cause::Aborted => 4,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum RankState {
    Running,
    /// Ended without error.
    Finished,
    Failed {
        at: Duration,
        cause: Cause,
        line: String,
    },
    /// Disconnected without a message.
    Lost {
        at: Duration,
    },
}

/// Last known status of a rank.
#[derive(Clone, Debug)]
pub(crate) struct RankStatus {
    pub rank: usize,
    pub host: Arc<str>,
    pub pid: u32,
    /// Time of its last heartbeat.
    pub last_heartbeat: Duration,
    /// Time at which its progress last grew.
    pub last_progress: Duration,
    pub busy: bool,
    pub snapshot: Snapshot,
    pub state: RankState,
}

impl RankStatus {
    pub fn new(rank: usize, host: &str, pid: u32, now: Duration) -> Self {
        let snapshot = Activity::new().snapshot();
        let host = Arc::from(host);
        RankStatus {
            rank,
            host,
            pid,
            last_heartbeat: now,
            last_progress: now,
            busy: false,
            snapshot,
            state: RankState::Running,
        }
    }

    /// Records a heartbeat.
    pub fn record(&mut self, snapshot: Snapshot, busy: bool, now: Duration) {
        if snapshot.progress != self.snapshot.progress {
            self.last_progress = now;
        }
        self.last_heartbeat = now;
        self.busy = busy;
        self.snapshot = snapshot;
    }

    fn who(&self) -> String {
        format!("rank {} (host {}, pid {})", self.rank, self.host, self.pid)
    }

    /// Activity in its last heartbeat.
    fn at(&self) -> String {
        self.snapshot.current_call.as_ref().map_or_else(|| self.snapshot.doing.to_string(), call)
    }

    fn is_running(&self) -> bool {
        self.state == RankState::Running
    }

    /// Tells whether it has failed or was lost, so that a diagnosis is near.
    pub fn is_in_trouble(&self) -> bool {
        matches!(self.state, RankState::Failed { .. } | RankState::Lost { .. })
    }
}

/// Reason why the run ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Diagnosis {
    /// Rank that caused it.
    pub rank: usize,
    /// Error message, one line.
    pub line: String,
    /// Exit code: 1 if a restart would fail again, 3 if it might not.
    pub code: u8,
}

const AGAIN: u8 = 1;
const FAULT: u8 = 3;

/// Diagnoses the run: the failure to report, once there is one and it is clear which rank caused it.
pub(crate) fn diagnose(statuses: &[RankStatus], limits: &Limits, now: Duration) -> Option<Diagnosis> {
    match first_root(statuses) {
        Some((at, status)) if now < at + settle(status) && !all_failed(statuses) => return None,
        Some((_, status)) => return Some(root(statuses, status)),
        None => {}
    }
    diverged(statuses)
        .or_else(|| communication_failed(statuses, now))
        .or_else(|| silent(statuses, limits.silence, now))
        .or_else(|| left_early(statuses, now))
        .or_else(|| hung(statuses, limits.stuck, now))
}

/// Diagnoses what a rank can tell of another by itself: whether it is still there.
pub(crate) fn diagnose_presence(
    statuses: &[RankStatus],
    limits: &Limits,
    now: Duration,
) -> Option<Diagnosis> {
    let gone = statuses.iter().find_map(|status| match status.state {
        RankState::Lost { at } if now >= at + LOST_SETTLE => Some(lost(statuses, status)),
        _ => None,
    });
    gone.or_else(|| silent(statuses, limits.silence, now))
}

/// The first rank that failed by itself or was lost.
fn first_root(statuses: &[RankStatus]) -> Option<(Duration, &RankStatus)> {
    let roots = statuses.iter().filter_map(|status| match &status.state {
        RankState::Failed { at, cause, .. } if cause.is_root() => Some((*at, status)),
        RankState::Lost { at } => Some((*at, status)),
        _ => None,
    });
    roots.min_by_key(|(at, status)| (*at, status.rank))
}

fn settle(status: &RankStatus) -> Duration {
    if matches!(status.state, RankState::Lost { .. }) { LOST_SETTLE } else { SETTLE }
}

fn all_failed(statuses: &[RankStatus]) -> bool {
    statuses.iter().all(|status| matches!(status.state, RankState::Failed { .. }))
}

fn root(statuses: &[RankStatus], status: &RankStatus) -> Diagnosis {
    match &status.state {
        RankState::Failed { cause: Cause::Panic, line, .. } => panicked(statuses, status, line),
        RankState::Failed { cause: Cause::Device, line, .. } => device_lost(statuses, status, line),
        RankState::Failed { line, .. } => failed(statuses, status, line),
        _ => lost(statuses, status),
    }
}

/// Reports an error that all ranks have once, without naming a rank.
fn failed(statuses: &[RankStatus], status: &RankStatus, line: &str) -> Diagnosis {
    let same = |other: &RankStatus| matches!(&other.state, RankState::Failed { line: theirs, cause, .. } if theirs == line && cause.is_root());
    let with_it: Vec<usize> =
        statuses.iter().filter(|status| same(status)).map(|status| status.rank).collect();
    let rank = with_it.first().copied().unwrap_or(status.rank);
    let line = match with_it.len() == statuses.len() {
        true => line.to_string(),
        false => format!("{}: {line}", ranks(&with_it)),
    };
    Diagnosis { rank, line, code: AGAIN }
}

fn panicked(statuses: &[RankStatus], status: &RankStatus, line: &str) -> Diagnosis {
    let line = match statuses.len() {
        1 => format!("{line} (in {})", status.at()),
        _ => format!("{} {line} (in {}){}", status.who(), status.at(), waiting(statuses, &[status.rank])),
    };
    Diagnosis { rank: status.rank, line, code: FAULT }
}

/// Reports a lost device; the line names the rank.
fn device_lost(statuses: &[RankStatus], status: &RankStatus, line: &str) -> Diagnosis {
    Diagnosis { rank: status.rank, line: format!("{line}{}", waiting(statuses, &[status.rank])), code: FAULT }
}

fn lost(statuses: &[RankStatus], status: &RankStatus) -> Diagnosis {
    // Where others are two calls ahead, it must have been further than in its last heartbeat.
    let ahead = statuses.iter().any(|other| other.snapshot.entered > status.snapshot.entered + 1);
    let at = if ahead {
        format!("was lost, last heartbeat in {}", status.at())
    } else {
        format!("was lost in {}", status.at())
    };
    let line = format!("{} {at}{}", status.who(), waiting(statuses, &[status.rank]));
    Diagnosis { rank: status.rank, line, code: FAULT }
}

/// Finds ranks that made as many calls as others, but not the same ones.
fn diverged(statuses: &[RankStatus]) -> Option<Diagnosis> {
    for status in statuses {
        let (mut agree, mut differ) = (0, Vec::new());
        for other in statuses {
            match same_calls(&status.snapshot, &other.snapshot) {
                Some(true) => agree += 1,
                Some(false) => differ.push(other),
                None => {}
            }
        }
        // The odd one out is named; between two, the one that isn't rank 0.
        let odd = differ.len() > agree || (differ.len() == agree && status.rank > 0);
        if let Some(other) = differ.first().filter(|_| odd) {
            return Some(apart(status, other));
        }
    }
    None
}

/// Compares the calls of two ranks, where they can be compared.
fn same_calls(one: &Snapshot, other: &Snapshot) -> Option<bool> {
    let stage = |snapshot: &Snapshot| snapshot.entered / Activity::MILESTONE;
    if one.entered == other.entered && one.digest != other.digest {
        return Some(false);
    }
    (stage(one) == stage(other)).then_some(one.milestone == other.milestone)
}

fn apart(status: &RankStatus, other: &RankStatus) -> Diagnosis {
    let (ours, theirs) = (&status.snapshot, &other.snapshot);
    let line = match (&ours.last_call, &theirs.last_call) {
        (Some(our), Some(their)) if ours.entered == theirs.entered && what(our) != what(their) => {
            format!("{} calls {} where rank {} calls {}", status.who(), call(our), other.rank, call(their))
        }
        _ => {
            let calls = ours.entered.min(theirs.entered);
            let who = status.who();
            format!(
                "{who} called other collectives than rank {} among the first {calls}; it is in {}",
                other.rank,
                status.at()
            )
        }
    };
    Diagnosis { rank: status.rank, line, code: AGAIN }
}

fn what(at: &CallInfo) -> (&'static str, &str, u64) {
    (at.collective, &at.name, at.bytes)
}

fn communication_failed(statuses: &[RankStatus], now: Duration) -> Option<Diagnosis> {
    let failures = statuses.iter().filter_map(|status| match &status.state {
        RankState::Failed { at, cause, line } => Some((*at, *cause, status, line)),
        _ => None,
    });
    // A rank that lost another aborts too, and is then lost to a third.
    let by_another = |cause: Cause| match cause {
        Cause::Lost(lost) => statuses.iter().any(|status| status.rank == lost && !status.is_running()),
        _ => false,
    };
    let (_, cause, status, line) = failures
        .clone()
        .min_by_key(|(at, cause, status, _)| (cause.order(), by_another(*cause), *at, status.rank))?;
    let since = failures.map(|(at, ..)| at).min()?;
    let patience = if cause == Cause::Mismatch { SETTLE } else { COMMUNICATION_SETTLE };
    if now < since + patience {
        return None;
    }
    let (rank, code) = match cause {
        Cause::Lost(rank) => (rank, FAULT),
        Cause::Mismatch => (status.rank, AGAIN),
        _ => (status.rank, FAULT),
    };
    let line = match statuses.len() {
        1 => line.clone(),
        _ => format!("rank {}, in {}: {line}", status.rank, status.at()),
    };
    Some(Diagnosis { rank, line, code })
}

/// Finds ranks without a heartbeat. Those of one host fall silent together, though their last heartbeats differ in time.
fn silent(statuses: &[RankStatus], silence: Duration, now: Duration) -> Option<Diagnosis> {
    let quiet = |status: &&RankStatus, limit| status.is_running() && now >= status.last_heartbeat + limit;
    statuses.iter().find(|status| quiet(status, silence + SETTLE))?;
    let silent: Vec<&RankStatus> = statuses.iter().filter(|status| quiet(status, silence)).collect();
    let first = silent.first()?;
    let numbers: Vec<usize> = silent.iter().map(|status| status.rank).collect();
    let who = match silent.len() {
        1 => first.who(),
        _ => format!("{} (host {})", ranks(&numbers), list(silent.iter().map(|status| &*status.host))),
    };
    let line = format!(
        "{who} sent no heartbeat for {:.0} s (stopped, or cut off from the network), last in {}{}",
        silence.as_secs_f64(),
        first.at(),
        waiting(statuses, &numbers)
    );
    Some(Diagnosis { rank: first.rank, line, code: FAULT })
}

/// Finds a rank that ended without error while another is in a call that it never made.
fn left_early(statuses: &[RankStatus], now: Duration) -> Option<Diagnosis> {
    let left = statuses.iter().filter(|status| status.state == RankState::Finished);
    let first = left.min_by_key(|status| status.snapshot.entered)?;
    let waits = |status: &&RankStatus| {
        let at = status.snapshot.current_call.as_ref();
        // The others may make the same call within a moment.
        let waits = status.is_running() && now >= status.last_progress + SETTLE;
        waits && at.is_some_and(|at| at.sequence > first.snapshot.entered)
    };
    statuses.iter().find(waits)?;
    let line = format!("{} ended its run{}", first.who(), waiting(statuses, &[first.rank]));
    Some(Diagnosis { rank: first.rank, line, code: AGAIN })
}

/// Finds a rank without progress that others wait for, or a collective in which all wait, or GPUs for which all wait.
fn hung(statuses: &[RankStatus], stuck: Duration, now: Duration) -> Option<Diagnosis> {
    // One without a heartbeat is silent rather than hung, which will show.
    let last_heartbeat = |status: &RankStatus| now < status.last_heartbeat + (stuck / 2).min(FRESH);
    let still = |status: &&RankStatus| {
        status.is_running() && !status.busy && last_heartbeat(status) && now >= status.last_progress + stuck
    };
    let (waiters, idle): (Vec<&RankStatus>, Vec<&RankStatus>) =
        statuses.iter().filter(still).partition(|status| status.snapshot.current_call.is_some());
    let someone_waits =
        statuses.iter().any(|status| status.is_running() && status.snapshot.current_call.is_some());
    if let Some(status) = idle.first().filter(|_| someone_waits) {
        return Some(stalled(statuses, status, stuck));
    }
    let here = statuses.iter().filter(|status| status.is_running()).count();
    // Calls in the queues of devices are no host's: which device the others wait for can't be told.
    if here > 1 && idle.len() == here && idle.iter().all(|status| status.snapshot.awaits_device) {
        let (seconds, at) = (stuck.as_secs_f64(), idle[0].at());
        let line = format!(
            "no rank made progress for {seconds:.0} s, and all wait for their GPUs in {at}: a kernel or NCCL hangs"
        );
        return Some(Diagnosis { rank: idle[0].rank, line, code: FAULT });
    }
    if waiters.len() < here || here < 2 {
        return None;
    }
    let behind = waiters.iter().min_by_key(|status| (status.snapshot.entered, status.rank))?;
    if waiters.iter().any(|status| status.snapshot.entered > behind.snapshot.entered) {
        return Some(stalled(statuses, behind, stuck));
    }
    let line =
        format!("all ranks wait in {} for {:.0} s: communication hangs", behind.at(), stuck.as_secs_f64());
    Some(Diagnosis { rank: behind.rank, line, code: FAULT })
}

fn stalled(statuses: &[RankStatus], status: &RankStatus, stuck: Duration) -> Diagnosis {
    let seconds = stuck.as_secs_f64();
    let line = format!(
        "{} made no progress for {seconds:.0} s in {}{}",
        status.who(),
        status.at(),
        waiting(statuses, &[status.rank])
    );
    Diagnosis { rank: status.rank, line, code: FAULT }
}

/// Names the ranks that wait for the faulty ones, and the call in which most of them wait.
fn waiting(statuses: &[RankStatus], faulty: &[usize]) -> String {
    let mut calls: Vec<(&CallInfo, Vec<usize>)> = Vec::new();
    for status in statuses.iter().filter(|status| !faulty.contains(&status.rank)) {
        let Some(at) = status.snapshot.current_call.as_ref().filter(|_| status.state != RankState::Finished)
        else {
            continue;
        };
        match calls.iter_mut().find(|(call, _)| *call == at) {
            Some((_, waiters)) => waiters.push(status.rank),
            None => calls.push((at, vec![status.rank])),
        }
    }
    calls.sort_by_key(|(at, waiters)| (std::cmp::Reverse(waiters.len()), at.sequence));
    let Some((at, waiters)) = calls.first() else { return String::new() };
    let (wait, them) =
        (if waiters.len() == 1 { "waits" } else { "wait" }, if faulty.len() == 1 { "it" } else { "them" });
    format!("; {} {wait} for {them} in {}", ranks(waiters), call(at))
}

#[cfg(test)]
mod tests;
