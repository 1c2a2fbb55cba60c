//! `vitesse report`: draws a study's report again, or one platform's against another's.

use crate::args::ReportArgs;
use std::path::PathBuf;
use study::report::{self, Format};
use study::results::Results;

pub fn run(args: ReportArgs) -> anyhow::Result<()> {
    let figures = figures(&args)?;
    let results =
        args.folders.iter().map(|folder| report::read(folder)).collect::<Result<Vec<Results>, _>>()?;
    let out: PathBuf = match (&args.out, &args.folders[..]) {
        (Some(out), _) => out.clone(),
        (None, [one]) => one.clone(),
        // Nobody's own report is to be replaced by a comparison.
        (None, _) => {
            anyhow::bail!("several results make a report of their own: say with --out where it goes")
        }
    };
    // A study's own report is drawn again; whatever else is there is somebody's.
    let pages = ["report.html", "report.md"].map(|name| out.join(name));
    let pages = pages.iter().filter(|_| args.out.is_some()).cloned();
    let drawn = figures.iter().flat_map(|(format, folder)| report::figure_files(folder, &results, *format));
    let written: Vec<PathBuf> = pages.chain(drawn).collect();
    files::output::all_free(written.iter().map(PathBuf::as_path), args.overwrite.force)
        .map_err(anyhow::Error::msg)?;
    report::write(&out, &results)?;
    println!("{}", out.join("report.html").display());
    println!("{}", out.join("report.md").display());
    if let Some((format, folder)) = figures {
        for path in report::write_figures(&folder, &results, format)? {
            println!("{}", path.display());
        }
    }
    Ok(())
}

/// How figures are to be written, and where.
fn figures(args: &ReportArgs) -> anyhow::Result<Option<(Format, PathBuf)>> {
    let Some([format, folder]) = args.figures.as_deref() else { return Ok(None) };
    let format = match format.to_str() {
        Some("svg") => Format::Svg,
        Some("png") => Format::Png,
        _ => anyhow::bail!("--figures {}: must be svg or png", format.display()),
    };
    Ok(Some((format, folder.clone())))
}
