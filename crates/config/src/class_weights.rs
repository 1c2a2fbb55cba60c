//! Weights of classes in the training loss.
//!
//! As in PyTorch's cross-entropy with `weight`: Σ wᵢ·lossᵢ / Σ wᵢ, with the weight of each label's class. Labels have weights anyway (0 for
//! padding and for ignored pixels), and what a rank and a step sum is divided by the weights of all ranks, so that a class's weight is that
//! of its labels.

use crate::{Augmentation, ConfigError, Raw, Resolved};
use data::Dataset;
use models::Network;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// `--class-weights`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum ClassWeights {
    /// Images / (classes × images of the class).
    Balanced,
    /// One for each class, in the order of the labels.
    Each(Vec<f32>),
    /// Those of some classes by name; 1 for the others.
    Named(Vec<(String, f32)>),
}

const BALANCED: &str = "balanced";
const FLAG: &str = "class-weights";

impl FromStr for ClassWeights {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.trim() == BALANCED {
            return Ok(ClassWeights::Balanced);
        }
        let weight = |text: &str| text.trim().parse().ok().filter(|w: &f32| *w >= 0.0 && w.is_finite());
        let parts: Vec<&str> = text.split(',').collect();
        let weights = if parts.iter().all(|part| part.contains('=')) {
            let named = |part: &&str| {
                let (name, text) = part.rsplit_once('=')?;
                Some((name.trim().to_string(), weight(text)?)).filter(|(name, _)| !name.is_empty())
            };
            parts.iter().map(named).collect::<Option<_>>().map(ClassWeights::Named)
        } else {
            parts.iter().map(|part| weight(part)).collect::<Option<_>>().map(ClassWeights::Each)
        };
        let expected =
            "is neither balanced, nor a weight of 0 or more for each class as in 1,2.5,1, nor cat=2,dog=0.5";
        match weights.ok_or(expected)? {
            ClassWeights::Each(each) if each.iter().all(|weight| *weight == 0.0) => {
                Err("leaves no class that counts".to_string())
            }
            weights => Ok(weights),
        }
    }
}

impl fmt::Display for ClassWeights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let texts: Vec<String> = match self {
            ClassWeights::Balanced => return f.write_str(BALANCED),
            ClassWeights::Each(each) => each.iter().map(f32::to_string).collect(),
            ClassWeights::Named(named) => named.iter().map(|(name, w)| format!("{name}={w}")).collect(),
        };
        f.write_str(&texts.join(","))
    }
}

impl TryFrom<String> for ClassWeights {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<ClassWeights> for String {
    fn from(weights: ClassWeights) -> Self {
        weights.to_string()
    }
}

impl Raw {
    /// Refuses weights that the loss could not honour.
    pub(super) fn check_class_weights(
        &self,
        network: &Network,
        augmentation: &Augmentation,
        label_smoothing: f64,
    ) -> Result<(), ConfigError> {
        let Some(weights) = &self.class_weights else { return Ok(()) };
        let refuse = |why: String| Err(ConfigError::setting(FLAG, weights, why));
        let classes = network.classes();
        match weights {
            ClassWeights::Each(each) if each.len() != classes => {
                refuse(format!("{}, where the head has {}", text::many(each.len(), "weight"), text::many(classes, "class")))
            }
            ClassWeights::Balanced if network.segments() => refuse(
                "every mask would have to be read first; `vitesse data inspect` counts pixels by class: give a weight for each".to_string(),
            ),
            _ if label_smoothing > 0.0 => refuse(format!(
                "with --label-smoothing {label_smoothing} every class has a share of every target, and the loss here weighs labels alone: \
                 add --label-smoothing 0"
            )),
            _ if augmentation.mixes() => refuse(
                "mixup and cutmix give an image two classes, and the loss here has one weight for each image: \
                 add --mixup 0 --cutmix 0"
                    .to_string(),
            ),
            _ => Ok(()),
        }
    }
}

impl Resolved {
    /// Weights of the classes in the training loss, in the order of the labels; none where all weigh the same. `set` is the training set.
    pub fn weights_of_classes(&self, set: &dyn Dataset) -> Result<Vec<f32>, ConfigError> {
        let Some(weights) = &self.class_weights else { return Ok(vec![]) };
        let refuse = |why: String| Err(ConfigError::setting(FLAG, weights, why));
        let classes = self.network.classes();
        match weights {
            ClassWeights::Each(each) => Ok(each.clone()),
            ClassWeights::Balanced => {
                let mut counts = vec![0usize; classes];
                (0..set.len()).for_each(|index| counts[set.label(index)] += 1);
                let present = counts.iter().filter(|count| **count > 0).count();
                let each = set.len() as f64 / present.max(1) as f64;
                // A class without images has no label to weigh.
                Ok(counts.iter().map(|&n| if n > 0 { (each / n as f64) as f32 } else { 1.0 }).collect())
            }
            ClassWeights::Named(named) => {
                let (names, mut each) = (set.class_names(), vec![1.0; classes]);
                for (name, weight) in named {
                    let Some(class) = names.iter().position(|known| known == name) else {
                        let meant = text::nearest(name, names.iter().map(String::as_str));
                        let hint = meant.map_or(String::new(), |meant| format!("; did you mean {meant}?"));
                        return refuse(format!("the data has no class {name}{hint}"));
                    };
                    each[class] = *weight;
                }
                if each.iter().all(|weight| *weight == 0.0) {
                    return refuse("leaves no class that counts".to_string());
                }
                Ok(each)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Facts, Preset, Task, sets};

    #[test]
    fn weights_are_numbers_names_or_balanced() {
        for text in ["balanced", "1,2.5,0", "cat=2", "a=b=0.5,dog=0"] {
            assert_eq!(text.parse::<ClassWeights>().unwrap().to_string(), text);
        }
        assert_eq!("a=b=2".parse(), Ok(ClassWeights::Named(vec![("a=b".to_string(), 2.0)])));
        for bad in ["", "1,,2", "-1,2", "1,x", "inf,1", "nan,1", "cat=2,1", "=2", "balance", "0,0"] {
            assert!(bad.parse::<ClassWeights>().is_err(), "{bad}");
        }
    }

    #[test]
    fn what_the_loss_can_not_honour_is_refused() {
        let weighted = |text: &str| Raw { class_weights: Some(text.parse().unwrap()), ..Raw::default() };
        let refused = |raw: Raw| {
            let facts = Facts::synthetic(&raw).unwrap();
            raw.resolve(&facts, 1).unwrap_err().to_string()
        };
        let ten = "1,1,1,1,1,1,1,1,1,2";
        assert_eq!(refused(weighted("1,2")), "--class-weights 1,2: 2 weights, where the head has 10 classes");
        let smooth = Raw { label_smoothing: Some(0.1), ..weighted(ten) };
        assert!(refused(smooth).contains("add --label-smoothing 0"));
        let mixed = Raw { augment: Some(Preset::Strong), label_smoothing: Some(0.0), ..weighted("balanced") };
        assert!(refused(mixed).contains("add --mixup 0 --cutmix 0"));
        let pixels = Raw { task: Some(Task::Segment), ..weighted("balanced") };
        assert!(refused(pixels).contains("`vitesse data inspect` counts pixels by class"));
        let named = Raw { train_samples: Some(8), test_samples: Some(8), ..weighted("disk=2") };
        let why = sets::resolve(&named, 1).err().unwrap().to_string();
        assert!(why.starts_with("--class-weights disk=2: the data has no class disk"), "{why}");
    }

    #[test]
    fn balanced_weights_are_those_of_scikit_learn() {
        let raw = Raw {
            class_weights: Some(ClassWeights::Balanced),
            train_samples: Some(100),
            test_samples: Some(8),
            ..Raw::default()
        };
        let (run, sets) = sets::resolve(&raw, 1).unwrap();
        let weights = run.weights_of_classes(&*sets.train).unwrap();
        let total: f32 = (0..100).map(|index| weights[sets.train.label(index)]).sum();
        assert!((total - 100.0).abs() < 1e-3, "the mean over images is 1: {total}");
        let of = |class: usize| {
            let images = (0..100).filter(|index| sets.train.label(*index) == class).count();
            weights[class] * images as f32
        };
        assert!((0..10).all(|class| (of(class) - 10.0).abs() < 1e-3), "every class weighs the same");
        let again = Resolved::from_json("", &run.to_json().unwrap()).unwrap();
        assert_eq!(again.class_weights, run.class_weights);
    }
}
