//! `vitesse data inspect` of images with masks.

use crate::args::InspectArgs;
use crate::class_names::{class_name, exact_name};
use crate::layout;
use crate::table::count;
use anyhow::Context;
use config::Raw;
use config::Source;
use config::sets::{Opened, Sets};
use data::segment::overlay::{self, percent};
use data::segment::{IGNORED, palette};
use data::{
    Caption, Dataset, Image, Loader, LoaderSettings, Preparation, Request, Sample, Sampler, Sheet, Split,
};
use serde_json::json;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use text::{many, printable};

pub fn inspect(args: &InspectArgs, raw: &Raw, source: &Source) -> anyhow::Result<()> {
    let sets = Opened::of(raw)?.to_inspect(raw, source)?;
    let size = raw.image_size.unwrap_or(source.image_size());
    let transform = raw.mask_transform(size, sets.train.channels())?;
    let parts = [(Split::Train, &sets.train), (Split::Test, &sets.test)];
    let censuses = parts.map(|(split, set)| (split, set, Census::of(&**set)));
    if args.json {
        let part = |(split, set, census): &(Split, &Arc<dyn Dataset>, Census)| {
            (split.to_string(), census.to_json(&***set))
        };
        let parts: serde_json::Map<_, _> = censuses.iter().map(part).collect();
        let left_out: Vec<String> =
            sets.left_out().map(|left| format!("{}: {}", left.name, left.problem)).collect();
        println!("{}", json!({"data": source.to_string(), "parts": parts, "left_out": left_out}));
    } else {
        println!("{source}");
        censuses.iter().for_each(|(split, set, census)| census.print(*split, &***set));
        sets.left_out().for_each(|left| {
            println!("  ✗ {}", printable::line(&format!("{}: {}", left.name, left.problem)))
        });
    }
    if let Some(path) = &args.sheet {
        sheet(raw.seed.unwrap_or(0), &sets, transform, path)?;
        println!("samples as a model sees them: {}", path.display());
    }
    let broken = censuses.iter().flat_map(|(_, _, census)| &census.broken).next();
    match broken {
        Some(problem) if !raw.skip_bad_images => {
            anyhow::bail!("{problem} (--skip-bad-images leaves such pairs out)")
        }
        _ => Ok(()),
    }
}

/// What is counted in some pairs, spread over all of a set.
struct Census {
    measured: usize,
    sizes: BTreeMap<(usize, usize), usize>,
    /// Of each label: pixels, and pairs that have some.
    pixels: Vec<u64>,
    pairs: Vec<usize>,
    broken: Vec<String>,
}

const MEASURED: usize = 500;
const CLASSES_SHOWN: usize = 20;

impl Census {
    fn of(set: &dyn Dataset) -> Self {
        let measured = set.len().min(MEASURED);
        let mut census = Census {
            measured,
            sizes: BTreeMap::new(),
            pixels: vec![0; 256],
            pairs: vec![0; 256],
            broken: vec![],
        };
        let mut sample = Sample::default();
        for place in 0..measured {
            match set.read(place * set.len() / measured, &mut sample) {
                Ok(()) => census.add(&sample),
                Err(error) => census.broken.push(error.to_string()),
            }
        }
        census
    }

    fn add(&mut self, sample: &Sample) {
        *self.sizes.entry(sample.size()).or_insert(0) += 1;
        let mut counts = [0u64; 256];
        sample.mask.iter().for_each(|&label| counts[usize::from(label)] += 1);
        for (label, &count) in counts.iter().enumerate() {
            self.pixels[label] += count;
            self.pairs[label] += usize::from(count > 0);
        }
    }

    fn labelled(&self) -> u64 {
        self.pixels[..usize::from(IGNORED)].iter().sum()
    }

    fn print(&self, split: Split, set: &dyn Dataset) {
        let classes = set.classes();
        let (images, channels) = (many(set.len(), "image"), many(set.channels(), "channel"));
        println!("{split}: {images} with masks, {}, {channels}", many(classes, "class"));
        let range = |side: fn(&(usize, usize)) -> usize| {
            let sides = || self.sizes.keys().map(side);
            (sides().min().unwrap_or(0), sides().max().unwrap_or(0))
        };
        let ((w0, w1), (h0, h1)) = (range(|s| s.0), range(|s| s.1));
        println!("  in {} of them: {w0} to {w1} × {h0} to {h1} pixels", count(self.measured));
        let labelled = self.labelled();
        let all = (labelled + self.pixels[usize::from(IGNORED)]).max(1);
        println!(
            "  {} of the pixels have a class, the others are ignored",
            percent(labelled as f64 / all as f64)
        );
        let mut order: Vec<usize> = (0..classes).filter(|&class| self.pixels[class] > 0).collect();
        order.sort_by_key(|&class| std::cmp::Reverse(self.pixels[class]));
        let names = set.class_names();
        let shown = &order[..order.len().min(CLASSES_SHOWN)];
        let width = shown.iter().map(|&class| class_name(names, class).chars().count()).max().unwrap_or(0);
        let most = shown.first().map_or(1, |&class| self.pixels[class]);
        for &class in shown {
            let (name, pixels) = (class_name(names, class), self.pixels[class]);
            let bar = layout::bar(pixels as f64 / most as f64, width + 26, 30);
            let share = percent(pixels as f64 / labelled as f64);
            let images = self.pairs[class];
            println!(
                "  {name:<width$} {share:>6} in {:>5} {:<6}  {bar}",
                count(images),
                text::count::of(images, "image")
            );
        }
        let (more, none) = (order.len() - shown.len(), classes - order.len());
        if more > 0 || none > 0 {
            println!("  … and {} more; {none} not seen", many(more, "class"));
        }
        self.broken.iter().for_each(|problem| println!("  ✗ {}", printable::line(problem)));
    }

    fn to_json(&self, set: &dyn Dataset) -> serde_json::Value {
        let class = |class: usize| {
            let (pixels, images) = (self.pixels[class], self.pairs[class]);
            json!({"name": exact_name(set.class_names(), class), "pixels": pixels, "images": images})
        };
        let size = |((width, height), images): (&(usize, usize), &usize)| json!({"width": width, "height": height, "images": images});
        json!({
            "images": set.len(),
            "channels": set.channels(),
            "classes": (0..set.classes()).map(class).collect::<Vec<_>>(),
            "ignored_pixels": self.pixels[usize::from(IGNORED)],
            "sizes": self.sizes.iter().map(size).collect::<Vec<_>>(),
            "measured": self.measured,
            "broken": self.broken,
        })
    }
}

/// Each sample is two pictures: the image, and the mask over it.
const SAMPLES: usize = 20;
const COLUMNS: usize = 8;
const SIDE: usize = 176;
const LEGEND: usize = 6;

/// Training samples, augmented as in the first epoch.
fn sheet(seed: u64, sets: &Sets, transform: data::segment::MaskTransform, path: &Path) -> anyhow::Result<()> {
    let (set, shown) = (Arc::clone(&sets.train), SAMPLES.min(sets.train.len()));
    let sampler = Sampler { len: set.len(), seed, shuffle: true };
    let settings = LoaderSettings { sampler, batch: shown, workers: 0, depth: 1, skip_bad: true };
    let requests = std::iter::once(Request { epoch: 0, first: 0, count: shown });
    let (width, height, channels) = (transform.width, transform.height, transform.channels);
    let area = transform.area();
    let preparation = Preparation::Masks { transform, finished: false };
    let mut loader = Loader::new(Arc::clone(&set), preparation, settings, requests)?;
    let batch = loader.next_batch()?.context("the set is empty")?;
    let mut sheet = Sheet::new(COLUMNS, SIDE, LEGEND);
    for sample in 0..shown {
        let pixels = batch.pixels[sample * area * channels..][..area * channels].to_vec();
        let mask = &batch.masks[sample * area..][..area];
        let image = Image { width, height, channels, pixels };
        let name = set.name(batch.indices[sample]);
        let stem = Path::new(&name).file_stem().map_or(name.clone(), |stem| stem.to_string_lossy().into());
        sheet.add(&image, vec![stem]);
        let legend = overlay::shares(mask).into_iter().take(LEGEND).map(|share| Caption {
            colour: Some(palette::colour(share.label)),
            text: format!("{} {}", percent(share.share), class_name(set.class_names(), share.label.into())),
        });
        sheet.add(&overlay::overlay(&image, mask)?, legend.collect());
    }
    Ok(sheet.save(path)?)
}
