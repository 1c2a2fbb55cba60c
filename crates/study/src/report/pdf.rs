//! A scene as PDF: one page, vector paths, and text as glyphs of the embedded font, which can be searched and copied.

use super::ReportError;
use super::page::{BOLD, REGULAR};
use super::paper::Paper;
use super::scene::{Anchor, Ink, Item, Scene};
use flate2::Compression;
use flate2::write::ZlibEncoder;
use pdf_writer::types::{CidFontType, FontFlags, LineJoinStyle, SystemInfo, TextRenderingMode, UnicodeCmap};
use pdf_writer::{Content, Filter, Finish, Name, Pdf, Rect, Ref, Str, TextStr};
use std::collections::BTreeMap;
use std::io::Write;
use ttf_parser::{Face, Tag};

/// Numbers of the objects, in the order in which they are written.
const CATALOG: i32 = 1;
const PAGES: i32 = 2;
const PAGE: i32 = 3;
const DRAWN: i32 = 4;
const INFO: i32 = 5;
/// The first of the five objects of a font: the font, its glyphs' widths, descriptor, file and characters.
const REGULAR_FONT: i32 = 10;
const BOLD_FONT: i32 = 20;
/// The first of the opacities.
const OPACITY: i32 = 100;

/// Circles are four curves, whose handles have this length.
const HANDLE: f32 = 0.552_285;

pub fn file(scene: &Scene, paper: &Paper) -> Result<Vec<u8>, ReportError> {
    let (x, y, width, height) = paper.area(scene);
    let scale = paper.points as f32;
    let mut drawing = Drawing {
        out: Content::new(),
        regular: Font::read(REGULAR)?,
        bold: Font::read(BOLD)?,
        opacities: BTreeMap::new(),
    };
    // Scenes grow downwards.
    drawing.out.transform([scale, 0.0, 0.0, -scale, -x as f32 * scale, (y + height) as f32 * scale]);
    paper.items(scene).for_each(|item| drawing.draw(item));
    let Drawing { out, regular, bold, opacities } = drawing;
    let id = Ref::new;
    let mut pdf = Pdf::new();
    pdf.catalog(id(CATALOG)).pages(id(PAGES));
    pdf.pages(id(PAGES)).kids([id(PAGE)]).count(1);
    let mut page = pdf.page(id(PAGE));
    page.media_box(Rect::new(0.0, 0.0, width as f32 * scale, height as f32 * scale));
    page.parent(id(PAGES)).contents(id(DRAWN));
    let mut resources = page.resources();
    let fonts = [(b"R", REGULAR_FONT, &regular), (b"B", BOLD_FONT, &bold)];
    let used = || fonts.iter().filter(|(_, _, font)| !font.used.is_empty());
    let mut list = resources.fonts();
    used().for_each(|(name, first, _)| _ = list.pair(Name(*name), id(*first)));
    list.finish();
    let mut states = resources.ext_g_states();
    for (percent, place) in &opacities {
        states.pair(Name(state_name(*percent).as_bytes()), id(OPACITY + place));
    }
    states.finish();
    resources.finish();
    page.finish();
    for (percent, place) in &opacities {
        let share = f32::from(*percent) / 100.0;
        pdf.ext_graphics(id(OPACITY + place)).non_stroking_alpha(share).stroking_alpha(share);
    }
    for (_, first, font) in used() {
        font.write(&mut pdf, *first)?;
    }
    let drawn = deflated(&out.finish())?;
    pdf.stream(id(DRAWN), &drawn).filter(Filter::FlateDecode);
    pdf.document_info(id(INFO)).title(TextStr(&scene.title)).creator(TextStr("vitesse"));
    Ok(pdf.finish())
}

fn deflated(bytes: &[u8]) -> Result<Vec<u8>, ReportError> {
    let mut encoder = ZlibEncoder::new(vec![], Compression::best());
    let written = encoder.write_all(bytes).and_then(|()| encoder.finish());
    written.map_err(|e| ReportError::Drawing(e.to_string()))
}

fn state_name(percent: u8) -> String {
    format!("O{percent}")
}

/// A font of the report, and the glyphs that were used of it.
struct Font {
    face: Face<'static>,
    name: String,
    used: BTreeMap<u16, char>,
}

impl Font {
    fn read(bytes: &'static [u8]) -> Result<Self, ReportError> {
        let face = Face::parse(bytes, 0).map_err(|e| ReportError::Drawing(e.to_string()))?;
        // Six letters before the name say that it is part of a font.
        let name = if face.is_bold() || bytes.as_ptr() == BOLD.as_ptr() { "SemiBold" } else { "Regular" };
        Ok(Font { face, name: format!("VITESS+Inter-{name}"), used: BTreeMap::new() })
    }

    /// Numbers of the glyphs, and how wide they are in units of the font.
    fn glyphs(&mut self, text: &str) -> (Vec<u8>, f32) {
        let (mut bytes, mut wide) = (vec![], 0.0);
        for c in text.chars() {
            // The first glyph stands for what the font lacks.
            let glyph = self.face.glyph_index(c).unwrap_or_default();
            self.used.entry(glyph.0).or_insert(c);
            bytes.extend(glyph.0.to_be_bytes());
            wide += f32::from(self.face.glyph_hor_advance(glyph).unwrap_or_default());
        }
        (bytes, wide)
    }

    fn write(&self, pdf: &mut Pdf, first: i32) -> Result<(), ReportError> {
        let [font, widths, descriptor, file, characters] = [0, 1, 2, 3, 4].map(|i| Ref::new(first + i));
        let name = Name(self.name.as_bytes());
        let info = |ordering: &'static [u8]| SystemInfo {
            registry: Str(b"Adobe"),
            ordering: Str(ordering),
            supplement: 0,
        };
        let unit = 1000.0 / f32::from(self.face.units_per_em());
        pdf.type0_font(font)
            .base_font(name)
            .encoding_predefined(Name(b"Identity-H"))
            .descendant_font(widths)
            .to_unicode(characters);
        let mut cid = pdf.cid_font(widths);
        cid.subtype(CidFontType::Type0).base_font(name).system_info(info(b"Identity"));
        cid.font_descriptor(descriptor);
        let mut each = cid.widths();
        for glyph in self.used.keys() {
            let wide = self.face.glyph_hor_advance(ttf_parser::GlyphId(*glyph)).unwrap_or_default();
            each.consecutive(*glyph, [f32::from(wide) * unit]);
        }
        each.finish();
        cid.finish();
        let box_ = self.face.global_bounding_box();
        let [left, bottom, right, top] =
            [box_.x_min, box_.y_min, box_.x_max, box_.y_max].map(|x| f32::from(x) * unit);
        pdf.font_descriptor(descriptor)
            .name(name)
            .flags(FontFlags::SYMBOLIC)
            .bbox(Rect::new(left, bottom, right, top))
            .italic_angle(0.0)
            .ascent(f32::from(self.face.ascender()) * unit)
            .descent(f32::from(self.face.descender()) * unit)
            .cap_height(f32::from(self.face.capital_height().unwrap_or_default()) * unit)
            .stem_v(90.0)
            .font_file3(file);
        let outlines = self.face.raw_face().table(Tag::from_bytes(b"CFF "));
        let outlines = outlines.ok_or_else(|| ReportError::Drawing("the font has no outlines".into()))?;
        let mut stream = deflated(outlines)?;
        pdf.stream(file, &stream).filter(Filter::FlateDecode).pair(Name(b"Subtype"), Name(b"CIDFontType0C"));
        let mut map = UnicodeCmap::new(Name(b"Characters"), info(b"UCS"));
        self.used.iter().for_each(|(glyph, c)| map.pair(*glyph, *c));
        stream = deflated(&map.finish())?;
        pdf.stream(characters, &stream).filter(Filter::FlateDecode);
        Ok(())
    }
}

struct Drawing {
    out: Content,
    regular: Font,
    bold: Font,
    /// Percent, and its place among the opacities.
    opacities: BTreeMap<u8, i32>,
}

impl Drawing {
    fn draw(&mut self, item: &Item) {
        match item {
            Item::Mark { items, .. } => return items.iter().for_each(|item| self.draw(item)),
            Item::Text { .. } => return self.text(item),
            _ => {}
        }
        self.out.save_state();
        match item {
            Item::Rect { x, y, w, h, ink, opacity } => {
                self.ink(*ink, *opacity);
                self.out.rect(*x as f32, *y as f32, *w as f32, *h as f32).fill_nonzero();
            }
            Item::Line { points, ink, width, dash, opacity } => {
                self.ink(*ink, *opacity);
                self.out.set_line_width(*width as f32).set_line_join(LineJoinStyle::RoundJoin);
                if !dash.is_empty() {
                    self.out.set_dash_pattern(dash.iter().map(|length| *length as f32), 0.0);
                }
                self.path(points);
                self.out.stroke();
            }
            Item::Polygon { points, ink, hollow, opacity } => {
                self.inside(*ink, *hollow, *opacity);
                self.path(points);
                self.out.close_path();
                self.fill(*hollow);
            }
            Item::Circle { x, y, r, ink, hollow, opacity } => {
                self.inside(*ink, *hollow, *opacity);
                self.circle(*x as f32, *y as f32, *r as f32);
                self.fill(*hollow);
            }
            Item::Text { .. } | Item::Mark { .. } => {}
        }
        self.out.restore_state();
    }

    fn ink(&mut self, ink: Ink, opacity: f64) {
        let [r, g, b] = rgb(ink);
        self.out.set_fill_rgb(r, g, b).set_stroke_rgb(r, g, b);
        let percent = (100.0 * opacity.clamp(0.0, 1.0)).round() as u8;
        if percent < 100 {
            let next = self.opacities.len() as i32;
            self.opacities.entry(percent).or_insert(next);
            self.out.set_parameters(Name(state_name(percent).as_bytes()));
        }
    }

    fn path(&mut self, points: &[(f64, f64)]) {
        for (i, (x, y)) in points.iter().enumerate() {
            match i {
                0 => self.out.move_to(*x as f32, *y as f32),
                _ => self.out.line_to(*x as f32, *y as f32),
            };
        }
    }

    fn circle(&mut self, x: f32, y: f32, r: f32) {
        let k = HANDLE * r;
        self.out
            .move_to(x + r, y)
            .cubic_to(x + r, y + k, x + k, y + r, x, y + r)
            .cubic_to(x - k, y + r, x - r, y + k, x - r, y)
            .cubic_to(x - r, y - k, x - k, y - r, x, y - r)
            .cubic_to(x + k, y - r, x + r, y - k, x + r, y)
            .close_path();
    }

    /// Colours of a closed shape, which come before its path: a hollow one is filled with paper.
    fn inside(&mut self, ink: Ink, hollow: bool, opacity: f64) {
        self.ink(ink, opacity);
        if hollow {
            let [r, g, b] = rgb(Ink::Paper);
            self.out.set_fill_rgb(r, g, b).set_line_width(1.8);
        }
    }

    fn fill(&mut self, hollow: bool) {
        if hollow {
            self.out.fill_nonzero_and_stroke();
        } else {
            self.out.fill_nonzero();
        }
    }

    fn text(&mut self, item: &Item) {
        let Item::Text { x, y, anchor, size, bold, halo, ink, text } = item else { return };
        let (font, name) = if *bold { (&mut self.bold, b"B") } else { (&mut self.regular, b"R") };
        let (glyphs, wide) = font.glyphs(text);
        let wide = f64::from(wide) * size / f64::from(font.face.units_per_em());
        let before = match anchor {
            Anchor::Start => 0.0,
            Anchor::Middle => wide / 2.0,
            Anchor::End => wide,
        };
        let place = [1.0, 0.0, 0.0, -1.0, (x - before) as f32, *y as f32];
        let mut show = |ink: Ink, mode: TextRenderingMode| {
            let [r, g, b] = rgb(ink);
            self.out.save_state();
            self.out.set_fill_rgb(r, g, b).set_stroke_rgb(r, g, b);
            self.out.set_line_width(3.0).set_line_join(LineJoinStyle::RoundJoin);
            self.out.begin_text().set_font(Name(name), *size as f32).set_text_rendering_mode(mode);
            self.out.set_text_matrix(place).show(Str(&glyphs)).end_text();
            self.out.restore_state();
        };
        if *halo {
            show(Ink::Paper, TextRenderingMode::Stroke);
        }
        show(*ink, TextRenderingMode::Fill);
    }
}

fn rgb(ink: Ink) -> [f32; 3] {
    let [_, red, green, blue] = ink.light().to_be_bytes();
    [red, green, blue].map(|x| f32::from(x) / 255.0)
}
