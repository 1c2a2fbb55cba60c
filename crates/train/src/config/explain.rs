//! What a configuration would do, key by key and setting by setting, without doing it.

use super::origin::{Log, Note};
use super::raw::Raw;
use super::source::Facts;
use crate::deepspeed::Verdict;

/// What became of a key of the file.
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
    /// In the order of resolving; those after a refusal are missing.
    pub settings: Vec<Note>,
    /// Why the run can't be started, in the words that starting it would give.
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
        let refusal = self.settle(facts, world, &mut log).err().map(|error| error.to_string());
        Explanation { world, keys: self.key_rows(world), settings: log.0, refusal }
    }

    fn key_rows(&self, world: usize) -> Vec<KeyRow> {
        let Some(file) = &self.deepspeed else { return vec![] };
        let verdicts = file.verdicts(&self.context(world));
        let mut rows: Vec<KeyRow> = file
            .entries
            .iter()
            .zip(verdicts)
            .map(|(entry, verdict)| KeyRow { key: entry.key.clone(), text: entry.text.clone(), verdict })
            .collect();
        if let Some(why) = self.batch_fault(world) {
            let honoured =
                |row: &&mut KeyRow| matches!(row.verdict, Verdict::Honoured(_)) && row.text != "\"auto\"";
            let blamed = BATCH.iter().find_map(|key| rows.iter().position(|row| row.key == *key));
            if let Some(row) = blamed.and_then(|i| rows.get_mut(i)).filter(honoured) {
                row.verdict = Verdict::Refused(why);
            }
        }
        rows
    }
}
