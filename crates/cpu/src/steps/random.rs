//! Dropout and stochastic depth: draws are a function of seed, step, site, sample, token and channel.

use super::Context;
use crate::kernels::Float;
use graph::Header;
use graph::op::{PathDrop, Per};
use graph::random::{Stream, drop_threshold};
use std::ops::Range;

/// The draws of one random op for sample `b` of the micro-batch.
pub fn stream(header: &Header, site: u32, b: usize) -> Stream {
    Stream::new(header.seed, header.step, site, header.first_sample + b as u64)
}

/// Multiplies a row by its mask: 0 where dropped, 1/(1-rate) elsewhere.
pub fn mask_row<T: Float>(stream: &Stream, token: u32, threshold: u32, scale: T, row: &mut [T]) {
    mask_range(stream, token, 0, threshold, scale, row);
}

/// Mask like [`mask_row`], of the part of a row from column `first` on, which is a multiple of 4: a draw is four words.
pub fn mask_range<T: Float>(
    stream: &Stream,
    token: u32,
    first: usize,
    threshold: u32,
    scale: T,
    range: &mut [T],
) {
    debug_assert!(first.is_multiple_of(4));
    for (block, values) in range.chunks_mut(4).enumerate() {
        let words = stream.words(token, (first / 4 + block) as u32);
        for (value, word) in values.iter_mut().zip(words) {
            *value = if word < threshold { T::ZERO } else { *value * scale };
        }
    }
}

/// Factor of the branch of sample `b` under stochastic depth.
pub fn path_factor<T: Float>(header: &Header, drop: Option<PathDrop>, b: usize) -> T {
    let Some(PathDrop { rate, site }) = drop else { return T::ONE };
    let dropped = stream(header, site, b).word() < drop_threshold(rate);
    if dropped { T::ZERO } else { T::from_f64(1.0 / (1.0 - rate)) }
}

/// Cuts a range of rows where samples end: (sample, its rows in the range).
pub fn by_sample(rows: Range<usize>, sample_rows: usize) -> impl Iterator<Item = (usize, Range<usize>)> {
    let size = sample_rows.max(1);
    let samples = rows.start / size..rows.end.div_ceil(size);
    samples.map(move |b| (b, (b * size).max(rows.start)..((b + 1) * size).min(rows.end)))
}

/// # Safety
/// Conditions of [`super::run`].
pub unsafe fn drop<T: Float>(cx: &Context<'_, T>, rate: f64, site: u32, per: Per) {
    let (x, y) = (cx.input(0), cx.output(0));
    let (batch, c) = (x.shape.0[0], x.shape.last());
    let size = x.data.len() / batch;
    let (threshold, scale) = (drop_threshold(rate), T::from_f64(1.0 / (1.0 - rate)));
    cx.by_sample(&x.shape, |b, _| {
        let range = b * size..(b + 1) * size;
        // SAFETY: each sample is one piece; input and output don't overlap.
        let (x, y) = unsafe { (x.data.part(range.clone()).read(), y.data.part(range).write()) };
        let stream = stream(cx.header, site, b);
        match per {
            Per::Sample if stream.word() < threshold => y.fill(T::ZERO),
            Per::Sample => crate::kernels::scale(x, scale, y),
            Per::Element | Per::Channel => {
                y.copy_from_slice(x);
                for (token, row) in y.chunks_exact_mut(c).enumerate() {
                    // All pixels of a channel share the draw of the first.
                    let token = if per == Per::Channel { 0 } else { token as u32 };
                    mask_row(&stream, token, threshold, scale, row);
                }
            }
        }
    });
}
