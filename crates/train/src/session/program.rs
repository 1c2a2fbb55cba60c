//! The plans of a run.

use crate::config::{LossScale, Residual, Resolved};
use crate::device::target;
use crate::error::TrainError;
use crate::finishing::Finishing;
use crate::real::Real;
use graph::{DType, DynamicScale, Graph, Loss, LossScaling, Mixed, Program, Settings};
use graph::{compile_observed, inference};

/// The types of a plan in mixed precision: of products, and of the residual stream.
pub fn mixed(run: &Resolved) -> Option<Mixed> {
    let half = run.precision.half()?;
    let residual = match run.residual {
        Residual::Fp32 => DType::F32,
        Residual::Half => half,
    };
    Some(Mixed { half, residual })
}

/// How the loss is scaled in fp16.
fn loss_scale(run: &Resolved) -> Option<LossScaling> {
    let LossScale { initial, dynamic, window, hysteresis, min } = run.loss_scale?;
    Some(LossScaling { initial, dynamic: dynamic.then_some(DynamicScale { window, hysteresis, min }) })
}

/// Compiles the plans of a rank that has `batch` images in a micro-step, prepared by the host.
pub fn program<T: Real>(run: &Resolved, batch: usize) -> Result<Program, TrainError> {
    program_with::<T>(run, batch, None)
}

/// As [`program`], with what the device does to images by itself.
pub(crate) fn program_with<T: Real>(
    run: &Resolved,
    batch: usize,
    finishing: Option<&Finishing>,
) -> Result<Program, TrainError> {
    compiled::<T>(run, batch, finishing, &mut |_, _, _| Ok(()))
}

/// The graph of a plan as a pass leaves it; see [`graph::passes_of`].
pub fn graph_after<T: Real>(
    run: &Resolved,
    batch: usize,
    plan: &str,
    pass: &str,
) -> Result<Option<Graph>, TrainError> {
    let mut found = None;
    compiled::<T>(run, batch, None, &mut |plans, name, graph| {
        if name == pass && plans.contains(&plan) {
            found = Some(graph.clone());
        }
        Ok(())
    })?;
    Ok(found)
}

fn compiled<T: Real>(
    run: &Resolved,
    batch: usize,
    finishing: Option<&Finishing>,
    observe: graph::compile::Observer<'_>,
) -> Result<Program, TrainError> {
    let settings = Settings {
        optimizer: run.optimizer,
        max_grad_norm: run.clip,
        recompute: run.recompute,
        group: &|state| run.group(&state.name),
        ema: run.ema,
        mixed: mixed(run),
        loss_scale: loss_scale(run),
        mesh: run.mesh(),
        exchange: run.exchange(),
        accumulates: run.accumulate > 1,
        target: &*target(run),
    };
    let loss = Loss { smoothing: run.label_smoothing, mixed: run.augmentation.mixes() };
    let mut model = run.network.build(batch, loss, <T as Real>::DTYPE)?;
    if let Some(finishing) = finishing {
        model = finishing.begin(model, batch)?;
    }
    Ok(compile_observed(model, &settings, observe)?)
}

/// As [`program_with`], for judging alone.
pub(super) fn judging<T: Real>(
    run: &Resolved,
    batch: usize,
    finishing: Option<&Finishing>,
) -> Result<Program, TrainError> {
    let mut model = run.network.build(batch, Loss::default(), <T as Real>::DTYPE)?;
    if let Some(finishing) = finishing {
        model = finishing.begin(model, batch)?;
    }
    Ok(inference(model, mixed(run), &*target(run))?)
}
