//! What documents name exists: files, functions and types in backticks, and the targets of links. So that documents can't rot.

use std::collections::{BTreeSet, HashSet};
use std::fs;
use std::path::{Path, PathBuf};
use testing::repository;

/// Folders that documents name files of.
const FOLDERS: [&str; 6] = ["crates", "scripts", "docs", "bench", ".ci", "fuzz"];
/// Endings that make a word in backticks a file of the repository.
const ENDINGS: [&str; 7] = [".rs", ".cu", ".cuh", ".py", ".md", ".toml", ".plan"];
/// Files that users write, or that Cargo does.
const OTHERS: [&str; 2] = ["Cargo.toml", "CHANGELOG.md"];

/// All that words are looked up in.
struct Code {
    /// Files and folders of the repository, from its root.
    paths: BTreeSet<String>,
    /// Rust files, by path, with the names that each declares.
    rust: Vec<(String, BTreeSet<String>)>,
    /// Every word of each crate's `lib.rs`, by its path.
    exported: Vec<(String, BTreeSet<String>)>,
    /// Every word of code and scripts.
    words: HashSet<String>,
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// Names that a Rust file declares, or has as variants or fields.
fn declared(text: &str) -> BTreeSet<String> {
    let keywords =
        ["fn", "struct", "enum", "trait", "type", "const", "static", "mod", "union", "macro_rules!"];
    let mut names = BTreeSet::new();
    for line in text.lines() {
        let code = line.trim_start();
        let words: Vec<&str> = code.split(' ').collect();
        for pair in words.windows(2).filter(|pair| keywords.contains(&pair[0])) {
            names.extend(pair[1].split(|c| !is_word(c)).next().map(str::to_string));
        }
        let first = code.split(|c| !is_word(c)).next().unwrap_or_default();
        if line.starts_with("    ") && code[first.len()..].starts_with([',', ' ', '(', ':']) {
            names.insert(first.to_string());
        }
        // A field that others may see.
        if let Some(field) = code.strip_prefix("pub ").and_then(|rest| rest.split_once(':')) {
            names.insert(field.0.to_string());
        }
    }
    names
}

fn snake_case(name: &str) -> String {
    let mut snake = String::new();
    for c in name.chars() {
        if c.is_uppercase() && !snake.is_empty() {
            snake.push('_');
        }
        snake.extend(c.to_lowercase());
    }
    snake
}

impl Code {
    fn read() -> Code {
        let root = repository();
        let mut code = Code { paths: BTreeSet::new(), rust: vec![], exported: vec![], words: HashSet::new() };
        let mut left: Vec<PathBuf> = FOLDERS.iter().map(|name| root.join(name)).collect();
        while let Some(path) = left.pop() {
            let name = path.strip_prefix(&root).unwrap().to_str().unwrap().to_string();
            if path.is_dir() {
                let is_ours = !path.join("CACHEDIR.TAG").exists();
                left.extend(
                    fs::read_dir(&path).into_iter().flatten().map(|e| e.unwrap().path()).filter(|_| is_ours),
                );
                code.paths.insert(name);
                continue;
            }
            let extension = path.extension().and_then(|end| end.to_str()).unwrap_or_default();
            if ["rs", "cu", "cuh", "py", "", "toml", "c"].contains(&extension) {
                let text = String::from_utf8_lossy(&fs::read(&path).unwrap()).into_owned();
                let words: HashSet<&str> = text.split(|c| !is_word(c)).collect();
                code.words.extend(words.iter().map(|word| word.to_string()));
                // Ops are printed by the names of their variants.
                code.words.extend(words.iter().map(|word| snake_case(word)));
                if extension == "rs" {
                    code.rust.push((name.clone(), declared(&text)));
                    if name.ends_with("src/lib.rs") {
                        code.exported
                            .push((name.clone(), words.iter().map(|word| word.to_string()).collect()));
                    }
                }
            }
            code.paths.insert(name);
        }
        assert!(code.rust.len() > 300, "{} files of Rust", code.rust.len());
        code
    }

    /// A file or folder whose path ends so.
    fn find(&self, end: &str) -> Option<&String> {
        let end = end.trim_end_matches('/');
        self.paths
            .iter()
            .find(|path| path.strip_suffix(end).is_some_and(|start| start.is_empty() || start.ends_with('/')))
    }

    /// What is wrong with `a::b::c`, if anything.
    fn check_symbol(&self, symbol: &str) -> Option<String> {
        let parts: Vec<&str> = symbol.split("::").collect();
        let is_crate = self.paths.contains(&format!("crates/{}", parts[0]));
        let within = if is_crate { format!("crates/{}/", parts[0]) } else { String::new() };
        let parts = if is_crate { &parts[1..] } else { &parts[..] };
        for name in parts {
            let in_file = self.paths.iter().any(|p| {
                let stem = p.strip_suffix(".rs").unwrap_or(p);
                p.starts_with(&within) && stem.rsplit('/').next() == Some(*name)
            });
            let declared = || {
                let mut files = self.rust.iter().filter(|(path, _)| path.starts_with(&within));
                files.any(|(_, names)| names.contains(*name))
            };
            // A crate may re-export what another declares.
            let lib = format!("{within}src/lib.rs");
            let re_exported =
                || self.exported.iter().any(|(path, words)| *path == lib && words.contains(*name));
            if !(in_file || declared() || is_crate && re_exported()) {
                let place = if is_crate { within.as_str() } else { "crates/" };
                return Some(format!("{place} declares no {name}"));
            }
        }
        None
    }

    /// What is wrong with a text in backticks, if anything.
    fn check(&self, token: &str) -> Option<String> {
        let word = token.split_whitespace().next()?.trim_end_matches("()");
        let stem = |part: &str| part.split('.').next().unwrap_or_default().to_string();
        let is_placeholder = |part: &str| {
            let stem = stem(part);
            stem.len() > 1
                && stem.chars().all(|c| c.is_ascii_uppercase())
                && stem != "README"
                && stem != "LOG"
        };
        let path = word.split("::").next()?;
        let is_file = ENDINGS.iter().any(|end| path.ends_with(end));
        let in_folder = path.contains('/') && FOLDERS.contains(&path.split('/').next()?);
        if word.starts_with(['/', '-', '*', '.']) && !word.starts_with(".ci/") || OTHERS.contains(&word) {
            return None;
        }
        if (is_file || in_folder) && !path.split('/').any(is_placeholder) {
            let Some(found) = self.find(path) else {
                let at_root = repository().join(path).exists();
                return (!at_root).then(|| format!("there is no {path}"));
            };
            let declared = self.rust.iter().find(|(name, _)| name == found).map(|(_, names)| names);
            let names = word.split("::").skip(1);
            let mut missing = names.filter(|name| !declared.is_some_and(|names| names.contains(*name)));
            return missing.next().map(|name| format!("{found} declares no {name}"));
        }
        let is_symbol = word.split("::").all(|part| !part.is_empty() && part.chars().all(is_word));
        let is_symbol = is_symbol && !word.starts_with(|c: char| c.is_ascii_digit());
        if is_symbol && word.contains("::") {
            return self.check_symbol(word).filter(|_| !word.starts_with("std::"));
        }
        let is_one = token == word && is_symbol && word.len() > 2 && !is_placeholder(word);
        (is_one && !self.words.contains(word)).then(|| format!("no code has the word {word}"))
    }
}

/// Lines outside of fenced and indented blocks, with their numbers.
fn prose(text: &str) -> Vec<(usize, &str)> {
    let mut lines = vec![];
    let mut is_fenced = false;
    for (number, line) in text.lines().enumerate() {
        let is_fence = line.starts_with("```");
        is_fenced ^= is_fence;
        if !is_fence && !is_fenced && !line.starts_with("    ") {
            lines.push((number + 1, line));
        }
    }
    lines
}

/// Texts in backticks, outside of blocks, with their lines.
fn quoted(text: &str) -> Vec<(usize, String)> {
    let mut found = vec![];
    for (number, line) in prose(text) {
        found.extend(line.split('`').skip(1).step_by(2).map(|token| (number, token.to_string())));
    }
    found
}

fn links(text: &str) -> Vec<(usize, String)> {
    let mut found = vec![];
    for (number, line) in prose(text) {
        let targets = line.split("](").skip(1).filter_map(|rest| rest.split(')').next());
        found.extend(targets.map(|target| (number, target.to_string())));
    }
    found
}

fn documents() -> Vec<PathBuf> {
    let root = repository();
    let single = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "bench/README.md"];
    let mut all: Vec<PathBuf> = single.iter().map(|name| root.join(name)).collect();
    all.extend(testing::files(&root.join("docs"), "md"));
    all
}

fn named(path: &Path) -> String {
    path.strip_prefix(repository()).unwrap().display().to_string()
}

#[test]
fn what_documents_name_exists() {
    let code = Code::read();
    let (mut wrong, mut looked) = (vec![], 0);
    for path in documents() {
        let text = fs::read_to_string(&path).unwrap();
        for (line, token) in quoted(&text) {
            looked += 1;
            if let Some(problem) = code.check(&token) {
                wrong.push(format!("{}:{line}: `{token}`: {problem}", named(&path)));
            }
        }
    }
    assert!(looked > 200, "{looked} were looked up");
    assert!(wrong.is_empty(), "{} of {looked}:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn what_is_wrong_would_be_seen() {
    let code = Code::read();
    let good = [
        "crates/testing/src/lib.rs",
        "testing/src/modules.rs::Sources",
        "testing::modules::Sources",
        "Sources::knots",
        "scripts/hosts",
        "vitesse plan --which last",
        "vit-ti/4",
        "names/FAMILY.rs",
        "Sources",
    ];
    for token in good {
        assert_eq!(code.check(token), None, "{token}");
    }
    // In two parts, as this file is looked through too.
    let none = format!("{}{}", "no_such_", "thing");
    let bad = [
        format!("crates/testing/src/{none}.rs"),
        format!("{none}.rs"),
        format!("testing/src/modules.rs::{none}"),
        format!("testing::modules::{none}"),
        format!("Sources::{none}"),
        format!("scripts/{none}"),
        none,
    ];
    for token in &bad {
        assert!(code.check(token).is_some(), "{token}");
    }
}

/// Anchors of a document: its headings as GitHub and mdBook name them.
fn anchors(text: &str) -> Vec<String> {
    let mut anchors: Vec<String> = vec![];
    let headings = prose(text).into_iter().filter(|(_, line)| line.starts_with('#'));
    for (_, line) in headings {
        let heading = line.trim_start_matches('#').trim().to_lowercase();
        let kept = heading.chars().filter(|c| is_word(*c) || *c == '-' || *c == ' ');
        let anchor = kept.map(|c| if c == ' ' { '-' } else { c }).collect::<String>();
        let before = anchors.iter().filter(|known| **known == anchor).count();
        anchors.push(if before == 0 { anchor } else { format!("{anchor}-{before}") });
    }
    anchors
}

/// What a link of a document leads to: a path, and an anchor if it names one. Links to other sites lead nowhere here.
fn target(document: &Path, link: &str) -> Option<(PathBuf, Option<String>)> {
    if link.contains("://") {
        return None;
    }
    let (file, anchor) = link.split_once('#').map_or((link, None), |(file, anchor)| (file, Some(anchor)));
    let folder = document.parent().unwrap();
    let path = if file.is_empty() { document.to_path_buf() } else { folder.join(file) };
    Some((path.canonicalize().unwrap_or(path), anchor.map(str::to_string)))
}

fn check_link(document: &Path, link: &str) -> Option<String> {
    let (path, anchor) = target(document, link)?;
    if !path.exists() {
        return Some("there is no such file".to_string());
    }
    let anchor = anchor?;
    let text = fs::read_to_string(&path).unwrap_or_default();
    (!anchors(&text).contains(&anchor)).then(|| "there is no such heading".to_string())
}

#[test]
fn links_lead_somewhere() {
    let root = repository();
    let more = ["CHANGELOG.md", "bench/LOG.md", "bench/studies/README.md"].map(|name| root.join(name));
    let (mut wrong, mut count) = (vec![], 0);
    for path in documents().into_iter().chain(more) {
        for (line, link) in links(&fs::read_to_string(&path).unwrap()) {
            count += 1;
            wrong.extend(
                check_link(&path, &link).map(|why| format!("{}:{line}: {link}: {why}", named(&path))),
            );
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(count > 150, "{count} links");
}

#[test]
fn dead_links_would_be_seen() {
    let readme = repository().join("README.md");
    assert_eq!(check_link(&readme, "docs/guide/runs.md#stop-and-resume"), None);
    assert_eq!(check_link(&readme, "https://example.org/nowhere"), None);
    assert!(check_link(&readme, "docs/guide/nowhere.md").is_some());
    assert!(check_link(&readme, "docs/guide/runs.md#nowhere").is_some());
    let text = "# One: `two` & three\n## A\n```\n# no heading\n```\n## A\n";
    assert_eq!(anchors(text), ["one-two--three", "a", "a-1"]);
}

/// What people look for first is at most two links from the README: a page, or a heading of it.
#[test]
fn common_tasks_are_two_links_away() {
    let root = repository();
    let guide = |page: &str| root.join("docs/guide").join(page).canonicalize().unwrap();
    let tasks = [
        ("fine-tuning", "weights.md", Some("fine-tune")),
        ("export", "weights.md", Some("export")),
        ("resuming", "runs.md", Some("stop-and-resume")),
        ("several GPUs", "ranks.md", Some("several-gpus")),
        ("why is it slow", "slow.md", None),
    ];
    let from = |path: &Path| -> Vec<_> {
        let text = fs::read_to_string(path).unwrap_or_default();
        links(&text).iter().filter_map(|(_, link)| target(path, link)).collect()
    };
    let mut reached = from(&root.join("README.md"));
    let pages: HashSet<PathBuf> = reached.iter().map(|(path, _)| path.clone()).collect();
    reached.extend(pages.iter().filter(|path| path.is_file()).flat_map(|path| from(path)));
    for (task, page, heading) in tasks {
        let wanted = (guide(page), heading.map(str::to_string));
        assert!(reached.contains(&wanted), "{task}: no link to {page}#{heading:?} within two of README.md");
    }
}

/// The book has every page of docs/ and no other.
#[test]
fn every_page_is_in_the_book() {
    let folder = repository().join("docs");
    let summary = fs::read_to_string(folder.join("SUMMARY.md")).unwrap();
    let listed: BTreeSet<String> = links(&summary).into_iter().map(|(_, link)| link).collect();
    let pages = testing::files(&folder, "md").into_iter();
    let pages = pages.map(|path| path.strip_prefix(&folder).unwrap().display().to_string());
    let pages: BTreeSet<String> = pages.filter(|page| page != "SUMMARY.md").collect();
    assert_eq!(listed, pages);
}

#[test]
fn every_design_file_is_in_the_index() {
    let folder = repository().join("docs/design");
    let index = fs::read_to_string(folder.join("README.md")).unwrap();
    for path in testing::files(&folder, "md") {
        let name = path.file_name().unwrap().to_str().unwrap();
        assert!(name == "README.md" || index.contains(&format!("({name})")), "{name} is not in the index");
    }
}

#[test]
fn every_record_is_in_the_index() {
    let folder = repository().join("bench");
    let index = fs::read_to_string(folder.join("README.md")).unwrap();
    for entry in fs::read_dir(&folder).unwrap().map(Result::unwrap).filter(|entry| entry.path().is_dir()) {
        let name = entry.file_name().into_string().unwrap();
        assert!(
            !name.starts_with("20") || index.contains(&format!("({name})")),
            "{name} is not in the index"
        );
    }
}

#[test]
fn the_first_documents_are_short() {
    for (name, allowed) in [("README.md", 150), ("ARCHITECTURE.md", 200)] {
        let lines = fs::read_to_string(repository().join(name)).unwrap().lines().count();
        assert!(lines <= allowed, "{name} has {lines} lines; {allowed} are allowed");
    }
}
