//! Plans written by hand, on the CPU.

mod common;

use comm::Communicator;
use common::ranks::on_each;
use common::written::program;
use cpu::{Executor, Options, Which};
use graph::random::Sequence;
use graph::{DType, Header, Program};

const FP8: &str = include_str!("../../graph/tests/plans/fp8-linear.plan");
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
        for micro in 0..2 {
            // What is in x grows tenfold, so that old scales are wrong, and saturate.
            let x: Vec<f32> =
                normal(16 * 32, 10 * step + micro).iter().map(|x| x * 10f32.powi(step as i32)).collect();
            let x: Vec<f32> = x.iter().map(|x| half::bf16::from_f32(*x).to_f32()).collect();
            assert!(executor.write_input(Which::Micro, "x", &x));
            let labels = executor.ints(Which::Micro, "labels").unwrap();
            labels.iter_mut().zip(0..).for_each(|(label, i)| *label = (7 * i) % 64);
            executor.input(Which::Micro, "weights").unwrap().fill(1.0);
            let header = Header { accumulate: micro > 0, ..header(32.0) };
            let mut seen = std::collections::HashMap::new();
            let mut note = |plan: &graph::Plan, shown: cpu::reference::Shown| {
                for (value, numbers) in plan.steps[shown.step].outputs.iter().zip(shown.results) {
                    seen.insert(plan.values[*value].name.clone(), numbers);
                }
            };
            executor.run_shown(Which::Micro, &header, &mut note).unwrap();

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

const ZERO3: &str = include_str!("../../graph/tests/plans/zero3-recompute.plan");

/// What one rank with all samples computes: the plan of two, without what they say to each other.
const ONE: &str = "plan micro batch=32 height=1 width=64 arena=262144
state block.0.weight f32[64,64] {\"parameter\":\"zeros\"}
state block.0.bias f32[64] {\"parameter\":\"zeros\"}
state block.1.weight f32[64,64] {\"parameter\":\"zeros\"}
state block.1.bias f32[64] {\"parameter\":\"zeros\"}
state block.0.weight.grad f32[64,64] \"gradient\"
state block.0.bias.grad f32[64] \"gradient\"
state block.1.weight.grad f32[64,64] \"gradient\"
state block.1.bias.grad f32[64] \"gradient\"
state stats f32[4] \"statistic\"
input x f32[32,64] @0
input labels i32[32] @16384
input weights f32[32] @16640
0 compute y f32[32,64] @20480, y.pre f32[32,64] @36864 = linear(x, $block.0.weight, $block.0.bias) bias=true gelu=true ; forward block.0
1 compute z f32[32,64] @53248, z.pre f32[32,64] @69632 = linear(y, $block.1.weight, $block.1.bias) bias=true gelu=true ; forward block.1
2 compute loss f32[] @86016, $stats = cross_entropy(z, labels, weights) smoothing=0.0 ; forward loss
3 compute d.loss f32[] @86272 = seed() dtype=\"f32\" ; backward loss
4 compute d.z f32[32,64] @86528 = cross_entropy_grad(z, labels, weights, d.loss) smoothing=0.0 ; backward loss
5 compute d.z.pre f32[32,64] @102912, $block.1.bias.grad = gelu_grad(z.pre, d.z) bias=true ; backward block.1
6 compute $block.1.weight.grad = linear_grad_w(d.z.pre, y) shape=[64,64] ; backward block.1
7 compute d.y f32[32,64] @119296 = linear_grad_x(d.z.pre, $block.1.weight) ; backward block.1
8 compute d.y.pre f32[32,64] @135680, $block.0.bias.grad = gelu_grad(y.pre, d.y) bias=true ; backward block.0
9 compute $block.0.weight.grad = linear_grad_w(d.y.pre, x) shape=[64,64] ; backward block.0
output loss
";

/// Does `work` on each of so many threads, which are ranks of the engine that a run of threads has.
fn among<R: Send>(ranks: usize, work: impl Fn(Communicator) -> R + Sync) -> Vec<R> {
    let options = comm::Options { comm: Some(comm::Choice::Threads), ranks: Some(ranks), timeout: None };
    let Ok(comm::Start::Threads(members)) = comm::start(&options) else { panic!("threads") };
    on_each(members.iter().map(|member| member.world.clone()).collect(), work)
}

/// A plan that works on samples of one run, from `first` on: inputs, then the plan itself.
fn run_samples(executor: &mut Executor<f32>, first: usize) {
    let x = normal(32 * 64, 9);
    let batch = executor.ints(Which::Micro, "labels").unwrap().len();
    assert!(executor.write_input(Which::Micro, "x", &x[64 * first..64 * (first + batch)]));
    let labels = executor.ints(Which::Micro, "labels").unwrap();
    labels.iter_mut().zip(first..).for_each(|(label, sample)| *label = (sample * 7 % 64) as i32);
    executor.input(Which::Micro, "weights").unwrap().fill(1.0);
    executor.run(Which::Micro, &header(32.0)).unwrap();
}

/// Parameters in shards, gathered where they are used and again for the backward pass: each rank has its part of the gradients that
/// one rank with all samples has.
#[test]
fn zero3_over_two_ranks_has_the_gradients_of_one() {
    let blocks = ["block.0", "block.1"];
    let flat: Vec<Vec<f32>> =
        (20..22).map(|site| normal(4160, site).iter().map(|x| 0.1 * x).collect()).collect();
    let mut one = executor(ONE);
    for (block, values) in blocks.iter().zip(&flat) {
        let (weight, bias) = values.split_at(64 * 64);
        for (name, values) in [("weight", weight), ("bias", bias)] {
            let id = one.find_state(&format!("{block}.{name}")).unwrap();
            one.write_state(id, values);
        }
    }
    run_samples(&mut one, 0);
    let shards = among(2, |comm| {
        let rank = comm.rank();
        let options = Options { threads: 1, seed: 7, comm: Some(comm) };
        let mut executor = Executor::<f32>::new(program(ZERO3), options).unwrap();
        for (block, values) in blocks.iter().zip(&flat) {
            let id = executor.find_state(&format!("{block}.shard")).unwrap();
            executor.write_state(id, &values[2080 * rank..2080 * (rank + 1)]);
        }
        run_samples(&mut executor, 16 * rank);
        blocks.map(|block| state(&executor, &format!("{block}.grad")))
    });
    for (number, block) in blocks.iter().enumerate() {
        let all: Vec<f32> = shards.iter().flat_map(|shard| shard[number].clone()).collect();
        let plain =
            [state(&one, &format!("{block}.weight.grad")), state(&one, &format!("{block}.bias.grad"))];
        let plain = plain.concat();
        let largest = plain.iter().fold(0.0f32, |most, x| most.max(x.abs()));
        let off = all.iter().zip(&plain).fold(0.0f32, |most, (a, b)| most.max((a - b).abs()));
        assert!(largest > 1e-3 && off < 1e-5 * largest, "{block}: off by {off} of {largest}");
    }
}

/// A mesh of two by two: sums over each axis, and over all, in one order.
#[test]
fn collectives_stay_within_their_groups() {
    let text = "plan micro batch=1 height=1 width=1 mesh=data:2,sequence:2 arena=4096
input x f32[4] @0
0 comm rows f32[4] @128 = all_reduce(x) reduction=\"sum\" group=\"sequence:2\" ; exchange rows
1 comm columns f32[4] @256 = all_reduce(x) reduction=\"sum\" group=\"data:2\" ; exchange columns
2 comm all f32[4] @384 = all_reduce(rows) reduction=\"sum\" group=\"data:2\" ; exchange all
3 comm world f32[4] @512 = all_reduce(x) reduction=\"sum\" group=\"data+sequence:4\" ; exchange world
4 comm gathered f32[8] @640 = all_gather(x) group=\"sequence:2\" ; exchange gathered
output rows
output columns
output all
output world
output gathered
";
    among(4, |comm| {
        let rank = comm.rank();
        let options = Options { threads: 1, seed: 7, comm: Some(comm) };
        let mut executor = Executor::<f32>::new(program(text), options).unwrap();
        let mut sums = |x: f32| {
            assert!(executor.write_input(Which::Micro, "x", &[x; 4]));
            executor.run(Which::Micro, &header(1.0)).unwrap();
            let first = |name: &str| executor.output(Which::Micro, name).unwrap()[0];
            let gathered = executor.output(Which::Micro, "gathered").unwrap();
            (["rows", "columns", "all", "world"].map(first), [gathered[0], gathered[4]])
        };
        let value = |rank: usize| 10f32.powi(rank as i32);
        let (row, column) = (rank / 2 * 2, rank % 2);
        for _ in 0..3 {
            let (found, gathered) = sums(value(rank));
            let expected = [value(row) + value(row + 1), value(column) + value(column + 2), 1111.0, 1111.0];
            assert_eq!((found, gathered), (expected, [value(row), value(row + 1)]));
        }
    });
    // A group that the mesh doesn't have is no plan.
    let other = text.replace("group=\"sequence:2\"", "group=\"sequence:4\"").parse::<graph::Plan>().unwrap();
    let why = "step 0 (all_reduce, rows): is among sequence:4, but the mesh is data:2,sequence:2";
    assert_eq!(other.check().unwrap_err().to_string(), why);
}

const ZERO2: &str = include_str!("../../graph/tests/plans/zero2-accumulation.plan");

/// What one rank computes with all samples of a step at once, and f32 parameters beside their copies.
const WHOLE: &str = "plan last batch=64 height=1 width=32 arena=131072
state fc1.weight f32[64,32] {\"parameter\":\"zeros\"}
state fc1.bias f32[64] {\"parameter\":\"zeros\"}
state fc2.weight f32[10,64] {\"parameter\":\"zeros\"}
state fc2.bias f32[10] {\"parameter\":\"zeros\"}
state fc1.weight.half bf16[64,32] \"copy\"
state fc1.bias.half bf16[64] \"copy\"
state fc2.weight.half bf16[10,64] \"copy\"
state fc2.bias.half bf16[10] \"copy\"
state fc1.weight.grad f32[64,32] \"gradient\"
state fc1.bias.grad f32[64] \"gradient\"
state fc2.weight.grad f32[10,64] \"gradient\"
state fc2.bias.grad f32[10] \"gradient\"
state stats f32[4] \"statistic\"
input x bf16[64,32] @0
input labels i32[64] @4096
input weights f32[64] @4352
0 compute fc1 bf16[64,64] @8192, fc1.pre bf16[64,64] @16384 = linear(x, $fc1.weight.half, $fc1.bias.half) bias=true gelu=true ; forward fc1
1 compute fc2 bf16[64,10] @24576 = linear(fc1, $fc2.weight.half, $fc2.bias.half) bias=true ; forward fc2
2 compute loss f32[] @28672, $stats = cross_entropy(fc2, labels, weights) smoothing=0.1 ; forward loss
3 compute d.loss f32[] @28800 = seed() dtype=\"f32\" ; backward loss
4 compute d.fc2 bf16[64,10] @32768 = cross_entropy_grad(fc2, labels, weights, d.loss) smoothing=0.1 ; backward loss
5 compute $fc2.weight.grad = linear_grad_w(d.fc2, fc1) shape=[10,64] ; backward fc2
6 compute $fc2.bias.grad = column_sum(d.fc2) ; backward fc2
7 compute d.fc1 bf16[64,64] @40960 = linear_grad_x(d.fc2, $fc2.weight.half) ; backward fc2
8 compute d.fc1.pre bf16[64,64] @49152, $fc1.bias.grad = gelu_grad(fc1.pre, d.fc1) bias=true ; backward fc1
9 compute $fc1.weight.grad = linear_grad_w(d.fc1.pre, x) shape=[64,32] ; backward fc1
";

/// The update of these parameters, each with its moments and its copy.
fn update_of(parameters: &[(&str, &str)]) -> String {
    let mut states = String::from("state stats f32[4] \"statistic\"\nstate applied f32[1] \"counter\"\n");
    let mut steps = format!(
        "0 compute norm f32[1] @0 = sum_squares({}) ; update norm\n\
        1 compute control f32[3] @128 = clip(norm, $stats) max_norm=1.0 ; update control\n\
        2 compute $applied = advance($applied, control) ; update applied\n",
        parameters.iter().map(|(name, _)| format!("${name}.grad")).collect::<Vec<_>>().join(", ")
    );
    for (number, (name, shape)) in parameters.iter().enumerate() {
        states += &format!(
            "state {name} f32{shape} {{\"parameter\":\"zeros\"}}\nstate {name}.half bf16{shape} \"copy\"\n\
            state {name}.grad f32{shape} \"gradient\"\nstate {name}.m f32{shape} \"moment\"\n\
            state {name}.v f32{shape} \"moment\"\n"
        );
        steps += &format!(
            "{} compute ${name}, ${name}.m, ${name}.v, ${name}.half = adamw(${name}, ${name}.grad, ${name}.m, \
            ${name}.v, control, $applied, ${name}.half) beta1=0.9 beta2=0.999 eps=1e-8 weight_decay=0.05 \
            lr_scale=1.0 ; update {name}\n",
            3 + number
        );
    }
    format!("plan update batch=64 height=1 width=32 arena=4096\n{states}{steps}output control\n")
}

/// Runs a plan on samples of a step, from `first` on, as a step's first micro-batch or a later one.
fn run_batch(executor: &mut Executor<f32>, which: Which, step: u32, first: usize, accumulate: bool) {
    let x = normal(64 * 32, 40 + step);
    let batch = executor.ints(which, "labels").unwrap().len();
    assert!(executor.write_input(which, "x", &x[32 * first..32 * (first + batch)]));
    let labels = executor.ints(which, "labels").unwrap();
    labels.iter_mut().zip(first..).for_each(|(label, sample)| *label = (sample * 7 % 10) as i32);
    executor.input(which, "weights").unwrap().fill(1.0);
    executor.run(which, &Header { accumulate, ..header(64.0) }).unwrap();
}

/// Two ranks, two micro-steps each: shards of gradients, moments and f32 parameters, whole copies. After some steps they have what one
/// rank has that holds everything.
#[test]
fn zero2_over_two_ranks_trains_as_one_does() {
    const STEPS: u32 = 3;
    let buckets =
        [("bucket.0", 768, ["fc2.weight", "fc2.bias"]), ("bucket.1", 2176, ["fc1.weight", "fc1.bias"])];
    let parameters =
        [("fc1.weight", "[64,32]"), ("fc1.bias", "[64]"), ("fc2.weight", "[10,64]"), ("fc2.bias", "[10]")];
    let first = |name: &str| -> Vec<f32> {
        let (count, site) = match name {
            "fc1.weight" => (2048, 50),
            "fc1.bias" => (64, 51),
            "fc2.weight" => (640, 52),
            _ => (10, 53),
        };
        normal(count, site).into_iter().map(|x| 0.2 * x).collect()
    };
    let mut one = executor(&format!("{WHOLE}{}", update_of(&parameters)));
    for (name, _) in parameters {
        let id = one.find_state(name).unwrap();
        one.write_state(id, &first(name));
    }
    for step in 0..STEPS {
        run_batch(&mut one, Which::Last, step, 0, false);
        one.run(Which::Update, &header(64.0)).unwrap();
    }
    let flat = |of: &dyn Fn(&str) -> Vec<f32>, names: [&str; 2], count: usize| {
        let mut all = names.map(of).concat();
        all.resize(count, 0.0);
        all
    };
    let ranks = among(2, |comm| {
        let rank = comm.rank();
        let options = Options { threads: 1, seed: 7, comm: Some(comm) };
        let mut executor = Executor::<f32>::new(program(ZERO2), options).unwrap();
        for (bucket, count, names) in buckets {
            let id = executor.find_state(&format!("{bucket}.master")).unwrap();
            let part = count / 2 * rank..count / 2 * (rank + 1);
            executor.write_state(id, &flat(&first, names, count)[part]);
            for name in names {
                let id = executor.find_state(&format!("{name}.half")).unwrap();
                executor.write_state(id, &first(name));
            }
        }
        for step in 0..STEPS {
            for micro in 0..2 {
                run_batch(&mut executor, Which::Micro, step, 16 * (2 * micro + rank), micro > 0);
            }
            executor.run(Which::Update, &header(64.0)).unwrap();
        }
        let of = |ending: &str| buckets.map(|(bucket, ..)| state(&executor, &format!("{bucket}.{ending}")));
        let copies = parameters.map(|(name, _)| state(&executor, &format!("{name}.half")));
        (of("master"), of("m"), copies, executor.output(Which::Update, "control").unwrap().to_vec())
    });
    assert!(
        ranks[0].2 == ranks[1].2 && ranks[0].3 == ranks[1].3,
        "copies and control are the same everywhere"
    );
    let (control, norm) = (one.output(Which::Update, "control").unwrap().to_vec(), ranks[0].3[2]);
    assert!((norm / control[2] - 1.0).abs() < 1e-3 && control[1] == 1.0, "{control:?}, {:?}", ranks[0].3);
    let rate = header(64.0).learning_rate as f32;
    for (number, (bucket, count, names)) in buckets.into_iter().enumerate() {
        let masters = [ranks[0].0[number].clone(), ranks[1].0[number].clone()].concat();
        let plain = flat(&|name| state(&one, name), names, count);
        let off = masters.iter().zip(&plain).fold(0.0f32, |most, (a, b)| most.max((a - b).abs()));
        assert!(off < 0.1 * rate, "{bucket}: off by {off}, with steps of {rate}");
        let moments = [ranks[0].1[number].clone(), ranks[1].1[number].clone()].concat();
        let plain = flat(&|name| state(&one, &format!("{name}.m")), names, count);
        let largest = plain.iter().fold(0.0f32, |most, x| most.max(x.abs()));
        let off = moments.iter().zip(&plain).fold(0.0f32, |most, (a, b)| most.max((a - b).abs()));
        assert!(off < 1e-2 * largest, "{bucket}: moments off by {off} of {largest}");
        // The copies are the masters, rounded.
        let halves = flat(
            &|name| {
                let at = parameters.iter().position(|(other, _)| *other == name).unwrap();
                ranks[0].2[at].clone()
            },
            names,
            count,
        );
        assert!(masters.iter().zip(&halves).all(|(w, half)| half::bf16::from_f32(*w).to_f32() == *half));
    }
}
