//! Studies that have a name: what they vary by default.

use crate::axes::{ACCUMULATION, Axes, BATCH_SIZES, MODELS, OPTIMIZERS, PRECISIONS, RANKS, THREADS, ZERO};
use crate::results::Kind;
use crate::spec::{Asked, Experiment};

/// Names that can be typed instead of a file's.
pub const NAMES: [&str; 10] = [
    "quick",
    "strong",
    "weak",
    "fixed-per-rank",
    "batch",
    "accumulation",
    "optimizer",
    "precision",
    "zero",
    "nodes",
];

/// The study of a name, for a machine of `cores` cores. `device`: the one that was typed. `optimizers`: all there are.
pub fn preset(name: &str, cores: usize, device: Option<&str>, optimizers: &[&str]) -> Option<Asked> {
    let kinds = [
        Kind::Strong,
        Kind::Weak,
        Kind::FixedPerRank,
        Kind::Batch,
        Kind::Accumulation,
        Kind::Optimizer,
        Kind::Precision,
        Kind::Zero,
        Kind::Nodes,
    ];
    if name == "quick" {
        return Some(quick());
    }
    let kind = kinds.into_iter().find(|kind| kind.name() == name)?;
    let none = Axes::default();
    let axes = match kind {
        Kind::Strong | Kind::Weak | Kind::FixedPerRank | Kind::Nodes => none.with(RANKS, doubling(cores)),
        Kind::Batch => none.with(BATCH_SIZES, [16, 32, 64, 128, 256]),
        Kind::Accumulation => none.with(ACCUMULATION, [1, 2, 4, 8]),
        Kind::Optimizer => none.with(OPTIMIZERS, optimizers.iter().copied()),
        Kind::Precision if device.is_none_or(|device| device == "cpu") => {
            none.with(PRECISIONS, ["fp32", "fp64"])
        }
        Kind::Precision => none.with(PRECISIONS, ["fp32", "tf32", "bf16", "fp16"]),
        Kind::Zero => none.with(ZERO, [0, 1, 2, 3]).with(RANKS, several(cores)),
        Kind::Grid => none,
    };
    let common = Experiment { kind: Some(kind), axes, ..Experiment::default() };
    Some(Asked { name: Some(name.into()), title: Some(kind.holds().into()), common, ..Asked::default() })
}

/// 1, 2, 4, … up to the number of cores.
fn doubling(cores: usize) -> Vec<usize> {
    std::iter::successors(Some(1), |ranks| Some(2 * ranks))
        .take_while(|ranks| *ranks <= cores.max(1))
        .collect()
}

/// The same without one rank, which divides nothing.
fn several(cores: usize) -> Vec<usize> {
    doubling(cores.max(2)).split_off(1)
}

/// Strong and weak scaling over 1 and 2 ranks, under three minutes on two cores.
fn quick() -> Asked {
    let both = |kind| Experiment { kind: Some(kind), ..Experiment::default() };
    let common = Experiment {
        axes: Axes::default()
            .with(RANKS, [1, 2])
            .with(BATCH_SIZES, [64])
            .with(MODELS, ["vit-nano/4"])
            .with(THREADS, [1]),
        epochs: Some(1),
        ..Experiment::default()
    };
    Asked {
        name: Some("quick".into()),
        title: Some("strong and weak scaling of a small ViT on the built-in set".into()),
        train: ["--train-samples", "2048", "--test-samples", "256"].map(str::to_string).to_vec(),
        common,
        experiments: vec![both(Kind::Strong), both(Kind::Weak)],
        ..Asked::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_is_a_study() {
        for name in NAMES {
            let asked = preset(name, 4, None, &["adamw", "sgd"]).unwrap();
            assert_eq!(asked.name.as_deref(), Some(name));
            assert!(asked.study().is_ok());
        }
        assert!(preset("strung", 4, None, &[]).is_none());
        assert_eq!(doubling(6), [1, 2, 4]);
    }

    #[test]
    fn what_is_typed_wins() {
        let typed = Experiment { axes: Axes::default().with(RANKS, [3]), ..Experiment::default() };
        let asked = Asked { common: typed, ..Asked::default() }.over(preset("quick", 2, None, &[]).unwrap());
        let study = asked.study().unwrap();
        assert!(study.experiments.iter().all(|one| one.axes.get(RANKS) == Some(&[3.into()])));
        assert_eq!(study.experiments[1].kind, Some(Kind::Weak));
    }
}
