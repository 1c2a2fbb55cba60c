//! `vitesse export`.

use crate::args::ExportArgs;
use crate::ending::ending;
use files::folder_of;
use formats::{onnx, weights};
use models::names::Convention;
use text::many;
use train::evaluated::{Evaluated, Found};

pub fn run(args: ExportArgs) -> anyhow::Result<()> {
    let is_onnx = args.out.extension().is_some_and(|found| found.eq_ignore_ascii_case("onnx"));
    if !is_onnx {
        ending("", Some(&args.out), "safetensors")?;
    }
    if let (true, Some(names)) = (is_onnx, args.to) {
        anyhow::bail!("--to {names}: says whose names safetensors have; an ONNX file holds the whole model");
    }
    if let Err(why) = files::output::free(&args.out, args.overwrite.force) {
        anyhow::bail!("{}: {why}", args.out.display());
    }
    let evaluated = Found::at(&args.from)?.without_data(&args.settings.0)?;
    let written = match is_onnx {
        true => to_onnx(&args, &evaluated)?,
        false => to_safetensors(&args, &evaluated)?,
    };
    println!("{} → {} ({written})", evaluated.file.display(), args.out.display());
    if evaluated.assumed {
        println!("note: mean and deviation are assumed: neither the weights nor flags say (--mean, --std)");
    }
    Ok(())
}

fn to_safetensors(args: &ExportArgs, evaluated: &Evaluated) -> anyhow::Result<String> {
    let names = args.to.unwrap_or(Convention::Timm);
    if let Some(what) = evaluated.run.network.refuses(names) {
        anyhow::bail!("{}: {what} has no {names} form: export it as timm", evaluated.run.model);
    }
    let card = evaluated.card(folder_of(&args.out));
    weights::save_as(&args.out, &evaluated.weights, names, &card, evaluated.config())?;
    Ok(format!("{names} names, {}", many(evaluated.weights.len(), "tensor")))
}

fn to_onnx(args: &ExportArgs, evaluated: &Evaluated) -> anyhow::Result<String> {
    let network = &evaluated.run.network;
    onnx::save(&args.out, network, &evaluated.weights, &evaluated.card(folder_of(&args.out)))?;
    let ([height, width], channels, classes) = (network.size(), network.channels(), network.classes());
    let operators = onnx::OPERATORS;
    Ok(format!("ONNX, opset {operators}: images (N,{channels},{height},{width}) → logits (N,{classes})"))
}
