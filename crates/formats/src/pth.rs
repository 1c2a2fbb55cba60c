//! PyTorch's own files of weights (`.pth`, `.pt`, `.bin`), read without running what they ask for.
//!
//! Such a file is a pickle that calls functions of `torch` to make tensors, and the values beside it: in a zip archive since
//! PyTorch 1.6, after the pickle before that. The pickle is only looked at (see [`data::pickle`]), and a file that names
//! anything but what state dicts are made of is refused.
//!
//! What is allocated follows from the length of the file: one storage at a time, the tensors (no more values than the
//! file has bytes), and a pickle of [`MAX_PICKLE`] bytes at most.

mod container;
mod view;
mod zip;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;
use text::printable;

use data::pickle::{Pickle, PickleError, Value};
use models::names::{Tensor, Weights};

use crate::tensors::{FileFault, TensorFault, at, is_printable};
use crate::weights::WeightsError;
use container::Container;
use view::View;

/// A ViT's pickle has less than 100 kB.
pub const MAX_PICKLE: u64 = 64 << 20;

/// What is wrong with a file of PyTorch's as a whole.
#[derive(Debug, PartialEq, thiserror::Error)]
pub enum PthFault {
    #[error("this file asks to run {0}; vitesse reads tensors only")]
    Runs(String),
    #[error("{0}")]
    Pickle(#[from] PickleError),
    #[error("damaged zip archive: {0}")]
    Zip(String),
    #[error("a zip archive, but not of weights: it has no data.pkl")]
    NoPickle,
    #[error("a TorchScript program; vitesse reads what `torch.save(model.state_dict(), …)` writes")]
    TorchScript,
    #[error("its pickle has {0} bytes, more than {MAX_PICKLE}")]
    PickleTooLong(u64),
    #[error("its values are in big-endian order")]
    BigEndian,
    #[error("damaged: {0}")]
    Damaged(&'static str),
    #[error("there are no tensors in it, only {0}")]
    NoTensors(&'static str),
    #[error("its tensors have more values than the file has bytes")]
    TooManyValues,
}

/// A fault of the file, of one of its tensors, or of the disk.
enum Fault {
    Io(io::Error),
    File(PthFault),
    Tensor(String, TensorFault),
    Name(String),
}

impl From<io::Error> for Fault {
    fn from(error: io::Error) -> Self {
        Fault::Io(error)
    }
}

impl<T: Into<PthFault>> From<T> for Fault {
    fn from(fault: T) -> Self {
        Fault::File(fault.into())
    }
}

/// Whether a file is one of PyTorch's, by how it begins. One that cannot be opened is not; whoever tries next says why.
pub fn is_pth(path: &Path) -> bool {
    let mut start = Vec::new();
    let read = File::open(path).and_then(|file| file.take(container::START).read_to_end(&mut start));
    read.is_ok() && (container::is_zip(&start) || container::is_legacy(&start))
}

/// Reads all tensors of numbers of a state dict, as f32; tensors of whole numbers (counters of steps) are left out.
pub fn read(path: &Path) -> Result<Weights, WeightsError> {
    let path_buf = || path.to_path_buf();
    read_all(path).map_err(|fault| match fault {
        Fault::Io(source) => WeightsError::Io { path: path_buf(), doing: "read", source },
        Fault::File(fault) => WeightsError::Pth { path: path_buf(), fault },
        Fault::Tensor(name, fault) => at(path, &name, fault),
        Fault::Name(name) => WeightsError::File { path: path_buf(), fault: FileFault::TensorName(name) },
    })
}

fn read_all(path: &Path) -> Result<Weights, Fault> {
    let container = Container::open(path)?;
    let (pickle, end) = container.pickle()?;
    refuse_foreign(&pickle)?;
    let storages = container.storages(&pickle, end)?;
    let mut weights = Weights::new();
    // By storage, so that one that many tensors share is read once.
    for (key, views) in by_storage(state_dict(pickle.root())?, container.length)? {
        let range = storages.get(&key);
        let bytes = range.map(|range| container.bytes(range.clone())).transpose()?;
        for (name, view) in views {
            let data = match &bytes {
                Some(bytes) => view.values(bytes),
                None => Err(TensorFault::NoStorage(printable::shortened(&key))),
            };
            let data = data.map_err(|fault| Fault::Tensor(name.clone(), fault))?;
            weights.insert(name, Tensor { shape: view.shape, data });
        }
    }
    if weights.is_empty() {
        return Err(PthFault::NoTensors(pickle.root().kind()).into());
    }
    Ok(weights)
}

/// Everything that a checkpoint with a state dict is made of. What is not a tensor is not looked at: training programs keep
/// their settings beside the weights.
fn is_known((module, name): (&str, &str)) -> bool {
    match module {
        "collections" => matches!(name, "OrderedDict" | "defaultdict" | "Counter"),
        "torch" => view::storage_type(name).is_some() || matches!(name, "Size" | "device"),
        "torch._utils" => view::makes_tensor(name) || view::makes_parameter(name),
        "argparse" => name == "Namespace",
        "__builtin__" | "builtins" => {
            matches!(name, "set" | "bytes" | "bytearray" | "dict" | "list" | "int" | "float")
        }
        "_codecs" => name == "encode",
        "numpy" => matches!(name, "dtype" | "ndarray"),
        "numpy.core.multiarray" | "numpy._core.multiarray" => matches!(name, "scalar" | "_reconstruct"),
        _ => false,
    }
}

fn refuse_foreign(pickle: &Pickle<'_>) -> Result<(), PthFault> {
    match pickle.globals().find(|&global| !is_known(global)) {
        Some((module, name)) => Err(PthFault::Runs(printable::shortened(&format!("{module}.{name}")))),
        None => Ok(()),
    }
}

/// Where training programs keep the weights, in the order in which timm looks: averaged weights first.
const NESTED: [&str; 4] = ["state_dict_ema", "model_ema", "state_dict", "model"];
/// How deep they nest them.
const MAX_NESTING: usize = 3;

/// Names and values of the state dict, which may be in another dict.
fn state_dict(root: Value<'_>) -> Result<Vec<(Value<'_>, Value<'_>)>, PthFault> {
    let mut dict = root;
    for _ in 0..MAX_NESTING {
        let inner = NESTED.iter().find_map(|key| dict.get(key).filter(|inner| entries(*inner).is_some()));
        match inner {
            Some(inner) => dict = inner,
            None => break,
        }
    }
    entries(dict).ok_or(PthFault::NoTensors(dict.kind()))
}

/// The entries of a dict. Python 2 gave those of an ordered one as an argument: a list of pairs.
fn entries(dict: Value<'_>) -> Option<Vec<(Value<'_>, Value<'_>)>> {
    let set: Vec<_> = dict.entries()?.collect();
    if dict.callable().is_none() {
        return Some(set);
    }
    let is_dict =
        |module: &str, name: &str| module == "collections" && matches!(name, "OrderedDict" | "defaultdict");
    match dict.call_of(is_dict)?.item(0).and_then(Value::items).filter(|_| set.is_empty()) {
        Some(pairs) => pairs.map(|pair| Some((pair.item(0)?, pair.item(1)?))).collect(),
        None => Some(set),
    }
}

type ByStorage = BTreeMap<String, Vec<(String, View)>>;

/// The tensors of a state dict, by the storage they lie in.
fn by_storage(entries: Vec<(Value<'_>, Value<'_>)>, file_length: u64) -> Result<ByStorage, Fault> {
    let mut found = ByStorage::new();
    let mut names = BTreeSet::new();
    let mut values = 0u64;
    for (key, value) in entries {
        let (Some(name), Some(view)) = (key.text(), View::of(value)) else { continue };
        let name = plain_name(name);
        if !is_printable(name) {
            return Err(Fault::Name(printable::shortened(name)));
        }
        let fault = |fault| Fault::Tensor(name.to_string(), fault);
        let Some((storage, view)) = view.map_err(fault)? else { continue };
        if !names.insert(name.to_string()) {
            return Err(fault(TensorFault::Twice));
        }
        values = values.saturating_add(view.elements as u64);
        if values > file_length {
            return Err(PthFault::TooManyValues.into());
        }
        found.entry(storage.to_string()).or_default().push((name.to_string(), view));
    }
    Ok(found)
}

/// Without what `DataParallel` and `torch.compile` put before every name.
fn plain_name(mut name: &str) -> &str {
    while let Some(rest) = ["module.", "_orig_mod."].iter().find_map(|wrapper| name.strip_prefix(wrapper)) {
        name = rest;
    }
    name
}

#[cfg(test)]
mod tests;
