//! Real plans, bound to addresses: what lies where is simulated with a mark for every value, so that a value written too early
//! or to a wrong place is seen.

mod fake;

use cuda::action::{Action, Address, Constants, Facts, Launch};
use cuda::bind::{Addresses, Binder, Bound, Maker, Steps, state_addresses};
use fake::{Batches, Fake, mark};
use graph::build::Conv;
use graph::op::Window;
use graph::{
    Builder, DType, Init, Key, Lane, Loss, Mesh, Mixed, Model, Op, Optimizer, Plan, Program, Recompute,
};
use graph::{Home, Role, Settings, compile};
use models::swin::Swin;
use models::upernet::UperNet;
use models::vit::{Pool, Vit};
use std::collections::HashMap;

const ARENA: Address = 1 << 40;
const STATES: Address = 1 << 41;
const ALIGN: u64 = 128;

/// A mark for each border of memory.
#[derive(Default)]
struct Marks(HashMap<Address, u64>);

impl Marks {
    fn read(&self, (address, bytes): (Address, u64), who: &str) -> u64 {
        let mark = |at: u64| self.0.get(&(address + at * ALIGN)).copied().unwrap_or(0);
        let first = mark(0);
        assert!((0..bytes.div_ceil(ALIGN)).all(|at| mark(at) == first), "{who} reads a mixture");
        first
    }

    fn write(&mut self, (address, bytes): (Address, u64), mark: u64) {
        self.0.extend((0..bytes.div_ceil(ALIGN)).map(|at| (address + at * ALIGN, mark)));
    }

    fn play(&mut self, bound: &Bound) {
        for placed in &bound.actions {
            let Action::Launch(Launch { kernel, .. }) = &placed.action else { panic!() };
            let (read, written) = fake::ranges(&placed.action).unwrap();
            let read: Vec<u64> = read.into_iter().map(|range| self.read(range, &kernel.name)).collect();
            for (i, range) in written.into_iter().enumerate() {
                // A sum that is its first part is that part.
                let is_sum = i == 0 && kernel.name.starts_with("accumulate ");
                let made = if is_sum { read[0] } else { mark(&(&kernel.name, i, &read)) };
                self.write(range, made);
            }
        }
    }
}

/// A ViT and a Swin V2, each with all that it may have.
fn models() -> [Model; 2] {
    let (image, patch, channels, classes) = (16, 4, 3, 5);
    let (width, depth, heads, mlp, pool) = (24, 3, 3, 48, Pool::ClassToken);
    let (dropout, attention_dropout, drop_path) = (0.1, 0.1, 0.1);
    let vit = Vit {
        image,
        patch,
        channels,
        classes,
        width,
        depth,
        heads,
        mlp,
        pool,
        dropout,
        attention_dropout,
        drop_path,
        norm_eps: 1e-6,
    };
    let (width, depths, heads, window) = (16, [1, 2, 1, 1], [1, 2, 2, 4], 4);
    let (image, pretrained, trained) = ([32, 48], None, None);
    let swin = Swin {
        image,
        channels,
        classes,
        width,
        depths,
        heads,
        window,
        pretrained,
        trained,
        dropout,
        drop_path,
    };
    let loss = Loss { smoothing: 0.1, mixed: false };
    let dtype = graph::DType::F32;
    [vit.build(4, loss, dtype).unwrap(), swin.build(2, loss, dtype).unwrap()]
}

fn program(recompute: Recompute) -> Program {
    let [vit, _] = models();
    compiled(vit, recompute)
}

/// Of a ViT and a Swin, with and without recomputation.
fn programs() -> impl Iterator<Item = Program> {
    [Recompute::None, Recompute::Gelu, Recompute::Full]
        .into_iter()
        .flat_map(|r| models().map(|model| compiled(model, r)))
}

/// UPerNet over four convolutions.
fn segmenter() -> Model {
    let graph = |training: bool| {
        let mut b = Builder::new(DType::F32, training);
        let mut x = b.input("images", DType::F32, [2, 32, 32, 3]);
        let targets = b.targets([2, 32, 32], false);
        let stages = [6, 8, 10, 12].map(|out| {
            let (window, weight, bias) = (Window { stride: 2, pad: 1 }, Init::Normal { std: 0.3 }, None);
            let name = format!("stage.{out}");
            let y = b.conv(x, Conv { name: &name, out, kernel: 3, window, weight, bias });
            x = b.border(y);
            x
        });
        let net = UperNet { classes: 5, channels: 8, auxiliary: 6, dropout: 0.1 };
        let ends = net.finish(&mut b, stages, (32, 32), targets, Loss::default());
        b.finish(&ends.values()).unwrap()
    };
    Model { train: graph(true), eval: graph(false), key: Key::default() }
}

fn compiled(model: Model, recompute: Recompute) -> Program {
    compiled_for(model, recompute, true)
}

const ADAMW: Optimizer = Optimizer::AdamW { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.05 };

fn compiled_for(model: Model, recompute: Recompute, accumulates: bool) -> Program {
    compiled_with(model, recompute, accumulates, ADAMW, None)
}

fn compiled_with(
    model: Model,
    recompute: Recompute,
    accumulates: bool,
    optimizer: Optimizer,
    mixed: Option<Mixed>,
) -> Program {
    let settings = Settings {
        max_grad_norm: Some(1.0),
        recompute,
        ema: Some(0.9),
        mixed,
        accumulates,
        ..Settings::plain(optimizer, &Batches)
    };
    compile(model, &settings).unwrap()
}

fn bind(program: &Program, plan: &Plan) -> Bound {
    bind_by(program, plan, &Fake)
}

fn bind_by(program: &Program, plan: &Plan, maker: &dyn Maker) -> Bound {
    let facts = Facts::h200();
    let states = state_addresses(&program.states, (Mesh::default(), 0), STATES, ARENA);
    let memory = Addresses { arena: ARENA, states: &states, header: 1 << 42 };
    let binder = Binder { memory, tf32: false, facts: &facts, maker, rank: 0 };
    binder.bind(plan, &mut Constants::at(1 << 43)).unwrap()
}

/// The states' marks after a plan, of those that it sums into.
fn sums(program: &Program, bound: &Bound) -> Vec<(String, u64)> {
    let mut marks = Marks::default();
    for (address, bytes) in [(ARENA, program.arena()), (STATES, program.state_bytes())] {
        for at in (0..bytes as u64).step_by(ALIGN as usize) {
            marks.write((address + at, 1), mark(&address));
        }
    }
    marks.play(bound);
    let states =
        program.states.iter().zip(state_addresses(&program.states, (Mesh::default(), 0), STATES, ARENA));
    let summed = states.filter(|(state, _)| matches!(state.role, Role::Gradient | Role::Statistic));
    let read = |(state, address): (&graph::State, Address)| {
        let found = marks.read((address, state.ty.bytes() as u64), &state.name);
        assert!(found != mark(&STATES) && found != mark(&ARENA), "nothing is written to {}", state.name);
        (state.name.clone(), found)
    };
    summed.map(read).collect()
}

#[test]
fn sums_made_in_their_states_are_the_same_sums() {
    for program in programs() {
        let (anew, adding) = (bind(&program, &program.first), bind(&program, &program.micro));
        assert_eq!(sums(&program, &anew), sums(&program, &adding));
        let count = |is: &dyn Fn(&Op) -> bool| program.micro.steps.iter().filter(|step| is(&step.op)).count();
        // Sums of parts go on from what is there. Others are added by a launch.
        let others = count(&|op| *op == Op::Accumulate);
        assert!(others > 2);
        assert_eq!(anew.actions.len() + others, adding.actions.len());
        // The position bias of each block of a Swin needs some of them.
        let sums = count(&|op| matches!(op, Op::AddUp { .. }));
        assert!((2..12).contains(&sums), "{sums} times sums are made");
    }
}

#[test]
fn all_of_an_update_is_two_groups() {
    let program = program(Recompute::None);
    let bound = bind(&program, &program.update);
    let mut groups: Vec<(usize, usize)> = bound.actions.iter().map(|p| (p.first, p.step)).collect();
    groups.dedup();
    assert_eq!(groups, [(0, 2), (3, program.update.steps.len() - 1)]);
}

/// Muon's matmuls read what was made for them, in the arena beside gradients or without; and there is a kernel for each step.
#[test]
fn updates_of_matrices_bind_and_play() {
    let (momentum, nesterov, beta1, beta2, eps, weight_decay) = (0.95, true, 0.9, 0.95, 1e-8, 0.05);
    let muon = Optimizer::Muon { momentum, nesterov, beta1, beta2, eps, weight_decay };
    let bf16 = Some(Mixed { half: DType::Bf16, residual: DType::F32 });
    for (accumulates, mixed) in [(true, None), (false, None), (false, bf16)] {
        for model in models().into_iter().chain([segmenter()]) {
            let program = compiled_with(model, Recompute::None, accumulates, muon, mixed);
            let bound = bind(&program, &program.update);
            let mut marks = Marks::default();
            for (address, bytes) in [(ARENA, program.arena()), (STATES, program.state_bytes())] {
                for at in (0..bytes as u64).step_by(ALIGN as usize) {
                    marks.write((address + at, 1), mark(&address));
                }
            }
            marks.play(&bound);
            let states = program.states.iter().zip(state_addresses(
                &program.states,
                (Mesh::default(), 0),
                STATES,
                ARENA,
            ));
            for (state, address) in states.filter(|(state, _)| state.is_parameter()) {
                let found = marks.read((address, state.ty.bytes() as u64), &state.name);
                assert!(found != mark(&STATES), "nothing is written to {}", state.name);
            }
            let matmuls = |steps: &[graph::plan::Step]| {
                steps.iter().filter(|step| matches!(step.op, Op::Matmul { .. })).count()
            };
            assert!(matmuls(&program.update.steps) >= 15);
            // Averages of running moments have no kernel yet, whatever the optimizer.
            if program.states.iter().any(|state| state.role == Role::Running) {
                continue;
            }
            let direction = if mixed.is_some() { "bf16" } else { "float" };
            let name = format!("newton_schulz<{direction}>");
            let real = bind_by(&program, &program.update, &Steps);
            let is_polynomial =
                |action: &Action| matches!(action, Action::Launch(launch) if launch.kernel.name == name);
            assert!(real.actions.iter().any(|placed| is_polynomial(&placed.action)), "{name}");
            let calls = real.actions.iter().filter(|p| matches!(p.action, Action::Matmul(_))).count();
            assert!(calls > matmuls(&program.update.steps), "one for each matrix of a stack");
        }
    }
}

/// The actions in another order that their lanes and waits allow: of the lanes whose next action is ready, `choose` takes one.
fn reordered(bound: &Bound, mut choose: impl FnMut(usize) -> usize) -> Bound {
    let mut queues: Vec<Vec<usize>> = Lane::ALL
        .iter()
        .map(|lane| (0..bound.actions.len()).rev().filter(|i| bound.actions[*i].lane == *lane).collect())
        .collect();
    let (mut order, mut done) = (vec![], vec![false; bound.actions.len()]);
    while order.len() < bound.actions.len() {
        let is_ready = |queue: &Vec<usize>| {
            queue.last().is_some_and(|next| bound.actions[*next].waits.iter().all(|wait| done[*wait]))
        };
        let ready: Vec<usize> = (0..queues.len()).filter(|lane| is_ready(&queues[*lane])).collect();
        assert!(!ready.is_empty(), "every lane waits for another");
        let next = queues[ready[choose(ready.len())]].pop().unwrap();
        done[next] = true;
        order.push(bound.actions[next].clone());
    }
    Bound { actions: order, ..bound.clone() }
}

/// Whatever order the lanes allow, the sums are these.
fn in_any_order(program: &Program, lanes: &Bound, want: &[(String, u64)]) {
    assert_eq!(sums(program, &reordered(lanes, |_| 0)), want, "as late as possible");
    assert_eq!(sums(program, &reordered(lanes, |n| n - 1)), want, "as early as possible");
    for seed in 0..20 {
        let mut random = graph::random::Sequence::new(seed, 1);
        let other = reordered(lanes, |n| (random.uniform() * n as f64) as usize);
        assert_eq!(sums(program, &other), want, "order {seed}");
    }
}

#[test]
fn weights_gradients_may_run_beside_the_rest() {
    let segmenters = [Recompute::None, Recompute::Full].map(|r| compiled(segmenter(), r));
    for program in programs().chain(segmenters) {
        for plan in [&program.first, &program.micro] {
            let lanes = bind(&program, plan);
            let aside = lanes.actions.iter().filter(|placed| placed.lane != Lane::Compute).count();
            assert!(aside > 10 && aside < lanes.actions.len() / 2);
            let want = sums(&program, &lanes);
            in_any_order(&program, &lanes, &want);
        }
    }
}

/// Where a step has one micro-step, gradients lie where activations were: they are the same sums, in any order that lanes allow.
#[test]
fn gradients_in_the_arena_are_the_same_sums() {
    let all = || models().into_iter().chain([segmenter()]);
    for recompute in [Recompute::None, Recompute::Gelu, Recompute::Full] {
        for (model, again) in all().zip(all()) {
            let (kept, lodged) = (compiled(model, recompute), compiled_for(again, recompute, false));
            let bytes = |program: &Program| program.arena() + program.state_bytes();
            assert!(lodged.states.iter().any(|state| matches!(state.home, Home::Arena(1..))));
            // Where hardly any activations are kept, there is little to gain.
            assert!(recompute != Recompute::None || bytes(&lodged) < bytes(&kept));
            let want = sums(&kept, &bind(&kept, &kept.first));
            let lanes = bind(&lodged, &lodged.last);
            assert_eq!(sums(&lodged, &lanes), want);
            in_any_order(&lodged, &lanes, &want);
        }
    }
}

/// Matmuls in fp8 have no kernels here yet: a plan with them is refused by name when it is bound.
#[test]
fn fp8_is_refused_when_it_is_bound() {
    let text = include_str!("../../graph/tests/plans/fp8-linear.plan");
    let start = text.find("\nplan update").unwrap();
    let micro: Plan = text[..start].parse().unwrap();
    let program = Program { states: micro.states.clone(), last: micro, ..Program::default() };
    let refused = cuda::kernels_of(&program, &Facts::h200(), false).err().unwrap().to_string();
    assert_eq!(refused, "fc: the CUDA executor has no kernel for quantize of bf16, f32, f32");
}
