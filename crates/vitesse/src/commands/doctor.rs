//! `vitesse doctor`: what this machine has, what it lacks, and what to install.

mod needs;

use comm::installed;
use comm::launch::environment;
use devices::sensors::{self, Sensors};
use needs::{Driver, LIBRARIES, Library, Needs};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::process::Command;
use text::many;
use train::machine::{self, kilobytes};

/// One thing that was looked for.
struct Finding {
    what: &'static str,
    found: Option<String>,
    /// What it is for, or how to get it.
    advice: &'static str,
}

pub fn run(as_json: bool) -> anyhow::Result<()> {
    let machine = machine::here();
    let findings = findings();
    let is_missing =
        |library: &&Library| findings.iter().any(|f| f.what == library.name && f.found.is_none());
    let needs = Needs::of(Driver::here(), &LIBRARIES.iter().filter(is_missing).collect::<Vec<_>>());
    if as_json {
        let found: serde_json::Map<_, _> =
            findings.into_iter().map(|f| (f.what.to_string(), json!(f.found))).collect();
        println!("{}", json!({ "machine": machine, "found": found, "gpu": needs.json() }));
        return Ok(());
    }
    println!("vitesse {} on {}, {}", env!("CARGO_PKG_VERSION"), machine.os, machine.kernel);
    println!(
        "  CPU       {}: {}, kernels for {}",
        machine.cpu,
        many(machine.threads, "thread"),
        machine.simd
    );
    let gib = |bytes: u64| bytes as f64 / (1u64 << 30) as f64;
    let free = kilobytes("MemAvailable").unwrap_or(0) * 1024;
    println!("  memory    {:.1} GiB, {:.1} free", gib(machine.memory_bytes), gib(free));
    for Finding { what, found, advice } in findings {
        match found {
            Some(found) => println!("✓ {what:<9} {found}"),
            None => println!("✗ {what:<9} not found: {advice}"),
        }
    }
    let mpi = if comm::HAS_MPI { "with MPI" } else { "without MPI (build with --features mpi)" };
    println!(
        "Built {mpi}. Computes on the CPU, and with --device cuda on NVIDIA GPUs of compute capability 7.5 on:"
    );
    match cuda::devices() {
        Ok(gpus) => gpus.iter().enumerate().for_each(|(number, gpu)| {
            let (major, minor) = gpu.capability;
            println!("✓ GPU {number}     {}, compute capability {major}.{minor}", gpu.name);
            let sensors = cuda::identity(number).map_err(|e| e.to_string()).and_then(sensors::once);
            match sensors {
                Ok(sensors) => println!("            {}", sensed(&sensors)),
                Err(why) => println!(
                    "✗ NVML      no load, temperature or power: {why}. It comes with the NVIDIA driver."
                ),
            }
        }),
        Err(why) => println!("✗ none here: {why}"),
    }
    needs.lines().iter().for_each(|line| println!("{line}"));
    Ok(())
}

/// What a GPU tells of itself.
fn sensed(sensors: &Sensors) -> String {
    let gib = |bytes: f64| bytes / (1u64 << 30) as f64;
    let Sensors { load, memory_used, memory_total, temperature, power, .. } = *sensors;
    let parts = [
        (load, format!("load {:.0}%", 100.0 * load)),
        (memory_used, format!("{:.1} of {:.1} GiB in use", gib(memory_used), gib(memory_total))),
        (temperature, format!("{temperature:.0} °C")),
        (power, format!("{power:.0} W")),
    ];
    let known = parts.into_iter().filter(|(number, _)| number.is_finite()).map(|(_, text)| text);
    known.collect::<Vec<_>>().join(", ")
}

fn findings() -> Vec<Finding> {
    let mut findings = vec![
        Finding {
            what: "big pages",
            found: transparent_huge_pages(),
            advice: "a step gains a few percent by: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        },
        Finding { what: "GPU", found: gpus(), advice: "no NVIDIA GPU, or no driver for it" },
        Finding {
            what: "driver",
            found: find_library(&["libcuda.so.1"]),
            advice: "libcuda comes with the NVIDIA driver",
        },
    ];
    findings.extend(LIBRARIES.iter().map(|library| Finding {
        what: library.name,
        found: find_library(library.files),
        advice: library.purpose,
    }));
    findings.extend([
        Finding {
            what: "MPI",
            found: on_path("mpirun").map(|path| path.display().to_string()),
            advice: "for --comm mpi install openmpi-bin and libopenmpi-dev",
        },
        Finding {
            what: "Slurm",
            found: on_path("srun").map(|path| path.display().to_string()),
            advice: "only clusters that use it have it",
        },
    ]);
    findings
}

fn transparent_huge_pages() -> Option<String> {
    let text = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").ok()?;
    let chosen = text.split_once('[')?.1.split_once(']')?.0.to_string();
    (chosen != "never").then(|| format!("transparent, {chosen}"))
}

fn gpus() -> Option<String> {
    let output =
        Command::new("nvidia-smi").arg("--query-gpu=name").arg("--format=csv,noheader").output().ok()?;
    let names = String::from_utf8_lossy(&output.stdout).trim().replace('\n', ", ");
    (output.status.success() && !names.is_empty()).then_some(names)
}

fn on_path(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|folder| folder.join(program)).find(|file| file.is_file())
}

/// Looks where a run does, in its order, without loading anything.
fn find_library(names: &[&str]) -> Option<String> {
    let within = |folders: Vec<PathBuf>| {
        let mut paths = names.iter().flat_map(|name| folders.iter().map(move |folder| folder.join(name)));
        paths.find(|path| path.is_file()).map(|path| path.display().to_string())
    };
    let program = std::env::current_exe().ok();
    let mut first = installed::named(&environment);
    first.extend(std::env::split_paths(&std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default()));
    within(first)
        .or_else(|| in_cache(names))
        .or_else(|| within(installed::folders(&environment, program.as_deref())))
}

/// The linker's own list of libraries.
fn in_cache(names: &[&str]) -> Option<String> {
    let ldconfig = on_path("ldconfig").unwrap_or_else(|| Path::new("/sbin/ldconfig").to_path_buf());
    let output = Command::new(ldconfig).arg("-p").output().ok()?;
    listed(&String::from_utf8_lossy(&output.stdout), names).map(str::to_string)
}

/// The file of the first name that the linker's list has. The list outlives what was uninstalled or unmounted since it was made.
fn listed<'a>(list: &'a str, names: &[&str]) -> Option<&'a str> {
    let files = |name: &&str| {
        let entries = list.lines().filter(|line| line.trim_start().starts_with(*name));
        entries.filter_map(|line| Some(line.split_once("=> ")?.1)).find(|file| Path::new(file).is_file())
    };
    names.iter().find_map(files)
}

#[cfg(test)]
mod tests {
    use super::*;
    use testing::Folder;

    #[test]
    fn libraries_that_are_listed_and_gone_are_not_found() {
        let folder = Folder::new("doctor-list");
        let there = folder.join("libnccl.so.2");
        std::fs::write(&there, "").unwrap();
        let there = there.display().to_string();
        let gone = "\tlibcudnn.so.9 (libc6,x86-64) => /nowhere/libcudnn.so.9";
        let list = format!(
            "3 libs found in cache\n\tlibnccl.so.2 (libc6,x86-64) => /nowhere/libnccl.so.2\n\tlibnccl.so.2 (libc6,x86-64) => {there}\n{gone}\n"
        );
        assert_eq!(listed(&list, &["libnccl.so", "libnccl.so.2"]), Some(there.as_str()));
        assert_eq!(listed(&list, &["libcudnn.so.9"]), None);
    }
}
