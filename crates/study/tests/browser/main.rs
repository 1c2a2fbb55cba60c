//! The report in a real browser: every figure draws, nothing overlaps or is cut, tips and downloads work, and nothing is asked for
//! from outside. `VITESSE_SHOTS=DIR` keeps pictures to look at.

mod chromium;
mod looks;
mod points;

use chromium::{Chromium, Page};
use looks::{draws, keep_page, keep_pictures, ready, tips};
use serde_json::json;
use std::path::Path;
use std::time::{Duration, Instant};
use study::results::Results;
use study::serve::{Server, Shows};
use study::{report, sample};
use testing::{Folder, need};

const DESKTOP: (u32, u32) = (1280, 900);
const PHONE: (u32, u32) = (390, 844);

fn browser(folder: &Folder) -> Result<Chromium, String> {
    Ok(Chromium::start(&testing::tools::chromium()?, folder.0.join("browser")))
}

fn written(folder: &Folder, name: &str, results: &[Results]) -> String {
    let folder = folder.0.join(name);
    report::write(&folder, results).unwrap();
    format!("file://{}", folder.join("report.html").display())
}

#[test]
fn the_report_works_on_phone_and_desktop_in_light_and_dark() {
    let folder = Folder::new("browser");
    let mut browser = need!(browser(&folder));
    let two = vec![sample::study(), sample::other_platform()];
    let views = [
        (&vec![sample::study()], DESKTOP, "light"),
        (&vec![sample::quick()], DESKTOP, "dark"),
        (&vec![sample::quick()], PHONE, "light"),
        (&two, PHONE, "dark"),
    ];
    for (results, size, scheme) in views {
        let view = format!("{} {scheme}", size.0);
        let (url, figures) = (written(&folder, &view.replace(' ', "-"), results), report::figures(results));
        let mut page = browser.open(&url, size, scheme);
        draws(&mut page, &view, &figures.iter().map(|figure| figure.id.as_str()).collect::<Vec<_>>());
        paper(&mut page, &view, scheme);
        tips(&mut page, &view, size == PHONE);
        keep_pictures(&mut page, &view.replace(' ', "-"));
        stays_at_home(&mut page, &view, &url);
        page.close();
    }
}

#[test]
fn downloads_are_what_is_drawn() {
    let folder = Folder::new("downloads");
    let mut browser = need!(browser(&folder));
    let results = [sample::study()];
    let url = written(&folder, "study", &results);
    let into = folder.0.join("into");
    std::fs::create_dir_all(&into).unwrap();
    browser.allow_downloads(&into);
    let mut page = browser.open(&url, DESKTOP, "dark");
    // One of each sort: strong-time and weak-time are drawn by the same code.
    let mut sorts: Vec<String> = vec![];
    let mut figures = report::figures(&results);
    figures.retain(|figure| {
        let sort = figure.id.rsplit('-').next().unwrap_or_default().to_string();
        let new = !sorts.contains(&sort);
        sorts.push(sort);
        new
    });
    assert!(figures.len() >= 8);
    let mut asked = 0;
    for figure in figures {
        for (i, kind) in ["svg", "png", "csv"].into_iter().enumerate() {
            // Chromium takes ten downloads of a page in a second, and drops more without a word.
            asked += 1;
            if asked % 9 == 0 {
                std::thread::sleep(Duration::from_millis(1100));
            }
            page.click(&format!("#{} button:nth-child({})", figure.id, i + 1));
            let bytes = arrived(&into.join(format!("{}.{kind}", figure.id)));
            match kind {
                "svg" => is_a_whole_figure(&String::from_utf8(bytes).unwrap(), &figure.full_title()),
                "png" => is_a_picture(&bytes, &figure.id),
                _ => assert_eq!(String::from_utf8(bytes).unwrap(), figure.csv()),
            }
        }
    }
    page.click("#all-data");
    let all: Vec<Results> = serde_json::from_slice(&arrived(&into.join("results.json"))).unwrap();
    assert_eq!(all[0].points.len(), results[0].points.len());
    stays_at_home(&mut page, "downloads", &url);
    page.close();
}

#[test]
fn hostile_names_are_text_and_nothing_else() {
    let folder = Folder::new("hostile");
    let mut browser = need!(browser(&folder));
    let url = written(&folder, "hostile", &[sample::hostile()]);
    let mut page = browser.open(&url, PHONE, "light");
    assert_eq!(page.run("document.querySelectorAll('img, iframe, object, embed, [onerror]').length"), 0);
    assert_eq!(page.run("document.scripts.length"), 3);
    // A page that is too wide makes a phone's view wider.
    assert_eq!(
        page.run("[innerWidth, document.documentElement.scrollWidth <= innerWidth]"),
        json!([390, true])
    );
    let title = page.run("document.querySelector('h1').textContent");
    assert!(title.as_str().unwrap().contains("<img src=x onerror=alert(2)>"), "{title}");
    tips(&mut page, "hostile", true);
    keep_pictures(&mut page, "hostile");
    stays_at_home(&mut page, "hostile", &url);
    page.close();
}

#[test]
fn the_live_page_follows_a_run() {
    let folder = Folder::new("live");
    let mut browser = need!(browser(&folder));
    let metrics = folder.0.join("metrics.jsonl");
    let step = |step: u32| {
        format!(
            "{{\"step\":{step},\"epoch\":1,\"loss\":{},\"images_per_second\":700.0}}\n",
            2.0 / f64::from(step + 1)
        )
    };
    std::fs::write(&metrics, (0..40).map(step).collect::<String>()).unwrap();
    let server = Server::start("127.0.0.1:0", Shows::One(folder.0.clone())).unwrap();
    let url = server.url();
    let mut page = browser.open(&url, PHONE, "dark");
    ready(&mut page, "document.querySelectorAll('main figure').length === 2");
    ready(
        &mut page,
        "document.getElementById('state').textContent.startsWith('epoch 2 of 2 · step 40 of 40')",
    );
    draws(&mut page, "live", &["loss", "rate"]);
    tips(&mut page, "live", true);
    page.run("document.activeElement.blur()");
    keep_pictures(&mut page, "live");
    std::fs::write(&metrics, (0..60).map(step).collect::<String>()).unwrap();
    ready(
        &mut page,
        "document.getElementById('state').textContent.startsWith('epoch 2 of 2 · step 60 of 60')",
    );
    ready(&mut page, "document.getElementById('log').textContent.includes('step 60')");
    let (complaints, requests) = page.complaints_and_requests();
    assert_eq!(complaints, [] as [String; 0]);
    let own = |asked: &&String| !asked.starts_with(&url) && !asked.starts_with("data:");
    assert_eq!(requests.iter().filter(own).collect::<Vec<_>>(), [] as [&String; 0]);
    std::fs::remove_file(&metrics).unwrap();
    std::fs::write(folder.0.join(".lock"), serde_json::to_string(&records::Holder::me("0".into())).unwrap())
        .unwrap();
    ready(&mut page, "document.getElementById('state').textContent.includes('running')");
    server.stop();
    ready(&mut page, "document.getElementById('state').textContent.startsWith('No answer')");
    page.close();
}

/// Fifty runs, some with long names: the list reads on a phone and a desktop, finds runs, and leads to their pages and back.
#[test]
fn a_list_of_runs_is_read_found_in_and_followed() {
    let folder = Folder::new("list");
    let mut browser = need!(browser(&folder));
    let config =
        r#"{"model":"vit-ti/4","steps":60,"epochs":15,"world":2,"data":{"source":"cifar10:/data/cifar-10"}}"#;
    for i in 0..50 {
        let name = format!(
            "runs/sweep-{}/{}",
            i % 3,
            if i % 10 == 0 { format!("{i:02}-{}", "long-name-".repeat(12)) } else { format!("{i:02}") }
        );
        let launch = format!(
            "[{{\"command\":[\"vitesse\"],\"folder\":\"/\",\"started\":{},\"version\":\"1\",\"machine\":{{\"host\":\"vm\",\"os\":\"\",\
             \"kernel\":\"\",\"cpu\":\"\",\"threads\":2,\"simd\":\"\",\"memory_bytes\":1}}}}]",
            1_794_000_000 + 1000 * i
        );
        folder.file(&format!("{name}/run.json"), launch);
        folder.file(&format!("{name}/config.json"), config);
        let steps = (0..30).map(|step| format!("{{\"step\":{step},\"epoch\":{},\"loss\":1.5,\"lr\":0.001,\"images_per_second\":700.0,\"top1\":0.5}}\n", step / 4));
        folder.file(&format!("{name}/metrics.jsonl"), steps.collect::<String>());
        match i % 4 {
            0 => folder.file(
                &format!("{name}/ended.json"),
                r#"{"how":"failed","why":"rank 1 was lost","steps":30,"ended":1}"#,
            ),
            1 => folder.file(
                &format!("{name}/.lock"),
                serde_json::to_string(&records::Holder::me("0".into())).unwrap(),
            ),
            _ => folder.file(&format!("{name}/ended.json"), r#"{"how":"finished","steps":30,"ended":1}"#),
        };
    }
    let server = Server::start("127.0.0.1:0", Shows::of(&folder.0.join("runs"))).unwrap();
    for (size, scheme) in [(DESKTOP, "light"), (PHONE, "dark")] {
        let mut page = browser.open(&server.url(), size, scheme);
        ready(&mut page, "document.querySelectorAll('.runs li').length === 50");
        let state = page.run("document.getElementById('state').textContent");
        assert_eq!(state, "50 runs · 13 running · 24 finished · 13 failed");
        assert_eq!(page.run("document.documentElement.scrollWidth <= innerWidth"), true, "{size:?}");
        // Texts of a run lie beside or below each other.
        let over = page.run(
            r#"[...document.querySelectorAll(".runs li")].flatMap((run) => {
                const boxes = [...run.querySelectorAll("a, span, small")].map((part) => part.getBoundingClientRect());
                return boxes.flatMap((a, i) => boxes.slice(i + 1).filter((b) =>
                    Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1 && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 2));
            }).length"#,
        );
        assert_eq!(over, 0, "{size:?}");
        keep_page(&mut page, &format!("list-{}", size.0));
        page.run("(() => { const find = document.querySelector('#find input'); find.value = 'failed sweep-1'; find.dispatchEvent(new Event('input')); })()");
        ready(&mut page, "document.querySelectorAll('.runs li').length === 4");
        page.go(".runs a");
        ready(&mut page, "document.getElementById('state')?.textContent.includes('failed: rank 1 was lost')");
        assert_eq!(page.run("document.getElementById('home').hidden"), false);
        draws(&mut page, "listed", &["loss", "accuracy", "optimizer", "rate"]);
        page.go("#home");
        ready(&mut page, "document.querySelectorAll('.runs li').length === 50");
        let (complaints, requests) = page.complaints_and_requests();
        assert_eq!(complaints, [] as [String; 0]);
        let away = |asked: &&String| !asked.starts_with(&server.url()) && !asked.starts_with("data:");
        assert_eq!(requests.iter().filter(away).collect::<Vec<_>>(), [] as [&String; 0]);
        page.close();
    }
}

fn paper(page: &mut Page, view: &str, scheme: &str) {
    let colour = page.run("getComputedStyle(document.body).backgroundColor");
    let expected = if scheme == "dark" { "rgb(21, 23, 27)" } else { "rgb(255, 255, 255)" };
    assert_eq!(colour, expected, "{view}");
}

/// No error or warning, and no address but the page's own.
fn stays_at_home(page: &mut Page, view: &str, url: &str) {
    let (complaints, requests) = page.complaints_and_requests();
    assert_eq!(complaints, [] as [String; 0], "{view}");
    let away: Vec<&String> = requests
        .iter()
        .filter(|asked| *asked != url && !asked.starts_with("data:") && !asked.starts_with("blob:"))
        .collect();
    assert_eq!(away, [] as [&String; 0], "{view}");
}

/// A file, once it is there as a whole.
fn arrived(path: &Path) -> Vec<u8> {
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        // A download gets its name when it is complete.
        match std::fs::read(path) {
            Ok(bytes) if !bytes.is_empty() => return bytes,
            _ => assert!(Instant::now() < deadline, "{}: did not arrive", path.display()),
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn is_a_whole_figure(svg: &str, title: &str) {
    assert!(svg.starts_with("<svg") && svg.ends_with("</svg>"), "{svg:.80}");
    assert!(svg.contains(&format!(">{title}</title>")) && svg.contains(".f-compute{fill:"), "{title}");
    assert!(svg.contains("@font-face{font-family:Report"), "{title}: no font");
    assert!(!svg.contains("var(--"), "{title}: colours of the page");
}

fn is_a_picture(bytes: &[u8], id: &str) {
    let mut reader = png::Decoder::new(std::io::Cursor::new(bytes)).read_info().unwrap();
    let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
    let info = reader.next_frame(&mut pixels).unwrap();
    assert_eq!(info.width, 1504, "{id}");
    let size = info.color_type.samples();
    let colours: std::collections::HashSet<&[u8]> = pixels.chunks(size).collect();
    assert!(colours.len() > 16 && pixels[..3] == [255, 255, 255], "{id}: {} colours", colours.len());
}
