//! Weights on disk, as safetensors: eight bytes of length, a JSON header, then the values.
//!
//! The header is checked here rather than by the `safetensors` crate, which supplies the types: its errors do
//! not say which tensor is at fault, it takes the last of two tensors with one name, and its sum of offsets
//! can overflow.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs::{self, File};
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use models::names::{self, Convention, NameError, Tensor, Weights};
use models::positions::{PositionsError, resize_positions};
use models::vit::Vit;
use safetensors::Dtype;
use safetensors::tensor::TensorInfo;
use serde::de::{Deserialize, Deserializer, Error as _, IgnoredAny, MapAccess, Visitor};

#[derive(Debug, thiserror::Error)]
pub enum WeightsError {
    #[error("{}: cannot {doing}: {source}", path.display())]
    Io { path: PathBuf, doing: &'static str, source: io::Error },
    #[error("{}: {fault}", path.display())]
    File { path: PathBuf, fault: FileFault },
    #[error("{}: tensor `{tensor}` {fault}", path.display())]
    Tensor { path: PathBuf, tensor: String, fault: TensorFault },
    #[error("{}: {source}", path.display())]
    Names { path: PathBuf, source: NameError },
    #[error("{}: {source}", path.display())]
    Positions { path: PathBuf, source: PositionsError },
}

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
}

/// What is wrong with one tensor of a file.
#[derive(Debug, PartialEq, thiserror::Error)]
pub enum TensorFault {
    #[error("occurs twice")]
    Twice,
    #[error("has {0} dimensions, more than {MAX_RANK}")]
    Rank(usize),
    #[error("is of type {0}: only F32, F64, F16 and BF16 can be read")]
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
}

/// The limit of the `safetensors` crate; nobody could read more.
const MAX_HEADER: u64 = 100_000_000;
/// Enough for any weight, and short enough that a shape fits into an error.
const MAX_RANK: usize = 8;
const MAX_NAME: usize = 256;
const METADATA: &str = "__metadata__";

/// Reads all tensors of a file, as f32. Allocates in proportion to the file, whatever its header says.
pub fn read(path: &Path) -> Result<Weights, WeightsError> {
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
    let tensors = parse_header(path, &json, present)?;
    drop(json);

    let mut weights = Weights::new();
    for (name, info) in tensors {
        let mut bytes = vec![0; info.data_offsets.1 - info.data_offsets.0];
        file.read_exact(&mut bytes).map_err(io_error("read"))?;
        let data = to_f32(info.dtype, &bytes).map_err(|fault| at(path, &name, fault))?;
        weights.insert(name, Tensor { shape: info.shape, data });
    }
    Ok(weights)
}

fn at(path: &Path, tensor: &str, fault: TensorFault) -> WeightsError {
    WeightsError::Tensor { path: path.to_path_buf(), tensor: tensor.to_string(), fault }
}

/// The tensors of a header in the order of their bytes, which they cover without gap or overlap.
fn parse_header(path: &Path, json: &[u8], present: u64) -> Result<Vec<(String, TensorInfo)>, WeightsError> {
    let file_error = |fault| WeightsError::File { path: path.to_path_buf(), fault };
    let Header(mut tensors) = serde_json::from_slice(json)
        .map_err(|error: serde_json::Error| file_error(FileFault::Json(shortened(&error.to_string()))))?;
    tensors.sort_by_key(|(_, info)| info.data_offsets);
    let mut names = BTreeSet::new();
    let mut previous_end = 0;
    for (name, info) in &tensors {
        if !is_printable(name) {
            return Err(file_error(FileFault::TensorName(shortened(name))));
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
    Ok(tensors)
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
        Dtype::F64 => Ok(8),
        Dtype::F32 => Ok(4),
        Dtype::F16 | Dtype::BF16 => Ok(2),
        other => Err(TensorFault::Type(other)),
    }
}

fn to_f32(dtype: Dtype, bytes: &[u8]) -> Result<Vec<f32>, TensorFault> {
    fn each<const N: usize>(bytes: &[u8], value: impl Fn([u8; N]) -> f32) -> Vec<f32> {
        bytes.as_chunks().0.iter().map(|&chunk| value(chunk)).collect()
    }
    match dtype {
        Dtype::F64 => Ok(each(bytes, |chunk| f64::from_le_bytes(chunk) as f32)),
        Dtype::F32 => Ok(each(bytes, f32::from_le_bytes)),
        Dtype::F16 => Ok(each(bytes, |chunk| f16::from_le_bytes(chunk).to_f32())),
        Dtype::BF16 => Ok(each(bytes, |chunk| bf16::from_le_bytes(chunk).to_f32())),
        other => Err(TensorFault::Type(other)),
    }
}

/// A name that an error can show on its line.
fn is_printable(name: &str) -> bool {
    name.len() <= MAX_NAME && !name.chars().any(char::is_control)
}

/// Text from a file, fit to be shown.
fn shortened(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { char::REPLACEMENT_CHARACTER } else { c }).take(200).collect()
}

/// All entries of a header as they come; a map would drop the first of two with one name.
struct Header(Vec<(String, TensorInfo)>);

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
        let mut tensors = Vec::new();
        while let Some(name) = map.next_key::<String>()? {
            if name == METADATA {
                map.next_value::<IgnoredAny>()?;
                continue;
            }
            match map.next_value() {
                Ok(info) => tensors.push((name, info)),
                Err(error) => return Err(M::Error::custom(format!("tensor `{name}`: {error}"))),
            }
        }
        Ok(Header(tensors))
    }
}

/// Writes tensors as f32 under their names. The file is there whole or not at all, even if the power fails.
pub fn write(
    path: &Path,
    weights: &Weights,
    metadata: &BTreeMap<String, String>,
) -> Result<(), WeightsError> {
    let io_error = |doing| move |source| WeightsError::Io { path: path.to_path_buf(), doing, source };
    let header = header(path, weights, metadata)?;
    let Some(name) = path.file_name() else {
        return Err(WeightsError::File { path: path.to_path_buf(), fault: FileFault::NotAFile });
    };
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let temporary = folder.join(format!(".{}.{}.tmp", name.to_string_lossy(), std::process::id()));
    let written = write_synced(&temporary, &header, weights).and_then(|()| fs::rename(&temporary, path));
    if written.is_err() {
        // The error that is reported is the first one; whether this succeeds adds nothing.
        let _ = fs::remove_file(&temporary);
    }
    written.map_err(io_error("write"))?;
    File::open(folder).and_then(|folder| folder.sync_all()).map_err(io_error("sync the folder"))
}

fn write_synced(path: &Path, header: &[u8], weights: &Weights) -> io::Result<()> {
    let mut file = BufWriter::new(File::create(path)?);
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(header)?;
    for tensor in weights.values() {
        for value in &tensor.data {
            file.write_all(&value.to_le_bytes())?;
        }
    }
    file.flush()?;
    file.get_ref().sync_all()
}

/// Equal weights and metadata give equal bytes; the `safetensors` crate would write metadata in random order.
fn header(
    path: &Path,
    weights: &Weights,
    metadata: &BTreeMap<String, String>,
) -> Result<Vec<u8>, WeightsError> {
    let file_error = |fault| WeightsError::File { path: path.to_path_buf(), fault };
    let mut entries = serde_json::Map::new();
    if !metadata.is_empty() {
        entries.insert(METADATA.to_string(), serde_json::json!(metadata));
    }
    let mut begin = 0;
    for (name, tensor) in weights {
        if !is_printable(name) || name == METADATA {
            return Err(file_error(FileFault::TensorName(shortened(name))));
        }
        let shape = tensor.shape.clone();
        if !tensor.is_whole() {
            return Err(at(path, name, TensorFault::Torn { shape, values: tensor.data.len() }));
        }
        let end = begin + size_of_val(tensor.data.as_slice());
        let info = TensorInfo { dtype: Dtype::F32, shape, data_offsets: (begin, end) };
        entries.insert(name.clone(), serde_json::json!(info));
        begin = end;
    }
    let mut json = serde_json::Value::Object(entries).to_string().into_bytes();
    // Values that begin at a multiple of eight bytes can be used where they lie by readers that map the file.
    json.resize(json.len().next_multiple_of(8), b' ');
    match json.len() as u64 {
        length if length > MAX_HEADER => Err(file_error(FileFault::HeaderTooLong(length))),
        _ => Ok(json),
    }
}

/// Reads weights for a model, whatever their convention, and resizes their position embedding to its grid.
pub fn load_for(path: &Path, vit: &Vit) -> Result<Weights, WeightsError> {
    let name_error = |source| WeightsError::Names { path: path.to_path_buf(), source };
    let weights = read(path)?;
    let convention = names::detect(weights.keys().map(String::as_str)).map_err(name_error)?;
    let mut weights = names::to_canonical(weights, convention).map_err(name_error)?;
    let class_token = weights.contains_key("cls_token");
    if let Some(pos) = weights.get_mut("pos_embed") {
        *pos = resize_positions(pos, class_token, vit.grid())
            .map_err(|source| WeightsError::Positions { path: path.to_path_buf(), source })?;
    }
    names::check(&weights, vit).map_err(name_error)?;
    Ok(weights)
}

/// Writes canonical weights for another library to read.
pub fn save_as(path: &Path, weights: &Weights, convention: Convention) -> Result<(), WeightsError> {
    let renamed = names::from_canonical(weights.clone(), convention)
        .map_err(|source| WeightsError::Names { path: path.to_path_buf(), source })?;
    // Hugging Face's loader refuses files that do not name their framework.
    write(path, &renamed, &BTreeMap::from([("format".to_string(), "pt".to_string())]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use models::vit::Pool;
    use safetensors::SafeTensors;

    const SMALL: Vit = Vit {
        image: 8,
        patch: 4,
        channels: 1,
        classes: 3,
        width: 4,
        depth: 2,
        heads: 2,
        mlp: 8,
        pool: Pool::ClassToken,
        dropout: 0.0,
        attention_dropout: 0.0,
        drop_path: 0.0,
    };

    /// A folder that goes when the test ends.
    struct Folder(PathBuf);

    impl Folder {
        fn new(test: &str) -> Folder {
            let folder = std::env::temp_dir().join(format!("vitesse-weights-{test}-{}", std::process::id()));
            fs::create_dir_all(&folder).unwrap();
            Folder(folder)
        }

        fn file(&self, name: &str, bytes: &[u8]) -> PathBuf {
            let path = self.0.join(name);
            fs::write(&path, bytes).unwrap();
            path
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn weights_of(vit: &Vit) -> Weights {
        let tensor = |seed: usize, shape: Vec<usize>| {
            let values = shape.iter().product();
            Tensor { shape, data: (0..values).map(|i| (seed * 1000 + i) as f32 / 7.0).collect() }
        };
        let expected = names::expected(vit).into_iter().enumerate();
        expected.map(|(seed, (name, shape))| (name, tensor(seed, shape))).collect()
    }

    fn with_header(json: &str, values: &[u8]) -> Vec<u8> {
        [&(json.len() as u64).to_le_bytes()[..], json.as_bytes(), values].concat()
    }

    #[test]
    fn what_is_saved_in_any_convention_loads_again() {
        let folder = Folder::new("conventions");
        let weights = weights_of(&SMALL);
        for convention in Convention::ALL {
            let path = folder.0.join(format!("{convention}.safetensors"));
            save_as(&path, &weights, convention).unwrap();
            assert_eq!(load_for(&path, &SMALL).unwrap(), weights, "{convention}");
            let bytes = fs::read(&path).unwrap();
            let theirs = SafeTensors::deserialize(&bytes).unwrap();
            let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
            assert_eq!(header.metadata().as_ref().unwrap()["format"], "pt");
            assert_eq!(theirs.len(), read(&path).unwrap().len());
        }
        assert_eq!(fs::read_dir(&folder.0).unwrap().count(), 3, "no temporary file stays");
    }

    #[test]
    fn other_types_become_f32() {
        let folder = Folder::new("types");
        let json = r#"{"d":{"dtype":"F64","shape":[1],"data_offsets":[0,8]},
            "h":{"dtype":"F16","shape":[2],"data_offsets":[8,12]},
            "__metadata__":{"a":"b"},
            "b":{"dtype":"BF16","shape":[],"data_offsets":[12,14]},
            "n":{"dtype":"F32","shape":[0,4],"data_offsets":[14,14]}}"#;
        let values = [&0.1f64.to_le_bytes()[..], &[0x00, 0x3c, 0x01, 0x00], &[0xc0, 0xbf]].concat();
        let weights = read(&folder.file("types", &with_header(json, &values))).unwrap();
        assert_eq!(weights["d"].data, [0.1]);
        assert_eq!(weights["h"].data, [1.0, 2f32.powi(-24)]);
        assert_eq!(weights["b"], Tensor { shape: vec![], data: vec![-1.5] });
        assert_eq!(weights["n"], Tensor { shape: vec![0, 4], data: vec![] });
    }

    #[test]
    fn positions_are_resized_to_the_model() {
        let folder = Folder::new("positions");
        let path = folder.0.join("small.safetensors");
        let weights = weights_of(&SMALL);
        save_as(&path, &weights, Convention::Torchvision).unwrap();
        let larger = load_for(&path, &Vit { image: 16, ..SMALL }).unwrap();
        assert_eq!(larger["pos_embed"].shape, [1, 17, 4]);
        assert_eq!(larger["pos_embed"], resize_positions(&weights["pos_embed"], true, 4).unwrap());
        assert_eq!(larger["head.weight"], weights["head.weight"]);
    }

    #[test]
    fn weights_of_another_model_are_refused() {
        let folder = Folder::new("another");
        let path = folder.0.join("small.safetensors");
        save_as(&path, &weights_of(&SMALL), Convention::HuggingFace).unwrap();
        let refused = |vit: &Vit| load_for(&path, vit).unwrap_err().to_string();
        let shown = path.display();
        assert_eq!(
            refused(&Vit { classes: 7, ..SMALL }),
            format!(
                "{shown}: weights are of another model: head.weight is [3, 4], this model needs [7, 4] \
                 (and 1 more tensor differs)"
            )
        );
        assert!(
            refused(&Vit { pool: Pool::Mean, ..SMALL })
                .ends_with("pos_embed is [1, 5, 4], this model needs [1, 4, 4] (and 5 more tensors differ)")
        );
        let mean = weights_of(&Vit { pool: Pool::Mean, ..SMALL });
        let error = save_as(&path, &mean, Convention::HuggingFace).unwrap_err().to_string();
        assert!(error.ends_with("has no huggingface form: export it as timm"), "{error}");
    }

    #[test]
    fn headers_that_lie_are_refused() {
        let folder = Folder::new("lies");
        let entry = |name: &str, dtype: &str, shape: &str, begin: u64, end: u64| {
            format!(r#""{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{begin},{end}]}}"#)
        };
        let one = |dtype, shape, begin, end| format!("{{{}}}", entry("a", dtype, shape, begin, end));
        let two = |name, begin| {
            format!("{{{},{}}}", entry("a", "F32", "[1]", 0, 4), entry(name, "F32", "[1]", begin, begin + 4))
        };
        // Eight tensors whose offsets reach almost to the largest number there is.
        let far = |i: u64| {
            let size = u64::MAX / 8 - 3;
            entry(&i.to_string(), "F32", &format!("[{}]", size / 4), i * size, (i + 1) * size)
        };
        let far: Vec<String> = (0..8).map(far).collect();
        for (json, fault) in [
            (one("F32", "[3]", 0, 8), "tensor `a` is [3] of F32, which is 12 bytes, but has 8"),
            (one("F32", "[2]", 8, 16), "tensor `a` is at bytes 8 to 16, but the file has 8 bytes"),
            (one("F32", "[2]", 8, 0), "tensor `a` is at bytes 8 to 0, but the file has 8 bytes"),
            (one("I64", "[1]", 0, 8), "tensor `a` is of type I64: only F32, F64, F16 and BF16 can be read"),
            (one("F32", "[1]", 0, 4), "its tensors have 4 bytes, the file has 8 for them"),
            (one("F32", "[9223372036854775807,3]", 0, 8), "more bytes than can be counted"),
            (one("F64", "[2305843009213693952]", 0, 0), "more bytes than can be counted"),
            (one("F32", "[1,1,1,1,1,1,1,1,2]", 0, 8), "tensor `a` has 9 dimensions, more than 8"),
            (two("b", 0), "tensor `b` begins at byte 0 of the values, but the tensor before it ends at 4"),
            (two("b", 2), "tensor `b` begins at byte 2 of the values, but the tensor before it ends at 4"),
            (two("a", 4), "tensor `a` occurs twice"),
            (two(r"b\nc", 4), "`b\u{fffd}c` cannot be the name of a tensor"),
            (one("F31", "[2]", 0, 8), "not a safetensors header: tensor `a`: unknown variant `F31`"),
            (one("F32", "[-2]", 0, 8), "not a safetensors header: tensor `a`: invalid value: integer `-2`"),
            (format!("{{{}}}", far.join(",")), "but the file has 8 bytes of values"),
            ("[1,2]".to_string(), "not a safetensors header: invalid type: sequence"),
            ("garbage".to_string(), "not a safetensors header: expected value"),
            (format!("{{\"a\":{}", "[".repeat(100_000)), "not a safetensors header"),
        ] {
            let path = folder.file("lie", &with_header(&json, &[0; 8]));
            let error = read(&path).unwrap_err().to_string();
            assert!(error.contains(fault), "{error}\nshould say\n{fault}");
            assert!(error.starts_with(&format!("{}: ", path.display())) && !error.contains('\n'), "{error}");
        }
    }

    #[test]
    fn lengths_beyond_the_file_are_refused() {
        let folder = Folder::new("lengths");
        let refused = |bytes: &[u8]| read(&folder.file("f", bytes)).unwrap_err().to_string();
        assert!(refused(b"").ends_with("0 bytes are too few for the length of a header"));
        assert!(refused(&[0xff; 16]).ends_with("should be 18446744073709551615 bytes, the file has 16"));
        assert!(refused(&[&(9u64 << 40).to_le_bytes()[..], b"{}"].concat()).contains("truncated"));
        assert!(read(&folder.0).unwrap_err().to_string().ends_with("not a regular file"));
        assert!(
            read(&folder.0.join("none")).unwrap_err().to_string().contains("none: cannot open: No such file")
        );
        // As long as it says, and all of it a hole.
        let path = folder.file("hole", &(1u64 << 40).to_le_bytes());
        File::options().append(true).open(&path).unwrap().set_len((1 << 40) + 8).unwrap();
        assert!(
            read(&path).unwrap_err().to_string().contains("a header of 1099511627776 bytes is more than")
        );
    }

    #[test]
    fn a_damaged_file_is_an_error_or_other_weights_but_no_panic() {
        let folder = Folder::new("damage");
        let path = folder.0.join("whole.safetensors");
        save_as(&path, &weights_of(&SMALL), Convention::HuggingFace).unwrap();
        let whole = fs::read(&path).unwrap();
        for i in 0..60 {
            let cut = &whole[..whole.len() * i / 60];
            let error = load_for(&folder.file("cut", cut), &SMALL).unwrap_err().to_string();
            assert!(error.contains("cut: ") && !error.contains('\n'), "{error}");
        }
        let mut state = 1u64;
        let mut random = |below: usize| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) as usize % below
        };
        let header = 8 + u64::from_le_bytes(*whole.first_chunk().unwrap()) as usize;
        let mut refused = 0;
        for _ in 0..600 {
            let mut damaged = whole.clone();
            for _ in 0..=random(3) {
                damaged[random(header)] ^= 1 << random(8);
            }
            if let Err(error) = load_for(&folder.file("flip", &damaged), &SMALL) {
                refused += 1;
                let error = error.to_string();
                assert!(error.contains("flip: ") && !error.contains('\n') && error.len() < 1000, "{error}");
            }
        }
        assert!(refused > 550, "only {refused} of 600 damaged headers were refused");
    }

    #[test]
    fn writing_refuses_what_could_not_be_read_and_keeps_the_old_file() {
        let folder = Folder::new("write");
        let path = folder.file("w", b"old");
        let tensor = |values: usize| Tensor { shape: vec![2], data: vec![1.0; values] };
        let none = BTreeMap::new();
        let torn = Weights::from([("a".to_string(), tensor(3))]);
        let error = write(&path, &torn, &none).unwrap_err().to_string();
        assert!(error.ends_with("tensor `a` is [2] but holds 3 values"), "{error}");
        assert!(write(&path, &Weights::from([(METADATA.to_string(), tensor(2))]), &none).is_err());
        assert!(write(&folder.0.join("none/w"), &Weights::new(), &none).is_err());
        assert_eq!(fs::read(&path).unwrap(), b"old");
        let whole = Weights::from([("a".to_string(), tensor(2))]);
        write(&path, &whole, &none).unwrap();
        assert_eq!(read(&path).unwrap(), whole);
    }
}
