//! Tuning of attention: our kernels, or one of cuDNN's proposals where the library is installed.

use super::convolutions::{entry, place};
use super::{Bench, KnownAlgorithms, SMALL, Tuner, fastest};
use crate::action::{Address, Attention, AttentionForward, Launch};
use crate::attention::{self, describe};
use crate::cache::Hash;
use crate::cudnn::{Cudnn, CudnnPlan, Proposals};
use crate::driver::Graph;
use crate::error::CudaError;
use crate::launch::Ready;
use crate::libraries;
use crate::modules::Modules;
use std::sync::Arc;
use std::time::Instant;

/// Most proposals measured: each is compiled first.
const MOST: usize = 2;

/// Cache entry of attention by our kernels.
const OWN: &str = "own";

/// Implementation of attention, set without measuring: our kernels, or a proposal of cuDNN's by its index. One that can't be
/// taken is an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionBy {
    pub forward: Option<usize>,
    pub backward: Option<usize>,
}

impl AttentionBy {
    pub const OWN: Self = AttentionBy { forward: None, backward: None };
    pub const CUDNN: Self = AttentionBy { forward: Some(0), backward: Some(0) };

    fn place(&self, attention: &Attention) -> Option<usize> {
        if attention.attended.gradient.is_some() { self.backward } else { self.forward }
    }
}

/// Implementation of attention.
#[derive(Clone)]
pub enum AttentionImpl {
    Own,
    Library(Arc<CudnnPlan>),
}

/// Launches of our kernels, or those after cuDNN's.
struct OwnKernels {
    own: Vec<Ready>,
    after: Option<Ready>,
}

impl OwnKernels {
    fn new(attention: &Attention, modules: &mut Modules) -> Result<Self, CudaError> {
        let mut ready = |launch: &Launch| Ready::new(launch, modules);
        let own = attention.own.iter().map(&mut ready).collect::<Result<_, _>>()?;
        Ok(OwnKernels { own, after: attention.after.as_ref().map(ready).transpose()? })
    }
}

impl KnownAlgorithms {
    /// Cache entry of attention, if there is one.
    pub(super) fn attention(&self, key: &str) -> Option<&str> {
        self.entries.get(key).map(String::as_str).filter(|text| *text == OWN || place(text).is_some())
    }

    fn may_measure(&self) -> bool {
        !self.deterministic && self.attention_by.is_none()
    }
}

impl Tuner {
    /// Tells whether candidates have to be measured before one can be chosen.
    pub fn must_measure_attention(&self, attention: &Attention) -> bool {
        let Some(key) = self.known.may_measure().then(|| key(attention)).flatten() else { return false };
        !self.attentions.contains_key(&key) && self.known.attention(&key).is_none()
    }

    /// Tells whether one of cuDNN's proposals may be run when attention is chosen.
    pub fn may_try_library(&self, attention: &Attention) -> bool {
        match self.known.attention_by {
            Some(by) => by.place(attention).is_some(),
            None => {
                let known = |key: String| self.known.attention(&key) != Some(OWN);
                !self.known.deterministic && key(attention).is_some_and(known)
            }
        }
    }

    /// Chooses the implementation of attention. Its results go where they would in a run, which is the scratch memory.
    pub fn attention(
        &mut self,
        attention: &Attention,
        bench: &mut Bench<'_>,
    ) -> Result<AttentionImpl, CudaError> {
        match self.known.attention_by.map(|by| by.place(attention)) {
            Some(None) => return Ok(AttentionImpl::Own),
            Some(Some(place)) => return asked_for(&attention.attended, place, bench),
            None if self.known.deterministic || !is_within(attention, bench) => {
                return Ok(AttentionImpl::Own);
            }
            None => {}
        }
        let Some(key) = key(attention) else { return Ok(AttentionImpl::Own) };
        if let Some(attending) = self.attentions.get(&key) {
            return Ok(attending.clone());
        }
        let kept = match self.known.attention(&key) {
            Some(OWN) => Some(AttentionImpl::Own),
            Some(text) => usable(text, &attention.attended, bench),
            None => None,
        };
        let attending = match kept {
            Some(attending) => attending,
            None => self.measure_attention(attention, bench)?,
        };
        let text = match &attending {
            AttentionImpl::Own => OWN.to_string(),
            AttentionImpl::Library(algorithm) => entry(algorithm),
        };
        self.known.changed |= self.known.entries.insert(key.clone(), text.clone()) != Some(text);
        self.tally.matmuls += 1;
        self.attentions.insert(key, attending.clone());
        Ok(attending)
    }

    fn measure_attention(
        &mut self,
        attention: &Attention,
        bench: &mut Bench<'_>,
    ) -> Result<AttentionImpl, CudaError> {
        let attended = &attention.attended;
        let kernels = OwnKernels::new(attention, bench.modules)?;
        let mut ways = vec![AttentionImpl::Own];
        let found =
            bench.libraries.cudnn().and_then(|cudnn| Ok((cudnn, attention::proposals(cudnn, attended)?)));
        if let Some((cudnn, proposals)) = refused(found)? {
            for place in 0..proposals.len().min(MOST) {
                let began = Instant::now();
                let ready = ready(cudnn, attended, &proposals, place, bench);
                self.tally.loading += began.elapsed().as_secs_f64();
                self.tally.tried += 1;
                ways.extend(refused(ready)?.map(|algorithm| AttentionImpl::Library(Arc::new(algorithm))));
            }
        }
        let began = Instant::now();
        // As a graph, as it is run: the host takes longer for cuDNN's calls than for launches.
        let count = repeats(attended);
        let mut graphs: Vec<(Graph, AttentionImpl)> = Vec::new();
        for way in ways {
            let run = || (0..count).try_for_each(|_| start(attention, &way, &kernels, bench));
            let graph = bench.stream.capture(run, "trying attention");
            graphs.extend(refused(graph)?.map(|graph| (graph, way)));
        }
        let time = |i: usize| {
            let launch = || bench.stream.launch(&graphs[i].0, "trying attention");
            self.timed(bench, 1, launch, || describe(attended))
        };
        (0..graphs.len()).try_for_each(|i| time(i).map(drop))?;
        let first = (0..graphs.len()).map(&time).collect::<Result<_, _>>()?;
        let winner = fastest(first, &time)?;
        self.tally.timing += began.elapsed().as_secs_f64();
        self.tally.measured += 1;
        Ok(winner.map_or(AttentionImpl::Own, |i| graphs.swap_remove(i).1))
    }
}

/// Turns a library's refusal into `None`; a lost GPU is an error.
fn refused<T>(result: Result<T, CudaError>) -> Result<Option<T>, CudaError> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(lost @ CudaError::Lost { .. }) => Err(lost),
        Err(_) => Ok(None),
    }
}

/// A proposal that was run once.
fn ready(
    cudnn: &Cudnn,
    attended: &AttentionForward,
    proposals: &Proposals,
    place: usize,
    bench: &Bench<'_>,
) -> Result<CudnnPlan, CudaError> {
    let algorithm = attention::algorithm(cudnn, attended, proposals, place)?;
    attention::run(cudnn, attended, &algorithm, bench.stream, bench.workspace.address)?;
    bench.stream.synchronise(|| describe(attended))?;
    Ok(algorithm)
}

fn asked_for(
    attended: &AttentionForward,
    place: usize,
    bench: &Bench<'_>,
) -> Result<AttentionImpl, CudaError> {
    let cudnn = bench.libraries.cudnn()?;
    let proposals = attention::proposals(cudnn, attended)?;
    let algorithm = ready(cudnn, attended, &proposals, place, bench)?;
    Ok(AttentionImpl::Library(Arc::new(algorithm)))
}

fn usable(text: &str, attended: &AttentionForward, bench: &Bench<'_>) -> Option<AttentionImpl> {
    let (cudnn, place) = (bench.libraries.cudnn().ok()?, place(text)?);
    let proposals = attention::proposals(cudnn, attended).ok()?;
    let algorithm = ready(cudnn, attended, &proposals, place, bench).ok()?;
    (entry(&algorithm) == text).then(|| AttentionImpl::Library(Arc::new(algorithm)))
}

fn start(
    attention: &Attention,
    way: &AttentionImpl,
    kernels: &OwnKernels,
    bench: &Bench<'_>,
) -> Result<(), CudaError> {
    let launch =
        |ready: &Ready| ready.start(bench.stream, || format!("trying {}", describe(&attention.attended)));
    match way {
        AttentionImpl::Own => kernels.own.iter().try_for_each(launch),
        AttentionImpl::Library(algorithm) => {
            let (cudnn, workspace) = (bench.libraries.cudnn()?, bench.workspace.address);
            attention::run(cudnn, &attention.attended, algorithm, bench.stream, workspace)?;
            kernels.after.iter().try_for_each(launch)
        }
    }
}

/// Number of timed runs, as for small matmuls.
fn repeats(attended: &AttentionForward) -> usize {
    let AttentionForward { batch, tokens, heads, head, dtype, .. } = attended;
    if 4 * batch * tokens * heads * head * dtype.bytes() < SMALL { 8 } else { 1 }
}

/// Tells whether all results lie in scratch memory.
fn is_within(attention: &Attention, bench: &Bench<'_>) -> bool {
    let (start, end) = (bench.scratch.address, bench.scratch.address + bench.scratch.bytes as Address);
    attention.attended.results().iter().all(|range| start <= range.start && range.end <= end)
}

/// Key of a choice in the cache; `None` where cuDNN isn't installed.
fn key(attention: &Attention) -> Option<String> {
    libraries::cudnn().ok().map(|version| key_for(attention, version))
}

/// The text of our kernels is part of it: others may be faster or slower.
pub(super) fn key_for(attention: &Attention, version: usize) -> String {
    let after = if attention.after.is_some() { " with sums" } else { "" };
    let own = attention.own.iter().fold(Hash::new(), |hash, launch| {
        hash.add(launch.kernel.source.text().as_bytes()).add(launch.kernel.name.as_bytes())
    });
    let own: String = own.text().chars().take(8).collect();
    format!("{}{after}, ours {own}, cuDNN {version}", describe(&attention.attended))
}
