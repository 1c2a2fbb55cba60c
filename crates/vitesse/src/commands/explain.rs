//! `vitesse config explain`.

use crate::args::ExplainArgs;
use crate::layout;
use config::deepspeed::Verdict;
use config::sets;
use config::{Explanation, KeyRow, Note, Origin, Raw, settings};
use serde_json::{Value, json};
use text::many;

pub fn explain(args: ExplainArgs) -> anyhow::Result<()> {
    let flags = args.train.settings.0;
    let config = args.file.or(flags.config.clone());
    let file = config.as_ref().map_or("no file".to_string(), |file| file.display().to_string());
    let raw = Raw { config, ..flags }.with_files()?;
    let facts = match raw.source()?.published() {
        Some(facts) => facts,
        None => sets::Opened::of(&raw)?.facts(&raw)?,
    };
    let explained = raw.explain(&facts, raw.ranks.unwrap_or(1));
    if raw.json {
        println!("{}", to_json(&file, &explained));
    } else {
        print!("{}", to_text(&file, raw.deepspeed.is_some(), &explained));
    }
    match explained.refusal {
        Some(why) => anyhow::bail!(why),
        None => Ok(()),
    }
}

/// Lines longer than this are broken, whatever the terminal.
const WIDTH: usize = 116;
/// Columns that are too few for the last column of a table beside the others.
const NARROW: usize = 30;

fn to_text(file: &str, has_keys: bool, explained: &Explanation) -> String {
    let mut out = format!("{file} on {}\n\n", many(explained.world, "rank"));
    if has_keys {
        out += &keys(explained);
    }
    if explained.refusal.is_some() {
        out += "This run would be refused.\n";
        return out;
    }
    for heading in headings() {
        let of_heading = |note: &&Note| heading_of(note.name) == heading;
        let rows: Vec<[String; 3]> =
            explained.settings.iter().chain(&explained.rest).filter(of_heading).map(setting_row).collect();
        out += &table([heading.to_string(), "value".to_string(), "from".to_string()], &rows);
        out.push('\n');
    }
    out
}

fn keys(explained: &Explanation) -> String {
    if explained.keys.is_empty() {
        return "  it says nothing\n\n".to_string();
    }
    let rows: Vec<[String; 3]> = explained.keys.iter().map(key_row).collect();
    let table = table(["  key", "in the file", "what becomes of it"].map(String::from), &rows);
    format!("{table}\n  ✓ honoured   · changes nothing here   → overridden by a flag   ✗ refused\n\n")
}

/// Headings of settings, in the order of the table.
fn headings() -> Vec<&'static str> {
    let mut headings: Vec<&str> = settings::all().iter().map(|setting| setting.heading).collect();
    headings.dedup();
    headings
}

/// Heading of a setting; what follows from several is of the run.
fn heading_of(name: &str) -> &'static str {
    settings::find(name).map_or("Run", |setting| setting.heading)
}

fn key_row(row: &KeyRow) -> [String; 3] {
    let (mark, text) = match &row.verdict {
        Verdict::Honoured(text) => ("✓", text.clone()),
        Verdict::Accepted(text) => ("·", text.clone()),
        Verdict::Overridden(flag) => ("→", flag.clone()),
        Verdict::Refused(why) => ("✗", format!("refused: {why}")),
    };
    [format!("{mark} {}", row.key), row.text.clone(), text]
}

fn setting_row(note: &Note) -> [String; 3] {
    let from = match &note.origin {
        Origin::Flag => format!("--{}", note.name),
        Origin::Settings(place) => place.clone(),
        Origin::File(key) => key.clone(),
        Origin::Derived(arithmetic) => format!("= {arithmetic}"),
        Origin::Default(why) if why.is_empty() => "default".to_string(),
        Origin::Default(why) => why.clone(),
    };
    let value = if note.value.is_empty() { "–".to_string() } else { note.value.clone() };
    [format!("  {}", note.name), value, from]
}

/// Three columns: the first two as wide as they need to be, within limits, the last broken to fit.
fn table(head: [String; 3], rows: &[[String; 3]]) -> String {
    let widest = |i: usize, limit: usize| {
        let cells = std::iter::once(&head).chain(rows).map(|row| row[i].chars().count());
        cells.filter(|width| *width <= limit).max().unwrap_or(limit)
    };
    let width = layout::width().map_or(WIDTH, |width| width.min(WIDTH));
    let (first, second) = (widest(0, 50), widest(1, 24));
    if width < first + 2 + second + 2 + NARROW {
        return below_each_other(&head, rows, width);
    }
    let mut out = String::new();
    for row in std::iter::once(&head).chain(rows) {
        let indent = first + 2 + second + 2;
        // A value wider than the terminal is broken, too.
        let value = wrap(&row[1], width - first - 2).join(&format!("\n{:1$}", "", first + 2));
        let mut line = format!("{:<first$}  {value:<second$}  ", row[0]);
        // A cell too wide for its column moves what follows to the next line.
        if line.chars().count() > indent && !row[2].is_empty() {
            out += line.trim_end();
            line = format!("\n{:indent$}", "");
        }
        let text = wrap(&row[2], width - indent).join(&format!("\n{:indent$}", ""));
        out += format!("{line}{text}").trim_end();
        out.push('\n');
    }
    out
}

/// The same where three columns have no room: the last in parentheses.
fn below_each_other(head: &[String; 3], rows: &[[String; 3]], width: usize) -> String {
    let mut out = String::new();
    for [name, value, rest] in rows {
        let rest = if rest.is_empty() { String::new() } else { format!(" ({rest})") };
        out += &format!("{}\n", layout::wrapped(&format!("{name}  {value}{rest}"), Some(width)));
    }
    format!("{}\n{out}", head[0])
}

/// Breaks a text between words.
fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let used = lines.last().map_or(0, |line| line.chars().count());
        if used > 0 && used + 1 + word.chars().count() > width {
            lines.push(String::new());
        }
        if let Some(line) = lines.last_mut() {
            if !line.is_empty() {
                line.push(' ');
            }
            line.push_str(word);
        }
    }
    lines
}

fn to_json(file: &str, explained: &Explanation) -> Value {
    let verdict = |verdict: &Verdict| match verdict {
        Verdict::Honoured(text) => ("honoured", text.clone()),
        Verdict::Accepted(text) => ("accepted", text.clone()),
        Verdict::Overridden(text) => ("overridden", text.clone()),
        Verdict::Refused(text) => ("refused", text.clone()),
    };
    let keys = explained.keys.iter().map(|row| {
        let (verdict, text) = verdict(&row.verdict);
        json!({"key": row.key, "value": row.text, "verdict": verdict, "text": text})
    });
    let settings = explained.settings.iter().chain(&explained.rest).map(|note| {
        let (from, detail) = match &note.origin {
            Origin::Flag => ("flag", String::new()),
            Origin::Settings(place) => ("settings file", place.clone()),
            Origin::File(key) => ("file", key.clone()),
            Origin::Derived(arithmetic) => ("derived", arithmetic.clone()),
            Origin::Default(why) => ("default", why.clone()),
        };
        json!({"setting": note.name, "value": note.value, "from": from, "detail": detail})
    });
    json!({
        "file": file,
        "ranks": explained.world,
        "keys": keys.collect::<Vec<_>>(),
        "settings": settings.collect::<Vec<_>>(),
        "refusal": explained.refusal,
    })
}
