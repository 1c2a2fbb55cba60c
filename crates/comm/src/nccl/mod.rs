//! Engine over NVIDIA's NCCL, for ranks with a GPU each: calls go into a CUDA stream, and spans are device addresses.
//!
//! A device group is made from an existing world ([`join`]) and used beside it: the world transfers data of the hosts,
//! the group data of the devices. Its communicator is made by
//! [`with_engine`](crate::Communicator::with_engine); [`Monitor::abort_with_run`](crate::Monitor::abort_with_run) has it aborted with
//! the world.
//!
//! NCCL chooses the order of sums by the number of ranks, the length and the machine. All ranks get the same bits of an
//! all-reduce, and so does the next run on the same machines; other engines may get others.

mod ffi;
mod handle;
mod join;
mod library;

pub use join::join;
pub use library::{Library, VARIABLE};

use crate::call::{Call, Collective, Counts};
use crate::element::{ElementType, Reduction};
use crate::engine::{CommError, Engine};
use ffi::{Comm, Functions, SUCCESS, data_type, reduction};
use handle::Handle;
use library::{fault, spelled};
use std::ffi::{c_int, c_void};
use std::sync::Arc;

/// CUDA stream and scratch memory of a device group.
#[derive(Clone, Copy, Debug)]
pub struct DeviceQueue {
    /// A `cudaStream_t` (or `CUstream`, which is the same); may be under capture when calls are made.
    pub stream: *mut c_void,
    /// 256 bytes of device memory with any content, for barriers.
    pub scratch: *mut c_void,
}

// SAFETY: addresses; the caller of `join` promises what may be done with them.
unsafe impl Send for DeviceQueue {}
// SAFETY: as above.
unsafe impl Sync for DeviceQueue {}

/// Engine of a group of ranks with a GPU each.
///
/// Graphs with captured calls must be destroyed before it is dropped: NCCL waits for that. In a successful run all ranks drop it, as
/// NCCL waits for those of the same machine too; a rank that failed calls [`abort`](Engine::abort) first.
pub struct Nccl {
    handle: Arc<Handle>,
    queue: DeviceQueue,
    rank: usize,
    size: usize,
}

impl Nccl {
    fn new(handle: Arc<Handle>, queue: DeviceQueue) -> Result<Arc<Self>, CommError> {
        let (mut rank, mut size) = (0, 0);
        // SAFETY: a group; the numbers are written.
        handle.within("ncclCommUserRank", |nccl, comm| unsafe { (nccl.comm_user_rank)(comm, &mut rank) })?;
        // SAFETY: as above.
        handle.within("ncclCommCount", |nccl, comm| unsafe { (nccl.comm_count)(comm, &mut size) })?;
        Ok(Arc::new(Nccl { handle, queue, rank: rank as usize, size: size as usize }))
    }

    pub fn library(&self) -> &Arc<Library> {
        self.handle.library()
    }

    /// # Safety
    /// As [`Engine::run`].
    unsafe fn all_to_all(&self, call: &Call, counts: Option<&Counts>) -> Result<(), CommError> {
        if call.send.address == call.receive.address {
            return Err(CommError::Misuse(
                "NCCL has no all_to_all in place: it needs a separate receive buffer".into(),
            ));
        }
        let (kind, bytes, equal) = (data_type(call.kind), call.kind.bytes(), call.send.len / self.size);
        let part = |counts: Option<&Vec<usize>>, rank: usize| counts.map_or(equal, |counts| counts[rank]);
        let send_and_receive = |nccl: &Functions, comm: Comm| {
            // SAFETY: the calls of a group are made together by the one that ends it, which is always made. Parts follow each other
            // within the spans, by the communicator's check. Empty parts are left out on both sides.
            unsafe {
                let mut code = (nccl.group_start)();
                if code != SUCCESS {
                    return code;
                }
                let (mut from, mut into) = (call.send.address.cast_const(), call.receive.address);
                for rank in 0..self.size {
                    let sent = part(counts.map(|counts| &counts.send), rank);
                    let received = part(counts.map(|counts| &counts.receive), rank);
                    if sent > 0 && code == SUCCESS {
                        code = (nccl.send)(from, sent, kind, rank as c_int, comm, self.queue.stream);
                    }
                    if received > 0 && code == SUCCESS {
                        code = (nccl.recv)(into, received, kind, rank as c_int, comm, self.queue.stream);
                    }
                    (from, into) = (from.add(sent * bytes), into.add(received * bytes));
                }
                let ended = (nccl.group_end)();
                if code == SUCCESS { ended } else { code }
            }
        };
        self.handle.within("ncclSend and ncclRecv", send_and_receive)
    }
}

fn data_type(kind: ElementType) -> c_int {
    match kind {
        ElementType::F32 => data_type::FLOAT32,
        ElementType::F64 => data_type::FLOAT64,
        ElementType::Bf16 => data_type::BFLOAT16,
        ElementType::F16 => data_type::FLOAT16,
        ElementType::U8 => data_type::UINT8,
        ElementType::I32 => data_type::INT32,
        ElementType::I64 => data_type::INT64,
        ElementType::U64 => data_type::UINT64,
    }
}

fn reduction(reduction: Reduction, kind: ElementType) -> Result<c_int, CommError> {
    let whole = matches!(kind, ElementType::U8 | ElementType::I32 | ElementType::I64 | ElementType::U64);
    match reduction {
        Reduction::Sum => Ok(reduction::SUM),
        Reduction::Max => Ok(reduction::MAX),
        // NCCL's rounding depends on the version.
        Reduction::Mean if whole => {
            Err(CommError::Misuse(format!("NCCL has no mean of integers ({})", kind.name())))
        }
        Reduction::Mean => Ok(reduction::AVG),
    }
}

impl Engine for Nccl {
    fn name(&self) -> &'static str {
        "nccl"
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn enqueues(&self) -> bool {
        true
    }

    /// Enqueues the call on the stream. The first calls of a group may wait for the other ranks to make them too.
    unsafe fn run(&self, call: &Call) -> Result<(), CommError> {
        let (send, receive) = (call.send.address.cast_const(), call.receive.address);
        let (kind, len, stream) = (data_type(call.kind), call.receive.len, self.queue.stream);
        if call.send.len == 0 && len == 0 && call.collective != Collective::Barrier {
            return Ok(());
        }
        // SAFETY: the spans are valid by the caller's promise, the stream by that of `join`'s caller.
        unsafe {
            match &call.collective {
                Collective::AllReduce(by) => {
                    let by = reduction(*by, call.kind)?;
                    self.handle.within("ncclAllReduce", |nccl, comm| {
                        (nccl.all_reduce)(send, receive, len, kind, by, comm, stream)
                    })
                }
                Collective::ReduceScatter(by) => {
                    let by = reduction(*by, call.kind)?;
                    self.handle.within("ncclReduceScatter", |nccl, comm| {
                        (nccl.reduce_scatter)(send, receive, len, kind, by, comm, stream)
                    })
                }
                Collective::AllGather => self.handle.within("ncclAllGather", |nccl, comm| {
                    (nccl.all_gather)(send, receive, call.send.len, kind, comm, stream)
                }),
                Collective::AllToAll(counts) => self.all_to_all(call, counts.as_deref()),
                Collective::Broadcast { root } => self.handle.within("ncclBroadcast", |nccl, comm| {
                    (nccl.broadcast)(receive, receive, len, kind, *root as c_int, comm, stream)
                }),
                // NCCL has no barrier; this takes as long. The scratch's content doesn't matter.
                Collective::Barrier => self.handle.within("ncclAllReduce", |nccl, comm| {
                    let byte = self.queue.scratch.cast::<u8>();
                    (nccl.all_reduce)(byte, byte, 1, data_type::UINT8, reduction::MAX, comm, stream)
                }),
            }
        }
    }

    /// Returns the error of a queued call of this group or a sub-group that has failed since. To be called now and then while the host
    /// waits for the device, which otherwise might be for ever. Callable from any thread.
    fn check(&self) -> Result<(), CommError> {
        self.handle.check()
    }

    /// Splits off a group on the same stream. Not while the stream is under capture.
    fn split(&self, colour: usize, key: usize) -> Result<Arc<dyn Engine>, CommError> {
        let library = self.handle.library();
        let Some(split) = library.functions.comm_split else {
            let version = spelled(library.version());
            return Err(fault(format!("version {version} can't split a group: 2.18 or newer is needed")));
        };
        let number = |what: &str, value: usize| {
            c_int::try_from(value)
                .map_err(|_| CommError::Misuse(format!("{what} {value} is too large for NCCL")))
        };
        let (colour, key) = (number("colour", colour)?, number("key", key)?);
        let mut part: Comm = std::ptr::null_mut();
        let made = self.handle.within("ncclCommSplit", |_, comm| {
            // SAFETY: a group; the new one is written. Without a configuration it is as the old one, and shares nothing with it.
            unsafe { split(comm, colour, key, &mut part, std::ptr::null_mut()) }
        });
        if part.is_null() {
            return Err(made.err().unwrap_or_else(|| fault("ncclCommSplit gave no group")));
        }
        // SAFETY: just made, and nobody else's.
        let part = unsafe { Handle::new(Arc::clone(library), part) };
        if let Err(error) = made {
            part.abort("the group that it was split off has failed");
            return Err(error);
        }
        self.handle.add_part(&part);
        Ok(Nccl::new(part, self.queue)?)
    }

    /// Aborts this group and its sub-groups.
    fn abort(&self, why: &str) {
        self.handle.abort(why);
    }
}
