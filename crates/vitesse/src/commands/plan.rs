//! `vitesse plan`.

mod diff;
mod memory;

use crate::args::{PlanArgs, WhichArg};
use crate::table::{count, megabytes};
use anyhow::bail;
use config::{Precision, Resolved};
use devices::memory_advice::check_here;
use devices::program::{graph_after, program};
use graph::op::Lane;
use graph::{Plan, Program};
use serde_json::json;
use text::many;

pub fn run(args: PlanArgs) -> anyhow::Result<()> {
    let run = args.settings.0.resolve_without_data(args.ranks.unwrap_or(1))?;
    if let Some(pass) = &args.print_after {
        return print_after(&run, args.which.unwrap_or(WhichArg::Last), pass);
    }
    let program = compiled(&run)?;
    if args.which == Some(WhichArg::Micro) && program.micro.steps.is_empty() {
        bail!("{ONE}");
    }
    if let Some(flags) = &args.diff {
        return diff::print(&args, flags, &run, &program);
    }
    match (args.which, args.json) {
        (Some(which), true) => println!("{}", pick(&program, which).to_json()),
        (Some(which), false) => print!("{}", pick(&program, which)),
        (None, true) => println!("{}", summary_json(&program)),
        (None, false) => {
            print_summary(&run, &program);
            // A plan may be for another machine.
            if let Err(why) = check_here(&run, &program) {
                println!("it doesn't fit here: {why}");
            }
        }
    }
    Ok(())
}

fn compiled(run: &Resolved) -> anyhow::Result<Program> {
    Ok(match run.precision {
        Precision::Fp64 => program::<f64>(run, run.batch)?,
        _ => program::<f32>(run, run.batch)?,
    })
}

const ONE: &str =
    "--which micro: there is none, as steps have one micro-batch; --accumulate gives them several";

/// The graph of a plan after one of its passes.
fn print_after(run: &Resolved, which: WhichArg, pass: &str) -> anyhow::Result<()> {
    let plan = match which {
        WhichArg::First => "first",
        WhichArg::Micro if run.accumulate == 1 => bail!("{ONE}"),
        WhichArg::Micro => "micro",
        WhichArg::Last => "last",
        WhichArg::Update => "update",
        WhichArg::Eval => "eval",
    };
    let found = match run.precision {
        Precision::Fp64 => graph_after::<f64>(run, run.batch, plan, pass)?,
        _ => graph_after::<f32>(run, run.batch, plan, pass)?,
    };
    let Some(graph) = found else {
        let passes = graph::passes_of(plan).join(", ");
        bail!("--print-after {pass}: the passes of the plan {plan} are {passes}");
    };
    print!("{graph}");
    Ok(())
}

fn pick(program: &Program, which: WhichArg) -> &Plan {
    match which {
        WhichArg::First => &program.first,
        WhichArg::Micro => &program.micro,
        WhichArg::Last => &program.last,
        WhichArg::Update => &program.update,
        WhichArg::Eval => &program.eval,
    }
}

fn print_summary(run: &Resolved, program: &Program) {
    let (model, each) = (&run.model, if run.world > 1 { ", on each rank" } else { "" });
    let (arena, states) = (megabytes(program.arena()), megabytes(program.state_bytes()));
    println!("{model}: arena {arena}, states {states}{each}");
    run.stage_instead(program.zero).iter().for_each(|line| println!("{line}"));
    memory::print(program);
    println!("{:<8} {:>6} {:>12} {:>12} {:>12}", "plan", "steps", "GFLOP", "GB moved", "arena");
    // Of one micro-batch, the last is the first.
    let one = program.micro.steps.is_empty();
    let is_idle = |plan: &Plan| plan.steps.is_empty() || (one && plan.name == "first");
    for plan in program.plans().into_iter().filter(|plan| !is_idle(plan)) {
        let cost = plan.cost();
        println!(
            "{:<8} {:>6} {:>12.3} {:>12.3} {:>12}",
            plan.name,
            count(plan.steps.len()),
            cost.flops / 1e9,
            cost.bytes / 1e9,
            megabytes(plan.arena)
        );
    }
    let (messages, bytes) = communicated_per_step(program, run.accumulate);
    if messages > 0 {
        println!("communication: {} in {} per step", megabytes(bytes as usize), many(messages, "message"));
    }
    println!("print one in full with --which first|micro|last|update|eval");
}

/// Collectives of a step of so many micro-steps, and the bytes of each rank that they take along.
fn communicated_per_step(program: &Program, micros: usize) -> (usize, f64) {
    let (first, between) = (usize::from(micros > 1), micros.saturating_sub(2));
    let runs = [(&program.first, first), (&program.micro, between), (&program.last, 1), (&program.update, 1)];
    runs.into_iter().fold((0, 0.0), |(messages, bytes), (plan, runs)| {
        let of = communicated(plan);
        (messages + runs * of.0, bytes + runs as f64 * of.1)
    })
}

/// Collectives of a plan, and the bytes of each rank that they take along.
fn communicated(plan: &Plan) -> (usize, f64) {
    let calls = plan.steps.iter().filter(|step| step.lane == Lane::Comm);
    calls.fold((0, 0.0), |(calls, bytes), step| (calls + 1, bytes + plan.cost_of(step).bytes))
}

fn summary_json(program: &Program) -> serde_json::Value {
    let plans: Vec<_> = program
        .plans()
        .into_iter()
        .map(|plan| {
            let cost = plan.cost();
            let (collectives, bytes) = communicated(plan);
            json!({
                "name": plan.name, "steps": plan.steps.len(), "flops": cost.flops, "bytes": cost.bytes,
                "arena": plan.arena, "exchanges": collectives, "exchanged_bytes": bytes,
            })
        })
        .collect();
    json!({
        "arena": program.arena(), "state_bytes": program.state_bytes(), "zero": program.zero,
        "memory": memory::json(program), "plans": plans,
    })
}
