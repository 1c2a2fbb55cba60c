//! What a report says equals what was measured, and nothing that was given to it gets out of its place.

use records::{FACTORS, Metric};
use std::collections::HashMap;
use std::fs;
use study::results::{Estimate, Flag, Kind, Outcome, Point, Results};
use study::{report, sample};
use testing::Folder;

fn unescaped(text: &str) -> String {
    let pairs = [
        ("&lt;", "<"),
        ("&gt;", ">"),
        ("&quot;", "\""),
        ("&#39;", "'"),
        ("&#10;", "\n"),
        ("&#9;", "\t"),
        ("&amp;", "&"),
    ];
    pairs.into_iter().fold(text.to_string(), |text, (from, to)| text.replace(from, to))
}

/// What stands between two pieces of text, wherever they occur.
fn between<'a>(text: &'a str, from: &str, to: &str) -> Vec<&'a str> {
    text.split(from).skip(1).filter_map(|rest| rest.split(to).next()).collect()
}

/// The numbers of the table by point: class of the element → value.
fn table(html: &str) -> HashMap<String, HashMap<String, f64>> {
    let mut rows = HashMap::new();
    for row in html.split("<tr class=\"point\" data-point=\"").skip(1) {
        let (id, rest) = row.split_once('"').unwrap();
        // A row of numbers, and one that says the rest.
        let cells: Vec<&str> = rest.split("</tr>").take(2).collect();
        let cells = cells.concat();
        let mut values = HashMap::new();
        for cell in cells.split("<data class=\"").skip(1) {
            let (class, rest) = cell.split_once("\" value=\"").unwrap();
            let value = rest.split('"').next().unwrap();
            values.insert(class.to_string(), value.parse().unwrap_or(f64::NAN));
        }
        assert!(rows.insert(unescaped(id), values).is_none(), "{id} stands twice");
    }
    rows
}

#[test]
fn the_table_has_the_numbers_of_the_results() {
    let results = sample::study();
    let table = table(&report::html(std::slice::from_ref(&results)));
    assert_eq!(table.len(), results.points.len());
    for point in &results.points {
        let row = &table[&point.id];
        let Some(summary) = &point.summary else {
            assert!(row.is_empty(), "{}", point.id);
            continue;
        };
        let is = |name: &str, estimate: Option<&Estimate>| {
            assert_eq!(row.get(name).copied(), estimate.map(|e| e.median), "{} {name}", point.id);
            let interval = estimate.and_then(|e| e.interval);
            assert_eq!(
                row.get(&format!("{name}-low")).copied(),
                interval.map(|i| i.0),
                "{} {name}",
                point.id
            );
            assert_eq!(
                row.get(&format!("{name}-high")).copied(),
                interval.map(|i| i.1),
                "{} {name}",
                point.id
            );
        };
        let point_is_divided = |point: &Point| {
            let of_kind = results.points.iter().filter(|other| other.kind == point.kind);
            of_kind.clone().any(|other| other.settings.ranks > 1 && other.factors.is_some())
        };
        is("epoch-seconds", Some(&summary.epoch_seconds));
        is("images-per-second", Some(&summary.images_per_second));
        is("speedup", summary.speedup.as_ref());
        is("efficiency", summary.efficiency.as_ref());
        for factor in FACTORS {
            is(factor.key, point.factors.as_ref().and_then(factor.of).filter(|_| point_is_divided(point)));
        }
        let median = |name: &str, estimate: Option<&Estimate>| {
            assert_eq!(row.get(name).copied(), estimate.map(|e| e.median), "{} {name}", point.id);
        };
        median("score", summary.score.as_ref().map(|score| &score.value));
        median("cpu-utilisation", summary.usage.cpu_utilisation.as_ref());
        median("gpu-load", summary.usage.gpu_load.as_ref());
        median("gpu-memory-bytes", summary.usage.gpu_memory_bytes.as_ref());
        median("gpu-watts", summary.usage.gpu_watts.as_ref());
    }
}

fn embedded(html: &str) -> Vec<Results> {
    let text = between(html, "<script type=\"application/json\" id=\"results\">", "</script>")[0];
    serde_json::from_str(text).unwrap()
}

#[test]
fn the_page_carries_the_results_but_for_single_steps() {
    let mut results = sample::study();
    let html = report::html(&[results.clone(), sample::other_platform()]);
    let found = embedded(&html);
    for run in results.points.iter_mut().flat_map(|point| &mut point.runs) {
        if let Outcome::Done(measured) = &mut run.outcome {
            measured.step_seconds.clear();
        }
    }
    assert_eq!(found.len(), 2);
    assert_eq!(found[0], results);
}

#[test]
fn figures_appear_where_results_hold_what_they_need() {
    let ids =
        |results: &[Results]| -> Vec<String> { report::figures(results).into_iter().map(|f| f.id).collect() };
    let all = ids(&[sample::study()]);
    for id in [
        "strong-time",
        "strong-speedup",
        "strong-efficiency",
        "strong-waterfall",
        "strong-losses",
        "strong-curves",
        "strong-accuracy",
        "strong-utilisation",
        "strong-memory",
        "strong-parts",
        "strong-ranks",
        "weak-time",
        "batch-time",
        "batch-accuracy",
        "optimizer-accuracy",
        "nodes-time",
        "nodes-speedup",
    ] {
        assert!(all.iter().any(|known| known == id), "{id} is missing: {all:?}");
    }
    assert!(!all.iter().any(|id| id.contains("platforms")));
    assert!(ids(&[sample::study(), sample::other_platform()]).contains(&"strong-platforms-1".to_string()));
    // One epoch makes no curve, one rank no speedup.
    let mut results = sample::quick();
    assert!(!ids(&[results.clone()]).iter().any(|id| id.contains("curves")));
    results.points.retain(|point| point.settings.ranks == 1);
    let one = ids(&[results.clone()]);
    assert!(
        one.contains(&"strong-time".to_string()) && !one.iter().any(|id| id.contains("speedup")),
        "{one:?}"
    );
    results.points.clear();
    assert!(ids(&[results.clone()]).is_empty());
    assert!(report::html(&[results]).contains("Two ranks train 1.9 times faster"));
}

#[test]
fn oversubscribed_points_stay_out_of_the_efficiency() {
    let figures = report::figures(&[sample::study()]);
    let csv = |id: &str| figures.iter().find(|f| f.id == id).unwrap().csv();
    let ranks = |csv: &str| {
        csv.lines().skip(1).map(|line| line.split(',').nth(2).unwrap().to_string()).collect::<Vec<_>>()
    };
    assert_eq!(ranks(&csv("strong-efficiency")), ["1", "2", "4", "8", "1", "2", "4", "8"]);
    let speedup = csv("strong-speedup");
    assert_eq!(ranks(&speedup).len(), 10);
    assert_eq!(speedup.lines().filter(|line| line.contains("more threads than cores")).count(), 2);
    let html = report::html(&[sample::study()]);
    assert!(html.contains("2 points with more threads than cores are left out."));
    assert!(html.contains("≠ unequal work: 39,936 images per epoch instead of 40,000"));
}

#[test]
fn few_samples_have_no_interval_anywhere() {
    let results = sample::quick();
    for figure in report::figures(std::slice::from_ref(&results)) {
        for line in figure.csv().lines().skip(1) {
            // Titles of panels may have a comma, within quotes.
            let after_title =
                line.strip_prefix('"').and_then(|rest| rest.split_once('"')).map_or(line, |(_, rest)| rest);
            let cells: Vec<&str> = after_title.split(',').collect();
            assert_eq!((cells[4], cells[5]), ("", ""), "{}: {line}", figure.id);
        }
    }
    let html = report::html(&[results]);
    assert!(!html.contains("-low\"") && html.contains("3 runs: too few for an interval"));
    assert!(html.contains("Dots: single runs; fewer than five have no interval."));
}

#[test]
fn failed_points_are_listed_with_their_error() {
    let (html, text) = (report::html(&[sample::study()]), report::markdown(&[sample::study()]));
    let failed = between(&html, "<ul class=\"failed\">", "</ul>");
    assert_eq!(failed.len(), 1);
    assert!(
        failed[0].contains("CUDA_ERROR_OUT_OF_MEMORY: 41.2 GB asked for") && failed[0].contains("batch 256"),
        "{}",
        failed[0]
    );
    assert!(text.contains("CUDA\\_ERROR\\_OUT\\_OF\\_MEMORY: 41.2 GB asked for"), "{text}");
}

#[test]
fn a_page_asks_for_nothing_from_outside() {
    for results in [sample::study(), sample::hostile()] {
        let html = report::html(&[results]);
        // Addresses stand only as text and as the name of SVG's language.
        for attribute in ["src=\"", "href=\"", "url(", "action=\"", "srcset=\"", "poster=\""] {
            for address in between(&html, attribute, "\"") {
                let known = address.starts_with("data:") || address.starts_with('#');
                assert!(known, "{attribute}{address:.80}");
            }
        }
        assert!(!html.contains("@import") && !html.contains("fetch(") && !html.contains("XMLHttpRequest"));
        assert!(html.contains("default-src 'none'") && !html.contains("connect-src"));
    }
}

#[test]
fn hostile_names_stay_text() {
    let folder = Folder::new("hostile-report");
    let results = [sample::hostile()];
    report::write(&folder.0, &results).unwrap();
    let html = fs::read_to_string(folder.0.join("report.html")).unwrap();
    assert_eq!(html.matches("<script").count(), 3, "a script from outside");
    assert_eq!(html.matches("</script").count(), 3);
    assert!(!html.contains("<img") && !html.contains("alert(1)</"));
    let data = between(&html, "<script type=\"application/json\" id=\"results\">", "</script>")[0];
    let data: serde_json::Value = serde_json::from_str(data).unwrap();
    assert_eq!(data[0]["title"], sample::HOSTILE);
    let text = fs::read_to_string(folder.0.join("report.md")).unwrap();
    assert!(!text.contains("<img") && !text.contains("<script"));
    assert!(
        text.lines().filter(|line| line.starts_with("| ")).all(|line| unescaped_pipes(line) == 11),
        "{text}"
    );
    let wish = report::Wish { width: None, font_size: None, title: true };
    let figures =
        report::write_figures(&folder.0.join("figures"), &results, report::Format::Svg, wish).unwrap();
    for path in figures.iter().filter(|path| path.extension().is_some_and(|end| end == "svg")) {
        let svg = fs::read_to_string(path).unwrap();
        assert!(!svg.contains("<img") && !svg.contains("<script"), "{}", path.display());
        assert!(!svg.contains("NaN") && !svg.contains("inf\""), "{}", path.display());
    }
    for figure in report::figures(&results) {
        for line in figure.csv().lines() {
            for cell in line.split(',') {
                let formula = cell.trim_start_matches('"').starts_with(['=', '@', '+']);
                assert!(!formula, "{}: {line}", figure.id);
            }
        }
    }
}

fn unescaped_pipes(line: &str) -> usize {
    line.replace("\\|", "").matches('|').count()
}

#[test]
fn who_is_faster_does_more_whichever_comes_first() {
    let bench = testing::repository().join("bench/2026-11-15-studies");
    let [fast, slow] =
        ["platforms-h200", "platforms-xeon"].map(|name| report::read(&bench.join(name)).unwrap());
    for results in [[fast.clone(), slow.clone()], [slow, fast]] {
        let text = report::markdown(&results);
        let said = "H200 does 82.5 to 166 times the images/s of 2 Xeon cores, over 3 points.";
        assert!(text.contains(said), "{:.600}", text);
    }
}

#[test]
fn series_and_warnings_of_many_points() {
    let results = sample::many();
    assert_eq!(results.points.len(), 36);
    let html = report::html(std::slice::from_ref(&results));
    let series = between(&html, "<tbody data-series=\"", "\"");
    let mut names: Vec<&str> = series.clone();
    names.dedup();
    assert_eq!(series.len(), 36);
    let expected = ["vit-b/16", "vit-s/16"]
        .iter()
        .flat_map(|model| [16, 64, 256].map(|n| format!("{model} · batch {n}")));
    assert_eq!(names, expected.collect::<Vec<_>>());
    let noisy: Vec<&String> = results.warnings.iter().filter(|w| w.contains(" points): ")).collect();
    assert!(noisy.iter().all(|warning| warning.len() < 400), "{noisy:?}");
    // A serial part is either from 0 to 100% with its interval, or a reason.
    let strong = report::markdown(&[sample::study()]);
    assert!(strong.contains("Serial part of CIFAR-10: "), "{strong}");
    let two = report::markdown(&[sample::quick()]);
    assert!(two.contains("No serial part is given: 1 number of ranks beyond one can be compared"), "{two}");
}

#[test]
fn markdown_has_every_point_and_its_limiter() {
    let results = sample::quick();
    let text = report::markdown(std::slice::from_ref(&results));
    assert_eq!(text.matches("\n| 2 ranks |").count(), 2, "{text}");
    assert!(text.contains('█') && text.contains("Two ranks train 1.9 times faster than one."));
    let limiter = results.points[0].limiter.as_ref().unwrap();
    assert!(text.contains(&limiter.sentence), "{text}");
}

#[test]
fn a_task_is_drawn_by_what_it_is_evaluated_by() {
    let mut results = sample::study();
    results.points.retain(|point| point.kind == Kind::Strong);
    for point in &mut results.points {
        for run in &mut point.runs {
            let Outcome::Done(measured) = &mut run.outcome else { continue };
            for epoch in &mut measured.curve {
                let accuracy = epoch.values.take(Metric::EvalTop1);
                epoch.values.set(Metric::EvalMeanIou, accuracy);
            }
        }
        let score = point.summary.as_mut().and_then(|summary| summary.score.as_mut()).unwrap();
        score.name = "validation mean IoU".into();
    }
    let figures = report::figures(std::slice::from_ref(&results));
    let titled = |id: &str| figures.iter().find(|figure| figure.id == id).unwrap().title.clone();
    assert_eq!(titled("strong-accuracy"), "validation mean IoU");
    assert_eq!(titled("strong-curves"), "loss and validation mean IoU by epoch");
    assert!(report::html(&[results]).contains("validation mean IoU <data class=\"score\""));
}

#[test]
fn results_are_read_back_or_refused_in_a_line() {
    let folder = Folder::new("read");
    let results = sample::study();
    let path = folder.0.join("results.json");
    let text = serde_json::to_string(&results).unwrap();
    fs::write(&path, &text).unwrap();
    assert_eq!(report::read(&folder.0).unwrap(), results);
    let refused = |text: &str| {
        fs::write(&path, text).unwrap();
        report::read(&folder.0).unwrap_err().to_string()
    };
    let other = refused(&text.replacen("\"format\":1", "\"format\":7", 1));
    assert!(other.ends_with("results.json: has format 7; this version of vitesse reads format 1"), "{other}");
    let cut = refused(&text[..text.len() / 2]);
    assert!(cut.contains("results.json: is not a study's results: ") && !cut.contains('\n'), "{cut}");
    assert!(refused("[]").contains("is not a study's results"));
    fs::write(&path, &text).unwrap();
    assert_eq!(report::read(&path).unwrap(), results);
    let missing = report::read(&folder.0.join("nowhere")).unwrap_err().to_string();
    assert!(missing.ends_with("nowhere: no such folder"), "{missing}");
    fs::create_dir(folder.0.join("empty")).unwrap();
    let empty = report::read(&folder.0.join("empty")).unwrap_err().to_string();
    assert!(empty.ends_with("/empty: holds no results.json, which a study leaves when it ends"), "{empty}");
}

#[test]
fn a_report_is_the_same_whenever_it_is_drawn() {
    let mut shuffled = sample::study();
    shuffled.points.reverse();
    let (a, b) = (report::figures(&[sample::study()]), report::figures(&[shuffled]));
    let time = |figures: &[report::Figure]| figures.iter().find(|f| f.id == "weak-time").unwrap().csv();
    assert_eq!(time(&a), time(&b));
    assert_eq!(report::html(&[sample::study()]), report::html(&[sample::study()]));
    assert!(
        sample::study()
            .points
            .iter()
            .any(|p| p.kind == Kind::Weak && p.flags.contains(&Flag::Outliers(vec![2])))
    );
}
