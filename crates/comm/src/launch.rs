//! Rank and world size of this process as its launcher sets them, and the backend that fits.
//!
//! Everything here is a function of a lookup of environment variables, so that tests need none.

mod backend;
mod hosts;

pub use backend::{Backend, NO_MPI};
pub(crate) use backend::{Built, choose_backend};
pub use hosts::{MasterAddress, expand_nodes, master_address};

use std::fmt;

/// Launcher of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Launcher {
    /// None: started by a user or a script, alone.
    Nothing,
    /// Open MPI's mpirun.
    OpenMpi,
    /// The mpirun or mpiexec of MPICH or Intel MPI.
    Mpich,
    /// A step of a Slurm job.
    Srun,
    /// torchrun, or a script that sets the same variables.
    Torchrun,
}

impl fmt::Display for Launcher {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(match self {
            Launcher::Nothing => "no launcher",
            Launcher::OpenMpi | Launcher::Mpich => "mpirun",
            Launcher::Srun => "srun",
            Launcher::Torchrun => "torchrun",
        })
    }
}

/// Rank, world size and host of a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    pub rank: usize,
    pub world: usize,
    /// Rank among the ranks of the same machine.
    pub local_rank: usize,
    pub local_world: usize,
    pub host: String,
    pub launcher: Launcher,
}

/// Lookup of an environment variable.
pub type Lookup<'a> = &'a dyn Fn(&str) -> Option<String>;

/// Looks up a variable in the environment of this process; empty counts as unset.
pub fn environment(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// An environment variable and its value.
type Named = (&'static str, usize);

/// Rank and world size from one launcher's variables. Not all launchers set the local rank.
struct LauncherRank {
    rank: Named,
    world: Named,
    local: Option<(usize, usize)>,
    launcher: Launcher,
}

impl Place {
    /// Place of a rank that is a thread of a process without launcher.
    pub fn thread(rank: usize, world: usize) -> Self {
        Place {
            rank,
            world,
            local_rank: rank,
            local_world: world,
            host: host_name(),
            launcher: Launcher::Nothing,
        }
    }

    /// Reads the place from the environment. A local rank that isn't set is 0 of 1 until the ranks have connected.
    pub fn find(var: Lookup) -> Result<Self, String> {
        let Some(found) = launched(var)? else { return Ok(Place::thread(0, 1)) };
        let (local_rank, local_world) = found.local.unwrap_or((0, 1));
        Ok(Place {
            rank: found.rank.1,
            world: found.world.1,
            local_rank,
            local_world,
            host: host_name(),
            launcher: found.launcher,
        })
    }

    /// Tells whether this is the one task of a Slurm step, which may start ranks by itself.
    pub fn is_lone_task(&self) -> bool {
        self.launcher == Launcher::Srun && self.world == 1
    }

    /// Tells whether the launcher set the local rank.
    pub(crate) fn knows_locals(var: Lookup) -> bool {
        launched(var).is_ok_and(|found| found.is_some_and(|found| found.local.is_some()))
    }
}

/// Reads the innermost launcher's variables. mpirun may run in a Slurm step, and torchrun under either, but not the other way round.
fn launched(var: Lookup) -> Result<Option<LauncherRank>, String> {
    let (by_hand, srun) = (torchrun(var)?, srun(var)?);
    if by_hand.is_some() && var("TORCHELASTIC_RUN_ID").is_some() {
        return Ok(by_hand);
    }
    // srun sets the variables of MPICH too, where it speaks the same protocol.
    let mpich = mpich(var)?.filter(|mpich| srun.as_ref().is_none_or(|srun| mpich.rank.1 != srun.rank.1));
    match (open_mpi(var)?.or(mpich).or(srun), by_hand) {
        (Some(launcher), Some(by_hand)) => {
            agree(by_hand.rank, launcher.rank)?;
            agree(by_hand.world, launcher.world)?;
            Ok(Some(LauncherRank { local: launcher.local.or(by_hand.local), ..launcher }))
        }
        (launcher, by_hand) => Ok(launcher.or(by_hand)),
    }
}

fn agree((name, value): Named, (other, theirs): Named) -> Result<(), String> {
    if value == theirs {
        return Ok(());
    }
    Err(format!("{name} is {value}, but {other} is {theirs}: unset {name}"))
}

fn open_mpi(var: Lookup) -> Result<Option<LauncherRank>, String> {
    let found = ranks(var, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")?;
    let Some((rank, world)) = found else { return Ok(None) };
    let local = locals(var, "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")?;
    Ok(Some(LauncherRank { rank, world, local, launcher: Launcher::OpenMpi }))
}

fn mpich(var: Lookup) -> Result<Option<LauncherRank>, String> {
    let Some((rank, world)) = ranks(var, "PMI_RANK", "PMI_SIZE")? else { return Ok(None) };
    let local = locals(var, "MPI_LOCALRANKID", "MPI_LOCALNRANKS")?;
    Ok(Some(LauncherRank { rank, world, local, launcher: Launcher::Mpich }))
}

/// Reads Slurm's variables. Only a step has ranks: the shell of a batch script has most of these variables too.
fn srun(var: Lookup) -> Result<Option<LauncherRank>, String> {
    if var("SLURM_STEP_ID").is_none() {
        return Ok(None);
    }
    let world_name =
        if var("SLURM_STEP_NUM_TASKS").is_some() { "SLURM_STEP_NUM_TASKS" } else { "SLURM_NTASKS" };
    let Some((rank, world)) = ranks(var, "SLURM_PROCID", world_name)? else { return Ok(None) };
    let local_world = match (var("SLURM_STEP_TASKS_PER_NODE"), number(var, "SLURM_NODEID")?) {
        (Some(counts), node) => {
            let counts = hosts::expand_counts("SLURM_STEP_TASKS_PER_NODE", &counts)?;
            counts.get(node.unwrap_or(0)).copied()
        }
        (None, _) => None,
    };
    let local = match (number(var, "SLURM_LOCALID")?, local_world) {
        (Some(local), Some(of)) if local < of => Some((local, of)),
        (Some(local), Some(of)) => {
            return Err(format!("SLURM_LOCALID is {local}, but SLURM_STEP_TASKS_PER_NODE gives {of} tasks"));
        }
        _ => None,
    };
    Ok(Some(LauncherRank { rank, world, local, launcher: Launcher::Srun }))
}

fn torchrun(var: Lookup) -> Result<Option<LauncherRank>, String> {
    let Some((rank, world)) = ranks(var, "RANK", "WORLD_SIZE")? else { return Ok(None) };
    let local = locals(var, "LOCAL_RANK", "LOCAL_WORLD_SIZE")?;
    Ok(Some(LauncherRank { rank, world, local, launcher: Launcher::Torchrun }))
}

fn ranks(
    var: Lookup,
    rank_name: &'static str,
    world_name: &'static str,
) -> Result<Option<(Named, Named)>, String> {
    let (rank, world) = (number(var, rank_name)?, number(var, world_name)?);
    match (rank, world) {
        (None, None) => Ok(None),
        (Some(_), None) => Err(format!("{rank_name} is set, but {world_name} is not")),
        (None, Some(_)) => Err(format!("{world_name} is set, but {rank_name} is not")),
        (_, Some(0)) => Err(format!("{world_name} is 0")),
        (Some(rank), Some(world)) if rank >= world => {
            Err(format!("{rank_name} is {rank}, but {world_name} is {world}"))
        }
        (Some(rank), Some(world)) => Ok(Some(((rank_name, rank), (world_name, world)))),
    }
}

/// Local rank and world size, if both are set.
fn locals(var: Lookup, rank_name: &str, world_name: &str) -> Result<Option<(usize, usize)>, String> {
    match (number(var, rank_name)?, number(var, world_name)?) {
        (Some(rank), Some(world)) if rank >= world => {
            Err(format!("{rank_name} is {rank}, but {world_name} is {world}"))
        }
        (Some(rank), Some(world)) => Ok(Some((rank, world))),
        _ => Ok(None),
    }
}

fn number(var: Lookup, name: &str) -> Result<Option<usize>, String> {
    let Some(text) = var(name) else { return Ok(None) };
    match text.trim().parse() {
        Ok(number) => Ok(Some(number)),
        Err(_) => Err(format!("{name} is \"{text}\", which is not a number")),
    }
}

pub(crate) fn host_name() -> String {
    let mut name = [0u8; 256];
    // SAFETY: the pointer and the length are those of the array.
    let answer = unsafe { libc::gethostname(name.as_mut_ptr().cast(), name.len()) };
    let end = name.iter().position(|byte| *byte == 0).unwrap_or(name.len());
    match answer {
        0 => String::from_utf8_lossy(&name[..end]).into_owned(),
        _ => "localhost".to_string(),
    }
}

#[cfg(test)]
mod tests;
