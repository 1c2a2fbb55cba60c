//! What the live page shows: fragments of HTML with figures, which the page puts in place when they change.

use super::run::Run;
use super::{is_study, named};
use crate::report::live as drawn;
use crate::results::{FORMAT, Platform, Point, Results};
use serde_json::json;
use std::path::{Path, PathBuf};

/// Files of points that a page looks at.
const MOST_POINTS: usize = 2000;

pub fn page() -> String {
    drawn::page()
}

/// A folder, looked at again and again.
pub struct Live {
    folder: PathBuf,
    run: Run,
    /// Names, sizes and times of a study's files, and what was drawn of them.
    study: Option<(Vec<Stamp>, String)>,
}

type Stamp = (PathBuf, u64, Option<std::time::SystemTime>);

impl Live {
    pub fn new(folder: PathBuf) -> Live {
        Live { run: Run::new(&folder), folder, study: None }
    }

    /// The page's data as it is now.
    pub fn json(&mut self) -> String {
        if is_study(&self.folder) { self.study() } else { self.run() }
    }

    fn run(&mut self) -> String {
        self.run.look();
        let (run, config) = (&self.run, self.run.config());
        let (mut about, mut state) = (vec![], vec![]);
        if !config.model.is_empty() {
            about.push(config.model.clone());
            about.push(crate::report::live::counted(config.world.max(1), "rank"));
        }
        if run.step == 0 && run.log.is_empty() {
            state.push("no step is written yet".to_string());
        } else {
            // Steps are numbered from 0.
            let done = run.step + 1;
            state.push(format!("epoch {} of {}", run.epoch, config.epochs.max(run.epoch)));
            state.push(format!("step {done} of {}", config.steps.max(done)));
        }
        let share = if config.steps > 0 { (run.step as f64 + 1.0) / config.steps as f64 } else { 0.0 };
        let share = if run.log.is_empty() { 0.0 } else { share.min(1.0) };
        let figures = drawn::run_figures(&drawn::RunCurves {
            loss: run.loss.points(),
            eval_loss: run.eval_loss.clone(),
            top1: run.top1.points(),
            eval_top1: run.eval_top1.clone(),
            eval_miou: run.eval_miou.clone(),
            rate: run.rate.points(),
            ranks: run.ranks(),
        });
        let answer = json!({
            "title": named(&self.folder),
            "about": about.join(" · "),
            "state": state.join(" · "),
            "share": share,
            "sections": { "figures": drawn::fragments(&figures), "log": drawn::log(&run.log) },
        });
        answer.to_string()
    }

    fn study(&mut self) -> String {
        let stamps = stamps(&self.folder);
        if let Some((known, answer)) = &self.study
            && *known == stamps
        {
            return answer.clone();
        }
        let (results, unreadable, finished) = read(&self.folder, &stamps);
        let failed = results.points.iter().filter(|point| point.summary.is_none()).count();
        let mut state = vec![crate::report::live::counted(results.points.len(), "point") + " measured"];
        if failed > 0 {
            state.push(format!("{failed} of them without a result"));
        }
        if unreadable > 0 {
            state.push(format!("{unreadable} files that are no points"));
        }
        if finished {
            state.push("the study is finished".into());
        }
        let answer = json!({
            "title": if results.title.is_empty() { named(&self.folder) } else { results.title.clone() },
            "about": results.summary,
            "state": state.join(" · "),
            "share": if finished { 1.0 } else { 0.0 },
            "sections": { "figures": drawn::study(&results), "log": "" },
        })
        .to_string();
        self.study = Some((stamps, answer.clone()));
        answer
    }
}

/// The files of a study, as they are now.
fn stamps(folder: &Path) -> Vec<Stamp> {
    let mut paths = vec![folder.join("results.json")];
    if let Ok(files) = std::fs::read_dir(folder.join("points")) {
        let files = files.filter_map(|file| Some(file.ok()?.path()));
        paths.extend(files.filter(|path| path.extension().is_some_and(|e| e == "json")).take(MOST_POINTS));
    }
    paths.sort();
    let stamp = |path: PathBuf| {
        let data = std::fs::metadata(&path).ok()?;
        Some((path, data.len(), data.modified().ok()))
    };
    paths.into_iter().filter_map(stamp).collect()
}

/// Whole results where a study is finished, else the points that are. Says how many files are neither, and whether it is finished.
fn read(folder: &Path, stamps: &[Stamp]) -> (Results, usize, bool) {
    if let Ok(results) = crate::report::read(folder) {
        return (results, 0, true);
    }
    let (mut points, mut unreadable): (Vec<Point>, usize) = (vec![], 0);
    for (path, ..) in stamps.iter().filter(|stamp| !stamp.0.ends_with("results.json")) {
        let point = std::fs::read(path).ok().and_then(|text| serde_json::from_slice(&text).ok());
        match point {
            Some(point) => points.push(point),
            None => unreadable += 1,
        }
    }
    let platform = Platform {
        name: String::new(),
        host: String::new(),
        cpu: String::new(),
        cores: 0,
        gpus: vec![],
        memory_bytes: 0,
    };
    let (version, name, title, summary) = Default::default();
    let results = Results {
        format: FORMAT,
        version,
        name,
        title,
        platform,
        started: 0,
        points,
        warnings: vec![],
        summary,
    };
    (results, unreadable, false)
}
