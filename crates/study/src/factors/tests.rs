use super::*;
use crate::results::{Outcome, Results};
use crate::testing::{Random, point};
use records::Parts;

/// A rank's mean step of random parts.
fn parts(random: &mut Random) -> Parts {
    let mut seconds = |most: f64| most * random.uniform();
    Parts {
        compute: 0.01 + seconds(0.1),
        communication: seconds(0.05),
        wait: seconds(0.05),
        data: seconds(0.02),
        optimizer: seconds(0.01),
        idle: seconds(0.01),
        hidden: seconds(0.05),
    }
}

/// A point of random accounts; a step takes as long as its longest account, and a little more.
fn random_point(ranks: usize, runs: usize, random: &mut Random) -> Point {
    let mut point = point(ranks, &vec![1.0; runs]);
    for run in &mut point.runs {
        let Outcome::Done(measured) = &mut run.outcome else { panic!("done") };
        measured.ranks = (0..ranks).map(|_| parts(random)).collect();
        if ranks == 1 {
            (measured.ranks[0].communication, measured.ranks[0].wait) = (0.0, 0.0);
        }
        let longest = measured.ranks.iter().map(Parts::wall).fold(0.0, f64::max);
        measured.step_seconds = (0..10).map(|_| longest * (1.0 + 0.01 * random.uniform())).collect();
        let all: f64 = measured.step_seconds.iter().sum();
        measured.images_per_second = measured.images as f64 / all;
    }
    point
}

fn rate(point: &Point) -> f64 {
    median(&measured(point).iter().map(|run| run.images_per_second).collect::<Vec<_>>())
}

#[test]
fn factors_multiply_to_the_efficiency_whatever_the_account() {
    let mut random = Random(14);
    for case in 0..500 {
        let (few, many) = ([1, 1, 2, 3][case % 4], [2, 4, 7, 16][case / 4 % 4]);
        let base = random_point(few, 1 + case % 6, &mut random);
        let here = random_point(many, 1 + case / 6 % 7, &mut random);
        let efficiency = rate(&here) / rate(&base) / (many as f64 / few as f64);
        let factors = factors(&here, Some(&base)).unwrap();
        assert!((factors.product() / efficiency - 1.0).abs() < 1e-9, "{case}: {factors:?}, {efficiency}");
        let left = waterfall(&factors).unwrap().last().unwrap().2;
        assert!((left / efficiency - 1.0).abs() < 1e-9, "{case}");
        if few == 1 {
            let shares = [&factors.load_balance, &factors.synchronisation, &factors.transfer];
            assert!(shares.iter().all(|share| share.median <= 1.0 + 1e-12), "{case}: {factors:?}");
        }
        // So do those of every run.
        let shared: Vec<&Estimate> = FACTORS.iter().filter_map(|f| (f.of)(&factors)).collect();
        for (i, run) in measured(&here).iter().enumerate() {
            let product: f64 = shared.iter().map(|estimate| estimate.samples[i]).product();
            let own = run.images_per_second / rate(&base) / (many as f64 / few as f64);
            assert!((product / own - 1.0).abs() < 1e-9, "{case}, run {i}");
        }
        for estimate in shared {
            let Some((low, high)) = estimate.interval else { continue };
            assert!(low <= estimate.median && estimate.median <= high, "{case}: {estimate:?}");
        }
    }
}

/// Points of the studies under `bench/`, as they were recorded.
#[test]
fn factors_multiply_to_the_efficiency_of_recorded_studies() {
    let folder = ::testing::repository().join("bench/2026-11-15-studies");
    let mut compared = 0;
    for name in
        ["a-photographs", "a1-a2-unequal-hosts", "a4-one-host", "a5-learning", "a6-hosts", "b-swin-segment"]
    {
        let mut results: Results = crate::store::read_results(&folder.join(name)).unwrap();
        crate::summary::divide(&mut results);
        for point in &results.points {
            let efficiency = point.summary.as_ref().and_then(|summary| summary.efficiency.as_ref());
            let Some(efficiency) = efficiency else { continue };
            let factors = point.factors.as_ref().unwrap();
            let product = factors.product();
            let apart = (product / efficiency.median - 1.0).abs();
            assert!(apart < 0.01, "{name}, {}: {product} is not {}", point.id, efficiency.median);
            let shares = [&factors.load_balance, &factors.synchronisation, &factors.transfer];
            assert!(shares.iter().all(|share| share.median <= 1.001), "{name}, {}: {factors:?}", point.id);
            compared += 1;
        }
    }
    assert!(compared >= 20, "{compared}");
    // A host of half the speed: the mean rank takes longer for an image, and the others wait for that host.
    let results = crate::store::read_results(&folder.join("a1-a2-unequal-hosts")).unwrap();
    let slow = results.points.iter().find(|point| point.settings.ranks == 2).unwrap();
    let base = results.points.iter().find(|point| point.settings.ranks == 1 && point.kind == slow.kind);
    let factors = factors(slow, base).unwrap();
    let [balance, synchronisation] = [&factors.load_balance, &factors.synchronisation].map(|f| f.median);
    assert!(balance < 0.8 && synchronisation > 0.98, "{factors:?}");
}

/// Two ranks, eight steps' worth of account each, by hand.
#[test]
fn each_factor_by_hand() {
    let with = |parts: &[Parts], step: f64| {
        let mut point = point(parts.len(), &[64.0 / step]);
        let Outcome::Done(measured) = &mut point.runs[0].outcome else { panic!("done") };
        (measured.ranks, measured.step_seconds) = (parts.to_vec(), vec![step; 10]);
        point
    };
    let base = with(&[Parts { compute: 0.098, optimizer: 0.002, ..Parts::default() }], 0.100);
    // Useful 60 and 40 ms, of a step of 80: 10 of communication, 10 and 30 of waiting.
    let slow =
        Parts { compute: 0.050, data: 0.006, idle: 0.002, optimizer: 0.002, wait: 0.010, ..Parts::default() };
    let slow = Parts { communication: 0.010, ..slow };
    let fast = Parts { compute: 0.030, wait: 0.030, ..slow };
    let here = with(&[slow, fast], 0.080);
    let factors = factors(&here, Some(&base)).unwrap();
    let is =
        |name: &str, value: f64, expected: f64| assert!((value - expected).abs() < 1e-12, "{name}: {value}");
    is("computation scaling", factors.computation_scaling.as_ref().unwrap().median, 100.0 / (60.0 + 40.0));
    is("load balance", factors.load_balance.median, 50.0 / 60.0);
    is("synchronisation", factors.synchronisation.median, 60.0 / 70.0);
    is("transfer", factors.transfer.median, 70.0 / 80.0);
    is("all", factors.product(), 100.0 / 160.0);
    // Without a base, the parallel efficiency.
    let alone = super::factors(&here, None).unwrap();
    is("alone", alone.product(), 50.0 / 80.0);
    assert!(alone.computation_scaling.is_none() && waterfall(&alone).is_none());
}

#[test]
fn a_straggler_that_stays_and_jitter_that_passes() {
    let slow = Parts { compute: 0.10, ..Parts::default() };
    let other = Parts { compute: 0.08, wait: 0.02, ..Parts::default() };
    let with = |parts: &[Parts], steps: &[&[u64]]| {
        let mut point = point(parts.len(), &vec![640.0; steps.len()]);
        for (run, steps) in point.runs.iter_mut().zip(steps) {
            let Outcome::Done(measured) = &mut run.outcome else { panic!("done") };
            (measured.ranks, measured.slowest_steps) = (parts.to_vec(), steps.to_vec());
        }
        let factors = factors(&point, None).unwrap();
        (waits_for(&factors).unwrap_or_default(), factors.slowest)
    };
    let (said, slowest) = with(&[other, other, slow], &[&[0, 1, 19], &[1, 0, 19]]);
    assert_eq!(slowest, Some(Slowest { rank: Some(2), steps: 0.95, lasting: true }));
    assert!(said.starts_with("a lasting straggler: rank 2 is the slowest in 95% of the steps"), "{said}");
    assert!(said.ends_with("(load balance 87%, synchronisation 100%)"), "{said}");
    let even = Parts { compute: 0.09, wait: 0.01, ..Parts::default() };
    let (said, slowest) = with(&[even; 3], &[&[8, 6, 6], &[7, 7, 6], &[9, 5, 6]]);
    assert!(!slowest.unwrap().lasting);
    assert!(said.starts_with("passing jitter: the slowest rank changes"), "{said}");
    assert!(said.ends_with("(load balance 100%, synchronisation 90%)"), "{said}");
    // Two of four have more to do.
    let (said, _) = with(&[slow, slow, other, other], &[&[10, 10, 0, 0]]);
    assert!(said.starts_with("a lasting imbalance: some ranks have more to do than others"), "{said}");
    // One of two, in most steps: they are not several.
    let (said, slowest) = with(&[slow, other], &[&[12, 8]]);
    assert!(!slowest.unwrap().lasting);
    assert!(said.starts_with("a lasting imbalance: some ranks"), "{said}");
    // Another one stays slow in each run.
    let (said, slowest) = with(&[slow, other], &[&[20, 0], &[0, 20]]);
    assert_eq!(slowest, Some(Slowest { rank: None, steps: 1.0, lasting: true }));
    assert!(said.contains("in each run another"), "{said}");
    // Little is waited, or too few steps were counted: nothing is said.
    assert_eq!(with(&[Parts { compute: 0.1, ..Parts::default() }; 2], &[&[20, 0]]).0, "");
    assert_eq!(with(&[slow, other], &[&[3, 0]]), (String::new(), None));
}
