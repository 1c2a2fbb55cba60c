//! Results made up for tests and pictures of the report: everything a study can hold, in plausible numbers.

mod many;

pub use many::many;

use crate::results::*;
use records::{Metric, Parts, Values};

/// Draws that are the same in every run.
struct Draw(u64);

impl Draw {
    /// From -1 to 1.
    fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as f64 / (1u64 << 30) as f64 - 1.0
    }
}

/// What a made-up point is made from.
struct Plan {
    kind: Kind,
    series: String,
    settings: Settings,
    repeats: usize,
    /// Seconds a step of one rank: computing, communication, data.
    compute: f64,
    communication: f64,
    data: f64,
    gpu: Option<f64>,
    flags: Vec<Flag>,
}

fn settings(ranks: usize, batch: usize) -> Settings {
    Settings {
        task: "classify".into(),
        model: "vit-b/16".into(),
        image_size: 224,
        data: "cifar100:data".into(),
        data_fraction: 1.0,
        ranks,
        hosts: 1,
        threads_per_rank: 1,
        batch_per_rank: batch,
        accumulation: 1,
        global_batch: batch * ranks,
        optimizer: "adamw".into(),
        precision: "bf16".into(),
        device: "cuda".into(),
        comm: "nccl".into(),
        images_per_epoch: 50_000,
        epochs: 5,
        steps: 5 * 50_000 / (batch * ranks) as u64,
        loader_threads: 2,
        other: Default::default(),
    }
}

fn estimate(samples: Vec<f64>) -> Estimate {
    let mut sorted = samples.clone();
    sorted.sort_by(f64::total_cmp);
    let n = sorted.len();
    let median = (sorted[(n - 1) / 2] + sorted[n / 2]) / 2.0;
    Estimate { median, interval: (n >= 5).then(|| (sorted[0], sorted[n - 1])), samples }
}

fn point(plan: Plan, draw: &mut Draw) -> Point {
    let s = &plan.settings;
    let steps_per_epoch = s.images_per_epoch as f64 / (s.global_batch * s.accumulation) as f64;
    let mut runs = vec![];
    for repeat in 0..plan.repeats {
        let noise = 1.0 + 0.02 * draw.next();
        let ranks: Vec<Parts> = (0..s.ranks)
            .map(|rank| {
                let compute = plan.compute * noise * (1.0 - 0.012 * ((rank * 7) % 5) as f64);
                let wait = plan.compute * noise - compute;
                Parts {
                    compute,
                    communication: plan.communication * noise,
                    wait,
                    data: plan.data * noise,
                    optimizer: 0.03 * plan.compute,
                    idle: 0.01 * plan.compute,
                    hidden: 0.8 * plan.communication,
                }
            })
            .collect();
        let step = (plan.compute + plan.communication + plan.data) * noise + 0.04 * plan.compute;
        let curve = (1..=s.epochs)
            .map(|epoch| {
                let pace = epoch as f64 * (64.0 / s.global_batch as f64).powf(0.18);
                let mut values = Values::default();
                values.set(Metric::Loss, 3.9 * (-0.22 * pace).exp() + 0.6 + 0.03 * draw.next());
                values.set(Metric::Top1, 0.62 - 0.55 * (-0.3 * pace).exp());
                values.set(Metric::EvalLoss, 3.8 * (-0.2 * pace).exp() + 0.8);
                values.set(Metric::EvalTop1, 0.58 - 0.5 * (-0.3 * pace).exp() + 0.006 * draw.next());
                Epoch { epoch, values }
            })
            .collect();
        let measured = Measured {
            step_seconds: (0..20).map(|_| step * (1.0 + 0.01 * draw.next())).collect(),
            epoch_seconds: vec![step * steps_per_epoch; s.epochs as usize],
            images_per_second: s.global_batch as f64 / step,
            images: 20 * s.global_batch as u64,
            slowest_steps: slowest(s.ranks),
            ranks,
            communication_bytes: 173_000_000,
            communication_bytes_per_second: 21e9,
            cpu_utilisation: Some((0.3 + 0.06 * s.ranks as f64 + 0.01 * draw.next()).min(1.0)),
            gpu_utilisation: plan.gpu.map(|busy| busy + 0.01 * draw.next()),
            memory_bytes: Some(5_400_000_000),
            planned_bytes: Some(4_900_000_000),
            collectives: vec![],
            gpu_memory_bytes: plan.gpu.map(|_| 17_000_000_000),
            gpu_load: plan.gpu.map(|busy| busy + 0.02),
            gpu_watts: plan.gpu.map(|busy| 400.0 * busy + 5.0 * draw.next()),
            watts: None,
            curve,
        };
        runs.push(Run {
            repeat,
            started: 1_794_755_952,
            seconds: 61.5,
            outcome: Outcome::Done(Box::new(measured)),
        });
    }
    let id = format!(
        "{:?}-{}-{}-{}-{}-{}-{}-{}",
        plan.kind, plan.series, s.model, s.ranks, s.hosts, s.threads_per_rank, s.batch_per_rank, s.optimizer
    );
    let id = id.to_lowercase().replace([' ', ',', '/', ':'], "-");
    let Plan { kind, series, settings, flags, .. } = plan;
    let mut point =
        Point { id, kind, series, settings, runs, summary: None, limiter: None, flags, factors: None };
    summarise(&mut point);
    point
}

/// Of twenty steps, those in which each rank is the slowest: mostly those with the most to do.
fn slowest(ranks: usize) -> Vec<u64> {
    let mut steps = vec![0; ranks];
    (0..20).for_each(|step: usize| steps[5 * (step * step % 7) % ranks] += 1);
    steps
}

fn done(point: &Point) -> Vec<&Measured> {
    let runs = point.runs.iter().filter_map(|run| match &run.outcome {
        Outcome::Done(measured) => Some(measured.as_ref()),
        Outcome::Failed { .. } => None,
    });
    runs.collect()
}

fn summarise(point: &mut Point) {
    let runs = done(point);
    if runs.is_empty() {
        return;
    }
    let first = runs[0];
    let parts = Parts::mean(&first.ranks);
    let wall = parts.wall();
    let (data, communication) = (parts.data / wall, parts.communication / wall);
    let (cause, sentence) = if data > 0.15 {
        let share = 100.0 * data;
        (Cause::Data, format!("data loading limits: ranks wait {share:.0}% of the time for images"))
    } else if communication > 0.08 {
        let share = 100.0 * communication;
        (
            Cause::Communication,
            format!("exposed communication {share:.0}%: accumulation 4 would bring 0.71 → 0.90"),
        )
    } else {
        let share = 100.0 * parts.compute / wall;
        (
            Cause::Compute,
            format!("computing itself: {share:.0}% of a step; nothing else takes a share worth naming"),
        )
    };
    let summary = Summary {
        epoch_seconds: estimate(runs.iter().map(|m| m.epoch_seconds[0]).collect()),
        step_seconds: estimate(runs.iter().map(|m| m.step_seconds[0]).collect()),
        images_per_second: estimate(runs.iter().map(|m| m.images_per_second).collect()),
        speedup: None,
        efficiency: None,
        serial_fraction: None,
        parts,
        score: crate::summary::score(&runs),
        usage: crate::summary::usage(&runs),
        collectives: vec![],
    };
    point.summary = Some(summary);
    point.limiter = Some(Limiter { cause, sentence, lost: vec![] });
}

/// Speedups against the fewest ranks of every series.
fn relate(points: &mut [Point]) {
    let rates: Vec<(Kind, String, usize, f64)> = points
        .iter()
        .filter_map(|p| {
            let rate = p.summary.as_ref()?.images_per_second.median;
            Some((p.kind, p.series.clone(), p.settings.ranks, rate))
        })
        .collect();
    for point in points.iter_mut() {
        let same = rates.iter().filter(|rate| rate.0 == point.kind && rate.1 == point.series);
        let Some(base) = same.min_by_key(|rate| rate.2) else { continue };
        let ranks = point.settings.ranks as f64 / base.2 as f64;
        let unequal = point.flags.iter().any(|flag| matches!(flag, Flag::UnequalWork(_)));
        let Some(summary) = &mut point.summary else { continue };
        if unequal || !matches!(point.kind, Kind::Strong | Kind::Weak | Kind::FixedPerRank | Kind::Nodes) {
            continue;
        }
        let over = |by: f64| estimate(summary.images_per_second.samples.iter().map(|x| x / by).collect());
        let speedup = over(base.3);
        if ranks > 1.0 {
            summary.serial_fraction = Some((1.0 / speedup.median - 1.0 / ranks) / (1.0 - 1.0 / ranks));
        }
        summary.efficiency = Some(over(base.3 * ranks));
        summary.speedup = Some(speedup);
    }
}

fn failed(mut point: Point, error: &str) -> Point {
    for run in &mut point.runs {
        run.outcome = Outcome::Failed { error: error.into() };
    }
    point.flags = vec![Flag::Failed((0..point.runs.len()).collect())];
    (point.summary, point.limiter) = (None, None);
    point
}

/// Points of all kinds; `speed` is that of the platform.
fn points(speed: f64) -> Vec<Point> {
    let mut draw = Draw(7);
    let mut points = vec![];
    let plan = |kind, series: &str, settings: Settings, repeats, gpu| {
        let images = (settings.batch_per_rank * settings.accumulation) as f64;
        let ranks = settings.ranks as f64;
        let communication =
            if settings.ranks > 1 { (0.004 + 0.0022 * ranks.log2()) / speed.sqrt() } else { 0.0 };
        let compute = (0.004 + 0.00068 * images) / speed;
        Plan {
            kind,
            series: series.into(),
            settings,
            repeats,
            compute,
            communication,
            data: 0.0004 * ranks,
            gpu,
            flags: vec![],
        }
    };
    let busy = |ranks: usize| Some(0.97 - 0.05 * (ranks as f64).log2());
    for (data, series) in [("cifar10:data", "CIFAR-10"), ("cifar100:data", "CIFAR-100")] {
        for ranks in [1, 2, 4, 8, 16] {
            let s = Settings { data: data.into(), global_batch: 128, ..settings(ranks, 128 / ranks) };
            let mut one = plan(Kind::Strong, series, s, 7, busy(ranks));
            if ranks == 16 {
                one.flags = vec![Flag::Oversubscribed];
                one.compute *= 2.1;
            }
            points.push(point(one, &mut draw));
        }
    }
    for ranks in [1, 2, 4, 8] {
        let fraction = 0.1 * ranks as f64;
        let images = 5_000 * ranks as u64;
        let s = Settings { data_fraction: fraction, images_per_epoch: images, ..settings(ranks, 64) };
        let mut one = plan(Kind::Weak, "batch 64 per rank", s, 3, busy(ranks));
        if ranks == 8 {
            one.flags = vec![
                Flag::UnequalWork("39,936 images per epoch instead of 40,000".into()),
                Flag::Outliers(vec![2]),
            ];
        }
        points.push(point(one, &mut draw));
    }
    for ranks in [1, 2] {
        for batch in [16, 32, 64, 128, 256] {
            let series = if ranks == 1 { "1 rank" } else { "2 ranks" };
            let one = point(plan(Kind::Batch, series, settings(ranks, batch), 5, busy(ranks)), &mut draw);
            let memory = "CUDA_ERROR_OUT_OF_MEMORY: 41.2 GB asked for, 39.6 GB free\n  in arena of plan last";
            points.push(if batch == 256 && ranks == 1 { failed(one, memory) } else { one });
        }
    }
    for (optimizer, factor) in [("adamw", 1.0), ("sgd", 0.96), ("lamb", 1.07)] {
        let s = Settings { optimizer: optimizer.into(), ..settings(4, 64) };
        let mut one = plan(Kind::Optimizer, "4 ranks", s, 5, None);
        one.compute *= factor;
        points.push(point(one, &mut draw));
    }
    for (model, threads) in [("vit-s/16", 1), ("vit-s/16", 4), ("vit-b/16", 1), ("vit-b/16", 4)] {
        let s = Settings { model: model.into(), threads_per_rank: threads, ..settings(2, 64) };
        points.push(point(plan(Kind::Grid, "loader threads", s, 2, None), &mut draw));
    }
    for (hosts, ranks) in [(1, 1), (1, 2), (1, 4), (1, 8), (2, 2), (4, 4), (8, 8), (16, 16), (32, 32)] {
        let s =
            Settings { hosts, global_batch: 64, comm: "tcp".into(), ..settings(ranks, 64 / ranks.min(64)) };
        let mut one = plan(Kind::Nodes, "CIFAR-100, batch 64", s, 5, None);
        one.communication *= if hosts > 1 { 3.0 } else { 1.0 };
        one.compute = 0.012 + 0.04 / ranks as f64;
        points.push(point(one, &mut draw));
    }
    relate(&mut points);
    points
}

/// A study of two data sets, batch sizes, optimizers and hosts, with a point that failed and one with too few cores.
pub fn study() -> Results {
    let mut results = Results {
        serial: vec![],
        format: FORMAT,
        version: "0.1.0".into(),
        name: "vit-b16".into(),
        title: "How far does ViT-B/16 scale on eight A100s?".into(),
        platform: Platform {
            name: "A100 SXM".into(),
            host: "node17".into(),
            cpu: "AMD EPYC 7763".into(),
            cores: 8,
            gpus: vec!["NVIDIA A100-SXM4-80GB".into(); 2],
            memory_bytes: 540_000_000_000,
        },
        started: 1_794_755_952,
        points: points(1.0),
        warnings: vec![
            "2 points have more threads than cores; they stay out of efficiency curves.".into(),
            "Weak scaling at 8 ranks trained on 39,936 images per epoch instead of 40,000.".into(),
        ],
        summary: "Eight ranks train 3.9 times faster than one: computing shrinks with the ranks, but the communication of gradients \
                  does not, and takes 38% of a step."
            .into(),
    };
    crate::summary::divide(&mut results);
    results
}

/// The same on a slower platform.
pub fn other_platform() -> Results {
    let mut results = study();
    results.platform.name = "V100 PCIe".into();
    results.platform.host = "node03".into();
    results.platform.gpus = vec!["Tesla V100-PCIE-32GB".into(); 2];
    results.points = points(0.42);
    crate::summary::divide(&mut results);
    results.summary = "Eight ranks train 4.6 times faster than one.".into();
    results.warnings.clear();
    results
}

/// Of a small study on two cores: few runs, few points.
pub fn quick() -> Results {
    let mut draw = Draw(3);
    let mut points: Vec<Point> = vec![];
    for kind in [Kind::Strong, Kind::Weak] {
        for ranks in [1, 2] {
            let images = if kind == Kind::Weak { 2000 * ranks as u64 } else { 4000 };
            let settings = Settings {
                model: "vit-nano/4".into(),
                image_size: 32,
                data: "synthetic".into(),
                precision: "fp32".into(),
                device: "cpu".into(),
                comm: "threads".into(),
                images_per_epoch: images,
                epochs: 1,
                global_batch: if kind == Kind::Weak { 32 * ranks } else { 64 },
                ..settings(ranks, if kind == Kind::Weak { 32 } else { 64 / ranks })
            };
            let compute = 0.0014 * settings.batch_per_rank as f64;
            let communication = if ranks > 1 { 0.002 } else { 0.0 };
            let plan = Plan {
                kind,
                series: String::new(),
                settings,
                repeats: 3,
                compute,
                communication,
                data: 0.0002,
                gpu: None,
                flags: vec![],
            };
            points.push(point(plan, &mut draw));
        }
    }
    relate(&mut points);
    let mut results = Results {
        name: "quick".into(),
        title: "Strong and weak scaling of a small ViT".into(),
        platform: Platform {
            name: "laptop".into(),
            host: "laptop".into(),
            cpu: "Intel Xeon".into(),
            cores: 2,
            gpus: vec![],
            memory_bytes: 8_000_000_000,
        },
        warnings: vec![],
        summary: "Two ranks train 1.9 times faster than one.".into(),
        points,
        ..study()
    };
    crate::summary::divide(&mut results);
    results
}

/// Text that tries to be markup, a script, a formula, and more than one line.
pub const HOSTILE: &str = "</script><script>alert(1)</script>\"'><img src=x onerror=alert(2)>&amp;]]>\u{0}\u{2028}\n=cmd|'/C calc'!A0";

/// Names and errors that mean harm, numbers that are none.
pub fn hostile() -> Results {
    let mut results = study();
    let formula = "=HYPERLINK(\"http://evil.example/\",\"x\")";
    results.name = HOSTILE.into();
    results.title = HOSTILE.into();
    results.summary = HOSTILE.into();
    results.platform.name = HOSTILE.into();
    results.platform.cpu = HOSTILE.into();
    results.platform.gpus = vec![HOSTILE.into()];
    results.warnings = vec![HOSTILE.into(), "@SUM(A1:A9)".into()];
    for (i, point) in results.points.iter_mut().enumerate() {
        point.id = format!("{i}-{HOSTILE}");
        point.series = if point.series.len() % 2 == 0 { HOSTILE.into() } else { formula.into() };
        point.settings.model = HOSTILE.into();
        point.settings.optimizer = format!("{formula}{}", point.settings.optimizer);
        if let Some(limiter) = &mut point.limiter {
            limiter.sentence = HOSTILE.into();
        }
        if i % 5 == 0 {
            point.flags.push(Flag::UnequalWork(HOSTILE.into()));
            point.runs.push(Run {
                repeat: 9,
                started: 0,
                seconds: 0.0,
                outcome: Outcome::Failed { error: HOSTILE.into() },
            });
        }
        if let Some(summary) = point.summary.as_mut().filter(|_| i % 7 == 3) {
            summary.epoch_seconds.median = f64::NAN;
            summary.images_per_second.samples = vec![f64::INFINITY, -1.0];
            summary.parts = Parts::default();
            summary.speedup =
                Some(Estimate { median: f64::NAN, interval: Some((f64::NAN, f64::NAN)), samples: vec![] });
        }
    }
    results
}
