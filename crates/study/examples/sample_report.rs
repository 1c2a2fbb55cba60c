//! Writes reports of made-up results, to look at: `cargo run -p study --example sample_report -- OUT`.

use std::path::PathBuf;
use study::{report, sample};

fn main() -> anyhow::Result<()> {
    let Some(out) = std::env::args_os().nth(1).map(PathBuf::from) else {
        anyhow::bail!("usage: sample_report OUT");
    };
    let reports = [
        ("study", vec![sample::study()]),
        ("quick", vec![sample::quick()]),
        ("platforms", vec![sample::study(), sample::other_platform()]),
        ("hostile", vec![sample::hostile()]),
        ("many", vec![sample::many()]),
    ];
    let recorded = |name: &str| {
        let bench = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../bench/2026-11-15-studies");
        report::read(&bench.join(name))
    };
    let far = ("far-apart", vec![recorded("platforms-h200")?, recorded("platforms-xeon")?]);
    let hosts = ("hosts", vec![recorded("a1-a2-unequal-hosts")?]);
    for (name, results) in reports.into_iter().chain([far, hosts]) {
        report::write(&out.join(name), &results)?;
        let screen = report::Wish { width: None, font_size: None, title: true };
        let paper = report::Wish { width: Some(85.0), font_size: Some(8.0), title: false };
        report::write_figures(&out.join(name).join("figures"), &results, report::Format::Png, screen)?;
        report::write_figures(&out.join(name).join("paper"), &results, report::Format::Pdf, paper)?;
        println!("{}", out.join(name).join("report.html").display());
    }
    Ok(())
}
