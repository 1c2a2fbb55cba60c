use crate::action::{Action, Address, Constants, Context, Kernel};
use crate::error::CudaError;
use graph::{DType, Op, Type};

pub fn actions(cx: &Context<'_>) -> Result<Vec<Action>, CudaError> {
    Err(cx.no_kernel())
}

pub fn scratch(_op: &Op, _inputs: &[&Type], _outputs: &[&Type]) -> usize {
    0
}

// Temporary stubs: the real ones come with the kernels.

pub fn optimizers(steps: &[Context<'_>], _constants: &mut Constants) -> Result<Vec<Action>, CudaError> {
    steps.first().map_or(Ok(Vec::new()), |cx| Err(cx.no_kernel()))
}

pub fn norm_clip_advance(
    norm: &Context<'_>,
    clip: &Context<'_>,
    advance: &Context<'_>,
) -> Result<Vec<Action>, CudaError> {
    Ok([actions(norm)?, actions(clip)?, actions(advance)?].concat())
}

pub fn refresh_copies(
    _pairs: &[(Address, Address, usize)],
    _dtype: DType,
    _constants: &mut Constants,
) -> Vec<Action> {
    Vec::new()
}

pub fn kernels() -> Vec<(Kernel, u32)> {
    Vec::new()
}
