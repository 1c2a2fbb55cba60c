//! Numbers by formula: a function of a name and an index, so that peers in other languages make the same.

use crate::random::{STEP, mix};

fn fnv1a(name: &str) -> u64 {
    let byte = |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
    name.bytes().fold(0xcbf2_9ce4_8422_2325, byte)
}

/// Random words for `name`, by number. The name is hashed once: models have tens of millions of weights.
pub fn words(name: &str) -> impl Fn(usize) -> u64 + use<> {
    let hash = fnv1a(name);
    move |i| mix(hash.wrapping_add((i as u64 + 1).wrapping_mul(STEP)))
}

/// Numbers in [-1, 1) for `name`, by number, that f32 holds exactly.
pub fn units(name: &str) -> impl Fn(usize) -> f64 + use<> {
    let words = words(name);
    move |i| (words(i) >> 40) as f64 / (1u64 << 23) as f64 - 1.0
}
