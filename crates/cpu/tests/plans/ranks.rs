//! Hand-written plans of several ranks: shards (ZeRO), and groups of a mesh.

pub use super::common::ranks::among;
use super::common::written::program;
use super::{executor, header, normal, state};
use cpu::{Executor, Options, Which};
use graph::Header;

const ZERO3: &str = include_str!("../../../graph/tests/plans/zero3-recompute.plan");

/// What one rank with all samples computes: the plans of two, without what they say to each other. A block's tensors lie one after the other.
fn one() -> String {
    let mut states = String::new();
    for (kind, (ending, dtype)) in
        [("", "f32"), (".grad", "f32"), (".m", "f32"), (".v", "f32"), (".half", "bf16")]
            .into_iter()
            .enumerate()
    {
        let (start, size) = (kind * 2 * 4096 * 4, if dtype == "f32" { 4 } else { 2 });
        for (block, [rows, columns]) in [[64, 63], [63, 64]].into_iter().enumerate() {
            let home = start + block * 4096 * size;
            states += &format!("state block.{block}{ending} {dtype}[4096] \"flat\" own@{home}\n");
            states += &format!(
                "state block.{block}.weight{ending} {dtype}[{rows},{columns}] \"master\" own@{home}\n"
            );
            states += &format!(
                "state block.{block}.bias{ending} {dtype}[{rows}] \"master\" own@{}\n",
                home + 4032 * size
            );
        }
    }
    states += &format!(
        "state stats f32[4] \"statistic\" own@{}\nstate applied f32[1] \"counter\" own@{}\n",
        10 * 4096 * 4,
        10 * 4096 * 4 + 128
    );
    let pieces = ["[[0,4032,1.0,0.05],[4032,64,1.0,0.0]]", "[[0,4032,1.0,0.05],[4032,63,1.0,0.0]]"];
    let flat = |block: usize| format!("{{\"elements\":4096,\"pieces\":{}}}", pieces[block]);
    let adamw = |number: usize, block: usize| {
        format!(
            "{number} compute $block.{block}, $block.{block}.m, $block.{block}.v, $block.{block}.half = adamw($block.{block}, $block.{block}.grad, \
            $block.{block}.m, $block.{block}.v, control, $applied, $block.{block}.half) beta1=0.9 beta2=0.999 eps=1e-8 elements=4096 \
            pieces={} ; update block.{block}\n",
            pieces[block]
        )
    };
    format!(
        "plan last batch=32 height=1 width=64 arena=262144\n{states}input x bf16[32,63] @0
input labels i32[32] @16384
input weights f32[32] @16640
0 compute y bf16[32,64] @20480, y.pre bf16[32,64] @36864 = linear(x, $block.0.weight.half, $block.0.bias.half) bias=true gelu=true ; forward block.0
1 compute z bf16[32,63] @53248, z.pre bf16[32,63] @69632 = linear(y, $block.1.weight.half, $block.1.bias.half) bias=true gelu=true ; forward block.1
2 compute loss f32[] @86016, $stats = cross_entropy(z, labels, weights) smoothing=0.0 ; forward loss
3 compute d.loss f32[] @86272 = seed() dtype=\"f32\" ; backward loss
4 compute d.z bf16[32,63] @86528 = cross_entropy_grad(z, labels, weights, d.loss) smoothing=0.0 ; backward loss
5 compute d.z.pre bf16[32,63] @102912, $block.1.bias.grad = gelu_grad(z.pre, d.z) bias=true ; backward block.1
6 compute $block.1.weight.grad = linear_grad_w(d.z.pre, y) shape=[63,64] ; backward block.1
7 compute d.y bf16[32,64] @119296 = linear_grad_x(d.z.pre, $block.1.weight.half) ; backward block.1
8 compute d.y.pre bf16[32,64] @135680, $block.0.bias.grad = gelu_grad(y.pre, d.y) bias=true ; backward block.0
9 compute $block.0.weight.grad = linear_grad_w(d.y.pre, x) shape=[64,63] ; backward block.0
plan update batch=32 height=1 width=64 arena=512
{states}0 compute squares f64[4] @0 = sum_squares($block.1.grad, $block.0.grad) flats=[{},{}] ; update norm
1 compute control f32[3] @128 = clip($stats, squares) max_norm=1.0 ; update control
2 compute $applied = advance($applied, control) ; update applied
{}{}output control
",
        flat(1),
        flat(0),
        adamw(3, 1),
        adamw(4, 0)
    )
}

/// Runs a plan on some samples of a step, from `first` on; `x` has all of them.
pub fn run_batch(executor: &mut Executor<f32>, which: Which, x: &[f32], first: usize, header: &Header) {
    let (width, batch) = (x.len() / header.nominal as usize, executor.ints(which, "labels").unwrap().len());
    assert!(executor.write_input(which, "x", &x[width * first..width * (first + batch)]));
    let labels = executor.ints(which, "labels").unwrap();
    labels.iter_mut().zip(first..).for_each(|(label, sample)| *label = (sample * 7 % 10) as i32);
    executor.input(which, "weights").unwrap().fill(1.0);
    executor.run(which, header).unwrap();
}

/// Parameters in shards, gathered where they are used and again for the backward pass, updated where they are: after some steps each rank
/// has its part of what one rank with all samples has.
#[test]
fn zero3_over_two_ranks_trains_as_one_does() {
    const STEPS: u32 = 3;
    let blocks = ["block.0", "block.1"];
    // The last element of the second block is padding.
    let flat: Vec<Vec<f32>> =
        (20..22).map(|site| normal(4096, site).iter().map(|x| 0.1 * x).collect()).collect();
    let samples = |step: u32| normal(32 * 63, 9 + step);
    let mut one = executor(&one());
    for (block, values) in blocks.iter().zip(&flat) {
        for (ending, values) in [("", values.clone()), (".half", values.clone())] {
            let id = one.find_state(&format!("{block}{ending}")).unwrap();
            one.write_state(id, &values);
        }
    }
    let gradient = |one: &Executor<f32>, block: &str| state(one, &format!("{block}.grad"));
    let mut first = None;
    for step in 0..STEPS {
        run_batch(&mut one, Which::Last, &samples(step), 0, &header(32.0));
        first.get_or_insert_with(|| blocks.map(|block| gradient(&one, block)));
        one.run(Which::Update, &header(32.0)).unwrap();
    }
    let ranks = among(2, |comm| {
        let rank = comm.rank();
        let options = Options { threads: 1, seed: 7, comm: Some(comm) };
        let program = program(ZERO3);
        program.check().unwrap();
        let mut executor = Executor::<f32>::new(program, options).unwrap();
        for (block, values) in blocks.iter().zip(&flat) {
            let id = executor.find_state(&format!("{block}.shard")).unwrap();
            executor.write_state(id, &values[2048 * rank..2048 * (rank + 1)]);
        }
        let mut gradients = None;
        for step in 0..STEPS {
            run_batch(&mut executor, Which::First, &samples(step), 16 * rank, &header(32.0));
            gradients.get_or_insert_with(|| blocks.map(|block| gradient(&executor, block)));
            executor.run(Which::Update, &header(32.0)).unwrap();
        }
        let of = |ending: &str| blocks.map(|block| state(&executor, &format!("{block}.{ending}")));
        let control = executor.output(Which::Update, "control").unwrap().to_vec();
        (gradients.unwrap(), of("shard"), of("shard.half"), control)
    });
    assert_eq!(ranks[0].3, ranks[1].3, "every rank clips alike");
    let control = one.output(Which::Update, "control").unwrap();
    assert!(
        (ranks[0].3[2] / control[2] - 1.0).abs() < 1e-3 && control[1] == 1.0,
        "{control:?}, {:?}",
        ranks[0].3
    );
    let rate = header(32.0).learning_rate as f32;
    for (number, block) in blocks.iter().enumerate() {
        // Without the padding of the second.
        let elements = 4096 - number;
        let apart = |a: &[f32], b: &[f32]| {
            a.iter().zip(b).take(elements).fold(0.0f32, |most, (a, b)| most.max((a - b).abs()))
        };
        let plain = &first.as_ref().unwrap()[number];
        let largest = plain[..elements].iter().fold(0.0f32, |most, x| most.max(x.abs()));
        let off = apart(&[ranks[0].0[number].clone(), ranks[1].0[number].clone()].concat(), plain);
        assert!(largest > 1e-3 && off < 1e-5 * largest, "{block}: gradients off by {off} of {largest}");
        let parameters = [ranks[0].1[number].clone(), ranks[1].1[number].clone()].concat();
        let off = apart(&parameters, &state(&one, block));
        assert!(off < 0.1 * rate, "{block}: off by {off}, with steps of {rate}");
        let halves = [ranks[0].2[number].clone(), ranks[1].2[number].clone()].concat();
        assert!(parameters.iter().zip(&halves).all(|(w, half)| half::bf16::from_f32(*w).to_f32() == *half));
    }
}

/// A mesh of two by two: sums over each axis, and over all, in one order.
#[test]
fn collectives_stay_within_their_groups() {
    let text = "plan micro batch=1 height=1 width=1 mesh=data:2,sequence:2 arena=4096
input x f32[4] @0
0 comm rows f32[4] @128 = all_reduce(x) reduction=\"sum\" group=\"sequence:2\" ; communication rows
1 comm columns f32[4] @256 = all_reduce(x) reduction=\"sum\" group=\"data:2\" ; communication columns
2 comm all f32[4] @384 = all_reduce(rows) reduction=\"sum\" group=\"data:2\" ; communication all
3 comm world f32[4] @512 = all_reduce(x) reduction=\"sum\" group=\"data+sequence:4\" ; communication world
4 comm gathered f32[8] @640 = all_gather(x) group=\"sequence:2\" ; communication gathered
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

/// A plan that leaves a gather under way has ended when others have not even begun theirs; whoever reads what is gathered waits.
#[test]
fn a_plan_ends_before_what_it_has_left() {
    let text = "plan update batch=1 height=1 width=1 mesh=data:2 arena=0
state whole f32[8] \"flat\" own@0
state part f32[4] \"master\" own@128
0 comm $whole = all_gather($part) group=\"data:2\" left ; update whole
plan eval batch=1 height=1 width=1 mesh=data:2 arena=512
state whole f32[8] \"flat\" own@0
state part f32[4] \"master\" own@128
input x f32[8] @0
0 compute y f32[8] @128 = scale(x) factor=2.0 ; forward y
1 compute z f32[8] @256 = add(y, $whole) after=whole ; forward z
output z
";
    let (tell, told) = std::sync::mpsc::channel();
    let (tell, told) = (std::sync::Mutex::new(tell), std::sync::Mutex::new(told));
    let sums = among(2, |comm| {
        let rank = comm.rank();
        let options = Options { threads: 1, seed: 7, comm: Some(comm) };
        let program = program(text);
        program.check().unwrap();
        let mut executor = Executor::<f32>::new(program, options).unwrap();
        let part = executor.find_state("part").unwrap();
        let mut seen = vec![];
        for step in 0..3 {
            executor.write_state(part, &[(10 * step + rank) as f32; 4]);
            if rank == 1 {
                // Rank 0's plan has ended: it waits for nobody.
                let patience = std::time::Duration::from_secs(60);
                told.lock().unwrap().recv_timeout(patience).expect("rank 0 waits for what it should leave");
            }
            executor.run(Which::Update, &header(1.0)).unwrap();
            if rank == 0 {
                tell.lock().unwrap().send(()).unwrap();
            }
            assert!(executor.write_input(Which::Eval, "x", &[1.0; 8]));
            executor.run(Which::Eval, &header(1.0)).unwrap();
            seen.push(executor.output(Which::Eval, "z").unwrap().to_vec());
            assert_eq!(state(&executor, "whole")[0], (10 * step) as f32);
        }
        seen
    });
    for seen in sums {
        let whole = |step: usize| [[(10 * step) as f32 + 2.0; 4], [(10 * step + 1) as f32 + 2.0; 4]].concat();
        assert_eq!(seen, [0, 1, 2].map(whole));
    }
}

/// The update of one bucket by LAMB, of which each of so many ranks holds a part.
fn lamb(ranks: usize) -> String {
    const ELEMENTS: usize = 12 * 2048;
    let part = ELEMENTS / ranks;
    let group = if ranks > 1 { format!(",\"group\":\"data:{ranks}\"") } else { String::new() };
    let of_op = if ranks > 1 { format!(" group=\"data:{ranks}\"") } else { String::new() };
    // Tensors of all sorts: over many borders, within one, of one element, with other rates.
    let pieces =
        "[[0,9000,1.0,0.1],[9024,100,0.5,0.0],[9152,1,1.0,0.0],[9216,14000,2.0,0.1],[23232,1300,1.0,0.0]]";
    let segments = 5 + 1 + 1 + 8 + 1;
    let flat = format!("elements={ELEMENTS} pieces={pieces}{of_op}");
    let mut text = format!("plan update batch=1 height=1 width=1 mesh=data:{ranks} arena=8192\n");
    for (number, name) in ["w", "g", "m", "v"].into_iter().enumerate() {
        text += &format!("state {name} f32[{part}] \"master\" own@{}\n", number * 4 * part);
    }
    text += &format!("state stats f32[4] \"statistic\" own@{}\n", 16 * part);
    text += &format!("state applied f32[1] \"counter\" own@{}\n", 16 * part + 128);
    // One rank has nothing to add up.
    let (of, wait) = if ranks > 1 { (".all", " wait=") } else { ("", "") };
    let mut steps: Vec<String> = vec![];
    let reduce = |steps: &mut Vec<String>, name: &str, ty: &str, offset: usize| {
        if ranks > 1 {
            steps.push(format!(
                "comm {name}.all {ty} @{offset} = all_reduce({name}) reduction=\"sum\" group=\"data:{ranks}\" wait={} ; update {name}",
                steps.len() - 1
            ));
        }
        if ranks > 1 { format!("{wait}{}", steps.len() - 1) } else { String::new() }
    };
    steps.push(format!(
        "compute squares f64[12] @0 = sum_squares($g) flats=[{{\"elements\":{ELEMENTS},\"pieces\":{pieces}{group}}}] ; update norm"
    ));
    let waits = reduce(&mut steps, "squares", "f64[12]", 128);
    steps.push(format!(
        "compute control f32[3] @256 = clip($stats, squares{of}) max_norm=1.0{waits} ; update control"
    ));
    steps.push("compute $applied = advance($applied, control) ; update applied".to_string());
    let betas = "beta1=0.9 beta2=0.999 eps=1e-6";
    let norms = format!("f64[{segments},2]");
    steps.push(format!(
        "compute $m, $v, norms {norms} @512 = lamb_moments($w, $g, $m, $v, control, $applied) {betas} {flat} ; update w"
    ));
    let waits = reduce(&mut steps, "norms", &norms, 1024);
    steps.push(format!(
        "compute $w = lamb_apply($w, $m, $v, norms{of}, control, $applied) {betas} min_coeff=0.01 max_coeff=10.0 {flat}{waits} ; update w"
    ));
    for (number, step) in steps.iter().enumerate() {
        text += &format!("{number} {step}\n");
    }
    text + "output control\n"
}

/// Gradient norm, LAMB's norms and what follows from them have the same bits however a buffer is divided.
#[test]
fn norms_dont_depend_on_how_buffers_are_divided() {
    const ELEMENTS: usize = 12 * 2048;
    let (w, g) = (normal(ELEMENTS, 60), normal(ELEMENTS, 61));
    let run = |ranks: usize| {
        let text = lamb(ranks);
        let of_ranks = among(ranks, |comm| {
            let rank = comm.rank();
            let options = Options { threads: 2, seed: 7, comm: Some(comm) };
            let mut executor = Executor::<f32>::new(program(&text), options).unwrap();
            let part = ELEMENTS / ranks * rank..ELEMENTS / ranks * (rank + 1);
            for (name, values) in [("w", &w[part.clone()]), ("g", &g[part]), ("stats", &[1.0; 4])] {
                let id = executor.find_state(name).unwrap();
                executor.write_state(id, values);
            }
            let mut controls = vec![];
            for _ in 0..3 {
                executor.run(Which::Update, &header(1.0)).unwrap();
                controls.extend(executor.output(Which::Update, "control").unwrap().to_vec());
            }
            (state(&executor, "w"), controls)
        });
        let controls = of_ranks[0].1.clone();
        assert!(of_ranks.iter().all(|(_, other)| *other == controls));
        (of_ranks.into_iter().flat_map(|(w, _)| w).collect::<Vec<f32>>(), controls)
    };
    let (one, controls) = run(1);
    assert!(controls[1] == 1.0 && controls[2] > 100.0, "{controls:?}");
    // What is not padding has moved.
    let moved = one.iter().zip(&w).filter(|(new, old)| new != old).count();
    assert!(moved > 24_000 && one[9000] == w[9000], "{moved}");
    for ranks in [2, 3, 4, 6] {
        assert!(run(ranks) == (one.clone(), controls.clone()), "{ranks} ranks");
    }
}
