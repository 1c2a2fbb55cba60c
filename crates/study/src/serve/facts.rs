//! What a run is: its data, model and settings, where it lies and how it was started, as `config.json`, `run.json` and `gpus.jsonl` tell.

use crate::report::live::{self as drawn, bytes, counted, date, grouped, percent};
use crate::tail::last_lines;
use records::{ConfigView, GpuLine, Launch};
use std::path::Path;
use std::time::SystemTime;
use text::many;

/// Bytes of `gpus.jsonl` that are looked at.
const TAIL: u64 = 64 << 10;

/// Both records, read again when they change.
#[derive(Default)]
pub struct Facts {
    stamps: [Option<(u64, SystemTime)>; 2],
    pub config: ConfigView,
    /// Every key of `config.json` with its value, as text.
    all: Vec<(String, String)>,
    pub launches: Vec<Launch>,
}

/// Size and time of a file; none if it is not there.
pub fn stamp(path: &Path) -> Option<(u64, SystemTime)> {
    let data = std::fs::metadata(path).ok()?;
    Some((data.len(), data.modified().ok()?))
}

impl Facts {
    pub fn look(&mut self, folder: &Path) {
        let (config, run) = (folder.join("config.json"), folder.join("run.json"));
        let stamps = [stamp(&config), stamp(&run)];
        if stamps == self.stamps {
            return;
        }
        let text = std::fs::read(&config).unwrap_or_default();
        self.config = serde_json::from_slice(&text).unwrap_or_default();
        self.all.clear();
        flatten("", &serde_json::from_slice(&text).unwrap_or_default(), &mut self.all);
        let run = std::fs::read(run).unwrap_or_default();
        self.launches = serde_json::from_slice(&run).unwrap_or_default();
        self.stamps = stamps;
    }

    /// Model, data and ranks in a line.
    pub fn about(&self) -> String {
        let ConfigView { model, data, world, .. } = &self.config;
        let images = match data.facts.train_images {
            0 => String::new(),
            images => many(images as usize, "image"),
        };
        let parts = [model.clone(), short_source(&data.source), images, counted((*world).max(1), "rank")];
        let parts: Vec<String> = parts.into_iter().filter(|part| !part.is_empty()).collect();
        if model.is_empty() { String::new() } else { parts.join(" · ") }
    }

    /// Seconds since 1970; none if no record tells.
    pub fn started(&self) -> Option<u64> {
        self.launches.first().map(|launch| launch.started)
    }

    /// The run's settings, folder, command and GPUs, as HTML.
    pub fn html(&self, folder: &Path) -> String {
        let mut rows = self.settings();
        let whole = std::path::absolute(folder).unwrap_or_else(|_| folder.to_path_buf());
        rows.push(("Folder", whole.display().to_string()));
        if let Some(launch) = self.launches.last() {
            let words = launch.command.iter().map(String::as_str);
            let command = shlex::try_join(words).unwrap_or_else(|_| launch.command.join(" "));
            rows.push(("Command", command));
            rows.push(("Typed in", launch.folder.display().to_string()));
            let machine = &launch.machine;
            let about = [machine.host.clone(), machine.cpu.clone(), counted(machine.threads, "thread")];
            rows.push(("Machine", format!("{} · vitesse {}", about.join(" · "), launch.version)));
            let continued = match self.launches.len() {
                1 => String::new(),
                launches => format!(", continued {}", counted(launches - 1, "time")),
            };
            rows.push(("Started", format!("{}{continued}", date(self.launches[0].started))));
        }
        let gpus = gpus(folder);
        if !gpus.is_empty() {
            rows.push(("GPUs", gpus.join("\n")));
        }
        drawn::facts(&rows, &self.all)
    }

    fn settings(&self) -> Vec<(&'static str, String)> {
        let c = &self.config;
        if c.model.is_empty() {
            return vec![];
        }
        let facts = &c.data.facts;
        let number = |n: u64| grouped(n as f64);
        let data = match facts.train_images {
            0 => c.data.source.clone(),
            images => format!(
                "{} · {}, {} of validation, {}",
                c.data.source,
                many(images as usize, "training image"),
                number(facts.test_images),
                many(facts.classes as usize, "class")
            ),
        };
        let size = c.network.size().map_or(String::new(), |size| format!(" · {size}"));
        let (world, accumulate) = (c.world.max(1), c.accumulate.max(1));
        let mut batch = many(c.batch * accumulate * world, "image");
        if world * accumulate > 1 {
            let parts = [(c.batch, "image"), (accumulate, "micro-step"), (world, "rank")];
            let parts = parts.iter().filter(|part| part.0 > 1 || part.1 == "image");
            let parts: Vec<String> = parts.map(|(n, what)| many(*n, what)).collect();
            batch = format!("{batch}: {}", parts.join(" × "));
        }
        let mut optimizer = format!("{} · weight decay {}", c.optimizer.name, c.optimizer.weight_decay);
        if let Some(peak) = c.schedule.peak {
            let warmup = c.schedule.warmup.filter(|steps| *steps > 0);
            let warmup = warmup
                .map_or(String::new(), |steps| format!(" after {} of warm-up", many(steps as usize, "step")));
            optimizer += &format!(" · learning rate {peak:e}, {}{warmup}", c.schedule.name);
        }
        let threads = if c.device == "cpu" {
            format!(" · {} per rank", counted(c.threads, "thread"))
        } else {
            String::new()
        };
        vec![
            ("Data", data),
            ("Model", format!("{}{size}", c.model)),
            ("Batch", batch),
            ("Length", format!("{}, {}", many(c.epochs as usize, "epoch"), many(c.steps as usize, "step"))),
            ("Optimizer", optimizer),
            ("Device", format!("{} · {}{threads} · seed {}", c.device, c.precision, c.seed)),
        ]
    }
}

/// A source without the way to its folder.
pub fn short_source(source: &str) -> String {
    match source.split_once(':') {
        Some((kind, path)) => {
            let last = path.trim_end_matches('/').rsplit('/').next().unwrap_or(path);
            format!("{kind}:{last}")
        }
        None => source.to_string(),
    }
}

/// Keys of a record with their values, as `network.depth`; lists are one value.
fn flatten(name: &str, value: &serde_json::Value, into: &mut Vec<(String, String)>) {
    match value {
        serde_json::Value::Object(members) => {
            for (key, value) in members {
                let name = if name.is_empty() { key.clone() } else { format!("{name}.{key}") };
                flatten(&name, value, into);
            }
        }
        serde_json::Value::Null if name.is_empty() => {}
        serde_json::Value::String(text) => into.push((name.to_string(), text.clone())),
        other => {
            let text: String = other.to_string().chars().take(200).collect();
            into.push((name.to_string(), text));
        }
    }
}

/// The GPU of each rank over the last epoch, a line each.
fn gpus(folder: &Path) -> Vec<String> {
    let lines = last_lines(&folder.join("gpus.jsonl"), TAIL);
    let lines: Vec<GpuLine> = lines.iter().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let last = lines.iter().map(|line| line.epoch).max();
    let of_last = lines.iter().filter(|line| Some(line.epoch) == last);
    let text = |line: &GpuLine| {
        let load = line.load.map_or(String::new(), |load| format!(" · load {}", percent(load)));
        let power = line.power.map_or(String::new(), |power| format!(" · {power:.0} W"));
        format!(
            "rank {}: GPU {}, {}{load} · {} of {} · up to {:.0} °C{power} (epoch {})",
            line.rank,
            line.gpu,
            line.name,
            bytes(line.memory_used),
            bytes(line.memory_total),
            line.temperature,
            line.epoch + 1
        )
    };
    of_last.map(text).collect()
}
