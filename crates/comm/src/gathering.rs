//! An all-gather that goes on while its caller does something else.

use crate::activity::Name;
use crate::call::{Call, Collective, Span};
use crate::communicator::Communicator;
use crate::element::Element;
use crate::engine::CommError;
use crate::queue::Ticket;

/// An all-gather under way, which holds its buffers until it is done.
pub struct Gathering<E: Element> {
    communicator: Communicator,
    ticket: Ticket,
    from: Vec<E>,
    into: Vec<E>,
}

impl<E: Element> Gathering<E> {
    /// Waits for it, and hands back what was sent and what all ranks sent.
    pub fn wait(mut self) -> Result<(Vec<E>, Vec<E>), CommError> {
        self.communicator.wait(self.ticket)?;
        Ok((std::mem::take(&mut self.from), std::mem::take(&mut self.into)))
    }
}

impl<E: Element> Drop for Gathering<E> {
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
    ) -> Result<Gathering<E>, CommError> {
        let (send, receive) = (Span::of(&from), Span::of_mut(&mut into));
        let call = Call { collective: Collective::AllGather, kind: E::TYPE, send, receive, name };
        // SAFETY: the buffers lie on the heap, where they stay when their vectors move. Nobody else has them until the call was waited for, which
        // dropping them does too; were they leaked, they would be there for ever.
        let ticket = unsafe { self.start(call) }?;
        Ok(Gathering { communicator: self.clone(), ticket, from, into })
    }
}
