use super::*;
use graph::graph::Phase;
use graph::plan::{PlanValue, ScratchRange};
use graph::{DType, Flat, Role, StateId, Type};

/// Makes a copy from the first input to the first output of every step, and one zeroing for merged optimizers. A norm's gradient
/// leaves two parts of each of the sums that are its other outputs; a zeroing of as many bytes as there are sums makes them, where the
/// first is or goes on from.
struct Fake;

/// Bytes of parts that a sum has.
const PARTS: usize = 64;

impl Maker for Fake {
    fn sums(&self, sums: &[PartialSum], _: &mut Constants) -> Vec<Action> {
        vec![Action::Zero { at: sums[0].start.unwrap_or(sums[0].out), bytes: sums.len() }]
    }

    fn actions(&self, cx: &StepContext<'_>) -> Result<Vec<Action>, CudaError> {
        if let Op::LayerNormGrad { .. } = cx.op {
            let sum = |(i, out): (usize, &Operand)| {
                let (parts, start, out) = (cx.parts + (i * PARTS) as Address, None, out.address);
                Action::Sum(PartialSum { parts, rows: 2, stride: 8, columns: 8, start, out })
            };
            let first = Action::Copy { from: cx.parts, to: cx.output(0).address, bytes: cx.inputs.len() };
            return Ok([first].into_iter().chain(cx.outputs[1..].iter().enumerate().map(sum)).collect());
        }
        if *cx.op == NOTHING {
            return Ok(vec![]);
        }
        let from = cx.inputs.first().map_or(cx.scratch, |o| o.address);
        let to = cx.outputs.first().map_or(0, |o| o.address);
        Ok(vec![Action::Copy { from, to, bytes: cx.inputs.len() }])
    }

    fn norm(&self, steps: &[StepContext<'_>], _: &mut Constants) -> Result<Vec<Action>, CudaError> {
        let [squares, clip, advance] = steps else { return self.actions(&steps[0]) };
        let from = squares.input(0).address + clip.input(0).address;
        Ok(vec![Action::Copy { from, to: advance.output(0).address, bytes: 3 }])
    }

    fn weights(&self, steps: &[StepContext<'_>]) -> Result<Vec<Action>, CudaError> {
        Ok(vec![Action::Zero { at: steps[0].output(0).address, bytes: steps.len() }])
    }

    fn optimizers(
        &self,
        steps: &[StepContext<'_>],
        constants: &mut Constants,
    ) -> Result<Vec<Action>, CudaError> {
        let at = constants.put(&[0; 24]);
        Ok(vec![Action::Zero { at, bytes: steps.len() }])
    }
}

/// Step without cost.
const NOTHING: Op = Op::Accumulate;

const ARENA: Address = 0x10_0000;
const STATES: [Address; 3] = [0x20_0000, 0x20_0080, 0x20_0400];

fn bind(plan: &Plan) -> Result<Bound, CudaError> {
    let facts = Facts::h200();
    let memory = Addresses { arena: ARENA, states: &STATES, header: 0x30_0000 };
    let binder = Binder { memory, tf32: false, facts: &facts, maker: &Fake, rank: 0 };
    binder.bind(plan, &mut Constants::at(0x40_0000))
}

/// A plan of states `s0`, `s1`, `s2`, to which values and steps are added.
#[derive(Default)]
struct Made(Plan);

impl Made {
    fn new() -> Self {
        let state = |i: usize| {
            let (name, ty) = (format!("s{i}"), Type::new(DType::F32, [8]));
            State { name, ty, role: Role::Gradient, home: Home::Own(128 * i), held: graph::Held::Whole }
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
        let (joined, left, waits, after, scratch, parts) = (false, false, vec![], vec![], None, None);
        let step =
            Step { op, inputs, outputs, lane, joined, waits, left, after, layer, phase, scratch, parts };
        self.0.steps.push(step);
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
    let bound = bind(&made.0).unwrap();
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
fn states_lie_where_they_are_at_home() {
    let mut made = Made::new();
    assert_eq!(
        state_addresses(&made.0.states, (Mesh::default(), 0), 1 << 20, 0),
        [0, 128, 256].map(|offset| (1 << 20) + offset)
    );
    made.0.states[1].home = Home::Arena(512);
    assert_eq!(
        state_addresses(&made.0.states, (Mesh::default(), 0), 1 << 20, 1 << 30),
        [1 << 20, (1 << 30) + 512, (1 << 20) + 256]
    );
}

/// What is left under way has the states that it works on, and who waits for it says so, even a step that does nothing.
#[test]
fn what_plans_leave_is_kept() {
    let mut made = Made::new();
    let (part, whole, value) = (made.value(state(0)), made.value(state(1)), made.value(arena(0)));
    let group = TWO.world();
    made.step(Op::AllGather { group, views: None }, &[part], &[whole]).left = true;
    made.0.values[whole].ty = Type::new(DType::F32, [16]);
    made.step(NOTHING, &[value], &[value]).after = vec![StateId(1)];
    let bound = bind(&made.0).unwrap();
    assert_eq!(bound.actions[0].left, [StateId(0), StateId(1)]);
    assert_eq!(bound.actions[1].action, Action::Zero { at: 0, bytes: 0 });
    assert_eq!((&bound.actions[1].after[..], &bound.actions[0].after[..]), (&[StateId(1)][..], &[][..]));
}

#[test]
fn lanes_and_waits_are_kept() {
    let mut made = Made::new();
    let values: Vec<usize> = (0..4).map(|i| made.value(arena(128 * i))).collect();
    made.step(Op::Gelu, &[values[0]], &[values[1]]);
    let beside = made.step(Op::Gelu, &[values[1]], &[values[2]]);
    (beside.lane, beside.waits) = (Lane::Side, vec![0]);
    made.step(Op::Gelu, &[values[0]], &[values[3]]);
    made.step(Op::Gelu, &[values[2]], &[values[1]]).waits = vec![1];
    let bound = bind(&made.0).unwrap();
    let seen: Vec<(Lane, Vec<usize>)> = bound.actions.iter().map(|p| (p.lane, p.waits.clone())).collect();
    let compute = Lane::Compute;
    assert_eq!(seen, [(compute, vec![]), (Lane::Side, vec![0]), (compute, vec![]), (compute, vec![1])]);
}

#[test]
fn waits_of_a_step_without_actions_pass_to_its_neighbours() {
    // On the side lane something reads x; a step that is none here waits for it, and the next relies on that.
    let mut made = Made::new();
    let (x, y, g) = (made.value(arena(0)), made.value(arena(128)), made.value(arena(256)));
    let (sum, same) = (made.value(state(0)), made.value(state(0)));
    made.step(Op::Gelu, &[x], &[y]).lane = Lane::Side;
    made.step(Op::Gelu, &[x], &[g]);
    made.step(NOTHING, &[sum], &[same]).waits = vec![0];
    made.step(Op::Gelu, &[y], &[x]);
    let after = made.step(Op::Gelu, &[same], &[y]);
    (after.lane, after.waits) = (Lane::Side, vec![2]);
    let bound = bind(&made.0).unwrap();
    assert_eq!(bound.actions.len(), 4);
    assert_eq!(bound.actions[2].waits, [0]);
    assert_eq!((bound.actions[3].lane, &bound.actions[3].waits[..]), (Lane::Side, &[1][..]));
}

#[test]
fn optimizers_that_are_joined_are_merged() {
    let mut made = Made::new();
    let values: Vec<usize> = (0..3).map(|i| made.value(state(i))).collect();
    let control = made.value(arena(0));
    let adamw = Op::AdamW { beta1: 0.9, beta2: 0.999, eps: 1e-8, flat: Flat::default() };
    let squares = || Op::SumSquares { flats: vec![] };
    made.step(squares(), &[values[0]], &[control]);
    made.step(adamw.clone(), &[values[0], values[1]], &[values[0]]);
    made.step(Op::Ema { decay: 0.9 }, &[values[2], values[0]], &[values[2]]).joined = true;
    made.step(adamw, &[values[1], values[0]], &[values[1]]).joined = true;
    made.step(Op::Gelu, &[control], &[control]);
    let bound = bind(&made.0).unwrap();
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
    made.step(Op::SumSquares { flats: vec![] }, &[gradient], &[squares]);
    made.step(Op::Clip { max_norm: None, scaled: false }, &[squares], &[control]).joined = true;
    made.step(Op::Advance, &[applied, control], &[applied]).joined = true;
    let bound = bind(&made.0).unwrap();
    assert_eq!(actions(&bound), [copy(STATES[0] + ARENA, STATES[1], 3)]);
    assert_eq!((bound.actions[0].first, bound.actions[0].step), (0, 2));
    // Not all of them: each for itself.
    made.0.steps.pop();
    made.0.steps[1].joined = false;
    assert_eq!(bind(&made.0).unwrap().actions.len(), 2);
}

const TWO: graph::Mesh = graph::Mesh { replica: 1, data: 2, sequence: 1 };

fn all_reduce() -> Op {
    Op::AllReduce { reduction: graph::op::Reduction::Sum, group: TWO.world() }
}

/// Two states are computed and communicated as one range, in place; then the compute lane goes on with one.
fn with_collectives() -> Made {
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

fn call(bound: &Bound) -> Vec<crate::action::CollectiveCall> {
    let of = |placed: &Placed| match &placed.action {
        Action::Collective(call) => Some(call.clone()),
        _ => None,
    };
    bound.actions.iter().filter_map(of).collect()
}

#[test]
fn adjacent_operands_are_one_range_with_the_padding_between_them() {
    let bound = bind(&with_collectives().0).unwrap();
    let [call] = &call(&bound)[..] else { panic!("{bound:?}") };
    // Eight numbers at one border of 128 bytes, eight at the next.
    assert_eq!((call.send, call.receive), ((STATES[0], 40), (STATES[0], 40)));
    assert_eq!(call.collective, comm::Collective::AllReduce(comm::Reduction::Sum));
    assert_eq!((call.kind, call.bytes(), call.layer.as_str()), (comm::ElementType::F32, 160, "layer"));
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
    made.step(Op::ReduceScatter { reduction, group: TWO.world(), views: None }, &[whole], &[part]);
    made.step(Op::AllGather { group: TWO.world(), views: None }, &[part], &[whole]);
    let max = Op::AllReduce { reduction: graph::op::Reduction::Max, group: TWO.world() };
    made.step(max, &[part], &[part]);
    let calls = call(&bind(&made.0).unwrap());
    let ranges: Vec<_> = calls.iter().map(|call| (call.send, call.receive)).collect();
    let (whole, part) = ((ARENA, 8), (ARENA + 256, 4));
    assert_eq!(ranges, [(whole, part), (part, whole), (part, part)]);
    assert_eq!(calls[0].collective, comm::Collective::ReduceScatter(comm::Reduction::Mean));
    assert_eq!(calls[1].collective, comm::Collective::AllGather);
    assert_eq!(calls[2].collective, comm::Collective::AllReduce(comm::Reduction::Max));
}

#[test]
fn values_that_dont_lie_side_by_side_are_refused() {
    let mut made = with_collectives();
    made.0.values[2].place = state(2);
    let error = bind(&made.0).unwrap_err().to_string();
    let why = "layer: all_reduce takes values that lie side by side, but v2 doesn't follow v1";
    assert_eq!(error, why);
}

#[test]
fn collectives_of_what_can_t_be_summed_are_refused_by_name() {
    let mut made = with_collectives();
    made.0.values.iter_mut().for_each(|value| value.ty.dtype = DType::I32);
    let error = bind(&made.0).unwrap_err().to_string();
    assert_eq!(error, "layer: the CUDA executor has no kernel for all_reduce of i32, i32");
}

#[test]
fn a_plan_for_other_ranks_is_refused() {
    let plan = with_collectives().0;
    let refused = |are| crate::collectives::check_ranks(&plan, are).unwrap_err().to_string();
    let among = "layer: all_reduce is among 2 ranks, but there";
    assert_eq!(refused(None), format!("{among} is no communicator"));
    assert_eq!(refused(Some(1)), format!("{among} is one"));
    assert_eq!(refused(Some(3)), format!("{among} are 3"));
    assert!(crate::collectives::check_ranks(&plan, Some(2)).is_ok());
    assert!(crate::collectives::check_ranks(&norms(2).0, None).is_ok());
}

const NORM: Op = Op::LayerNormGrad { add: false, sum: false, half: None };

/// Gradients of norms, whose sums are added up together; all but the first add to those so far.
fn norms(count: usize) -> Made {
    let mut made = Made::new();
    let x = made.value(arena(0));
    let (mut inputs, mut so_far, mut sums) = (vec![], vec![], vec![]);
    for i in 0..count {
        let parts = ScratchRange { offset: 256 + 2 * PARTS * i, bytes: PARTS };
        let (dx, left) = (made.value(arena(128)), made.value(arena(parts.offset)));
        made.step(NORM, &[x], &[dx, left]).parts = Some(parts);
        inputs.push(left);
        so_far.push(made.value(state(i as u32)));
        sums.push(made.value(state(i as u32)));
    }
    inputs.extend(&so_far[1..]);
    let step = made.step(Op::AddUp { starts: (1..count).collect() }, &inputs, &sums);
    (step.lane, step.waits) = (Lane::Side, vec![count - 1]);
    made
}

#[test]
fn sums_of_many_steps_are_made_together() {
    let bound = bind(&norms(3).0).unwrap();
    let norm = |i: usize| copy(ARENA + 256 + (2 * PARTS * i) as Address, ARENA + 128, 1);
    assert_eq!(actions(&bound), [norm(0), norm(1), norm(2), Action::Zero { at: STATES[0], bytes: 3 }]);
    let [one, _, _, all] = &bound.actions[..] else { panic!() };
    assert_eq!((one.results.len(), all.results.len()), (1, 3), "parts are no results");
    assert_eq!((all.lane, &all.waits[..]), (Lane::Side, &[2][..]));
}

#[test]
fn parts_are_left_where_the_plan_says() {
    let refused = |change: &dyn Fn(&mut Plan)| {
        let mut made = norms(2);
        change(&mut made.0);
        bind(&made.0).unwrap_err().to_string()
    };
    let why = "layer: layer_norm_grad leaves partial sums, for which the plan has no place";
    assert!(refused(&|plan| plan.steps[1].parts = None).contains(why));
    let why = "layer: layer_norm_grad leaves other partial sums than the plan has a place for";
    let smaller =
        |plan: &mut Plan| plan.steps[1].parts = Some(ScratchRange { offset: 384, bytes: PARTS / 2 });
    assert!(refused(&smaller).contains(why));
    let elsewhere = |plan: &mut Plan| plan.values[plan.steps[1].outputs[1]].place = arena(640);
    assert!(refused(&elsewhere).contains("leaves partial sums of what is none of its results"));
    let other = |plan: &mut Plan| plan.steps[2].inputs[1] = 0;
    assert!(refused(&other).contains("layer: nobody left parts of sum 1"));
}
