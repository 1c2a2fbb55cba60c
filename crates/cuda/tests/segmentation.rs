//! UPerNet as published, in mixed precision: what a GPU would do, and in how much memory. All but the times need no GPU.

use cuda::action::Facts;
use cuda::{Executor, MemoryNeeds, Options, Which};
use graph::build::Conv;
use graph::op::Window;
use graph::{Builder, DType, Graph, Header, Init, Key, Loss, Mixed, Model, Op, Optimizer, Plan, Program};
use graph::{Settings, ValueId, compile};
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
    b.finish(&ends.values()).unwrap()
}

fn program() -> Program {
    let key = Key { batch: BATCH, height: 512, width: 512 };
    let model = Model { train: graph(true), eval: graph(false), key };
    let target = cuda::Target { half_precision: false, facts: Facts::h200() };
    let settings = Settings {
        max_grad_norm: Some(1.0),
        mixed: Some(Mixed { half: DType::Bf16, residual: DType::F32 }),
        ..Settings::plain(
            Optimizer::AdamW { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.05 },
            &target,
        )
    };
    compile(model, &settings).unwrap()
}

/// Steps of an op, with the types of what they read and write.
fn steps(plan: &Plan, name: &str) -> Vec<String> {
    let types = |list: &[usize]| {
        let types: Vec<String> = list.iter().map(|v| plan.values[*v].ty.to_string()).collect();
        types.join(", ")
    };
    let of = plan.steps.iter().filter(|step| step.op.name() == name);
    of.map(|step| format!("{} → {}", types(&step.inputs), types(&step.outputs))).collect()
}

#[test]
fn maps_are_in_half_precision_and_hardly_anything_is_cast() {
    let program = program();
    let plan = &program.last;
    // Of images, which a backbone takes apart; nothing else is of another type than its reader wants.
    assert_eq!(steps(plan, "cast"), ["f32[8,512,512,8] → bf16[8,512,512,8]"]);
    for op in
        ["conv", "conv_grad_x", "batch_norm", "batch_norm_grad", "resize", "resize_grad", "concat", "slice"]
    {
        let steps = steps(plan, op);
        assert!(steps.len() >= 2, "{op}: {steps:?}");
        let maps = |step: &String| step.rsplit(" → ").next().is_some_and(|out| out.starts_with("bf16[8,"));
        assert!(steps.iter().all(maps), "{op}: {steps:?}");
    }
    for (op, made) in [("moments", "f32[3,"), ("batch_norm_sums", "f32[2,"), ("conv_grad_w", "f32[")] {
        let is_single = |step: &String| step.contains(&format!(" → {made}"));
        assert!(steps(plan, op).iter().all(is_single), "{op}: {:?}", steps(plan, op));
    }
}

/// Nothing has the size of an image and a number for each class.
#[test]
fn logits_of_pixels_take_no_memory() {
    let program = program();
    let largest = program.last.values.iter().map(|value| value.ty.bytes()).max().unwrap();
    // The maps of four levels side by side.
    assert_eq!(largest, BATCH * 128 * 128 * 2048 * 2);
    let needs = MemoryNeeds::of(&program, &Facts::h200(), false).unwrap();
    println!("{needs:?}");
    assert!(needs.arena < 2 << 30, "{needs:?}");
    let coarse = program.eval.values.iter().find(|value| value.name == "head").unwrap();
    assert_eq!(coarse.ty.to_string(), "f32[8,128,128,150]");
    assert!(program.eval.values.iter().all(|value| value.ty.bytes() <= largest));
}

/// cuDNN has the convolutions of three pixels and more, all of one type; others are matmuls.
#[test]
fn convolutions_are_found_by_their_kernels() {
    let program = program();
    let kernels = cuda::kernels_of(&program, &Facts::h200(), false).unwrap();
    assert!(kernels.iter().any(|kernel| kernel.name == "batch_norm<bf16, 8, 32>"));
    assert!(kernels.iter().any(|kernel| kernel.name == "resized_loss_grad_cells<float, bf16, 5>"));
    let of_points = program.last.steps.iter().filter(|step| matches!(step.op, Op::Linear { .. })).count();
    // Three lateral ones, four of the pyramid, two classifiers.
    assert_eq!((of_points, steps(&program.last, "conv").len()), (9, 4 + 6));
}

/// Times of all that takes a while, and the memory.
#[test]
#[ignore = "needs a GPU"]
fn times_of_the_heads() {
    let options = Options { device: 0, seed: 1, deterministic: false, tf32: false, comm: None };
    let mut gpu = Executor::new(program(), options).unwrap();
    let pixels = BATCH * 512 * 512;
    let noise = |i: usize| ((i * 7919) % 2003) as f32 / 1000.0 - 1.0;
    gpu.upload_f32(Which::Last, "images", &(0..8 * pixels).map(noise).collect::<Vec<_>>()).unwrap();
    gpu.upload_i32(Which::Last, "labels", &(0..pixels).map(|i| (i / 97 % 150) as i32).collect::<Vec<_>>())
        .unwrap();
    gpu.upload_f32(Which::Last, "weights", &vec![1.0; pixels]).unwrap();
    let (nominal, learning_rate) = (pixels as f64, 1e-4);
    let header = Header { seed: 1, step: 0, first_sample: 0, learning_rate, nominal };
    let mut times = gpu.profile(Which::Last, &header, 5).unwrap();
    let total: f64 = times.iter().map(|time| time.seconds).sum();
    times.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
    for time in times.iter().filter(|time| time.seconds > 2e-5) {
        let (ms, tera, giga) =
            (1e3 * time.seconds, time.flops / time.seconds / 1e12, time.bytes / time.seconds / 1e9);
        println!("{ms:8.3} ms {tera:7.1} TFLOP/s {giga:7.0} GB/s  {}: {}", time.layer, time.what);
    }
    println!("{:.2} ms in {} actions", 1e3 * total, times.len());
    let mut seconds = f64::INFINITY;
    for _ in 0..10 {
        gpu.synchronise().unwrap();
        let began = std::time::Instant::now();
        gpu.run(Which::Last, &header).unwrap();
        gpu.synchronise().unwrap();
        seconds = seconds.min(began.elapsed().as_secs_f64());
    }
    println!("{:.2} ms as a graph", 1e3 * seconds);
    println!("{:?}\n{:?}", gpu.memory(), gpu.startup());
}
