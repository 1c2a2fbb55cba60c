//! Where a file keeps its pickle and its storages: in a zip archive, or one after the other ("legacy").

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::Path;

use data::pickle::{Pickle, Value};

use super::zip::Zip;
use super::{Fault, MAX_PICKLE, PthFault, view};

/// How many bytes tell what a file is.
pub(super) const START: u64 = LEGACY.len() as u64;

/// The first of the legacy format's pickles: a whole number of ten bytes.
const LEGACY: &[u8] = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.";
/// The second: the version of the format.
const LEGACY_VERSION: i64 = 1001;

pub(super) fn is_zip(start: &[u8]) -> bool {
    start.starts_with(b"PK\x03\x04")
}

pub(super) fn is_legacy(start: &[u8]) -> bool {
    start.starts_with(LEGACY)
}

pub(super) struct Container {
    file: File,
    pub length: u64,
    /// The pickle of the weights; of a legacy file its beginning, as much as a pickle may have.
    bytes: Vec<u8>,
    /// Where in `bytes` the pickle of the weights begins.
    begin: usize,
    archive: Option<Archive>,
}

/// A zip archive, and the folder in it that everything is in.
struct Archive {
    zip: Zip,
    folder: String,
}

/// The place of every storage in the file, by key.
type Storages = BTreeMap<String, Range<u64>>;

impl Container {
    pub fn open(path: &Path) -> Result<Self, Fault> {
        let file = File::open(path)?;
        let length = file.metadata()?.len();
        let mut start = Vec::new();
        (&file).take(START).read_to_end(&mut start)?;
        if is_zip(&start) { Self::zip(file, length) } else { Self::legacy(file, length) }
    }

    fn zip(file: File, length: u64) -> Result<Self, Fault> {
        let zip = Zip::read(&file, length)?;
        let folder_of = |name: &str| {
            name.strip_suffix("/data.pkl").filter(|folder| !folder.contains('/')).map(str::to_string)
        };
        let folder = zip.names().find_map(folder_of).ok_or(PthFault::NoPickle)?;
        let archive = Archive { zip, folder };
        if archive.find(&file, "constants.pkl")?.is_some() {
            return Err(PthFault::TorchScript.into());
        }
        // Written since PyTorch 2.1; before that, nothing but little-endian was.
        let order = archive.small(&file, "byteorder")?;
        if order.is_some_and(|order| order != b"little") {
            return Err(PthFault::BigEndian.into());
        }
        let bytes = archive.small(&file, "data.pkl")?.ok_or(PthFault::NoPickle)?;
        Ok(Self { file, length, bytes, begin: 0, archive: Some(archive) })
    }

    /// Five pickles (a mark, a version, about the machine, the weights, the keys of the storages), then the storages.
    fn legacy(mut file: File, length: u64) -> Result<Self, Fault> {
        let mut bytes = Vec::new();
        file.rewind()?;
        (&file).take(MAX_PICKLE).read_to_end(&mut bytes)?;
        let mut begin = LEGACY.len();
        let (version, length_of_version) = Pickle::read_first(bytes.get(begin..).unwrap_or_default())?;
        if version.root().int() != Some(LEGACY_VERSION) {
            return Err(PthFault::Damaged("the version of the format is not known").into());
        }
        begin += length_of_version;
        let (machine, length_of_machine) = Pickle::read_first(bytes.get(begin..).unwrap_or_default())?;
        if machine.root().get("little_endian").and_then(Value::bool) == Some(false) {
            return Err(PthFault::BigEndian.into());
        }
        begin += length_of_machine;
        Ok(Self { file, length, bytes, begin, archive: None })
    }

    /// The pickle of the weights, and where it ends.
    pub fn pickle(&self) -> Result<(Pickle<'_>, usize), Fault> {
        let bytes = self.bytes.get(self.begin..).unwrap_or_default();
        let (pickle, length) = match self.archive {
            Some(_) => (Pickle::read(bytes)?, bytes.len()),
            None => Pickle::read_first(bytes)?,
        };
        Ok((pickle, self.begin + length))
    }

    /// Where the storages lie that a pickle, which ends at `end`, speaks of.
    pub fn storages(&self, pickle: &Pickle<'_>, end: usize) -> Result<Storages, Fault> {
        let used: BTreeMap<&str, usize> =
            pickle.references().filter_map(view::storage).map(|(key, _, width)| (key, width)).collect();
        let Some(archive) = &self.archive else { return self.legacy_storages(&used, end) };
        let mut storages = Storages::new();
        for key in used.keys() {
            if let Some(range) = archive.find(&self.file, &format!("data/{key}"))? {
                storages.insert(key.to_string(), range);
            }
        }
        Ok(storages)
    }

    /// `used` has the bytes per value of every storage.
    fn legacy_storages(&self, used: &BTreeMap<&str, usize>, end: usize) -> Result<Storages, Fault> {
        let (keys, length) = Pickle::read_first(self.bytes.get(end..).unwrap_or_default())?;
        let keys = keys.root().items().ok_or(PthFault::Damaged("the keys of its storages are missing"))?;
        let mut storages = Storages::new();
        let mut at = (end + length) as u64;
        for key in keys {
            let known = key.text().and_then(|key| Some((key, *used.get(key)?)));
            let (key, width) = known.ok_or(PthFault::Damaged("it has a storage that no tensor uses"))?;
            let range = self.legacy_storage(at, width)?;
            at = range.end;
            if storages.insert(key.to_string(), range).is_some() {
                return Err(PthFault::Damaged("it has two storages under one key").into());
            }
        }
        Ok(storages)
    }

    /// A storage begins with the number of its values.
    fn legacy_storage(&self, at: u64, width: usize) -> Result<Range<u64>, Fault> {
        let cut = PthFault::Damaged("it ends within a storage");
        let begin = at + size_of::<u64>() as u64;
        if begin > self.length {
            return Err(cut.into());
        }
        let count = read_range(&self.file, at..begin)?;
        let count = count.first_chunk().map_or(0, |count| u64::from_le_bytes(*count));
        let end = count.checked_mul(width as u64).and_then(|length| begin.checked_add(length));
        let end = end.filter(|&end| end <= self.length).ok_or(cut)?;
        Ok(begin..end)
    }

    /// Bytes of a storage.
    pub fn bytes(&self, range: Range<u64>) -> io::Result<Vec<u8>> {
        read_range(&self.file, range)
    }
}

impl Archive {
    fn find(&self, file: &File, name: &str) -> Result<Option<Range<u64>>, Fault> {
        self.zip.find(file, &format!("{}/{name}", self.folder))
    }

    /// All of a file that should be small.
    fn small(&self, file: &File, name: &str) -> Result<Option<Vec<u8>>, Fault> {
        let Some(range) = self.find(file, name)? else { return Ok(None) };
        let length = range.end - range.start;
        if length > MAX_PICKLE {
            return Err(PthFault::PickleTooLong(length).into());
        }
        Ok(Some(read_range(file, range)?))
    }
}

/// Bytes of a file that are known to lie within it.
pub(super) fn read_range(mut file: &File, range: Range<u64>) -> io::Result<Vec<u8>> {
    file.seek(SeekFrom::Start(range.start))?;
    let mut bytes = vec![0; (range.end - range.start) as usize];
    file.read_exact(&mut bytes)?;
    Ok(bytes)
}
