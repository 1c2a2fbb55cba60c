//! Words that a stranger from PyTorch, JAX or MPI would need a glossary for, with what to write instead.

const TABLE: [(&str, &str); 28] = [
    ("product", "matmul"),
    ("products", "matmuls"),
    ("halves", "half precision"),
    ("exchange", "communication, all-reduce"),
    ("exchanged", "communicated, all-reduced"),
    ("exchanges", "communicates"),
    ("travel", "communicate, send"),
    ("travels", "communicates, sends"),
    ("travelled", "communicated, sent"),
    ("wire", "communication dtype"),
    ("judge", "evaluate"),
    ("judged", "evaluated"),
    ("held out", "validation"),
    ("drawn images", "synthetic images"),
    ("drawn set", "synthetic set"),
    ("drawn sets", "synthetic sets"),
    ("drawn shapes", "synthetic shapes"),
    ("leading part", "subset"),
    ("recognised", "recall"),
    ("images a second", "images/s"),
    ("time an epoch", "time per epoch"),
    ("batch a rank", "batch per rank"),
    ("image a rank", "image per rank"),
    ("images a rank", "images per rank"),
    ("thread a rank", "thread per rank"),
    ("threads a rank", "threads per rank"),
    ("ms a step", "ms per step"),
    ("says so", "a note, a warning, the action itself"),
];

/// A word of our own in a text.
pub struct Strange {
    /// Number of its line, from 1.
    pub number: usize,
    /// The line.
    pub line: String,
    /// The word, and what to write instead.
    pub words: String,
}

/// Words of our own in a text, outside of backticks and of comments.
pub fn strange(text: &str) -> Vec<Strange> {
    let mut found = vec![];
    for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.starts_with("<!-- ")) {
        let prose: String = line.split('`').step_by(2).collect::<Vec<_>>().join(" \u{1} ");
        let is_word = |c: char| c.is_alphanumeric() || c == '_' || c == '\u{1}';
        let words: Vec<String> =
            prose.split(|c| !is_word(c)).filter(|word| !word.is_empty()).map(str::to_lowercase).collect();
        for (phrase, better) in TABLE {
            let phrase_words: Vec<&str> = phrase.split(' ').collect();
            if words.windows(phrase_words.len()).any(|window| window == phrase_words) {
                let words = format!("{phrase}: write {better}");
                found.push(Strange { number: number + 1, line: line.to_string(), words });
            }
        }
    }
    found
}
