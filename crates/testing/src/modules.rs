//! The layout of a crate: whether its modules depend on each other in one direction.
//!
//! A module is a file or folder directly under `src`, with all below it. It depends on those that it names by `crate::` or
//! `super::`, and on those whose names `lib.rs` re-exports. What is for tests alone doesn't count.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Source files of a crate with their text, without tests.
pub struct Sources(pub Vec<(PathBuf, String)>);

/// Modules, and those that each depends on.
type Uses = BTreeMap<String, BTreeSet<String>>;

impl Sources {
    /// Reads the sources of the crate in this folder.
    pub fn read(folder: &Path) -> Sources {
        let root = folder.join("src");
        let paths = crate::files(&root, "rs").into_iter().filter(|path| !is_for_tests(path));
        let text = |path: PathBuf| {
            let text = std::fs::read_to_string(&path).unwrap();
            let text = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
            (path.strip_prefix(&root).unwrap().to_path_buf(), text.to_string())
        };
        Sources(paths.map(text).collect())
    }

    /// Groups of modules that depend on each other in a circle.
    pub fn knots(&self) -> Vec<Vec<String>> {
        knots(&self.uses())
    }

    fn uses(&self) -> Uses {
        let is_lib = |path: &Path| path == Path::new("lib.rs") || path == Path::new("main.rs");
        let modules: BTreeSet<String> =
            self.0.iter().filter(|(path, _)| !is_lib(path)).map(|(path, _)| module(path)).collect();
        let lib = self.0.iter().filter(|(path, _)| is_lib(path)).map(|(_, text)| re_exports(text, &modules));
        let homes: BTreeMap<String, String> = lib.flatten().collect();
        let mut uses: Uses = modules.iter().map(|module| (module.clone(), BTreeSet::new())).collect();
        for (path, text) in self.0.iter().filter(|(path, _)| !is_lib(path)) {
            let own = module(path);
            let up = "super::".repeat(path.components().count());
            let code = text.lines().filter(|line| !line.trim_start().starts_with("//"));
            let code = code.collect::<Vec<_>>().join("\n");
            let named = [named_after(&code, "crate::"), named_after(&code, &up)].concat();
            let others = named.iter().filter_map(|name| {
                let module = if modules.contains(name) { Some(name) } else { homes.get(name) };
                module.filter(|module| **module != own).cloned()
            });
            uses.entry(own.clone()).or_default().extend(others);
        }
        uses
    }
}

fn is_for_tests(path: &Path) -> bool {
    let is_test = |name: &str| {
        let stem = name.trim_end_matches(".rs");
        stem == "tests" || stem == "testing" || stem.ends_with("_tests")
    };
    path.iter().skip_while(|part| *part != "src").filter_map(|part| part.to_str()).any(is_test)
}

fn module(path: &Path) -> String {
    let first = path.components().next().map(|part| part.as_os_str().to_string_lossy().into_owned());
    first.unwrap_or_default().trim_end_matches(".rs").to_string()
}

/// Names that follow a prefix: one, or those in braces. `a` of `crate::a::b`; `a` and `c` of `crate::{a::b, c}`.
fn named_after(text: &str, prefix: &str) -> Vec<String> {
    let mut names = vec![];
    for (at, _) in text.match_indices(prefix) {
        let before = text[..at].chars().next_back();
        if before.is_some_and(|c| c.is_alphanumeric() || c == '_' || c == ':') {
            continue;
        }
        let rest = &text[at + prefix.len()..];
        match rest.strip_prefix('{') {
            Some(group) => names.extend(first_words(group)),
            None => names.push(word(rest).to_string()),
        }
    }
    names
}

/// The first word of each entry of a list in braces, whose inner braces don't matter.
fn first_words(group: &str) -> Vec<String> {
    let (mut names, mut depth, mut begins) = (vec![], 0, true);
    for (at, c) in group.char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth == 0 => break,
            '}' => depth -= 1,
            ',' => begins |= depth == 0,
            _ if c.is_whitespace() => {}
            _ => {
                if begins && depth == 0 {
                    names.push(word(&group[at..]).to_string());
                }
                begins = false;
            }
        }
    }
    names
}

fn word(text: &str) -> &str {
    text.split(|c: char| !(c.is_alphanumeric() || c == '_')).next().unwrap_or_default()
}

/// Names that `lib.rs` takes from its modules, each with its module.
fn re_exports(lib: &str, modules: &BTreeSet<String>) -> Vec<(String, String)> {
    let mut found = vec![];
    for statement in lib.split(';').filter_map(|text| text.split("use ").nth(1)) {
        let path = statement.trim_start_matches("self::").trim_start_matches("crate::");
        let module = word(path).to_string();
        if modules.contains(&module) {
            let names = path.split(|c: char| !(c.is_alphanumeric() || c == '_')).skip(1);
            found
                .extend(names.filter(|name| !name.is_empty()).map(|name| (name.to_string(), module.clone())));
        }
    }
    found
}

fn knots(uses: &Uses) -> Vec<Vec<String>> {
    let reach = |from: &str| {
        let (mut seen, mut left) = (BTreeSet::new(), vec![from.to_string()]);
        while let Some(module) = left.pop() {
            for next in uses.get(&module).into_iter().flatten() {
                if seen.insert(next.clone()) {
                    left.push(next.clone());
                }
            }
        }
        seen
    };
    let reached: BTreeMap<&String, BTreeSet<String>> = uses.keys().map(|m| (m, reach(m))).collect();
    let mut knots: Vec<Vec<String>> = vec![];
    for (module, far) in reached.iter().filter(|(module, far)| far.contains(**module)) {
        if !knots.iter().any(|knot| knot.contains(module)) {
            let back = |other: &&String| reached.get(other).is_some_and(|far| far.contains(*module));
            knots.push(far.iter().filter(back).cloned().collect());
        }
    }
    knots
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sources(files: &[(&str, &str)]) -> Sources {
        Sources(files.iter().map(|(path, text)| (path.into(), text.to_string())).collect())
    }

    #[test]
    fn a_knot_is_found_however_it_is_written() {
        let straight =
            [("lib.rs", "mod a; mod b; mod c;"), ("a.rs", "use crate::b::X;"), ("b.rs", ""), ("c.rs", "")];
        assert!(sources(&straight).knots().is_empty());
        for back in
            ["use crate::a::Y;", "use crate::{c::Z, a::{Y, W}};", "fn f(x: super::a::Y) {}", "crate::a()"]
        {
            let mut files = straight.to_vec();
            files[2] = ("b.rs", back);
            assert_eq!(sources(&files).knots(), [["a", "b"]], "{back}");
        }
        // Through a name that lib.rs re-exports, and from deeper down.
        let files =
            [("lib.rs", "pub use a::{Y, Z};"), ("a/deep.rs", "super::super::b::f()"), ("b.rs", "crate::Z")];
        assert_eq!(sources(&files).knots(), [["a", "b"]]);
        // Two knots, and one that depends on both.
        let files = [
            ("a.rs", "crate::b"),
            ("b.rs", "crate::a"),
            ("c.rs", "crate::d"),
            ("d.rs", "crate::c crate::a"),
            ("e.rs", "crate::a crate::d"),
        ];
        assert_eq!(sources(&files).knots(), [["a", "b"], ["c", "d"]]);
    }
}
