//! Why a program can't be bound to a GPU, or run there.

#[derive(Debug, thiserror::Error)]
pub enum CudaError {
    #[error("{layer}: the CUDA executor has no kernel for {op}{}", of_types(.types))]
    NoKernel { layer: String, op: String, types: String },
}

fn of_types(types: &str) -> String {
    if types.is_empty() { String::new() } else { format!(" of {types}") }
}
