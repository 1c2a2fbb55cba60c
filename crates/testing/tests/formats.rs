//! `docs/formats.md` names every field of every type that a run or a study leaves, and no other. A comment before a table names the
//! type: `<!-- fields: FILE TYPE; also more names, or types whose fields are members too -->`.

use std::collections::BTreeSet;
use std::fs;
use testing::repository;

type Names = BTreeSet<String>;

/// Text between the braces after `head`, at any depth.
fn body<'a>(text: &'a str, head: &str) -> Option<&'a str> {
    let start = text.find(head)? + head.len();
    let open = start + text[start..].find('{')?;
    let mut depth = 0;
    for (at, c) in text[open..].char_indices() {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return Some(&text[open + 1..open + at]);
        }
    }
    None
}

/// The first text in quotes after `key`.
fn quoted_after<'a>(line: &'a str, key: &str) -> Option<&'a str> {
    line.split_once(key)?.1.split('"').nth(1)
}

fn kebab_case(name: &str) -> String {
    let mut kebab = String::new();
    for c in name.chars() {
        if c.is_uppercase() && !kebab.is_empty() {
            kebab.push('-');
        }
        kebab.extend(c.to_lowercase());
    }
    kebab
}

/// Members of a struct, or variants of an enum in kebab case, as serde writes them. A member that is skipped, or flattened into the others,
/// is none.
fn declared(source: &str, name: &str) -> Names {
    let (is_enum, text) = match body(source, &format!("struct {name} ")) {
        Some(text) => (false, text),
        None => (true, body(source, &format!("enum {name} ")).unwrap_or_else(|| panic!("no {name}"))),
    };
    let (mut names, mut attribute) = (Names::new(), String::new());
    for line in text.lines().filter(|line| line.starts_with("    ") && !line.starts_with("     ")) {
        let line = line.trim();
        if line.starts_with("#[serde") {
            attribute.push_str(line);
            continue;
        }
        if line.is_empty() || line.starts_with(['#', '/', '}', ')']) {
            continue;
        }
        let end = if is_enum { [',', '(', ' '].as_slice() } else { [':'].as_slice() };
        let word = line.trim_start_matches("pub ").split(end).next().unwrap_or_default();
        let member = if is_enum { kebab_case(word) } else { word.to_string() };
        let serde = std::mem::take(&mut attribute);
        if !serde.contains("flatten") && !serde.contains("(skip)") {
            names.insert(quoted_after(&serde, "rename = ").map_or(member, str::to_string));
        }
    }
    assert!(!names.is_empty(), "{name} has no members");
    names
}

/// Names of metrics, and of their values by layer.
fn metrics(source: &str) -> Names {
    let text = body(source, "metrics! ").expect("the list of metrics");
    let kinds = ["real(", "whole(", "measured(", "seconds(", "evaluated(", "layers: Some("];
    let texts = kinds.iter().flat_map(|kind| text.split(kind).skip(1));
    let names: Names = texts.filter_map(|rest| rest.split('"').nth(1)).map(str::to_string).collect();
    assert!(names.len() > 20, "{names:?}");
    names
}

/// Names of columns: the first text of each entry.
fn columns(source: &str, name: &str) -> Names {
    let start = source.find(&format!("const {name}:")).expect("the list of columns");
    let text = source[start..].split("\n];").next().unwrap_or_default();
    text.lines()
        .filter_map(|line| line.trim().strip_prefix("(\"")?.split('"').next())
        .map(str::to_string)
        .collect()
}

/// Settings whose resolved value is what was typed, or a constant.
fn plain_settings() -> Names {
    let file = repository().join("crates/config/src/settings/table.rs");
    let source = fs::read_to_string(file).unwrap();
    let (mut names, mut last) = (Names::new(), "");
    for line in source.lines().filter(|line| line.starts_with("        ") && !line.contains("///")) {
        if let Some((name, _)) =
            line.trim().split_once(": ").filter(|_| line.contains(" = ") && !line.starts_with("         "))
        {
            last = name;
        }
        if line.contains("; plain ") || line.trim_start().starts_with("plain ") {
            names.insert(last.to_string());
        }
    }
    assert!(names.len() > 5, "{names:?}");
    names
}

/// Names in backticks in the first column of the table that follows.
fn documented(text: &str) -> Names {
    let rows =
        text.lines().skip_while(|line| !line.starts_with('|')).take_while(|line| line.starts_with('|'));
    let first = rows.skip(2).filter_map(|row| row.split('|').nth(1));
    first.flat_map(|cell| cell.split('`').skip(1).step_by(2).map(str::to_string)).collect()
}

/// What a marker asks for.
fn expected(kind: &str, rest: &str) -> Names {
    let (place, also) = rest.split_once("; also ").unwrap_or((rest, ""));
    let (file, name) = place.split_once(' ').unwrap_or((place, ""));
    let source = fs::read_to_string(repository().join(file)).unwrap_or_else(|e| panic!("{file}: {e}"));
    let mut names = match kind {
        "metrics" => metrics(&source),
        "columns" => columns(&source, name),
        "kebab-fields" => declared(&source, name).iter().map(|name| name.replace('_', "-")).collect(),
        _ => declared(&source, name),
    };
    for more in also.split(' ').filter(|more| !more.is_empty()) {
        if more == "Plain" {
            // Members of the record like any other.
            names.remove("plain");
            names.extend(plain_settings());
        } else if more.starts_with(char::is_uppercase) {
            names.extend(declared(&source, more));
        } else {
            names.insert(more.to_string());
        }
    }
    names
}

#[test]
fn every_field_is_documented() {
    let text = fs::read_to_string(repository().join("docs/formats.md")).unwrap();
    let (mut wrong, mut seen) = (vec![], Names::new());
    for part in text.split("<!-- ").skip(1) {
        let (marker, rest) = part.split_once(" -->").expect("a comment ends");
        let (kind, place) = marker.split_once(": ").expect("a comment names a type");
        let (expected, found) = (expected(kind, place), documented(rest));
        let missing: Vec<_> = expected.difference(&found).collect();
        let strange: Vec<_> = found.difference(&expected).collect();
        if !missing.is_empty() || !strange.is_empty() {
            wrong.push(format!("{place}: not documented {missing:?}; documented, but not there {strange:?}"));
        }
        seen.extend(place.split([' ', ';']).map(str::to_string));
    }
    assert!(wrong.is_empty(), "docs/formats.md\n{}", wrong.join("\n"));
    // No type of a record is forgotten.
    let is_described_in_its_table = ["Epoch", "Score", "Lost", "Evaluation", "Outcome", "Ended"];
    // What readers need of config.json, which has its table.
    let is_view = |name: &&str| name.ends_with("View");
    for path in testing::files(&repository().join("crates/records/src"), "rs") {
        let source = fs::read_to_string(&path).unwrap();
        let types = source.split("Deserialize)]").skip(1).filter_map(|rest| {
            let line = rest.lines().find(|line| line.starts_with("pub "))?;
            line.split([' ', '<', '(']).nth(2)
        });
        for name in types.filter(|name| !is_described_in_its_table.contains(name) && !is_view(name)) {
            assert!(seen.contains(name), "docs/formats.md has no table of {name} ({})", path.display());
        }
    }
}

#[test]
fn declarations_are_read_as_serde_writes_them() {
    let source = "pub struct A {\n    /// Text: of it.\n    pub one: u64,\n    #[serde(default, rename = \"deux\")]\n    pub two: u64,\n    \
                  #[serde(flatten)]\n    pub rest: B,\n    #[serde(skip)]\n    three: u64,\n}\npub enum C {\n    OneTwo,\n    Three(u64),\n}\n";
    let names = |list: &[&str]| list.iter().map(|name| name.to_string()).collect::<Names>();
    assert_eq!(declared(source, "A"), names(&["one", "deux"]));
    assert_eq!(declared(source, "C"), names(&["one-two", "three"]));
    let table = "text\n| field | |\n|---|---|\n| `one`, `deux` | a `word` |\n\n| `other` | |";
    assert_eq!(documented(table), names(&["one", "deux"]));
}
