//! The update: clipping and the optimizers. Every result is written over its input where the plan says so.

use super::{Context, PIECE};
use crate::executor::Operand;
use crate::kernels::{self, Float};
use crate::memory::View;
use graph::Op;
use std::ops::Range;

/// control = (factor for every gradient, 1 to apply or 0 to skip, gradient norm).
///
/// # Safety
/// As [`super::run`]; so for every function here.
pub unsafe fn clip<T: Float>(cx: &Context<'_, T>, max_norm: Option<f64>, scaled: bool) {
    cx.each(1, |_, _| {
        // SAFETY: inputs are only read; the output is this step's own.
        let (squares, stats, control) =
            unsafe { (cx.input(0).data.read(), cx.input(1).data.read(), cx.output(0).data.write()) };
        let actual = stats[1].to_f64();
        // Gradients were divided by the nominal count; what a partial batch lacks is made up for here.
        let correction = cx.header.nominal / actual;
        // SAFETY: only read.
        let loss_scale = if scaled { unsafe { cx.input(2).data.read()[0].to_f64() } } else { 1.0 };
        let norm = squares[0].to_f64().sqrt() / loss_scale * correction;
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

/// What every optimizer reads beside its tensors.
struct Control {
    factor: f64,
    apply: bool,
    applied: f64,
}

/// What a piece of an optimizer starts with: its range of the outputs holds what they update, in place or not. None if the step
/// is skipped, and then that is all there is to do.
///
/// # Safety
/// Nobody else touches this range of the outputs.
unsafe fn begin<T: Float>(cx: &Context<'_, T>, range: &Range<usize>) -> Option<Control> {
    // SAFETY: passed on to the caller.
    unsafe {
        start_in_place(cx, range);
        Some(control(cx)).filter(|control| control.apply)
    }
}

/// # Safety
/// The two scalars are only read.
unsafe fn control<T: Float>(cx: &Context<'_, T>) -> Control {
    // Behind the parameter, its gradient and its moments.
    let at = cx.step.outputs.len() + 1 - usize::from(copy(cx).is_some());
    // SAFETY: passed on to the caller.
    let (control, applied) = unsafe { (cx.input(at).data.read(), cx.input(at + 1).data.read()) };
    Control { factor: control[0].to_f64(), apply: control[1].to_f64() != 0.0, applied: applied[0].to_f64() }
}

/// The result that is the parameter once more, in half precision.
fn copy<'a, T: Float>(cx: &'a Context<'_, T>) -> Option<&'a Operand<T>> {
    let moments = match cx.step.op {
        Op::Sgd { .. } => 1,
        _ => 2,
    };
    cx.step.outputs.get(1 + moments)
}

/// The copy of a range of the parameter, which was updated.
///
/// # Safety
/// Nobody else touches this range of the outputs.
unsafe fn write_copy<T: Float>(cx: &Context<'_, T>, range: Range<usize>) {
    if let Some(copy) = copy(cx) {
        // SAFETY: the parameter and its copy lie apart; the rest is passed on to the caller.
        unsafe {
            copy.data.part(range.clone()).write().copy_from_slice(cx.output(0).data.part(range).read());
        }
    }
}

/// Makes a range of each output start as the input it may overwrite, so that the kernels can work in place.
///
/// # Safety
/// Nobody else touches this range of the outputs.
unsafe fn start_in_place<T: Float>(cx: &Context<'_, T>, range: &Range<usize>) {
    for (input, output) in &cx.step.in_place {
        let (old, new) = (cx.input(*input).data, cx.output(*output).data);
        if !old.same_place(&new) {
            // SAFETY: in different places, so apart.
            unsafe { new.part(range.clone()).write().copy_from_slice(old.part(range.clone()).read()) };
        }
    }
}

/// Runs `task` on pieces of the parameter's range.
fn pieces<T: Float>(cx: &Context<'_, T>, task: impl Fn(Range<usize>) + Sync) {
    cx.ranges(cx.output(0).data.len(), PIECE, |range, _| task(range));
}

pub unsafe fn adamw<T: Float>(cx: &Context<'_, T>) {
    let Op::AdamW { beta1, beta2, eps, weight_decay, lr_scale } = cx.step.op else { return };
    let lr = cx.header.learning_rate * lr_scale;
    let [w, m, v] = [0, 1, 2].map(|i| cx.output(i).data);
    pieces(cx, |r| {
        // SAFETY: pieces don't overlap.
        let Some(Control { factor, applied, .. }) = (unsafe { begin(cx, &r) }) else { return };
        let (bias1, bias2) = (1.0 - beta1.powf(applied), 1.0 - beta2.powf(applied));
        let hyper = kernels::AdamW { lr, beta1, beta2, eps, weight_decay, bias1, bias2 };
        let g = cx.input(1).data.part(r.clone());
        // SAFETY: pieces don't overlap; the gradient overlaps no output.
        unsafe {
            let [w, m, v] = [w, m, v].map(|x| x.part(r.clone()).write());
            kernels::adamw(w, g.read(), m, v, hyper, factor);
            write_copy(cx, r);
        }
    });
}

pub unsafe fn sgd<T: Float>(cx: &Context<'_, T>) {
    let Op::Sgd { momentum, nesterov, weight_decay, lr_scale } = cx.step.op else { return };
    let lr = cx.header.learning_rate * lr_scale;
    let [w, buffer] = [0, 1].map(|i| cx.output(i).data);
    pieces(cx, |r| {
        // SAFETY: pieces don't overlap.
        let Some(Control { factor, applied, .. }) = (unsafe { begin(cx, &r) }) else { return };
        let first = applied == 1.0;
        let hyper = kernels::Sgd { lr, momentum, dampening: 0.0, nesterov, weight_decay, first };
        let g = cx.input(1).data.part(r.clone());
        // SAFETY: pieces don't overlap; the gradient overlaps no output.
        unsafe {
            let [w, buffer] = [w, buffer].map(|x| x.part(r.clone()).write());
            kernels::sgd(w, g.read(), Some(buffer), hyper, factor);
            write_copy(cx, r);
        }
    });
}

pub unsafe fn lamb<T: Float>(cx: &Context<'_, T>) {
    let Op::Lamb { beta1, beta2, eps, weight_decay, min_coeff, max_coeff, lr_scale } = cx.step.op else {
        return;
    };
    let lr = cx.header.learning_rate * lr_scale;
    let hyper = |applied: f64| {
        let (bias1, bias2) = (1.0 - beta1.powf(applied), 1.0 - beta2.powf(applied));
        kernels::Lamb { lr, beta1, beta2, eps, weight_decay, bias1, bias2, min_coeff, max_coeff }
    };
    let [w, m, v] = [0, 1, 2].map(|i| cx.output(i).data);
    let norms: View<f64> = cx.scratch();
    pieces(cx, |r| {
        // SAFETY: pieces don't overlap.
        let Some(Control { factor, applied, .. }) = (unsafe { begin(cx, &r) }) else { return };
        let (piece, g) = (r.start / PIECE, cx.input(1).data.part(r.clone()));
        // SAFETY: pieces don't overlap and each has its own two sums; the gradient overlaps no output.
        unsafe {
            let [m, v] = [m, v].map(|x| x.part(r.clone()).write());
            let w = w.part(r.clone()).read();
            let (w_squares, u_squares) =
                kernels::lamb_moments_and_norms(w, g.read(), m, v, hyper(applied), factor);
            norms.part(2 * piece..2 * piece + 2).write().copy_from_slice(&[w_squares, u_squares]);
        }
    });
    pieces(cx, |r| {
        // SAFETY: only read, as the sums are: every piece is done.
        let (Control { apply, applied, .. }, sums) =
            unsafe { (control(cx), norms.part(0..2 * w.len().div_ceil(PIECE)).read()) };
        if !apply {
            return;
        }
        let sum = |which: usize| sums.iter().skip(which).step_by(2).sum::<f64>();
        let step = hyper(applied).step(sum(0), sum(1));
        // SAFETY: pieces don't overlap; the moments are only read now.
        unsafe {
            let [m, v] = [m, v].map(|x| x.part(r.clone()).read());
            kernels::lamb_apply(w.part(r.clone()).write(), m, v, hyper(applied), step);
            write_copy(cx, r);
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
