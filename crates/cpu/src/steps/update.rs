//! Steps of `update`: clipping and the optimizers. Every result is written over its input where the plan has both in
//! one place.

use super::{Context, PIECE};
use crate::kernels::{self, Float};
use graph::Op;
use graph::flat::{CHUNK, Flat, Piece, Segment};
use std::ops::Range;

/// Partial sums over flat gradients: which elements of which operand each is of.
pub(crate) struct Chunks {
    /// Partial sums in order: number, operand, elements of it.
    held: Vec<(usize, usize, Vec<Range<usize>>)>,
    /// Partial sums that are other ranks'.
    others: Vec<usize>,
}

impl Chunks {
    pub fn of(flats: &[Flat]) -> Self {
        let (mut held, mut others, mut base) = (vec![], vec![], 0);
        for (operand, flat) in flats.iter().enumerate() {
            for chunk in 0..flat.chunks() {
                let start = chunk * CHUNK;
                let end = (start + CHUNK).min(flat.elements);
                if start < flat.first || end > flat.first + flat.held() {
                    others.push(base + chunk);
                    continue;
                }
                let local = start - flat.first..end - flat.first;
                held.push((base + chunk, operand, flat.within(local).map(|(_, range)| range).collect()));
            }
            base += flat.chunks();
        }
        Chunks { held, others }
    }
}

/// # Safety
/// Conditions of [`super::run`]; so for every function here.
pub unsafe fn sum_squares<T: Float>(cx: &Context<'_, T>, chunks: &Chunks) {
    let out = cx.output(0).doubles;
    cx.each(1, |_, _| {
        for other in &chunks.others {
            // SAFETY: nobody else writes what is another rank's.
            unsafe { out.part(*other..other + 1).write()[0] = 0.0 };
        }
    });
    cx.ranges(chunks.held.len(), PIECE / CHUNK, |range, _| {
        for (number, operand, ranges) in &chunks.held[range] {
            let x = cx.input(*operand).data;
            // SAFETY: inputs are only read; each partial sum is one piece's.
            unsafe {
                let squares = ranges.iter().map(|range| kernels::sum_squares(x.part(range.clone()).read()));
                out.part(*number..number + 1).write()[0] = squares.sum();
            }
        }
    });
}

/// control = (factor for every gradient, 1 to apply or 0 to skip, gradient norm).
pub unsafe fn clip<T: Float>(cx: &Context<'_, T>, max_norm: Option<f64>, scaled: bool) {
    cx.each(1, |_, _| {
        // SAFETY: inputs are only read; the output is this step's own.
        let (stats, sums, control) = unsafe {
            let sums = cx.input(1 + usize::from(scaled)).doubles.read();
            (cx.input(0).data.read(), sums, cx.output(0).data.write())
        };
        let actual = stats[1].to_f64();
        // Gradients were divided by the nominal count; what a partial batch lacks is made up for here.
        let correction = cx.header.nominal / actual;
        // SAFETY: only read.
        let loss_scale = if scaled { unsafe { cx.input(1).data.read()[0].to_f64() } } else { 1.0 };
        let squares = T::from_f64(sums.iter().sum()).to_f64();
        let norm = squares.sqrt() / loss_scale * correction;
        let clip = max_norm.map_or(1.0, |max| (max / (norm + 1e-6)).min(1.0));
        let apply = norm.is_finite() && actual > 0.0;
        let values = if apply { [correction * clip / loss_scale, 1.0, norm] } else { [0.0, 0.0, norm] };
        control.iter_mut().zip(values).for_each(|(out, value)| *out = T::from_f64(value));
    });
}

pub unsafe fn advance<T: Float>(cx: &Context<'_, T>) {
    cx.each(1, |_, _| {
        // SAFETY: scalars, read before the output is written.
        let (before, apply) = unsafe { (cx.input(0).data.read()[0], cx.input(1).data.read()[1]) };
        // SAFETY: the output is this step's own, and no slice of the input is held.
        unsafe { cx.output(0).data.write()[0] = before + apply };
    });
}

/// scale = (scale, good steps since it changed, skipped steps it still bears).
pub unsafe fn loss_scale<T: Float>(cx: &Context<'_, T>, window: u64, hysteresis: u64, min: f64) {
    cx.each(1, |_, _| {
        // SAFETY: numbers that are read before the output is written.
        let (state, applied) =
            unsafe { (cx.input(0).data.read(), cx.input(1).data.read()[1].to_f64() != 0.0) };
        let [mut scale, mut good, mut borne] = [0, 1, 2].map(|i| state[i].to_f64());
        if applied {
            good += 1.0;
            if good >= window as f64 {
                (scale, good, borne) = (2.0 * scale, 0.0, hysteresis as f64);
            }
        } else {
            good = 0.0;
            if borne > 1.0 {
                borne -= 1.0;
            } else {
                scale = (scale / 2.0).max(min);
            }
        }
        // SAFETY: the output is this step's own, and no slice of the input is held.
        let out = unsafe { cx.output(0).data.write() };
        out.iter_mut().zip([scale, good, borne]).for_each(|(out, value)| *out = T::from_f64(value));
    });
}

/// Values that every optimizer reads beside its tensors.
struct Control {
    factor: f64,
    apply: bool,
    applied: f64,
}

/// Start of a piece of an optimizer: its range of the outputs holds what they update, in place or not. None if the step
/// is skipped, and then that is all there is to do.
///
/// # Safety
/// Nobody else touches this range of the outputs.
unsafe fn begin<T: Float>(cx: &Context<'_, T>, range: &Range<usize>, at: usize) -> Option<Control> {
    // SAFETY: passed on to the caller.
    unsafe {
        start_in_place(cx, range);
        Some(control(cx, at)).filter(|control| control.apply)
    }
}

/// Control and applied steps, operands from `at` on.
///
/// # Safety
/// The two scalars are only read.
unsafe fn control<T: Float>(cx: &Context<'_, T>, at: usize) -> Control {
    // SAFETY: passed on to the caller.
    let (control, applied) = unsafe { (cx.input(at).data.read(), cx.input(at + 1).data.read()) };
    Control { factor: control[0].to_f64(), apply: control[1].to_f64() != 0.0, applied: applied[0].to_f64() }
}

/// Writes a range of the parameters, which were updated, once more: to the result of that number, if there is one.
///
/// # Safety
/// Nobody else touches this range of the outputs.
pub(super) unsafe fn write_copy<T: Float>(cx: &Context<'_, T>, copy: usize, range: Range<usize>) {
    if let Some(copy) = cx.step.outputs.get(copy) {
        // SAFETY: the parameters and their copies lie apart; the rest is passed on to the caller.
        unsafe {
            copy.data.part(range.clone()).write().copy_from_slice(cx.output(0).data.part(range).read());
        }
    }
}

/// Makes a range of each output start as the input it may overwrite, so that the kernels can work in place.
///
/// # Safety
/// Nobody else touches this range of the outputs.
pub(super) unsafe fn start_in_place<T: Float>(cx: &Context<'_, T>, range: &Range<usize>) {
    for (input, output) in &cx.step.in_place {
        let (old, new) = (cx.input(*input).data, cx.output(*output).data);
        if !old.same_place(&new) {
            // SAFETY: in different places, so apart.
            unsafe { new.part(range.clone()).write().copy_from_slice(old.part(range.clone()).read()) };
        }
    }
}

/// Runs `task` on pieces of a flat buffer, which begin at borders of partial sums.
fn pieces<T: Float>(cx: &Context<'_, T>, task: impl Fn(Range<usize>) + Sync) {
    cx.ranges(cx.output(0).data.len(), PIECE, |range, _| task(range));
}

pub unsafe fn adamw<T: Float>(cx: &Context<'_, T>) {
    let Op::AdamW { beta1, beta2, eps, flat } = &cx.step.op else { return };
    let (beta1, beta2, eps) = (*beta1, *beta2, *eps);
    let [w, m, v] = [0, 1, 2].map(|i| cx.output(i).data);
    pieces(cx, |range| {
        // SAFETY: pieces don't overlap.
        let Some(Control { factor, applied, .. }) = (unsafe { begin(cx, &range, 4) }) else { return };
        let (bias1, bias2) = (1.0 - beta1.powf(applied), 1.0 - beta2.powf(applied));
        for (number, r) in flat.within(range) {
            let Piece { lr_scale, weight_decay, .. } = flat.pieces[number];
            let lr = cx.header.learning_rate * lr_scale;
            let hyper = kernels::AdamW { lr, beta1, beta2, eps, weight_decay, bias1, bias2 };
            let g = cx.input(1).data.part(r.clone());
            // SAFETY: pieces don't overlap; the gradients overlap no output.
            unsafe {
                let [w, m, v] = [w, m, v].map(|x| x.part(r.clone()).write());
                kernels::adamw(w, g.read(), m, v, hyper, factor);
                write_copy(cx, 3, r);
            }
        }
    });
}

pub unsafe fn sgd<T: Float>(cx: &Context<'_, T>) {
    let Op::Sgd { momentum, nesterov, flat } = &cx.step.op else { return };
    let (momentum, nesterov) = (*momentum, *nesterov);
    let [w, buffer] = [0, 1].map(|i| cx.output(i).data);
    pieces(cx, |range| {
        // SAFETY: pieces don't overlap.
        let Some(Control { factor, applied, .. }) = (unsafe { begin(cx, &range, 3) }) else { return };
        let first = applied == 1.0;
        for (number, r) in flat.within(range) {
            let Piece { lr_scale, weight_decay, .. } = flat.pieces[number];
            let lr = cx.header.learning_rate * lr_scale;
            let hyper = kernels::Sgd { lr, momentum, dampening: 0.0, nesterov, weight_decay, first };
            let g = cx.input(1).data.part(r.clone());
            // SAFETY: pieces don't overlap; the gradients overlap no output.
            unsafe {
                let [w, buffer] = [w, buffer].map(|x| x.part(r.clone()).write());
                kernels::sgd(w, g.read(), Some(buffer), hyper, factor);
                write_copy(cx, 2, r);
            }
        }
    });
}

/// The segments of a flat buffer.
pub(crate) struct Segments {
    /// Segments that this rank holds, with their numbers among all.
    held: Vec<(usize, Segment)>,
    /// The numbers of others.
    others: Vec<usize>,
    /// Numbers of the segments of each tensor.
    of_piece: Vec<Range<usize>>,
}

impl Segments {
    pub fn of(flat: &Flat) -> Self {
        let held: Vec<(usize, Segment)> = flat.held_segments().collect();
        let all: Vec<Segment> = flat.segments().collect();
        let is_held = |number: &usize| held.binary_search_by_key(number, |(number, _)| *number).is_ok();
        let others = (0..all.len()).filter(|number| !is_held(number)).collect();
        let first = |piece: usize| all.partition_point(|segment| segment.piece < piece);
        let of_piece = (0..flat.pieces.len()).map(|piece| first(piece)..first(piece + 1)).collect();
        Segments { held, others, of_piece }
    }

    /// Segments in a range of what this rank holds, whose first element in the whole buffer is `first`.
    fn within(&self, range: &Range<usize>, first: usize) -> &[(usize, Segment)] {
        let before = |at: usize| self.held.partition_point(|(_, segment)| segment.start < first + at);
        &self.held[before(range.start)..before(range.end)]
    }
}

/// Hyperparameters of LAMB for all tensors of a step.
fn lamb_hyper(
    lr: f64,
    betas: [f64; 2],
    eps: f64,
    piece: &Piece,
    applied: f64,
    clamp: [f64; 2],
) -> kernels::Lamb {
    let [beta1, beta2] = betas;
    let (bias1, bias2) = (1.0 - beta1.powf(applied), 1.0 - beta2.powf(applied));
    let (lr, weight_decay, [min_coeff, max_coeff]) = (lr * piece.lr_scale, piece.weight_decay, clamp);
    let adam = kernels::AdamW { lr, beta1, beta2, eps, weight_decay, bias1, bias2 };
    kernels::Lamb { adam, min_coeff, max_coeff }
}

pub unsafe fn lamb_moments<T: Float>(cx: &Context<'_, T>, segments: &Segments) {
    let Op::LambMoments { beta1, beta2, eps, flat } = &cx.step.op else { return };
    let [m, v] = [0, 1].map(|i| cx.output(i).data);
    let norms = cx.output(2).doubles;
    cx.each(1, |_, _| {
        for other in &segments.others {
            // SAFETY: nobody else writes what is another rank's.
            unsafe { norms.part(2 * other..2 * other + 2).write().fill(0.0) };
        }
    });
    pieces(cx, |range| {
        // SAFETY: pieces don't overlap.
        let control = unsafe { begin(cx, &range, 4) };
        for (number, segment) in segments.within(&range, flat.first) {
            // SAFETY: every segment has its own two sums.
            let sums = unsafe { norms.part(2 * number..2 * number + 2).write() };
            let Some(Control { factor, applied, .. }) = control else {
                sums.fill(0.0);
                continue;
            };
            let piece = &flat.pieces[segment.piece];
            let hyper = lamb_hyper(0.0, [*beta1, *beta2], *eps, piece, applied, [0.0; 2]);
            let start = segment.start - flat.first;
            let r = start..start + segment.count;
            // SAFETY: segments don't overlap; parameters and gradients are only read and overlap no output.
            unsafe {
                let (w, g) =
                    (cx.input(0).data.part(r.clone()).read(), cx.input(1).data.part(r.clone()).read());
                let [m, v] = [m, v].map(|x| x.part(r.clone()).write());
                let (w_squares, u_squares) = kernels::lamb_moments_and_norms(w, g, m, v, hyper, factor);
                sums.copy_from_slice(&[w_squares, u_squares]);
            }
        }
    });
}

pub unsafe fn lamb_apply<T: Float>(cx: &Context<'_, T>, segments: &Segments) {
    let Op::LambApply { beta1, beta2, eps, min_coeff, max_coeff, flat } = &cx.step.op else { return };
    let w = cx.output(0).data;
    pieces(cx, |range| {
        // SAFETY: pieces don't overlap.
        let Some(Control { applied, .. }) = (unsafe { begin(cx, &range, 4) }) else { return };
        // SAFETY: only read.
        let sums = unsafe { cx.input(3).doubles.read() };
        for (number, r) in flat.within(range) {
            let (lr, clamp) = (cx.header.learning_rate, [*min_coeff, *max_coeff]);
            let hyper = lamb_hyper(lr, [*beta1, *beta2], *eps, &flat.pieces[number], applied, clamp);
            let of_tensor = segments.of_piece[number].clone();
            let sum = |which: usize| of_tensor.clone().map(|segment| sums[2 * segment + which]).sum::<f64>();
            let step = hyper.step(sum(0), sum(1));
            // SAFETY: pieces don't overlap; the moments are only read and overlap no output.
            unsafe {
                let [m, v] = [1, 2].map(|i| cx.input(i).data.part(r.clone()).read());
                kernels::lamb_apply(w.part(r.clone()).write(), m, v, hyper, step);
                write_copy(cx, 1, r);
            }
        }
    });
}

/// The moving average of a parameter, which `cx` has as the optimizer left it.
pub unsafe fn ema<T: Float>(cx: &Context<'_, T>, decay: f64) {
    let (p, average) = (cx.input(1).data, cx.output(0).data);
    pieces(cx, |r| {
        // SAFETY: pieces don't overlap; control and the parameter are only read, and that lies apart from its average.
        unsafe {
            start_in_place(cx, &r);
            if cx.input(2).data.read()[1].to_f64() != 0.0 {
                kernels::ema(average.part(r.clone()).write(), p.part(r).read(), decay);
            }
        }
    });
}
