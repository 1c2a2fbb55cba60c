//! Names, paths and errors come from outside. Here they become harmless in each of the languages a report is written in.

use text::printable::is_unprintable;

/// For text and attribute values of HTML and SVG. Characters that XML forbids, or that a reader
/// would not see as they are, become U+FFFD.
pub fn markup(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' | '<' | '>' => out.push_str(entity(c)),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            '\n' => out.push_str("&#10;"),
            '\t' => out.push_str("&#9;"),
            c if is_unprintable(c) || c == '\u{fffe}' || c == '\u{ffff}' => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}

/// The entity of one of the characters that markup begins or ends with.
fn entity(c: char) -> &'static str {
    match c {
        '<' => "&lt;",
        '>' => "&gt;",
        _ => "&amp;",
    }
}

/// JSON for a script element: no `<` may end the element, and no line separator may break a reader.
pub fn json_in_script(json: &str) -> String {
    json.replace('<', "\\u003c")
        .replace('>', "\\u003e")
        .replace('&', "\\u0026")
        .replace('\u{2028}', "\\u2028")
        .replace('\u{2029}', "\\u2029")
}

/// A cell of CSV, on one line. A text that a spreadsheet would take for a formula gets an apostrophe before it.
pub fn csv(text: &str) -> String {
    let text: String = text.chars().map(|c| if is_unprintable(c) { ' ' } else { c }).collect();
    let formula = text.trim_start().starts_with(['=', '+', '-', '@']);
    let text = if formula { format!("'{text}") } else { text };
    if text.contains([',', '"', ';']) { format!("\"{}\"", text.replace('"', "\"\"")) } else { text }
}

/// A cell of a Markdown table, or a piece of a paragraph: one line, nothing of it markup.
pub fn markdown(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' | '<' | '>' => out.push_str(entity(c)),
            '\\' | '`' | '*' | '_' | '[' | ']' | '|' | '#' | '~' | '!' => {
                out.push('\\');
                out.push(c);
            }
            c if is_unprintable(c) => out.push(' '),
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_from_outside_is_markup() {
        let hostile = "</script><img src=x onerror=\"alert('1')\">&\u{0}\u{2028}";
        assert_eq!(
            markup(hostile),
            "&lt;/script&gt;&lt;img src=x onerror=&quot;alert(&#39;1&#39;)&quot;&gt;&amp;\u{fffd}\u{fffd}"
        );
        let json = json_in_script(&serde_json::to_string(hostile).unwrap());
        assert!(!json.contains(['<', '>', '&', '\u{2028}']), "{json}");
        assert_eq!(serde_json::from_str::<String>(&json).unwrap(), hostile);
        assert_eq!(markdown("a|b\n<i>`x`"), "a\\|b &lt;i&gt;\\`x\\`");
    }

    #[test]
    fn no_cell_is_a_formula() {
        for text in ["=1+1", "+1", "-1+cmd|' /C calc'!A0", "@SUM(A1)", "\t=1", "\r=1"] {
            assert!(csv(text).trim_start_matches('"').starts_with('\''), "{text:?}");
        }
        assert_eq!(csv("a,b"), "\"a,b\"");
        assert_eq!(csv("say \"hi\""), "\"say \"\"hi\"\"\"");
        assert_eq!(csv("plain"), "plain");
    }
}
