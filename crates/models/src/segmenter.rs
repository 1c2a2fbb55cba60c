//! Models that classify pixels: a backbone, and a head that brings what it says back to the image's size.
//!
//! Legend: B batch, T tokens, C width, K classes.

use crate::network::{Network, NetworkError};
use crate::swin::Swin;
use crate::upernet::UperNet;
use crate::vit::Vit;
use graph::build::Linear;
use graph::{Builder, DType, Graph, GraphError, Init, Key, Loss, Model};
use serde::{Deserialize, Serialize};

/// Fields tell the heads apart in records. The backbone's classes are those of the pixels.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Segmenter {
    /// UPerNet over the four stages of a Swin V2, as published for ADE20K.
    Upernet { swin: Swin, upernet: UperNet },
    /// A ViT's tokens back where their patches came from, a linear classifier, resized to the image (the simplest head of
    /// Strudel et al., 2021).
    Linear { vit: Vit },
}

/// Swin V2s that are narrower than any published one get a head to match. (width, channels, auxiliary channels)
pub(crate) const NARROW: (usize, usize, usize) = (96, 64, 32);

impl Segmenter {
    /// Decodes a name such as `swinv2-b/w8+upernet` or `vit-ti/16+linear`, for square images.
    pub fn named(
        name: &str,
        image: usize,
        channels: usize,
        classes: usize,
    ) -> Result<Segmenter, NetworkError> {
        let (backbone, head) = name.split_once('+').unwrap_or((name, ""));
        let wrong = |why: &'static str| NetworkError::Head { model: name.to_string(), why };
        match (head.to_ascii_lowercase().as_str(), Network::named(backbone, image, channels, classes)?) {
            ("upernet", Network::Swin(swin)) => {
                let published = UperNet::published(classes);
                let (width, channels, auxiliary) = NARROW;
                let upernet =
                    if swin.width < width { UperNet { channels, auxiliary, ..published } } else { published };
                Ok(Segmenter::Upernet { swin, upernet })
            }
            ("linear", Network::Vit(vit)) => Ok(Segmenter::Linear { vit }),
            ("upernet", _) => {
                Err(wrong("UPerNet reads four stages, which a ViT doesn't have: write +linear"))
            }
            ("linear", _) => Err(wrong("a linear head reads a ViT's tokens: over a Swin V2 write +upernet")),
            _ => Err(wrong("a head for pixels is +upernet, over a Swin V2, or +linear, over a ViT")),
        }
    }

    /// What is below the head, as a classifier of its own.
    pub fn backbone(&self) -> Network {
        match self {
            Segmenter::Upernet { swin, .. } => Network::Swin(swin.clone()),
            Segmenter::Linear { vit } => Network::Vit(vit.clone()),
        }
    }

    /// The graphs of training and evaluation, for labels and weights of a pixel each (B,height,width).
    pub fn build(&self, batch: usize, loss: Loss, dtype: DType) -> Result<Model, GraphError> {
        let [height, width] = self.backbone().size();
        let train = self.graph(Builder::new(dtype, true), batch, loss, dtype)?;
        let eval = self.graph(Builder::new(dtype, false), batch, Loss::default(), dtype)?;
        Ok(Model { train, eval, key: Key { batch, height, width } })
    }

    /// Every parameter and every running moment with its shape.
    pub fn states(&self) -> Vec<(String, Vec<usize>)> {
        // What is wrong with a model's sizes, building it says.
        let model = self.build(1, Loss::default(), DType::F32);
        let states = model.map(|model| model.train.states).unwrap_or_default();
        states.into_iter().map(|state| (state.name, state.ty.shape.0)).collect()
    }

    fn graph(&self, mut b: Builder, batch: usize, loss: Loss, dtype: DType) -> Result<Graph, GraphError> {
        let backbone = self.backbone();
        let [height, width] = backbone.size();
        let images = b.input("images", dtype, [batch, backbone.channels(), height, width]);
        let targets = b.targets([batch, height, width], loss.mixed);
        match self {
            Segmenter::Upernet { swin, upernet } => {
                let stages = swin.stages(&mut b, images);
                let ends = upernet.finish(&mut b, stages, (height, width), targets, loss);
                b.finish(&ends)
            }
            Segmenter::Linear { vit } => {
                let tokens = vit.encode(&mut b, images); // (B,T,C)
                let tokens = vit.norm(&mut b, tokens);
                let head = Linear { name: "head", out: vit.classes, weight: Init::Zeros, bias: Init::Zeros };
                let tokens = b.linear(tokens, head);
                let small = b.grid(tokens, (vit.grid(), vit.grid())); // (B,h,w,K)
                let logits = b.resize("logits", small, (height, width));
                let (loss, stats) = b.weighted_losses(logits, &[], targets, loss.smoothing);
                b.name(small, "head");
                b.finish(&[loss, stats, small])
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_join_a_backbone_and_a_head() {
        let parameters = |name: &str, image, classes| {
            let model = Segmenter::named(name, image, 3, classes).unwrap();
            let states = model.build(1, Loss::default(), DType::F32).unwrap().train.states;
            states.iter().filter(|s| s.is_parameter()).map(|s| s.ty.shape.count()).sum::<usize>()
        };
        // timm's swinv2_base_window8_256 without norm (2 × 1024) and head (1000 × 1025), and the published heads.
        assert_eq!(
            parameters("swinv2-b/w8+upernet", 512, 150),
            87_918_816 - 2048 - 1_025_000 + 33_315_990 + 1_218_710
        );
        assert!(parameters("swinv2-nano/w8+upernet", 64, 5) < 2_500_000);
        assert!(parameters("vit-nano/4+linear", 64, 5) < 600_000);
    }

    #[test]
    fn heads_that_do_not_fit_are_refused_in_one_line() {
        let message = |name| Segmenter::named(name, 64, 3, 5).unwrap_err().to_string();
        assert_eq!(
            message("vit-nano/4+upernet"),
            "vit-nano/4+upernet: UPerNet reads four stages, which a ViT doesn't have: write +linear"
        );
        assert!(message("swinv2-ti/w8+linear").ends_with("over a Swin V2 write +upernet"));
        assert!(
            message("swinv2-ti/w8+fcn")
                .ends_with("a head for pixels is +upernet, over a Swin V2, or +linear, over a ViT")
        );
        assert!(message("resnet50+upernet").starts_with("resnet50: unknown model"));
    }
}
