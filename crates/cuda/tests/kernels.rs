//! Every kernel compiles for every GPU that is supported. Needs NVRTC, but no GPU.

use cuda::action::Kernel;
use cuda::compile::{Arch, compile_all, nvrtc_version, supported};
use cuda::steps::{attention, loss, rows, tokens, update};
use std::collections::BTreeSet;

fn kernels() -> BTreeSet<Kernel> {
    let lists =
        [attention::kernels(), rows::kernels(), tokens::kernels(), loss::kernels(), update::kernels()];
    lists.into_iter().flatten().collect()
}

/// The kinds of GPU from Turing on that this NVRTC knows; one of a family stands for it.
fn capabilities(known: &[u32]) -> Vec<(u32, u32)> {
    let wanted = [75, 80, 86, 89, 90, 100, 120];
    wanted.into_iter().filter(|n| known.contains(n)).map(|n| (n / 10, n % 10)).collect()
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
    let kernels = kernels();
    for capability in capabilities(&supported().unwrap()) {
        let images = compile_all(&kernels, &Arch::of(capability).unwrap());
        let images = images.unwrap_or_else(|error| panic!("{error}"));
        let names: usize = images.iter().map(|(_, image)| image.names.len()).sum();
        assert_eq!(names, kernels.len());
    }
}
