//! What a GPU runs is what the plan says: lanes, waits and launches, as bound and as the driver captured them, and the time that follows.

use cuda::action::{Constants, Facts};
use cuda::bind::{Addresses, Binder, Bound, Steps, state_addresses};
use cuda::{Executor, Options, Which};
use graph::{DType, Header, Lane, Loss, Mesh, Mixed, Op, Optimizer, Plan, Program, Settings, compile};
use models::Network;

const BF16: Mixed = Mixed { half: DType::Bf16, residual: DType::F32 };

/// Name, image size, classes, batch.
type Case = (&'static str, usize, usize, usize);

const CASES: [Case; 3] =
    [("vit-b/16", 224, 1000, 64), ("vit-ti/4", 32, 10, 128), ("swinv2-b/w8+upernet", 512, 150, 8)];

fn program((name, image, classes, batch): Case, mesh: Mesh, target: &cuda::Target) -> Program {
    let network = Network::named(name, image, 3, classes).unwrap();
    let settings = Settings {
        max_grad_norm: Some(1.0),
        mixed: Some(BF16),
        mesh,
        ..Settings::plain(
            Optimizer::AdamW { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.05 },
            target,
        )
    };
    compile(network.build(batch, Loss::default(), DType::F32).unwrap(), &settings).unwrap()
}

fn bound(program: &Program, plan: &Plan, facts: &Facts) -> Bound {
    let states = state_addresses(&program.states, (program.last.mesh, 0), 1 << 41, 1 << 40);
    let memory = Addresses { arena: 1 << 40, states: &states, header: 1 << 42 };
    let binder = Binder { memory, tf32: false, facts, maker: &Steps, rank: 0 };
    binder.bind(plan, &mut Constants::at(1 << 43)).unwrap()
}

/// For each action, whether each before it is done when it starts.
fn closure(count: usize, after: impl Fn(usize) -> Vec<usize>) -> Vec<Vec<bool>> {
    let mut done: Vec<Vec<bool>> = Vec::with_capacity(count);
    for action in 0..count {
        let mut mine = vec![false; count];
        for before in after(action) {
            mine[before] = true;
            for (mine, theirs) in mine.iter_mut().zip(&done[before]) {
                *mine |= *theirs;
            }
        }
        done.push(mine);
    }
    done
}

/// Whether actions, by their steps and the order they are in, are ordered as the plan orders those steps; how many pairs are not
/// ordered.
fn compare(plan: &Plan, steps: &[(usize, usize, Lane)], done: &[Vec<bool>]) -> usize {
    let clocks = plan.clocks();
    let mut beside = 0;
    for (b, (first, _, lane)) in steps.iter().enumerate() {
        assert_eq!(plan.steps[*first].lane, *lane, "step {first}");
        for (a, (before, step, _)) in
            steps[..b].iter().enumerate().filter(|(_, (before, ..))| before != first)
        {
            let ordered = clocks.happens_before(*step, *first);
            let of = |step: usize| format!("{} of {}", plan.steps[step].op.name(), plan.steps[step].layer);
            assert_eq!(
                done[b][a],
                ordered,
                "step {before} ({}) and step {first} ({})",
                of(*step),
                of(*first)
            );
            beside += usize::from(!ordered);
        }
    }
    beside
}

#[test]
fn bound_plans_have_the_lanes_waits_and_launches_of_the_plan() {
    let target = cuda::Target { half_precision: true, facts: Facts::h200() };
    for (case, mesh) in CASES.into_iter().zip([Mesh::of_data(4), Mesh::default(), Mesh::of_data(2)]) {
        let program = program(case, mesh, &target);
        for plan in [&program.first, &program.last, &program.update] {
            plan.check().unwrap();
            let bound = bound(&program, plan, &target.facts);
            // A lane's actions follow each other.
            let mut lasts: std::collections::HashMap<Lane, usize> = Default::default();
            let after: Vec<Vec<usize>> = bound
                .actions
                .iter()
                .enumerate()
                .map(|(i, placed)| {
                    lasts.insert(placed.lane, i).into_iter().chain(placed.waits.clone()).collect()
                })
                .collect();
            let steps: Vec<_> = bound.actions.iter().map(|p| (p.first, p.step, p.lane)).collect();
            let beside = compare(plan, &steps, &closure(steps.len(), |action| after[action].clone()));
            let joined = plan.steps.iter().filter(|step| step.joined).count();
            println!(
                "{}, {}: {} steps, {} actions, {joined} joined, {beside} pairs beside each other",
                case.0,
                plan.name,
                plan.steps.len(),
                steps.len()
            );
            for (first, step, _) in steps {
                assert_eq!(plan.launch_of(step), first..step + 1, "an action is of one launch");
            }
            assert!(plan.name == "update" || beside > 50);
        }
    }
}

fn opened(case: Case) -> Executor {
    let target = cuda::Target::of(0, true);
    let options = Options { device: 0, seed: 1, deterministic: false, tf32: false, comm: None };
    let mut gpu = Executor::new(program(case, Mesh::default(), &target), options).unwrap();
    let plan = gpu.program().last.clone();
    let count = |name: &str| plan.values[plan.find(name).unwrap()].ty.shape.count();
    let noise = |i: usize| ((i * 7919) % 2003) as f32 / 1000.0 - 1.0;
    gpu.upload_f32(Which::Last, "images", &(0..count("images")).map(noise).collect::<Vec<_>>()).unwrap();
    let classes = case.2;
    let labels: Vec<i32> = (0..count("labels")).map(|i| (i / 97 % classes) as i32).collect();
    gpu.upload_i32(Which::Last, "labels", &labels).unwrap();
    gpu.upload_f32(Which::Last, "weights", &vec![1.0; count("weights")]).unwrap();
    gpu
}

#[test]
#[ignore = "needs a GPU"]
fn the_driver_captures_what_the_plan_says() {
    for case in CASES {
        let mut gpu = opened(case);
        for which in [Which::Last, Which::Update] {
            let captured = gpu.captured(which).unwrap();
            let plan = gpu.program().plan(which).clone();
            let done = closure(captured.len(), |action| captured[action].after.clone());
            let steps: Vec<_> = captured.iter().map(|c| (c.first, c.step, c.lane)).collect();
            let beside = compare(&plan, &steps, &done);
            println!(
                "{}, {}: {} captured, {beside} pairs beside each other",
                case.0,
                plan.name,
                captured.len()
            );
            assert!(which == Which::Update || beside > 50);
        }
    }
}

/// With the durations of a run's own steps, a replay of the plan comes to that run's time. On a GPU that others use, not every time.
#[test]
#[ignore = "needs a GPU"]
fn a_replay_comes_to_the_time_of_the_run() {
    for case in CASES {
        let mut gpu = opened(case);
        let nominal = gpu.program().last.key.batch as f64;
        let header = Header { seed: 1, step: 0, first_sample: 0, learning_rate: 1e-5, nominal };
        let mut best = f64::INFINITY;
        for _ in 0..5 {
            let timed = gpu.time_steps(Which::Last, &header).unwrap();
            let plan = &gpu.program().last;
            let replayed = graph::replay(plan, &timed.seconds);
            let off = replayed.seconds() / timed.total - 1.0;
            let busy = |lane| 1e3 * replayed.busy(lane);
            println!(
                "{}: {:.3} ms replayed, {:.3} ms measured with marks ({:+.1}%), {:.3} ms without; compute {:.3} ms, side {:.3} ms",
                case.0,
                1e3 * replayed.seconds(),
                1e3 * timed.total,
                1e2 * off,
                1e3 * timed.unmarked,
                busy(Lane::Compute),
                busy(Lane::Side)
            );
            best = best.min(off.abs());
        }
        assert!(best < 0.05, "{}: {best}", case.0);
        assert!(gpu.program().last.steps.iter().any(|step| matches!(step.op, Op::AddUp { .. })));
    }
}
