//! Comparison of two sets of results: which is faster, and how sure that is.

use crate::error::StudyError;
use crate::report::short;
use crate::results::{Estimate, Point, Results, Settings};
use crate::stats::{CLAIM, Ratio, ratio};
use serde::Serialize;

/// Two results, point by point.
#[derive(Debug, PartialEq, Serialize)]
pub struct Comparison {
    pub pairs: Vec<Pair>,
    /// Points that only one of them has, or that did not succeed there.
    pub left_out: Vec<String>,
    /// The answer for people.
    pub sentence: String,
}

/// A point in both.
#[derive(Debug, PartialEq, Serialize)]
pub struct Pair {
    pub id: String,
    /// What B's images/s are, as a factor of A's.
    pub factor: f64,
    pub interval: Option<(f64, f64)>,
    /// How often chance alone would part equal things so far; with several points, as Holm (1979) corrects it.
    pub p: Option<f64>,
    pub verdict: Verdict,
    /// In what the points are not the same.
    pub differs: Vec<String>,
    pub sentence: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    Faster,
    Slower,
    /// No difference can be shown.
    Alike,
    /// Fewer than five runs on a side.
    TooFewRuns,
}

pub fn compare(a: &Results, b: &Results) -> Result<Comparison, StudyError> {
    let (points, left_out) = pair_up(a, b)?;
    let ratios: Vec<Ratio> = points.iter().map(|(a, b)| ratio(rates(a), rates(b))).collect();
    let corrected = holm(&ratios.iter().map(|ratio| ratio.p).collect::<Vec<_>>());
    let pairs = points.iter().zip(&ratios).zip(corrected);
    let pairs: Vec<Pair> = pairs.map(|(((a, b), ratio), p)| pair(a, b, ratio, p)).collect();
    let sentence = overall(&pairs, a.points.len().max(b.points.len()) > 1);
    Ok(Comparison { pairs, left_out, sentence })
}

fn rates(point: &Point) -> &[f64] {
    point.summary.as_ref().map_or(&[], |summary| &summary.images_per_second.samples)
}

type Paired<'a> = Vec<(&'a Point, &'a Point)>;

/// Points of the same name, or else of the same settings on another kind of device. Two results of one point each are compared whatever it is, and what differs is said.
fn pair_up<'a>(a: &'a Results, b: &'a Results) -> Result<(Paired<'a>, Vec<String>), StudyError> {
    let good = |results: &'a Results| {
        results.points.iter().filter(|point| point.summary.is_some()).collect::<Vec<_>>()
    };
    let (of_a, of_b) = (good(a), good(b));
    if let ([one], [other]) = (&of_a[..], &of_b[..]) {
        return Ok((vec![(one, other)], vec![]));
    }
    let named = |point: &Point| of_b.iter().find(|other| other.id == point.id);
    let alike = |point: &Point| of_b.iter().find(|other| are_alike(point, other));
    let partner = |point: &Point| named(point).or_else(|| alike(point)).copied();
    let pairs: Paired = of_a.iter().filter_map(|point| Some((*point, partner(point)?))).collect();
    if pairs.is_empty() {
        let why = "the two have no point in common that was measured in both: nothing can be compared";
        return Err(StudyError::Impossible(why.into()));
    }
    let both = |id: &String| pairs.iter().any(|(one, other)| one.id == *id || other.id == *id);
    let ids = a.points.iter().chain(&b.points).map(|point| point.id.clone());
    let mut alone: Vec<String> = ids.filter(|id| !both(id)).collect();
    alone.sort();
    alone.dedup();
    Ok((pairs, alone))
}

/// Tells whether two points did the same, each with what its platform has.
fn are_alike(a: &Point, b: &Point) -> bool {
    let Settings { device, comm, loader_threads, .. } = a.settings.clone();
    a.kind == b.kind && a.settings == Settings { device, comm, loader_threads, ..b.settings.clone() }
}

/// What the images/s of B are, as factors of A's: the least and the most over the points that both have, and how many
/// those are.
pub fn factors(a: &Results, b: &Results) -> Option<(f64, f64, usize)> {
    let (points, _) = pair_up(a, b).ok()?;
    let factors: Vec<f64> = points.iter().map(|(a, b)| ratio(rates(a), rates(b)).factor).collect();
    let least = factors.iter().copied().reduce(f64::min)?;
    Some((least, factors.iter().copied().reduce(f64::max)?, factors.len()))
}

/// Holm's correction: the smallest of m chances counts m times, the next m - 1 times, and none less than one before it.
fn holm(chances: &[Option<f64>]) -> Vec<Option<f64>> {
    let mut order: Vec<(usize, f64)> =
        chances.iter().enumerate().filter_map(|(i, p)| Some((i, (*p)?))).collect();
    order.sort_by(|a, b| a.1.total_cmp(&b.1));
    let mut corrected = vec![None; chances.len()];
    let (count, mut least) = (order.len(), 0.0f64);
    for (place, (i, p)) in order.into_iter().enumerate() {
        least = least.max((p * (count - place) as f64).min(1.0));
        corrected[i] = Some(least);
    }
    corrected
}

fn pair(a: &Point, b: &Point, ratio: &Ratio, p: Option<f64>) -> Pair {
    let Ratio { factor, interval, .. } = *ratio;
    let verdict = match p {
        None => Verdict::TooFewRuns,
        Some(p) if p <= CLAIM && factor > 1.0 => Verdict::Faster,
        Some(p) if p <= CLAIM => Verdict::Slower,
        Some(_) => Verdict::Alike,
    };
    let differs = differences(a, b);
    let mut sentence = said(a, b, verdict, ratio, p);
    if !differs.is_empty() {
        sentence += &format!("; they are not the same: {}", differs.join(", "));
    }
    Pair { id: a.id.clone(), factor, interval, p, verdict, differs, sentence }
}

fn said(a: &Point, b: &Point, verdict: Verdict, ratio: &Ratio, p: Option<f64>) -> String {
    let change = |factor: f64| match factor {
        factor if ratio.factor >= 2.0 => format!("{} times", short(factor)),
        // Said of A, which is faster by so much.
        factor if ratio.factor <= 0.5 => format!("{} times", short(1.0 / factor)),
        factor => format!("{:+.1}%", 100.0 * (factor - 1.0)),
    };
    let (n_a, n_b) = (rates(a).len(), rates(b).len());
    let runs = if n_a == n_b { format!("{n_a} runs each") } else { format!("{n_a} and {n_b} runs") };
    let turned = |(low, high)| if ratio.factor <= 0.5 { (high, low) } else { (low, high) };
    let ends = ratio.interval.map(turned);
    let between = ends.map_or(String::new(), |(low, high)| format!("{} to {}", change(low), change(high)));
    let chance = p.map_or(String::new(), |p| format!("p = {p:.2}"));
    let chance = if p.is_some_and(|p| p < 0.01) { "p < 0.01".to_string() } else { chance };
    match verdict {
        Verdict::Faster | Verdict::Slower => {
            let much = match ratio.factor {
                factor if factor >= 2.0 => format!("faster, with {} times the images/s", short(factor)),
                factor if factor <= 0.5 => {
                    format!("slower: A has {} times its images/s", short(1.0 / factor))
                }
                factor if verdict == Verdict::Faster => {
                    format!("faster by {:.1}% in images/s", 100.0 * (factor - 1.0))
                }
                factor => format!("slower by {:.1}% in images/s", 100.0 * (1.0 - factor)),
            };
            format!("B is {much} (95%: {between}; {chance}, {runs})")
        }
        Verdict::Alike => {
            format!("no difference can be shown: {} (95%: {between}; {chance}, {runs})", change(ratio.factor))
        }
        Verdict::TooFewRuns => {
            let samples = |e: Option<&Estimate>| {
                let all = e.map_or(&[][..], |e| &e.samples);
                all.iter().map(|x| format!("{x:.1}")).collect::<Vec<_>>().join(" ")
            };
            let of = |point: &Point| samples(point.summary.as_ref().map(|s| &s.images_per_second));
            format!(
                "too few runs to be sure ({runs}, five are needed): A {} images/s, B {}, {}",
                of(a),
                of(b),
                change(ratio.factor)
            )
        }
    }
}

/// Settings in which two points differ, but for where they ran.
fn differences(a: &Point, b: &Point) -> Vec<String> {
    let fields = |point: &Point| match serde_json::to_value(&point.settings) {
        Ok(serde_json::Value::Object(fields)) => fields,
        _ => Default::default(),
    };
    let set = |data: &serde_json::Value| data.as_str().and_then(|d| d.split(':').next()).map(str::to_string);
    let (of_a, of_b) = (fields(a), fields(b));
    let other = |name: &str, x: &serde_json::Value, y: &serde_json::Value| match name {
        "data" => set(x) != set(y),
        _ => x != y,
    };
    let pairs = of_a.iter().filter_map(|(name, x)| Some((name, x, of_b.get(name)?)));
    pairs
        .filter(|(name, x, y)| other(name, x, y))
        .map(|(name, x, y)| format!("{} {x} and {y}", name.replace('_', " ")))
        .collect()
}

/// `of_many`: whether there are points besides, so that one has to be named.
fn overall(pairs: &[Pair], of_many: bool) -> String {
    if let [one] = pairs {
        return if of_many { format!("{}: {}", one.id, one.sentence) } else { one.sentence.clone() };
    }
    let count = |verdict| pairs.iter().filter(|pair| pair.verdict == verdict).count();
    let of = pairs.len();
    let mut words = Vec::new();
    for (verdict, text) in [(Verdict::Faster, "B is faster at"), (Verdict::Slower, "B is slower at")] {
        let factors: Vec<f64> = pairs.iter().filter(|p| p.verdict == verdict).map(|p| p.factor).collect();
        let (Some(least), Some(most)) =
            (factors.iter().copied().reduce(f64::min), factors.iter().copied().reduce(f64::max))
        else {
            continue;
        };
        let percent = |factor: f64| 100.0 * (factor - 1.0).abs();
        let much = match verdict {
            Verdict::Slower if least <= 0.5 => {
                format!("where A has {} to {} times its images/s", short(1.0 / most), short(1.0 / least))
            }
            _ if most >= 2.0 => format!("with {} to {} times the images/s", short(least), short(most)),
            Verdict::Faster => format!("by {:.1} to {:.1}%", percent(least), percent(most)),
            _ => format!("by {:.1} to {:.1}%", percent(most), percent(least)),
        };
        words.push(format!("{text} {} of {of} points, {much}", factors.len()));
    }
    for (verdict, text) in [
        (Verdict::Alike, "no difference can be shown at"),
        (Verdict::TooFewRuns, "there are too few runs at"),
    ] {
        if count(verdict) > 0 {
            words.push(format!("{text} {} of {of} points", count(verdict)));
        }
    }
    words.join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Random, point};

    fn results(points: Vec<Point>) -> Results {
        let mut results = crate::testing::results(points);
        crate::summary::complete(&mut results, &|_| false);
        results
    }

    fn noisy(n: usize, rate: f64, noise: f64, random: &mut Random) -> Vec<f64> {
        (0..n).map(|_| rate * (noise * random.normal()).exp()).collect()
    }

    fn verdict(a: &[f64], b: &[f64]) -> Verdict {
        compare(&results(vec![point(1, a)]), &results(vec![point(1, b)])).unwrap().pairs[0].verdict
    }

    #[test]
    fn identical_runs_are_told_apart_in_at_most_five_of_a_hundred() {
        for n in [5, 10, 20] {
            let mut random = Random(40 + n as u64);
            let claims = (0..2000).filter(|_| {
                let (a, b) = (noisy(n, 100.0, 0.03, &mut random), noisy(n, 100.0, 0.03, &mut random));
                matches!(verdict(&a, &b), Verdict::Faster | Verdict::Slower)
            });
            let share = claims.count() as f64 / 2000.0;
            println!("n = {n}: {share:.4} false claims");
            assert!(share <= 0.055, "n = {n}: {share}");
        }
    }

    /// Where the noise allows it: 1% for five runs, 2% for ten, 3% for twenty.
    #[test]
    fn a_planted_slowdown_of_five_percent_is_found() {
        for (n, noise) in [(5, 0.01), (10, 0.02), (20, 0.03)] {
            let mut random = Random(70 + n as u64);
            let found = (0..1000).filter(|_| {
                let (a, b) = (noisy(n, 100.0, noise, &mut random), noisy(n, 95.0, noise, &mut random));
                verdict(&a, &b) == Verdict::Slower
            });
            let share = found.count() as f64 / 1000.0;
            println!("n = {n}, noise {noise}: found in {share:.3}");
            assert!(share >= 0.99, "n = {n}: {share}");
        }
    }

    /// With many points one of them differs by chance more often; together they do so in at most 5%.
    #[test]
    fn many_identical_points_make_no_more_false_claims() {
        let mut random = Random(9);
        let claims = (0..500).filter(|_| {
            let mut study = || {
                results([1, 2, 4].map(|ranks| point(ranks, &noisy(10, 100.0, 0.03, &mut random))).to_vec())
            };
            let (a, b) = (study(), study());
            compare(&a, &b)
                .unwrap()
                .pairs
                .iter()
                .any(|p| matches!(p.verdict, Verdict::Faster | Verdict::Slower))
        });
        let share = claims.count() as f64 / 500.0;
        println!("{share:.4} false claims");
        assert!(share <= 0.055, "{share}");
    }

    /// The same points on another kind of device have other names.
    #[test]
    fn platforms_are_compared() {
        let (slow, fast) = ([100.0, 101.0, 99.0, 100.0, 102.0], [800.0, 801.0, 799.0, 800.0, 802.0]);
        let there = |ranks, rates: &[f64]| {
            let mut there = point(ranks, rates);
            (there.id, there.settings.device) = (format!("{} there", there.id), "cuda".into());
            there
        };
        let a = results(vec![point(1, &slow), point(2, &fast), point(4, &slow)]);
        let b = results(vec![there(1, &fast), there(2, &slow)]);
        let compared = compare(&a, &b).unwrap();
        assert_eq!((compared.pairs.len(), compared.left_out.len()), (2, 1));
        assert_eq!(compared.pairs[0].differs, ["device \"cpu\" and \"cuda\""]);
        let (least, most, points) = factors(&a, &b).unwrap();
        assert_eq!((least, most, points), (0.125, 8.0, 2));
        assert_eq!(factors(&a, &results(vec![there(8, &fast), there(16, &fast)])), None);
    }

    #[test]
    fn corrections_by_hand() {
        let p = holm(&[Some(0.01), None, Some(0.04), Some(0.03)]);
        let expected = [Some(0.03), None, Some(0.06), Some(0.06)];
        assert!(
            p.iter().zip(expected).all(|(a, b)| (a.unwrap_or(9.0) - b.unwrap_or(9.0)).abs() < 1e-12),
            "{p:?}"
        );
    }

    #[test]
    fn what_is_said() {
        let (slow, fast) = ([100.0, 101.0, 99.0, 100.0, 102.0], [110.0, 111.0, 109.0, 110.0, 112.0]);
        let of = |points: Vec<Point>| results(points);
        let one = compare(&of(vec![point(1, &slow)]), &of(vec![point(1, &fast)])).unwrap();
        assert!(one.sentence.starts_with("B is faster by 10.0% in images/s (95%: +"), "{}", one.sentence);
        assert!(one.sentence.contains("p < 0.01, 5 runs each"), "{}", one.sentence);
        let few = compare(&of(vec![point(1, &slow[..2])]), &of(vec![point(1, &fast)])).unwrap();
        assert_eq!(few.pairs[0].verdict, Verdict::TooFewRuns);
        assert!(few.sentence.contains("A 100.0 101.0 images/s, B 110.0 111.0"), "{}", few.sentence);
        let two =
            compare(&of(vec![point(1, &slow), point(2, &fast)]), &of(vec![point(1, &slow), point(4, &fast)]));
        let two = two.unwrap();
        assert_eq!((two.pairs.len(), two.left_out.len()), (1, 2));
        assert!(two.sentence.starts_with("strong-1: no difference can be shown: "), "{}", two.sentence);
        let other = compare(&of(vec![point(1, &slow)]), &of(vec![point(2, &fast)])).unwrap();
        assert!(other.sentence.contains("they are not the same: ranks 1 and 2"), "{}", other.sentence);
        let times = slow.map(|rate| 2.5 * rate);
        let much = compare(&of(vec![point(1, &slow)]), &of(vec![point(1, &times)])).unwrap();
        assert!(
            much.sentence.starts_with("B is faster, with 2.50 times the images/s (95%: "),
            "{}",
            much.sentence
        );
        let apart =
            compare(&of(vec![point(1, &slow), point(2, &slow)]), &of(vec![point(4, &fast), point(8, &fast)]));
        assert!(apart.is_err());
    }
}
