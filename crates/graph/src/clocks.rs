//! Order that lanes and waits enforce: vector clocks.

use crate::op::Lane;

/// Vector clock over lanes: the steps that have finished before each step starts.
#[derive(Clone, Debug, Default)]
pub struct Clocks {
    /// Number of steps of each lane that have finished before each step starts.
    before: Vec<[usize; Lane::ALL.len()]>,
    /// Lane and place in it of each step.
    at: Vec<(usize, usize)>,
    issued: [usize; Lane::ALL.len()],
    last: [Option<usize>; Lane::ALL.len()],
}

impl Clocks {
    /// Clocks of steps, each with its lane, its waits, and whether it may run at the same time as the one before.
    pub fn of<'a>(steps: impl Iterator<Item = (Lane, &'a [usize], bool)>) -> Self {
        let mut clocks = Clocks::default();
        for (lane, waits, beside) in steps {
            clocks.push(lane, waits, beside);
        }
        clocks
    }

    /// Adds a step that needs `needs` finished, and with `beside` not the step before; returns those it must wait for expressly,
    /// the rest being implied.
    pub fn push(&mut self, lane: Lane, needs: &[usize], beside: bool) -> Vec<usize> {
        let lane = Lane::ALL.iter().position(|l| *l == lane).unwrap_or(0);
        let mut clock = match self.last[lane] {
            Some(before) if beside => self.before[before],
            Some(before) => self.after(before),
            None => Default::default(),
        };
        let mut waits = Vec::new();
        let mut sorted = needs.to_vec();
        sorted.sort_unstable();
        // Latest first: waiting for a later step of a lane implies the earlier ones.
        for need in sorted.into_iter().rev() {
            let (l, place) = self.at[need];
            if clock[l] <= place {
                let theirs = self.after(need);
                clock.iter_mut().zip(theirs).for_each(|(mine, their)| *mine = (*mine).max(their));
                waits.push(need);
            }
        }
        waits.reverse();
        self.at.push((lane, self.issued[lane]));
        self.before.push(clock);
        self.last[lane] = Some(self.at.len() - 1);
        self.issued[lane] += 1;
        waits
    }

    /// Checks whether the next step of a lane starts after `step` is done, without waiting for it.
    pub fn knows(&self, lane: Lane, step: usize) -> bool {
        let lane = Lane::ALL.iter().position(|l| *l == lane).unwrap_or(0);
        let (of, place) = self.at[step];
        self.last[lane].is_some_and(|last| self.after(last)[of] > place)
    }

    fn after(&self, step: usize) -> [usize; Lane::ALL.len()] {
        let (lane, place) = self.at[step];
        let mut clock = self.before[step];
        clock[lane] = clock[lane].max(place + 1);
        clock
    }

    /// Checks whether `earlier` has finished whenever `later` starts.
    pub fn happens_before(&self, earlier: usize, later: usize) -> bool {
        let (lane, place) = self.at[earlier];
        self.before[later][lane] > place
    }
}
