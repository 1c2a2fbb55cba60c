//! All-gather that runs concurrently with its caller and owns its buffers.

use crate::activity::Name;
use crate::call::{Call, Collective, Span};
use crate::communicator::Communicator;
use crate::element::Element;
use crate::engine::CommError;
use crate::queue::Ticket;

/// All-gather under way. It owns its buffers, so unlike the calls of a [`Scope`](crate::Scope) it may outlive the function that started it.
#[must_use = "dropping it waits for it"]
pub struct PendingGather<E: Element> {
    communicator: Communicator,
    ticket: Ticket,
    from: Vec<E>,
    into: Vec<E>,
}

impl<E: Element> PendingGather<E> {
    /// Waits for it, and hands back what was sent and what all ranks sent.
    pub fn wait(mut self) -> Result<(Vec<E>, Vec<E>), CommError> {
        self.communicator.wait(self.ticket)?;
        Ok((std::mem::take(&mut self.from), std::mem::take(&mut self.into)))
    }
}

impl<E: Element> Drop for PendingGather<E> {
    fn drop(&mut self) {
        let _ = self.communicator.wait(self.ticket);
    }
}

impl Communicator {
    /// Starts an all-gather, after the calls started before. `into` has room for what each rank sends.
    pub fn start_all_gather<E: Element>(
        &self,
        name: Name,
        from: Vec<E>,
        mut into: Vec<E>,
    ) -> Result<PendingGather<E>, CommError> {
        let (send, receive) = (Span::of(&from), Span::of_mut(&mut into));
        let call = Call { collective: Collective::AllGather, kind: E::TYPE, send, receive, name };
        // SAFETY: the buffers lie on the heap, where they stay when their vectors move. Nobody else has them until the call was waited for,
        // which dropping them does too; were they leaked, they would be there for ever.
        let ticket = unsafe { self.start(call) }?;
        Ok(PendingGather { communicator: self.clone(), ticket, from, into })
    }
}
