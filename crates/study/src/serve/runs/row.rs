//! A run or study in the list: little is read of it, and only when it has changed.

use crate::report::live::{Listed, counted, date, grouped, score};
use crate::report::short;
use crate::serve::facts::{Facts, short_source, stamp};
use crate::serve::folder::{Kind, is_locked};
use crate::serve::http::escaped;
use crate::serve::state::{State, Watch};
use crate::store::{self, LOCK, POINTS};
use crate::tail::last_lines;
use records::{Metric, MetricsLine};
use std::path::PathBuf;
use std::time::{Duration, SystemTime};
use text::many;

/// Bytes of the metrics that are looked at: some hundred steps.
const TAIL: u64 = 64 << 10;

pub struct Row {
    folder: PathBuf,
    /// The last walk that met it.
    pub round: u64,
    pub was_read: bool,
    stamps: [Option<(u64, SystemTime)>; 3],
    of: Of,
}

enum Of {
    Run(Box<RunRow>),
    Study(StudyRow),
}

struct RunRow {
    facts: Facts,
    watch: Watch,
    state: State,
    step: Option<MetricsLine>,
    evaluation: Option<MetricsLine>,
}

#[derive(Default)]
struct StudyRow {
    title: String,
    started: u64,
    done: usize,
    all: usize,
    running: bool,
}

impl Row {
    pub fn new(folder: PathBuf, kind: Kind) -> Row {
        let of = match kind {
            Kind::Study => Of::Study(StudyRow::default()),
            Kind::Run => Of::Run(Box::new(RunRow {
                facts: Facts::default(),
                watch: Watch::default(),
                state: State::Starting,
                step: None,
                evaluation: None,
            })),
        };
        Row { folder, round: 0, was_read: false, stamps: [None; 3], of }
    }

    /// Reads what has changed; false if the folder holds nothing any more.
    pub fn look(&mut self, now: Duration) -> bool {
        let names = match self.of {
            Of::Run(_) => ["metrics.jsonl", "run.json", "config.json"],
            Of::Study(_) => ["study.json", POINTS, "results.json"],
        };
        let stamps = names.map(|name| stamp(&self.folder.join(name)));
        let changed = stamps != self.stamps;
        (self.stamps, self.was_read) = (stamps, true);
        match &mut self.of {
            Of::Run(run) => {
                if changed {
                    run.facts.look(&self.folder);
                    run.read(&last_lines(&self.folder.join("metrics.jsonl"), TAIL));
                }
                run.state = run.watch.look(&self.folder, run.share() >= 1.0, now);
            }
            Of::Study(study) => {
                if changed {
                    study.read(&self.folder);
                }
                study.running = is_locked(&self.folder.join(LOCK));
            }
        }
        stamps.iter().any(Option::is_some)
    }

    pub fn is_study(&self) -> bool {
        matches!(self.of, Of::Study(_))
    }

    pub fn goes_on(&self) -> bool {
        match &self.of {
            Of::Run(run) => run.state.goes_on(),
            Of::Study(study) => study.running,
        }
    }

    /// How it is, in one word.
    pub fn word(&self) -> &'static str {
        match &self.of {
            Of::Run(run) => run.state.word(),
            Of::Study(study) if study.all > 0 && study.done >= study.all => "finished",
            Of::Study(study) if study.running => "running",
            Of::Study(_) => "stopped",
        }
    }

    /// Seconds since 1970; 0 where no record tells.
    pub fn started(&self) -> u64 {
        match &self.of {
            Of::Run(run) => run.facts.started().unwrap_or(0),
            Of::Study(study) => study.started,
        }
    }

    /// Returns whether name, model, data or state have all these words, which are in small letters.
    pub fn matches(&self, name: &str, words: &str) -> bool {
        let about = match &self.of {
            Of::Run(run) => run.facts.about(),
            Of::Study(study) => format!("study {}", study.title),
        };
        let text = format!("{name} {about} {}", self.word()).to_lowercase();
        words.split_whitespace().all(|word| text.contains(word))
    }

    pub fn listed<'a>(&'a self, name: &'a str) -> Listed<'a> {
        let (state, share, about, numbers) = match &self.of {
            Of::Run(run) => (run.state(), run.share(), run.about(), run.numbers()),
            Of::Study(study) => {
                let state = format!("{} · {} of {} done", self.word(), study.done, counted(study.all, "run"));
                let share = if study.all == 0 { 0.0 } else { study.done as f64 / study.all as f64 };
                let title =
                    if study.title.is_empty() { String::new() } else { format!(" · {}", study.title) };
                (state, share, format!("study{title}"), started(study.started))
            }
        };
        Listed {
            href: format!("run/{}/", escaped(name)),
            name,
            word: self.word(),
            state,
            share,
            about,
            numbers,
        }
    }
}

fn started(seconds: u64) -> String {
    if seconds == 0 { String::new() } else { date(seconds) }
}

impl RunRow {
    /// Takes the last step and the last evaluation; an evaluation that is too far back stays as it was seen.
    fn read(&mut self, lines: &[String]) {
        let last = |evaluation: bool| {
            let lines = lines.iter().rev().filter(|line| line.contains("\"eval_loss\"") == evaluation);
            lines.filter_map(|line| serde_json::from_str::<MetricsLine>(line).ok()).next()
        };
        self.step = last(false);
        self.evaluation = last(true).or(self.evaluation.take()).filter(|_| !lines.is_empty());
    }

    fn done(&self) -> u64 {
        let steps = [&self.step, &self.evaluation].into_iter().flatten().map(|line| line.step + 1);
        steps.max().unwrap_or(0)
    }

    fn share(&self) -> f64 {
        match self.facts.config.steps {
            0 => 0.0,
            steps => (self.done() as f64 / steps as f64).min(1.0),
        }
    }

    fn state(&self) -> String {
        let steps = self.facts.config.steps.max(self.done());
        let of = if steps > 0 {
            format!(" · {} of {} steps", grouped(self.done() as f64), grouped(steps as f64))
        } else {
            String::new()
        };
        match &self.state {
            State::RunningOn(host) => format!("running on {host}{of}"),
            state if state.goes_on() || self.done() < steps => format!("{}{of}", state.word()),
            state => format!("{} · {}", state.word(), many(steps as usize, "step")),
        }
    }

    fn about(&self) -> String {
        let config = &self.facts.config;
        let ranks = if config.world > 1 { counted(config.world, "rank") } else { String::new() };
        let parts = [config.model.clone(), short_source(&config.data.source), ranks];
        let parts: Vec<String> = parts.into_iter().filter(|part| !part.is_empty()).collect();
        parts.join(" · ")
    }

    fn numbers(&self) -> String {
        let of = |line: &Option<MetricsLine>, metric| line.as_ref().and_then(|line| line.get(metric));
        let named = [(Metric::EvalTop1, "top-1"), (Metric::EvalMeanIou, "mean IoU")];
        let scores =
            named.map(|(metric, name)| of(&self.evaluation, metric).map(|x| format!("{name} {}", score(x))));
        let mut numbers: Vec<String> = scores.into_iter().flatten().collect();
        numbers.extend(of(&self.step, Metric::Loss).map(|x| format!("loss {}", short(x))));
        let rate = of(&self.step, Metric::ImagesPerSecond).filter(|_| self.state.goes_on());
        numbers.extend(rate.map(|x| format!("{} images/s", short(x))));
        numbers.extend(self.facts.started().map(date));
        numbers.join(" · ")
    }
}

impl StudyRow {
    fn read(&mut self, folder: &std::path::Path) {
        let Ok(plan) = store::read_plan(folder) else {
            if let Ok(results) = store::read_results(folder) {
                let runs = results.points.iter().map(|point| point.runs.len()).sum();
                (self.title, self.started, self.done, self.all) =
                    (results.title, results.started, runs, runs);
            }
            return;
        };
        let points = plan.points.iter().map(|point| folder.join(POINTS).join(format!("{}.json", point.id)));
        self.done = points.filter_map(|path| Some(store::read_point(&path).ok()?.runs.len())).sum();
        self.all = plan.points.len() * plan.study.repeats;
        (self.title, self.started) = (plan.study.title, plan.started);
    }
}
