//! What some flags change about plans.

use super::{compiled, memory, pick};
use crate::args::{Cli, Command, PlanArgs};
use crate::table::count;
use anyhow::bail;
use config::Resolved;
use graph::{Change, Plan, Program, compare};
use text::many;

/// Unchanged steps that are shown beside those that changed.
const CONTEXT: usize = 1;

/// Prints how the plans of a command line differ from those that it would make with more flags.
pub fn print(args: &PlanArgs, flags: &str, run: &Resolved, program: &Program) -> anyhow::Result<()> {
    let other = with(args, flags)?;
    let changed = compiled(&other)?;
    run.stage_instead(program.zero).iter().for_each(|line| println!("{line}"));
    other.stage_instead(changed.zero).iter().for_each(|line| println!("{flags}: {line}"));
    match args.which {
        None => {
            memory::print_both(["as it is", flags], [program, &changed]);
            println!();
            // Of one micro-batch, the last is the first.
            let one = program.micro.steps.is_empty() && changed.micro.steps.is_empty();
            let plans = program.plans().into_iter().zip(changed.plans());
            let plans = plans.filter(|(plan, _)| !(one && plan.name == "first"));
            plans.for_each(|(before, after)| print_counts(&before.name, &compare(before, after)));
            println!("print the steps that change with --which first|micro|last|update|eval");
        }
        Some(which) => print_steps(pick(program, which), pick(&changed, which)),
    }
    Ok(())
}

/// The run of the same command line with more flags.
fn with(args: &PlanArgs, flags: &str) -> anyhow::Result<Resolved> {
    let words = ["vitesse", "plan"].into_iter().chain(flags.split_whitespace());
    let typed = match Cli::read(&words.collect::<Vec<_>>()) {
        Ok(Cli { command: Command::Plan(typed) }) => typed,
        Ok(_) => bail!("--diff {flags}: takes flags of `vitesse plan`"),
        Err(error) => bail!("--diff {flags}: {error}"),
    };
    let only = typed.which.is_none() && typed.diff.is_none() && typed.print_after.is_none() && !typed.json;
    if !only || flags.trim().is_empty() {
        bail!("--diff {flags}: takes flags that shape the plans, as in --diff '--zero 2'");
    }
    let ranks = typed.ranks.or(args.ranks).unwrap_or(1);
    Ok(typed.settings.0.or(args.settings.0.clone()).resolve_without_data(ranks)?)
}

fn counts(changes: &[Change]) -> (usize, usize) {
    let of = |is: fn(&Change) -> bool| changes.iter().filter(|change| is(change)).count();
    (of(|change| matches!(change, Change::Gone(_))), of(|change| matches!(change, Change::New(_))))
}

fn print_counts(plan: &str, changes: &[Change]) {
    let (gone, new) = counts(changes);
    if !changes.is_empty() {
        println!(
            "{plan:<8} {:>6} gone {:>6} new of {}",
            count(gone),
            count(new),
            many(changes.len(), "step")
        );
    }
}

/// The steps that only one of the two has, each with its neighbours.
fn print_steps(before: &Plan, after: &Plan) {
    let changes = compare(before, after);
    let is_new = |change: &Change| !matches!(change, Change::Same(_));
    let near = |at: usize| {
        let beside = at.saturating_sub(CONTEXT)..(at + CONTEXT + 1).min(changes.len());
        changes[beside].iter().any(is_new)
    };
    let mut hidden = 0;
    for (at, change) in changes.iter().enumerate() {
        if near(at) {
            print_hidden(std::mem::take(&mut hidden));
            println!("{change}");
        } else {
            hidden += 1;
        }
    }
    print_hidden(hidden);
}

fn print_hidden(steps: usize) {
    if steps > 0 {
        println!("  … {} as before", many(steps, "step"));
    }
}
