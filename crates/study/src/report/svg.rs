//! A scene as SVG. Colours are classes: a page gives them by variables, in light and dark; a file brings its own style.

use super::escape::markup;
use super::page::font;
use super::paper::Paper;
use super::scene::{Anchor, Ink, Item, MARGIN, Scene};
use std::fmt::Write;

/// For a page: without title and note, which it says itself; they lie outside the view, for whoever downloads the figure.
pub fn in_page(scene: &Scene, class: &str) -> String {
    let Scene { width, height, above, below, .. } = scene;
    let mut out = String::new();
    let (id, whole) = (markup(&format!("{}-{class}", scene.id)), height + above + below);
    let _ = write!(
        out,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" class=\"figure {class}\" role=\"img\" aria-labelledby=\"{id}-title {id}-desc\" \
         viewBox=\"0 0 {} {}\" data-whole=\"{} {} {} {}\">",
        n(*width),
        n(*height),
        n(-MARGIN),
        n(-above),
        n(width + 2.0 * MARGIN),
        n(whole)
    );
    body(&mut out, scene, &id, true);
    out
}

/// A file that stands alone, with its font.
pub fn file(scene: &Scene, paper: &Paper) -> String {
    let (x, y, w, h) = paper.area(scene);
    let mut out = String::new();
    let id = markup(&scene.id);
    let size = |units: f64| match paper.sized {
        true => format!("{}pt", n(units * paper.points)),
        false => n(units),
    };
    let _ = write!(
        out,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" role=\"img\" aria-labelledby=\"{id}-title {id}-desc\" width=\"{wide}\" \
         height=\"{high}\" viewBox=\"{x} {y} {w} {h}\"><style>{font}{style}</style>\
         <rect class=\"f-paper\" x=\"{x}\" y=\"{y}\" width=\"{w}\" height=\"{h}\"/>",
        wide = size(w),
        high = size(h),
        w = n(w),
        x = n(x),
        h = n(h),
        y = n(y),
        font = font(),
        style = file_style()
    );
    body(&mut out, scene, &id, paper.titled);
    out
}

/// The classes of shapes, with the colours of light paper.
pub fn file_style() -> String {
    let mut out = String::from(
        "text{font-family:Report,Inter,\"Helvetica Neue\",Helvetica,Arial,sans-serif;text-rendering:geometricPrecision}.b{font-weight:600}\
         .area{fill:none;pointer-events:all}",
    );
    for ink in Ink::ALL {
        let (name, colour) = (ink.name(), ink.light());
        let _ = write!(out, ".f-{name}{{fill:#{colour:06x}}}.l-{name}{{stroke:#{colour:06x};fill:none}}");
    }
    let paper = Ink::Paper.light();
    let _ = write!(
        out,
        ".hollow{{fill:#{paper:06x}}}.halo{{paint-order:stroke;stroke:#{paper:06x};stroke-width:3px;stroke-linejoin:round}}"
    );
    out
}

fn body(out: &mut String, scene: &Scene, id: &str, titled: bool) {
    let _ = write!(
        out,
        "<title id=\"{id}-title\">{}</title><desc id=\"{id}-desc\">{}</desc>",
        markup(&scene.title),
        markup(&scene.description)
    );
    items(out, &scene.items);
    if titled {
        out.push_str("<g class=\"frame\" aria-hidden=\"true\">");
        items(out, &scene.frame);
        out.push_str("</g>");
    }
    out.push_str("</svg>");
}

fn items(out: &mut String, list: &[Item]) {
    list.iter().for_each(|one| item(out, one));
}

fn item(out: &mut String, item: &Item) {
    let _ = match item {
        Item::Rect { x, y, w, h, ink, opacity } => write!(
            out,
            "<rect class=\"f-{}\" x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\"{}/>",
            ink.name(),
            n(*x),
            n(*y),
            n(*w),
            n(*h),
            faded(*opacity)
        ),
        Item::Line { points, ink, width, dash, opacity } => {
            let lengths: Vec<String> = dash.iter().map(|length| n(*length)).collect();
            let dash = if dash.is_empty() {
                String::new()
            } else {
                format!(" stroke-dasharray=\"{}\"", lengths.join(" "))
            };
            write!(
                out,
                "<polyline class=\"l-{}\" points=\"{}\" stroke-width=\"{}\" stroke-linejoin=\"round\"{}{}/>",
                ink.name(),
                places(points),
                n(*width),
                dash,
                faded(*opacity)
            )
        }
        Item::Circle { x, y, r, ink, hollow, opacity } => {
            let (class, style) = shape(*ink, *hollow);
            write!(
                out,
                "<circle class=\"{class}\" cx=\"{}\" cy=\"{}\" r=\"{}\"{style}{}/>",
                n(*x),
                n(*y),
                n(*r),
                faded(*opacity)
            )
        }
        Item::Polygon { points, ink, hollow, opacity } => {
            let (class, style) = shape(*ink, *hollow);
            let (points, faded) = (places(points), faded(*opacity));
            write!(out, "<polygon class=\"{class}\" points=\"{points}\"{style}{faded}/>")
        }
        Item::Text { x, y, anchor, size, bold, halo, ink, text } => write!(
            out,
            "<text class=\"f-{}{}{}\" x=\"{}\" y=\"{}\" font-size=\"{}\"{}>{}</text>",
            ink.name(),
            if *bold { " b" } else { "" },
            if *halo { " halo" } else { "" },
            n(*x),
            n(*y),
            n(*size),
            match anchor {
                Anchor::Start => "",
                Anchor::Middle => " text-anchor=\"middle\"",
                Anchor::End => " text-anchor=\"end\"",
            },
            markup(text)
        ),
        Item::Mark { tip, area: (x, y, w, h), items: inside } => {
            let _ = write!(
                out,
                "<g class=\"mark\"><title>{}</title><rect class=\"area\" x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\"/>",
                markup(tip),
                n(*x),
                n(*y),
                n(*w),
                n(*h)
            );
            items(out, inside);
            out.write_str("</g>")
        }
    };
}

fn places(points: &[(f64, f64)]) -> String {
    points.iter().map(|(x, y)| format!("{},{}", n(*x), n(*y))).collect::<Vec<_>>().join(" ")
}

/// Class and style of a closed shape.
fn shape(ink: Ink, hollow: bool) -> (String, &'static str) {
    let name = ink.name();
    match hollow {
        true => (format!("l-{name} hollow"), " stroke-width=\"1.8\""),
        false => (format!("f-{name}"), ""),
    }
}

fn faded(opacity: f64) -> String {
    if opacity < 1.0 { format!(" opacity=\"{}\"", n(opacity)) } else { String::new() }
}

/// A coordinate: hundredths are finer than any screen. What is not a number would break the figure, and is 0.
fn n(x: f64) -> String {
    if !x.is_finite() {
        return "0".into();
    }
    let text = format!("{x:.2}");
    let text = text.trim_end_matches('0').trim_end_matches('.');
    if text == "-0" { "0".into() } else { text.to_string() }
}
