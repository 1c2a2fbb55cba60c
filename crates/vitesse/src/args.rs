//! What can be typed. Defaults live in `train::config`, so that they are the same for every front end.

pub mod launch;
mod settings;
pub mod study;
mod weights;

use clap::{Args, Parser, Subcommand, ValueEnum};
use config::Raw;
use config::deepspeed::{DeepSpeed, FileError};
pub use settings::RanksArgs;
use settings::{
    AugmentArgs, DataArgs, DeviceArgs, ExchangeArgs, ModelArgs, OptimizerArgs, OutputArgs, RunArgs, StepArgs,
};
use std::path::{Path, PathBuf};
use weights::SingleDeviceArgs;
pub use weights::{ClassifyArgs, EvalArgs, ExportArgs, SegmentArgs};

const TRAIN: &str = "\
Examples:
  vitesse train
  vitesse train --model vit-ti/4 --batch-size 32 --accumulate 2 --out runs/first
  vitesse train --init runs/first/weights.safetensors --model vit-ti/4 --lr 1e-4 --steps 100
  vitesse train --config deepspeed.json --precision fp32
  vitesse train --task segment
  vitesse train --data ade20k:ADEChallengeData2016 --model swinv2-b/w8+upernet --iterations 160000 --device cuda --out runs/ade20k
  vitesse train --ranks 4 --out runs/four --max-restarts 2
  vitesse train --model vit-s/16 --data folder:photos --out runs/photos --resume auto
  mpirun -n 4 vitesse train --out runs/four";
const STUDY: &str = "\
Examples:
  vitesse study quick
  vitesse study plan strong --ranks 1,2,4 --model vit-ti/4 --data cifar10:data
  vitesse study weak --ranks 1,2,4,8 --data cifar100:data --data-fraction 0.1 --out studies/weak
  vitesse study fixed-per-rank --ranks 1,2,4 --batch-sizes 8 --steps 160 --repeats 10
  vitesse study nodes --ranks 1,2,4 --hosts a,b,c,d --batch-sizes 64
  vitesse study strong --ranks 8,16,32 --nodes 1 --launcher 'srun -n {ranks}' -- --augment standard
  vitesse study experiments.toml
  vitesse study --resume studies/weak";
const COMPARE: &str = "\
Examples:
  vitesse compare studies/before studies/after
  vitesse compare studies/quick/results.json elsewhere/results.json --json";
const LAUNCH: &str = "\
Examples:
  vitesse launch --with mpirun --nodes 2 --per-node 4 --hosts a,b -- --model vit-b/16 --data folder:imagenet --out runs/b16
  vitesse launch --with slurm --nodes 4 --per-node 8 --gpus --time 12:00:00 --out job.sh -- --config deepspeed.json --out runs/b16";
const EVAL: &str = "\
Examples:
  vitesse eval --weights runs/first
  vitesse eval --weights runs/first/checkpoints/best.safetensors --data folder:photos --logits logits.safetensors
  vitesse eval --weights runs/ade20k --masks predicted --eval-mode slide
  vitesse eval --weights vit_b_16.pth --data folder:imagenet --mean 0.485,0.456,0.406 --std 0.229,0.224,0.225 --eval-resize 256";
const CLASSIFY: &str = "\
Examples:
  vitesse classify cat.jpg --weights runs/first
  vitesse classify photos/*.jpg --weights runs/first --grid answers.png";
const SEGMENT: &str = "\
Examples:
  vitesse segment street.jpg --weights runs/ade20k
  vitesse segment photos/*.jpg --weights runs/ade20k --out answers --eval-mode slide";
const EXPORT: &str = "\
Examples:
  vitesse export runs/first best.safetensors --to timm
  vitesse export vit_b_16.pth vit_b_16.safetensors --to huggingface --mean 0.485,0.456,0.406 --std 0.229,0.224,0.225";
const GET: &str = "\
Examples:
  vitesse data get cifar10 data
  vitesse train --data cifar10:data --model vit-ti/4 --augment standard --out runs/cifar10";
const INSPECT: &str = "\
Examples:
  vitesse data inspect --data cifar10:data
  vitesse data inspect --data folder:photos --augment strong --sheet sheet.png
  vitesse data inspect --data ade20k:ADEChallengeData2016 --augment strong --sheet sheet.png";
const PLAN: &str = "\
Examples:
  vitesse plan --model vit-b/16 --image-size 224 --batch-size 4
  vitesse plan --recompute full --which last --json
  vitesse plan --model vit-b/16 --image-size 224 --device cuda --precision bf16 --which last";
const BENCH: &str = "\
Examples:
  vitesse bench --model vit-ti/4 --batch-size 64 --threads 1
  vitesse bench --model vit-b/16 --image-size 224 --batch-size 4 --classes 1000 --json
  vitesse bench --model swinv2-b/w8+upernet --device cuda";
const REPORT: &str = "\
Examples:
  vitesse report studies/a100
  vitesse report studies/a100 studies/v100 --out studies/both
  vitesse report studies/a100 --figures svg paper/figures";
const EXPLAIN: &str = "\
Examples:
  vitesse config explain deepspeed.json
  vitesse config explain deepspeed.json --ranks 2 --precision fp32 --batch-size 16";

/// Trains vision transformers, and tells how well that scales.
#[derive(Parser)]
#[command(version, propagate_version = true, arg_required_else_help = true)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Subcommand)]
pub enum Command {
    /// Train a model; with no options, a small ViT on the built-in set, in about a minute on two cores
    #[command(after_help = TRAIN)]
    Train(Box<TrainArgs>),
    /// Measure how training scales: every point of a grid several times, in shuffled order, with what limits it
    #[command(after_help = STUDY)]
    Study(Box<study::StudyArgs>),
    /// Say whether the second of two studies is faster than the first, by how much, and how sure that is
    #[command(after_help = COMPARE)]
    Compare(study::CompareArgs),
    /// Print, or write, what starts a run on several nodes: an sbatch script, or a line for mpirun or torchrun
    #[command(after_help = LAUNCH)]
    Launch(launch::LaunchArgs),
    /// Evaluate weights on the validation set
    #[command(after_help = EVAL)]
    Eval(EvalArgs),
    /// Say what images show: the most probable classes
    #[command(after_help = CLASSIFY)]
    Classify(ClassifyArgs),
    /// Say what every pixel of images shows: a mask, and a picture with the classes laid over
    #[command(after_help = SEGMENT)]
    Segment(SegmentArgs),
    /// Write weights under the names that timm, torchvision or Hugging Face use
    #[command(after_help = EXPORT)]
    Export(ExportArgs),
    /// Download data sets, or look at one
    #[command(subcommand)]
    Data(DataCommand),
    /// Print the plan a run would execute: every step with its operations, bytes, lane and memory
    #[command(after_help = PLAN)]
    Plan(PlanArgs),
    /// Time a training step on random data, and its matrix products alone
    #[command(after_help = BENCH)]
    Bench(BenchArgs),
    /// Draw the report of a study again from its results; from two or more, one platform against another
    #[command(after_help = REPORT)]
    Report(ReportArgs),
    /// Show what this machine has and lacks, and what to install
    Doctor {
        /// Print JSON instead of text
        #[arg(long)]
        json: bool,
    },
    /// Print completions for a shell, to be put where it looks for them
    ///
    /// Example: vitesse completions bash > /etc/bash_completion.d/vitesse
    Completions { shell: clap_complete::Shell },
    /// Write the manual pages into a folder
    ///
    /// Example: vitesse man /usr/local/share/man/man1
    Man { out: PathBuf },
    /// Look into a configuration
    #[command(subcommand)]
    Config(ConfigCommand),
}

#[derive(Subcommand)]
pub enum ConfigCommand {
    /// Tell what becomes of every key of a DeepSpeed configuration, and what run it makes with these flags of `train`;
    /// fails if the run would be refused
    #[command(after_help = EXPLAIN)]
    Explain(Box<ExplainArgs>),
}

#[derive(Args, Clone)]
pub struct TrainArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub step: StepArgs,
    #[command(flatten)]
    pub data: DataArgs,
    #[command(flatten)]
    pub augment: AugmentArgs,
    #[command(flatten)]
    pub optimizer: OptimizerArgs,
    #[command(flatten)]
    pub run: RunArgs,
    #[command(flatten)]
    pub device: DeviceArgs,
    #[command(flatten)]
    pub ranks: RanksArgs,
    #[command(flatten)]
    pub exchange: ExchangeArgs,
    #[command(flatten)]
    pub output: OutputArgs,
    /// Print one JSON object at the end instead of text
    #[arg(long, help_heading = "Output")]
    pub json: bool,
}

#[derive(Subcommand)]
pub enum DataCommand {
    /// Download a data set from its official site; goes on where a broken download stopped
    #[command(after_help = GET)]
    Get(GetArgs),
    /// Count images, sizes and classes, and draw a sheet of what a model would see
    #[command(after_help = INSPECT)]
    Inspect(Box<InspectArgs>),
}

#[derive(Args, Clone)]
pub struct GetArgs {
    /// cifar10 or cifar100
    pub set: data::Downloadable,
    /// Where to put it
    #[arg(value_name = "DIR")]
    pub folder: PathBuf,
    /// Another place to get the archive from; it must have the official checksum
    #[arg(long, value_name = "URL")]
    pub from: Option<String>,
}

#[derive(Args, Clone)]
pub struct InspectArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub data: DataArgs,
    #[command(flatten)]
    pub augment: AugmentArgs,
    /// Draw augmented training samples into a PNG file
    #[arg(long, value_name = "FILE.png")]
    pub sheet: Option<PathBuf>,
    /// Print JSON instead of text
    #[arg(long)]
    pub json: bool,
}

#[derive(Args, Clone)]
pub struct PlanArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub step: StepArgs,
    #[command(flatten)]
    pub device: DeviceArgs,
    /// Micro-steps whose gradients make one optimizer step: with more than one, gradients need memory of their own [default: 1]
    #[arg(long, value_name = "MICRO_STEPS", help_heading = "Run")]
    pub accumulate: Option<usize>,
    /// Ranks that train together: the last micro-step exchanges their gradients
    #[arg(long, default_value_t = 1, help_heading = "Ranks")]
    pub ranks: usize,
    #[command(flatten)]
    pub exchange: ExchangeArgs,
    /// Which plan to print in full; without it, a summary of all
    #[arg(long, value_enum)]
    pub which: Option<WhichArg>,
    /// Print the graph of a plan as this pass leaves it, on its way from the model to the plan
    #[arg(long, value_name = "PASS", conflicts_with = "json")]
    pub print_after: Option<String>,
    /// Print JSON instead of text
    #[arg(long)]
    pub json: bool,
}

#[derive(Args, Clone)]
pub struct BenchArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub step: StepArgs,
    #[command(flatten)]
    pub device: SingleDeviceArgs,
    /// Ranks, on threads of this process, with an exchange of gradients in every step
    #[arg(long, default_value_t = 1, help_heading = "Ranks")]
    pub ranks: usize,
    #[command(flatten)]
    pub exchange: ExchangeArgs,
    /// Timed steps
    #[arg(long, default_value_t = 10)]
    pub steps: usize,
    /// Go on for at least so many seconds
    #[arg(long, default_value_t = 0.0)]
    pub seconds: f64,
    /// Time every kernel and product of the step by itself, too (GPUs only)
    #[arg(long)]
    pub kernels: bool,
    /// Run one step for every line on standard input, answering with seconds: for harnesses that alternate programs
    #[arg(long)]
    pub on_request: bool,
    /// Print JSON instead of text
    #[arg(long)]
    pub json: bool,
}

#[derive(Args, Clone)]
pub struct ReportArgs {
    /// Folders with a results.json
    #[arg(required = true, value_name = "DIR")]
    pub folders: Vec<PathBuf>,
    /// Folder for report.html and report.md [default: that of the results]
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Write every figure as a file, too
    #[arg(long, num_args = 2, value_names = ["svg|png", "DIR"])]
    pub figures: Option<Vec<PathBuf>>,
}

#[derive(Args, Clone)]
pub struct ExplainArgs {
    /// A DeepSpeed configuration
    #[arg(value_name = "FILE", conflicts_with = "config")]
    pub file: PathBuf,
    #[command(flatten)]
    pub train: TrainArgs,
}

#[derive(Clone, Copy, ValueEnum, PartialEq)]
pub enum WhichArg {
    First,
    Micro,
    Last,
    Update,
    Eval,
}

/// The arguments of a `train` command that was given before.
pub fn train_args(command: &[String]) -> anyhow::Result<TrainArgs> {
    match Cli::try_parse_from(command)?.command {
        Command::Train(args) => Ok(*args),
        _ => anyhow::bail!("the run was not started by `vitesse train`"),
    }
}

impl TrainArgs {
    /// Whether the run leaves files, so that it is worth going on when nobody reads what it prints.
    pub fn keeps_files(&self) -> bool {
        self.output.out.is_some() || self.run.resumes_any()
    }

    /// What was typed, with the configuration file read.
    pub fn raw(self) -> Result<Raw, FileError> {
        self.raw_within(Path::new(""))
    }

    /// The same as typed in another folder.
    pub fn raw_within(self, folder: &Path) -> Result<Raw, FileError> {
        let config = self.run.config.as_deref().map(|path| folder.join(path));
        let deepspeed = config.as_deref().map(DeepSpeed::read).transpose()?;
        let raw = self.data.raw(self.step.raw(self.model.raw()));
        let raw = self.device.raw(self.exchange.raw(self.optimizer.raw(self.augment.raw(raw))));
        let raw = Raw { deepspeed, ..self.output.raw(self.run.raw(raw)) };
        Ok(if folder.as_os_str().is_empty() { raw } else { raw.within(folder) })
    }
}

impl ExplainArgs {
    pub fn raw(self) -> Result<Raw, FileError> {
        let deepspeed = Some(DeepSpeed::read(&self.file)?);
        Ok(Raw { deepspeed, ..self.train.raw()? })
    }
}
