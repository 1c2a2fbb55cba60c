//! Tuning of convolutions: choice of one of cuDNN's proposals.

use super::{Bench, Tuner, fastest};
use crate::action::{Address, Convolution};
use crate::convolution::{self, describe};
use crate::cudnn::{Cudnn, CudnnPlan, Proposals};
use crate::error::CudaError;
use crate::matmul::MathLibraries;
use std::sync::Arc;
use std::time::Instant;

/// Most proposals measured, and number of slower ones in a row after which no more are tried.
const MOST: usize = 12;
const PATIENCE: usize = 5;

impl Tuner {
    /// Tells whether proposals have to be measured before one can be chosen.
    pub fn must_measure_convolution(&self, conv: &Convolution, libraries: &MathLibraries) -> bool {
        let Ok(cudnn) = libraries.cudnn() else { return false };
        let key = key(conv, cudnn);
        let is_known = self.convolutions.contains_key(&key) || self.known.entries.contains_key(&key);
        !self.known.deterministic && !is_known
    }

    /// Chooses the plan of a convolution. It is run at least once, so that its kernel is loaded before anything is captured; the
    /// result goes to the scratch memory.
    pub fn convolution(
        &mut self,
        conv: &Convolution,
        bench: &Bench<'_>,
    ) -> Result<Arc<CudnnPlan>, CudaError> {
        let cudnn = bench.libraries.cudnn()?;
        let key = key(conv, cudnn);
        if let Some(algorithm) = self.convolutions.get(&key) {
            return Ok(Arc::clone(algorithm));
        }
        let (trial, proposals) = (trial(conv, bench), convolution::proposals(cudnn, conv)?);
        let deterministic = self.known.deterministic;
        let kept = self.known.entries.get(&key).and_then(|text| usable(text, cudnn, conv, &proposals));
        let algorithm = match kept.filter(|algorithm| start(cudnn, &trial, algorithm, bench).is_ok()) {
            Some(algorithm) => algorithm,
            None if deterministic => first(cudnn, &trial, &proposals, bench)?,
            None => self.measure_convolution(&trial, cudnn, &proposals, bench)?,
        };
        if !deterministic {
            let text = entry(&algorithm);
            self.known.changed |= self.known.entries.insert(key.clone(), text.clone()) != Some(text);
        }
        self.tally.matmuls += 1;
        let algorithm = Arc::new(algorithm);
        self.convolutions.insert(key, Arc::clone(&algorithm));
        Ok(algorithm)
    }

    fn measure_convolution(
        &mut self,
        trial: &Convolution,
        cudnn: &Cudnn,
        proposals: &Proposals,
        bench: &Bench<'_>,
    ) -> Result<CudnnPlan, CudaError> {
        let start = |algorithm: &CudnnPlan| start(cudnn, trial, algorithm, bench);
        let mut ways: Vec<(f64, CudnnPlan)> = Vec::new();
        let mut best = (f64::INFINITY, 0);
        let mut refused: Vec<CudaError> = Vec::new();
        for place in 0..proposals.len() {
            if ways.len() >= MOST || (!ways.is_empty() && place > best.1 + PATIENCE) {
                break;
            }
            let began = Instant::now();
            let ready = convolution::algorithm(cudnn, trial, proposals, place);
            let ready = ready.and_then(|algorithm| start(&algorithm).map(|()| algorithm));
            self.tally.loading += began.elapsed().as_secs_f64();
            self.tally.tried += 1;
            let algorithm = match ready {
                Ok(algorithm) => algorithm,
                Err(error) => {
                    refused.push(error);
                    continue;
                }
            };
            let began = Instant::now();
            let seconds = self.timed(bench, 1, || start(&algorithm), || describe(trial))?;
            self.tally.timing += began.elapsed().as_secs_f64();
            if seconds < best.0 {
                best = (seconds, place);
            }
            ways.push((seconds, algorithm));
        }
        let seconds = ways.iter().map(|way| way.0).collect();
        let winner = fastest(seconds, |i| self.timed(bench, 1, || start(&ways[i].1), || describe(trial)))?;
        self.tally.measured += 1;
        winner.map(|i| ways.swap_remove(i).1).ok_or_else(|| nothing(trial, &refused))
    }
}

fn start(
    cudnn: &Cudnn,
    trial: &Convolution,
    algorithm: &CudnnPlan,
    bench: &Bench<'_>,
) -> Result<(), CudaError> {
    convolution::run(cudnn, trial, algorithm, bench.stream, bench.workspace.address)
}

/// First proposal that is allowed and runs.
fn first(
    cudnn: &Cudnn,
    trial: &Convolution,
    proposals: &Proposals,
    bench: &Bench<'_>,
) -> Result<CudnnPlan, CudaError> {
    let mut refused = Vec::new();
    for place in 0..proposals.len() {
        let ready = convolution::algorithm(cudnn, trial, proposals, place);
        match ready.and_then(|algorithm| start(cudnn, trial, &algorithm, bench).map(|()| algorithm)) {
            Ok(algorithm) => return Ok(algorithm),
            Err(error) => refused.push(error),
        }
    }
    Err(nothing(trial, &refused))
}

fn nothing(conv: &Convolution, refused: &[CudaError]) -> CudaError {
    let doing = format!("looking for an algorithm for {}", describe(conv));
    let why = refused.first().map_or(String::new(), |error| format!("; the first: {error}"));
    CudaError::Cudnn { doing, status: format!("none of {} proposals can be taken{why}", refused.len()) }
}

/// Cache entry of a plan: its index among the proposals, which are the same for one version on one kind of GPU,
/// and the engine that must be found there.
pub(super) fn entry(algorithm: &CudnnPlan) -> String {
    format!("cudnn {} engine {}", algorithm.place, algorithm.engine)
}

/// Index in a cache entry.
pub(super) fn place(text: &str) -> Option<usize> {
    text.strip_prefix("cudnn ")?.split(' ').next()?.parse().ok()
}

fn usable(text: &str, cudnn: &Cudnn, conv: &Convolution, proposals: &Proposals) -> Option<CudnnPlan> {
    let place = place(text)?;
    convolution::algorithm(cudnn, conv, proposals, place).ok().filter(|algorithm| entry(algorithm) == text)
}

/// The convolution with its result in scratch memory.
fn trial(conv: &Convolution, bench: &Bench<'_>) -> Convolution {
    let scratch = bench.scratch;
    let range = scratch.address..scratch.address + scratch.bytes as Address;
    let (address, bytes) = conv.result();
    if range.contains(&address) || bytes > scratch.bytes {
        *conv
    } else {
        conv.with_result_at(scratch.address)
    }
}

/// Key of a convolution in the cache: everything that a plan depends on.
fn key(conv: &Convolution, cudnn: &Cudnn) -> String {
    let y = conv.y.axes.map(|n| n.to_string()).join("×");
    let tf32 = if conv.tf32 { " tf32" } else { "" };
    format!("{} → {y}{tf32}, cuDNN {}", describe(conv), cudnn.version)
}
