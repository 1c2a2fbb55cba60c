//! Tests of the layers under the executor that need a GPU.

use crate::action::{Address, Epilogue, Facts, Kernel, Launch, Matmul, Matrix, Source};
use crate::compile::{Arch, Image, compile, compile_text_for_tests};
use crate::driver::{Block, Context, Event, Stream};
use crate::launch::Ready;
use crate::libraries;
use crate::matmul::{MathLibraries, MatmulImpl, WORKSPACE};
use crate::modules::Modules;
use crate::steps::{hopper, weights};
use crate::tuner::{Bench, KnownAlgorithms, Tuner};
use graph::DType;
use half::bf16;
use std::sync::Arc;

fn gpu() -> (Facts, Arc<Context>) {
    let facts = libraries::device(0).unwrap_or_else(|error| panic!("{error}"));
    (facts, Context::open(0).unwrap())
}

/// Small integers, exact in every type.
fn numbers(count: usize, salt: usize) -> Vec<f32> {
    (0..count).map(|i| ((i * 7 + salt * 5) % 9) as f32 - 4.0).collect()
}

fn bytes(values: &[f32], dtype: DType) -> Vec<u8> {
    match dtype {
        DType::F32 => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
        _ => values.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect(),
    }
}

fn floats(bytes: &[u8], dtype: DType) -> Vec<f32> {
    match dtype {
        DType::F32 => bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
        _ => bytes.as_chunks().0.iter().map(|b| bf16::from_le_bytes(*b).to_f32()).collect(),
    }
}

#[test]
#[ignore = "needs a GPU"]
fn matmuls_match_the_plan() {
    let (facts, context) = gpu();
    let stream = Stream::new(&context).unwrap();
    let mut libraries = MathLibraries::new(&context, true).unwrap();
    let mut modules = Modules::new(&context);
    let mut tuner = Tuner::new(&context, KnownAlgorithms::read(&facts, true)).unwrap();
    let workspace = Block::new(&context, WORKSPACE, "a test").unwrap();
    let memory = Block::new(&context, 1 << 20, "a test").unwrap();
    let scratch = Block::new(&context, 1 << 20, "a test").unwrap();
    let (m, n, k) = (24, 40, 16);
    let (left, right) = (numbers(m * k, 1), numbers(k * n, 2));
    let (bias, old) = (numbers(n, 3), numbers(m * n, 4));
    let at = |part: Address| memory.address + (part << 16);
    for case in 0..32 {
        let bit = |which: usize| case >> which & 1 == 1;
        let (left_transposed, right_transposed, accumulate, with_bias) = (bit(0), bit(1), bit(2), bit(3));
        if accumulate && with_bias {
            continue;
        }
        let (operands, result) = if bit(4) { (DType::Bf16, DType::F32) } else { (DType::F32, DType::F32) };
        let side = |address, rows: usize, columns: usize, transposed: bool| {
            let (rows, columns) = if transposed { (columns, rows) } else { (rows, columns) };
            Matrix::new(address, operands, rows, columns)
        };
        let matmul = Matmul {
            left: side(at(0), m, k, left_transposed),
            left_transposed,
            right: side(at(1), k, n, right_transposed),
            right_transposed,
            result: Matrix::new(at(2), result, m, n),
            accumulate,
            epilogue: if with_bias { Epilogue::Bias(at(3)) } else { Epilogue::None },
            tf32: false,
        };
        stream.send_now(&bytes(&left, operands), at(0)).unwrap();
        stream.send_now(&bytes(&right, operands), at(1)).unwrap();
        stream.send_now(&bytes(&old, result), at(2)).unwrap();
        stream.send_now(&bytes(&bias, result), at(3)).unwrap();
        let mut bench = Bench {
            libraries: &libraries,
            modules: &mut modules,
            stream: &stream,
            scratch: &scratch,
            workspace: &workspace,
        };
        let MatmulImpl::Library(algorithm) = tuner.choose(&matmul, &mut bench).unwrap() else {
            panic!("a deterministic tuner tries nothing");
        };
        libraries.provide([algorithm.workspace, 0]).unwrap();
        libraries.run(&matmul, &algorithm, &stream, false).unwrap();
        let mut got = vec![0; m * n * result.bytes()];
        stream.fetch_now(at(2), &mut got).unwrap();
        let element = |values: &[f32], i: usize, j: usize, rows: usize, columns: usize, turned: bool| {
            values[if turned { j * rows + i } else { i * columns + j }]
        };
        for (index, got) in floats(&got, result).into_iter().enumerate() {
            let (i, j) = (index / n, index % n);
            let dot: f32 = (0..k)
                .map(|l| {
                    element(&left, i, l, m, k, left_transposed)
                        * element(&right, l, j, k, n, right_transposed)
                })
                .sum();
            let more = if accumulate { old[index] } else { 0.0 } + if with_bias { bias[j] } else { 0.0 };
            assert_eq!(got, dot + more, "case {case}, element {i}, {j}");
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn matmuls_of_our_own_match_the_plan() {
    let (facts, context) = gpu();
    let stream = Stream::new(&context).unwrap();
    // Ragged everywhere; 1000 columns are tried with both widths of tiles.
    let (m, n, k) = (1100, 1000, 72);
    let memory = Block::new(&context, 16 << 20, "a test").unwrap();
    let at = |part: Address| memory.address + (part << 22);
    let (left, right, bias) = (numbers(m * k, 1), numbers(k * n, 2), numbers(n, 3));
    stream.send_now(&bytes(&left, DType::Bf16), at(0)).unwrap();
    stream.send_now(&bytes(&right, DType::Bf16), at(1)).unwrap();
    stream.send_now(&bytes(&bias, DType::Bf16), at(3)).unwrap();
    for case in 0..4 {
        let (right_transposed, with_bias) = (case & 1 == 1, case & 2 == 2);
        let matrix = |part, rows, columns| Matrix::new(at(part), DType::Bf16, rows, columns);
        let matmul = Matmul {
            left: matrix(0, m, k),
            left_transposed: false,
            right: if right_transposed { matrix(1, n, k) } else { matrix(1, k, n) },
            right_transposed,
            result: matrix(2, m, n),
            accumulate: false,
            epilogue: if with_bias { Epilogue::Bias(at(3)) } else { Epilogue::None },
            tf32: false,
        };
        let weight = |l: usize, j: usize| right[if right_transposed { j * k + l } else { l * n + j }];
        let dot = |i: usize, j: usize| (0..k).map(|l| left[i * k + l] * weight(l, j)).sum::<f32>();
        let more = |j: usize| if with_bias { bias[j] } else { 0.0 };
        let want: Vec<f32> =
            (0..m * n).map(|x| bf16::from_f32(dot(x / n, x % n) + more(x % n)).to_f32()).collect();
        let cuts = hopper::candidates(&matmul, &facts);
        assert_eq!(cuts.is_empty(), facts.capability != (9, 0));
        for cut in cuts {
            let launch = hopper::plain(&matmul, cut, &facts).unwrap();
            let arch = Arch::of(facts.capability).unwrap();
            let image = compile(Source::Matmul, std::slice::from_ref(&launch.kernel.name), &arch).unwrap();
            let mut modules = Modules::load(&context, &[(Source::Matmul, image)]).unwrap();
            stream.zero(at(2), m * n * 2).unwrap();
            Ready::new(&launch, &mut modules).unwrap().start(&stream, || "a test".into()).unwrap();
            let mut got = vec![0; m * n * 2];
            stream.fetch_now(at(2), &mut got).unwrap();
            assert!(floats(&got, DType::Bf16) == want, "case {case}, {}", launch.kernel.name);
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn weight_gradients_made_together_are_those_made_alone() {
    let (facts, context) = gpu();
    let stream = Stream::new(&context).unwrap();
    let memory = Block::new(&context, 16 << 20, "a test").unwrap();
    let at = |part: usize| memory.address + ((part as Address) << 20);
    // Ragged, of both kinds of tiles; sums for one, two and four blocks.
    let sizes = [(200, 72), (8, 392), (192, 192), (520, 8)];
    let small = [(128, 128), (136, 8), (120, 256), (8, 8)];
    for (case, (sizes, depth)) in [(sizes, 1000), (sizes, 72), (small, 1000), (small, 40)].iter().enumerate()
    {
        let depth = *depth;
        let mut matmuls = Vec::new();
        let mut want: Vec<Vec<f32>> = Vec::new();
        for (i, (rows, columns)) in sizes[..4 - case % 2].iter().copied().enumerate() {
            let (left, right) = (numbers(depth * rows, i), numbers(depth * columns, i + 4));
            let old = numbers(rows * columns, i + 8);
            stream.send_now(&bytes(&left, DType::Bf16), at(3 * i)).unwrap();
            stream.send_now(&bytes(&right, DType::Bf16), at(3 * i + 1)).unwrap();
            stream.send_now(&bytes(&old, DType::F32), at(3 * i + 2)).unwrap();
            let half = |part, columns| Matrix::new(at(part), DType::Bf16, depth, columns);
            let accumulate = (case + i) % 2 == 1;
            matmuls.push(Matmul {
                left: half(3 * i, rows),
                left_transposed: true,
                right: half(3 * i + 1, columns),
                right_transposed: false,
                result: Matrix::new(at(3 * i + 2), DType::F32, rows, columns),
                accumulate,
                epilogue: Epilogue::None,
                tf32: false,
            });
            let dot = |r: usize, c: usize| {
                (0..depth).map(|l| left[l * rows + r] * right[l * columns + c]).sum::<f32>()
            };
            let before = |at: usize| if accumulate { old[at] } else { 0.0 };
            let made = |at: usize| dot(at / columns, at % columns) + before(at);
            want.push((0..rows * columns).map(made).collect());
        }
        let launch = weights::together(&matmuls, &facts);
        assert_eq!(launch.is_some(), facts.capability == (9, 0));
        let Some(launch) = launch else { return };
        let arch = Arch::of(facts.capability).unwrap();
        let image = compile(Source::Weights, std::slice::from_ref(&launch.kernel.name), &arch).unwrap();
        let mut modules = Modules::load(&context, &[(Source::Weights, image)]).unwrap();
        Ready::new(&launch, &mut modules).unwrap().start(&stream, || "a test".into()).unwrap();
        for (matmul, want) in matmuls.iter().zip(want) {
            let mut got = vec![0; want.len() * 4];
            stream.fetch_now(matmul.result.address, &mut got).unwrap();
            let found = floats(&got, DType::F32) == want;
            assert!(found, "case {case}, {}, {} rows", launch.kernel.name, matmul.result.rows);
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn captured_work_runs_as_often_as_it_is_launched() {
    let (facts, context) = gpu();
    let text = r#"
        #include "common.cuh"
        template <int N> __global__ void add(float* to, float x, long long unused, double y) {
            extern __shared__ float shared[];
            shared[N + threadIdx.x] = x + (float)y;
            to[threadIdx.x] += shared[N + threadIdx.x];
        }"#;
    let name = "add<16000>".to_string();
    let arch = Arch::of(facts.capability).unwrap();
    let image: Image = compile_text_for_tests(text, std::slice::from_ref(&name), &arch).unwrap();
    let mut modules = Modules::load(&context, &[(Source::Rows, image)]).unwrap();
    let (stream, other) = (Stream::new(&context).unwrap(), Stream::new(&context).unwrap());
    let memory = Block::new(&context, 256, "a test").unwrap();
    let kernel = Kernel::new(Source::Rows, name);
    let launch = Launch { kernel, grid: [1; 3], block: 32, shared: 64_200, args: vec![] };
    let function = modules.function(&launch).unwrap();
    let words = [memory.address, u64::from(1.5f32.to_bits()), 7, 2.5f64.to_bits()];
    let (fork, join) = (Event::new(&context).unwrap(), Event::new(&context).unwrap());
    let work = || {
        let mut args = words.each_ref().map(|word| std::ptr::from_ref(word).cast_mut().cast());
        fork.record(&stream)?;
        other.wait(&fork)?;
        // SAFETY: four arguments, as the kernel takes them.
        let result = unsafe {
            let (params, extra) = (args.as_mut_ptr(), std::ptr::null_mut());
            cudarc::driver::sys::cuLaunchKernel(
                function.raw,
                1,
                1,
                1,
                32,
                1,
                1,
                64_200,
                other.raw,
                params,
                extra,
            )
        };
        crate::driver::check(result, || "launching".into())?;
        join.record(&other)?;
        stream.wait(&join)
    };
    stream.zero(memory.address, 256).unwrap();
    let graph = stream.capture(work, "a test").unwrap();
    for _ in 0..3 {
        stream.launch(&graph, "a test").unwrap();
    }
    let mut got = vec![0; 128];
    stream.fetch_now(memory.address, &mut got).unwrap();
    assert_eq!(floats(&got, DType::F32), [12.0; 32]);
}
