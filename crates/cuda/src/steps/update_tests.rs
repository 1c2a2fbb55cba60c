use super::*;
use crate::action::Facts;
use graph::ALIGN;
use graph::Shape;

const BASE: Address = 1 << 20;
const HEADER: Address = 0x1000;
const ADAMW: Op = Op::AdamW { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.1, lr_scale: 1.0 };

fn operand(address: Address, dtype: DType, count: usize) -> Operand {
    Operand { address, dtype, shape: Shape::from([count]) }
}

fn single(address: Address, count: usize) -> Operand {
    operand(address, DType::F32, count)
}

#[derive(Clone)]
struct Step {
    op: Op,
    inputs: Vec<Operand>,
    outputs: Vec<Operand>,
}

/// How far apart the tensors of a step lie, and the steps.
const PART: Address = 0x100_0000;
const APART: Address = 0x1_0000_0000;

/// A step of AdamW or LAMB on memory from `at` on, in place, with a copy if it has a type.
fn step(op: Op, at: Address, count: usize, half: Option<DType>) -> Step {
    let place = |i: u64| single(at + i * PART, count);
    let copy = half.map(|dtype| operand(at + 4 * PART, dtype, count));
    let mut inputs = vec![place(0), place(1), place(2), place(3), single(0x2000, 3), single(0x3000, 1)];
    inputs.extend(copy.clone());
    let mut outputs = vec![place(0), place(2), place(3)];
    outputs.extend(copy);
    Step { op, inputs, outputs }
}

fn average(of: &Step, decay: f64) -> Step {
    let place = single(of.outputs[0].address + 5 * PART, of.outputs[0].shape.count());
    let inputs = vec![place.clone(), of.outputs[0].clone(), single(0x2000, 3)];
    Step { op: Op::Ema { decay }, inputs, outputs: vec![place] }
}

fn contexts<R>(steps: &[Step], f: impl FnOnce(&[Context<'_>]) -> R) -> R {
    let facts = &Facts::h200();
    let (scratch, header, tf32) = (0x8000, HEADER, false);
    let context = steps.iter().map(|Step { op, inputs, outputs }| Context {
        op,
        layer: "",
        inputs,
        outputs,
        scratch,
        parts: 0,
        header,
        tf32,
        facts,
    });
    f(&context.collect::<Vec<_>>())
}

fn merged(steps: &[Step]) -> (Vec<Action>, Constants) {
    let mut constants = Constants::at(BASE);
    let actions = contexts(steps, |steps| optimizers(steps, &mut constants)).expect("there are kernels");
    (actions, constants)
}

fn launches(actions: &[Action]) -> Vec<&Launch> {
    let launches = actions.iter().map(|action| if let Action::Launch(l) = action { Some(l) } else { None });
    launches.flatten().collect()
}

fn names(actions: &[Action]) -> Vec<&str> {
    launches(actions).iter().map(|l| l.kernel.name.as_str()).collect()
}

/// The words of a table that lies at `arg`.
fn words<const N: usize>(constants: &Constants, arg: Arg, count: usize) -> Vec<[u64; N]> {
    let Arg::Pointer(address) = arg else { panic!("{arg:?} is no table") };
    let start = (address - BASE) as usize;
    let bytes = &constants.bytes()[start..start + count * N * 8];
    let word = |b: &[u8]| u64::from_le_bytes(b.try_into().expect("eight bytes"));
    bytes.chunks(8 * N).map(|row| std::array::from_fn(|i| word(&row[8 * i..8 * i + 8]))).collect()
}

fn adamw_step(address: Address, count: usize) -> Step {
    step(ADAMW, address, count, Some(DType::Bf16))
}

#[test]
fn pieces_cover_every_element_once() {
    let counts = [1, 5, 192, 193, 4096, 4097, 589_824];
    let steps: Vec<Step> =
        counts.iter().enumerate().map(|(i, n)| adamw_step((i as u64 + 1) * APART, *n)).collect();
    let (actions, constants) = merged(&steps);
    let [launch] = launches(&actions)[..] else { panic!("one launch") };
    let blocks = launch.grid[0] as usize;
    let tensors = words::<10>(&constants, launch.args[0], counts.len());
    let mut covered = vec![0; counts.len()];
    for (block, [piece]) in words::<1>(&constants, launch.args[1], blocks).into_iter().enumerate() {
        let (tensor, index) = (piece as u32 as usize, (piece >> 32) as usize);
        let (first, own) = (tensors[tensor][9] as u32 as usize, (tensors[tensor][9] >> 32) as usize);
        assert_eq!((block - first, own), (index, counts[tensor].div_ceil(PIECE)));
        assert_eq!(covered[tensor], index * PIECE);
        covered[tensor] = counts[tensor].min((index + 1) * PIECE);
    }
    assert_eq!(covered, counts);
    let rows = tensors.iter().map(|row| row[8] as usize).collect::<Vec<_>>();
    assert_eq!(rows, counts);
}

#[test]
fn a_row_has_what_belongs_to_a_parameter() {
    let of = adamw_step(APART, 100);
    let average = average(&of, 0.99);
    let places = |i: u64| APART + i * PART;
    let (actions, constants) = merged(&[of, average]);
    let launch = launches(&actions)[0];
    assert_eq!(actions.len(), 1);
    let row = words::<10>(&constants, launch.args[0], 1)[0];
    assert_eq!(row[..6], [0, 1, 2, 3, 4, 5].map(places));
    assert_eq!(row[6..9], [1f64.to_bits(), 0.1f64.to_bits(), 100]);
    assert_eq!(launch.args[2..5], [HEADER, 0x2000, 0x3000].map(Arg::Pointer));
    assert_eq!(launch.args[5], Arg::F64(1.0 - 0.99));
}

#[test]
fn parameter_groups_share_a_launch_and_other_rules_do_not() {
    let decay =
        |weight_decay, lr_scale| Op::AdamW { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay, lr_scale };
    let steps = |ops: [Op; 3], half: [Option<DType>; 3]| -> Vec<Step> {
        (1..).zip(ops).zip(half).map(|((i, op), half)| step(op, i * APART, 10, half)).collect()
    };
    let (bf16, f16) = (Some(DType::Bf16), Some(DType::F16));
    let groups = [decay(0.1, 1.0), decay(0.0, 1.0), decay(0.1, 0.5)];
    assert_eq!(names(&merged(&steps(groups.clone(), [None, bf16, None])).0), ["adamw<bf16>"]);
    assert_eq!(names(&merged(&steps(groups.clone(), [None, f16, bf16])).0), ["adamw<f16>", "adamw<bf16>"]);
    let other = Op::AdamW { beta1: 0.8, beta2: 0.999, eps: 1e-8, weight_decay: 0.1, lr_scale: 1.0 };
    let (actions, _) = merged(&steps([ADAMW, other, ADAMW], [None; 3]));
    assert_eq!(launches(&actions).iter().map(|l| l.grid[0]).collect::<Vec<_>>(), [2, 1]);
    let lamb = |weight_decay| Op::Lamb {
        beta1: 0.9,
        beta2: 0.999,
        eps: 1e-6,
        weight_decay,
        min_coeff: 0.01,
        max_coeff: 10.0,
        lr_scale: 1.0,
    };
    let (actions, _) = merged(&steps([lamb(0.1), lamb(0.0), lamb(0.1)], [f16; 3]));
    assert_eq!(names(&actions), ["lamb_moments", "lamb_steps", "lamb_apply<f16>"]);
}

#[test]
fn outputs_elsewhere_start_as_copies() {
    let mut moved = adamw_step(APART, 10);
    moved.outputs[1].address = 3 * APART;
    moved.outputs[3].address = 4 * APART;
    let (actions, _) = merged(&[moved, adamw_step(2 * APART, 10)]);
    let copy = |from, to, bytes| Action::Copy { from, to, bytes };
    let copies = [copy(APART + 2 * PART, 3 * APART, 40), copy(APART + 4 * PART, 4 * APART, 20)];
    assert_eq!(actions[..2], copies);
    assert_eq!(names(&actions[2..]), ["adamw<bf16>"]);
}

#[test]
fn steps_that_reuse_memory_stay_apart() {
    let (mut a, mut b) = (adamw_step(APART, 100), adamw_step(2 * APART, 100));
    (a.outputs[0].address, b.outputs[0].address) = (3 * APART, 3 * APART + 128);
    let (actions, _) = merged(&[a, b]);
    let kinds = actions.iter().map(|a| matches!(a, Action::Copy { .. })).collect::<Vec<_>>();
    assert_eq!(kinds, [true, false, true, false]);
}

#[test]
fn averages_need_their_parameter() {
    let of = adamw_step(APART, 10);
    let alone = [average(&of, 0.9)];
    let mut constants = Constants::at(BASE);
    assert!(contexts(&alone, |steps| optimizers(steps, &mut constants)).is_err());
}

#[test]
fn neighbours_are_one_run() {
    let tensors = [
        single(1024 + 256, 7),
        single(1024, 64),
        single(1024 + 384, 32),
        single(4096, 32),
        operand(4096 + 128, DType::F16, 9),
    ];
    let run = |address, dtype, count| Run { address, dtype, count };
    // What lies between the second and the third may be anything.
    let want = [
        run(1024, DType::F32, 64 + 7),
        run(1024 + 384, DType::F32, 32),
        run(4096, DType::F32, 32),
        run(4096 + 128, DType::F16, 9),
    ];
    assert_eq!(runs(&tensors), want);
}

fn norm(counts: &[usize], gap: usize) -> Step {
    let mut at = BASE;
    let mut place = |n: &usize| {
        let operand = single(at, *n);
        at += (4 * *n as u64).next_multiple_of(ALIGN as u64) + gap as u64;
        operand
    };
    Step {
        op: Op::SumSquares,
        inputs: counts.iter().map(&mut place).collect(),
        outputs: vec![single(0x4000, 1)],
    }
}

#[test]
fn partial_sums_fit_the_scratch() {
    for counts in [&[1][..], &[4096; 9], &[590_000; 150], &[1, 5, 4097, 7_000_001]] {
        for gap in [0, ALIGN] {
            let step = norm(counts, gap);
            let inputs = step.inputs.clone();
            let types: Vec<Type> = inputs.iter().map(|x| Type::new(x.dtype, x.shape.clone())).collect();
            let bytes = scratch(&step.op, &types.iter().collect::<Vec<_>>(), &[]);
            let mut constants = Constants::at(BASE);
            let actions =
                contexts(&[step], |steps| super::norm(steps, &mut constants)).expect("there are kernels");
            let [squares, sum] = launches(&actions)[..] else { panic!("{actions:?}") };
            let partials = squares.grid[0] as usize;
            assert_eq!(sum.args[1], Arg::U32(partials as u32));
            assert!(partials * 8 <= bytes && partials <= PARTIALS + counts.len());
            // Every element is in one piece, and nothing else is.
            let pieces = words::<2>(&constants, squares.args[0], partials);
            let ranges: Vec<_> = pieces.iter().map(|[from, elements]| *from..from + 4 * elements).collect();
            assert!(ranges.windows(2).all(|two| two[0].end <= two[1].start));
            assert_eq!(pieces.iter().map(|[_, n]| *n as usize).sum::<usize>(), counts.iter().sum::<usize>());
            for x in &inputs {
                let holds = |byte: u64| ranges.iter().any(|range| range.contains(&byte));
                let end = x.address + 4 * x.shape.count() as u64;
                assert!(holds(x.address) && holds(end - 4));
                assert!(!holds(end) || inputs.iter().any(|other| other.address == end));
            }
        }
    }
}

#[test]
fn norm_clip_and_advance_are_one_launch_after_the_squares() {
    let clip = Op::Clip { max_norm: Some(1.0), scaled: false };
    let steps = [
        norm(&[100, 200], 0),
        Step {
            op: clip,
            inputs: vec![single(0x4000, 1), single(0x5000, 4)],
            outputs: vec![single(0x2000, 3)],
        },
        Step {
            op: Op::Advance,
            inputs: vec![single(0x3000, 1), single(0x2000, 3)],
            outputs: vec![single(0x3000, 1)],
        },
    ];
    let mut constants = Constants::at(BASE);
    let fused = contexts(&steps, |steps| super::norm(steps, &mut constants)).expect("there are kernels");
    assert_eq!(names(&fused), ["sum_squares<float>", "norm_clip_advance"]);
    let launch = launches(&fused)[1];
    let pointers = [0x5000, 0, HEADER, HEADER + HALT].map(Arg::Pointer);
    assert_eq!(launch.args[3..7], pointers);
    let apart = [&steps[..1], &steps[1..2]].concat();
    let apart = contexts(&apart, |steps| super::norm(steps, &mut constants)).expect("there are kernels");
    assert_eq!(names(&apart), ["sum_squares<float>", "sum_partials", "clip"]);
}

#[test]
fn every_launch_is_of_a_listed_kernel() {
    let known: Vec<String> = kernels().into_iter().map(|(kernel, _)| kernel.name).collect();
    let mut constants = Constants::at(BASE);
    let mut actions = refresh_copies(&[(APART, 2 * APART, 5000)], DType::F16, &mut constants);
    assert_eq!(launches(&actions)[0].grid[0] as usize, 5000usize.div_ceil(PIECE));
    let scale = Op::LossScale { window: 1000, hysteresis: 2, min: 1.0 };
    let ends = vec![single(0x6000, 3), single(0x2000, 3)];
    let scale = Step { op: scale, inputs: ends, outputs: vec![single(0x6000, 3)] };
    actions.extend(contexts(&[scale], |steps| super::actions(&steps[0])).expect("there is a kernel"));
    actions.extend(merged(&[adamw_step(APART, 10)]).0);
    assert!(names(&actions).iter().all(|name| known.iter().any(|k| k == name)), "{:?}", names(&actions));
}
