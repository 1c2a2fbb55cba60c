//! A study's folder. `study.json` is what is to be measured, `points/` has a file a point with the runs done so far, `runs/` what
//! each run wrote by itself. Files are written aside, synced and renamed, so that a kill at any moment costs the run under way.

use crate::error::StudyError;
use crate::grid::Planned;
use crate::report::ReportError;
use crate::results::{FORMAT, Platform, Point, Results, Run};
use crate::spec::Study;
use files;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::fs::{self, File, TryLockError};
use std::io::Write;
use std::path::{Path, PathBuf};

/// `study.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    pub format: u32,
    pub version: String,
    /// Seconds since 1970.
    pub started: u64,
    /// Where the study was begun: paths in it are relative to that.
    pub folder: PathBuf,
    pub platform: Platform,
    pub study: Study,
    pub points: Vec<Planned>,
}

/// A file of `points/`.
#[derive(Serialize, Deserialize)]
struct PointFile {
    format: u32,
    point: Point,
}

/// The plan in a folder, which another process may be working on.
pub fn read_plan(folder: &Path) -> Result<Plan, StudyError> {
    read_json(&folder.join(PLAN), "plan of a study")
}

/// A file of `points/`.
pub fn read_point(path: &Path) -> Result<Point, StudyError> {
    read_json(path, "point of a study").map(|PointFile { point, .. }| point)
}

/// What the folder of a run is called.
pub fn run_name(id: &str, repeat: usize) -> String {
    format!("{id}.{repeat}")
}

/// The folder of a study that this process works on.
pub struct Store {
    pub folder: PathBuf,
    pub plan: Plan,
    /// Nobody else works here while this is held.
    _lock: File,
}

const PLAN: &str = "study.json";
pub const RESULTS: &str = "results.json";
pub const POINTS: &str = "points";
pub const RUNS: &str = "runs";
pub const LOCK: &str = ".lock";

impl Store {
    /// Begins a study in a folder, or goes on with the same study there.
    pub fn open(folder: &Path, plan: Plan) -> Result<Self, StudyError> {
        if !folder.join(PLAN).try_exists().map_err(StudyError::io(folder))? {
            return Self::create(folder, plan);
        }
        let store = Self::resume(folder, &plan.version)?;
        match difference(&store.plan, &plan) {
            Some(why) => Err(StudyError::OtherStudy { folder: folder.to_path_buf(), why }),
            None => Ok(store),
        }
    }

    fn create(folder: &Path, plan: Plan) -> Result<Self, StudyError> {
        fs::create_dir_all(folder).map_err(StudyError::io(folder))?;
        // Whoever was killed before its plan was written left no more than these.
        let ours = |name: &str| name == LOCK || name == format!(".{PLAN}{}", files::UNFINISHED);
        for entry in fs::read_dir(folder).map_err(StudyError::io(folder))? {
            let entry = entry.map_err(StudyError::io(folder))?;
            if !ours(&entry.file_name().to_string_lossy()) {
                return Err(StudyError::NotEmpty(folder.to_path_buf()));
            }
        }
        let lock = lock(folder)?;
        write_json(&folder.join(PLAN), &plan)?;
        Ok(Store { folder: folder.to_path_buf(), plan, _lock: lock })
    }

    /// Goes on with the study in a folder.
    pub fn resume(folder: &Path, version: &str) -> Result<Self, StudyError> {
        let path = folder.join(PLAN);
        if !path.try_exists().map_err(StudyError::io(&path))? {
            return Err(StudyError::NothingToResume(folder.to_path_buf()));
        }
        let lock = lock(folder)?;
        let plan = read_plan(folder)?;
        if plan.version != version {
            let (found, here) = (plan.version, version.to_string());
            return Err(StudyError::OtherVersion { folder: folder.to_path_buf(), found, here });
        }
        let store = Store { folder: folder.to_path_buf(), plan, _lock: lock };
        // Results are made again from the points, but never over something that this build can't read.
        if store.folder.join(RESULTS).exists() {
            read_results(&store.folder)?;
        }
        store.points()?;
        Ok(store)
    }

    fn point_path(&self, id: &str) -> PathBuf {
        self.folder.join(POINTS).join(format!("{id}.json"))
    }

    /// Where a run writes what it measures.
    pub fn run_folder(&self, id: &str, repeat: usize) -> PathBuf {
        self.folder.join(RUNS).join(run_name(id, repeat))
    }

    /// All points in the order of the plan, with the runs done so far.
    pub fn points(&self) -> Result<Vec<Point>, StudyError> {
        self.plan.points.iter().map(|planned| self.point(planned)).collect()
    }

    fn point(&self, planned: &Planned) -> Result<Point, StudyError> {
        let path = self.point_path(&planned.id);
        let Planned { id, kind, series, settings, .. } = planned.clone();
        let empty = Point {
            id,
            kind,
            series,
            settings,
            runs: vec![],
            summary: None,
            limiter: None,
            flags: vec![],
            factors: None,
        };
        if !path.try_exists().map_err(StudyError::io(&path))? {
            return Ok(empty);
        }
        let point = read_point(&path)?;
        let same = Point { runs: vec![], ..point.clone() } == empty;
        if same && point.runs.iter().all(|run| run.repeat < self.plan.study.repeats) {
            return Ok(point);
        }
        Err(StudyError::Corrupt { path, what: "point of this study", why: "its settings are others".into() })
    }

    /// Adds a run to its point, on disk when this returns.
    pub fn add(&self, planned: &Planned, run: Run) -> Result<(), StudyError> {
        let mut point = self.point(planned)?;
        point.runs.retain(|other| other.repeat != run.repeat);
        point.runs.push(run);
        point.runs.sort_by_key(|run| run.repeat);
        self.write(point)
    }

    /// Takes away failed runs, so that they are tried again.
    pub fn forget_failures(&self) -> Result<(), StudyError> {
        for mut point in self.points()? {
            let before = point.runs.len();
            point.runs.retain(|run| run.measured().is_some());
            if point.runs.len() < before {
                self.write(point)?;
            }
        }
        Ok(())
    }

    fn write(&self, point: Point) -> Result<(), StudyError> {
        let folder = self.folder.join(POINTS);
        fs::create_dir_all(&folder).map_err(StudyError::io(&folder))?;
        write_json(&self.point_path(&point.id), &PointFile { format: FORMAT, point })
    }
}

/// In what another plan is another study.
fn difference(old: &Plan, new: &Plan) -> Option<String> {
    let ids = |plan: &Plan| plan.points.iter().map(|point| point.id.clone()).collect::<Vec<_>>();
    let (had, asked) = (ids(old), ids(new));
    if let Some(id) = asked.iter().find(|id| !had.contains(id)) {
        return Some(format!("it has no point {id}"));
    }
    if let Some(id) = had.iter().find(|id| !asked.contains(id)) {
        return Some(format!("it has a point {id}"));
    }
    let (a, b) = (&old.study, &new.study);
    if a.repeats != b.repeats {
        return Some(format!("it repeats runs {} times, not {}", a.repeats, b.repeats));
    }
    if old.platform.host != new.platform.host {
        return Some(format!("it was begun on {}, not on {}", old.platform.host, new.platform.host));
    }
    (a != b).then(|| "name, order or the way ranks are started differ".to_string())
}

fn lock(folder: &Path) -> Result<File, StudyError> {
    let path = folder.join(LOCK);
    let file = File::options().create(true).truncate(false).write(true).open(&path);
    let file = file.map_err(StudyError::io(&path))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(StudyError::Busy(folder.to_path_buf())),
        Err(TryLockError::Error(source)) => Err(StudyError::Io { path, source }),
    }
}

/// Reads the results in a folder, or in a file.
pub fn read_results(path: &Path) -> Result<Results, StudyError> {
    let file = if path.is_file() { path.to_path_buf() } else { path.join(RESULTS) };
    if !file.exists() {
        return Err(StudyError::Report(ReportError::NoResults(path.to_path_buf())));
    }
    read_json(&file, "results of a study")
}

fn read_json<T: DeserializeOwned>(path: &Path, what: &'static str) -> Result<T, StudyError> {
    let text = fs::read_to_string(path).map_err(StudyError::io(path))?;
    let corrupt = |why: String| StudyError::Corrupt { path: path.to_path_buf(), what, why };
    let value: Value = serde_json::from_str(&text).map_err(|e| corrupt(e.to_string()))?;
    match value.get("format").and_then(Value::as_u64) {
        Some(format) if format == u64::from(FORMAT) => {}
        Some(found) => return Err(StudyError::OtherFormat { path: path.to_path_buf(), found }),
        None => return Err(corrupt("it names no format".to_string())),
    }
    serde_json::from_value(value).map_err(|e| corrupt(e.to_string()))
}

pub(crate) fn write_json(path: &Path, value: &impl Serialize) -> Result<(), StudyError> {
    let text = serde_json::to_string_pretty(value).map_err(|e| StudyError::Corrupt {
        path: path.to_path_buf(),
        what: "record that can be written",
        why: e.to_string(),
    })?;
    files::replace(path, |file| writeln!(file, "{text}")).map_err(StudyError::io(path))
}
