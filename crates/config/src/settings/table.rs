//! The table of settings. A new one is declared here, and has its effect where its value is used: `run.plain.NAME` if it is plain,
//! and otherwise where it is resolved.

use super::check::{any, between_0_and_1, counts, if_given};
use super::declare::{dashed, flag, resolve, settings};
use super::file::Sources;
use super::value::{DefaultText, Timeout, Typed};
use super::{About, BENCH, CLASSIFY, EVAL, EXPORT, INSPECT, OF_WEIGHTS, PLAN, SEGMENT, Setting, TRAIN};
use crate::data_help;
use crate::deepspeed::DeepSpeed;
use crate::error::ConfigError;
use crate::offers;
use crate::optimizers;
use crate::origin::Log;
use crate::{
    Betas, Cache, ClassWeights, CommDtype, Crop, Device, EvalMode, Every, Form, Interpolation, LrScale,
    PageAddress, Part, Precision, Preset, RandAugment, Residual, ShardGroup, Span, Task,
};
use graph::{Recompute, Zero};
use models::vit::Pool;
use std::path::PathBuf;

const RUN: About = About::of(TRAIN);
/// Settings of a step.
const STEP: About = About::of(TRAIN | PLAN | BENCH);
const MODEL: About = About::of(TRAIN | PLAN | BENCH | INSPECT);
const DATA: About = About::of(TRAIN | INSPECT);
/// Commands that compute with weights.
const COMPUTE: u16 = EVAL | CLASSIFY | SEGMENT;

settings! {
    "Model" {
        /// classify: one class for each image; segment: a class for each pixel
        task: Option<Task> = MODEL.value("TASK").default("the task of the model and the data"),
        /// vit-SIZE/PATCH, SIZE one of nano, ti, s, b, l, h, g, G, e or WIDTH-DEPTH-HEADS-MLP, or swinv2-SIZE/wWINDOW, SIZE one of nano, ti, s, b, l or a width and
        /// the blocks of each stage, as 352-2-2-18-2, or timm's name, as vit_base_patch16_224, swinv2_tiny_window8_256,
        /// vit_small_patch14_reg4_dinov2 or deit3_small_patch16_224 (`vitesse models` lists them); for pixels a ViT's name with +linear or swinv2-SIZE/wWINDOW+upernet
        model: Option<String> = MODEL.value("MODEL").offers(offers::models)
            .default("vit-nano/4; for synthetic masks swinv2-nano/w8+upernet, for others swinv2-b/w8+upernet")
            .elsewhere(OF_WEIGHTS, "Model", "The model, as for `train`", "the model of the weights"),
        /// Side of the square images, or of the crops from images with masks, in pixels
        image_size: Option<usize> = MODEL.value("PIXELS").default("that of timm's name; else 32, or 224 for folders; with masks 512, or 64 if they are synthetic")
            .elsewhere(OF_WEIGHTS, "Model", "Side of the square images, or of the windows on images with masks, in pixels; positions of a ViT \
                are resized, windows of a Swin V2 stay those of training", "the size of the weights"),
        /// Channels of an image
        channels: Option<usize> = MODEL.value("CHANNELS").default("those of the data"),
        /// Classes of the head, at least those of the data
        classes: Option<usize> = MODEL.value("CLASSES").default("those of the data")
            .elsewhere(OF_WEIGHTS, "Model", "Classes of the head", "those of the weights"),
        /// Pooling of tokens into one vector: class-token or mean
        pool: Option<Pool> = MODEL.value("POOL").default("class-token"),
        /// Number under the root of a ViT's layer norms; Hugging Face's ViTs have 1e-12
        norm_eps: Option<f64> = STEP.value("EPS").default("1e-6; 1e-5 of a Swin V2, which has no other"),
        /// Rate of dropout, from 0 to below 1; of UPerNet, that of channels before its classifiers
        dropout: Option<f64> = STEP.value("RATE").default("0; 0.1 for UPerNet, as published"),
        /// Rate of dropout on attention probabilities, from 0 to below 1
        attention_dropout: Option<f64> = STEP.value("RATE").default("0"),
        /// Rate of stochastic depth at the last block, from 0 to below 1
        drop_path: Option<f64> = STEP.value("RATE").default("0; 0.3 for a published Swin V2 with UPerNet"),
    }
    "Data" {
        /// {}
        data: Option<String> = DATA.value("SET").names(data_help).offers(offers::sets).default("synthetic, or for --task segment synthetic-masks")
            .free(&["data.source", "data.relative"])
            .elsewhere(EVAL, "Data", "{}", "what the weights were trained on"),
        /// Training images of the synthetic sets
        train_samples: Option<usize> = DATA.value("IMAGES").default("20000, or 2000 with masks"),
        /// Validation images of the synthetic sets
        test_samples: Option<usize> = DATA.value("IMAGES").default("2000, or 200 with masks")
            .elsewhere(EVAL, "Data", "Images of the synthetic sets", "as many as in training"),
        /// Share of the training set to use, above 0 and up to 1
        data_fraction: Option<f64> = RUN.value("F").default("1"),
        /// Threads that read images ahead of the training
        workers: Option<usize> = DATA.value("THREADS").default("1, or all where files are decoded").free(&["data.workers"])
            .elsewhere(EVAL, "Data", "Threads that read images ahead, of images with one class each", "1, or all where files are decoded"),
        /// Memory for decoded images: auto, off, or a size such as 2GB
        cache: Option<Cache> = DATA.value("auto|off|BYTES").offers(|| vec!["auto", "off"]).default("auto").free(&["data.cache"]),
        /// Leave out images that can't be read, instead of ending the run
        skip_bad_images: bool = DATA.elsewhere(EVAL, "Data", "Leave out images that can't be read, instead of ending", ""),
        /// Mean of an image's values, from 0 to 1: one number, or one for each channel
        mean: Vec<f32> = DATA.value("NUMBERS").commas().default("0.5; with masks ImageNet's")
            .elsewhere(OF_WEIGHTS, "Preprocessing", "Mean of an image's values, from 0 to 1: one number, or one for each channel",
                "that of the weights, or 0.5; with masks ImageNet's"),
        /// Standard deviation of an image's values: one number, or one for each channel
        std: Vec<f32> = DATA.value("NUMBERS").commas().default("0.5; with masks ImageNet's")
            .elsewhere(OF_WEIGHTS, "Preprocessing", "Standard deviation of an image's values: one number, or one for each channel",
                "that of the weights, or 0.5; with masks ImageNet's"),
        /// bilinear or bicubic, where images are resized
        interpolation: Option<Interpolation> = DATA.value("KIND").default("bilinear")
            .elsewhere(EVAL | CLASSIFY | EXPORT, "Preprocessing", "bilinear or bicubic, where images are resized",
                "that of the weights, or bilinear"),
        /// Evaluate on the middle of images resized to this, in pixels, up to 16384
        eval_resize: Option<usize> = DATA.value("PIXELS")
            .default("the whole image resized; with --crop resized, 8/7 of the image size")
            .elsewhere(EVAL | CLASSIFY | EXPORT, "Preprocessing", "Take the middle of images resized to this, in pixels",
                "that of the weights, or the whole image resized"),
        /// With masks: evaluate images whole, padded to one of a few sizes, or slide: through windows of the image size, by the mean
        /// where they overlap
        eval_mode: Option<EvalMode> = DATA.value("MODE").default("whole; slide for a ViT").agreed(&["pixels.eval_mode"])
            .elsewhere(EVAL | SEGMENT | EXPORT, "Preprocessing", "With masks: read images whole, or slide: through windows",
                "that of the weights, or whole; slide for a ViT"),
        /// With --eval-mode slide: from window to window, in pixels
        eval_stride: Option<usize> = DATA.value("PIXELS").default("two thirds of the image size").agreed(&["pixels.eval_stride"])
            .elsewhere(EVAL | SEGMENT | EXPORT, "Preprocessing", "With --eval-mode slide: from window to window, in pixels",
                "that of the weights, or two thirds of the image size"),
    }
    "Augmentation" {
        /// none; standard: random crops and mirror images; strong: also RandAugment, mixup, cutmix, erasing and label smoothing, with
        /// masks distorted colours
        augment: Option<Preset> = DATA.value("PRESET").default("none; for files with masks strong"),
        /// Crop of training images: none; pad: at random after padding by an eighth; resized: a random part, resized
        crop: Option<Crop> = DATA.value("CROP").default("that of --augment"),
        /// Share of training images that are mirrored, from 0 to 1
        flip: Option<f64> = DATA.value("P").default("that of --augment"),
        /// Random operations on an image, up to 8, and their magnitude, up to 30
        rand_augment: Option<RandAugment> = DATA.value("N,M").default("that of --augment"),
        /// Share of training images of which a part is erased, from 0 to 1
        erase: Option<f64> = DATA.value("P").default("that of --augment"),
        /// Mix pairs of images, in shares from Beta(A,A), A from 0.001 to 1000; 0 for none
        mixup: Option<f64> = DATA.value("A").default("that of --augment"),
        /// Paste a part of one image of a pair into the other, with A as for --mixup; 0 for none
        cutmix: Option<f64> = DATA.value("A").default("that of --augment"),
        /// Weights of the classes in the training loss, the mean over the labels' weights as in PyTorch: a number for each class, in their
        /// order; NAME=WEIGHT for some, 1 for the others; or balanced: images / (classes × images of the class)
        class_weights: Option<ClassWeights> = RUN.value("WEIGHTS").offers(|| vec!["balanced"]); plain Option<ClassWeights> = None, any,
        /// Label smoothing, from 0 to below 1
        label_smoothing: Option<f64> = STEP.value("RATE").default("0, or 0.1 with --augment strong"),
    }
    "Optimizer" {
        /// {}
        optimizer: Option<String> = STEP.value("OPTIMIZER").names(optimizers::help).offers(offers::optimizers).default("adamw").deepspeed(&["optimizer.type"]),
        /// Highest learning rate
        lr: Option<f64> = RUN.value("LR").names(optimizers::rates)
            .default("{}; else 1e-3, or 6e-5 for a published Swin V2 with UPerNet")
            .deepspeed(&["optimizer.params.lr", "scheduler.params.warmup_max_lr", "scheduler.params.cycle_max_lr"]),
        /// Weight decay of matrices
        weight_decay: Option<f64> = STEP.value("WEIGHT_DECAY").names(optimizers::decays)
            .default("{}; else 0.05, or 0.01 with masks").deepspeed(&["optimizer.params.weight_decay"]),
        /// Largest gradient norm; 0 to leave gradients unclipped
        clip: Option<f64> = STEP.value("NORM").default("1; 0 for a published Swin V2 with UPerNet").deepspeed(&["gradient_clipping"]),
        /// Schedule of the learning rate: cosine, linear, step, poly or constant
        schedule: Option<Form> = RUN.value("FORM").default("cosine, or poly with masks").deepspeed(&["scheduler.type"]),
        /// Decay rates of Adam's two moments, each from 0 to below 1; of adamw, lamb, and muon where it leaves parameters to AdamW
        betas: Option<Betas> = STEP.value("BETA1,BETA2").default("0.9,0.999").deepspeed(&["optimizer.params.betas"]),
        /// Momentum, from 0 to below 1; of sgd and muon
        momentum: Option<f64> = STEP.value("MOMENTUM").default("0.9 for sgd, 0.95 for muon").deepspeed(&["optimizer.params.momentum"]),
        /// Number that is added to the root of the second moment; of adamw, lamb and muon
        eps: Option<f64> = STEP.value("EPS").default("1e-8").deepspeed(&["optimizer.params.eps"]),
        /// Steps of warm-up, or epochs as in 5ep
        warmup_steps: Option<Span> = RUN.value("SPAN")
            .default("a twentieth of all, or with masks a tenth but no more than 1500; none if the rate is constant")
            .deepspeed(&["scheduler.params.warmup_num_steps"]),
        /// Lowest learning rate, of cosine, linear and poly
        min_lr: Option<f64> = RUN.value("LR").default("0"),
        /// With --schedule step: steps between drops of the rate, or epochs as in 30ep
        step_every: Option<Span> = RUN.value("SPAN").default("a third of all steps"),
        /// With --schedule step: when the rate drops, as in 30ep,60ep
        milestones: Vec<Span> = RUN.value("SPANS").commas(),
        /// With --schedule step: the factor of a drop
        gamma: Option<f64> = RUN.value("GAMMA").default("0.1"),
        /// With --schedule poly: the power
        power: Option<f64> = RUN.value("POWER").default("1"),
        /// Factor on the learning rate of some parameters: a name or its beginning, or a pattern as in blocks.*=0.1 (repeatable; the last that matches holds)
        lr_scale: Vec<LrScale> = RUN.value("PATTERN=FACTOR"),
        /// Parameters that are not trained: a name or its beginning, or a pattern as for --lr-scale (repeatable)
        freeze: Vec<String> = RUN.value("PATTERN"),
        /// Factor from each layer's learning rate to that of the layer below, above 0 and up to 1
        layer_decay: Option<f64> = RUN.value("FACTOR"),
        /// Parameters without weight decay, beside biases, norms, class token and positions; none: decay even those (repeatable)
        no_decay: Vec<String> = RUN.value("PATTERN"),
        /// Keep a moving average of the parameters with this decay, between 0 and 1, and evaluate it
        ema: Option<f64> = RUN.also(PLAN).value("DECAY"); plain Option<f64> = None, if_given(between_0_and_1),
    }
    "Run" {
        /// A DeepSpeed configuration in JSON, or settings in TOML by the names of their flags; flags win over both (`vitesse config
        /// explain FILE` shows what it would do)
        config: Option<PathBuf> = RUN.value("FILE.json|FILE.toml").once().free(&[]),
        /// Images of a micro-step, per rank
        batch_size: Option<usize> = MODEL.value("IMAGES").default("64, or 8 with masks").agreed(&["batch"])
            .deepspeed(&["train_micro_batch_size_per_gpu", "micro_batch_per_gpu"])
            .elsewhere(COMPUTE, "Run", "Images that are computed at once", "as in training, or 64; with masks 8"),
        /// Micro-steps whose gradients make one optimizer step
        accumulate: Option<usize> = STEP.value("MICRO_STEPS").default("1").agreed(&["accumulate"])
            .deepspeed(&["gradient_accumulation_steps"]),
        /// Images of an optimizer step, over all ranks
        global_batch: Option<usize> = RUN.value("IMAGES").default("batch-size × accumulate × ranks").deepspeed(&["train_batch_size"]),
        /// Passes over the training set
        epochs: Option<u64> = RUN.value("EPOCHS").default("3; on ADE20K as many as 160,000 × 8 images take").free(&["epochs"]),
        /// Leave out the last batch of an epoch where it is not full; models with batch norm always do
        drop_last: bool = RUN.deepspeed(&["dataloader_drop_last"]); plain bool = false, any,
        /// Optimizer steps; not with --epochs
        steps: Option<u64> = RUN.value("STEPS").alias("iterations"),
        /// Device: cpu or cuda
        device: Option<Device> = STEP.value("DEVICE").default("cpu").agreed(&["device"])
            .elsewhere(COMPUTE, "Run", "Device: cpu or cuda", "cpu"),
        /// Precision of matmuls: fp32, on the CPU also fp64, on a GPU also tf32, bf16 or fp16
        precision: Option<Precision> = STEP.value("PRECISION").default("fp32, on a GPU bf16")
            .deepspeed(&["fp16.enabled", "bf16.enabled", "bfloat16.enabled"])
            .only(COMPUTE | BENCH, &["fp32", "tf32", "bf16", "fp16"])
            .elsewhere(COMPUTE | BENCH, "Run", "Precision of matmuls: fp32, on a GPU also tf32, bf16 or fp16",
                "fp32; on a GPU as in training there, or bf16"),
        /// With bf16 or fp16: precision of the residual stream, fp32 or half
        residual: Option<Residual> = STEP.value("TYPE").default("fp32")
            .elsewhere(COMPUTE, "Run", "With bf16 or fp16: precision of the residual stream, fp32 or half", "fp32"),
        /// Compute the same bits in every run on GPUs of a kind: matmuls use the first algorithm that the library proposes, not the one
        /// measured to be the fastest
        deterministic: bool = STEP.agreed(&[])
            .elsewhere(COMPUTE, "Run", "Compute the same bits in every run on GPUs of a kind: matmuls use the first algorithm that the \
                library proposes, not the one measured to be the fastest", "");
            plain bool = false, any,
        /// Activations to recompute in the backward pass instead of keeping them: none; gelu: outputs of GELUs, the largest and
        /// cheapest; full: all within a block
        recompute: Option<Recompute> = STEP.value("RECOMPUTE").default("none").free(&["recompute"]),
        /// CPU threads
        threads: Option<usize> = MODEL.value("THREADS").default("all").free(&["threads"])
            .elsewhere(COMPUTE, "Run", "CPU threads", "all"),
        /// Seed of weights, data, order and dropout
        seed: Option<u64> = MODEL.value("SEED")
            .elsewhere(EVAL, "Data", "Seed of the synthetic sets", "as in training"); plain u64 = 0, any,
        /// Weights to start from: a run's folder, a checkpoint, safetensors or .pth, under timm's, torchvision's or Hugging Face's names
        init: Option<PathBuf> = RUN.value("RUN|WEIGHTS").alias("weights").free(&["init"]),
        /// With --init: start with a new head if that of the weights has other classes; from a classifier's backbone, with new heads for pixels
        new_head: bool = RUN.free(&["new_head"]),
        /// Continue the run in this folder, or in that of --out; auto: continue the run in --out if there is one, else start it
        resume: Option<Option<PathBuf>> = RUN.value("DIR|auto").offers(|| vec!["auto"]).free(&["resume"]).once(),
        /// Take over a run folder that is locked by a process elsewhere, without waiting a minute for a sign of life; replace the file of
        /// --trace and logs of --rank-logs that are there already
        force: bool = RUN.free(&[]).once(),
    }
    "Ranks" {
        /// Ranks: threads of this process, or with --comm mpi processes that mpirun starts
        ranks: Option<usize> = RUN.value("N").default("those of the launcher, or 1").agreed(&["world"]).once(),
        /// Communication backend: threads, mpi, tcp, or nccl between GPUs
        comm: Option<comm::Backend> = RUN.value("BACKEND")
            .default("the one that fits the launcher; nccl if every rank has a GPU of its own").free(&[]).once(),
        /// With --comm mpi and no launcher: a file of hosts for mpirun
        hostfile: Option<PathBuf> = RUN.value("FILE").requires("comm").free(&[]).once(),
        /// End the run when a rank sends no heartbeat, or makes no progress while others wait, for so long: 30, 30s or 5m
        timeout: Option<Timeout> = RUN.value("TIME").default("10s without heartbeat, 2m without progress").free(&[]).once(),
        /// When a rank is lost, continue from the last checkpoint, at most so many times; needs --out
        max_restarts: Option<u32> = RUN.value("N").free(&[]).once(),
        /// With --max-restarts and --hostfile: continue without hosts that no longer answer, over at least so many ranks; a step has the
        /// same images as ever, and --batch-size and --accumulate give way
        min_ranks: Option<usize> = RUN.value("N").default("all").agreed(&[]).once(),
        /// Give slower ranks fewer images, once their speed is known; a step has the same images as ever
        balance: bool = RUN.agreed(&[]); plain bool = false, any,
        /// ZeRO: what ranks divide among each other instead of each holding all of it: 0, nothing; 1, what the optimizer keeps; 2,
        /// gradients too; 3, parameters too. What is computed is the same
        zero: Option<Zero> = STEP.value("STAGE").deepspeed(&["zero_optimization.stage"]).agreed(&[]);
            plain Zero = Zero::Stage0, any,
        /// Ranks that divide it, with other such groups beside them that hold the same: node, those of a host, or so many that follow each
        /// other; between groups ranks all-reduce one part of the gradients, once per step
        shard_group: Option<ShardGroup> = STEP.value("RANKS|node").offers(|| vec!["node"]).default("all ranks")
            .deepspeed(&["zero_optimization.mics_shard_size"]).agreed(&["shard_group"]),
        /// Elements of gradients that ranks all-reduce at once; a larger gradient goes alone
        bucket_size: Option<usize> = STEP.value("ELEMENTS").default("1048576, or a third of all if that is less")
            .deepspeed(&["zero_optimization.reduce_bucket_size"]).agreed(&["all_reduce.bucket"]),
        /// All-reduce gradients after the backward pass, not during it
        no_overlap: bool = STEP.deepspeed(&["zero_optimization.overlap_comm"]).agreed(&["all_reduce.overlap"]),
        /// Reduce gradients in every micro-step, not their sums once per step; then all stages of --zero have the same bits with several
        /// micro-steps, too
        reduce_every_micro_step: bool = STEP.agreed(&[]); plain bool = false, any,
        /// Communication dtype of gradients: fp32, bf16 or fp16
        comm_dtype: Option<CommDtype> = STEP.value("DTYPE").default("that of the gradients").formerly("wire")
            .deepspeed(&["communication_data_type"]).agreed(&["all_reduce.dtype"]),
    }
    "Output" {
        /// Folder for metrics.jsonl, weights.safetensors and checkpoints
        out: Option<PathBuf> = RUN.value("DIR").free(&["out"]),
        /// Steps between checkpoints; needs --out
        checkpoint_every: Option<u64> = RUN.value("STEPS").default("an epoch").agreed(&["checkpoint_every"]),
        /// Checkpoints to keep; needs --out
        keep: Option<usize> = RUN.value("CHECKPOINTS").free(&[]); plain usize = 2, counts,
        /// Keep metrics alone: write neither checkpoints nor weights
        no_checkpoints: bool = RUN.excludes(&["checkpoint-every", "keep", "max-restarts"]).free(&["checkpoints"]),
        /// Epochs between evaluations, or iterations as in 16000it
        eval_every: Option<Every> = RUN.value("SPAN")
            .default("1, on ADE20K a tenth of all steps; more where evaluating would take longer than training")
            .agreed(&["eval_every", "eval_steps"]),
        /// Images of the validation set that the run evaluates on, or all; `vitesse eval` takes all
        eval_images: Option<Part> = RUN.value("IMAGES|all").offers(|| vec!["all"]).default("all, but no more than three times the images that are trained on")
            .agreed(&["data.eval_images"]),
        /// End the run after so many evaluations without a better score than the best before them
        early_stop: Option<u64> = RUN.value("EVALUATIONS").agreed(&[]); plain Option<u64> = None, if_given(counts),
        /// Steps between lines of the log
        log_every: Option<u64> = RUN.value("STEPS").default("about twenty lines a run").deepspeed(&["steps_per_print"])
            .agreed(&["log_every"]),
        /// Measure on the steps of the log how far the update moves each layer's weights, ‖ΔW‖/‖W‖
        update_ratios: bool = RUN.agreed(&[]); plain bool = false, any,
        /// Write a trace of every rank and lane, for chrome://tracing or Perfetto
        trace: Option<PathBuf> = RUN.value("FILE").free(&["trace"]),
        /// Steps to trace
        trace_steps: Option<u64> = RUN.value("STEPS").requires("trace").agreed(&[]); plain u64 = 20, counts,
        /// Don't measure where the time goes
        no_account: bool = RUN.agreed(&["account"]),
        /// Don't print at the end where the time went by kind of work; on a GPU all steps then run alike, where otherwise three run kernel by kernel
        no_breakdown: bool = RUN.free(&["breakdown", "breakdown_lines"]),
        /// Show curves, settings, the account of time and the log on a live page; ADDR is a port, a host or both, as 9999 or localhost:8433 (default
        /// 127.0.0.1:8420); the run prints the URL, whose token lets nobody else look; needs --out
        serve: Option<Option<PageAddress>> = RUN.value("ADDR").free(&[]).once(),
        /// Let every rank write its own log there, as rank-N.log
        rank_logs: Option<PathBuf> = RUN.value("DIR").free(&[]).once(),
        /// Print one JSON object at the end instead of text
        json: bool = RUN.free(&[]).once(),
    }
}
