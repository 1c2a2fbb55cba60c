//! The flags that make up a run, in the groups that `--help` shows. Each group adds what was typed to a [`Raw`].

use clap::{Args, ValueEnum};
use comm::Backend;
use config::Raw;
use config::{
    Cache, Crop, Device, EvalMode, Every, Form, Interpolation, LrScale, Precision, Preset, RandAugment,
    Residual, Span, Task, Wire,
};
use graph::Recompute;
use models::vit::Pool;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;
use train::record;

#[derive(Args, Clone)]
#[command(next_help_heading = "Model")]
pub struct ModelArgs {
    /// classify: one class for each image; segment: a class for each pixel [default: as the model and the data have it]
    #[arg(long)]
    task: Option<Task>,
    /// vit-SIZE/PATCH, SIZE one of nano, ti, s, b, l, h, or swinv2-SIZE/wWINDOW, SIZE one of nano, ti, s, b, l or a width and
    /// the blocks of each stage, as 352-2-2-18-2, or timm's name of a DINOv2 or DeiT III, as vit_small_patch14_reg4_dinov2 or
    /// deit3_small_patch16_224; for pixels a ViT's name with +linear or swinv2-SIZE/wWINDOW+upernet [default:
    /// vit-nano/4; for drawn masks swinv2-nano/w8+upernet, for others swinv2-b/w8+upernet]
    #[arg(long, value_name = "MODEL")]
    model: Option<String>,
    /// Side of the square images, or of the cuts from images with masks, in pixels [default: 32, or 224 for folders; with masks 512, or 64 if
    /// they are drawn]
    #[arg(long, value_name = "PIXELS")]
    image_size: Option<usize>,
    /// Channels of an image [default: those of the data]
    #[arg(long)]
    channels: Option<usize>,
    /// Classes of the head, at least those of the data [default: those of the data]
    #[arg(long)]
    classes: Option<usize>,
    /// How tokens become one vector [default: class-token]
    #[arg(long, value_enum)]
    pool: Option<PoolArg>,
    /// Images of a micro-step, per rank [default: 64, or 8 with masks]
    #[arg(long, value_name = "IMAGES", help_heading = "Run")]
    batch_size: Option<usize>,
    /// CPU threads [default: all]
    #[arg(long, help_heading = "Run")]
    threads: Option<usize>,
    /// Seed of weights, data, order and dropout [default: 0]
    #[arg(long, help_heading = "Run")]
    seed: Option<u64>,
}

#[derive(Args, Clone)]
#[command(next_help_heading = "Model")]
pub struct StepArgs {
    /// Rate of dropout, from 0 to below 1; of UPerNet, that of channels before its classifiers [default: 0; 0.1 for UPerNet, as published]
    #[arg(long, value_name = "RATE")]
    dropout: Option<f64>,
    /// Rate of dropout on attention probabilities
    #[arg(long, value_name = "RATE")]
    attention_dropout: Option<f64>,
    /// Rate of stochastic depth at the last block [default: 0; 0.3 for a published Swin V2 with UPerNet]
    #[arg(long, value_name = "RATE")]
    drop_path: Option<f64>,
    /// Label smoothing [default: 0, or 0.1 with --augment strong]
    #[arg(long, value_name = "RATE", help_heading = "Augmentation")]
    label_smoothing: Option<f64>,
    /// adamw, sgd, lamb or muon, which orthogonalises the momentum of matrices and leaves all else to adamw [default: adamw]
    #[arg(long, help_heading = "Optimizer")]
    optimizer: Option<String>,
    /// Weight decay of matrices [default: 0.05 for adamw and muon, or 0.01 with masks; 1e-4 for sgd, 0.01 for lamb]
    #[arg(long, help_heading = "Optimizer")]
    weight_decay: Option<f64>,
    /// Largest gradient norm; 0 to leave gradients as they are [default: 1; 0 for a published Swin V2 with UPerNet]
    #[arg(long, value_name = "NORM", help_heading = "Optimizer")]
    clip: Option<f64>,
    /// Which activations to compute again instead of keeping them [default: none]
    #[arg(long, value_enum, help_heading = "Run")]
    recompute: Option<RecomputeArg>,
}

#[derive(Args, Clone)]
#[command(next_help_heading = "Data")]
pub struct DataArgs {
    #[arg(long, value_name = "SET", help = config::data_help() + " [default: synthetic, or for --task segment synthetic-masks]")]
    data: Option<String>,
    /// Images to draw for training, of the drawn sets [default: 20000, or 2000 with masks]
    #[arg(long, value_name = "IMAGES")]
    train_samples: Option<usize>,
    /// Images to draw for evaluation, of the drawn sets [default: 2000, or 200 with masks]
    #[arg(long, value_name = "IMAGES")]
    test_samples: Option<usize>,
    /// Threads that read images ahead of the training [default: 1, or all where files are decoded]
    #[arg(long, value_name = "THREADS")]
    workers: Option<usize>,
    /// Memory for decoded images: auto, off, or a size such as 2GB [default: auto]
    #[arg(long, value_name = "auto|off|BYTES")]
    cache: Option<Cache>,
    /// Leave out images that can't be read, instead of ending the run
    #[arg(long)]
    skip_bad_images: bool,
    /// Mean of an image's values, from 0 to 1: one number, or one for each channel [default: 0.5; with masks ImageNet's]
    #[arg(long, value_name = "NUMBERS", value_delimiter = ',')]
    mean: Vec<f32>,
    /// Their standard deviation [default: 0.5; with masks ImageNet's]
    #[arg(long, value_name = "NUMBERS", value_delimiter = ',')]
    std: Vec<f32>,
    /// bilinear or bicubic, where images are resized [default: bilinear]
    #[arg(long, value_name = "KIND")]
    interpolation: Option<Interpolation>,
    /// Evaluate on the middle of images resized to this, in pixels, up to 16384 [default: the whole image resized; with --crop resized, 8/7 of the image size]
    #[arg(long, value_name = "PIXELS")]
    eval_resize: Option<usize>,
    /// With masks: judge images whole, padded to one of a few sizes, or slide: through windows of the image size, by their mean where they
    /// overlap [default: whole; slide for a ViT]
    #[arg(long, value_name = "MODE")]
    eval_mode: Option<EvalMode>,
    /// With --eval-mode slide: from window to window [default: two thirds of the image size]
    #[arg(long, value_name = "PIXELS")]
    eval_stride: Option<usize>,
}

#[derive(Args, Clone)]
#[command(next_help_heading = "Augmentation")]
pub struct AugmentArgs {
    /// none; standard: random crops and mirror images; strong: also RandAugment, mixup, cutmix, erasing and label smoothing, with masks
    /// distorted colours [default: none; for files with masks strong]
    #[arg(long, value_name = "PRESET")]
    augment: Option<Preset>,
    /// Training images are cut: none; pad: at random after padding by an eighth; resized: a random part, resized
    #[arg(long, value_name = "CROP")]
    crop: Option<Crop>,
    /// How often an image is mirrored
    #[arg(long, value_name = "P")]
    flip: Option<f64>,
    /// Random operations on an image, up to 8, and their magnitude, up to 30
    #[arg(long, value_name = "N,M")]
    rand_augment: Option<RandAugment>,
    /// How often a part of the image is erased
    #[arg(long, value_name = "P")]
    erase: Option<f64>,
    /// Mix pairs of images, in shares drawn from Beta(A,A), A from 0.001 to 1000; 0 for none
    #[arg(long, value_name = "A")]
    mixup: Option<f64>,
    /// Paste a part of one image of a pair into the other, with A as for --mixup; 0 for none
    #[arg(long, value_name = "A")]
    cutmix: Option<f64>,
}

#[derive(Args, Clone)]
#[command(next_help_heading = "Optimizer")]
pub struct OptimizerArgs {
    /// Highest learning rate [default: 1e-3 for adamw and muon, or 6e-5 for a published Swin V2 with UPerNet; 0.03 for sgd, 4e-3 for lamb]
    #[arg(long)]
    lr: Option<f64>,
    /// How the rate falls: cosine, linear, step, poly or constant [default: cosine, or poly with masks]
    #[arg(long, value_name = "FORM")]
    schedule: Option<Form>,
    /// Steps of warm-up [default: a twentieth of all, or with masks a tenth but no more than 1500; none if the rate is constant]
    #[arg(long, value_name = "STEPS")]
    warmup_steps: Option<u64>,
    /// Lowest learning rate, of cosine, linear and poly [default: 0]
    #[arg(long, value_name = "LR")]
    min_lr: Option<f64>,
    /// With --schedule step: steps between drops of the rate, or epochs as in 30ep [default: a third of all]
    #[arg(long, value_name = "SPAN")]
    step_every: Option<Span>,
    /// With --schedule step: when the rate drops, as in 30ep,60ep
    #[arg(long, value_name = "SPANS", value_delimiter = ',')]
    milestones: Vec<Span>,
    /// With --schedule step: the factor of a drop [default: 0.1]
    #[arg(long)]
    gamma: Option<f64>,
    /// With --schedule poly: the power [default: 1]
    #[arg(long)]
    power: Option<f64>,
    /// Times the rate of some parameters: a name or its beginning, or a pattern as in blocks.*=0.1 (repeatable; the last that matches holds)
    #[arg(long, value_name = "PATTERN=FACTOR")]
    lr_scale: Vec<LrScale>,
    /// Each layer learns slower than the one above by this factor
    #[arg(long, value_name = "FACTOR")]
    layer_decay: Option<f64>,
    /// Parameters without weight decay, beside biases, norms, class token and positions; none: decay even those (repeatable)
    #[arg(long, value_name = "PATTERN")]
    no_decay: Vec<String>,
    /// Keep a moving average of the parameters with this decay, and evaluate it
    #[arg(long, value_name = "DECAY")]
    ema: Option<f64>,
}

#[derive(Args, Clone)]
#[command(next_help_heading = "Run")]
pub struct RunArgs {
    /// A DeepSpeed configuration; flags win over it (`vitesse config explain FILE` tells what it would do)
    #[arg(long, value_name = "FILE.json")]
    pub config: Option<PathBuf>,
    /// Micro-steps whose gradients make one optimizer step [default: 1]
    #[arg(long, value_name = "MICRO_STEPS")]
    accumulate: Option<usize>,
    /// Images of an optimizer step, over all ranks [default: batch-size × accumulate × ranks]
    #[arg(long, value_name = "IMAGES")]
    global_batch: Option<usize>,
    /// Passes over the training set [default: 3; on ADE20K as many as 160,000 × 8 images take]
    #[arg(long)]
    epochs: Option<u64>,
    /// Optimizer steps; not with --epochs
    #[arg(long, visible_alias = "iterations")]
    steps: Option<u64>,
    /// How much of the training set to use, from 0 to 1 [default: 1]
    #[arg(long, value_name = "F", help_heading = "Data")]
    data_fraction: Option<f64>,
    /// Weights to start from: a run's folder, a checkpoint, safetensors or .pth, under timm's, torchvision's or Hugging Face's names
    #[arg(long, value_name = "RUN|WEIGHTS", visible_alias = "weights")]
    init: Option<PathBuf>,
    /// With --init: start with a new head if that of the weights has other classes; from a classifier's backbone, with new heads for pixels
    #[arg(long)]
    new_head: bool,
    /// Continue the run in this folder [default: that of --out]; auto: continue the run in --out if there is one, else start it
    #[arg(long, value_name = "DIR|auto", num_args = 0..=1)]
    resume: Option<Option<PathBuf>>,
    /// Take over a run folder that is locked by a process elsewhere, without looking for a minute whether that is alive
    #[arg(long)]
    force: bool,
}

#[derive(Args, Clone)]
#[command(next_help_heading = "Run")]
pub struct DeviceArgs {
    /// What computes: cpu or cuda [default: cpu]
    #[arg(long)]
    device: Option<Device>,
    /// What products are computed in: fp32, on the CPU also fp64, on a GPU also tf32, bf16 or fp16 [default: fp32, on a GPU bf16]
    #[arg(long)]
    precision: Option<Precision>,
    /// With bf16 or fp16: what the residual stream is kept in, fp32 or half [default: fp32]
    #[arg(long, value_name = "TYPE")]
    residual: Option<Residual>,
    /// Let nothing that is measured decide how numbers are computed: on a GPU, products are made by the first algorithm proposed
    /// instead of the fastest, so that every run on such a GPU gives the same bits
    #[arg(long)]
    deterministic: bool,
}

impl DeviceArgs {
    pub fn raw(self, raw: Raw) -> Raw {
        let DeviceArgs { device, precision, residual, deterministic } = self;
        Raw { device, precision, residual, deterministic, ..raw }
    }
}

#[derive(Args, Clone)]
#[command(next_help_heading = "Output")]
pub struct OutputArgs {
    /// Folder for metrics.jsonl, weights.safetensors and checkpoints
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Steps between checkpoints; needs --out [default: an epoch]
    #[arg(long, value_name = "STEPS")]
    checkpoint_every: Option<u64>,
    /// Checkpoints to keep; needs --out [default: 2]
    #[arg(long, value_name = "CHECKPOINTS")]
    keep: Option<usize>,
    /// Keep metrics alone: write neither checkpoints nor weights
    #[arg(long, conflicts_with_all = ["checkpoint_every", "keep", "max_restarts"])]
    no_checkpoints: bool,
    /// Epochs between evaluations, or iterations as in 16000it [default: 1; on ADE20K a tenth of all steps]
    #[arg(long, value_name = "SPAN")]
    eval_every: Option<Every>,
    /// Steps between lines of the log [default: about twenty lines a run]
    #[arg(long, value_name = "STEPS")]
    log_every: Option<u64>,
    /// Write what every rank and lane did when, for chrome://tracing or Perfetto
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Steps to trace [default: 20]
    #[arg(long, value_name = "STEPS", requires = "trace")]
    trace_steps: Option<u64>,
    /// Don't measure where the time goes
    #[arg(long)]
    no_account: bool,
    /// Don't tell at the end where the time went by kind of work; on a GPU all steps then run alike, where otherwise three run kernel by kernel
    #[arg(long)]
    no_breakdown: bool,
    /// Show curves, the account of time and the log on a live page, at ADDR [default: 127.0.0.1:8420]; needs --out
    #[arg(long, value_name = "ADDR", num_args = 0..=1)]
    pub serve: Option<Option<SocketAddr>>,
    /// Let every rank write its own log there, as rank-N.log
    #[arg(long, value_name = "DIR")]
    pub rank_logs: Option<PathBuf>,
    /// Give slower ranks fewer images, once their speed is known; a step has the same images as ever
    #[arg(long, help_heading = "Ranks")]
    balance: bool,
}

#[derive(Args, Clone)]
#[command(next_help_heading = "Ranks")]
pub struct RanksArgs {
    /// Ranks: threads of this process, or with --comm mpi processes that mpirun starts [default: those of the launcher, or 1]
    #[arg(long, value_name = "N")]
    pub ranks: Option<usize>,
    /// Communication backend: threads, mpi, tcp, or nccl between GPUs [default: the one that fits the launcher; nccl if every rank has a
    /// GPU of its own]
    #[arg(long, value_name = "BACKEND")]
    pub comm: Option<Backend>,
    /// With --comm mpi and no launcher: a file of hosts for mpirun
    #[arg(long, value_name = "FILE", requires = "comm")]
    pub hostfile: Option<PathBuf>,
    /// End the run when a rank is silent, or stuck while others wait, for so long: 30, 30s or 5m [default: 10s silent, 2m stuck]
    #[arg(long, value_name = "TIME", value_parser = time)]
    pub timeout: Option<Duration>,
    /// When a rank is lost, go on from the last checkpoint, at most so many times; needs --out
    #[arg(long, value_name = "N")]
    pub max_restarts: Option<u32>,
}

impl RanksArgs {
    pub fn options(&self) -> comm::Options {
        comm::Options { comm: self.comm, ranks: self.ranks, timeout: self.timeout }
    }
}

/// Seconds, or a number with its unit.
fn time(text: &str) -> Result<Duration, String> {
    let (number, unit) = match text.strip_suffix(['s', 'm', 'h']) {
        Some(number) => (number, &text[number.len()..]),
        None => (text, "s"),
    };
    let seconds = match unit {
        "h" => 3600.0,
        "m" => 60.0,
        _ => 1.0,
    };
    let number: f64 = number.parse().map_err(|_| "must be a time such as 30, 30s or 5m".to_string())?;
    let time = Duration::try_from_secs_f64(number * seconds).ok().filter(|time| *time >= SHORTEST_TIMEOUT);
    time.ok_or_else(|| "must be at least 1s".to_string())
}

/// Shortest timeout: ranks send several heartbeats a second; on a busy machine some come late.
const SHORTEST_TIMEOUT: Duration = Duration::from_secs(1);

#[derive(Args, Clone)]
#[command(next_help_heading = "Ranks")]
pub struct ExchangeArgs {
    /// Numbers that ranks exchange at once; a larger gradient travels alone [default: 1048576, or
    /// a third of all if that is less]
    #[arg(long, value_name = "ELEMENTS")]
    bucket_size: Option<usize>,
    /// Exchange gradients after the backward pass, not during it
    #[arg(long)]
    no_overlap: bool,
    /// What gradients travel as: fp32, bf16 or fp16 [default: as they are]
    #[arg(long, value_name = "TYPE")]
    wire: Option<Wire>,
}

impl ExchangeArgs {
    pub fn raw(self, raw: Raw) -> Raw {
        Raw { bucket_size: self.bucket_size, no_overlap: self.no_overlap, wire: self.wire, ..raw }
    }
}

#[derive(Clone, Copy, ValueEnum)]
pub enum PoolArg {
    ClassToken,
    Mean,
}

#[derive(Clone, Copy, ValueEnum)]
pub enum RecomputeArg {
    /// Keep them all
    None,
    /// What GELUs make, the largest and cheapest of them
    Gelu,
    /// All within a block
    Full,
}

impl ModelArgs {
    pub fn raw(self) -> Raw {
        Raw {
            task: self.task,
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
                RecomputeArg::Gelu => Recompute::Gelu,
                RecomputeArg::Full => Recompute::Full,
            }),
            ..raw
        }
    }
}

impl DataArgs {
    pub fn raw(self, raw: Raw) -> Raw {
        Raw {
            data: self.data,
            train_samples: self.train_samples,
            test_samples: self.test_samples,
            workers: self.workers,
            cache: self.cache,
            skip_bad_images: self.skip_bad_images,
            mean: self.mean,
            std: self.std,
            interpolation: self.interpolation,
            eval_resize: self.eval_resize,
            eval_mode: self.eval_mode,
            eval_stride: self.eval_stride,
            ..raw
        }
    }
}

impl AugmentArgs {
    pub fn raw(self, raw: Raw) -> Raw {
        Raw {
            augment: self.augment,
            crop: self.crop,
            flip: self.flip,
            rand_augment: self.rand_augment,
            erase: self.erase,
            mixup: self.mixup,
            cutmix: self.cutmix,
            ..raw
        }
    }
}

impl OptimizerArgs {
    pub fn raw(self, raw: Raw) -> Raw {
        Raw {
            lr: self.lr,
            schedule: self.schedule,
            warmup_steps: self.warmup_steps,
            min_lr: self.min_lr,
            step_every: self.step_every,
            milestones: self.milestones,
            gamma: self.gamma,
            power: self.power,
            lr_scale: self.lr_scale,
            layer_decay: self.layer_decay,
            no_decay: self.no_decay,
            ema: self.ema,
            ..raw
        }
    }
}

/// Of `--resume`; a folder of this name is `./auto`.
const AUTO: &str = "auto";

impl RunArgs {
    /// Whether a run is to be continued, if there is one.
    pub fn resumes_any(&self) -> bool {
        self.resume.is_some()
    }

    /// Whether a run is started where there is none to continue.
    pub fn resumes_or_starts(&self) -> bool {
        matches!(&self.resume, Some(Some(folder)) if folder == Path::new(AUTO))
    }

    /// The folder of the run to continue, if one is to be.
    pub fn resumes(&self, out: Option<&Path>) -> Option<PathBuf> {
        let folder = self.resume.as_ref()?.as_deref();
        if self.resumes_or_starts() {
            return out.filter(|folder| record::holds_run(folder)).map(Path::to_path_buf);
        }
        folder.or(out).map(Path::to_path_buf)
    }

    /// All but the configuration file, which has yet to be read.
    pub fn raw(self, raw: Raw) -> Raw {
        Raw {
            accumulate: self.accumulate,
            global_batch: self.global_batch,
            epochs: self.epochs,
            steps: self.steps,
            data_fraction: self.data_fraction,
            init: self.init,
            new_head: self.new_head,
            // What continues a run says so itself.
            resume: self.resume.filter(|folder| folder.as_deref() != Some(Path::new(AUTO))),
            force: self.force,
            ..raw
        }
    }
}

impl OutputArgs {
    pub fn raw(self, raw: Raw) -> Raw {
        Raw {
            out: self.out,
            checkpoint_every: self.checkpoint_every,
            keep: self.keep,
            no_checkpoints: self.no_checkpoints,
            no_breakdown: self.no_breakdown,
            eval_every: self.eval_every,
            log_every: self.log_every,
            trace: self.trace,
            trace_steps: self.trace_steps,
            no_account: self.no_account,
            balance: self.balance,
            ..raw
        }
    }
}
