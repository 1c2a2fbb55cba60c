//! Run folders and studies that the version before wrote are read by this one: see `fixtures/before/README.md`.

mod common;

use common::{Folder, largest_difference, text};
use serde_json::Value;
use std::fs;
use std::path::Path;

const BEFORE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/before");

/// Copies a folder, and unpacks what is packed.
fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        let there = to.join(path.file_name().unwrap());
        if path.is_dir() {
            copy(&path, &there);
        } else if path.extension().is_some_and(|end| end == "gz") {
            let mut file = flate2::read::GzDecoder::new(fs::File::open(&path).unwrap());
            std::io::copy(&mut file, &mut fs::File::create(there.with_extension("")).unwrap()).unwrap();
        } else {
            fs::copy(path, there).unwrap();
        }
    }
}

/// A value without what is null, and without the name of the score, which has changed.
fn essence(value: &Value) -> Value {
    match value {
        Value::Object(fields) => {
            let named = fields.contains_key("name") && fields.contains_key("value");
            let kept = fields.iter().filter(|(key, value)| !(value.is_null() || named && *key == "name"));
            kept.map(|(key, value)| (key.clone(), essence(value))).collect()
        }
        Value::Array(values) => values.iter().map(essence).collect(),
        other => other.clone(),
    }
}

/// A copy of the fixture `part` in a folder of its own, under its last name.
fn fixture(name: &str, part: &str) -> Folder {
    let folder = Folder::new(name);
    copy(&Path::new(BEFORE).join(part), &folder.0.join(Path::new(part).file_name().unwrap()));
    folder
}

fn json(text: &[u8]) -> Value {
    serde_json::from_slice(text).unwrap()
}

#[test]
fn a_run_goes_on_where_the_version_before_stopped() {
    let folder = fixture("before-resume", "runs/classify");
    let before = folder.losses("classify");
    assert_eq!(before.len(), 4);
    let output = folder.run(&["train", "--resume", "classify"]);
    assert!(text(&output).contains("going on after step 1"), "{}", text(&output));
    let after = folder.losses("classify");
    // Processors with other vectors round otherwise.
    assert!(largest_difference(&after, &before) < 1e-5, "{after:?} instead of {before:?}");
    let table = fs::read_to_string(folder.0.join("classify/metrics.csv")).unwrap();
    assert!(table.lines().next().unwrap().starts_with("step,epoch,loss,lr,images_per_second,grad_norm,top1"));
    assert_eq!(table.lines().count(), 1 + 4 + 1, "steps and an evaluation: {table}");
}

#[test]
fn weights_of_the_version_before_are_evaluated() {
    let folder = fixture("before-eval", "runs/classify");
    let before = json(&fs::read(folder.0.join("classify/eval.json")).unwrap());
    let after = json(&folder.run(&["eval", "--weights", "classify", "--threads", "1", "--json"]).stdout);
    let loss = |of: &Value| vec![of["eval_loss"].as_f64().unwrap()];
    assert!(largest_difference(&loss(&after), &loss(&before)) < 1e-5, "{after}");
    for key in ["model", "image_size", "data", "images", "preprocessing", "eval_top1", "confusion"] {
        assert_eq!(after[key], before[key], "{key}");
    }
}

#[test]
fn a_study_of_the_version_before_is_reported() {
    let folder = fixture("before-report", "studies/strong");
    folder.run(&["report", "strong"]);
    let report = fs::read_to_string(folder.0.join("strong/report.md")).unwrap();
    let html = fs::read_to_string(folder.0.join("strong/report.html")).unwrap();
    // Medians of the two runs of each point.
    for number in ["2193", "2200"] {
        assert!(
            report.replace(',', "").contains(number) && html.replace(',', "").contains(number),
            "{report}"
        );
    }
}

#[test]
fn a_study_of_the_version_before_is_compared_and_gone_on_with() {
    let folder = fixture("before-compare", "studies/strong");
    copy(&folder.0.join("strong"), &folder.0.join("again"));
    let both = json(&folder.run(&["compare", "strong", "again", "--json"]).stdout);
    assert_eq!(both["pairs"].as_array().unwrap().len(), 2, "{both}");
    // All of its runs are there: nothing runs again, and the results follow from the points as they did.
    let results = |name: &str| json(&fs::read(folder.0.join(name).join("results.json")).unwrap());
    let output = folder.run(&["study", "--resume", "again"]);
    assert!(!text(&output).contains("run 1/"), "{}", text(&output));
    let (before, after) = (results("strong"), results("again"));
    assert_eq!(after["points"].as_array().unwrap().len(), 2);
    for (before, after) in
        before["points"].as_array().unwrap().iter().zip(after["points"].as_array().unwrap())
    {
        let [before, after] = [before, after].map(essence);
        assert_eq!((&before["id"], &before["runs"]), (&after["id"], &after["runs"]));
        assert_eq!(before["summary"], after["summary"]);
    }
}
