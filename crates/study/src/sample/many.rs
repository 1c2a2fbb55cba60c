//! A study of 36 points, completed as a real one is: six series over six numbers of ranks.

use super::{Draw, settings, study};
use crate::results::*;
use records::{Metric, Parts, Values};

/// Models with the seconds that an image takes, batches of a rank, and how ranks differ.
const MODELS: [(&str, f64); 2] = [("vit-s/16", 0.000_28), ("vit-b/16", 0.000_96)];
const BATCHES: [usize; 3] = [256, 16, 64];
const RANKS: [usize; 6] = [1, 2, 4, 8, 16, 32];
const RUNS: usize = 5;
const STEPS: usize = 24;

/// Weak scaling of two models by three batches; one rank of each eight is slow for the larger model, and links are slow beyond eight.
pub fn many() -> Results {
    let mut draw = Draw(22);
    let mut points = vec![];
    for ranks in RANKS {
        for (model, seconds) in MODELS {
            for batch in BATCHES {
                let images = 4_096 * ranks as u64;
                let steps = images / (batch * ranks) as u64;
                let s = Settings {
                    model: model.into(),
                    images_per_epoch: images,
                    steps,
                    ..settings(ranks, batch)
                };
                let runs = (0..RUNS).map(|repeat| run(repeat, &s, seconds, &mut draw)).collect();
                points.push(Point {
                    id: format!("weak-{}-{batch}-{ranks}", model.replace('/', "-")),
                    kind: Kind::Weak,
                    series: format!("{model} · batch {batch}"),
                    settings: s,
                    runs,
                    summary: None,
                    limiter: None,
                    flags: vec![],
                    factors: None,
                });
            }
        }
    }
    let mut results = Results {
        name: "many".into(),
        title: "Weak scaling of two models by three batch sizes, to 32 ranks".into(),
        points,
        ..study()
    };
    results.platform.cores = 64;
    crate::summary::complete(&mut results, &|_| false);
    results
}

fn run(repeat: usize, s: &Settings, seconds: f64, draw: &mut Draw) -> Run {
    let ranks = s.ranks;
    let pace = 1.0 + 0.015 * draw.next();
    let communication = match ranks {
        1 => 0.0,
        2..=8 => 0.001 + 0.000_4 * ranks as f64,
        _ => 0.006 + 0.000_25 * ranks as f64,
    };
    let mut all = vec![Parts::default(); ranks];
    let (mut slowest_steps, mut step_seconds) = (vec![0; ranks], vec![]);
    for _ in 0..STEPS {
        let mut own: Vec<Parts> = (0..ranks)
            .map(|rank| {
                let slow = if s.model == "vit-b/16" && rank % 8 == 5 { 1.12 } else { 1.0 };
                let jitter = 1.0 + 0.03 * draw.next().abs();
                let compute = (0.002 + seconds * s.batch_per_rank as f64) * pace * slow * jitter;
                Parts {
                    compute,
                    optimizer: 0.001,
                    data: 0.000_02 * ranks as f64,
                    idle: 0.000_2,
                    ..Parts::default()
                }
            })
            .collect();
        let longest = own.iter().map(Parts::own).fold(0.0, f64::max);
        let last = own.iter().position(|parts| parts.own() == longest).unwrap_or(0);
        slowest_steps[last] += u64::from(ranks > 1);
        for parts in &mut own {
            (parts.wait, parts.communication) = (longest - parts.own(), communication);
            parts.hidden = 2.0 * communication;
        }
        step_seconds.push(longest + communication);
        all.iter_mut().zip(&own).for_each(|(sum, parts)| *sum += *parts * (1.0 / STEPS as f64));
    }
    let total: f64 = step_seconds.iter().sum();
    let images = (STEPS * s.global_batch) as f64;
    let mut values = Values::default();
    values.set(Metric::EvalTop1, 0.55 + 0.01 * draw.next());
    let busy = 0.99 - communication / (communication + seconds * s.batch_per_rank as f64);
    let measured = Measured {
        epoch_seconds: vec![total / STEPS as f64 * s.steps as f64],
        images_per_second: images / total,
        images: images as u64,
        slowest_steps: if ranks > 1 { slowest_steps } else { vec![] },
        ranks: all,
        communication_bytes: if ranks > 1 { 173_000_000 } else { 0 },
        communication_bytes_per_second: if ranks > 1 { 21e9 } else { 0.0 },
        cpu_utilisation: Some(0.4),
        gpu_utilisation: Some(busy),
        memory_bytes: Some(5_400_000_000),
        planned_bytes: None,
        collectives: vec![],
        gpu_memory_bytes: Some(9_000_000_000 + 30_000_000 * s.batch_per_rank as u64),
        gpu_load: Some(busy),
        gpu_watts: Some(410.0 * busy),
        watts: None,
        curve: vec![Epoch { epoch: 0, values }],
        step_seconds,
    };
    Run { repeat, started: 1_794_755_952, seconds: 30.0, outcome: Outcome::Done(Box::new(measured)) }
}
