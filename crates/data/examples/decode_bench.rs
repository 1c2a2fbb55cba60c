//! How many images one core decodes and augments in a second.
//!
//!     cargo run --release -p data --example decode_bench -- FOLDER [ROUNDS]
//!
//! Reads every image below FOLDER, and does once what `bench/loader_peer.py` does with torchvision: decode, random
//! resized crop to 224 × 224, flip, and numbers with mean 0.5 and deviation 0.5. Rates are of CPU time.

use data::resize::{CropBox, Interpolation, Resizer};
use data::{DataError, Image, decode};
use std::path::{Path, PathBuf};
use std::time::Instant;

const SIZE: usize = 224;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let folder = arguments.next().ok_or("usage: decode_bench FOLDER [ROUNDS]")?;
    let rounds: usize = arguments.next().map_or(Ok(3), |rounds| rounds.parse())?;
    let mut paths = Vec::new();
    images_below(Path::new(&folder), &mut paths)?;
    paths.sort();
    println!("{} images", paths.len());

    let mut loader = Loader::new();
    for _ in 0..rounds {
        let decoded = rate(&paths, |path| loader.decode(path))?;
        let loaded = rate(&paths, |path| loader.load(path))?;
        println!("decode {decoded:7.1} images/s    decode + crop + flip + normalise {loaded:7.1} images/s");
    }
    Ok(())
}

fn images_below(folder: &Path, paths: &mut Vec<PathBuf>) -> std::io::Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            images_below(&path, paths)?;
        } else if path
            .extension()
            .is_some_and(|e| e.eq_ignore_ascii_case("jpg") || e.eq_ignore_ascii_case("jpeg"))
        {
            paths.push(path);
        }
    }
    Ok(())
}

/// Images per second of CPU time.
fn rate(paths: &[PathBuf], mut work: impl FnMut(&Path) -> Result<(), DataError>) -> Result<f64, DataError> {
    let (clock, busy) = (Instant::now(), busy_seconds());
    paths.iter().try_for_each(|path| work(path))?;
    let seconds = busy_seconds().zip(busy).map(|(after, before)| after - before);
    Ok(paths.len() as f64 / seconds.unwrap_or_else(|| clock.elapsed().as_secs_f64()))
}

/// How long this thread has run, where Linux tells it: other programs on the same core then don't count.
fn busy_seconds() -> Option<f64> {
    let times = std::fs::read_to_string("/proc/thread-self/schedstat").ok()?;
    times.split_whitespace().next()?.parse::<f64>().ok().map(|nanoseconds| nanoseconds * 1e-9)
}

struct Loader {
    image: Image,
    cropped: Image,
    resizer: Resizer,
    numbers: Vec<f32>,
    state: u64,
}

impl Loader {
    fn new() -> Self {
        let numbers = vec![0.0; SIZE * SIZE * 3];
        Loader {
            image: Image::default(),
            cropped: Image::default(),
            resizer: Resizer::new(),
            numbers,
            state: 1,
        }
    }

    fn decode(&mut self, path: &Path) -> Result<(), DataError> {
        let bytes = std::fs::read(path).map_err(|error| DataError::file(path, error))?;
        decode::decode(&bytes, path, 3, &mut self.image)
    }

    fn load(&mut self, path: &Path) -> Result<(), DataError> {
        self.decode(path)?;
        let crop = self.random_crop();
        self.resizer.resize(&self.image, crop, (SIZE, SIZE), Interpolation::Bilinear, &mut self.cropped);
        let flip = self.uniform() < 0.5;
        for (row, line) in self.cropped.pixels.chunks_exact(SIZE * 3).enumerate() {
            for (x, pixel) in line.chunks_exact(3).enumerate() {
                let at = row * SIZE + if flip { SIZE - 1 - x } else { x };
                for (plane, &byte) in self.numbers.chunks_exact_mut(SIZE * SIZE).zip(pixel) {
                    plane[at] = f32::from(byte) * (2.0 / 255.0) - 1.0;
                }
            }
        }
        std::hint::black_box(&self.numbers);
        Ok(())
    }

    /// torchvision's RandomResizedCrop: 0.08 to 1 of the area, sides 3:4 to 4:3.
    fn random_crop(&mut self) -> CropBox {
        let (width, height) = (self.image.width as f64, self.image.height as f64);
        for _ in 0..10 {
            let area = width * height * (0.08 + 0.92 * self.uniform());
            let ratio = ((4.0_f64 / 3.0).ln() * (2.0 * self.uniform() - 1.0)).exp();
            let (w, h) = ((area * ratio).sqrt().round(), (area / ratio).sqrt().round());
            if w <= width && h <= height {
                let left = (self.uniform() * (width - w + 1.0)).floor();
                let top = (self.uniform() * (height - h + 1.0)).floor();
                return CropBox { left, top, width: w, height: h };
            }
        }
        CropBox::whole(&self.image)
    }

    fn uniform(&mut self) -> f64 {
        self.state =
            self.state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.state >> 11) as f64 / (1_u64 << 53) as f64
    }
}
