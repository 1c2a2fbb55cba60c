//! Collectives that lists leave under way when they end: gathers that an update begins and that the next plans wait for where they read what
//! is gathered.
//!
//! They are no part of a list's graph, which ends when all in it is done. They are launched behind it on the comm lane's stream, each with an
//! event after it; graphs of later lists wait for the event as it was recorded before they were launched.

use super::list::{List, Mark, Streams};
use super::plans::Lists;
use crate::driver::{Context, Event};
use crate::error::CudaError;
use graph::StateId;
use std::sync::Arc;

/// Events of all collectives that the lists of a program leave, each with the states that it works on.
pub(super) struct Behind(Vec<(Vec<StateId>, Arc<Event>)>);

impl Behind {
    pub fn new(context: &Arc<Context>, lists: &Lists) -> Result<Self, CudaError> {
        let left = lists.bound.iter().flat_map(|bound| &bound.actions);
        let left = left.filter(|placed| !placed.left.is_empty());
        let event = |states: &Vec<StateId>| Ok((states.clone(), Arc::new(Event::new(context)?)));
        Ok(Behind(left.map(|placed| event(&placed.left)).collect::<Result<_, CudaError>>()?))
    }

    /// Event of the collective that works on just these states.
    pub fn of(&self, states: &[StateId]) -> Option<Arc<Event>> {
        self.0.iter().find(|(of, _)| of == states).map(|(_, event)| Arc::clone(event))
    }

    /// Events of collectives that work on any of these states.
    pub fn touching(&self, states: &[StateId]) -> Vec<Arc<Event>> {
        let touches = |of: &[StateId]| of.iter().any(|state| states.contains(state));
        self.0.iter().filter(|(of, _)| touches(of)).map(|(_, event)| Arc::clone(event)).collect()
    }

    /// Events of all.
    pub fn all(&self) -> Vec<Arc<Event>> {
        self.0.iter().map(|(_, event)| Arc::clone(event)).collect()
    }
}

impl List {
    /// Enqueues collectives on the comm lane's stream, after all that is enqueued; what is enqueued later doesn't wait for them.
    pub fn start_behind(
        &self,
        which: &[usize],
        streams: &Streams,
        marks: Option<&dyn Mark>,
    ) -> Result<(), CudaError> {
        let stream = streams.comm();
        self.ended.record(streams.compute())?;
        stream.wait(&self.ended)?;
        for index in which {
            marks.map_or(Ok(()), |marks| marks.before(*index, stream, true))?;
            self.call(*index)?.enqueue(streams)?;
            marks.map_or(Ok(()), |marks| marks.after(*index, stream))?;
            if let Some(left) = &self.actions[*index].left {
                left.record(stream)?;
            }
        }
        Ok(())
    }
}
