use super::*;
use crate::results::{Outcome, Summary};
use crate::stats::estimate;
use crate::testing::point;

/// A point whose ranks spent their steps so.
fn with(parts: &[Parts], change: impl Fn(&mut Point, &mut Measured)) -> Point {
    let mut point = point(parts.len(), &[100.0]);
    let Outcome::Done(mut measured) = point.runs[0].outcome.clone() else { panic!("done") };
    measured.ranks = parts.to_vec();
    measured.step_seconds = vec![Parts::mean(parts).wall(); 10];
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
    communication: 0.001,
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

/// A loader thread per rank makes a batch in 160 ms, of which 60 are hidden: two would.
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
    let slow = with(&[Parts { communication: 0.090, hidden: 0.010, ..STEP }; 2], |point, measured| {
        (measured.communication_bytes, measured.communication_bytes_per_second) = (10_000_000, 1e8);
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
            collectives: vec![],
        });
    });
    // Of 193 ms, 90 are communication and 1 the optimizer; by eight times the images 79.6 of these are saved: 113.4 ms.
    let words =
        ["exposed communication 47%", "10.0 MB per step at 100.0 MB/s (0.80 Gbit/s)", "10% of it hidden"];
    says(&slow, Cause::Communication, &words);
    says(&slow, Cause::Communication, &["accumulation 8 would make it 1.70 times as fast"]);
    let compared = limiter(&slow, Some(&with(&[STEP], |_, _| {})), false, 4).unwrap().sentence;
    assert!(compared.contains("accumulation 8 would bring the efficiency from 0.53 to 0.90"), "{compared}");
}

#[test]
fn a_slow_link_is_no_tiny_batch() {
    let slow = with(&[Parts { communication: 0.090, ..STEP }; 2], |point, measured| {
        (measured.communication_bytes, measured.communication_bytes_per_second) = (10_000_000, 1e8);
        point.settings.batch_per_rank = 4;
    });
    says(&slow, Cause::Communication, &[]);
}

#[test]
fn a_straggler() {
    let usual = Parts { wait: 0.090, ..STEP };
    let slow = Parts { compute: 0.190, ..STEP };
    let parts = [usual, usual, usual, slow];
    says(&with(&parts, |_, _| {}), Cause::Straggler, &["rank 3 is 1.9× slower", "wait 47% of their time"]);
    // Equal ranks that jitter wait for each other, but none of them is slow.
    let jitter = with(&[Parts { wait: 0.015, ..STEP }; 2], |_, _| {});
    says(&jitter, Cause::Waiting, &["wait 13% of the time for whoever is slowest in a step"]);
    let idle = with(&[Parts { idle: 0.020, ..STEP }], |_, _| {});
    says(&idle, Cause::Compute, &["computing takes 81% of the step, idling 16%"]);
}

/// A study of two points by their accounts, whose rates are those of the accounts.
fn compared(base: &Point, point: &Point) -> Limiter {
    let mut points = [base.clone(), point.clone()];
    for point in &mut points {
        let account = Account::of(point).unwrap();
        let images = point.settings.global_batch as f64 * (1.0 - account.padding);
        let rate = images / account.step;
        let Outcome::Done(measured) = &mut point.runs[0].outcome else { panic!("done") };
        measured.images_per_second = rate;
    }
    let [base, mut point] = points;
    let rate = |point: &Point| point.runs[0].measured().unwrap().images_per_second;
    let ranks = |point: &Point| point.settings.ranks as f64;
    let efficiency = rate(&point) / rate(&base) / (ranks(&point) / ranks(&base));
    point.summary = Some(summary(efficiency));
    limiter(&point, Some(&base), false, 16).unwrap()
}

fn summary(efficiency: f64) -> Summary {
    Summary {
        epoch_seconds: estimate(&[1.0]),
        step_seconds: estimate(&[1.0]),
        images_per_second: estimate(&[1.0]),
        speedup: Some(estimate(&[2.0 * efficiency])),
        efficiency: Some(estimate(&[efficiency])),
        serial_fraction: None,
        parts: STEP,
        score: None,
        usage: crate::results::Usage::default(),
        collectives: vec![],
    }
}

fn weak(point: &mut Point) {
    point.kind = crate::results::Kind::Weak;
    (point.settings.batch_per_rank, point.settings.global_batch) = (64, 64 * point.settings.ranks);
}

fn whole(point: &mut Point, measured: &mut Measured) {
    measured.images = (10 * point.settings.global_batch) as u64;
}

/// ViT-Ti/4 over 8 ranks of a thread each, by weak scaling on a machine of 16 cores that others use too. Images took 1.31 times as long,
/// and the ranks waited for each other for 19% of the time.
#[test]
fn what_is_named_adds_up_to_what_is_missing() {
    let one = Parts { compute: 0.970, optimizer: 0.020, idle: 0.010, ..Parts::default() };
    let base = with(&[one], |point, measured| {
        weak(point);
        whole(point, measured);
    });
    // 1.271 + 0.352 + 0.135 + 0.059 + 0.035 = 1.852 s: an efficiency of 0.54.
    let eight =
        Parts { compute: 1.271, wait: 0.352, communication: 0.135, optimizer: 0.059, idle: 0.035, ..one };
    let point = with(&[eight; 8], |point, measured| {
        weak(point);
        whole(point, measured);
    });
    let limiter = compared(&base, &point);
    println!("{}", limiter.sentence);
    assert_eq!(limiter.cause, Cause::Waiting);
    for words in [
        "46% of the time is lost against 1 rank: 19% waiting for whoever is slowest in a step, a different rank each time",
        "16% slower computing (an image takes a rank 1.31 times as long: ranks share memory bandwidth, caches or cores)",
        "7% communication that nothing hides",
    ] {
        assert!(limiter.sentence.contains(words), "{words}: {}", limiter.sentence);
    }
    let sum: f64 = limiter.lost.iter().map(|lost| lost.share).sum();
    assert!((sum - (1.0 - 1.0 / 1.852)).abs() < 1e-12, "{sum}");
    // What no part of the account shows has a name, too.
    let mut strange = point.clone();
    strange.summary = Some(summary(0.40));
    let said = super::limiter(&strange, Some(&base), false, 16).unwrap().sentence;
    assert!(
        said.starts_with("60% of the time is lost")
            && said.contains("14% that the account of time does not explain"),
        "{said}"
    );
}

#[test]
fn gains_are_named_beside_losses() {
    let base = with(&[STEP], whole);
    let faster = Parts { compute: 0.030, communication: 0.040, ..STEP };
    let limiter = compared(&base, &with(&[faster; 2], whole));
    // 73 ms × 2 against 104: 29% lost, of which communication is 54 and computing -27.
    assert!(
        limiter
            .sentence
            .starts_with("29% of the time is lost against 1 rank: 54% communication that nothing hides"),
        "{}",
        limiter.sentence
    );
    assert!(limiter.sentence.contains("less 27% gained by faster computing"), "{}", limiter.sentence);
    // Nothing lost is no sentence about losses, but the parts are kept.
    let better = compared(&base, &with(&[Parts { compute: 0.040, ..STEP }; 2], whole));
    assert!(!better.sentence.contains("lost"), "{}", better.sentence);
    assert!(better.lost.iter().map(|lost| lost.share).sum::<f64>() < 0.0);
}

#[test]
fn a_straggler_and_jitter_are_told_apart() {
    let base = with(&[Parts { wait: 0.0, ..STEP }], whole);
    let usual = Parts { compute: 0.050, wait: 0.060, ..STEP };
    let slow = Parts { compute: 0.090, wait: 0.020, ..STEP };
    let limiter = compared(&base, &with(&[usual, usual, usual, slow], whole));
    let share = |cause| limiter.lost.iter().find(|lost| lost.cause == cause).unwrap().share;
    // Three of four wait 40 ms for the one, and all 20 ms for someone.
    let step = Account::of(&with(&[usual, usual, usual, slow], whole)).unwrap().seconds;
    assert!(
        (share(Cause::Straggler) * step - 0.030).abs() < 1e-9
            && (share(Cause::Waiting) * step - 0.020).abs() < 1e-9
    );
    assert!(limiter.sentence.contains("waiting for rank 3, which is 1.8× slower"), "{}", limiter.sentence);
}

/// Efficiency is a quotient of medians, so what is lost is that of the runs in the middle, whatever others did.
#[test]
fn runs_far_from_the_others_change_nothing_in_what_is_lost() {
    let usual = |step: Parts, ranks: usize| {
        let mut point = with(&vec![step; ranks], whole);
        let mut run = point.runs[0].clone();
        let Outcome::Done(measured) = &mut run.outcome else { panic!("done") };
        measured.images_per_second = 64.0 / step.wall();
        let mut far = run.clone();
        let Outcome::Done(measured) = &mut far.outcome else { panic!("done") };
        measured.images_per_second /= 9.0;
        measured.step_seconds.iter_mut().for_each(|seconds| *seconds *= 9.0);
        measured.ranks.iter_mut().for_each(|parts| parts.idle += 8.0 * step.wall());
        point.runs = vec![run.clone(), far, run];
        point
    };
    let (base, mut point) =
        (usual(STEP, 1), usual(Parts { communication: 0.049, compute: 0.050, ..STEP }, 2));
    point.summary = Some(summary(0.104 / 2.0 / 0.102));
    let limiter = limiter(&point, Some(&base), false, 4).unwrap();
    let open = limiter.lost.iter().find(|lost| lost.cause == Cause::Unexplained).unwrap().share;
    assert!(open.abs() < 1e-9, "{open}: {}", limiter.sentence);
    let expected = "49% of the time is lost against 1 rank: 48% communication that nothing hides";
    assert!(limiter.sentence.starts_with(expected), "{}", limiter.sentence);
}

/// A step is as long as the longest account of it: by what the others are shorter they wait, whoever it is.
#[test]
fn ranks_that_end_their_steps_apart_wait_too() {
    let base = with(&[STEP], whole);
    let apart = with(&[Parts { compute: 0.050, ..STEP }; 2], |point, measured| {
        measured.step_seconds = vec![0.060; 10];
        whole(point, measured);
    });
    let limiter = compared(&base, &apart);
    let share = |cause| limiter.lost.iter().find(|lost| lost.cause == cause).unwrap().share;
    assert!((share(Cause::Waiting) - (2.0 * 0.007 - 0.001) / 0.120).abs() < 1e-9, "{}", limiter.sentence);
    assert!(share(Cause::Unexplained).abs() < 1e-9, "{}", limiter.sentence);
}

/// Of two runs, the median is between them; that is no time that went unexplained.
#[test]
fn two_runs_explain_as_much_as_one() {
    let two = |step: Parts, ranks: usize| {
        let mut point = with(&vec![step; ranks], whole);
        for factor in [1.0, 2.0] {
            let mut run = point.runs[0].clone();
            let Outcome::Done(measured) = &mut run.outcome else { panic!("done") };
            measured.images_per_second = 64.0 / step.wall() / factor;
            measured.step_seconds = vec![factor * step.wall(); 10];
            measured.ranks = vec![step * factor; ranks];
            point.runs.push(run);
        }
        point.runs.remove(0);
        point
    };
    let (base, mut point) = (two(STEP, 1), two(Parts { compute: 0.052, ..STEP }, 2));
    point.summary = Some(summary(STEP.wall() / 0.056 / 2.0));
    let limiter = limiter(&point, Some(&base), false, 4).unwrap();
    let open = limiter.lost.iter().find(|lost| lost.cause == Cause::Unexplained).unwrap().share;
    assert!(open.abs() < 1e-9, "{open}: {}", limiter.sentence);
}

/// Whatever the accounts: the parts sum to what is missing, those that are named leave at most a tenth of it, and the percents of the
/// sentence sum to the percents that are lost.
#[test]
fn losses_sum_to_what_is_missing_whatever_the_account() {
    let mut random = crate::testing::Random(18);
    let mut lost_something = 0;
    for _ in 0..5000 {
        let mut draw = |ranks: usize| {
            let mut part =
                |most: f64| if random.uniform() < 0.3 { 0.0 } else { most * random.uniform().powi(3) };
            let (communication, wait, data, idle) = (part(0.3), part(0.5), part(0.2), part(0.1));
            let parts: Vec<Parts> = (0..ranks)
                .map(|_| Parts {
                    compute: 0.02 + part(0.3),
                    optimizer: part(0.1),
                    communication,
                    wait,
                    data,
                    idle,
                    hidden: 0.0,
                })
                .collect();
            let full = 0.3 + 0.7 * random.uniform();
            let apart = if ranks > 1 { 1.0 + 0.1 * random.uniform() } else { 1.0 };
            with(&parts, |point, measured| {
                measured.step_seconds.iter_mut().for_each(|seconds| *seconds *= apart);
                point.settings.global_batch = 64 * (1 + ranks / 3);
                measured.images = (10.0 * full * point.settings.global_batch as f64) as u64;
            })
        };
        let (base, point) = (draw(1), draw(2));
        let point = if lost_something % 2 == 0 { draw(8) } else { point };
        let limiter = compared(&base, &point);
        let (here, there) = (Account::of(&point).unwrap(), Account::of(&base).unwrap());
        let per_image = |a: &Account| {
            let images = a.point.settings.global_batch as f64 * (1.0 - a.padding);
            a.point.settings.ranks as f64 * a.step / images
        };
        let missing = 1.0 - per_image(&there) / per_image(&here);
        let sum: f64 = limiter.lost.iter().map(|lost| lost.share).sum();
        assert!((sum - missing).abs() < 1e-9, "{sum} of {missing}");
        let open = limiter.lost.iter().find(|lost| lost.cause == Cause::Unexplained).unwrap().share;
        assert!(open.abs() < 1e-9, "the account explains all: {open}");
        let Some(largest) = losses::largest(&limiter.lost) else {
            assert!(missing < 0.02, "{missing}");
            continue;
        };
        lost_something += 1;
        assert_eq!(largest.all, (100.0 * missing).round() as i64);
        let named: i64 = largest.named.iter().map(|(_, percent)| percent).sum();
        assert_eq!(named + largest.smaller, largest.all);
        let causes: Vec<Cause> = largest.named.iter().map(|(cause, _)| *cause).collect();
        let losses: f64 = limiter.lost.iter().map(|lost| lost.share.max(0.0)).sum();
        let unnamed = limiter.lost.iter().filter(|lost| !causes.contains(&lost.cause));
        let unnamed: f64 = unnamed.map(|lost| lost.share.abs()).sum();
        assert!(unnamed <= (0.1 * losses).max(0.01) + 1e-9, "{unnamed} of {missing}");
        // The sentence says what was largest.
        let words: i64 = limiter
            .sentence
            .split("; ")
            .next()
            .unwrap()
            .split(": ")
            .skip(1)
            .collect::<Vec<_>>()
            .join(": ")
            .split(", ")
            .filter_map(|part| {
                let (less, part) = part.strip_prefix("less ").map_or((1, part), |part| (-1, part));
                Some(less * part.split_once('%')?.0.parse::<i64>().ok()?)
            })
            .sum();
        assert_eq!(words, largest.all, "{}", limiter.sentence);
    }
    assert!(lost_something > 1000, "{lost_something}");
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
    says(&tiny, Cause::TinyBatch, &["with 1 image per rank", "43% of the step", "8 images per rank"]);
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
        &["80 images per epoch fill 2 batches of 64", "38% of what is computed"],
    );
    let short = with(
        &[Parts { compute: 0.002, communication: 0.0005, wait: 0.0004, ..Parts::default() }; 4],
        |_, m| {
            (m.communication_bytes, m.communication_bytes_per_second) = (500_000, 1e9);
        },
    );
    says(&short, Cause::TooLittleWork, &["computes 2.0 ms per step", "fewer than 4 ranks"]);
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
