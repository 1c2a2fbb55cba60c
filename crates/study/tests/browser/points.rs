//! The table of many points, and what is printed.

use super::{DESKTOP, PHONE, browser, draws, keep_pictures, stays_at_home, written};
use crate::chromium::Page;
use serde_json::{Value, json};
use study::{report, sample};
use testing::{Folder, need};

/// Rows that are to be seen, from top to bottom: series, point, and the number in a column.
fn shown(page: &mut Page, column: &str) -> Vec<(String, String, f64)> {
    let rows = page.run(&format!(
        r#"[...document.querySelectorAll("table.points tbody")]
            .filter((body) => body.getBoundingClientRect().height > 0)
            .sort((a, b) => a.getBoundingClientRect().top - b.getBoundingClientRect().top)
            .map((body) => [body.dataset.series, body.querySelector(".opens").textContent,
                +body.querySelector("tr.point data.{column}").value])"#
    ));
    let text = |value: &Value| value.as_str().unwrap().to_string();
    let row = |row: &Value| (text(&row[0]), text(&row[1]), row[2].as_f64().unwrap());
    rows.as_array().unwrap().iter().map(row).collect()
}

fn head(page: &mut Page, name: &str) {
    let at = page.run(&format!(
        r#"[...document.querySelectorAll("table.points th")].findIndex((th) => th.textContent === {name:?}) + 1"#
    ));
    assert!(at.as_u64().unwrap() > 0, "no column {name}");
    page.click(&format!("table.points th:nth-child({at}) button"));
}

fn filter(page: &mut Page, selector: &str, event: &str, value: &str) {
    page.run(&format!(
        r#"(() => {{ const it = document.querySelector(".filters {selector}"); it.value = {value:?};
            it.dispatchEvent(new Event("{event}", {{ bubbles: true }})); }})()"#
    ));
}

#[test]
fn many_points_are_sorted_filtered_and_opened() {
    let folder = Folder::new("many-points");
    let mut browser = need!(browser(&folder));
    let results = vec![sample::many()];
    let (url, figures) = (written(&folder, "many", &results), report::figures(&results));
    let ids: Vec<&str> = figures.iter().map(|figure| figure.id.as_str()).collect();
    let mut page = browser.open(&url, DESKTOP, "light");
    draws(&mut page, "many", &ids);
    let before = shown(&mut page, "efficiency");
    assert_eq!(before.len(), 36);
    assert_eq!((before[6].0.as_str(), before[6].1.as_str()), ("vit-b/16 · batch 64", "1 rank"));
    // By a number: the largest first, then the smallest.
    head(&mut page, "images/s");
    let rates: Vec<f64> = shown(&mut page, "images-per-second").into_iter().map(|row| row.2).collect();
    assert!(rates.len() == 36 && rates.windows(2).all(|pair| pair[0] >= pair[1]), "{rates:?}");
    head(&mut page, "transfer");
    head(&mut page, "transfer");
    let transfer: Vec<f64> = shown(&mut page, "transfer").into_iter().map(|row| row.2).collect();
    assert!(transfer.windows(2).all(|pair| pair[0] <= pair[1]), "{transfer:?}");
    let sorted = page.run(r#"document.querySelector("th[aria-sort]").getAttribute("aria-sort")"#);
    assert_eq!(sorted, "ascending");
    // By ranks as numbers, and back to the order of the study.
    head(&mut page, "point");
    let ranks: Vec<String> = shown(&mut page, "efficiency").into_iter().map(|row| row.1).collect();
    assert_eq!((ranks[0].as_str(), ranks[6].as_str(), ranks[35].as_str()), ("1 rank", "2 ranks", "32 ranks"));
    head(&mut page, "series");
    assert_eq!(shown(&mut page, "efficiency"), before);
    // By series, and by words.
    filter(&mut page, "select", "change", "vit-s/16 · batch 256");
    let one = shown(&mut page, "efficiency");
    assert!(one.len() == 6 && one.iter().all(|row| row.0 == "vit-s/16 · batch 256"), "{one:?}");
    filter(&mut page, "input", "input", "32 RANKS");
    assert_eq!(shown(&mut page, "efficiency").len(), 1);
    assert_eq!(page.run(r#"document.querySelector(".filters span").textContent"#), "1 of 36 points");
    filter(&mut page, "select", "change", "*");
    assert_eq!(shown(&mut page, "efficiency").len(), 6);
    filter(&mut page, "input", "input", "");
    // A row opens, and tells what explains it.
    let says = |page: &mut Page| {
        page.run(r#"[...document.querySelectorAll("tr.says")].filter((row) => row.offsetHeight > 0).map((row) => row.textContent)"#)
    };
    assert_eq!(says(&mut page), json!([]));
    page.click(r#"tr[data-point="weak-vit-b-16-64-32"] .opens"#);
    let text = says(&mut page)[0].as_str().unwrap().to_string();
    for words in
        ["of the time is lost", "95% intervals", "load balance", "account of a step", "lost against the base"]
    {
        assert!(text.contains(words), "{words}: {text}");
    }
    keep_pictures(&mut page, "many-open");
    page.click(r#"tr[data-point="weak-vit-b-16-64-32"] .opens"#);
    assert_eq!(says(&mut page), json!([]));
    stays_at_home(&mut page, "many", &url);
    page.close();
    let mut page = browser.open(&url, PHONE, "dark");
    draws(&mut page, "many on a phone", &ids);
    assert_eq!(shown(&mut page, "efficiency").len(), 36);
    keep_pictures(&mut page, "many-phone");
    page.close();
}

/// Platforms a hundred times apart, from recorded studies.
#[test]
fn platforms_far_apart_are_drawn_by_powers_of_ten() {
    let folder = Folder::new("far-apart");
    let mut browser = need!(browser(&folder));
    let bench = testing::repository().join("bench/2026-11-15-studies");
    let results = ["platforms-h200", "platforms-xeon"].map(|name| report::read(&bench.join(name)).unwrap());
    let (url, figures) = (written(&folder, "far", &results), report::figures(&results));
    let mut page = browser.open(&url, DESKTOP, "light");
    draws(&mut page, "far apart", &figures.iter().map(|figure| figure.id.as_str()).collect::<Vec<_>>());
    let ticks = page.run(
        r#"[...document.querySelectorAll("figure[id=batch-platforms-1] svg.wide text")].map((text) => text.textContent)
            .filter((text) => ["10.0", "100", "1,000", "10,000"].includes(text))"#,
    );
    assert!(ticks.as_array().unwrap().len() >= 4, "{ticks}");
    keep_pictures(&mut page, "far-apart");
    stays_at_home(&mut page, "far apart", &url);
    page.close();
}

#[test]
fn the_quick_study_is_printed_on_five_pages() {
    let folder = Folder::new("printed");
    let mut browser = need!(browser(&folder));
    let url = written(&folder, "quick", &[sample::quick()]);
    let mut page = browser.open(&url, DESKTOP, "dark");
    for (name, width, height) in [("A4", 8.27, 11.69), ("letter", 8.5, 11.0)] {
        let params = json!({ "paperWidth": width, "paperHeight": height, "preferCSSPageSize": false });
        let printed = page.call("Page.printToPDF", params);
        let pdf = decoded(printed["data"].as_str().unwrap());
        let pages = String::from_utf8_lossy(&pdf).matches("/Type /Page\n").count();
        assert!((2..=5).contains(&pages), "{name}: {pages} pages");
    }
    page.call("Emulation.setEmulatedMedia", json!({ "media": "print" }));
    let kept = page.run(
        r#"({
            rows: [...document.querySelectorAll("table.points tbody")].map((it) => getComputedStyle(it).breakInside),
            figures: [...document.querySelectorAll("main figure")].map((it) => getComputedStyle(it).breakInside),
            heads: [...document.querySelectorAll("h2, h3, caption")].map((it) => getComputedStyle(it).breakAfter),
            says: [...document.querySelectorAll("tr.says")].every((it) => it.offsetHeight > 0),
            paper: getComputedStyle(document.documentElement).getPropertyValue("--paper"),
        })"#,
    );
    for part in ["rows", "figures", "heads"] {
        let all = kept[part].as_array().unwrap();
        assert!(!all.is_empty() && all.iter().all(|it| it == "avoid"), "{part}: {kept}");
    }
    assert_eq!((&kept["says"], &kept["paper"]), (&json!(true), &json!("#ffffff")));
    page.close();
}

fn decoded(base64: &str) -> Vec<u8> {
    let digit = |c: u8| match c {
        b'A'..=b'Z' => c - b'A',
        b'a'..=b'z' => c - b'a' + 26,
        b'0'..=b'9' => c - b'0' + 52,
        b'+' => 62,
        _ => 63,
    };
    let digits: Vec<u8> = base64.bytes().filter(|c| *c != b'=').map(digit).collect();
    let word = |four: &[u8]| {
        four.iter().fold(0u32, |word, digit| word << 6 | u32::from(*digit)) << (6 * (4 - four.len()))
    };
    digits.chunks(4).flat_map(|four| word(four).to_be_bytes()[1..four.len()].to_vec()).collect()
}
