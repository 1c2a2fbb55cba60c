//! `metrics.jsonl`: a line for every step and every evaluation, with only the numbers it concerns. Each number is declared once, in
//! [`METRICS`]; the columns of `metrics.csv`, TensorBoard's tags, the curves of the live page and a study's curves by epoch follow from that.

mod line;

pub use line::{LayerValues, MetricsLine, Values, csv_heading};

/// One number of a line of metrics: how it is called, written and shown.
#[derive(Clone, Copy, Debug)]
pub struct Declared {
    pub metric: Metric,
    /// Key in `metrics.jsonl` and column of `metrics.csv`.
    pub name: &'static str,
    pub unit: &'static str,
    pub digits: Digits,
    /// How an epoch's steps become one number, for the curves of a study. `None`: not at all.
    pub over: Option<Over>,
    /// Tag in TensorBoard.
    pub tag: Option<&'static str>,
    /// Curve of the live page.
    pub curve: Option<Curve>,
    /// Word for it in lines of the log, behind loss, learning rate and images/s.
    pub log: Option<&'static str>,
    /// Key of the values by layer, of which the metric is the largest.
    pub layers: Option<&'static str>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Digits {
    Whole,
    /// All digits.
    Real,
    /// Six decimals: a measurement.
    Measured,
}

/// How the values of an epoch become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Over {
    /// Mean, each step weighted by its images.
    Images,
    /// The last one: that of the evaluation after the epoch.
    Last,
    /// Largest.
    Most,
}

/// A curve of a chart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Curve {
    /// The [`Chart`]'s.
    pub chart: &'static str,
    pub name: &'static str,
    /// Noise from step to step is smoothed.
    pub smooth: bool,
}

/// A figure of the live page: a chart, or several beside each other.
#[derive(Clone, Copy, Debug)]
pub struct Figure {
    pub id: &'static str,
    pub title: &'static str,
    pub charts: &'static [Chart],
}

/// A chart; its curves are the metrics that name it.
#[derive(Clone, Copy, Debug)]
pub struct Chart {
    pub id: &'static str,
    /// Empty where the figure has no other.
    pub title: &'static str,
    pub scale: Scale,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scale {
    Free,
    /// Shares between 0 and 1, shown as percentages.
    Share,
    /// Shares, from 0 on.
    Part,
    /// From 0 on.
    Amount,
    /// Bytes, from 0 on.
    Bytes,
}

pub const FIGURES: [Figure; 7] = [
    Figure { id: "loss", title: "Loss", charts: &[alone("loss", Scale::Free)] },
    Figure { id: "accuracy", title: "Accuracy", charts: &[alone("accuracy", Scale::Share)] },
    Figure { id: "miou", title: "Mean IoU", charts: &[alone("miou", Scale::Share)] },
    Figure {
        id: "optimizer",
        title: "Learning rate and gradient norm",
        charts: &[
            Chart { id: "lr", title: "Learning rate", scale: Scale::Amount },
            Chart { id: "gradient", title: "Gradient norm", scale: Scale::Amount },
        ],
    },
    Figure {
        id: "updates",
        title: "Update of a layer's weights, ‖ΔW‖/‖W‖",
        charts: &[alone("updates", Scale::Free)],
    },
    Figure { id: "rate", title: "Images/s", charts: &[alone("rate", Scale::Amount)] },
    Figure {
        id: "gpus",
        title: "GPUs, as their sensors read: mean of the ranks",
        charts: &[
            Chart { id: "gpu-load", title: "Load", scale: Scale::Part },
            Chart { id: "gpu-memory", title: "Memory in use", scale: Scale::Bytes },
            Chart { id: "gpu-temperature", title: "Temperature, °C", scale: Scale::Free },
            Chart { id: "gpu-power", title: "Power, W", scale: Scale::Amount },
        ],
    },
];

const fn alone(id: &'static str, scale: Scale) -> Chart {
    Chart { id, title: "", scale }
}

/// Declares [`Metric`] and [`METRICS`] from one list, in the order of the columns.
macro_rules! metrics {
    ($($(#[$doc:meta])* $metric:ident: $declared:expr;)*) => {
        /// A number of a line of metrics.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Metric { $($(#[$doc])* $metric),* }

        /// All metrics, in the order of the columns of `metrics.csv`.
        pub const METRICS: [Declared; [$(Metric::$metric),*].len()] =
            [$(Declared { metric: Metric::$metric, ..$declared }),*];
    };
}

metrics! {
    /// Training loss, of the main head.
    Loss: Declared { over: Some(Over::Images), tag: Some("train/loss"), curve: training("loss"), ..real("loss") };
    LearningRate: Declared { tag: Some("train/learning_rate"), curve: plain("lr"), ..real("lr") };
    ImagesPerSecond: Declared { unit: "images/s", tag: Some("train/images_per_second"), curve: noisy("rate"), ..measured("images_per_second") };
    GradientNorm: Declared { tag: Some("train/gradient_norm"), curve: noisy("gradient"), ..real("grad_norm") };
    /// Training accuracy.
    Top1: Declared { over: Some(Over::Images), tag: Some("train/top1"), curve: training("accuracy"), ..real("top1") };
    EvalLoss: Declared { tag: Some("eval/loss"), curve: validation("loss"), ..evaluated("eval_loss") };
    EvalTop1: Declared { tag: Some("eval/top1"), curve: validation("accuracy"), ..evaluated("eval_top1") };
    EvalTop5: Declared { tag: Some("eval/top5"), ..evaluated("eval_top5") };
    /// Wall time of the step.
    Seconds: seconds("seconds");
    ComputeSeconds: Declared { tag: Some("seconds/compute"), ..seconds("compute_seconds") };
    /// Communication that nothing hides.
    CommunicationSeconds: Declared { tag: Some("seconds/exchange"), ..seconds("exchange_seconds") };
    WaitSeconds: Declared { tag: Some("seconds/wait_for_ranks"), ..seconds("wait_seconds") };
    DataSeconds: Declared { tag: Some("seconds/data"), ..seconds("data_seconds") };
    OptimizerSeconds: Declared { tag: Some("seconds/optimizer"), ..seconds("optimizer_seconds") };
    IdleSeconds: Declared { tag: Some("seconds/idle"), ..seconds("idle_seconds") };
    /// Communication behind compute.
    HiddenSeconds: Declared { tag: Some("seconds/hidden_exchange"), ..seconds("hidden_exchange_seconds") };
    SlowestRank: whole("slowest_rank");
    FastestRank: whole("fastest_rank");
    LossScale: Declared { tag: Some("train/loss_scale"), ..real("loss_scale") };
    /// Time on cores, of all processes of the run.
    CpuSeconds: seconds("cpu_seconds");
    EvalMeanIou: Declared { tag: Some("eval/miou"), curve: validation("miou"), ..evaluated("eval_miou") };
    EvalPixelAccuracy: Declared { tag: Some("eval/pixel_accuracy"), ..evaluated("eval_pixel_accuracy") };
    /// Share of the time in which something ran, 0 to 1, by the GPU's sensors.
    GpuLoad: Declared { tag: Some("gpu/load"), curve: noisy("gpu-load"), ..measured("gpu_load") };
    GpuMemoryUsed: Declared { unit: "bytes", tag: Some("gpu/memory_used"), curve: plain("gpu-memory"), ..whole("gpu_memory_used") };
    GpuTemperature: Declared { unit: "°C", tag: Some("gpu/temperature"), curve: plain("gpu-temperature"), ..measured("gpu_temperature") };
    GpuPower: Declared { unit: "W", tag: Some("gpu/power"), curve: noisy("gpu-power"), ..measured("gpu_power") };
    /// How far the update moved the weights of a layer, ‖ΔW‖/‖W‖: the largest of all layers.
    UpdateRatio: Declared {
        tag: Some("update_ratio"),
        curve: Some(Curve { chart: "updates", name: "largest", smooth: false }),
        log: Some("update"),
        layers: Some("update_ratios"),
        ..real("update_ratio")
    };
    UpdateRatioMedian: Declared {
        tag: Some("update_ratio_median"),
        curve: Some(Curve { chart: "updates", name: "median", smooth: false }),
        ..real("update_ratio_median")
    };
    /// Training waited for a copy of the states, or for the checkpoint before: part of the step, and of its idle time.
    CheckpointSeconds: Declared { tag: Some("seconds/checkpoint"), ..seconds("checkpoint_seconds") };
}

impl Metric {
    pub fn declared(self) -> &'static Declared {
        const ALL: &[Declared] = &METRICS;
        &ALL[self as usize]
    }

    /// The metric of a key or column.
    pub fn named(name: &str) -> Option<Metric> {
        METRICS.iter().find(|declared| declared.name == name).map(|declared| declared.metric)
    }
}

const fn real(name: &'static str) -> Declared {
    Declared {
        metric: Metric::Loss,
        name,
        unit: "",
        digits: Digits::Real,
        over: None,
        tag: None,
        curve: None,
        log: None,
        layers: None,
    }
}

const fn whole(name: &'static str) -> Declared {
    Declared { digits: Digits::Whole, ..real(name) }
}

const fn measured(name: &'static str) -> Declared {
    Declared { digits: Digits::Measured, ..real(name) }
}

const fn seconds(name: &'static str) -> Declared {
    Declared { unit: "s", ..measured(name) }
}

const fn evaluated(name: &'static str) -> Declared {
    Declared { over: Some(Over::Last), ..real(name) }
}

const fn training(chart: &'static str) -> Option<Curve> {
    Some(Curve { chart, name: "training", smooth: true })
}

const fn validation(chart: &'static str) -> Option<Curve> {
    Some(Curve { chart, name: "validation", smooth: false })
}

/// The only curve of its chart, which names it; `plain` as it is, `noisy` smoothed.
const fn plain(chart: &'static str) -> Option<Curve> {
    Some(Curve { chart, name: "", smooth: false })
}

const fn noisy(chart: &'static str) -> Option<Curve> {
    Some(Curve { chart, name: "", smooth: true })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_tags_are_unique_and_figures_are_there() {
        for (i, one) in METRICS.iter().enumerate() {
            assert_eq!(one.metric as usize, i);
            assert_eq!(Metric::named(one.name), Some(one.metric));
            assert!(METRICS[..i].iter().all(|other| other.tag.is_none() || other.tag != one.tag), "{one:?}");
            let drawn =
                |curve: Curve| FIGURES.iter().flat_map(|f| f.charts).filter(|c| c.id == curve.chart).count();
            assert!(one.curve.is_none_or(|curve| drawn(curve) == 1), "{one:?}");
        }
    }
}
