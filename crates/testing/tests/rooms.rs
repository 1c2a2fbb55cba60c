//! Crates, and modules within a crate, depend on each other in one direction.

use std::collections::BTreeMap;
use std::fs;
use testing::modules::Sources;
use testing::repository;

/// Crates from the ground up: one may use those before it, and none after it. Between two that don't use each other the order
/// says nothing.
const ORDER: [&str; 17] = [
    "testing", "text", "files", "graph", "comm", "data", "records", "models", "calls", "cpu", "cuda",
    "config", "formats", "devices", "train", "study", "vitesse",
];

/// How many modules of a crate are in circles; crates that are not here have none. A registry and its entries are one by nature: those of
/// config are settings, each with the type that the table names and the check that reads what was typed. A number may get smaller, and
/// grows only with a reason.
const IN_CIRCLES: [(&str, usize); 12] = [
    ("comm", 3),
    ("config", 20),
    ("cpu", 2),
    ("cuda", 17),
    ("data", 6),
    ("devices", 5),
    ("formats", 4),
    ("models", 10),
    ("records", 2),
    ("study", 9),
    ("train", 4),
    ("vitesse", 2),
];

fn crates() -> Vec<String> {
    let folders = fs::read_dir(repository().join("crates")).unwrap().map(|entry| entry.unwrap().path());
    let with_manifest = folders.filter(|path| path.join("Cargo.toml").exists());
    let mut names: Vec<String> =
        with_manifest.map(|path| path.file_name().unwrap().to_str().unwrap().to_string()).collect();
    names.sort();
    names
}

/// Crates of this repository that a crate's manifest names under a heading.
fn named(name: &str, heading: &str) -> Vec<String> {
    let manifest = repository().join("crates").join(name).join("Cargo.toml");
    let text = fs::read_to_string(manifest).unwrap();
    let section = text.split(&format!("\n{heading}\n")).nth(1).unwrap_or_default();
    let lines = section.lines().take_while(|line| !line.starts_with('['));
    let words = lines.filter_map(|line| line.split(['.', ' ', '=']).next());
    words.filter(|word| ORDER.contains(word)).map(str::to_string).collect()
}

#[test]
fn crates_depend_in_one_direction() {
    let place = |name: &str| {
        let place = ORDER.iter().position(|known| *known == name);
        place.unwrap_or_else(|| panic!("{name} has no place in ORDER"))
    };
    let mut seen = 0;
    for name in crates() {
        for used in named(&name, "[dependencies]") {
            assert!(place(&used) < place(&name), "{name} uses {used}, which is above it");
            assert_ne!(used, "testing", "{name}: a dev-dependency only");
            seen += 1;
        }
    }
    assert!(seen > 20, "{seen} dependencies were found");
}

#[test]
fn modules_depend_in_one_direction() {
    let allowed: BTreeMap<&str, usize> = IN_CIRCLES.into_iter().collect();
    let mut wrong = vec![];
    for name in crates() {
        let sources = Sources::read(&repository().join("crates").join(&name));
        assert!(!sources.0.is_empty(), "{name} has no sources");
        let knots = sources.knots();
        let found: usize = knots.iter().map(Vec::len).sum();
        let allowed = allowed.get(name.as_str()).copied().unwrap_or(0);
        if found > 0 {
            let lists: Vec<String> = knots.iter().map(|knot| knot.join(" ")).collect();
            println!("{name}: {found} modules in circles, {allowed} allowed: {}", lists.join("; "));
        }
        if found > allowed {
            wrong.push(name);
        }
    }
    assert!(wrong.is_empty(), "modules of {} depend on each other in more circles", wrong.join(", "));
}
