//! A run that fails says where.

use config::Raw;
use config::sets;
use formats::weights;
use models::names::{Convention, Weights};
use train::run::{Events, Summary, train};
use train::{Session, TrainError};

struct Silent;

impl Events for Silent {}

fn raw() -> Raw {
    Raw {
        model: Some("vit-nano/8".into()),
        batch_size: Some(4),
        accumulate: Some(2),
        threads: Some(2),
        train_samples: Some(32),
        test_samples: Some(4),
        steps: Some(20),
        warmup_steps: Some(config::Span::Steps(0)),
        ..Raw::default()
    }
}

fn train_on(raw: &Raw) -> Result<Summary, TrainError> {
    let (run, sets) = sets::resolve(raw, 1)?;
    let alone = comm::Options { comm: Some(comm::Backend::Threads), ranks: Some(1), timeout: None };
    let Ok(comm::Start::Threads(members)) = comm::start(&alone, |_| {}) else { panic!("one rank") };
    train(run, sets, &members[0], &mut Silent)
}

fn session(raw: &Raw) -> Session {
    let (run, sets) = sets::resolve(raw, 1).unwrap();
    Session::new(run, sets).unwrap()
}

fn failure(raw: Raw) -> (TrainError, String) {
    let error = train_on(&raw).unwrap_err();
    let text = error.to_string();
    println!("{text}");
    (error, text)
}

/// Starts from fresh weights that `change` has been at.
fn failure_from(name: &str, change: impl Fn(&mut Weights)) -> (TrainError, String) {
    let mut tensors = session(&raw()).weights().unwrap();
    change(&mut tensors);
    let folder = testing::Folder::new("divergence");
    let path = folder.join(format!("{name}.safetensors"));
    weights::save_as(&path, &tensors, Convention::Timm, &config::card::Card::default(), None).unwrap();
    failure(Raw { init: Some(path), ..raw() })
}

#[test]
fn a_huge_learning_rate_names_a_layer_or_parameter() {
    let (error, text) = failure(Raw { lr: Some(1e25), ..raw() });
    let TrainError::NotFinite { step, culprit: Some(_), .. } = error else { panic!("{text}") };
    assert!(step > 0 && text.starts_with(&format!("step {step}: loss is ")), "{text}");
    assert!(text.ends_with("; parameters are as before the step"), "{text}");
}

#[test]
fn a_poisoned_weight_is_named() {
    let poison = |w: &mut Weights| w.get_mut("blocks.2.mlp.fc1.weight").unwrap().data[3] = f32::NAN;
    let (_, text) = failure_from("nan", poison);
    let expected = "step 0: loss is NaN; parameter blocks.2.mlp.fc1.weight holds NaN before the step (element 3); \
        parameters are as before the step";
    assert_eq!(text, expected);
}

#[test]
fn a_norm_that_overflows_alone_is_told_apart() {
    let (_, text) = failure_from("norm", |w| {
        let head = &mut w.get_mut("head.weight").unwrap().data;
        head.iter_mut().enumerate().for_each(|(i, x)| *x = if i % 7 == 0 { 1e24 } else { -1e24 });
    });
    assert!(text.contains("every gradient is finite, but their norm overflowed"), "{text}");
}
