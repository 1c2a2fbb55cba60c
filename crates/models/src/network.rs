//! A model of any family: what the rest of the program needs to know of it.

use crate::names;
use crate::segmenter::{NARROW, Segmenter};
use crate::swin::{Swin, SwinError};
use crate::vit::{Vit, VitError};
use graph::{DType, GraphError, Loss, Model};
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// Of dropout, of whatever is dropped.
pub const RATES: Range<f64> = 0.0..1.0;

/// Fields tell the families apart in records.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Network {
    Vit(Vit),
    Swin(Swin),
    Segmenter(Segmenter),
}

/// What is wrong with a model; each text begins with the model's name.
#[derive(Debug, thiserror::Error, PartialEq)]
pub enum NetworkError {
    #[error(
        "{0}: unknown model: a name is vit-SIZE/PATCH, such as vit-ti/16, or swinv2-SIZE/wWINDOW, such as swinv2-ti/w8; with \
         +linear or +upernet it tells pixels apart"
    )]
    Unknown(String),
    #[error("{model}: {why}")]
    Head { model: String, why: &'static str },
    #[error(transparent)]
    Vit(#[from] VitError),
    #[error(transparent)]
    Swin(#[from] SwinError),
}

/// Side of the images that UPerNet was published for.
const ADE20K: usize = 512;

impl Network {
    /// Whether a name is that of a model that tells pixels apart.
    pub fn name_segments(name: &str) -> bool {
        name.contains('+')
    }

    /// Decodes a name such as `vit-b/16`, `swinv2-b/w8` or `swinv2-b/w8+upernet`, for square images.
    pub fn named(name: &str, image: usize, channels: usize, classes: usize) -> Result<Network, NetworkError> {
        if Self::name_segments(name) {
            return Ok(Network::Segmenter(Segmenter::named(name, image, channels, classes)?));
        }
        match name.to_ascii_lowercase().split_once('-') {
            Some(("vit", _)) => Ok(Network::Vit(Vit::named(name, image, channels, classes)?)),
            Some(("swinv2", _)) => Ok(Network::Swin(Swin::named(name, [image; 2], channels, classes)?)),
            _ => Err(NetworkError::Unknown(name.to_string())),
        }
    }

    pub fn check(&self, model: &str) -> Result<(), NetworkError> {
        match self {
            Network::Vit(vit) => Ok(vit.check(model)?),
            Network::Swin(swin) => Ok(swin.check(model)?),
            Network::Segmenter(segmenter) => segmenter.backbone().check(model),
        }
    }

    /// The graphs of training and evaluation for batches of `batch` images.
    pub fn build(&self, batch: usize, loss: Loss, dtype: DType) -> Result<Model, GraphError> {
        match self {
            Network::Vit(vit) => vit.build(batch, loss, dtype),
            Network::Swin(swin) => swin.build(batch, loss, dtype),
            Network::Segmenter(segmenter) => segmenter.build(batch, loss, dtype),
        }
    }

    /// The network without a head for pixels: of a segmenter its backbone, else itself.
    pub fn backbone(&self) -> Network {
        match self {
            Network::Segmenter(segmenter) => segmenter.backbone(),
            other => other.clone(),
        }
    }

    /// Rows and columns of the images that it is trained on, in pixels.
    pub fn size(&self) -> [usize; 2] {
        match self {
            Network::Vit(vit) => [vit.image; 2],
            Network::Swin(swin) => swin.image,
            Network::Segmenter(segmenter) => segmenter.backbone().size(),
        }
    }

    /// Side of the square images that it is trained on, in pixels.
    pub fn image(&self) -> usize {
        self.size()[0]
    }

    pub fn channels(&self) -> usize {
        match self {
            Network::Vit(vit) => vit.channels,
            Network::Swin(swin) => swin.channels,
            Network::Segmenter(segmenter) => segmenter.backbone().channels(),
        }
    }

    pub fn classes(&self) -> usize {
        match self {
            Network::Vit(vit) => vit.classes,
            Network::Swin(swin) => swin.classes,
            Network::Segmenter(segmenter) => segmenter.backbone().classes(),
        }
    }

    /// Whether it tells the classes of pixels, rather than of images.
    pub fn segments(&self) -> bool {
        matches!(self, Network::Segmenter(_))
    }

    /// Labels of a sample: one, or one for each pixel.
    pub fn labels(&self) -> usize {
        if self.segments() { self.size().iter().product() } else { 1 }
    }

    /// Whether training takes moments over a batch.
    pub fn normalises_batches(&self) -> bool {
        matches!(self, Network::Segmenter(Segmenter::Upernet { .. }))
    }

    /// The same model, with the same parameters, for images of so many rows and columns. A ViT has none: its positions are learned
    /// for one size.
    pub fn sized(&self, size: [usize; 2]) -> Option<Network> {
        match self {
            _ if size == self.size() => Some(self.clone()),
            Network::Swin(swin) => Some(Network::Swin(swin.sized(size))),
            Network::Segmenter(Segmenter::Upernet { swin, upernet }) => {
                let (swin, upernet) = (swin.sized(size), upernet.clone());
                Some(Network::Segmenter(Segmenter::Upernet { swin, upernet }))
            }
            Network::Vit(_) | Network::Segmenter(Segmenter::Linear { .. }) => None,
        }
    }

    /// As it was trained on images of other rows and columns: windows and shifts of a Swin V2 are those of `size`. A ViT has none.
    pub fn trained_at(mut self, size: [usize; 2]) -> Network {
        if let Network::Swin(swin) | Network::Segmenter(Segmenter::Upernet { swin, .. }) = &mut self {
            swin.trained = Some(size).filter(|size| *size != swin.image);
        }
        self
    }

    /// Rows and columns of the images that windows are for, if those were others.
    pub fn trained(&self) -> Option<[usize; 2]> {
        match self {
            Network::Swin(swin) | Network::Segmenter(Segmenter::Upernet { swin, .. }) => swin.trained,
            Network::Vit(_) | Network::Segmenter(Segmenter::Linear { .. }) => None,
        }
    }

    /// The side of the images that a model of this name was published for; none for names that no model has.
    pub fn published_image(name: &str) -> Option<usize> {
        // Of a size that windows and patches of any published size divide.
        match Network::named(name, 1 << 10, 3, 2).ok()? {
            Network::Swin(swin) => swin.published_image(),
            Network::Segmenter(Segmenter::Upernet { swin, .. }) if swin.width >= NARROW.0 => Some(ADE20K),
            Network::Vit(_) | Network::Segmenter(_) => None,
        }
    }

    /// Blocks of each stage; a ViT has one stage.
    pub fn stages(&self) -> Vec<usize> {
        match self {
            Network::Vit(vit) => vec![vit.depth],
            Network::Swin(swin) => swin.depths.to_vec(),
            Network::Segmenter(segmenter) => segmenter.backbone().stages(),
        }
    }

    /// Every parameter, and every running moment, with its shape, canonically named.
    pub fn expected(&self) -> Vec<(String, Vec<usize>)> {
        match self {
            Network::Vit(vit) => names::expected(vit),
            Network::Swin(swin) => swin.parameters(),
            Network::Segmenter(segmenter) => segmenter.states(),
        }
    }

    /// About as many numbers as a step of `batch` images has at hand: for refusing what no memory holds, before anything is
    /// multiplied that might not fit a number.
    pub fn numbers(&self, batch: usize) -> f64 {
        let size = |n: usize| n as f64;
        let image = size(self.channels()) * size(self.image()).powi(2);
        let (activations, weights) = match self {
            Network::Vit(vit) => {
                let tokens = (size(vit.image) / size(vit.patch)).powi(2) + 1.0;
                let block = tokens * (size(vit.heads) * tokens + 8.0 * size(vit.mlp));
                let pixels = size(vit.channels) * size(vit.patch).powi(2);
                (size(vit.depth) * block, size(vit.width) * (size(vit.classes) + pixels + tokens))
            }
            Network::Swin(swin) => {
                let tokens = image / size(swin.channels) / 16.0;
                let pixels = 16.0 * size(swin.channels);
                let blocks = size(swin.depths.iter().sum());
                (
                    blocks * tokens * 40.0 * size(swin.width),
                    size(swin.width) * (8.0 * size(swin.classes) + pixels),
                )
            }
            Network::Segmenter(segmenter) => {
                // Logits of every pixel and their gradients, of two heads.
                let pixels = size(self.size()[0]) * size(self.size()[1]);
                let heads = 4.0 * pixels * size(self.classes());
                return segmenter.backbone().numbers(batch) + size(batch) * heads;
            }
        };
        size(batch) * (activations + image + size(self.classes())) + weights
    }
}
