//! The collectives of a step, over all plans of training.

use super::Which;
use super::bind::BoundPlan;
use super::unfinished::Left;
use graph::run::CollectiveTime;

/// Times of collectives since they were last asked for.
pub(super) struct Made {
    times: Vec<CollectiveTime>,
    /// The place of each plan's first; plans that don't train have none.
    first: [Option<usize>; Which::ALL.len()],
    /// They were asked for: the next run begins anew.
    told: bool,
}

impl Made {
    pub fn of<T>(plans: &[BoundPlan<T>]) -> Self {
        let (mut times, mut first) = (vec![], [None; Which::ALL.len()]);
        for which in Which::TRAINING {
            first[which as usize] = Some(times.len());
            times.extend(plans[which as usize].collectives.iter().cloned());
        }
        Made { times, first, told: false }
    }

    pub fn begin(&mut self) {
        if std::mem::take(&mut self.told) {
            self.times.iter_mut().for_each(CollectiveTime::reset);
        }
    }

    pub fn tell(&mut self) {
        self.told = true;
    }

    pub fn times(&self) -> &[CollectiveTime] {
        &self.times
    }

    /// Adds a run of a plan; what it left comes later.
    pub fn add<T>(&mut self, plan: usize, bound: &BoundPlan<T>) {
        let Some(first) = self.first[plan] else { return };
        for (at, time) in
            bound.collectives.iter().enumerate().filter(|(at, _)| bound.calls[*at].left.is_none())
        {
            self.times[first + at].add(time);
        }
    }

    /// Adds a collective that a plan had left, and forgets it there.
    pub fn add_left(&mut self, left: &mut Left) {
        if let Some(first) = self.first[left.plan] {
            self.times[first + left.call].add(&left.time);
        }
        left.time.reset();
    }
}
