//! The machine of a run: written beside its results, and shown by `vitesse doctor`.

use records::Machine;
use std::fs;

/// The machine that this process runs on.
pub fn here() -> Machine {
    Machine {
        host: line("/proc/sys/kernel/hostname"),
        os: os_name(),
        kernel: line("/proc/sys/kernel/osrelease"),
        cpu: field("/proc/cpuinfo", "model name").unwrap_or_else(|| std::env::consts::ARCH.to_string()),
        threads: std::thread::available_parallelism().map_or(1, usize::from),
        simd: format!("{:?}", cpu::kernels::level()).to_lowercase(),
        memory_bytes: kilobytes("MemTotal").unwrap_or(0) * 1024,
    }
}

/// A figure of the kernel's table of memory.
pub fn kilobytes(name: &str) -> Option<u64> {
    field("/proc/meminfo", name)?.split_whitespace().next()?.parse().ok()
}

/// The first line of a small file of the system, empty where there is none.
fn line(path: &str) -> String {
    let text = fs::read_to_string(path).unwrap_or_default();
    text.lines().next().unwrap_or_default().trim().to_string()
}

/// The value after `name` and a colon.
fn field(path: &str, name: &str) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    text.lines().find_map(|line| {
        let (key, value) = line.split_once(':')?;
        (key.trim() == name).then(|| value.trim().to_string())
    })
}

fn os_name() -> String {
    let text = fs::read_to_string("/etc/os-release").unwrap_or_default();
    let name = text.lines().find_map(|line| line.strip_prefix("PRETTY_NAME="));
    name.map_or_else(|| std::env::consts::OS.to_string(), |name| name.trim_matches('"').to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_can_be_described() {
        let machine = here();
        assert!(machine.threads >= 1 && !machine.simd.is_empty() && !machine.os.is_empty());
        let text = serde_json::to_string(&machine).unwrap();
        assert_eq!(serde_json::from_str::<Machine>(&text).unwrap(), machine);
    }
}
