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
    #[error("a figure can't be drawn as PNG: {0}")]
    Png(String),
    #[error("nothing to report: no results were given")]
    Nothing,
}

/// Reads `results.json` of a study's folder.
pub fn read(folder: &Path) -> Result<Results, ReportError> {
    #[derive(serde::Deserialize)]
    struct Head {
        format: u64,
    }
    let path = folder.join("results.json");
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
    Svg,
    Png,
}

/// Files that [`write_figures`] writes.
pub fn figure_files(folder: &Path, results: &[Results], format: Format) -> Vec<PathBuf> {
    let ending = match format {
        Format::Svg => "svg",
        Format::Png => "png",
    };
    figures(results).iter().map(|figure| folder.join(format!("{}.{ending}", figure.id))).collect()
}

/// Writes every figure as a file; returns their paths.
pub fn write_figures(
    folder: &Path,
    results: &[Results],
    format: Format,
) -> Result<Vec<PathBuf>, ReportError> {
    fs::create_dir_all(folder).map_err(|source| ReportError::Io { path: folder.into(), source })?;
    let mut paths = vec![];
    for figure in figures(results) {
        let scene = figure.scene(figure::WIDE);
        let (name, bytes) = match format {
            Format::Svg => (format!("{}.svg", figure.id), svg::file(&scene).into_bytes()),
            Format::Png => (format!("{}.png", figure.id), png::file(&scene)?),
        };
        let path = folder.join(name);
        replace(&path, &bytes)?;
        paths.push(path);
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
