//! Mixed precision: what is a half, what is not, and who reads what.

#[path = "support/simulator.rs"]
mod simulator;
#[path = "support/transformer.rs"]
mod transformer;

use graph::plan::{Place, PlanValue, Step};
use graph::{DType, DynamicScale, LossScaling, Mixed, Op, Plan, Program, Recompute, Role, Settings, compile};
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
            for step in plan.steps.iter().filter(|s| s.op.is_product()) {
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
        let dtype = if state.role == Role::Copy { DType::Bf16 } else { DType::F32 };
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
    let with_copies = updates.iter().filter(|s| s.inputs.len() == 7).count();
    assert_eq!(with_copies, program.states.iter().filter(|s| s.role == Role::Copy).count());
    assert!(with_copies < updates.len());
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
