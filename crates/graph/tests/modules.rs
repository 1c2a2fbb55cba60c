//! How the crate is laid out: modules depend on each other in one direction, and none knows a device.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Every source file with its text, without what is for tests alone.
fn sources() -> Vec<(PathBuf, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let (mut folders, mut files) = (vec![root.clone()], vec![]);
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if !path.ends_with("tests.rs") {
                let text = std::fs::read_to_string(&path).unwrap();
                let text = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default().to_string();
                files.push((path.strip_prefix(&root).unwrap().to_path_buf(), text));
            }
        }
    }
    assert!(files.len() > 30);
    files
}

/// Words after `crate::`, outside of comments.
fn used(text: &str) -> impl Iterator<Item = &str> {
    let lines = text.lines().filter(|line| !line.trim_start().starts_with("//"));
    lines
        .flat_map(|line| line.split("crate::").skip(1))
        .map(|rest| rest.split(|c: char| !(c.is_alphanumeric() || c == '_')).next().unwrap_or_default())
}

/// A module that is reached from one of those it uses.
fn cycle(uses: &BTreeMap<String, BTreeSet<String>>) -> Option<Vec<&str>> {
    let mut left: BTreeSet<&str> = uses.keys().map(String::as_str).collect();
    // Takes away modules that use none of those that are left.
    while let Some(leaf) = left.iter().find(|m| !uses[**m].iter().any(|used| left.contains(used.as_str()))) {
        let leaf = *leaf;
        left.remove(leaf);
    }
    (!left.is_empty()).then(|| left.into_iter().collect())
}

#[test]
fn modules_depend_in_one_direction() {
    let mut uses: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for (path, text) in sources().iter().filter(|(path, _)| !path.ends_with("lib.rs")) {
        let first = path.components().next().unwrap().as_os_str().to_string_lossy();
        let module = first.trim_end_matches(".rs").to_string();
        let others = used(text).filter(|other| **other != module).map(str::to_string);
        uses.entry(module.clone()).or_default().extend(others);
    }
    assert_eq!(cycle(&uses), None, "{uses:#?}");
    // It would be seen.
    uses.entry("types".into()).or_default().insert("compile".into());
    assert!(cycle(&uses).is_some());
}

#[test]
fn no_device_is_named() {
    let named = ["hopper", "h100", "h200", "cuda", "nvidia", "gpu"];
    for (path, text) in sources() {
        let text = text.to_lowercase();
        let found = named.iter().find(|word| text.contains(**word));
        assert_eq!(found, None, "{}", path.display());
    }
}
