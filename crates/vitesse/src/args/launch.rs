//! What `vitesse launch` takes.

use super::Overwrite;
use clap::{Args, ValueEnum};
use std::path::PathBuf;

#[derive(Args, Clone)]
pub struct LaunchArgs {
    /// What starts the processes
    #[arg(long, value_enum)]
    pub with: WithArg,
    /// Machines
    #[arg(long, default_value_t = 1)]
    pub nodes: usize,
    /// Ranks on each machine: one for each GPU, or for a part of its cores
    #[arg(long, value_name = "RANKS", default_value_t = 1)]
    pub per_node: usize,
    /// Ask for as many GPUs on each node as there are ranks (slurm)
    #[arg(long)]
    pub gpus: bool,
    /// Cores for each rank (slurm)
    #[arg(long, value_name = "CORES")]
    pub cpus_per_rank: Option<usize>,
    /// The machines, rank 0's first
    #[arg(long, value_delimiter = ',', value_name = "HOSTS", conflicts_with = "hostfile")]
    pub hosts: Vec<String>,
    /// A file of hosts as mpirun reads it
    #[arg(long, value_name = "FILE")]
    pub hostfile: Option<PathBuf>,
    /// Limit of time, as sbatch takes it (slurm)
    #[arg(long)]
    pub time: Option<String>,
    /// Partition to run in (slurm)
    #[arg(long)]
    pub partition: Option<String>,
    /// Write a script instead of printing it
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
    #[command(flatten)]
    pub overwrite: Overwrite,
    /// Options of `vitesse train`
    #[arg(last = true, value_name = "TRAIN_OPTIONS")]
    pub train: Vec<String>,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
pub enum WithArg {
    Mpirun,
    Slurm,
    Torchrun,
}
