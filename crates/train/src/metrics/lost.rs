//! What a run that goes on finds missing of its metrics.

use super::{at, parsed};
use crate::error::TrainError;
use records::MetricsLine;
use std::collections::BTreeSet;
use std::path::Path;

/// What is missing of the metrics of a run that goes on.
pub(super) struct Lost {
    /// Whether there was a file.
    found: bool,
    next_step: u64,
    /// Steps that have a line.
    steps: BTreeSet<u64>,
    /// Lines that can't be read.
    pub damaged: usize,
}

impl Lost {
    pub fn of(path: &Path, next_step: u64) -> Result<Self, TrainError> {
        let found = path.try_exists().map_err(at(path))?;
        Ok(Lost { found, next_step, steps: BTreeSet::new(), damaged: 0 })
    }

    /// Takes in a line. Evaluations have lines of their own.
    pub fn saw(&mut self, line: &str) {
        let line = parsed::<MetricsLine>(line).filter(MetricsLine::is_step);
        self.steps.extend(line.map(|line| line.step));
    }

    fn missing(&self) -> u64 {
        self.next_step - self.steps.len() as u64
    }

    pub fn any(&self) -> bool {
        self.damaged > 0 || self.missing() > 0
    }

    pub fn line(&self, path: &Path) -> Option<String> {
        let (missing, all) = (self.missing(), self.next_step);
        if missing == 0 {
            return (self.damaged > 0).then(|| unreadable(path, self.damaged));
        }
        let path = path.display();
        if !self.found {
            return Some(format!("{path} is missing: the metrics of {all} steps are lost"));
        }
        let first = (0..all).find(|step| !self.steps.contains(step)).unwrap_or(0);
        Some(format!(
            "{path} is damaged: the metrics of {missing} of {all} steps are lost, the first of step {first}"
        ))
    }
}

pub(super) fn unreadable(path: &Path, lines: usize) -> String {
    format!("{} is damaged: lines that can't be read are dropped: {lines}", path.display())
}
