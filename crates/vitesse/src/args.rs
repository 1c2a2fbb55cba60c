//! What can be typed. Defaults live in `train::config`, so that they are the same for every front end.

use clap::{Args, Parser, Subcommand, ValueEnum};
use graph::Recompute;
use models::names::Convention;
use models::vit::Pool;
use std::path::PathBuf;
use train::Raw;

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
    Train(TrainArgs),
    /// Score weights on the held-out set
    Eval(EvalArgs),
    /// Print the plan a run would execute: every step with its operations, bytes, lane and memory
    Plan(PlanArgs),
    /// Time a training step on random data, and its matrix products alone
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
}

#[derive(Args, Clone)]
pub struct ModelArgs {
    /// vit-SIZE/PATCH, SIZE one of nano, ti, s, b, l, h [default: vit-nano/4]
    #[arg(long, value_name = "MODEL")]
    model: Option<String>,
    /// Side of the square images, in pixels [default: 32]
    #[arg(long, value_name = "PIXELS")]
    image_size: Option<usize>,
    /// Channels of an image [default: 3]
    #[arg(long)]
    channels: Option<usize>,
    /// Classes to tell apart [default: 10]
    #[arg(long)]
    classes: Option<usize>,
    /// How tokens become one vector [default: class-token]
    #[arg(long, value_enum)]
    pool: Option<PoolArg>,
    /// Images of a micro-step, per rank [default: 64]
    #[arg(long, value_name = "IMAGES")]
    batch_size: Option<usize>,
    /// CPU threads [default: all]
    #[arg(long)]
    threads: Option<usize>,
    /// Seed of weights, data, order and dropout [default: 0]
    #[arg(long)]
    seed: Option<u64>,
}

#[derive(Args, Clone)]
pub struct StepArgs {
    /// Rate of dropout
    #[arg(long, value_name = "RATE")]
    dropout: Option<f64>,
    /// Rate of dropout on attention probabilities
    #[arg(long, value_name = "RATE")]
    attention_dropout: Option<f64>,
    /// Rate of stochastic depth at the last block
    #[arg(long, value_name = "RATE")]
    drop_path: Option<f64>,
    /// Label smoothing
    #[arg(long, value_name = "RATE")]
    label_smoothing: Option<f64>,
    /// adamw, sgd or lamb [default: adamw]
    #[arg(long)]
    optimizer: Option<String>,
    /// Weight decay of matrices [default: 0.05 for adamw, 1e-4 for sgd, 0.01 for lamb]
    #[arg(long)]
    weight_decay: Option<f64>,
    /// Largest gradient norm; 0 to leave gradients as they are [default: 1]
    #[arg(long, value_name = "NORM")]
    clip: Option<f64>,
    /// Which activations to compute again instead of keeping them [default: none]
    #[arg(long, value_enum)]
    recompute: Option<RecomputeArg>,
}

#[derive(Args, Clone)]
pub struct DataArgs {
    /// The data set: synthetic [default: synthetic]
    #[arg(long, value_name = "SET")]
    data: Option<String>,
    /// Images to draw for training [default: 20000]
    #[arg(long, value_name = "IMAGES")]
    train_samples: Option<usize>,
    /// Images to draw for evaluation [default: 2000]
    #[arg(long, value_name = "IMAGES")]
    test_samples: Option<usize>,
}

/// Examples:
///   vitesse train
///   vitesse train --model vit-ti/4 --batch-size 32 --accumulate 2 --out runs/first
///   vitesse train --init runs/first/weights.safetensors --model vit-ti/4 --lr 1e-4 --steps 100
#[derive(Args, Clone)]
#[command(verbatim_doc_comment)]
pub struct TrainArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub step: StepArgs,
    #[command(flatten)]
    pub data: DataArgs,
    /// Micro-steps whose gradients make one optimizer step [default: 1]
    #[arg(long, value_name = "MICRO_STEPS")]
    pub accumulate: Option<usize>,
    /// Passes over the training set [default: 3]
    #[arg(long)]
    pub epochs: Option<u64>,
    /// Optimizer steps, instead of epochs
    #[arg(long)]
    pub steps: Option<u64>,
    /// Highest learning rate; warms up, then falls as a cosine [default: 1e-3 for adamw, 0.03 for sgd, 4e-3 for lamb]
    #[arg(long)]
    pub lr: Option<f64>,
    /// Steps of warm-up [default: a twentieth of all]
    #[arg(long, value_name = "STEPS")]
    pub warmup_steps: Option<u64>,
    /// Weights to start from: safetensors under timm's, torchvision's or Hugging Face's names
    #[arg(long, value_name = "WEIGHTS")]
    pub init: Option<PathBuf>,
    /// Folder for metrics.jsonl and weights.safetensors
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Print one JSON object at the end instead of text
    #[arg(long)]
    pub json: bool,
}

/// Examples:
///   vitesse eval --weights runs/first/weights.safetensors --model vit-ti/4
///   vitesse eval --weights w.safetensors --model vit-ti/4 --export out.safetensors --to torchvision
#[derive(Args, Clone)]
#[command(verbatim_doc_comment)]
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

/// Examples:
///   vitesse plan --model vit-b/16 --image-size 224 --batch-size 4
///   vitesse plan --recompute full --which micro --json
#[derive(Args, Clone)]
#[command(verbatim_doc_comment)]
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

/// Examples:
///   vitesse bench --model vit-ti/4 --batch-size 64 --threads 1
///   vitesse bench --model vit-b/16 --image-size 224 --batch-size 4 --classes 1000 --json
#[derive(Args, Clone)]
#[command(verbatim_doc_comment)]
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

#[derive(Clone, Copy, ValueEnum)]
pub enum PoolArg {
    ClassToken,
    Mean,
}

#[derive(Clone, Copy, ValueEnum)]
pub enum RecomputeArg {
    None,
    Full,
}

#[derive(Clone, Copy, ValueEnum, PartialEq)]
pub enum WhichArg {
    Micro,
    Last,
    Update,
    Eval,
}

impl ModelArgs {
    pub fn raw(self) -> Raw {
        Raw {
            model: self.model,
            image_size: self.image_size,
            channels: self.channels,
            classes: self.classes,
            pool: self.pool.map(|p| match p {
                PoolArg::ClassToken => Pool::ClassToken,
                PoolArg::Mean => Pool::Mean,
            }),
            batch_size: self.batch_size,
            threads: self.threads,
            seed: self.seed,
            ..Raw::default()
        }
    }
}

impl StepArgs {
    pub fn raw(self, raw: Raw) -> Raw {
        Raw {
            dropout: self.dropout,
            attention_dropout: self.attention_dropout,
            drop_path: self.drop_path,
            label_smoothing: self.label_smoothing,
            optimizer: self.optimizer,
            weight_decay: self.weight_decay,
            clip: self.clip,
            recompute: self.recompute.map(|r| match r {
                RecomputeArg::None => Recompute::None,
                RecomputeArg::Full => Recompute::Full,
            }),
            ..raw
        }
    }
}

impl DataArgs {
    pub fn raw(self, raw: Raw) -> Raw {
        Raw { data: self.data, train_samples: self.train_samples, test_samples: self.test_samples, ..raw }
    }
}

impl TrainArgs {
    pub fn raw(self) -> Raw {
        let raw = self.data.raw(self.step.raw(self.model.raw()));
        Raw {
            accumulate: self.accumulate,
            epochs: self.epochs,
            steps: self.steps,
            lr: self.lr,
            warmup_steps: self.warmup_steps,
            init: self.init,
            out: self.out,
            ..raw
        }
    }
}
