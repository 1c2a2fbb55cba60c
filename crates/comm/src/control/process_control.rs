//! State that the ranks of a process share with its control thread.

use super::diagnosis::{Cause, Diagnosis, Limits};
use crate::activity::Activity;
use crate::engine::Engine;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

/// Time after a diagnosis in which a rank's own thread should print it, as it knows what else is on the screen. The control thread does
/// after that: mpirun kills all ranks a second after one died.
const PRINT_AFTER: Duration = Duration::from_millis(300);
/// Longest wait for the line to be printed: the reader may be stuck.
const PRINTED_WITHIN: Duration = Duration::from_secs(1);
/// Time after a diagnosis at which the process exits, if its ranks haven't ended by themselves.
const END_AFTER: Duration = Duration::from_secs(3);

/// Prints a line to the user, from any thread.
pub(crate) type Printer = fn(&str);

/// A rank of this process.
pub(crate) struct LocalRank {
    pub rank: usize,
    pub activity: Arc<Activity>,
    /// Number of [`BusyGuard`](super::BusyGuard)s.
    pub busy: AtomicU32,
    pub engine: OnceLock<Arc<dyn Engine>>,
    /// Engines of its other groups, as long as they exist.
    others: Mutex<Vec<Weak<dyn Engine>>>,
}

impl LocalRank {
    pub fn new(rank: usize, activity: Arc<Activity>) -> Self {
        LocalRank {
            rank,
            activity,
            busy: AtomicU32::new(0),
            engine: OnceLock::new(),
            others: Mutex::default(),
        }
    }

    /// All engines that are aborted with the run.
    fn engines(&self) -> Vec<Arc<dyn Engine>> {
        let others = self.others.lock().unwrap_or_else(PoisonError::into_inner);
        self.engine.get().cloned().into_iter().chain(others.iter().filter_map(Weak::upgrade)).collect()
    }

    pub fn is_busy(&self) -> bool {
        self.busy.load(Ordering::Relaxed) > 0
    }
}

/// Report of a rank on its run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Report {
    Working,
    Failed { cause: Cause, line: String },
    Finished,
}

/// Shared state of the ranks of this process and its control thread.
pub(crate) struct ProcessControl {
    pub locals: Vec<LocalRank>,
    pub limits: Limits,
    /// True if a control thread serves it. One rank alone needs none.
    pub served: bool,
    /// Prints a line for the user.
    print: Printer,
    status: Mutex<Status>,
    changed: Condvar,
    /// Wakes the control thread, which polls the other end.
    wake_sender: UnixStream,
    wake_receiver: UnixStream,
}

/// Progress of printing the diagnosis.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Printing {
    /// Nothing to do: another thread or process prints it.
    Elsewhere,
    /// This process prints it, and no thread has begun to.
    Pending,
    /// The control thread is printing it.
    Ongoing,
}

/// State under the lock.
struct Status {
    reports: Vec<Report>,
    /// Number of ranks whose work is over, in whatever way.
    ended: usize,
    diagnosis: Option<Diagnosis>,
    printing: Printing,
    /// True if the control thread has nothing left to do for the other ranks.
    closed: bool,
}

impl ProcessControl {
    pub fn new(
        locals: Vec<LocalRank>,
        limits: Limits,
        served: bool,
        print: Printer,
    ) -> std::io::Result<Self> {
        let (wake_sender, wake_receiver) = UnixStream::pair()?;
        wake_sender.set_nonblocking(true)?;
        wake_receiver.set_nonblocking(true)?;
        let status = Status {
            reports: vec![Report::Working; locals.len()],
            ended: 0,
            diagnosis: None,
            printing: Printing::Elsewhere,
            closed: !served,
        };
        Ok(ProcessControl {
            locals,
            limits,
            served,
            print,
            status: Mutex::new(status),
            changed: Condvar::new(),
            wake_sender,
            wake_receiver,
        })
    }

    /// Descriptor that the control thread polls beside its connections.
    pub fn wake_fd(&self) -> RawFd {
        self.wake_receiver.as_raw_fd()
    }

    /// Clears the wake-ups received so far.
    pub fn clear_wakeups(&self) {
        let mut bytes = [0; 64];
        while matches!((&self.wake_receiver).read(&mut bytes), Ok(count) if count > 0) {}
    }

    pub fn report(&self, index: usize, report: Report) {
        let mut status = self.status();
        if status.reports[index] == Report::Working {
            status.reports[index] = report;
        }
        drop(status);
        // If the pipe is full, the control thread is about to wake.
        let _ = (&self.wake_sender).write(&[1]);
    }

    pub fn reported(&self, index: usize) -> Report {
        self.status().reports[index].clone()
    }

    /// Ends the run of all ranks of this process. The first diagnosis counts.
    pub fn set_diagnosis(&self, diagnosis: &Diagnosis, prints: bool) {
        let mut status = self.status();
        if status.diagnosis.is_none() {
            status.diagnosis = Some(diagnosis.clone());
            status.printing = if prints { Printing::Pending } else { Printing::Elsewhere };
        }
        drop(status);
        self.changed.notify_all();
        for engine in self.locals.iter().flat_map(LocalRank::engines) {
            engine.abort(&diagnosis.line);
        }
    }

    /// Registers an engine to be aborted with the run.
    pub fn abort_with_run(&self, index: usize, engine: &Arc<dyn Engine>) {
        let mut others = self.locals[index].others.lock().unwrap_or_else(PoisonError::into_inner);
        others.retain(|other| other.strong_count() > 0);
        others.push(Arc::downgrade(engine));
        drop(others);
        // The diagnosis is set before engines are looked for; so one of the two sees the other.
        if let Some(diagnosis) = self.diagnosis() {
            engine.abort(&diagnosis.line);
        }
    }

    pub fn diagnosis(&self) -> Option<Diagnosis> {
        self.status().diagnosis.clone()
    }

    pub fn wait_for_diagnosis(&self, time: Duration) -> Option<Diagnosis> {
        let status = self.status();
        let undecided = |status: &mut Status| status.diagnosis.is_none();
        let waited = self.changed.wait_timeout_while(status, time, undecided);
        waited.unwrap_or_else(PoisonError::into_inner).0.diagnosis.clone()
    }

    /// Waits until the other ranks are informed, or a diagnosis arrived.
    pub fn wait_for_close(&self, time: Option<Duration>) {
        let mut status = self.status();
        let deadline = time.map(|time| Instant::now() + time);
        while !status.closed && (deadline.is_some() || status.diagnosis.is_none()) {
            let left = deadline.map_or(END_AFTER, |d| d.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                return;
            }
            status = self.changed.wait_timeout(status, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    pub fn close(&self) {
        self.status().closed = true;
        self.changed.notify_all();
    }

    /// Records that a rank's work is over.
    pub fn rank_ended(&self) {
        self.status().ended += 1;
        self.changed.notify_all();
    }

    /// Claims the printing of the diagnosis; false if another thread prints it. Waits for the control thread if it has begun to.
    pub fn claim_line(&self) -> bool {
        let mut status = self.status();
        let claimed = status.printing == Printing::Pending;
        if claimed {
            status.printing = Printing::Elsewhere;
        }
        let printing = |status: &mut Status| status.printing == Printing::Ongoing;
        drop(self.changed.wait_timeout_while(status, PRINTED_WITHIN, printing));
        claimed
    }

    /// Ends the process after a diagnosis: gives its ranks time to end by themselves, and exits if they don't. `poll` serves the
    /// connections, and returns whether anything is left to do.
    pub fn conclude(self: &Arc<Self>, mut poll: impl FnMut() -> bool) {
        let since = Instant::now();
        loop {
            if !poll() {
                self.close();
            }
            let mut status = self.status();
            if status.closed && status.ended == self.locals.len() {
                return;
            }
            let code = status.diagnosis.as_ref().map_or(1, |diagnosis| diagnosis.code);
            if since.elapsed() >= PRINT_AFTER && status.printing == Printing::Pending {
                status.printing = Printing::Ongoing;
                let line =
                    status.diagnosis.as_ref().map(|diagnosis| diagnosis.line.clone()).unwrap_or_default();
                self.print_line(line);
            }
            drop(status);
            if since.elapsed() >= END_AFTER {
                // SAFETY: exits at once. Files are replaced atomically, so nothing is lost.
                unsafe { libc::_exit(i32::from(code)) };
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Prints on a thread of its own: the reader may be stuck, and the exit must not wait.
    fn print_line(self: &Arc<Self>, line: String) {
        let control = Arc::clone(self);
        let print = move || {
            (control.print)(&line);
            control.status().printing = Printing::Elsewhere;
            control.changed.notify_all();
        };
        let _ = std::thread::Builder::new().spawn(print);
    }

    fn status(&self) -> MutexGuard<'_, Status> {
        // Consistent between any two statements, even after a panic.
        self.status.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
