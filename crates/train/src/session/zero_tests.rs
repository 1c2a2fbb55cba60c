//! Checkpoints of states that ranks divide: of any stage and number of ranks, for any other.

use super::Session;
use crate::error::TrainError;
use crate::saver::{Order, Saver};
use comm::Communicator;
use config::{Raw, Resolved, ShardGroup, Shares, sets};
use devices::device::{Device, Seat, open};
use formats::checkpoint::{Checkpoint, Checkpoints, Progress};
use formats::tensors::Reader;
use graph::touched::{Bytes, Touched};
use graph::{DType, Held, Loss, Mixed, Program, Settings, StateId, Zero};
use std::collections::BTreeMap;
use std::path::Path;
use testing::Folder;

/// Images of a step, of all ranks.
const BATCH: usize = 12;

/// A run, whatever ranks divide; the CPU computes in half precision for tests alone.
#[derive(Clone)]
pub(super) struct Case {
    pub raw: Raw,
    pub mixed: Option<Mixed>,
}

const BF16: Mixed = Mixed { half: DType::Bf16, residual: DType::F32 };

pub(super) fn raw(optimizer: &str) -> Raw {
    Raw {
        model: Some("vit-nano/8".into()),
        image_size: Some(16),
        train_samples: Some(48),
        test_samples: Some(12),
        steps: Some(8),
        threads: Some(1),
        workers: Some(1),
        seed: Some(5),
        lr: Some(1e-3),
        dropout: Some(0.1),
        ema: Some(0.9),
        optimizer: Some(optimizer.into()),
        ..Raw::default()
    }
}

/// The plans of a stage, for each of so many ranks.
fn program(run: &Resolved, mixed: Option<Mixed>, zero: Zero) -> Program {
    let target = cpu::Target { threads: 1 };
    let settings = Settings {
        group: &|state| run.group(&state.name),
        recompute: run.recompute,
        max_grad_norm: run.clip,
        ema: run.ema,
        mixed,
        loss_scale: run.loss_scaling(),
        mesh: run.mesh(),
        communication: graph::Communication { bucket: 9000, ..run.communication() },
        zero,
        ..Settings::plain(run.optimizer, &target)
    };
    let loss = Loss { smoothing: run.label_smoothing, mixed: run.augmentation.mixes() };
    graph::compile(run.network.build(run.batch, loss, DType::F32).unwrap(), &settings).unwrap()
}

pub(super) fn session(case: &Case, zero: Zero, world: Communicator) -> Session<f32> {
    let ranks = world.size();
    let raw = Raw { batch_size: Some(BATCH / ranks), zero: Some(zero), ..case.raw.clone() };
    let (run, sets) = sets::resolve(&raw, ranks).unwrap();
    let seat = Seat { world: world.clone(), ..Seat::alone() };
    let device: Box<dyn Device<f32>> = open(&run, program(&run, case.mixed, zero), &seat).unwrap();
    let shares = Shares::equal(BATCH / ranks, ranks);
    Session::over(run, sets, world, shares, device)
}

/// Does `work` on each of so many ranks.
pub(super) fn among<R: Send>(ranks: usize, work: impl Fn(Communicator) -> R + Sync) -> Vec<R> {
    let options = comm::Options { comm: Some(comm::Backend::Threads), ranks: Some(ranks), timeout: None };
    let Ok(comm::Start::Threads(members)) = comm::start(&options, |_| {}) else { panic!("threads") };
    let worlds = members.iter().map(|member| member.world.clone());
    std::thread::scope(|scope| {
        let threads: Vec<_> = worlds.map(|world| scope.spawn(|| work(world))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Runs steps; returns their losses.
pub(super) fn steps(session: &mut Session<f32>, steps: std::ops::Range<u64>) -> Vec<f64> {
    let step = |step| {
        session.step(step).unwrap();
        session.result().unwrap().unwrap().result.score.loss
    };
    steps.map(step).collect()
}

/// Saves as the loop does: rank 0 writes, the others give their parts, and steps go on meanwhile.
fn save(session: &mut Session<f32>, folder: &Path, step: u64) -> Saver<f32> {
    let (progress, checkpoints) = (Progress { step, ..Progress::default() }, Checkpoints::of_run(folder, 9));
    let (config, metrics) = ("{}".to_string(), vec![]);
    let order = Order { checkpoints, progress, config, best: false, metrics, choices: None };
    let mut saver = Saver::new(session).unwrap();
    saver.take(session, step).unwrap();
    saver.write(session, Some(order).filter(|_| session.world().rank() == 0)).unwrap();
    saver
}

/// Goes on where the latest checkpoint was made, as the loop does: rank 0 reads, the others follow.
fn resume(session: &mut Session<f32>, folder: &Path) -> Result<(), TrainError> {
    if session.world().rank() == 0 {
        let latest = Checkpoints::of_run(folder, 9).latest()?;
        session.restore(Checkpoint::open(&latest)?)?;
    }
    session.follow_first()
}

/// Names, shapes and bits of a file's tensors, in their order.
fn tensors(folder: &Path) -> Vec<(String, Vec<usize>, Vec<u32>)> {
    let path = Checkpoints::of_run(folder, 9).latest().unwrap();
    let mut tensors = vec![];
    let reader = Reader::open(&path).unwrap();
    reader
        .each(|name, shape, values: Vec<f32>| {
            tensors.push((name, shape, values.into_iter().map(f32::to_bits).collect()));
        })
        .unwrap();
    tensors
}

/// Trains on ranks that divide states, saves, and goes on at other stages on other numbers of ranks: what they begin with is what was
/// saved, to the bit, and they go on as a run that nothing disturbed.
fn goes_on_anywhere(name: &str, optimizer: &str, mixed: Option<Mixed>, tolerance: f64) {
    let folder = Folder::new(&format!("zero-{name}"));
    let case = Case { raw: raw(optimizer), mixed };
    let whole = among(4, |world| {
        let mut session = session(&case, Zero::Stage3, world);
        let states = &session.device().program().states;
        assert!(states.iter().any(|state| matches!(state.held, Held::Of { .. }) && state.is_parameter()));
        let mut losses = steps(&mut session, 0..4);
        let mut saver = save(&mut session, &folder.0, 4);
        losses.extend(steps(&mut session, 4..8));
        saver.finish(true).unwrap();
        (losses, session.weights().unwrap())
    });
    assert!(whole[0].1.values().all(|tensor| tensor.data.len() == tensor.shape.iter().product::<usize>()));
    let saved = tensors(&folder.0);
    for (zero, ranks, group) in [
        (Zero::Stage0, 1, None),
        (Zero::Stage2, 3, None),
        (Zero::Stage1, 2, None),
        (Zero::Stage3, 4, None),
        (Zero::Stage3, 4, Some(ShardGroup::Ranks(2))),
        (Zero::Stage1, 6, Some(ShardGroup::Ranks(3))),
    ] {
        let case = Case { raw: Raw { shard_group: group, ..case.raw.clone() }, ..case.clone() };
        let again = Folder::new(&format!("zero-{name}-again"));
        let resumed = among(ranks, |world| {
            let mut session = session(&case, zero, world);
            resume(&mut session, &folder.0).unwrap();
            let _saver = save(&mut session, &again.0, 4);
            (steps(&mut session, 4..8), session.weights().unwrap())
        });
        let (losses, weights) = &resumed[0];
        let what = format!("{name}: stage {zero} on {ranks} ranks in groups of {group:?}");
        assert!(tensors(&again.0) == saved, "{what}: what was loaded is not what was saved");
        for (loss, undisturbed) in losses.iter().zip(&whole[0].0[4..]) {
            assert!((loss / undisturbed - 1.0).abs() < tolerance, "{what}: {losses:?}, not {:?}", whole[0].0);
        }
        if (zero, ranks, group) == (Zero::Stage3, 4, None) {
            assert_eq!(losses[..], whole[0].0[4..], "{what}");
            assert!(*weights == whole[0].1, "{what}: other weights at the end");
        }
    }
}

#[test]
fn checkpoints_of_shards_fit_any_stage_and_ranks() {
    goes_on_anywhere("adamw", "adamw", None, 1e-5);
}

#[test]
fn checkpoints_of_shards_fit_any_stage_and_ranks_in_bf16() {
    goes_on_anywhere("adamw-bf16", "adamw", Some(BF16), 1e-2);
}

#[test]
fn checkpoints_of_whole_matrices_with_one_owner_fit_too() {
    goes_on_anywhere("muon", "muon", None, 1e-5);
}

/// Weights of `--init` that rank 0 alone has: all ranks get their parts, and averages begin equal to them.
#[test]
fn ranks_get_their_parts_of_first_weights() {
    let folder = Folder::new("zero-init");
    let case = |raw: Raw| Case { raw, mixed: Some(BF16) };
    let (first, other) = (case(Raw { seed: Some(9), ..raw("adamw") }), raw("adamw"));
    among(1, |world| drop(save(&mut session(&first, Zero::Stage0, world), &folder.0, 1)));
    let of = |tensors: Vec<(String, Vec<usize>, Vec<u32>)>| -> BTreeMap<String, Vec<u32>> {
        tensors.into_iter().map(|(name, _, bits)| (name, bits)).collect()
    };
    let (saved, again) = (of(tensors(&folder.0)), Folder::new("zero-init-again"));
    let init = Checkpoints::of_run(&folder.0, 9).latest().unwrap();
    for zero in Zero::ALL {
        among(2, |world| {
            let mut session = session(&case(Raw { init: Some(init.clone()), ..other.clone() }), zero, world);
            session.load_init().unwrap();
            session.follow_first().unwrap();
            drop(save(&mut session, &again.0, 1));
        });
        let begun = of(tensors(&again.0));
        for (name, bits) in &saved {
            assert!(begun[name] == *bits, "stage {zero}: {name}");
        }
    }
}

/// Every element is given once, whoever else holds it.
#[test]
fn parts_that_are_given_cover_each_tensor() {
    for (ranks, group) in [(3, None), (6, Some(ShardGroup::Ranks(3)))] {
        let zero = Some(Zero::Stage3);
        let raw = Raw { batch_size: Some(4), shard_group: group, zero, ..raw("adamw") };
        let (run, _) = sets::resolve(&raw, ranks).unwrap();
        let program = program(&run, None, Zero::Stage3);
        for (index, state) in program.states.iter().enumerate() {
            let id = StateId(index as u32);
            if super::shards::is_divided(&program, id) {
                let given = super::shards::given(&program, id);
                let mut elements: Vec<usize> = given.into_iter().flatten().collect();
                elements.sort_unstable();
                assert!(elements.into_iter().eq(0..state.ty.shape.count()), "{}", state.name);
            }
        }
    }
}

/// Copies of states are made beside the steps after them, and only updates wait for that.
#[test]
fn nothing_but_updates_writes_what_checkpoints_hold() {
    for (optimizer, mixed) in [("adamw", None), ("adamw", Some(BF16)), ("muon", None), ("lamb", Some(BF16))] {
        let (run, _) = sets::resolve(&Raw { batch_size: Some(4), ..raw(optimizer) }, 3).unwrap();
        for zero in Zero::ALL {
            let program = program(&run, mixed, zero);
            let states = &program.states;
            let lasting = states.iter().filter(|state| state.role.lasts()).map(|state| match state.held {
                Held::Of { flat, .. } => &states[flat.index()],
                _ => state,
            });
            let kept: Vec<Bytes> =
                lasting.filter_map(|state| Bytes::at(state.home, state.extent())).collect();
            for plan in program.plans() {
                let writes =
                    |step: &Touched| step.writes.iter().any(|bytes| kept.iter().any(|k| k.meets(bytes)));
                let writes = plan.touched().iter().any(writes);
                assert_eq!(writes, plan.name == "update", "{optimizer}, stage {zero}: {}", plan.name);
            }
        }
    }
}
