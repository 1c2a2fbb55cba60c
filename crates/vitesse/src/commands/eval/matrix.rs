//! The confusion matrix as a file: CSV, or a picture.

use crate::class_names::exact_name;
use anyhow::Context;
use std::fmt::Write;
use std::path::Path;
use study::report::confusion::Matrix;

/// Endings of the files that it is written to.
pub const ENDINGS: [&str; 3] = ["csv", "png", "svg"];

/// Writes it in the form that the file's name ends in. `note`: what was evaluated, for a picture.
pub fn write(path: &Path, rows: &[Vec<u64>], names: &[String], note: &str) -> anyhow::Result<()> {
    let names: Vec<String> = (0..rows.len()).map(|class| exact_name(names, class)).collect();
    let picture = Matrix { rows, names: &names, note };
    let is = |ending: &str| path.extension().is_some_and(|found| found.eq_ignore_ascii_case(ending));
    let bytes = match (is("png"), is("svg")) {
        (true, _) => picture.png()?,
        (_, true) => picture.svg().into_bytes(),
        _ => csv(rows, &names)?.into_bytes(),
    };
    std::fs::write(path, bytes).with_context(|| path.display().to_string())
}

fn csv(rows: &[Vec<u64>], names: &[String]) -> anyhow::Result<String> {
    let quoted = |name: &str| format!("\"{}\"", name.replace('"', "\"\""));
    let mut text = String::from("class");
    for name in names {
        write!(text, ",{}", quoted(name))?;
    }
    for (name, row) in names.iter().zip(rows) {
        write!(text, "\n{}", quoted(name))?;
        row.iter().try_for_each(|count| write!(text, ",{count}"))?;
    }
    text.push('\n');
    Ok(text)
}
