//! Every kernel compiles for every GPU that is supported. Needs NVRTC, but no GPU.

use cuda::action::{Facts, Kernel};
use cuda::compile::{Arch, compile_all, nvrtc_version, supported};
use cuda::steps::{attention, loss, rows, tokens, update};
use std::collections::BTreeSet;

/// One GPU of each kind, with the shared memory that a block may have.
const GPUS: [((u32, u32), u32); 7] = [
    ((7, 5), 65_536),
    ((8, 0), 166_912),
    ((8, 6), 101_376),
    ((8, 9), 101_376),
    ((9, 0), 232_448),
    ((10, 0), 232_448),
    ((12, 0), 101_376),
];

/// What stands for all instances that this GPU can have.
fn kernels(facts: &Facts) -> BTreeSet<Kernel> {
    let lists =
        [attention::kernels(facts), rows::kernels(), tokens::kernels(), loss::kernels(), update::kernels()];
    let capability = 10 * facts.capability.0 + facts.capability.1;
    lists.into_iter().flatten().filter(|(_, least)| *least <= capability).map(|(kernel, _)| kernel).collect()
}

#[test]
fn every_kernel_compiles_for_every_gpu() {
    if let Err(error) = nvrtc_version() {
        assert!(std::env::var_os("VITESSE_REQUIRE_NVRTC").is_none(), "{error}");
        eprintln!("left out: {error}");
        return;
    }
    // SAFETY: the only test of this program, and no other thread runs yet.
    unsafe { std::env::set_var("VITESSE_CACHE", env!("CARGO_TARGET_TMPDIR")) };
    let known = supported().unwrap();
    for (capability, shared_per_block) in GPUS {
        let number = 10 * capability.0 + capability.1;
        if !known.contains(&number) {
            eprintln!("left out: this NVRTC doesn't know sm_{number}");
            continue;
        }
        let facts = Facts { name: format!("sm_{number}"), capability, processors: 100, shared_per_block };
        let kernels = kernels(&facts);
        let images = compile_all(&kernels, &Arch::of(capability).unwrap());
        let images = images.unwrap_or_else(|error| panic!("{error}"));
        let names: usize = images.iter().map(|(_, image)| image.names.len()).sum();
        assert_eq!(names, kernels.len());
    }
}
