//! Snapshots hold states as they were, however many steps are queued behind them.

use super::memory::{executor, program};
use cuda::{Executor, Which};
use graph::{Header, StateId};

const BATCH: usize = 8;
const IMAGE: usize = 224;

fn step(gpu: &mut Executor, step: u64) {
    let header = Header { seed: 1, step, first_sample: 0, learning_rate: 1e-2, nominal: BATCH as f64 };
    let images: Vec<f32> =
        (0..BATCH * 3 * IMAGE * IMAGE).map(|i| (i as f32 * 0.37 + step as f32).sin()).collect();
    gpu.upload_f32(Which::Last, "images", &images).unwrap();
    gpu.upload_i32(Which::Last, "labels", &[step as i32; BATCH]).unwrap();
    gpu.upload_f32(Which::Last, "weights", &[1.0; BATCH]).unwrap();
    gpu.run(Which::Last, &header).unwrap();
    gpu.run(Which::Update, &header).unwrap();
}

fn values(gpu: &Executor, ids: &[StateId]) -> Vec<Vec<f32>> {
    let value = |id: &StateId| {
        let mut values = vec![0.0; gpu.program().states[id.index()].ty.shape.count()];
        gpu.state_f32(*id, &mut values).unwrap();
        values
    };
    ids.iter().map(value).collect()
}

#[test]
#[ignore = "needs a GPU"]
fn a_snapshot_holds_what_states_were() {
    let mut gpu = executor(program("vit-b/16", IMAGE, BATCH));
    let states = gpu.program().states.iter().enumerate().filter(|(_, state)| state.role.lasts());
    let ids: Vec<StateId> = states.map(|(index, _)| StateId(index as u32)).collect();
    assert_eq!(gpu.prepare_snapshots(&ids).unwrap(), None, "there is room");
    let bytes: usize = ids.iter().map(|id| gpu.program().states[id.index()].ty.bytes()).sum();
    assert!(gpu.memory().copies >= bytes && gpu.memory().copies < bytes + (64 << 20), "{:?}", gpu.memory());
    for number in 0..3 {
        step(&mut gpu, 2 * number);
        let expected = values(&gpu, &ids);
        let mut snapshot = gpu.snapshot().unwrap().unwrap();
        // Two steps are queued before anything is read, and a third while it is.
        step(&mut gpu, 2 * number + 1);
        let reader = std::thread::spawn(move || {
            let read = |index: usize, snapshot: &mut cuda::Snapshot| snapshot.read(index).unwrap().to_vec();
            (0..expected.len()).all(|index| read(index, &mut snapshot) == expected[index])
        });
        step(&mut gpu, 2 * number + 2);
        assert!(reader.join().unwrap(), "snapshot {number}");
    }
    let one = gpu.snapshot().unwrap();
    assert!(gpu.snapshot().is_err(), "one at a time");
    drop(one);
    assert!(gpu.snapshot().is_ok());
}
