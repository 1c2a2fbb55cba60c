//! The book of docs/ is built by mdBook, and no link between its pages is dead.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use testing::{need, repository, tools};

fn mdbook() -> Result<PathBuf, String> {
    let ours = repository().join("target/mdbook/bin/mdbook");
    if ours.is_file() { Ok(ours) } else { tools::find(&["mdbook"]) }
}

/// Values of an attribute in a page.
fn values<'a>(html: &'a str, attribute: &str) -> Vec<&'a str> {
    html.split(&format!(" {attribute}=\"")).skip(1).filter_map(|rest| rest.split('"').next()).collect()
}

/// A link's path without `.` and `..`; a folder stands for its index.
fn resolved(page: &Path, link: &str) -> PathBuf {
    let mut path = page.parent().unwrap().to_path_buf();
    for part in link.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(path.pop()),
            part => path.push(part),
        }
    }
    if path.is_dir() { path.join("index.html") } else { path }
}

#[test]
fn the_book_is_built_and_has_no_dead_link() {
    need!(mdbook());
    let output = Command::new(repository().join("scripts/book")).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && !said.contains("WARN") && !said.contains("ERROR"), "{said}");
    let root = repository().join("target/book/html");
    // Scripts fill in the list of chapters, and one page has all for printing.
    let pages: Vec<PathBuf> = testing::files(&root, "html");
    let own = ["404.html", "toc.html", "print.html"].map(|name| root.join(name));
    let texts: HashMap<&PathBuf, String> = pages
        .iter()
        .filter(|page| !own.contains(page))
        .map(|page| (page, fs::read_to_string(page).unwrap()))
        .collect();
    let ids: HashMap<&PathBuf, HashSet<&str>> =
        texts.iter().map(|(page, text)| (*page, values(text, "id").into_iter().collect())).collect();
    let (mut wrong, mut count) = (vec![], 0);
    for (page, text) in &texts {
        let links = values(text, "href").into_iter().chain(values(text, "src"));
        for link in links.filter(|link| !link.contains("://") && !link.starts_with("javascript:")) {
            let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
            let path = if file.is_empty() { page.to_path_buf() } else { resolved(page, file) };
            let known = ids.get(&path).is_none_or(|ids| anchor.is_empty() || ids.contains(anchor));
            if !path.exists() || !known {
                wrong.push(format!("{}: {link}", page.strip_prefix(&root).unwrap().display()));
            }
            count += 1;
        }
    }
    assert!(wrong.is_empty(), "dead links:\n{}", wrong.join("\n"));
    assert!(pages.len() > 40 && count > 1000, "{} pages, {count} links", pages.len());
    let figure = root.join("docs/report.png");
    assert!(figure.is_file(), "{}", figure.display());
}
