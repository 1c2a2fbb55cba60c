//! The checksums of a file, within its header: metadata `crc32` holds that of the header, then those of the tensors in the
//! order of their bytes, each as eight hexadecimal digits. They are zlib's CRC-32; that of the header is taken over its JSON
//! with `00000000` in its own place.
//!
//! They are the first thing in a header, so that their place is known without parsing it. To any other reader they are
//! metadata like the rest.

use super::METADATA;

/// Name of the metadata.
pub(super) const KEY: &str = "crc32";
const DIGITS: usize = 8;
/// Where a header has its digits.
const PLACE: std::ops::Range<usize> = BEGIN.len()..BEGIN.len() + DIGITS;
/// How a header with checksums begins.
const BEGIN: &str = r#"{"__metadata__":{"crc32":""#;

pub(super) fn of(bytes: &[u8]) -> u32 {
    crc32fast::hash(bytes)
}

/// The text for a file of so many tensors, as long as it will be.
pub(super) fn blank(tensors: usize) -> String {
    vec!["0".repeat(DIGITS); tensors + 1].join(" ")
}

/// Puts the checksums of the tensors, then that of the header, where [`blank`] left room.
pub(super) fn fill(header: &mut [u8], tensors: &[u32]) {
    debug_assert!(header.starts_with(BEGIN.as_bytes()), "{METADATA} begins with {KEY}");
    for (index, sum) in tensors.iter().enumerate() {
        let begin = PLACE.start + (index + 1) * (DIGITS + 1);
        header[begin..begin + DIGITS].copy_from_slice(digits(*sum).as_bytes());
    }
    let sum = digits(of_header(header));
    header[PLACE].copy_from_slice(sum.as_bytes());
}

/// The checksums of so many tensors from their text; none if the header is not as it was written.
pub(super) fn read(header: &[u8], text: &str, tensors: usize) -> Option<Vec<u32>> {
    let numbers: Option<Vec<u32>> = text.split(' ').map(number).collect();
    let numbers = numbers.filter(|numbers| numbers.len() == tensors + 1)?;
    let sound = header.strip_prefix(BEGIN.as_bytes())?.starts_with(text.as_bytes())
        && of_header(header) == numbers[0];
    sound.then(|| numbers[1..].to_vec())
}

/// With zeros for its own digits.
fn of_header(header: &[u8]) -> u32 {
    let mut sum = crc32fast::Hasher::new();
    sum.update(&header[..PLACE.start]);
    sum.update(&[b'0'; DIGITS]);
    sum.update(&header[PLACE.end..]);
    sum.finalize()
}

fn digits(sum: u32) -> String {
    format!("{sum:08x}")
}

/// As [`digits`] writes it, and in no other way.
fn number(text: &str) -> Option<u32> {
    u32::from_str_radix(text, 16).ok().filter(|sum| digits(*sum) == text)
}
