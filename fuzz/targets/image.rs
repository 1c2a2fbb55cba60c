#![no_main]

use data::{Image, decode};
use fuzz::{check_error, within};
use libfuzzer_sys::fuzz_target;
use std::path::Path;

const MAX_PIXELS: usize = 1 << 18;

/// As in `crates/data/tests/decode_fuzz.rs`, which says what takes them.
const BYTES_PER_PIXEL: usize = 24;
const FIXED_BYTES: usize = 32 << 20;

fuzz_target!(|bytes: &[u8]| {
    let name = Path::new("input");
    let claimed = decode::dimensions(bytes, name);
    for channels in [3, 1] {
        let mut image = Image::default();
        let bound = MAX_PIXELS * BYTES_PER_PIXEL + FIXED_BYTES + 2 * bytes.len();
        let decoded = within(bound, || decode::decode_within(MAX_PIXELS, bytes, name, channels, &mut image));
        match decoded {
            Ok(()) => {
                assert_eq!(claimed.as_ref().ok(), Some(&(image.width, image.height)));
                assert_eq!(image.pixels.len(), image.width * image.height * channels);
            }
            Err(error) => check_error(error),
        }
    }
});
