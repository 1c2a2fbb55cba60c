//! `vitesse eval`.

use crate::args::EvalArgs;
use models::names::{Tensor, Weights};
use serde_json::json;
use std::collections::BTreeMap;
use train::{Raw, Session, session, weights};

pub fn run(args: EvalArgs) -> anyhow::Result<()> {
    let raw = Raw { init: Some(args.weights), ..args.data.raw(args.model.raw()) };
    let facts = session::facts(&raw)?;
    let mut session = Session::new(raw.resolve(&facts, 1)?)?;
    let mut logits = Vec::new();
    let score = session.evaluate(|_, batch| logits.extend_from_slice(batch))?;
    if let Some(path) = &args.logits {
        weights::write(path, &evaluated(&session, logits)?, &BTreeMap::new())?;
    }
    if let (Some(path), Some(convention)) = (&args.export, args.to) {
        weights::save_as(path, &session.weights(), convention)?;
    }
    if args.json {
        let (loss, top1, top5) = (score.loss, score.top1, score.top5);
        println!(
            "{}",
            json!({"eval_loss": loss, "eval_top1": top1, "eval_top5": top5, "samples": score.samples})
        );
    } else {
        println!(
            "{} images · loss {:.4} · top-1 {:.2}% · top-5 {:.2}%",
            score.samples,
            score.loss,
            100.0 * score.top1,
            100.0 * score.top5
        );
    }
    Ok(())
}

/// Logits with the images they belong to, normalised as the model saw them, and the labels.
fn evaluated(session: &Session, logits: Vec<f32>) -> anyhow::Result<Weights> {
    let set = session.test_set();
    let (n, channels) = (set.len(), set.channels());
    let (size, classes) = (session.resolved().vit.image, session.resolved().vit.classes);
    let (mut images, mut labels) = (vec![0.0; n * channels * size * size], vec![0; n]);
    let mut ones = vec![0.0; n];
    let indices: Vec<usize> = (0..n).collect();
    data::Filler::new(size).fill(set, &indices, n, &mut images, &mut labels, &mut ones)?;
    let labels = labels.into_iter().map(|label| label as f32).collect();
    Ok(Weights::from([
        ("logits".to_string(), Tensor { shape: vec![n, classes], data: logits }),
        ("images".to_string(), Tensor { shape: vec![n, channels, size, size], data: images }),
        ("labels".to_string(), Tensor { shape: vec![n], data: labels }),
    ]))
}
