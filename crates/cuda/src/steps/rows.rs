use crate::action::{Action, Context};
use crate::error::CudaError;
use graph::{Op, Type};

pub fn actions(cx: &Context<'_>) -> Result<Vec<Action>, CudaError> {
    Err(cx.no_kernel())
}

pub fn scratch(_op: &Op, _inputs: &[&Type], _outputs: &[&Type]) -> usize {
    0
}
