//! `vitesse models`.

use crate::table::count;
use anyhow::Context;
use models::Network;
use models::architecture::Listed;
use serde_json::{Value, json};

/// Classes of the head that is counted: ImageNet's.
const CLASSES: usize = 1000;
const CHANNELS: usize = 3;

/// A model with what follows from its graph.
struct Row {
    model: Listed,
    parameters: usize,
    /// Operations of the forward pass of one image.
    flops: f64,
}

pub fn run(json: bool) -> anyhow::Result<()> {
    let families = Network::listed().into_iter().map(|(family, models)| {
        let rows = models.into_iter().map(row).collect::<anyhow::Result<Vec<_>>>()?;
        Ok((family, rows))
    });
    let families = families.collect::<anyhow::Result<Vec<_>>>()?;
    if json {
        let rows = families.iter().flat_map(|(family, rows)| rows.iter().map(|row| to_json(family, row)));
        println!("{}", rows.collect::<Value>());
    } else {
        print(&families);
    }
    Ok(())
}

fn row(model: Listed) -> anyhow::Result<Row> {
    let network = Network::named(&model.name, model.image, CHANNELS, CLASSES)?;
    let flops = network.forward_flops().with_context(|| model.name.clone())?;
    let shapes = network.expected();
    let parameters = shapes.iter().map(|(_, shape)| shape.iter().product::<usize>()).sum();
    Ok(Row { model, parameters, flops })
}

fn to_json(family: &str, row: &Row) -> Value {
    let Row { model, parameters, flops } = row;
    json!({"family": family, "model": model.name, "timm": model.timm, "image_size": model.image, "classes": CLASSES,
        "parameters": parameters, "forward_flops": flops.round() as u64})
}

fn print(families: &[(&str, Vec<Row>)]) {
    let longest = |name: fn(&Row) -> usize| families.iter().flat_map(|(_, rows)| rows).map(name).max();
    let width = longest(|row| row.model.name.len()).unwrap_or(0);
    println!("{:<width$} {:>5} {:>13} {:>8}  {}", "model", "px", "parameters", "GFLOP", "timm's name");
    for (family, rows) in families {
        println!("{family}");
        for Row { model, parameters, flops } in rows {
            let timm = match &model.timm {
                Some(timm) if *timm == model.name => "the same",
                Some(timm) => timm,
                None => "–",
            };
            let (name, image, parameters) = (&model.name, model.image, count(*parameters));
            println!("  {name:<width$} {image:>3} {parameters:>13} {:>8.2}  {timm}", flops / 1e9);
        }
    }
    println!("\nGFLOP: the forward pass of one image, a multiply-add counting two; {CLASSES} classes.");
    println!("Segmentation: add +upernet to a Swin V2, +linear to a ViT.");
}
