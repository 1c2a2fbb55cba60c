//! What a GPU of this machine still needs, and the commands that install it.

use serde_json::{Value, json};
use std::path::Path;

/// A library that GPUs use, and its packages. `{major}` is CUDA's version, `{minor}` as in `13-0`.
pub struct Library {
    pub name: &'static str,
    /// Files of which one is enough.
    pub files: &'static [&'static str],
    /// What it is for.
    pub purpose: &'static str,
    /// PyPI's packages of CUDA 12 and 13.
    pip: [&'static str; 2],
    apt: &'static str,
    conda: &'static str,
}

pub const LIBRARIES: [Library; 4] = [
    Library {
        name: "cuBLASLt",
        files: &["libcublasLt.so.13", "libcublasLt.so.12"],
        purpose: "for matmuls on a GPU",
        pip: ["nvidia-cublas-cu12", "nvidia-cublas==13.*"],
        apt: "libcublas-{minor}",
        conda: "libcublas",
    },
    Library {
        name: "NVRTC",
        files: &["libnvrtc.so.13", "libnvrtc.so.12"],
        purpose: "for compiling the kernels of a GPU",
        pip: ["nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvrtc==13.*"],
        apt: "cuda-nvrtc-{minor}",
        conda: "cuda-nvrtc",
    },
    Library {
        name: "cuDNN",
        files: &["libcudnn.so.9"],
        purpose: "for convolutions on a GPU, and some attention",
        pip: ["nvidia-cudnn-cu12", "nvidia-cudnn-cu13"],
        apt: "libcudnn9-cuda-{major}",
        conda: "cudnn",
    },
    Library {
        name: "NCCL",
        files: &["libnccl.so.2"],
        purpose: "for all-reduce between GPUs",
        pip: ["nvidia-nccl-cu12", "nvidia-nccl-cu13"],
        apt: "libnccl2",
        conda: "nccl",
    },
];

/// Where this machine stands with NVIDIA's driver.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Driver {
    /// With the CUDA version that it supports, such as 12020.
    Installed(i32),
    /// A GPU without driver.
    Missing,
    /// Neither.
    NoGpu,
}

impl Driver {
    pub fn here() -> Self {
        match cuda::driver_version() {
            Some(version) => Driver::Installed(version),
            None if has_nvidia_gpu(Path::new("/sys/bus/pci/devices")) => Driver::Missing,
            None => Driver::NoGpu,
        }
    }

    /// The CUDA version whose libraries fit: the driver's own.
    fn cuda(self) -> (usize, usize) {
        match self {
            Driver::Installed(version) if version >= 13_000 => (13, (version as usize % 1000) / 10),
            Driver::Installed(version) => (12, (version.max(12_020) as usize % 1000) / 10),
            _ => (13, 0),
        }
    }
}

/// Tells whether a PCI bus has a display or compute device of NVIDIA.
fn has_nvidia_gpu(bus: &Path) -> bool {
    let starts = |path: &Path, file: &str, text: &str| {
        std::fs::read_to_string(path.join(file)).is_ok_and(|found| found.starts_with(text))
    };
    let mut devices = std::fs::read_dir(bus).into_iter().flatten().flatten().map(|entry| entry.path());
    devices.any(|path| starts(&path, "vendor", "0x10de") && starts(&path, "class", "0x03"))
}

/// Commands that install libraries, by package manager.
pub struct Needs {
    driver: Driver,
    missing: Vec<&'static str>,
    commands: Vec<(&'static str, String)>,
}

impl Needs {
    /// `missing`: the libraries that were not found.
    pub fn of(driver: Driver, missing: &[&Library]) -> Self {
        let (major, minor) = driver.cuda();
        let joined = |name: &dyn Fn(&Library) -> String| {
            missing.iter().map(|library| name(library)).collect::<Vec<_>>().join(" ")
        };
        let quoted = |package: &str| match package.contains('*') {
            true => format!("'{package}'"),
            false => package.to_string(),
        };
        let apt = |library: &Library| {
            let minor = format!("{major}-{minor}");
            library.apt.replace("{minor}", &minor).replace("{major}", &major.to_string())
        };
        let commands = vec![
            ("pip", format!("pip install {}", joined(&|library| quoted(library.pip[major - 12])))),
            ("apt", format!("apt-get install {}", joined(&apt))),
            (
                "conda",
                format!(
                    "conda install -c conda-forge {} cuda-version={major}.{minor}",
                    joined(&|library| library.conda.to_string())
                ),
            ),
        ];
        Needs { driver, missing: missing.iter().map(|library| library.name).collect(), commands }
    }

    /// What to print.
    pub fn lines(&self) -> Vec<String> {
        let mut lines = Vec::new();
        if self.driver == Driver::Missing {
            lines.push(
                "This machine has an NVIDIA GPU without driver: install nvidia-driver (Debian), or nvidia-driver-580-server (Ubuntu), \
                 as root, and restart."
                    .to_string(),
            );
        }
        if self.missing.is_empty() {
            return lines;
        }
        let (major, minor) = self.driver.cuda();
        let missing = self.missing.join(", ");
        lines.push(match self.driver {
            Driver::Installed(_) => {
                format!("For --device cuda {missing} must be installed; the driver serves CUDA {major}.{minor}. One of these does it:")
            }
            _ => format!("A node with a GPU also needs {missing}. Beside a driver of CUDA {major}, one of these installs it:"),
        });
        for (manager, command) in &self.commands {
            let note = match *manager {
                "pip" => "into the environment of vitesse, or any that is active",
                "apt" => "from NVIDIA's repository for this distribution",
                _ => "into the active environment",
            };
            lines.push(format!("  {manager:<5} {command}"));
            lines.push(format!("        ({note})"));
        }
        lines
    }

    pub fn json(&self) -> Value {
        let commands: serde_json::Map<_, _> =
            self.commands.iter().map(|(manager, command)| (manager.to_string(), json!(command))).collect();
        let driver = match self.driver {
            Driver::Installed(version) => json!(version),
            _ => Value::Null,
        };
        let install = if self.missing.is_empty() { Value::Null } else { Value::Object(commands) };
        json!({ "driver": driver, "missing": self.missing, "install": install })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use testing::Folder;

    fn all() -> Vec<&'static Library> {
        LIBRARIES.iter().collect()
    }

    #[test]
    fn commands_fit_the_driver() {
        let text = |version| Needs::of(Driver::Installed(version), &all()).lines().join("\n");
        let new = text(13_010);
        for part in [
            "the driver serves CUDA 13.1",
            "pip install 'nvidia-cublas==13.*' 'nvidia-cuda-nvrtc==13.*' nvidia-cudnn-cu13 nvidia-nccl-cu13",
            "apt-get install libcublas-13-1 cuda-nvrtc-13-1 libcudnn9-cuda-13 libnccl2",
            "conda install -c conda-forge libcublas cuda-nvrtc cudnn nccl cuda-version=13.1",
        ] {
            assert!(new.contains(part), "{part}: {new}");
        }
        let old = text(12_040);
        for part in ["nvidia-cublas-cu12 nvidia-cuda-nvrtc-cu12", "libcublas-12-4", "cuda-version=12.4"] {
            assert!(old.contains(part), "{part}: {old}");
        }
    }

    #[test]
    fn only_what_is_missing_is_installed() {
        let needs = Needs::of(Driver::Installed(12_080), &[&LIBRARIES[2]]);
        let text = needs.lines().join("\n");
        assert!(text.contains("pip install nvidia-cudnn-cu12\n"), "{text}");
        assert_eq!(needs.json()["install"]["apt"], "apt-get install libcudnn9-cuda-12");
        let nothing = Needs::of(Driver::Installed(12_080), &[]);
        assert!(nothing.lines().is_empty() && nothing.json()["install"].is_null());
    }

    #[test]
    fn a_gpu_without_driver_is_seen_on_the_bus() {
        let bus = Folder::new("needs-bus");
        let add = |name: &str, vendor: &str, class: &str| {
            std::fs::create_dir_all(bus.join(name)).expect("a folder");
            std::fs::write(bus.join(name).join("vendor"), vendor).expect("a file");
            std::fs::write(bus.join(name).join("class"), class).expect("a file");
        };
        add("0000:00:1f.0", "0x8086\n", "0x030000\n");
        // The sound of a card of NVIDIA.
        add("0000:01:00.1", "0x10de\n", "0x040300\n");
        assert!(!has_nvidia_gpu(&bus.join(".")));
        add("0000:01:00.0", "0x10de\n", "0x030200\n");
        assert!(has_nvidia_gpu(&bus.join(".")));
        let line = Needs::of(Driver::Missing, &[]).lines().join("\n");
        assert!(line.contains("without driver"), "{line}");
    }
}
