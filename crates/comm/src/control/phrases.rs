//! Ranks, calls and sizes in words.

use crate::activity::CallInfo;

/// `rank 2`, `ranks 0, 1 and 3`.
pub(crate) fn ranks(ranks: &[usize]) -> String {
    let noun = if ranks.len() == 1 { "rank" } else { "ranks" };
    // The ranks of a large run would hide the rest of the line.
    const SHOWN: usize = 8;
    if ranks.len() <= SHOWN {
        return format!("{noun} {}", list(ranks));
    }
    let shown: Vec<String> = ranks[..SHOWN - 1].iter().map(usize::to_string).collect();
    format!("{noun} {} and {} others", shown.join(", "), ranks.len() + 1 - SHOWN)
}

/// Joins items by commas, with `and` before the last.
pub(crate) fn list(items: impl IntoIterator<Item = impl ToString>) -> String {
    let mut texts: Vec<String> = items.into_iter().map(|item| item.to_string()).collect();
    texts.dedup();
    match texts.pop() {
        Some(last) if texts.is_empty() => last,
        Some(last) => format!("{} and {last}", texts.join(", ")),
        None => String::new(),
    }
}

/// `all_reduce #137 of blocks.7 (1.8 MB)`.
pub(crate) fn call(at: &CallInfo) -> String {
    let size = match at.bytes {
        0 => String::new(),
        bytes => format!(" ({})", size(bytes)),
    };
    format!("{} #{} of {}{size}", at.collective, at.sequence, at.name)
}

fn size(bytes: u64) -> String {
    const UNITS: [&str; 4] = ["kB", "MB", "GB", "TB"];
    if bytes < 1000 {
        return if bytes == 1 { "1 byte".to_string() } else { format!("{bytes} bytes") };
    }
    let mut value = bytes as f64 / 1000.0;
    let mut unit = 0;
    while value >= 999.5 && unit + 1 < UNITS.len() {
        value /= 1000.0;
        unit += 1;
    }
    match value < 10.0 {
        true => format!("{value:.1} {}", UNITS[unit]),
        false => format!("{value:.0} {}", UNITS[unit]),
    }
}
