use super::*;
use crate::testing::Random;

const STUDIES: usize = 2000;

/// Times of runs: with noise as machines have it. The median is known.
#[derive(Clone, Copy, Debug)]
enum Noise {
    Normal,
    /// Never much faster, sometimes much slower.
    LogNormal,
    Exponential,
    /// One run in ten meets another tenant.
    Disturbed,
}

const NOISES: [Noise; 4] = [Noise::Normal, Noise::LogNormal, Noise::Exponential, Noise::Disturbed];

impl Noise {
    fn sample(self, random: &mut Random) -> f64 {
        match self {
            Noise::Normal => 1.0 + 0.02 * random.normal(),
            Noise::LogNormal => (0.1 * random.normal()).exp(),
            Noise::Exponential => 1.0 - 0.05 * random.uniform().ln(),
            Noise::Disturbed => {
                let extra = if random.uniform() < 0.1 { 0.2 * random.uniform() } else { 0.0 };
                1.0 + 0.02 * random.normal() + extra
            }
        }
    }

    fn median(self) -> f64 {
        match self {
            Noise::Normal | Noise::LogNormal => 1.0,
            Noise::Exponential => 1.0 + 0.05 * 2f64.ln(),
            Noise::Disturbed => {
                let mut random = Random(99);
                let many: Vec<f64> = (0..400_001).map(|_| self.sample(&mut random)).collect();
                median(&many)
            }
        }
    }

    fn samples(self, n: usize, random: &mut Random) -> Vec<f64> {
        (0..n).map(|_| self.sample(random)).collect()
    }
}

#[test]
fn medians_by_hand() {
    assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
    assert_eq!(median(&[4.0, 1.0, 3.0, 2.0]), 2.5);
    assert!(median(&[]).is_nan());
}

#[test]
fn no_interval_below_five() {
    assert_eq!(estimate(&[1.0, 2.0, 3.0, 4.0]).interval, None);
    assert_eq!(estimate(&[1.0, 2.0, 3.0, 4.0]).samples.len(), 4);
    let two = ratio(&[1.0; 4], &[2.0; 5]);
    assert_eq!((two.factor, two.interval, two.p), (2.0, None, None));
}

/// Worked out on paper from binomial tables.
#[test]
fn intervals_by_hand() {
    // n = 10: k = 2 covers 1 - 2·11/1024 = 0.978516, k = 3 covers 1 - 2·56/1024 = 0.890625; share = 0.028516/0.087891 =
    // 0.324444; inner = 8·0.324444 / (2 + 6·0.324444) = 0.657658.
    let x: Vec<f64> = (1..=10).map(f64::from).collect();
    let (low, high) = interval(&x).unwrap();
    assert!((low - 2.657658).abs() < 1e-5 && (high - 8.342342).abs() < 1e-5, "{low} {high}");
    // n = 6: k = 1 covers 0.96875, k = 2 0.78125; share 0.1; inner = 5·0.1 / (1 + 4·0.1) = 0.357143.
    let (low, high) = interval(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]).unwrap();
    assert!((low - 1.357143).abs() < 1e-5 && (high - 5.642857).abs() < 1e-5, "{low} {high}");
    let (low, high) = interval(&[1.0, 2.0, 3.0, 4.0, 5.0]).unwrap();
    assert!(low < 1.0 && high > 5.0 && (low + high - 6.0).abs() < 1e-12);
    // Nothing is less than nothing, and no share more than the whole.
    assert_eq!(interval(&[0.01, 0.5, 0.6, 0.7, 0.99]).unwrap().0, 0.0);
    assert_eq!(estimate_share(&[0.01, 0.5, 0.6, 0.7, 0.99]).interval, Some((0.0, 1.0)));
    assert!(estimate(&[0.01, 0.5, 0.6, 0.7, 0.99]).interval.is_some_and(|(_, high)| high > 1.0));
}

/// Against tables of Mann and Whitney's distribution.
#[test]
fn rank_sums_by_hand() {
    // 3 and 2: ten orders; U = 0, 1, 2, 3, 4, 5, 6 in 1, 1, 2, 2, 2, 1, 1 of them.
    let sums = rank_sums(3, 2);
    let expected = [0.1, 0.2, 0.4, 0.6, 0.8, 0.9, 1.0];
    assert!(sums.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-12), "{sums:?}");
    // Critical values of the two-sided test at 5%: U <= 2, 23 and 127 for n = 5, 10 and 20.
    for (n, critical) in [(5, 2), (10, 23), (20, 127)] {
        let sums = rank_sums(n, n);
        assert!(2.0 * sums[critical] <= 0.05 && 2.0 * sums[critical + 1] > 0.05, "{n}");
    }
    let apart = ratio(&[1.0, 1.1, 1.2, 1.3, 1.4], &[2.0, 2.1, 2.2, 2.3, 2.4]);
    assert!((apart.p.unwrap() - 2.0 / 252.0).abs() < 1e-12);
    assert_eq!(ratio(&[1.0; 5], &[1.0; 5]).p, Some(1.0));
}

#[test]
fn a_test_and_its_interval_agree() {
    let mut random = Random(3);
    for n in [5, 7, 10, 20] {
        for _ in 0..500 {
            let (a, b) = (Noise::Normal.samples(n, &mut random), Noise::Normal.samples(n, &mut random));
            let Ratio { interval, p, .. } = ratio(&a, &b);
            let (low, high) = interval.unwrap();
            assert_eq!(low > 1.0 || high < 1.0, p.unwrap() <= CLAIM, "{low} {high} {p:?}");
        }
    }
}

#[test]
fn intervals_cover_the_median_in_95_of_100_studies() {
    for noise in NOISES {
        let truth = noise.median();
        for n in [5, 10, 20] {
            let mut random = Random(1 + n as u64);
            let covered = (0..STUDIES).filter(|_| {
                let (low, high) = interval(&noise.samples(n, &mut random)).unwrap();
                low <= truth && truth <= high
            });
            let share = covered.count() as f64 / STUDIES as f64;
            println!("{noise:?}, n = {n}: {share:.4}");
            assert!((0.93..=0.97).contains(&share), "{noise:?}, n = {n}: {share}");
        }
    }
}

#[test]
fn intervals_of_a_factor_cover_it() {
    for noise in NOISES {
        for n in [5, 10, 20] {
            let mut random = Random(100 + n as u64);
            let covered = (0..STUDIES).filter(|_| {
                let (a, b) = (noise.samples(n, &mut random), noise.samples(n, &mut random));
                let b: Vec<f64> = b.iter().map(|x| 1.7 * x).collect();
                let (low, high) = ratio(&a, &b).interval.unwrap();
                low <= 1.7 && 1.7 <= high
            });
            let share = covered.count() as f64 / STUDIES as f64;
            println!("{noise:?}, n = {n}: {share:.4}");
            // Exactly 96.8, 96.5 and 96.2% in the long run.
            assert!((0.93..=0.98).contains(&share), "{noise:?}, n = {n}: {share}");
        }
    }
}

#[test]
fn karp_and_flatt_by_hand() {
    assert_eq!(serial_fraction(4.0, 4.0), Some(0.0));
    assert_eq!(serial_fraction(1.0, 4.0), Some(1.0));
    // Their own example of a serial part of a tenth: speedup 1 / (0.1 + 0.9 / 4) = 3.0769.
    assert!((serial_fraction(1.0 / (0.1 + 0.9 / 4.0), 4.0).unwrap() - 0.1).abs() < 1e-12);
    assert_eq!(serial_fraction(1.0, 1.0), None);
}

#[test]
fn outliers_stand_far_off() {
    assert_eq!(outliers(&[1.0, 1.01, 0.99, 1.0, 1.02, 1.4]), [5]);
    assert_eq!(outliers(&[1.0, 1.01, 0.99, 1.0, 1.02, 1.03]), Vec::<usize>::new());
    assert_eq!(outliers(&[1.0, 1.0, 1.0, 1.0, 1.01]), Vec::<usize>::new(), "without spread, 1% is nothing");
    assert_eq!(outliers(&[1.0, 9.0, 1.0]), Vec::<usize>::new());
}
