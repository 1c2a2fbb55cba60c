use super::*;
use crate::results::{Outcome, Run};
use crate::testing::point;

fn study(points: Vec<Point>, crowded: &str) -> Results {
    let mut results = crate::testing::results(points);
    complete(&mut results, &|id| id == crowded);
    results
}

const ONE: [f64; 5] = [100.0, 101.0, 99.0, 100.0, 102.0];
const TWO: [f64; 5] = [180.0, 182.0, 179.0, 181.0, 180.0];

#[test]
fn speedup_efficiency_and_serial_fraction() {
    let results = study(vec![point(2, &TWO), point(1, &ONE)], "");
    let summary = results.points[0].summary.as_ref().unwrap();
    let (speedup, efficiency) = (summary.speedup.as_ref().unwrap(), summary.efficiency.as_ref().unwrap());
    assert!((speedup.median - 1.8).abs() < 1e-12 && (efficiency.median - 0.9).abs() < 1e-12);
    let ((low, high), (less, more)) = (speedup.interval.unwrap(), efficiency.interval.unwrap());
    assert!(low < 1.8 && high > 1.8 && low > 1.7 && high < 1.9, "{low} {high}");
    assert!((low / 2.0 - less).abs() < 1e-12 && (high / 2.0 - more).abs() < 1e-12);
    assert!((speedup.samples[1] - 1.82).abs() < 1e-12 && speedup.samples.len() == 5);
    // (1/1.8 - 1/2) / (1 - 1/2)
    assert!((summary.serial_fraction.unwrap() - 0.111_111).abs() < 1e-5);
    let base = results.points[1].summary.as_ref().unwrap();
    assert_eq!((base.speedup.as_ref().unwrap().median, base.efficiency.as_ref().unwrap().median), (1.0, 1.0));
    assert_eq!(base.serial_fraction, None);
    assert!((base.epoch_seconds.median - 6.4).abs() < 1e-12);
    assert!(results.summary.contains("2 ranks do 1.80") && results.summary.contains("efficiency of 0.90"));
    assert_eq!(results.warnings, Vec::<String>::new());
}

/// A point of another series.
fn of(series: &str, ranks: usize, rates: &[f64]) -> Point {
    let id = format!("strong-{series}-{ranks}");
    Point { id, series: series.into(), ..point(ranks, rates) }
}

#[test]
fn a_headline_names_the_series_it_speaks_of() {
    let times = |factor: f64| ONE.map(|rate| factor * rate);
    let two = |series, factor| [of(series, 1, &ONE), of(series, 2, &times(factor))];
    let points = [two("a", 1.5), two("b", 1.9), two("c", 1.2), two("d", 1.7)].concat();
    let said = study(points.clone(), "").summary;
    let range = "strong: over 4 series, efficiencies from 0.60 (c: 2 ranks do 1.20 [";
    assert!(said.starts_with(range) && said.contains("to 0.95 (b: 2 ranks do 1.90 ["), "{said}");
    assert!(said.contains("; c: 40% of the time is lost"), "the limiter of a series that is named: {said}");
    // Whatever their order, the same is said.
    let turned: Vec<Point> = points.iter().rev().cloned().collect();
    assert_eq!(study(turned, "").summary, said);
    // One that could be compared, among others that could not.
    let some = study(vec![of("a", 1, &ONE), of("a", 2, &TWO), of("b", 1, &ONE)], "").summary;
    assert!(some.starts_with("strong: a: 2 ranks do 1.80"), "{some}");
    // Points that were measured did succeed, whether they may be compared or not.
    let none = study(vec![of("a", 4, &ONE), of("b", 4, &TWO)], "").summary;
    assert_eq!(
        none,
        "strong: 100.0 (a, 4 ranks) to 180.0 images/s (b, 4 ranks); no point may be compared with its base, as noted."
    );
    let batch = |series: &str, batch: usize, rates: &[f64]| {
        let mut point = of(series, 1, rates);
        (point.kind, point.settings.batch_per_rank, point.id) =
            (Kind::Batch, batch, format!("{series}-{batch}"));
        point
    };
    let points = vec![batch("a", 16, &ONE), batch("a", 64, &TWO), batch("b", 16, &TWO), batch("b", 64, &ONE)];
    assert_eq!(
        study(points, "").summary,
        "batch: batch 64 is fastest, 180.0 images/s (a); batch 16 is fastest, 180.0 images/s (b)."
    );
    assert_eq!(study(vec![of("a", 1, &[])], "").summary, "No run succeeded.");
}

#[test]
fn few_runs_have_no_interval() {
    let results = study(vec![point(1, &ONE[..3]), point(2, &TWO)], "");
    let speedup = results.points[1].summary.as_ref().unwrap().speedup.as_ref().unwrap();
    assert!(speedup.interval.is_none() && (speedup.median - 1.8).abs() < 1e-12);
    assert!(results.warnings[0].contains("1 point of fewer than 5 runs"), "{:?}", results.warnings);
}

#[test]
fn unequal_work_is_flagged_and_not_compared() {
    let mut other = point(2, &TWO);
    other.settings.images_per_epoch = 320;
    let results = study(vec![point(1, &ONE), other], "");
    let summary = results.points[1].summary.as_ref().unwrap();
    assert!(summary.speedup.is_none() && summary.efficiency.is_none());
    let expected = Flag::UnequalWork("images per epoch: 320, and 640 over 1 rank".into());
    assert_eq!(results.points[1].flags, [expected]);
    assert!(results.warnings[0].contains("not compared"), "{:?}", results.warnings);
    // Images that could not be read.
    let mut skipped = point(2, &TWO);
    for run in &mut skipped.runs {
        let Outcome::Done(measured) = &mut run.outcome else { panic!("done") };
        measured.images = 600;
    }
    let results = study(vec![point(1, &ONE), skipped], "");
    assert!(results.points[1].summary.as_ref().unwrap().speedup.is_none());
    let mut threads = point(2, &TWO);
    threads.settings.threads_per_rank = 2;
    let results = study(vec![point(1, &ONE), threads], "");
    assert!(results.points[1].summary.as_ref().unwrap().speedup.is_none());
}

#[test]
fn weak_scaling_compares_what_a_rank_has() {
    let weak = |ranks: usize, rates: &[f64], images: u64| {
        let mut point = point(ranks, rates);
        point.kind = Kind::Weak;
        (point.settings.batch_per_rank, point.settings.global_batch) = (64, 64 * ranks);
        point.settings.images_per_epoch = images;
        for run in &mut point.runs {
            let Outcome::Done(measured) = &mut run.outcome else { panic!("done") };
            measured.images = images;
        }
        point
    };
    let results = study(vec![weak(1, &ONE, 640), weak(2, &TWO, 1280)], "");
    assert!(
        (results.points[1].summary.as_ref().unwrap().efficiency.as_ref().unwrap().median - 0.9).abs() < 1e-12
    );
    let results = study(vec![weak(1, &ONE, 640), weak(2, &TWO, 1290)], "");
    assert!(results.points[1].summary.as_ref().unwrap().efficiency.is_none());
}

#[test]
fn crowded_points_stay_out_of_efficiency() {
    let results = study(vec![point(1, &ONE), point(4, &TWO)], "strong-4");
    let summary = results.points[1].summary.as_ref().unwrap();
    assert!(summary.speedup.is_some() && summary.efficiency.is_none() && summary.serial_fraction.is_none());
    assert!(results.points[1].flags.contains(&Flag::Oversubscribed));
    assert_eq!(results.points[1].limiter.as_ref().unwrap().cause, crate::results::Cause::Oversubscribed);
}

#[test]
fn outliers_and_failures_are_named() {
    let mut one = point(1, &[100.0, 101.0, 99.0, 100.0, 50.0]);
    one.runs.push(Run {
        repeat: 5,
        started: 0,
        seconds: 0.0,
        outcome: Outcome::Failed { error: "no".into() },
    });
    let none = Point { runs: vec![one.runs[5].clone()], ..point(2, &[]) };
    let results = study(vec![one, none], "");
    assert_eq!(results.points[0].flags, [Flag::Outliers(vec![4]), Flag::Failed(vec![5])]);
    assert!(results.points[1].summary.is_none() && results.points[1].limiter.is_none());
}

/// Stages of ZeRO are held against the lowest over the same ranks, in images/s and in memory.
#[test]
fn stages_are_compared_over_the_same_ranks() {
    let of = |stage: usize, ranks: usize, rate: f64, bytes: u64| {
        let rates = ONE.map(|one| one / 100.0 * rate);
        let mut point = point(ranks, &rates);
        (point.kind, point.series) = (Kind::Zero, format!("vit-nano/4 · {ranks} ranks"));
        point.id = format!("zero-{stage}-{ranks}");
        point.settings.other.insert("zero".into(), stage.to_string());
        for run in &mut point.runs {
            if let Outcome::Done(measured) = &mut run.outcome {
                let all = OfKind { kind: "all_gather".into(), bytes: 7.0, seconds: 0.5, exposed: 0.25 };
                (measured.planned_bytes, measured.collectives) = (Some(bytes), vec![all]);
            }
        }
        point
    };
    let points = vec![
        of(0, 2, 100.0, 1000),
        of(1, 2, 98.0, 700),
        of(3, 2, 80.0, 400),
        of(0, 4, 190.0, 1000),
        of(3, 4, 171.0, 250),
    ];
    let results = study(points, "");
    let speed = |at: usize| results.points[at].summary.as_ref().unwrap().speedup.as_ref().unwrap().median;
    for (at, expected) in [1.0, 0.98, 0.8, 1.0, 0.9].into_iter().enumerate() {
        assert!((speed(at) - expected).abs() < 1e-12, "{}: {}", results.points[at].id, speed(at));
    }
    assert!(results.points.iter().all(|point| point.flags.is_empty()), "the stage is what varies");
    let summary = results.points[2].summary.as_ref().unwrap();
    assert_eq!(summary.usage.planned_bytes.as_ref().unwrap().median, 400.0);
    assert!((summary.collectives[0].exposed - 0.25).abs() < 1e-12 && summary.collectives.len() == 1);
    let said = &results.summary;
    assert!(said.starts_with("zero: over 4 ranks, against stage 0: stage 3 0.90 ["), "{said}");
    assert!(said.ends_with("times the images/s with 25% of the memory."), "{said}");
    let limiter = results.points[2].limiter.as_ref().unwrap();
    assert!(limiter.sentence.contains("lost against stage 0"), "{}", limiter.sentence);
}
