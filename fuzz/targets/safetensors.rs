#![no_main]

use fuzz::{Scratch, check_error, within};
use libfuzzer_sys::fuzz_target;
use std::sync::LazyLock;
use formats::tensors::Stored;
use formats::weights;

static SCRATCH: LazyLock<Scratch> = LazyLock::new(|| Scratch::new("safetensors"));

/// For messages, and the buffers of files.
const OVERHEAD: usize = 20_000;

/// A name in a header takes a few bytes there and a tensor with a shape here; values become f32 beside their bytes.
const PER_BYTE: usize = 45;

fuzz_target!(|bytes: &[u8]| {
    // Those are for the target `pth`.
    if bytes.starts_with(b"PK\x03\x04") || bytes.starts_with(b"\x80\x02\x8a\x0a") {
        return;
    }
    let path = SCRATCH.file(bytes);
    match within(PER_BYTE * bytes.len() + OVERHEAD, || weights::read(&path)) {
        Ok(weights) => assert!(weights.values().all(|tensor| tensor.is_whole())),
        Err(error) => check_error(error),
    }
    if let Err(error) = Stored::find(&path) {
        check_error(error);
    }
});
