//! Plans written by hand, on the CPU.

mod common;

use common::written::program;
use cpu::{Executor, Options, Which};
use graph::Header;
use graph::random::Sequence;

const FP16: &str = include_str!("../../graph/tests/plans/fp16-skipped-step.plan");

fn header(nominal: f64) -> Header {
    Header { seed: 5, step: 0, first_sample: 0, learning_rate: 1e-3, nominal, accumulate: false }
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
fn refusal(text: &str) -> String {
    match Executor::<f32>::new(program(text), Options::alone(2, 0)) {
        Ok(_) => panic!("{text} was bound"),
        Err(error) => error.to_string(),
    }
}

#[test]
fn what_has_no_kernel_is_refused_when_it_is_bound() {
    let prepare = "plan eval batch=2 height=8 width=8 arena=8192\n\
        input pixels u8[4,8,8,3] @0\n\
        input choices i32[2,34] @1024\n\
        input levels f32[3,256] @2048\n\
        0 compute images f32[2,3,8,8] @5120 = prepare(pixels, choices, levels) size=8 ; forward images\n\
        output images\n";
    assert_eq!(refusal(prepare), "images: the CPU executor has no kernel for prepare");
    let doubles = "plan eval batch=2 height=1 width=1 arena=256\n\
        input x f64[2,8] @0\n\
        0 compute y f64[2,8] @128 = gelu(x) ; forward y\n\
        output y\n";
    assert_eq!(refusal(doubles), "x is f64[2,8], but this executor computes in f32");
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
