//! The registry of families, and a model of any of them.

use crate::architecture::{self, Architecture, Family, Listed, NetworkError};
use crate::identify::Identity;
use crate::layer_scale_vit::LayerScaleVit;
use crate::names::{Table, Weights};
use crate::segmenter::Segmenter;
use crate::swin::Swin;
use crate::timm;
use crate::vit::Vit;
use graph::{DType, GraphError, Loss, Model, ValueId};
use serde::{Deserialize, Serialize};
use std::ops::{Deref, DerefMut};

macro_rules! families {
    ($($family:ident = $tag:literal,)*) => {
        /// A model of any family: what it is by its [`Architecture`], and by its fields where one wants to know. Records name the
        /// family; those of before had its fields alone.
        #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
        #[serde(tag = "family", from = "Record")]
        pub enum Network {
            $(#[serde(rename = $tag)] $family($family),)*
        }

        #[derive(Deserialize)]
        #[serde(tag = "family")]
        enum Tagged {
            $(#[serde(rename = $tag)] $family($family),)*
        }

        impl From<Tagged> for Network {
            fn from(record: Tagged) -> Network {
                match record {
                    $(Tagged::$family(model) => Network::$family(model),)*
                }
            }
        }

        impl Deref for Network {
            type Target = dyn Architecture;

            fn deref(&self) -> &Self::Target {
                match self {
                    $(Network::$family(model) => model,)*
                }
            }
        }

        impl DerefMut for Network {
            fn deref_mut(&mut self) -> &mut Self::Target {
                match self {
                    $(Network::$family(model) => model,)*
                }
            }
        }

        $(
            impl From<$family> for Network {
                fn from(model: $family) -> Network {
                    Network::$family(model)
                }
            }

            impl $family {
                /// The graphs of training and evaluation for batches of `batch` images. `loss` is that of training; evaluation
                /// neither smooths nor mixes.
                pub fn build(&self, batch: usize, loss: Loss, dtype: DType) -> Result<Model, GraphError> {
                    architecture::build(self, batch, loss, dtype)
                }
            }
        )*

        /// Form of each family's names.
        const FORMS: &[Option<&str>] = &[$(<$family as Family>::FORM,)*];

        /// The names of each family's tensors.
        pub(crate) const TABLES: &[&dyn Table] = &[$(<$family as Family>::NAMES,)*];

        fn decode(
            name: &str,
            image: usize,
            channels: usize,
            classes: usize,
        ) -> Option<Result<Network, NetworkError>> {
            $(
                if let Some(model) = <$family as Family>::decode(name, image, channels, classes) {
                    return Some(model.map(Network::$family));
                }
            )*
            None
        }

        /// Models of every family, by the family's name in records.
        fn listed() -> Vec<(&'static str, Vec<Listed>)> {
            vec![$(($tag, <$family as Family>::listed()),)*]
        }

        /// Identity of the model of canonically named weights.
        pub(crate) fn identify(weights: &Weights, window: Option<usize>) -> Identity {
            $(
                if let Some(identity) = <$family as Family>::identify(weights, window) {
                    return identity;
                }
            )*
            Identity::default()
        }
    };
}

// A line each, what names and tensors are asked first: the more particular before the more general.
families! {
    Segmenter = "segmenter",
    Swin = "swinv2",
    LayerScaleVit = "layer-scale-vit",
    Vit = "vit",
}

/// A record with the family's name, or one of before.
#[derive(Deserialize)]
#[serde(untagged)]
enum Record {
    Tagged(Tagged),
    Vit(Vit),
    Swin(Swin),
    Segmenter(Segmenter),
}

impl From<Record> for Network {
    fn from(record: Record) -> Network {
        match record {
            Record::Tagged(tagged) => tagged.into(),
            Record::Vit(vit) => vit.into(),
            Record::Swin(swin) => swin.into(),
            Record::Segmenter(segmenter) => segmenter.into(),
        }
    }
}

impl Network {
    /// True for names of segmentation models.
    pub fn name_segments(name: &str) -> bool {
        name.contains('+')
    }

    /// Decodes a name such as `vit-b/16`, `swinv2-b/w8` or `swinv2-b/w8+upernet`, or timm's name of such a model, for square images.
    pub fn named(name: &str, image: usize, channels: usize, classes: usize) -> Result<Network, NetworkError> {
        let unknown = || {
            let forms: Vec<&str> = FORMS.iter().rev().flatten().copied().collect();
            let names =
                format!("a name is {}; with +linear or +upernet it segments images", forms.join(", or "));
            Err(NetworkError::unknown(name, names))
        };
        let ours = timm::ours(name).map(|(ours, _)| ours);
        decode(ours.as_deref().unwrap_or(name), image, channels, classes).unwrap_or_else(unknown)
    }

    /// Published models, and ours, by the family's name in records.
    pub fn listed() -> Vec<(&'static str, Vec<Listed>)> {
        listed().into_iter().rev().filter(|(_, models)| !models.is_empty()).collect()
    }

    /// The side of the images that a name itself says, as timm's do.
    pub fn image_in_name(name: &str) -> Option<usize> {
        timm::image(name)
    }

    /// Floating-point operations of the forward pass of one image; a multiply-add counts as two.
    pub fn forward_flops(&self) -> Result<f64, GraphError> {
        let graph = self.build(1, Loss::default(), DType::F32)?.eval;
        let types = |values: &[ValueId]| values.iter().map(|value| graph.ty(*value)).collect::<Vec<_>>();
        let cost = |node: &graph::graph::Node| {
            graph::rules::cost::cost(&node.op, &types(&node.inputs), &types(&node.outputs)).flops
        };
        Ok(graph.nodes.iter().map(cost).sum())
    }

    /// The side of the images that a model of this name was published for; none for names that no model has.
    pub fn published_image(name: &str) -> Option<usize> {
        Network::of_any_size(name)?.deref().published_image()
    }

    /// A model of this name, of whatever size; none for names that no model has.
    pub fn of_any_size(name: &str) -> Option<Network> {
        Network::named(name, EVERY_SIZE, 3, 2).ok()
    }

    /// The graphs of training and evaluation for batches of `batch` images.
    pub fn build(&self, batch: usize, loss: Loss, dtype: DType) -> Result<Model, GraphError> {
        architecture::build(&**self, batch, loss, dtype)
    }

    /// Every parameter, and every running moment, with its shape, canonically named.
    pub fn expected(&self) -> Vec<(String, Vec<usize>)> {
        architecture::expected(&**self)
    }

    /// The network without a head for pixels: of a segmenter its backbone, else itself.
    pub fn backbone(&self) -> &Network {
        self.below().unwrap_or(self)
    }

    /// True for segmentation models, false for classifiers.
    pub fn segments(&self) -> bool {
        self.below().is_some()
    }

    /// Side of the square images that it is trained on, in pixels.
    pub fn image(&self) -> usize {
        self.size()[0]
    }

    /// Labels of a sample: one, or one for each pixel.
    pub fn labels(&self) -> usize {
        if self.segments() { self.size().iter().product() } else { 1 }
    }

    /// The same model, with the same parameters, for images of so many rows and columns. A ViT has none: its positions are learned
    /// for one size.
    pub fn sized(&self, size: [usize; 2]) -> Option<Network> {
        if size == self.size() { Some(self.clone()) } else { self.deref().sized(size) }
    }

    /// Network as it was trained on images of `size`, rows and columns: windows and shifts of a Swin V2 are those of
    /// that size.
    pub fn trained_at(mut self, size: [usize; 2]) -> Network {
        self.train_at(size);
        self
    }
}

/// A side that windows and patches of any published size divide.
const EVERY_SIZE: usize = 7 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_names_are_told_what_names_look_like() {
        let message = Network::named("resnet50", 32, 3, 10).unwrap_err().to_string();
        assert_eq!(
            message,
            "resnet50: unknown model: a name is vit-SIZE/PATCH, such as vit-ti/16, or timm's, such as vit_base_patch16_224, \
             vit_small_patch14_reg4_dinov2 or deit3_small_patch16_224, or swinv2-SIZE/wWINDOW, such as swinv2-ti/w8; with \
             +linear or +upernet it segments images; `vitesse models` lists them"
        );
    }

    #[test]
    fn every_listed_model_is_one() {
        let listed = Network::listed();
        assert_eq!(
            listed.iter().map(|(family, _)| *family).collect::<Vec<_>>(),
            ["vit", "layer-scale-vit", "swinv2"]
        );
        for model in listed.into_iter().flat_map(|(_, models)| models) {
            let network = Network::named(&model.name, model.image, 3, 1000).unwrap();
            assert!(network.forward_flops().unwrap() > 0.0);
            if let Some(timm) = &model.timm {
                assert_eq!(Network::named(timm, model.image, 3, 1000).unwrap(), network, "{timm}");
                let image = Network::image_in_name(timm);
                assert!(image.is_none_or(|image| image == model.image), "{timm}: {image:?}");
            }
        }
    }

    /// Multiply-adds as published (Dosovitskiy et al. and timm: 17.6 GMACs with attention; Liu et al.: 5.96 at 256 px).
    #[test]
    fn operations_are_about_the_published_ones() {
        let giga =
            |name: &str, image| Network::named(name, image, 3, 1000).unwrap().forward_flops().unwrap() / 2e9;
        let (vit, swin) = (giga("vit-b/16", 224), giga("swinv2-ti/w8", 256));
        assert!((vit / 17.6 - 1.0).abs() < 0.03 && (swin / 5.96 - 1.0).abs() < 0.05, "{vit} {swin}");
    }

    #[test]
    fn records_name_their_family_and_those_of_before_are_read() {
        for name in [
            "vit-ti/4",
            "vit_nano_patch16_reg4_dinov2",
            "swinv2-nano/w8",
            "swinv2-nano/w8+upernet",
            "vit-nano/4+linear",
        ] {
            let network = Network::named(name, 64, 3, 5).unwrap();
            let record = serde_json::to_value(&network).unwrap();
            assert!(record["family"].is_string(), "{record}");
            assert_eq!(serde_json::from_value::<Network>(record).unwrap(), network);
        }
        let untagged = |network: &Network| {
            let mut record = serde_json::to_value(network).unwrap();
            record.as_object_mut().unwrap().remove("family");
            record
        };
        let (vit, swin) = (Network::named("vit-ti/4", 64, 3, 5), Network::named("swinv2-nano/w8", 64, 3, 5));
        let (vit, swin) = (vit.unwrap(), swin.unwrap());
        let upernet = Network::named("swinv2-nano/w8+upernet", 64, 3, 5).unwrap();
        let linear = Network::named("vit-ti/4+linear", 64, 3, 5).unwrap();
        let heads = serde_json::json!({"classes": 5, "channels": 64, "auxiliary": 32, "dropout": 0.1});
        for (before, network) in [
            (untagged(&vit), &vit),
            (untagged(&swin), &swin),
            (serde_json::json!({"vit": untagged(&vit)}), &linear),
            (serde_json::json!({"swin": untagged(&swin), "upernet": heads}), &upernet),
        ] {
            assert_eq!(&serde_json::from_value::<Network>(before).unwrap(), network);
        }
    }
}
