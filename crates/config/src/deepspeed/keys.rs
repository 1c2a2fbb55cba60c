//! Every key that is known, with its type and what becomes of it.

use super::judge::{self, Context, Verdict};
use super::{DeepSpeed, Entry};
use super::{all_reduce, precision, zero};
use crate::optimizers;
use std::borrow::Cow;
use std::sync::LazyLock;

/// Type of a key's value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    /// A whole number, written as an integer or like 2e8.
    Whole,
    /// A whole number of at least 1.
    Count,
    Number,
    Positive,
    NotNegative,
    /// A number from 0 to below 1.
    Share,
    Bool,
    Text,
    OneOf(&'static [&'static str]),
    /// Adam's betas: two numbers from 0 to below 1.
    Betas,
    Any,
}

/// Effect of a key.
#[derive(Clone, Copy)]
pub enum Rule {
    /// Read when the run is resolved. If there is a flag that says the same, it wins.
    Honoured(Option<&'static str>),
    /// Asks for nothing that would change the run.
    Harmless(&'static str),
    /// Fine with this value; with any other the reason to refuse it.
    Must(Expected, &'static str),
    Judged(fn(&DeepSpeed, &Entry, &Context) -> Verdict),
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Expected {
    Is(bool),
    Equals(f64),
}

#[derive(Clone, Copy)]
pub struct Key {
    pub path: &'static str,
    pub kind: Kind,
    /// "auto" leaves the choice to vitesse, as it leaves it to Hugging Face's Trainer.
    pub auto: bool,
    pub rule: Rule,
}

pub(crate) const fn key(path: &'static str, kind: Kind, rule: Rule) -> Key {
    Key { path, kind, auto: false, rule }
}

/// A key that may be "auto".
pub(crate) const fn auto(path: &'static str, kind: Kind, rule: Rule) -> Key {
    Key { path, kind, auto: true, rule }
}

use Expected::{Equals, Is};
use Kind::{Any, Bool, Count, NotNegative, Number, OneOf, Positive, Text, Whole};
use Rule::{Harmless, Honoured, Judged, Must};

const DEVICES: Kind = OneOf(&["none", "cpu", "nvme"]);
const ENABLED: Rule = Judged(precision::enabled);
const LOSS_SCALE: Rule = Judged(precision::loss_scale);
const OFF_IN_FP16: Rule = Judged(precision::off_in_fp16);
const IN_BF16: Rule = Judged(precision::in_bf16);
const NO_OFFLOAD: Rule = Harmless("tunes offloading, which is not needed here");
const DETAIL: Rule = Judged(zero::detail);
pub(crate) const OTHER_KERNEL: Rule = Harmless("chooses a kernel; the arithmetic is the same");

/// In the order in which a reader would look for them.
pub const KEYS: &[Key] = &[
    auto("train_batch_size", Count, Judged(judge::batch)),
    auto("train_micro_batch_size_per_gpu", Count, Judged(judge::batch)),
    auto("micro_batch_per_gpu", Count, Judged(judge::batch)),
    auto("gradient_accumulation_steps", Count, Judged(judge::batch)),
    key("managed_gradient_accumulation", Bool, Must(Is(true), "accumulation is always managed here")),
    auto("gradient_clipping", NotNegative, Honoured(Some("clip"))),
    auto("steps_per_print", Count, Honoured(Some("log-every"))),
    key("wall_clock_breakdown", Bool, Judged(judge::breakdown)),
    key("memory_breakdown", Bool, Must(Is(false), "`vitesse plan` prints a run's memory before it starts")),
    key("dump_state", Bool, Must(Is(false), "`vitesse config explain` prints a run's settings")),
    key("log_level", Text, Harmless("there are no levels of logging")),
    key("disable_python_gc", Bool, Harmless("there is no Python here")),
    key("pin_memory", Bool, Judged(judge::pinned)),
    key("prescale_gradients", Bool, Judged(all_reduce::prescale)),
    key("gradient_predivide_factor", Positive, Judged(all_reduce::predivide)),
    key("gradient_allreduce_op", OneOf(&["mean", "sum"]), Judged(all_reduce::reduction)),
    key("communication_data_type", OneOf(&["fp32", "fp16", "bf16", "bfp16"]), Judged(all_reduce::comm_dtype)),
    key("seq_parallel_communication_data_type", Text, Harmless("there is no sequence parallelism here")),
    key("sequence_parallel_size", Count, Must(Equals(1.0), "there is no sequence parallelism here yet")),
    key("disable_allgather", Bool, Must(Is(false), "there is no other way to gather here")),
    key("sparse_gradients", Bool, Must(Is(false), "a vision transformer has no sparse gradients")),
    key("zero_allow_untested_optimizer", Bool, Harmless("every optimizer here is tested")),
    key("zero_force_ds_cpu_optimizer", Bool, Harmless("there is one implementation of each optimizer here")),
    key("dataloader_drop_last", Bool, Honoured(Some("drop-last"))),
    key("use_data_before_expert_parallelism", Bool, Harmless("there are no experts here")),
    // ---- precision -----------------------------------------------------------------------------------------------
    auto("fp16.enabled", Bool, ENABLED),
    auto("fp16.auto_cast", Bool, OFF_IN_FP16),
    auto("fp16.loss_scale", Number, LOSS_SCALE),
    auto("fp16.initial_scale_power", Whole, LOSS_SCALE),
    auto("fp16.loss_scale_window", Whole, LOSS_SCALE),
    auto("fp16.hysteresis", Whole, LOSS_SCALE),
    auto("fp16.consecutive_hysteresis", Bool, OFF_IN_FP16),
    auto("fp16.min_loss_scale", Number, LOSS_SCALE),
    auto("fp16.fp16_master_weights_and_grads", Bool, OFF_IN_FP16),
    auto("bf16.enabled", Bool, ENABLED),
    auto("bf16.immediate_grad_update", Bool, IN_BF16),
    auto("bf16.check_grad_overflow", Bool, IN_BF16),
    auto("bf16.bf16_master_weights_and_grads", Bool, IN_BF16),
    auto("bf16.bf16_optimizer_states", Bool, IN_BF16),
    auto("bfloat16.enabled", Bool, ENABLED),
    // ---- ZeRO ----------------------------------------------------------------------------------------------------
    key("zero_optimization.stage", Whole, Judged(zero::stage)),
    key("zero_optimization.offload_optimizer.device", DEVICES, Judged(judge::offload)),
    key("zero_optimization.offload_optimizer.pin_memory", Bool, NO_OFFLOAD),
    key("zero_optimization.offload_optimizer.nvme_path", Text, NO_OFFLOAD),
    key("zero_optimization.offload_optimizer.buffer_count", Whole, NO_OFFLOAD),
    key("zero_optimization.offload_optimizer.pipeline", Bool, NO_OFFLOAD),
    key("zero_optimization.offload_optimizer.pipeline_read", Bool, NO_OFFLOAD),
    key("zero_optimization.offload_optimizer.pipeline_write", Bool, NO_OFFLOAD),
    key("zero_optimization.offload_optimizer.fast_init", Bool, NO_OFFLOAD),
    key("zero_optimization.offload_optimizer.ratio", Number, NO_OFFLOAD),
    key("zero_optimization.offload_optimizer.super_offload", Bool, NO_OFFLOAD),
    key("zero_optimization.offload_optimizer.cpuadam_cores_perc", Number, NO_OFFLOAD),
    key("zero_optimization.offload_param.device", DEVICES, Judged(judge::offload)),
    key("zero_optimization.offload_param.pin_memory", Bool, NO_OFFLOAD),
    key("zero_optimization.offload_param.nvme_path", Text, NO_OFFLOAD),
    key("zero_optimization.offload_param.buffer_count", Whole, NO_OFFLOAD),
    key("zero_optimization.offload_param.buffer_size", Whole, NO_OFFLOAD),
    key("zero_optimization.offload_param.max_in_cpu", Whole, NO_OFFLOAD),
    key("zero_optimization.cpu_offload", Bool, Judged(judge::offload)),
    key("zero_optimization.cpu_offload_param", Bool, Judged(judge::offload)),
    key("zero_optimization.cpu_offload_use_pin_memory", Bool, NO_OFFLOAD),
    auto("zero_optimization.allgather_partitions", Bool, DETAIL),
    auto("zero_optimization.allgather_bucket_size", Whole, DETAIL),
    auto("zero_optimization.overlap_comm", Bool, Judged(all_reduce::overlap)),
    auto("zero_optimization.reduce_scatter", Bool, DETAIL),
    auto("zero_optimization.reduce_bucket_size", Count, Judged(all_reduce::bucket)),
    auto("zero_optimization.contiguous_gradients", Bool, DETAIL),
    auto("zero_optimization.use_multi_rank_bucket_allreduce", Bool, DETAIL),
    auto("zero_optimization.round_robin_gradients", Bool, DETAIL),
    auto("zero_optimization.ignore_unused_parameters", Bool, DETAIL),
    auto("zero_optimization.load_from_fp32_weights", Bool, DETAIL),
    auto("zero_optimization.elastic_checkpoint", Bool, DETAIL),
    auto("zero_optimization.legacy_stage1", Bool, DETAIL),
    auto("zero_optimization.sub_group_size", Whole, DETAIL),
    auto("zero_optimization.memory_efficient_linear", Bool, DETAIL),
    auto("zero_optimization.zero_hpz_partition_size", Whole, DETAIL),
    auto("zero_optimization.zero_quantized_weights", Bool, DETAIL),
    auto("zero_optimization.zero_quantized_nontrainable_weights", Bool, DETAIL),
    auto("zero_optimization.zero_quantized_gradients", Bool, DETAIL),
    auto("zero_optimization.compute_grad_norm", Bool, DETAIL),
    auto("zero_optimization.parameter_alignment", Bool, DETAIL),
    auto("zero_optimization.pipeline_loading_checkpoint", Bool, DETAIL),
    auto("zero_optimization.override_module_apply", Bool, DETAIL),
    auto("zero_optimization.log_trace_cache_warnings", Bool, DETAIL),
    auto("zero_optimization.enable_sanity_checks", Bool, DETAIL),
    auto("zero_optimization.stage3_prefetch_bucket_size", Whole, DETAIL),
    auto("zero_optimization.stage3_param_persistence_threshold", Whole, DETAIL),
    auto("zero_optimization.stage3_model_persistence_threshold", Whole, DETAIL),
    auto("zero_optimization.stage3_max_live_parameters", Whole, DETAIL),
    auto("zero_optimization.stage3_max_reuse_distance", Whole, DETAIL),
    auto("zero_optimization.stage3_module_granularity_threshold", Whole, DETAIL),
    auto("zero_optimization.stage3_use_all_reduce_for_fetch_params", Bool, DETAIL),
    auto("zero_optimization.stage3_allgather_sequential", Bool, DETAIL),
    auto("zero_optimization.stage3_gather_16bit_weights_on_model_save", Bool, DETAIL),
    auto("zero_optimization.stage3_gather_fp16_weights_on_model_save", Bool, DETAIL),
    auto("zero_optimization.prefetch_bucket_size", Whole, DETAIL),
    auto("zero_optimization.param_persistence_threshold", Whole, DETAIL),
    auto("zero_optimization.model_persistence_threshold", Whole, DETAIL),
    auto("zero_optimization.max_live_parameters", Whole, DETAIL),
    auto("zero_optimization.max_reuse_distance", Whole, DETAIL),
    auto("zero_optimization.module_granularity_threshold", Whole, DETAIL),
    auto("zero_optimization.use_all_reduce_for_fetch_params", Bool, DETAIL),
    auto("zero_optimization.allgather_sequential", Bool, DETAIL),
    auto("zero_optimization.gather_16bit_weights_on_model_save", Bool, DETAIL),
    auto("zero_optimization.mics_shard_size", Number, DETAIL),
    auto("zero_optimization.mics_hierarchical_params_gather", Bool, DETAIL),
    // ---- pipelines -----------------------------------------------------------------------------------------------
    key("pipeline.pipe_partitioned", Bool, Must(Is(false), "there are no pipeline stages here to partition")),
    key("pipeline.grad_partitioned", Bool, Must(Is(false), "there are no pipeline stages here to partition")),
    key("pipeline.stages", Any, Judged(judge::pipeline_stages)),
    key("pipeline.partition", Text, Harmless("divides a model among pipeline stages, of which there is one")),
    key("pipeline.seed_layers", Bool, Must(Is(false), "weights are initialised by name, not by layer")),
    key(
        "pipeline.activation_checkpoint_interval",
        Whole,
        Must(Equals(0.0), "--recompute full says the same here"),
    ),
    // ---- optimizer and scheduler: their parameters depend on the type ---------------------------------------------
    key("optimizer.type", Text, Judged(judge::optimizer_type)),
    key("optimizer.legacy_fusion", Bool, OTHER_KERNEL),
    key("scheduler.type", Text, Judged(judge::scheduler_type)),
];

/// A parameter of some optimizers or schedulers.
pub struct Param {
    pub key: Key,
    /// Their types, in letters of any case.
    pub of: Cow<'static, [&'static str]>,
}

impl Param {
    /// Returns whether an optimizer or a scheduler of this type has it.
    pub fn is_of(&self, kind: &str) -> bool {
        self.of.iter().any(|of| of.eq_ignore_ascii_case(kind))
    }
}

const fn param(of: &'static [&'static str], key: Key) -> Param {
    Param { key, of: Cow::Borrowed(of) }
}

pub const SCHEDULERS: &[&str] = &["WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest"];

/// Keys of `optimizer.params` that every optimizer has.
const COMMON_PARAMS: &[Key] = &[
    auto("optimizer.params.lr", Positive, Judged(judge::learning_rate)),
    auto("optimizer.params.weight_decay", NotNegative, Judged(judge::weight_decay)),
    key("optimizer.params.foreach", Bool, OTHER_KERNEL),
    key("optimizer.params.fused", Bool, OTHER_KERNEL),
    key("optimizer.params.maximize", Bool, Must(Is(false), "a loss is always made smaller here")),
    key(
        "optimizer.params.max_grad_norm",
        Number,
        Must(Equals(0.0), "DeepSpeed refuses it too: set gradient_clipping"),
    ),
];

/// Parameters of optimizers: those that all have, and those that the registry has for each.
pub static OPTIMIZER_PARAMS: LazyLock<Vec<Param>> = LazyLock::new(|| {
    let mut params: Vec<Param> = vec![];
    for one in optimizers::ALL.iter().filter(|one| one.refused.is_none()) {
        for key in COMMON_PARAMS.iter().chain(one.keys) {
            let types = one.deepspeed.iter().copied();
            match params.iter_mut().find(|param| param.key.path == key.path) {
                Some(param) => param.of.to_mut().extend(types),
                None => params.push(Param { key: *key, of: types.collect::<Vec<_>>().into() }),
            }
        }
    }
    params
});

const WARMUPS: &[&str] = &["warmuplr", "warmupdecaylr", "warmupcosinelr"];
const WARMUPS_BY_RATE: &[&str] = &["warmuplr", "warmupdecaylr"];
const TOTALS: &[&str] = &["warmupdecaylr", "warmupcosinelr"];
const COSINE: &[&str] = &["warmupcosinelr"];
const CYCLE: &[&str] = &["onecycle"];
const RANGE: &[&str] = &["lrrangetest"];
const ALL_SCHEDULERS: &[&str] = &["warmuplr", "warmupdecaylr", "warmupcosinelr", "onecycle", "lrrangetest"];
const READ: Rule = Honoured(None);
const NO_MOMENTUM: Rule = Harmless("only with cycle_momentum");

pub const SCHEDULER_PARAMS: &[Param] = &[
    param(WARMUPS_BY_RATE, auto("scheduler.params.warmup_min_lr", NotNegative, READ)),
    param(WARMUPS_BY_RATE, auto("scheduler.params.warmup_max_lr", Positive, Honoured(Some("lr")))),
    param(WARMUPS, auto("scheduler.params.warmup_num_steps", Count, Honoured(Some("warmup-steps")))),
    param(WARMUPS, key("scheduler.params.warmup_type", OneOf(&["log", "linear"]), READ)),
    param(TOTALS, auto("scheduler.params.total_num_steps", Count, Judged(judge::total_steps))),
    param(COSINE, auto("scheduler.params.warmup_min_ratio", NotNegative, READ)),
    param(COSINE, auto("scheduler.params.cos_min_ratio", NotNegative, READ)),
    param(CYCLE, key("scheduler.params.cycle_min_lr", NotNegative, READ)),
    param(CYCLE, key("scheduler.params.cycle_max_lr", Positive, Honoured(Some("lr")))),
    param(CYCLE, key("scheduler.params.decay_lr_rate", NotNegative, READ)),
    param(CYCLE, key("scheduler.params.cycle_first_step_size", Count, READ)),
    param(CYCLE, key("scheduler.params.cycle_second_step_size", Whole, READ)),
    param(CYCLE, key("scheduler.params.cycle_first_stair_count", Whole, Judged(judge::stairs))),
    param(CYCLE, key("scheduler.params.cycle_second_stair_count", Whole, Judged(judge::stairs))),
    param(CYCLE, key("scheduler.params.decay_step_size", Whole, READ)),
    param(
        CYCLE,
        key(
            "scheduler.params.cycle_momentum",
            Bool,
            Must(Is(false), "momentum is fixed when a run is compiled and can't cycle"),
        ),
    ),
    param(CYCLE, key("scheduler.params.cycle_min_mom", Number, NO_MOMENTUM)),
    param(CYCLE, key("scheduler.params.cycle_max_mom", Number, NO_MOMENTUM)),
    param(CYCLE, key("scheduler.params.decay_mom_rate", Number, NO_MOMENTUM)),
    param(RANGE, key("scheduler.params.lr_range_test_min_lr", Positive, READ)),
    param(RANGE, key("scheduler.params.lr_range_test_step_size", Count, READ)),
    param(RANGE, key("scheduler.params.lr_range_test_step_rate", NotNegative, READ)),
    param(RANGE, key("scheduler.params.lr_range_test_staircase", Bool, READ)),
    param(
        ALL_SCHEDULERS,
        key(
            "scheduler.params.last_batch_iteration",
            Number,
            Must(Equals(-1.0), "a run starts at its first step; --resume continues one"),
        ),
    ),
];

/// Parts of DeepSpeed that are not here. Switched off they are accepted; otherwise refused with what to do instead.
pub const ABSENT: &[(&str, &str)] = &[
    ("activation_checkpointing", "--recompute full says what it is for here"),
    ("aio", "nothing is read from or written to NVMe"),
    ("amp", "there is no apex here; use fp16 or bf16"),
    ("autotuning", "there is no tuning of settings here"),
    ("checkpoint", "--checkpoint-every and --keep say how checkpoints are kept here"),
    ("comet", "metrics are written to metrics.jsonl"),
    ("comms_logger", "a run accounts for its time at the end"),
    ("compile", "a run is always compiled"),
    ("compression_training", "there is no compression here"),
    ("csv_monitor", "metrics are written to metrics.jsonl"),
    ("curriculum_learning", "images come in random order"),
    ("data_efficiency", "images come in random order"),
    ("data_types", "gradients are accumulated in fp32"),
    ("eigenvalue", "there is no quantisation here"),
    ("elasticity", "a run keeps its number of ranks"),
    ("expert_parallel", "there are no experts here"),
    ("flops_profiler", "`vitesse plan` counts operations, and a run ends with its account of time"),
    ("hybrid_engine", "it is for text generation"),
    ("monitor_config", "metrics are written to metrics.jsonl"),
    ("nebula", "checkpoints are written to --out"),
    ("progressive_layer_drop", "--drop-path says the like here"),
    ("quantize_training", "there is no quantisation here"),
    ("sparse_attention", "attention is dense here"),
    ("tensor_parallel", "there is no tensor parallelism here"),
    ("tensorboard", "metrics are written to metrics.jsonl"),
    ("timers", "a run accounts for its time at the end"),
    ("torch_autocast", "use fp16 or bf16"),
    ("wandb", "metrics are written to metrics.jsonl"),
    ("weight_quantization", "there is no quantisation here"),
    ("zero_optimization.leaf_module", "parameters are gathered by bucket, not by module"),
    ("zero_optimization.zenflow", "there is no ZenFlow here"),
    ("zero_optimization.zeropp_loco_param", "nothing is quantised for its way here"),
];

/// Every key, parameters of all optimizers and schedulers included.
pub fn all() -> impl Iterator<Item = &'static Key> + Clone {
    KEYS.iter().chain(OPTIMIZER_PARAMS.iter().chain(SCHEDULER_PARAMS).map(|param| &param.key))
}

/// Hint on a part of DeepSpeed that is not here.
pub fn absent(path: &str) -> Option<&'static str> {
    ABSENT.iter().find(|(name, _)| *name == path).map(|(_, instead)| *instead)
}
