//! How a run goes on: what it was told at its start, from its records, with what is told now on top.

use crate::error::TrainError;
use crate::record::{self, Launch};
use comm::launch::environment;
use comm::{Launcher, Member, Place};
use config::settings::command_line;
use config::{Raw, Record, Resolved};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// Value of `--resume` that starts a run where there is none; a folder of this name is `./auto`.
const AUTO: &str = "auto";

/// Whether a run is started where there is none to continue.
fn resumes_or_starts(typed: &Raw) -> bool {
    matches!(&typed.resume, Some(Some(folder)) if folder == Path::new(AUTO))
}

/// The folder of the run to continue, if one is to be.
pub fn folder(typed: &Raw) -> Option<PathBuf> {
    let (folder, out) = (typed.resume.as_ref()?.as_deref(), typed.out.as_deref());
    if resumes_or_starts(typed) {
        return out.filter(|folder| record::holds_run(folder)).map(Path::to_path_buf);
    }
    folder.or(out).map(Path::to_path_buf)
}

/// A run continues over the ranks it had, unless it is told otherwise or a launcher decides.
pub fn ranks_as_before(typed: Raw) -> Raw {
    let Some(folder) = folder(&typed) else { return typed };
    let launched = Place::find(&environment).map_or(true, |place| place.launcher != Launcher::Nothing);
    if launched || typed.ranks.is_some() {
        return typed;
    }
    // What can't be read is reported when the run is prepared.
    let Ok(Some(last)) = told_last(&folder) else { return typed };
    let mpi = typed.comm.is_none_or(|comm| comm == comm::Backend::Mpi);
    Raw {
        ranks: last.ranks,
        comm: typed.comm.or(last.comm),
        timeout: typed.timeout.or(last.timeout),
        hostfile: typed.hostfile.or(last.hostfile.filter(|_| mpi)),
        ..typed
    }
}

/// Name of the records of a run's launches, for messages.
fn records(folder: &Path) -> String {
    folder.join("run.json").display().to_string()
}

/// What a launch of the run in `folder` was told.
fn told(folder: &Path, launch: &Launch, typed: Option<Record>) -> Result<Raw, TrainError> {
    Ok(match typed {
        Some(typed) => typed.raw(&records(folder))?,
        None => command_line::read(&launch.command, &launch.folder, &records(folder))?,
    })
}

fn told_last(folder: &Path) -> Result<Option<Raw>, TrainError> {
    let (launches, mut typed) = (record::launches(folder)?, record::typed(folder)?);
    launches.last().map(|last| told(folder, last, typed.pop().flatten())).transpose()
}

/// What is to be run: as typed, or over what the run that goes on was told before. Whether there is such a run is for the first rank
/// to see, and so are its records.
pub fn settings(typed: Raw, world: usize, member: Option<&Member>) -> Result<Raw, TrainError> {
    match to_continue(&typed, member)? {
        Some(folder) => continued(typed, folder, world, member),
        None if resumes_or_starts(&typed) => Ok(Raw { resume: None, ..typed }),
        None => Ok(typed),
    }
}

fn to_continue(typed: &Raw, member: Option<&Member>) -> Result<Option<PathBuf>, TrainError> {
    if !resumes_or_starts(typed) {
        return Ok(folder(typed));
    }
    if typed.out.is_none() {
        let why = "of which run? Name its folder: --out DIR";
        return Err(config::ConfigError::setting("resume", AUTO, why).into());
    }
    let there = || Ok(vec![u8::from(folder(typed).is_some())]);
    let there = from_first(member, "whether there is a run to continue", there)?;
    Ok((there == [1]).then(|| typed.out.clone()).flatten())
}

/// A continued run is told again what it was told at its start; what is typed now comes on top.
fn continued(
    mut typed: Raw,
    folder: PathBuf,
    world: usize,
    member: Option<&Member>,
) -> Result<Raw, TrainError> {
    let Some(History { told, typed_in, before }) = history(&folder, member)? else { return Ok(typed) };
    let mut earlier = told.raw(&records(&folder))?;
    typed.divide_again(&before, world);
    if typed.data.is_none() && earlier.data.is_some() {
        // Where it was, or beside the run, if both were moved.
        earlier.data = Some(before.place().find(&folder, Some(&typed_in))?.to_string());
    }
    typed.compute_again(&earlier, &before);
    if typed.global_batch.is_some() {
        // Divided anew; how it was divided before is of no concern.
        (earlier.batch_size, earlier.accumulate) = (None, None);
    }
    Ok(Raw { resume: Some(Some(folder.clone())), out: Some(folder), ..typed.or(earlier) })
}

/// The start of a run.
#[derive(Serialize, Deserialize)]
struct History {
    told: Record,
    typed_in: PathBuf,
    /// What that was resolved to.
    before: Resolved,
}

fn history(folder: &Path, member: Option<&Member>) -> Result<Option<History>, TrainError> {
    let corrupt = |error: serde_json::Error| {
        let problem = format!("can't be sent to other ranks: {error}");
        TrainError::Record { path: folder.join("run.json"), problem }
    };
    let history = from_first(member, "the history of the run", || {
        let (launches, typed) = (record::launches(folder)?, record::typed(folder)?);
        let before = record::config(folder)?;
        let first = launches.first().zip(typed.into_iter().next()).map(|(first, typed)| {
            let told = Record::of(&told(folder, first, typed)?, &first.folder);
            Ok::<_, TrainError>(History { told, typed_in: first.folder.clone(), before })
        });
        serde_json::to_vec(&first.transpose()?).map_err(corrupt)
    })?;
    serde_json::from_slice(&history).map_err(corrupt)
}

/// What the first rank finds, on every rank.
fn from_first(
    member: Option<&Member>,
    what: &str,
    find: impl FnOnce() -> Result<Vec<u8>, TrainError>,
) -> Result<Vec<u8>, TrainError> {
    let Some(world) = member.map(|member| &member.world).filter(|world| world.size() > 1) else {
        return find();
    };
    let found = if world.rank() == 0 { find()? } else { Vec::new() };
    Ok(world.broadcast_bytes(world.name(what), 0, found)?)
}
