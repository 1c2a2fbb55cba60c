use super::*;
use crate::Task;

/// Value and reason of a setting.
fn of(raw: Raw, world: usize) -> impl Fn(&str) -> (String, String) {
    let explained = raw.explain(&Facts::synthetic(&raw).unwrap(), world);
    assert_eq!(explained.refusal, None);
    move |name| {
        let note = explained.settings.iter().chain(&explained.rest).find(|note| note.name == name).unwrap();
        let Origin::Default(why) = &note.origin else { panic!("{note:?}") };
        (note.value.clone(), why.clone())
    }
}

fn pair(value: &str, why: &str) -> (String, String) {
    (value.to_string(), why.to_string())
}

#[test]
fn settings_that_nobody_typed_have_the_values_of_the_run() {
    let image = of(Raw::default(), 1);
    for (name, value) in [
        ("task", "classify"),
        ("norm-eps", "1e-6"),
        ("dropout", "0"),
        ("drop-path", "0"),
        ("train-samples", "20000"),
        ("test-samples", "2000"),
        ("ranks", "1"),
        ("min-lr", "0"),
    ] {
        assert_eq!(image(name), pair(value, ""), "{name}");
    }
    let masks = of(Raw { task: Some(Task::Segment), ..Raw::default() }, 2);
    for (name, value) in [("train-samples", "2000"), ("ranks", "2"), ("norm-eps", "1e-5")] {
        assert_eq!(masks(name), pair(value, ""), "{name}");
    }
    assert_eq!(masks("dropout").0, "0.1");
}

#[test]
fn settings_without_use_in_a_run_have_no_value() {
    let image = of(Raw::default(), 1);
    for (name, why) in [
        ("eval-mode", "for images with masks"),
        ("momentum", "for other optimizers"),
        ("step-every", "for --schedule step"),
        ("power", "for --schedule poly"),
        ("comm-dtype", "one rank communicates nothing"),
    ] {
        assert_eq!(image(name), pair("", why), "{name}");
    }
    let masks = of(Raw { task: Some(Task::Segment), ..Raw::default() }, 2);
    assert_eq!(masks("mixup"), pair("", "for images with one class each"));
    assert_eq!(masks("pool"), pair("", "for ViTs"));
    assert!(masks("bucket-size").0.parse::<usize>().is_ok());
}
