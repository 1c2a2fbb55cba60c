//! How many launches a step has.

use cuda::action::{Action, Constants, Facts, Launch};
use cuda::bind::{Addresses, Binder, Placed, Steps, state_addresses};
use graph::{DType, Loss, Mesh, Mixed, Model, Optimizer, Plan, Program, Settings, compile};
use models::swin::Swin;
use models::vit::Vit;

const LOSS: Loss = Loss { smoothing: 0.1, mixed: false };
const BF16: Mixed = Mixed { half: DType::Bf16, residual: DType::F32 };

/// ViT-Ti/4 of 32 px in bf16, as the benchmarks have it.
fn vit_ti(batch: usize, accumulates: bool) -> Program {
    let vit = Vit::named("vit-ti/4", 32, 3, 10).unwrap();
    compiled(vit.build(batch, LOSS, DType::F32).unwrap(), Some(BF16), accumulates)
}

fn compiled(model: Model, mixed: Option<Mixed>, accumulates: bool) -> Program {
    let target = cuda::Target { half_precision: mixed.is_some(), facts: Facts::h200() };
    let settings = Settings {
        max_grad_norm: Some(1.0),
        mixed,
        accumulates,
        ..Settings::plain(
            Optimizer::AdamW { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.05 },
            &target,
        )
    };
    compile(model, &settings).unwrap()
}

/// Kernels of a list by their names, without template arguments; matmuls by one of their own.
fn names(program: &Program, plan: &Plan) -> Vec<String> {
    let facts = Facts::h200();
    let states = state_addresses(&program.states, (Mesh::default(), 0), 1 << 41, 1 << 40);
    let memory = Addresses { arena: 1 << 40, states: &states, header: 1 << 42 };
    let binder = Binder { memory, tf32: false, facts: &facts, maker: &Steps, rank: 0 };
    let bound = binder.bind(plan, &mut Constants::at(1 << 43)).unwrap();
    let name = |launch: &Launch| launch.kernel.name.split('<').next().unwrap().to_string();
    let names = |placed: &Placed| match &placed.action {
        Action::Launch(launch) => vec![name(launch)],
        Action::Attention(attention) => attention.own.iter().map(name).collect(),
        Action::Matmul(_) => vec!["matmul".into()],
        other => panic!("{other:?}"),
    };
    bound.actions.iter().flat_map(names).collect()
}

/// Every sum over rows is made by the kernel that makes what is summed, but for two: nothing of ours makes the gradients of
/// the patches' embedding and of the logits with sums.
#[test]
fn sums_have_hardly_a_launch_of_their_own() {
    // Of programs for one micro-step, and for several: the first of those, and others.
    for (accumulates, accumulate) in [(false, false), (true, false), (true, true)] {
        let program = vit_ti(128, accumulates);
        let names = names(&program, if accumulate { &program.last } else { &program.first });
        let count = |name: &str| names.iter().filter(|n| *n == name).count();
        println!("accumulating {accumulate}: {} launches", names.len());
        assert_eq!((count("column_sum"), count("sum_parts")), (2, 3));
        // The loss's statistics, and the two parameters that make positions.
        assert_eq!(count("add"), if accumulate { 3 } else { 0 });
        // Three of the class token, and four at a time of eleven blocks and a quarter.
        assert_eq!(count("weights"), 12);
        assert!(names.len() < 211);
    }
    let program = vit_ti(128, false);
    assert_eq!(names(&program, &program.update).len(), 3);
}

/// Swin V2-Ti with stochastic depth: every block has one attention each way, and no value is converted or moved by a launch of its own.
#[test]
fn a_block_of_swin_is_few_launches() {
    let swin = Swin { drop_path: 0.2, ..Swin::named("swinv2-ti/w8", [256, 320], 3, 10).unwrap() };
    let narrow = Mixed { half: DType::F16, residual: DType::F16 };
    for (mixed, attention) in [
        (Some(BF16), "window_attention"),
        (Some(narrow), "window_attention"),
        (None, "plain_window_attention"),
    ] {
        let program = compiled(swin.build(4, LOSS, DType::F32).unwrap(), mixed, true);
        for accumulate in [false, true] {
            let names = names(&program, if accumulate { &program.last } else { &program.first });
            let count = |name: &str| names.iter().filter(|n| *n == name).count();
            println!("{mixed:?}, accumulating {accumulate}: {} launches", names.len());
            assert_eq!([count(attention), count("position_bias"), count("norm_add")], [12, 12, 24]);
            assert_eq!(
                [count("position_bias_grad"), count("norm_add_grad"), count("merge_patches")],
                [12, 24, 3]
            );
            assert_eq!(count("window_attention_grad"), if mixed.is_some() { 12 } else { 0 });
            assert_eq!(count("cast"), 0, "kernels convert as they go");
        }
        assert_eq!(names(&program, &program.eval).iter().filter(|n| *n == attention).count(), 12);
    }
}
