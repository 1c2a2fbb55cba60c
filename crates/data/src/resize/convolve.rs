//! The two passes: sums of bytes times weights.
//!
//! Plain loops, compiled once more for AVX2, where multiplying eight 32-bit numbers is one instruction; the baseline
//! of x86-64 has none for it.

use super::taps::{BITS, Taps};

/// Half of a byte's last place.
const ROUNDING: i32 = 1 << (BITS - 1);

/// Bytes that are summed side by side.
const LANES: usize = 16;

#[derive(Default)]
pub(super) struct Scratch {
    /// Several rows, interleaved pixel by pixel.
    lanes: Vec<[u8; LANES]>,
    resized: Vec<[u8; LANES]>,
    sums: Vec<i32>,
}

/// Part of an image: as many bytes of as many rows.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a> {
    /// Beginning with the first byte of the first row.
    pub(super) bytes: &'a [u8],
    /// Distance from a row to the next.
    pub(super) stride: usize,
    /// Length of each row.
    pub(super) len: usize,
}

impl<'a> Rows<'a> {
    pub(super) fn copy_to(self, out: &mut [u8]) {
        out.chunks_exact_mut(self.len).zip(self.iter(0)).for_each(|(to, from)| to.copy_from_slice(from));
    }

    #[inline(always)]
    fn iter(self, from: usize) -> impl Iterator<Item = &'a [u8]> {
        self.bytes.chunks(self.stride).skip(from).map(move |row| &row[..self.len])
    }
}

/// Compiles functions for AVX2 besides the baseline, and picks at run time. What a body calls must be
/// `#[inline(always)]`.
macro_rules! simd {
    ($($(#[$attr:meta])* pub fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $body:block)*) => {$(
        $(#[$attr])*
        pub(super) fn $name($($arg: $ty),*) {
            #[inline(always)]
            fn body($($arg: $ty),*) $body

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2")]
            fn avx2($($arg: $ty),*) {
                body($($arg),*)
            }

            #[cfg(target_arch = "x86_64")]
            if is_x86_feature_detected!("avx2") {
                // SAFETY: the CPU was just asked.
                return unsafe { avx2($($arg),*) };
            }
            body($($arg),*)
        }
    )*};
}

simd! {
    /// Rows of (W, C) bytes to as many pixels as there are taps; `line` bytes of `out` for each row.
    pub fn across(rows: Rows, channels: usize, taps: &Taps, scratch: &mut Scratch, out: &mut [u8], line: usize) {
        match channels {
            1 => interleaved::<1, 1>(rows, taps, scratch, out, line),
            2 => interleaved::<2, 2>(rows, taps, scratch, out, line),
            3 => interleaved::<3, 4>(rows, taps, scratch, out, line),
            4 => interleaved::<4, 4>(rows, taps, scratch, out, line),
            _ => one_by_one(rows, channels, taps, out, line),
        }
    }

    /// All columns: (H, line) bytes to as many rows as there are taps.
    pub fn down(rows: &[u8], line: usize, taps: &Taps, scratch: &mut Scratch, out: &mut [u8]) {
        scratch.sums.resize(line, 0);
        let sums = &mut scratch.sums[..line];
        for ((first, weights), out) in taps.iter().zip(out.chunks_exact_mut(line)) {
            sums.fill(ROUNDING);
            for (row, &weight) in rows[first * line..].chunks_exact(line).zip(weights) {
                sums.iter_mut().zip(row).for_each(|(sum, &byte)| *sum += i32::from(byte) * weight);
            }
            out.iter_mut().zip(&*sums).for_each(|(out, &sum)| *out = to_byte(sum));
        }
    }
}

/// Pixels of `C` bytes that take `L` lanes each, `LANES / L` rows at once: a weight is the same for all of them.
#[inline(always)]
fn interleaved<const C: usize, const L: usize>(
    rows: Rows,
    taps: &Taps,
    scratch: &mut Scratch,
    out: &mut [u8],
    line: usize,
) {
    let at_once = LANES / L;
    scratch.lanes.resize(rows.len / C, [0; LANES]);
    scratch.resized.resize(line / C, [0; LANES]);
    for (group, out) in out.chunks_mut(at_once * line).enumerate() {
        for (i, row) in rows.iter(group * at_once).take(out.len() / line).enumerate() {
            for (lanes, pixel) in scratch.lanes.iter_mut().zip(row.chunks_exact(C)) {
                lanes[i * L..][..C].copy_from_slice(pixel);
            }
        }
        for (resized, (first, weights)) in scratch.resized.iter_mut().zip(taps.iter()) {
            *resized = weighted_sums(&scratch.lanes[first..], weights);
        }
        for (i, row) in out.chunks_exact_mut(line).enumerate() {
            for (pixel, lanes) in row.chunks_exact_mut(C).zip(&scratch.resized) {
                pixel.copy_from_slice(&lanes[i * L..][..C]);
            }
        }
    }
}

/// All lanes are given back, even those that nobody reads: leaving some out keeps LLVM from using vectors.
#[inline(always)]
fn weighted_sums(pixels: &[[u8; LANES]], weights: &[i32]) -> [u8; LANES] {
    let mut sums = [ROUNDING; LANES];
    for (lanes, &weight) in pixels.iter().zip(weights) {
        for lane in 0..LANES {
            sums[lane] += i32::from(lanes[lane]) * weight;
        }
    }
    sums.map(to_byte)
}

#[inline(always)]
fn one_by_one(rows: Rows, channels: usize, taps: &Taps, out: &mut [u8], line: usize) {
    for (row, out) in rows.iter(0).zip(out.chunks_exact_mut(line)) {
        for ((first, weights), out) in taps.iter().zip(out.chunks_exact_mut(channels)) {
            for (channel, out) in out.iter_mut().enumerate() {
                let bytes = row[first * channels + channel..].iter().step_by(channels);
                let sum = bytes.zip(weights).map(|(&byte, &weight)| i32::from(byte) * weight).sum::<i32>();
                *out = to_byte(sum + ROUNDING);
            }
        }
    }
}

/// One sum.
pub(super) fn weighted(bytes: impl Iterator<Item = u8>, weights: &[i32]) -> u8 {
    let sum = bytes.zip(weights).map(|(byte, &weight)| i32::from(byte) * weight).sum::<i32>();
    to_byte(sum + ROUNDING)
}

#[inline(always)]
fn to_byte(sum: i32) -> u8 {
    (sum >> BITS).clamp(0, 255) as u8
}
