//! A GPU's sensors, by a stand-in for NVML.

use devices::sensors::Sampler;
use std::path::Path;
use std::time::{Duration, Instant};

#[test]
fn sensors_are_asked_in_the_background() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fake_nvml/fake_nvml.c");
    let folder = testing::Folder::new("sensors");
    let path = folder.join("libfake-nvml.so");
    testing::tools::shared_library(&source, &path, &[]);

    let uuid = std::array::from_fn(|i| i as u8);
    let deadline = Instant::now() + Duration::from_secs(30);
    let wait = |done: &dyn Fn() -> bool| {
        while !done() {
            assert!(Instant::now() < deadline, "nobody asks");
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    let sampler = Sampler::from_file(&path, uuid);
    wait(&|| sampler.latest().is_known());
    let first = sampler.latest();
    assert!((0.4..0.9).contains(&first.load) && first.temperature == 61.0, "{first:?}");
    assert_eq!((first.memory_used, first.memory_free, first.memory_total), (400.0, 590.0, 1000.0));
    // This GPU doesn't tell.
    assert!(first.power.is_nan());
    wait(&|| sampler.latest().load != first.load);
    drop(sampler);
    // Another GPU, and no library.
    let others = [Sampler::from_file(&path, [7; 16]), Sampler::from_file("/nowhere/libnvidia-ml.so.1", uuid)];
    std::thread::sleep(Duration::from_millis(200));
    assert!(others.iter().all(|sampler| !sampler.latest().is_known()));
}
