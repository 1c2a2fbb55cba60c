//! The other ranks: through NCCL, whose calls go into a stream, or through the host's memory.

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

/// How ranks exchange what lies on their GPUs.
#[derive(Clone)]
pub enum GpuComm {
    /// Over NCCL, each rank with a GPU of its own: a device group is made of the ranks of `world`. All of them open their
    /// executors at the same time. A verdict of `monitor` breaks the group off.
    Nccl { world: Communicator, library: Arc<Library>, monitor: Option<Monitor> },
    /// Through pinned memory of the host, by the engine of a world. Ranks may share a GPU.
    Host(Communicator),
}

impl GpuComm {
    /// Which of the ranks this is.
    pub fn rank(&self) -> usize {
        match self {
            GpuComm::Nccl { world, .. } | GpuComm::Host(world) => world.rank(),
        }
    }
}

/// How often a rank that waits for the GPU looks whether the others are still there.
const LOOK: Duration = Duration::from_millis(5);
/// What is done soon is waited for without sleeping.
const SPIN: Duration = Duration::from_micros(50);
const NAP: Duration = Duration::from_micros(20);

/// Of the device's memory, for barriers and for the first call.
const SCRATCH: usize = 512;

/// An open [`GpuComm`]. The parts are dropped in this order; graphs with calls are gone by then.
pub(super) struct GpuCommunicator {
    /// Calls are made here: of all ranks, and of the groups that plans name.
    groups: RefCell<PlanCommunicators>,
    /// The hosts' own exchange.
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

    /// Makes the groups that a program names. All ranks do so at the same time.
    pub fn prepare(&self, program: &Program, stream: &Stream) -> Result<(), CudaError> {
        let new = self.groups.borrow_mut().prepare(program.plans())?;
        new.iter().try_for_each(|group| self.connect(group, stream))
    }

    /// The ranks of a group that was prepared.
    pub fn group(&self, group: Group) -> Option<Communicator> {
        self.groups.borrow().get(group).cloned()
    }

    /// Whether calls go into the comm lane's stream, and not through the host's memory.
    pub fn is_on_device(&self) -> bool {
        self.comm().engine().enqueues()
    }

    /// All ranks.
    pub fn comm(&self) -> Communicator {
        self.groups.borrow().world().clone()
    }

    /// Whether the other ranks are still there, as far as is known.
    fn check(&self) -> Result<(), CommError> {
        self.comm().engine().check()?;
        self.world.engine().check()
    }

    /// Waits for the GPU, or for the failure of another rank, without which this might be for ever.
    pub fn wait_until(&self, mut is_done: impl FnMut() -> Result<bool, CudaError>) -> Result<(), CudaError> {
        let began = Instant::now();
        let mut looked = began;
        while !is_done()? {
            let now = Instant::now();
            if now.duration_since(looked) >= LOOK {
                self.check()?;
                looked = now;
            }
            if now.duration_since(began) < SPIN { std::thread::yield_now() } else { std::thread::sleep(NAP) }
        }
        Ok(())
    }

    /// All ranks come to a good end.
    pub fn finish(&mut self) {
        self.is_orderly = true;
    }

    /// Breaks off what runs on the GPU and waits for other ranks, unless all come to a good end: then that ends by itself.
    pub fn let_go(&self) {
        if !self.is_orderly && self.is_on_device() {
            self.comm().engine().abort("this rank has ended");
        }
    }
}

/// Puts a call into the comm lane's stream, which may be under capture.
///
/// # Safety
/// The spans are of the GPU, and nobody touches them before the stream has come past the call.
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
    /// Who does collectives. Programs that have some are refused when there is nobody.
    pub fn communicator(&self) -> Result<&GpuCommunicator, CudaError> {
        self.communicator.as_ref().ok_or_else(|| CudaError::Misuse("a collective without other ranks".into()))
    }
}
