//! The names of models for pixels: a backbone's and a head's. timm's backbones have no prefix; transformers calls them `backbone`
//! where it has the family's own name else.

use super::{Convention, NameError, Table, Weights, detect, from_canonical, to_canonical};
use crate::dense_names::{HEADS, from_torch, to_torch};

/// Prefixes of a backbone's names in transformers: alone, and under a head.
const PREFIX: [&str; 2] = ["swinv2.", "backbone."];

fn is_head(name: &str) -> bool {
    HEADS.iter().any(|head| name.starts_with(head))
}

/// The names of a backbone of any family and of heads for pixels.
pub struct Segmenter;

impl Table for Segmenter {
    fn detect(&self, names: &[&str]) -> Option<Convention> {
        let backbone = backbone_names(names)?;
        detect(backbone.iter().map(String::as_str)).ok()
    }

    fn import(&self, weights: Weights, from: Convention) -> Result<Weights, NameError> {
        let (heads, backbone): (Weights, Weights) = weights.into_iter().partition(|(name, _)| is_head(name));
        let backbone = backbone.into_iter().map(|(name, tensor)| (moved(&name, 1, 0), tensor)).collect();
        let mut ours = to_canonical(backbone, from)?;
        ours.extend(from_torch(heads)?);
        Ok(ours)
    }

    fn export(&self, weights: Weights, to: Convention) -> Result<Weights, NameError> {
        let (heads, backbone): (Weights, Weights) = weights.into_iter().partition(|(name, _)| is_head(name));
        let mut theirs = from_canonical(backbone, to)?;
        if to == Convention::HuggingFace {
            theirs = theirs.into_iter().map(|(name, tensor)| (moved(&name, 0, 1), tensor)).collect();
        }
        theirs.extend(to_torch(heads)?);
        Ok(theirs)
    }
}

/// The names of the backbone as it would have them alone, if there is a head above it.
fn backbone_names(names: &[&str]) -> Option<Vec<String>> {
    let any = names.iter().any(|name| is_head(name));
    any.then(|| names.iter().filter(|name| !is_head(name)).map(|name| moved(name, 1, 0)).collect())
}

fn moved(name: &str, from: usize, to: usize) -> String {
    name.strip_prefix(PREFIX[from]).map_or_else(|| name.to_string(), |rest| format!("{}{rest}", PREFIX[to]))
}

#[cfg(test)]
mod tests {
    use super::super::{Tensor, check_against};
    use super::*;
    use crate::Network;

    #[test]
    fn a_conversion_and_its_reverse_change_nothing() {
        let network = Network::named("swinv2-nano/w8+upernet", 32, 3, 4).unwrap();
        let tensor = |seed: usize, shape: Vec<usize>| {
            let count = shape.iter().product::<usize>();
            Tensor { data: (0..count).map(|i| (seed * 7 + i) as f32).collect(), shape }
        };
        let expected = network.expected().into_iter().enumerate();
        let mut weights: Weights = expected.map(|(i, (name, shape))| (name, tensor(i, shape))).collect();
        // The number of batches is one for all channels.
        for (_, tensor) in weights.iter_mut().filter(|(name, _)| name.ends_with(".running")) {
            let channels = tensor.shape[1];
            tensor.data[2 * channels..].fill(3.0);
        }
        assert_eq!(check_against(&weights, &network.expected()), Ok(()));
        for convention in [Convention::Timm, Convention::HuggingFace] {
            let theirs = from_canonical(weights.clone(), convention).unwrap();
            assert_eq!(theirs["decode_head.classifier.weight"].shape, [4, 64, 1, 1]);
            assert_eq!(detect(theirs.keys().map(String::as_str)), Ok(convention));
            assert_eq!(to_canonical(theirs, convention), Ok(weights.clone()), "{convention}");
        }
        // transformers 5.22: UperNetForSemanticSegmentation over a Swinv2Config.
        let theirs = from_canonical(weights, Convention::HuggingFace).unwrap();
        for name in [
            "backbone.embeddings.patch_embeddings.projection.weight",
            "backbone.encoder.layers.0.blocks.0.attention.self.continuous_position_bias_mlp.0.weight",
            "backbone.encoder.layers.0.downsample.reduction.weight",
            "auxiliary_head.convs.0.batch_norm.num_batches_tracked",
        ] {
            assert!(theirs.contains_key(name), "{name}");
        }
    }
}
