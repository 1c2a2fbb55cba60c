//! `vitesse classify`.

use crate::args::ClassifyArgs;
use crate::class_names::{class_name, exact_name};
use crate::ending::ending;
use crate::images::{self, Named};
use crate::layout;
use config::Task;
use config::outputs::{self, Output};
use config::sets::Sets;
use data::{Dataset, Sample, Sheet, Unlabelled};
use serde_json::json;
use std::sync::Arc;
use text::printable;
use train::Session;
use train::confusion::most_probable;
use train::evaluated::Found;

/// Most images that are computed at once.
const BATCH: usize = 32;
/// Side of a picture on the grid, and how many stand in a row.
const SIDE: usize = 160;
const COLUMNS: usize = 5;

pub fn run(args: ClassifyArgs) -> anyhow::Result<()> {
    outputs::check("grid", args.grid.as_deref(), Output::File { force: args.overwrite.force })?;
    ending("--grid ", args.grid.as_deref(), "png")?;
    let named = images::found(&args.images)?;
    let raw = args.settings.0.clone();
    let evaluated = Found::at(&args.weights)?.without_data(&raw)?.of_task(Task::Classify, "segment")?;
    let (mut run, weights) = (evaluated.run, evaluated.weights);
    let names = run.class_names.clone();
    run.batch = named.len().min(raw.batch_size.unwrap_or(BATCH));
    // One that can't be read doesn't keep the others from their answers.
    run.data.skip_bad_images = true;
    let classes = run.network.classes();
    let (paths, channels) = (named.iter().map(|image| image.path.clone()).collect(), run.network.channels());
    let files: Arc<dyn Dataset> =
        Arc::new(Unlabelled::new(paths, channels, data::Task::Classify, names.clone()));
    let sets = Sets { train: Arc::clone(&files), test: Arc::clone(&files) };
    let mut session = Session::for_evaluation(run, sets, &weights)?;
    let mut answers = Vec::new();
    session.evaluate(|_, logits| {
        answers.extend(logits.chunks_exact(classes).map(|logits| most_probable(logits, args.top)));
    })?;
    let unread = images::unread(session.take_skipped());
    let good = named.len() - unread.len();
    if let Some(path) = args.grid.as_ref().filter(|_| good > 0) {
        let mut sheet = Sheet::new(COLUMNS.min(good), SIDE, args.top.min(3));
        let mut sample = Sample::default();
        for (index, answer) in answers.iter().enumerate().filter(|(index, _)| !unread.contains_key(index)) {
            files.read(index, &mut sample)?;
            let caption =
                |&(class, p): &(usize, f32)| format!("{:3.0}% {}", 100.0 * p, class_name(&names, class));
            sheet.add(&sample.image, answer.iter().map(caption).collect());
        }
        sheet.save(path)?;
    }
    for (index, (Named { path, .. }, answer)) in named.iter().zip(&answers).enumerate() {
        if let Some(why) = unread.get(&index) {
            if args.json {
                println!("{}", images::failed(path, why));
            }
            continue;
        }
        if args.json {
            let ranked = answer
                .iter()
                .map(|&(class, p)| json!({"class": exact_name(&names, class), "probability": p}));
            println!("{}", json!({"image": path, "classes": ranked.collect::<Vec<_>>()}));
            continue;
        }
        println!("{}", printable::line(&path.display().to_string()));
        for &(class, probability) in answer {
            let bar = layout::bar(f64::from(probability), 31, 30);
            println!("  {:>5.1}%  {:<20} {bar}", 100.0 * probability, class_name(&names, class));
        }
    }
    images::end(&unread, named.len())
}
