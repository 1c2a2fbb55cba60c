//! `vitesse export`.

use crate::args::ExportArgs;
use crate::judge::Judge;
use train::stored::Stored;
use train::weights;

pub fn run(args: ExportArgs) -> anyhow::Result<()> {
    let (stored, raw) = (Stored::find(&args.from)?, args.model.raw());
    let (from, known) = (stored.weights.display().to_string(), stored.run.is_some() && raw.model.is_none());
    let judge = Judge::new(stored, &raw)?;
    if args.out.exists() {
        anyhow::bail!("{}: exists already, and is not replaced", args.out.display());
    }
    let config = if known { Some(judge.run.to_json()?) } else { None };
    weights::save_as(&args.out, &judge.weights, args.to, config.as_deref())?;
    println!("{} → {} ({} names, {} tensors)", from, args.out.display(), args.to, judge.weights.len());
    Ok(())
}
