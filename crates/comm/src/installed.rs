//! Folders in which NVIDIA's libraries may be installed, beside those in which the system's loader looks.

use crate::launch::Lookup;
use std::path::{Path, PathBuf};

/// Environment variable with folders that are looked into first.
pub const VARIABLE: &str = "VITESSE_CUDA_PATH";

/// The folders that the user names.
pub fn named(var: Lookup) -> Vec<PathBuf> {
    paths(var, VARIABLE)
}

/// The folders of an installed CUDA, and of environments of pip and conda: that of the program `program`, be it active or not, and the
/// active one.
pub fn folders(var: Lookup, program: Option<&Path>) -> Vec<PathBuf> {
    let toolkits = ["CUDA_HOME", "CUDA_PATH"].into_iter().flat_map(|name| paths(var, name));
    let mut folders: Vec<PathBuf> = toolkits.map(|toolkit| toolkit.join("lib64")).collect();
    let own = program.and_then(Path::parent).filter(|folder| folder.ends_with("bin")).and_then(Path::parent);
    let active = ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().flat_map(|name| paths(var, name));
    let mut environments: Vec<PathBuf> = own.map(Path::to_path_buf).into_iter().chain(active).collect();
    environments.dedup();
    folders.extend(environments.iter().flat_map(|environment| in_environment(environment)));
    folders.push("/usr/local/cuda/lib64".into());
    let mut versions = entries(Path::new("/usr/local"), "cuda-");
    versions.sort();
    folders.extend(versions.into_iter().rev().map(|version| version.join("lib64")));
    let system = [
        "/opt/cuda/lib64",
        "/usr/local/nccl/lib",
        "/opt/nccl/lib",
        "/usr/local/lib",
        "/usr/lib/x86_64-linux-gnu",
        "/usr/lib/aarch64-linux-gnu",
        "/usr/lib64",
        "/usr/lib/wsl/lib",
    ];
    folders.extend(system.map(PathBuf::from));
    folders
}

/// pip puts each library into a folder of its own, conda all into one.
fn in_environment(environment: &Path) -> Vec<PathBuf> {
    let lib = environment.join("lib");
    let mut pythons = entries(&lib, "python");
    pythons.sort();
    let mut folders: Vec<PathBuf> = Vec::new();
    for python in pythons.into_iter().rev() {
        let mut packages = entries(&python.join("site-packages/nvidia"), "");
        packages.sort();
        folders.extend(packages.into_iter().rev().map(|package| package.join("lib")));
    }
    folders.push(lib);
    folders
}

fn paths(var: Lookup, name: &str) -> Vec<PathBuf> {
    var(name).map_or_else(Vec::new, |list| std::env::split_paths(&list).collect())
}

fn entries(folder: &Path, prefix: &str) -> Vec<PathBuf> {
    let fits = |path: &PathBuf| {
        path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with(prefix))
    };
    std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).filter(fits).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use testing::Folder;

    #[test]
    fn packages_of_the_program_s_own_environment_are_found_without_activating_it() {
        let folder = Folder::new("installed");
        let environment = folder.join("venv");
        let packages = environment.join("lib/python3.11/site-packages/nvidia");
        for package in ["cu13", "nccl", "cudnn"] {
            std::fs::create_dir_all(packages.join(package).join("lib")).expect("a folder");
        }
        let found = folders(&|_| None, Some(&environment.join("bin/vitesse")));
        assert_eq!(
            found[..4],
            [
                packages.join("nccl/lib"),
                packages.join("cudnn/lib"),
                packages.join("cu13/lib"),
                environment.join("lib")
            ]
        );
        let elsewhere = folders(&|_| None, Some(&folder.join("target/release/vitesse")));
        assert_eq!(elsewhere[0], Path::new("/usr/local/cuda/lib64"));
    }

    #[test]
    fn what_the_user_names_comes_first() {
        let var = |name: &str| match name {
            "CUDA_HOME" => Some("/opt/a".to_string()),
            "CONDA_PREFIX" => Some("/opt/conda".to_string()),
            VARIABLE => Some("/b:/c".to_string()),
            _ => None,
        };
        assert_eq!(named(&var), [Path::new("/b"), Path::new("/c")]);
        let found = folders(&var, None);
        assert_eq!(found[..2], [Path::new("/opt/a/lib64"), Path::new("/opt/conda/lib")]);
    }
}
