use super::*;
use graph::graph::Phase;
use graph::plan::{PlanValue, ScratchRange};
use graph::{DType, Role, Type};

/// Makes a copy from the first input to the first output of every step, and one zeroing for merged optimizers. A norm's gradient
/// leaves parts of the sums that are its other outputs; a zeroing of as many bytes as there are sums makes them.
struct Fake;

/// Bytes of parts that a sum has.
const PARTS: usize = 1 << 20;

impl Maker for Fake {
    fn parts(&self, op: &Op, _: &[Operand], outputs: &[Operand], _: &Facts) -> usize {
        if matches!(op, Op::LayerNormGrad { .. }) { PARTS * (outputs.len() - 1) } else { 0 }
    }

    fn sums(&self, sums: &[PartialSum], _: &mut Constants) -> Vec<Action> {
        vec![Action::Zero { at: sums[0].out, bytes: sums.len() }]
    }

    fn actions(&self, cx: &Context<'_>) -> Result<Vec<Action>, CudaError> {
        if let Op::LayerNormGrad { .. } = cx.op {
            let sum = |(i, out): (usize, &Operand)| {
                let (parts, start, out) = (cx.parts + (i * PARTS) as Address, None, out.address);
                Action::Sum(PartialSum { parts, rows: PARTS / 32, stride: 8, columns: 8, start, out })
            };
            let first = Action::Copy { from: cx.parts, to: cx.output(0).address, bytes: cx.inputs.len() };
            return Ok([first].into_iter().chain(cx.outputs[1..].iter().enumerate().map(sum)).collect());
        }
        let from = cx.inputs.first().map_or(cx.scratch, |o| o.address);
        let to = cx.outputs.first().map_or(0, |o| o.address);
        Ok(vec![Action::Copy { from, to, bytes: cx.inputs.len() }])
    }

    fn norm(&self, steps: &[Context<'_>], _: &mut Constants) -> Result<Vec<Action>, CudaError> {
        let [squares, clip, advance] = steps else { return self.actions(&steps[0]) };
        let from = squares.input(0).address + clip.input(0).address;
        Ok(vec![Action::Copy { from, to: advance.output(0).address, bytes: 3 }])
    }

    fn weights(&self, steps: &[Context<'_>]) -> Result<Vec<Action>, CudaError> {
        Ok(vec![Action::Zero { at: steps[0].output(0).address, bytes: steps.len() }])
    }

    fn optimizers(&self, steps: &[Context<'_>], constants: &mut Constants) -> Result<Vec<Action>, CudaError> {
        let at = constants.put(&[0; 24]);
        Ok(vec![Action::Zero { at, bytes: steps.len() }])
    }
}

const ARENA: Address = 0x10_0000;
const REGION: Address = 0x1000_0000;
const STATES: [Address; 3] = [0x20_0000, 0x20_0080, 0x20_0100];

fn bind(plan: &Plan, accumulate: bool) -> Result<Bound, CudaError> {
    let facts = Facts::h200();
    let memory = Memory { arena: ARENA, states: &STATES, header: 0x30_0000, parts: REGION };
    let binder = Binder { memory, accumulate, tf32: false, overlap: false, facts: &facts, maker: &Fake };
    binder.bind(plan, &mut Constants::at(0x40_0000))
}

/// A plan of states `s0`, `s1`, `s2`, to which values and steps are added.
#[derive(Default)]
struct Made(Plan);

impl Made {
    fn new() -> Self {
        let state = |i: usize| {
            let (name, ty) = (format!("s{i}"), Type::new(DType::F32, [8]));
            State { name, ty, role: Role::Gradient, arena: None }
        };
        Made(Plan { states: (0..3).map(state).collect(), mesh: TWO, arena: 4096, ..Plan::default() })
    }

    fn value(&mut self, place: Place) -> usize {
        let (name, ty) = (format!("v{}", self.0.values.len()), Type::new(DType::F32, [8]));
        self.0.values.push(PlanValue { name, ty, place });
        self.0.values.len() - 1
    }

    fn step(&mut self, op: Op, inputs: &[usize], outputs: &[usize]) -> &mut Step {
        let (inputs, outputs, lane) = (inputs.to_vec(), outputs.to_vec(), op.lane());
        let (layer, phase) = ("layer".to_string(), Phase::Backward);
        let (waits, scratch) = (vec![], None);
        self.0.steps.push(Step { op, inputs, outputs, lane, waits, layer, phase, scratch });
        self.0.steps.last_mut().unwrap()
    }
}

fn arena(offset: usize) -> Place {
    Place::Arena(offset)
}

fn state(index: u32) -> Place {
    Place::State(StateId(index))
}

fn copy(from: Address, to: Address, bytes: usize) -> Action {
    Action::Copy { from, to, bytes }
}

fn actions(bound: &Bound) -> Vec<Action> {
    bound.actions.iter().map(|p| p.action.clone()).collect()
}

#[test]
fn operands_have_the_addresses_of_their_places() {
    let mut made = Made::new();
    let (a, b, c) = (made.value(arena(256)), made.value(state(1)), made.value(arena(512)));
    made.step(Op::Add, &[a, b], &[c]);
    made.step(Op::Seed { dtype: DType::F32 }, &[], &[c]).scratch =
        Some(ScratchRange { offset: 1024, bytes: 64 });
    made.step(Op::Assign { state: StateId(2) }, &[c], &[]);
    let bound = bind(&made.0, false).unwrap();
    assert_eq!(
        actions(&bound),
        [
            copy(ARENA + 256, ARENA + 512, 2),
            copy(ARENA + 1024, ARENA + 512, 0),
            copy(ARENA + 512, STATES[2], 1)
        ]
    );
    assert_eq!(bound.addresses, [ARENA + 256, STATES[1], ARENA + 512]);
}

#[test]
fn states_lie_side_by_side_at_borders() {
    let mut made = Made::new();
    assert_eq!(state_addresses(&made.0.states, 1 << 20, 0), [0, 128, 256].map(|offset| (1 << 20) + offset));
    made.0.states[1].arena = Some(512);
    assert_eq!(
        state_addresses(&made.0.states, 1 << 20, 1 << 30),
        [1 << 20, (1 << 30) + 512, (1 << 20) + 128]
    );
}

/// x → gelu → g; sum of state 0 and g, in the state.
fn summed() -> Made {
    let mut made = Made::new();
    let (x, g) = (made.value(arena(0)), made.value(arena(128)));
    let (so_far, sum) = (made.value(state(0)), made.value(state(0)));
    made.step(Op::Gelu, &[x], &[g]);
    made.step(Op::Accumulate, &[so_far, g], &[sum]);
    made
}

#[test]
fn the_first_part_of_a_sum_is_made_in_its_state() {
    let plan = summed().0;
    let bound = bind(&plan, false).unwrap();
    assert_eq!(actions(&bound), [copy(ARENA, STATES[0], 1)]);
    assert_eq!(bound.addresses[1], STATES[0]);
    let adding = bind(&plan, true).unwrap();
    assert_eq!(actions(&adding), [copy(ARENA, ARENA + 128, 1), copy(STATES[0], STATES[0], 2)]);
}

#[test]
fn a_part_that_others_need_stays_where_it_is() {
    let mut used_twice = summed();
    let out = used_twice.value(arena(256));
    used_twice.step(Op::Gelu, &[1], &[out]);
    assert_eq!(bind(&used_twice.0, false).unwrap().actions.len(), 3);

    let mut is_output = summed();
    is_output.0.outputs = vec![1];
    assert_eq!(bind(&is_output.0, false).unwrap().actions.len(), 2);

    let mut of_the_host = summed();
    of_the_host.0.steps.remove(0);
    assert_eq!(bind(&of_the_host.0, false).unwrap().actions.len(), 1);

    let mut other_type = summed();
    other_type.0.values[1].ty.dtype = DType::Bf16;
    assert_eq!(bind(&other_type.0, false).unwrap().actions.len(), 2);
}

#[test]
fn a_state_that_is_read_in_between_is_not_overwritten_early() {
    let mut made = summed();
    let out = made.value(arena(256));
    let reader = made.step(Op::Gelu, &[2], &[out]).clone();
    made.0.steps.pop();
    // Between the maker and the sum: no.
    made.0.steps.insert(1, reader.clone());
    assert_eq!(bind(&made.0, false).unwrap().actions.len(), 3);
    // Before the maker, on the same lane: the order of the lane keeps them apart.
    made.0.steps.swap(0, 1);
    assert_eq!(bind(&made.0, false).unwrap().actions.len(), 2);
    // Before the maker, on another lane: it may still run.
    made.0.steps[0].lane = Lane::Copy;
    assert_eq!(bind(&made.0, false).unwrap().actions.len(), 3);
}

#[test]
fn a_maker_that_works_in_place_is_left_alone() {
    let mut made = summed();
    made.0.steps[0].op = Op::Accumulate;
    let old = made.value(arena(128));
    made.0.steps[0].inputs = vec![old, 0];
    assert_eq!(bind(&made.0, false).unwrap().actions.len(), 2);
}

#[test]
fn lanes_and_waits_are_kept() {
    let mut made = Made::new();
    let values: Vec<usize> = (0..4).map(|i| made.value(arena(128 * i))).collect();
    made.step(Op::Gelu, &[values[0]], &[values[1]]);
    let beside = made.step(Op::Gelu, &[values[1]], &[values[2]]);
    (beside.lane, beside.waits) = (Lane::Copy, vec![0]);
    made.step(Op::Gelu, &[values[0]], &[values[3]]);
    made.step(Op::Gelu, &[values[2]], &[values[1]]).waits = vec![1];
    let bound = bind(&made.0, false).unwrap();
    let seen: Vec<(Lane, Vec<usize>)> = bound.actions.iter().map(|p| (p.lane, p.waits.clone())).collect();
    let compute = Lane::Compute;
    assert_eq!(seen, [(compute, vec![]), (Lane::Copy, vec![0]), (compute, vec![]), (compute, vec![1])]);
}

#[test]
fn waits_of_a_step_without_actions_pass_to_its_neighbours() {
    // On the copy lane something reads x; the forwarded sum waits for it; the next step relies on that.
    let mut made = Made::new();
    let (x, y, g) = (made.value(arena(0)), made.value(arena(128)), made.value(arena(256)));
    let (so_far, sum) = (made.value(state(0)), made.value(state(0)));
    let reader = made.step(Op::Gelu, &[x], &[y]);
    reader.lane = Lane::Copy;
    made.step(Op::Gelu, &[x], &[g]);
    made.step(Op::Accumulate, &[so_far, g], &[sum]).waits = vec![0];
    made.step(Op::Gelu, &[y], &[x]);
    let after = made.step(Op::Gelu, &[sum], &[y]);
    (after.lane, after.waits) = (Lane::Copy, vec![2]);
    let bound = bind(&made.0, false).unwrap();
    assert_eq!(bound.actions.len(), 4);
    assert_eq!(bound.actions[2].waits, [0]);
    assert_eq!((bound.actions[3].lane, &bound.actions[3].waits[..]), (Lane::Copy, &[1][..]));
}

#[test]
fn optimizers_that_follow_each_other_are_merged() {
    let mut made = Made::new();
    let values: Vec<usize> = (0..3).map(|i| made.value(state(i))).collect();
    let control = made.value(arena(0));
    let adamw = Op::AdamW { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.0, lr_scale: 1.0 };
    made.step(Op::SumSquares, &[values[0]], &[control]);
    made.step(adamw.clone(), &[values[0], values[1]], &[values[0]]);
    made.step(Op::Ema { decay: 0.9 }, &[values[2], values[0]], &[values[2]]);
    made.step(adamw, &[values[1], values[0]], &[values[1]]);
    made.step(Op::Gelu, &[control], &[control]);
    let bound = bind(&made.0, false).unwrap();
    assert_eq!(bound.actions.len(), 3);
    assert_eq!(bound.actions[1].action, Action::Zero { at: 0x40_0000, bytes: 3 });
    assert_eq!((bound.actions[1].first, bound.actions[1].step), (1, 3));
    assert_eq!((bound.actions[2].first, bound.actions[2].step), (4, 4));
}

#[test]
fn the_norm_and_what_follows_from_it_are_launched_together() {
    let mut made = Made::new();
    let gradient = made.value(state(0));
    let (squares, control, applied) = (made.value(arena(0)), made.value(arena(128)), made.value(state(1)));
    made.step(Op::SumSquares, &[gradient], &[squares]);
    made.step(Op::Clip { max_norm: None, scaled: false }, &[squares], &[control]);
    made.step(Op::Advance, &[applied, control], &[applied]);
    let bound = bind(&made.0, false).unwrap();
    assert_eq!(actions(&bound), [copy(STATES[0] + ARENA, STATES[1], 3)]);
    assert_eq!((bound.actions[0].first, bound.actions[0].step), (0, 2));
    // Not all of them: each for itself.
    made.0.steps.pop();
    assert_eq!(bind(&made.0, false).unwrap().actions.len(), 2);
}

const TWO: graph::Mesh = graph::Mesh { data: 2, sequence: 1 };

fn all_reduce() -> Op {
    Op::AllReduce { reduction: graph::op::Reduction::Sum, group: TWO.world() }
}

/// Two states are made on the compute lane and travel as one, in their place; then the compute lane goes on with one.
fn exchanging() -> Made {
    let mut made = Made::new();
    let x = made.value(arena(0));
    let before: Vec<usize> = (0..2).map(|i| made.value(state(i))).collect();
    let after: Vec<usize> = (0..2).map(|i| made.value(state(i))).collect();
    let out = made.value(arena(128));
    made.step(Op::Gelu, &[x], &[before[0]]);
    made.step(Op::Gelu, &[x], &[before[1]]);
    made.step(all_reduce(), &before, &after).waits = vec![1];
    made.step(Op::Gelu, &[after[0]], &[out]).waits = vec![2];
    made
}

fn exchanged(bound: &Bound) -> Vec<crate::action::Exchanged> {
    let of = |placed: &Placed| match &placed.action {
        Action::Exchange(exchanged) => Some(exchanged.clone()),
        _ => None,
    };
    bound.actions.iter().filter_map(of).collect()
}

#[test]
fn neighbours_travel_as_one_range_with_the_padding_between_them() {
    let bound = bind(&exchanging().0, false).unwrap();
    let [call] = &exchanged(&bound)[..] else { panic!("{bound:?}") };
    // Eight numbers at one border of 128 bytes, eight at the next.
    assert_eq!((call.send, call.receive), ((STATES[0], 40), (STATES[0], 40)));
    assert_eq!(call.collective, comm::Collective::AllReduce(comm::Reduction::Sum));
    assert_eq!((call.kind, call.bytes(), call.layer.as_str()), (comm::Kind::F32, 160, "layer"));
    let placed: Vec<_> = bound.actions.iter().map(|p| (p.lane, p.waits.clone())).collect();
    let compute = Lane::Compute;
    assert_eq!(placed, [(compute, vec![]), (compute, vec![]), (Lane::Comm, vec![1]), (compute, vec![2])]);
}

#[test]
fn parts_of_a_buffer_are_scattered_and_gathered() {
    let mut made = Made::new();
    let (whole, part) = (made.value(arena(0)), made.value(arena(256)));
    let reduction = graph::op::Reduction::Mean;
    made.0.values[part].ty = Type::new(DType::F32, [4]);
    made.step(Op::ReduceScatter { reduction, group: TWO.world() }, &[whole], &[part]);
    made.step(Op::AllGather { group: TWO.world() }, &[part], &[whole]);
    let max = Op::AllReduce { reduction: graph::op::Reduction::Max, group: TWO.world() };
    made.step(max, &[part], &[part]);
    let calls = exchanged(&bind(&made.0, false).unwrap());
    let ranges: Vec<_> = calls.iter().map(|call| (call.send, call.receive)).collect();
    let (whole, part) = ((ARENA, 8), (ARENA + 256, 4));
    assert_eq!(ranges, [(whole, part), (part, whole), (part, part)]);
    assert_eq!(calls[0].collective, comm::Collective::ReduceScatter(comm::Reduction::Mean));
    assert_eq!(calls[1].collective, comm::Collective::AllGather);
    assert_eq!(calls[2].collective, comm::Collective::AllReduce(comm::Reduction::Max));
}

#[test]
fn values_that_dont_lie_side_by_side_are_refused() {
    let mut made = exchanging();
    made.0.values[2].place = state(2);
    let error = bind(&made.0, false).unwrap_err().to_string();
    let why = "layer: all_reduce takes values that lie side by side, but v2 doesn't follow v1";
    assert_eq!(error, why);
}

#[test]
fn collectives_of_what_can_t_be_summed_are_refused_by_name() {
    let mut made = exchanging();
    made.0.values.iter_mut().for_each(|value| value.ty.dtype = DType::I32);
    let error = bind(&made.0, false).unwrap_err().to_string();
    assert_eq!(error, "layer: the CUDA executor has no kernel for all_reduce of i32, i32");
}

#[test]
fn a_plan_for_other_ranks_is_refused() {
    let plan = exchanging().0;
    let refused = |are| crate::exchange::check_ranks(&plan, are).unwrap_err().to_string();
    let among = "layer: all_reduce is among 2 ranks, but there";
    assert_eq!(refused(None), format!("{among} is no communicator"));
    assert_eq!(refused(Some(1)), format!("{among} is one"));
    assert_eq!(refused(Some(3)), format!("{among} are 3"));
    assert!(crate::exchange::check_ranks(&plan, Some(2)).is_ok());
    assert!(crate::exchange::check_ranks(&summed().0, None).is_ok());
}

const NORM: Op = Op::LayerNormGrad { add: false, sum: false, half: None };

/// Norms' gradients, each with a sum that is added to a state.
fn norms(count: usize) -> Made {
    let mut made = Made::new();
    let x = made.value(arena(0));
    for i in 0..count {
        let (dx, sum) = (made.value(arena(128)), made.value(arena(256 + 128 * i)));
        let (so_far, total) = (made.value(state(i as u32)), made.value(state(i as u32)));
        made.step(NORM, &[x], &[dx, sum]);
        made.step(Op::Accumulate, &[so_far, sum], &[total]);
    }
    made
}

#[test]
fn sums_of_many_steps_are_made_together() {
    let plan = norms(3).0;
    for accumulate in [false, true] {
        let bound = bind(&plan, accumulate).unwrap();
        let parts = |i: usize| REGION + (i * PARTS) as Address;
        let norm = |i: usize| copy(parts(i), ARENA + 128, 1);
        let sums = Action::Zero { at: STATES[0], bytes: 3 };
        assert_eq!(actions(&bound), [norm(0), norm(1), norm(2), sums]);
        assert_eq!(bound.parts, 3 * PARTS);
        let [one, _, _, all] = &bound.actions[..] else { panic!() };
        assert_eq!((one.parts, one.results.len()), ((REGION, PARTS), 1));
        for (sum, to) in all.sums.iter().zip(STATES) {
            assert_eq!((sum.out, sum.start), (to, accumulate.then_some(to)));
        }
        assert_eq!(all.results.len(), 3);
    }
}

#[test]
fn sums_are_made_before_anyone_needs_them() {
    let mut made = norms(2);
    let out = made.value(arena(1024));
    // The first norm's sum, after it was added to its state.
    made.step(Op::Gelu, &[4], &[out]);
    for accumulate in [false, true] {
        let bound = bind(&made.0, accumulate).unwrap();
        let seen = actions(&bound);
        assert_eq!(seen.len(), 4);
        assert_eq!(seen[2..], [Action::Zero { at: STATES[0], bytes: 2 }, copy(STATES[0], ARENA + 1024, 1)]);
    }
    // A sum that someone needs as it is isn't added to its state on the way.
    let mut made = norms(2);
    let out = made.value(arena(1024));
    made.step(Op::Gelu, &[2], &[out]);
    let bound = bind(&made.0, true).unwrap();
    let add = copy(STATES[0], STATES[0], 2);
    assert_eq!(actions(&bound)[1..3], [Action::Zero { at: ARENA + 256, bytes: 1 }, add]);
}

#[test]
fn what_travels_waits_for_its_sums() {
    let mut made = norms(2);
    let after: Vec<usize> = (0..2).map(|i| made.value(state(i))).collect();
    made.step(all_reduce(), &[4, 8], &after).waits = vec![3];
    let bound = bind(&made.0, false).unwrap();
    let [_, _, sums, call] = &bound.actions[..] else { panic!("{bound:?}") };
    assert!(sums.sums.len() == 2 && call.waits.contains(&2));
}

#[test]
fn parts_that_fill_their_memory_are_added_up() {
    let mut made = norms(1);
    for i in 0..20 {
        let (dx, sum) = (made.value(arena(128)), made.value(arena(4096 + 128 * i)));
        made.step(NORM, &[0], &[dx, sum]);
        made.0.outputs.push(sum);
    }
    let bound = bind(&made.0, false).unwrap();
    let made: Vec<usize> = bound.actions.iter().map(|p| p.sums.len()).filter(|sums| *sums > 0).collect();
    assert_eq!(made, [8, 8, 5]);
    assert_eq!(bound.parts, 16 * PARTS);
}

#[test]
fn sums_that_nobody_needs_are_not_made() {
    let mut made = norms(2);
    made.0.steps.pop();
    let bound = bind(&made.0, false).unwrap();
    let [first, second, sums] = &bound.actions[..] else { panic!("{bound:?}") };
    assert_eq!((first.results.len(), second.results.len(), sums.sums.len()), (1, 1, 1));
}

#[test]
fn a_sum_that_is_a_state_is_made() {
    let mut made = Made::new();
    let (x, dx, sum) = (made.value(arena(0)), made.value(arena(128)), made.value(state(1)));
    made.step(NORM, &[x], &[dx, sum]);
    let bound = bind(&made.0, false).unwrap();
    assert_eq!(bound.actions.last().unwrap().sums[0].out, STATES[1]);
}

#[test]
fn a_sum_is_made_before_its_place_is_someones_working_memory() {
    let mut made = Made::new();
    let (x, dx, sum, y) =
        (made.value(arena(0)), made.value(arena(128)), made.value(arena(256)), made.value(arena(384)));
    made.step(NORM, &[x], &[dx, sum]);
    made.step(Op::Gelu, &[x], &[y]);
    made.step(Op::Gelu, &[x], &[y]).scratch = Some(ScratchRange { offset: 200, bytes: 60 });
    made.0.outputs = vec![sum];
    let bound = bind(&made.0, false).unwrap();
    let made: Vec<usize> = bound.actions.iter().map(|placed| placed.sums.len()).collect();
    assert_eq!(made, [0, 0, 1, 0]);
}
