//! How a run was started: `run.json`, and what readers need of `config.json`.

use crate::schema::Schema;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;
use std::path::PathBuf;

/// One start or continuation of a run: an entry of `run.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Launch {
    pub command: Vec<String>,
    /// The folder it was typed in.
    pub folder: PathBuf,
    /// Seconds since 1970.
    pub started: u64,
    /// Version of vitesse.
    pub version: String,
    pub machine: Machine,
    #[serde(default)]
    pub schema: Schema<1>,
}

/// The machine that a run ran on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Machine {
    pub host: String,
    pub os: String,
    pub kernel: String,
    pub cpu: String,
    /// Threads the operating system lets this program run at once.
    pub threads: usize,
    /// The instruction set the kernels use.
    pub simd: String,
    pub memory_bytes: u64,
}

/// Keys of `config.json` that readers need who know nothing of configurations; what a file lacks is empty.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct ConfigView {
    pub model: String,
    pub steps: u64,
    pub epochs: u64,
    /// Ranks; 0 where the file has none.
    pub world: usize,
    /// Images of a micro-step of a rank.
    pub batch: usize,
    pub accumulate: usize,
    pub device: String,
    pub precision: String,
    pub threads: usize,
    pub seed: u64,
    pub data: DataView,
    pub network: NetworkView,
    pub optimizer: OptimizerView,
    pub schedule: ScheduleView,
}

/// Data set of a run.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct DataView {
    /// As `--data` has it: `synthetic`, or `folder:/home/ann/photos`.
    #[serde(deserialize_with = "source")]
    pub source: String,
    pub facts: FactsView,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct FactsView {
    pub train_images: u64,
    pub test_images: u64,
    pub classes: u64,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct NetworkView {
    /// Rows and columns of the images; empty where the network has them in its backbone.
    #[serde(deserialize_with = "one_or_more")]
    image: Vec<u64>,
    backbone: Option<Box<NetworkView>>,
}

impl NetworkView {
    /// Size of the images: `224 px`, `64×96 px`; none where the file doesn't tell.
    pub fn size(&self) -> Option<String> {
        match (&self.image[..], &self.backbone) {
            ([side], _) => Some(format!("{side} px")),
            ([rows, columns], _) if rows == columns => Some(format!("{rows} px")),
            ([rows, columns], _) => Some(format!("{rows}×{columns} px")),
            (_, Some(backbone)) => backbone.size(),
            _ => None,
        }
    }
}

/// A synthetic set is recorded by its name, others as `{"folder": "/home/ann/photos"}`, or `{"cifar100": {"path": "/data", …}}`.
fn source<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    let value = Value::deserialize(deserializer)?;
    let placed = value.as_object().and_then(|sets| sets.iter().next()).and_then(|(set, place)| {
        let path = place.as_str().or_else(|| place.get("path")?.as_str())?;
        Some(format!("{set}:{path}"))
    });
    Ok(placed.or_else(|| value.as_str().map(str::to_string)).unwrap_or_default())
}

/// A number, or a list of some.
fn one_or_more<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u64>, D::Error> {
    let value = Value::deserialize(deserializer)?;
    let one = value.as_u64().map(|one| vec![one]);
    let more = || value.as_array().map(|all| all.iter().filter_map(Value::as_u64).collect());
    Ok(one.or_else(more).unwrap_or_default())
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct OptimizerView {
    #[serde(rename = "type")]
    pub name: String,
    pub weight_decay: f64,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct ScheduleView {
    #[serde(rename = "type")]
    pub name: String,
    /// Highest learning rate.
    pub peak: Option<f64>,
    /// Steps.
    pub warmup: Option<u64>,
}

/// How a run ended: `ended.json`. A run that goes on, or whose process was killed, has none.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Ending {
    pub how: Ended,
    /// Signal that stopped it, or the error that it failed with.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub why: Option<String>,
    /// Steps that were made.
    pub steps: u64,
    /// Seconds since 1970.
    pub ended: u64,
    #[serde(default)]
    pub schema: Schema<1>,
}

impl Ending {
    /// Name of the file in a run's folder.
    pub const FILE: &str = "ended.json";
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Ended {
    /// All steps were made, or those that `--early-stop` left.
    Finished,
    Stopped,
    Failed,
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// Data and images as every family and kind of set are recorded: a reader that trips over one knows nothing of the run.
    #[test]
    fn a_configuration_is_read_whatever_its_data_and_its_network() {
        for (source, wanted) in [
            (json!("synthetic"), "synthetic"),
            (json!({"folder": "/home/ann/photos"}), "folder:/home/ann/photos"),
            (json!({"cifar100": {"path": "/data", "coarse": true}}), "cifar100:/data"),
            (json!(7), ""),
        ] {
            let text =
                json!({"model": "vit-ti/4", "data": {"source": source, "facts": {"classes": 4}}}).to_string();
            let view: ConfigView = serde_json::from_str(&text).unwrap();
            assert_eq!((view.model.as_str(), view.data.source.as_str()), ("vit-ti/4", wanted));
            assert_eq!(view.data.facts.classes, 4);
        }
        for (network, wanted) in [
            (json!({"family": "vit", "image": 32}), Some("32 px")),
            (json!({"family": "swinv2", "image": [256, 256]}), Some("256 px")),
            (json!({"family": "segmenter", "backbone": {"image": [64, 96]}, "head": {}}), Some("64×96 px")),
            (json!({"family": "of tomorrow"}), None),
        ] {
            let view: ConfigView = serde_json::from_str(&json!({"network": network}).to_string()).unwrap();
            assert_eq!(view.network.size().as_deref(), wanted);
        }
    }
}
