//! Benchmarks of inference on random images: from a batch in the host's memory to its logits there.

use crate::bench::noise;
use crate::error::TrainError;
use crate::session::evaluation_header;
use config::Resolved;
use data::Batch;
use devices::device::{self, Device, Seat, Which, planned};
use devices::memory_advice::with_advice;
use devices::program::evaluation_program;
use std::time::Instant;

/// Inference in batches of several sizes.
pub struct InferenceBench {
    run: Resolved,
    device: Box<dyn Device<f32>>,
    batch: Batch,
}

/// Batches run before those that are timed.
const WARM_UP: usize = 3;

/// How often a batch is timed.
#[derive(Clone, Copy, Debug)]
pub struct Repeats {
    pub times: usize,
    /// Seconds after which fewer do, but no fewer than [`LEAST`](Repeats::LEAST).
    pub seconds: f64,
}

impl Repeats {
    pub const LEAST: usize = 10;
}

/// Batch sizes up to `largest`: powers of two, and that itself.
pub fn batch_sizes(largest: usize) -> Vec<usize> {
    let powers = std::iter::successors(Some(1usize), |size| size.checked_mul(2));
    powers.take_while(|size| *size < largest).chain([largest]).collect()
}

impl InferenceBench {
    /// With a plan for batches of one image; weights start as those of a training do.
    pub fn new(run: &Resolved) -> Result<Self, TrainError> {
        let run = Resolved { batch: 1, ..run.clone() };
        let program_of = |run: &Resolved, batch: usize| evaluation_program::<f32>(run, batch, None);
        let device = device::open(&run, program_of(&run, 1)?, &Seat::alone())
            .map_err(|error| with_advice(error, &run, program_of))?;
        Ok(InferenceBench { batch: images(&run, 1), run, device })
    }

    /// Seconds of each run in batches of `batch` images.
    pub fn time(&mut self, batch: usize, repeats: Repeats) -> Result<Vec<f64>, TrainError> {
        if batch != self.run.batch {
            self.run.batch = batch;
            self.device.rebind(evaluation_program::<f32>(&self.run, batch, None)?)?;
            self.batch = images(&self.run, batch);
        }
        for _ in 0..WARM_UP {
            self.once()?;
        }
        let (began, mut seconds) = (Instant::now(), vec![]);
        let slow = |done: usize| done >= Repeats::LEAST && began.elapsed().as_secs_f64() >= repeats.seconds;
        while seconds.len() < repeats.times && !slow(seconds.len()) {
            seconds.push(self.once()?);
        }
        Ok(seconds)
    }

    fn once(&mut self) -> Result<f64, TrainError> {
        let began = Instant::now();
        self.device.load(Which::Eval, &(&self.batch).into())?;
        self.device.run(Which::Eval, &evaluation_header(self.run.batch as f64))?;
        let logits = planned(self.device.output(Which::Eval, "head")?);
        std::hint::black_box(&logits);
        Ok(began.elapsed().as_secs_f64())
    }
}

fn images(run: &Resolved, batch: usize) -> Batch {
    let [height, width] = run.network.size();
    let labels = batch * run.network.labels();
    Batch {
        images: noise(batch * run.network.channels() * height * width, run.seed),
        labels: vec![0; labels],
        weights: vec![1.0; labels],
        ..Batch::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use config::Raw;

    #[test]
    fn sizes_are_powers_of_two_up_to_the_largest() {
        assert_eq!(batch_sizes(1), [1]);
        assert_eq!(batch_sizes(8), [1, 2, 4, 8]);
        assert_eq!(batch_sizes(12), [1, 2, 4, 8, 12]);
    }

    #[test]
    fn every_batch_is_run_as_often_as_asked() {
        let run =
            Raw { batch_size: Some(3), threads: Some(1), ..Raw::default() }.resolve_without_data(1).unwrap();
        let mut bench = InferenceBench::new(&run).unwrap();
        for batch in batch_sizes(run.batch) {
            let seconds = bench.time(batch, Repeats { times: 12, seconds: 600.0 }).unwrap();
            assert_eq!(seconds.len(), 12);
            assert!(seconds.iter().all(|seconds| *seconds > 0.0));
            let logits = bench.device.output(Which::Eval, "head").unwrap().unwrap().len();
            assert_eq!(logits, batch * run.network.classes());
        }
        let few = bench.time(1, Repeats { times: 1000, seconds: 0.0 }).unwrap();
        assert_eq!(few.len(), Repeats::LEAST, "the time is over");
    }
}
