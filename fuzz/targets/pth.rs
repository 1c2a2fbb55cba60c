#![no_main]

use data::pickle::MEMORY_PER_BYTE;
use fuzz::{Scratch, check_error, within};
use libfuzzer_sys::fuzz_target;
use std::sync::LazyLock;
use formats::pth;

static SCRATCH: LazyLock<Scratch> = LazyLock::new(|| Scratch::new("pth"));

/// For messages, and the buffers of files.
const OVERHEAD: usize = 20_000;

/// The values as f32, at most one for each byte of the file, and the bytes of one storage.
const VALUES_PER_BYTE: usize = 5;

fuzz_target!(|bytes: &[u8]| {
    let path = SCRATCH.file(bytes);
    match within((MEMORY_PER_BYTE + VALUES_PER_BYTE) * bytes.len() + OVERHEAD, || pth::read(&path)) {
        Ok(weights) => assert!(weights.values().all(|tensor| tensor.is_whole())),
        Err(error) => check_error(error),
    }
});
