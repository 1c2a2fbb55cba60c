//! Settings that nobody typed and that resolving did not note: the value that the run has, or why it has none.

use crate::origin::Origin;
use crate::resolved::Resolved;
use crate::schedule::Schedule;
use crate::task::Task;

/// Value and origin of a setting in a run; `None` where the default holds as the table words it.
pub(super) fn unsaid(name: &str, run: &Resolved) -> Option<(String, Origin)> {
    let network = &run.network;
    let with_masks = Task::of(network) == Task::Segment;
    let synthetic = run.data.source.is_synthetic();
    let value = match name {
        "task" => Task::of(network).to_string(),
        "ranks" => run.world.to_string(),
        "norm-eps" => format!("{:e}", network.norm_eps()),
        "dropout" | "attention-dropout" | "drop-path" => "0".to_string(),
        "train-samples" if synthetic => run.data.facts.train_images.to_string(),
        "test-samples" if synthetic => run.data.facts.test_images.to_string(),
        _ => return idle(name, run, with_masks).map(|why| (String::new(), Origin::Default(why.to_string()))),
    };
    Some((value, Origin::default_value()))
}

/// Reason that a setting changes nothing in a run.
fn idle(name: &str, run: &Resolved, with_masks: bool) -> Option<&'static str> {
    let by_steps = matches!(run.schedule, Schedule::Step { .. });
    let falls =
        matches!(run.schedule, Schedule::Cosine { .. } | Schedule::Linear { .. } | Schedule::Poly { .. });
    Some(match name {
        "pool" if run.network.pool().is_none() => "for ViTs",
        "train-samples" | "test-samples" => "for synthetic images",
        "eval-mode" | "eval-stride" if !with_masks => "for images with masks",
        "crop" | "rand-augment" | "erase" | "mixup" | "cutmix" | "eval-resize" if with_masks => {
            "for images with one class each"
        }
        "momentum" | "betas" | "eps" => "for other optimizers",
        "step-every" | "milestones" | "gamma" if !by_steps => "for --schedule step",
        "power" => "for --schedule poly",
        "min-lr" if !falls => "for other schedules",
        "comm" | "bucket-size" | "comm-dtype" if run.world == 1 => "one rank communicates nothing",
        _ => return None,
    })
}
