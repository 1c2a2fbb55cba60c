//! `vitesse eval` of models that tell pixels apart, and their scores for people.

use super::subject::Subject;
use crate::args::EvalArgs;
use crate::class_names::{class_name, exact_name};
use crate::layout;
use anyhow::Context;
use config::sets::Sets;
use data::Dataset;
use data::segment::overlay::save_mask;
use serde_json::json;
use std::fs;
use std::path::{Path, PathBuf};
use text::{many, printable};
use train::evaluated::Evaluated;
use train::segmentation::PixelScore;
use train::segmentation::scores::{ClassScore, Scores};
use train::{Session, TrainError};

pub fn run(args: &EvalArgs, evaluated: Evaluated, sets: Sets) -> anyhow::Result<()> {
    if args.logits.is_some() {
        anyhow::bail!(
            "--logits: is for models that classify images; --masks writes what is predicted of pixels"
        );
    }
    let (test, names) = (sets.test.clone(), evaluated.run.class_names.clone());
    let subject = Subject::of(&evaluated, &sets);
    if let Some(folder) = &args.masks {
        let masks: Vec<PathBuf> =
            (0..test.len()).map(|index| folder.join(mask_name(&*test, index))).collect();
        files::output::all_free(masks.iter().map(PathBuf::as_path), args.overwrite.force)
            .map_err(|why| anyhow::anyhow!("--masks {}: {why}", folder.display()))?;
        fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    }
    let mut session: Session = Session::for_evaluation(evaluated.run, sets, &evaluated.weights)?;
    if !args.json {
        subject.print();
    }
    let score = session.evaluate_pixels(|answer| {
        let Some(folder) = &args.masks else { return Ok(()) };
        let (image, path) = (&answer.sample.image, folder.join(mask_name(&*test, answer.index)));
        save_mask(answer.labels, (image.width, image.height), &path).map_err(TrainError::from)
    })?;
    for skipped in session.take_skipped() {
        eprintln!("left out: {}", printable::line(&skipped.problem.to_string()));
    }
    if let Some(path) = &args.confusion {
        let classes = score.confusion.by_class().len();
        let row = |label: usize| (0..classes).map(|other| score.confusion.count(label, other)).collect();
        let rows: Vec<_> = (0..classes).map(row).collect();
        super::matrix::write(path, &rows, &names, &in_a_line(&score.confusion.scores()))?;
    }
    if args.json {
        println!("{}", to_json(&subject, &score, &names));
    } else {
        println!(
            "{} · loss {:.4} · {}",
            many(score.images as usize, "image"),
            score.loss,
            in_a_line(&score.confusion.scores())
        );
        println!();
        print_classes(&score.confusion.by_class(), &names);
    }
    Ok(())
}

/// That of the image, or the number of one that has no file.
fn mask_name(set: &dyn Dataset, index: usize) -> PathBuf {
    let name = set.name(index);
    let stem = Path::new(&name).file_stem().filter(|_| Path::new(&name).exists());
    let stem = stem.map_or_else(|| format!("{index:06}"), |stem| stem.to_string_lossy().into_owned());
    PathBuf::from(stem + ".png")
}

/// How well pixels are told apart.
pub fn in_a_line(scores: &Scores) -> String {
    format!(
        "mean IoU {:.2}% · {:.2}% of the pixels · mean accuracy {:.2}%",
        100.0 * scores.mean_iou,
        100.0 * scores.pixel_accuracy,
        100.0 * scores.mean_accuracy
    )
}

/// Classes are listed one by one up to this many; of more, the most frequent and the worst of those that occur.
const LISTED: usize = 25;
const EACH: usize = 10;

pub fn print_classes(scores: &[ClassScore], names: &[String]) {
    let all: u64 = scores.iter().map(|score| score.pixels).sum();
    let mut classes: Vec<(usize, &ClassScore)> =
        scores.iter().enumerate().filter(|(_, score)| score.iou.is_some()).collect();
    if classes.len() <= LISTED {
        return print_rows(&classes, all, names);
    }
    classes.sort_by_key(|(_, score)| std::cmp::Reverse(score.pixels));
    println!("the {EACH} classes with most pixels");
    print_rows(&classes[..EACH], all, names);
    classes.retain(|(_, score)| score.pixels > 0);
    classes.sort_by(|a, b| a.1.iou.unwrap_or(0.0).total_cmp(&b.1.iou.unwrap_or(0.0)));
    println!("the {EACH} told apart worst");
    print_rows(&classes[..EACH.min(classes.len())], all, names);
}

fn print_rows(classes: &[(usize, &ClassScore)], all: u64, names: &[String]) {
    let width = classes.iter().map(|(class, _)| class_name(names, *class).chars().count()).max();
    let width = width.unwrap_or(0).max(5);
    println!("  {:<width$}  {:>7}  {:>8}  {:>8}", "class", "IoU", "accuracy", "pixels");
    for (class, score) in classes {
        let percent = |share: Option<f64>| share.map_or("–".to_string(), |x| format!("{:.1}%", 100.0 * x));
        let share = (all > 0).then(|| score.pixels as f64 / all as f64);
        println!(
            "  {:<width$}  {:>7}  {:>8}  {:>8}  {}",
            class_name(names, *class),
            percent(score.iou),
            percent(score.accuracy),
            percent(share),
            layout::bar(score.iou.unwrap_or(0.0), width + 33, 20)
        );
    }
}

fn to_json(subject: &Subject, score: &PixelScore, names: &[String]) -> serde_json::Value {
    let scores = score.confusion.scores();
    let class = |(class, score): (usize, ClassScore)| json!({"class": exact_name(names, class), "iou": score.iou, "accuracy": score.accuracy, "pixels": score.pixels});
    let mut report = subject.to_json();
    report["eval_loss"] = json!(score.loss);
    report["eval_miou"] = json!(scores.mean_iou);
    report["eval_pixel_accuracy"] = json!(scores.pixel_accuracy);
    report["eval_mean_accuracy"] = json!(scores.mean_accuracy);
    report["images"] = json!(score.images);
    report["pixels"] = json!(scores.pixels);
    report["classes"] = score.confusion.by_class().into_iter().enumerate().map(class).collect();
    report
}
