//! Numbers and tables for people.

use cpu::StepTime;

/// 1234567 → "1,234,567".
pub fn count(n: usize) -> String {
    let digits = n.to_string();
    let mut out = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

pub fn megabytes(bytes: usize) -> String {
    format!("{:.1} MB", bytes as f64 / 1e6)
}

/// One line of the account of time.
pub struct Row {
    pub name: String,
    pub seconds: f64,
    /// FLOP/s or bytes/s, whichever says more of this kind of work.
    pub rate: String,
}

/// Steps grouped by kind, with the rest of the wall time as its last row.
pub fn account(times: &[StepTime], wall: f64, data: f64) -> Vec<Row> {
    let mut rows: Vec<Row> = times
        .iter()
        .map(|t| {
            let rate = if t.is_product || t.op.starts_with("attention") {
                format!("{:.0} GFLOP/s", t.flops / t.seconds / 1e9)
            } else {
                format!("{:.1} GB/s", t.bytes / t.seconds / 1e9)
            };
            Row { name: format!("{} ({})", t.op, t.phase.name()), seconds: t.seconds, rate }
        })
        .collect();
    if data > 0.0 {
        rows.push(Row { name: "data".into(), seconds: data, rate: String::new() });
    }
    rows.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
    let counted: f64 = rows.iter().map(|r| r.seconds).sum();
    rows.push(Row { name: "everything else".into(), seconds: wall - counted, rate: String::new() });
    rows
}

const BAR: f64 = 30.0;

/// Rows with their share of the whole and a bar. Rows under half a percent are summed up.
pub fn print_account(rows: &[Row], wall: f64) {
    let small = |r: &&Row| r.seconds < 0.005 * wall && r.name != "everything else";
    let line = |name: &str, seconds: f64, rate: &str| {
        let share = seconds / wall;
        let bar = "█".repeat((share * BAR).round().max(0.0) as usize);
        println!("  {name:<28} {:>8.2} s {:>5.1}%  {rate:>12}  {bar}", seconds, 100.0 * share);
    };
    for row in rows.iter().filter(|r| !small(r)) {
        line(&row.name, row.seconds, &row.rate);
    }
    let rest: Vec<&Row> = rows.iter().filter(small).collect();
    if !rest.is_empty() {
        let name = format!("{} kinds under 0.5% each", rest.len());
        line(&name, rest.iter().map(|r| r.seconds).sum(), "");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_have_thousands_separators() {
        assert_eq!(count(0), "0");
        assert_eq!(count(999), "999");
        assert_eq!(count(86_567_656), "86,567,656");
    }
}
