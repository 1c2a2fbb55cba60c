//! The lines that a training run writes while it goes on: `metrics.jsonl` and `ranks.jsonl`.

use crate::results::Parts;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use std::fs;
use std::path::Path;

/// Of `metrics.jsonl`: a step, or an evaluation.
#[derive(Clone, Debug, Deserialize)]
pub struct Line {
    pub step: u64,
    pub epoch: u64,
    pub loss: Option<f64>,
    pub lr: Option<f64>,
    pub top1: Option<f64>,
    pub images_per_second: Option<f64>,
    pub seconds: Option<f64>,
    compute_seconds: Option<f64>,
    exchange_seconds: Option<f64>,
    wait_seconds: Option<f64>,
    data_seconds: Option<f64>,
    optimizer_seconds: Option<f64>,
    idle_seconds: Option<f64>,
    hidden_exchange_seconds: Option<f64>,
    pub cpu_seconds: Option<f64>,
    pub eval_loss: Option<f64>,
    pub eval_top1: Option<f64>,
    pub eval_miou: Option<f64>,
    pub eval_pixel_accuracy: Option<f64>,
    pub gpu_load: Option<f64>,
    pub gpu_memory_used: Option<f64>,
    pub gpu_power: Option<f64>,
}

impl Line {
    pub fn images(&self) -> f64 {
        self.images_per_second.unwrap_or(0.0) * self.seconds.unwrap_or(0.0)
    }

    /// Where a step's time went, as the mean over ranks; an evaluation has none.
    pub fn parts(&self) -> Option<Parts> {
        Some(Parts {
            compute: self.compute_seconds?,
            exchange: self.exchange_seconds?,
            wait: self.wait_seconds?,
            data: self.data_seconds?,
            optimizer: self.optimizer_seconds?,
            idle: self.idle_seconds?,
            hidden: self.hidden_exchange_seconds?,
        })
    }
}

/// Of `ranks.jsonl`: a step of one rank.
#[derive(Deserialize)]
pub struct RankLine {
    pub step: u64,
    pub rank: usize,
    compute: f64,
    exchange: f64,
    wait: f64,
    data: f64,
    optimizer: f64,
    idle: f64,
    hidden_exchange: f64,
}

impl RankLine {
    pub fn parts(&self) -> Parts {
        let RankLine { compute, exchange, wait, data, optimizer, idle, hidden_exchange: hidden, .. } = *self;
        Parts { compute, exchange, wait, data, optimizer, idle, hidden }
    }
}

/// Whole lines of a file; one that is still being written is left out.
pub fn read_lines<T: DeserializeOwned>(path: &Path) -> Result<Vec<T>, String> {
    let text = fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))?;
    let whole = &text[..text.rfind('\n').map_or(0, |end| end + 1)];
    let read = |line| serde_json::from_str(line).map_err(|e| format!("{}: {e}", path.display()));
    whole.lines().map(read).collect()
}
