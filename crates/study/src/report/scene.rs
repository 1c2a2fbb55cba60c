//! What a figure is drawn with: a flat list of shapes, which `svg` writes as text and `png` as pixels.

/// What a shape stands for; its colour is decided by whoever shows it, in light or in dark.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Ink {
    Text,
    Muted,
    Grid,
    Paper,
    /// Text on pale parts: dark in light and in dark.
    Deep,
    Compute,
    Communication,
    Wait,
    Data,
    Optimizer,
    Idle,
    /// Of the n-th series; they repeat after [`SERIES`].
    Series(usize),
}

/// Lines over an area, in the colour of paper.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pattern {
    Plain,
    Rising,
    Falling,
    Upright,
    Level,
}

/// Corners of a marker, around its middle.
type Corners = &'static [(f64, f64)];

/// Shapes of the series' marks; the first is a circle.
const MARKERS: [Option<Corners>; SERIES] = [
    None,
    Some(&[(-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)]),
    Some(&[(0.0, -1.2), (1.1, 0.8), (-1.1, 0.8)]),
    Some(&[(0.0, -1.3), (1.1, 0.0), (0.0, 1.3), (-1.1, 0.0)]),
    Some(&[(0.0, 1.2), (1.1, -0.8), (-1.1, -0.8)]),
    Some(&[
        (-0.4, -1.2),
        (0.4, -1.2),
        (0.4, -0.4),
        (1.2, -0.4),
        (1.2, 0.4),
        (0.4, 0.4),
        (0.4, 1.2),
        (-0.4, 1.2),
        (-0.4, 0.4),
        (-1.2, 0.4),
        (-1.2, -0.4),
        (-0.4, -0.4),
    ]),
    Some(&[(-0.6, -1.1), (0.6, -1.1), (1.2, 0.0), (0.6, 1.1), (-0.6, 1.1), (-1.2, 0.0)]),
];

/// Series that have a colour of their own.
pub const SERIES: usize = 7;

impl Ink {
    pub const ALL: [Ink; 11 + SERIES] = [
        Ink::Text,
        Ink::Muted,
        Ink::Grid,
        Ink::Paper,
        Ink::Deep,
        Ink::Compute,
        Ink::Communication,
        Ink::Wait,
        Ink::Data,
        Ink::Optimizer,
        Ink::Idle,
        Ink::Series(0),
        Ink::Series(1),
        Ink::Series(2),
        Ink::Series(3),
        Ink::Series(4),
        Ink::Series(5),
        Ink::Series(6),
    ];

    pub fn name(self) -> &'static str {
        match self {
            Ink::Text => "text",
            Ink::Muted => "muted",
            Ink::Grid => "grid",
            Ink::Paper => "paper",
            Ink::Deep => "deep",
            Ink::Compute => "compute",
            Ink::Communication => "exchange",
            Ink::Wait => "wait",
            Ink::Data => "data",
            Ink::Optimizer => "optimizer",
            Ink::Idle => "idle",
            Ink::Series(n) => ["s0", "s1", "s2", "s3", "s4", "s5", "s6"][n % SERIES],
        }
    }

    /// Dashes of a series' line. With more series than shapes, the two together still differ.
    pub fn dash(self) -> &'static [f64] {
        const DASHES: [&[f64]; 6] =
            [&[], &[7.0, 3.0], &[2.0, 3.0], &[9.0, 3.0, 2.0, 3.0], &[4.0, 2.0], &[12.0, 3.0]];
        match self {
            Ink::Series(n) => DASHES[(n + n / SERIES) % DASHES.len()],
            _ => &[],
        }
    }

    fn pattern(self) -> Pattern {
        match self {
            Ink::Communication => Pattern::Rising,
            Ink::Wait => Pattern::Level,
            Ink::Data => Pattern::Falling,
            Ink::Optimizer => Pattern::Upright,
            _ => Pattern::Plain,
        }
    }

    /// Red, green and blue on light paper. Series are Okabe and Ito's colours, darkened where text has them too.
    pub fn light(self) -> u32 {
        match self {
            Ink::Text => 0x1d2129,
            Ink::Muted => 0x5f6672,
            Ink::Grid => 0xe4e4e0,
            Ink::Paper => 0xffffff,
            Ink::Deep => 0x1d2129,
            Ink::Compute => 0x3f6f9f,
            Ink::Communication => 0xd55e00,
            Ink::Wait => 0xe9a33b,
            Ink::Data => 0x0b8f6c,
            Ink::Optimizer => 0xb0699a,
            Ink::Idle => 0xc3c7cd,
            Ink::Series(n) => {
                [0x0067a5, 0xc85200, 0x00825f, 0xb0528a, 0x8a6d00, 0x3f8fc4, 0x5f6672][n % SERIES]
            }
        }
    }

    pub fn dark(self) -> u32 {
        match self {
            Ink::Text => 0xe8e8e4,
            Ink::Muted => 0x9aa1ac,
            Ink::Grid => 0x2e323a,
            Ink::Paper => 0x15171b,
            Ink::Deep => 0x15171b,
            Ink::Compute => 0x5b8fc4,
            Ink::Communication => 0xee7d32,
            Ink::Wait => 0xf0bd66,
            Ink::Data => 0x35b994,
            Ink::Optimizer => 0xcc8bb8,
            Ink::Idle => 0x4a505a,
            Ink::Series(n) => {
                [0x62b0ea, 0xf28b45, 0x3cc79d, 0xe08fc0, 0xd6b445, 0xa5d8fa, 0x9aa1ac][n % SERIES]
            }
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Anchor {
    Start,
    Middle,
    End,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Item {
    Rect {
        x: f64,
        y: f64,
        w: f64,
        h: f64,
        ink: Ink,
        /// 0 to 1.
        opacity: f64,
    },
    /// An open line through points.
    Line {
        points: Vec<(f64, f64)>,
        ink: Ink,
        width: f64,
        /// Lengths of dashes and gaps; none: drawn through.
        dash: &'static [f64],
        opacity: f64,
    },
    /// A closed shape of straight sides.
    Polygon {
        points: Vec<(f64, f64)>,
        ink: Ink,
        hollow: bool,
        opacity: f64,
    },
    Circle {
        x: f64,
        y: f64,
        r: f64,
        ink: Ink,
        hollow: bool,
        opacity: f64,
    },
    Text {
        x: f64,
        y: f64,
        anchor: Anchor,
        size: f64,
        bold: bool,
        /// With a rim of paper, to be read over lines.
        halo: bool,
        ink: Ink,
        text: String,
    },
    /// Shapes that stand for one measurement; `tip` says what it was, a line each. Whoever points at `area` is shown it.
    Mark {
        tip: String,
        area: (f64, f64, f64, f64),
        items: Vec<Item>,
    },
}

/// Paper around a figure that stands alone.
pub const MARGIN: f64 = 16.0;

/// A figure, laid out.
#[derive(Clone, Debug, PartialEq)]
pub struct Scene {
    pub id: String,
    pub title: String,
    /// For those who can't see it.
    pub description: String,
    pub width: f64,
    pub height: f64,
    pub items: Vec<Item>,
    /// Above 0 and below `height`: title and note, for a figure that stands alone. A page says them in its own text.
    pub frame: Vec<Item>,
    pub above: f64,
    pub below: f64,
}

impl Item {
    pub fn text(x: f64, y: f64, anchor: Anchor, size: f64, ink: Ink, text: impl Into<String>) -> Item {
        Item::Text { x, y, anchor, size, bold: false, halo: false, ink, text: text.into() }
    }

    pub fn bold(self) -> Item {
        match self {
            Item::Text { x, y, anchor, size, halo, ink, text, .. } => {
                Item::Text { x, y, anchor, size, bold: true, halo, ink, text }
            }
            other => other,
        }
    }

    pub fn halo(self) -> Item {
        match self {
            Item::Text { x, y, anchor, size, bold, ink, text, .. } => {
                Item::Text { x, y, anchor, size, bold, halo: true, ink, text }
            }
            other => other,
        }
    }

    pub fn rule(from: (f64, f64), to: (f64, f64), ink: Ink, width: f64) -> Item {
        Item::Line { points: vec![from, to], ink, width, dash: &[], opacity: 1.0 }
    }

    /// The mark of a series at a place: its shape tells it apart where colours don't.
    pub fn marker((x, y): (f64, f64), ink: Ink, hollow: bool) -> Item {
        let Ink::Series(n) = ink else {
            return Item::Circle { x, y, r: 4.0, ink, hollow, opacity: 1.0 };
        };
        let Some(corners) = MARKERS[n % SERIES] else {
            return Item::Circle { x, y, r: 4.0, ink, hollow, opacity: 1.0 };
        };
        let points = corners.iter().map(|(a, b)| (x + 4.0 * a, y + 4.0 * b)).collect();
        Item::Polygon { points, ink, hollow, opacity: 1.0 }
    }

    /// A rectangle with the pattern of its ink, which tells parts apart in greyscale.
    pub fn filled((x, y, w, h): (f64, f64, f64, f64), ink: Ink, opacity: f64) -> Vec<Item> {
        const PITCH: f64 = 6.0;
        let mut items = vec![Item::Rect { x, y, w, h, ink, opacity }];
        let mut line = |from: (f64, f64), to: (f64, f64)| {
            let (points, width) = (vec![from, to], 1.1);
            items.push(Item::Line { points, ink: Ink::Paper, width, dash: &[], opacity: 0.6 * opacity });
        };
        let (right, bottom) = (x + w, y + h);
        let pattern = if w < 2.0 || h < 2.0 { Pattern::Plain } else { ink.pattern() };
        let count = |length: f64| (length / PITCH) as usize;
        match pattern {
            Pattern::Plain => {}
            Pattern::Upright => {
                (1..=count(w)).map(|i| x + PITCH * i as f64).for_each(|at| line((at, y), (at, bottom)))
            }
            Pattern::Level => {
                (1..=count(h)).map(|i| y + PITCH * i as f64).for_each(|at| line((x, at), (right, at)))
            }
            Pattern::Rising | Pattern::Falling => {
                // Diagonals begin at the left or at the bottom, and end at the top or at the right.
                for i in 1..=count(w + h) {
                    let along = PITCH * i as f64;
                    let from = (x + (along - h).max(0.0), y + along.min(h));
                    let to = (x + along.min(w), y + (along - w).max(0.0));
                    match pattern {
                        Pattern::Rising => line(from, to),
                        _ => line((x + right - from.0, from.1), (x + right - to.0, to.1)),
                    }
                }
            }
        }
        items
    }
}
