//! Studies that have a name: what they vary unless told otherwise.

use crate::results::Kind;
use crate::spec::{Asked, Experiment};

/// Names that can be typed instead of a file's.
pub const NAMES: [&str; 9] =
    ["quick", "strong", "weak", "fixed-per-rank", "batch", "accumulation", "optimizer", "precision", "nodes"];

/// A study by its name, for a machine of so many cores. `device`: as it was asked for.
pub fn preset(name: &str, cores: usize, device: Option<&str>) -> Option<Asked> {
    let kinds = [
        Kind::Strong,
        Kind::Weak,
        Kind::FixedPerRank,
        Kind::Batch,
        Kind::Accumulation,
        Kind::Optimizer,
        Kind::Precision,
        Kind::Nodes,
    ];
    if name == "quick" {
        return Some(quick());
    }
    let kind = kinds.into_iter().find(|kind| kind.name() == name)?;
    let mut common = Experiment { kind: Some(kind), ..Experiment::default() };
    let words = |words: &[&str]| Some(words.iter().map(|word| word.to_string()).collect());
    match kind {
        Kind::Strong | Kind::Weak | Kind::FixedPerRank | Kind::Nodes => common.ranks = Some(doubling(cores)),
        Kind::Batch => common.batch_sizes = Some(vec![16, 32, 64, 128, 256]),
        Kind::Accumulation => common.accumulation = Some(vec![1, 2, 4, 8]),
        Kind::Optimizer => common.optimizers = words(&["adamw", "sgd", "lamb"]),
        Kind::Precision if device.is_none_or(|device| device == "cpu") => {
            common.precisions = words(&["fp32", "fp64"])
        }
        Kind::Precision => common.precisions = words(&["fp32", "tf32", "bf16", "fp16"]),
        Kind::Grid => {}
    }
    Some(Asked { name: Some(name.into()), title: Some(kind.holds().into()), common, ..Asked::default() })
}

/// 1, 2, 4, … up to the number of cores.
fn doubling(cores: usize) -> Vec<usize> {
    std::iter::successors(Some(1), |ranks| Some(2 * ranks))
        .take_while(|ranks| *ranks <= cores.max(1))
        .collect()
}

/// Strong and weak scaling over 1 and 2 ranks, under three minutes on two cores.
fn quick() -> Asked {
    let both = |kind| Experiment { kind: Some(kind), ..Experiment::default() };
    let common = Experiment {
        ranks: Some(vec![1, 2]),
        batch_sizes: Some(vec![64]),
        models: Some(vec!["vit-nano/4".into()]),
        threads: Some(vec![1]),
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
            let asked = preset(name, 4, None).unwrap();
            assert_eq!(asked.name.as_deref(), Some(name));
            assert!(asked.study().is_ok());
        }
        assert!(preset("strung", 4, None).is_none());
        assert_eq!(doubling(6), [1, 2, 4]);
    }

    #[test]
    fn what_is_typed_wins() {
        let typed = Experiment { ranks: Some(vec![3]), ..Experiment::default() };
        let asked = Asked { common: typed, ..Asked::default() }.over(preset("quick", 2, None).unwrap());
        let study = asked.study().unwrap();
        assert!(study.experiments.iter().all(|one| one.ranks.as_deref() == Some(&[3])));
        assert_eq!(study.experiments[1].kind, Some(Kind::Weak));
    }
}
