//! What a model says of windows, put together.
//!
//! K classes; logits are (H, W, K).

use crate::DataError;

/// Logits at some resolution, of whatever area.
#[derive(Clone, Copy, Debug)]
pub struct Grid<'a> {
    pub width: usize,
    pub height: usize,
    pub classes: usize,
    pub logits: &'a [f32],
}

impl Grid<'_> {
    pub(super) fn check(&self) -> Result<(), DataError> {
        let (expected, found) = (self.width * self.height * self.classes, self.logits.len());
        if found == expected && found > 0 {
            return Ok(());
        }
        Err(DataError::BufferLength { buffer: "logits", expected, found })
    }

    /// One line of logits between two of the grid's.
    fn line(&self, row: Tap, out: &mut [f32]) {
        let line = |y: usize| &self.logits[y * self.width * self.classes..][..self.width * self.classes];
        let [(low, less), (high, more)] = row.ends();
        let ends = line(low).iter().zip(line(high));
        out.iter_mut().zip(ends).for_each(|(out, (low, high))| *out = less * low + more * high);
    }

    /// The most probable class at every place between the grid's.
    pub(super) fn labels(&self, columns: &Taps, rows: &Taps, threads: usize) -> Vec<u8> {
        let width = columns.0.len();
        let mut labels = vec![0; width * rows.0.len()];
        in_rows(&mut labels, width, threads, |first, part| {
            let (mut line, mut scores) = (vec![0.0; self.width * self.classes], vec![0.0; self.classes]);
            for (row, labels) in rows.0[first..].iter().zip(part.chunks_exact_mut(width)) {
                self.line(*row, &mut line);
                for (column, label) in columns.iter().zip(labels) {
                    between(&line, column, &mut scores, |score, value| *score = value);
                    *label = largest(&scores);
                }
            }
        });
        labels
    }
}

/// Hands what lies between two cells of a line to `put`, class by class.
fn between(line: &[f32], column: Tap, scores: &mut [f32], put: impl Fn(&mut f32, f32)) {
    let classes = scores.len();
    let [(low, less), (high, more)] = column.ends();
    let ends = line[low * classes..][..classes].iter().zip(&line[high * classes..][..classes]);
    scores.iter_mut().zip(ends).for_each(|(score, (low, high))| put(score, less * low + more * high));
}

/// Parts of some rows of an image at once, each with the number of its first row.
fn in_rows<T: Send>(image: &mut [T], width: usize, threads: usize, work: impl Fn(usize, &mut [T]) + Sync) {
    let rows = (image.len() / width.max(1)).div_ceil(threads.max(1)).max(1);
    std::thread::scope(|scope| {
        for (i, part) in image.chunks_mut(rows * width.max(1)).enumerate() {
            let work = &work;
            scope.spawn(move || work(i * rows, part));
        }
    });
}

/// Logits of an image, as sums over the windows that see a pixel.
#[derive(Clone, Debug)]
pub struct Canvas {
    width: usize,
    height: usize,
    classes: usize,
    sums: Vec<f32>,
    /// Windows that saw a pixel: (H, W).
    times: Vec<u32>,
}

impl Canvas {
    /// For an image of (width, height).
    pub fn new((width, height): (usize, usize), classes: usize) -> Self {
        let area = width * height;
        Canvas { width, height, classes, sums: vec![0.0; area * classes], times: vec![0; area] }
    }

    /// Makes room for another image, reusing memory.
    pub fn clear(&mut self, (width, height): (usize, usize)) {
        (self.width, self.height) = (width, height);
        self.sums.clear();
        self.sums.resize(width * height * self.classes, 0.0);
        self.times.clear();
        self.times.resize(width * height, 0);
    }

    /// Adds what was said of a window of `size` (width, height) pixels at `place`. Logits of a coarser grid are interpolated, as
    /// PyTorch does it without aligned corners; what lies beyond the image is left out.
    pub fn add(
        &mut self,
        place: (usize, usize),
        size: (usize, usize),
        grid: &Grid,
        threads: usize,
    ) -> Result<(), DataError> {
        grid.check()?;
        if grid.classes != self.classes {
            let (expected, found) = (self.classes, grid.classes);
            return Err(DataError::BufferLength { buffer: "logits of a pixel", expected, found });
        }
        let columns = Taps::new(size.0, grid.width as f64 / size.0 as f64, grid.width);
        let rows = Taps::new(size.1, grid.height as f64 / size.1 as f64, grid.height);
        let ((left, top), classes, width) = (place, self.classes, self.width);
        let end = (top + size.1).min(self.height);
        for times in self.times.chunks_exact_mut(width).take(end).skip(top) {
            times.iter_mut().skip(left).take(size.0).for_each(|times| *times += 1);
        }
        let seen = &mut self.sums[top * width * classes..end * width * classes];
        in_rows(seen, width * classes, threads, |first, part| {
            let mut line = vec![0.0; grid.width * classes];
            for (row, sums) in rows.0[first..].iter().zip(part.chunks_exact_mut(width * classes)) {
                grid.line(*row, &mut line);
                for (column, sums) in columns.iter().zip(sums.chunks_exact_mut(classes).skip(left)) {
                    between(&line, column, sums, |sum, value| *sum += value);
                }
            }
        });
        Ok(())
    }

    /// The most probable class of every pixel of the original image of (width, height): averages are interpolated to it. Of
    /// equal logits the first wins.
    pub fn labels(&self, original: (usize, usize), threads: usize) -> Result<Vec<u8>, DataError> {
        if let Some(pixel) = self.times.iter().position(|&times| times == 0) {
            let (x, y) = (pixel % self.width, pixel / self.width);
            let problem = format!("no window has seen column {x}, row {y}");
            return Err(DataError::Call { what: "windows", problem });
        }
        let columns = Taps::new(original.0, self.width as f64 / original.0 as f64, self.width);
        let rows = Taps::new(original.1, self.height as f64 / original.1 as f64, self.height);
        // From sums to means, if some pixels were seen more often than others.
        let mut means = std::borrow::Cow::Borrowed(&self.sums);
        if self.times.iter().any(|times| *times != self.times[0]) {
            for (sums, &times) in means.to_mut().chunks_exact_mut(self.classes).zip(&self.times) {
                sums.iter_mut().for_each(|sum| *sum /= times as f32);
            }
        }
        let grid = Grid { width: self.width, height: self.height, classes: self.classes, logits: &means };
        Ok(grid.labels(&columns, &rows, threads))
    }
}

/// The first of the largest.
pub(super) fn largest(scores: &[f32]) -> u8 {
    let most = scores.iter().fold(f32::NEG_INFINITY, |most, &score| if score > most { score } else { most });
    scores.iter().position(|&score| score == most).unwrap_or(0) as u8
}

/// Along an axis: for each output pixel the two neighbours it lies between.
pub(super) struct Taps(Vec<Tap>);

#[derive(Clone, Copy)]
pub(super) struct Tap {
    low: usize,
    high: usize,
    /// Weight of the higher one.
    share: f32,
}

impl Taps {
    /// `scale` input pixels for each of `to` output pixels; the input ends after `within`.
    pub(super) fn new(to: usize, scale: f64, within: usize) -> Self {
        let last = within.max(1) - 1;
        let tap = |i: usize| {
            let at = ((i as f64 + 0.5) * scale - 0.5).clamp(0.0, last as f64);
            let low = at as usize;
            Tap { low, high: (low + 1).min(last), share: (at - low as f64) as f32 }
        };
        Taps((0..to).map(tap).collect())
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = Tap> + '_ {
        self.0.iter().copied()
    }
}

impl Tap {
    /// Places and weights. Both may be the same place, and a weight may be 0.
    #[inline]
    pub(super) fn ends(self) -> [(usize, f32); 2] {
        [(self.low, 1.0 - self.share), (self.high, self.share)]
    }
}
