//! The other files of a run that grow by lines.

use crate::metrics::{Digits, Metric};
use crate::parts::Parts;
use crate::schema::Schema;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::fs;
use std::io::{self, Write};
use std::path::Path;

/// A line of `ranks.jsonl`: a step of one rank.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
pub struct RankLine {
    pub step: u64,
    pub rank: usize,
    #[serde(flatten)]
    pub parts: Parts,
    /// What the sensors of the rank's GPU read.
    pub gpu_load: Option<f64>,
    pub gpu_memory_used: Option<f64>,
    pub gpu_temperature: Option<f64>,
    pub gpu_power: Option<f64>,
    #[serde(default)]
    pub schema: Schema<1>,
}

impl RankLine {
    /// Writes the line, without building it in memory.
    pub fn write_json(&self, out: &mut impl Write) -> io::Result<()> {
        let Parts { compute, communication, wait, data, optimizer, idle, hidden } = self.parts;
        write!(
            out,
            "{{\"step\":{},\"rank\":{},\"seconds\":{:.6},\"compute\":{compute:.6},\"exchange\":{communication:.6},\
             \"wait\":{wait:.6},\"data\":{data:.6},\"optimizer\":{optimizer:.6},\"idle\":{idle:.6},\
             \"hidden_exchange\":{hidden:.6}",
            self.step,
            self.rank,
            self.parts.wall()
        )?;
        let sensed = [
            (Metric::GpuLoad, self.gpu_load),
            (Metric::GpuMemoryUsed, self.gpu_memory_used),
            (Metric::GpuTemperature, self.gpu_temperature),
            (Metric::GpuPower, self.gpu_power),
        ];
        for (metric, value) in sensed {
            let Some(value) = value else { continue };
            let declared = metric.declared();
            match declared.digits {
                Digits::Whole => write!(out, ",\"{}\":{}", declared.name, value as u64)?,
                _ => write!(out, ",\"{}\":{value:.6}", declared.name)?,
            }
        }
        writeln!(out, ",\"schema\":{}}}", self.schema.number())
    }
}

/// A line of `gpus.jsonl`: the GPU of a rank, over an epoch.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GpuLine {
    /// The last of the epoch.
    pub step: u64,
    pub epoch: u64,
    pub rank: usize,
    /// Number of the GPU on its host.
    pub gpu: usize,
    pub name: String,
    /// Mean share of the time in which something ran, 0 to 1.
    pub load: Option<f64>,
    /// Most bytes in use, by all programs.
    pub memory_used: f64,
    pub memory_free: f64,
    pub memory_total: f64,
    /// Highest, in degrees Celsius.
    pub temperature: f64,
    /// Mean, in watts.
    pub power: Option<f64>,
    #[serde(default)]
    pub schema: Schema<1>,
}

/// A line of `classes.jsonl`: the IoU of every class after a step, in the order of the labels. A class of which there is no pixel has none.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ClassesLine {
    pub step: u64,
    pub epoch: u64,
    pub iou: Vec<Option<f64>>,
    #[serde(default)]
    pub schema: Schema<1>,
}

/// All whole lines of a file; one that is still being written is left out.
pub fn read_lines<T: DeserializeOwned>(path: &Path) -> Result<Vec<T>, String> {
    let text = fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))?;
    let whole = &text[..text.rfind('\n').map_or(0, |end| end + 1)];
    let read = |line| serde_json::from_str(line).map_err(|e| format!("{}: {e}", path.display()));
    whole.lines().map(read).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_a_rank_is_read_as_it_was_written() {
        let parts = Parts { compute: 0.5, communication: 0.25, hidden: 0.125, ..Parts::default() };
        let line = RankLine {
            step: 3,
            rank: 1,
            parts,
            gpu_load: None,
            gpu_memory_used: Some(1000.0),
            gpu_temperature: Some(61.0),
            gpu_power: None,
            schema: Schema::CURRENT,
        };
        let mut text = vec![];
        line.write_json(&mut text).unwrap();
        assert_eq!(serde_json::from_slice::<RankLine>(&text).unwrap(), line);
        let text = String::from_utf8(text).unwrap();
        assert!(
            text.contains("\"exchange\":0.250000") && text.contains("\"gpu_memory_used\":1000,"),
            "{text}"
        );
    }
}
