//! Where the time goes from the start to the first step.

use crate::compile::Compiled;
use crate::tuner::Tally;
use serde::Serialize;
use std::time::Instant;

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Startup {
    /// What was done one after the other, each with its seconds.
    pub phases: Vec<(&'static str, f64)>,
    /// Beside all that, on other threads.
    pub kernels: Kernels,
    pub products: Tally,
}

/// Of kernels, by units that are compiled together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Kernels {
    pub compiled: usize,
    /// Found on disk.
    pub found: usize,
    /// From the beginning to the last one's end.
    pub seconds: f64,
}

impl Startup {
    /// Ends a phase that began then, and begins the next.
    pub fn lap(&mut self, phase: &'static str, began: Instant) -> Instant {
        let now = Instant::now();
        self.add(phase, now.duration_since(began).as_secs_f64());
        now
    }

    pub fn add(&mut self, phase: &'static str, seconds: f64) {
        match self.phases.iter_mut().find(|(name, _)| *name == phase) {
            Some((_, sum)) => *sum += seconds,
            None => self.phases.push((phase, seconds)),
        }
    }

    pub fn compiled(&mut self, compiled: &Compiled) {
        self.kernels.compiled += compiled.made;
        self.kernels.found += compiled.found;
        self.kernels.seconds += compiled.seconds;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_phase_that_comes_again_is_added() {
        let mut startup = Startup::default();
        let began = startup.lap("a", Instant::now());
        startup.add("b", 2.0);
        startup.add("a", 1.0);
        assert!(began.elapsed().as_secs_f64() < 60.0);
        assert_eq!(startup.phases.iter().map(|(name, _)| *name).collect::<Vec<_>>(), ["a", "b"]);
        assert!(startup.phases[0].1 >= 1.0);
    }
}
