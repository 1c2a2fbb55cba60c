//! Text that fits the terminal: no line that is meant for people is wider than it.

use std::io::IsTerminal;

/// Columns of the terminal, or of `COLUMNS`; none where text goes elsewhere, which has no end of a line to keep to.
pub fn width() -> Option<usize> {
    let told = std::env::var("COLUMNS").ok().and_then(|columns| columns.parse().ok()).filter(|n| *n > 0);
    told.or_else(|| std::io::stdout().is_terminal().then(terminal).flatten())
}

/// Columns of the terminal that standard output is.
fn terminal() -> Option<usize> {
    // SAFETY: asks for the size of a terminal into a place of the right type.
    let size = unsafe {
        let mut size: libc::winsize = std::mem::zeroed();
        (libc::ioctl(libc::STDOUT_FILENO, libc::TIOCGWINSZ, &mut size) == 0).then_some(size)
    };
    size.map(|size| usize::from(size.ws_col)).filter(|columns| *columns > 0)
}

/// True where fewer columns are there than `needed`.
pub fn narrower_than(needed: usize) -> bool {
    width().is_some_and(|width| width < needed)
}

/// Length of a bar whose scale has `most` columns, in what `used` columns leave of a line; a scale of fewer than 8 shows nothing.
pub fn scale(used: usize, most: usize) -> usize {
    let room = width().map_or(most, |width| width.saturating_sub(used).min(most));
    if room < 8 { 0 } else { room }
}

/// A bar for a share from 0 to 1, after `used` columns of its line.
pub fn bar(share: f64, used: usize, most: usize) -> String {
    "█".repeat((share * scale(used, most) as f64).round().max(0.0) as usize)
}

/// A line broken between words, or before a `·`, so that each part fits; what follows the first is indented further. A line of JSON stays
/// whole.
pub fn wrapped(line: &str, width: Option<usize>) -> String {
    let Some(width) = width else { return line.to_string() };
    let wide = |text: &str| text.chars().count();
    if wide(line) <= width || line.starts_with(['{', '[']) {
        return line.to_string();
    }
    let indent = line.chars().take_while(|c| *c == ' ').count();
    let hang = " ".repeat((indent + 4).min(width / 3));
    let mut lines = vec![" ".repeat(indent)];
    let mut empty = true;
    for word in pieces(line.trim_start(), width - hang.len()) {
        let last = lines.len() - 1;
        let space = usize::from(!empty);
        if !empty && wide(&lines[last]) + space + wide(word.trim_end_matches(" ·")) > width {
            lines.push(hang.clone());
            empty = true;
        }
        let last = lines.len() - 1;
        if !empty {
            lines[last].push(' ');
        }
        lines[last].push_str(&word);
        empty = false;
    }
    let text: Vec<&str> = lines.iter().map(|line| line.trim_end().trim_end_matches(" ·")).collect();
    text.join("\n")
}

/// What a line is broken between: the parts that `·` divides, or where one is too wide, its words.
fn pieces(line: &str, width: usize) -> Vec<String> {
    let mut pieces = vec![];
    let parts: Vec<&str> = line.split(" · ").collect();
    for (number, part) in parts.iter().enumerate() {
        let dot = if number + 1 < parts.len() { " ·" } else { "" };
        if parts.len() > 1 && part.chars().count() + 2 <= width {
            pieces.push(format!("{part}{dot}"));
            continue;
        }
        pieces.extend(part.split(' ').map(String::from));
        if let Some(last) = pieces.last_mut() {
            last.push_str(dot);
        }
    }
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_broken_between_words() {
        let line = "  rank 3 is slow: an image takes it 1.4 times as long; the others wait";
        let text = wrapped(line, Some(30));
        assert!(text.lines().all(|line| line.chars().count() <= 30), "{text}");
        assert_eq!(text.lines().count(), 3, "{text}");
        assert_eq!(text.split_whitespace().collect::<Vec<_>>(), line.split_whitespace().collect::<Vec<_>>());
        assert!(text.lines().skip(1).all(|line| line.starts_with("      ")), "{text}");
        assert_eq!(wrapped(line, None), line);
        let dots = "epoch 17 · step 17/20 · loss 1.7001 · 302 images/s";
        assert_eq!(wrapped(dots, Some(38)), "epoch 17 · step 17/20 · loss 1.7001\n    302 images/s");
        assert_eq!(wrapped("short", Some(30)), "short");
        let json = format!("{{\"a\": \"{}\"}}", "b ".repeat(40));
        assert_eq!(wrapped(&json, Some(30)), json);
        assert_eq!(wrapped(&"x".repeat(40), Some(30)), "x".repeat(40), "one word stays whole");
    }
}
