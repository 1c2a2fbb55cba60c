//! Times every `f32` kernel on one core: `cargo run --release -p cpu --example kernels [elements]`.
//!
//! Prints ns per element and the GB/s of the slices read and written, each counted once. The default size keeps the
//! slices in L2; a large one (e.g. 16777216) shows what is left when memory is the limit.

use cpu::kernels::*;
use std::time::Instant;

fn main() {
    let elements = std::env::args().nth(1).map_or(96 * 768, |n| n.parse().expect("elements: a number"));
    println!("{elements} elements, {:?}\n{:<28} {:>11} {:>8}", level(), "kernel", "ns/element", "GB/s");
    let mut bench = Bench::new(elements);
    bench.elementwise();
    bench.gelu();
    bench.norm(192);
    bench.norm(768);
    bench.softmax(65);
    bench.softmax(197);
    bench.optimize();
    bench.images();
}

/// The best of several runs, so that a neighbour on the machine does not show.
fn time(name: &str, elements: usize, floats_per_element: f64, mut kernel: impl FnMut()) {
    let calls = (1 << 20) / elements + 1;
    let best = (0..40)
        .map(|_| {
            let start = Instant::now();
            (0..calls).for_each(|_| kernel());
            start.elapsed().as_secs_f64() / calls as f64
        })
        .fold(f64::INFINITY, f64::min);
    let gigabytes = floats_per_element * 4.0 * elements as f64 / 1e9;
    println!("{name:<28} {:>11.3} {:>8.1}", best * 1e9 / elements as f64, gigabytes / best);
}

struct Bench {
    a: Vec<f32>,
    b: Vec<f32>,
    c: Vec<f32>,
    d: Vec<f32>,
    n: usize,
}

impl Bench {
    fn new(n: usize) -> Bench {
        let wave = |frequency: f32| (0..n).map(|i| 3.0 * (i as f32 * frequency).sin()).collect();
        Bench { a: wave(0.7), b: wave(1.3), c: vec![0.0; n], d: vec![0.0; n], n }
    }

    fn elementwise(&mut self) {
        let Bench { a, b, c, n, .. } = self;
        let (cols, n) = (768.min(*n), *n);
        let whole = n / cols * cols;
        let mut acc = vec![0.0; cols];
        time("add", n, 3.0, || add(a, b, c));
        time("add_assign", n, 3.0, || add_assign(c, a));
        time("scale", n, 2.0, || scale(a, 0.5, c));
        time("add_bias", whole, 2.0, || add_bias(&mut c[..whole], &acc));
        time("column_sum", whole, 1.0, || column_sum(&a[..whole], cols, &mut acc));
        time("sum_squares", n, 1.0, || assert!(sum_squares(a) > 0.0));
    }

    fn gelu(&mut self) {
        let Bench { a, b, c, n, .. } = self;
        let cols = 768.min(*n);
        let whole = *n / cols * cols;
        let (bias, mut dbias) = (vec![0.0; cols], vec![0.0; cols]);
        time("gelu", whole, 2.0, || gelu(&a[..whole], &mut c[..whole]));
        time("bias_gelu", whole, 3.0, || bias_gelu(&mut a[..whole], &bias, &mut c[..whole]));
        time("gelu_grad", whole, 3.0, || gelu_grad(&a[..whole], &b[..whole], &mut c[..whole]));
        time("gelu_grad_bias", whole, 3.0, || {
            gelu_grad_bias(&a[..whole], &b[..whole], &mut c[..whole], cols, &mut dbias);
        });
    }

    fn norm(&mut self, cols: usize) {
        let Bench { a, b, c, d, n } = self;
        let (rows, n) = (*n / cols, *n / cols * cols);
        let (a, b, c, d) = (&a[..n], &b[..n], &mut c[..n], &mut d[..n]);
        let (gamma, beta) = (vec![1.0; cols], vec![0.0; cols]);
        let (mut dgamma, mut dbeta) = (vec![0.0; cols], vec![0.0; cols]);
        let (mut mean, mut rstd) = (vec![0.0; rows], vec![0.0; rows]);
        time(&format!("layer_norm {cols}"), n, 2.0, || {
            layer_norm(a, &gamma, &beta, 1e-6, c, &mut mean, &mut rstd);
        });
        time(&format!("add_layer_norm {cols}"), n, 4.0, || {
            add_layer_norm(a, b, &gamma, &beta, 1e-6, d, c, &mut mean, &mut rstd);
        });
        time(&format!("layer_norm_grad {cols}"), n, 3.0, || {
            layer_norm_grad(a, &mean, &rstd, &gamma, b, None, c, &mut dgamma, &mut dbeta);
        });
        time(&format!("layer_norm_grad + add {cols}"), n, 4.0, || {
            layer_norm_grad(a, &mean, &rstd, &gamma, b, Some(d), c, &mut dgamma, &mut dbeta);
        });
    }

    fn softmax(&mut self, cols: usize) {
        let Bench { a, b, c, n, .. } = self;
        let (rows, n) = (*n / cols, *n / cols * cols);
        let (a, b, c) = (&a[..n], &b[..n], &mut c[..n]);
        let (mut lse, mut delta) = (vec![0.0; rows], vec![0.0; rows]);
        // In place: the next call takes the softmax of probabilities, which costs the same.
        c.copy_from_slice(a);
        time(&format!("softmax_rows {cols}"), n, 2.0, || softmax_rows(c, cols, 0.125, &mut lse));
        c.copy_from_slice(a);
        time(&format!("softmax_from_lse {cols}"), n, 2.0, || softmax_from_lse(c, cols, 0.125, &lse));
        time(&format!("row_dot {cols}"), n, 2.0, || row_dot(a, b, cols, &mut delta));
        c.copy_from_slice(a);
        time(&format!("softmax_grad {cols}"), n, 3.0, || softmax_grad(b, c, cols, &delta, 1.0));
    }

    fn optimize(&mut self) {
        let Bench { a, b, c, d, n } = self;
        let n = *n;
        c.fill(0.0);
        d.fill(0.0);
        let (lr, beta1, beta2, weight_decay, bias1, bias2) = (1e-5, 0.9, 0.999, 0.05, 0.5, 0.5);
        let adam = AdamW { lr, beta1, beta2, eps: 1e-8, weight_decay, bias1, bias2 };
        time("adamw", n, 7.0, || adamw(a, b, c, d, adam, 1.0));
        let hyper = Sgd { lr, momentum: 0.9, dampening: 0.0, nesterov: true, weight_decay, first: false };
        time("sgd (nesterov)", n, 5.0, || sgd(a, b, Some(c), hyper, 1.0));
        let (min_coeff, max_coeff) = (0.01, 10.0);
        let hyper = Lamb { adam, min_coeff, max_coeff };
        time("lamb_moments_and_norms", n, 6.0, || {
            assert!(lamb_moments_and_norms(a, b, c, d, hyper, 1.0).0 > 0.0);
        });
        time("lamb_apply", n, 4.0, || lamb_apply(a, c, d, hyper, 1e-5));
    }

    fn images(&mut self) {
        for (side, patch) in [(32, 4), (224, 16)] {
            let grid = PatchGrid { channels: 3, height: side, width: side, patch };
            let image: Vec<f32> = vec![1.0; 3 * side * side];
            let mut rows = vec![0.0; image.len()];
            time(&format!("patches {side}/{patch}"), image.len(), 2.0, || patches(&image, grid, &mut rows));
        }
    }
}
