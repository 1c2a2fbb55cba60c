//! Damage done to files at random.
//!
//! The same damage every time, in a number of rounds that takes a few seconds. `VITESSE_FUZZ_SECONDS` makes each test go on
//! for that long, into damage not seen before.

use crate::Random;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

impl Random {
    /// A place in a file; half of them near its ends, where what describes the rest is.
    fn place(&mut self, length: usize) -> usize {
        match self.below(4) {
            0 => self.below(length.min(400)),
            1 => length.saturating_sub(1 + self.below(length.min(400))),
            _ => self.below(length),
        }
    }

    /// One of the files, damaged in up to four places.
    pub fn damaged(&mut self, files: &[Vec<u8>]) -> Vec<u8> {
        let mut bytes = self.pick(files).clone();
        for _ in 0..=self.below(4) {
            self.damage(&mut bytes, files);
        }
        bytes
    }

    fn damage(&mut self, bytes: &mut Vec<u8>, files: &[Vec<u8>]) {
        const NUMBERS: [u64; 12] =
            [0, 1, 2, 0x7f, 0x80, 0xff, 0x7fff, 0xffff, 0x7fff_ffff, 0xffff_ffff, i64::MAX as u64, u64::MAX];
        let at = self.place(bytes.len());
        let until = (at + 1 + self.below(40)).min(bytes.len());
        match self.below(8) {
            _ if bytes.is_empty() => bytes.push(self.next() as u8),
            0 | 1 => bytes[at] ^= 1 << self.below(8),
            2 => bytes[at] = self.next() as u8,
            3 => {
                let width = 1 << self.below(4);
                let number = self.pick(&NUMBERS).to_le_bytes();
                bytes.iter_mut().skip(at).zip(&number[..width]).for_each(|(byte, digit)| *byte = *digit);
            }
            4 => drop(bytes.drain(at..until)),
            5 => {
                let copy = bytes[at..until].to_vec();
                let to = self.place(bytes.len());
                drop(bytes.splice(to..to, copy));
            }
            6 => {
                let other = self.pick(files);
                let from = self.place(other.len());
                let piece = other[from..(from + 1 + self.below(60)).min(other.len())].to_vec();
                let end = (at + self.below(60)).min(bytes.len());
                drop(bytes.splice(at..end, piece));
            }
            _ => bytes.truncate(at),
        }
    }
}

/// Makes an input and tries it, again and again. `try_it` says how much memory it took at most, and how much was allowed.
pub fn rounds(
    name: &str,
    count: usize,
    mut make: impl FnMut(&mut Random) -> Vec<u8>,
    mut try_it: impl FnMut(&[u8]) -> (usize, usize),
) {
    let seconds = std::env::var("VITESSE_FUZZ_SECONDS").ok().and_then(|seconds| seconds.parse().ok());
    let longer = seconds.map(Duration::from_secs_f64);
    let start = Instant::now();
    let mut random = Random::new(0x5eed);
    let (mut done, mut closest) = (0, 0.0f64);
    while longer.map_or(done < count, |longer| start.elapsed() < longer) {
        let input = make(&mut random);
        let result = catch_unwind(AssertUnwindSafe(|| try_it(&input)));
        match result {
            Ok((used, allowed)) if used <= allowed => closest = closest.max(used as f64 / allowed as f64),
            wrong => {
                let kept = std::env::temp_dir().join(format!("vitesse-fuzz-{name}-round-{done}"));
                std::fs::write(&kept, &input).unwrap();
                let what = wrong.map_or("it panicked".to_string(), |(used, allowed)| {
                    format!("it took {used} bytes, {allowed} are allowed")
                });
                panic!("{name}, round {done}: {what}; the input is {}", kept.display());
            }
        }
        done += 1;
    }
    println!(
        "{name}: {done} rounds in {:.1?}, {:.0}% of the memory allowed",
        start.elapsed(),
        closest * 100.0
    );
}
