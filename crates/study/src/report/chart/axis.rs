//! Scales and ticks.

/// From numbers to pixels.
#[derive(Clone, Copy, Debug)]
pub struct Scale {
    pub low: f64,
    pub high: f64,
    pub from: f64,
    pub to: f64,
    pub log: bool,
}

impl Scale {
    pub fn at(&self, x: f64) -> f64 {
        let share = |x: f64| match self.log {
            true => (x.max(f64::MIN_POSITIVE) / self.low).ln() / (self.high / self.low).ln(),
            false => (x - self.low) / (self.high - self.low),
        };
        let share = share(x);
        // A scale of one number has it in the middle.
        let share = if share.is_finite() { share.clamp(-0.05, 1.05) } else { 0.5 };
        self.from + share * (self.to - self.from)
    }
}

/// Round numbers from `low` to the first one past `high`: about `wanted` of them.
pub fn round_ticks(low: f64, high: f64, wanted: usize) -> Vec<f64> {
    if !(low.is_finite() && high.is_finite()) || high <= low {
        return vec![low];
    }
    let rough = (high - low) / wanted.max(1) as f64;
    let power = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 2.5, 5.0, 10.0].map(|x| x * power).into_iter().find(|step| *step >= rough * 0.999);
    let step = step.unwrap_or(10.0 * power);
    let first = (low / step + 1e-9).floor();
    let last = (high / step - 1e-9).ceil();
    let count = ((last - first) as usize).min(50);
    // Multiples, not sums: 0.30000000000000004 is no tick.
    (0..=count).map(|i| ((first + i as f64) * step * 1e12 / power).round() * power / 1e12).collect()
}

/// How many digits tell ticks apart.
pub fn tick_digits(ticks: &[f64]) -> usize {
    let apart = |digits: usize| {
        let factor = 10f64.powi(digits as i32);
        ticks.iter().all(|x| ((x * factor).round() / factor - x).abs() <= x.abs() * 1e-6 + 1e-12)
    };
    (0..7).find(|digits| apart(*digits)).unwrap_or(7)
}

pub fn powers_of_two(low: f64, high: f64) -> Vec<f64> {
    // Noise just below a power needs no room of its own.
    let (first, last) = ((low.max(1e-9).log2() + 0.05).floor() as i32, high.max(1e-9).log2().ceil() as i32);
    (first..=last.min(first + 24)).map(|power| 2f64.powi(power)).collect()
}

/// Ticks of an axis that goes by powers of ten; over few of them with 2 and 5 between.
pub fn powers_of_ten(low: f64, high: f64) -> Vec<f64> {
    let (first, last) = (low.log10().floor() as i32, high.log10().ceil() as i32);
    let between: &[f64] = if high / low <= 60.0 { &[1.0, 2.0, 5.0] } else { &[1.0] };
    let all = (first..=last).flat_map(|power| {
        between.iter().map(move |x| {
            // Quotients of whole numbers: 0.05, not 0.050000000000000003.
            if power < 0 { x / 10f64.powi(-power) } else { x * 10f64.powi(power) }
        })
    });
    let all: Vec<f64> = all.collect();
    let from = all.iter().rposition(|tick| *tick <= low).unwrap_or(0);
    let to = all.iter().position(|tick| *tick >= high).unwrap_or(all.len() - 1);
    all[from..=to].to_vec()
}

/// Of labels at places, those that can be read without touching each other; the first and the last go first.
pub fn apart(places: &[(f64, f64)]) -> Vec<bool> {
    let mut shown = vec![false; places.len()];
    let mut order: Vec<usize> = (0..places.len()).collect();
    order.sort_by_key(|i| {
        if *i == 0 {
            0
        } else if *i + 1 == places.len() {
            1
        } else {
            2
        }
    });
    for i in order {
        let (x, half) = places[i];
        let free = (0..places.len())
            .filter(|j| shown[*j])
            .all(|j| (places[j].0 - x).abs() >= half + places[j].1 + 5.0);
        shown[i] = free;
    }
    shown
}

/// Places moved apart as little as it takes to lie `gap` from each other, within `from..=to`; in the order given.
pub fn pushed_apart(wanted: &[f64], gap: f64, from: f64, to: f64) -> Vec<f64> {
    let mut order: Vec<usize> = (0..wanted.len()).collect();
    order.sort_by(|a, b| wanted[*a].total_cmp(&wanted[*b]));
    let mut places: Vec<f64> = order.iter().map(|i| wanted[*i].clamp(from, to.max(from))).collect();
    for i in 1..places.len() {
        places[i] = places[i].max(places[i - 1] + gap);
    }
    let mut limit = to;
    for place in places.iter_mut().rev() {
        *place = place.min(limit);
        limit = *place - gap;
    }
    let mut out = vec![0.0; wanted.len()];
    order.into_iter().zip(places).for_each(|(i, place)| out[i] = place);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_cover() {
        assert_eq!(round_ticks(0.0, 0.93, 4), [0.0, 0.25, 0.5, 0.75, 1.0]);
        assert_eq!(round_ticks(0.0, 37.0, 4), [0.0, 10.0, 20.0, 30.0, 40.0]);
        assert_eq!(round_ticks(0.0, 0.3, 3), [0.0, 0.1, 0.2, 0.3]);
        assert_eq!(round_ticks(1.0, 1.0, 4), [1.0]);
        assert_eq!(round_ticks(0.0, f64::NAN, 4), [0.0]);
        assert_eq!(tick_digits(&[0.0, 0.25, 0.5]), 2);
        assert_eq!(powers_of_two(0.99, 6.0), [1.0, 2.0, 4.0, 8.0]);
        assert_eq!(powers_of_two(0.7, 2.0), [0.5, 1.0, 2.0]);
        assert_eq!(powers_of_ten(3.0, 400.0), [1.0, 10.0, 100.0, 1000.0]);
        assert_eq!(powers_of_ten(3.0, 90.0), [2.0, 5.0, 10.0, 20.0, 50.0, 100.0]);
        assert_eq!(powers_of_ten(0.03, 1.7), [0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0]);
    }

    #[test]
    fn labels_keep_their_distance() {
        let places = pushed_apart(&[10.0, 11.0, 50.0], 14.0, 0.0, 60.0);
        assert_eq!(places, [10.0, 24.0, 50.0]);
        let places = pushed_apart(&[59.0, 58.0, 57.0], 14.0, 0.0, 60.0);
        assert_eq!(places, [60.0, 46.0, 32.0]);
        assert_eq!(apart(&[(0.0, 10.0), (12.0, 10.0), (30.0, 10.0)]), [true, false, true]);
    }
}
