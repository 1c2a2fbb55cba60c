//! A model bound to a device and its data, on one rank: one optimizer step, one evaluation.

mod evaluate;
mod feed;
#[cfg(test)]
mod finishing_tests;
pub(crate) mod shards;
mod states;
#[cfg(test)]
mod under_way_tests;
#[cfg(test)]
mod zero_tests;

pub use evaluate::Evaluation;
pub(crate) use evaluate::header as evaluation_header;

use crate::account::{Account, Step};
use crate::error::TrainError;
use crate::fault;
use comm::Communicator;
use config::Shares;
use config::sets::Sets;
use config::{Resolved, Task};
use data::{Loader, Skipped};
use devices::DeviceError;
use devices::Real;
use devices::device::{self, BadValue, Device, Outcome, Seat, Which};
use devices::finishing::Finishing;
use devices::memory_advice::with_advice;
use devices::program::{evaluation_program, program_with};
use files::fault::Fault;
use graph::{Header, Lane, Program};
use models::names::Weights;
use std::collections::VecDeque;
use std::time::Instant;

/// Loss and hits over some samples: images, or pixels.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Score {
    pub loss: f64,
    pub top1: f64,
    pub top5: f64,
    pub samples: f64,
}

impl Score {
    /// From the sums that `cross_entropy` gives.
    fn of(sums: [f64; 4]) -> Self {
        let [loss, samples, top1, top5] = sums;
        Score { loss: loss / samples, top1: top1 / samples, top5: top5 / samples, samples }
    }
}

/// What a step came to, over all ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepResult {
    pub score: Score,
    /// Images that it took.
    pub images: f64,
    pub learning_rate: f64,
    pub gradient_norm: f64,
    /// False if the gradient was not finite and nothing was changed.
    pub applied: bool,
    /// What losses are multiplied by from here on, in fp16.
    pub loss_scale: Option<f64>,
}

pub struct Session<T: Real = f32> {
    run: Resolved,
    world: Communicator,
    /// How a micro-step is divided among the ranks.
    shares: Shares,
    device: Box<dyn Device<T>>,
    /// Steps whose results were not taken yet, oldest first.
    in_flight: VecDeque<Queued>,
    sets: Sets,
    /// What the device does to images by itself.
    finishing: Option<Finishing>,
    /// Whoever looks at evaluated batches wants their images.
    shows_images: bool,
    /// Reads ahead for the steps from here on.
    ahead: Option<Ahead>,
    skipped: Vec<Skipped>,
    account: Account,
    fault: Option<Fault>,
    /// Weights to begin with, of which the other ranks have yet to get their parts.
    init: Option<Weights>,
}

struct Ahead {
    next_step: u64,
    feed: Loader,
}

/// What the host knows of a step that it handed to the device.
struct Queued {
    step: u64,
    learning_rate: f64,
    began: Instant,
    /// Seconds in which the host waited for images and copied them.
    data: f64,
    /// Result, if the step's account was posted.
    posted: Option<Finished>,
}

/// A step that is done.
#[derive(Clone, Copy, Debug)]
pub struct Finished {
    pub step: u64,
    pub result: StepResult,
    /// Moment when the host began with it.
    pub began: Instant,
    /// Moment when the host knew the result.
    pub ended: Instant,
}

impl<T: Real> Session<T> {
    /// A run of one rank on the data it was resolved for; weights start as the model says, or as `--init` does.
    pub fn new(run: Resolved, sets: Sets) -> Result<Self, TrainError> {
        Self::among(run, sets, Seat::alone())
    }

    /// The part of a run that one rank has.
    pub fn among(mut run: Resolved, sets: Sets, seat: Seat) -> Result<Self, TrainError> {
        let _warm = device::warm(&run, &seat);
        run.class_names = sets.class_names().to_vec();
        run.gpu = seat.local_rank;
        let shares = run.shares();
        let finishing = Finishing::of::<T>(&run, &sets, true)?;
        let fault = Fault::from_environment(seat.world.rank()).map_err(TrainError::Fault)?;
        let sets = fault.as_ref().map_or(sets.clone(), |fault| fault::spoil(fault, sets));
        let mut session = Self::bind(run, sets, seat, shares, finishing, program_with::<T>)?;
        session.fault = fault;
        // A continued run takes its weights from a checkpoint.
        if session.run.resume.is_none() {
            session.load_init()?;
        }
        Ok(session)
    }

    /// Over a device of its own, for the plans that `plan` makes of so many images.
    fn bind(
        run: Resolved,
        sets: Sets,
        seat: Seat,
        shares: Shares,
        finishing: Option<Finishing>,
        plan: impl Fn(&Resolved, usize, Option<&Finishing>) -> Result<Program, DeviceError>,
    ) -> Result<Self, TrainError> {
        let plan = |run: &Resolved, batch: usize| plan(run, batch, finishing.as_ref());
        let batch = shares.of(seat.world.rank());
        let opened = device::open(&run, plan(&run, batch)?, &seat);
        let mut device = opened.map_err(|error| with_advice(error, &run, plan))?;
        if let Some(finishing) = &finishing {
            finishing.fill(&mut *device, &sets)?;
        }
        Ok(Self::over(run, sets, seat.world, shares, device).finishing(finishing))
    }

    /// Over a device that is open.
    pub(crate) fn over(
        run: Resolved,
        sets: Sets,
        world: Communicator,
        shares: Shares,
        mut device: Box<dyn Device<T>>,
    ) -> Self {
        device.set_timing(run.account);
        let account = Account::new(&world, device.collectives());
        let (ahead, skipped) = (None, Vec::new());
        let in_flight = VecDeque::with_capacity(device.depth() + 2);
        let (finishing, shows_images, fault) = (None, false, None);
        Session {
            run,
            world,
            shares,
            device,
            in_flight,
            sets,
            finishing,
            shows_images,
            ahead,
            skipped,
            account,
            fault,
            init: None,
        }
    }

    /// The device makes images of bytes by itself.
    pub(crate) fn finishing(self, finishing: Option<Finishing>) -> Self {
        Session { finishing, ..self }
    }

    /// Binds a model for evaluation alone: no memory for gradients.
    pub fn for_evaluation(mut run: Resolved, sets: Sets, weights: &Weights) -> Result<Self, TrainError> {
        run.plain.ema = None;
        let finishing = Finishing::of::<T>(&run, &sets, false)?;
        let shares = Shares::equal(run.batch, 1);
        let mut session = Self::bind(run, sets, Seat::alone(), shares, finishing, evaluation_program::<T>)?;
        session.load_weights(weights)?;
        Ok(session)
    }

    /// Divides micro-steps otherwise from the next step on; none is in flight. Samples, their numbers and the weighting of gradients stay.
    pub fn divide(&mut self, shares: Shares) -> Result<(), TrainError> {
        let batch = shares.of(self.world.rank());
        if batch != self.shares.of(self.world.rank()) {
            let program = program_with::<T>(&self.run, batch, self.finishing.as_ref())?;
            self.device.rebind(program)?;
        }
        self.shares = shares;
        self.ahead = None;
        Ok(())
    }

    pub fn shares(&self) -> &Shares {
        &self.shares
    }

    pub fn resolved(&self) -> &Resolved {
        &self.run
    }

    pub fn world(&self) -> &Communicator {
        &self.world
    }

    pub fn device(&self) -> &dyn Device<T> {
        &*self.device
    }

    pub fn device_mut(&mut self) -> &mut dyn Device<T> {
        &mut *self.device
    }

    pub fn account(&self) -> &Account {
        &self.account
    }

    pub fn account_mut(&mut self) -> &mut Account {
        &mut self.account
    }

    pub(crate) fn sets(&self) -> &Sets {
        &self.sets
    }

    pub(crate) fn note_skipped(&mut self, skipped: Skipped) {
        self.skipped.push(skipped);
    }

    /// Images that could not be read since the last call.
    pub fn take_skipped(&mut self) -> Vec<Skipped> {
        std::mem::take(&mut self.skipped)
    }

    /// Hands the device one optimizer step over `accumulate` micro-batches. What it came to is asked for with
    /// [`result`](Session::result).
    pub fn step(&mut self, step: u64) -> Result<(), TrainError> {
        let began = Instant::now();
        if let Some(fault) = &self.fault {
            fault::strike(fault, step, &self.world, &mut *self.device)?;
        }
        let mut ahead = match self.ahead.take().filter(|ahead| ahead.next_step == step) {
            Some(ahead) => ahead,
            None => Ahead { next_step: step, feed: self.training_feed(step, self.run.data.workers)? },
        };
        let mut data = 0.0;
        for micro in 0..self.run.accumulate {
            let (which, header) = self.micro(step, micro);
            let start = Instant::now();
            self.load(which, &mut ahead.feed)?;
            data += start.elapsed().as_secs_f64();
            self.device.run(which, &header)?;
        }
        ahead.next_step += 1;
        self.ahead = Some(ahead);
        let header = self.header(step);
        self.device.run(Which::Update, &header)?;
        self.device.end_step()?;
        self.in_flight.push_back(Queued {
            step,
            learning_rate: header.learning_rate,
            began,
            data,
            posted: None,
        });
        Ok(())
    }

    /// Steps that were handed to the device and whose results were not taken yet.
    pub fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// How many steps may be in flight.
    pub fn depth(&self) -> usize {
        let applied = |queued: &Queued| queued.posted.is_some_and(|finished| finished.result.applied);
        self.device.depth().max(1) + usize::from(self.in_flight.back().is_some_and(applied))
    }

    /// Posts the account of the step that has just run, if its update left collectives under way, and takes no other rank's in: all calls of
    /// a rank have one order, so waiting for the others would be waiting for those collectives, which the next step is to hide. Where a device
    /// has several steps in flight, results come later anyway.
    pub fn post_account(&mut self, stop: bool) -> Result<(), TrainError> {
        if self.device.depth() > 1 || !self.device.program().leaves_collectives() {
            return Ok(());
        }
        let Some(queued) = self.in_flight.pop_back() else { return Ok(()) };
        let finished = self.outcome(&queued)?;
        self.in_flight.push_back(Queued { posted: Some(finished), ..queued });
        Ok(self.account.post(&self.world, stop, self.skipped.len())?)
    }

    /// Counts the collectives that the last update has left under way, whose times no step's account has. All ranks call it; no step is
    /// in flight.
    pub fn finish_collectives(&mut self) -> Result<(), TrainError> {
        if self.device.program().leaves_collectives() {
            self.account.share_rest(&self.world, self.device.finish_collectives()?)?;
        }
        Ok(())
    }

    /// Waits for the oldest step in flight, if there is one; the account is then its own.
    pub fn result(&mut self) -> Result<Option<Finished>, TrainError> {
        let Some(queued) = self.in_flight.pop_front() else { return Ok(None) };
        queued.posted.map_or_else(|| self.outcome(&queued), Ok).map(Some)
    }

    /// Waits for a step that was handed to the device, and notes its account.
    fn outcome(&mut self, queued: &Queued) -> Result<Finished, TrainError> {
        let Queued { step, learning_rate, began, data, .. } = *queued;
        let Outcome { stats, control: [_, apply, gradient_norm], scale } = self.device.outcome()?;
        let loss_scale = scale.map(|[scale, ..]| scale);
        let spent = self.device.take_account();
        self.account.note(data, spent, self.device.collectives(), self.device.sensors());
        let score = Score::of(stats);
        let images = match self.run.task() {
            Task::Classify if self.run.class_weights.is_none() => score.samples,
            // Labels are pixels there, or weigh more or less than one.
            Task::Classify | Task::Segment => self.run.images_of_step(step) as f64,
        };
        let applied = apply != 0.0;
        let result = StepResult { score, images, learning_rate, gradient_norm, applied, loss_scale };
        Ok(Finished { step, result, began, ended: Instant::now() })
    }

    /// Ends the account of a step whose result was taken: what every rank did in it, and what they have to tell each other.
    pub fn share_account(&mut self, stop: bool) -> Result<&Step, TrainError> {
        if self.account.receive()?.is_none() {
            self.account.share(&self.world, stop, self.skipped.len())?;
        }
        Ok(self.account.last())
    }

    /// Goes once more through a step that was skipped, from the parameters as they are now, and names the first
    /// value of this rank that is not finite. With none in flight and none applied since, these are the ones it started with;
    /// there is no bad value then if only the sum of the gradients' squares overflowed.
    pub fn first_bad_value(&mut self, step: u64) -> Result<Option<BadValue>, TrainError> {
        let mut feed = self.training_feed(step, 0)?;
        // Not the plan with the all-reduce of gradients: each rank looks for itself, and may be done before the others. Not so if
        // ranks need each other for their batch norms.
        let together = self.device.program().first.steps.iter().any(|step| step.lane == Lane::Comm);
        let mut first = None;
        for micro in 0..self.run.accumulate {
            if first.is_some() && !together {
                break;
            }
            let (_, header) = self.micro(step, micro);
            let which = if micro == 0 { Which::First } else { Which::Micro };
            self.load(which, &mut feed)?;
            first = first.or(self.device.run_checked(which, &header)?);
        }
        Ok(first)
    }

    fn header(&self, step: u64) -> Header {
        let (seed, learning_rate) = (self.run.seed, self.run.schedule.at(step));
        let nominal = self.run.nominal();
        Header { seed, step, first_sample: 0, learning_rate, nominal }
    }

    /// The plan of a micro-step, and what it is told.
    fn micro(&self, step: u64, micro: usize) -> (Which, Header) {
        let which = Program::micro_step(micro, self.run.accumulate);
        let first_sample = (micro * self.shares.total() + self.shares.before(self.world.rank())) as u64;
        (which, Header { first_sample, ..self.header(step) })
    }

    /// Copies the next batch into a plan. A plan may reuse the memory of its inputs, so this is done before every run.
    fn load(&mut self, which: Which, feed: &mut Loader) -> Result<(), TrainError> {
        // The loader was told of as many batches as it is asked for.
        let batch = device::planned(feed.next_batch()?);
        self.skipped.extend_from_slice(&batch.skipped);
        Ok(self.device.load(which, &batch.into())?)
    }
}
