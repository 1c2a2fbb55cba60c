//! Calls of mpirun.

use anyhow::{Context, bail};
use comm::supervisor::SUPERVISOR;
use std::path::Path;
use std::process::Command;

/// Checks that ranks can be started by mpirun, as far as that can be told before.
pub fn may_call_mpirun() -> anyhow::Result<()> {
    if !comm::HAS_MPI {
        bail!("--comm mpi: {}", comm::launch::NO_MPI);
    }
    let (root, open_mpi) = (is_root(), mpirun_version()?.contains("Open MPI"));
    if root && open_mpi && !root_may(&|name| std::env::var(name).ok()) {
        bail!(
            "--comm mpi: mpirun refuses to run as root; set OMPI_ALLOW_RUN_AS_ROOT=1 and OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 if this is \
             meant, or become another user"
        );
    }
    Ok(())
}

/// mpirun for a program that shows whether a host can be reached and has vitesse.
pub fn on_host(host: &str, program: &Path) -> anyhow::Result<Command> {
    let mut command = Command::new("mpirun");
    let flag = if mpirun_version()?.contains("Open MPI") { "--host" } else { "-hosts" };
    command.args(["-n", "1", flag, host]).arg(program).arg("--version");
    Ok(command)
}

/// Returns whether Open MPI was told, and told again, that root may use it: by the variables of its fourth or of its fifth version.
fn root_may(var: &dyn Fn(&str) -> Option<String>) -> bool {
    let set = |name: String| var(&name).is_some_and(|value| value == "1");
    ["OMPI", "PRTE"].iter().any(|mpi| {
        let name = format!("{mpi}_ALLOW_RUN_AS_ROOT");
        set(format!("{name}_CONFIRM")) && set(name)
    })
}

fn is_root() -> bool {
    // SAFETY: only asks.
    unsafe { libc::geteuid() == 0 }
}

fn mpirun_version() -> anyhow::Result<String> {
    let version = Command::new("mpirun").arg("--version").output();
    let version = version.context("--comm mpi needs mpirun, which can't be started")?;
    Ok(String::from_utf8_lossy(&version.stdout).into_owned())
}

/// mpirun for ranks that have threads of their own.
pub fn mpirun(ranks: usize, hostfile: Option<&Path>) -> anyhow::Result<Command> {
    let version = mpirun_version()?;
    let mut command = Command::new("mpirun");
    command.args(["-n", &ranks.to_string()]);
    if let Some(file) = hostfile {
        command.arg("--hostfile").arg(file);
    }
    if version.contains("Open MPI") {
        // It would tie all threads of a rank to one core.
        command.args(["--bind-to", "none"]);
        // Only variables of its own reach other hosts by themselves.
        command.args(["-x", SUPERVISOR]);
        if hostfile.is_none() {
            command.arg("--oversubscribe");
        }
    }
    Ok(command)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_has_to_be_allowed_twice() {
        let with = |set: &[(&str, &str)]| {
            root_may(&|name: &str| set.iter().find(|(known, _)| *known == name).map(|(_, v)| v.to_string()))
        };
        let (once, again) = (("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"));
        assert!(!with(&[]) && !with(&[once]) && !with(&[again]) && with(&[once, again]));
        assert!(!with(&[("OMPI_ALLOW_RUN_AS_ROOT", "0"), again]));
        assert!(with(&[("PRTE_ALLOW_RUN_AS_ROOT", "1"), ("PRTE_ALLOW_RUN_AS_ROOT_CONFIRM", "1")]));
    }
}
