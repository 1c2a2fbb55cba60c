//! Times convolutions, batch norm and resizing of 512 channels: `cargo run --release -p cpu --example dense [threads [side]]`.
//!
//! Prints GFLOP/s by the clock and by the processors' time (which a busy machine changes less; with one thread only, as idle ones spin), the best of several runs, and
//! beside each convolution the product that it comes to, as a linear layer. `bench/conv_peer.py` does the same with PyTorch.

use cpu::{Executor, Options, StepTime, Which};
use graph::build::{BatchNorm, Conv, Linear};
use graph::op::Window;
use graph::{Builder, DType, Graph, Header, Init, Key, Model, Optimizer, ParamGroup, Settings, compile};
use std::collections::BTreeMap;

const CHANNELS: usize = 512;
const SMALL: Init = Init::Normal { std: 0.02 };

fn main() {
    let number = |i: usize| std::env::args().nth(i).map(|n| n.parse::<usize>().expect("a number"));
    let threads = number(1).unwrap_or(2);
    println!(
        "{threads} threads\n{:>9} {:<28} {:>9} {:>9} {:>9}",
        "pixels", "step", "ms", "GFLOP/s", "of CPU"
    );
    for side in number(2).map_or(vec![32, 64, 128], |side| vec![side]) {
        run(threads, side, &convolution(side));
        run(threads, side, &matmul(side));
    }
}

/// Convolution, batch norm, ReLU, and twice the size.
fn convolution(side: usize) -> Graph {
    let mut b = Builder::new(DType::F32, true);
    let targets = b.targets([1, 1, 1], false);
    let x = b.parameter("x", [1, side, side, CHANNELS], Init::Normal { std: 1.0 });
    let window = Window { stride: 1, pad: 1 };
    let conv = Conv { name: "conv", out: CHANNELS, kernel: 3, window, weight: SMALL, bias: None };
    let y = b.conv(x, conv);
    let y = b.batch_norm(y, BatchNorm { relu: true, ..BatchNorm::named("norm") });
    let y = b.resize("twice", y, (2 * side, 2 * side));
    let y = b.average_pool("pool", y, 1);
    let (loss, stats) = b.weighted_losses(y, &[], targets, 0.0);
    b.finish(&[loss, stats, y]).expect("the graph is sound")
}

/// As many multiplications, laid out already.
fn matmul(side: usize) -> Graph {
    let mut b = Builder::new(DType::F32, true);
    let targets = b.targets([1, side, side], false);
    let x = b.parameter("x", [1, side, side, 9 * CHANNELS], Init::Normal { std: 1.0 });
    let y = b.linear(x, Linear { name: "linear", out: CHANNELS, weight: SMALL, bias: Init::Zeros });
    let (loss, stats) = b.weighted_losses(y, &[], targets, 0.0);
    b.finish(&[loss, stats, y]).expect("the graph is sound")
}

fn run(threads: usize, side: usize, graph: &Graph) {
    let target = cpu::Target { threads };
    let settings = Settings {
        group: &|_| ParamGroup { lr_scale: 1.0, decays: false },
        accumulates: true,
        ..Settings::plain(Optimizer::Sgd { momentum: 0.0, nesterov: false, weight_decay: 0.0 }, &target)
    };
    let model = Model { train: graph.clone(), eval: graph.clone(), key: Key::default() };
    let program = compile(model, &settings).expect("the graph compiles");
    let mut executor = Executor::<f32>::new(program, Options::alone(threads, 1)).expect("it fits");
    let header = Header { seed: 1, step: 0, first_sample: 0, learning_rate: 0.0, nominal: 1.0 };
    let mut best: BTreeMap<String, (StepTime, f64)> = BTreeMap::new();
    for _ in 0..5 {
        executor.reset_times();
        executor.labels(Which::Last).expect("labels").fill(1);
        executor.input(Which::Last, "weights").expect("weights").fill(1.0);
        let (wall, before) = (std::time::Instant::now(), processor_seconds());
        executor.run(Which::Last, &header).expect("it runs");
        let share = (processor_seconds() - before) / wall.elapsed().as_secs_f64() / threads as f64;
        for time in executor.training_times() {
            // How much of the processors the run had holds for each of its steps, more or less.
            let kept = best.get(&time.op).is_none_or(|(kept, of)| time.seconds * share < kept.seconds * of);
            if kept {
                best.insert(time.op.clone(), (time, share));
            }
        }
    }
    let kinds = ["conv", "linear", "moments", "batch_norm", "resize"];
    for (time, share) in best.values().filter(|(t, _)| kinds.iter().any(|k| t.op.starts_with(k))) {
        let rate = time.flops / time.seconds / 1e9;
        let ms = time.seconds * 1e3;
        println!("{:>9} {:<28} {ms:>9.2} {rate:>9.1} {:>9.1}", side * side, time.op, rate / share);
    }
}

/// Of all threads of this process so far.
fn processor_seconds() -> f64 {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: the struct is ours, and plain numbers.
    let usage = unsafe {
        libc::getrusage(libc::RUSAGE_SELF, usage.as_mut_ptr());
        usage.assume_init()
    };
    let seconds = |t: libc::timeval| t.tv_sec as f64 + t.tv_usec as f64 / 1e6;
    seconds(usage.ru_utime) + seconds(usage.ru_stime)
}
