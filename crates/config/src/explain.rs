//! What a configuration would do, key by key and setting by setting, without doing it.

#[cfg(test)]
mod tests;
mod unsaid;

use super::batch::{Batch, ranks};
use super::origin::{Log, Note, Origin};
use super::resolved::Resolved;
use super::settings::{self, Raw};
use super::source::Facts;
use crate::deepspeed::Verdict;

/// Effect of a key of the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyRow {
    pub key: String,
    /// The value as it stands in the file.
    pub text: String,
    pub verdict: Verdict,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Explanation {
    pub world: usize,
    /// In the order of the file.
    pub keys: Vec<KeyRow>,
    /// Settings in the order of resolving; those after a refusal are missing.
    pub settings: Vec<Note>,
    /// All others: as typed, as the run has them, or their default in words. No value where a run has no use for one.
    pub rest: Vec<Note>,
    /// Error that starting the run would give.
    pub refusal: Option<String>,
}

/// The keys that must multiply, the one to blame first.
const BATCH: [&str; 4] = [
    "train_batch_size",
    "micro_batch_per_gpu",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
];

impl Raw {
    pub fn explain(&self, facts: &Facts, world: usize) -> Explanation {
        let mut log = Log::default();
        let run = self.settle(facts, world, &mut log);
        let mut keys = self.key_rows(world);
        self.tell_batch(&mut keys, world);
        for setting in settings::all() {
            let note = log.0.iter().find(|note| note.name == setting.name);
            for key in setting.about.deepspeed.iter().filter(|key| !BATCH.contains(key)) {
                if let (Some(row), Some(note)) = (row(&mut keys, key).filter(|row| row.is_auto()), note) {
                    row.verdict = Verdict::Honoured(format!("--{} {}", setting.name, note.value));
                }
            }
        }
        let mut rest = self.rest(&log, run.as_ref().ok());
        self.name_files(&mut log);
        self.name_files(&mut rest);
        let refusal = run.err().map(|error| error.to_string());
        Explanation { world, keys, settings: log.0, rest: rest.0, refusal }
    }

    /// Settings that resolving had nothing to say of.
    fn rest(&self, log: &Log, run: Option<&Resolved>) -> Log {
        let mut rest = Log::default();
        for setting in settings::all() {
            if log.0.iter().any(|note| note.name == setting.name) {
                continue;
            }
            let texts = setting.texts(self);
            match texts.join(",") {
                _ if texts.is_empty() => {
                    let unsaid = run.and_then(|run| unsaid::unsaid(setting.name, run));
                    let (value, origin) =
                        unsaid.unwrap_or_else(|| (setting.default(), Origin::default_value()));
                    rest.note(setting.name, value, origin);
                }
                alone if alone.is_empty() => rest.note(setting.name, "yes", Origin::Flag),
                values => rest.note(setting.name, values, Origin::Flag),
            }
        }
        rest
    }

    /// Names the settings file where it decided.
    fn name_files(&self, log: &mut Log) {
        for note in log.0.iter_mut().filter(|note| note.origin == Origin::Flag) {
            if let Some(place) = self.sources.of(note.name) {
                note.origin = Origin::Settings(place.to_string());
            }
        }
    }

    fn key_rows(&self, world: usize) -> Vec<KeyRow> {
        let Some(file) = &self.deepspeed else { return vec![] };
        let verdicts = file.verdicts(&self.context(world));
        let rows = file.entries.iter().zip(verdicts);
        rows.map(|(entry, verdict)| KeyRow { key: entry.key.clone(), text: entry.text.clone(), verdict })
            .collect()
    }

    /// Puts the arithmetic beside the keys that are part of it.
    fn tell_batch(&self, rows: &mut [KeyRow], world: usize) {
        let Ok(batch) = self.batch(world, &mut Log::default()) else {
            let blamed = BATCH.iter().find(|key| row(rows, key).is_some_and(|row| !row.is_auto()));
            let why = self.batch_fault(world);
            if let (Some(row), Some(why)) = (blamed.and_then(|key| row(rows, key)), why) {
                row.verdict = Verdict::Refused(why);
            }
            return;
        };
        let Batch { micro, accumulate, total } = batch;
        let product = format!("--global-batch {total} = {micro} × {accumulate} × {}", ranks(world));
        if let Some(row) = row(rows, "train_batch_size") {
            row.verdict = Verdict::Honoured(product);
        }
        for (key, text) in [
            ("train_micro_batch_size_per_gpu", format!("--batch-size {micro}")),
            ("gradient_accumulation_steps", format!("--accumulate {accumulate}")),
        ] {
            if let Some(row) = row(rows, key).filter(|row| row.is_auto()) {
                row.verdict = Verdict::Honoured(text);
            }
        }
    }
}

impl KeyRow {
    fn is_auto(&self) -> bool {
        self.text == "\"auto\""
    }
}

/// The row of a key that is honoured.
fn row<'a>(rows: &'a mut [KeyRow], key: &str) -> Option<&'a mut KeyRow> {
    rows.iter_mut().find(|row| row.key == key && matches!(row.verdict, Verdict::Honoured(_)))
}
