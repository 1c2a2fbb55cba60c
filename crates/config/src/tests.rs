//! Resolving as a whole: plain runs, each refusal, the record, and the study's three files.

mod arithmetic;
mod limits;
mod peer;

use super::resolved::SCHEMA;
use super::*;
use crate::deepspeed::{DeepSpeed, Verdict};
use crate::schedule::{Drops, Ramp, Schedule, Scheduler};
use graph::{Optimizer, Zero};

const INTRA: &str = include_str!("../tests/fixtures/deepspeed/study-a-intra.json");
const VECTOR: &str = include_str!("../tests/fixtures/deepspeed/study-a-vector.json");
const ZERO2: &str = include_str!("../tests/fixtures/deepspeed/zero2-offload.json");

fn resolve(raw: Raw, world: usize) -> Result<Resolved, String> {
    let facts = Facts::synthetic(&raw).map_err(|e| e.to_string())?;
    raw.resolve(&facts, world).map_err(|e| e.to_string())
}

fn plain(raw: Raw) -> Resolved {
    resolve(raw, 1).unwrap()
}

fn refused(raw: Raw) -> String {
    resolve(raw, 1).unwrap_err()
}

fn file(name: &str, text: &str) -> Raw {
    Raw { deepspeed: Some(DeepSpeed::parse(name, text).unwrap()), ..Raw::default() }
}

#[test]
fn a_plain_run_resolves() {
    let run = plain(Raw::default());
    assert_eq!(run.steps, 3 * 313);
    assert_eq!((run.batch, run.accumulate, run.global_batch()), (64, 1, 64));
    assert_eq!(run.schedule, Schedule::Cosine { peak: 1e-3, min: 0.0, warmup: 46, total: 939 });
    let adamw = Optimizer::AdamW { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.05 };
    assert_eq!((run.optimizer, run.clip, run.label_smoothing), (adamw, Some(1.0), 0.0));
    assert!(run.augmentation.is_none() && run.ema.is_none() && run.breakdown);
    assert_eq!(run.augmentation.mean, [0.5; 3]);
    assert_eq!((run.checkpoint_every, run.keep, run.eval_every, run.log_every), (313, 2, 1, 46));
}

#[test]
fn steps_say_how_long_a_run_is() {
    let run = plain(Raw { steps: Some(10), ..Raw::default() });
    assert_eq!((run.steps, run.epochs), (10, 1));
}

#[test]
fn each_bad_setting_names_its_flag() {
    let raw = Raw::default;
    let cases: Vec<(Raw, &str)> = vec![
        (Raw { batch_size: Some(0), ..raw() }, "--batch-size 0: must be at least 1"),
        (Raw { lr: Some(-1.0), ..raw() }, "--lr -1: must be positive"),
        (Raw { lr: Some(f64::NAN), ..raw() }, "--lr NaN: must be positive"),
        (
            Raw { optimizer: Some("adam".into()), ..raw() },
            "--optimizer adam: is none of adamw, sgd, lamb, muon; did you mean adamw?",
        ),
        (Raw { data: Some("cifar10".into()), ..raw() }, "--data cifar10: names no folder: write cifar10:DIR"),
        (
            Raw { model: Some("vit-ti/5".into()), ..raw() },
            "--model vit-ti/5: patch 5 doesn't divide the 32×32 image",
        ),
        (Raw { dropout: Some(1.0), ..raw() }, "--dropout 1: must lie in 0 ≤ rate < 1"),
        (
            Raw { device: Some(Device::Cuda), precision: Some(Precision::Fp64), ..raw() },
            "--precision fp64: the GPU path has no fp64; use --device cpu",
        ),
        (
            Raw { residual: Some(Residual::Half), ..raw() },
            "--residual half: is for bf16 and fp16, and this run computes in fp32",
        ),
        (
            Raw {
                device: Some(Device::Cuda),
                precision: Some(Precision::Tf32),
                residual: Some(Residual::Fp32),
                ..raw()
            },
            "--residual fp32: is for bf16 and fp16, and this run computes in tf32",
        ),
        (
            Raw { precision: Some(Precision::Tf32), ..raw() },
            "--precision tf32: the CPU computes in fp32 or fp64",
        ),
        (
            Raw { precision: Some(Precision::Fp16), ..raw() },
            "--precision fp16: the CPU computes in fp32 or fp64",
        ),
        (
            Raw { precision: Some(Precision::Bf16), ..raw() },
            "--precision bf16: the CPU computes in fp32 or fp64",
        ),
        (Raw { data_fraction: Some(0.0), ..raw() }, "--data-fraction 0: must lie in 0 < F ≤ 1"),
        (Raw { ema: Some(1.0), ..raw() }, "--ema 1: must lie in 0 < decay < 1"),
        (Raw { flip: Some(1.5), ..raw() }, "--flip 1.5: must be from 0 to 1"),
        (Raw { mixup: Some(-0.1), ..raw() }, "--mixup -0.1: must be from 0.001 to 1000: or 0, for none"),
        (
            Raw { cutmix: Some(1.0), batch_size: Some(3), ..raw() },
            "--batch-size 3: mixup and cutmix mix images in pairs, so that a rank needs an even number of them",
        ),
        (
            Raw { mean: vec![0.5, 0.5], ..raw() },
            "--mean 0.5,0.5: 2 numbers for 3 channels: give one, or one for each",
        ),
        (Raw { std: vec![0.0], ..raw() }, "--std 0: must be from 0.0001 to 1000, of values from 0 to 1"),
        (
            Raw { eval_resize: Some(16), ..raw() },
            "--eval-resize 16: must be from 32 to 16384: the model reads 32 px of it",
        ),
        (Raw { keep: Some(0), out: Some("run".into()), ..raw() }, "--keep 0: must be at least 1"),
        (Raw { power: Some(2.0), ..raw() }, "--power 2: is for --schedule poly; this run's is cosine"),
        (Raw { min_lr: Some(1.0), ..raw() }, "--min-lr 1: must lie between 0 and the highest rate, 0.001"),
        (
            Raw { resume: Some(None), ..raw() },
            "--resume: which run? Name its folder: --resume DIR, or --out DIR",
        ),
        (
            Raw { resume: Some(Some("a".into())), out: Some("b".into()), ..raw() },
            "--resume a: a run continues in its own folder, and --out is b",
        ),
        (
            Raw { new_head: true, ..raw() },
            "--new-head: there are no weights whose head could be another: add --init WEIGHTS",
        ),
        (
            Raw { epochs: Some(u64::MAX), ..raw() },
            "--epochs 18446744073709551615: more steps than can be counted",
        ),
        (
            Raw { batch_size: Some(usize::MAX), accumulate: Some(2), ..raw() },
            "--batch-size × --accumulate × --ranks: more images than can be counted",
        ),
        (
            Raw { image_size: Some(1 << 62), ..raw() },
            "--model vit-nano/4 on 4611686018427387904 px, 3 channels, 10 classes, 64 images at a time: no memory holds that",
        ),
    ];
    for (raw, expected) in cases {
        assert_eq!(refused(raw), expected);
    }
}

#[test]
fn absurd_sizes_are_refused_before_they_are_multiplied() {
    let huge = 1 << 62;
    for raw in [
        Raw { image_size: Some(huge), ..Raw::default() },
        Raw { image_size: Some(huge), augment: Some(Preset::Strong), ..Raw::default() },
        Raw { batch_size: Some(huge), ..Raw::default() },
        Raw { classes: Some(huge), ..Raw::default() },
        Raw { channels: Some(huge), ..Raw::default() },
        Raw { model: Some(format!("vit-b/{huge}")), image_size: Some(huge), ..Raw::default() },
        Raw { model: Some("vit-b/1".into()), image_size: Some(16_384), ..Raw::default() },
    ] {
        let text = raw.resolve_without_data(1).unwrap_err().to_string();
        assert!(text.ends_with("no memory holds that"), "{text}");
    }
}

const CIFAR: Facts = Facts { train_images: 50_000, test_images: 10_000, classes: 100, channels: 3 };

fn cifar() -> Raw {
    Raw { data: Some("cifar100:/d".into()), ..Raw::default() }
}

#[test]
fn the_data_decides_what_was_not_typed() {
    let run = cifar().resolve(&CIFAR, 1).unwrap();
    assert_eq!((run.network.classes(), run.network.image(), run.steps_per_epoch), (100, 32, 782));
    let folder = Raw { data: Some("folder:/d".into()), model: Some("vit-ti/16".into()), ..Raw::default() };
    assert_eq!(folder.resolve(&CIFAR, 1).unwrap().network.image(), 224);
    let tenth = Raw { data_fraction: Some(0.1), ..cifar() }.resolve(&CIFAR, 1).unwrap();
    assert_eq!((tenth.data.train_images(), tenth.steps_per_epoch), (5_000, 79));
    let wide = Raw { classes: Some(1000), ..cifar() }.resolve(&CIFAR, 1).unwrap();
    assert_eq!((wide.network.classes(), wide.data.facts.classes), (1000, 100));

    let refused = |raw: Raw| raw.resolve(&CIFAR, 1).unwrap_err().to_string();
    assert_eq!(
        refused(Raw { classes: Some(10), ..cifar() }),
        "--classes 10: the data has 100 classes, more than the head would have"
    );
    assert_eq!(refused(Raw { channels: Some(1), ..cifar() }), "--channels 1: the images have 3 channels");
    assert!(
        refused(Raw { train_samples: Some(9), ..cifar() })
            .starts_with("--train-samples 9: only synthetic sets")
    );
    assert_eq!("cifar100:/d".parse::<Source>().unwrap().published(), Some(CIFAR));
}

#[test]
fn presets_augment_and_single_settings_change_them() {
    let standard = plain(Raw { augment: Some(Preset::Standard), ..Raw::default() }).augmentation;
    assert_eq!((standard.train, standard.flip), (Geometry::PadCrop { padding: 4 }, 0.5));
    assert_eq!(standard.eval, Geometry::Resize);
    let strong = Raw { augment: Some(Preset::Strong), erase: Some(0.0), ..Raw::default() };
    let run = plain(strong);
    assert_eq!((run.augmentation.rand_augment, run.augmentation.erase), (Some((2, 9)), 0.0));
    assert_eq!((run.augmentation.mixup, run.augmentation.cutmix, run.label_smoothing), (0.8, 1.0, 0.1));

    let photographs = Raw {
        data: Some("folder:/d".into()),
        augment: Some(Preset::Standard),
        model: Some("vit-ti/16".into()),
        ..Raw::default()
    };
    let augmentation = photographs.resolve(&CIFAR, 1).unwrap().augmentation;
    assert!(matches!(augmentation.train, Geometry::RandomResizedCrop { .. }));
    assert_eq!(augmentation.eval, Geometry::CenterCrop { resize: 256 });
}

#[test]
fn schedules_come_from_flags() {
    let schedule = |raw: Raw| plain(Raw { steps: Some(600), ..raw }).schedule;
    let form = |form| Raw { schedule: Some(form), ..Raw::default() };
    assert_eq!(schedule(form(Form::Constant)), Schedule::Constant { peak: 1e-3, warmup: 0 });
    assert_eq!(
        schedule(Raw { min_lr: Some(1e-5), warmup_steps: Some(Span::Steps(9)), ..form(Form::Linear) }),
        Schedule::Linear { peak: 1e-3, min: 1e-5, warmup: 9, total: 600 }
    );
    assert_eq!(
        schedule(Raw { power: Some(0.9), lr: Some(0.1), ..form(Form::Poly) }),
        Schedule::Poly { peak: 0.1, min: 0.0, power: 0.9, warmup: 30, total: 600 }
    );
    let step = |drops| Schedule::Step { peak: 1e-3, gamma: 0.1, drops, warmup: 30 };
    assert_eq!(schedule(form(Form::Step)), step(Drops::Every(200)));
    let every = Raw { step_every: Some(Span::Epochs(2.0)), ..form(Form::Step) };
    assert_eq!(schedule(every), step(Drops::Every(626)));
    let at = Raw { milestones: vec![Span::Steps(500), Span::Epochs(1.0)], ..form(Form::Step) };
    assert_eq!(schedule(at), step(Drops::At(vec![313, 500])));
}

#[test]
fn a_run_can_be_read_back_bit_for_bit() {
    let raw = Raw {
        lr: Some(0.1 + 0.2),
        augment: Some(Preset::Strong),
        mean: vec![0.485, 0.456, 0.406],
        lr_scale: vec!["head=10".parse().unwrap()],
        schedule: Some(Form::Step),
        cache: Some(Cache::Bytes(5)),
        out: Some("runs/a".into()),
        ..Raw::default()
    };
    for run in
        [plain(raw), plain(Raw { precision: Some(Precision::Fp32), ..zero_off() }), plain(Raw::default())]
    {
        let text = run.to_json().unwrap();
        assert_eq!(Resolved::from_json("config.json", &text).unwrap(), run);
        let error = |text: &str| Resolved::from_json("config.json", text).unwrap_err().to_string();
        let other = text.replacen(&format!("\"schema\": {SCHEMA}"), "\"schema\": 99", 1);
        assert_eq!(error(&other), format!("config.json: has schema 99; this build reads {SCHEMA}"));
        assert_eq!(error("{}"), "config.json: is no record of a run: it has no schema");
        assert!(error(&text[..text.len() / 2]).starts_with("config.json: EOF"));
    }
}

#[test]
fn a_continued_run_must_compute_the_same() {
    let before = plain(Raw { batch_size: Some(32), accumulate: Some(2), ..Raw::default() });
    let same = Raw {
        threads: Some(7),
        out: Some("elsewhere".into()),
        workers: Some(3),
        log_every: Some(5),
        keep: Some(9),
        ..Raw::default()
    };
    // 64 × 1 and 32 × 2 are the same step.
    assert_eq!(plain(same).differences(&before), Vec::<String>::new());
    let other = Raw {
        model: Some("vit-ti/4".into()),
        seed: Some(1),
        batch_size: Some(8),
        optimizer: Some("sgd".into()),
        augment: Some(Preset::Standard),
        ..Raw::default()
    };
    let found = plain(other).differences(&before).join("\n");
    for expected in [
        "model is vit-ti/4, was vit-nano/4",
        "global batch is 8, was 64",
        "seed is 1, was 0",
        "optimizer.type is sgd, was adamw",
        "augmentation.flip is 0.5, was 0.0",
        "schedule.total is 7500, was 939",
    ] {
        assert!(found.contains(expected), "{expected} is not in\n{found}");
    }
    let moved = |path: &str| Raw { data: Some(path.into()), ..Raw::default() }.resolve(&CIFAR, 1).unwrap();
    assert!(moved("cifar100:/a").differences(&moved("cifar100:/b")).is_empty());
    assert_eq!(moved("cifar10:/a").differences(&moved("cifar100:/a")), ["data is cifar10, was cifar100"]);
}

#[test]
fn the_study_vector_file_fits_two_ranks() {
    let expected = "study-a-vector.json: train_batch_size 32 ≠ micro_batch_per_gpu 16 × gradient_accumulation_steps 1 \
                    × 1 rank = 16; it fits 2 ranks (DeepSpeed would have ignored micro_batch_per_gpu, which is not its \
                    key, and taken 32 images per rank)";
    let raw = file("study-a-vector.json", VECTOR);
    assert_eq!(refused(raw.clone()), expected);
    let run = resolve(raw.clone(), 2).unwrap();
    assert_eq!((run.batch, run.accumulate, run.world, run.global_batch()), (16, 1, 2, 32));
    assert!(run.breakdown);
    // A flag for all ranks together settles it on one.
    let run = plain(Raw { global_batch: Some(16), ..raw });
    assert_eq!((run.batch, run.accumulate), (16, 1));
}

#[test]
fn the_study_intra_file_needs_fp32_here() {
    let raw = file("study-a-intra.json", INTRA);
    let expected = "study-a-intra.json:4:24: fp16.enabled true: the CPU computes in fp32; use --precision fp32 to override";
    assert_eq!(refused(raw.clone()), expected);
    let fp32 = Raw { precision: Some(Precision::Fp32), ..raw };
    assert_eq!(plain(fp32.clone()).batch, 64);
    assert_eq!(resolve(fp32.clone(), 2).unwrap().batch, 32);
    assert_eq!(
        refused(Raw { batch_size: Some(16), ..fp32 }),
        "study-a-intra.json: train_batch_size 64 ≠ --batch-size 16 × gradient_accumulation_steps 1 × 1 rank = 16; it fits 4 ranks"
    );
}

/// The file with what can't be had here taken out.
fn zero_off() -> Raw {
    let text = ZERO2.replace("\"stage\": 2", "\"stage\": 0").replace("{ \"enabled\": true }", "{}");
    file("zero2-offload.json", &text)
}

#[test]
fn the_zero_file_is_refused_for_precision_alone() {
    let raw = file("zero2-offload.json", ZERO2);
    assert_eq!(
        refused(raw.clone()),
        "zero2-offload.json:2:24: bf16.enabled true: the CPU computes in fp32; use --precision fp32 to override"
    );
    let fp32 = Raw { precision: Some(Precision::Fp32), ..raw };
    for world in [1, 2] {
        assert_eq!(resolve(fp32.clone(), world).unwrap().zero, Zero::Stage2);
    }
    assert_eq!(resolve(fp32.clone(), 2).unwrap().all_reduce.bucket, 200_000_000);
    let typed = Raw { zero: Some(Zero::Stage1), ..fp32 };
    assert_eq!(resolve(typed, 2).unwrap().zero, Zero::Stage1, "a flag wins");
}

/// The stage may change when a run goes on; ranks have the same.
#[test]
fn a_stage_may_change_when_a_run_continues_but_not_between_ranks() {
    let with = |zero: Zero| resolve(Raw { zero: Some(zero), ..Raw::default() }, 2).unwrap();
    let (one, three) = (with(Zero::Stage1), with(Zero::Stage3));
    assert_eq!(three.differences(&one), Vec::<String>::new());
    assert_eq!(three.differences_among_ranks(&one), ["zero is 3, not 1"]);
    assert_eq!(Resolved::from_json("x", &three.to_json().unwrap()).unwrap(), three);
}

#[test]
fn auto_leaves_the_choice_to_flags_and_defaults() {
    let run = plain(zero_off());
    assert_eq!((run.batch, run.accumulate, run.log_every, run.breakdown), (64, 1, 50, false));
    let adamw = Optimizer::AdamW { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.05 };
    assert_eq!(run.optimizer, adamw);
    let decayed =
        |max, warmup| Scheduler::WarmupDecayLr { min: 0.0, max, warmup, ramp: Ramp::Log, total: 939 };
    assert_eq!(run.schedule, Schedule::DeepSpeed(decayed(1e-3, 46)));
    let flags =
        Raw { lr: Some(0.5), warmup_steps: Some(Span::Steps(7)), weight_decay: Some(0.0), ..zero_off() };
    let run = plain(flags);
    assert_eq!(run.schedule, Schedule::DeepSpeed(decayed(0.5, 7)));
    assert!(matches!(run.optimizer, Optimizer::AdamW { weight_decay: 0.0, .. }));
    let own = plain(Raw { schedule: Some(Form::Constant), ..zero_off() });
    assert_eq!(own.schedule, Schedule::Constant { peak: 1e-3, warmup: 0 });
    let power = refused(Raw { power: Some(2.0), ..zero_off() });
    assert!(
        power.starts_with("--power 2: is for --schedule poly; this run's is WarmupDecayLR of zero2"),
        "{power}"
    );
}

fn with(section: &str, kind: &str, params: &str) -> Raw {
    file("ds.json", &format!("{{\"{section}\": {{\"type\": \"{kind}\", \"params\": {{{params}}}}}}}"))
}

/// AdamW's learning rate and decay, which a file's section for another optimizer doesn't change.
#[test]
fn muon_has_the_rate_and_decay_of_adamw() {
    let muon = |raw: Raw| plain(Raw { optimizer: Some("muon".into()), ..raw });
    let (momentum, nesterov, beta1, beta2, eps) = (0.95, true, 0.9, 0.999, 1e-8);
    let expected = Optimizer::Muon { momentum, nesterov, beta1, beta2, eps, weight_decay: 0.05 };
    for raw in [Raw::default(), with("optimizer", "Lamb", "\"lr\": 0.01"), with("optimizer", "Muon", "")] {
        let run = muon(raw);
        assert_eq!(run.optimizer, expected);
        assert_eq!(run.schedule.at(46), 1e-3);
    }
}

#[test]
fn optimizers_of_the_file_have_deepspeeds_defaults() {
    let optimizer = |kind: &str, params: &str| plain(with("optimizer", kind, params)).optimizer;
    let adamw = |beta1, eps, weight_decay| Optimizer::AdamW { beta1, beta2: 0.999, eps, weight_decay };
    assert_eq!(optimizer("Adam", ""), adamw(0.9, 1e-8, 0.0));
    assert_eq!(
        optimizer("AdamW", "\"betas\": [0.8, 0.999], \"eps\": 1e-6, \"weight_decay\": 0.1"),
        adamw(0.8, 1e-6, 0.1)
    );
    assert_eq!(optimizer("SGD", ""), Optimizer::Sgd { momentum: 0.0, nesterov: false, weight_decay: 0.0 });
    assert_eq!(
        optimizer("SGD", "\"momentum\": 0.9, \"nesterov\": true, \"dampening\": 0"),
        Optimizer::Sgd { momentum: 0.9, nesterov: true, weight_decay: 0.0 }
    );
    let lamb = optimizer("Lamb", "\"max_coeff\": 5, \"min_coeff\": 0.1, \"bias_correction\": true");
    assert!(
        matches!(lamb, Optimizer::Lamb { min_coeff: 0.1, max_coeff: 5.0, weight_decay: 0.0, .. }),
        "{lamb:?}"
    );
    assert_eq!(plain(with("optimizer", "Lamb", "\"lr\": 0.01")).schedule.at(46), 0.01);
    assert_eq!(plain(with("optimizer", "SGD", "")).schedule.at(46), 1e-3, "PyTorch's default");
    assert_eq!(plain(with("optimizer", "SGD", "\"lr\": \"auto\"")).schedule.at(46), 0.03, "ours");
    // Another optimizer by flag leaves the file's parameters aside.
    let sgd = Raw { optimizer: Some("sgd".into()), ..with("optimizer", "AdamW", "\"lr\": 5, \"eps\": 1") };
    assert_eq!(plain(sgd).schedule.at(46), 0.03);
    assert_eq!(
        refused(with("optimizer", "SGD", "\"nesterov\": true")),
        "ds.json: optimizer.params.nesterov true needs optimizer.params.momentum above 0"
    );
}

#[test]
fn schedulers_of_the_file_have_deepspeeds_defaults() {
    let scheduler = |kind: &str, params: &str| match plain(with("scheduler", kind, params)).schedule {
        Schedule::DeepSpeed(scheduler) => scheduler,
        other => panic!("{other}"),
    };
    let ramp = Ramp::Log;
    assert_eq!(scheduler("WarmupLR", ""), Scheduler::WarmupLr { min: 0.0, max: 1e-3, warmup: 1000, ramp });
    assert_eq!(
        scheduler("WarmupLR", "\"warmup_max_lr\": 0.5, \"warmup_type\": \"linear\", \"warmup_num_steps\": 5"),
        Scheduler::WarmupLr { min: 0.0, max: 0.5, warmup: 5, ramp: Ramp::Linear }
    );
    assert_eq!(
        scheduler("WarmupDecayLR", "\"total_num_steps\": 2000"),
        Scheduler::WarmupDecayLr { min: 0.0, max: 0.001, warmup: 1000, ramp, total: 2000 }
    );
    let (peak, min_ratio, cos_min_ratio) = (1e-3, 0.0, 0.0001);
    assert_eq!(
        scheduler("WarmupCosineLR", "\"total_num_steps\": \"auto\", \"warmup_num_steps\": \"auto\""),
        Scheduler::WarmupCosineLr { peak, min_ratio, cos_min_ratio, warmup: 46, ramp, total: 939 }
    );
    let cycle = "\"cycle_min_lr\": 0.1, \"cycle_max_lr\": 1, \"cycle_momentum\": false, \"cycle_first_step_size\": 10";
    let found = Schedule::DeepSpeed(scheduler("OneCycle", cycle));
    assert_eq!([found.at(0), found.at(10), found.at(20), found.at(900)], [0.1, 1.0, 0.1, 0.1]);
    let found = Schedule::DeepSpeed(scheduler("LRRangeTest", ""));
    assert_eq!([found.at(0), found.at(2000)], [0.001, 0.002]);
    let lr = Raw { lr: Some(1.0), ..with("scheduler", "LRRangeTest", "") };
    assert_eq!(refused(lr), "--lr 1: the file's scheduler has no use for it; add --schedule");
}

#[test]
fn explaining_tells_every_key_and_every_setting() {
    let raw = file("study-a-vector.json", VECTOR);
    let facts = Facts::synthetic(&raw).unwrap();
    let explained = raw.explain(&facts, 1);
    assert_eq!(explained.keys.len(), 11);
    assert!(matches!(&explained.keys[0].verdict, Verdict::Refused(why) if why.contains("fits 2 ranks")));
    assert!(explained.refusal.is_some());
    assert!(explained.keys[3..].iter().all(|row| !matches!(row.verdict, Verdict::Refused(_))));

    let explained = raw.explain(&facts, 2);
    assert_eq!(explained.refusal, None);
    let note = |name: &str| explained.settings.iter().find(|note| note.name == name).unwrap();
    assert_eq!(note("batch-size").origin, Origin::File("micro_batch_per_gpu".into()));
    assert_eq!(note("steps").origin, Origin::Derived("3 epochs × 20,000 images / 32".into()));
    assert_eq!(note("lr").origin, Origin::default_value());

    let raw = Raw { precision: Some(Precision::Fp32), ..file("intra.json", INTRA) };
    let explained = raw.explain(&facts, 2);
    let derived = "train_batch_size 64 / (gradient_accumulation_steps 1 × 2 ranks)".to_string();
    let micro = explained.settings.iter().find(|note| note.name == "batch-size").unwrap();
    assert_eq!((micro.value.as_str(), &micro.origin), ("32", &Origin::Derived(derived)));
    assert_eq!(explained.keys[2].verdict, Verdict::Overridden("--precision fp32".into()));
}
