//! A scene as PNG, for places that take no SVG. Text is drawn from the font that reports bring along, so that no font need be
//! installed; colours are those of light paper.

use super::ReportError;
use super::page::{BOLD, REGULAR};
use super::paper::Paper;
use super::scene::{Anchor, Ink, Item, Scene};
use tiny_skia::{
    Color, FillRule, LineCap, LineJoin, Paint, Path, PathBuilder, Pixmap, Rect, Stroke, StrokeDash, Transform,
};
use ttf_parser::{Face, OutlineBuilder};

/// Pixels for each of the scene's.
const SCALE: f32 = 2.0;
/// A picture with more pixels to a side is refused.
const LARGEST: f64 = 8000.0;

pub fn file(scene: &Scene, paper: &Paper) -> Result<Vec<u8>, ReportError> {
    let (x, y, width, height) = paper.area(scene);
    // Two pixels to the unit on screens, 300 to the inch on paper.
    let scale = if paper.sized { (paper.points * 300.0 / 72.0) as f32 } else { SCALE };
    if !(width <= LARGEST && height <= LARGEST) {
        return Err(ReportError::Drawing(format!("{} × {height:.0} is too large", width)));
    }
    let (wide, high) = ((width as f32 * scale).ceil() as u32, (height as f32 * scale).ceil() as u32);
    let problem = |what: &str| ReportError::Drawing(what.to_string());
    let mut canvas = Canvas {
        pixels: Pixmap::new(wide, high).ok_or_else(|| problem("it has no size"))?,
        place: Transform::from_translate(-x as f32, -y as f32).post_scale(scale, scale),
        regular: Face::parse(REGULAR, 0).map_err(|e| problem(&e.to_string()))?,
        bold: Face::parse(BOLD, 0).map_err(|e| problem(&e.to_string()))?,
    };
    canvas.pixels.fill(colour(Ink::Paper, 1.0));
    paper.items(scene).for_each(|item| canvas.draw(item));
    encoded(&canvas.pixels, (wide, high), paper).map_err(|e| problem(&e.to_string()))
}

fn encoded(pixels: &Pixmap, (wide, high): (u32, u32), paper: &Paper) -> Result<Vec<u8>, png::EncodingError> {
    let mut out = vec![];
    let mut encoder = png::Encoder::new(&mut out, wide, high);
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_depth(png::BitDepth::Eight);
    if paper.sized {
        let per_metre = (300.0 / 0.0254_f64).round() as u32;
        let unit = png::Unit::Meter;
        encoder.set_pixel_dims(Some(png::PixelDimensions { xppu: per_metre, yppu: per_metre, unit }));
    }
    let mut writer = encoder.write_header()?;
    // Paper is opaque, so that nothing is.
    let colours: Vec<u8> = pixels.pixels().iter().flat_map(|p| [p.red(), p.green(), p.blue()]).collect();
    writer.write_image_data(&colours)?;
    writer.finish()?;
    Ok(out)
}

fn colour(ink: Ink, opacity: f64) -> Color {
    let [_, red, green, blue] = ink.light().to_be_bytes();
    Color::from_rgba8(red, green, blue, (opacity.clamp(0.0, 1.0) * 255.0).round() as u8)
}

fn paint(ink: Ink, opacity: f64) -> Paint<'static> {
    let mut paint = Paint { anti_alias: true, ..Paint::default() };
    paint.set_color(colour(ink, opacity));
    paint
}

struct Canvas {
    pixels: Pixmap,
    place: Transform,
    regular: Face<'static>,
    bold: Face<'static>,
}

impl Canvas {
    fn draw(&mut self, item: &Item) {
        match item {
            Item::Rect { x, y, w, h, ink, opacity } => {
                let rect = Rect::from_xywh(*x as f32, *y as f32, *w as f32, *h as f32);
                let rect = rect.filter(|rect| rect.width() > 0.0 && rect.height() > 0.0);
                if let Some(rect) = rect {
                    self.pixels.fill_rect(rect, &paint(*ink, *opacity), self.place, None);
                }
            }
            Item::Line { points, ink, width, dash, opacity } => {
                // None for no dashes at all.
                let dash: Vec<f32> = dash.iter().map(|length| *length as f32).collect();
                let dash = if dash.is_empty() { None } else { StrokeDash::new(dash, 0.0) };
                let line_join = LineJoin::Round;
                let stroke = Stroke {
                    width: *width as f32,
                    dash,
                    line_join,
                    line_cap: LineCap::Butt,
                    ..Stroke::default()
                };
                if let Some(path) = polyline(points, false) {
                    self.pixels.stroke_path(&path, &paint(*ink, *opacity), &stroke, self.place, None);
                }
            }
            Item::Circle { x, y, r, ink, hollow, opacity } => {
                if let Some(path) = PathBuilder::from_circle(*x as f32, *y as f32, *r as f32) {
                    self.shape(&path, *ink, *hollow, *opacity);
                }
            }
            Item::Polygon { points, ink, hollow, opacity } => {
                if let Some(path) = polyline(points, true) {
                    self.shape(&path, *ink, *hollow, *opacity);
                }
            }
            Item::Text { x, y, anchor, size, bold, halo, ink, text } => {
                self.text((*x, *y), *anchor, *size, *bold, *halo, *ink, text);
            }
            Item::Mark { items, .. } => items.iter().for_each(|item| self.draw(item)),
        }
    }

    fn shape(&mut self, path: &Path, ink: Ink, hollow: bool, opacity: f64) {
        self.fill(path, if hollow { Ink::Paper } else { ink }, opacity, self.place);
        if hollow {
            let stroke = Stroke { width: 1.8, ..Stroke::default() };
            self.pixels.stroke_path(path, &paint(ink, opacity), &stroke, self.place, None);
        }
    }

    fn fill(&mut self, path: &Path, ink: Ink, opacity: f64, place: Transform) {
        self.pixels.fill_path(path, &paint(ink, opacity), FillRule::Winding, place, None);
    }

    #[allow(clippy::too_many_arguments)]
    fn text(
        &mut self,
        (x, y): (f64, f64),
        anchor: Anchor,
        size: f64,
        bold: bool,
        halo: bool,
        ink: Ink,
        text: &str,
    ) {
        let face = if bold { &self.bold } else { &self.regular };
        let mut outline = Outline { path: PathBuilder::new(), at: 0.0 };
        for c in text.chars() {
            // The first glyph stands for what the font lacks.
            let glyph = face.glyph_index(c).unwrap_or_default();
            face.outline_glyph(glyph, &mut outline);
            outline.at += f32::from(face.glyph_hor_advance(glyph).unwrap_or(face.units_per_em()));
        }
        let (wide, scale) = (outline.at, size as f32 / f32::from(face.units_per_em()));
        let Some(path) = outline.path.finish() else { return };
        let before = match anchor {
            Anchor::Start => 0.0,
            Anchor::Middle => wide / 2.0,
            Anchor::End => wide,
        };
        // Glyphs grow upwards.
        let place = Transform::from_translate(-before, 0.0).post_scale(scale, -scale);
        let place = place.post_translate(x as f32, y as f32).post_concat(self.place);
        if halo {
            let stroke = Stroke { width: 3.0 / scale, line_join: LineJoin::Round, ..Stroke::default() };
            self.pixels.stroke_path(&path, &paint(Ink::Paper, 1.0), &stroke, place, None);
        }
        self.fill(&path, ink, 1.0, place);
    }
}

fn polyline(points: &[(f64, f64)], closed: bool) -> Option<Path> {
    let mut path = PathBuilder::new();
    for (i, (x, y)) in points.iter().enumerate() {
        match i {
            0 => path.move_to(*x as f32, *y as f32),
            _ => path.line_to(*x as f32, *y as f32),
        }
    }
    if closed {
        path.close();
    }
    path.finish()
}

/// Glyphs beside each other, in units of the font.
struct Outline {
    path: PathBuilder,
    at: f32,
}

impl OutlineBuilder for Outline {
    fn move_to(&mut self, x: f32, y: f32) {
        self.path.move_to(self.at + x, y);
    }

    fn line_to(&mut self, x: f32, y: f32) {
        self.path.line_to(self.at + x, y);
    }

    fn quad_to(&mut self, x1: f32, y1: f32, x: f32, y: f32) {
        self.path.quad_to(self.at + x1, y1, self.at + x, y);
    }

    fn curve_to(&mut self, x1: f32, y1: f32, x2: f32, y2: f32, x: f32, y: f32) {
        self.path.cubic_to(self.at + x1, y1, self.at + x2, y2, self.at + x, y);
    }

    fn close(&mut self) {
        self.path.close();
    }
}
