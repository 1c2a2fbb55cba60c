//! The directory of a zip archive whose files are stored as they are, which is how PyTorch writes it.
//!
//! Numbers are little-endian. PyTorch writes the directory twice, in the old form and in the one for large files ("zip64").

use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;

use super::container::read_range;
use super::{Fault, PthFault};

/// 65,536 files of names as long as PyTorch's take a tenth of it.
const MAX_DIRECTORY: u64 = 64 << 20;

const LOCAL: [u8; 4] = *b"PK\x03\x04";
const CENTRAL: [u8; 4] = *b"PK\x01\x02";
const END: [u8; 4] = *b"PK\x05\x06";
const END_64: [u8; 4] = *b"PK\x06\x06";
const LOCATOR_64: [u8; 4] = *b"PK\x06\x07";
const LOCAL_LENGTH: u64 = 30;
const CENTRAL_LENGTH: usize = 46;
const END_LENGTH: usize = 22;
const END_64_LENGTH: u64 = 56;
const LOCATOR_64_LENGTH: usize = 20;
/// What stands in a field of the old form when the number is in the new one.
const ELSEWHERE: u64 = u32::MAX as u64;

struct Entry {
    /// Of the local header, which comes before the bytes.
    offset: u64,
    /// As stored.
    length: u64,
    /// Neither compressed nor encrypted.
    plain: bool,
}

pub(super) struct Zip {
    entries: BTreeMap<String, Entry>,
    /// No file reaches beyond.
    directory: u64,
}

fn damaged(what: impl ToString) -> PthFault {
    PthFault::Zip(what.to_string())
}

impl Zip {
    pub fn read(file: &File, length: u64) -> Result<Self, Fault> {
        let directory = find_directory(file, length)?;
        let mut bytes = &read_range(file, directory.clone())?[..];
        let mut entries = BTreeMap::new();
        let mut total = 0u64;
        while !bytes.is_empty() {
            let (name, entry, length) = parse_entry(bytes)?;
            bytes = &bytes[length..];
            total = total.saturating_add(entry.length);
            if entries.insert(name, entry).is_some() {
                return Err(damaged("it has two files of one name").into());
            }
        }
        // Files that overlap could make a small archive a large one.
        if total > directory.start {
            return Err(damaged("its files have more bytes than it has").into());
        }
        Ok(Self { entries, directory: directory.start })
    }

    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    /// Where the bytes of a file lie.
    pub fn find(&self, file: &File, name: &str) -> Result<Option<Range<u64>>, Fault> {
        self.entries.get(name).map(|entry| self.locate(file, entry)).transpose()
    }

    fn locate(&self, file: &File, entry: &Entry) -> Result<Range<u64>, Fault> {
        if !entry.plain {
            return Err(damaged("its files are compressed or encrypted, which PyTorch does not do").into());
        }
        let beyond = || damaged("a file lies beyond its end");
        let header_end = entry.offset.checked_add(LOCAL_LENGTH).filter(|&end| end <= self.directory);
        let header_end = header_end.ok_or_else(beyond)?;
        let header = read_range(file, entry.offset..header_end)?;
        if !header.starts_with(&LOCAL) {
            return Err(damaged("a file is not where its directory says").into());
        }
        let (name, extra) = (number::<2>(&header, 26), number::<2>(&header, 28));
        let begin = name.zip(extra).map(|(name, extra)| header_end + name + extra);
        let range = begin.and_then(|begin| Some(begin..begin.checked_add(entry.length)?));
        range.filter(|range| range.end <= self.directory).ok_or_else(|| beyond().into())
    }
}

/// The `N` bytes at `at` as a number.
fn number<const N: usize>(bytes: &[u8], at: usize) -> Option<u64> {
    let digits: &[u8; N] = bytes.get(at..)?.first_chunk()?;
    Some(digits.iter().rev().fold(0, |number, &byte| number << 8 | u64::from(byte)))
}

fn find_directory(file: &File, length: u64) -> Result<Range<u64>, Fault> {
    let no_end = || damaged("it has no directory, perhaps it is truncated");
    // The end may be followed by a comment, which PyTorch does not write.
    let tail_begin = length.saturating_sub((END_LENGTH + LOCATOR_64_LENGTH) as u64);
    let tail = read_range(file, tail_begin..length)?;
    let end =
        tail.len().checked_sub(END_LENGTH).filter(|&end| tail[end..].starts_with(&END)).ok_or_else(no_end)?;
    let (mut size, mut offset) = (number::<4>(&tail, end + 12), number::<4>(&tail, end + 16));
    if tail.starts_with(&LOCATOR_64) && end == LOCATOR_64_LENGTH {
        let at = number::<8>(&tail, 8)
            .filter(|at| at.checked_add(END_64_LENGTH).is_some_and(|end| end <= tail_begin));
        let at = at.ok_or_else(no_end)?;
        let end = read_range(file, at..at + END_64_LENGTH)?;
        if !end.starts_with(&END_64) {
            return Err(no_end().into());
        }
        (size, offset) = (number::<8>(&end, 40), number::<8>(&end, 48));
    }
    let range = size.zip(offset).and_then(|(size, offset)| Some(offset..offset.checked_add(size)?));
    match range {
        Some(range) if range.end > length => Err(damaged("its directory lies beyond its end").into()),
        Some(range) if range.end - range.start > MAX_DIRECTORY => {
            Err(damaged("its directory is too long").into())
        }
        Some(range) => Ok(range),
        None => Err(no_end().into()),
    }
}

/// The first file of the directory, and the length of its entry there.
fn parse_entry(bytes: &[u8]) -> Result<(String, Entry, usize), PthFault> {
    let cut = || damaged("its directory is not one");
    if !bytes.starts_with(&CENTRAL) {
        return Err(cut());
    }
    let field = |at| number::<4>(bytes, at).ok_or_else(cut);
    let short = |at| number::<2>(bytes, at).map(|number| number as usize).ok_or_else(cut);
    let (flags, method) = (short(8)?, short(10)?);
    let name_end = CENTRAL_LENGTH + short(28)?;
    let extra_end = name_end + short(30)?;
    let end = extra_end + short(32)?;
    let name = bytes.get(CENTRAL_LENGTH..name_end).ok_or_else(cut)?;
    let extra = bytes.get(name_end..extra_end).ok_or_else(cut)?;
    let name = String::from_utf8(name.to_vec()).map_err(|_| damaged("a name is not UTF-8"))?;
    let (mut stored, mut length, mut offset) = (field(20)?, field(24)?, field(42)?);
    // The large numbers come in this order, and only those that are needed.
    let mut large = zip64_numbers(extra);
    for number in [&mut length, &mut stored, &mut offset] {
        if *number == ELSEWHERE {
            *number = large.next().ok_or_else(cut)?;
        }
    }
    if end > bytes.len() {
        return Err(cut());
    }
    let plain = method == 0 && flags & 1 == 0 && stored == length;
    Ok((name, Entry { offset, length: stored, plain }, end))
}

/// The numbers of the field for large files, among the extra fields of an entry: (kind, length, bytes) each.
fn zip64_numbers(mut extra: &[u8]) -> impl Iterator<Item = u64> {
    const ZIP64: u64 = 1;
    let mut found: &[u8] = &[];
    while let (Some(kind), Some(length)) = (number::<2>(extra, 0), number::<2>(extra, 2)) {
        let end = 4 + length as usize;
        let Some(bytes) = extra.get(4..end) else { break };
        if kind == ZIP64 {
            found = bytes;
            break;
        }
        extra = &extra[end..];
    }
    found.as_chunks().0.iter().map(|&digits| u64::from_le_bytes(digits))
}
