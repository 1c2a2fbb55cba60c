//! `vitesse report`.

mod common;

use common::{Folder, text};
use std::fs;
use std::path::Path;
use study::results::Results;
use study::sample;

fn results(folder: &Path, results: &Results) {
    fs::create_dir_all(folder).unwrap();
    fs::write(folder.join("results.json"), serde_json::to_string(results).unwrap()).unwrap();
}

#[test]
fn reports_are_drawn_again_and_against_each_other() {
    let folder = Folder::new("report");
    results(&folder.0.join("a"), &sample::study());
    results(&folder.0.join("b"), &sample::other_platform());
    folder.run(&["report", "a", "--figures", "svg", "--figures-dir", "figures"]);
    let html = fs::read_to_string(folder.0.join("a/report.html")).unwrap();
    assert!(html.contains("How far does ViT-B/16 scale on eight A100s?"));
    assert!(fs::read_to_string(folder.0.join("a/report.md")).unwrap().starts_with("# How far does ViT"));
    assert!(fs::read_to_string(folder.0.join("figures/strong-speedup.svg")).unwrap().starts_with("<svg"));
    folder.run(&[
        "report",
        "a",
        "b",
        "--out",
        "both",
        "--figures",
        "png",
        "--figures-dir",
        "figures",
        "--force",
    ]);
    assert!(
        fs::read_to_string(folder.0.join("both/report.html")).unwrap().contains("id=\"strong-platforms-1\"")
    );
    let png = fs::read(folder.0.join("figures/strong-platforms-1.png")).unwrap();
    assert!(png.starts_with(b"\x89PNG") && png.len() > 10_000);
}

#[test]
fn what_can_t_be_drawn_is_refused_and_nothing_is_overwritten() {
    let folder = Folder::new("report-refused");
    results(&folder.0.join("good"), &sample::quick());
    results(&folder.0.join("new"), &Results { format: 99, ..sample::quick() });
    fs::create_dir_all(folder.0.join("torn")).unwrap();
    fs::write(folder.0.join("torn/results.json"), "{\"format\":1,").unwrap();
    fs::write(folder.0.join("torn/report.html"), "as it was").unwrap();
    let cases: [(&[&str], &str); 5] = [
        (&["report", "new"], "new/results.json: has format 99; this version of vitesse reads format 1"),
        (&["report", "torn"], "torn/results.json: is not a study's results"),
        (&["report", "nowhere"], "nowhere: no such folder"),
        (&["report", "good", "good"], "say with --out where it goes"),
        (
            &["report", "good", "--figures", "pdf", "--width", "20mm", "--no-title"],
            "--width 20mm has no room for text of 8 pt: it takes 56mm, or a smaller --font-size",
        ),
    ];
    for (args, line) in cases {
        let output = folder.start(args).wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{args:?}");
        assert!(text(&output).contains(line), "{args:?}: {}", text(&output));
    }
    assert_eq!(fs::read_to_string(folder.0.join("torn/report.html")).unwrap(), "as it was");
    let typed: [(&[&str], &str); 3] = [
        (&["--figures", "gif"], "pdf, svg, png"),
        (&["--figures", "pdf", "--width", "85"], "must be a length with its unit, such as 85mm"),
        (&["--width", "85mm"], "--figures"),
    ];
    for (args, line) in typed {
        let output = folder.start(&[&["report", "good"], args].concat()).wait_with_output().unwrap();
        assert!(!output.status.success() && text(&output).contains(line), "{args:?}: {}", text(&output));
    }
}

/// At the width of a paper's column: fonts are embedded, and numbers lie beside.
#[test]
fn figures_for_a_paper() {
    let folder = Folder::new("report-paper");
    results(&folder.0.join("a"), &sample::many());
    let args = ["--width", "85mm", "--font-size", "8", "--no-title"];
    for format in ["pdf", "svg", "png"] {
        folder.run(&[&["report", "a", "--figures", format], &args[..]].concat());
        assert!(folder.0.join(format!("a/figures/weak-waterfall.{format}")).exists(), "{format}");
    }
    let read = |name: &str| fs::read(folder.0.join("a/figures").join(name)).unwrap();
    let pdf = String::from_utf8_lossy(&read("weak-efficiency.pdf")).into_owned();
    assert!(pdf.starts_with("%PDF-1.7") && pdf.contains("/MediaBox [0 0 240.94"), "{pdf:.300}");
    let fonts = ["/BaseFont /VITESS+Inter-Regular", "/Subtype /CIDFontType0C", "/FontFile3 ", "/ToUnicode "];
    assert!(fonts.iter().all(|words| pdf.contains(words)), "a font is missing");
    let svg = String::from_utf8(read("weak-efficiency.svg")).unwrap();
    assert!(
        svg.contains("width=\"240.94pt\"") && svg.contains("@font-face{font-family:Report"),
        "{svg:.200}"
    );
    assert!(!svg.contains("class=\"frame\"") && svg.contains(">vit-b/16 · batch 64</text>"));
    // 85 mm are 1004 pixels at 300 to the inch.
    assert_eq!(read("weak-efficiency.png")[16..20], 1004u32.to_be_bytes());
    let csv = String::from_utf8(read("weak-waterfall.csv")).unwrap();
    assert!(csv.contains(",factor,load balance,0.9"), "{csv:.400}");
}
