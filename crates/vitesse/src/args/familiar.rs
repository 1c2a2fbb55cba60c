//! Flags of other programs (timm, torchvision's references, Hugging Face's Trainer, DeepSpeed, mmsegmentation), with what does the same here.
//! Whoever types one of them misspells nothing, so the nearest name would be a wrong answer.

/// Names that mean the same elsewhere, without dashes; the flag of `vitesse train` that does it here, if there is one; what to do.
type Row = (&'static [&'static str], &'static str, &'static str);

const HALF: &str =
    "half precision is --precision bf16 or fp16, on a GPU (--device cuda), where bf16 is the default";

pub const TABLE: &[Row] = &[
    (
        &["amp", "autocast", "mixed-precision", "fp16", "half", "bf16", "bfloat16", "amp-dtype", "dtype"],
        "precision",
        HALF,
    ),
    (&["tf32"], "precision", "TF32 is --precision tf32, on a GPU"),
    (&["fp32", "no-amp"], "precision", "single precision is --precision fp32, which is the default on a CPU"),
    (
        &["pretrained", "checkpoint-path", "finetune", "ckpt", "load", "load-from", "pretrained-path"],
        "init",
        "weights to start from are --init FILE, or a run's folder; nothing is downloaded. --new-head gives them other classes",
    ),
    (&["wd", "decay", "weight_decay"], "weight-decay", "weight decay is --weight-decay"),
    (&["learning-rate", "base-lr", "blr"], "lr", "the learning rate is --lr"),
    (&["min-learning-rate", "lr-min"], "min-lr", "the lowest learning rate is --min-lr"),
    (
        &["eval-only", "evaluate", "eval", "val-only", "test-only", "validate", "do-eval", "e"],
        "",
        "`vitesse eval --weights RUN` evaluates a run or a file of weights",
    ),
    (
        &["wandb", "log-wandb", "report-to", "tensorboard", "tb", "mlflow", "comet"],
        "out",
        "--out DIR keeps metrics.jsonl, metrics.csv and TensorBoard's events; --serve shows them while the run goes on",
    ),
    (
        &[
            "gpus",
            "gpu-ids",
            "num-gpus",
            "n-gpu",
            "nproc-per-node",
            "nproc",
            "num-processes",
            "devices",
            "num-devices",
        ],
        "ranks",
        "--ranks N --device cuda uses N GPUs of this machine, one for each rank",
    ),
    (&["gpu", "cuda", "use-cuda", "accelerator"], "device", "a GPU is --device cuda"),
    (&["cpu", "no-cuda", "use-cpu"], "device", "--device cpu is the default"),
    (
        &["num-workers", "dataloader-num-workers", "j", "data-workers"],
        "workers",
        "threads that read images are --workers N",
    ),
    (
        &[
            "batch",
            "b",
            "bs",
            "train-batch-size",
            "per-device-train-batch-size",
            "micro-batch-size",
            "samples-per-gpu",
        ],
        "batch-size",
        "--batch-size is that of a rank, --global-batch that of all ranks",
    ),
    (
        &[
            "gradient-accumulation-steps",
            "grad-accum-steps",
            "accum-iter",
            "update-freq",
            "accumulate-grad-batches",
        ],
        "accumulate",
        "micro-steps whose gradients make one step are --accumulate N",
    ),
    (
        &["max-steps", "num-steps", "max-iters", "train-iters", "total-steps"],
        "steps",
        "the length of a run in steps is --steps N",
    ),
    (
        &["num-epochs", "max-epochs", "num-train-epochs", "epoch"],
        "epochs",
        "the length of a run in epochs is --epochs N",
    ),
    (&["opt", "optim"], "optimizer", "the optimizer is --optimizer"),
    (
        &["sched", "scheduler", "lr-scheduler", "lr-scheduler-type", "lr-policy"],
        "schedule",
        "the schedule of the rate is --schedule",
    ),
    (
        &["warmup", "warmup-epochs", "lr-warmup-epochs", "warmup-iters", "warmup-ratio"],
        "warmup-steps",
        "--warmup-steps takes steps, or epochs as in 5ep",
    ),
    (&["smoothing", "label-smoothing-factor"], "label-smoothing", "label smoothing is --label-smoothing"),
    (
        &[
            "clip-grad",
            "grad-clip",
            "max-grad-norm",
            "clip-grad-norm",
            "gradient-clip-val",
            "gradient-clipping",
        ],
        "clip",
        "the largest gradient norm is --clip",
    ),
    (
        &["img-size", "imgsz", "input-size", "resolution", "train-crop-size", "crop-size"],
        "image-size",
        "the side of the images is --image-size",
    ),
    (
        &["num-classes", "nb-classes", "num-labels"],
        "classes",
        "the classes of the head are --classes, by default those of the data",
    ),
    (
        &["data-path", "data-dir", "dataset", "dataset-name", "train-dir", "data-root", "root"],
        "data",
        "--data names a set and its place, as in folder:photos, list:photos.csv or cifar10:data",
    ),
    (
        &[
            "output",
            "output-dir",
            "o",
            "save-dir",
            "work-dir",
            "logdir",
            "log-dir",
            "checkpoint-dir",
            "default-root-dir",
        ],
        "out",
        "the folder of a run is --out DIR",
    ),
    (
        &["resume-from-checkpoint", "resume-from", "continue", "ckpt-path", "auto-resume"],
        "resume",
        "--resume DIR continues the run in a folder; --resume auto does so if there is one",
    ),
    (
        &["model-ema", "ema-decay", "model-ema-decay", "use-ema"],
        "ema",
        "the moving average of the parameters is --ema DECAY",
    ),
    (&["drop", "drop-rate"], "dropout", "the rate of dropout is --dropout"),
    (
        &["attn-drop", "attn-drop-rate"],
        "attention-dropout",
        "the rate on attention probabilities is --attention-dropout",
    ),
    (&["drop-path-rate", "stochastic-depth"], "drop-path", "the rate of stochastic depth is --drop-path"),
    (
        &["aa", "auto-augment", "randaug", "ra-magnitude"],
        "rand-augment",
        "RandAugment is --rand-augment N,M; --augment standard or strong sets all augmentation at once",
    ),
    (&["hflip", "hflip-prob"], "flip", "the share of mirrored images is --flip"),
    (
        &["reprob", "random-erase", "random-erasing"],
        "erase",
        "the share of images with an erased part is --erase",
    ),
    (&["mixup-alpha"], "mixup", "mixup's alpha is --mixup"),
    (&["cutmix-alpha"], "cutmix", "cutmix's alpha is --cutmix"),
    (
        &[
            "grad-checkpointing",
            "gradient-checkpointing",
            "activation-checkpointing",
            "use-checkpoint",
            "checkpoint-activations",
        ],
        "recompute",
        "recomputing activations instead of keeping them is --recompute full",
    ),
    (
        &["compile", "torchcompile", "torch-compile", "jit", "channels-last", "cudnn-benchmark"],
        "",
        "leave it out: every run is compiled, and its memory laid out, before it starts",
    ),
    (
        &["ddp", "distributed", "dist", "strategy", "data-parallel"],
        "ranks",
        "--ranks N trains data-parallel over N ranks",
    ),
    (
        &["deepspeed", "deepspeed-config", "ds-config"],
        "config",
        "--config FILE.json reads a DeepSpeed configuration",
    ),
    (
        &["fsdp", "zero-stage"],
        "zero",
        "--zero 1, 2 or 3 divides optimizer states, gradients and parameters among the ranks of --ranks N",
    ),
    (
        &["tensor-parallel", "tensor-parallel-size", "tp", "pipeline-parallel", "pp"],
        "",
        "every rank computes whole layers here: --ranks N trains data-parallel, and --zero 3 divides parameters among them",
    ),
    (
        &["world-size", "nnodes", "num-nodes", "nodes", "num-machines"],
        "ranks",
        "--ranks N starts ranks on this machine; `vitesse launch --nodes N` says how to start them on several",
    ),
    (
        &[
            "local-rank",
            "rank",
            "master-addr",
            "master-port",
            "node-rank",
            "rdzv-endpoint",
            "dist-url",
            "dist-backend",
        ],
        "comm",
        "ranks find each other by what mpirun, srun or torchrun tell them; --comm chooses the backend",
    ),
    (
        &["print-freq", "log-interval", "logging-steps", "log-freq"],
        "log-every",
        "steps between lines of the log are --log-every N",
    ),
    (
        &["save-freq", "save-steps", "save-interval", "save-every", "checkpoint-interval"],
        "checkpoint-every",
        "steps between checkpoints are --checkpoint-every N",
    ),
    (&["save-total-limit", "checkpoint-hist", "save-top-k"], "keep", "checkpoints to keep are --keep N"),
    (
        &[
            "eval-steps",
            "eval-interval",
            "val-interval",
            "eval-freq",
            "val-every",
            "check-val-every-n-epoch",
            "evaluation-strategy",
        ],
        "eval-every",
        "--eval-every takes epochs, or steps as in 500it",
    ),
    (
        &["max-eval-samples", "limit-val-batches", "eval-samples"],
        "eval-images",
        "images to evaluate on are --eval-images N",
    ),
    (
        &["max-train-samples", "limit-train-batches", "subset"],
        "data-fraction",
        "the share of the training set to use is --data-fraction",
    ),
    (
        &["early-stopping", "patience", "early-stopping-patience"],
        "early-stop",
        "--early-stop N ends a run after N evaluations without a better score",
    ),
    (
        &["freeze-backbone", "freeze-layers", "frozen-stages", "linear-probe"],
        "freeze",
        "--freeze PATTERN keeps parameters as they start, as in --freeze blocks --freeze patch_embed",
    ),
    (
        &["beta1", "beta2", "opt-betas", "adam-beta1", "adam-beta2"],
        "betas",
        "Adam's betas are --betas BETA1,BETA2",
    ),
    (&["opt-eps", "adam-epsilon", "epsilon"], "eps", "Adam's epsilon is --eps"),
    (&["class-weight", "weight-classes"], "class-weights", "weights of the classes are --class-weights"),
    (
        &["profile", "profiler"],
        "trace",
        "--trace FILE shows what every rank did when; a run ends with where its time went",
    ),
    (&["quiet", "q", "silent"], "json", "--json prints one object at the end instead of text"),
    (&["verbose", "v", "debug"], "log-every", "--log-every 1 prints a line for each step"),
    (&["do-train", "train"], "", "leave it out: `vitesse train` trains"),
    (
        &["dry-run", "print-config"],
        "",
        "`vitesse config explain` prints the settings of a run, `vitesse plan` its steps and memory",
    ),
    (&["config-file", "cfg", "c"], "config", "a file of settings is --config FILE.toml or FILE.json"),
    (
        &["overwrite", "overwrite-output-dir", "y", "yes", "f"],
        "force",
        "--force replaces a file that is there",
    ),
];

/// What to do instead of a flag, for a command that has the flags `has`.
pub fn hint(name: &str, has: impl Fn(&str) -> bool) -> Option<String> {
    let (_, flag, text) = TABLE.iter().find(|(names, ..)| names.contains(&name))?;
    Some(match flag.is_empty() || has(flag) {
        true => text.to_string(),
        false => format!("{text} (of `vitesse train`)"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::Cli;
    use clap::CommandFactory;
    use std::collections::BTreeSet;

    /// A name that is a flag of ours would never come here, and what a row names must be there.
    #[test]
    fn every_row_names_a_flag_of_train_and_none_is_one() {
        let cli = Cli::command();
        let train = cli.find_subcommand("train").unwrap();
        let flags: BTreeSet<&str> = train
            .get_arguments()
            .flat_map(|arg| arg.get_long_and_visible_aliases().unwrap_or_default())
            .collect();
        let mut seen = BTreeSet::new();
        for (names, flag, text) in TABLE {
            assert!(flag.is_empty() || flags.contains(flag), "--{flag} is no flag");
            assert!(flag.is_empty() || text.contains(&format!("--{flag}")), "{text} doesn't name --{flag}");
            for name in *names {
                assert!(!flags.contains(name), "--{name} is a flag");
                assert!(seen.insert(name), "{name} stands twice");
            }
        }
    }
}
