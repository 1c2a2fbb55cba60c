//! `vitesse classify`.

use crate::args::ClassifyArgs;
use crate::judge::{Judge, class_name, exact_name};
use data::files::Files;
use data::{Dataset, Image, Sheet};
use serde_json::json;
use std::sync::Arc;
use train::config::Task;
use train::confusion::most_probable;
use train::sets::{ImageSets, Sets};
use train::stored::Stored;
use train::{Session, printable};

/// Most images that are computed at once.
const BATCH: usize = 32;
/// Side of a picture on the grid, and how many stand in a row.
const SIDE: usize = 160;
const COLUMNS: usize = 5;

pub fn run(args: ClassifyArgs) -> anyhow::Result<()> {
    let raw = args.device.raw(args.model.raw());
    let judge = Judge::new(Stored::find(&args.weights)?, &raw)?.of_task(Task::Classify, "segment")?;
    let mut judge = judge.on_device(&raw)?;
    let names = judge.run.class_names.clone();
    judge.run.batch = args.images.len().min(BATCH);
    let classes = judge.run.network.classes();
    let files: Arc<dyn Dataset> = Arc::new(Files::new(args.images.clone(), judge.run.network.channels()));
    let sets = Sets::Images(ImageSets { train: Arc::clone(&files), test: Arc::clone(&files) });
    let mut session = Session::for_evaluation(judge.run, sets, &judge.weights)?;
    let mut answers = Vec::new();
    session.evaluate(|_, logits| {
        answers.extend(logits.chunks_exact(classes).map(|logits| most_probable(logits, args.top)));
    })?;
    if let Some(path) = &args.grid {
        let mut sheet = Sheet::new(COLUMNS.min(args.images.len()), SIDE, args.top.min(3));
        let mut image = Image::default();
        for (index, answer) in answers.iter().enumerate() {
            files.read(index, &mut image)?;
            let caption =
                |&(class, p): &(usize, f32)| format!("{:3.0}% {}", 100.0 * p, class_name(&names, class));
            sheet.add(&image, answer.iter().map(caption).collect());
        }
        sheet.save(path)?;
    }
    for (path, answer) in args.images.iter().zip(&answers) {
        if args.json {
            let ranked = answer
                .iter()
                .map(|&(class, p)| json!({"class": exact_name(&names, class), "probability": p}));
            println!("{}", json!({"image": path, "classes": ranked.collect::<Vec<_>>()}));
            continue;
        }
        println!("{}", printable::line(&path.display().to_string()));
        for &(class, probability) in answer {
            let bar = "█".repeat((probability * 30.0).round() as usize);
            println!("  {:>5.1}%  {:<20} {bar}", 100.0 * probability, class_name(&names, class));
        }
    }
    Ok(())
}
