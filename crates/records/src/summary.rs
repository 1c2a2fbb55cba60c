//! What `vitesse train --json` prints at its end.

use crate::parts::Parts;
use crate::schema::Schema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::path::PathBuf;

/// How a run ended, and where its time went.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// Steps made by this process.
    #[serde(default)]
    pub steps: u64,
    #[serde(default)]
    pub images: u64,
    pub eval_loss: Option<f64>,
    /// Images that could not be read.
    #[serde(default)]
    pub skipped_images: u64,
    /// Why the run was stopped before its end, if it was.
    pub stopped: Option<String>,
    #[serde(default)]
    pub images_per_second: f64,
    #[serde(default)]
    pub training_seconds: f64,
    #[serde(default)]
    pub evaluation_seconds: f64,
    pub weights: Option<PathBuf>,
    /// What could not be written.
    #[serde(default)]
    pub failures: Vec<String>,
    /// Seconds of the first rank by kind of step.
    #[serde(default)]
    pub seconds: Map<String, Value>,
    pub note_on_seconds: Option<String>,
    /// Memory of a rank as its plans have it: arena and states.
    #[serde(default)]
    pub memory_bytes: Option<u64>,
    /// Account of time of each rank.
    #[serde(default)]
    pub ranks: Vec<Parts>,
    /// Collectives of a step.
    #[serde(default, rename = "exchanged")]
    pub collectives: Vec<Collective>,
    #[serde(flatten)]
    pub evaluation: Evaluation,
    #[serde(default)]
    pub schema: Schema<1>,
}

/// One collective of a step, over the whole run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Collective {
    pub layer: String,
    /// That each rank sends.
    pub bytes: usize,
    /// Ranks of its group; 0 in records of older versions, where it was all of them.
    #[serde(default)]
    pub ranks: usize,
    /// Calls.
    pub times: u64,
    /// From the last rank's entering to the end: the communication itself.
    pub seconds: f64,
    /// Name of the op: all_reduce, reduce_scatter, all_gather.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub kind: String,
    /// Seconds of those in which ranks waited for it: the mean over ranks.
    #[serde(default)]
    pub exposed: f64,
}

impl Collective {
    /// Bytes that a rank sends and receives in all calls, if ranks send what a ring of them would: 2(n-1)/n of the data, half of that where
    /// they scatter it, and n-1 times their own part where they gather. `all` is the number of ranks of the run.
    pub fn sent(&self, all: usize) -> f64 {
        let n = if self.ranks == 0 { all } else { self.ranks } as f64;
        let share = match self.kind.as_str() {
            "all_gather" => n - 1.0,
            "reduce_scatter" => (n - 1.0) / n,
            _ => 2.0 * (n - 1.0) / n,
        };
        share * self.bytes as f64 * self.times as f64
    }

    /// Bytes/s of those.
    pub fn bandwidth(&self, all: usize) -> f64 {
        if self.seconds > 0.0 { self.sent(all) / self.seconds } else { 0.0 }
    }
}

/// The last evaluation and the best, by the task; nothing where this process made none.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Evaluation {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eval_top1: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eval_top5: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eval_miou: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eval_pixel_accuracy: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eval_mean_accuracy: Option<f64>,
    /// IoU of every class.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eval_iou: Option<Vec<Option<f64>>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub best_top1: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub best_miou: Option<f64>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_summary_of_schema_0_is_read() {
        let text = r#"{"steps":6,"stopped":null,"weights":null,"ranks":[{"compute":1,"exchange":2,"wait":3,"data":4,"update":5,
            "idle":6,"hidden":7}],"exchanged":[{"layer":"head","bytes":100,"times":6,"seconds":0.5}],"eval_top1":0.5}"#;
        let summary: Summary = serde_json::from_str(text).unwrap();
        assert_eq!((summary.steps, summary.ranks[0].optimizer, summary.schema.number()), (6, 5.0, 0));
        assert_eq!(summary.evaluation, Evaluation { eval_top1: Some(0.5), ..Evaluation::default() });
        assert_eq!(summary.collectives[0].bandwidth(2), 1200.0, "a ring of two sends all of the data once");
        let written = serde_json::to_value(&summary).unwrap();
        assert_eq!(
            (&written["ranks"][0]["optimizer"], &written["exchanged"][0]["layer"]),
            (&5.0.into(), &"head".into())
        );
        assert!(written.get("eval_miou").is_none());
    }
}
