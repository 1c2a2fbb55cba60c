//! `vitesse eval`.

pub mod pixels;
mod subject;

use crate::args::EvalArgs;
use crate::class_names::{class_name, exact_name};
use crate::ending::ending;
use anyhow::Context;
use config::Task;
use config::outputs::{self, Output};
use formats::weights;
use models::names::{Tensor, Weights};
use serde_json::json;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;
use subject::Subject;
use text::{many, printable};
use train::Session;
use train::confusion::Confusion;
use train::evaluated::Found;
use train::session::Score;

pub fn run(args: EvalArgs) -> anyhow::Result<()> {
    let force = args.overwrite.force;
    outputs::check("confusion", args.confusion.as_deref(), Output::File { force })?;
    outputs::check("logits", args.logits.as_deref(), Output::File { force })?;
    outputs::check("masks", args.masks.as_deref(), Output::Folder)?;
    ending("--confusion ", args.confusion.as_deref(), "csv")?;
    ending("--logits ", args.logits.as_deref(), "safetensors")?;
    let (evaluated, sets) = Found::at(&args.weights)?.with_data(&args.settings.0)?;
    if evaluated.run.task() == Task::Segment {
        return pixels::run(&args, evaluated, sets);
    }
    if args.masks.is_some() {
        anyhow::bail!("--masks: is for segmentation; this model classifies images");
    }
    let subject = Subject::of(&evaluated, &sets);
    let (names, classes) = (evaluated.run.class_names.clone(), evaluated.run.network.classes());
    let mut session = Session::for_evaluation(evaluated.run, sets, &evaluated.weights)?;

    let mut confusion = Confusion::new(classes);
    let mut dump = args.logits.is_some().then(Dump::default);
    if dump.is_some() && !args.no_images {
        images_fit(&session)?;
        session.show_images();
    }
    if !args.json {
        subject.print();
    }
    let score = session.evaluate(|batch, logits| {
        let samples = batch.labels.iter().zip(&batch.weights).zip(logits.chunks_exact(classes));
        for ((&label, _), logits) in samples.filter(|((_, weight), _)| **weight > 0.0) {
            confusion.add(label as usize, logits);
        }
        if let Some(dump) = &mut dump {
            let (count, image) = (batch.request.count, batch.images.len() / batch.labels.len().max(1));
            dump.logits.extend_from_slice(logits);
            if !args.no_images {
                dump.images.extend_from_slice(&batch.images[..count * image]);
            }
            dump.labels.extend(batch.labels[..count].iter().map(|&label| label as f32));
        }
    })?;
    for skipped in session.take_skipped() {
        eprintln!("left out: {}", printable::line(&skipped.problem.to_string()));
    }
    if let (Some(path), Some(dump)) = (&args.logits, dump) {
        weights::write(path, &dump.tensors(&session), &BTreeMap::new())?;
    }
    if let Some(path) = &args.confusion {
        write_confusion(path, confusion.rows().map(<[u64]>::to_vec).collect(), &names)?;
    }
    if args.json {
        println!("{}", to_json(&subject, &score, &confusion, &names));
    } else {
        print_scores(&score, &confusion, &names);
    }
    Ok(())
}

/// The evaluated images in order, normalised as the model saw them, with its answers.
#[derive(Default)]
struct Dump {
    logits: Vec<f32>,
    images: Vec<f32>,
    labels: Vec<f32>,
}

impl Dump {
    fn tensors(self, session: &Session) -> Weights {
        let (network, n) = (&session.resolved().network, self.labels.len());
        let image = vec![n, network.channels(), network.image(), network.image()];
        let mut tensors = Weights::from([
            ("logits".to_string(), Tensor { shape: vec![n, network.classes()], data: self.logits }),
            ("labels".to_string(), Tensor { shape: vec![n], data: self.labels }),
        ]);
        if !self.images.is_empty() {
            tensors.insert("images".to_string(), Tensor { shape: image, data: self.images });
        }
        tensors
    }
}

/// They are gathered in memory before they are written.
fn images_fit(session: &Session) -> anyhow::Result<()> {
    let network = &session.resolved().network;
    let image = network.channels() * network.image().pow(2);
    let bytes = (session.test_set().len() * image * size_of::<f32>()) as u64;
    let room = data::available_memory().unwrap_or(u64::MAX) / 2;
    if bytes > room {
        let gigabytes = |bytes: u64| bytes as f64 / 1e9;
        anyhow::bail!(
            "--logits: the images would take {:.1} GB, more than half of the free memory ({:.1} GB): add --no-images",
            gigabytes(bytes),
            gigabytes(room)
        );
    }
    Ok(())
}

pub fn write_confusion(path: &Path, rows: Vec<Vec<u64>>, names: &[String]) -> anyhow::Result<()> {
    let quoted = |name: &str| format!("\"{}\"", name.replace('"', "\"\""));
    let mut text = String::from("class");
    for class in 0..rows.len() {
        write!(text, ",{}", quoted(&exact_name(names, class)))?;
    }
    for (class, row) in rows.iter().enumerate() {
        write!(text, "\n{}", quoted(&exact_name(names, class)))?;
        row.iter().try_for_each(|count| write!(text, ",{count}"))?;
    }
    text.push('\n');
    std::fs::write(path, text).with_context(|| path.display().to_string())
}

/// Classes are listed one by one up to this many; of more, the worst.
const LISTED: usize = 20;
const WORST: usize = 10;
const MISTAKES: usize = 5;

fn print_scores(score: &Score, confusion: &Confusion, names: &[String]) {
    println!(
        "{} · loss {:.4} · top-1 {:.2}% · top-5 {:.2}%",
        many(score.samples.round() as usize, "image"),
        score.loss,
        100.0 * score.top1,
        100.0 * score.top5
    );
    let mut classes: Vec<_> =
        (0..confusion.rows().count()).map(|class| (class, confusion.class(class))).collect();
    classes.retain(|(_, score)| score.images > 0);
    if classes.len() > LISTED {
        classes.sort_by(|a, b| a.1.recall.total_cmp(&b.1.recall));
        classes.truncate(WORST);
        println!("\nthe {WORST} classes with the lowest recall");
    } else {
        println!();
    }
    let width =
        classes.iter().map(|(class, _)| class_name(names, *class).chars().count()).max().unwrap_or(0).max(5);
    println!("  {:<width$}  {:>7}  {:>10}  {:>9}", "class", "images", "recall", "precision");
    for (class, score) in classes {
        println!(
            "  {:<width$}  {:>7}  {:>9.1}%  {:>8.1}%",
            class_name(names, class),
            score.images,
            100.0 * score.recall,
            100.0 * score.precision
        );
    }
    let mistakes = confusion.mistakes();
    if !mistakes.is_empty() {
        println!("most frequent mistakes");
    }
    for (label, taken, images) in mistakes.into_iter().take(MISTAKES) {
        println!("  {images:>5} × {} taken for {}", class_name(names, label), class_name(names, taken));
    }
}

fn to_json(subject: &Subject, score: &Score, confusion: &Confusion, names: &[String]) -> serde_json::Value {
    let class = |class: usize| {
        let score = confusion.class(class);
        json!({"class": exact_name(names, class), "images": score.images, "recall": score.recall, "precision": score.precision})
    };
    let mut report = subject.to_json();
    report["eval_loss"] = json!(score.loss);
    report["eval_top1"] = json!(score.top1);
    report["eval_top5"] = json!(score.top5);
    report["samples"] = json!(score.samples.round() as u64);
    report["classes"] = (0..confusion.rows().count()).map(class).collect();
    report["confusion"] = confusion.rows().map(|row| json!(row)).collect();
    report
}
