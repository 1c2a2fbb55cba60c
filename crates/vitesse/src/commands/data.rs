//! `vitesse data`.

mod with_masks;

use crate::args::{GetArgs, InspectArgs, MakeArgs};
use crate::class_names::{class_name, exact_name};
use crate::ending::ending;
use crate::layout;
use crate::table::count;
use anyhow::Context;
use config::outputs::{self, Output};
use config::sets::{self, Sets};
use config::{Part, Raw, Resolved, Task};
use data::registry::{Entry, Open};
use data::{Dataset, Image, Loader, LoaderSettings, Request, Sample, Sampler, Sheet, Split, SyntheticSpec};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use text::{many, printable};

pub fn get(args: GetArgs) -> anyhow::Result<()> {
    let bar = ProgressBar::new(0);
    let template = "{bar:30} {bytes} of {total_bytes} · {bytes_per_sec} · {eta} left";
    bar.set_style(ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar()));
    let path = data::get(args.set, &args.folder, args.from.as_deref(), &mut |done, total| {
        if let Some(total) = total {
            bar.set_length(total);
        }
        bar.set_position(done);
    })?;
    bar.finish_and_clear();
    println!("{}", path.display());
    println!("train on it with: vitesse train --data {}:{}", args.set, args.folder.display());
    Ok(())
}

pub fn make(args: &MakeArgs) -> anyhow::Result<()> {
    let MakeArgs { folder, train_samples, test_samples, image_size, classes, seed, .. } = args;
    let problem = |why: &str| anyhow::anyhow!("{}: {why}", folder.display());
    if folder.exists() {
        return Err(problem("exists already; name a new folder"));
    }
    let task = match args.task {
        Task::Classify => data::Task::Classify,
        Task::Segment => data::Task::Segment,
    };
    let Open::Synthetic(open) = Entry::synthetic(task).open else { return Err(problem("no such set")) };
    let parts = [(Split::Train, "train", *train_samples), (Split::Test, "val", *test_samples)];
    let spec = |split, len| SyntheticSpec {
        split,
        len,
        image_size: *image_size,
        channels: 3,
        classes: *classes,
        seed: *seed,
    };
    // Bad settings are refused before the folder is made.
    let sets = parts.map(|(split, part, len)| open(spec(split, len)).map(|set| (part, set)));
    let mut names = vec![];
    for set in sets {
        let (part, set) = set?;
        data::synthetic::files::write(&*set, &folder.join(part))?;
        names = set.class_names().to_vec();
    }
    if task == data::Task::Segment {
        std::fs::write(folder.join("classes.txt"), names.join("\n") + "\n")?;
    }
    let name = if task == data::Task::Segment { "masks" } else { "folder" };
    println!(
        "{}: {} of {}",
        folder.display(),
        many(train_samples + test_samples, "image"),
        many(*classes, "class")
    );
    println!("train on it with: vitesse train --data {name}:{}", folder.display());
    Ok(())
}

pub fn inspect(args: InspectArgs) -> anyhow::Result<()> {
    outputs::check("sheet", args.sheet.as_deref(), Output::File { force: args.overwrite.force })?;
    ending("--sheet ", args.sheet.as_deref(), "png")?;
    // All of it, whatever a run would evaluate.
    let raw = Raw { eval_images: Some(Part::All), ..args.settings.0.clone() };
    let source = raw.source()?;
    if source.has_masks() {
        return with_masks::inspect(&args, &raw, &source);
    }
    let (run, sets) = sets::resolve(&raw, 1)?;
    let parts = [(Split::Train, &sets.train), (Split::Test, &sets.test)];
    if args.json {
        let part = |(split, set): (Split, &Arc<dyn Dataset>)| {
            (split.to_string(), Census::of(&**set).to_json(&**set))
        };
        let parts: serde_json::Map<_, _> = parts.into_iter().map(part).collect();
        println!("{}", json!({"data": run.data.source.to_string(), "parts": parts}));
    } else {
        println!("{}", run.data.source);
        for (split, set) in parts {
            Census::of(&**set).print(split, &**set);
        }
        sets.left_out().for_each(|left| {
            println!("  ✗ {}", printable::line(&format!("{}: {}", left.name, left.problem)))
        });
    }
    if let Some(path) = &args.sheet {
        sheet(&run, &sets, path)?;
        println!("samples as a model sees them: {}", path.display());
    }
    Ok(())
}

/// What is counted of a set. Sizes are those of a sample of its images, spread over all of it.
struct Census {
    by_class: Vec<usize>,
    sizes: BTreeMap<(usize, usize), usize>,
    measured: usize,
    broken: Vec<String>,
}

const MEASURED: usize = 500;
const CLASSES_SHOWN: usize = 20;

impl Census {
    fn of(set: &dyn Dataset) -> Self {
        let mut by_class = vec![0; set.classes()];
        (0..set.len()).for_each(|index| by_class[set.label(index)] += 1);
        let (mut sizes, mut broken, mut sample) = (BTreeMap::new(), vec![], Sample::default());
        let measured = set.len().min(MEASURED);
        for place in 0..measured {
            match set.read(place * set.len() / measured, &mut sample) {
                Ok(()) => *sizes.entry(sample.size()).or_insert(0) += 1,
                Err(error) => broken.push(error.to_string()),
            }
        }
        Census { by_class, sizes, measured, broken }
    }

    fn print(&self, split: Split, set: &dyn Dataset) {
        let (least, most) =
            (self.by_class.iter().min().unwrap_or(&0), self.by_class.iter().max().unwrap_or(&0));
        println!(
            "{split}: {}, {} with {}{} each, {}",
            many(set.len(), "image"),
            many(set.classes(), "class"),
            if least == most { String::new() } else { format!("{} to ", count(*least)) },
            many(*most, "image"),
            many(set.channels(), "channel")
        );
        println!("  sizes: {}", self.sizes_text());
        let names = set.class_names();
        let shown = 0..set.classes().min(CLASSES_SHOWN);
        let width = shown.map(|class| class_name(names, class).chars().count()).max().unwrap_or(0);
        for (class, images) in self.by_class.iter().enumerate().take(CLASSES_SHOWN) {
            let bar = layout::bar(*images as f64 / (*most).max(1) as f64, width + 13, 30);
            println!("  {:<width$} {:>8}  {bar}", class_name(names, class), count(*images));
        }
        if set.classes() > CLASSES_SHOWN {
            println!("  … and {} more", many(set.classes() - CLASSES_SHOWN, "class"));
        }
        for problem in &self.broken {
            println!("  ✗ {}", printable::line(problem));
        }
    }

    fn sizes_text(&self) -> String {
        let range = |side: fn(&(usize, usize)) -> usize| {
            let sides = || self.sizes.keys().map(side);
            (sides().min().unwrap_or(0), sides().max().unwrap_or(0))
        };
        let ((w0, w1), (h0, h1)) = (range(|s| s.0), range(|s| s.1));
        match self.sizes.len() {
            1 => format!("{w0}×{h0} pixels"),
            _ => format!("{w0} to {w1} × {h0} to {h1} pixels, in {} looked at", many(self.measured, "image")),
        }
    }

    fn to_json(&self, set: &dyn Dataset) -> serde_json::Value {
        let class = |(class, images): (usize, &usize)| (exact_name(set.class_names(), class), json!(images));
        let classes: serde_json::Map<_, _> = self.by_class.iter().enumerate().map(class).collect();
        let size = |((width, height), images): (&(usize, usize), &usize)| json!({"width": width, "height": height, "images": images});
        json!({
            "images": set.len(),
            "channels": set.channels(),
            "classes": classes,
            "sizes": self.sizes.iter().map(size).collect::<Vec<_>>(),
            "measured": self.measured,
            "broken": self.broken,
        })
    }
}

const ROWS: usize = 8;
const COLUMNS: usize = 10;
const SIDE: usize = 96;

/// Training samples, augmented as in the first epoch.
fn sheet(run: &Resolved, sets: &Sets, path: &Path) -> anyhow::Result<()> {
    let (set, transform) = (Arc::clone(&sets.train), run.augmentation.training(&run.network));
    let shown = (ROWS * COLUMNS).min(set.len());
    let sampler = Sampler { len: set.len(), seed: run.seed, shuffle: true };
    let settings = LoaderSettings { sampler, batch: shown, workers: 0, depth: 1, skip_bad: true };
    let requests = std::iter::once(Request { epoch: 0, first: 0, count: shown });
    let mut loader = Loader::new(Arc::clone(&set), transform.clone(), settings, requests)?;
    let batch = loader.next_batch()?.context("the set is empty")?;
    let mut sheet = Sheet::new(COLUMNS, SIDE, 1);
    let names = set.class_names();
    for sample in 0..shown {
        let pixels = &batch.images[sample * transform.sample_len()..][..transform.sample_len()];
        let (label, partner) = (batch.labels[sample] as usize, batch.partners[sample] as usize);
        let share = batch.mix[sample];
        let caption = match share < 1.0 {
            true => {
                format!("{:.0}% {} {}", 100.0 * share, class_name(names, label), class_name(names, partner))
            }
            false => class_name(names, label),
        };
        sheet.add(&to_image(pixels, &transform), vec![caption]);
    }
    Ok(sheet.save(path)?)
}

/// Back from what a model reads to pixels.
fn to_image(sample: &[f32], transform: &data::Transform) -> Image {
    let (size, channels) = (transform.size, transform.channels);
    let mut image = Image::default();
    let pixels = image.reset(size, size, channels);
    for (channel, plane) in sample.chunks_exact(size * size).enumerate() {
        let (mean, std) = (transform.mean[channel], transform.std[channel]);
        for (place, value) in plane.iter().enumerate() {
            pixels[place * channels + channel] =
                ((value * std + mean) * 255.0).round().clamp(0.0, 255.0) as u8;
        }
    }
    image
}
