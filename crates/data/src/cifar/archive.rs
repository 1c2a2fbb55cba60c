//! Files out of an archive: tar, or tar packed with gzip.
//!
//! Only the wanted files are kept. Everything is counted as it is unpacked, so that a small file that unpacks to a huge one
//! ends at [`MAX_UNPACKED`].

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufReader, Read, Seek};
use std::path::Path;

use flate2::bufread::MultiGzDecoder;

use super::{MAX_FILE, MAX_UNPACKED};
use crate::error::shown;

/// Files found in an archive.
#[derive(Default)]
pub(super) struct Contents {
    pub wanted: BTreeMap<String, Vec<u8>>,
    /// The names of all files, without their folders, as far as they fit [`MAX_OTHERS`].
    pub others: Vec<String>,
}

/// Enough to say what an archive is instead of what it should be.
const MAX_OTHERS: usize = 32;

/// Reads the files with these names, whatever folder of the archive they are in.
pub(super) fn read(path: &Path, wanted: &[&str]) -> Result<Contents, String> {
    let cannot = |doing: &str, error: io::Error| format!("cannot {doing}: {}", shown(error));
    let mut file = File::open(path).map_err(|error| cannot("open", error))?;
    let mut head = Vec::new();
    (&mut file).take(MAGIC_END).read_to_end(&mut head).map_err(|error| cannot("read", error))?;
    file.rewind().map_err(|error| cannot("read", error))?;
    let file = BufReader::with_capacity(1 << 16, file);
    let packed: Box<dyn Read> = match packing(&head)? {
        Packing::None => Box::new(file),
        Packing::Gzip => Box::new(MultiGzDecoder::new(file)),
    };
    unpack(packed, wanted).map_err(|error| cannot("unpack", error))
}

#[derive(Debug, PartialEq)]
enum Packing {
    None,
    Gzip,
}

/// Tar has its mark near the end of the first header.
const TAR: (usize, &[u8]) = (257, b"ustar");
const MAGIC_END: u64 = 262;

/// Kind of a file, by how it begins.
fn packing(head: &[u8]) -> Result<Packing, String> {
    let unpack_first =
        |what: &str| Err(format!("it is packed with {what}; unpack it first, or pack it with gzip"));
    match head {
        [] => Err("it is empty".to_string()),
        [0x1f, 0x8b, ..] => Ok(Packing::Gzip),
        [0xfd, b'7', b'z', b'X', b'Z', ..] => unpack_first("xz"),
        [b'B', b'Z', b'h', ..] => unpack_first("bzip2"),
        [0x28, 0xb5, 0x2f, 0xfd, ..] => unpack_first("zstd"),
        [b'P', b'K', ..] => unpack_first("zip"),
        _ if head.get(TAR.0..).is_some_and(|mark| mark.starts_with(TAR.1)) => Ok(Packing::None),
        _ => Err("it is neither a tar archive nor one packed with gzip".to_string()),
    }
}

fn unpack(packed: impl Read, wanted: &[&str]) -> io::Result<Contents> {
    let mut contents = Contents::default();
    let mut archive = tar::Archive::new(Limited { inner: packed, left: MAX_UNPACKED });
    // Raw: the extensions of tar (long names, sparse files) would be read into memory whole, and no set needs them.
    for entry in archive.entries()?.raw(true) {
        let mut entry = entry?;
        let kind = entry.header().entry_type();
        if !kind.is_file() && !kind.is_contiguous() {
            continue;
        }
        let path = entry.path_bytes();
        let name = path.rsplit(|&byte| byte == b'/').next().unwrap_or(&path);
        let name = String::from_utf8_lossy(name).into_owned();
        if !wanted.contains(&name.as_str()) {
            if contents.others.len() < MAX_OTHERS {
                contents.others.push(name);
            }
            continue;
        }
        let bytes = member(&mut entry).map_err(|error| io::Error::other(format!("{name}: {error}")))?;
        if contents.wanted.insert(name.clone(), bytes).is_some() {
            return Err(io::Error::other(format!("{name}: it is there twice")));
        }
    }
    // The checksum of gzip comes last.
    io::copy(&mut archive.into_inner(), &mut io::sink())?;
    Ok(contents)
}

fn member<R: Read>(entry: &mut tar::Entry<'_, R>) -> io::Result<Vec<u8>> {
    let size = entry.size();
    if size > MAX_FILE {
        return Err(io::Error::other(too_large(size)));
    }
    let mut bytes = Vec::new();
    entry.read_to_end(&mut bytes)?;
    match bytes.len() as u64 {
        length if length == size => Ok(bytes),
        length => Err(io::Error::other(format!("truncated: {length} of {size} bytes are there"))),
    }
}

pub(super) fn too_large(size: u64) -> String {
    format!("{size} bytes are more than a file of this set may have, {MAX_FILE}")
}

/// Fails where more is read than may be.
struct Limited<R> {
    inner: R,
    left: u64,
}

impl<R: Read> Read for Limited<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(buffer)?;
        self.left = self.left.checked_sub(count as u64).ok_or_else(|| {
            io::Error::other(format!("it unpacks to more than {MAX_UNPACKED} bytes, which no such set does"))
        })?;
        Ok(count)
    }
}
