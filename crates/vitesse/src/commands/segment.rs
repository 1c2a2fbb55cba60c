//! `vitesse segment`.

use crate::args::SegmentArgs;
use crate::class_names::{class_name, exact_name};
use crate::images::{self, Named};
use crate::layout;
use anyhow::Context;
use config::Task;
use config::outputs::{self, Output};
use config::sets::Sets;
use data::segment::overlay::{percent, save_mask, save_picture, shares};
use data::{Dataset, Unlabelled};
use files::folder_of;
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
    let named = images::found(&args.images)?;
    let mut taken = BTreeSet::new();
    for path in named.iter().flat_map(|image| KINDS.map(|kind| beside(&args.out, &image.within, kind))) {
        let refuse = |what: &str| anyhow::anyhow!("--out {}: {} {what}", args.out.display(), path.display());
        files::output::free(&path, args.overwrite.force).map_err(refuse)?;
        if !taken.insert(path.clone()) {
            return Err(refuse("would hold two images"));
        }
    }
    let raw = args.settings.0.clone();
    let evaluated = Found::at(&args.weights)?.without_data(&raw)?.of_task(Task::Segment, "classify")?;
    let (mut run, weights) = (evaluated.run, evaluated.weights);
    // Windows of one image at a time, at most.
    run.batch = run.batch.min(named.len().max(4));
    // One that can't be read doesn't keep the others from their answers.
    run.data.skip_bad_images = true;
    let names = run.class_names.clone();
    let channels = run.network.channels();
    let paths = named.iter().map(|image| image.path.clone()).collect();
    let images: Arc<dyn Dataset> =
        Arc::new(Unlabelled::new(paths, channels, data::Task::Segment, names.clone()));
    let sets = Sets { train: Arc::clone(&images), test: images };
    fs::create_dir_all(&args.out).with_context(|| args.out.display().to_string())?;
    let mut session: Session = Session::for_evaluation(run, sets, &weights)?;
    session.evaluate_pixels(|answer| {
        let (image, Named { path, within }) = (&answer.sample.image, &named[answer.index]);
        let [mask, overlay] = KINDS.map(|kind| beside(&args.out, within, kind));
        fs::create_dir_all(folder_of(&mask)).map_err(|source| TrainError::Io { path: folder_of(&mask).into(), source })?;
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
            let bar = layout::bar(share.share, 31, 30);
            println!("  {:>6}  {:<20} {bar}", percent(share.share), class_name(&names, share.label.into()));
        }
        Ok(())
    })?;
    let unread = images::unread(session.take_skipped());
    if args.json {
        unread.iter().for_each(|(index, why)| println!("{}", images::failed(&named[*index].path, why)));
    }
    images::end(&unread, named.len())
}

/// NAME.KIND.png in a folder, or in the one below it that the image lies in.
fn beside(folder: &Path, image: &Path, kind: &str) -> PathBuf {
    let stem = image.file_stem().unwrap_or_default().to_string_lossy();
    let below = image.parent().unwrap_or(Path::new(""));
    folder.join(below).join(format!("{stem}.{kind}.png"))
}
