use super::*;
use crate::action::Facts;
use graph::Shape;

const BASE: Address = 1 << 20;
const HEADER: Address = 0x1000;

/// A buffer of tensors of so many elements, one after the other, each with this weight decay and factor of the learning rate.
fn flat(counts: &[usize], weight_decay: f64, lr_scale: f64) -> Flat {
    let (starts, elements) = graph::passes::arrange(counts, graph::passes::Division::Whole);
    let piece = |(start, count): (usize, &usize)| Piece { start, count: *count, lr_scale, weight_decay };
    Flat { elements, pieces: starts.into_iter().zip(counts).map(piece).collect(), ..Flat::default() }
}

fn adamw(flat: Flat) -> Op {
    Op::AdamW { beta1: 0.9, beta2: 0.999, eps: 1e-8, flat }
}

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

/// Distance between the tensors of a step, and between steps, in bytes.
const PART: Address = 0x100_0000;
const APART: Address = 0x1_0000_0000;

/// A step of AdamW on memory from `at` on, in place, with a copy if it has a type.
fn step(op: Op, at: Address, half: Option<DType>) -> Step {
    let Op::AdamW { flat, .. } = &op else { panic!("{op:?}") };
    let count = flat.held();
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

fn contexts<R>(steps: &[Step], f: impl FnOnce(&[StepContext<'_>]) -> R) -> R {
    let facts = &Facts::h200();
    let (scratch, header, tf32) = (0x8000, HEADER, false);
    let context = steps.iter().map(|Step { op, inputs, outputs }| StepContext {
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

fn adamw_step(address: Address, counts: &[usize]) -> Step {
    step(adamw(flat(counts, 0.1, 1.0)), address, Some(DType::Bf16))
}

/// Pieces of a launch of optimizers: (tensor, first element, elements, segment) of every block.
fn pieces(constants: &Constants, launch: &Launch) -> Vec<[usize; 4]> {
    let halves = |word: u64| [word as u32 as usize, (word >> 32) as usize];
    let rows = words::<2>(constants, launch.args[1], launch.grid[0] as usize);
    rows.into_iter().map(|[a, b]| [halves(a), halves(b)].concat().try_into().expect("four")).collect()
}

#[test]
fn pieces_cover_every_element_once() {
    let counts = [1, 5, 192, 193, 4096, 4097, 589_824];
    // In two buffers, the second of which ranks divide.
    let group = Some(graph::Mesh::of_data(2).world());
    let whole = adamw_step(APART, &counts);
    let (starts, _) = graph::passes::arrange(&counts, graph::passes::Division::Even(2));
    let even = flat(&counts, 0.1, 1.0);
    let even = Flat { elements: even.elements.next_multiple_of(2 * CHUNK), group, ..even };
    let parts = [0, 1].map(|rank| step(adamw(even.part(rank)), (2 + rank as u64) * APART, Some(DType::Bf16)));
    let mut divided = vec![0; counts.len()];
    for (number, of) in [vec![whole], parts[..1].to_vec(), parts[1..].to_vec()].into_iter().enumerate() {
        let base = (number as u64 + 1) * APART;
        let first = number.saturating_sub(1) * even.held();
        let (actions, constants) = merged(&of);
        let [launch] = launches(&actions)[..] else { panic!("one launch") };
        let rows = 1 + pieces(&constants, launch).iter().map(|piece| piece[0]).max().unwrap();
        let tensors = words::<10>(&constants, launch.args[0], rows);
        let mut end = vec![None; rows];
        for [tensor, from, count, _] in pieces(&constants, launch) {
            assert!(from % 4 == 0 && count > 0 && count <= CHUNK);
            assert_eq!(end[tensor].unwrap_or(from), from, "one after the other");
            end[tensor] = Some(from + count);
            // Which tensor it is, from where it lies.
            let element = first + (tensors[tensor][0] - base) as usize / 4 + from;
            let of = starts.iter().rposition(|start| *start <= element).unwrap();
            assert!(element + count <= starts[of] + counts[of]);
            divided[of] += if number == 0 { 0 } else { count };
            assert_eq!(tensors[tensor][4] - base - 4 * PART, (tensors[tensor][0] - base) / 2, "its copy");
        }
    }
    assert_eq!(divided, counts);
}

#[test]
fn a_row_has_what_belongs_to_a_parameter() {
    let of = adamw_step(APART, &[100, 7]);
    let average = average(&of, 0.99);
    let (actions, constants) = merged(&[of, average]);
    let launch = launches(&actions)[0];
    assert_eq!(actions.len(), 1);
    // The second begins at the next multiple of 64 elements.
    let rows = words::<10>(&constants, launch.args[0], 2);
    let places = |i: u64, offset: u64| APART + i * PART + offset;
    assert_eq!(rows[0][..6], [0, 1, 2, 3, 4, 5].map(|i| places(i, 0)));
    assert_eq!(rows[1][..6], [0, 1, 2, 3, 4, 5].map(|i| places(i, if i == 4 { 256 } else { 512 })));
    assert_eq!(rows[0][7..9], [1f64.to_bits(), 0.1f64.to_bits()]);
    assert_eq!(pieces(&constants, launch), [[0, 0, 100, 0], [1, 0, 7, 1]]);
    assert_eq!(launch.args[2..5], [HEADER, 0x2000, 0x3000].map(Arg::Pointer));
    assert_eq!(launch.args[5], Arg::F64(1.0 - 0.99));
}

#[test]
fn parameter_groups_share_a_launch_and_other_rules_do_not() {
    let decay = |weight_decay, lr_scale| adamw(flat(&[10], weight_decay, lr_scale));
    let steps = |ops: [Op; 3], half: [Option<DType>; 3]| -> Vec<Step> {
        (1..).zip(ops).zip(half).map(|((i, op), half)| step(op, i * APART, half)).collect()
    };
    let (bf16, f16) = (Some(DType::Bf16), Some(DType::F16));
    let groups = [decay(0.1, 1.0), decay(0.0, 1.0), decay(0.1, 0.5)];
    assert_eq!(names(&merged(&steps(groups.clone(), [None, bf16, None])).0), ["adamw<bf16>"]);
    assert_eq!(names(&merged(&steps(groups.clone(), [None, f16, bf16])).0), ["adamw<f16>", "adamw<bf16>"]);
    let other = Op::AdamW { beta1: 0.8, beta2: 0.999, eps: 1e-8, flat: flat(&[10], 0.1, 1.0) };
    let (actions, _) = merged(&steps([decay(0.1, 1.0), other, decay(0.1, 1.0)], [None; 3]));
    assert_eq!(launches(&actions).iter().map(|l| l.grid[0]).collect::<Vec<_>>(), [2, 1]);
}

/// Moments and norms of all buffers, then step sizes and parameters of all.
#[test]
fn lamb_is_three_launches() {
    let (beta1, beta2, eps, min_coeff, max_coeff) = (0.9, 0.999, 1e-6, 0.01, 10.0);
    let flats = [flat(&[5000, 10], 0.1, 1.0), flat(&[10], 0.0, 1.0)];
    let control = [single(0x2000, 3), single(0x3000, 1)];
    let place = |i: u64, part: u64, flat: &Flat| single((i + 1) * APART + part * PART, flat.held());
    let norms =
        |i: u64, flat: &Flat| operand((i + 1) * APART + 6 * PART, DType::F64, 2 * flat.segments().count());
    let moments = (0..).zip(&flats).map(|(i, flat)| Step {
        op: Op::LambMoments { beta1, beta2, eps, flat: flat.clone() },
        inputs: [&[0, 1, 2, 3].map(|part| place(i, part, flat))[..], &control].concat(),
        outputs: vec![place(i, 2, flat), place(i, 3, flat), norms(i, flat)],
    });
    let apply = (0..).zip(&flats).map(|(i, flat)| Step {
        op: Op::LambApply { beta1, beta2, eps, min_coeff, max_coeff, flat: flat.clone() },
        inputs: [&[0, 2, 3].map(|part| place(i, part, flat))[..], &[norms(i, flat)], &control].concat(),
        outputs: vec![place(i, 0, flat)],
    });
    let steps: Vec<Step> = moments.chain(apply).collect();
    let (actions, constants) = merged(&steps);
    assert_eq!(names(&actions), ["lamb_moments", "lamb_steps", "lamb_apply<bf16>"]);
    assert_eq!(launches(&actions).iter().map(|l| l.grid[0]).collect::<Vec<_>>(), [5, 3, 5]);
    // 5,000 elements are three segments; ten more begin in the third chunk; the other buffer has numbers of its own.
    let launch = launches(&actions)[0];
    assert_eq!(
        pieces(&constants, launch).iter().map(|p| [p[0], p[3]]).collect::<Vec<_>>(),
        [[0, 0], [0, 1], [0, 2], [1, 3], [2, 0]]
    );
    let rows = words::<10>(&constants, launches(&actions)[1].args[0], 3);
    let segments = rows.iter().map(|row| (row[9] as u32, (row[9] >> 32) as u32)).collect::<Vec<_>>();
    assert_eq!(segments, [(0, 3), (3, 1), (0, 1)]);
    assert_eq!([rows[0][6], rows[2][6]], [1, 2].map(|i| i * APART + 6 * PART));
}

#[test]
fn outputs_elsewhere_start_as_copies() {
    let mut moved = adamw_step(APART, &[10]);
    moved.outputs[1].address = 3 * APART;
    moved.outputs[3].address = 4 * APART;
    let (actions, _) = merged(&[moved, adamw_step(2 * APART, &[10])]);
    let copy = |from, to, bytes| Action::Copy { from, to, bytes };
    let copies = [copy(APART + 2 * PART, 3 * APART, 4 * CHUNK), copy(APART + 4 * PART, 4 * APART, 2 * CHUNK)];
    assert_eq!(actions[..2], copies);
    assert_eq!(names(&actions[2..]), ["adamw<bf16>"]);
}

#[test]
fn steps_that_reuse_memory_stay_apart() {
    let (mut a, mut b) = (adamw_step(APART, &[100]), adamw_step(2 * APART, &[100]));
    (a.outputs[0].address, b.outputs[0].address) = (3 * APART, 3 * APART + 128);
    let (actions, _) = merged(&[a, b]);
    let kinds = actions.iter().map(|a| matches!(a, Action::Copy { .. })).collect::<Vec<_>>();
    assert_eq!(kinds, [true, false, true, false]);
}

#[test]
fn averages_need_their_parameter() {
    let of = adamw_step(APART, &[10]);
    let alone = [average(&of, 0.9)];
    let mut constants = Constants::at(BASE);
    assert!(contexts(&alone, |steps| optimizers(steps, &mut constants)).is_err());
}

fn squares(flats: Vec<Flat>) -> Step {
    let inputs = (1..).zip(&flats).map(|(i, flat)| single(i * APART, flat.held())).collect();
    let chunks = flats.iter().map(Flat::chunks).sum();
    Step { op: Op::SumSquares { flats }, inputs, outputs: vec![operand(0x4000, DType::F64, chunks)] }
}

/// Every element is in one partial sum, padding in none, and a rank has zeros for what others hold.
#[test]
fn partial_sums_are_cut_at_fixed_borders() {
    let counts: [&[usize]; 3] = [&[1], &[4096, 100, 3000], &[1, 5, 4097, 70_001]];
    let group = Some(graph::Mesh::of_data(2).world());
    let of_ranks = |rank: usize| -> Vec<Flat> {
        let divided = counts.map(|counts| {
            let (_, elements) = graph::passes::arrange(counts, graph::passes::Division::Even(2));
            Flat { elements, group, ..flat(counts, 0.0, 1.0) }.part(rank)
        });
        divided.into()
    };
    let mut seen = vec![];
    for flats in [counts.map(|counts| flat(counts, 0.0, 1.0)).into(), of_ranks(0), of_ranks(1)] {
        let total: usize = flats.iter().map(Flat::chunks).sum();
        let step = squares(flats.clone());
        let mut constants = Constants::at(BASE);
        let actions =
            contexts(&[step], |steps| super::norm(steps, &mut constants)).expect("there are kernels");
        let [launch] = launches(&actions)[..] else { panic!("{actions:?}") };
        let Arg::U32(chunks) = launch.args[2] else { panic!("{:?}", launch.args) };
        assert_eq!(launch.grid[0], chunks.div_ceil(WARPS as u32));
        let zeros = Action::Zero { at: 0x4000, bytes: 8 * total };
        assert_eq!(actions.contains(&zeros), (chunks as usize) < total);
        let rows = words::<2>(&constants, launch.args[1], chunks as usize);
        let chunks: Vec<[usize; 3]> =
            rows.iter().map(|[a, b]| [*a as u32 as usize, (a >> 32) as usize, *b as u32 as usize]).collect();
        let last = chunks.iter().map(|[_, first, count]| first + count).max().unwrap();
        let squares = words::<2>(&constants, launch.args[0], last);
        for [number, first, count] in chunks {
            for [address, elements] in &squares[first..first + count] {
                let of = (address / APART - 1) as usize;
                let element = flats[of].first + (address % APART) as usize / 4;
                let before: usize = flats[..of].iter().map(Flat::chunks).sum();
                assert_eq!(number - before, element / CHUNK);
                assert!(element % CHUNK + *elements as usize <= CHUNK);
                seen.push((flats[of].group.is_some(), of, element, *elements as usize));
            }
        }
    }
    for divided in [false, true] {
        let mut all: Vec<_> =
            seen.iter().filter(|row| row.0 == divided).map(|row| (row.1, row.2, row.3)).collect();
        all.sort_unstable();
        let want: Vec<_> = (counts.iter().enumerate())
            .flat_map(|(of, counts)| {
                flat(counts, 0.0, 1.0).segments().map(|s| (of, s.start, s.count)).collect::<Vec<_>>()
            })
            .collect();
        assert_eq!(all, want);
    }
}

#[test]
fn norm_clip_and_advance_are_one_launch_after_the_squares() {
    let clip = Op::Clip { max_norm: Some(1.0), scaled: false };
    let steps = [
        squares(vec![flat(&[100, 200], 0.0, 1.0)]),
        Step {
            op: clip,
            inputs: vec![single(0x5000, 4), operand(0x4000, DType::F64, 1)],
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
    assert_eq!(names(&fused), ["sum_squares", "clip_advance"]);
    let launch = launches(&fused)[1];
    let pointers = [0x5000, 0, HEADER, HEADER + HALT].map(Arg::Pointer);
    assert_eq!((launch.args[0], launch.args[1]), (Arg::Pointer(0x4000), Arg::U32(1)));
    assert_eq!(launch.args[2..6], pointers);
    let apart = [&steps[..1], &steps[1..2]].concat();
    let apart = contexts(&apart, |steps| super::norm(steps, &mut constants)).expect("there are kernels");
    assert_eq!(names(&apart), ["sum_squares", "clip"]);
}

#[test]
fn every_launch_is_of_a_listed_kernel() {
    let known: Vec<String> = kernels().into_iter().map(|(kernel, _)| kernel.name).collect();
    let mut constants = Constants::at(BASE);
    let mut actions = refresh_copies(&[(APART, 2 * APART, 5000)], DType::F16, &mut constants);
    assert_eq!(launches(&actions)[0].grid[0] as usize, 5000usize.div_ceil(CHUNK));
    let scale = Op::LossScale { window: 1000, hysteresis: 2, min: 1.0 };
    let ends = vec![single(0x6000, 3), single(0x2000, 3)];
    let scale = Step { op: scale, inputs: ends, outputs: vec![single(0x6000, 3)] };
    actions.extend(contexts(&[scale], |steps| super::actions(&steps[0])).expect("there is a kernel"));
    actions.extend(merged(&[adamw_step(APART, &[10])]).0);
    assert!(names(&actions).iter().all(|name| known.iter().any(|k| k == name)), "{:?}", names(&actions));
}

/// Two tensors of which one is three matrices: a row for each, in the order of the buffer.
#[test]
fn a_row_of_muon_is_a_matrix() {
    let stacks = vec![graph::flat::Stack { rows: 8, columns: 4, starts: vec![0, 32, 64, 128] }];
    let of = flat(&[96, 32], 0.1, 0.5);
    let directions = |address: Address, dtype| Operand { address, dtype, shape: Shape::from([4, 8, 4]) };
    let control = single(0x2000, 3);
    let (n, bf16) = (of.held(), DType::Bf16);
    let momentum = Step {
        op: Op::MuonMomentum {
            momentum: 0.95,
            nesterov: true,
            to: Some(bf16),
            stacks: stacks.clone(),
            flat: of.clone(),
        },
        inputs: vec![single(APART, n), single(2 * APART, n), control.clone()],
        outputs: vec![single(2 * APART, n), directions(3 * APART, bf16)],
    };
    let apply = Step {
        op: Op::MuonApply { rms: 0.2, stacks, flat: of },
        inputs: vec![
            single(4 * APART, n),
            control,
            directions(5 * APART, bf16),
            operand(4 * APART + 4 * PART, bf16, n),
        ],
        outputs: vec![single(4 * APART, n), operand(4 * APART + 4 * PART, bf16, n)],
    };
    let average = average(&apply, 0.99);
    let (actions, constants) = merged(&[momentum, apply, average]);
    assert_eq!(names(&actions), ["muon_momentum<bf16, 4>", "muon_apply<bf16, bf16, 4>"]);
    let rows = words::<10>(&constants, launches(&actions)[0].args[0], 4);
    let starts = [0, 32, 64, 128];
    for (row, (number, start)) in rows.iter().zip((0..).zip(starts)) {
        assert_eq!(row[1..3], [APART + 4 * start, 2 * APART + 4 * start]);
        assert_eq!(row[4], 3 * APART + 2 * 32 * number, "its directions");
    }
    let rows = words::<10>(&constants, launches(&actions)[1].args[0], 4);
    for (row, (number, start)) in rows.iter().zip((0..).zip(starts)) {
        assert_eq!((row[0], row[3]), (4 * APART + 4 * start, 5 * APART + 2 * 32 * number));
        assert_eq!(row[4..6], [4 * APART + 4 * PART + 2 * start, 4 * APART + 5 * PART + 4 * start]);
        let (lr_scale, decay) = (f64::from_bits(row[7]), f64::from_bits(row[8]));
        assert_eq!(lr_scale, 0.5 * 0.2 * 8f64.sqrt());
        assert!((lr_scale * decay - 0.5 * 0.1).abs() < 1e-15, "decay is by the learning rate alone");
    }
    assert_eq!(pieces(&constants, launches(&actions)[0]).len(), 4);
    let known: Vec<String> = kernels().into_iter().map(|(kernel, _)| kernel.name).collect();
    assert!(names(&actions).iter().all(|name| known.iter().any(|k| k == name)));
}
