//! UPerNet as published, in mixed precision: what a GPU would do, and in how much memory. Needs no GPU.

use cuda::Needs;
use cuda::action::Facts;
use graph::build::Conv;
use graph::op::Window;
use graph::{Builder, DType, Graph, Group, Init, Key, Loss, Mixed, Model, Optimizer, Plan, Program};
use graph::{Recompute, Settings, ValueId, compile};
use models::upernet::UperNet;

const BATCH: usize = 8;

/// Four stages of Swin V2-B's widths, each a convolution of the one before.
fn stages(b: &mut Builder, images: ValueId) -> [ValueId; 4] {
    let mut x = images;
    [0, 1, 2, 3].map(|i| {
        let (kernel, weight, bias) = (if i == 0 { 4 } else { 2 }, Init::Normal { std: 0.02 }, None);
        let (name, window) = (format!("stage.{i}"), Window { stride: kernel, pad: 0 });
        x = b.conv(x, Conv { name: &name, out: 128 << i, kernel, window, weight, bias });
        x
    })
}

fn graph(training: bool) -> Graph {
    let mut b = Builder::new(DType::F32, training);
    let images = b.input("images", DType::F32, [BATCH, 512, 512, 8]);
    let targets = b.targets([BATCH, 512, 512], false);
    let stages = stages(&mut b, images);
    let ends = UperNet::published(150).finish(&mut b, stages, (512, 512), targets, Loss::default());
    b.finish(&ends).unwrap()
}

fn program() -> Program {
    let key = Key { batch: BATCH, height: 512, width: 512 };
    let model = Model { train: graph(true), eval: graph(false), key };
    let settings = Settings {
        optimizer: Optimizer::AdamW { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.05 },
        max_grad_norm: Some(1.0),
        recompute: Recompute::None,
        group: &|_| Group { lr_scale: 1.0, decays: true },
        ema: None,
        mixed: Some(Mixed { half: DType::Bf16, residual: DType::F32 }),
        loss_scale: None,
        exchange: None,
        scratch: &cuda::scratch,
    };
    compile(model, &settings).unwrap()
}

fn show(plan: &Plan) {
    for step in &plan.steps {
        let types = |list: &[usize]| list.iter().map(|v| plan.values[*v].ty.to_string()).collect::<Vec<_>>();
        println!(
            "{} {:?} → {:?} ({})",
            step.op.name(),
            types(&step.inputs),
            types(&step.outputs),
            step.layer
        );
    }
}

#[test]
fn maps_are_halves_and_hardly_anything_is_cast() {
    let program = program();
    show(&program.last);
    let needs = Needs::of(&program, &Facts::h200(), false).unwrap();
    println!("{needs:?}");
}
