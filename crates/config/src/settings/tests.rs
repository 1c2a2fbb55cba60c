use super::*;
use std::collections::BTreeSet;

#[test]
fn names_are_unique_and_settings_name_each_other() {
    let names: BTreeSet<&str> = all().iter().map(|setting| setting.name).collect();
    assert_eq!(names.len(), all().len());
    for setting in all() {
        let others =
            setting.about.excludes.iter().chain([&setting.about.requires]).filter(|name| !name.is_empty());
        others.for_each(|other| assert!(names.contains(other), "{} names {other}", setting.name));
        assert_eq!(setting.field.replace('_', "-"), setting.name);
        let has_value = setting.form != Form::Switch;
        assert_eq!(has_value, !setting.about.value.is_empty(), "{} needs a name for its value", setting.name);
        assert!(!setting.help(TRAIN).ends_with('.') && !setting.help(TRAIN).is_empty(), "{}", setting.name);
    }
}

#[test]
fn what_is_put_is_what_is_typed() {
    let words = |setting: &Setting| setting.words(TRAIN).first().copied();
    for setting in all() {
        let text = match setting.form {
            Form::Switch | Form::Perhaps => "",
            _ => words(setting).unwrap_or(match setting.name {
                "lr-scale" => "head=2",
                "rand-augment" => "2,9",
                "timeout" => "30s",
                "ema" => "0.5",
                "betas" => "0.9,0.98",
                _ => "1",
            }),
        };
        let mut raw = Raw::default();
        setting.put(&mut raw, text).unwrap_or_else(|why| panic!("{} {text}: {why}", setting.name));
        assert_eq!(setting.texts(&raw), [text], "{}", setting.name);
        let (kept, again) = (Raw::default().or(raw.clone()), Raw::default());
        assert_eq!(setting.is_set(&kept), !setting.about.once, "{}", setting.name);
        assert!(!setting.is_set(&again));
    }
}

#[test]
fn defaults_of_plain_settings_are_told() {
    let help = |name: &str| find(name).unwrap().help(TRAIN);
    assert_eq!(help("seed"), "Seed of weights, data, order and dropout [default: 0]");
    assert_eq!(help("keep"), "Checkpoints to keep; needs --out [default: 2]");
    assert!(!help("ema").contains("default") && !help("balance").contains("default"));
    assert_eq!(find("seed").unwrap().help(EVAL), "Seed of the synthetic sets [default: as in training]");
}

#[test]
fn some_commands_take_fewer_words() {
    let precision = find("precision").unwrap();
    assert!(precision.check(TRAIN, "fp64").is_ok() && precision.check(EVAL, "bf16").is_ok());
    assert_eq!(precision.check(BENCH, "fp64").unwrap_err(), "is none of fp32, tf32, bf16, fp16");
}
