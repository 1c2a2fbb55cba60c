//! The report in a real browser: every figure draws, nothing overlaps or is cut, tips and downloads work, and nothing is asked for
//! from outside. `VITESSE_SHOTS=DIR` keeps pictures to look at.

mod chromium;
mod points;

use chromium::{Chromium, Page};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use study::results::Results;
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
    let server = study::serve::Server::start("127.0.0.1:0".parse().unwrap(), &folder.0).unwrap();
    let url = server.url();
    let mut page = browser.open(&url, PHONE, "dark");
    let ready = |page: &mut Page, what: &str| {
        let script = format!(
            "new Promise((done) => {{ const look = () => ({what}) ? done(true) : setTimeout(look, 50); look(); }})"
        );
        assert_eq!(page.run(&script), true);
    };
    ready(&mut page, "document.querySelectorAll('main figure').length === 2");
    ready(&mut page, "document.getElementById('state').textContent === 'epoch 1 of 1 · step 40 of 40'");
    draws(&mut page, "live", &["loss", "rate"]);
    tips(&mut page, "live", true);
    page.run("document.activeElement.blur()");
    keep_pictures(&mut page, "live");
    std::fs::write(&metrics, (0..60).map(step).collect::<String>()).unwrap();
    ready(&mut page, "document.getElementById('state').textContent === 'epoch 1 of 1 · step 60 of 60'");
    ready(&mut page, "document.getElementById('log').textContent.includes('step 59')");
    let (complaints, requests) = page.complaints_and_requests();
    assert_eq!(complaints, [] as [String; 0]);
    let own = |asked: &&String| !asked.starts_with(&url) && !asked.starts_with("data:");
    assert_eq!(requests.iter().filter(own).collect::<Vec<_>>(), [] as [&String; 0]);
    server.stop();
    ready(&mut page, "document.getElementById('state').textContent.startsWith('No answer')");
    page.close();
}

/// Every figure is there, has marks, and its texts are inside, readable and apart.
fn draws(page: &mut Page, view: &str, expected: &[&str]) {
    let found = page.run(
        r#"[...document.querySelectorAll("main figure")].map((figure) => {
            const svg = [...figure.querySelectorAll("svg.figure")].find((svg) => svg.getBoundingClientRect().width > 0);
            const all = svg.getBoundingClientRect();
            const texts = [...svg.querySelectorAll("text")].filter((text) => !text.closest(".frame") && text.textContent.trim());
            const boxes = texts.map((text) => ({ says: text.textContent, box: text.getBoundingClientRect() }));
            const outside = boxes.filter(({ box }) =>
                box.left < all.left - 1 || box.right > all.right + 1 || box.top < all.top - 2 || box.bottom > all.bottom + 2);
            const over = [];
            boxes.forEach((a, i) => boxes.slice(i + 1).forEach((b) => {
                const wide = Math.min(a.box.right, b.box.right) - Math.max(a.box.left, b.box.left);
                const high = Math.min(a.box.bottom, b.box.bottom) - Math.max(a.box.top, b.box.top);
                if (wide > 1 && high > 4) over.push(`${a.says} / ${b.says}`);
            }));
            return {
                id: figure.id, width: all.width, height: all.height, marks: svg.querySelectorAll(".mark").length,
                smallest: Math.min(...boxes.map(({ box }) => box.height)),
                outside: outside.map(({ says }) => says), over,
            };
        })"#,
    );
    let found = found.as_array().unwrap();
    let ids: Vec<&str> = found.iter().map(|figure| figure["id"].as_str().unwrap()).collect();
    assert_eq!(ids, expected, "{view}");
    for figure in found {
        let number = |name: &str| figure[name].as_f64().unwrap();
        assert!(number("width") > 300.0 && number("height") > 60.0, "{view}: {figure}");
        assert!(number("marks") > 0.0 && number("smallest") > 11.0, "{view}: {figure}");
        assert_eq!(figure["outside"], json!([]), "{view}: text is cut: {figure}");
        assert_eq!(figure["over"], json!([]), "{view}: text lies on text: {figure}");
    }
    assert_eq!(page.run("document.documentElement.scrollWidth <= innerWidth"), true, "{view}: too wide");
}

fn paper(page: &mut Page, view: &str, scheme: &str) {
    let colour = page.run("getComputedStyle(document.body).backgroundColor");
    let expected = if scheme == "dark" { "rgb(21, 23, 27)" } else { "rgb(255, 255, 255)" };
    assert_eq!(colour, expected, "{view}");
}

/// Pointing at the last mark of every figure shows its runs, and so does the keyboard.
fn tips(page: &mut Page, view: &str, touch: bool) {
    let count = page.run("document.querySelectorAll('main figure').length").as_u64().unwrap();
    for i in 0..count {
        let at = page.run(&format!(
            r#"(() => {{
                const figure = document.querySelectorAll("main figure")[{i}];
                const svg = [...figure.querySelectorAll("svg.figure")].find((svg) => svg.getBoundingClientRect().width > 0);
                const mark = [...svg.querySelectorAll(".mark")].at(-1);
                mark.scrollIntoView({{ block: "center" }});
                const box = mark.querySelector(".area").getBoundingClientRect();
                return {{ x: box.left + box.width / 2, y: box.top + box.height / 2, tip: mark.dataset.tip }};
            }})()"#
        ));
        let (x, y) = (at["x"].as_f64().unwrap(), at["y"].as_f64().unwrap());
        if touch {
            page.tap(x, y)
        } else {
            page.point_at(1.0, 1.0);
            page.point_at(x, y)
        }
        let shown = shown_tip(page);
        assert_eq!(shown["text"], at["tip"], "{view}, figure {i}");
        assert!(at["tip"].as_str().is_some_and(|tip| tip.contains('\n')), "{view}: {at}");
        assert_eq!(shown["inside"], true, "{view}, figure {i}: the tip is cut");
    }
    // From the first mark to the second by keyboard, wherever the pointer rests.
    let second = page.run(
        r#"(() => {
            const svg = [...document.querySelectorAll("svg.figure")].find((svg) => svg.getBoundingClientRect().width > 0);
            const marks = svg.querySelectorAll(".mark");
            marks[0].focus();
            return marks[1].dataset.tip;
        })()"#,
    );
    page.press("ArrowRight");
    assert_eq!(shown_tip(page)["text"], second, "{view}: keyboard");
    page.press("Escape");
    assert_eq!(shown_tip(page), Value::Null, "{view}: Escape");
}

fn shown_tip(page: &mut Page) -> Value {
    page.run(
        r#"(() => {
            const tip = document.getElementById("tip");
            if (!tip.classList.contains("on")) return null;
            const box = tip.getBoundingClientRect();
            return { text: tip.textContent, inside: box.left >= 0 && box.right <= innerWidth };
        })()"#,
    )
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

fn keep_pictures(page: &mut Page, view: &str) {
    let Some(folder) = std::env::var_os("VITESSE_SHOTS").map(PathBuf::from) else { return };
    std::fs::create_dir_all(&folder).unwrap();
    let boxes = page.run(
        r#"["header", "main > section", ...[...document.querySelectorAll("main figure")].map((figure) => `figure[id="${figure.id}"]`)].map((which) => {
            const box = document.querySelector(which).getBoundingClientRect();
            return { name: which, x: 0, y: box.top + scrollY - 8, width: innerWidth, height: Math.min(box.height + 16, 2400), scale: 1 };
        })"#,
    );
    for clip in boxes.as_array().unwrap() {
        let name: String = clip["name"]
            .as_str()
            .unwrap()
            .chars()
            .filter(|c| c.is_ascii_alphanumeric() || *c == '-')
            .collect();
        let picture = page.screenshot(Some(clip.clone()));
        std::fs::write(folder.join(format!("{view}-{name}.png.b64")), picture).unwrap();
    }
}
