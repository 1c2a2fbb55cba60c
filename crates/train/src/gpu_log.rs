//! `gpus.jsonl`: for every epoch and rank, which GPU it has and what that was like.

use crate::account::Step;
use crate::error::TrainError;
use devices::sensors::Sensors;
use records::{GpuLine, Schema};
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

/// Number and name of the GPU of each rank, where it has one.
pub type Gpus = Vec<Option<(usize, String)>>;

pub struct GpuLog {
    path: PathBuf,
    gpus: Gpus,
    epoch: u64,
    ranks: Vec<Sums>,
}

/// Over an epoch.
#[derive(Clone, Debug, Default)]
struct Sums {
    step: u64,
    loads: Mean,
    powers: Mean,
    most_used: f64,
    total: f64,
    hottest: f64,
    /// Whether anything was known.
    known: bool,
}

#[derive(Clone, Copy, Debug, Default)]
struct Mean {
    sum: f64,
    count: f64,
}

impl Mean {
    fn add(&mut self, x: f64) {
        if x.is_finite() {
            self.sum += x;
            self.count += 1.0;
        }
    }

    fn value(&self) -> Option<f64> {
        (self.count > 0.0).then_some(self.sum / self.count)
    }
}

impl Sums {
    fn add(&mut self, step: u64, sensors: &Sensors) {
        self.step = step;
        self.known |= sensors.is_known();
        self.loads.add(sensors.load);
        self.powers.add(sensors.power);
        // What is unknown is smaller than anything.
        self.most_used = self.most_used.max(sensors.memory_used);
        self.total = self.total.max(sensors.memory_total);
        self.hottest = self.hottest.max(sensors.temperature);
    }
}

impl GpuLog {
    /// Of a run whose next step this is; what was written of it and later ones goes.
    pub fn open(folder: &Path, gpus: Gpus, next_step: u64) -> Result<Self, TrainError> {
        let path = folder.join("gpus.jsonl");
        let ranks = vec![Sums::default(); gpus.len()];
        let log = GpuLog { path, gpus, epoch: 0, ranks };
        log.cut(next_step)?;
        Ok(log)
    }

    fn failed(&self, source: std::io::Error) -> TrainError {
        TrainError::Io { path: self.path.clone(), source }
    }

    fn cut(&self, next_step: u64) -> Result<(), TrainError> {
        let text = match fs::read(&self.path) {
            Ok(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(self.failed(error)),
        };
        let stays =
            |line: &&str| serde_json::from_str::<GpuLine>(line).is_ok_and(|line| line.step < next_step);
        let kept: String = text.lines().filter(stays).flat_map(|line| [line, "\n"]).collect();
        files::replace(&self.path, |file| file.write_all(kept.as_bytes())).map_err(|e| self.failed(e))
    }

    /// Takes in a step; one of a new epoch ends the last.
    pub fn step(&mut self, step: u64, epoch: u64, account: &Step) -> Result<(), TrainError> {
        if epoch != self.epoch {
            self.end_epoch()?;
            self.epoch = epoch;
        }
        for (sums, sensors) in self.ranks.iter_mut().zip(&account.sensors) {
            sums.add(step, sensors);
        }
        Ok(())
    }

    /// Writes what there is of the present epoch. Nothing where there are no sensors.
    pub fn end_epoch(&mut self) -> Result<(), TrainError> {
        let mut text = String::new();
        let sums: Vec<Sums> = self.ranks.iter_mut().map(std::mem::take).collect();
        for (rank, (sums, gpu)) in sums.into_iter().zip(&self.gpus).enumerate() {
            let Sums { step, loads, powers, most_used, total, hottest, known } = sums;
            let Some((number, name)) = gpu.as_ref().filter(|_| known) else { continue };
            let line = GpuLine {
                step,
                epoch: self.epoch,
                rank,
                gpu: *number,
                name: name.clone(),
                load: loads.value(),
                memory_used: most_used,
                memory_free: total - most_used,
                memory_total: total,
                temperature: hottest,
                power: powers.value(),
                schema: Schema::CURRENT,
            };
            let line = serde_json::to_string(&line).map_err(|error| self.failed(error.into()))?;
            text += &format!("{line}\n");
        }
        if text.is_empty() {
            return Ok(());
        }
        let file = files::append(&self.path);
        file.and_then(|mut file| file.write_all(text.as_bytes())).map_err(|error| self.failed(error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use testing::Folder;

    fn sensed(load: f64, used: f64) -> Step {
        let known =
            Sensors { load, memory_used: used, memory_total: 100.0, temperature: 50.0, ..Sensors::unknown() };
        Step { sensors: vec![known, Sensors::unknown()], ..Step::default() }
    }

    fn lines(folder: &Folder) -> Vec<serde_json::Value> {
        let text = fs::read_to_string(folder.0.join("gpus.jsonl")).unwrap_or_default();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    #[test]
    fn an_epoch_is_a_line_for_every_gpu_with_sensors() {
        let folder = Folder::new("gpu-log");
        let gpus = vec![Some((3, "H200".to_string())), Some((4, "P4".to_string()))];
        let write = |next: u64| {
            let mut log = GpuLog::open(&folder.0, gpus.clone(), next).unwrap();
            for step in next..6 {
                log.step(step, step / 3, &sensed(0.2 * (step % 3) as f64, 10.0 + step as f64)).unwrap();
            }
            log.end_epoch().unwrap();
        };
        write(0);
        let whole = lines(&folder);
        assert_eq!(whole.len(), 2, "the second GPU has no sensors");
        let first = &whole[0];
        assert_eq!((&first["gpu"], &first["name"], &first["step"]), (&json!(3), &json!("H200"), &json!(2)));
        assert!((first["load"].as_f64().unwrap() - 0.2).abs() < 1e-12 && first["power"].is_null());
        assert_eq!((&first["memory_used"], &first["memory_free"]), (&json!(12.0), &json!(88.0)));
        // Gone on from the second epoch.
        write(3);
        assert_eq!(lines(&folder), whole);
        assert_eq!(fs::read_dir(&folder.0).unwrap().count(), 1);
    }
}
