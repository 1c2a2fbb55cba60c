//! Plans written by hand, on the CPU.

#[path = "../common/mod.rs"]
mod common;
mod ranks;
mod zero2;

use common::written::program;
use cpu::{Executor, Options, Which};
use graph::random::Sequence;
use graph::{DType, Header, Program};

const FP8: &str = include_str!("../../../graph/tests/plans/fp8-linear.plan");
const FP16: &str = include_str!("../../../graph/tests/plans/fp16-skipped-step.plan");

fn header(nominal: f64) -> Header {
    Header { seed: 5, step: 0, first_sample: 0, learning_rate: 1e-3, nominal }
}

fn executor(text: &str) -> Executor<f32> {
    Executor::new(program(text), Options::alone(2, 7)).unwrap()
}

fn state(executor: &Executor<f32>, name: &str) -> Vec<f32> {
    executor.state(executor.find_state(name).unwrap()).into_owned()
}

fn normal(count: usize, site: u32) -> Vec<f32> {
    let mut random = Sequence::new(3, site);
    (0..count).map(|_| random.normal() as f32).collect()
}

/// Why a program can't be bound.
fn refusal(program: Program) -> String {
    match Executor::<f32>::new(program, Options::alone(2, 0)) {
        Ok(_) => panic!("it was bound"),
        Err(error) => error.to_string(),
    }
}

#[test]
fn what_has_no_kernel_is_refused_when_it_is_bound() {
    // No op of a step; `check` refuses it, too.
    let mut input = program(
        "plan eval batch=2 height=1 width=1 arena=256\n\
        0 compute x f32[] @0 = seed() dtype=\"f32\" ; forward x\n\
        output x\n",
    );
    input.eval.steps[0].op = graph::Op::Input;
    assert_eq!(refusal(input), "x: the CPU executor has no kernel for input");
    let doubles = "plan eval batch=2 height=1 width=1 arena=256\n\
        input x f64[2,8] @0\n\
        0 compute y f64[2,8] @128 = gelu(x) ; forward y\n\
        output y\n";
    assert_eq!(refusal(program(doubles)), "x is f64[2,8], but this executor computes in f32");
}

/// The loss scale follows what the gradients can bear; a step that is skipped leaves everything else as it was.
#[test]
fn a_skipped_step_in_fp16_changes_the_loss_scale_alone() {
    let mut executor = executor(FP16);
    let trained =
        ["fc.weight", "fc.bias", "fc.weight.half", "fc.bias.half", "fc.weight.m", "fc.weight.v", "applied"];
    let mut step = |x: &[f32]| {
        assert!(executor.write_input(Which::Last, "x", x));
        executor
            .ints(Which::Last, "labels")
            .unwrap()
            .iter_mut()
            .zip(0..)
            .for_each(|(label, i)| *label = i % 64);
        executor.input(Which::Last, "weights").unwrap().fill(1.0);
        executor.run(Which::Last, &header(16.0)).unwrap();
        executor.run(Which::Update, &header(16.0)).unwrap();
        let applied = executor.output(Which::Update, "control").unwrap()[1];
        let states = trained.map(|name| state(&executor, name));
        (applied, state(&executor, "loss_scale"), states)
    };
    let good = normal(16 * 32, 1);
    let (applied, scale, before) = step(&good);
    assert_eq!((applied, &scale[..]), (1.0, &[65536.0, 1.0, 2.0][..]));
    let [weight, _, copy, ..] = &before;
    assert!(weight.iter().any(|x| *x != 0.0));
    assert!(weight.iter().zip(copy).all(|(w, half)| half::f16::from_f32(*w).to_f32() == *half));
    let mut bad = good.clone();
    bad[3] = f32::INFINITY;
    for expected in [[65536.0, 0.0, 1.0], [32768.0, 0.0, 1.0], [16384.0, 0.0, 1.0]] {
        let (applied, scale, after) = step(&bad);
        assert_eq!((applied, &scale[..]), (0.0, &expected[..]));
        assert!(after == before);
    }
    let (applied, scale, after) = step(&good);
    assert_eq!((applied, &scale[..]), (1.0, &[16384.0, 1.0, 1.0][..]));
    assert!(after != before && after[6] == [2.0]);
}

/// What an fp8 number of these bits is, from its fields alone; None for what is not finite.
fn of_bits(bits: u8, dtype: DType) -> Option<f64> {
    let (mantissa, bias, largest) = if dtype == DType::E4M3 { (3, 7, 448.0) } else { (2, 15, 57344.0) };
    let (code, sign) = (bits % 128, if bits < 128 { 1.0 } else { -1.0 });
    let (exponent, part) =
        (i32::from(code >> mantissa), f64::from(code % (1 << mantissa)) / f64::from(1 << mantissa));
    let size =
        if exponent == 0 { part * 2f64.powi(1 - bias) } else { (1.0 + part) * 2f64.powi(exponent - bias) };
    (size <= largest && code != 127).then_some(sign * size)
}

/// The numbers times the scale as fp8, by a search among all there are, divided by the scale again.
fn through_fp8(values: &[f64], scale: f64, dtype: DType) -> Vec<f64> {
    let all: Vec<(u8, f64)> = (0..=255).filter_map(|bits| Some((bits, of_bits(bits, dtype)?))).collect();
    let nearest = |x: f64| {
        let order = |a: &&(u8, f64), b: &&(u8, f64)| {
            (a.1 - x).abs().total_cmp(&(b.1 - x).abs()).then((a.0 % 2).cmp(&(b.0 % 2)))
        };
        all.iter().min_by(order).unwrap().1
    };
    // The executor multiplies in f32.
    values.iter().map(|x| nearest(f64::from(*x as f32 * scale as f32)) / scale).collect()
}

/// a (m,k) · b (n,k) transposed.
fn matmul(a: &[f64], b: &[f64], k: usize) -> Vec<f64> {
    let dot = |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(x, y)| x * y).sum::<f64>();
    a.chunks_exact(k).flat_map(|a| b.chunks_exact(k).map(move |b| dot(a, b))).collect()
}

fn transposed(x: &[f64], columns: usize) -> Vec<f64> {
    (0..columns).flat_map(|c| x.iter().skip(c).step_by(columns).copied()).collect()
}

fn largest(x: &[f64]) -> f64 {
    x.iter().fold(0.0, |most, x| most.max(x.abs()))
}

/// (scale, history), as the layer's direct computation has them.
struct Scale {
    dtype: DType,
    range: f64,
    numbers: Vec<f64>,
}

impl Scale {
    fn new(dtype: DType, range: f64) -> Self {
        Scale { dtype, range, numbers: vec![1.0, 0.0, 0.0, 0.0, 0.0] }
    }

    fn round(&self, x: &[f64]) -> Vec<f64> {
        through_fp8(x, self.numbers[0], self.dtype)
    }

    fn note(&mut self, newest: f64) {
        self.numbers[1..].rotate_right(1);
        self.numbers[1] = newest;
        self.numbers[0] = f64::from((self.range / largest(&self.numbers[1..])) as f32);
    }
}

fn assert_close(got: &[f64], want: &[f64], tolerance: f64, what: &str) {
    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
    let apart = norm(&mut got.iter().zip(want).map(|(a, b)| a - b)) / norm(&mut want.iter().copied());
    assert!(got.len() == want.len() && apart < tolerance, "{what} is {apart:.1e} off");
}

/// Scales, largest values, transposed copies and all three matmuls of a layer in fp8, against a direct computation.
#[test]
fn a_linear_layer_in_fp8_computes_what_it_says() {
    let mut executor = executor(FP8);
    let numbers = |values: Vec<f32>| values.into_iter().map(f64::from).collect::<Vec<f64>>();
    let [mut of_x, mut of_w] = [(); 2].map(|()| Scale::new(DType::E4M3, 448.0));
    let mut of_d = Scale::new(DType::E5M2, 57344.0 / 2.0);
    for step in 0..6 {
        let (mut peaks, mut sum) = ([0f64; 3], vec![0.0; 64 * 32]);
        for (micro, which) in [(0, Which::First), (1, Which::Micro)] {
            // What is in x grows tenfold, so that old scales are wrong, and saturate.
            let x: Vec<f32> =
                normal(16 * 32, 10 * step + micro).iter().map(|x| x * 10f32.powi(step as i32)).collect();
            let x: Vec<f32> = x.iter().map(|x| half::bf16::from_f32(*x).to_f32()).collect();
            assert!(executor.write_input(which, "x", &x));
            let labels = executor.ints(which, "labels").unwrap();
            labels.iter_mut().zip(0..).for_each(|(label, i)| *label = (7 * i) % 64);
            executor.input(which, "weights").unwrap().fill(1.0);
            let header = header(32.0);
            let mut seen = std::collections::HashMap::new();
            let mut note = |plan: &graph::Plan, shown: cpu::reference::Shown| {
                for (value, numbers) in plan.steps[shown.step].outputs.iter().zip(shown.results) {
                    seen.insert(plan.values[*value].name.clone(), numbers);
                }
            };
            executor.run_shown(which, &header, &mut note).unwrap();

            let (x, w) = (numbers(x), numbers(state(&executor, "fc.weight")));
            let bias = numbers(state(&executor, "fc.bias.half"));
            let (x8, w8) = (of_x.round(&x), of_w.round(&w));
            let y: Vec<f64> =
                matmul(&x8, &w8, 32).iter().zip(bias.iter().cycle()).map(|(y, b)| y + b).collect();
            assert_close(&seen["fc"], &y, 0.004, "y");
            // The gradient of the loss is what the executor has: this is about matmuls.
            let d = &seen["d.fc"];
            let d8 = of_d.round(d);
            assert_close(&seen["d.x"], &matmul(&d8, &transposed(&w8, 32), 64), 0.004, "dx");
            let dw = matmul(&transposed(&d8, 64), &transposed(&x8, 32), 16);
            sum.iter_mut().zip(dw).for_each(|(sum, dw)| *sum += dw);
            assert_close(&numbers(state(&executor, "fc.weight.grad")), &sum, 1e-6, "dw");
            for (peak, values) in peaks.iter_mut().zip([&x, &w, d]) {
                *peak = peak.max(largest(values));
            }
            // Copies are transposes, bit for bit, and numbers of their format.
            for (copy, columns) in [("x8", 32), ("w8", 32), ("d8", 64)] {
                assert!(seen[&format!("{copy}.t")] == transposed(&seen[copy], columns), "{copy}");
            }
            assert!(seen["x8"].iter().all(|x| x.abs() <= 448.0));
        }
        executor.run(Which::Update, &header(32.0)).unwrap();
        for (scale, peak, name) in
            [(&mut of_x, peaks[0], "fc.x"), (&mut of_w, peaks[1], "fc.weight"), (&mut of_d, peaks[2], "d.fc")]
        {
            scale.note(peak);
            assert_eq!(numbers(state(&executor, &format!("{name}.scale"))), scale.numbers, "{name}");
        }
    }
}

/// One number that is not finite, and scales stay as they were.
#[test]
fn a_largest_value_that_is_not_finite_leaves_the_scale() {
    let mut executor = executor(FP8);
    let step = |executor: &mut Executor<f32>, x: &[f32]| {
        assert!(executor.write_input(Which::Last, "x", x));
        executor.ints(Which::Last, "labels").unwrap().fill(3);
        executor.input(Which::Last, "weights").unwrap().fill(1.0);
        executor.run(Which::Last, &header(16.0)).unwrap();
        executor.run(Which::Update, &header(16.0)).unwrap();
        state(executor, "fc.x.scale")
    };
    let mut x = normal(16 * 32, 1);
    let before = step(&mut executor, &x);
    assert!(before[0] != 1.0 && before[1] > 0.0);
    x[7] = f32::NAN;
    assert_eq!(step(&mut executor, &x), before);
    assert_eq!(state(&executor, "fc.x.largest"), [f32::INFINITY]);
}
