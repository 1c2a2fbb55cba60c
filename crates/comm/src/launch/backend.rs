//! Choice of the communication backend.

use super::{Launcher, Lookup, Place};
use std::fmt;
use std::str::FromStr;

/// Communication backend, as the user names it with `--comm`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    Threads,
    Mpi,
    Tcp,
    Nccl,
}

const NAMES: [(Backend, &str); 4] =
    [(Backend::Threads, "threads"), (Backend::Mpi, "mpi"), (Backend::Tcp, "tcp"), (Backend::Nccl, "nccl")];

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(NAMES[*self as usize].1)
    }
}

impl FromStr for Backend {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = NAMES.iter().find(|(_, name)| *name == text);
        found.map(|(backend, _)| *backend).ok_or_else(|| "must be threads, mpi, tcp or nccl".to_string())
    }
}

/// Optional parts of this binary.
#[derive(Clone, Copy)]
pub(crate) struct Built {
    pub mpi: bool,
}

/// Error for a binary without MPI.
pub const NO_MPI: &str =
    "this vitesse was built without MPI: build it with `cargo build --release --features mpi`";

/// Chooses the backend of the world: the one requested, or the one that fits the launcher. What can't be honoured is refused with the
/// reason.
///
/// It is never NCCL, which works between GPUs beside a world of the hosts. With `--comm nccl` the world uses the backend that fits the
/// launcher, and the group of GPUs is made when those are opened ([`crate::Member::requested`]).
pub(crate) fn choose_backend(
    requested: Option<Backend>,
    ranks: Option<usize>,
    place: &Place,
    built: Built,
    var: Lookup,
) -> Result<Backend, String> {
    let (world, launcher) = (place.world, place.launcher);
    // `srun --pty bash` and salloc's shell are tasks too; what is typed there is typed as on any machine.
    let launcher =
        if place.is_lone_task() && requested != Some(Backend::Mpi) { Launcher::Nothing } else { launcher };
    if ranks == Some(0) {
        return Err("--ranks 0: must be at least 1".to_string());
    }
    if let Some(ranks) = ranks.filter(|ranks| launcher != Launcher::Nothing && *ranks != world) {
        return Err(format!("--ranks {ranks}, but {launcher} started {world}: leave out --ranks"));
    }
    let backend = requested
        .filter(|requested| *requested != Backend::Nccl)
        .unwrap_or_else(|| default(launcher, built, var));
    match backend {
        Backend::Mpi if !built.mpi => {
            let tcp = match launcher {
                Launcher::Nothing => "",
                _ => ", or choose --comm tcp",
            };
            Err(format!("{NO_MPI}{tcp}"))
        }
        Backend::Threads if launcher != Launcher::Nothing && world > 1 => Err(format!(
            "--comm threads needs all ranks in one process, but {launcher} started {world} processes: leave out --comm"
        )),
        Backend::Tcp if launcher == Launcher::Nothing && ranks.unwrap_or(1) > 1 => Err(
            "--comm tcp needs a launcher: torchrun, srun, or RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set for each process"
                .to_string(),
        ),
        backend => Ok(backend),
    }
}

fn default(launcher: Launcher, built: Built, var: Lookup) -> Backend {
    match launcher {
        Launcher::Nothing => Backend::Threads,
        Launcher::OpenMpi | Launcher::Mpich => Backend::Mpi,
        Launcher::Torchrun => Backend::Tcp,
        Launcher::Srun if built.mpi && srun_starts_mpi(var) => Backend::Mpi,
        Launcher::Srun => Backend::Tcp,
    }
}

/// Tells whether srun offers the process manager interface that MPI needs.
fn srun_starts_mpi(var: Lookup) -> bool {
    let kind = var("SLURM_MPI_TYPE").unwrap_or_default();
    kind.starts_with("pm") || var("PMIX_RANK").is_some() || var("PMIX_NAMESPACE").is_some()
}
