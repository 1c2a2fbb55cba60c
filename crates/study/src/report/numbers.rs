//! Numbers for people: three digits that count, and a unit they can picture.

/// Three digits that count; what is not a number is a dash.
pub fn short(x: f64) -> String {
    if !x.is_finite() {
        return "–".into();
    }
    let size = x.abs();
    match size {
        0.0 => "0".into(),
        _ if size >= 999.5 => grouped(x),
        _ if size >= 99.95 => format!("{x:.0}"),
        _ if size >= 9.995 => format!("{x:.1}"),
        _ if size >= 0.0995 => format!("{x:.2}"),
        _ if size >= 0.00095 => format!("{x:.4}"),
        _ => format!("{x:.1e}"),
    }
}

/// 1234567 → "1,234,567"; beyond a billion as a power of ten.
pub fn grouped(x: f64) -> String {
    if !x.is_finite() {
        return "–".into();
    }
    if x.abs() >= 1e9 {
        return format!("{x:.2e}");
    }
    let digits = format!("{:.0}", x.abs());
    let mut out = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    if x < 0.0 { format!("−{out}") } else { out }
}

/// A unit of time or of bytes: what it is called, and how many seconds or bytes are in it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Unit(pub &'static str, pub f64);

impl Unit {
    /// In which the largest of some times reads well.
    pub fn of_time(largest: f64) -> Unit {
        match largest {
            _ if largest >= 7200.0 => Unit("h", 3600.0),
            _ if largest >= 600.0 => Unit("min", 60.0),
            _ if largest >= 1.0 => Unit("s", 1.0),
            _ if largest >= 1e-3 => Unit("ms", 1e-3),
            _ => Unit("µs", 1e-6),
        }
    }

    pub fn of_bytes(largest: f64) -> Unit {
        match largest {
            _ if largest >= 1e9 => Unit("GB", 1e9),
            _ if largest >= 1e6 => Unit("MB", 1e6),
            _ if largest >= 1e3 => Unit("kB", 1e3),
            _ => Unit("B", 1.0),
        }
    }

    pub fn number(self, x: f64) -> String {
        short(x / self.1)
    }
}

pub fn seconds(x: f64) -> String {
    if !x.is_finite() {
        return "–".into();
    }
    let unit = Unit::of_time(x.abs());
    format!("{} {}", unit.number(x), unit.0)
}

/// 0.123 → "12.3%".
pub fn percent(x: f64) -> String {
    if !x.is_finite() {
        return "–".into();
    }
    let x = 100.0 * x;
    if x.abs() >= 9.95 || x == 0.0 { format!("{x:.0}%") } else { format!("{x:.1}%") }
}

/// Percentage with a tenth, for accuracies.
pub fn score(x: f64) -> String {
    if x.is_finite() { format!("{:.1}%", 100.0 * x) } else { "–".into() }
}

/// At an axis: whole numbers are whole.
pub fn tick(x: f64) -> String {
    if x.fract() == 0.0 { grouped(x) } else { short(x) }
}

/// A number with all its digits, for tables that are read by programs.
pub fn exact(x: f64) -> String {
    if x.is_finite() { format!("{x}") } else { String::new() }
}

/// The minute, in UTC, by the civil calendar.
pub fn date(seconds_since_1970: u64) -> String {
    let days = (seconds_since_1970 / 86_400) as i64;
    let clock = seconds_since_1970 % 86_400;
    // Years that begin in March, so that the leap day is the last.
    let z = days + 719_468;
    let era = z.div_euclid(146_097);
    let of_era = z.rem_euclid(146_097);
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02} {:02}:{:02} UTC", clock / 3600, clock / 60 % 60)
}

pub fn bytes(x: f64) -> String {
    let unit = Unit::of_bytes(x);
    format!("{} {}", unit.number(x), unit.0)
}

/// "1 rank", "2 ranks".
pub fn counted(n: usize, what: &str) -> String {
    let end = if n == 1 { "" } else { "s" };
    format!("{n} {what}{end}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_digits_count() {
        let cases = [
            (0.0, "0"),
            (0.9946, "0.99"),
            (1.005, "1.00"),
            (12.34, "12.3"),
            (99.96, "100"),
            (999.6, "1,000"),
        ];
        for (x, text) in cases {
            assert_eq!(short(x), text, "{x}");
        }
        assert_eq!(short(f64::NAN), "–");
        assert_eq!(short(0.00001), "1.0e-5");
        assert_eq!(grouped(-1234567.0), "−1,234,567");
        assert_eq!(seconds(0.0123), "12.3 ms");
        assert_eq!(seconds(1234.5), "20.6 min");
        assert_eq!(percent(0.0123), "1.2%");
        assert_eq!(percent(0.97), "97%");
    }

    #[test]
    fn dates_follow_the_calendar() {
        assert_eq!(date(0), "1970-01-01 00:00 UTC");
        assert_eq!(date(951_782_400), "2000-02-29 00:00 UTC");
        assert_eq!(date(1_794_755_952), "2026-11-15 15:19 UTC");
    }
}
