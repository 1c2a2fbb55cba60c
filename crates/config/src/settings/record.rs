//! What was typed, as it is recorded with a run, so that a continuation is told the same.

use super::{Raw, find};
use crate::deepspeed::{DeepSpeed, FileError};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;

/// Typed values by flag; the DeepSpeed file with its text.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    settings: BTreeMap<String, Texts>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    deepspeed: Option<File>,
}

/// Values of a setting as they were typed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
enum Texts {
    Alone(bool),
    One(String),
    List(Vec<String>),
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    file: String,
    text: String,
}

impl Record {
    /// The record of what was typed in `folder`: its paths hold from any other.
    pub fn of(raw: &Raw, folder: &Path) -> Self {
        let raw = raw.clone().within(folder);
        let texts = |texts: Vec<String>| match texts.as_slice() {
            [one] if one.is_empty() => Texts::Alone(true),
            [one] => Texts::One(one.clone()),
            _ => Texts::List(texts),
        };
        let typed = super::all().iter().map(|setting| (setting.name, setting.texts(&raw)));
        let typed = typed.filter(|(_, values)| !values.is_empty());
        let settings = typed.map(|(name, values)| (name.to_string(), texts(values))).collect();
        let file = |file: DeepSpeed| File { file: file.file, text: file.text };
        Record { settings, deepspeed: raw.deepspeed.map(file) }
    }

    /// Reads what was typed; `place` is the record's name in messages.
    pub fn raw(&self, place: &str) -> Result<Raw, FileError> {
        let mut raw = Raw::default();
        for (name, texts) in &self.settings {
            let refused =
                |why: &str| FileError::File { file: place.to_string(), why: format!("--{name} {why}") };
            let setting = find(name).ok_or_else(|| refused("is no setting of this build"))?;
            let texts: &[String] = match texts {
                Texts::Alone(false) => &[],
                Texts::Alone(true) => &[String::new()],
                Texts::One(text) => std::slice::from_ref(text),
                Texts::List(texts) => texts,
            };
            for text in texts {
                setting.put(&mut raw, text).map_err(|why| refused(&format!("{text}: {why}")))?;
            }
        }
        if let Some(File { file, text }) = &self.deepspeed {
            raw.deepspeed = Some(DeepSpeed::parse(file, text)?);
        }
        Ok(raw)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Every, Preset};

    #[test]
    fn a_record_says_what_was_typed() {
        let raw = Raw {
            data: Some("folder:photos".into()),
            lr: Some(1e-30),
            mean: vec![0.1, 0.2, 0.3],
            milestones: vec!["30ep".parse().unwrap()],
            augment: Some(Preset::Strong),
            eval_every: Some(Every::Steps(5)),
            lr_scale: vec!["head=10".parse().unwrap(), "a,b=0.1".parse().unwrap()],
            timeout: Some(super::super::value::Value::read("5m").unwrap()),
            resume: Some(None),
            balance: true,
            deepspeed: Some(DeepSpeed::parse("ds.json", "{\"steps_per_print\": 7}").unwrap()),
            ..Raw::default()
        };
        let record = Record::of(&raw, Path::new("/home"));
        let text = serde_json::to_string(&record).unwrap();
        let read: Record = serde_json::from_str(&text).unwrap();
        assert_eq!(read.raw("run.json").unwrap(), Raw { data: Some("folder:/home/photos".into()), ..raw });
        let other = text.replace("\"balance\"", "\"blance\"");
        let error = serde_json::from_str::<Record>(&other).unwrap().raw("run.json").unwrap_err().to_string();
        assert_eq!(error, "run.json: --blance is no setting of this build");
    }
}
