//! How wide text is in the font that reports bring along, and where to break it.

/// Units of the font in an em.
const EM: f64 = 2816.0;

/// Of the characters from space to tilde, in the regular weight.
const ADVANCE: [u16; 95] = [
    792, 784, 1136, 1776, 1796, 2288, 1800, 624, 1020, 1020, 1408, 1856, 788, 1296, 776, 1004, 1760, 1308,
    1704, 1792, 1808, 1712, 1756, 1608, 1736, 1756, 776, 788, 1856, 1856, 1856, 1428, 2636, 1904, 1832, 2048,
    2024, 1684, 1652, 2092, 2084, 744, 1528, 1836, 1584, 2504, 2120, 2144, 1788, 2144, 1800, 1796, 1808,
    2088, 1904, 2672, 1808, 1872, 1760, 1020, 1004, 1020, 1320, 1272, 1400, 1588, 1748, 1572, 1748, 1640,
    1016, 1716, 1664, 668, 668, 1532, 668, 2448, 1648, 1680, 1716, 1716, 1048, 1472, 1024, 1636, 1568, 2288,
    1520, 1568, 1524, 1020, 920, 1020, 1856,
];

/// The bold weight is that much wider, at most.
const BOLD: f64 = 1.06;

/// Pixels that text takes at a size. What the font lacks is counted as a full square, which other fonts keep to.
pub fn width(text: &str, size: f64, bold: bool) -> f64 {
    let units: f64 = text.chars().map(advance).sum();
    units / EM * size * if bold { BOLD } else { 1.0 }
}

fn advance(c: char) -> f64 {
    match c {
        ' '..='~' => f64::from(ADVANCE[c as usize - 0x20]),
        '·' | '’' | '‘' => 776.0,
        '–' | '•' | '†' => 1500.0,
        '\u{a0}'..='\u{17f}' => 1900.0,
        _ => EM,
    }
}

/// Text that fits, with an ellipsis where it was cut.
pub fn fit(text: &str, size: f64, bold: bool, room: f64) -> String {
    if width(text, size, bold) <= room {
        return text.to_string();
    }
    let mut kept: Vec<char> = text.chars().collect();
    while !kept.is_empty() {
        kept.pop();
        let shortened = kept.iter().collect::<String>().trim_end().to_string() + "…";
        if width(&shortened, size, bold) <= room {
            return shortened;
        }
    }
    String::new()
}

/// Lines of words that fit.
pub fn wrap(text: &str, size: f64, bold: bool, room: f64) -> Vec<String> {
    let mut lines: Vec<String> = vec![];
    for word in text.split_whitespace() {
        let word = fit(word, size, bold, room);
        match lines.last_mut() {
            Some(line) if width(&format!("{line} {word}"), size, bold) <= room => {
                line.push(' ');
                line.push_str(&word);
            }
            _ => lines.push(word),
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_cut_and_broken_where_it_must() {
        assert_eq!(fit("ranks", 12.0, false, 100.0), "ranks");
        let cut = fit("a very long name of a series", 12.0, false, 80.0);
        assert!(cut.ends_with('…') && width(&cut, 12.0, false) <= 80.0, "{cut}");
        assert_eq!(fit("wide", 12.0, false, 3.0), "");
        let lines = wrap("one two three four five", 12.0, false, 60.0);
        assert!(lines.len() > 1 && lines.iter().all(|line| width(line, 12.0, false) <= 60.0));
        assert_eq!(lines.join(" "), "one two three four five");
    }
}
