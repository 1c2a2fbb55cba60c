//! Points for tests, as if they had been measured.

use crate::grid::Planned;
use crate::results::{FORMAT, Kind, Measured, Outcome, Platform, Point, Results, Run, Settings};
use records::Parts;

/// A study of these points, whose summaries are still missing.
pub fn results(points: Vec<Point>) -> Results {
    let platform = Platform {
        name: "here".into(),
        host: "here".into(),
        cpu: "one".into(),
        cores: 2,
        gpus: vec![],
        memory_bytes: 0,
    };
    Results {
        format: FORMAT,
        version: "0".into(),
        name: "s".into(),
        title: "s".into(),
        platform,
        started: 0,
        points,
        warnings: vec![],
        summary: String::new(),
        serial: vec![],
    }
}

/// A point of strong scaling whose runs did so many images/s.
pub fn point(ranks: usize, rates: &[f64]) -> Point {
    let settings = Settings {
        task: "classification".into(),
        model: "vit-nano/4".into(),
        image_size: 32,
        data: "synthetic".into(),
        data_fraction: 1.0,
        ranks,
        hosts: 1,
        threads_per_rank: 1,
        batch_per_rank: 64 / ranks,
        accumulation: 1,
        global_batch: 64 / ranks * ranks,
        optimizer: "adamw".into(),
        precision: "fp32".into(),
        device: "cpu".into(),
        comm: "threads".into(),
        images_per_epoch: 640,
        epochs: 1,
        steps: 10,
        loader_threads: 1,
        other: Default::default(),
    };
    let runs = rates.iter().enumerate().map(|(repeat, rate)| run(repeat, ranks, *rate)).collect();
    Point {
        id: format!("strong-{ranks}"),
        kind: Kind::Strong,
        series: "vit-nano/4".into(),
        settings,
        runs,
        summary: None,
        limiter: None,
        flags: vec![],
        factors: None,
    }
}

/// A point to be measured.
pub fn planned(id: &str, settings: Settings) -> Planned {
    Planned {
        id: id.into(),
        kind: Kind::Strong,
        series: String::new(),
        settings,
        options: vec![],
        warmup: 0,
        oversubscribed: false,
        estimate: None,
    }
}

/// Ten steps of 64 images, all of it computing.
fn run(repeat: usize, ranks: usize, rate: f64) -> Run {
    let step = 64.0 / rate;
    let measured = Measured {
        step_seconds: vec![step; 10],
        epoch_seconds: vec![10.0 * step],
        images_per_second: rate,
        images: 640,
        ranks: vec![Parts { compute: step, ..Parts::default() }; ranks],
        slowest_steps: vec![],
        communication_bytes: 0,
        communication_bytes_per_second: 0.0,
        cpu_utilisation: None,
        gpu_utilisation: None,
        memory_bytes: None,
        planned_bytes: None,
        collectives: vec![],
        gpu_memory_bytes: None,
        gpu_load: None,
        gpu_watts: None,
        watts: None,
        curve: vec![],
    };
    Run { repeat, started: 0, seconds: 1.0, outcome: Outcome::Done(Box::new(measured)) }
}

/// Random numbers for tests.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        crate::engine::split_mix(&mut self.0)
    }

    /// From 0 to 1, neither of them.
    pub fn uniform(&mut self) -> f64 {
        ((self.next() >> 11) as f64 + 0.5) / (1u64 << 53) as f64
    }

    pub fn normal(&mut self) -> f64 {
        (-2.0 * self.uniform().ln()).sqrt() * (std::f64::consts::TAU * self.uniform()).cos()
    }
}
