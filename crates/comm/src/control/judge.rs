//! What is wrong with the ranks, from what each was last heard to do. No sockets, threads or clocks here: time is an argument.

use super::phrases::{call, list, ranks};
use crate::engine::CommError;
use crate::pulse::{At, Pulse, Snapshot};
use std::sync::Arc;
use std::time::Duration;

/// How long is too long.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Without a sign of life.
    pub silence: Duration,
    /// Without progress, while others wait.
    pub stuck: Duration,
}

impl Limits {
    pub fn new(timeout: Option<Duration>) -> Self {
        let of = |seconds| timeout.unwrap_or(Duration::from_secs(seconds));
        Limits { silence: of(10), stuck: of(120) }
    }
}

/// A rank failed: others that fail within this time may do so for the same reason.
const SETTLE: Duration = Duration::from_millis(400);
/// A rank went: the others, which are asked at once, answer within this time. mpirun kills them soon after.
const LOST_SETTLE: Duration = Duration::from_millis(120);
/// An exchange failed: the rank that is to blame will be missed within this time, if it can be.
const EXCHANGE_SETTLE: Duration = Duration::from_millis(1200);

/// What was heard of a rank within this time tells what it does now.
const FRESH: Duration = Duration::from_secs(2);

/// Why a rank ended its run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cause {
    /// Its own error: input, files, configuration.
    Own,
    Panic,
    /// What it computes on was lost.
    Device,
    /// The exchange failed: ranks called different things.
    Mismatch,
    /// The exchange failed for the loss of a rank.
    Lost(usize),
    /// The exchange failed.
    Exchange,
    /// The exchange was broken off for the fault of another.
    Aborted,
}

impl Cause {
    /// Of an error on a rank whose exchange failed so, if it did.
    pub fn of(broken: Option<&CommError>) -> Self {
        match broken {
            None => Cause::Own,
            Some(CommError::Mismatch { .. } | CommError::Misuse(_)) => Cause::Mismatch,
            Some(CommError::Lost { rank, .. }) => Cause::Lost(*rank),
            Some(CommError::Engine { .. }) => Cause::Exchange,
            Some(CommError::Aborted(_)) => Cause::Aborted,
        }
    }

    fn is_root(self) -> bool {
        matches!(self, Cause::Own | Cause::Panic | Cause::Device)
    }

    /// Of failures that follow from another, the one that tells most comes first.
    fn order(self) -> u8 {
        match self {
            Cause::Own | Cause::Panic | Cause::Device => 0,
            Cause::Mismatch => 1,
            Cause::Lost(_) => 2,
            Cause::Exchange => 3,
            Cause::Aborted => 4,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum State {
    Here,
    /// Ended in good order.
    Left,
    Failed {
        at: Duration,
        cause: Cause,
        line: String,
    },
    /// Went without a word.
    Gone {
        at: Duration,
    },
}

/// What is known of a rank.
#[derive(Clone, Debug)]
pub(crate) struct Seat {
    pub rank: usize,
    pub host: Arc<str>,
    pub pid: u32,
    pub heard: Duration,
    /// When its progress last grew.
    pub moved: Duration,
    pub busy: bool,
    pub snapshot: Snapshot,
    pub state: State,
}

impl Seat {
    pub fn new(rank: usize, host: &str, pid: u32, now: Duration) -> Self {
        let snapshot = Pulse::new().snapshot();
        let host = Arc::from(host);
        Seat { rank, host, pid, heard: now, moved: now, busy: false, snapshot, state: State::Here }
    }

    /// A sign of life.
    pub fn hear(&mut self, snapshot: Snapshot, busy: bool, now: Duration) {
        if snapshot.progress != self.snapshot.progress {
            self.moved = now;
        }
        self.heard = now;
        self.busy = busy;
        self.snapshot = snapshot;
    }

    fn who(&self) -> String {
        format!("rank {} (host {}, pid {})", self.rank, self.host, self.pid)
    }

    /// What it did when last heard of.
    fn at(&self) -> String {
        self.snapshot.at.as_ref().map_or_else(|| self.snapshot.doing.to_string(), call)
    }

    fn is_here(&self) -> bool {
        self.state == State::Here
    }

    /// Whether it is known to be in trouble, so that a verdict is near.
    pub fn is_in_trouble(&self) -> bool {
        matches!(self.state, State::Failed { .. } | State::Gone { .. })
    }
}

/// What ends the run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// Whose fault it is.
    pub rank: usize,
    pub line: String,
    /// 1: it would happen again; 3: it might not.
    pub code: u8,
}

const AGAIN: u8 = 1;
const FAULT: u8 = 3;

/// The fault to report, once there is one and it is clear whose.
pub(crate) fn judge(seats: &[Seat], limits: &Limits, now: Duration) -> Option<Verdict> {
    match first_root(seats) {
        Some((at, seat)) if now < at + settle(seat) && !all_failed(seats) => return None,
        Some((_, seat)) => return Some(root(seats, seat)),
        None => {}
    }
    diverged(seats)
        .or_else(|| exchange_failed(seats, now))
        .or_else(|| silent(seats, limits.silence, now))
        .or_else(|| left_early(seats, now))
        .or_else(|| hung(seats, limits.stuck, now))
}

/// What a rank can tell of another by itself: whether it is there.
pub(crate) fn judge_presence(seats: &[Seat], limits: &Limits, now: Duration) -> Option<Verdict> {
    let gone = seats.iter().find_map(|seat| match seat.state {
        State::Gone { at } if now >= at + LOST_SETTLE => Some(lost(seats, seat)),
        _ => None,
    });
    gone.or_else(|| silent(seats, limits.silence, now))
}

/// The first rank that failed by itself or went without a word.
fn first_root(seats: &[Seat]) -> Option<(Duration, &Seat)> {
    let roots = seats.iter().filter_map(|seat| match &seat.state {
        State::Failed { at, cause, .. } if cause.is_root() => Some((*at, seat)),
        State::Gone { at } => Some((*at, seat)),
        _ => None,
    });
    roots.min_by_key(|(at, seat)| (*at, seat.rank))
}

fn settle(seat: &Seat) -> Duration {
    if matches!(seat.state, State::Gone { .. }) { LOST_SETTLE } else { SETTLE }
}

fn all_failed(seats: &[Seat]) -> bool {
    seats.iter().all(|seat| matches!(seat.state, State::Failed { .. }))
}

fn root(seats: &[Seat], seat: &Seat) -> Verdict {
    match &seat.state {
        State::Failed { cause: Cause::Panic, line, .. } => panicked(seats, seat, line),
        State::Failed { cause: Cause::Device, line, .. } => device_lost(seats, seat, line),
        State::Failed { line, .. } => failed(seats, seat, line),
        _ => lost(seats, seat),
    }
}

/// An error that all ranks have is told once, and not as if one of them had made it.
fn failed(seats: &[Seat], seat: &Seat, line: &str) -> Verdict {
    let same = |other: &Seat| matches!(&other.state, State::Failed { line: theirs, cause, .. } if theirs == line && cause.is_root());
    let with_it: Vec<usize> = seats.iter().filter(|seat| same(seat)).map(|seat| seat.rank).collect();
    let rank = with_it.first().copied().unwrap_or(seat.rank);
    let line = match with_it.len() == seats.len() {
        true => line.to_string(),
        false => format!("{}: {line}", ranks(&with_it)),
    };
    Verdict { rank, line, code: AGAIN }
}

fn panicked(seats: &[Seat], seat: &Seat, line: &str) -> Verdict {
    let line = match seats.len() {
        1 => format!("{line} (in {})", seat.at()),
        _ => format!("{} {line} (in {}){}", seat.who(), seat.at(), waiting(seats, &[seat.rank])),
    };
    Verdict { rank: seat.rank, line, code: FAULT }
}

/// The line says whose device it was.
fn device_lost(seats: &[Seat], seat: &Seat, line: &str) -> Verdict {
    Verdict { rank: seat.rank, line: format!("{line}{}", waiting(seats, &[seat.rank])), code: FAULT }
}

fn lost(seats: &[Seat], seat: &Seat) -> Verdict {
    // Where others are two calls ahead, it must have been further than when it was last heard of.
    let ahead = seats.iter().any(|other| other.snapshot.entered > seat.snapshot.entered + 1);
    let at = if ahead {
        format!("was lost, last heard of in {}", seat.at())
    } else {
        format!("was lost in {}", seat.at())
    };
    let line = format!("{} {at}{}", seat.who(), waiting(seats, &[seat.rank]));
    Verdict { rank: seat.rank, line, code: FAULT }
}

/// Ranks that made as many calls as others, but not the same ones.
fn diverged(seats: &[Seat]) -> Option<Verdict> {
    for seat in seats {
        let (mut agree, mut differ) = (0, Vec::new());
        for other in seats {
            match same_calls(&seat.snapshot, &other.snapshot) {
                Some(true) => agree += 1,
                Some(false) => differ.push(other),
                None => {}
            }
        }
        // The odd one out is to blame; between two, the one that isn't rank 0.
        let odd = differ.len() > agree || (differ.len() == agree && seat.rank > 0);
        if let Some(other) = differ.first().filter(|_| odd) {
            return Some(apart(seat, other));
        }
    }
    None
}

/// Whether two ranks made the same calls, where that can be told.
fn same_calls(one: &Snapshot, other: &Snapshot) -> Option<bool> {
    let stage = |snapshot: &Snapshot| snapshot.entered / Pulse::MILESTONE;
    if one.entered == other.entered && one.digest != other.digest {
        return Some(false);
    }
    (stage(one) == stage(other)).then_some(one.milestone == other.milestone)
}

fn apart(seat: &Seat, other: &Seat) -> Verdict {
    let (ours, theirs) = (&seat.snapshot, &other.snapshot);
    let line = match (&ours.last, &theirs.last) {
        (Some(our), Some(their)) if ours.entered == theirs.entered && what(our) != what(their) => {
            format!("{} calls {} where rank {} calls {}", seat.who(), call(our), other.rank, call(their))
        }
        _ => {
            let calls = ours.entered.min(theirs.entered);
            let who = seat.who();
            format!(
                "{who} made other calls than rank {}, among the first {calls}; it is in {}",
                other.rank,
                seat.at()
            )
        }
    };
    Verdict { rank: seat.rank, line, code: AGAIN }
}

fn what(at: &At) -> (&'static str, &str, u64) {
    (at.collective, &at.name, at.bytes)
}

fn exchange_failed(seats: &[Seat], now: Duration) -> Option<Verdict> {
    let failures = seats.iter().filter_map(|seat| match &seat.state {
        State::Failed { at, cause, line } => Some((*at, *cause, seat, line)),
        _ => None,
    });
    // A rank that lost another breaks off too, and is lost to a third.
    let by_another = |cause: Cause| match cause {
        Cause::Lost(lost) => seats.iter().any(|seat| seat.rank == lost && !seat.is_here()),
        _ => false,
    };
    let (_, cause, seat, line) = failures
        .clone()
        .min_by_key(|(at, cause, seat, _)| (cause.order(), by_another(*cause), *at, seat.rank))?;
    let since = failures.map(|(at, ..)| at).min()?;
    let patience = if cause == Cause::Mismatch { SETTLE } else { EXCHANGE_SETTLE };
    if now < since + patience {
        return None;
    }
    let (rank, code) = match cause {
        Cause::Lost(rank) => (rank, FAULT),
        Cause::Mismatch => (seat.rank, AGAIN),
        _ => (seat.rank, FAULT),
    };
    let line = match seats.len() {
        1 => line.clone(),
        _ => format!("rank {}, in {}: {line}", seat.rank, seat.at()),
    };
    Some(Verdict { rank, line, code })
}

/// Ranks of one host fall silent together, but were not last heard of together.
fn silent(seats: &[Seat], silence: Duration, now: Duration) -> Option<Verdict> {
    let quiet = |seat: &&Seat, limit| seat.is_here() && now >= seat.heard + limit;
    seats.iter().find(|seat| quiet(seat, silence + SETTLE))?;
    let silent: Vec<&Seat> = seats.iter().filter(|seat| quiet(seat, silence)).collect();
    let first = silent.first()?;
    let numbers: Vec<usize> = silent.iter().map(|seat| seat.rank).collect();
    let who = match silent.len() {
        1 => first.who(),
        _ => format!("{} (host {})", ranks(&numbers), list(silent.iter().map(|seat| &*seat.host))),
    };
    let line = format!(
        "{who} gave no sign of life for {:.0} s (stopped, or cut off), last in {}{}",
        silence.as_secs_f64(),
        first.at(),
        waiting(seats, &numbers)
    );
    Some(Verdict { rank: first.rank, line, code: FAULT })
}

/// A rank ended in good order, and another is in a call that it never made.
fn left_early(seats: &[Seat], now: Duration) -> Option<Verdict> {
    let left = seats.iter().filter(|seat| seat.state == State::Left);
    let first = left.min_by_key(|seat| seat.snapshot.entered)?;
    let waits = |seat: &&Seat| {
        let at = seat.snapshot.at.as_ref();
        // The others come to the same call within a moment.
        let waits = seat.is_here() && now >= seat.moved + SETTLE;
        waits && at.is_some_and(|at| at.sequence > first.snapshot.entered)
    };
    seats.iter().find(waits)?;
    let line = format!("{} ended its run{}", first.who(), waiting(seats, &[first.rank]));
    Some(Verdict { rank: first.rank, line, code: AGAIN })
}

/// A rank that does nothing while others wait for it; or an exchange in which all wait.
fn hung(seats: &[Seat], stuck: Duration, now: Duration) -> Option<Verdict> {
    // One that isn't heard of either is rather silent, which will show.
    let heard = |seat: &Seat| now < seat.heard + (stuck / 2).min(FRESH);
    let still = |seat: &&Seat| seat.is_here() && !seat.busy && heard(seat) && now >= seat.moved + stuck;
    let (waiters, idle): (Vec<&Seat>, Vec<&Seat>) =
        seats.iter().filter(still).partition(|seat| seat.snapshot.at.is_some());
    let someone_waits = seats.iter().any(|seat| seat.is_here() && seat.snapshot.at.is_some());
    if let Some(seat) = idle.first().filter(|_| someone_waits) {
        return Some(stalled(seats, seat, stuck));
    }
    let here = seats.iter().filter(|seat| seat.is_here()).count();
    if waiters.len() < here || here < 2 {
        return None;
    }
    let behind = waiters.iter().min_by_key(|seat| (seat.snapshot.entered, seat.rank))?;
    if waiters.iter().any(|seat| seat.snapshot.entered > behind.snapshot.entered) {
        return Some(stalled(seats, behind, stuck));
    }
    let line =
        format!("all ranks wait in {} for {:.0} s: the exchange hangs", behind.at(), stuck.as_secs_f64());
    Some(Verdict { rank: behind.rank, line, code: FAULT })
}

fn stalled(seats: &[Seat], seat: &Seat, stuck: Duration) -> Verdict {
    let seconds = stuck.as_secs_f64();
    let line = format!(
        "{} made no progress for {seconds:.0} s in {}{}",
        seat.who(),
        seat.at(),
        waiting(seats, &[seat.rank])
    );
    Verdict { rank: seat.rank, line, code: FAULT }
}

/// Who waits for the ranks at fault, and where: the call that most wait in.
fn waiting(seats: &[Seat], faulty: &[usize]) -> String {
    let mut calls: Vec<(&At, Vec<usize>)> = Vec::new();
    for seat in seats.iter().filter(|seat| !faulty.contains(&seat.rank)) {
        let Some(at) = seat.snapshot.at.as_ref().filter(|_| seat.state != State::Left) else { continue };
        match calls.iter_mut().find(|(call, _)| *call == at) {
            Some((_, waiters)) => waiters.push(seat.rank),
            None => calls.push((at, vec![seat.rank])),
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
