//! What is looked at on a page: its figures, its tips, and pictures of it.

use crate::chromium::Page;
use serde_json::{Value, json};
use std::path::PathBuf;

/// Every figure is there, has marks, and its texts are inside, readable and apart.
pub fn draws(page: &mut Page, view: &str, expected: &[&str]) {
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

/// Pointing at the last mark of every figure shows its runs, and so does the keyboard.
pub fn tips(page: &mut Page, view: &str, touch: bool) {
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

/// Keeps pictures in the folder that `VITESSE_SHOTS` names.
pub fn keep_pictures(page: &mut Page, view: &str) {
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

/// Waits until a condition holds in the page.
pub fn ready(page: &mut Page, what: &str) {
    let script = format!(
        "new Promise((done) => {{ const look = () => ({what}) ? done(true) : setTimeout(look, 50); look(); }})"
    );
    assert_eq!(page.run(&script), true);
}

/// A picture of the page from its top, to be looked at.
pub fn keep_page(page: &mut Page, name: &str) {
    let Some(folder) = std::env::var_os("VITESSE_SHOTS").map(PathBuf::from) else { return };
    std::fs::create_dir_all(&folder).unwrap();
    let clip = page.run(
        "({ x: 0, y: 0, width: innerWidth, height: Math.min(document.documentElement.scrollHeight, 6000), scale: 1 })",
    );
    std::fs::write(folder.join(format!("{name}.png.b64")), page.screenshot(Some(clip))).unwrap();
}
