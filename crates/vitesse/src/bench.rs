//! `vitesse bench`.

use crate::args::BenchArgs;
use crate::table;
use serde_json::json;
use std::io::{BufRead, Write};
use train::bench::StepBench;

pub fn run(args: BenchArgs) -> anyhow::Result<()> {
    let run = args.step.raw(args.model.raw()).resolve_without_data()?;
    let mut bench = StepBench::new(&run)?;
    if args.on_request {
        return serve(&mut bench);
    }
    let ceilings = cpu::ceilings::measure(run.threads)?;
    for _ in 0..2 {
        bench.step();
        bench.products();
    }
    bench.reset_times();
    let (mut steps, mut products) = (vec![], vec![]);
    for _ in 0..args.steps.max(1) {
        steps.push(bench.step());
        products.push(bench.products());
    }
    let times = bench.times();
    let (step, product) = (median(&steps), median(&products));
    let flops = bench.executor().program().last.cost().flops;
    if args.json {
        let report = json!({
            "model": run.model, "image_size": run.vit.image, "batch_size": run.batch, "threads": run.threads,
            "step_seconds": steps, "product_seconds": products, "flops": flops,
            "images_per_second": run.batch as f64 / step, "products_share": product / step,
            "ceiling_flops": ceilings.flops, "ceiling_bytes": ceilings.bytes,
            "kinds": times.iter().map(kind_json).collect::<Vec<_>>(),
        });
        println!("{report}");
        return Ok(());
    }
    println!(
        "{} · batch {} · {} threads: {:.1} ms a step, {:.1} images/s, {:.0} GFLOP/s",
        run.model,
        run.batch,
        run.threads,
        1e3 * step,
        run.batch as f64 / step,
        flops / step / 1e9
    );
    println!(
        "products alone take {:.1} ms: the step runs at {:.1}% of their rate",
        1e3 * product,
        100.0 * product / step
    );
    println!(
        "ceilings of this machine: {:.0} GFLOP/s for products in cache, {:.1} GB/s copying memory",
        ceilings.flops / 1e9,
        ceilings.bytes / 1e9
    );
    let wall: f64 = steps.iter().sum();
    table::print_account(&table::account(&times, wall, 0.0), wall, Some(ceilings));
    Ok(())
}

fn kind_json(time: &cpu::StepTime) -> serde_json::Value {
    json!({"op": time.op, "phase": time.phase.name(), "seconds": time.seconds, "flops": time.flops, "bytes": time.bytes})
}

/// `step` and `products` each run once and answer with seconds.
fn serve(bench: &mut StepBench) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    for line in std::io::stdin().lock().lines() {
        let seconds = match line?.trim() {
            "step" => bench.step(),
            "products" => bench.products(),
            other => anyhow::bail!("'{other}' is neither step nor products"),
        };
        writeln!(out, "{seconds}")?;
        out.flush()?;
    }
    Ok(())
}

fn median(samples: &[f64]) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}
