//! The first byte says as which file of which set the others are read.

#![no_main]

use data::pickle::MEMORY_PER_BYTE;
use data::{Cifar, CifarKind, CifarLabels, Dataset, Sample, Split};
use fuzz::{Scratch, check_error, within};
use libfuzzer_sys::fuzz_target;
use std::path::Path;
use std::sync::LazyLock;

const FINE: CifarKind = CifarKind::Hundred { labels: CifarLabels::Fine };
const COARSE: CifarKind = CifarKind::Hundred { labels: CifarLabels::Coarse };

static SCRATCH: LazyLock<Scratch> = LazyLock::new(|| Scratch::new("cifar"));

/// For messages, and the buffers of files.
const OVERHEAD: usize = 200_000;

/// Gzip packs a thousand bytes into one at best; each is held once packed in its file and once as pixels.
const ARCHIVE_PER_BYTE: usize = 3 * 1032;

fuzz_target!(|input: &[u8]| {
    let Some((choice, bytes)) = input.split_first() else { return };
    let (name, kind, per_byte) = match choice {
        b'b' => ("test_batch.bin", CifarKind::Ten, 3),
        b'f' => ("test.bin", FINE, 3),
        b'c' => ("test.bin", COARSE, 3),
        b'p' => ("test_batch", CifarKind::Ten, MEMORY_PER_BYTE),
        b'q' => ("test", FINE, MEMORY_PER_BYTE),
        b'r' => ("test", COARSE, MEMORY_PER_BYTE),
        b'a' => ("cifar-10-binary.tar.gz", CifarKind::Ten, ARCHIVE_PER_BYTE),
        b'd' => ("cifar-100-python.tar.gz", FINE, ARCHIVE_PER_BYTE),
        _ => return,
    };
    let folder = SCRATCH.folder(name, bytes);
    within(per_byte * bytes.len() + OVERHEAD, || read(&folder, kind));
});

fn read(folder: &Path, kind: CifarKind) {
    match Cifar::open(folder, kind, Split::Test) {
        Ok(set) => {
            let mut sample = Sample::default();
            for index in 0..set.len() {
                set.read(index, &mut sample).expect("an image that is counted");
                assert!(set.label(index) < set.classes());
            }
        }
        Err(error) => check_error(error),
    }
}
