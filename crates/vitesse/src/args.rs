//! What can be typed. Defaults live in `train::config`, so that they are the same for every front end.

mod settings;

use clap::{Args, Parser, Subcommand, ValueEnum};
use models::names::Convention;
use settings::{AugmentArgs, DataArgs, ModelArgs, OptimizerArgs, OutputArgs, RunArgs, StepArgs};
use std::path::PathBuf;
use train::Raw;
use train::deepspeed::{ConfigError, DeepSpeed};

const TRAIN: &str = "\
Examples:
  vitesse train
  vitesse train --model vit-ti/4 --batch-size 32 --accumulate 2 --out runs/first
  vitesse train --init runs/first/weights.safetensors --model vit-ti/4 --lr 1e-4 --steps 100
  vitesse train --config deepspeed.json --precision fp32";
const EVAL: &str = "\
Examples:
  vitesse eval --weights runs/first/weights.safetensors --model vit-ti/4
  vitesse eval --weights w.safetensors --model vit-ti/4 --export out.safetensors --to torchvision";
const PLAN: &str = "\
Examples:
  vitesse plan --model vit-b/16 --image-size 224 --batch-size 4
  vitesse plan --recompute full --which micro --json";
const BENCH: &str = "\
Examples:
  vitesse bench --model vit-ti/4 --batch-size 64 --threads 1
  vitesse bench --model vit-b/16 --image-size 224 --batch-size 4 --classes 1000 --json";
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
    /// Score weights on the held-out set
    #[command(after_help = EVAL)]
    Eval(EvalArgs),
    /// Print the plan a run would execute: every step with its operations, bytes, lane and memory
    #[command(after_help = PLAN)]
    Plan(PlanArgs),
    /// Time a training step on random data, and its matrix products alone
    #[command(after_help = BENCH)]
    Bench(BenchArgs),
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
    pub output: OutputArgs,
    /// Print one JSON object at the end instead of text
    #[arg(long, help_heading = "Output")]
    pub json: bool,
}

#[derive(Args, Clone)]
pub struct EvalArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub data: DataArgs,
    /// Weights to score: safetensors under timm's, torchvision's or Hugging Face's names
    #[arg(long, value_name = "WEIGHTS")]
    pub weights: PathBuf,
    /// Write the logits of all evaluated images, in order, with the images and labels
    #[arg(long, value_name = "FILE")]
    pub logits: Option<PathBuf>,
    /// Write the weights again, under the names given by --to
    #[arg(long, value_name = "FILE", requires = "to")]
    pub export: Option<PathBuf>,
    /// Whose names to export under
    #[arg(long, value_name = "timm|torchvision|huggingface", requires = "export")]
    pub to: Option<Convention>,
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
    /// Which plan to print in full; without it, a summary of all
    #[arg(long, value_enum)]
    pub which: Option<WhichArg>,
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
    /// Timed steps
    #[arg(long, default_value_t = 10)]
    pub steps: usize,
    /// Run one step for every line on standard input, answering with seconds: for harnesses that alternate programs
    #[arg(long)]
    pub on_request: bool,
    /// Print JSON instead of text
    #[arg(long)]
    pub json: bool,
}

#[derive(Args, Clone)]
pub struct ExplainArgs {
    /// A DeepSpeed configuration
    #[arg(value_name = "FILE", conflicts_with = "config")]
    pub file: PathBuf,
    /// Explain a run over this many ranks
    #[arg(long, default_value_t = 1)]
    pub ranks: usize,
    #[command(flatten)]
    pub train: TrainArgs,
}

#[derive(Clone, Copy, ValueEnum, PartialEq)]
pub enum WhichArg {
    Micro,
    Last,
    Update,
    Eval,
}

impl TrainArgs {
    /// What was typed, with the configuration file read.
    pub fn raw(self) -> Result<Raw, ConfigError> {
        let deepspeed = self.run.config.as_deref().map(DeepSpeed::read).transpose()?;
        let raw = self.data.raw(self.step.raw(self.model.raw()));
        let raw = self.optimizer.raw(self.augment.raw(raw));
        Ok(Raw { deepspeed, ..self.output.raw(self.run.raw(raw)) })
    }
}

impl ExplainArgs {
    pub fn raw(self) -> Result<Raw, ConfigError> {
        let deepspeed = Some(DeepSpeed::read(&self.file)?);
        Ok(Raw { deepspeed, ..self.train.raw()? })
    }
}
