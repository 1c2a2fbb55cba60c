//! Benchmarks of a training step on random data: the whole step, and on the CPU its matmuls alone.

use crate::error::TrainError;
use comm::Communicator;
use config::Resolved;
use data::Batch;
use devices::device::{self, Device, KernelTime, Seat, StepTime, Which};
use devices::memory_advice::with_advice;
use devices::program::program;
use graph::random::Sequence;
use graph::{Header, Program};
use std::time::Instant;

/// What ranks do together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    Step,
    /// A step without the account of its time.
    Untimed,
    Matmuls,
    End,
}

impl Turn {
    const ALL: [Turn; 4] = [Turn::Step, Turn::Untimed, Turn::Matmuls, Turn::End];
}

/// One rank of a benchmark.
pub struct StepBench {
    world: Communicator,
    device: Box<dyn Device<f32>>,
    header: Header,
    batch: Batch,
    /// Micro-steps of a step.
    micros: usize,
    in_flight: usize,
    /// What was done before the device was open, and until the batch was there: each with its seconds.
    startup: Vec<(&'static str, f64)>,
}

/// Normal numbers, drawn once and then repeated: a prime number of them, so that no two images are alike.
pub(crate) fn noise(count: usize, seed: u64) -> Vec<f32> {
    const REPEATED: usize = 1_000_003;
    let mut random = Sequence::new(seed, u32::MAX);
    let mut images: Vec<f32> = (0..count.min(REPEATED)).map(|_| random.normal() as f32).collect();
    images.resize(count, 0.0);
    for at in (REPEATED..count).step_by(REPEATED) {
        let end = (at + REPEATED).min(count);
        images.copy_within(0..end - at, at);
    }
    images
}

impl StepBench {
    pub fn new(run: &Resolved, seat: Seat) -> Result<Self, TrainError> {
        let _warm = device::warm(run, &seat);
        let count = run.batch * run.network.channels() * run.network.image().pow(2);
        std::thread::scope(|scope| {
            let images = scope.spawn(|| noise(count, run.seed));
            let began = Instant::now();
            let program_of = |run: &Resolved, batch: usize| program::<f32>(run, batch);
            let program = program_of(run, run.batch)?;
            let graph = began.elapsed().as_secs_f64();
            let began = Instant::now();
            let device =
                device::open(run, program, &seat).map_err(|error| with_advice(error, run, program_of))?;
            let opening = began.elapsed().as_secs_f64();
            let began = Instant::now();
            let Ok(images) = images.join() else { unreachable!("drawing numbers doesn't panic") };
            let waited = began.elapsed().as_secs_f64();
            let startup = vec![("graph", graph), ("device", opening), ("waiting for images", waited)];
            Ok(Self::with(run, seat.world, device, images, startup))
        })
    }

    fn with(
        run: &Resolved,
        world: Communicator,
        device: Box<dyn Device<f32>>,
        images: Vec<f32>,
        startup: Vec<(&'static str, f64)>,
    ) -> Self {
        let labels = run.batch * run.network.labels();
        let batch = Batch {
            images,
            labels: (0..labels).map(|i| (i % run.network.classes()) as i32).collect(),
            weights: vec![1.0; labels],
            ..Batch::default()
        };
        let (seed, nominal) = (run.seed, run.nominal());
        let header = Header { seed, step: 0, first_sample: 0, learning_rate: 1e-4, nominal };
        StepBench { world, device, header, batch, micros: run.accumulate, in_flight: 0, startup }
    }

    /// Where the time goes until the first step is done, as far as it was: what the device did is told apart.
    pub fn startup(&self) -> Vec<(&'static str, f64)> {
        let Some(device) = self.device.startup() else { return self.startup.clone() };
        let opening = self.startup.iter().filter(|(name, _)| *name == "device").map(|(_, s)| s).sum::<f64>();
        let told: f64 = device.phases.iter().filter(|(name, _)| *name != "capturing").map(|(_, s)| s).sum();
        let others = self.startup.iter().filter(|(name, _)| *name != "device").copied();
        let rest = [("device, the rest", (opening - told).max(0.0))];
        others.chain(device.phases.iter().copied()).chain(rest).collect()
    }

    pub fn device(&self) -> &dyn Device<f32> {
        &*self.device
    }

    /// Seconds of all micro-steps, all-reduce and update. A device that has several steps in flight is kept busy: then these
    /// are the seconds from one step's end to the next one's, with all the host does in between. On others a step stands by itself: what its
    /// update left under way is waited for, as there may be no next one to hide it.
    fn step(&mut self) -> Result<f64, TrainError> {
        let depth = self.device.depth().max(1);
        let began = Instant::now();
        let mut loading = 0.0;
        for which in self.micro_steps() {
            let start = Instant::now();
            if self.header.step == 0 || self.micros > 1 || !self.device.keeps_batches() {
                self.device.load(which, &(&self.batch).into())?;
            }
            loading += start.elapsed().as_secs_f64();
            self.device.run(which, &self.header)?;
        }
        self.device.run(Which::Update, &self.header)?;
        self.device.end_step()?;
        self.header.step += 1;
        self.in_flight += 1;
        self.wait(depth - 1)?;
        if depth == 1 && self.device.program().leaves_collectives() {
            // It comes behind them, as all calls of a rank have one order.
            self.world.barrier(self.world.name("the end of a step"))?;
        }
        let seconds = began.elapsed().as_secs_f64();
        Ok(if depth == 1 { seconds - loading } else { seconds })
    }

    /// The plans of a step's micro-steps.
    fn micro_steps(&self) -> impl Iterator<Item = Which> + use<> {
        let micros = self.micros;
        (0..micros).map(move |micro| Program::micro_step(micro, micros))
    }

    /// Operations of all micro-steps of a step.
    pub fn flops(&self) -> f64 {
        self.micro_steps().map(|which| self.device.program().plan(which).cost().flops).sum()
    }

    /// Until this many steps are in flight.
    fn wait(&mut self, in_flight: usize) -> Result<(), TrainError> {
        while self.in_flight > in_flight {
            self.device.outcome()?;
            self.device.take_account();
            self.in_flight -= 1;
        }
        Ok(())
    }

    /// A turn of all ranks; the seconds it took here.
    pub fn take(&mut self, turn: Turn) -> Result<f64, TrainError> {
        match turn {
            Turn::Step => self.step(),
            Turn::Untimed => {
                self.device.set_timing(false);
                let seconds = self.step();
                self.device.set_timing(true);
                seconds
            }
            Turn::Matmuls => {
                let micro_steps = self.micro_steps();
                let alone = |which| self.device.run_matmuls(which, &self.header).unwrap_or(0.0);
                Ok(micro_steps.map(alone).sum())
            }
            Turn::End => {
                self.wait(0)?;
                self.device.finish();
                Ok(0.0)
            }
        }
    }

    /// A turn by itself: the seconds until nothing is in flight.
    pub fn take_alone(&mut self, turn: Turn) -> Result<f64, TrainError> {
        let seconds = self.take(turn)?;
        let start = Instant::now();
        self.wait(0)?;
        Ok(seconds + start.elapsed().as_secs_f64())
    }

    /// What the first rank wants done next, on every rank.
    pub fn told(&self, mine: Turn) -> Result<Turn, TrainError> {
        let mut turn = [mine as u8];
        self.world.broadcast(self.world.name("the next turn"), 0, &mut turn)?;
        Ok(Turn::ALL[usize::from(turn[0]).min(Turn::ALL.len() - 1)])
    }

    /// Every kernel and matmul of a step, on devices that can tell.
    pub fn profile(&mut self, repeats: usize) -> Result<Vec<KernelTime>, TrainError> {
        self.wait(0)?;
        if self.world.size() > 1 {
            // The other ranks would have to go through every collective with it.
            return Err(TrainError::setting("kernels", "", "is for one rank"));
        }
        Ok(self.device.profile(&self.header, repeats)?)
    }

    /// What the device could do at most, where it measures that itself.
    pub fn ceilings(&mut self) -> Result<Option<graph::Ceilings>, TrainError> {
        self.wait(0)?;
        Ok(self.device.ceilings()?)
    }

    pub fn reset_times(&mut self) {
        self.device.reset_times();
    }

    pub fn times(&self) -> Vec<StepTime> {
        self.device.training_times()
    }
}
