//! A step allocates nothing. One test, alone in its program, since the counters see every thread.

mod common;

use common::{HEADER, Setup, fill_batch};
use config::Raw;
use config::sets;
use cpu::Which;
use graph::{Header, Loss};
use models::vit::Vit;
use records::Parts;
use testing::Folder;
use testing::allocations::{self, Counting};
use train::Session;
use train::account::Step;
use train::metrics::{Metrics, evaluation_line, step_line};
use train::session::{Evaluation, StepResult};
use train::tensorboard::EventFile;

#[global_allocator]
static ALLOCATOR: Counting = Counting::apart(cpu::matmul::inside);

/// Lets ten steps run after two to settle, and counts.
fn allocates_nothing(what: &str, mut step: impl FnMut(u64)) {
    (0..2).for_each(&mut step);
    let (ours, inside) = (allocations::count(), allocations::count_apart());
    (2..12).for_each(&mut step);
    let ours = allocations::count() - ours;
    let inside = allocations::count_apart() - inside;
    println!("{what}, 10 steps: {ours} allocations by vitesse, {inside} inside gemm");
    assert_eq!(ours, 0, "{what}: allocations in ten steps");
}

#[test]
fn a_step_allocates_nothing() {
    let raw = Raw {
        model: Some("vit-nano/4".into()),
        batch_size: Some(8),
        accumulate: Some(2),
        threads: Some(2),
        dropout: Some(0.1),
        attention_dropout: Some(0.1),
        drop_path: Some(0.1),
        train_samples: Some(100),
        ..Raw::default()
    };
    let (run, sets) = sets::resolve(&raw, 1).unwrap();
    let mut session: Session = Session::new(run, sets).unwrap();
    assert!(allocations::count() > 0, "the counter counts");
    let mut last = None;
    allocates_nothing("training", |step| {
        session.step(step).unwrap();
        last = session.result().unwrap().map(|finished| finished.result);
        session.share_account(false).unwrap();
    });
    recording_allocates_nothing(&last.unwrap());
    averages_and_mixed_labels_allocate_nothing();
}

fn recording_allocates_nothing(result: &StepResult) {
    let folder = Folder::new("allocations");
    let mut metrics = Metrics::create(&folder).unwrap();
    let mut events = EventFile::create(&folder, 0).unwrap();
    let account = Step { parts: vec![Parts::default(); 3], ..Step::default() };
    allocates_nothing("metrics and events", |step| {
        let line = step_line(step, 0, result, &account);
        metrics.step(&line, &account).unwrap();
        metrics.evaluation(&evaluation_line(step, 0, &Evaluation::Images(result.score))).unwrap();
        metrics.sync().unwrap();
        events.draw(&line).unwrap();
        events.flush().unwrap();
    });
}

fn averages_and_mixed_labels_allocate_nothing() {
    let vit = Vit::named("vit-nano/4", 32, 3, 10).unwrap();
    let setup = Setup { loss: Loss { smoothing: 0.1, mixed: true }, ema: Some(0.99), ..Setup::new(8) };
    let mut executor = setup.executor::<f32>(&vit);
    allocates_nothing("averages and mixed labels", |step| {
        fill_batch(&mut executor, Which::Last, 0, 10);
        let batch = executor.batch(Which::Last).unwrap();
        batch.partners.unwrap().fill(3);
        batch.mix.unwrap().fill(0.7);
        let header = Header { step, nominal: 8.0, learning_rate: 1e-3, ..HEADER };
        executor.run(Which::Last, &header).unwrap();
        executor.run(Which::Update, &header).unwrap();
    });
}
