#![no_main]

use fuzz::{check_error, within};
use libfuzzer_sys::fuzz_target;
use config::deepspeed::DeepSpeed;
use config::{Facts, Raw, Resolved};

/// For a file of 64 KiB, more than which is not read.
const BOUND: usize = 32 << 20;

fuzz_target!(|text: &str| {
    if text.len() <= 64 * 1024 {
        within(BOUND, || read(text));
    }
});

fn read(text: &str) {
    let file = match DeepSpeed::parse("ds.json", text) {
        Ok(file) => file,
        Err(error) => return check_error(error),
    };
    let raw = Raw { deepspeed: Some(file), ..Raw::default() };
    let facts = Facts::synthetic(&raw).expect("defaults");
    for world in [1, 8] {
        let explained = raw.explain(&facts, world);
        match raw.resolve(&facts, world) {
            Ok(run) => {
                assert_eq!(explained.refusal, None);
                for step in [0, 1, 2, 11, run.steps - 1, u64::MAX] {
                    assert!(!run.schedule.at(step).is_nan(), "step {step} of {}", run.schedule);
                }
                let record = run.to_json().expect("a run without paths");
                assert_eq!(Resolved::from_json("config.json", &record).expect("what was written"), run);
            }
            Err(error) => {
                assert_eq!(explained.refusal, Some(error.to_string()));
                check_error(error);
            }
        }
    }
}
