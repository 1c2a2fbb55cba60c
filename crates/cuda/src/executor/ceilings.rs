//! The GPU's measured peak rates, with which those of kernels and matmuls are compared.

use super::list::ReadyWork;
use super::prepare::fill_with_noise;
use super::{Executor, Which};
use crate::action::{Address, Epilogue, Matmul, Matrix};
use crate::driver::{Block, Event};
use crate::error::CudaError;
use crate::matmul::{CANDIDATES, WORKSPACE, sizes};
use graph::{Ceilings, DType};

/// Size of the square matrices: large enough for any GPU's full rate.
const SIDE: usize = 8192;

/// Runs of each candidate, and seconds for which the best is sustained, as a GPU that computes for long has less power to
/// spend than in its first milliseconds.
const TRIED: usize = 3;
const HELD: f64 = 0.5;

impl Executor {
    /// Peak rates of cuBLASLt's matmuls in the type of this program's largest, on random numbers, and of copying memory.
    /// Called between steps, as it overwrites activations.
    pub fn ceilings(&mut self) -> Result<Ceilings, CudaError> {
        self.synchronise()?;
        let (dtype, tf32) = self.main_type()?;
        let matrix = SIDE * SIDE * dtype.bytes();
        let own = (self.plans.arena.bytes < 3 * matrix)
            .then(|| Block::new(&self.context, 3 * matrix, "measuring the GPU's ceilings"))
            .transpose()?;
        let room = own.as_ref().unwrap_or(&self.plans.arena);
        let workspace = Block::new(&self.context, WORKSPACE, "measuring the GPU's ceilings")?;
        fill_with_noise(room, &self.streams)?;
        let at = |i: usize| Matrix::new(room.address + (i * matrix) as Address, dtype, SIDE, SIDE);
        let matmul = Matmul {
            left: at(0),
            left_transposed: false,
            right: at(1),
            right_transposed: true,
            result: at(2),
            accumulate: false,
            epilogue: Epilogue::None,
            tf32,
        };
        let stream = self.streams.compute();
        let mut best: Option<(f64, _)> = None;
        for algorithm in self.libraries.candidates(&matmul, CANDIDATES)? {
            let run = || self.libraries.run_in(&matmul, &algorithm, stream, &workspace);
            let seconds = run().and_then(|()| self.seconds(TRIED, run));
            match seconds {
                Ok(seconds) if best.is_none_or(|(least, _)| seconds < least) => {
                    best = Some((seconds, algorithm))
                }
                Err(lost @ CudaError::Lost { .. }) => return Err(lost),
                _ => {}
            }
        }
        let none = || CudaError::Misuse(format!("cuBLASLt has no way to multiply matrices of {dtype}"));
        let (seconds, algorithm) = best.ok_or_else(none)?;
        let times = (HELD / seconds).ceil() as usize;
        let held = self.seconds(times, || self.libraries.run_in(&matmul, &algorithm, stream, &workspace))?;
        let copied = 3 * matrix / 2;
        let copy = || stream.copy(room.address, room.address + copied as Address, copied);
        copy()?;
        let copying = self.seconds((HELD * 1e12 / copied as f64) as usize, copy)?;
        Ok(Ceilings { flops: 2.0 * (SIDE as f64).powi(3) / held, bytes: 2.0 * copied as f64 / copying })
    }

    /// Seconds of one of several runs.
    fn seconds(&self, times: usize, run: impl Fn() -> Result<(), CudaError>) -> Result<f64, CudaError> {
        let (start, end) = (Event::timed(&self.context)?, Event::timed(&self.context)?);
        start.record(self.streams.compute())?;
        (0..times).try_for_each(|_| run())?;
        end.record(self.streams.compute())?;
        end.synchronise(|| "measuring the GPU's ceilings".into())?;
        Ok(end.seconds_since(&start)? / times as f64)
    }

    /// Operand type of the largest matmul, and whether it may be rounded to tf32.
    fn main_type(&mut self) -> Result<(DType, bool), CudaError> {
        let list = self.plans.list(Which::Last)?;
        let matmul = |work: &ReadyWork| match work {
            ReadyWork::Matmul(matmul, _) => Some(*matmul),
            _ => None,
        };
        let operations = |matmul: &Matmul| {
            let (m, n, k) = sizes(matmul);
            m * n * k
        };
        let largest = list.actions.iter().filter_map(|action| matmul(&action.work)).max_by_key(operations);
        Ok(largest.map_or((DType::F32, self.options.tf32), |matmul| (matmul.left.dtype, matmul.tf32)))
    }
}
