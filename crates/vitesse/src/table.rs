//! Numbers and tables for people.

use cpu::StepTime;
use cpu::ceilings::Ceilings;

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
    pub rate: Rate,
}

#[derive(Clone, Copy)]
pub enum Rate {
    Flops(f64),
    Bytes(f64),
    None,
}

impl Rate {
    /// The rate, and how near it comes to the machine's ceiling where that was measured.
    fn text(self, ceilings: Option<Ceilings>) -> String {
        let (text, share) = match self {
            Rate::Flops(rate) => (format!("{:.0} GFLOP/s", rate / 1e9), ceilings.map(|c| rate / c.flops)),
            Rate::Bytes(rate) => (format!("{:.1} GB/s", rate / 1e9), ceilings.map(|c| rate / c.bytes)),
            Rate::None => return String::new(),
        };
        share.map_or(text.clone(), |share| format!("{text} = {:>3.0}%", 100.0 * share))
    }
}

/// Steps grouped by kind, with the rest of the wall time as its last row.
pub fn account(times: &[StepTime], wall: f64, data: f64) -> Vec<Row> {
    let mut rows: Vec<Row> = times
        .iter()
        .map(|t| {
            let arithmetic = t.is_product || t.op.starts_with("attention");
            let rate =
                if arithmetic { Rate::Flops(t.flops / t.seconds) } else { Rate::Bytes(t.bytes / t.seconds) };
            Row { name: format!("{} ({})", t.op, t.phase.name()), seconds: t.seconds, rate }
        })
        .collect();
    if data > 0.0 {
        rows.push(Row { name: "data".into(), seconds: data, rate: Rate::None });
    }
    rows.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
    let counted: f64 = rows.iter().map(|r| r.seconds).sum();
    rows.push(Row { name: "everything else".into(), seconds: wall - counted, rate: Rate::None });
    rows
}

const BAR: f64 = 30.0;

/// Rows with their share of the whole and a bar. Rows under half a percent are summed up.
pub fn print_account(rows: &[Row], wall: f64, ceilings: Option<Ceilings>) {
    let small = |r: &&Row| r.seconds < 0.005 * wall && r.name != "everything else";
    let line = |name: &str, seconds: f64, rate: Rate| {
        let (share, rate) = (seconds / wall, rate.text(ceilings));
        let bar = "█".repeat((share * BAR).round().max(0.0) as usize);
        println!("  {name:<28} {seconds:>8.2} s {:>5.1}%  {rate:>20}  {bar}", 100.0 * share);
    };
    for row in rows.iter().filter(|r| !small(r)) {
        line(&row.name, row.seconds, row.rate);
    }
    let rest: Vec<&Row> = rows.iter().filter(small).collect();
    if !rest.is_empty() {
        let name = format!("{} kinds under 0.5% each", rest.len());
        line(&name, rest.iter().map(|r| r.seconds).sum(), Rate::None);
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
