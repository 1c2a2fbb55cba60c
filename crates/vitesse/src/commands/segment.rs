//! `vitesse segment`.

use crate::args::SegmentArgs;
use crate::class_names::{class_name, exact_name};
use anyhow::Context;
use config::Task;
use config::outputs::{self, Output};
use config::sets::Sets;
use data::segment::overlay::{percent, save_mask, save_picture, shares};
use data::{Dataset, Unlabelled};
use serde_json::json;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use text::printable;
use train::evaluated::Found;
use train::{Session, TrainError};

/// What is written of an image.
const KINDS: [&str; 2] = ["mask", "overlay"];

pub fn run(args: SegmentArgs) -> anyhow::Result<()> {
    outputs::check("out", Some(&args.out), Output::Folder)?;
    let mut names = BTreeSet::new();
    for image in &args.images {
        for kind in KINDS {
            let path = beside(&args.out, image, kind);
            if path.exists() || !names.insert(path.clone()) {
                let what = if path.exists() {
                    "exists already, and is not replaced"
                } else {
                    "would hold two images"
                };
                anyhow::bail!("--out {}: {} {what}", args.out.display(), path.display());
            }
        }
    }
    let raw = args.settings.0.clone();
    let evaluated = Found::at(&args.weights)?.without_data(&raw)?.of_task(Task::Segment, "classify")?;
    let (mut run, weights) = (evaluated.run, evaluated.weights);
    // Windows of one image at a time, at most.
    run.batch = run.batch.min(args.images.len().max(4));
    let names = run.class_names.clone();
    let channels = run.network.channels();
    let images: Arc<dyn Dataset> =
        Arc::new(Unlabelled::new(args.images.clone(), channels, data::Task::Segment, names.clone()));
    let sets = Sets { train: Arc::clone(&images), test: images };
    fs::create_dir_all(&args.out).with_context(|| args.out.display().to_string())?;
    let mut session: Session = Session::for_evaluation(run, sets, &weights)?;
    session.evaluate_pixels(|answer| {
        let (image, path) = (&answer.sample.image, &args.images[answer.index]);
        let [mask, overlay] = KINDS.map(|kind| beside(&args.out, path, kind));
        let saved = save_mask(answer.labels, (image.width, image.height), &mask)
            .and_then(|()| save_picture(image, answer.labels, &names, &overlay));
        saved.map_err(TrainError::from)?;
        if args.json {
            let share = |share: data::segment::overlay::Share| {
                json!({"class": exact_name(&names, share.label.into()), "share": share.share})
            };
            let classes: Vec<_> = shares(answer.labels).into_iter().map(share).collect();
            println!("{}", json!({"image": path, "mask": mask, "overlay": overlay, "classes": classes}));
            return Ok(());
        }
        let files = [path, &mask, &overlay].map(|path| printable::line(&path.display().to_string()));
        println!("{} → {}, {}", files[0], files[1], files[2]);
        for share in shares(answer.labels).into_iter().take(args.top) {
            let bar = "█".repeat((share.share * 30.0).round() as usize);
            println!("  {:>6}  {:<20} {bar}", percent(share.share), class_name(&names, share.label.into()));
        }
        Ok(())
    })?;
    Ok(())
}

/// NAME.KIND.png in a folder.
fn beside(folder: &Path, image: &Path, kind: &str) -> PathBuf {
    let stem = image.file_stem().unwrap_or_default().to_string_lossy();
    folder.join(format!("{stem}.{kind}.png"))
}
