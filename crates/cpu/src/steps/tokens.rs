//! Ops that move rows between images, patches and tokens.
//!
//! Legend: B batch, N patches, T tokens, C channels.

use super::Context;
use crate::kernels::{self, Float, PatchGrid};
use graph::op::Pooling;

fn grid(image: &[usize], patch: usize) -> PatchGrid {
    PatchGrid { channels: image[1], height: image[2], width: image[3], patch }
}

/// # Safety
/// Conditions of [`super::run`]; so for every function here.
pub unsafe fn patches<T: Float>(cx: &Context<'_, T>, patch: usize) {
    let (images, rows) = (cx.input(0), cx.output(0));
    let (batch, grid) = (images.shape.0[0], grid(&images.shape.0, patch));
    let size = images.data.len() / batch;
    cx.by_sample(&rows.shape, |b, _| {
        let range = b * size..(b + 1) * size;
        // SAFETY: each image is one piece; input and output don't overlap.
        let (image, rows) =
            unsafe { (images.data.part(range.clone()).read(), rows.data.part(range).write()) };
        kernels::patches(image, grid, rows);
    });
}

pub unsafe fn unpatches<T: Float>(cx: &Context<'_, T>, patch: usize) {
    let (rows, images) = (cx.input(0), cx.output(0));
    let (batch, grid) = (images.shape.0[0], grid(&images.shape.0, patch));
    let size = images.data.len() / batch;
    cx.by_sample(&rows.shape, |b, _| {
        let range = b * size..(b + 1) * size;
        // SAFETY: each image is one piece; input and output don't overlap.
        let (rows, image) =
            unsafe { (rows.data.part(range.clone()).read(), images.data.part(range).write()) };
        kernels::unpatches(rows, grid, image);
    });
}

pub unsafe fn embed<T: Float>(cx: &Context<'_, T>, class_token: bool) {
    let first = usize::from(class_token);
    let [_, tokens, c] = cx.output(0).shape.axes();
    let patches_size = (tokens - first) * c;
    // SAFETY: inputs are only read.
    let positions = unsafe { cx.input(1 + first).data.read() };
    cx.by_sample(&cx.output(0).shape, |b, _| {
        // SAFETY: each sample is one piece; inputs and output don't overlap.
        unsafe {
            let out = cx.output(0).data.part(b * tokens * c..(b + 1) * tokens * c).write();
            let patches = cx.input(0).data.part(b * patches_size..(b + 1) * patches_size).read();
            let (head, body) = out.split_at_mut(first * c);
            if class_token {
                kernels::add(cx.input(1).data.read(), &positions[..c], head);
            }
            kernels::add(patches, &positions[first * c..], body);
        }
    });
}

pub unsafe fn embed_grad<T: Float>(cx: &Context<'_, T>, class_token: bool) {
    let first = usize::from(class_token);
    let [batch, tokens, c] = cx.input(0).shape.axes();
    let patches = tokens - first;
    let dtokens = cx.input(0).data;
    let dpositions = cx.output(1 + first).data;
    cx.each(tokens, |t, _| {
        // SAFETY: each token is one piece, with rows of its own in every output.
        unsafe {
            let sum = dpositions.part(t * c..(t + 1) * c).write();
            sum.fill(T::ZERO);
            for b in 0..batch {
                let row = dtokens.part((b * tokens + t) * c..(b * tokens + t + 1) * c).read();
                kernels::add_assign(sum, row);
                if t >= first {
                    let at = (b * patches + t - first) * c;
                    cx.output(0).data.part(at..at + c).write().copy_from_slice(row);
                }
            }
            if t < first {
                cx.output(1).data.write().copy_from_slice(sum);
            }
        }
    });
}

pub unsafe fn prepend<T: Float>(cx: &Context<'_, T>) {
    let [_, tokens, c] = cx.output(0).shape.axes();
    let size = cx.input(0).shape.0[1] * c;
    cx.by_sample(&cx.output(0).shape, |b, _| {
        // SAFETY: each sample is one piece; inputs and output don't overlap.
        unsafe {
            let out = cx.output(0).data.part(b * tokens * c..(b + 1) * tokens * c).write();
            let (head, body) = out.split_at_mut(tokens * c - size);
            body.copy_from_slice(cx.input(0).data.part(b * size..(b + 1) * size).read());
            let mut at = 0;
            for prefix in &cx.step.inputs[1..] {
                let prefix = prefix.data.read();
                head[at..at + prefix.len()].copy_from_slice(prefix);
                at += prefix.len();
            }
        }
    });
}

pub unsafe fn token_sum<T: Float>(cx: &Context<'_, T>, start: usize, count: usize) {
    let [batch, tokens, c] = cx.input(0).shape.axes();
    cx.each(count, |t, _| {
        // SAFETY: each token is one piece, with a row of its own in the output.
        unsafe {
            let sum = cx.output(0).data.part(t * c..(t + 1) * c).write();
            sum.fill(T::ZERO);
            for b in 0..batch {
                let at = (b * tokens + start + t) * c;
                kernels::add_assign(sum, cx.input(0).data.part(at..at + c).read());
            }
        }
    });
}

pub unsafe fn pool<T: Float>(cx: &Context<'_, T>, kind: Pooling) {
    let [_, tokens, c] = cx.input(0).shape.axes();
    cx.by_sample(&cx.input(0).shape, |b, _| {
        // SAFETY: each sample is one piece; input and output don't overlap.
        let (x, y) = unsafe {
            let x = cx.input(0).data.part(b * tokens * c..(b + 1) * tokens * c).read();
            (x, cx.output(0).data.part(b * c..(b + 1) * c).write())
        };
        match kind {
            Pooling::First => y.copy_from_slice(&x[..c]),
            Pooling::Mean => {
                y.fill(T::ZERO);
                kernels::column_sum(x, c, y);
                let share = T::from_f64(1.0 / tokens as f64);
                y.iter_mut().for_each(|y| *y *= share);
            }
        }
    });
}

pub unsafe fn pool_grad<T: Float>(cx: &Context<'_, T>, kind: Pooling) {
    let [_, tokens, c] = cx.output(0).shape.axes();
    cx.by_sample(&cx.output(0).shape, |b, _| {
        // SAFETY: each sample is one piece; input and output don't overlap.
        let (dy, dx) = unsafe {
            let dy = cx.input(0).data.part(b * c..(b + 1) * c).read();
            (dy, cx.output(0).data.part(b * tokens * c..(b + 1) * tokens * c).write())
        };
        match kind {
            Pooling::First => {
                dx[..c].copy_from_slice(dy);
                dx[c..].fill(T::ZERO);
            }
            Pooling::Mean => {
                let share = T::from_f64(1.0 / tokens as f64);
                dx.chunks_exact_mut(c).for_each(|row| kernels::scale(dy, share, row));
            }
        }
    });
}
