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

/// A curve of a figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Curve {
    /// The [`Figure`]'s.
    pub figure: &'static str,
    pub name: &'static str,
}

/// A figure of the live page; its curves are the metrics that name it.
#[derive(Clone, Copy, Debug)]
pub struct Figure {
    pub id: &'static str,
    pub title: &'static str,
    pub scale: Scale,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scale {
    Free,
    /// From 0 to 1, shown as percentages.
    Share,
    /// From 0 on.
    Amount,
}

pub const FIGURES: [Figure; 5] = [
    Figure { id: "loss", title: "Loss", scale: Scale::Free },
    Figure { id: "accuracy", title: "Accuracy", scale: Scale::Share },
    Figure { id: "miou", title: "Mean IoU", scale: Scale::Share },
    Figure { id: "rate", title: "Images/s", scale: Scale::Amount },
    Figure { id: "updates", title: "Update of a layer's weights, ‖ΔW‖/‖W‖", scale: Scale::Free },
];

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
    LearningRate: Declared { tag: Some("train/learning_rate"), ..real("lr") };
    ImagesPerSecond: Declared { unit: "images/s", tag: Some("train/images_per_second"), curve: training("rate"), ..measured("images_per_second") };
    GradientNorm: Declared { tag: Some("train/gradient_norm"), ..real("grad_norm") };
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
    GpuLoad: Declared { tag: Some("gpu/load"), ..measured("gpu_load") };
    GpuMemoryUsed: Declared { unit: "bytes", tag: Some("gpu/memory_used"), ..whole("gpu_memory_used") };
    GpuTemperature: Declared { unit: "°C", tag: Some("gpu/temperature"), ..measured("gpu_temperature") };
    GpuPower: Declared { unit: "W", tag: Some("gpu/power"), ..measured("gpu_power") };
    /// How far the update moved the weights of a layer, ‖ΔW‖/‖W‖: the largest of all layers.
    UpdateRatio: Declared {
        tag: Some("update_ratio"),
        curve: Some(Curve { figure: "updates", name: "largest" }),
        log: Some("update"),
        layers: Some("update_ratios"),
        ..real("update_ratio")
    };
    UpdateRatioMedian: Declared {
        tag: Some("update_ratio_median"),
        curve: Some(Curve { figure: "updates", name: "median" }),
        ..real("update_ratio_median")
    };
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

const fn training(figure: &'static str) -> Option<Curve> {
    Some(Curve { figure, name: "training" })
}

const fn validation(figure: &'static str) -> Option<Curve> {
    Some(Curve { figure, name: "validation" })
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
            assert!(one.curve.is_none_or(|curve| FIGURES.iter().any(|figure| figure.id == curve.figure)));
        }
    }
}
