//! A study as its files tell it: what is measured so far, and the run that goes on.

use super::folder::is_locked;
use super::run::Run;
use crate::engine::results_of;
use crate::grid::MOST_POINTS;
use crate::report;
use crate::report::live::{self as drawn, counted};
use crate::results::{Point, Results};
use crate::store::{self, POINTS, Plan, RESULTS, RUNS};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

pub struct Study {
    folder: PathBuf,
    /// Names, sizes and times of the files that were read, and what they came to.
    stamps: Vec<Stamp>,
    seen: Seen,
    /// The folder of the run that goes on.
    now: Option<(PathBuf, Run)>,
}

type Stamp = (PathBuf, u64, Option<SystemTime>);

/// What is on disk of a study.
#[derive(Default)]
struct Seen {
    plan: Option<Plan>,
    results: Option<Results>,
    /// Files that are no points.
    unreadable: usize,
    /// Table and figures.
    html: String,
}

impl Seen {
    /// From the points as they are, since `results.json` is written only when a study ends or stops. Without a plan, it is all there is.
    fn read(folder: &Path, stamps: &[Stamp]) -> Seen {
        let (mut points, mut unreadable): (Vec<Point>, usize) = (vec![], 0);
        for (path, ..) in stamps.iter().filter(|stamp| !stamp.0.ends_with(RESULTS)) {
            match store::read_point(path) {
                Ok(point) => points.push(point),
                Err(_) => unreadable += 1,
            }
        }
        let plan = store::read_plan(folder).ok();
        let results = match &plan {
            Some(plan) => Some(results_of(plan, points)),
            None => report::read(folder).ok(),
        };
        let html = results.as_ref().map_or_else(String::new, drawn::study);
        Seen { plan, results, unreadable, html }
    }

    fn points(&self) -> &[Point] {
        self.results.as_ref().map_or(&[], |results| &results.points)
    }

    /// Runs that are done, and those that are planned.
    fn runs(&self) -> (usize, usize) {
        let done = self.points().iter().map(|point| point.runs.len()).sum();
        (done, self.plan.as_ref().map_or(done, |plan| plan.points.len() * plan.study.repeats))
    }
}

impl Study {
    pub fn new(folder: &Path) -> Study {
        Study { folder: folder.to_path_buf(), stamps: vec![], seen: Seen::default(), now: None }
    }

    /// Reads what has changed since the last look.
    pub fn look(&mut self, now: Duration) {
        let stamps = stamps(&self.folder);
        if stamps != self.stamps || self.seen.plan.is_none() {
            self.seen = Seen::read(&self.folder, &stamps);
            self.stamps = stamps;
        }
        match (self.running(), &self.now) {
            (Some(folder), Some((known, _))) if folder == *known => {}
            (Some(folder), _) => self.now = Some((folder.clone(), Run::new(&folder))),
            (None, _) => self.now = None,
        }
        if let Some((_, run)) = &mut self.now {
            run.look(now);
        }
    }

    /// The newest folder of a run that no point has yet.
    fn running(&self) -> Option<PathBuf> {
        let (done, all) = self.seen.runs();
        let known: Vec<String> = self
            .seen
            .points()
            .iter()
            .flat_map(|point| point.runs.iter().map(|run| store::run_name(&point.id, run.repeat)))
            .collect();
        let folders = std::fs::read_dir(self.folder.join(RUNS)).ok().filter(|_| done < all)?.flatten();
        // Beside folders of runs lies what they printed.
        let folders = folders.filter(|entry| entry.file_type().is_ok_and(|file| file.is_dir()));
        let new = folders.filter(|entry| !known.iter().any(|name| entry.file_name() == name.as_str()));
        new.max_by_key(|entry| entry.metadata().and_then(|data| data.modified()).ok())
            .map(|entry| entry.path())
    }

    pub fn title(&self) -> Option<String> {
        let title = self.seen.results.as_ref().map(|results| results.title.clone());
        title.filter(|title| !title.is_empty())
    }

    /// As far as it can be given now.
    pub fn answer(&self) -> String {
        let (done, _) = self.seen.runs();
        self.seen
            .results
            .as_ref()
            .filter(|_| done > 0)
            .map_or(String::new(), |results| results.summary.clone())
    }

    pub fn state(&self) -> String {
        let (done, all) = self.seen.runs();
        let mut state = vec![format!("{done} of {} done", counted(all, "run"))];
        let failed = self.seen.points().iter().flat_map(|point| &point.runs);
        match failed.filter(|run| run.measured().is_none()).count() {
            0 => {}
            failed => state.push(format!("{failed} failed")),
        }
        if self.seen.unreadable > 0 {
            state.push(format!("{} that can't be read", counted(self.seen.unreadable, "file")));
        }
        state.push(match self.word() {
            "finished" => "the study is finished".into(),
            word => word.into(),
        });
        state.join(" · ")
    }

    pub fn is_done(&self) -> bool {
        let (done, all) = self.seen.runs();
        done == all && all > 0
    }

    /// How it is, in one word.
    pub fn word(&self) -> &'static str {
        match is_locked(&self.folder.join(store::LOCK)) {
            _ if self.is_done() => "finished",
            true => "running",
            false => "stopped",
        }
    }

    /// Where it lies, as HTML.
    pub fn facts(&self) -> String {
        let whole = std::path::absolute(&self.folder).unwrap_or_else(|_| self.folder.clone());
        let mut rows = vec![("Folder", whole.display().to_string())];
        if let Some(plan) = &self.seen.plan {
            let platform = &plan.platform;
            rows.push((
                "Machine",
                format!("{} · {} · vitesse {}", platform.host, platform.cpu, plan.version),
            ));
            rows.push(("Started", drawn::date(plan.started)));
            rows.push(("Points", format!("{} × {}", plan.points.len(), counted(plan.study.repeats, "run"))));
        }
        drawn::facts(&rows, &[])
    }

    pub fn share(&self) -> f64 {
        let (done, all) = self.seen.runs();
        let part = self.now.as_ref().map_or(0.0, |(_, run)| run.share());
        if all == 0 { 0.0 } else { ((done as f64 + part) / all as f64).min(1.0) }
    }

    pub fn figures(&self) -> &str {
        &self.seen.html
    }

    /// The run that goes on.
    pub fn now(&self) -> String {
        let Some((folder, run)) = &self.now else { return String::new() };
        let head = format!("{} · {}", self.called(folder), run.state());
        drawn::now(&head) + &run.figures() + &run.log()
    }

    /// What a run's folder is the run of.
    fn called(&self, folder: &Path) -> String {
        let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let known = self.seen.plan.as_ref().and_then(|plan| {
            let (id, repeat) = name.rsplit_once('.')?;
            let point = plan.points.iter().find(|point| point.id == id)?;
            let (kind, ranks) = (point.kind.name(), counted(point.settings.ranks, "rank"));
            let (batch, repeat) = (point.settings.batch_per_rank, repeat.parse::<usize>().ok()? + 1);
            Some(format!(
                "{kind} · {} · {ranks} · batch {batch} per rank · run {repeat} of {}",
                point.series, plan.study.repeats
            ))
        });
        known.unwrap_or(name)
    }
}

/// The files of a study, as they are now.
fn stamps(folder: &Path) -> Vec<Stamp> {
    let mut paths = vec![folder.join(RESULTS)];
    if let Ok(files) = std::fs::read_dir(folder.join(POINTS)) {
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
