//! Which engine does the exchange.

use super::{Launcher, Lookup, Place};
use std::fmt;
use std::str::FromStr;

/// An engine, as a user names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice {
    Threads,
    Mpi,
    Tcp,
    Nccl,
}

const NAMES: [(Choice, &str); 4] =
    [(Choice::Threads, "threads"), (Choice::Mpi, "mpi"), (Choice::Tcp, "tcp"), (Choice::Nccl, "nccl")];

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(NAMES[*self as usize].1)
    }
}

impl FromStr for Choice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = NAMES.iter().find(|(_, name)| *name == text);
        found.map(|(choice, _)| *choice).ok_or_else(|| "must be threads, mpi, tcp or nccl".to_string())
    }
}

/// What this binary has.
#[derive(Clone, Copy)]
pub(crate) struct Built {
    pub mpi: bool,
}

/// Why ranks can't be MPI's.
pub const NO_MPI: &str =
    "this vitesse was built without MPI: build it with `cargo build --release --features mpi`";

/// The engine of the world: what was asked for, or what suits the launcher. What can't be honoured is refused with the reason.
///
/// NCCL is never it: that works between GPUs, beside a world that carries what the hosts have to say to each other. Who asks for it
/// gets the world that suits the launcher, and the group of GPUs is made when those are opened ([`crate::Member::asked`]).
pub(crate) fn decide(
    asked: Option<Choice>,
    ranks: Option<usize>,
    place: &Place,
    built: Built,
    var: Lookup,
) -> Result<Choice, String> {
    let (world, launcher) = (place.world, place.launcher);
    if ranks == Some(0) {
        return Err("--ranks must be at least 1".to_string());
    }
    if let Some(ranks) = ranks.filter(|ranks| launcher != Launcher::Nothing && *ranks != world) {
        return Err(format!("--ranks {ranks}, but {launcher} started {world}: leave out --ranks"));
    }
    let choice =
        asked.filter(|asked| *asked != Choice::Nccl).unwrap_or_else(|| default(launcher, built, var));
    match choice {
        Choice::Mpi if !built.mpi => {
            let tcp = match launcher {
                Launcher::Nothing => "",
                _ => ", or choose --comm tcp",
            };
            Err(format!("{NO_MPI}{tcp}"))
        }
        Choice::Threads if launcher != Launcher::Nothing && world > 1 => Err(format!(
            "--comm threads is for the ranks of one process, but {launcher} started {world} processes: leave out --comm"
        )),
        Choice::Tcp if launcher == Launcher::Nothing && ranks.unwrap_or(1) > 1 => Err(
            "--comm tcp needs a launcher: torchrun, srun, or RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set for each process"
                .to_string(),
        ),
        choice => Ok(choice),
    }
}

fn default(launcher: Launcher, built: Built, var: Lookup) -> Choice {
    match launcher {
        Launcher::Nothing => Choice::Threads,
        Launcher::OpenMpi | Launcher::Mpich => Choice::Mpi,
        Launcher::Torchrun => Choice::Tcp,
        Launcher::Srun if built.mpi && srun_starts_mpi(var) => Choice::Mpi,
        Launcher::Srun => Choice::Tcp,
    }
}

/// Whether srun offers what MPI needs to find its ranks.
fn srun_starts_mpi(var: Lookup) -> bool {
    let kind = var("SLURM_MPI_TYPE").unwrap_or_default();
    kind.starts_with("pm") || var("PMIX_RANK").is_some() || var("PMIX_NAMESPACE").is_some()
}
