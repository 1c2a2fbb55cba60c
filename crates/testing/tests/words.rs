//! Documents use the words of the field. So does the help of the command line: see `crates/vitesse/tests/cli.rs`.

use std::fs;
use testing::repository;
use testing::words::strange;

#[test]
fn documents_use_the_words_of_the_field() {
    let root = repository();
    let single = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"];
    let mut paths: Vec<_> = single.iter().map(|name| root.join(name)).collect();
    paths.extend(testing::files(&root.join("docs"), "md"));
    let mut wrong = vec![];
    for path in paths {
        for found in strange(&fs::read_to_string(&path).unwrap()) {
            let name = path.strip_prefix(&root).unwrap().display();
            wrong.push(format!("{name}:{}: {}\n    {}", found.number, found.words, found.line));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn words_of_our_own_would_be_seen() {
    let found = |text: &str| strange(text).into_iter().map(|found| found.words).collect::<Vec<_>>();
    assert_eq!(found("loss 2.0, held-out"), ["held out: write validation"]);
    let two = found("Gradients travel as bf16.\nMatrix products");
    assert_eq!(two, ["travel: write communicate, send", "products: write matmuls"]);
    assert_eq!(found("production, a wired lane, `exchange`, exchange_seconds"), Vec::<String>::new());
}
