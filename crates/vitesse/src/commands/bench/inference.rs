//! `vitesse bench --inference`.

use crate::args::BenchArgs;
use crate::table::{self, rate};
use config::Resolved;
use serde_json::{Value, json};
use train::inference::{InferenceBench, Repeats, batch_sizes};

/// Timed runs of a batch size, unless told otherwise, and the seconds after which there may be fewer.
const RUNS: usize = 50;
const SECONDS: f64 = 5.0;

/// Times of one batch size.
struct Timed {
    batch: usize,
    /// Seconds of each run, shortest first.
    seconds: Vec<f64>,
}

impl Timed {
    /// The nearest rank.
    fn quantile(&self, share: f64) -> f64 {
        let rank = (share * self.seconds.len() as f64).ceil() as usize;
        self.seconds.get(rank.max(1) - 1).copied().unwrap_or(f64::NAN)
    }

    fn median(&self) -> f64 {
        self.quantile(0.5)
    }

    fn images_per_second(&self) -> f64 {
        self.batch as f64 / self.median()
    }

    fn to_json(&self) -> Value {
        json!({"batch_size": self.batch, "runs": self.seconds.len(), "latency_median_seconds": self.median(),
            "latency_p95_seconds": self.quantile(0.95), "images_per_second": self.images_per_second(), "seconds": self.seconds})
    }
}

pub fn run(args: &BenchArgs, run: &Resolved) -> anyhow::Result<()> {
    let mut bench = InferenceBench::new(run)?;
    let seconds = if args.seconds > 0.0 { args.seconds } else { SECONDS };
    let repeats = Repeats { times: args.steps.unwrap_or(RUNS).max(1), seconds };
    let [height, width] = run.network.size();
    if !args.json {
        println!("{} · {width}×{height} px · inference on {}", run.model, table::device(run));
        println!("{:>7}  {:>11}  {:>11}  {:>9}  {:>5}", "batch", "median", "p95", "images/s", "runs");
    }
    let mut all = vec![];
    for batch in batch_sizes(run.batch) {
        let mut seconds = bench.time(batch, repeats)?;
        seconds.sort_by(f64::total_cmp);
        let timed = Timed { batch, seconds };
        if !args.json {
            println!(
                "{batch:>7}  {:>8.2} ms  {:>8.2} ms  {:>9}  {:>5}",
                1e3 * timed.median(),
                1e3 * timed.quantile(0.95),
                rate(timed.images_per_second()),
                timed.seconds.len()
            );
        }
        all.push(timed);
    }
    if args.json {
        let report = json!({
            "model": run.model, "image_size": run.network.image(), "device": run.device, "precision": run.precision,
            "threads": run.threads, "inference": all.iter().map(Timed::to_json).collect::<Vec<_>>(),
        });
        println!("{report}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_the_nearest_ranks() {
        let timed = Timed { batch: 4, seconds: (1..=20).map(f64::from).collect() };
        assert_eq!((timed.median(), timed.quantile(0.95), timed.images_per_second()), (10.0, 19.0, 0.4));
        let one = Timed { batch: 1, seconds: vec![2.0] };
        assert_eq!((one.median(), one.quantile(0.95)), (2.0, 2.0));
    }
}
