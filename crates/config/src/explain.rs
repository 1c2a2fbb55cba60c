//! What a configuration would do, key by key and setting by setting, without doing it.

use super::batch::{Batch, ranks};
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

/// Keys that may be "auto", and the setting that tells what was chosen.
const CHOSEN: [(&str, &str); 7] = [
    ("optimizer.params.lr", "lr"),
    ("optimizer.params.weight_decay", "weight-decay"),
    ("scheduler.params.warmup_max_lr", "lr"),
    ("scheduler.params.warmup_num_steps", "warmup-steps"),
    ("gradient_clipping", "clip"),
    ("steps_per_print", "log-every"),
    ("zero_optimization.reduce_bucket_size", "bucket-size"),
];

impl Raw {
    pub fn explain(&self, facts: &Facts, world: usize) -> Explanation {
        let mut log = Log::default();
        let refusal = self.settle(facts, world, &mut log).err().map(|error| error.to_string());
        let mut keys = self.key_rows(world);
        self.tell_batch(&mut keys, world);
        for (key, setting) in CHOSEN {
            let note = log.0.iter().find(|note| note.name == setting);
            if let (Some(row), Some(note)) = (row(&mut keys, key).filter(|row| row.is_auto()), note) {
                row.verdict = Verdict::Honoured(format!("--{setting} {}", note.value));
            }
        }
        Explanation { world, keys, settings: log.0, refusal }
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
