//! Random choices are spread as torchvision's are.
//!
//! Kolmogorov and Smirnov's test against distribution functions recorded from torchvision
//! (`fixtures/make_torchvision.py`), at some values of each. Seeds are fixed, so a test either always passes or never;
//! one draw in 10,000 of correct code would have failed.

use data::augment::OpKind;
use data::{Choice, Geometry, Interpolation, Mix, RandAugment, Transform};

const DRAWS: usize = 100_000;

fn plain(size: usize) -> Transform {
    Transform::evaluation(size, None, &[0.0; 3], &[1.0; 3], Interpolation::Bilinear)
}

/// The choices of two epochs.
fn choices(transform: Transform, source: (usize, usize)) -> Vec<Choice> {
    transform.check().unwrap();
    (0..DRAWS).map(|i| transform.choose(3, (i % 2) as u64, i / 2, source)).collect()
}

fn compare(name: &str, mut draws: Vec<f64>) {
    let fixture = include_str!("fixtures/draws.txt");
    let line = fixture.lines().find(|line| line.split(' ').next() == Some(name)).expect(name);
    let theirs: f64 = line.split(' ').nth(1).unwrap().parse().unwrap();
    draws.sort_by(f64::total_cmp);
    let ours = draws.len() as f64;
    let mut apart = (0.0, 0.0);
    for point in line.split(' ').skip(2) {
        let (value, share) = point.split_once(':').unwrap();
        let (value, share): (f64, f64) = (value.parse().unwrap(), share.parse().unwrap());
        // Values are recorded with nine digits.
        let below = draws.partition_point(|draw| *draw <= value * (1.0 + 1e-8)) as f64;
        let difference = (below / ours - share).abs();
        if difference > apart.0 {
            apart = (difference, value);
        }
    }
    // The level 10⁻⁴: √(−ln(10⁻⁴ / 2) / 2), for two samples of different sizes.
    let critical = 2.2255 * ((ours + theirs) / (ours * theirs)).sqrt();
    println!("{name:28} {:.5} of {critical:.5}", apart.0);
    assert!(apart.0 < critical, "{name}: {:.5} apart at {}; {critical:.5} is critical", apart.0, apart.1);
}

#[test]
fn random_parts_of_an_image() {
    for (width, height, scale) in [(500, 375, 0.08), (32, 32, 0.25), (300, 90, 0.25)] {
        let geometry = Geometry::RandomResizedCrop { scale: (scale, 1.0), ratio: (3.0 / 4.0, 4.0 / 3.0) };
        let drawn = choices(Transform { geometry, ..plain(32) }, (width, height));
        let (full_width, full_height) = (width as f64, height as f64);
        let of = |statistic: &str, f: &dyn Fn(&data::CropBox) -> f64| {
            compare(
                &format!("crop_{width}x{height}_{statistic}"),
                drawn.iter().map(|c| f(&c.region)).collect(),
            );
        };
        of("width", &|b| b.width);
        of("height", &|b| b.height);
        of("left", &|b| b.left);
        of("top", &|b| b.top);
        of("area", &|b| b.width * b.height);
        of("ratio", &|b| b.width / b.height);
        of("place", &|b| {
            b.left / (full_width - b.width).max(1.0) + b.top / (full_height - b.height).max(1.0)
        });
    }
}

#[test]
fn erased_rectangles() {
    for size in [32, 224] {
        let drawn = choices(Transform { erase: 1.0, ..plain(size) }, (size, size));
        // Where none fits, torchvision "erases" the whole image by itself.
        let whole = data::augment::Rect { left: 0, top: 0, width: size as u32, height: size as u32 };
        let of = |statistic: &str, f: &dyn Fn(&data::augment::Rect) -> u32| {
            let values = drawn.iter().map(|c| f64::from(f(&c.erase.unwrap_or(whole))));
            compare(&format!("erase_{size}_{statistic}"), values.collect());
        };
        of("width", &|r| r.width);
        of("height", &|r| r.height);
        of("left", &|r| r.left);
        of("top", &|r| r.top);
        of("area", &|r| r.width * r.height);
    }
}

#[test]
fn operations_and_their_signs() {
    let rand_augment = Some(RandAugment { ops: 2, magnitude: 9 });
    let drawn = choices(Transform { rand_augment, ..plain(32) }, (32, 32));
    let ops: Vec<_> = drawn.iter().flat_map(|choice| choice.ops.as_slice()).collect();
    assert_eq!(ops.len(), 2 * DRAWS);
    let sign = |magnitude: f32| if magnitude < 0.0 { 0.5 } else { 0.0 };
    compare("ops_32", ops.iter().map(|op| f64::from(op.kind as u8) + sign(op.magnitude)).collect());

    // Fourteen equally frequent kinds: χ² with 13 degrees of freedom exceeds 42.6 once in 20,000 draws.
    let expected = ops.len() as f64 / OpKind::ALL.len() as f64;
    let seen = OpKind::ALL.map(|kind| ops.iter().filter(|op| op.kind == kind).count() as f64);
    let chi_squared: f64 = seen.iter().map(|seen| (seen - expected).powi(2) / expected).sum();
    assert!(chi_squared < 42.6, "χ² = {chi_squared}");
}

#[test]
fn shares_of_mixup() {
    for alpha in ["0.1", "0.2", "0.4", "0.8", "1.0", "2.0", "10.0"] {
        let transform = Transform { mixup: alpha.parse().unwrap(), ..plain(32) };
        let lambda = |pair| f64::from(transform.choose(3, 0, 2 * pair, (32, 32)).mix.lambda());
        compare(&format!("beta_{alpha}"), (0..DRAWS).map(lambda).collect());
    }
}

#[test]
fn patches_of_cutmix() {
    for (size, alpha) in [(32, "1.0"), (224, "1.0"), (32, "0.3")] {
        let transform = Transform { cutmix: alpha.parse().unwrap(), ..plain(size) };
        let draw = |pair| match transform.choose(3, 0, 2 * pair, (32, 32)).mix {
            Mix::Patch { patch, lambda } => (patch, lambda),
            other => panic!("{other:?}"),
        };
        let drawn: Vec<_> = (0..DRAWS).map(draw).collect();
        let of = |statistic: &str, f: &dyn Fn(&(data::augment::Rect, f32)) -> f64| {
            compare(&format!("cutmix_{size}_{alpha}_{statistic}"), drawn.iter().map(f).collect());
        };
        // λ is kept in single precision; what it stands for is a whole number of pixels.
        let pixels = (size * size) as f64;
        of("lambda", &|(_, lambda)| (f64::from(*lambda) * pixels).round() / pixels);
        of("width", &|(patch, _)| f64::from(patch.width));
        of("left", &|(patch, _)| f64::from(patch.left));
        of("bottom", &|(patch, _)| f64::from(patch.top + patch.height));
    }
}

/// Binomial: 4.5 standard deviations are exceeded once in 150,000 draws.
#[test]
fn rates_of_what_happens_or_not() {
    for rate in [0.0, 0.1, 0.25, 0.5, 1.0] {
        let drawn = choices(Transform { flip: rate, erase: rate, ..plain(224) }, (32, 32));
        let n = DRAWS as f64;
        let flips = drawn.iter().filter(|choice| choice.flip).count() as f64;
        let erased = drawn.iter().filter(|choice| choice.erase.is_some()).count() as f64;
        let both = drawn.iter().filter(|choice| choice.flip && choice.erase.is_some()).count() as f64;
        for (seen, rate) in [(flips, rate), (erased, rate), (both, rate * rate)] {
            let error = 4.5 * (n * rate * (1.0 - rate)).sqrt();
            assert!((seen - n * rate).abs() <= error, "{seen} of {n} at rate {rate}");
        }
    }
}

#[test]
fn shifts_are_uniform_and_independent() {
    let geometry = Geometry::PadCrop { padding: 4 };
    let drawn = choices(Transform { geometry, ..plain(32) }, (32, 32));
    let mut seen = [0.0; 81];
    for Choice { shift: (x, y), .. } in &drawn {
        seen[((x + 4) * 9 + y + 4) as usize] += 1.0;
    }
    // χ² with 80 degrees of freedom exceeds 139 once in 20,000 draws.
    let expected = DRAWS as f64 / 81.0;
    let chi_squared: f64 = seen.iter().map(|seen: &f64| (seen - expected).powi(2) / expected).sum();
    assert!(chi_squared < 139.0, "χ² = {chi_squared}");
}
