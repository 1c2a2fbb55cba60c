//! Where the time of training went, on every rank.
//!
//! A step ends with one small all-gather of what every rank measured, so that all of them know the slowest, and
//! agree on what to do next (to stop, or to divide the work otherwise) without asking.

use comm::{CommError, Communicator, Name, PendingGather};
use devices::sensors::Sensors;
use graph::run::{Account as Spent, CollectiveTime};
use records::{Collective, Parts};
use std::collections::VecDeque;
use std::time::Instant;

/// One step of all ranks.
#[derive(Clone, Debug, Default)]
pub struct Step {
    /// Of each rank.
    pub parts: Vec<Parts>,
    /// Whether a rank was asked to stop.
    pub stop: bool,
    /// Images that could not be read.
    pub skipped: u64,
    /// What the sensors of each rank's GPU said last.
    pub sensors: Vec<Sensors>,
    /// Seconds that cores worked for the run, summed over its processes.
    pub cpu: f64,
}

impl Step {
    /// Wall time: that of the slowest account, which differs from the others by little.
    pub fn seconds(&self) -> f64 {
        self.parts.iter().map(Parts::wall).fold(0.0, f64::max)
    }

    /// Over all ranks.
    pub fn mean(&self) -> Parts {
        Parts::mean(&self.parts)
    }

    /// The ranks that came last and first to their collectives by their own work: data, computing and the host.
    pub fn slowest_and_fastest(&self) -> (usize, usize) {
        let own = |rank: &usize| {
            let Parts { compute, data, optimizer, idle, .. } = self.parts[*rank];
            compute + data + optimizer + idle
        };
        let ranks = || 0..self.parts.len();
        let slowest = ranks().max_by(|a, b| own(a).total_cmp(&own(b))).unwrap_or(0);
        let fastest = ranks().min_by(|a, b| own(a).total_cmp(&own(b))).unwrap_or(0);
        (slowest, fastest)
    }
}

/// The account of a run: of the step under way, and the sums.
pub struct Account {
    ranks: usize,
    name: Name,
    /// The end of the last step that was accounted for, and the process's time on cores then.
    mark: Instant,
    worked: f64,
    /// Tells this process from others, also of other hosts.
    process: f64,
    /// Numbers of this rank: fixed ones, then the seconds and the exposed part of every collective, then what its GPU's
    /// sensors read.
    mine: Vec<f64>,
    all: Vec<f64>,
    /// Numbers under way of steps that have ended, oldest first.
    posted: VecDeque<PendingGather<f64>>,
    /// Buffers for the next ones: this rank's numbers, and all ranks'.
    spare: Vec<(Vec<f64>, Vec<f64>)>,
    step: Step,
    totals: Vec<Parts>,
    collectives: Vec<Collective>,
    steps: u64,
}

/// The fixed numbers, by their place.
const STOP: usize = 0;
const SKIPPED: usize = 1;
const WALL: usize = 2;
const DATA: usize = 3;
const COMPUTE: usize = 4;
const UPDATE: usize = 5;
const EXPOSED: usize = 6;
const HIDDEN: usize = 7;
const CPU: usize = 8;
const PROCESS: usize = 9;
const FIXED: usize = 10;

impl Account {
    pub fn new(world: &Communicator, exchanges: &[CollectiveTime]) -> Self {
        let (ranks, name) = (world.size(), world.name("the account of a step"));
        Self::of(ranks, name, exchanges)
    }

    fn of(ranks: usize, name: Name, exchanges: &[CollectiveTime]) -> Self {
        let width = FIXED + 2 * exchanges.len() + Sensors::COUNT;
        let collectives = exchanges.iter().map(|e| Collective {
            layer: e.layer.to_string(),
            bytes: e.bytes,
            ranks: e.ranks,
            times: 0,
            seconds: 0.0,
            kind: e.kind.to_string(),
            exposed: 0.0,
        });
        Account {
            ranks,
            name,
            mark: Instant::now(),
            worked: process_seconds(),
            process: process_number(),
            mine: vec![0.0; width],
            all: vec![0.0; width * ranks],
            posted: VecDeque::with_capacity(2),
            spare: Vec::with_capacity(2),
            step: Step {
                parts: vec![Parts::default(); ranks],
                sensors: vec![Sensors::unknown(); ranks],
                ..Step::default()
            },
            totals: vec![Parts::default(); ranks],
            collectives: collectives.collect(),
            steps: 0,
        }
    }

    /// What came before isn't part of any step: a start, an evaluation, a checkpoint.
    pub fn begin(&mut self) {
        self.mark = Instant::now();
        self.worked = process_seconds();
    }

    /// What a step took on this rank.
    pub fn note(&mut self, data: f64, spent: Spent, exchanges: &[CollectiveTime], sensors: Option<Sensors>) {
        self.mine[DATA] = data;
        self.mine[COMPUTE] = spent.compute;
        self.mine[UPDATE] = spent.update;
        self.mine[EXPOSED] = spent.exposed;
        self.mine[HIDDEN] = spent.hidden;
        self.note_collectives(exchanges);
        let sensors = sensors.unwrap_or_else(Sensors::unknown);
        if let Some(place) = self.mine.last_chunk_mut::<{ Sensors::COUNT }>() {
            *place = sensors.numbers();
        }
    }

    fn note_collectives(&mut self, exchanges: &[CollectiveTime]) {
        for (place, exchange) in self.mine[FIXED..].as_chunks_mut::<2>().0.iter_mut().zip(exchanges) {
            *place = [exchange.seconds, exchange.exposed];
        }
        for (total, exchange) in self.collectives.iter_mut().zip(exchanges) {
            total.times += exchange.calls;
        }
    }

    /// Adds collectives that no step had to wait for to the totals.
    pub fn share_rest(
        &mut self,
        world: &Communicator,
        exchanges: &[CollectiveTime],
    ) -> Result<(), CommError> {
        self.mine.fill(0.0);
        self.note_collectives(exchanges);
        if self.ranks == 1 {
            return Ok(());
        }
        world.all_gather(self.name, &self.mine, &mut self.all)?;
        for (i, total) in self.collectives.iter_mut().enumerate() {
            let seconds = self.all.chunks_exact(self.mine.len()).map(|numbers| numbers[FIXED + 2 * i]);
            total.seconds += seconds.fold(f64::INFINITY, f64::min);
        }
        Ok(())
    }

    /// Ends a step: every rank learns what the others measured. Allocates nothing.
    pub fn share(&mut self, world: &Communicator, stop: bool, skipped: usize) -> Result<&Step, CommError> {
        self.end(stop, skipped);
        if self.ranks == 1 {
            self.all.copy_from_slice(&self.mine);
        } else {
            world.all_gather(self.name, &self.mine, &mut self.all)?;
        }
        self.take_in();
        Ok(&self.step)
    }

    /// Ends a step as [`share`](Account::share) does, but without waiting for the others: their numbers come behind collectives that the
    /// next step is to hide.
    pub fn post(&mut self, world: &Communicator, stop: bool, skipped: usize) -> Result<(), CommError> {
        self.end(stop, skipped);
        let (mut mine, all) = self.spare.pop().unwrap_or_else(|| (self.mine.clone(), self.all.clone()));
        mine.copy_from_slice(&self.mine);
        self.posted.push_back(world.start_all_gather(self.name, mine, all)?);
        Ok(())
    }

    /// Takes in what every rank measured in the oldest step that was posted, if one was.
    pub fn receive(&mut self) -> Result<Option<&Step>, CommError> {
        let Some(posted) = self.posted.pop_front() else { return Ok(None) };
        let (mine, all) = posted.wait()?;
        self.spare.push((mine, std::mem::replace(&mut self.all, all)));
        self.take_in();
        Ok(Some(&self.step))
    }

    /// Notes what only the end of a step tells: how long it took, and what this rank has to tell the others.
    fn end(&mut self, stop: bool, skipped: usize) {
        let now = Instant::now();
        self.mine[WALL] = now.duration_since(self.mark).as_secs_f64();
        self.mark = now;
        let worked = process_seconds();
        (self.mine[CPU], self.mine[PROCESS]) = (worked - self.worked, self.process);
        self.worked = worked;
        (self.mine[STOP], self.mine[SKIPPED]) = (f64::from(u8::from(stop)), skipped as f64);
    }

    fn take_in(&mut self) {
        let Account { mine, all, step, totals, collectives, .. } = self;
        let of_ranks = || all.chunks_exact(mine.len());
        step.stop = of_ranks().any(|numbers| numbers[STOP] != 0.0);
        step.skipped = of_ranks().map(|numbers| numbers[SKIPPED] as u64).sum();
        // Ranks that are threads of one process all count the same one.
        let counted = |rank: usize, process: f64| of_ranks().take(rank).any(|n| n[PROCESS] == process);
        let first = of_ranks().enumerate().filter(|(rank, n)| !counted(*rank, n[PROCESS]));
        step.cpu = first.map(|(_, numbers)| numbers[CPU]).sum();
        for (parts, numbers) in step.parts.iter_mut().zip(of_ranks()) {
            let [wall, data, compute, update] = [WALL, DATA, COMPUTE, UPDATE].map(|i| numbers[i]);
            let exposed = numbers[EXPOSED];
            // A device that has other steps to do works on while the host brings it data; only what is beyond that is a stall.
            let rest = (wall - compute - update - exposed).max(0.0);
            let data = data.min(rest);
            let idle = rest - data;
            *parts = Parts {
                compute,
                communication: exposed,
                wait: 0.0,
                data,
                optimizer: update,
                idle,
                hidden: numbers[HIDDEN],
            };
        }
        for (sensors, numbers) in step.sensors.iter_mut().zip(of_ranks()) {
            *sensors = numbers.last_chunk().map_or_else(Sensors::unknown, Sensors::from_numbers);
        }
        for (i, total) in collectives.iter_mut().enumerate() {
            let times = |numbers: &[f64]| [numbers[FIXED + 2 * i], numbers[FIXED + 2 * i + 1]];
            // All ranks are done at the same moment, so the one that came last was in it for the shortest time, and
            // that time is the communication itself; what a rank waited longer, it waited for that one.
            let transfer = of_ranks().map(|numbers| times(numbers)[0]).fold(f64::INFINITY, f64::min);
            for (parts, numbers) in step.parts.iter_mut().zip(of_ranks()) {
                let wait = (times(numbers)[1] - transfer).max(0.0).min(parts.communication);
                parts.communication -= wait;
                parts.wait += wait;
            }
            // Of waiting for it, what is beyond the communication itself is waiting for ranks.
            let exposed = of_ranks().map(|numbers| times(numbers)[1].min(transfer)).sum::<f64>();
            total.seconds += transfer;
            total.exposed += exposed / step.parts.len() as f64;
        }
        totals.iter_mut().zip(&step.parts).for_each(|(total, parts)| *total += *parts);
        self.steps += 1;
    }

    /// The last step that was shared.
    pub fn last(&self) -> &Step {
        &self.step
    }

    /// Of each rank, over all steps so far.
    pub fn totals(&self) -> &[Parts] {
        &self.totals
    }

    pub fn collectives(&self) -> &[Collective] {
        &self.collectives
    }

    pub fn steps(&self) -> u64 {
        self.steps
    }
}

/// Seconds that cores worked for this process, all threads together.
fn process_seconds() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes to the structure it is given.
    let told = unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut time) };
    if told == 0 { time.tv_sec as f64 + 1e-9 * time.tv_nsec as f64 } else { 0.0 }
}

/// Of the process's number and its host's name; 52 bits, which a number of a message holds exactly.
fn process_number() -> f64 {
    use std::hash::{DefaultHasher, Hash, Hasher};
    let mut hasher = DefaultHasher::new();
    (std::process::id(), std::fs::read("/proc/sys/kernel/hostname").unwrap_or_default()).hash(&mut hasher);
    (hasher.finish() >> 12) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn exchange(seconds: f64, exposed: f64) -> CollectiveTime {
        CollectiveTime {
            calls: 1,
            seconds,
            exposed,
            ..CollectiveTime::new("head.bias", "all_reduce", 1000, 2)
        }
    }

    /// Feeds what two ranks measured, without a communicator.
    fn of_two(first: &[f64], second: &[f64]) -> Account {
        let name = Communicator::solo().name("test");
        let mut account = Account::of(2, name, &[exchange(0.0, 0.0)]);
        account.note(0.0, Spent::default(), &[exchange(0.0, 0.0)], None);
        let unknown = Sensors::unknown().numbers();
        let hot = Sensors { temperature: 80.0, ..Sensors::unknown() }.numbers();
        account.all = [first, &unknown, second, &hot].concat();
        account.take_in();
        account
    }

    /// Rank 1 computes for 3 s, rank 0 for 1 s; the communication itself takes 0.5 s, a fifth of a second of it hidden.
    #[test]
    fn waiting_is_told_from_communication() {
        let fast = [0.0, 0.0, 3.8, 0.1, 1.0, 0.2, 2.3, 0.2, 1.5, 7.0, 2.5, 2.3];
        let slow = [1.0, 2.0, 3.8, 0.1, 3.0, 0.2, 0.3, 0.2, 3.5, 8.0, 0.5, 0.3];
        let account = of_two(&fast, &slow);
        let [one, two] = account.step.parts[..] else { panic!("two ranks") };
        assert!((one.wait - 1.8).abs() < 1e-12 && (one.communication - 0.5).abs() < 1e-12, "{one:?}");
        assert!(two.wait == 0.0 && two.communication == 0.3, "{two:?}");
        assert!((one.wall() - 3.8).abs() < 1e-12 && (two.wall() - 3.8).abs() < 1e-12);
        assert_eq!(account.step.slowest_and_fastest(), (1, 0));
        assert!(account.step.stop && account.step.skipped == 2);
        assert_eq!(account.step.sensors[1].temperature, 80.0);
        assert!(!account.step.sensors[0].is_known());
        assert_eq!(account.step.cpu, 5.0, "two processes");
        let same = slow.map(|x| if x == 8.0 { 7.0 } else { x });
        assert_eq!(of_two(&fast, &same).step.cpu, 1.5, "one process, told of by both of its ranks");
        let all = &account.collectives()[0];
        assert_eq!((all.seconds, all.times), (0.5, 1));
        assert_eq!(all.bandwidth(2), 2000.0, "a ring of two sends all of the data once");
    }

    /// A device computes for 4 s while the host copies for 3: of these only the half second beyond is a stall.
    #[test]
    fn data_that_comes_beside_computing_costs_nothing() {
        let numbers = [0.0, 0.0, 5.0, 3.0, 4.0, 0.5, 0.0, 0.0, 1.0, 7.0, 0.0, 0.0];
        let account = of_two(&numbers, &numbers);
        let parts = account.step.parts[0];
        assert_eq!((parts.data, parts.idle), (0.5, 0.0));
        assert!((parts.wall() - 5.0).abs() < 1e-12);
    }

    #[test]
    fn one_rank_shares_with_nobody() {
        let mut account = Account::new(&Communicator::solo(), &[]);
        account.begin();
        std::thread::sleep(std::time::Duration::from_millis(5));
        account.note(0.001, Spent { compute: 0.002, ..Default::default() }, &[], None);
        let step = account.share(&Communicator::solo(), false, 0).unwrap();
        let parts = step.parts[0];
        assert_eq!((parts.data, parts.compute, parts.wait), (0.001, 0.002, 0.0));
        assert!(parts.idle > 0.0019 && parts.wall() >= 0.005);
    }
}
