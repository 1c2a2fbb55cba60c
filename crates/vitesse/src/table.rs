//! Numbers and tables for people.

use crate::layout;
use config::Device;
use config::Resolved;
use graph::run::{KernelTime, StepTime};
use graph::{Ceilings, Cost};
use records::{Collective, PARTS, Parts};
use text::many;

pub use text::count::grouped as count;

/// Images a second; of few, their fractions too.
pub fn rate(images: f64) -> String {
    if images < 10.0 { format!("{images:.2}") } else { format!("{images:.0}") }
}

pub fn megabytes(bytes: usize) -> String {
    format!("{:.1} MB", bytes as f64 / 1e6)
}

/// What computes, and with what.
pub fn device(run: &Resolved) -> String {
    match run.device {
        Device::Cpu => many(run.threads, "thread"),
        Device::Cuda => format!("{} in {}", run.device, run.precision),
    }
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
            let arithmetic = t.is_matmul || t.op.starts_with("attention");
            let rate = match (arithmetic, t.bytes > 0.0) {
                // Waiting moves nothing, in whatever phase.
                (_, false) => return Row { name: t.op.clone(), seconds: t.seconds, rate: Rate::None },
                (true, _) => Rate::Flops(t.flops / t.seconds),
                (false, _) => Rate::Bytes(t.bytes / t.seconds),
            };
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

/// Kernels and matmuls by name: how often, how long together, at which rate, and what part of that time the ceilings would have
/// allowed.
pub fn print_kernels(times: &[KernelTime], ceilings: Option<Ceilings>) {
    let mut groups: Vec<(String, usize, f64, Cost)> = vec![];
    for time in times {
        let name = format!("{} · {}", time.op, time.what);
        let index = groups.iter().position(|g| g.0 == name).unwrap_or_else(|| {
            groups.push((name, 0, 0.0, Cost::default()));
            groups.len() - 1
        });
        let group = &mut groups[index];
        (group.1, group.2) = (group.1 + 1, group.2 + time.seconds);
        group.3 += Cost { flops: time.flops, bytes: time.bytes };
    }
    groups.sort_by(|a, b| b.2.total_cmp(&a.2));
    let total: f64 = groups.iter().map(|g| g.2).sum();
    println!("{}, {:.3} ms one by one:", many(times.len(), "action"), 1e3 * total);
    for (name, count, seconds, cost) in groups {
        let share = ceilings.map(|c| format!(" {:>4.0}% of the ceiling", 100.0 * c.share(cost, seconds)));
        println!(
            "  {:>8.3} ms {:>5.1}% {count:>4} × {:>8.1} µs {:>7.1} TFLOP/s {:>7.0} GB/s{}  {name}",
            1e3 * seconds,
            100.0 * seconds / total,
            1e6 * seconds / count as f64,
            cost.flops / seconds / 1e12,
            cost.bytes / seconds / 1e9,
            share.unwrap_or_default()
        );
    }
}

const BAR: usize = 30;
/// Columns of the account of time before its bars, of which its names have at least so many.
const ACCOUNT: usize = 72;
const NAME: usize = 28;
/// Columns beside the names where there is no room for bars.
const NARROW: usize = 33;

/// Rows with their share of the whole and a bar. Rows under half a percent are summed up.
pub fn print_account(rows: &[Row], wall: f64, ceilings: Option<Ceilings>) {
    let small = |r: &&Row| r.seconds < 0.005 * wall && r.name != "everything else";
    let longest = rows.iter().filter(|r| !small(r)).map(|r| r.name.chars().count()).max().unwrap_or(0);
    let wide = longest.max(NAME);
    let used = ACCOUNT + wide - NAME;
    let narrow = layout::narrower_than(used);
    // Of the longest names, those that no column of a narrow terminal holds take a line more.
    let room = layout::width().unwrap_or(used).saturating_sub(NARROW);
    let name_of_narrow = longest.min(room).max(NAME - 2);
    let line = |name: &str, seconds: f64, rate: Rate| {
        let share = seconds / wall;
        if narrow {
            let (rate, wide) = (rate.text(None), name_of_narrow);
            return println!("  {name:<wide$} {seconds:>7.2} s {:>5.1}% {rate:>12}", 100.0 * share);
        }
        let (rate, bar) = (rate.text(ceilings), layout::bar(share, used, BAR));
        println!("  {name:<wide$} {seconds:>8.2} s {:>5.1}%  {rate:>20}  {bar}", 100.0 * share);
    };
    for row in rows.iter().filter(|r| !small(r)) {
        line(&row.name, row.seconds, row.rate);
    }
    let rest: Vec<&Row> = rows.iter().filter(small).collect();
    if !rest.is_empty() {
        let name = format!("{} under 0.5% each", many(rest.len(), "kind"));
        line(&name, rest.iter().map(|r| r.seconds).sum(), Rate::None);
    }
}

/// The parts of a step on one line, those under half a percent left out.
pub fn percentages(parts: &Parts) -> String {
    let share = |seconds: f64| 100.0 * seconds / parts.wall();
    let shares = PARTS.iter().map(|part| (part, share((part.of)(parts))));
    let words = shares.filter(|(_, share)| *share >= 0.5).map(|(part, share)| match part.glyph {
        Some(_) => format!("{} {share:.0}%", part.name),
        None => format!("({} {share:.0}%)", part.name),
    });
    words.collect::<Vec<_>>().join(" · ")
}

/// Ranks that a table lists one by one; of more, the slowest, the fastest and their mean.
const LISTED: usize = 8;

/// Where the time of each rank went, as numbers and as a bar.
pub fn print_ranks(ranks: &[Parts]) {
    let wall = ranks.iter().map(Parts::wall).fold(0.0, f64::max);
    // Without a bar, and without tenths, where there is no room for either.
    let used = 12 + 10 * PARTS.len();
    let narrow = layout::narrower_than(used);
    let wide = |short: &str| if narrow { short.len().max(4) } else { 9 };
    println!(
        "  {:<8} {}",
        "rank",
        PARTS.map(|part| format!("{:>1$}", part.short, wide(part.short))).join(" ")
    );
    let line = |name: &str, parts: &Parts| {
        let digits = usize::from(!narrow);
        let cells = PARTS
            .map(|part| format!("{:>2$.1$}%", 100.0 * (part.of)(parts) / wall, digits, wide(part.short) - 1));
        println!("  {name:<8} {}  {}", cells.join(" "), bar(parts, wall, layout::scale(used, BAR)));
    };
    let mut listed: Vec<usize> = (0..ranks.len()).collect();
    if ranks.len() > LISTED {
        let own = |rank: &usize| ranks[*rank].compute + ranks[*rank].data;
        listed.sort_by(|a, b| own(a).total_cmp(&own(b)));
        listed = vec![listed[0], listed[listed.len() - 1]];
    }
    for rank in listed {
        line(&rank.to_string(), &ranks[rank]);
    }
    if ranks.len() > 1 {
        line("mean", &Parts::mean(ranks));
    }
    if layout::scale(used, BAR) > 0 {
        println!("  █ compute  ▓ optimizer  ▒ comm  ░ wait for ranks  · data and idle");
    }
}

/// A bar whose parts are told apart without colours.
fn bar(parts: &Parts, wall: f64, scale: usize) -> String {
    let Parts { compute, communication, wait, data, optimizer, idle, .. } = *parts;
    let mut bar = String::new();
    let mut so_far = 0.0;
    for (part, seconds) in
        [("█", compute), ("▓", optimizer), ("▒", communication), ("░", wait), ("·", data + idle)]
    {
        so_far += seconds;
        let end = (so_far / wall * scale as f64).round() as usize;
        let drawn = bar.chars().count();
        bar.push_str(&part.repeat(end.saturating_sub(drawn)));
    }
    bar
}

/// Collectives of a step, of each kind what is exposed, and how fast they are.
pub fn print_collectives(collectives: &[Collective], ranks: usize, steps: u64) {
    let ran: Vec<&Collective> = collectives.iter().filter(|e| e.times > 0).collect();
    if ran.is_empty() || steps == 0 {
        return;
    }
    let each = 1.0 / steps as f64;
    let sum = |of: &[&Collective], f: &dyn Fn(&Collective) -> f64| of.iter().map(|e| f(e)).sum::<f64>();
    let bytes = |of: &[&Collective]| (each * sum(of, &|e| e.bytes as f64 * e.times as f64)) as usize;
    let seconds = sum(&ran, &|e| e.seconds);
    let rate = if seconds > 0.0 { sum(&ran, &|e| e.sent(ranks)) / seconds } else { 0.0 };
    println!(
        "communication: {} in {} per step, {:.1} ms, {:.2} GB/s per rank; slowest:",
        megabytes(bytes(&ran)),
        many((each * sum(&ran, &|e| e.times as f64)).round() as usize, "message"),
        1e3 * each * seconds,
        rate / 1e9
    );
    print_slowest(&ran, ranks);
    let mut kinds: Vec<&str> = ran.iter().map(|e| e.kind.as_str()).collect();
    kinds.sort_unstable();
    kinds.dedup();
    for kind in kinds.into_iter().filter(|kind| !kind.is_empty()) {
        let of: Vec<&Collective> = ran.iter().copied().filter(|e| e.kind == kind).collect();
        let (all, exposed) = (sum(&of, &|e| e.seconds), sum(&of, &|e| e.exposed));
        println!(
            "  {:>9} {:>8.2} ms, {:.2} ms of it exposed: {}",
            megabytes(bytes(&of)),
            1e3 * each * all,
            1e3 * each * exposed,
            kind.replace('_', "-")
        );
    }
}

fn print_slowest(collectives: &[&Collective], ranks: usize) {
    let mut sorted = collectives.to_vec();
    sorted.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
    for e in sorted.into_iter().take(3) {
        println!(
            "  {:>9} {:>8.2} ms {:>7.2} GB/s  {}",
            megabytes(e.bytes),
            1e3 * e.seconds / e.times as f64,
            e.bandwidth(ranks) / 1e9,
            e.layer
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_has_every_part_once() {
        let parts = Parts { compute: 6.0, communication: 1.0, wait: 2.0, optimizer: 1.0, ..Parts::default() };
        assert_eq!(bar(&parts, 10.0, BAR), format!("{}{}{}{}", "█".repeat(18), "▓▓▓", "▒▒▒", "░░░░░░"));
        assert_eq!(
            percentages(&parts),
            "compute 60% · communication 10% · wait for ranks 20% · optimizer 10%"
        );
    }
}
