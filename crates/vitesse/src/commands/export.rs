//! `vitesse export`.

use crate::args::ExportArgs;
use crate::ending::ending;
use files::folder_of;
use formats::weights;
use text::many;
use train::evaluated::Found;

pub fn run(args: ExportArgs) -> anyhow::Result<()> {
    ending("", Some(&args.out), "safetensors")?;
    if let Err(why) = files::output::free(&args.out, args.overwrite.force) {
        anyhow::bail!("{}: {why}", args.out.display());
    }
    let evaluated = Found::at(&args.from)?.without_data(&args.settings.0)?;
    if let Some(what) = evaluated.run.network.refuses(args.to) {
        anyhow::bail!("{}: {what} has no {} form: export it as timm", evaluated.run.model, args.to);
    }
    let card = evaluated.card(folder_of(&args.out));
    weights::save_as(&args.out, &evaluated.weights, args.to, &card, evaluated.config())?;
    println!(
        "{} → {} ({} under names of {})",
        evaluated.file.display(),
        args.out.display(),
        many(evaluated.weights.len(), "tensor"),
        args.to
    );
    Ok(())
}
