//! Chooses how each product is made, by one of cuBLASLt's algorithms or by our kernel: measured on the spot, then kept on disk.

use crate::action::{Address, Epilogue, Facts, Kernel, Launch, Matrix, Product, Source};
use crate::cache::{self, Hash};
use crate::driver::{Block, Context, Event, Stream};
use crate::error::CudaError;
use crate::launch::Ready;
use crate::modules::Modules;
use crate::product::{Algorithm, CANDIDATES, Choice, Products, alignment, describe};
use crate::steps::hopper::{self, Cut};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// How many of the candidates are measured more than once, and how often.
const FINALISTS: usize = 4;
const ROUNDS: usize = 3;

/// Bytes of a product that may stay in the cache from the kernel before.
const SMALL: usize = 24 << 20;

/// Bytes that are copied before each measurement: more than any GPU's cache holds.
const DISTRACTION: usize = 96 << 20;

pub struct Tuner {
    deterministic: bool,
    facts: Facts,
    chosen: HashMap<String, Choice>,
    /// What the disk has, or will have: from a product's [`key`] to its [`entry`].
    known: BTreeMap<String, String>,
    file: String,
    changed: bool,
    start: Event,
    end: Event,
}

impl Tuner {
    /// A deterministic one takes cuBLASLt's first proposal and measures nothing.
    pub fn new(context: &Arc<Context>, facts: &Facts, deterministic: bool) -> Result<Self, CudaError> {
        let version = Products::version();
        // Of other kernels than these it is not known how fast they are.
        let ours = Source::Product.text().as_bytes();
        let hash = Hash::new().add(facts.name.as_bytes()).add(&version.to_le_bytes()).add(ours);
        let file = format!("products-{}.json", hash.text());
        let known = cache::read(&file).and_then(|bytes| serde_json::from_slice(&bytes).ok());
        Ok(Tuner {
            deterministic,
            facts: facts.clone(),
            chosen: HashMap::new(),
            known: known.filter(|_| !deterministic).unwrap_or_default(),
            file,
            changed: false,
            start: Event::timed(context)?,
            end: Event::timed(context)?,
        })
    }

    /// Our kernels that may be chosen for a product: all that could be, or what is known to be the fastest.
    pub fn kernels(&self, product: &Product) -> Vec<Kernel> {
        let kept = self.known.get(&key(product)).and_then(|text| kept(text, product, &self.facts));
        let cuts = match kept {
            _ if self.deterministic => Vec::new(),
            Some(Kept::Own(cut)) => vec![cut],
            Some(Kept::Library(_)) => Vec::new(),
            None => hopper::candidates(product, &self.facts),
        };
        cuts.into_iter().filter_map(|cut| Some(hopper::plain(product, cut, &self.facts)?.kernel)).collect()
    }

    /// A product by our kernel.
    pub fn launch(&self, product: &Product, cut: Cut) -> Result<Launch, CudaError> {
        let none = || CudaError::Misuse(format!("no kernel of ours for {}", describe(product)));
        hopper::plain(product, cut, &self.facts).ok_or_else(none)
    }

    /// How a product is made. It is run at least once, so that its kernel is loaded before anything is captured; what is
    /// computed goes to the start of the scratch memory unless the result already lies there.
    pub fn choose(&mut self, product: &Product, bench: &mut Bench<'_>) -> Result<Choice, CudaError> {
        let key = key(product);
        if let Some(choice) = self.chosen.get(&key) {
            return Ok(*choice);
        }
        let kept = self.known.get(&key).and_then(|text| kept(text, product, &self.facts));
        let usable = kept.and_then(|kept| match kept {
            Kept::Own(cut) => Some(Choice::Own(cut)),
            Kept::Library(data) => bench.products.accept(product, data).map(Choice::Library),
        });
        let choice = match usable {
            Some(choice) => choice,
            None if self.deterministic => {
                let found = bench.products.candidates(product, 1)?;
                Choice::Library(found.into_iter().next().ok_or_else(|| nothing(product))?)
            }
            None => self.measure(product, bench)?,
        };
        self.trial(product, choice, bench)?.start(bench)?;
        if !self.deterministic {
            let text = entry(&choice);
            self.changed |= self.known.insert(key.clone(), text.clone()) != Some(text);
        }
        self.chosen.insert(key, choice);
        Ok(choice)
    }

    /// Keeps what was measured.
    pub fn save(&mut self) {
        if std::mem::take(&mut self.changed) && !self.deterministic {
            let bytes = serde_json::to_vec_pretty(&self.known).unwrap_or_default();
            cache::write(&self.file, &bytes);
        }
    }

    fn measure(&self, product: &Product, bench: &mut Bench<'_>) -> Result<Choice, CudaError> {
        let found = bench.products.candidates(product, CANDIDATES)?.into_iter().map(Choice::Library);
        let ours = hopper::candidates(product, &self.facts).into_iter().map(Choice::Own);
        let mut trials = Vec::new();
        for choice in found.chain(ours) {
            // The first run loads the kernel; one that can't run is no candidate.
            let trial = self.trial(product, choice, bench);
            if let Ok(trial) = trial.and_then(|trial| trial.start(bench).map(|()| trial)) {
                trials.push((choice, trial));
            }
        }
        let fastest = fastest(trials.len(), |i| self.time(product, &trials[i].1, bench))?;
        fastest.map(|i| trials[i].0).ok_or_else(|| nothing(product))
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
        let repeats = repeats(product);
        bench.distract()?;
        self.start.record(bench.stream)?;
        (0..repeats).try_for_each(|_| trial.start(bench))?;
        self.end.record(bench.stream)?;
        self.end.synchronise(|| format!("measuring {}", describe(product)))?;
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
    /// With the kernels that [`Tuner::kernels`] named.
    pub modules: &'a mut Modules,
    pub stream: &'a Stream,
    /// Memory that nobody misses.
    pub scratch: &'a Block,
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
            Trial::Library(product, algorithm) => bench.products.run(product, algorithm, bench.stream, false),
            Trial::Own(ready) => ready.start(bench.stream, || "trying a product".into()),
        }
    }
}

/// Which of so many takes the least time: all are timed once, and the best of them more often.
fn fastest(
    count: usize,
    mut time: impl FnMut(usize) -> Result<f64, CudaError>,
) -> Result<Option<usize>, CudaError> {
    let mut timed = (0..count).map(|i| Ok((time(i)?, i))).collect::<Result<Vec<_>, CudaError>>()?;
    timed.sort_by(|a, b| a.0.total_cmp(&b.0));
    timed.truncate(FINALISTS);
    for (total, i) in &mut timed {
        *total = 0.0;
        for _ in 0..ROUNDS {
            *total += time(*i)?;
        }
    }
    Ok(timed.into_iter().min_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, i)| i))
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

#[cfg(test)]
mod tests {
    use super::*;
    use graph::DType;

    #[test]
    fn algorithms_survive_their_text() {
        let data = [0, 1, u64::MAX, 0x1234_5678_9abc_def0, 4, 5, 6, 7];
        assert_eq!(parse(&words(&data)), Some(data));
        assert_eq!(parse("00"), None);
        assert_eq!(parse(&"x".repeat(128)), None);
    }

    fn large() -> Product {
        let matrix = |rows, columns| Matrix::new(256, DType::Bf16, rows, columns);
        Product {
            left: matrix(50432, 768),
            left_transposed: false,
            right: matrix(2304, 768),
            right_transposed: true,
            result: matrix(50432, 2304),
            accumulate: false,
            epilogue: Epilogue::Bias(512),
            tf32: false,
        }
    }

    #[test]
    fn ways_of_our_own_survive_their_text() {
        let (product, facts) = (large(), Facts::h200());
        let cuts = hopper::candidates(&product, &facts);
        assert!(!cuts.is_empty());
        for cut in cuts {
            let text = entry(&Choice::Own(cut));
            assert_eq!(kept(&text, &product, &facts), Some(Kept::Own(cut)), "{text}");
            // Elsewhere it is measured again.
            let older = Facts { capability: (8, 0), ..facts.clone() };
            assert_eq!(kept(&text, &product, &older), None);
            assert_eq!(kept(&text, &Product { accumulate: true, ..product }, &facts), None);
        }
        assert!(kept("own 192x4 2 8", &product, &facts).is_some());
        for text in ["own ", "own 512x4 1 1", "192x4 2 8", ""] {
            assert_eq!(kept(text, &product, &facts), None, "{text}");
        }
        let data = [7; 8];
        assert_eq!(kept(&words(&data), &product, &facts), Some(Kept::Library(data)));
    }

    #[test]
    fn the_fastest_of_several_runs_is_taken() {
        // The first run of the second one is slow, that of the fourth one fast.
        let mean = [5.0, 2.0, 3.0, 2.5, 9.0, 8.0];
        let first = [5.0, 2.9, 3.0, 1.0, 9.0, 8.0];
        let mut runs = [0; 6];
        let time = |i: usize| {
            runs[i] += 1;
            Ok(if runs[i] == 1 { first[i] } else { mean[i] })
        };
        assert_eq!(fastest(6, time).unwrap(), Some(1));
        assert_eq!(runs, [4, 4, 4, 4, 1, 1]);
        assert_eq!(fastest(0, |_| Ok(0.0)).unwrap(), None);
    }

    #[test]
    fn keys_tell_products_apart() {
        let matrix = |rows, columns| Matrix::new(256, DType::Bf16, rows, columns);
        let base = Product {
            left: matrix(8, 4),
            left_transposed: false,
            right: matrix(16, 4),
            right_transposed: true,
            result: matrix(8, 16),
            accumulate: false,
            epilogue: Epilogue::None,
            tf32: false,
        };
        let far = Product { left: Matrix { address: 16, ..base.left }, ..base };
        let others = [
            Product { accumulate: true, ..base },
            Product { epilogue: Epilogue::Bias(512), ..base },
            Product { tf32: true, ..base },
            Product { result: Matrix { dtype: DType::F32, ..base.result }, ..base },
            far,
        ];
        for other in others {
            assert_ne!(key(&base), key(&other));
        }
        assert_eq!(key(&base), key(&Product { left: Matrix { address: 512, ..base.left }, ..base }));
    }
}
