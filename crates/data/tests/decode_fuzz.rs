//! Broken files: whatever the bytes, `decode` and `decode_mask` answer, and allocate no more than their limit on pixels allows.
//!
//! Mutates the files of fixtures/images in ways that suit their formats; `common/fuzz.rs` says how often.

use data::{Image, decode};
use std::path::Path;
use testing::Random;
use testing::allocations::{Counting, peak};
use testing::fuzz::rounds;

/// Images may claim this many pixels here.
const MAX_PIXELS: usize = 1 << 20;

/// What a decoder may hold for each of them: coefficients of a progressive JPEG take 8 bytes, pixels 4, and a turned
/// image once more; Vecs that grow may be twice as large as what they hold.
const BYTES_PER_PIXEL: usize = 24;

/// Tables, and rows of JPEG that are padded to 32 pixels, be the image one pixel high.
const FIXED_BYTES: usize = 32 << 20;

#[global_allocator]
static ALLOCATOR: Counting = Counting::new();

#[test]
fn broken_files_are_answered_within_bounds() {
    let files = files();
    let (mut decoded, mut refused) = (0, 0);
    rounds(
        "images",
        300_000,
        |random| {
            let mut mutant =
                if random.below(4) == 0 { random.damaged(&files) } else { mutate(&files, random) };
            if random.below(4) > 0 {
                mend_checksums(&mut mutant);
            }
            mutant
        },
        |mutant| {
            let channels = if (decoded + refused) % 2 == 0 { 3 } else { 1 };
            let mut image = Image::default();
            let name = Path::new("mutant");
            let (answer, used) =
                peak(|| decode::decode_within(MAX_PIXELS, mutant, name, channels, &mut image));
            match answer {
                Ok(()) => {
                    decoded += 1;
                    assert_eq!(image.pixels.len(), image.width * image.height * channels);
                }
                Err(error) => {
                    refused += 1;
                    assert!(!error.to_string().contains('\n'), "{error:?}");
                }
            }
            let mut mask = vec![];
            let (answer, used_by_mask) =
                peak(|| decode::decode_mask_within(MAX_PIXELS, mutant, name, &mut mask));
            match answer {
                Ok((width, height)) => assert_eq!(mask.len(), width * height),
                Err(error) => assert!(!error.to_string().contains('\n'), "{error:?}"),
            }
            (used.max(used_by_mask), MAX_PIXELS * BYTES_PER_PIXEL + FIXED_BYTES + mutant.len() * 2)
        },
    );
    println!("{decoded} mutants decoded, {refused} refused");
    assert!(decoded > 0 && refused > 0);
}

fn files() -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/images");
    let mut paths: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.retain(|path| path.extension().is_some_and(|extension| extension != "json"));
    paths.sort();
    paths.iter().map(|path| std::fs::read(path).unwrap()).collect()
}

/// A file with one to four things done to it. Headers are hit more often than their share of bytes.
fn mutate(files: &[Vec<u8>], random: &mut Random) -> Vec<u8> {
    let mut bytes = files[random.below(files.len())].clone();
    for _ in 0..=random.below(4) {
        if bytes.is_empty() {
            break;
        }
        let span = if random.below(2) == 0 { bytes.len() } else { bytes.len().min(64) };
        let at = random.below(span);
        match random.below(8) {
            0 => bytes[at] ^= 1 << random.below(8),
            1 => bytes[at] = random.below(256) as u8,
            2 => bytes.truncate(at),
            // Lengths and sizes: extreme values, two or four bytes wide.
            3 | 4 => {
                let value = [0, 1, 2, 0x7f, 0x80, 0xff][random.below(6)];
                let width = [2, 4][random.below(2)];
                bytes[at..].iter_mut().take(width).for_each(|byte| *byte = value);
            }
            5 => {
                let other = &files[random.below(files.len())];
                let from = random.below(other.len());
                bytes.truncate(at);
                bytes.extend_from_slice(&other[from..]);
            }
            6 => {
                let length = random.below(32).min(bytes.len() - at);
                bytes.drain(at..at + length);
            }
            _ => {
                let length = random.below(64).min(bytes.len() - at);
                let copy = bytes[at..at + length].to_vec();
                let to = random.below(bytes.len());
                bytes.splice(to..to, copy);
            }
        }
    }
    bytes
}

/// Broken checksums are all that a decoder of PNG would ever look at.
fn mend_checksums(bytes: &mut [u8]) {
    let mut at = 8;
    while bytes.starts_with(b"\x89PNG") {
        let Some(&[l3, l2, l1, l0]) = bytes.get(at..at + 4) else { return };
        let end = at + 8 + u32::from_be_bytes([l3, l2, l1, l0]) as usize;
        let Some(chunk) = bytes.get(at + 4..end) else { return };
        let checksum = !chunk.iter().fold(!0, |sum: u32, &byte| {
            (0..8).fold(sum ^ u32::from(byte), |sum, _| {
                (sum >> 1) ^ (0xedb8_8320 & 0_u32.wrapping_sub(sum & 1))
            })
        });
        let Some(place) = bytes.get_mut(end..end + 4) else { return };
        place.copy_from_slice(&checksum.to_be_bytes());
        at = end + 4;
    }
}
