//! Communication with other ranks: by NCCL, whose calls go into a stream, or through host memory.

use super::list::Streams;
use crate::driver::{Block, Context, Stream};
use crate::error::CudaError;
use calls::PlanCommunicators;
use comm::nccl::{self, DeviceQueue, Library};
use comm::{Call, Collective, CommError, Communicator, ElementType, Engine, Monitor, Reduction, Span};
use graph::{Group, Program};
use std::cell::RefCell;
use std::ffi::c_void;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Communication between ranks with data on GPUs.
#[derive(Clone)]
pub enum GpuComm {
    /// Over NCCL, each rank with a GPU of its own: a device group is made of the ranks of `world`. All of them open their
    /// executors at the same time. The group is aborted with the run of `monitor`.
    Nccl { world: Communicator, library: Arc<Library>, monitor: Option<Monitor> },
    /// Through pinned host memory, by the engine of a world. Ranks may share a GPU.
    Host(Communicator),
}

impl GpuComm {
    /// This rank.
    pub fn rank(&self) -> usize {
        match self {
            GpuComm::Nccl { world, .. } | GpuComm::Host(world) => world.rank(),
        }
    }
}

/// Period at which a rank that waits for the GPU checks the other ranks.
const LOOK: Duration = Duration::from_millis(5);
/// Time for which a wait spins before it sleeps.
const SPIN: Duration = Duration::from_micros(50);
const NAP: Duration = Duration::from_micros(20);

/// Bytes of device memory for barriers and for the first call.
const SCRATCH: usize = 512;

/// An open [`GpuComm`]. Fields are dropped in this order; graphs with calls are destroyed by then.
pub(super) struct GpuCommunicator {
    /// Communicators of all ranks, and of the groups that plans name.
    groups: RefCell<PlanCommunicators>,
    /// Communicator of the hosts.
    world: Communicator,
    is_orderly: bool,
    scratch: Option<Block>,
}

impl GpuCommunicator {
    /// `stream` is the comm lane's, and outlives what is returned.
    pub fn open(comm: &GpuComm, context: &Arc<Context>, stream: &Stream) -> Result<Self, CudaError> {
        let (world, library, monitor) = match comm {
            GpuComm::Host(world) => {
                let groups = RefCell::new(PlanCommunicators::new(world.clone()));
                return Ok(GpuCommunicator {
                    groups,
                    world: world.clone(),
                    is_orderly: false,
                    scratch: None,
                });
            }
            GpuComm::Nccl { world, library, monitor } => (world, library, monitor),
        };
        let _busy = monitor.as_ref().map(|monitor| monitor.busy("joining the GPUs"));
        context.enter()?;
        let scratch = Block::new(context, SCRATCH, "communication scratch")?;
        let queue = DeviceQueue { stream: stream.raw.cast(), scratch: scratch.address as *mut c_void };
        // SAFETY: both are of the GPU that is current; the scratch is dropped after the group, and so is the stream.
        let engine: Arc<dyn Engine> = unsafe { nccl::join(Ok(Arc::clone(library)), world, queue) }?;
        if let Some(monitor) = monitor {
            monitor.abort_with_run(&engine);
        }
        let groups = RefCell::new(PlanCommunicators::new(world.with_engine(engine)));
        let communicator =
            GpuCommunicator { groups, world: world.clone(), is_orderly: false, scratch: Some(scratch) };
        communicator.connect(&communicator.comm(), stream)?;
        Ok(communicator)
    }

    /// NCCL connects the ranks of a group at their first call, which takes long and should not happen under capture.
    fn connect(&self, group: &Communicator, stream: &Stream) -> Result<(), CudaError> {
        let Some(scratch) = &self.scratch else { return Ok(()) };
        let address = (scratch.address as *mut u8).wrapping_add(SCRATCH / 2);
        let span = Span { address, len: 32 };
        let name = group.name("first call of the GPUs");
        let collective = Collective::AllReduce(Reduction::Sum);
        let call = Call { collective, kind: ElementType::F32, send: span, receive: span, name };
        // SAFETY: memory of the GPU that nobody else uses.
        unsafe { enqueue(group, &call) }?;
        self.wait_until(|| stream.is_done())
    }

    /// Makes the groups that a program names. All ranks call it at the same time.
    pub fn prepare(&self, program: &Program, stream: &Stream) -> Result<(), CudaError> {
        let new = self.groups.borrow_mut().prepare(program.plans())?;
        new.iter().try_for_each(|group| self.connect(group, stream))
    }

    /// Communicator of a prepared group.
    pub fn group(&self, group: Group) -> Option<Communicator> {
        self.groups.borrow().get(group).cloned()
    }

    /// Tells whether calls go into the comm lane's stream, and not through host memory.
    pub fn is_on_device(&self) -> bool {
        self.comm().engine().enqueues()
    }

    /// All ranks.
    pub fn comm(&self) -> Communicator {
        self.groups.borrow().world().clone()
    }

    /// Returns an error if another rank is known to be lost.
    fn check(&self) -> Result<(), CommError> {
        self.comm().engine().check()?;
        self.world.engine().check()
    }

    /// Waits for the GPU, or for the failure of another rank, which could otherwise block it for ever.
    pub fn wait_until(&self, is_done: impl FnMut() -> Result<bool, CudaError>) -> Result<(), CudaError> {
        let waited = self.wait_and_look(is_done);
        self.world.activity().await_device(false);
        waited
    }

    fn wait_and_look(&self, mut is_done: impl FnMut() -> Result<bool, CudaError>) -> Result<(), CudaError> {
        let began = Instant::now();
        let mut looked = began;
        while !is_done()? {
            let now = Instant::now();
            if now.duration_since(looked) >= LOOK {
                self.world.activity().await_device(self.is_on_device());
                self.check()?;
                looked = now;
            }
            if now.duration_since(began) < SPIN { std::thread::yield_now() } else { std::thread::sleep(NAP) }
        }
        Ok(())
    }

    /// Records that all ranks end without error.
    pub fn finish(&mut self) {
        self.is_orderly = true;
    }

    /// Aborts collectives on the GPU that wait for other ranks, unless all ranks end without error.
    pub fn let_go(&self) {
        if !self.is_orderly && self.is_on_device() {
            self.comm().engine().abort("this rank has ended");
        }
    }
}

/// Enqueues a call on the comm lane's stream, which may be under capture.
///
/// # Safety
/// The spans are device memory, and nobody touches them before the stream has run the call.
pub(super) unsafe fn enqueue(group: &Communicator, call: &Call) -> Result<(), CudaError> {
    // SAFETY: passed on to the caller.
    let ticket = unsafe { group.start(call.clone()) }?;
    group.wait(ticket)?;
    Ok(())
}

impl Drop for GpuCommunicator {
    fn drop(&mut self) {
        self.let_go();
    }
}

impl Streams {
    /// Communicator for collectives. Programs with some are refused without one.
    pub fn communicator(&self) -> Result<&GpuCommunicator, CudaError> {
        self.communicator.as_ref().ok_or_else(|| CudaError::Misuse("a collective without other ranks".into()))
    }
}
