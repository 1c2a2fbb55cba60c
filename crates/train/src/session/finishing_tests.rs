//! Plans that prepare images by themselves, as those of a GPU do.

use crate::{Session, TrainError};
use comm::Communicator;
use config::sets;
use config::{Device as Chosen, Precision, Preset, Raw, Shares};
use devices::Device;
use devices::finishing::Finishing;
use devices::program::{program, program_with};
use testing::Folder;

/// CIFAR-10 in its binary form, with images of smooth noise.
fn cifar(folder: &Folder) -> String {
    let records = |count: usize, seed: usize| -> Vec<u8> {
        let byte = |i: usize, at: usize| ((i * 37 + at * (i % 7 + 1) / 5 + seed) % 251) as u8;
        (0..count)
            .flat_map(|i| [(i % 10) as u8].into_iter().chain((0..3072).map(move |at| byte(i, at))))
            .collect()
    };
    folder.file("data_batch_1.bin", records(45, 3));
    folder.file("test_batch.bin", records(19, 8));
    format!("cifar10:{}", folder.0.display())
}

/// Losses of a few steps, and of an evaluation.
fn losses(raw: &Raw) -> Result<Vec<f64>, TrainError> {
    let (run, sets) = sets::resolve(raw, 1)?;
    losses_of(Session::<f32>::new(run, sets)?)
}

/// The same of plans that were made for a GPU, on the CPU.
fn losses_of_a_gpus_plans(raw: &Raw) -> Result<Vec<f64>, TrainError> {
    let (run, sets) = sets::resolve(&Raw { device: Some(Chosen::Cuda), ..raw.clone() }, 1)?;
    let finishing = Finishing::of::<f32>(&run, &sets, true)?.unwrap();
    let program = program_with::<f32>(&run, run.batch, Some(&finishing))?;
    assert!(program.last.steps.iter().any(|step| matches!(step.op, graph::Op::Prepare { .. })));
    let executor = cpu::Executor::<f32>::new(program, cpu::Options::alone(2, run.seed))?;
    let mut device: Box<dyn Device<f32>> = Box::new(executor);
    finishing.fill(&mut *device, &sets)?;
    let (world, shares) = (Communicator::solo(), Shares::equal(run.batch, 1));
    losses_of(Session::over(run, sets, world, shares, device).finishing(Some(finishing)))
}

fn losses_of(mut session: Session<f32>) -> Result<Vec<f64>, TrainError> {
    let mut losses = Vec::new();
    for step in 0..4 {
        session.step(step)?;
        losses.extend(session.result()?.map(|finished| finished.result.score.loss));
    }
    losses.push(session.evaluate(|_, _| {})?.loss);
    Ok(losses)
}

fn small(data: &str) -> Raw {
    Raw {
        model: Some("vit-nano/8".into()),
        data: Some(data.into()),
        image_size: Some(48),
        batch_size: Some(6),
        steps: Some(4),
        precision: Some(Precision::Fp32),
        ..Raw::default()
    }
}

#[test]
fn small_sets_lie_on_the_gpu() {
    let folder = Folder::new("resident");
    let raw = Raw { device: Some(Chosen::Cuda), ..small(&cifar(&folder)) };
    let (run, sets) = sets::resolve(&raw, 1).unwrap();
    let finishing = Finishing::of::<f32>(&run, &sets, true).unwrap().unwrap();
    assert_eq!((finishing.train.as_ref().unwrap().resident, finishing.eval.resident), (Some(45), Some(19)));
    let program = program_with::<f32>(&run, run.batch, Some(&finishing)).unwrap();
    for plan in [&program.last, &program.eval] {
        plan.check().unwrap();
        assert!(plan.find("pixels").is_none() && plan.find("choices").is_some());
    }
    assert!(cuda::kernels_of(&program, &cuda::action::Facts::h200(), false).is_ok());
    // Operations on bytes come after the resizing, so the host does that.
    let raw = Raw { augment: Some(Preset::Strong), ..raw };
    let (run, sets) = sets::resolve(&raw, 1).unwrap();
    let finishing = Finishing::of::<f32>(&run, &sets, true).unwrap().unwrap();
    let train = finishing.train.unwrap();
    assert_eq!((train.resident, train.width, finishing.eval.width), (None, 48, 32));
}

/// The CPU runs what was made for a GPU, whose plans prepare images by themselves and have no working memory for the CPU's
/// kernels: the same bits as those of the CPU's own plans in fp32, and about the same in half precision.
#[test]
fn the_cpu_runs_a_gpus_plans() {
    let folder = Folder::new("of-a-gpu");
    let (standard, strong) = (Preset::Standard, Preset::Strong);
    for (data, augment, mixup) in [
        (cifar(&folder), standard, Some(0.8)),
        (cifar(&folder), strong, None),
        ("synthetic".into(), standard, None),
    ] {
        let raw = Raw { augment: Some(augment), mixup, ..small(&data) };
        let own = losses(&Raw { device: Some(Chosen::Cpu), ..raw.clone() }).unwrap();
        assert_eq!(losses_of_a_gpus_plans(&raw).unwrap(), own, "{data}, {augment}");
        let halves = [Precision::Bf16, Precision::Fp16];
        for precision in halves.into_iter().filter(|_| mixup.is_some()) {
            let half = losses_of_a_gpus_plans(&Raw { precision: Some(precision), ..raw.clone() }).unwrap();
            println!("{data}, {augment}: {own:.4?} in fp32, {half:.4?} in {precision}");
            assert!(half != own && half.iter().zip(&own).all(|(a, b)| (a - b).abs() < 2e-2), "{half:?}");
        }
    }
}

/// The same losses as on the CPU, whoever prepares the images: from a set that lies on the GPU, from bytes that come with a
/// batch, with every augmentation.
#[test]
#[ignore = "needs a GPU"]
fn a_gpu_sees_what_the_cpu_sees() {
    let folder = Folder::new("finishing");
    let presets = [Preset::None, Preset::Standard, Preset::Strong];
    for data in [cifar(&folder), "synthetic".into()] {
        for (preset, mixup) in presets.into_iter().flat_map(|preset| [(preset, None), (preset, Some(0.8))]) {
            let on = |device| {
                losses(&Raw { device: Some(device), augment: Some(preset), mixup, ..small(&data) }).unwrap()
            };
            let (cpu, gpu) = (on(Chosen::Cpu), on(Chosen::Cuda));
            println!("{data}, {preset}, mixup {mixup:?}: {cpu:.5?} {gpu:.5?}");
            assert!(cpu.len() == 5 && cpu.iter().zip(&gpu).all(|(a, b)| (a - b).abs() < 1e-3));
        }
    }
}

/// On a GPU all plans but the update begin with bytes; the states of the model keep their places, and with them the
/// first values of parameters.
#[test]
fn plans_for_a_gpu_begin_with_bytes() {
    let raw = Raw { device: Some(Chosen::Cuda), mixup: Some(0.8), ..Raw::default() };
    let (run, sets) = sets::resolve(&raw, 1).unwrap();
    let finishing = Finishing::of::<f32>(&run, &sets, true).unwrap().unwrap();
    let (plain, bytes) = (
        program::<f32>(&run, run.batch).unwrap(),
        program_with::<f32>(&run, run.batch, Some(&finishing)).unwrap(),
    );
    for plan in bytes.plans().into_iter().filter(|plan| !plan.steps.is_empty()) {
        plan.check().unwrap();
        let names: Vec<&str> = plan.inputs.iter().map(|v| plan.values[*v].name.as_str()).collect();
        let begins = names.first() == Some(&"pixels") && names.get(1) == Some(&"choices");
        assert_eq!(begins, plan.name != "update", "{}: {names:?}", plan.name);
        assert!(!names.contains(&"images"));
    }
    let parameters = |program: &graph::Program| {
        let states = program.states.iter().enumerate();
        states.filter(|(_, s)| s.is_parameter()).map(|(i, s)| (i, s.name.clone())).collect::<Vec<_>>()
    };
    assert_eq!(parameters(&plain), parameters(&bytes));
    // Samples are mixed in training alone, and partners of other batches come with them.
    let images = |plan: &graph::Plan| plan.values[plan.find("pixels").unwrap()].ty.shape.0[0];
    assert_eq!((images(&bytes.last), images(&bytes.eval)), (run.batch + 2, run.batch));
    assert!(cuda::kernels_of(&bytes, &cuda::action::Facts::h200(), false).is_ok());
    let cpu = Raw { device: Some(Chosen::Cpu), ..raw };
    let (run, sets) = sets::resolve(&cpu, 1).unwrap();
    assert!(Finishing::of::<f32>(&run, &sets, true).unwrap().is_none());
}
