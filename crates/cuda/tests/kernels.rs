//! Every kernel compiles for every GPU that is supported. Needs NVRTC, but no GPU.

use cuda::action::{Facts, Kernel};
use cuda::compile::{Arch, compile_all, nvrtc_version, supported};
use cuda::steps::{
    attention, attention_flash, attention_hopper, attention_plain, attention_sides, attention_tf32,
};
use cuda::steps::{batch_norm, channels, conv, hopper, loss, maps, norm_add, position_bias, prepare, resize};
use cuda::steps::{resized_loss, rows, scaling, tokens, update, weights, windows, windows_plain};
use std::collections::BTreeSet;

/// (compute capability, shared memory of a block): the kinds of GPU from Turing on, one of a family standing for it.
const GPUS: [(u32, u32); 7] = [
    (75, 65_536),
    (80, 166_912),
    (86, 101_376),
    (89, 101_376),
    (90, 232_448),
    (100, 232_448),
    (120, 101_376),
];

/// The kernels that such a GPU may have to run.
fn kernels(facts: &Facts) -> BTreeSet<Kernel> {
    let lists = [
        attention::kernels(facts),
        attention_flash::kernels(facts),
        attention_hopper::kernels(facts),
        attention_plain::kernels(),
        attention_sides::kernels(facts),
        attention_tf32::kernels(facts),
        windows::kernels(facts),
        windows_plain::kernels(),
        position_bias::kernels(),
        norm_add::kernels(),
        scaling::kernels(),
        maps::kernels(),
        rows::kernels(),
        prepare::kernels(),
        tokens::kernels(),
        loss::kernels(),
        batch_norm::kernels(),
        resize::kernels(),
        resized_loss::kernels(),
        channels::kernels(),
        conv::kernels(),
        update::kernels(),
    ];
    let (major, minor) = facts.capability;
    let hopper =
        if facts.capability == (9, 0) { [hopper::kernels(), weights::kernels()].concat() } else { vec![] };
    let lists = lists.into_iter().chain([hopper]);
    let of_steps = lists.flatten().filter(|(_, least)| *least <= 10 * major + minor).map(|(k, _)| k);
    of_steps.chain([cuda::collectives::clock(), cuda::moves::kernel()]).collect()
}

/// GPUs whose code is that of another but for its number: the paths that kernels take are those of 80.
const ALIKE: [u32; 3] = [86, 89, 120];

/// Every kernel, but of those with an instance that has no fp16, which compiles as bf16 does, only such.
fn one_of_each(kernels: BTreeSet<Kernel>) -> BTreeSet<Kernel> {
    let template = |kernel: &Kernel| kernel.name.split('<').next().unwrap_or_default().to_string();
    let is_fp16 = |kernel: &Kernel| kernel.name.split(['<', '>', ',', ' ']).any(|word| word == "f16");
    let others: BTreeSet<String> = kernels.iter().filter(|k| !is_fp16(k)).map(template).collect();
    kernels.into_iter().filter(|k| !is_fp16(k) || !others.contains(&template(k))).collect()
}

#[test]
fn every_kernel_compiles_for_every_gpu() {
    testing::need!(nvrtc_version());
    // SAFETY: the only test of this program, and no other thread runs yet.
    unsafe { std::env::set_var("VITESSE_CACHE", env!("CARGO_TARGET_TMPDIR")) };
    let known = supported().unwrap();
    for (number, shared_per_block) in GPUS.into_iter().filter(|(number, _)| known.contains(number)) {
        let capability = (number / 10, number % 10);
        let facts = Facts { capability, shared_per_block, ..Facts::h200() };
        let mut kernels = kernels(&facts);
        if ALIKE.contains(&number) && std::env::var_os("VITESSE_ALL_KERNELS").is_none() {
            kernels = one_of_each(kernels);
        }
        let images = compile_all(&kernels, &Arch::of(capability).unwrap());
        let images = images.unwrap_or_else(|error| panic!("{error}"));
        let names: usize = images.iter().map(|(_, image)| image.names.len()).sum();
        assert_eq!(names, kernels.len());
    }
}
