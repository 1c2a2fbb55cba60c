//! `vitesse export`.

use crate::args::ExportArgs;
use crate::judge::Judge;
use models::names::Convention;
use models::{Network, Segmenter};
use train::stored::Stored;
use train::weights;

pub fn run(args: ExportArgs) -> anyhow::Result<()> {
    let (stored, raw) = (Stored::find(&args.from)?, args.model.raw());
    let (from, known) = (stored.weights.display().to_string(), stored.run.is_some() && raw.model.is_none());
    let judge = Judge::new(stored, &raw)?;
    if args.out.exists() {
        anyhow::bail!("{}: exists already, and is not replaced", args.out.display());
    }
    // Its head has the name of a classifier's in the others' models.
    let linear = matches!(judge.run.network, Network::Segmenter(Segmenter::Linear { .. }));
    if linear && args.to != Convention::Timm {
        anyhow::bail!(
            "{}: a ViT with a linear head for pixels has no {} form: export it as timm",
            judge.run.model,
            args.to
        );
    }
    let config = if known { Some(judge.run.to_json()?) } else { None };
    weights::save_as(&args.out, &judge.weights, args.to, config.as_deref())?;
    println!("{} → {} ({} names, {} tensors)", from, args.out.display(), args.to, judge.weights.len());
    Ok(())
}
