//! Chooses how each product is made, by one of cuBLASLt's algorithms or by our kernel: measured on the spot, then kept on disk.

mod attention;
mod convolutions;
#[cfg(test)]
mod tests;

use crate::action::{Address, Epilogue, Facts, HEADERS, Kernel, Launch, Matrix, Product, Source};
use crate::cache::{self, Hash};
use crate::cudnn;
use crate::driver::{Block, Context, Event, Stream};
use crate::error::CudaError;
use crate::launch::Ready;
use crate::modules::Modules;
use crate::product::{Algorithm, CANDIDATES, Choice, Products, alignment, describe};
use crate::steps::hopper::{self, Cut};
use graph::run::Tally;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Instant;

pub use attention::{Attending, AttentionBy};

/// How many of the candidates are measured more than once, and how often at most.
const FINALISTS: usize = 4;
const ROUNDS: usize = 4;

/// What takes so much longer than the fastest is out of the running.
const HOPELESS: f64 = 1.25;

/// cuBLASLt's proposals come in the order in which it expects them to be fast. After so many that were no faster than one before
/// them, no more are tried: each costs the loading of its kernel.
const PATIENCE: usize = 8;

/// Bytes of a product that may stay in the cache from the kernel before.
const SMALL: usize = 24 << 20;

/// Bytes that are copied before each measurement: more than any GPU's cache holds.
const DISTRACTION: usize = 96 << 20;

/// How products, convolutions and attention are made on one kind of GPU, with one version of cuBLASLt and of our kernels.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Choices {
    /// The GPU's name.
    pub gpu: String,
    /// What stands for GPU, cuBLASLt and kernels: where another stands, choices are of no use.
    pub of: String,
    /// From a product to how it is made.
    pub products: BTreeMap<String, String>,
}

/// What is known of products before anything is measured.
pub struct Known {
    deterministic: bool,
    /// Who makes attention, if that is not to be measured.
    pub attention_by: Option<AttentionBy>,
    facts: Facts,
    /// What the disk has, or will have: from a product's [`key`] to its [`entry`].
    entries: BTreeMap<String, String>,
    file: String,
    changed: bool,
}

impl Known {
    /// Without measuring, cuBLASLt's first proposal is taken, and nothing needs to be known.
    pub fn read(facts: &Facts, deterministic: bool) -> Self {
        let version = Products::version();
        // Of other kernels than these it is not known how fast they are, nor which of them would have been tried.
        let hash = Hash::new().add(facts.name.as_bytes()).add(&version.to_le_bytes());
        let texts = HEADERS.iter().map(|(_, text)| text.to_string()).chain([Source::Product.text().into()]);
        let ours = texts.chain(hopper::kernels().into_iter().map(|(kernel, _)| kernel.name));
        let hash = ours.fold(hash, |hash, text| hash.add(text.as_bytes()));
        let file = format!("products-{}.json", hash.text());
        let kept = || cache::read(&file).and_then(|bytes| serde_json::from_slice(&bytes).ok());
        let entries = if deterministic { None } else { kept() }.unwrap_or_default();
        let attention_by = None;
        Known { deterministic, attention_by, facts: facts.clone(), entries, file, changed: false }
    }

    fn find(&self, product: &Product) -> Option<Kept> {
        self.entries.get(&key(product)).and_then(|text| kept(text, product, &self.facts))
    }

    /// Our kernels that may be chosen for a product: all that could be, or what is known to be the fastest.
    pub fn kernels(&self, product: &Product) -> Vec<Kernel> {
        let cuts = match self.find(product) {
            _ if self.deterministic => Vec::new(),
            Some(Kept::Own(cut)) => vec![cut],
            Some(Kept::Library(_)) => Vec::new(),
            None => hopper::candidates(product, &self.facts),
        };
        cuts.into_iter().filter_map(|cut| Some(hopper::plain(product, cut, &self.facts)?.kernel)).collect()
    }

    /// Takes over what was chosen elsewhere; whether that was of any use.
    pub fn adopt(&mut self, choices: &Choices) -> bool {
        let ours = !self.deterministic && choices.of == self.file;
        if ours {
            self.entries.extend(choices.products.clone());
        }
        ours
    }
}

pub struct Tuner {
    pub known: Known,
    chosen: HashMap<String, Choice>,
    /// Products of which cuBLASLt's ways were tried already.
    tried: HashMap<String, Vec<Way>>,
    convolutions: HashMap<String, Arc<cudnn::Algorithm>>,
    attentions: HashMap<String, Attending>,
    pub tally: Tally,
    start: Event,
    end: Event,
}

/// A way to make a product, its place among cuBLASLt's proposals, and the shortest time it took so far.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Way {
    choice: Choice,
    place: Option<usize>,
    seconds: f64,
}

impl Tuner {
    pub fn new(context: &Arc<Context>, known: Known) -> Result<Self, CudaError> {
        let (start, end) = (Event::timed(context)?, Event::timed(context)?);
        let (chosen, tried) = (HashMap::new(), HashMap::new());
        let (convolutions, attentions) = (HashMap::new(), HashMap::new());
        let tally = Tally::default();
        Ok(Tuner { known, chosen, tried, convolutions, attentions, tally, start, end })
    }

    /// A product by our kernel.
    pub fn launch(&self, product: &Product, cut: Cut) -> Result<Launch, CudaError> {
        let none = || CudaError::Misuse(format!("no kernel of ours for {}", describe(product)));
        hopper::plain(product, cut, &self.known.facts).ok_or_else(none)
    }

    /// Whether a product has to be measured before it can be chosen how to make it.
    pub fn must_measure(&self, product: &Product, products: &Products) -> bool {
        let is_chosen = || self.chosen.contains_key(&key(product));
        !self.known.deterministic && !is_chosen() && self.usable(product, products).is_none()
    }

    /// What is known of a product, if it still holds.
    fn usable(&self, product: &Product, products: &Products) -> Option<Choice> {
        match self.known.find(product)? {
            Kept::Own(cut) => Some(Choice::Own(cut)),
            Kept::Library(data) => products.accept(product, data).map(Choice::Library),
        }
    }

    /// Tries cuBLASLt's ways to make a product that must be measured. That takes none of our kernels, so it can be done while they
    /// are still being compiled.
    pub fn try_library(&mut self, product: &Product, bench: &mut Bench<'_>) -> Result<(), CudaError> {
        if self.must_measure(product, bench.products) && !self.tried.contains_key(&key(product)) {
            let ways = self.library_ways(product, bench)?;
            self.tried.insert(key(product), ways);
        }
        Ok(())
    }

    /// How a product is made. It is run at least once, so that its kernel is loaded before anything is captured; what is
    /// computed goes to the start of the scratch memory unless the result already lies there.
    pub fn choose(&mut self, product: &Product, bench: &mut Bench<'_>) -> Result<Choice, CudaError> {
        let key = key(product);
        if let Some(choice) = self.chosen.get(&key) {
            return Ok(*choice);
        }
        let deterministic = self.known.deterministic;
        let usable = if deterministic { None } else { self.usable(product, bench.products) };
        let choice = match usable {
            Some(choice) => choice,
            None if deterministic => {
                let found = bench.products.candidates(product, 1)?;
                Choice::Library(found.into_iter().next().ok_or_else(|| nothing(product))?)
            }
            None => self.measure(product, bench)?,
        };
        self.trial(product, choice, bench)?.start(bench)?;
        if !deterministic {
            let text = entry(&choice);
            self.known.changed |= self.known.entries.insert(key.clone(), text.clone()) != Some(text);
        }
        self.tally.products += 1;
        self.chosen.insert(key, choice);
        Ok(choice)
    }

    /// What was chosen so far.
    pub fn choices(&self) -> Choices {
        let Known { entries, file, facts, .. } = &self.known;
        let is_chosen = |key: &String| {
            let Tuner { chosen, convolutions, attentions, .. } = self;
            chosen.contains_key(key) || convolutions.contains_key(key) || attentions.contains_key(key)
        };
        let chosen = entries.iter().filter(|(key, _)| is_chosen(key));
        let products = chosen.map(|(key, text)| (key.clone(), text.clone())).collect();
        Choices { gpu: facts.name.clone(), of: file.clone(), products }
    }

    /// Keeps what was measured.
    pub fn save(&mut self) {
        if std::mem::take(&mut self.known.changed) && !self.known.deterministic {
            let bytes = serde_json::to_vec_pretty(&self.known.entries).unwrap_or_default();
            cache::write(&self.known.file, &bytes);
        }
    }

    fn measure(&mut self, product: &Product, bench: &mut Bench<'_>) -> Result<Choice, CudaError> {
        let mut ways = match self.tried.remove(&key(product)) {
            Some(ways) => ways,
            None => self.library_ways(product, bench)?,
        };
        for cut in hopper::candidates(product, &self.known.facts) {
            ways.extend(self.try_way(product, Choice::Own(cut), None, bench)?);
        }
        let trials: Vec<Trial> =
            ways.iter().map(|way| self.trial(product, way.choice, bench)).collect::<Result<_, _>>()?;
        let began = Instant::now();
        let first = ways.iter().map(|way| way.seconds).collect();
        let fastest = fastest(first, |i| self.time(product, &trials[i], bench))?;
        self.tally.timing += began.elapsed().as_secs_f64();
        self.tally.measured += 1;
        let winner = fastest.map(|i| ways[i]).ok_or_else(|| nothing(product))?;
        self.tally.furthest = self.tally.furthest.max(winner.place.unwrap_or(0));
        Ok(winner.choice)
    }

    /// cuBLASLt's ways, each timed once, as far as it seems worth it.
    fn library_ways(&mut self, product: &Product, bench: &mut Bench<'_>) -> Result<Vec<Way>, CudaError> {
        let mut ways: Vec<Way> = Vec::new();
        let mut best = (f64::INFINITY, 0);
        for (place, algorithm) in bench.products.candidates(product, CANDIDATES)?.into_iter().enumerate() {
            if place > best.1 + PATIENCE {
                break;
            }
            let way = self.try_way(product, Choice::Library(algorithm), Some(place), bench)?;
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
        product: &Product,
        choice: Choice,
        place: Option<usize>,
        bench: &mut Bench<'_>,
    ) -> Result<Option<Way>, CudaError> {
        let began = Instant::now();
        let trial = self.trial(product, choice, bench);
        let started = trial.and_then(|trial| trial.start(bench).map(|()| trial));
        self.tally.loading += began.elapsed().as_secs_f64();
        self.tally.tried += 1;
        let trial = match started {
            Ok(trial) => trial,
            Err(lost @ CudaError::Lost { .. }) => return Err(lost),
            Err(_) => return Ok(None),
        };
        let began = Instant::now();
        let mut seconds = self.time(product, &trial, bench)?;
        if repeats(product) > 1 {
            // Of small ones a moment in which the host was elsewhere is a large part.
            seconds = seconds.min(self.time(product, &trial, bench)?);
        }
        self.tally.timing += began.elapsed().as_secs_f64();
        Ok(Some(Way { choice, place, seconds }))
    }

    fn trial(&self, product: &Product, choice: Choice, bench: &mut Bench<'_>) -> Result<Trial, CudaError> {
        let product = trial(product, bench.scratch);
        Ok(match choice {
            Choice::Library(algorithm) => Trial::Library(product, algorithm),
            Choice::Own(cut) => Trial::Own(Ready::new(&self.launch(&product, cut)?, bench.modules)?),
        })
    }

    /// Seconds of one run, after something that fills the cache with other things and keeps the GPU busy until the run is
    /// queued.
    fn time(&self, product: &Product, trial: &Trial, bench: &Bench<'_>) -> Result<f64, CudaError> {
        self.timed(bench, repeats(product), || trial.start(bench), || describe(product))
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

/// How often a product is run to be timed. What small ones read is in the cache when they run, as it was written just before; and
/// one run of them is hardly longer than an event.
fn repeats(product: &Product) -> usize {
    let bytes = |m: &Matrix| m.rows * m.columns * m.dtype.bytes();
    let Product { left, right, result, .. } = product;
    if bytes(left) + bytes(right) + bytes(result) < SMALL { 8 } else { 1 }
}

/// Where products are tried.
pub struct Bench<'a> {
    pub products: &'a Products,
    /// With the kernels that [`Known::kernels`] named.
    pub modules: &'a mut Modules,
    pub stream: &'a Stream,
    /// Memory that nobody misses.
    pub scratch: &'a Block,
    /// Of [`WORKSPACE`](crate::product::WORKSPACE) bytes.
    pub workspace: &'a Block,
}

impl Bench<'_> {
    fn distract(&self) -> Result<(), CudaError> {
        let bytes = DISTRACTION.min(self.scratch.bytes / 2);
        let from = self.scratch.address + (self.scratch.bytes - bytes) as Address;
        self.stream.copy(from, self.scratch.address, bytes)
    }
}

/// A product that is tried in one way.
enum Trial {
    Library(Product, Algorithm),
    Own(Ready),
}

impl Trial {
    fn start(&self, bench: &Bench<'_>) -> Result<(), CudaError> {
        match self {
            Trial::Library(product, algorithm) => {
                bench.products.run_in(product, algorithm, bench.stream, bench.workspace)
            }
            Trial::Own(ready) => ready.start(bench.stream, || "trying a product".into()),
        }
    }
}

/// Which of several takes the least time, by successive halving: what was timed once is sorted, the better half is timed again,
/// and so on until one is left or nothing new is to be learned. Of each, the shortest time counts, as whatever else goes on in the
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

fn nothing(product: &Product) -> CudaError {
    let doing = format!("looking for an algorithm for {}", describe(product));
    CudaError::Product { doing, status: "none fits the workspace".into() }
}

/// The product with a result that nobody misses.
fn trial(product: &Product, scratch: &Block) -> Product {
    let range = scratch.address..scratch.address + scratch.bytes as Address;
    let bytes = product.result.rows * product.result.stride * product.result.dtype.bytes();
    let mut trial = *product;
    if !range.contains(&product.result.address) && bytes <= scratch.bytes {
        trial.result.address = scratch.address;
    }
    trial
}

/// Everything about a product that an algorithm may depend on.
fn key(product: &Product) -> String {
    let side = |m: &Matrix, transposed: bool| {
        let turned = if transposed { "t" } else { "n" };
        format!("{}x{}/{} {}{turned}@{}", m.rows, m.columns, m.stride, m.dtype, alignment(m.address))
    };
    let Product { left, right, result, .. } = product;
    let (left, right) = (side(left, product.left_transposed), side(right, product.right_transposed));
    let bias = match product.epilogue {
        Epilogue::None => "",
        Epilogue::Bias(_) => " bias",
    };
    let adds = if product.accumulate { " adds" } else { "" };
    let tf32 = if product.tf32 { " tf32" } else { "" };
    format!("{left} {right} {}{bias}{adds}{tf32}", side(result, false))
}

/// What the disk holds of a choice.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kept {
    Library([u64; 8]),
    Own(Cut),
}

/// An algorithm's words, or `own` and how the result is cut.
fn entry(choice: &Choice) -> String {
    match choice {
        Choice::Library(algorithm) => words(&algorithm.algo.data),
        Choice::Own(cut) => format!("own {}", cut.text()),
    }
}

/// None for what is no entry, or a way that this product isn't made in any more.
fn kept(text: &str, product: &Product, facts: &Facts) -> Option<Kept> {
    match text.strip_prefix("own ") {
        Some(text) => {
            hopper::candidates(product, facts).into_iter().find(|cut| cut.text() == text).map(Kept::Own)
        }
        None => parse(text).map(Kept::Library),
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
