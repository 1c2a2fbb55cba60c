//! The settings file: TOML, every setting by the name of its flag.
//!
//! ```toml
//! model = "vit-ti/4"
//! lr = 1e-3
//! milestones = ["30ep", "60ep"]
//! skip-bad-images = true
//! ```
//!
//! Paths are relative to the folder that the command is typed in, as those of flags are.

use super::value::Form;
use super::{Raw, Setting, TRAIN, all, find};
use crate::deepspeed::{DeepSpeed, FileError, read_text};
use std::collections::BTreeMap;
use std::path::Path;
use text::nearest;
use toml::de::{DeTable, DeValue};

/// Settings that a file decided, with the file and line of each.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sources(BTreeMap<&'static str, String>);

impl Sources {
    /// File and line that decided a setting.
    pub fn of(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }
}

impl Raw {
    /// These flags, over the files that `--config` names.
    pub fn with_files(self) -> Result<Raw, FileError> {
        let Some(path) = self.config.clone() else { return Ok(self) };
        if !is_toml(&path) {
            return Ok(Raw { deepspeed: Some(DeepSpeed::read(&path)?), ..self });
        }
        let file = read(&path)?;
        let deepspeed = file.config.as_deref().map(DeepSpeed::read).transpose()?;
        Ok(Raw { deepspeed, ..self.over_file(file) })
    }

    fn over_file(self, mut file: Raw) -> Raw {
        file.yield_to(&self);
        let mut raw = self;
        for setting in all() {
            if !setting.is_set(&raw) && setting.is_set(&file) {
                (setting.take)(&mut raw, &file);
                let place = file.sources.of(setting.name).unwrap_or_default().to_string();
                raw.sources.0.insert(setting.name, place);
            }
        }
        raw
    }
}

fn is_toml(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("toml"))
}

/// The settings of a file.
pub fn read(path: &Path) -> Result<Raw, FileError> {
    let text = read_text(path, "that is no file of settings")?;
    parse(&path.display().to_string(), &text)
}

/// Reads settings; `file` is the name in messages.
pub fn parse(file: &str, text: &str) -> Result<Raw, FileError> {
    let line = |at: usize| text.as_bytes()[..at.min(text.len())].iter().filter(|b| **b == b'\n').count() + 1;
    let refused = |at: usize, why: String| FileError::File { file: format!("{file}:{}", line(at)), why };
    let table = DeTable::parse(text).map_err(|error| {
        let why = error.message().lines().collect::<Vec<_>>().join("; ");
        refused(error.span().map_or(0, |span| span.start), why)
    })?;
    let mut raw = Raw::default();
    for (key, value) in table.get_ref() {
        let at = key.span().start;
        let name = key.get_ref().as_ref();
        let Some(setting) = find(name).filter(|setting| setting.about.commands & TRAIN != 0) else {
            return Err(refused(at, unknown(name)));
        };
        let spelled = |why: String| refused(at, format!("{name}: {why}"));
        for text in texts(setting, value.get_ref()).map_err(spelled)? {
            setting.put(&mut raw, &text).map_err(|why| spelled(format!("{text} {why}")))?;
        }
        raw.sources.0.insert(setting.name, format!("{file}:{}", line(at)));
    }
    if raw.config.as_deref().is_some_and(is_toml) {
        let why = "config: names a DeepSpeed configuration in JSON; settings are in this file".to_string();
        return Err(FileError::File { file: file.to_string(), why });
    }
    Ok(raw)
}

fn unknown(name: &str) -> String {
    let names = all().iter().map(|setting| setting.name);
    match nearest(&name.replace('_', "-"), names) {
        Some(meant) => format!("{name}: there is no such setting; did you mean {meant}?"),
        None => {
            format!("{name}: there is no such setting; `vitesse train --help` lists all, without the dashes")
        }
    }
}

/// A value as it would be typed.
fn texts(setting: &Setting, value: &DeValue<'_>) -> Result<Vec<String>, String> {
    let switch = matches!(setting.form, Form::Switch | Form::Perhaps);
    match value {
        DeValue::Boolean(true) if switch => Ok(vec![String::new()]),
        DeValue::Boolean(false) if switch => Ok(vec![]),
        DeValue::Array(values) if setting.form == Form::List => {
            values.iter().map(|value| one(value.get_ref())).collect()
        }
        _ if setting.form == Form::Switch => {
            Err(format!("expected true or false, found {}", value.type_str()))
        }
        value => Ok(vec![one(value)?]),
    }
}

fn one(value: &DeValue<'_>) -> Result<String, String> {
    match value {
        DeValue::String(text) => Ok(text.to_string()),
        DeValue::Integer(number) if number.radix() == 10 => Ok(number.as_str().to_string()),
        DeValue::Float(number) => Ok(number.as_str().to_string()),
        other => Err(format!("expected a number or a text, found {}", other.type_str())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_setting_can_be_in_a_file() {
        let text = "model = \"vit-ti/4\"\nlr = 1e-3\nmilestones = [\"30ep\", 60]\nmean = 0.5\nskip-bad-images = true\n\
                    balance = false\nserve = true\nranks = 4\nbatch-size = 1_024\niterations = 7\n";
        let raw = parse("run.toml", text).unwrap();
        assert_eq!((raw.model.as_deref(), raw.lr, raw.ranks), (Some("vit-ti/4"), Some(1e-3), Some(4)));
        assert_eq!(raw.milestones, ["30ep".parse().unwrap(), "60".parse().unwrap()]);
        assert_eq!((raw.mean, raw.skip_bad_images, raw.balance), (vec![0.5], true, false));
        assert_eq!((raw.serve, raw.batch_size, raw.steps), (Some(None), Some(1024), Some(7)));
        assert_eq!(raw.sources.of("lr"), Some("run.toml:2"));
    }

    #[test]
    fn what_is_wrong_in_a_file_is_named_with_its_line() {
        let refused = |text: &str| parse("run.toml", text).unwrap_err().to_string();
        assert_eq!(
            refused("seed = 1\nbatch_size = 3"),
            "run.toml:2: batch_size: there is no such setting; did you mean batch-size?"
        );
        assert_eq!(refused("lr = \"much\""), "run.toml:1: lr: much is no number");
        assert_eq!(refused("\nlr = true"), "run.toml:2: lr: expected a number or a text, found boolean");
        assert_eq!(refused("balance = 1"), "run.toml:1: balance: expected true or false, found integer");
        assert_eq!(refused("[lr]\nx = 1"), "run.toml:1: lr: expected a number or a text, found table");
        assert!(refused("lr = ").starts_with("run.toml:1: "), "{}", refused("lr = "));
        assert!(refused("lr = 1\nlr = 2").starts_with("run.toml:2: "), "{}", refused("lr = 1\nlr = 2"));
        assert!(refused("config = \"other.toml\"").contains("config: names a DeepSpeed configuration"));
    }

    #[test]
    fn a_value_that_a_run_cannot_have_is_named_with_its_line() {
        let refused = |text: &str, typed: Raw| {
            let raw = typed.over_file(parse("run.toml", text).unwrap());
            crate::sets::resolve(&raw, 1).err().unwrap().to_string()
        };
        let plain = Raw::default;
        let lr = refused("seed = 1\nlr = -1", plain());
        assert!(lr.starts_with("run.toml:2: lr -1: "), "{lr}");
        let model = refused("model = \"vit-xs/4\"", plain());
        assert!(model.starts_with("run.toml:1: model vit-xs/4: "), "{model}");
        let data = refused("\n\ndata = \"mnist\"", plain());
        assert!(data.starts_with("run.toml:3: data mnist: is none of "), "{data}");
        let samples = refused("train-samples = 0", plain());
        assert!(samples.starts_with("run.toml:1: train-samples 0: "), "{samples}");
        // A flag over the file is a flag.
        let typed = refused("lr = 0.1", Raw { lr: Some(-2.0), ..plain() });
        assert!(typed.starts_with("--lr -2: "), "{typed}");
    }

    #[test]
    fn flags_win_over_a_file() {
        let file = parse("run.toml", "lr = 0.1\nepochs = 3\nseed = 5\nranks = 2").unwrap();
        let typed = Raw { lr: Some(0.2), steps: Some(7), ..Raw::default() };
        let raw = typed.over_file(file);
        assert_eq!((raw.lr, raw.steps, raw.epochs, raw.seed), (Some(0.2), Some(7), None, Some(5)));
        assert_eq!(raw.ranks, Some(2), "also what holds for one launch");
        assert_eq!((raw.sources.of("lr"), raw.sources.of("seed")), (None, Some("run.toml:3")));
    }
}
