//! The report of a study: `report.html` (one file, no network), `report.md`, and figures as SVG files. It draws what `results` holds.

mod build;
mod chart;
pub mod confusion;
mod escape;
mod figure;
mod html;
pub(crate) mod live;
mod markdown;
mod measure;
mod numbers;
mod page;
mod paper;
mod pdf;
mod png;
mod points;
mod scene;
mod svg;
mod table;

pub use build::figures;
pub use figure::Figure;
pub use html::html;
pub use markdown::markdown;
pub(crate) use numbers::short;
use paper::Paper;
pub use paper::Wish;
pub use points::in_order;

use crate::results::{FORMAT, Results};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

#[derive(Debug, thiserror::Error)]
pub enum ReportError {
    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
    #[error("{}: is not a study's results: {source}", path.display())]
    Corrupt { path: PathBuf, source: serde_json::Error },
    #[error("{}: has format {found}; this version of vitesse reads format {FORMAT}", path.display())]
    Format { path: PathBuf, found: u64 },
    #[error("{}: {}", .0.display(), no_results(.0))]
    NoResults(PathBuf),
    #[error("a figure can't be drawn: {0}")]
    Drawing(String),
    #[error("{0}")]
    Size(String),
    #[error("nothing to report: no results were given")]
    Nothing,
}

/// What a folder without results lacks.
fn no_results(folder: &Path) -> &'static str {
    match folder.is_dir() {
        true => "holds no results.json, which a study leaves when it ends",
        false => "no such folder",
    }
}

/// Reads `results.json` of a study's folder, or the file itself.
pub fn read(folder: &Path) -> Result<Results, ReportError> {
    #[derive(serde::Deserialize)]
    struct Head {
        format: u64,
    }
    let path = if folder.is_file() { folder.to_path_buf() } else { folder.join("results.json") };
    if !path.exists() {
        return Err(ReportError::NoResults(folder.to_path_buf()));
    }
    let text = fs::read(&path).map_err(|source| ReportError::Io { path: path.clone(), source })?;
    // What another version wrote may lack fields; its number says why.
    match serde_json::from_slice::<Head>(&text) {
        Ok(Head { format: found }) if found != u64::from(FORMAT) => Err(ReportError::Format { path, found }),
        _ => {
            let mut results: Results =
                serde_json::from_slice(&text).map_err(|source| ReportError::Corrupt { path, source })?;
            // Versions before did not divide the efficiency; all it takes is in the runs.
            if results.points.iter().all(|point| point.factors.is_none()) {
                crate::summary::divide(&mut results);
            }
            Ok(results)
        }
    }
}

/// Writes `report.html` and `report.md` into a folder. Several results are one platform against another.
pub fn write(folder: &Path, results: &[Results]) -> Result<(), ReportError> {
    if results.is_empty() {
        return Err(ReportError::Nothing);
    }
    fs::create_dir_all(folder).map_err(|source| ReportError::Io { path: folder.into(), source })?;
    replace(&folder.join("report.html"), html(results).as_bytes())?;
    replace(&folder.join("report.md"), markdown(results).as_bytes())
}

/// What a figure's file is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    Pdf,
    Svg,
    Png,
}

impl Format {
    /// How names of its files end.
    fn ending(self) -> &'static str {
        match self {
            Format::Pdf => "pdf",
            Format::Svg => "svg",
            Format::Png => "png",
        }
    }
}

/// Refuses figures of a size that has no room for their text.
pub fn check(wish: Wish) -> Result<(), ReportError> {
    Paper::new(wish).map(|_| ())
}

/// Files that [`write_figures`] writes.
pub fn figure_files(folder: &Path, results: &[Results], format: Format) -> Vec<PathBuf> {
    let files =
        |figure: &Figure| [format.ending(), "csv"].map(|end| folder.join(format!("{}.{end}", figure.id)));
    figures(results).iter().flat_map(files).collect()
}

/// Writes every figure as a file, and its numbers as CSV beside it; returns the paths of both.
pub fn write_figures(
    folder: &Path,
    results: &[Results],
    format: Format,
    wish: Wish,
) -> Result<Vec<PathBuf>, ReportError> {
    let paper = Paper::new(wish)?;
    fs::create_dir_all(folder).map_err(|source| ReportError::Io { path: folder.into(), source })?;
    let mut paths = vec![];
    for figure in figures(results) {
        let scene = figure.scene(paper.width);
        let bytes = match format {
            Format::Pdf => pdf::file(&scene, &paper)?,
            Format::Svg => svg::file(&scene, &paper).into_bytes(),
            Format::Png => png::file(&scene, &paper)?,
        };
        for (ending, bytes) in [(format.ending(), &bytes), ("csv", &figure.csv().into_bytes())] {
            let path = folder.join(format!("{}.{ending}", figure.id));
            replace(&path, bytes)?;
            paths.push(path);
        }
    }
    Ok(paths)
}

/// Written aside and renamed, so that whoever looks at a report sees the old one or the new one.
fn replace(path: &Path, bytes: &[u8]) -> Result<(), ReportError> {
    let aside = path.with_added_extension("tmp");
    let at = |path: &Path| {
        let path = path.to_path_buf();
        move |source| ReportError::Io { path, source }
    };
    fs::write(&aside, bytes).map_err(at(&aside))?;
    fs::rename(&aside, path).map_err(at(path))
}
