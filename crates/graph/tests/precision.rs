//! Mixed precision: what is a half, what is not, and who reads what.

#[path = "support/simulator.rs"]
mod simulator;
#[path = "support/transformer.rs"]
mod transformer;

use graph::build::{CosineAttention, Linear};
use graph::op::Pooling;
use graph::plan::{Place, PlanValue, Step};
use graph::{Builder, DType, DynamicScale, Init, Key, LossScaling, Mixed, Model, Op, Plan, Program};
use graph::{COPY, Home, Recompute, Role, Settings, State, ValueId, Windows, compile};
use simulator::simulate;
use transformer::{model, settings};

const BF16: Mixed = Mixed { half: DType::Bf16, residual: DType::F32 };
const NARROW: Mixed = Mixed { half: DType::Bf16, residual: DType::Bf16 };
const SCALING: LossScaling =
    LossScaling { initial: 65536.0, dynamic: Some(DynamicScale { window: 1000, hysteresis: 2, min: 1.0 }) };

fn compiled(settings: &Settings<'_>) -> Program {
    let program = compile(model(2), settings).unwrap();
    for plan in program.plans() {
        plan.check().unwrap_or_else(|e| panic!("{}: {e}\n{plan}", plan.name));
        simulate(plan, &vec![1; plan.steps.len()]).unwrap_or_else(|e| panic!("{}: {e}", plan.name));
        let text = plan.to_string();
        assert_eq!(text.parse::<Plan>().unwrap().to_string(), text);
    }
    program
}

fn inputs<'a>(plan: &'a Plan, step: &Step) -> Vec<&'a PlanValue> {
    step.inputs.iter().map(|v| &plan.values[*v]).collect()
}

fn outputs<'a>(plan: &'a Plan, step: &Step) -> Vec<&'a PlanValue> {
    step.outputs.iter().map(|v| &plan.values[*v]).collect()
}

fn casts(plan: &Plan) -> usize {
    plan.steps.iter().filter(|s| matches!(s.op, Op::Cast { .. })).count()
}

#[test]
fn products_read_halves_and_sum_gradients_in_single_precision() {
    for (mixed, recompute) in [(BF16, Recompute::None), (BF16, Recompute::Full), (NARROW, Recompute::None)] {
        let program = compiled(&Settings { mixed: Some(mixed), recompute, ..settings() });
        for plan in [&program.micro, &program.last, &program.eval] {
            for step in plan.steps.iter().filter(|s| s.op.is_matmul()) {
                let logits = step.layer.starts_with("head") && matches!(step.op, Op::Linear { .. });
                let biased = !logits && matches!(step.op, Op::Linear { bias: true, .. });
                let halves = if biased { 3 } else { 2 };
                for value in &inputs(plan, step)[..halves] {
                    assert_eq!(value.ty.dtype, DType::Bf16, "{} of {}", value.name, step.layer);
                }
                let single = logits || matches!(step.op, Op::LinearGradW { .. });
                let dtype = if single { DType::F32 } else { DType::Bf16 };
                assert_eq!(outputs(plan, step)[0].ty.dtype, dtype, "{}", step.layer);
            }
        }
        assert_eq!(casts(&program.last), 0, "the kernels convert as they go");
    }
}

#[test]
fn parameters_and_all_that_is_kept_stay_single() {
    let program = compiled(&Settings { mixed: Some(BF16), ..settings() });
    for state in &program.states {
        let is_copy = state.role == Role::Copy || (state.role == Role::Flat && state.name.ends_with(COPY));
        let dtype = if is_copy { DType::Bf16 } else { DType::F32 };
        assert_eq!(state.ty.dtype, dtype, "{}", state.name);
    }
    let copied: Vec<&str> = program.states.iter().filter_map(|s| s.copies()).collect();
    assert!(copied.contains(&"blocks.0.qkv.weight") && copied.contains(&"head.weight"));
    assert!(
        !copied.contains(&"head.bias")
            && !copied.contains(&"blocks.0.norm1.weight")
            && !copied.contains(&"pos_embed")
    );
}

#[test]
fn the_optimizer_writes_copies_in_place() {
    let program = compiled(&Settings { mixed: Some(BF16), ..settings() });
    let plan = &program.update;
    let updates: Vec<&Step> = plan.steps.iter().filter(|s| matches!(s.op, Op::AdamW { .. })).collect();
    assert!(!updates.is_empty() && updates.iter().all(|s| s.inputs.len() == 7));
    // A copy lies in the buffer of copies at the elements at which its parameter lies in that of parameters.
    let place = |value: usize| match plan.values[value].place {
        Place::State(state) => &program.states[state.index()],
        Place::Arena(_) => panic!("{}", plan.values[value].name),
    };
    let offset = |state: &State, buffer: &State| match (state.home, buffer.home) {
        (Home::Own(at), Home::Own(start)) => (at - start) / state.ty.dtype.bytes(),
        homes => panic!("{homes:?}"),
    };
    let copies: Vec<&State> = program.states.iter().filter(|s| s.role == Role::Copy).collect();
    for copy in &copies {
        let parameter = program.states.iter().find(|s| Some(s.name.as_str()) == copy.copies()).unwrap();
        let update = updates.iter().find(|step| place(step.outputs[3]).overlaps(copy)).unwrap();
        assert_eq!(offset(copy, place(update.outputs[3])), offset(parameter, place(update.outputs[0])));
    }
    assert!(!copies.is_empty());
    assert!(updates.iter().all(|s| outputs(plan, s).iter().all(|v| matches!(v.place, Place::State(_)))));
    assert!(plan.steps.iter().all(|s| !matches!(s.op, Op::Assign { .. })), "nothing is copied");
}

#[test]
fn the_residual_stream_has_a_type_of_its_own() {
    for mixed in [BF16, NARROW] {
        let program = compiled(&Settings { mixed: Some(mixed), ..settings() });
        let plan = &program.last;
        for step in &plan.steps {
            let values = outputs(plan, step);
            match step.op {
                Op::LayerNorm { add: true, .. } => {
                    assert_eq!([values[0], values[1]].map(|v| v.ty.dtype), [mixed.residual, DType::Bf16]);
                    assert_eq!(values[2].ty.dtype, DType::F32);
                }
                Op::LayerNormGrad { half, .. } => {
                    assert_eq!(values[0].ty.dtype, mixed.residual);
                    assert!(half.is_none() || mixed == BF16, "a half needs no copy");
                }
                _ => {}
            }
        }
        let twice = plan.steps.iter().filter(|s| matches!(s.op, Op::LayerNormGrad { half: Some(_), .. }));
        assert_eq!(twice.count() > 0, mixed == BF16);
    }
}

fn stage_of_windows(b: &mut Builder, mut x: ValueId, merge: bool, weight: Init) -> ValueId {
    let layer = |name, out| Linear { name, out, weight, bias: Init::Zeros };
    if merge {
        let merged = b.merge_patches(x);
        let reduced = b.linear_without_bias(merged, layer("reduction", 32));
        x = b.layer_norm("downsample", reduced, 1e-5);
    }
    let windows = Windows { size: [4, 4], shift: [0, 0] };
    let y = b.window_attention(x, &CosineAttention { heads: 2, windows, pretrained: None, weight });
    let width = b.shape(y).last();
    let y = b.linear(y, layer("out", width));
    let x = b.add_norm("norm1", x, y, 1e-5, 0.1, weight);
    let y = b.linear(x, layer("fc1", 64));
    let y = b.gelu(y);
    let y = b.linear(y, layer("fc2", width));
    b.add_norm("norm2", x, y, 1e-5, 0.1, weight)
}

/// Two blocks of a Swin V2 with a merging between them.
fn windows_model() -> Model {
    let build = |training: bool| {
        let mut b = Builder::new(DType::F32, training);
        let images = b.input("images", DType::F32, [2, 3, 32, 32]);
        let targets = b.targets([2], false);
        let weight = Init::Normal { std: 0.02 };
        let layer = |name, out| Linear { name, out, weight, bias: Init::Zeros };
        let patches = b.patch_embedding(images, 4, layer("proj", 16));
        let x = b.reshape(patches, [2, 8, 8, 16]);
        let mut x = b.layer_norm("norm", x, 1e-5);
        for stage in 0..2 {
            x = b.scope(&format!("layers.{stage}"), |b| stage_of_windows(b, x, stage == 1, weight));
        }
        let x = b.layer_norm("last", x, 1e-5);
        let x = b.reshape(x, [2, 16, 32]);
        let x = b.pool(x, Pooling::Mean);
        let logits = b.linear(x, layer("head", 5));
        let (loss, stats) = b.cross_entropy(logits, targets, 0.1);
        b.finish(&[loss, stats]).unwrap()
    };
    Model { train: build(true), eval: build(false), key: Key { batch: 2, height: 32, width: 32 } }
}

#[test]
fn windows_read_halves_and_their_stream_is_written_twice_where_it_is_single() {
    for mixed in [BF16, NARROW] {
        let settings = Settings { mixed: Some(mixed), ema: None, ..settings() };
        let program = compile(windows_model(), &settings).unwrap();
        program.plans().into_iter().for_each(|plan| plan.check().unwrap());
        let plan = &program.last;
        assert_eq!(casts(plan), 0);
        let types = |values: Vec<&PlanValue>| values.iter().map(|v| v.ty.dtype).collect::<Vec<_>>();
        let (half, single) = (DType::Bf16, DType::F32);
        for step in &plan.steps {
            let (inputs, outputs) = (types(inputs(plan, step)), types(outputs(plan, step)));
            match step.op {
                Op::WindowAttention { .. } => assert_eq!(
                    (&inputs[..], &outputs[..]),
                    (&[half, single, single, single, single][..], &[half, single][..])
                ),
                Op::WindowAttentionGrad { .. } => {
                    assert_eq!([inputs[0], inputs[5], inputs[7], outputs[0]], [half; 4]);
                    assert_eq!(outputs[1..], [single; 4]);
                }
                Op::PositionBias { .. } | Op::PositionBiasGrad { .. } => {
                    assert!(inputs.iter().chain(&outputs).all(|dtype| *dtype == single));
                }
                Op::NormAdd { half: twice, .. } => {
                    assert_eq!((inputs[0], outputs[0]), (half, mixed.residual));
                    assert!(twice.is_none() || mixed == BF16, "a half needs no copy");
                }
                Op::NormAddGrad { .. } => {
                    assert_eq!(([inputs[0], outputs[0]], inputs[1]), ([half; 2], single))
                }
                Op::Add | Op::SplitPatches { .. } => assert_eq!(outputs[0], mixed.residual),
                // Of a product's result, or of the stream: as it is.
                Op::LayerNorm { .. } => {
                    let last = step.layer.starts_with("last");
                    assert_eq!((inputs[0], outputs[0]), (if last { mixed.residual } else { half }, half));
                }
                Op::LayerNormGrad { .. } => assert_eq!(inputs[0], outputs[0]),
                _ => {}
            }
        }
        let twice = plan.steps.iter().filter(|s| matches!(s.op, Op::NormAdd { half: Some(_), .. })).count();
        assert_eq!(twice, if mixed == BF16 { 2 } else { 0 }, "what products read, and nothing else");
    }
}

#[test]
fn averages_are_cast_where_they_are_evaluated() {
    let with = compiled(&Settings { mixed: Some(BF16), ..settings() });
    let without = compiled(&Settings { mixed: Some(BF16), ema: None, ..settings() });
    assert!(casts(&with.eval) > 0);
    assert_eq!(casts(&without.eval), 0);
}

#[test]
fn fp16_carries_the_loss_scale_from_seed_to_clip() {
    let mixed = Some(Mixed { half: DType::F16, residual: DType::F32 });
    let program = compiled(&Settings { mixed, loss_scale: Some(SCALING), ..settings() });
    let scale = program.states.iter().position(|s| s.role == Role::LossScale { initial: 65536.0 }).unwrap();
    let reads = |plan: &Plan, step: &Step| {
        inputs(plan, step).iter().any(|v| v.place == Place::State(graph::StateId(scale as u32)))
    };
    let seed = program.last.steps.iter().find(|s| matches!(s.op, Op::Seed { .. })).unwrap();
    assert!(reads(&program.last, seed));
    let update = &program.update;
    let clip = update.steps.iter().find(|s| matches!(s.op, Op::Clip { scaled: true, .. })).unwrap();
    assert!(reads(update, clip));
    let last = update.steps.last().unwrap();
    assert!(matches!(last.op, Op::LossScale { window: 1000, hysteresis: 2, .. }));
    let fixed = LossScaling { initial: 128.0, dynamic: None };
    let program = compiled(&Settings { mixed, loss_scale: Some(fixed), ..settings() });
    assert!(program.update.steps.iter().all(|s| !matches!(s.op, Op::LossScale { .. })));
}
