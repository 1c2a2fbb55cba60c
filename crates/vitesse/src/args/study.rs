//! What `vitesse study` and `vitesse compare` take.

use clap::Args;
use comm::Backend;
use config::Task;
use std::net::SocketAddr;
use std::path::PathBuf;
use study::spec::{Asked, Experiment, Launch};

#[derive(Args, Clone)]
pub struct StudyArgs {
    /// quick, strong, weak, fixed-per-rank, batch, accumulation, optimizer, precision, nodes, or a file in TOML or JSON; with `plan`
    /// before it, points and an estimate of the time are printed, and nothing runs
    #[arg(value_name = "[plan] STUDY|FILE", num_args = 0..=2, required_unless_present = "resume", conflicts_with = "resume")]
    pub what: Vec<String>,
    /// Go on with the study in this folder
    #[arg(long, value_name = "DIR")]
    pub resume: Option<PathBuf>,
    /// Folder for points/, results.json, results.csv, report.html and report.md; a study that was interrupted there goes on [default: studies/NAME]
    #[arg(long, value_name = "DIR", conflicts_with = "resume")]
    pub out: Option<PathBuf>,
    /// Run failed runs again
    #[arg(long)]
    pub retry_failed: bool,
    /// Runs of every point; from 5 on there are confidence intervals [default: 5]
    #[arg(long, value_name = "N")]
    pub repeats: Option<usize>,
    /// First steps of a run that don't count [default: 3]
    #[arg(long, value_name = "STEPS")]
    pub warmup: Option<u64>,
    /// Of the order in which points run [default: 0]
    #[arg(long)]
    pub seed: Option<u64>,
    /// What the study asks, for the report
    #[arg(long)]
    pub title: Option<String>,
    /// What legends call this machine [default: the host's name]
    #[arg(long, value_name = "NAME")]
    pub platform: Option<String>,
    /// Show the points that are done, and the run that goes on, on a live page at ADDR [default: 127.0.0.1:8420]
    #[arg(long, value_name = "ADDR", num_args = 0..=1, require_equals = true)]
    pub serve: Option<Option<SocketAddr>>,
    /// Print JSON instead of text
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub grid: GridArgs,
    #[command(flatten)]
    pub launch: StartArgs,
    /// Options of `vitesse train` for every run
    #[arg(last = true, value_name = "TRAIN_OPTIONS")]
    pub train: Vec<String>,
}

#[derive(Args, Clone)]
#[command(next_help_heading = "Grid (lists are separated by commas)")]
pub struct GridArgs {
    /// classify or segment [default: as the models and the data have it]
    #[arg(long)]
    task: Option<Task>,
    /// Ranks [default: 1, 2, 4, … up to the cores, or 1 where something else varies]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    ranks: Option<Vec<usize>>,
    /// Numbers of hosts [default: 1]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    nodes: Option<Vec<usize>>,
    /// Images of a micro-step of one rank; for strong and nodes, of a step of all ranks [default: those of one rank of `vitesse train`;
    /// for strong and nodes, rounded up to what all ranks × accumulations divide]
    #[arg(long, value_name = "LIST", value_delimiter = ',', alias = "batch-size")]
    batch_sizes: Option<Vec<usize>>,
    /// Micro-steps for each exchange
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    accumulation: Option<Vec<usize>>,
    /// Models, as vit-ti/4 or swinv2-b/w8+upernet
    #[arg(long, value_name = "LIST", value_delimiter = ',', alias = "models")]
    model: Option<Vec<String>>,
    /// Data sets, as cifar10:DIR or ade20k:DIR
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    data: Option<Vec<String>>,
    /// Part of the training set; for weak, of each rank [default: 1; for weak, such that all ranks use all of it]
    #[arg(long, value_name = "LIST", value_delimiter = ',', alias = "data-fractions")]
    data_fraction: Option<Vec<f64>>,
    /// adamw, sgd, lamb
    #[arg(long, value_name = "LIST", value_delimiter = ',', alias = "optimizer")]
    optimizers: Option<Vec<String>>,
    /// fp32, fp64; on a GPU also tf32, bf16, fp16
    #[arg(long, value_name = "LIST", value_delimiter = ',', alias = "precision")]
    precisions: Option<Vec<String>>,
    /// Threads of a rank [default: the cores divided by the most ranks, the same for all points]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    threads: Option<Vec<usize>>,
    /// cpu or cuda
    #[arg(long)]
    pub device: Option<String>,
    /// Passes over the data in a run [default: 1]
    #[arg(long, conflicts_with = "steps")]
    epochs: Option<u64>,
    /// Optimizer steps of a run, instead; for fixed-per-rank those of one rank, so that more ranks make fewer
    #[arg(long, visible_alias = "iterations")]
    steps: Option<u64>,
}

#[derive(Args, Clone)]
#[command(next_help_heading = "How ranks are started")]
pub struct StartArgs {
    /// More ranks × threads than cores are meant; such points are marked, and stay out of efficiency
    #[arg(long)]
    oversubscribe: bool,
    /// Communication backend: threads, mpi or nccl [default: threads]
    #[arg(long, value_name = "BACKEND")]
    comm: Option<Backend>,
    /// Hosts that mpirun starts ranks on
    #[arg(long, value_name = "NAMES", value_delimiter = ',', conflicts_with = "hostfile")]
    hosts: Vec<String>,
    /// A file of hosts as mpirun reads it
    #[arg(long, value_name = "FILE")]
    hostfile: Option<PathBuf>,
    /// A command that starts the ranks, as 'srun -N {hosts} -n {ranks}'; also {per-host}, {hostlist}, {hostfile}, {command}
    #[arg(long, value_name = "TEMPLATE")]
    launcher: Option<String>,
}

#[derive(Args, Clone)]
pub struct CompareArgs {
    /// A study's folder, or its results.json
    pub a: PathBuf,
    /// Another
    pub b: PathBuf,
    /// Print JSON instead of text
    #[arg(long)]
    pub json: bool,
}

impl StudyArgs {
    /// What was typed, to be put over what the named study or file says.
    pub fn asked(self) -> Asked {
        let (grid, start) = (self.grid, self.launch);
        let common = Experiment {
            kind: None,
            task: grid.task.map(|task| task.to_string()),
            ranks: grid.ranks,
            nodes: grid.nodes,
            batch_sizes: grid.batch_sizes,
            accumulation: grid.accumulation,
            models: grid.model,
            data: grid.data,
            data_fractions: grid.data_fraction,
            optimizers: grid.optimizers,
            precisions: grid.precisions,
            threads: grid.threads,
            device: grid.device,
            epochs: grid.epochs,
            steps: grid.steps,
            warmup: self.warmup,
        };
        let launch = Launch {
            comm: start.comm.map(|comm| comm.to_string()),
            hosts: start.hosts,
            hostfile: start.hostfile,
            launcher: start.launcher,
        };
        Asked {
            name: None,
            title: self.title,
            platform: self.platform,
            repeats: self.repeats,
            seed: self.seed,
            oversubscribe: start.oversubscribe,
            launch,
            train: self.train,
            common,
            experiments: vec![],
        }
    }
}
