//! Ranks as threads of a test: an engine as plain as can be, which may be told to dawdle or to fail.

use comm::{Activity, Call, Collective, CommError, Communicator, ElementType, Engine, Reduction, Span};
use half::{bf16, f16};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::time::Duration;

struct Meeting {
    barrier: Barrier,
    spans: Mutex<Vec<Span>>,
}

/// One rank's side of the meeting.
pub struct Together {
    rank: usize,
    size: usize,
    meeting: Arc<Meeting>,
    /// Each call takes this much longer.
    pub delay: Duration,
    /// The call, counted from 0, that fails on every rank.
    pub fails_at: Option<usize>,
    pub calls: AtomicUsize,
}

impl Together {
    pub fn ranks(size: usize) -> Vec<Together> {
        let spans = Mutex::new(vec![Span::EMPTY; size]);
        let meeting = Arc::new(Meeting { barrier: Barrier::new(size), spans });
        let rank = |rank| Together {
            rank,
            size,
            meeting: Arc::clone(&meeting),
            delay: Duration::ZERO,
            fails_at: None,
            calls: AtomicUsize::new(0),
        };
        (0..size).map(rank).collect()
    }

    pub fn communicator(self) -> Communicator {
        Communicator::new(Arc::new(self), Arc::new(Activity::new()))
    }
}

/// Communicators of `size` ranks.
pub fn communicators(size: usize) -> Vec<Communicator> {
    Together::ranks(size).into_iter().map(Together::communicator).collect()
}

/// Does `work` on every rank, each a thread, and returns what they return in their order.
pub fn on_each<R: Send>(ranks: Vec<Communicator>, work: impl Fn(Communicator) -> R + Sync) -> Vec<R> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = ranks.into_iter().map(|comm| scope.spawn(|| work(comm))).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

/// Does `work` on each of so many threads, which are ranks of the engine that a run of threads has.
pub fn among<R: Send>(ranks: usize, work: impl Fn(Communicator) -> R + Sync) -> Vec<R> {
    let options = comm::Options { comm: Some(comm::Backend::Threads), ranks: Some(ranks), timeout: None };
    let Ok(comm::Start::Threads(members)) = comm::start(&options, |_| {}) else { panic!("threads") };
    on_each(members.iter().map(|member| member.world.clone()).collect(), work)
}

/// Element `i`, whatever the type.
unsafe fn load(kind: ElementType, span: Span, i: usize) -> f64 {
    // SAFETY: the caller's spans are valid for their kind.
    unsafe {
        match kind {
            ElementType::F32 => f64::from(*span.address.cast::<f32>().add(i)),
            ElementType::F64 => *span.address.cast::<f64>().add(i),
            ElementType::Bf16 => (*span.address.cast::<bf16>().add(i)).to_f64(),
            ElementType::F16 => (*span.address.cast::<f16>().add(i)).to_f64(),
            other => panic!("no sums of {other:?} here"),
        }
    }
}

unsafe fn store(kind: ElementType, span: Span, i: usize, value: f64) {
    // SAFETY: the caller's spans are valid for their kind.
    unsafe {
        match kind {
            ElementType::F32 => *span.address.cast::<f32>().add(i) = value as f32,
            ElementType::F64 => *span.address.cast::<f64>().add(i) = value,
            ElementType::Bf16 => *span.address.cast::<bf16>().add(i) = bf16::from_f64(value),
            ElementType::F16 => *span.address.cast::<f16>().add(i) = f16::from_f64(value),
            other => panic!("no sums of {other:?} here"),
        }
    }
}

impl Engine for Together {
    fn name(&self) -> &'static str {
        "together"
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    unsafe fn run(&self, call: &Call) -> Result<(), CommError> {
        if self.fails_at == Some(self.calls.fetch_add(1, Ordering::Relaxed)) {
            return Err(CommError::Lost { rank: 1, why: "the test says so".into() });
        }
        std::thread::sleep(self.delay);
        self.meeting.spans.lock().unwrap()[self.rank] = call.send;
        self.meeting.barrier.wait();
        let spans = self.meeting.spans.lock().unwrap().clone();
        // SAFETY: all ranks are here, and nobody writes before the next meeting.
        let of = |span: &Span, i| unsafe { load(call.kind, *span, i) };
        let elements = 0..call.send.len;
        let results: Vec<f64> = match &call.collective {
            Collective::AllReduce(Reduction::Sum) => {
                elements.map(|i| spans.iter().map(|span| of(span, i)).sum()).collect()
            }
            Collective::AllGather => {
                spans.iter().flat_map(|span| elements.clone().map(move |i| of(span, i))).collect()
            }
            other => panic!("{other:?} is not needed here"),
        };
        self.meeting.barrier.wait();
        for (i, result) in results.into_iter().enumerate() {
            // SAFETY: the caller's span; the others only read theirs before the meeting.
            unsafe { store(call.kind, call.receive, i, result) };
        }
        Ok(())
    }

    fn split(&self, _: usize, _: usize) -> Result<Arc<dyn Engine>, CommError> {
        Err(CommError::Misuse("not here".into()))
    }

    fn abort(&self, _: &str) {}
}
