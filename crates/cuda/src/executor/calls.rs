//! Collectives of a list, ready to run.
//!
//! Over NCCL a call goes into the comm lane's stream, and is captured with everything else. Through the host, the data
//! leaves on the comm lane's stream when the compute lane has got there; the communicator works in pinned memory; the
//! result goes back on a stream of its own, so that it needn't wait for data that leaves later. The thread that runs the list
//! drives this, see [`crate::collectives::Stage`].

use super::communicator::enqueue;
use super::list::Streams;
use crate::action::{Address, CollectiveCall};
use crate::collectives::note_time;
use crate::driver::{Context, Event, Pinned, Stream};
use crate::error::CudaError;
use crate::launch::Ready;
use crate::modules::Modules;
use comm::{Call, Communicator, Span, Ticket};
use std::cell::Cell;
use std::ffi::c_void;
use std::sync::Arc;

pub(super) struct PreparedCall {
    /// Ranks that take part.
    comm: Communicator,
    /// Call with the addresses of its data: on the GPU, or in host memory.
    call: Call,
    /// Addresses on the GPU.
    send: Address,
    receive: Address,
    /// Launches that record its start and end.
    marks: Option<[Ready; 2]>,
    /// Event of the compute lane's reaching the call.
    ready: Event,
    /// Event of the data's arrival in host memory.
    here: Event,
    /// Event of the result's arrival on the GPU.
    back: Event,
    at: Cell<CallProgress>,
}

/// Progress of a call through the host.
#[derive(Clone, Copy)]
enum CallProgress {
    Nowhere,
    /// Copied to the host.
    Left,
    /// Run by the communicator.
    Started(Ticket),
    /// Copied back to the GPU, or there already.
    Back,
}

/// Host memory of a call: offsets of what is sent and received.
pub(super) type HostPlace<'a> = (&'a Pinned, usize, usize);

impl PreparedCall {
    pub fn new(
        call: &CollectiveCall,
        host: Option<HostPlace<'_>>,
        comm: Communicator,
        context: &Arc<Context>,
        modules: &mut Modules,
    ) -> Result<Self, CudaError> {
        let CollectiveCall { group: _, collective, kind, send, receive, layer, times } = call;
        let (from, into) = match host {
            Some((memory, from, into)) => (memory.address(from), memory.address(into)),
            None => (send.0 as *mut c_void, receive.0 as *mut c_void),
        };
        let call = Call {
            collective: collective.clone(),
            kind: *kind,
            send: Span { address: from.cast(), len: send.1 },
            receive: Span { address: into.cast(), len: receive.1 },
            name: comm.name(layer),
        };
        let mut mark = |at: Address| Ready::new(&note_time(at), modules);
        let marks = match *times {
            Some(at) => Some([mark(at)?, mark(at + 8)?]),
            None => None,
        };
        let event = || Event::new(context);
        let (ready, here, back) = (event()?, event()?, event()?);
        let (send, receive) = (send.0, receive.0);
        Ok(PreparedCall {
            comm,
            call,
            send,
            receive,
            marks,
            ready,
            here,
            back,
            at: Cell::new(CallProgress::Nowhere),
        })
    }

    fn mark(&self, which: usize, stream: &Stream) -> Result<(), CudaError> {
        match &self.marks {
            Some(marks) => marks[which].start(stream, || "noting down a time".into()),
            None => Ok(()),
        }
    }

    /// Enqueues the call on the comm lane's stream, after what it waits for.
    pub fn enqueue(&self, streams: &Streams) -> Result<(), CudaError> {
        self.mark(0, streams.comm())?;
        // SAFETY: the plan's own memory; the lanes' waits keep others away from it.
        unsafe { enqueue(&self.comm, &self.call) }?;
        self.mark(1, streams.comm())
    }

    /// Enqueues the call between the compute lane's actions.
    pub fn enqueue_alone(&self, streams: &Streams) -> Result<(), CudaError> {
        self.ready.record(streams.compute())?;
        streams.comm().wait(&self.ready)?;
        self.enqueue(streams)?;
        self.back.record(streams.comm())?;
        streams.compute().wait(&self.back)
    }

    /// Starts the copy of the data to the host.
    pub fn leave(&self, streams: &Streams) -> Result<(), CudaError> {
        self.ready.record(streams.compute())?;
        streams.comm().wait(&self.ready)?;
        self.mark(0, streams.comm())?;
        let Span { address, len } = self.call.send;
        // SAFETY: nobody touches the host's side before `here`; what was there before has been read, since the compute lane has
        // waited for it to go back.
        unsafe { streams.comm().fetch(self.send, address.cast(), len * self.call.kind.bytes()) }?;
        self.here.record(streams.comm())?;
        self.at.set(CallProgress::Left);
        Ok(())
    }

    /// Advances the call as far as possible without waiting; returns whether it advanced. Must be called on calls in their order.
    fn advance(&self, streams: &Streams) -> Result<bool, CudaError> {
        let comm = &self.comm;
        match self.at.get() {
            CallProgress::Left if self.here.is_done()? => {
                // SAFETY: pinned memory that lives as long as this; nobody touches it until the call was waited for, which
                // `bring_back` sees to whatever happens.
                let ticket = unsafe { comm.start(self.call.clone()) }?;
                self.at.set(CallProgress::Started(ticket));
                Ok(true)
            }
            CallProgress::Started(ticket) if comm.is_done(ticket) => {
                self.at.set(CallProgress::Nowhere);
                comm.wait(ticket)?;
                let Span { address, len } = self.call.receive;
                let (stream, bytes) = (streams.back(), len * self.call.kind.bytes());
                // SAFETY: what came stays there until the next run's data leaves, which is after this.
                unsafe { stream.send(address.cast_const().cast(), self.receive, bytes) }?;
                self.mark(1, stream)?;
                self.back.record(stream)?;
                self.at.set(CallProgress::Back);
                Ok(true)
            }
            _ => Ok(false),
        }
    }
}

/// Runs the started calls in their order until the one with this index is back; what is enqueued on the compute lane
/// from then on starts after it. `calls` are all of the list's.
pub(super) fn bring_back(calls: &[&PreparedCall], number: usize, streams: &Streams) -> Result<(), CudaError> {
    let communicator = streams.communicator()?;
    let is_back = || {
        let mut moved = true;
        while std::mem::take(&mut moved) {
            for call in calls {
                moved |= call.advance(streams)?;
                if matches!(call.at.get(), CallProgress::Left) {
                    // Those behind it may not overtake it.
                    break;
                }
            }
        }
        Ok(matches!(calls[number].at.get(), CallProgress::Back))
    };
    if let Err(error) = communicator.wait_until(is_back) {
        // The communicator's thread works in memory that may be freed now.
        for call in calls {
            if let CallProgress::Started(ticket) = call.at.replace(CallProgress::Nowhere) {
                let _ = call.comm.wait(ticket);
            }
        }
        return Err(error);
    }
    // Results go back in order, so this one implies those before.
    streams.compute().wait(&calls[number].back)
}
