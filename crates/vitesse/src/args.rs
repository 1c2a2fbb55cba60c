//! What can be typed. Settings and their defaults are declared in `config::settings`.

mod examples;
mod familiar;
pub mod launch;
mod refusal;
mod settings;
pub mod study;
mod weights;

use clap::{Arg, Args, CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum};
use config::settings::{BENCH, INSPECT, PLAN, TRAIN};
use config::{PageAddress, Raw, Task};
use settings::Settings;
use std::ffi::{OsStr, OsString};
use std::path::PathBuf;
pub use weights::{ClassifyArgs, EvalArgs, ExportArgs, SegmentArgs};

/// Trains vision transformers, and measures how well that scales.
#[derive(Parser)]
#[command(version, propagate_version = true, arg_required_else_help = true)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Subcommand)]
pub enum Command {
    /// Train a model; with no options, a small ViT on the built-in set, in a minute and a half on two cores
    #[command(after_help = examples::TRAIN)]
    Train(Box<TrainArgs>),
    /// Measure how training scales: every point of a grid several times, in shuffled order, with what limits it
    #[command(after_help = examples::STUDY, override_usage = "vitesse study [plan] STUDY|FILE [OPTIONS]\n       [-- TRAIN_OPTIONS]")]
    Study(Box<study::StudyArgs>),
    /// Compare two studies: by how much the second is faster than the first, with an interval
    #[command(after_help = examples::COMPARE)]
    Compare(study::CompareArgs),
    /// Print, or write, what starts a run on several nodes: an sbatch script, or a line for mpirun or torchrun
    #[command(after_help = examples::LAUNCH)]
    Launch(launch::LaunchArgs),
    /// Evaluate weights on the validation set
    #[command(after_help = examples::EVAL)]
    Eval(EvalArgs),
    /// Classify images: print the most probable classes
    #[command(after_help = examples::CLASSIFY)]
    Classify(ClassifyArgs),
    /// Segment images: write a mask, and the image with the classes laid over
    #[command(after_help = examples::SEGMENT)]
    Segment(SegmentArgs),
    /// Write weights under the names that timm, torchvision or Hugging Face use, or the model as ONNX
    #[command(after_help = examples::EXPORT)]
    Export(ExportArgs),
    /// Download or make data sets, or look at one
    #[command(subcommand)]
    Data(DataCommand),
    /// List the models: families, sizes, parameters and operations
    ///
    /// Any of the names is a --model; sizes, patches and windows combine beyond the listed ones (`vitesse train --help`).
    Models {
        /// Print JSON instead of text
        #[arg(long)]
        json: bool,
    },
    /// Print the plan a run would execute: every step with its operations, bytes, lane and memory
    #[command(after_help = examples::PLAN)]
    Plan(PlanArgs),
    /// Time a training step on random data and its matmuls alone, or inference
    #[command(after_help = examples::BENCH)]
    Bench(BenchArgs),
    /// Draw the report of a study again from its results; from two or more, one platform against another
    #[command(after_help = examples::REPORT)]
    Report(ReportArgs),
    /// Show the runs and studies below a folder in a browser, those that go on and those that ended, each with its page
    #[command(after_help = examples::SERVE)]
    Serve(ServeArgs),
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
    Man {
        out: PathBuf,
        #[command(flatten)]
        overwrite: Overwrite,
    },
    /// Look into a configuration
    #[command(subcommand)]
    Config(ConfigCommand),
}

/// For commands that write files.
#[derive(Args, Clone, Copy)]
pub struct Overwrite {
    /// Replace files that are there already
    #[arg(long)]
    pub force: bool,
}

#[derive(Subcommand)]
pub enum ConfigCommand {
    /// Print every setting of the run that these flags of `train` make, its value and what decided it, and what becomes of every
    /// key of a DeepSpeed configuration; fails if the run would be refused
    #[command(after_help = examples::EXPLAIN)]
    Explain(Box<ExplainArgs>),
}

#[derive(Args, Clone)]
pub struct TrainArgs {
    #[command(flatten)]
    pub settings: Settings<{ TRAIN }>,
}

#[derive(Subcommand)]
pub enum DataCommand {
    /// Download a data set from its official site; goes on where a broken download stopped
    #[command(after_help = examples::GET)]
    Get(GetArgs),
    /// Write a synthetic set as image files, to try a folder of images without a download
    #[command(after_help = examples::MAKE)]
    Make(MakeArgs),
    /// Count images, sizes and classes, and draw a sheet of what a model would see
    #[command(after_help = examples::INSPECT)]
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
pub struct MakeArgs {
    /// New folder for train/ and val/
    #[arg(value_name = "DIR")]
    pub folder: PathBuf,
    /// classify: a folder for each class; segment: images/ and masks/
    #[arg(long, default_value = "classify")]
    pub task: Task,
    /// Training images
    #[arg(long, value_name = "IMAGES", default_value_t = 400)]
    pub train_samples: usize,
    /// Validation images
    #[arg(long, value_name = "IMAGES", default_value_t = 100)]
    pub test_samples: usize,
    /// Side of the square images, in pixels
    #[arg(long, value_name = "PIXELS", default_value_t = 96)]
    pub image_size: usize,
    /// Classes; of masks, the ground is one
    #[arg(long, default_value_t = 4)]
    pub classes: usize,
    /// Seed of the images
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
}

#[derive(Args, Clone)]
pub struct InspectArgs {
    /// Draw augmented training samples into a PNG file
    #[arg(long, value_name = "FILE.png")]
    pub sheet: Option<PathBuf>,
    #[command(flatten)]
    pub overwrite: Overwrite,
    /// Print JSON instead of text
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub settings: Settings<{ INSPECT }>,
}

#[derive(Args, Clone)]
pub struct PlanArgs {
    /// Ranks that train together [default: 1]
    #[arg(long, help_heading = "Ranks")]
    pub ranks: Option<usize>,
    /// Compare with the plans that these flags would make of this command line, as in --diff '--zero 2': the memory of a rank, and with
    /// --which the steps that one of the two doesn't have
    #[arg(long, value_name = "FLAGS", allow_hyphen_values = true, conflicts_with_all = ["print_after", "json"])]
    pub diff: Option<String>,
    /// Which plan to print in full; without it, a summary of all
    #[arg(long, value_enum)]
    pub which: Option<WhichArg>,
    /// Print the graph of a plan as this pass leaves it, on its way from the model to the plan
    #[arg(long, value_name = "PASS", conflicts_with = "json")]
    pub print_after: Option<String>,
    /// Print JSON instead of text
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub settings: Settings<{ PLAN }>,
}

#[derive(Args, Clone)]
pub struct BenchArgs {
    /// Ranks, on threads of this process, with an all-reduce of gradients in every step
    #[arg(long, default_value_t = 1, help_heading = "Ranks")]
    pub ranks: usize,
    /// Time inference instead of training steps: latency and images/s of batches of 1, 2, 4, … up to --batch-size, from images to
    /// logits in the host's memory
    #[arg(long, conflicts_with_all = ["kernels", "on_request"])]
    pub inference: bool,
    /// Timed steps, or batches of each size with --inference [default: 10; 50 with --inference]
    #[arg(long)]
    pub steps: Option<usize>,
    /// Go on for at least so many seconds; with --inference, for at most so many for each size, after 10 batches [default: 0; 5]
    #[arg(long, default_value_t = 0.0, hide_default_value = true)]
    pub seconds: f64,
    /// Time every kernel and matmul of the step by itself, too (GPUs only)
    #[arg(long)]
    pub kernels: bool,
    /// Run one step for every line on standard input, answering with seconds: for harnesses that alternate programs
    #[arg(long)]
    pub on_request: bool,
    /// Print JSON instead of text
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub settings: Settings<{ BENCH }>,
}

#[derive(Args, Clone)]
pub struct ReportArgs {
    /// Folders of studies, or their results.json
    #[arg(required = true, value_name = "DIR")]
    pub folders: Vec<PathBuf>,
    /// Folder for report.html and report.md [default: that of the results]
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Write every figure as a file, with its numbers as CSV beside it: pdf, svg or png
    #[arg(long, value_name = "FORMAT")]
    pub figures: Option<FigureArg>,
    /// Folder for figures [default: figures, in the report's folder]
    #[arg(long, value_name = "DIR", requires = "figures")]
    pub figures_dir: Option<PathBuf>,
    /// Width of figures in mm, cm, in or pt, such as 85mm [default: 752 px]
    #[arg(long, value_name = "LENGTH", requires = "figures", value_parser = millimetres)]
    pub width: Option<f64>,
    /// Size of text at the axes of figures, in points, 4 to 40 [default: 8 with --width]
    #[arg(long, value_name = "PT", requires = "figures", value_parser = points)]
    pub font_size: Option<f64>,
    /// Leave title and note out of figures: a caption says them
    #[arg(long, requires = "figures")]
    pub no_title: bool,
    #[command(flatten)]
    pub overwrite: Overwrite,
}

#[derive(Args, Clone)]
pub struct ServeArgs {
    /// Folder that runs and studies lie in, at any depth up to six; or one run or study
    #[arg(value_name = "RUNS_DIR")]
    pub folder: PathBuf,
    /// Where to serve: a port, a host or both, as 9999 or localhost:8433; port 0 is any that is free
    #[arg(long, value_name = "ADDR", default_value_t)]
    pub address: PageAddress,
}

#[derive(Args, Clone)]
pub struct ExplainArgs {
    /// A DeepSpeed configuration in JSON, or settings in TOML
    #[arg(value_name = "FILE", conflicts_with = "config")]
    pub file: Option<PathBuf>,
    #[command(flatten)]
    pub train: TrainArgs,
}

#[derive(Clone, Copy, ValueEnum, PartialEq)]
pub enum FigureArg {
    Pdf,
    Svg,
    Png,
}

/// Millimetres of a length with its unit.
fn millimetres(text: &str) -> Result<f64, String> {
    let units = [("mm", 1.0), ("cm", 10.0), ("in", 25.4), ("pt", 25.4 / 72.0)];
    let parsed =
        units.iter().find_map(|(unit, mm)| Some(text.strip_suffix(unit)?.trim().parse::<f64>().ok()? * mm));
    let parsed = parsed.filter(|mm| mm.is_finite() && *mm > 0.0);
    parsed.ok_or_else(|| "must be a length with its unit, such as 85mm, 17.4cm, 3.3in or 240pt".to_string())
}

fn points(text: &str) -> Result<f64, String> {
    let size = text.strip_suffix("pt").unwrap_or(text).parse().ok();
    size.filter(|size| (4.0..=40.0).contains(size)).ok_or_else(|| "must be 4 to 40 points".to_string())
}

#[derive(Clone, Copy, ValueEnum, PartialEq)]
pub enum WhichArg {
    First,
    Micro,
    Last,
    Update,
    Eval,
}

impl Cli {
    /// What was typed, or the one line that says what is wrong with it. Help and versions are printed, and end the program.
    pub fn read<W: AsRef<OsStr>>(words: &[W]) -> anyhow::Result<Cli> {
        let words: Vec<OsString> = words.iter().map(|word| word.as_ref().to_os_string()).collect();
        let parsed = numbered(Cli::command()).try_get_matches_from(&words);
        parsed.and_then(|matches| Cli::from_arg_matches(&matches)).map_err(|error| {
            match refusal::line(&error, &words) {
                Some(line) => anyhow::Error::msg(line),
                // Where a command is missing, help goes to standard error; 2 is no exit code of ours.
                None if error.exit_code() != 0 => {
                    let _ = error.print();
                    std::process::exit(1)
                }
                None => error.exit(),
            }
        })
    }
}

/// With negative numbers as values of flags: `--lr -1` is refused as a rate, not as a flag called -1.
fn numbered(command: clap::Command) -> clap::Command {
    let valued = |arg: &Arg| arg.get_action().takes_values() && !arg.is_positional();
    let one = |arg: Arg| if valued(&arg) { arg.allow_negative_numbers(true) } else { arg };
    command.mut_args(one).mut_subcommands(numbered)
}

/// What was typed after `vitesse train`, without reading files.
pub fn typed_for_train(command: &[String]) -> anyhow::Result<Raw> {
    match Cli::read(command)?.command {
        Command::Train(args) => Ok(args.settings.0),
        _ => anyhow::bail!("the run was not started by `vitesse train`"),
    }
}
