//! The two passes: sums of bytes times weights.
//!
//! Plain loops, compiled once more for AVX2, where multiplying eight 32-bit numbers is one instruction; the baseline of x86-64
//! has none for it.

use super::taps::{BITS, Taps};

/// Half of a byte's last place.
const ROUNDING: i32 = 1 << (BITS - 1);

#[derive(Default)]
pub(super) struct Scratch {
    /// A row with a byte or more behind it, so that four bytes can be read where three are meant.
    padded: Vec<u8>,
    sums: Vec<i32>,
}

/// Compiles functions for AVX2 besides the baseline, and picks at run time. What a body calls must be `#[inline(always)]`.
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
    /// One row: (W, C) bytes to as many output pixels as there are taps.
    pub fn across(row: &[u8], channels: usize, taps: &Taps, scratch: &mut Scratch, out: &mut [u8]) {
        match channels {
            1 => pixels::<1, 1>(row, taps, out),
            2 => pixels::<2, 2>(row, taps, out),
            3 => {
                scratch.padded.clear();
                scratch.padded.extend_from_slice(row);
                scratch.padded.push(0);
                pixels::<3, 4>(&scratch.padded, taps, out);
            }
            4 => pixels::<4, 4>(row, taps, out),
            _ => any_pixels(row, channels, taps, out),
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

/// Pixels of `C` bytes, of which `L` are read at once.
#[inline(always)]
fn pixels<const C: usize, const L: usize>(row: &[u8], taps: &Taps, out: &mut [u8]) {
    for ((first, weights), out) in taps.iter().zip(out.chunks_exact_mut(C)) {
        let mut sums = [ROUNDING; L];
        for (bytes, &weight) in row[first * C..].windows(L).step_by(C).zip(weights) {
            for lane in 0..L {
                sums[lane] += i32::from(bytes[lane]) * weight;
            }
        }
        for lane in 0..C {
            out[lane] = to_byte(sums[lane]);
        }
    }
}

#[inline(always)]
fn any_pixels(row: &[u8], channels: usize, taps: &Taps, out: &mut [u8]) {
    for ((first, weights), out) in taps.iter().zip(out.chunks_exact_mut(channels)) {
        for (channel, out) in out.iter_mut().enumerate() {
            let bytes = row[first * channels + channel..].iter().step_by(channels);
            let sum = bytes.zip(weights).map(|(&byte, &weight)| i32::from(byte) * weight).sum::<i32>();
            *out = to_byte(sum + ROUNDING);
        }
    }
}

#[inline(always)]
fn to_byte(sum: i32) -> u8 {
    (sum >> BITS).clamp(0, 255) as u8
}
