//! The plans of a run.

use crate::config::{LossScale, Residual, Resolved};
use crate::device::{gathers, linger, scratch_of};
use crate::error::TrainError;
use crate::finishing::Finishing;
use crate::real::Real;
use graph::{DType, DynamicScale, Loss, LossScaling, Mixed, Program, Settings, compile, inference};

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
    let settings = Settings {
        optimizer: run.optimizer,
        max_grad_norm: run.clip,
        recompute: run.recompute,
        group: &|state| run.group(&state.name),
        ema: run.ema,
        mixed: mixed(run),
        loss_scale: loss_scale(run),
        exchange: run.exchange(),
        accumulates: run.accumulate > 1,
        gathers: gathers(run),
        linger: linger(run),
        scratch: &scratch_of(run),
    };
    let loss = Loss { smoothing: run.label_smoothing, mixed: run.augmentation.mixes() };
    let mut model = run.network.build(batch, loss, <T as Real>::DTYPE)?;
    if let Some(finishing) = finishing {
        model = finishing.begin(model, batch)?;
    }
    Ok(compile(model, &settings)?)
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
    Ok(inference(model, mixed(run), &scratch_of(run))?)
}
