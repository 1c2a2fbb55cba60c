//! Counts with their units.

/// "1 thread", "2 threads", "1,000 images": a count with its noun, in the plural where there is not one.
pub fn many(count: usize, noun: &str) -> String {
    format!("{} {}", grouped(count), of(count, noun))
}

/// The noun that goes with a count.
pub fn of(count: usize, noun: &str) -> String {
    if count == 1 { noun.to_string() } else { plural(noun) }
}

/// The plural of a noun, or of the last word of several: step → steps, class → classes, entry → entries.
fn plural(noun: &str) -> String {
    let ends = |ends: &[&str]| ends.iter().any(|end| noun.ends_with(end));
    match noun.strip_suffix('y') {
        Some(stem) if !stem.ends_with(['a', 'e', 'o', 'u']) => format!("{stem}ies"),
        _ if noun.ends_with("epoch") => format!("{noun}s"),
        _ if ends(&["s", "x", "ch", "sh"]) => format!("{noun}es"),
        _ => format!("{noun}s"),
    }
}

/// 1234567 → "1,234,567".
pub fn grouped(count: usize) -> String {
    let digits = count.to_string();
    let mut out = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_is_no_plural() {
        assert_eq!(many(1, "thread"), "1 thread");
        assert_eq!(many(0, "class"), "0 classes");
        assert_eq!(many(1000, "training image"), "1,000 training images");
        assert_eq!(
            (of(2, "entry"), of(2, "day"), of(3, "batch")),
            ("entries".into(), "days".into(), "batches".into())
        );
    }

    #[test]
    fn counts_have_thousands_separators() {
        assert_eq!(
            (grouped(0), grouped(999), grouped(86_567_656)),
            ("0".into(), "999".into(), "86,567,656".into())
        );
    }
}
