//! `vitesse report`: draws a study's report again, or one platform's against another's.

use crate::args::{FigureArg, ReportArgs};
use std::path::PathBuf;
use study::report::{self, Format, Wish};
use study::results::Results;

pub fn run(args: ReportArgs) -> anyhow::Result<()> {
    let wish = Wish { width: args.width, font_size: args.font_size, title: !args.no_title };
    report::check(wish)?;
    let results =
        args.folders.iter().map(|folder| report::read(folder)).collect::<Result<Vec<Results>, _>>()?;
    let out: PathBuf = match (&args.out, &args.folders[..]) {
        (Some(out), _) => out.clone(),
        // A file's report lies beside it.
        (None, [one]) if one.is_file() => one.parent().map(PathBuf::from).unwrap_or_default(),
        (None, [one]) => one.clone(),
        // Nobody's own report is to be replaced by a comparison.
        (None, _) => {
            anyhow::bail!("several results make a report of their own: say with --out where it goes")
        }
    };
    let folder = args.figures_dir.clone().unwrap_or_else(|| out.join("figures"));
    let format = args.figures.map(|format| match format {
        FigureArg::Pdf => Format::Pdf,
        FigureArg::Svg => Format::Svg,
        FigureArg::Png => Format::Png,
    });
    // A study's own report and figures are drawn again; whatever else is there is somebody's. Beside a file of another name may lie
    // the report of another study.
    let studys = |path: &PathBuf| !path.is_file() || path.file_name().is_some_and(|n| n == "results.json");
    let own = args.out.is_none() && args.folders.iter().all(studys);
    let pages = ["report.html", "report.md"].map(|name| out.join(name));
    let pages = pages.into_iter().filter(|_| !own);
    let elsewhere = !own || args.figures_dir.is_some();
    let drawn = format.iter().filter(|_| elsewhere);
    let drawn = drawn.flat_map(|format| report::figure_files(&folder, &results, *format));
    let written: Vec<PathBuf> = pages.chain(drawn).collect();
    files::output::all_free(written.iter().map(PathBuf::as_path), args.overwrite.force)
        .map_err(anyhow::Error::msg)?;
    report::write(&out, &results)?;
    println!("{}", out.join("report.html").display());
    println!("{}", out.join("report.md").display());
    if let Some(format) = format {
        for path in report::write_figures(&folder, &results, format, wish)? {
            println!("{}", path.display());
        }
    }
    Ok(())
}
