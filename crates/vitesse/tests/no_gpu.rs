//! A GPU that can't be used: one line that says what is there and what is needed. The libraries are stand-ins.

mod common;

use common::{Folder, VITESSE, text};
use std::path::{Path, PathBuf};
use std::process::Output;
use testing::tools::shared_library;

const TINY: [&str; 9] =
    ["train", "--device", "cuda", "--model", "vit-nano/8", "--batch-size", "4", "--steps", "2"];

/// What the stand-ins say of themselves.
#[derive(Clone, Copy)]
struct Machine {
    /// As the driver counts: 12040 is 12.4.
    driver: u32,
    /// What starting the driver comes to.
    init: u32,
    /// Of both GPUs.
    capability: u32,
    free_mib: u32,
    /// 134 is 13.4.
    nvrtc: u32,
    blas: u32,
}

const GOOD: Machine =
    Machine { driver: 13000, init: 0, capability: 90, free_mib: 100_000, nvrtc: 130, blas: 130_001 };

fn tests() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests")
}

/// Builds the machine's libraries and runs vitesse on it.
fn run(folder: &Folder, machine: &Machine, args: &[&str], environment: &[(&str, &str)]) -> Output {
    let source = tests().join("fake_cuda/fake_cuda.c");
    let Machine { driver, init, capability, free_mib, nvrtc, blas } = machine;
    let driver = format!("-DDRIVER={driver} -DINIT={init} -DCAPABILITY={capability} -DFREE_MIB={free_mib}");
    let libraries = [
        ("libcuda.so", driver),
        ("libnvrtc.so", format!("-DNVRTC={nvrtc}")),
        ("libcublasLt.so", format!("-DBLAS={blas}")),
    ];
    for (name, flags) in libraries {
        let flags: Vec<&str> = flags.split(' ').collect();
        shared_library(&source, &folder.0.join(name), &flags);
    }
    let mut command = folder.command(VITESSE, args);
    command.env("VITESSE_CUDA_PATH", &folder.0).env("VITESSE_CACHE", folder.0.join("cache"));
    command.envs(environment.iter().copied()).output().unwrap()
}

/// What it says on standard error, having failed as it would again.
fn refused(output: &Output) -> String {
    let error = String::from_utf8_lossy(&output.stderr).trim_end().to_string();
    assert_eq!(output.status.code(), Some(1), "{}", text(output));
    assert!(!error.contains("panicked"), "{error}");
    error
}

#[test]
fn what_is_missing_or_too_old_is_said_in_one_line() {
    let folder = Folder::new("no-gpu");
    let cases: [(Machine, &str); 6] = [
        (
            Machine { driver: 11040, ..GOOD },
            "the NVIDIA driver is too old: it supports CUDA 11.4, but 12.2 (driver 535) is needed",
        ),
        (
            Machine { init: 100, ..GOOD },
            "no NVIDIA GPU was found (CUDA_ERROR_NO_DEVICE: no CUDA-capable device is detected)",
        ),
        (
            Machine { capability: 60, ..GOOD },
            "Fake GPU is too old: it has compute capability 6.0, but 7.5 is needed",
        ),
        (Machine { nvrtc: 118, ..GOOD }, "libnvrtc is of CUDA 11, but 12 or 13 is needed"),
        (Machine { blas: 111_101, ..GOOD }, "libcublasLt is of CUDA 11, but 12 or 13 is needed"),
        (
            Machine { driver: 12040, nvrtc: 124, ..GOOD },
            "libcublasLt is of CUDA 13, which the NVIDIA driver, of CUDA 12.4, can't serve",
        ),
    ];
    for (machine, line) in cases {
        let error = refused(&run(&folder, &machine, &TINY, &[]));
        assert_eq!(error, format!("vitesse: --device cuda: {line}"));
        let output = run(&folder, &machine, &["doctor"], &[]);
        assert!(output.status.success() && text(&output).contains(line), "{}", text(&output));
    }
}

#[test]
fn a_machine_without_driver_says_what_to_install() {
    let folder = Folder::new("no-driver");
    let doctor = folder.run(&["doctor", "--json"]);
    let found: serde_json::Value = serde_json::from_slice(&doctor.stdout).unwrap();
    if !found["found"]["driver"].is_null() {
        return testing::inapplicable("this machine has a driver");
    }
    let output = folder.start(&TINY).wait_with_output().unwrap();
    let error = refused(&output);
    assert!(error.starts_with("vitesse: --device cuda: libcuda was not found"), "{error}");
    assert!(error.contains("install the driver") && error.lines().count() == 1, "{error}");
}

#[test]
fn an_old_nccl_is_named_with_its_version() {
    let folder = Folder::new("old-nccl");
    let nccl = folder.0.join("libnccl.so.2");
    let source = tests().join("../../comm/tests/fake_nccl/fake_nccl.c");
    shared_library(&source, &nccl, &["-DFAKE_VERSION=2804"]);
    let args = [&TINY[..], &["--ranks", "2", "--comm", "nccl"]].concat();
    let error = refused(&run(&folder, &GOOD, &args, &[("VITESSE_NCCL", nccl.to_str().unwrap())]));
    assert!(error.contains("is NCCL 2.8.4; 2.10.0 or newer is needed"), "{error}");
    assert_eq!(error.lines().count(), 1, "{error}");
}

#[test]
fn too_little_memory_is_told_with_what_would_fit() {
    let folder = Folder::new("little-memory");
    let machine = Machine { free_mib: 600, ..GOOD };
    let args = ["bench", "--device", "cuda", "--model", "vit-ti/4", "--batch-size", "512"];
    let error = refused(&run(&folder, &machine, &args, &[]));
    assert_eq!(error.lines().count(), 1, "{error}");
    let (problem, advice) = error.split_once("; ").unwrap();
    assert!(
        problem.starts_with("vitesse: not enough memory on Fake GPU: ") && problem.contains("600.0 MiB of")
    );
    assert!(advice.starts_with("--batch-size ") && advice.contains("with --recompute full"), "{advice}");
}
