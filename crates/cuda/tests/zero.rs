//! Plans of ZeRO's stages, bound for each rank: what a rank holds lies where its number says, and what an update leaves under way is waited
//! for where it is needed. Several ranks' memory is played with a mark for every few bytes.

mod fake;
#[path = "../../cpu/tests/common/optimizers.rs"]
mod optimizers;

use comm::Collective;
use cuda::action::{Action, Address, CollectiveCall, Constants, Facts};
use cuda::bind::{Addresses, Binder, Bound, Maker, Placed, Steps, state_addresses};
use cuda::{MemoryNeeds, Which};
use fake::{Batches, Fake, mark};
use graph::{
    Communication, DType, Held, Loss, Mesh, Mixed, Optimizer, Program, Settings, StateId, Zero, compile,
};
use models::vit::Vit;
use optimizers::{ADAMW, LAMB, MUON};
use std::collections::HashMap;

const ARENA: Address = 1 << 40;
const STATES: Address = 1 << 41;
const ALIGN: u64 = 128;
const BF16: Mixed = Mixed { half: DType::Bf16, residual: DType::F32 };

fn program(zero: Zero, ranks: usize, optimizer: Optimizer, mixed: Option<Mixed>) -> Program {
    program_for(zero, ranks, optimizer, mixed, &Batches)
}

fn program_for(
    zero: Zero,
    ranks: usize,
    optimizer: Optimizer,
    mixed: Option<Mixed>,
    target: &dyn graph::Target,
) -> Program {
    let vit = Vit { depth: 3, ..Vit::named("vit-nano/4", 16, 3, 10).unwrap() };
    let communication = Communication { bucket: 40_000, overlap: true, dtype: None, each_micro_step: false };
    let (model, mesh) = (vit.build(4, Loss::default(), DType::F32).unwrap(), Mesh::of_data(ranks));
    let plain = settings(target);
    let accumulates = true;
    compile(model, &Settings { optimizer, mixed, mesh, communication, zero, accumulates, ..plain }).unwrap()
}

fn settings(target: &dyn graph::Target) -> Settings<'_> {
    Settings { max_grad_norm: Some(1.0), ema: Some(0.9), ..Settings::plain(ADAMW, target) }
}

/// Every plan of a rank.
fn bound(program: &Program, rank: usize, maker: &dyn Maker) -> Vec<Bound> {
    let facts = Facts::h200();
    let states = state_addresses(&program.states, (program.last.mesh, rank), STATES, ARENA);
    let memory = Addresses { arena: ARENA, states: &states, header: 1 << 42 };
    let binder = Binder { memory, tf32: false, facts: &facts, maker, rank };
    let mut constants = Constants::at(1 << 43);
    program.plans().map(|plan| binder.bind(plan, &mut constants).unwrap()).into_iter().collect()
}

/// Memory of all ranks: a mark for each rank and border.
struct Memory {
    marks: Vec<HashMap<Address, u64>>,
}

fn borders((address, bytes): fake::Range) -> impl Iterator<Item = Address> {
    (0..bytes.div_ceil(ALIGN)).map(move |at| address + at * ALIGN)
}

impl Memory {
    fn of(ranks: usize) -> Self {
        Memory { marks: vec![HashMap::new(); ranks] }
    }

    /// What was never written: inputs are each rank's own, and states start alike where they are whole.
    fn read(&self, rank: usize, at: Address) -> u64 {
        let own = if at < STATES { rank } else { 0 };
        self.marks[rank].get(&at).copied().unwrap_or_else(|| mark(&(own, at)))
    }

    /// One action of a plan, on all ranks.
    fn play(&mut self, actions: &[&Placed]) {
        let calls: Vec<&CollectiveCall> = actions.iter().filter_map(|placed| call(placed)).collect();
        if !calls.is_empty() {
            return self.communicate(&calls);
        }
        for (rank, placed) in actions.iter().enumerate() {
            let Some((read, written)) = fake::ranges(&placed.action) else { continue };
            let Action::Launch(launch) = &placed.action else { unreachable!() };
            let of = |range| borders(range).map(|at| self.read(rank, at)).collect::<Vec<_>>();
            let read = mark(&read.into_iter().map(of).collect::<Vec<_>>());
            for (i, range) in written.into_iter().enumerate() {
                let made = |at: Address| (at, mark(&(&launch.kernel.name, i, at, read)));
                self.marks[rank].extend(borders(range).map(made));
            }
        }
    }

    fn communicate(&mut self, calls: &[&CollectiveCall]) {
        let bytes = |(_, elements): (Address, usize)| (elements * calls[0].kind.bytes()) as u64;
        let (sent, received) = (bytes(calls[0].send), bytes(calls[0].receive));
        let read = |rank: usize, at: u64| self.read(rank, calls[rank].send.0 + at);
        let together = |at: u64| mark(&(0..calls.len()).map(|rank| read(rank, at)).collect::<Vec<_>>());
        let at = |range: u64| borders((0, range));
        let result = |rank: usize| -> Vec<u64> {
            match &calls[rank].collective {
                Collective::AllReduce(_) => at(sent).map(together).collect(),
                Collective::ReduceScatter(_) => {
                    at(received).map(|at| together(rank as u64 * received + at)).collect()
                }
                Collective::AllGather => {
                    let of = |rank: usize| at(sent).map(|at| read(rank, at)).collect::<Vec<_>>();
                    (0..calls.len()).flat_map(of).collect()
                }
                other => panic!("{other:?}"),
            }
        };
        let results: Vec<Vec<u64>> = (0..calls.len()).map(result).collect();
        for (rank, result) in results.into_iter().enumerate() {
            let places = borders((calls[rank].receive.0, received));
            self.marks[rank].extend(places.zip(result));
        }
    }
}

fn call(placed: &Placed) -> Option<&CollectiveCall> {
    match &placed.action {
        Action::Collective(call) => Some(call),
        _ => None,
    }
}

/// When collectives run that an update has left under way.
#[derive(Clone, Copy, PartialEq)]
enum Left {
    AtOnce,
    /// Just before the first action that waits for them, or the next collective.
    Late,
    /// Only before the next collective, whoever waits.
    TooLate,
}

/// Two steps and an evaluation on all ranks; the marks of all that the ranks hold then.
fn played(program: &Program, ranks: usize, when: Left) -> Vec<u64> {
    let lists: Vec<Vec<Bound>> = (0..ranks).map(|rank| bound(program, rank, &Fake)).collect();
    let mut memory = Memory::of(ranks);
    let mut under_way: Vec<(usize, usize)> = vec![];
    let of = |plan: usize, index: usize| -> Vec<&Placed> {
        lists.iter().map(|plans| &plans[plan].actions[index]).collect()
    };
    let step = [Which::First, Which::Micro, Which::Last, Which::Update];
    for which in [&step[..], &step[..], &[Which::Eval]].concat() {
        let plan = which as usize;
        let mut behind = vec![];
        for (index, placed) in lists[0][plan].actions.iter().enumerate() {
            let works_on = |(plan, left): &(usize, usize)| -> bool {
                let left = &lists[0][*plan].actions[*left].left;
                left.iter().any(|state: &StateId| placed.after.contains(state))
            };
            // They are in order: with one come those before it.
            let waits = if when == Left::TooLate { None } else { under_way.iter().rposition(works_on) };
            let is_call = call(placed).is_some() && placed.left.is_empty();
            let now = if is_call { under_way.len() } else { waits.map_or(0, |last| last + 1) };
            under_way.drain(..now).for_each(|(plan, index)| memory.play(&of(plan, index)));
            match placed.left.is_empty() {
                true => memory.play(&of(plan, index)),
                false => behind.push((plan, index)),
            }
        }
        under_way.extend(behind);
        if when == Left::AtOnce {
            under_way.drain(..).for_each(|(plan, index)| memory.play(&of(plan, index)));
        }
    }
    under_way.drain(..).for_each(|(plan, index)| memory.play(&of(plan, index)));
    let own = borders((STATES, program.state_bytes() as u64)).chain(borders((ARENA, program.arena() as u64)));
    own.flat_map(|at| (0..ranks).map(|rank| memory.read(rank, at)).collect::<Vec<_>>()).collect()
}

/// Whenever the gathers of an update come, everyone reads what they bring; and the waits are what sees to that.
#[test]
fn what_is_left_under_way_is_waited_for() {
    let mut left = 0;
    for zero in Zero::ALL {
        for (optimizer, mixed, ranks) in
            [(ADAMW, None, 3), (ADAMW, Some(BF16), 2), (LAMB, None, 2), (MUON, Some(BF16), 2)]
        {
            let program = program(zero, ranks, optimizer, mixed);
            program.check().unwrap();
            let plain = played(&program, ranks, Left::AtOnce);
            let what = format!("stage {zero}, {}, {mixed:?}, {ranks} ranks", optimizer.name());
            assert!(played(&program, ranks, Left::Late) == plain, "{what}");
            let leaves = program.update.steps.iter().filter(|step| step.left).count();
            // At stage 3 a plan begins with a gather of its own, which comes behind those.
            if leaves > 0 && program.zero < Zero::Stage3 {
                assert!(played(&program, ranks, Left::TooLate) != plain, "{what}: nobody needs them");
            }
            assert_eq!(leaves > 0, program.zero != Zero::Stage0, "{what}");
            left += leaves;
        }
    }
    assert!(left > 20, "{left}");
}

/// Parts of all ranks are one buffer; a tensor in a shard lies in the shards of the ranks that hold some of it.
#[test]
fn what_a_rank_holds_lies_where_its_number_says() {
    let ranks = 3;
    let program = program(Zero::Stage3, ranks, ADAMW, Some(BF16));
    let (states, mesh) = (&program.states, program.last.mesh);
    let addresses: Vec<Vec<Address>> =
        (0..ranks).map(|rank| state_addresses(states, (mesh, rank), STATES, ARENA)).collect();
    let (mut within, mut of) = (0, 0);
    for (index, state) in states.iter().enumerate() {
        let starts: Vec<Address> = addresses.iter().map(|rank| rank[index]).collect();
        match state.held {
            Held::Whole | Held::Shard(_) => assert!(starts.iter().all(|start| *start == starts[0])),
            Held::Within(_) => {
                let bytes = state.ty.bytes() as Address;
                assert!(starts.windows(2).all(|pair| pair[1] == pair[0] + bytes), "{}", state.name);
                within += 1;
            }
            Held::Of { flat, .. } => {
                let flat = &states[flat.index()];
                let held = |rank: usize| state.elements_of(states, mesh, rank).0;
                let mut next = 0;
                for rank in (0..ranks).filter(|rank| !held(*rank).is_empty()) {
                    assert_eq!(held(rank).start, next, "{}", state.name);
                    next = held(rank).end;
                    let from = addresses[rank][index];
                    let shard = addresses[rank][states.iter().position(|s| s.name == flat.name).unwrap()];
                    let end = from + (held(rank).len() * state.ty.dtype.bytes()) as Address;
                    assert!(from >= shard && end <= shard + flat.ty.bytes() as Address, "{}", state.name);
                }
                assert_eq!(next, state.ty.shape.count(), "{}", state.name);
                of += 1;
            }
        }
    }
    assert!(within > 0 && of > 100, "{within} parts, {of} tensors");
}

/// There is a kernel for every step of every stage, on every rank, and all ranks make the same collectives in one order.
#[test]
fn every_stage_binds_on_every_rank() {
    let half = |mixed: Option<Mixed>| cuda::Target { half_precision: mixed.is_some(), facts: Facts::h200() };
    for zero in Zero::ALL {
        for (optimizer, mixed) in [(ADAMW, None), (LAMB, Some(BF16)), (MUON, None), (MUON, Some(BF16))] {
            for ranks in [2, 4] {
                let program = program_for(zero, ranks, optimizer, mixed, &half(mixed));
                let lists: Vec<_> = (0..ranks).map(|rank| bound(&program, rank, &Steps)).collect();
                let calls = |plans: &Vec<Bound>| -> Vec<(Collective, String, usize, usize)> {
                    let all = plans.iter().flat_map(|bound| bound.actions.iter().filter_map(call));
                    all.map(|c| (c.collective.clone(), c.layer.clone(), c.send.1, c.receive.1)).collect()
                };
                let first = calls(&lists[0]);
                let what = format!("stage {zero}, {}, {mixed:?}, {ranks} ranks", optimizer.name());
                assert!(lists.iter().all(|plans| calls(plans) == first), "{what}");
                let end = STATES + program.state_bytes() as Address;
                for call in lists.iter().flatten().flat_map(|bound| bound.actions.iter().filter_map(call)) {
                    for (address, elements) in [call.send, call.receive] {
                        let last = address + (elements * call.kind.bytes()) as Address;
                        let inside = (address >= STATES && last <= end)
                            || (address >= ARENA && last <= ARENA + program.arena() as Address);
                        assert!(inside, "{what}: {}", call.layer);
                    }
                }
            }
        }
    }
}

/// Memory that a GPU needs is that of the plans; one rank has the plans of stage 0 whatever it asks for.
#[test]
fn memory_is_that_of_the_plans() {
    let target = cuda::Target { half_precision: true, facts: Facts::h200() };
    let needs = |zero: Zero, ranks: usize| {
        let program = program_for(zero, ranks, ADAMW, Some(BF16), &target);
        let needs = MemoryNeeds::of(&program, &Facts::h200(), false).unwrap();
        assert_eq!((needs.arena, needs.states), (program.arena(), program.state_bytes()), "stage {zero}");
        assert_eq!(needs.uses.total(), needs.arena + needs.states, "stage {zero}");
        needs
    };
    let alone = needs(Zero::Stage0, 1);
    for zero in Zero::ALL {
        assert_eq!(needs(zero, 1), alone, "stage {zero}");
    }
    let states = Zero::ALL.map(|zero| needs(zero, 4).states);
    assert!(states.windows(2).all(|pair| pair[1] < pair[0]), "{states:?}");
}

/// Bytes of an H200 and of an L40S.
const LARGE: usize = 139 << 30;
const SMALL: usize = 44 << 30;

/// The largest ViT, of 3.8 billion parameters, on 8 ranks: what each holds at each stage, and what a smaller GPU refuses.
#[test]
fn the_largest_vit_is_planned_for_eight_ranks() {
    let network = Vit::named("vit-e/14", 224, 3, 1000).unwrap();
    let target = cuda::Target { half_precision: true, facts: Facts::h200() };
    let n = 8.0;
    // Copies, f32 parameters, gradients and moments; with several micro-steps, so that gradients are states.
    let promised = [18.0, 6.0 + 12.0 / n, 2.0 + 16.0 / n, 18.0 / n];
    for (zero, promised) in Zero::ALL.into_iter().zip(promised) {
        let model = network.build(8, Loss::default(), DType::F32).unwrap();
        let (mesh, mixed) = (Mesh::of_data(8), Some(BF16));
        let plain = Settings { ema: None, accumulates: true, ..settings(&target) };
        let program = compile(model, &Settings { mesh, mixed, zero, ..plain }).unwrap();
        let trained = program.states.iter().filter(|state| state.is_parameter());
        let parameters: usize = trained.map(|state| state.ty.shape.count()).sum();
        let needs = MemoryNeeds::of(&program, &Facts::h200(), false).unwrap();
        let each = needs.states as f64 / parameters as f64;
        println!("stage {zero}: {each:.2} bytes for each of {parameters}: {}", needs.uses);
        assert_eq!((parameters / 1_000_000, program.zero), (3_807, zero));
        assert!((each / promised - 1.0).abs() < 0.03, "stage {zero}: {each}, {promised} promised");
        assert!(needs.check(&Facts::h200(), (LARGE, LARGE)).is_ok());
        match needs.check(&Facts::h200(), (SMALL, SMALL)) {
            Ok(()) => assert!(zero > Zero::Stage0),
            Err(error) => {
                let error = error.to_string();
                let kinds = [
                    "moments 28.",
                    "parameters 14.",
                    "gradients 14.",
                    "half-precision copies 7.",
                    "activations ",
                ];
                assert!(zero == Zero::Stage0 && kinds.iter().all(|kind| error.contains(kind)), "{error}");
                assert!(error.ends_with("44.00 GiB of 44.00 GiB free"), "{error}");
            }
        }
    }
}
