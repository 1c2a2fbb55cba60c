//! Everything that can end a study, each with the culprit in its text.

use crate::results::FORMAT;
use std::path::PathBuf;

#[derive(Debug, thiserror::Error)]
pub enum StudyError {
    #[error("{file}: {why}")]
    File { file: String, why: String },
    /// A study that can't be, whoever asked for it.
    #[error("{0}")]
    Impossible(String),
    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: std::io::Error },
    #[error("{}: is no {what}: {why}", path.display())]
    Corrupt { path: PathBuf, what: &'static str, why: String },
    #[error("{}: has format {found}, and this build reads {FORMAT}: it was written by another version of vitesse", path.display())]
    OtherFormat { path: PathBuf, found: u64 },
    #[error("{} was begun by vitesse {found}, and this is {here}: choose another --out, so that their times don't mix", folder.display())]
    OtherVersion { folder: PathBuf, found: String, here: String },
    #[error("{} holds another study: {why}; choose another --out", folder.display())]
    OtherStudy { folder: PathBuf, why: String },
    #[error("{}: holds no study to go on with", .0.display())]
    NothingToResume(PathBuf),
    #[error("{}: holds files that are no study's: choose another --out", .0.display())]
    NotEmpty(PathBuf),
    #[error("{}: another study is at work there", .0.display())]
    Busy(PathBuf),
    #[error(transparent)]
    Report(#[from] crate::report::ReportError),
}

impl StudyError {
    pub(crate) fn io(path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |source| StudyError::Io { path, source }
    }
}
