//! Pages of a column chunk: headers, compression, levels and values.

use super::thrift::{self, Value, varint};
use std::io::Read;

/// No page may claim to unpack to more.
const MAX_PAGE: u64 = 1 << 30;

/// Facts of a column before its pages are read.
pub(super) struct Chunk {
    pub(super) kind: u64,
    pub(super) codec: u64,
    /// Flag: values may be missing.
    pub(super) optional: bool,
    /// Rows of the row group.
    pub(super) rows: usize,
}

const CUT_OFF: &str = "a page is cut off";

impl Chunk {
    /// All values as text; those that are missing are empty.
    pub(super) fn read(&self, mut bytes: &[u8]) -> Result<Vec<String>, String> {
        let (mut values, mut dictionary) = (vec![], None);
        while values.len() < self.rows && !bytes.is_empty() {
            let (header, len) = thrift::read(bytes)?;
            let size = |field| {
                header.number(field).filter(|size| *size <= MAX_PAGE).ok_or("a page has no valid size")
            };
            let (unpacked, packed) = (size(2)?, size(3)?);
            let (page, rest) = bytes[len..].split_at_checked(packed as usize).ok_or(CUT_OFF)?;
            bytes = rest;
            match header.number(1) {
                Some(0) => {
                    let page = self.unpacked(page, unpacked)?;
                    self.page(header.get(5), 2, &page, None, dictionary.as_deref(), &mut values)?;
                }
                Some(2) => {
                    let about = header.get(7).ok_or("a dictionary has no header")?;
                    let page = self.unpacked(page, unpacked)?;
                    let count = about.number(1).unwrap_or(0).min(page.len() as u64);
                    dictionary = Some(self.plain(&page, count as usize)?);
                }
                Some(3) => {
                    let about = header.get(8).ok_or("a page has no header")?;
                    let sizes = [5, 6].map(|field| about.number(field).unwrap_or(u64::MAX));
                    let [levels, repetition] = sizes;
                    if repetition != 0 {
                        return Err("has repeated values".into());
                    }
                    let (levels, rest) = usize::try_from(levels)
                        .ok()
                        .and_then(|len| page.split_at_checked(len))
                        .ok_or(CUT_OFF)?;
                    let unpacked = unpacked.checked_sub(levels.len() as u64).ok_or(CUT_OFF)?;
                    let rest = if about.flag(7) == Some(false) {
                        rest.to_vec()
                    } else {
                        self.unpacked(rest, unpacked)?
                    };
                    self.page(Some(about), 4, &rest, Some(levels), dictionary.as_deref(), &mut values)?;
                }
                Some(1) => {}
                _ => return Err("has a page of an unknown kind".into()),
            }
        }
        Ok(values)
    }

    fn unpacked(&self, page: &[u8], len: u64) -> Result<Vec<u8>, String> {
        let mut out = vec![];
        let read = match self.codec {
            0 => return Ok(page.to_vec()),
            1 => {
                if snap::raw::decompress_len(page).is_ok_and(|found| found as u64 == len) {
                    out =
                        snap::raw::Decoder::new().decompress_vec(page).map_err(|error| error.to_string())?;
                }
                Ok(0)
            }
            2 => flate2::read::MultiGzDecoder::new(page).take(len + 1).read_to_end(&mut out),
            6 => {
                let decoder =
                    ruzstd::decoding::StreamingDecoder::new(page).map_err(|error| error.to_string())?;
                decoder.take(len + 1).read_to_end(&mut out)
            }
            other => {
                let name = ["LZO", "Brotli", "LZ4", "", "LZ4"].get((other as usize).wrapping_sub(3));
                let name = name.filter(|name| !name.is_empty()).unwrap_or(&"an unknown codec");
                return Err(format!("is compressed with {name}; Snappy, gzip, Zstandard and none are read"));
            }
        };
        read.map_err(|error| error.to_string())?;
        if out.len() as u64 == len { Ok(out) } else { Err("a page does not unpack to its size".into()) }
    }

    /// Values of a data page. `encoding`: the field of its header that names that. `levels`: those that stand outside of it.
    fn page(
        &self,
        about: Option<&Value>,
        encoding: i16,
        mut page: &[u8],
        levels: Option<&[u8]>,
        dictionary: Option<&[String]>,
        values: &mut Vec<String>,
    ) -> Result<(), String> {
        let about = about.ok_or("a page has no header")?;
        let room = (self.rows - values.len()) as u64;
        let count =
            about.number(1).filter(|count| *count <= room).ok_or("has more values than rows")? as usize;
        let present = match (self.optional, levels) {
            (false, _) => vec![1; count],
            (true, Some(levels)) => runs(levels, 1, count)?,
            (true, None) => {
                let (len, rest) = page.split_first_chunk::<4>().ok_or(CUT_OFF)?;
                let (levels, rest) =
                    rest.split_at_checked(u32::from_le_bytes(*len) as usize).ok_or(CUT_OFF)?;
                page = rest;
                runs(levels, 1, count)?
            }
        };
        let there = present.iter().filter(|level| **level == 1).count();
        let found: Vec<String> = match about.number(encoding) {
            Some(0) => self.plain(page, there)?,
            Some(2 | 8) => {
                let dictionary = dictionary.ok_or("has no dictionary")?;
                let (width, rest) = page.split_first().ok_or(CUT_OFF)?;
                let places = runs(rest, *width, there)?;
                let word = |place: u32| dictionary.get(place as usize).cloned();
                places
                    .into_iter()
                    .map(word)
                    .collect::<Option<_>>()
                    .ok_or("names what its dictionary lacks")?
            }
            other => {
                let other = other.map_or("unknown".to_string(), |number| number.to_string());
                return Err(format!("is encoded as number {other}; plain values and dictionaries are read"));
            }
        };
        let mut found = found.into_iter();
        values.extend(present.into_iter().map(|level| match level {
            1 => found.next().unwrap_or_default(),
            _ => String::new(),
        }));
        Ok(())
    }

    /// `count` plain values.
    fn plain(&self, mut page: &[u8], count: usize) -> Result<Vec<String>, String> {
        let mut values = Vec::with_capacity(count.min(page.len()));
        for _ in 0..count {
            let (text, rest) = match self.kind {
                1 => page
                    .split_first_chunk()
                    .map(|(bytes, rest)| (i32::from_le_bytes(*bytes).to_string(), rest)),
                2 => page
                    .split_first_chunk()
                    .map(|(bytes, rest)| (i64::from_le_bytes(*bytes).to_string(), rest)),
                6 => {
                    let (len, rest) = page.split_first_chunk().ok_or(CUT_OFF)?;
                    let (text, rest) =
                        rest.split_at_checked(u32::from_le_bytes(*len) as usize).ok_or(CUT_OFF)?;
                    let text = std::str::from_utf8(text).map_err(|_| "is not text: it is not valid UTF-8")?;
                    Some((text.to_string(), rest))
                }
                _ => return Err("holds neither text nor whole numbers".into()),
            }
            .ok_or(CUT_OFF)?;
            page = rest;
            values.push(text);
        }
        Ok(values)
    }
}

/// `count` numbers of `width` bits each, in runs of equal ones and of packed ones.
fn runs(mut bytes: &[u8], width: u8, count: usize) -> Result<Vec<u32>, String> {
    if width > 32 {
        return Err("has numbers of more than 32 bits".into());
    }
    let (mut values, bits) = (Vec::with_capacity(count), usize::from(width));
    while values.len() < count {
        let head = varint(&mut bytes).ok_or(CUT_OFF)?;
        let room = count - values.len();
        if head & 1 == 0 {
            let len = bits.div_ceil(8);
            let (value, rest) = bytes.split_at_checked(len).ok_or(CUT_OFF)?;
            let number = value.iter().rev().fold(0u32, |number, byte| number << 8 | u32::from(*byte));
            let times = usize::try_from(head >> 1).unwrap_or(room).min(room);
            if times == 0 {
                return Err("has an empty run".into());
            }
            values.extend(std::iter::repeat_n(number, times));
            bytes = rest;
            continue;
        }
        let len =
            usize::try_from(head >> 1).ok().and_then(|groups| groups.checked_mul(bits)).ok_or(CUT_OFF)?;
        let packed = bytes.get(..len.min(bytes.len())).unwrap_or_default();
        bytes = &bytes[packed.len()..];
        let there = (packed.len() * 8).checked_div(bits).unwrap_or(room);
        if there == 0 {
            return Err(CUT_OFF.into());
        }
        let bit = |at: usize| u32::from(packed[at / 8] >> (at % 8) & 1);
        let number = |i: usize| (0..bits).fold(0, |number, b| number | bit(i * bits + b) << b);
        values.extend((0..there.min(room)).map(number));
    }
    Ok(values)
}
