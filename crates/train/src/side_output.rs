//! Files written beside the results of a run.

use crate::error::TrainError;

/// A writer whose failure must not cost the results of a run: the first ends it, and is kept until someone asks.
pub(crate) struct SideOutput<T> {
    writer: Option<T>,
    pub failure: Option<TrainError>,
}

impl<T> SideOutput<T> {
    pub fn new(writer: T) -> Self {
        SideOutput { writer: Some(writer), failure: None }
    }

    pub fn with(&mut self, write: impl FnOnce(&mut T) -> Result<(), TrainError>) {
        if let Some(writer) = &mut self.writer
            && let Err(error) = write(writer)
        {
            (self.writer, self.failure) = (None, Some(error));
        }
    }
}
