//! Times f32 matmuls of training steps at two levels, in turn: `cargo run --release -p cpu --example matmuls [threads [shapes]]`.
//!
//! Prints GFLOP/s of a thread at AVX-512 and at the machine's best level: the median of many calls and the best. Each thread has
//! matrices of its own, several of each, so that they come from memory as they do in a step. Shapes are `M,N,K:layout`; layouts are
//! `forward` (the right side by columns), `inputs` (both by rows), `weights` (the left side by columns).

use cpu::kernels::{Level, level, limit};
use cpu::matmul::{Matrix, matmul};
use std::sync::Barrier;
use std::time::Instant;

/// Of ViT-S/16, ViT-Ti/4, Swin V2-Ti and ViT-B/16: blocks of samples, weight gradients, attention.
const SHAPES: &str = "394,1152,384:forward 394,384,384:forward 394,1536,384:forward 394,384,1536:forward \
    394,384,1152:inputs 394,384,1536:inputs 394,1536,384:inputs 576,384,1576:weights 384,768,1576:weights \
    520,576,192:forward 520,192,768:forward 520,768,192:inputs 192,192,2080:weights \
    512,288,96:forward 512,96,384:forward 512,384,96:inputs 512,576,192:forward 256,1536,384:forward 256,3072,768:forward \
    96,288,2048:weights 384,96,2048:weights 768,192,2048:weights 394,3072,768:forward 394,768,3072:forward \
    768,768,1576:weights 197,197,64:forward 197,64,197:inputs 197,64,197:weights 197,197,64:inputs \
    65,65,64:forward 65,64,65:inputs 64,64,32:forward 64,32,64:inputs 64,32,64:weights \
    32,32,512:inputs 48,512,512:inputs 512,32,512:inputs 512,512,32:inputs 64,96,128:inputs 128,128,128:inputs 256,256,256:inputs";

fn main() {
    let mut args = std::env::args().skip(1);
    let threads = args.next().map_or(1, |n| n.parse::<usize>().expect("a number of threads"));
    let given: Vec<String> = args.collect();
    let shapes = if given.is_empty() { SHAPES.to_string() } else { given.join(" ") };
    limit(Level::Amx);
    let best = level();
    println!("{threads} threads, {:?} and {best:?}, GFLOP/s of a thread: medians (best)", Level::Avx512);
    for shape in shapes.split_whitespace() {
        let (sizes, layout) = shape.split_once(':').expect("M,N,K:layout");
        let sizes: Vec<usize> = sizes.split(',').map(|n| n.parse().expect("a number")).collect();
        let [m, n, k] = sizes[..] else { panic!("M,N,K") };
        let [old, new] = rates(threads, (m, n, k), layout, [Level::Avx512, best]);
        println!(
            "{shape:<24} {:>6.1} ({:>6.1}) {:>6.1} ({:>6.1})  × {:.2} ({:.2})",
            old.0,
            old.1,
            new.0,
            new.1,
            new.0 / old.0,
            new.1 / old.1
        );
    }
}

/// Median and best of both levels.
fn rates(
    threads: usize,
    (m, n, k): (usize, usize, usize),
    layout: &str,
    levels: [Level; 2],
) -> [(f64, f64); 2] {
    let flops = 2.0 * (m * n * k) as f64;
    let copies = ((24 << 20) / (4 * (m * k + m * n + k * n))).clamp(1, 64);
    let calls = (2e8 / flops).ceil().clamp(1.0, 200.0) as usize;
    let (barrier, turns) = (Barrier::new(threads), 12);
    let times: Vec<[Vec<f64>; 2]> = std::thread::scope(|scope| {
        let work = |index: usize| {
            let side = |len: usize| -> Vec<Vec<f32>> {
                (0..copies)
                    .map(|copy| (0..len).map(|i| ((i * 7 + copy + index) % 13) as f32 - 6.0).collect())
                    .collect()
            };
            let (a, b, mut c) = (side(m * k), side(k * n), side(m * n));
            let mut times = [vec![], vec![]];
            let mut at = 0;
            for turn in 0..turns {
                for (which, level) in levels.into_iter().enumerate() {
                    barrier.wait();
                    if index == 0 {
                        limit(level);
                    }
                    barrier.wait();
                    let start = Instant::now();
                    for _ in 0..calls {
                        at = (at + 1) % copies;
                        let rows = |x: &[f32], width| Matrix::rows(x.as_ptr().cast_mut(), width);
                        let (a, b) = match layout {
                            "forward" => (rows(&a[at], k), rows(&b[at], k).transposed()),
                            "inputs" => (rows(&a[at], k), rows(&b[at], n)),
                            _ => (rows(&a[at], m).transposed(), rows(&b[at], n)),
                        };
                        // SAFETY: three arrays that hold as much, of which two are only read.
                        unsafe { matmul((m, n, k), Matrix::rows(c[at].as_mut_ptr(), n), a, b, false) };
                    }
                    if turn > 0 {
                        times[which].push(start.elapsed().as_secs_f64() / calls as f64);
                    }
                }
            }
            times
        };
        let handles: Vec<_> = (0..threads).map(|index| scope.spawn(move || work(index))).collect();
        handles.into_iter().map(|handle| handle.join().expect("a thread")).collect()
    });
    [0, 1].map(|which| {
        let mut all: Vec<f64> = times.iter().flat_map(|t| t[which].iter().copied()).collect();
        all.sort_by(f64::total_cmp);
        (flops / all[all.len() / 2] / 1e9, flops / all[0] / 1e9)
    })
}
