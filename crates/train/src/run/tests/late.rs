//! A device that is ahead of what the host knows of it.

use cpu::Executor;
use devices::DeviceError;
use devices::device::{
    Account, BadValue, Benchmarks, CollectiveTime, Event, Hardware, Inputs, Outcome, Plans, Prepared,
    Snapshot, States, StepTime, Times, Which,
};
use graph::{Header, Program, StateId};
use std::borrow::Cow;
use std::collections::VecDeque;
use std::sync::Arc;

/// The control of a step in which the device is lost.
pub const LOST: [f64; 3] = [-1.0; 3];

/// The CPU as a GPU would be: it is ahead of what the host knows of it, by at most `depth` steps. Whatever needs a moment with
/// nothing in flight fails if there is something.
pub struct Late {
    executor: Executor<f32>,
    depth: usize,
    in_flight: VecDeque<Outcome>,
    /// Steps ended.
    ended: u64,
    /// What is told of a step instead of the truth.
    change: fn(u64, &mut Outcome),
    /// States that snapshots are of.
    copied: Vec<StateId>,
    /// The memory of the one snapshot that there may be.
    room: Arc<()>,
}

impl Late {
    /// A device that may have `depth` steps in flight, and tells of each what `change` makes of it.
    pub fn new(executor: Executor<f32>, depth: usize, change: fn(u64, &mut Outcome)) -> Self {
        let (in_flight, copied, room) = (VecDeque::new(), vec![], Arc::new(()));
        Late { executor, depth, in_flight, ended: 0, change, copied, room }
    }

    fn quiet(&self) -> &Executor<f32> {
        assert!(self.in_flight.is_empty(), "{} steps are in flight", self.in_flight.len());
        &self.executor
    }

    fn quiet_mut(&mut self) -> &mut Executor<f32> {
        self.quiet();
        &mut self.executor
    }
}

impl Plans for Late {
    fn program(&self) -> &Program {
        self.executor.program()
    }

    fn rebind(&mut self, program: Program) -> Result<(), DeviceError> {
        Plans::rebind(self.quiet_mut(), program)
    }

    fn depth(&self) -> usize {
        self.depth
    }

    fn load(&mut self, which: Which, batch: &Inputs<'_>) -> Result<(), DeviceError> {
        self.executor.load(which, batch)
    }

    fn run(&mut self, which: Which, header: &Header) -> Result<(), DeviceError> {
        Plans::run(&mut self.executor, which, header)
    }

    fn end_step(&mut self) -> Result<(), DeviceError> {
        let mut outcome = self.executor.outcome()?;
        (self.change)(self.ended, &mut outcome);
        self.ended += 1;
        self.in_flight.push_back(outcome);
        assert!(self.in_flight.len() <= self.depth);
        Ok(())
    }

    fn outcome(&mut self) -> Result<Outcome, DeviceError> {
        let outcome = self.in_flight.pop_front().unwrap();
        if outcome.control != LOST {
            return Ok(outcome);
        }
        let (doing, name) = ("waiting for a step's numbers".into(), "CUDA_ERROR_LAUNCH_FAILED".into());
        let meaning = "unspecified launch failure".into();
        Err(cuda::CudaError::Lost { doing, name, meaning }.into())
    }

    fn run_checked(&mut self, which: Which, header: &Header) -> Result<Option<BadValue>, DeviceError> {
        Plans::run_checked(self.quiet_mut(), which, header)
    }
}

impl States<f32> for Late {
    fn output(&self, which: Which, name: &str) -> Result<Option<Cow<'_, [f32]>>, DeviceError> {
        States::output(self.quiet(), which, name)
    }

    fn state(&self, id: StateId) -> Result<Cow<'_, [f32]>, DeviceError> {
        States::state(self.quiet(), id)
    }

    fn write_state(&mut self, id: StateId, values: &[f32]) -> Result<(), DeviceError> {
        States::write_state(self.quiet_mut(), id, values)
    }

    fn write_bytes(&mut self, id: StateId, bytes: &[u8]) -> Result<(), DeviceError> {
        States::write_bytes(self.quiet_mut(), id, bytes)
    }

    fn reset_averages(&mut self) -> Result<(), DeviceError> {
        States::reset_averages(self.quiet_mut())
    }

    /// With three steps in flight, and no room for a copy with two.
    fn prepare_snapshots(&mut self, ids: &[StateId]) -> Result<Prepared, DeviceError> {
        self.copied = ids.to_vec();
        Ok(match self.depth {
            1 => Prepared::No,
            2 => Prepared::NoRoom { bytes: 7_000_000_000 },
            _ => Prepared::Beside,
        })
    }

    fn snapshot(&mut self) -> Result<Option<Box<dyn Snapshot<f32> + Send>>, DeviceError> {
        assert_eq!(Arc::strong_count(&self.room), 1, "a snapshot is left");
        let states = self.copied.iter().map(|id| self.executor.state(*id).to_vec()).collect();
        let copied = Copied { states, _room: Arc::clone(&self.room) };
        Ok((self.depth > 2).then(|| Box::new(copied) as Box<dyn Snapshot<f32> + Send>))
    }
}

/// Is read slowly, so that steps go on meanwhile.
struct Copied {
    states: Vec<Vec<f32>>,
    _room: Arc<()>,
}

impl Snapshot<f32> for Copied {
    fn read(&mut self, index: usize) -> Result<&[f32], DeviceError> {
        std::thread::sleep(std::time::Duration::from_micros(300));
        Ok(&self.states[index])
    }
}

impl Times for Late {
    fn take_account(&mut self) -> Account {
        self.executor.take_account()
    }

    fn collectives(&self) -> &[CollectiveTime] {
        self.executor.collectives()
    }

    fn set_timing(&mut self, on: bool) {
        self.executor.set_timing(on);
    }

    fn set_tracing(&mut self, on: bool) {
        self.executor.set_tracing(on);
    }

    fn take_trace(&mut self, into: &mut Vec<Event>) {
        self.executor.take_trace(into);
    }

    fn training_times(&self) -> Vec<StepTime> {
        self.executor.training_times()
    }

    fn reset_times(&mut self) {
        self.executor.reset_times();
    }
}

impl Benchmarks for Late {}

impl Hardware for Late {
    fn name(&self) -> String {
        "GPU 0 (a CPU in truth)".into()
    }

    fn lose(&mut self) -> Result<(), DeviceError> {
        self.executor.lose()
    }

    fn spin(&mut self) -> Result<(), DeviceError> {
        self.executor.spin()
    }
}
