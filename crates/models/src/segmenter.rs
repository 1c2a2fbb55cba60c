//! Models that classify pixels: a backbone of any family, and a head that brings what it says back to the image's size.
//!
//! Legend: B batch, T tokens, C width, K classes.

use crate::architecture::{
    Architecture, Decoded, Ends, Family, Features, Misfit, NetworkError, Positions, Shape, Sizes, Variation,
    Windows,
};
use crate::dense_names::HEADS;
use crate::identify::{Identity, shape_of};
use crate::names::{self, Convention, Table, Weights};
use crate::network::{self, Network};
use crate::swin::Swin;
use crate::upernet::{AUXILIARY_WEIGHT, UperNet};
use crate::vit::{Pool, Vit};
use graph::build::Linear;
use graph::{Builder, Init, Loss, ValueId};
use serde::{Deserialize, Serialize};

/// The backbone's classes are those of the pixels.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(from = "Record")]
pub struct Segmenter {
    pub backbone: Box<Network>,
    pub head: Head,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum Head {
    /// UPerNet over the four stages of a Swin V2, as published for ADE20K.
    Upernet(UperNet),
    /// A ViT's tokens back where their patches came from, a linear classifier, resized to the image (the simplest head of
    /// Strudel et al., 2021).
    Linear,
}

/// Serial form, of now or of earlier versions.
#[derive(Deserialize)]
#[serde(untagged, deny_unknown_fields)]
enum Record {
    Now { backbone: Box<Network>, head: Head },
    Upernet { swin: Swin, upernet: UperNet },
    Linear { vit: Vit },
}

impl From<Record> for Segmenter {
    fn from(record: Record) -> Segmenter {
        match record {
            Record::Now { backbone, head } => Segmenter { backbone, head },
            Record::Upernet { swin, upernet } => Segmenter::upernet(swin, upernet),
            Record::Linear { vit } => Segmenter::linear(vit),
        }
    }
}

/// Backbones that are narrower than any published one get a head to match. (width, channels, auxiliary channels)
const NARROW: (usize, usize, usize) = (96, 64, 32);

/// Side of the images that UPerNet was published for.
const ADE20K: usize = 512;

impl Segmenter {
    pub fn upernet(backbone: impl Into<Network>, upernet: UperNet) -> Self {
        Segmenter { backbone: Box::new(backbone.into()), head: Head::Upernet(upernet) }
    }

    pub fn linear(backbone: impl Into<Network>) -> Self {
        Segmenter { backbone: Box::new(backbone.into()), head: Head::Linear }
    }

    /// Decodes a name such as `swinv2-b/w8+upernet` or `vit-ti/16+linear`, for square images.
    pub fn named(
        name: &str,
        image: usize,
        channels: usize,
        classes: usize,
    ) -> Result<Segmenter, NetworkError> {
        let (backbone, head) = name.split_once('+').unwrap_or((name, ""));
        let wrong = |why: String| Err(NetworkError::unfit(name, why));
        let backbone = Network::named(backbone, image, channels, classes)?;
        match (head.to_ascii_lowercase().as_str(), backbone.shape()) {
            ("upernet", Some(Shape::Stages)) => {
                let published = UperNet::published(classes);
                let (_, channels, auxiliary) = NARROW;
                let narrow = is_narrow(&backbone);
                let upernet = if narrow { UperNet { channels, auxiliary, ..published } } else { published };
                Ok(Segmenter::upernet(backbone, upernet))
            }
            ("linear", Some(Shape::Tokens)) => Ok(Segmenter::linear(backbone)),
            ("upernet", _) => wrong(format!(
                "UPerNet reads four stages, which {} doesn't have: write +linear",
                backbone.kind()
            )),
            ("linear", _) => {
                wrong(format!("a linear head reads a ViT's tokens: over {} write +upernet", backbone.kind()))
            }
            _ => wrong("a head for pixels is +upernet, over a Swin V2, or +linear, over a ViT".to_string()),
        }
    }

    /// True for the published head, with which the published training settings go.
    fn is_published(&self) -> bool {
        matches!(self.head, Head::Upernet(_)) && !is_narrow(&self.backbone)
    }
}

/// Checks whether the first stage has fewer channels than any published one.
fn is_narrow(backbone: &Network) -> bool {
    backbone.sizes().width < NARROW.0
}

impl Architecture for Segmenter {
    fn check(&self, model: &str) -> Result<(), NetworkError> {
        self.backbone.check(model)
    }

    fn sizes(&self) -> Sizes {
        self.backbone.sizes()
    }

    fn stages(&self) -> Vec<usize> {
        self.backbone.stages()
    }

    /// Graph with labels and weights of a pixel each (B,height,width).
    fn graph(&self, b: &mut Builder, images: ValueId, batch: usize, loss: Loss) -> Ends {
        let [height, width] = self.size();
        let targets = b.targets([batch, height, width], loss.mixed);
        match (&self.head, self.backbone.features(b, images)) {
            (Head::Upernet(upernet), Some(Features::Stages(stages))) => {
                upernet.finish(b, stages, (height, width), targets, loss)
            }
            (Head::Linear, Some(Features::Tokens { tokens, grid })) => {
                let out = self.classes();
                let head = Linear { name: "head", out, weight: Init::Zeros, bias: Init::Zeros };
                let tokens = b.linear(tokens, head);
                let small = b.grid(tokens, grid); // (B,h,w,K)
                let logits = b.resize("logits", small, (height, width));
                let (loss, stats) = b.weighted_losses(logits, &[], targets, loss.smoothing);
                b.name(small, "head");
                Ends { loss, stats, logits: small }
            }
            // A record could put a head over a backbone that it can't read. Images are no tokens, which is what the builder reports.
            (Head::Upernet(_) | Head::Linear, _) => {
                let logits = b.grid(images, (0, 0));
                let (loss, stats) = b.cross_entropy(logits, targets, loss.smoothing);
                Ends { loss, stats, logits }
            }
        }
    }

    fn features(&self, _: &mut Builder, _: ValueId) -> Option<Features> {
        None
    }

    fn shape(&self) -> Option<Shape> {
        None
    }

    fn kind(&self) -> &'static str {
        "a model for pixels"
    }

    fn numbers(&self, batch: usize) -> f64 {
        let size = |n: usize| n as f64;
        // Logits of every pixel and their gradients, of two heads.
        let [height, width] = self.size().map(size);
        let heads = 4.0 * height * width * size(self.classes());
        self.backbone.numbers(batch) + size(batch) * heads
    }

    /// Applies changes. As published, dropout is UPerNet's; the backbone has none.
    fn vary(&mut self, variation: &Variation) -> Result<(), Misfit> {
        match &mut self.head {
            Head::Upernet(upernet) => {
                upernet.dropout = variation.dropout.unwrap_or(upernet.dropout);
                self.backbone.vary(&Variation { dropout: None, ..*variation })
            }
            Head::Linear => self.backbone.vary(variation),
        }
    }

    fn norm_eps(&self) -> f64 {
        self.backbone.norm_eps()
    }

    fn below(&self) -> Option<&Network> {
        Some(&self.backbone)
    }

    fn pool(&self) -> Option<Pool> {
        self.backbone.pool()
    }

    fn positions(&self) -> Option<Positions> {
        self.backbone.positions()
    }

    fn windows(&self) -> Option<Windows> {
        self.backbone.windows()
    }

    fn sized(&self, size: [usize; 2]) -> Option<Network> {
        let backbone = Box::new(self.backbone.sized(size)?);
        Some(Segmenter { backbone, head: self.head.clone() }.into())
    }

    fn train_at(&mut self, size: [usize; 2]) {
        self.backbone.train_at(size);
    }

    fn trained(&self) -> Option<[usize; 2]> {
        self.backbone.trained()
    }

    fn published_image(&self) -> Option<usize> {
        self.is_published().then_some(ADE20K)
    }

    fn usual_dropout(&self) -> Option<(f64, &'static str)> {
        match &self.head {
            Head::Upernet(upernet) => Some((upernet.dropout, "of UPerNet's heads, as published")),
            Head::Linear => None,
        }
    }

    fn normalises_batches(&self) -> bool {
        matches!(self.head, Head::Upernet(_))
    }

    fn auxiliary_weight(&self) -> Option<f64> {
        matches!(self.head, Head::Upernet(_)).then_some(AUXILIARY_WEIGHT)
    }

    /// Refuses the names of other libraries, where its head's name is a classifier's.
    fn refuses(&self, convention: Convention) -> Option<&'static str> {
        let linear = self.head == Head::Linear && convention != Convention::Timm;
        linear.then_some("a ViT with a linear head for pixels")
    }
}

impl Family for Segmenter {
    const FORM: Option<&'static str> = None;
    const NAMES: &'static dyn Table = &names::Segmenter;

    fn decode(name: &str, image: usize, channels: usize, classes: usize) -> Decoded<Self> {
        Network::name_segments(name).then(|| Segmenter::named(name, image, channels, classes))
    }

    fn identify(weights: &Weights, window: Option<usize>) -> Option<Identity> {
        let head = format!("{}classifier.weight", HEADS[0]);
        let classes = shape_of(weights, &head)?.first().copied();
        let backbone: Weights =
            weights.iter().filter(|(name, _)| **name != head).map(|(n, t)| (n.clone(), t.clone())).collect();
        let below = network::identify(&backbone, window);
        let with_head = |name: Option<String>| name.map(|name| format!("{name}+upernet"));
        Some(Identity {
            model: with_head(below.model.clone()),
            but_for_window: with_head(below.but_for_window.clone()),
            classes,
            ..below
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use graph::DType;

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
        // Records could say it too: then no graph can be built.
        let vit = Vit::named("vit-nano/4", 64, 3, 5).unwrap();
        let odd = Segmenter::upernet(vit, UperNet::published(5));
        assert!(odd.build(1, Loss::default(), DType::F32).is_err());
    }
}
