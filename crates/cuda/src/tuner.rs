//! Chooses the algorithm of each product: measured on the spot, then kept on disk.

use crate::action::{Address, Epilogue, Facts, Matrix, Product};
use crate::cache::{self, Hash};
use crate::driver::{Block, Context, Event, Stream};
use crate::error::CudaError;
use crate::product::{CANDIDATES, Choice, Products, alignment};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// How many of the candidates are measured more than once, and how often.
const FINALISTS: usize = 4;
const ROUNDS: usize = 3;

/// Bytes that are copied before each measurement: more than any GPU's cache holds.
const DISTRACTION: usize = 96 << 20;

pub struct Tuner {
    deterministic: bool,
    chosen: HashMap<String, Choice>,
    /// What the disk has, or will have: from a product's [`key`] to its algorithm.
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
        let hash = Hash::new().add(facts.name.as_bytes()).add(&version.to_le_bytes());
        let file = format!("products-{}.json", hash.text());
        let known = cache::read(&file).and_then(|bytes| serde_json::from_slice(&bytes).ok());
        Ok(Tuner {
            deterministic,
            chosen: HashMap::new(),
            known: known.filter(|_| !deterministic).unwrap_or_default(),
            file,
            changed: false,
            start: Event::timed(context)?,
            end: Event::timed(context)?,
        })
    }

    /// The algorithm for a product. It is run at least once, so that its kernel is loaded before anything is captured; what
    /// is computed goes to the start of the scratch memory unless the result already lies there.
    pub fn choose(&mut self, product: &Product, bench: &Bench<'_>) -> Result<Choice, CudaError> {
        let key = key(product);
        if let Some(choice) = self.chosen.get(&key) {
            return Ok(*choice);
        }
        let kept = self.known.get(&key).and_then(|text| parse(text));
        let choice = match kept.and_then(|data| bench.products.accept(product, data)) {
            Some(choice) => choice,
            None if self.deterministic => first(bench.products.candidates(product, 1)?, product)?,
            None => self.measure(product, bench)?,
        };
        bench.run(product, &choice)?;
        if !self.deterministic {
            let text = format(&choice.algo.data);
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

    fn measure(&self, product: &Product, bench: &Bench<'_>) -> Result<Choice, CudaError> {
        let mut timed = Vec::new();
        for choice in bench.products.candidates(product, CANDIDATES)? {
            // The first run loads the kernel; one that can't run is no candidate.
            if bench.run(product, &choice).is_ok() {
                timed.push(Choice { seconds: Some(self.time(product, &choice, bench)?), ..choice });
            }
        }
        let seconds = |choice: &Choice| choice.seconds.unwrap_or(f64::MAX);
        timed.sort_by(|a, b| seconds(a).total_cmp(&seconds(b)));
        timed.truncate(FINALISTS);
        for choice in &mut timed {
            let mut total = 0.0;
            for _ in 0..ROUNDS {
                total += self.time(product, choice, bench)?;
            }
            choice.seconds = Some(total / ROUNDS as f64);
        }
        timed.sort_by(|a, b| seconds(a).total_cmp(&seconds(b)));
        first(timed, product)
    }

    /// Seconds of one run, after something that fills the cache with other things and keeps the GPU busy until the run is
    /// queued.
    fn time(&self, product: &Product, choice: &Choice, bench: &Bench<'_>) -> Result<f64, CudaError> {
        bench.distract()?;
        self.start.record(bench.stream)?;
        bench.run(product, choice)?;
        self.end.record(bench.stream)?;
        self.end.synchronise(|| format!("measuring {}", crate::product::describe(product)))?;
        self.end.seconds_since(&self.start)
    }
}

/// Where products are tried.
pub struct Bench<'a> {
    pub products: &'a Products,
    pub stream: &'a Stream,
    /// Memory that nobody misses.
    pub scratch: &'a Block,
}

impl Bench<'_> {
    fn run(&self, product: &Product, choice: &Choice) -> Result<(), CudaError> {
        self.products.run(&trial(product, self.scratch), choice, self.stream)
    }

    fn distract(&self) -> Result<(), CudaError> {
        let bytes = DISTRACTION.min(self.scratch.bytes / 2);
        let from = self.scratch.address + (self.scratch.bytes - bytes) as Address;
        self.stream.copy(from, self.scratch.address, bytes)
    }
}

fn first(choices: Vec<Choice>, product: &Product) -> Result<Choice, CudaError> {
    let doing = || format!("looking for an algorithm for {}", crate::product::describe(product));
    let none = || CudaError::Product { doing: doing(), status: "none fits the workspace".into() };
    choices.into_iter().next().ok_or_else(none)
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

fn format(data: &[u64; 8]) -> String {
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
        assert_eq!(parse(&format(&data)), Some(data));
        assert_eq!(parse("00"), None);
        assert_eq!(parse(&"x".repeat(128)), None);
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
