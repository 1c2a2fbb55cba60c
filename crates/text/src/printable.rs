//! Text from outside (names of files and classes, lines of other programs, errors with either in them) before a terminal gets it.
//!
//! A terminal obeys what it is shown: escape sequences clear the screen, set its title or write into the clipboard, and marks for
//! right-to-left text let a name read as another one. So such characters are shown as `\u001b` and the like, which inside a string of JSON
//! still stands for the character itself.

use std::fmt::Write;

/// Returns whether a terminal or a reader would obey a character instead of showing it.
pub fn is_unprintable(c: char) -> bool {
    let directs =
        matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    c.is_control() || directs || matches!(c, '\u{2028}' | '\u{2029}' | '\u{feff}')
}

/// Text of any number of lines, as a terminal may show it.
pub fn text(text: &str) -> String {
    shown(text, |c| matches!(c, '\n' | '\t'))
}

/// A piece of text that is to stay on its line: a name, a path, an error.
pub fn line(text: &str) -> String {
    shown(text, |_| false)
}

/// The beginning of a text that may be of any length.
pub fn shortened(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { char::REPLACEMENT_CHARACTER } else { c }).take(200).collect()
}

fn shown(text: &str, kept: impl Fn(char) -> bool) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            c if !is_unprintable(c) || kept(c) => out.push(c),
            // All of them have at most four digits.
            c => drop(write!(out, "\\u{:04x}", u32::from(c))),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_left_for_a_terminal_to_obey() {
        let hostile = "a\u{1b}]0;owned\u{7}\u{9b}31m\r\n\tb\u{7f}\u{202e}txt.exe\u{2069}";
        assert_eq!(
            text(hostile),
            "a\\u001b]0;owned\\u0007\\u009b31m\\u000d\n\tb\\u007f\\u202etxt.exe\\u2069"
        );
        assert_eq!(line("a\nvitesse: done\t"), "a\\u000avitesse: done\\u0009");
        for plain in ["Käse", "猫", "👩‍🔬", "a b", "1.0 → 2"] {
            assert_eq!(line(plain), plain);
        }
        let every = (0..=0x10_ffff).filter_map(char::from_u32).collect::<String>();
        assert!(!line(&every).chars().any(is_unprintable));
    }

    /// What is printed as JSON says the same afterwards.
    #[test]
    fn json_keeps_its_meaning() {
        let every = (0..=0x10_ffff).filter_map(char::from_u32).collect::<String>();
        let json = serde_json::json!({ every.clone(): [every] });
        assert_eq!(serde_json::from_str::<serde_json::Value>(&text(&json.to_string())).unwrap(), json);
    }
}
