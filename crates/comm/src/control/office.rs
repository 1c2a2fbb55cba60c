//! What the ranks of a process and its control thread share.

use super::judge::{Cause, Limits, Verdict};
use crate::engine::Engine;
use crate::pulse::Pulse;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

/// After a verdict a rank's own thread should tell it, as it knows what else is on the screen. Not later than this: mpirun kills
/// all ranks a second after one died.
const PRINT_AFTER: Duration = Duration::from_millis(300);
/// Unless whoever reads is stuck.
const PRINTED_WITHIN: Duration = Duration::from_secs(1);
/// A rank that hasn't ended by itself this long after a verdict is ended.
const END_AFTER: Duration = Duration::from_secs(3);

/// A rank of this process.
pub(crate) struct Local {
    pub rank: usize,
    pub pulse: Arc<Pulse>,
    /// How many things of unknown length it does.
    pub busy: AtomicU32,
    pub engine: OnceLock<Arc<dyn Engine>>,
    /// Engines of other groups that it is in, as long as they are there.
    others: Mutex<Vec<Weak<dyn Engine>>>,
}

impl Local {
    pub fn new(rank: usize, pulse: Arc<Pulse>) -> Self {
        Local { rank, pulse, busy: AtomicU32::new(0), engine: OnceLock::new(), others: Mutex::default() }
    }

    /// All engines that end with the run.
    fn engines(&self) -> Vec<Arc<dyn Engine>> {
        let others = self.others.lock().unwrap_or_else(PoisonError::into_inner);
        self.engine.get().cloned().into_iter().chain(others.iter().filter_map(Weak::upgrade)).collect()
    }

    pub fn is_busy(&self) -> bool {
        self.busy.load(Ordering::Relaxed) > 0
    }
}

/// What a rank says of its run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Report {
    Working,
    Failed { cause: Cause, line: String },
    Left,
}

pub(crate) struct Office {
    pub locals: Vec<Local>,
    pub limits: Limits,
    /// Whether a control thread serves it. One rank alone needs none.
    pub served: bool,
    desk: Mutex<Desk>,
    changed: Condvar,
    bell: UnixStream,
    ear: UnixStream,
}

/// Where the line of the verdict is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Line {
    /// With whoever prints it, or another process does.
    Elsewhere,
    /// This process prints it, and nobody has begun to.
    Waiting,
    /// The control thread prints it.
    OnItsWay,
}

struct Desk {
    reports: Vec<Report>,
    /// Ranks whose work is over, in whatever way.
    ended: usize,
    verdict: Option<Verdict>,
    line: Line,
    /// The control thread has nothing left to do for the others.
    closed: bool,
}

impl Office {
    pub fn new(locals: Vec<Local>, limits: Limits, served: bool) -> std::io::Result<Self> {
        let (bell, ear) = UnixStream::pair()?;
        bell.set_nonblocking(true)?;
        ear.set_nonblocking(true)?;
        let desk = Desk {
            reports: vec![Report::Working; locals.len()],
            ended: 0,
            verdict: None,
            line: Line::Elsewhere,
            closed: !served,
        };
        Ok(Office { locals, limits, served, desk: Mutex::new(desk), changed: Condvar::new(), bell, ear })
    }

    /// What the control thread waits for, beside its links.
    pub fn ear(&self) -> RawFd {
        self.ear.as_raw_fd()
    }

    /// Takes note of the bell.
    pub fn listen(&self) {
        let mut bytes = [0; 64];
        while matches!((&self.ear).read(&mut bytes), Ok(count) if count > 0) {}
    }

    pub fn report(&self, seat: usize, report: Report) {
        let mut desk = self.desk();
        if desk.reports[seat] == Report::Working {
            desk.reports[seat] = report;
        }
        drop(desk);
        // A full pipe has rung already.
        let _ = (&self.bell).write(&[1]);
    }

    pub fn reported(&self, seat: usize) -> Report {
        self.desk().reports[seat].clone()
    }

    /// The run is over for all ranks of this process. The first verdict holds.
    pub fn decide(&self, verdict: &Verdict, prints: bool) {
        let mut desk = self.desk();
        if desk.verdict.is_none() {
            desk.verdict = Some(verdict.clone());
            desk.line = if prints { Line::Waiting } else { Line::Elsewhere };
        }
        drop(desk);
        self.changed.notify_all();
        for engine in self.locals.iter().flat_map(Local::engines) {
            engine.abort(&verdict.line);
        }
    }

    /// A verdict ends this engine too.
    pub fn ends(&self, seat: usize, engine: &Arc<dyn Engine>) {
        let mut others = self.locals[seat].others.lock().unwrap_or_else(PoisonError::into_inner);
        others.retain(|other| other.strong_count() > 0);
        others.push(Arc::downgrade(engine));
        drop(others);
        // A verdict is set before engines are looked for; so one of the two sees the other.
        if let Some(verdict) = self.verdict() {
            engine.abort(&verdict.line);
        }
    }

    pub fn verdict(&self) -> Option<Verdict> {
        self.desk().verdict.clone()
    }

    pub fn wait_for_verdict(&self, time: Duration) -> Option<Verdict> {
        let desk = self.desk();
        let undecided = |desk: &mut Desk| desk.verdict.is_none();
        let waited = self.changed.wait_timeout_while(desk, time, undecided);
        waited.unwrap_or_else(PoisonError::into_inner).0.verdict.clone()
    }

    /// Waits until the others were told, or a verdict came.
    pub fn wait_for_close(&self, time: Option<Duration>) {
        let mut desk = self.desk();
        let deadline = time.map(|time| Instant::now() + time);
        while !desk.closed && (deadline.is_some() || desk.verdict.is_none()) {
            let left = deadline.map_or(END_AFTER, |d| d.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                return;
            }
            desk = self.changed.wait_timeout(desk, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    pub fn close(&self) {
        self.desk().closed = true;
        self.changed.notify_all();
    }

    /// A rank's work is over.
    pub fn end(&self) {
        self.desk().ended += 1;
        self.changed.notify_all();
    }

    /// Whether the caller is the one to print the verdict. If the control thread has begun to, waits for it.
    pub fn claim_line(&self) -> bool {
        let mut desk = self.desk();
        let claimed = desk.line == Line::Waiting;
        if claimed {
            desk.line = Line::Elsewhere;
        }
        let printing = |desk: &mut Desk| desk.line == Line::OnItsWay;
        drop(self.changed.wait_timeout_while(desk, PRINTED_WITHIN, printing));
        claimed
    }

    /// After a verdict: gives the ranks of this process time to end by themselves, and ends them if they don't. `tend`
    /// serves the links, and tells whether there is anything left to do.
    pub fn conclude(self: &Arc<Self>, mut tend: impl FnMut() -> bool) {
        let since = Instant::now();
        loop {
            if !tend() {
                self.close();
            }
            let mut desk = self.desk();
            if desk.closed && desk.ended == self.locals.len() {
                return;
            }
            let code = desk.verdict.as_ref().map_or(1, |verdict| verdict.code);
            if since.elapsed() >= PRINT_AFTER && desk.line == Line::Waiting {
                desk.line = Line::OnItsWay;
                let line = desk.verdict.as_ref().map(|verdict| verdict.line.clone()).unwrap_or_default();
                self.print(line);
            }
            drop(desk);
            if since.elapsed() >= END_AFTER {
                // SAFETY: ends the process at once. Files are whole or as they were at any moment, so nothing is lost.
                unsafe { libc::_exit(i32::from(code)) };
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// On a thread of its own: whoever reads may be stuck too, and the end must not wait.
    fn print(self: &Arc<Self>, line: String) {
        let office = Arc::clone(self);
        let print = move || {
            eprintln!("vitesse: {line}");
            office.desk().line = Line::Elsewhere;
            office.changed.notify_all();
        };
        let _ = std::thread::Builder::new().spawn(print);
    }

    fn desk(&self) -> MutexGuard<'_, Desk> {
        // Whole between any two statements, whoever panicked.
        self.desk.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
