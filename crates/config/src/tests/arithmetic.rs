//! Devices and precisions: which go together, what a file says of them, and what may change.

use super::*;
use crate::card::Card;
use graph::{DType, Mixed};

fn on_gpu(raw: Raw) -> Raw {
    Raw { device: Some(Device::Cuda), ..raw }
}

fn in_precision(precision: Precision) -> Raw {
    Raw { precision: Some(precision), ..Raw::default() }
}

#[test]
fn each_device_has_its_precisions() {
    let of = |raw: Raw| {
        let run = plain(raw);
        (run.device, run.precision, run.residual, run.loss_scale)
    };
    let (cpu, cuda) = (Device::Cpu, Device::Cuda);
    assert_eq!(of(Raw::default()), (cpu, Precision::Fp32, Residual::Fp32, None));
    assert_eq!(of(in_precision(Precision::Fp64)), (cpu, Precision::Fp64, Residual::Fp32, None));
    assert_eq!(of(on_gpu(Raw::default())), (cuda, Precision::Bf16, Residual::Fp32, None));
    for precision in [Precision::Fp32, Precision::Tf32, Precision::Bf16] {
        assert_eq!(of(on_gpu(in_precision(precision))), (cuda, precision, Residual::Fp32, None));
    }
    let scale = LossScale { initial: 65_536.0, dynamic: true, window: 1000, hysteresis: 2, min: 1.0 };
    let fp16 = on_gpu(in_precision(Precision::Fp16));
    assert_eq!(of(fp16.clone()), (cuda, Precision::Fp16, Residual::Fp32, Some(scale)));
    let half = Raw { residual: Some(Residual::Half), ..fp16 };
    assert_eq!(of(half.clone()), (cuda, Precision::Fp16, Residual::Half, Some(scale)));
    let (half, bf16) = (plain(half), plain(on_gpu(Raw::default())));
    assert_eq!(half.mixed(), Some(Mixed { half: DType::F16, residual: DType::F16 }));
    assert_eq!(bf16.mixed(), Some(Mixed { half: DType::Bf16, residual: DType::F32 }));
    assert_eq!(plain(Raw::default()).mixed(), None);
}

#[test]
fn a_file_says_the_precision_on_a_gpu() {
    let read = |text: &str| on_gpu(file("ds.json", text));
    assert_eq!(plain(on_gpu(file("intra.json", INTRA))).precision, Precision::Fp16);
    assert_eq!(plain(read("{}")).precision, Precision::Bf16);
    assert_eq!(plain(read(r#"{"bf16": {"enabled": false}}"#)).precision, Precision::Fp32);
    let block = r#"{"fp16": {"enabled": true, "loss_scale": 0, "initial_scale_power": 12, "loss_scale_window": 500,
                    "hysteresis": 3, "min_loss_scale": 2}}"#;
    let run = plain(read(block));
    let scale = LossScale { initial: 4096.0, dynamic: true, window: 500, hysteresis: 3, min: 2.0 };
    assert_eq!((run.precision, run.loss_scale), (Precision::Fp16, Some(scale)));
    let fixed = plain(read(r#"{"fp16": {"enabled": true, "loss_scale": 128}}"#)).loss_scale.unwrap();
    assert_eq!((fixed.initial, fixed.dynamic), (128.0, false));
    // A flag wins over the file.
    let flag = plain(Raw { precision: Some(Precision::Tf32), ..read(block) });
    assert_eq!((flag.precision, flag.loss_scale), (Precision::Tf32, None));
    assert_eq!(
        refused(read(r#"{"fp16": {"enabled": true}, "bf16": {"enabled": true}}"#)),
        "ds.json:1:22: fp16.enabled true: bf16.enabled is true as well, and only one of them can be (one more key is \
         refused: `vitesse config explain ds.json` lists all)"
    );
    assert_eq!(
        refused(read(r#"{"fp16": {"enabled": true, "auto_cast": true}}"#)),
        "ds.json:1:41: fp16.auto_cast true: nothing is cast by itself: the plan says what is computed in fp16"
    );
    assert_eq!(
        refused(read(r#"{"fp16": {"enabled": true, "consecutive_hysteresis": true}}"#)),
        "ds.json:1:54: fp16.consecutive_hysteresis true: skipped steps are forgotten when the loss scale changes, not \
         at every good step"
    );
    // The same text on the CPU, where nothing of it holds.
    let cpu = Raw { precision: Some(Precision::Fp32), ..file("ds.json", block) };
    assert_eq!(plain(cpu).loss_scale, None);

    let explained = read(block).explain(&Facts::synthetic(&Raw::default()).unwrap(), 1);
    let setting = |name: &str| {
        let note = explained.settings.iter().find(|note| note.name == name).unwrap();
        (note.value.clone(), note.origin.clone())
    };
    let of = |key: &str| Origin::File(key.to_string());
    assert_eq!(setting("device"), ("cuda".to_string(), Origin::Flag));
    assert_eq!(setting("precision"), ("fp16".to_string(), of("fp16.enabled")));
    assert_eq!(setting("residual"), ("fp32".to_string(), Origin::default_value()));
    let keys = "fp16.loss_scale, fp16.initial_scale_power, fp16.loss_scale_window, fp16.hysteresis, fp16.min_loss_scale";
    let value = "dynamic from 4096 (window 500, hysteresis 3, at least 2)".to_string();
    assert_eq!(setting("loss-scale"), (value, of(keys)));
}

#[test]
fn a_continued_run_may_move_to_another_device_but_not_to_another_precision() {
    let cpu = plain(Raw::default());
    let moved = plain(on_gpu(in_precision(Precision::Fp32)));
    assert_eq!(moved.differences(&cpu), Vec::<String>::new());
    assert_eq!(moved.differences_among_ranks(&cpu), ["device is cuda, not cpu"]);
    let fp16 = plain(on_gpu(in_precision(Precision::Fp16)));
    let found = fp16.differences(&cpu);
    assert_eq!(found[0], "loss_scale.dynamic is true, was nothing");
    assert_eq!(found.last().unwrap(), "precision is fp16, was fp32");
    let half = plain(on_gpu(Raw { residual: Some(Residual::Half), ..Raw::default() }));
    assert_eq!(half.differences(&plain(on_gpu(Raw::default()))), ["residual is half, was fp32"]);

    // What was never said stays as it was.
    let again = |mut typed: Raw, earlier: Raw| {
        typed.compute_again(&earlier, &cpu);
        plain(typed.or(earlier)).precision
    };
    assert_eq!(again(on_gpu(Raw::default()), Raw::default()), Precision::Fp32);
    assert_eq!(again(on_gpu(in_precision(Precision::Bf16)), Raw::default()), Precision::Bf16);
    assert_eq!(again(Raw::default(), on_gpu(Raw::default())), Precision::Bf16);
    // A record from before there were these settings is read.
    let text = cpu.to_json().unwrap();
    let old: serde_json::Map<String, serde_json::Value> = serde_json::from_str(&text).unwrap();
    let old: serde_json::Map<_, _> =
        old.into_iter().filter(|(name, _)| name != "residual" && name != "loss_scale").collect();
    assert_eq!(Resolved::from_json("config.json", &serde_json::json!(old).to_string()).unwrap(), cpu);
}

#[test]
fn weights_are_evaluated_on_the_cpu_unless_flags_say_otherwise() {
    let evaluated = |typed: Raw, trained: Resolved| {
        let raw = Card::of(&trained).under(&typed);
        let run = raw.resolve_for_evaluation(&Facts::synthetic(&raw).unwrap()).unwrap();
        (run.device, run.precision, run.loss_scale.is_some())
    };
    let fp16 = || plain(on_gpu(in_precision(Precision::Fp16)));
    assert_eq!(evaluated(Raw::default(), fp16()), (Device::Cpu, Precision::Fp32, false));
    assert_eq!(evaluated(on_gpu(Raw::default()), fp16()), (Device::Cuda, Precision::Fp16, true));
    let cpu = || plain(Raw::default());
    assert_eq!(evaluated(on_gpu(Raw::default()), cpu()), (Device::Cuda, Precision::Bf16, false));
    let exact = plain(in_precision(Precision::Fp64));
    assert_eq!(evaluated(Raw::default(), exact), (Device::Cpu, Precision::Fp32, false));
}

#[test]
fn measurements_can_be_kept_out_of_the_arithmetic() {
    assert!(!Raw::default().resolve_without_data(1).unwrap().deterministic);
    let typed = Raw { deterministic: true, ..Raw::default() };
    let run = typed.clone().resolve_without_data(1).unwrap();
    assert!(run.deterministic);
    // A run goes on as it was told at its start; and may be told so later.
    assert!(Raw::default().or(typed.clone()).deterministic);
    let before = Raw::default().resolve_without_data(1).unwrap();
    assert!(run.differences(&before).is_empty());
    let refused = Raw { balance: true, ..typed }.resolve_without_data(2).unwrap_err().to_string();
    assert!(refused.contains("--deterministic"), "{refused}");
}
