//! Tuning: chooses one of cuBLASLt's algorithms or our kernel for each matmul, by measuring, and keeps the choice on disk.

mod attention;
mod convolutions;
#[cfg(test)]
mod tests;

use crate::action::{Address, Epilogue, Facts, HEADERS, Kernel, Launch, Matmul, Matrix, Source};
use crate::cache::{self, Hash};
use crate::cudnn;
use crate::driver::{Block, Context, Event, Stream};
use crate::error::CudaError;
use crate::launch::Ready;
use crate::matmul::{CANDIDATES, CublasAlgorithm, MathLibraries, MatmulImpl, alignment, describe};
use crate::modules::Modules;
use crate::steps::hopper::{self, Tiling};
use graph::run::MatmulTuning;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Instant;

pub use attention::{AttentionBy, AttentionImpl};

/// Number of candidates that are measured more than once, and how often at most.
const FINALISTS: usize = 4;
const ROUNDS: usize = 4;

/// Factor over the fastest time from which on a candidate is dropped.
const HOPELESS: f64 = 1.25;

/// cuBLASLt's proposals come in the order in which it expects them to be fast. After so many that were no faster than one before
/// them, no more are tried: each costs the loading of its kernel.
const PATIENCE: usize = 8;

/// Bytes of a matmul that may stay in the cache from the kernel before.
const SMALL: usize = 24 << 20;

/// Bytes that are copied before each measurement: more than any GPU's cache holds.
const DISTRACTION: usize = 96 << 20;

/// Algorithms chosen for matmuls, convolutions and attention on one kind of GPU, with one version of cuBLASLt and of our kernels.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AlgorithmChoices {
    /// The GPU's name.
    pub gpu: String,
    /// Identifier of GPU, cuBLASLt and kernels: choices of another one don't apply.
    pub of: String,
    /// Map from a matmul, convolution or attention to its algorithm. Files name it `products`.
    #[serde(rename = "matmuls")]
    pub algorithms: BTreeMap<String, String>,
}

/// Algorithms known before anything is measured.
pub struct KnownAlgorithms {
    deterministic: bool,
    /// Implementation of attention, if it is not to be measured.
    pub attention_by: Option<AttentionBy>,
    facts: Facts,
    /// Cache on disk: map from a matmul's [`key`] to its [`entry`].
    entries: BTreeMap<String, String>,
    file: String,
    changed: bool,
}

impl KnownAlgorithms {
    /// Reads the cache. Without measuring, cuBLASLt's first proposal is used, and nothing is read.
    pub fn read(facts: &Facts, deterministic: bool) -> Self {
        let version = MathLibraries::version();
        // Of other kernels than these it is not known how fast they are, nor which of them would have been tried.
        let hash = Hash::new().add(facts.name.as_bytes()).add(&version.to_le_bytes());
        let texts = HEADERS.iter().map(|(_, text)| text.to_string()).chain([Source::Matmul.text().into()]);
        let ours = texts.chain(hopper::kernels().into_iter().map(|(kernel, _)| kernel.name));
        let hash = ours.fold(hash, |hash, text| hash.add(text.as_bytes()));
        let file = format!("products-{}.json", hash.text());
        let kept = || cache::read(&file).and_then(|bytes| serde_json::from_slice(&bytes).ok());
        let entries = if deterministic { None } else { kept() }.unwrap_or_default();
        let attention_by = None;
        KnownAlgorithms { deterministic, attention_by, facts: facts.clone(), entries, file, changed: false }
    }

    fn find(&self, matmul: &Matmul) -> Option<CacheEntry> {
        self.entries.get(&key(matmul)).and_then(|text| kept(text, matmul, &self.facts))
    }

    /// Our kernels that may be chosen for a matmul: all that could be, or what is known to be the fastest.
    pub fn kernels(&self, matmul: &Matmul) -> Vec<Kernel> {
        let cuts = match self.find(matmul) {
            _ if self.deterministic => Vec::new(),
            Some(CacheEntry::Own(cut)) => vec![cut],
            Some(CacheEntry::Library(_)) => Vec::new(),
            None => hopper::candidates(matmul, &self.facts),
        };
        cuts.into_iter().filter_map(|cut| Some(hopper::plain(matmul, cut, &self.facts)?.kernel)).collect()
    }

    /// Adopts recorded choices; returns whether they apply here.
    pub fn adopt(&mut self, choices: &AlgorithmChoices) -> bool {
        let ours = !self.deterministic && choices.of == self.file;
        if ours {
            self.entries.extend(choices.algorithms.clone());
        }
        ours
    }
}

pub struct Tuner {
    pub known: KnownAlgorithms,
    chosen: HashMap<String, MatmulImpl>,
    /// Matmuls for which cuBLASLt's algorithms were tried already.
    tried: HashMap<String, Vec<Candidate>>,
    convolutions: HashMap<String, Arc<cudnn::CudnnPlan>>,
    attentions: HashMap<String, AttentionImpl>,
    pub tally: MatmulTuning,
    start: Event,
    end: Event,
}

/// Candidate for a matmul, its index among cuBLASLt's proposals, and its shortest time so far.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Candidate {
    choice: MatmulImpl,
    place: Option<usize>,
    seconds: f64,
}

impl Tuner {
    pub fn new(context: &Arc<Context>, known: KnownAlgorithms) -> Result<Self, CudaError> {
        let (start, end) = (Event::timed(context)?, Event::timed(context)?);
        let (chosen, tried) = (HashMap::new(), HashMap::new());
        let (convolutions, attentions) = (HashMap::new(), HashMap::new());
        let tally = MatmulTuning::default();
        Ok(Tuner { known, chosen, tried, convolutions, attentions, tally, start, end })
    }

    /// Launch of our kernel for a matmul.
    pub fn launch(&self, matmul: &Matmul, cut: Tiling) -> Result<Launch, CudaError> {
        let none = || CudaError::Misuse(format!("no kernel of ours for {}", describe(matmul)));
        hopper::plain(matmul, cut, &self.known.facts).ok_or_else(none)
    }

    /// Tells whether a matmul has to be measured before an algorithm can be chosen.
    pub fn must_measure(&self, matmul: &Matmul, libraries: &MathLibraries) -> bool {
        let is_chosen = || self.chosen.contains_key(&key(matmul));
        !self.known.deterministic && !is_chosen() && self.usable(matmul, libraries).is_none()
    }

    /// Known algorithm of a matmul, if it still applies.
    fn usable(&self, matmul: &Matmul, libraries: &MathLibraries) -> Option<MatmulImpl> {
        match self.known.find(matmul)? {
            CacheEntry::Own(cut) => Some(MatmulImpl::Own(cut)),
            CacheEntry::Library(data) => libraries.accept(matmul, data).map(MatmulImpl::Library),
        }
    }

    /// Tries cuBLASLt's algorithms for a matmul that must be measured. That needs none of our kernels, so it can run while they
    /// are still being compiled.
    pub fn try_library(&mut self, matmul: &Matmul, bench: &mut Bench<'_>) -> Result<(), CudaError> {
        if self.must_measure(matmul, bench.libraries) && !self.tried.contains_key(&key(matmul)) {
            let ways = self.library_ways(matmul, bench)?;
            self.tried.insert(key(matmul), ways);
        }
        Ok(())
    }

    /// Chooses the implementation of a matmul. It is run at least once, so that its kernel is loaded before anything is captured; what is
    /// computed goes to the start of the scratch memory unless the result already lies there.
    pub fn choose(&mut self, matmul: &Matmul, bench: &mut Bench<'_>) -> Result<MatmulImpl, CudaError> {
        let key = key(matmul);
        if let Some(choice) = self.chosen.get(&key) {
            return Ok(*choice);
        }
        let deterministic = self.known.deterministic;
        let usable = if deterministic { None } else { self.usable(matmul, bench.libraries) };
        let choice = match usable {
            Some(choice) => choice,
            None if deterministic => {
                let found = bench.libraries.candidates(matmul, 1)?;
                MatmulImpl::Library(found.into_iter().next().ok_or_else(|| nothing(matmul))?)
            }
            None => self.measure(matmul, bench)?,
        };
        self.trial(matmul, choice, bench)?.start(bench)?;
        if !deterministic {
            let text = entry(&choice);
            self.known.changed |= self.known.entries.insert(key.clone(), text.clone()) != Some(text);
        }
        self.tally.matmuls += 1;
        self.chosen.insert(key, choice);
        Ok(choice)
    }

    /// Choices so far.
    pub fn choices(&self) -> AlgorithmChoices {
        let KnownAlgorithms { entries, file, facts, .. } = &self.known;
        let is_chosen = |key: &String| {
            let Tuner { chosen, convolutions, attentions, .. } = self;
            chosen.contains_key(key) || convolutions.contains_key(key) || attentions.contains_key(key)
        };
        let chosen = entries.iter().filter(|(key, _)| is_chosen(key));
        let algorithms = chosen.map(|(key, text)| (key.clone(), text.clone())).collect();
        AlgorithmChoices { gpu: facts.name.clone(), of: file.clone(), algorithms }
    }

    /// Writes measured choices to disk.
    pub fn save(&mut self) {
        if std::mem::take(&mut self.known.changed) && !self.known.deterministic {
            let bytes = serde_json::to_vec_pretty(&self.known.entries).unwrap_or_default();
            cache::write(&self.known.file, &bytes);
        }
    }

    fn measure(&mut self, matmul: &Matmul, bench: &mut Bench<'_>) -> Result<MatmulImpl, CudaError> {
        let mut ways = match self.tried.remove(&key(matmul)) {
            Some(ways) => ways,
            None => self.library_ways(matmul, bench)?,
        };
        for cut in hopper::candidates(matmul, &self.known.facts) {
            ways.extend(self.try_way(matmul, MatmulImpl::Own(cut), None, bench)?);
        }
        let trials: Vec<Trial> =
            ways.iter().map(|way| self.trial(matmul, way.choice, bench)).collect::<Result<_, _>>()?;
        let began = Instant::now();
        let first = ways.iter().map(|way| way.seconds).collect();
        let fastest = fastest(first, |i| self.time(matmul, &trials[i], bench))?;
        self.tally.timing += began.elapsed().as_secs_f64();
        self.tally.measured += 1;
        let winner = fastest.map(|i| ways[i]).ok_or_else(|| nothing(matmul))?;
        self.tally.furthest = self.tally.furthest.max(winner.place.unwrap_or(0));
        Ok(winner.choice)
    }

    /// cuBLASLt's algorithms, each timed once, until they stop getting faster.
    fn library_ways(&mut self, matmul: &Matmul, bench: &mut Bench<'_>) -> Result<Vec<Candidate>, CudaError> {
        let mut ways: Vec<Candidate> = Vec::new();
        let mut best = (f64::INFINITY, 0);
        for (place, algorithm) in bench.libraries.candidates(matmul, CANDIDATES)?.into_iter().enumerate() {
            if place > best.1 + PATIENCE {
                break;
            }
            let way = self.try_way(matmul, MatmulImpl::Library(algorithm), Some(place), bench)?;
            if let Some(way) = way.filter(|way| way.seconds < best.0) {
                best = (way.seconds, place);
            }
            ways.extend(way);
        }
        Ok(ways)
    }

    /// The first run loads the kernel; one that can't run is no candidate. The second is timed.
    fn try_way(
        &mut self,
        matmul: &Matmul,
        choice: MatmulImpl,
        place: Option<usize>,
        bench: &mut Bench<'_>,
    ) -> Result<Option<Candidate>, CudaError> {
        let began = Instant::now();
        let trial = self.trial(matmul, choice, bench);
        let started = trial.and_then(|trial| trial.start(bench).map(|()| trial));
        self.tally.loading += began.elapsed().as_secs_f64();
        self.tally.tried += 1;
        let trial = match started {
            Ok(trial) => trial,
            Err(lost @ CudaError::Lost { .. }) => return Err(lost),
            Err(_) => return Ok(None),
        };
        let began = Instant::now();
        let mut seconds = self.time(matmul, &trial, bench)?;
        if repeats(matmul) > 1 {
            // Of small ones a moment in which the host was elsewhere is a large part.
            seconds = seconds.min(self.time(matmul, &trial, bench)?);
        }
        self.tally.timing += began.elapsed().as_secs_f64();
        Ok(Some(Candidate { choice, place, seconds }))
    }

    fn trial(&self, matmul: &Matmul, choice: MatmulImpl, bench: &mut Bench<'_>) -> Result<Trial, CudaError> {
        let matmul = trial(matmul, bench.scratch);
        Ok(match choice {
            MatmulImpl::Library(algorithm) => Trial::Library(matmul, algorithm),
            MatmulImpl::Own(cut) => Trial::Own(Ready::new(&self.launch(&matmul, cut)?, bench.modules)?),
        })
    }

    /// Seconds of one run, after something that fills the cache with other things and keeps the GPU busy until the run is
    /// queued.
    fn time(&self, matmul: &Matmul, trial: &Trial, bench: &Bench<'_>) -> Result<f64, CudaError> {
        self.timed(bench, repeats(matmul), || trial.start(bench), || describe(matmul))
    }

    fn timed(
        &self,
        bench: &Bench<'_>,
        repeats: usize,
        start: impl Fn() -> Result<(), CudaError>,
        what: impl FnOnce() -> String,
    ) -> Result<f64, CudaError> {
        bench.distract()?;
        self.start.record(bench.stream)?;
        (0..repeats).try_for_each(|_| start())?;
        self.end.record(bench.stream)?;
        self.end.synchronise(|| format!("measuring {}", what()))?;
        Ok(self.end.seconds_since(&self.start)? / repeats as f64)
    }
}

/// Number of timed runs of a matmul. What small ones read is in the cache when they run, as it was written just before; and
/// one run of them is hardly longer than an event.
fn repeats(matmul: &Matmul) -> usize {
    let bytes = |m: &Matrix| m.rows * m.columns * m.dtype.bytes();
    let Matmul { left, right, result, .. } = matmul;
    if bytes(left) + bytes(right) + bytes(result) < SMALL { 8 } else { 1 }
}

/// Memory, kernels and stream for trial runs.
pub struct Bench<'a> {
    pub libraries: &'a MathLibraries,
    /// Modules with the kernels that [`KnownAlgorithms::kernels`] named.
    pub modules: &'a mut Modules,
    pub stream: &'a Stream,
    /// Scratch memory.
    pub scratch: &'a Block,
    /// Workspace of [`WORKSPACE`](crate::matmul::WORKSPACE) bytes.
    pub workspace: &'a Block,
}

impl Bench<'_> {
    fn distract(&self) -> Result<(), CudaError> {
        let bytes = DISTRACTION.min(self.scratch.bytes / 2);
        let from = self.scratch.address + (self.scratch.bytes - bytes) as Address;
        self.stream.copy(from, self.scratch.address, bytes)
    }
}

/// Trial run of a matmul.
enum Trial {
    Library(Matmul, CublasAlgorithm),
    Own(Ready),
}

impl Trial {
    fn start(&self, bench: &Bench<'_>) -> Result<(), CudaError> {
        match self {
            Trial::Library(matmul, algorithm) => {
                bench.libraries.run_in(matmul, algorithm, bench.stream, bench.workspace)
            }
            Trial::Own(ready) => ready.start(bench.stream, || "trying a matmul".into()),
        }
    }
}

/// Finds the fastest of several by successive halving: what was timed once is sorted, the better half is timed again,
/// and so on until one is left or nothing new is to be learned. The shortest time of each counts, as other load on the
/// machine can only make it longer.
fn fastest(
    first: Vec<f64>,
    mut time: impl FnMut(usize) -> Result<f64, CudaError>,
) -> Result<Option<usize>, CudaError> {
    let mut left: Vec<(f64, usize)> =
        first.into_iter().enumerate().map(|(i, seconds)| (seconds, i)).collect();
    for round in 0..=ROUNDS {
        left.sort_by(|a, b| a.0.total_cmp(&b.0));
        let Some(best) = left.first().map(|(seconds, _)| *seconds) else { return Ok(None) };
        let most = if round == 0 { FINALISTS } else { left.len().div_ceil(2).max(2) };
        left.truncate(most);
        left.retain(|(seconds, _)| *seconds <= best * HOPELESS);
        if left.len() == 1 || round == ROUNDS {
            break;
        }
        for (seconds, i) in &mut left {
            *seconds = seconds.min(time(*i)?);
        }
    }
    Ok(left.first().map(|(_, i)| *i))
}

fn nothing(matmul: &Matmul) -> CudaError {
    let doing = format!("looking for an algorithm for {}", describe(matmul));
    CudaError::Matmul { doing, status: "none fits the workspace".into() }
}

/// The matmul with its result in scratch memory.
fn trial(matmul: &Matmul, scratch: &Block) -> Matmul {
    let range = scratch.address..scratch.address + scratch.bytes as Address;
    let bytes = matmul.result.rows * matmul.result.stride * matmul.result.dtype.bytes();
    let mut trial = *matmul;
    if !range.contains(&matmul.result.address) && bytes <= scratch.bytes {
        trial.result.address = scratch.address;
    }
    trial
}

/// Key of a matmul in the cache: everything that an algorithm may depend on.
fn key(matmul: &Matmul) -> String {
    let side = |m: &Matrix, transposed: bool| {
        let turned = if transposed { "t" } else { "n" };
        format!("{}x{}/{} {}{turned}@{}", m.rows, m.columns, m.stride, m.dtype, alignment(m.address))
    };
    let Matmul { left, right, result, .. } = matmul;
    let (left, right) = (side(left, matmul.left_transposed), side(right, matmul.right_transposed));
    let bias = match matmul.epilogue {
        Epilogue::None => "",
        Epilogue::Bias(_) => " bias",
    };
    let adds = if matmul.accumulate { " adds" } else { "" };
    let tf32 = if matmul.tf32 { " tf32" } else { "" };
    format!("{left} {right} {}{bias}{adds}{tf32}", side(result, false))
}

/// Choice as read from disk.
#[derive(Clone, Copy, Debug, PartialEq)]
enum CacheEntry {
    Library([u64; 8]),
    Own(Tiling),
}

/// Cache entry of a choice: an algorithm's words, or `own` and the tiling.
fn entry(choice: &MatmulImpl) -> String {
    match choice {
        MatmulImpl::Library(algorithm) => words(&algorithm.algo.data),
        MatmulImpl::Own(cut) => format!("own {}", cut.text()),
    }
}

/// Parses a cache entry; `None` if it is invalid, or no longer applies to this matmul.
fn kept(text: &str, matmul: &Matmul, facts: &Facts) -> Option<CacheEntry> {
    match text.strip_prefix("own ") {
        Some(text) => {
            hopper::candidates(matmul, facts).into_iter().find(|cut| cut.text() == text).map(CacheEntry::Own)
        }
        None => parse(text).map(CacheEntry::Library),
    }
}

fn words(data: &[u64; 8]) -> String {
    data.iter().map(|word| format!("{word:016x}")).collect()
}

fn parse(text: &str) -> Option<[u64; 8]> {
    let mut data = [0; 8];
    if text.len() != 128 || !text.is_ascii() {
        return None;
    }
    for (i, word) in data.iter_mut().enumerate() {
        *word = u64::from_str_radix(&text[16 * i..16 * i + 16], 16).ok()?;
    }
    Some(data)
}
