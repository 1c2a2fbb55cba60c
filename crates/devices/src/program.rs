//! The plans of a run.

use crate::device::target;
use crate::error::DeviceError;
use crate::finishing::Finishing;
use crate::real::Real;
use config::Resolved;
use graph::{Graph, Loss, Model, Program, Settings, Zero};
use graph::{compile_observed, inference, stage_taken};

/// Compiles the plans of a rank that has `batch` images in a micro-step, prepared by the host.
pub fn program<T: Real>(run: &Resolved, batch: usize) -> Result<Program, DeviceError> {
    program_with::<T>(run, batch, None)
}

/// As [`program`], with what the device does to images by itself.
pub fn program_with<T: Real>(
    run: &Resolved,
    batch: usize,
    finishing: Option<&Finishing>,
) -> Result<Program, DeviceError> {
    compiled::<T>(run, batch, finishing, &mut |_, _, _| Ok(()))
}

/// The graph of a plan as a pass leaves it; see [`graph::passes_of`].
pub fn graph_after<T: Real>(
    run: &Resolved,
    batch: usize,
    plan: &str,
    pass: &str,
) -> Result<Option<Graph>, DeviceError> {
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
) -> Result<Program, DeviceError> {
    run.refuse_unknown_hosts()?;
    let settings = Settings {
        optimizer: run.optimizer,
        max_grad_norm: run.clip,
        recompute: run.recompute,
        group: &|state| run.group(&state.name),
        ema: run.ema,
        mixed: run.mixed(),
        loss_scale: run.loss_scaling(),
        mesh: run.mesh(),
        communication: run.communication(),
        zero: run.zero,
        gathering: run.gathering,
        accumulates: run.accumulate > 1,
        target: &*target(run),
    };
    let model = |batch: usize| -> Result<Model, DeviceError> {
        let loss = Loss { smoothing: run.label_smoothing, mixed: run.augmentation.mixes() };
        let model = run.network.build(batch, loss, <T as Real>::DTYPE)?;
        finishing.map_or(Ok(model.clone()), |finishing| finishing.begin(model, batch))
    };
    // Ranks may have different numbers of images, also later on: all decide by the same.
    let zero = match settings.stage() {
        Zero::Stage2 => stage_taken(&model(run.batch)?, &settings)?,
        stage => stage,
    };
    Ok(compile_observed(model(batch)?, &Settings { zero, ..settings }, observe)?)
}

/// As [`program_with`], for evaluation alone.
pub fn evaluation_program<T: Real>(
    run: &Resolved,
    batch: usize,
    finishing: Option<&Finishing>,
) -> Result<Program, DeviceError> {
    let mut model = run.network.build(batch, Loss::default(), <T as Real>::DTYPE)?;
    if let Some(finishing) = finishing {
        model = finishing.begin(model, batch)?;
    }
    Ok(inference(model, run.mixed(), &*target(run))?)
}
