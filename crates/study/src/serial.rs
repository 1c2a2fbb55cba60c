//! Amdahl's law over a series of strong scaling: the part of the work that is not divided among ranks.
//!
//! The law says 1 / speedup = s + (1 - s) / p. With x = 1 - 1/p and y = 1/speedup - 1/p that is y = s x, a line through nothing, fitted by
//! least squares to one y for each number of ranks. Its interval is Student's, from the scatter of the points around the line, so that it
//! holds the noise of runs and also how badly the law fits. Where a fit would mean nothing, the reason is given instead.

use crate::results::{Fit, Kind, Point, Results, Serial};

/// Numbers of ranks beyond the first from which on there is a fit.
const FEWEST: usize = 3;
/// Half the width of an interval beyond which nothing is known.
const WIDEST: f64 = 0.25;
/// Of Student's t, for a two-sided 95%, by degrees of freedom from 1 on.
const STUDENT: [f64; 12] =
    [12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179];

/// A fit, or a reason against one, for every series of strong scaling with more than one number of ranks.
pub fn fits(results: &Results) -> Vec<Serial> {
    let mut series: Vec<&str> = vec![];
    let strong = || results.points.iter().filter(|point| point.kind == Kind::Strong);
    for point in strong() {
        if !series.contains(&point.series.as_str()) {
            series.push(&point.series);
        }
    }
    let of = |name: &str| strong().filter(|point| point.series == name).collect::<Vec<_>>();
    let serial = |name: &&str| {
        let points = of(name);
        let many = points.iter().filter(|point| point.settings.ranks > 1).count();
        let (part, reason) = match fit(&points) {
            Ok(fit) => (Some(fit), String::new()),
            Err(reason) => (None, reason),
        };
        (many > 0).then(|| Serial { kind: Kind::Strong, series: name.to_string(), part, reason })
    };
    series.iter().filter_map(serial).collect()
}

fn fit(points: &[&Point]) -> Result<Fit, String> {
    if points.iter().map(|point| point.settings.ranks).min() != Some(1) {
        return Err("the series has no point of one rank".into());
    }
    // Points of too few cores have a speedup, and no efficiency.
    let known = points.iter().filter(|point| point.settings.ranks > 1).filter_map(|point| {
        let summary = point.summary.as_ref()?;
        summary.efficiency.as_ref()?;
        let (p, speedup) = (point.settings.ranks as f64, summary.speedup.as_ref()?.median);
        (speedup.is_finite() && speedup > 0.0).then(|| (1.0 - 1.0 / p, 1.0 / speedup - 1.0 / p))
    });
    let known: Vec<(f64, f64)> = known.collect();
    line(&known)
}

fn line(known: &[(f64, f64)]) -> Result<Fit, String> {
    let n = known.len();
    if n < FEWEST {
        let known = crate::limiter::counted(n, "number");
        return Err(format!("{known} of ranks beyond one can be compared, and a fit needs {FEWEST}"));
    }
    let squares: f64 = known.iter().map(|(x, _)| x * x).sum();
    let value = known.iter().map(|(x, y)| x * y).sum::<f64>() / squares;
    let scatter: f64 = known.iter().map(|(x, y)| (y - value * x).powi(2)).sum::<f64>() / (n - 1) as f64;
    let half = STUDENT.get(n - 2).copied().unwrap_or(2.0) * (scatter / squares).sqrt();
    let percent = |x: f64| format!("{:.0}%", 100.0 * x);
    match value {
        _ if value < 0.0 => Err("more ranks do better than their number".into()),
        _ if value > 1.0 => Err("more ranks are slower than one".into()),
        _ if half > WIDEST => Err(format!(
            "the points don't follow Amdahl's law: a fit gives {} ± {}",
            percent(value),
            percent(half)
        )),
        _ => Ok(Fit { value, interval: ((value - half).max(0.0), (value + half).min(1.0)), points: n }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(ranks: &[f64], speedup: impl Fn(f64) -> f64) -> Result<Fit, String> {
        line(&ranks.iter().map(|p| (1.0 - 1.0 / p, 1.0 / speedup(*p) - 1.0 / p)).collect::<Vec<_>>())
    }

    #[test]
    fn the_serial_part_is_found_where_there_is_one() {
        let amdahl = |p: f64| 1.0 / (0.08 + 0.92 / p);
        let fit = of(&[2.0, 4.0, 8.0, 16.0], amdahl).unwrap();
        assert!((fit.value - 0.08).abs() < 1e-12 && fit.interval.1 - fit.interval.0 < 1e-6, "{fit:?}");
        let noisy = of(&[2.0, 4.0, 8.0, 16.0], |p| amdahl(p) * if p == 4.0 { 0.97 } else { 1.02 }).unwrap();
        let (low, high) = noisy.interval;
        assert!(low < 0.08 && 0.08 < high && high - low > 0.005, "{noisy:?}");
        assert_eq!(noisy.points, 4);
    }

    #[test]
    fn what_means_nothing_has_a_reason() {
        let refused = |ranks: &[f64], speedup: fn(f64) -> f64| of(ranks, speedup).unwrap_err();
        assert_eq!(
            refused(&[2.0, 4.0], |p| p),
            "2 numbers of ranks beyond one can be compared, and a fit needs 3"
        );
        assert_eq!(refused(&[2.0, 4.0, 8.0], |p| 1.1 * p), "more ranks do better than their number");
        assert_eq!(refused(&[2.0, 4.0, 8.0], |_| 0.7), "more ranks are slower than one");
        let strange = refused(&[2.0, 4.0, 8.0], |p| if p == 4.0 { 3.9 } else { 1.4 });
        assert!(strange.starts_with("the points don't follow Amdahl's law: a fit gives "), "{strange}");
    }
}
