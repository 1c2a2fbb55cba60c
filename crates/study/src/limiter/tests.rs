use super::*;
use crate::results::{Outcome, Summary};
use crate::stats::estimate;
use crate::testing::point;

/// A point whose ranks spent their steps so.
fn with(parts: &[Parts], change: impl Fn(&mut Point, &mut Measured)) -> Point {
    let mut point = point(parts.len(), &[100.0]);
    let Outcome::Done(mut measured) = point.runs[0].outcome.clone() else { panic!("done") };
    measured.ranks = parts.to_vec();
    change(&mut point, &mut measured);
    point.runs[0].outcome = Outcome::Done(measured);
    point
}

fn named(point: &Point) -> (Cause, String) {
    let limiter = limiter(point, None, false, 4).unwrap();
    println!("{}", limiter.sentence);
    (limiter.cause, limiter.sentence)
}

fn says(point: &Point, cause: Cause, words: &[&str]) {
    let (found, sentence) = named(point);
    assert_eq!(found, cause, "{sentence}");
    for word in words {
        assert!(sentence.contains(word), "{word} is not in: {sentence}");
    }
}

const STEP: Parts = Parts {
    compute: 0.100,
    exchange: 0.001,
    wait: 0.001,
    data: 0.001,
    optimizer: 0.001,
    idle: 0.0,
    hidden: 0.01,
};

#[test]
fn nothing_but_computing() {
    let one = with(&[STEP], |_, _| {});
    says(&one, Cause::Compute, &["computing takes 96%"]);
    let shared = with(&[Parts { compute: 0.06, ..STEP }; 2], |_, _| {});
    let limiter = limiter(&shared, Some(&one), false, 4).unwrap();
    assert!(limiter.sentence.contains("1.20 times as long as over 1 rank"), "{}", limiter.sentence);
}

/// A loader thread a rank makes a batch in 160 ms, of which 60 are hidden: two would.
#[test]
fn a_slow_loader() {
    let slow = with(&[Parts { data: 0.060, compute: 0.097, ..STEP }; 2], |_, _| {});
    says(
        &slow,
        Cause::Data,
        &["wait 38% of the time for images", "4 loader threads would feed 2 ranks (now 2)"],
    );
}

#[test]
fn a_loader_that_is_slow_on_one_rank() {
    let parts = [Parts { wait: 0.060, ..STEP }, Parts { data: 0.061, ..STEP }];
    says(&with(&parts, |_, _| {}), Cause::Data, &["rank 1 waits 37% of its time for images", "others 37%"]);
}

/// 10 MB at 100 MB/s.
#[test]
fn a_slow_link() {
    let slow = with(&[Parts { exchange: 0.090, hidden: 0.010, ..STEP }; 2], |point, measured| {
        (measured.exchange_bytes, measured.exchange_bytes_per_second) = (10_000_000, 1e8);
        point.summary = Some(Summary {
            epoch_seconds: estimate(&[1.0]),
            step_seconds: estimate(&[1.0]),
            images_per_second: estimate(&[1.0]),
            speedup: Some(estimate(&[1.06])),
            efficiency: Some(estimate(&[0.53])),
            serial_fraction: None,
            parts: STEP,
            score: None,
            usage: crate::results::Usage::default(),
        });
    });
    // Of 193 ms, 90 are exchange and 1 the optimizer; by eight times the images 79.6 of these are saved: 113.4 ms.
    let words =
        ["exposed exchange 47%", "10.0 MB a step at 100.0 MB a second (0.80 Gbit/s)", "10% of it hidden"];
    says(&slow, Cause::Exchange, &words);
    says(&slow, Cause::Exchange, &["accumulation 8 would make it 1.70 times as fast"]);
    let compared = limiter(&slow, Some(&with(&[STEP], |_, _| {})), false, 4).unwrap().sentence;
    assert!(compared.contains("accumulation 8 would bring the efficiency from 0.53 to 0.90"), "{compared}");
}

#[test]
fn a_slow_link_is_no_tiny_batch() {
    let slow = with(&[Parts { exchange: 0.090, ..STEP }; 2], |point, measured| {
        (measured.exchange_bytes, measured.exchange_bytes_per_second) = (10_000_000, 1e8);
        point.settings.batch_per_rank = 4;
    });
    says(&slow, Cause::Exchange, &[]);
}

#[test]
fn a_straggler() {
    let usual = Parts { wait: 0.090, ..STEP };
    let slow = Parts { compute: 0.190, ..STEP };
    let parts = [usual, usual, usual, slow];
    says(&with(&parts, |_, _| {}), Cause::Straggler, &["rank 3 is 1.9× slower", "wait 47% of their time"]);
    // Equal ranks that jitter wait for each other, but none of them is slow.
    let jitter = with(&[Parts { wait: 0.015, ..STEP }; 2], |_, _| {});
    says(&jitter, Cause::Compute, &[]);
}

#[test]
fn a_tiny_batch() {
    let tiny = with(
        &[Parts { compute: 0.0012, optimizer: 0.0006, idle: 0.0003, ..Parts::default() }],
        |point, m| {
            point.settings.batch_per_rank = 1;
            point.settings.global_batch = 1;
            m.images = 10;
        },
    );
    says(&tiny, Cause::TinyBatch, &["with 1 image a rank", "43% of the step", "8 images a rank"]);
}

#[test]
fn too_little_work() {
    let padded = with(&[STEP], |point, measured| {
        point.settings.images_per_epoch = 80;
        measured.images = 10 * 40;
    });
    says(
        &padded,
        Cause::TooLittleWork,
        &["80 images an epoch fill 2 batches of 64", "38% of what is computed"],
    );
    let short =
        with(&[Parts { compute: 0.002, exchange: 0.0005, wait: 0.0004, ..Parts::default() }; 4], |_, m| {
            (m.exchange_bytes, m.exchange_bytes_per_second) = (500_000, 1e9);
        });
    says(&short, Cause::TooLittleWork, &["computes 2.0 ms a step", "fewer than 4 ranks"]);
}

#[test]
fn the_optimizer() {
    let heavy = with(&[Parts { optimizer: 0.040, ..STEP }], |_, _| {});
    says(&heavy, Cause::Optimizer, &["takes 28% of the step", "1.27 times as fast"]);
}

#[test]
fn too_few_cores() {
    let crowded = with(&[Parts { wait: 0.040, ..STEP }; 4], |_, _| {});
    let limiter = limiter(&crowded, None, true, 2).unwrap();
    assert_eq!(limiter.cause, Cause::Oversubscribed);
    assert!(limiter.sentence.contains("4 ranks × 1 thread on 2 cores"), "{}", limiter.sentence);
    assert!(limiter.sentence.contains("the work of 2.0"), "{}", limiter.sentence);
}

/// One rank of one thread on four cores, which it has a quarter of the time.
#[test]
fn cores_that_others_use() {
    let busy = |busy| with(&[STEP], move |_, measured| measured.cpu_utilisation = Some(busy));
    says(&busy(0.0625), Cause::Oversubscribed, &["something to compute 97% of the time, and a core 25%"]);
    says(&busy(0.24), Cause::Compute, &[]);
}

#[test]
fn a_point_without_runs_has_none() {
    assert!(limiter(&point(1, &[]), None, false, 2).is_none());
}
