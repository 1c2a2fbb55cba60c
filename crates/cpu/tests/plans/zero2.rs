//! A hand-written ZeRO-2 plan against one rank that holds everything.

use super::common::written::program;
use super::ranks::{among, run_batch};
use super::{executor, header, normal, state};
use cpu::{Executor, Options, Which};

const ZERO2: &str = include_str!("../../../graph/tests/plans/zero2-accumulation.plan");

/// The parameters of ZERO2: their bucket, their first element in it, shape, count and weight decay.
const PARAMETERS: [(&str, usize, usize, &str, usize, &str); 4] = [
    ("fc2.weight", 0, 0, "[10,64]", 640, "0.05"),
    ("fc2.bias", 0, 640, "[10]", 10, "0.0"),
    ("fc1.weight", 1, 0, "[64,32]", 2048, "0.05"),
    ("fc1.bias", 1, 2048, "[64]", 64, "0.0"),
];

/// Elements of each of the two buckets.
const BUCKET: usize = 4096;

/// The states of one rank that holds everything: two buckets of each kind, and the parameters' views into them.
fn whole_states() -> String {
    let kinds = [
        ("", "f32", "{\"parameter\":\"zeros\"}"),
        (".grad", "f32", "\"gradient\""),
        (".m", "f32", "\"moment\""),
        (".v", "f32", "\"moment\""),
        (".half", "bf16", "\"copy\""),
    ];
    let mut text = String::new();
    for (kind, (ending, dtype, role)) in kinds.into_iter().enumerate() {
        let (start, size) = (kind * 2 * BUCKET * 4, if dtype == "f32" { 4 } else { 2 });
        for bucket in 0..2 {
            let home = start + bucket * BUCKET * size;
            text += &format!("state bucket.{bucket}{ending} {dtype}[{BUCKET}] \"flat\" own@{home}\n");
        }
        for (name, bucket, first, shape, ..) in PARAMETERS {
            let home = start + (bucket * BUCKET + first) * size;
            text += &format!("state {name}{ending} {dtype}{shape} {role} own@{home}\n");
        }
    }
    let end = 10 * BUCKET * 4;
    text += &format!("state stats f32[4] \"statistic\" own@{end}\n");
    text + &format!("state applied f32[1] \"counter\" own@{}\n", end + 128)
}

/// What one rank computes with all samples of a step at once, and f32 parameters beside their copies.
const WHOLE: &str = "input x bf16[64,32] @0
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

/// Training on one rank that holds everything.
fn whole() -> String {
    let pieces = |bucket: usize| {
        let of = PARAMETERS.iter().filter(|parameter| parameter.1 == bucket);
        let piece = |(_, _, first, _, count, decay): &(_, _, usize, _, usize, &str)| {
            format!("[{first},{count},1.0,{decay}]")
        };
        format!("[{}]", of.map(piece).collect::<Vec<_>>().join(","))
    };
    let flat = |bucket: usize| format!("{{\"elements\":{BUCKET},\"pieces\":{}}}", pieces(bucket));
    let adamw = |bucket: usize| {
        format!(
            "{} compute $bucket.{bucket}, $bucket.{bucket}.m, $bucket.{bucket}.v, $bucket.{bucket}.half = adamw($bucket.{bucket}, \
            $bucket.{bucket}.grad, $bucket.{bucket}.m, $bucket.{bucket}.v, control, $applied, $bucket.{bucket}.half) \
            beta1=0.9 beta2=0.999 eps=1e-8 elements={BUCKET} pieces={} ; update bucket.{bucket}\n",
            3 + bucket,
            pieces(bucket)
        )
    };
    let states = whole_states();
    format!(
        "plan last batch=64 height=1 width=32 arena=131072\n{states}{WHOLE}\
        plan update batch=64 height=1 width=32 arena=4096\n{states}\
        0 compute squares f64[4] @0 = sum_squares($bucket.0.grad, $bucket.1.grad) flats=[{},{}] ; update norm\n\
        1 compute control f32[3] @128 = clip($stats, squares) max_norm=1.0 ; update control\n\
        2 compute $applied = advance($applied, control) ; update applied\n{}{}output control\n",
        flat(0),
        flat(1),
        adamw(0),
        adamw(1),
    )
}

/// Two ranks, two micro-steps each: shards of gradients, moments and f32 parameters, whole copies. After some steps they have what one
/// rank has that holds everything.
#[test]
fn zero2_over_two_ranks_trains_as_one_does() {
    const STEPS: u32 = 3;
    let samples = |step: u32| normal(64 * 32, 40 + step);
    let first = |name: &str| -> Vec<f32> {
        let (at, parameter) = PARAMETERS.iter().enumerate().find(|(_, p)| p.0 == name).unwrap();
        normal(parameter.4, 50 + at as u32).into_iter().map(|x| 0.2 * x).collect()
    };
    let mut one = executor(&whole());
    for (name, ..) in PARAMETERS {
        let id = one.find_state(name).unwrap();
        one.write_state(id, &first(name));
    }
    for step in 0..STEPS {
        run_batch(&mut one, Which::Last, &samples(step), 0, &header(64.0));
        one.run(Which::Update, &header(64.0)).unwrap();
    }
    // A bucket of tensors.
    let flat = |of: &dyn Fn(&str) -> Vec<f32>, bucket: usize| {
        let mut all = vec![0.0; BUCKET];
        for (name, _, first, _, count, _) in PARAMETERS.iter().filter(|p| p.1 == bucket) {
            all[*first..first + count].copy_from_slice(&of(name));
        }
        all
    };
    let ranks = among(2, |comm| {
        let rank = comm.rank();
        let options = Options { threads: 1, seed: 7, comm: Some(comm) };
        let program = program(ZERO2);
        program.check().unwrap();
        let mut executor = Executor::<f32>::new(program, options).unwrap();
        for bucket in 0..2 {
            let id = executor.find_state(&format!("bucket.{bucket}.shard")).unwrap();
            let part = BUCKET / 2 * rank..BUCKET / 2 * (rank + 1);
            executor.write_state(id, &flat(&first, bucket)[part]);
        }
        for (name, ..) in PARAMETERS {
            let id = executor.find_state(&format!("{name}.half")).unwrap();
            executor.write_state(id, &first(name));
        }
        for step in 0..STEPS {
            for (micro, which) in [(0, Which::First), (1, Which::Micro)] {
                let first = 16 * (2 * micro + rank);
                run_batch(&mut executor, which, &samples(step), first, &header(64.0));
            }
            executor.run(Which::Update, &header(64.0)).unwrap();
        }
        let of = |ending: &str| [0, 1].map(|bucket| state(&executor, &format!("bucket.{bucket}.{ending}")));
        let copies = PARAMETERS.map(|(name, ..)| state(&executor, &format!("{name}.half")));
        (of("shard"), of("m"), copies, executor.output(Which::Update, "control").unwrap().to_vec())
    });
    assert!(
        ranks[0].2 == ranks[1].2 && ranks[0].3 == ranks[1].3,
        "copies and control are the same everywhere"
    );
    let (control, norm) = (one.output(Which::Update, "control").unwrap().to_vec(), ranks[0].3[2]);
    assert!((norm / control[2] - 1.0).abs() < 1e-3 && control[1] == 1.0, "{control:?}, {:?}", ranks[0].3);
    let rate = header(64.0).learning_rate as f32;
    for bucket in 0..2 {
        let apart =
            |a: &[f32], b: &[f32]| a.iter().zip(b).fold(0.0f32, |most, (a, b)| most.max((a - b).abs()));
        let both = |of: &dyn Fn(usize) -> Vec<f32>| [of(0), of(1)].concat();
        let parameters = both(&|rank| ranks[rank].0[bucket].clone());
        let off = apart(&parameters, &flat(&|name| state(&one, name), bucket));
        assert!(off < 0.1 * rate, "{bucket}: off by {off}, with steps of {rate}");
        let moments = both(&|rank| ranks[rank].1[bucket].clone());
        let plain = flat(&|name| state(&one, &format!("{name}.m")), bucket);
        let largest = plain.iter().fold(0.0f32, |most, x| most.max(x.abs()));
        let off = apart(&moments, &plain);
        assert!(off < 1e-2 * largest, "{bucket}: moments off by {off} of {largest}");
        // The copies are the parameters, rounded.
        let copy_of = |name: &str| {
            let at = PARAMETERS.iter().position(|(other, ..)| *other == name).unwrap();
            ranks[0].2[at].clone()
        };
        let halves = flat(&copy_of, bucket);
        assert!(parameters.iter().zip(&halves).all(|(w, half)| half::bf16::from_f32(*w).to_f32() == *half));
    }
}
