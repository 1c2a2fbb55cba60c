//! A model bound to a device and its data, on one rank: one optimizer step, one evaluation.

use crate::account::{Account, Step};
use crate::checkpoint::{Checkpoint, Checkpoints, Progress};
use crate::config::{LossScale, Residual, Resolved};
use crate::device::{self, BadValue, Device, Outcome, Seat, Which, planned, scratch_of};
use crate::error::TrainError;
use crate::fault::Fault;
use crate::finishing::Finishing;
use crate::fitting;
use crate::real::{self, Real};
use crate::sets::Sets;
use crate::shares::Shares;
use crate::stored::weights_file;
use crate::tensors::Outline;
use crate::weights;
use comm::{Communicator, Reduction};
use data::{Dataset, Finish, LoadedBatch, Loader, LoaderSettings, Request, Sampler, Skipped, Transform};
use graph::{
    AVERAGE, DType, DynamicScale, Header, Lane, Loss, LossScaling, Mixed, Program, Role, Settings, State,
    StateId, compile, inference,
};
use models::names::{Tensor, Weights};
use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

/// Batches under way: enough that a slow image doesn't stop the step, few enough that memory stays small.
const DEPTH: usize = 4;

/// Loss and hits over some samples.
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
}

struct Ahead {
    next_step: u64,
    loader: Loader,
}

/// What the host knows of a step that it handed to the device.
struct Queued {
    step: u64,
    learning_rate: f64,
    began: Instant,
    /// Seconds in which the host waited for images and copied them.
    data: f64,
}

/// A step that is done.
#[derive(Clone, Copy, Debug)]
pub struct Finished {
    pub step: u64,
    pub result: StepResult,
    /// When the host began with it.
    pub began: Instant,
}

/// The types of a plan in mixed precision: of products, and of the residual stream.
pub fn mixed(run: &Resolved) -> Option<Mixed> {
    let half = run.precision.half()?;
    let residual = match run.residual {
        Residual::Fp32 => DType::F32,
        Residual::Half => half,
    };
    Some(Mixed { half, residual })
}

/// How the loss is scaled in fp16.
fn loss_scale(run: &Resolved) -> Option<LossScaling> {
    let LossScale { initial, dynamic, window, hysteresis, min } = run.loss_scale?;
    Some(LossScaling { initial, dynamic: dynamic.then_some(DynamicScale { window, hysteresis, min }) })
}

/// Compiles the plans of a rank that has `batch` images in a micro-step, prepared by the host.
pub fn program<T: Real>(run: &Resolved, batch: usize) -> Result<Program, TrainError> {
    program_with::<T>(run, batch, None)
}

/// As [`program`], with what the device does to images by itself.
pub(crate) fn program_with<T: Real>(
    run: &Resolved,
    batch: usize,
    finishing: Option<&Finishing>,
) -> Result<Program, TrainError> {
    let settings = Settings {
        optimizer: run.optimizer,
        max_grad_norm: run.clip,
        recompute: run.recompute,
        group: &|state| run.group(&state.name),
        ema: run.ema,
        mixed: mixed(run),
        loss_scale: loss_scale(run),
        exchange: run.exchange(),
        scratch: &scratch_of(run),
    };
    let loss = Loss { smoothing: run.label_smoothing, mixed: run.augmentation.mixes() };
    let mut model = run.network.build(batch, loss, <T as Real>::DTYPE)?;
    if let Some(finishing) = finishing {
        model = finishing.begin(model, batch)?;
    }
    Ok(compile(model, &settings)?)
}

/// What a checkpoint keeps: all that the next step depends on and that can't be made from the rest.
fn lasts(state: &State) -> bool {
    !matches!(state.role, Role::Gradient | Role::Statistic | Role::Copy | Role::Resident | Role::Pending)
}

impl<T: Real> Session<T> {
    /// A run of one rank on the data it was resolved for; weights start as the model says, or as `--init` does.
    pub fn new(run: Resolved, sets: Sets) -> Result<Self, TrainError> {
        Self::among(run, sets, Seat::alone())
    }

    /// The part of a run that one rank has.
    pub fn among(mut run: Resolved, sets: Sets, seat: Seat) -> Result<Self, TrainError> {
        let _warm = device::warm(&run, &seat);
        run.class_names = sets.train.class_names().to_vec();
        let shares = Shares::equal(run.batch, seat.world.size());
        let finishing = Finishing::of::<T>(&run, &sets, true)?;
        let fault = Fault::from_environment(seat.world.rank())?;
        let sets = fault.as_ref().map_or(sets.clone(), |fault| fault.spoil(sets));
        let plan = |run: &Resolved, batch: usize, with: Option<&Finishing>| {
            let program = program_with::<T>(run, batch, with)?;
            run.check_batches(&program).map(|()| program)
        };
        let mut session = Self::bind(run, sets, seat, shares, finishing, plan)?;
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
        plan: impl Fn(&Resolved, usize, Option<&Finishing>) -> Result<Program, TrainError>,
    ) -> Result<Self, TrainError> {
        let plan = |run: &Resolved, batch: usize| plan(run, batch, finishing.as_ref());
        let opened = device::open(&run, plan(&run, run.batch)?, &seat);
        let mut device = opened.map_err(|error| fitting::advised(error, &run, plan))?;
        if let Some(finishing) = &finishing {
            finishing.fill(&mut *device, &sets)?;
        }
        Ok(Session { finishing, ..Self::over(run, sets, seat.world, shares, device) })
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
        let account = Account::new(&world, device.exchanges());
        let (ahead, skipped) = (None, Vec::new());
        let in_flight = VecDeque::with_capacity(device.depth() + 1);
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
        }
    }

    /// Starts from the weights of `--init`, if there are any.
    pub(crate) fn load_init(&mut self) -> Result<(), TrainError> {
        // The other ranks get them from rank 0; they may not even have the file.
        if let Some(path) = self.run.init.as_ref().filter(|_| self.world.rank() == 0) {
            let weights = weights::load_for(&weights_file(path)?, &self.run.network, self.run.new_head)?;
            self.load_weights(&weights)?;
        }
        Ok(())
    }

    /// For judging weights only: no memory for gradients.
    pub fn for_evaluation(mut run: Resolved, sets: Sets, weights: &Weights) -> Result<Self, TrainError> {
        run.ema = None;
        let finishing = Finishing::of::<T>(&run, &sets, false)?;
        let plan = |run: &Resolved, batch: usize, finishing: Option<&Finishing>| {
            let mut model = run.network.build(batch, Loss::default(), <T as Real>::DTYPE)?;
            if let Some(finishing) = finishing {
                model = finishing.begin(model, batch)?;
            }
            Ok(inference(model, mixed(run), &scratch_of(run))?)
        };
        let shares = Shares::equal(run.batch, 1);
        let mut session = Self::bind(run, sets, Seat::alone(), shares, finishing, plan)?;
        session.load_weights(weights)?;
        Ok(session)
    }

    /// Gives every rank the states of rank 0: the weights to begin with, or where a checkpoint was made.
    pub fn follow_first(&mut self) -> Result<(), TrainError> {
        if self.world.size() == 1 {
            return Ok(());
        }
        for id in self.lasting_ids() {
            let call = self.world.name(&self.device.program().states[id.index()].name);
            let mut values = self.device.state(id)?.into_owned();
            self.world.broadcast(call, 0, &mut values)?;
            self.device.write_state(id, &values)?;
        }
        self.device.states_written()
    }

    /// The states that a checkpoint keeps.
    fn lasting_ids(&self) -> Vec<StateId> {
        let states = self.device.program().states.iter().enumerate();
        states.filter(|(_, state)| lasts(state)).map(|(index, _)| StateId(index as u32)).collect()
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

    /// Images that could not be read since the last call.
    pub fn take_skipped(&mut self) -> Vec<Skipped> {
        std::mem::take(&mut self.skipped)
    }

    /// Hands the device one optimizer step over `accumulate` micro-batches. What it came to is asked for with
    /// [`result`](Session::result).
    pub fn step(&mut self, step: u64) -> Result<(), TrainError> {
        let began = Instant::now();
        if let Some(fault) = &self.fault {
            fault.strike(step, &self.world, &mut *self.device)?;
        }
        let mut ahead = match self.ahead.take().filter(|ahead| ahead.next_step == step) {
            Some(ahead) => ahead,
            None => Ahead { next_step: step, loader: self.training_loader(step, self.run.data.workers)? },
        };
        let mut data = 0.0;
        for micro in 0..self.run.accumulate {
            let (which, header) = self.micro(step, micro);
            let start = Instant::now();
            self.load(which, &mut ahead.loader)?;
            data += start.elapsed().as_secs_f64();
            self.device.run(which, &header)?;
        }
        ahead.next_step += 1;
        self.ahead = Some(ahead);
        let header = self.header(step);
        self.device.run(Which::Update, &header)?;
        self.device.end_step()?;
        self.in_flight.push_back(Queued { step, learning_rate: header.learning_rate, began, data });
        Ok(())
    }

    /// Steps that were handed to the device and whose results were not taken yet.
    pub fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// How many steps may be in flight.
    pub fn depth(&self) -> usize {
        self.device.depth().max(1)
    }

    /// Waits for the oldest step in flight, if there is one; the account is then its own.
    pub fn result(&mut self) -> Result<Option<Finished>, TrainError> {
        let Some(Queued { step, learning_rate, began, data }) = self.in_flight.pop_front() else {
            return Ok(None);
        };
        let Outcome { stats, control: [_, apply, gradient_norm], scale } = self.device.outcome()?;
        let loss_scale = scale.map(|[scale, ..]| scale);
        let spent = self.device.take_account();
        self.account.note(data, spent, self.device.exchanges(), self.device.sensors());
        let score = Score::of(stats);
        let result = StepResult { score, learning_rate, gradient_norm, applied: apply != 0.0, loss_scale };
        Ok(Some(Finished { step, result, began }))
    }

    /// Ends the account of a step: what every rank did in it, and what they have to tell each other.
    pub fn share_account(&mut self, stop: bool) -> Result<&Step, TrainError> {
        let skipped = self.skipped.len();
        Ok(self.account.share(&self.world, stop, skipped)?)
    }

    /// Goes once more through a step that was skipped, from the parameters as they are now, and names the first
    /// value of this rank that is not finite. With none in flight and none applied since, these are the ones it started with;
    /// there is no bad value then if only the sum of the gradients' squares overflowed.
    pub fn first_bad_value(&mut self, step: u64) -> Result<Option<BadValue>, TrainError> {
        let mut loader = self.training_loader(step, 0)?;
        // Not the plan with the gradients' exchange: each rank looks for itself, and may be done before the others. Not so if
        // ranks need each other for their batch norms.
        let together = self.device.program().micro.steps.iter().any(|step| step.lane == Lane::Comm);
        let mut first = None;
        for micro in 0..self.run.accumulate {
            if first.is_some() && !together {
                break;
            }
            let (_, header) = self.micro(step, micro);
            self.load(Which::Micro, &mut loader)?;
            first = first.or(self.device.run_checked(Which::Micro, &header)?);
        }
        Ok(first)
    }

    fn header(&self, step: u64) -> Header {
        let (seed, learning_rate) = (self.run.seed, self.run.schedule.at(step));
        let nominal = self.run.nominal();
        Header { seed, step, first_sample: 0, learning_rate, nominal, accumulate: false }
    }

    /// The plan of a micro-step, and what it is told.
    fn micro(&self, step: u64, micro: usize) -> (Which, Header) {
        let which = if micro + 1 == self.run.accumulate { Which::Last } else { Which::Micro };
        let first_sample = (micro * self.shares.total() + self.shares.before(self.world.rank())) as u64;
        (which, Header { first_sample, accumulate: micro > 0, ..self.header(step) })
    }

    /// Reads this rank's micro-batches of all steps from `step` on.
    fn training_loader(&self, step: u64, workers: usize) -> Result<Loader, TrainError> {
        let (set, transform) =
            (Arc::clone(&self.sets.train), self.run.augmentation.training(&self.run.network));
        let sampler = Sampler { len: set.len(), seed: self.run.seed, shuffle: true };
        let requests = requests(&self.run, &self.shares, self.world.rank(), step);
        let finish = self.finishing.as_ref().and_then(|finishing| finishing.train.as_ref());
        self.loader(set, transform, finish, self.loading(sampler, workers), requests)
    }

    /// Reads samples as the device takes them.
    fn loader(
        &self,
        set: Arc<dyn Dataset>,
        transform: Transform,
        finish: Option<&Arc<Finish>>,
        settings: LoaderSettings,
        requests: impl Iterator<Item = Request> + Send + 'static,
    ) -> Result<Loader, TrainError> {
        Ok(match finish {
            Some(finish) => Loader::unfinished(set, transform, Arc::clone(finish), settings, requests)?,
            None => Loader::new(set, transform, settings, requests)?,
        })
    }

    fn loading(&self, sampler: Sampler, workers: usize) -> LoaderSettings {
        let (batch, skip_bad) = (self.shares.of(self.world.rank()), self.run.data.skip_bad_images);
        LoaderSettings { sampler, batch, workers, depth: DEPTH, skip_bad }
    }

    /// Copies the next batch into a plan. A plan may reuse the memory of its inputs, so this is done before every run.
    fn load(&mut self, which: Which, loader: &mut Loader) -> Result<(), TrainError> {
        let Some(loaded) = loader.next_batch()? else {
            unreachable!("the loader is asked for as many batches as it was told of")
        };
        self.skipped.extend_from_slice(&loaded.skipped);
        self.device.load(which, loaded)
    }

    /// Evaluated batches will have images, even if the device makes its own.
    pub fn show_images(&mut self) {
        self.shows_images = true;
    }

    /// Scores the held-out set, each image on one rank; `each` sees every batch of this rank and its logits, those of
    /// padding left out. The score is that of all ranks.
    pub fn evaluate(&mut self, mut each: impl FnMut(&LoadedBatch, &[T])) -> Result<Score, TrainError> {
        self.device.before_evaluation()?;
        let set = Arc::clone(&self.sets.test);
        let transform = self.run.augmentation.evaluation(&self.run.network);
        let sampler = Sampler { len: set.len(), seed: 0, shuffle: false };
        let settings = self.loading(sampler, self.run.data.workers);
        let requests = || self.shares.once(self.world.rank(), set.len());
        let finish = self.finishing.as_ref().map(|finishing| &finishing.eval);
        let mut shown = match finish.filter(|_| self.shows_images) {
            Some(_) => Some(Loader::new(set.clone(), transform.clone(), settings.clone(), requests())?),
            None => None,
        };
        let mut loader = self.loader(set.clone(), transform, finish, settings, requests())?;
        let nominal = self.run.batch as f64;
        let header =
            Header { seed: 0, step: 0, first_sample: 0, learning_rate: 0.0, nominal, accumulate: false };
        let mut sums: Vec<[f64; 4]> = Vec::new();
        while let Some(batch) = loader.next_batch()? {
            self.skipped.extend_from_slice(&batch.skipped);
            self.device.load(Which::Eval, batch)?;
            self.device.run(Which::Eval, &header)?;
            let stats = planned(self.device.output(Which::Eval, "loss.stats")?);
            sums.push(std::array::from_fn(|i| stats[i].to_f64()));
            let logits = planned(self.device.output(Which::Eval, "head")?);
            let batch = match &mut shown {
                Some(shown) => planned(shown.next_batch()?),
                None => batch,
            };
            each(batch, &logits[..batch.request.count * self.run.network.classes()]);
        }
        self.total(&sums)
    }

    /// The sums of all batches of all ranks, added in the order of the batches: the same for any number of ranks.
    fn total(&self, mine: &[[f64; 4]]) -> Result<Score, TrainError> {
        let (ranks, rank) = (self.world.size(), self.world.rank());
        let mut all = vec![0.0; mine.len() * ranks * 4];
        for (chunk, sums) in mine.iter().enumerate() {
            all[(chunk * ranks + rank) * 4..][..4].copy_from_slice(sums);
        }
        self.world.all_reduce(self.world.name("evaluation"), Reduction::Sum, &mut all)?;
        let mut total = [0.0; 4];
        for batch in all.as_chunks::<4>().0 {
            total.iter_mut().zip(batch).for_each(|(total, x)| *total += x);
        }
        Ok(Score::of(total))
    }

    pub fn test_set(&self) -> &dyn Dataset {
        &*self.sets.test
    }

    /// The parameters and running moments under their canonical names; with averages, those, since they are what is evaluated.
    pub fn weights(&self) -> Result<Weights, TrainError> {
        let holds = |state: &&State| state.is_parameter() || state.role == Role::Running;
        let values = |name: &str| -> Result<Option<Vec<f32>>, TrainError> {
            let Some(id) = self.device.find_state(name) else { return Ok(None) };
            Ok(Some(self.device.state(id)?.iter().map(|x| x.to_f64() as f32).collect()))
        };
        let tensor = |state: &State| {
            let own = planned(values(&state.name)?);
            let data = match values(&format!("{}{AVERAGE}", state.name))? {
                Some(average) if state.role == Role::Running => weights::with_count_of(average, &own),
                Some(average) => average,
                None => own,
            };
            Ok((state.name.clone(), Tensor { shape: state.ty.shape.0.clone(), data }))
        };
        self.device.program().states.iter().filter(holds).map(tensor).collect()
    }

    /// Sets the parameters that `weights` has; they were checked against this model when they were read.
    fn load_weights(&mut self, weights: &Weights) -> Result<(), TrainError> {
        let mut values = Vec::new();
        for (name, tensor) in weights {
            if let Some(id) = self.device.find_state(name) {
                values.resize(tensor.data.len(), T::ZERO);
                real::copy(&tensor.data, &mut values);
                self.device.write_state(id, &values)?;
            }
        }
        self.device.reset_averages()?;
        self.device.states_written()
    }

    /// Writes a checkpoint, state by state: none is in flight.
    pub fn save(
        &self,
        checkpoints: &Checkpoints,
        progress: &Progress,
        config: &str,
        best: bool,
    ) -> Result<PathBuf, TrainError> {
        let (ids, states) = (self.lasting_ids(), &self.device.program().states);
        let outline = |id: &StateId| {
            let state = &states[id.index()];
            Outline { name: &state.name, shape: &state.ty.shape.0 }
        };
        let outlines: Vec<Outline<'_>> = ids.iter().map(outline).collect();
        checkpoints.save(&outlines, |index| self.device.state(ids[index]), progress, config, best)
    }

    /// Goes on where a checkpoint was made.
    pub fn restore(&mut self, checkpoint: Checkpoint) -> Result<Progress, TrainError> {
        let states: Vec<State> =
            self.device.program().states.iter().filter(|state| lasts(state)).cloned().collect();
        let expected: Vec<Outline<'_>> =
            states.iter().map(|s| Outline { name: &s.name, shape: &s.ty.shape.0 }).collect();
        self.ahead = None;
        let progress = checkpoint.restore(&expected, |name, values: &[T]| {
            let id = self.device.find_state(name);
            id.map_or(Ok(()), |id| self.device.write_state(id, values))
        })?;
        self.device.states_written()?;
        Ok(progress)
    }
}

/// A rank's micro-batches of every step from `step` to the last, one after the other; of `step` itself in any case.
fn requests(
    run: &Resolved,
    shares: &Shares,
    rank: usize,
    step: u64,
) -> impl Iterator<Item = Request> + Send + 'static {
    let (accumulate, global, shares) = (run.accumulate, run.global_batch(), shares.clone());
    let (per_epoch, images) = (run.steps_per_epoch, run.data.train_images());
    let steps = step..run.steps.max(step + 1);
    steps.flat_map(move |step| (0..accumulate).map(move |micro| (step, micro))).map(move |(step, micro)| {
        let (epoch, in_epoch) = (step / per_epoch, (step % per_epoch) as usize);
        shares.request(rank, epoch, in_epoch * global + micro * shares.total(), images)
    })
}
