//! Augmentation as the loader does it.

use super::augmentation::{Augmentation, Geometry, Interpolation};
use models::Network;

impl Augmentation {
    /// Transform of training images.
    pub fn training(&self, network: &Network) -> data::Transform {
        data::Transform {
            geometry: self.train.into(),
            flip: self.flip,
            rand_augment: self.rand_augment.map(|(ops, magnitude)| data::RandAugment { ops, magnitude }),
            erase: self.erase,
            mixup: self.mixup,
            cutmix: self.cutmix,
            ..self.evaluation(network)
        }
    }

    /// Transform of validation images: nothing random.
    pub fn evaluation(&self, network: &Network) -> data::Transform {
        let plain = data::Transform::evaluation(
            network.image(),
            None,
            &self.mean,
            &self.std,
            self.interpolation.into(),
        );
        data::Transform { geometry: self.eval.into(), ..plain }
    }
}

impl From<Geometry> for data::Geometry {
    fn from(geometry: Geometry) -> Self {
        match geometry {
            Geometry::Resize => data::Geometry::Resize,
            Geometry::CenterCrop { resize } => data::Geometry::CenterCrop { resize },
            Geometry::PadCrop { padding } => data::Geometry::PadCrop { padding },
            Geometry::RandomResizedCrop { scale, ratio } => {
                data::Geometry::RandomResizedCrop { scale, ratio }
            }
        }
    }
}

impl From<Interpolation> for data::Interpolation {
    fn from(how: Interpolation) -> Self {
        match how {
            Interpolation::Bilinear => data::Interpolation::Bilinear,
            Interpolation::Bicubic => data::Interpolation::Bicubic,
        }
    }
}
