//! `vitesse bench`.

use crate::args::BenchArgs;
use crate::table;
use serde_json::json;
use std::io::{BufRead, Write};
use train::bench::{StepBench, Turn};
use train::{Resolved, TrainError};

pub fn run(args: BenchArgs) -> anyhow::Result<()> {
    let mut raw = args.exchange.clone().raw(args.step.clone().raw(args.model.clone().raw()));
    let all = std::thread::available_parallelism().map_or(1, usize::from);
    raw.threads = raw.threads.or((args.ranks > 1).then_some((all / args.ranks.max(1)).max(1)));
    let run = raw.resolve_without_data(args.ranks)?;
    let options = comm::Options { comm: Some(comm::Choice::Threads), ranks: Some(args.ranks), timeout: None };
    let comm::Start::Threads(members) = comm::start(&options)? else {
        anyhow::bail!("bench measures the ranks of one process; start it without a launcher")
    };
    let mut benches = Vec::new();
    for member in &members {
        benches.push(StepBench::new(&run, member.world.clone())?);
    }
    let mut first = benches.remove(0);
    std::thread::scope(|scope| {
        let others: Vec<_> = benches.into_iter().map(|bench| scope.spawn(move || follow(bench))).collect();
        let measured = if args.on_request { serve(&mut first) } else { measure(&mut first, &run, &args) };
        first.told(Turn::End)?;
        for other in others {
            other.join().map_err(|_| anyhow::anyhow!("a rank panicked"))??;
        }
        measured
    })
}

/// Another rank than the first.
fn follow(mut bench: StepBench) -> Result<(), TrainError> {
    loop {
        match bench.told(Turn::End)? {
            Turn::End => return Ok(()),
            turn => drop(bench.take(turn)?),
        }
    }
}

/// A turn of all ranks, as the first one has it.
fn take(bench: &mut StepBench, turn: Turn) -> Result<f64, TrainError> {
    bench.told(turn)?;
    bench.take(turn)
}

fn measure(bench: &mut StepBench, run: &Resolved, args: &BenchArgs) -> anyhow::Result<()> {
    let ceilings = cpu::ceilings::measure(run.threads)?;
    for _ in 0..2 {
        take(bench, Turn::Step)?;
        take(bench, Turn::Products)?;
    }
    bench.reset_times();
    let (mut steps, mut products) = (vec![], vec![]);
    for _ in 0..args.steps.max(1) {
        steps.push(take(bench, Turn::Step)?);
        products.push(take(bench, Turn::Products)?);
    }
    let times = bench.times();
    let (step, product) = (median(&steps), median(&products));
    let flops = bench.executor().program().last.cost().flops;
    let images = (run.batch * run.world) as f64 / step;
    if args.json {
        let report = json!({
            "model": run.model, "image_size": run.vit.image, "batch_size": run.batch, "threads": run.threads,
            "ranks": run.world, "step_seconds": steps, "product_seconds": products, "flops": flops,
            "images_per_second": images, "products_share": product / step,
            "ceiling_flops": ceilings.flops, "ceiling_bytes": ceilings.bytes,
            "kinds": times.iter().map(kind_json).collect::<Vec<_>>(),
        });
        println!("{report}");
        return Ok(());
    }
    let ranks = if run.world == 1 { String::new() } else { format!(" × {} ranks", run.world) };
    println!(
        "{} · batch {}{ranks} · {} threads: {:.1} ms a step, {images:.1} images/s, {:.0} GFLOP/s",
        run.model,
        run.batch,
        run.threads,
        1e3 * step,
        flops * run.world as f64 / step / 1e9
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

/// `step`, `untimed` (a step without the account of its time) and `products` each run once and answer with seconds.
fn serve(bench: &mut StepBench) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    for line in std::io::stdin().lock().lines() {
        let turn = match line?.trim() {
            "step" => Turn::Step,
            "untimed" => Turn::Untimed,
            "products" => Turn::Products,
            other => anyhow::bail!("'{other}' is neither step, untimed nor products"),
        };
        let seconds = take(bench, turn)?;
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
