//! `vitesse eval`.

mod matrix;
pub mod pixels;
mod scores;
mod subject;

use crate::args::EvalArgs;
use crate::ending::{ending, endings};
use config::Task;
use config::outputs::{self, Output};
use formats::weights;
use models::names::{Tensor, Weights};
use std::collections::BTreeMap;
use subject::Subject;
use text::printable;
use train::Session;
use train::confusion::Confusion;
use train::evaluated::Found;

pub fn run(args: EvalArgs) -> anyhow::Result<()> {
    let force = args.overwrite.force;
    outputs::check("confusion", args.confusion.as_deref(), Output::File { force })?;
    outputs::check("logits", args.logits.as_deref(), Output::File { force })?;
    outputs::check("masks", args.masks.as_deref(), Output::Folder)?;
    endings("--confusion ", args.confusion.as_deref(), &matrix::ENDINGS)?;
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
        let rows: Vec<_> = confusion.rows().map(<[u64]>::to_vec).collect();
        matrix::write(path, &rows, &names, &scores::in_a_line(&score))?;
    }
    if args.json {
        println!("{}", scores::to_json(&subject, &score, &confusion, &names));
    } else {
        scores::print(&score, &confusion, &names);
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
