//! A file of named tensors, as safetensors: eight bytes of length, a JSON header, then the values.
//!
//! The header is checked here rather than by the `safetensors` crate, which supplies the types: its errors do
//! not say which tensor is at fault, it takes the last of two tensors with one name, and its sum of offsets
//! can overflow.
//!
//! Every file written here carries checksums of its header and of each tensor (`tensors/checksums.rs`). Whatever reads a file
//! through [`Reader`] verifies them; files of others, and of older versions, have none.

mod checksums;

use crate::weights::WeightsError;
use half::{bf16, f16};
use models::names;
use safetensors::Dtype;
use safetensors::tensor::TensorInfo;
use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, Visitor};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs::{self, File};
use std::io::{self, BufReader, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use text::printable;

/// What is wrong with a file as a whole.
#[derive(Debug, PartialEq, thiserror::Error)]
pub enum FileFault {
    #[error("not a regular file")]
    NotAFile,
    #[error("not a safetensors file: {0} bytes are too few for the length of a header")]
    TooShort(u64),
    #[error("truncated, or not safetensors: the header should be {header} bytes, the file has {file}")]
    HeaderBeyondEnd { header: u64, file: u64 },
    #[error("a header of {0} bytes is more than the {MAX_HEADER} that safetensors allows")]
    HeaderTooLong(u64),
    #[error("the header is not a safetensors header: {0}")]
    Json(String),
    #[error("truncated or overlong: its tensors have {claimed} bytes, the file has {present} for them")]
    Size { claimed: u64, present: u64 },
    #[error("`{0}` cannot be the name of a tensor")]
    TensorName(String),
    #[error(
        "damaged: its header has another checksum than when it was written (or another program copied `{}` into its metadata)",
        checksums::KEY
    )]
    Checksum,
}

/// What is wrong with one tensor of a file.
#[derive(Debug, PartialEq, thiserror::Error)]
pub enum TensorFault {
    #[error("occurs twice")]
    Twice,
    #[error("has {0} dimensions, more than {MAX_RANK}")]
    Rank(usize),
    #[error("is of type {0}: only F32, F64, F16, BF16 and I64 can be read")]
    Type(Dtype),
    #[error("is {shape:?} of {dtype}, more bytes than can be counted")]
    Overflow { shape: Vec<usize>, dtype: Dtype },
    #[error("is {shape:?} of {dtype}, which is {needed} bytes, but has {found}")]
    Length { shape: Vec<usize>, dtype: Dtype, needed: usize, found: usize },
    #[error("is at bytes {begin} to {end}, but the file has {present} bytes of values")]
    OutOfRange { begin: usize, end: usize, present: u64 },
    #[error("begins at byte {begin} of the values, but the tensor before it ends at {previous_end}")]
    Misplaced { begin: usize, previous_end: usize },
    #[error("is {shape:?} but holds {values} values")]
    Torn { shape: Vec<usize>, values: usize },
    #[error("is damaged: it has another checksum than when it was written")]
    Checksum,
    #[error("is not described as PyTorch does it")]
    Malformed,
    #[error("lies in storage `{0}`, which the file does not have")]
    NoStorage(String),
    #[error("is {shape:?} with strides {strides:?} from {offset} on, but its storage has {stored} values")]
    Beyond { shape: Vec<usize>, strides: Vec<usize>, offset: usize, stored: usize },
}

/// The limit of the `safetensors` crate; nobody could read more.
const MAX_HEADER: u64 = 100_000_000;
/// Enough for any weight, and short enough that a shape fits into an error.
pub(crate) const MAX_RANK: usize = 8;
const MAX_NAME: usize = 256;
const METADATA: &str = "__metadata__";

/// An open file whose header was found sound. Its tensors are read one after the other, and verified as they are.
pub struct Reader {
    path: PathBuf,
    file: BufReader<File>,
    header: Header,
}

impl Reader {
    pub fn open(path: &Path) -> Result<Self, WeightsError> {
        let io_error = |doing| move |source| WeightsError::Io { path: path.to_path_buf(), doing, source };
        let file_error = |fault| WeightsError::File { path: path.to_path_buf(), fault };
        let about = fs::metadata(path).map_err(io_error("open"))?;
        if !about.is_file() {
            return Err(file_error(FileFault::NotAFile));
        }
        let mut file = BufReader::new(File::open(path).map_err(io_error("open"))?);
        let Some(after_length) = about.len().checked_sub(8) else {
            return Err(file_error(FileFault::TooShort(about.len())));
        };
        let mut length = [0; 8];
        file.read_exact(&mut length).map_err(io_error("read"))?;
        let header = u64::from_le_bytes(length);
        let Some(present) = after_length.checked_sub(header) else {
            return Err(file_error(FileFault::HeaderBeyondEnd { header, file: about.len() }));
        };
        if header > MAX_HEADER {
            return Err(file_error(FileFault::HeaderTooLong(header)));
        }
        let mut json = vec![0; header as usize];
        file.read_exact(&mut json).map_err(io_error("read"))?;
        let header = parse_header(path, &json, present)?;
        Ok(Reader { path: path.to_path_buf(), file, header })
    }

    /// Without the checksums.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.header.metadata
    }

    /// Whether damage to the values is noticed.
    pub fn has_checksums(&self) -> bool {
        self.header.checksums.is_some()
    }

    /// Names and shapes, in the order of the file.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, &[usize])> {
        self.header.tensors.iter().map(|(name, info)| (name.as_str(), info.shape.as_slice()))
    }

    /// Gives every tensor, as `T`. Allocates in proportion to the file, whatever its header says.
    pub fn each<T: Stored>(
        mut self,
        mut take: impl FnMut(String, Vec<usize>, Vec<T>),
    ) -> Result<(), WeightsError> {
        for (index, (name, info)) in self.header.tensors.into_iter().enumerate() {
            let mut bytes = vec![0; info.data_offsets.1 - info.data_offsets.0];
            let read = self.file.read_exact(&mut bytes);
            read.map_err(|source| WeightsError::Io { path: self.path.clone(), doing: "read", source })?;
            let written = self.header.checksums.as_ref().map(|sums| sums[index]);
            if written.is_some_and(|written| written != checksums::of(&bytes)) {
                return Err(at(&self.path, &name, TensorFault::Checksum));
            }
            let data = read_as(info.dtype, &bytes).map_err(|fault| at(&self.path, &name, fault))?;
            take(name, info.shape, data);
        }
        Ok(())
    }

    /// Reads the file to its end, to notice damage.
    pub fn verify(self) -> Result<(), WeightsError> {
        self.each(|_, _, _: Vec<f32>| {})
    }
}

pub(crate) fn at(path: &Path, tensor: &str, fault: TensorFault) -> WeightsError {
    WeightsError::Tensor { path: path.to_path_buf(), tensor: tensor.to_string(), fault }
}

/// The tensors of a header in the order of their bytes, which they cover without gap or overlap.
fn parse_header(path: &Path, json: &[u8], present: u64) -> Result<Header, WeightsError> {
    let file_error = |fault| WeightsError::File { path: path.to_path_buf(), fault };
    let mut header: Header = serde_json::from_slice(json).map_err(|error: serde_json::Error| {
        file_error(FileFault::Json(printable::shortened(&error.to_string())))
    })?;
    header.tensors.sort_by_key(|(_, info)| info.data_offsets);
    if let Some(text) = header.metadata.remove(checksums::KEY) {
        let sums = checksums::read(json, &text, header.tensors.len());
        header.checksums = Some(sums.ok_or_else(|| file_error(FileFault::Checksum))?);
    }
    let mut names = BTreeSet::new();
    let mut previous_end = 0;
    for (name, info) in &header.tensors {
        if !is_printable(name) {
            return Err(file_error(FileFault::TensorName(printable::shortened(name))));
        }
        if !names.insert(name) {
            return Err(at(path, name, TensorFault::Twice));
        }
        check_info(info, previous_end, present).map_err(|fault| at(path, name, fault))?;
        previous_end = info.data_offsets.1;
    }
    let claimed = previous_end as u64;
    if claimed != present {
        return Err(file_error(FileFault::Size { claimed, present }));
    }
    Ok(header)
}

fn check_info(info: &TensorInfo, previous_end: usize, present: u64) -> Result<(), TensorFault> {
    let ((begin, end), dtype) = (info.data_offsets, info.dtype);
    if info.shape.len() > MAX_RANK {
        return Err(TensorFault::Rank(info.shape.len()));
    }
    let shape = || info.shape.clone();
    let width = width(dtype)?;
    let needed = names::elements(&info.shape).and_then(|elements| elements.checked_mul(width));
    let needed = needed.ok_or_else(|| TensorFault::Overflow { shape: shape(), dtype })?;
    if begin > end || end as u64 > present {
        return Err(TensorFault::OutOfRange { begin, end, present });
    }
    if end - begin != needed {
        return Err(TensorFault::Length { shape: shape(), dtype, needed, found: end - begin });
    }
    if begin != previous_end {
        return Err(TensorFault::Misplaced { begin, previous_end });
    }
    Ok(())
}

/// Bytes per value of a type that can be read.
fn width(dtype: Dtype) -> Result<usize, TensorFault> {
    match dtype {
        Dtype::F64 | Dtype::I64 => Ok(8),
        Dtype::F32 => Ok(4),
        Dtype::F16 | Dtype::BF16 => Ok(2),
        other => Err(TensorFault::Type(other)),
    }
}

/// A type of numbers that tensors are written as, and that every type of a file can be read as.
pub trait Stored: Copy + 'static {
    const DTYPE: Dtype;
    fn of(value: f64) -> Self;
    /// The bytes of `values`, little end first, in `place`, which has room for more.
    fn put(values: &[Self], place: &mut [u8]);
}

macro_rules! stored {
    ($($type:ident => $dtype:ident),*) => {
        $(impl Stored for $type {
            const DTYPE: Dtype = Dtype::$dtype;

            fn of(value: f64) -> Self {
                value as $type
            }

            fn put(values: &[Self], place: &mut [u8]) {
                for (place, value) in place.as_chunks_mut().0.iter_mut().zip(values) {
                    *place = value.to_le_bytes();
                }
            }
        })*
    };
}

stored!(f32 => F32, f64 => F64);

/// Values of any type as `T`; rounded once, since f64 holds all of them.
pub(crate) fn read_as<T: Stored>(dtype: Dtype, bytes: &[u8]) -> Result<Vec<T>, TensorFault> {
    fn each<const N: usize, T: Stored>(bytes: &[u8], value: impl Fn([u8; N]) -> f64) -> Vec<T> {
        bytes.as_chunks().0.iter().map(|&chunk| T::of(value(chunk))).collect()
    }
    match dtype {
        Dtype::F64 => Ok(each(bytes, f64::from_le_bytes)),
        Dtype::F32 => Ok(each(bytes, |chunk| f32::from_le_bytes(chunk).into())),
        Dtype::F16 => Ok(each(bytes, |chunk| f16::from_le_bytes(chunk).into())),
        Dtype::BF16 => Ok(each(bytes, |chunk| bf16::from_le_bytes(chunk).into())),
        // The number of batches that a batch norm has seen.
        Dtype::I64 => Ok(each(bytes, |chunk| i64::from_le_bytes(chunk) as f64)),
        other => Err(TensorFault::Type(other)),
    }
}

/// A name that an error can show on its line.
pub(crate) fn is_printable(name: &str) -> bool {
    name.len() <= MAX_NAME && !name.chars().any(char::is_control)
}

/// All entries of a header as they come; a map would drop the first of two with one name.
#[derive(Default)]
struct Header {
    tensors: Vec<(String, TensorInfo)>,
    metadata: BTreeMap<String, String>,
    /// Of the tensors, where the file has some.
    checksums: Option<Vec<u32>>,
}

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(HeaderVisitor)
    }
}

struct HeaderVisitor;

impl<'de> Visitor<'de> for HeaderVisitor {
    type Value = Header;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map from names to tensors")
    }

    fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Header, M::Error> {
        let mut header = Header::default();
        while let Some(name) = map.next_key::<String>()? {
            if name == METADATA {
                header.metadata = map.next_value()?;
                continue;
            }
            match map.next_value() {
                Ok(info) => header.tensors.push((name, info)),
                Err(error) => return Err(M::Error::custom(format!("tensor `{name}`: {error}"))),
            }
        }
        Ok(header)
    }
}

/// A tensor to be written.
pub struct Entry<'a, T = f32> {
    pub name: &'a str,
    pub shape: &'a [usize],
    pub values: &'a [T],
}

/// Name and shape of a tensor.
#[derive(Clone, Copy, Debug)]
pub struct Outline<'a> {
    pub name: &'a str,
    pub shape: &'a [usize],
}

/// Writes tensors as they are. The file is there whole or not at all, even if the power fails.
pub fn write<T: Stored>(
    path: &Path,
    entries: &[Entry<'_, T>],
    metadata: &BTreeMap<String, String>,
) -> Result<(), WeightsError> {
    for Entry { name, shape, values } in entries {
        if names::elements(shape) != Some(values.len()) {
            let torn = TensorFault::Torn { shape: shape.to_vec(), values: values.len() };
            return Err(at(path, &printable::shortened(name), torn));
        }
    }
    let outlines: Vec<Outline<'_>> =
        entries.iter().map(|entry| Outline { name: entry.name, shape: entry.shape }).collect();
    write_each(path, &outlines, metadata, |index, write| write(entries[index].values))
}

/// What takes the values of a tensor.
pub type Writer<'w, T> = dyn FnMut(&[T]) -> io::Result<()> + 'w;

/// The same, with the values of one tensor after the other, as `values` gives them: not all need be in memory at once.
pub fn write_each<T: Stored>(
    path: &Path,
    outlines: &[Outline<'_>],
    metadata: &BTreeMap<String, String>,
    mut values: impl FnMut(usize, &mut Writer<'_, T>) -> io::Result<()>,
) -> Result<(), WeightsError> {
    let io_error = |doing| move |source| WeightsError::Io { path: path.to_path_buf(), doing, source };
    let mut header = header::<T>(path, outlines, metadata)?;
    files::replace(path, |file| {
        file.write_all(&(header.len() as u64).to_le_bytes())?;
        file.write_all(&header)?;
        const CHUNK: usize = 1 << 14;
        let mut bytes = [0; 8 * CHUNK];
        let mut sums = Vec::with_capacity(outlines.len());
        for (index, outline) in outlines.iter().enumerate() {
            let (mut sum, mut count) = (crc32fast::Hasher::new(), 0);
            values(index, &mut |values| {
                count += values.len();
                for values in values.chunks(CHUNK) {
                    T::put(values, &mut bytes);
                    let bytes = &bytes[..size_of_val(values)];
                    sum.update(bytes);
                    file.write_all(bytes)?;
                }
                Ok(())
            })?;
            if names::elements(outline.shape) != Some(count) {
                return Err(io::Error::other(format!("{} has {count} values", outline.name)));
            }
            sums.push(sum.finalize());
        }
        // Known only now that all values went by: not all need be in memory at once.
        checksums::fill(&mut header, &sums);
        file.seek(SeekFrom::Start(size_of::<u64>() as u64))?;
        file.write_all(&header)
    })
    .map_err(io_error("write"))
}

/// With room for checksums. Equal tensors and metadata give equal bytes; the `safetensors` crate would write metadata in random order.
fn header<T: Stored>(
    path: &Path,
    outlines: &[Outline<'_>],
    metadata: &BTreeMap<String, String>,
) -> Result<Vec<u8>, WeightsError> {
    let file_error = |fault| WeightsError::File { path: path.to_path_buf(), fault };
    let mut json = serde_json::Map::new();
    let mut first = serde_json::Map::new();
    first.insert(checksums::KEY.to_string(), checksums::blank(outlines.len()).into());
    let others = metadata.iter().filter(|(key, _)| *key != checksums::KEY);
    first.extend(others.map(|(key, text)| (key.clone(), text.clone().into())));
    json.insert(METADATA.to_string(), first.into());
    let mut begin = 0;
    for Outline { name, shape } in outlines {
        if !is_printable(name) || *name == METADATA {
            return Err(file_error(FileFault::TensorName(printable::shortened(name))));
        }
        let shape = shape.to_vec();
        let bytes = names::elements(&shape).and_then(|elements| elements.checked_mul(size_of::<T>()));
        let Some(end) = bytes.and_then(|bytes| bytes.checked_add(begin)) else {
            return Err(at(path, name, TensorFault::Overflow { shape, dtype: T::DTYPE }));
        };
        let info = TensorInfo { dtype: T::DTYPE, shape, data_offsets: (begin, end) };
        json.insert(name.to_string(), serde_json::json!(info));
        begin = end;
    }
    let mut json = serde_json::Value::Object(json).to_string().into_bytes();
    // Values that begin at a multiple of eight bytes can be used where they lie by readers that map the file.
    json.resize(json.len().next_multiple_of(8), b' ');
    match json.len() as u64 {
        length if length > MAX_HEADER => Err(file_error(FileFault::HeaderTooLong(length))),
        _ => Ok(json),
    }
}

#[cfg(test)]
mod tests;
