//! Swin Transformer V2 (Liu et al., 2022, figure 1), with timm's numerics, initial values, padding and names.
//!
//! Legend: B batch, h and w rows and columns of a feature map, C channels, T tokens in a window.

use crate::architecture::{
    self, Architecture, Decoded, Ends, Family, Features, Listed, Misfit, NetworkError, Shape, Sizes,
    Variation, no_empty, only_rates,
};
use crate::identify::{Identity, PATCHES, counted, shape_of};
use crate::names::{self, Table, Weights};
use crate::network::Network;
use crate::timm;
use crate::vit::Pool;
use graph::build::{CosineAttention, Linear};
use graph::op::Pooling;
use graph::{Builder, Init, Loss, ValueId, Windows};
use serde::{Deserialize, Serialize};

const EPS: f64 = 1e-5;
/// Side of a patch, in pixels.
const PATCH: usize = 4;
/// Width of the MLP over that of its block.
const MLP_RATIO: usize = 4;
/// Every linear layer but the patch embedding.
const WEIGHT: Init = Init::TruncatedNormal { std: 0.02 };

/// Everything that decides the shape of a Swin V2 and of each of its parameters.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Swin {
    /// Rows and columns of the input image, in pixels.
    pub image: [usize; 2],
    pub channels: usize,
    pub classes: usize,
    /// C of the first stage; each further one has twice as much.
    pub width: usize,
    /// Blocks of each stage.
    pub depths: [usize; 4],
    pub heads: [usize; 4],
    /// Side of a window, in tokens. A stage whose map is smaller has windows of the map's size.
    pub window: usize,
    /// Sides of the windows that the position bias of each stage was learned for, if they were others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pretrained: Option<[usize; 4]>,
    /// Rows and columns of the images it was trained on, where `image` has others: windows and shifts stay as they were, as in timm
    /// and transformers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trained: Option<[usize; 2]>,
    /// Rate of element dropout after the attention projection and both MLP layers.
    pub dropout: f64,
    /// Stochastic depth at the last block; grows linearly from zero at the first.
    pub drop_path: f64,
}

/// Section 3.5 of the paper, with heads of 32 channels; nano is our own, for a first run. (name, width, depths, heads)
const SIZES: [(&str, usize, [usize; 4], [usize; 4]); 5] = [
    ("nano", 32, [1, 1, 2, 1], [1, 2, 4, 8]),
    ("ti", 96, [2, 2, 6, 2], [3, 6, 12, 24]),
    ("s", 96, [2, 2, 18, 2], [3, 6, 12, 24]),
    ("b", 128, [2, 2, 18, 2], [4, 8, 16, 32]),
    ("l", 192, [2, 2, 18, 2], [6, 12, 24, 48]),
];

/// Channels of a head, in every published size.
const HEAD: usize = 32;

/// Beyond any that was published: what names may ask for.
const WIDEST: usize = 4096;
const DEEPEST: usize = 1000;

/// The image sizes that windows were pre-trained at: the published models. (window, pixels)
const PRETRAINED: [(usize, usize); 4] = [(8, 256), (12, 192), (16, 256), (24, 384)];

/// Published models by timm's words for windows and images, and ours. (size, windows, pixels)
const PUBLISHED: [(&str, &str, &str); 11] = [
    ("nano", "8", "64"),
    ("ti", "8", "256"),
    ("ti", "16", "256"),
    ("s", "8", "256"),
    ("s", "16", "256"),
    ("b", "8", "256"),
    ("b", "16", "256"),
    ("b", "12to16", "192to256"),
    ("b", "12to24", "192to384"),
    ("l", "12to16", "192to256"),
    ("l", "12to24", "192to384"),
];

/// Form of names of Swin V2s, for messages.
const NAMES: &str = "a Swin V2 is swinv2-SIZE/wWINDOW with SIZE one of nano, ti, s, b, l, such as swinv2-ti/w8, or \
     swinv2-b/w12to16 for windows of 16 pre-trained with 12, or swinv2-352-2-2-18-2/w8 for a width and the blocks of each stage";

/// Tokens along a side that leave one for the last stage.
const LEAST: usize = 8;

impl Swin {
    /// Decodes a name such as `swinv2-b/w8`, or `swinv2-b/w12to16`.
    pub fn named(
        name: &str,
        image: [usize; 2],
        channels: usize,
        classes: usize,
    ) -> Result<Swin, NetworkError> {
        let unknown = || NetworkError::unknown(name, NAMES);
        let lower = name.to_ascii_lowercase();
        let (size, windows) =
            lower.strip_prefix("swinv2-").and_then(|n| n.split_once("/w")).ok_or_else(unknown)?;
        let number = |text: &str| text.parse::<usize>().map_err(|_| unknown());
        let (window, pretrained) = match windows.split_once("to") {
            Some((before, now)) => {
                let before = number(before)?;
                let pixels = PRETRAINED.iter().find(|p| p.0 == before).ok_or_else(unknown)?.1;
                let map = |stage: usize| (pixels / PATCH) >> stage;
                (number(now)?, Some([0, 1, 2, 3].map(|stage| before.min(map(stage)))))
            }
            None => (number(windows)?, None),
        };
        let (width, depths, heads) = match SIZES.iter().find(|s| s.0 == size) {
            Some(&(_, width, depths, heads)) => (width, depths, heads),
            None => {
                let numbers = size.split('-').map(number).collect::<Result<Vec<_>, _>>()?;
                let [width, depths @ ..]: [usize; 5] = numbers.try_into().map_err(|_| unknown())?;
                if !width.is_multiple_of(HEAD) || !(HEAD..=WIDEST).contains(&width) {
                    let why = format!(
                        "width {width} is not a multiple of {HEAD}, the channels of a head, from {HEAD} to {WIDEST}"
                    );
                    return Err(NetworkError::unfit(name, why));
                }
                if let Some(depth) = depths.into_iter().find(|depth| !(1..=DEEPEST).contains(depth)) {
                    let why = format!("{depth} blocks in a stage, but a stage has from 1 to {DEEPEST}");
                    return Err(NetworkError::unfit(name, why));
                }
                (width, depths, [0, 1, 2, 3].map(|stage| (width / HEAD) << stage))
            }
        };
        let (trained, dropout, drop_path) = (None, 0.0, 0.0);
        let swin = Swin {
            image,
            channels,
            classes,
            width,
            depths,
            heads,
            window,
            pretrained,
            trained,
            dropout,
            drop_path,
        };
        swin.check(name)?;
        Ok(swin)
    }

    /// Side of the first stage's windows that position biases are, or were, learned in.
    pub fn learned_window(&self) -> usize {
        self.pretrained.map_or(self.window, |sides| sides[0])
    }

    /// The same model for images of another size. Its windows are those it was trained with, also where a map is larger now than the
    /// windows that filled it: position biases were learned for no others.
    pub fn sized(&self, image: [usize; 2]) -> Swin {
        Swin { image, trained: Some(self.trained.unwrap_or(self.image)), ..self.clone() }
    }

    /// The name of a Swin V2 of this width, with so many blocks in each stage, but for its window.
    pub(crate) fn name_of(width: usize, depths: [usize; 4]) -> String {
        match SIZES.iter().find(|size| (size.1, size.2) == (width, depths)) {
            Some((name, ..)) => format!("swinv2-{name}"),
            None => format!("swinv2-{width}-{}", depths.map(|depth| depth.to_string()).join("-")),
        }
    }

    /// Results of the four stages, (B,h,w,C): a quarter of the image's rows and columns and C channels, then always
    /// half the rows and columns and twice the channels.
    pub fn maps(&self, b: &mut Builder, images: ValueId) -> [ValueId; 4] {
        let mut x = self.embed(b, images);
        std::array::from_fn(|stage| {
            b.scope(&format!("layers.{stage}"), |b| {
                if stage > 0 {
                    let merged = b.scope("downsample", |b| self.merge(b, x, stage));
                    x = b.border(merged);
                }
                for i in 0..self.depths[stage] {
                    let y = b.scope(&format!("blocks.{i}"), |b| self.block(b, x, stage, i));
                    x = b.border(y);
                }
            });
            x
        })
    }

    /// Patches of 4×4 pixels, linearly projected and normalised.
    fn embed(&self, b: &mut Builder, images: ValueId) -> ValueId {
        let [h, w] = self.image.map(|side| side / PATCH);
        let fan_in = (self.channels * PATCH * PATCH) as f64;
        let init = Init::Uniform { bound: (1.0 / fan_in).sqrt() };
        let proj = Linear { name: "proj", out: self.width, weight: init, bias: init };
        let x = b.scope("patch_embed", |b| {
            let patches = b.patch_embedding(images, PATCH, proj);
            let batch = b.shape(patches).0.first().copied().unwrap_or(1);
            let map = b.reshape(patches, [batch, h, w, self.width]);
            b.layer_norm("norm", map, EPS)
        });
        b.border(x)
    }

    /// Patch merging: 2×2 tokens become one of twice the channels.
    fn merge(&self, b: &mut Builder, x: ValueId, stage: usize) -> ValueId {
        let x = b.merge_patches(x);
        let out = self.width << stage;
        let x =
            b.linear_without_bias(x, Linear { name: "reduction", out, weight: WEIGHT, bias: Init::Zeros });
        b.layer_norm("norm", x, EPS)
    }

    /// x + norm(attention(x)), then x + norm(MLP(x)). Norms start at zero, and so every block as the identity.
    fn block(&self, b: &mut Builder, x: ValueId, stage: usize, i: usize) -> ValueId {
        let before: usize = self.depths[..stage].iter().sum();
        let last = self.depths.iter().sum::<usize>() - 1;
        let drop_path = self.drop_path * (before + i) as f64 / last.max(1) as f64;

        let y = b.scope("attn", |b| self.attention(b, x, stage, i));
        let x = b.add_norm("norm1", x, y, EPS, drop_path, Init::Zeros);

        let y = b.scope("mlp", |b| self.mlp(b, x));
        b.add_norm("norm2", x, y, EPS, drop_path, Init::Zeros)
    }

    fn attention(&self, b: &mut Builder, x: ValueId, stage: usize, i: usize) -> ValueId {
        let (heads, windows) = (self.heads[stage], self.cut(stage, i % 2 == 1));
        let pretrained = self.pretrained.map(|sides| [sides[stage]; 2]);
        let y = b.window_attention(x, &CosineAttention { heads, windows, pretrained, weight: WEIGHT });
        let out = b.shape(x).last();
        let y = b.linear(y, Linear { name: "proj", out, weight: WEIGHT, bias: Init::Zeros });
        b.dropout(y, self.dropout)
    }

    fn mlp(&self, b: &mut Builder, x: ValueId) -> ValueId {
        let c = b.shape(x).last();
        let layer = |name, out| Linear { name, out, weight: WEIGHT, bias: Init::Zeros };
        let y = b.linear(x, layer("fc1", MLP_RATIO * c));
        let y = b.gelu(y);
        let y = b.dropout(y, self.dropout);
        let y = b.linear(y, layer("fc2", c));
        b.dropout(y, self.dropout)
    }

    /// The windows of a stage. Along a side on which the map of training is no larger than a window there is nothing to shift. As in
    /// timm, a stage's size for this is rounded down at every halving, while its map is rounded up.
    fn cut(&self, stage: usize, shifted: bool) -> Windows {
        let map = self.trained.unwrap_or(self.image).map(|side| (side / PATCH) >> stage);
        let size = map.map(|side| side.min(self.window));
        let shift = map.map(|side| if shifted && side > self.window { self.window / 2 } else { 0 });
        Windows { size, shift }
    }
}

impl Architecture for Swin {
    fn check(&self, model: &str) -> Result<(), NetworkError> {
        let (image, window) = (self.image, self.window);
        let sizes = [
            ("the window", window),
            ("the number of channels", self.channels),
            ("the number of classes", self.classes),
        ];
        no_empty(model, &sizes)?;
        only_rates(model, &[("dropout", self.dropout), ("drop path", self.drop_path)])?;
        if image.iter().any(|side| !side.is_multiple_of(PATCH)) {
            return Err(NetworkError::Patch { model: model.to_string(), patch: PATCH, image });
        }
        if image.iter().any(|side| side / PATCH < window.max(LEAST)) {
            let [height, width] = image;
            let why = format!(
                "the {height}×{width} image has {}×{} tokens, fewer than one window of {window}×{window} or less than \
                 {LEAST}×{LEAST}",
                height / PATCH,
                width / PATCH
            );
            return Err(NetworkError::unfit(model, why));
        }
        Ok(())
    }

    fn sizes(&self) -> Sizes {
        let Swin { image, channels, classes, width, .. } = *self;
        Sizes { image, channels, classes, width }
    }

    fn stages(&self) -> Vec<usize> {
        self.depths.to_vec()
    }

    /// The classifier, from images to logits and loss.
    fn graph(&self, b: &mut Builder, images: ValueId, batch: usize, loss: Loss) -> Ends {
        let targets = b.targets([batch], loss.mixed);

        let [.., x] = self.maps(b, images);
        let y = b.layer_norm("norm", x, EPS);
        let [b_, h, w, c] = [0, 1, 2, 3].map(|axis| b.shape(y).0.get(axis).copied().unwrap_or(1));
        let tokens = b.reshape(y, [b_, h * w, c]);
        let pooled = b.pool(tokens, Pooling::Mean); // (B,C)
        let head = Linear { name: "fc", out: self.classes, weight: WEIGHT, bias: Init::Zeros };
        let logits = b.scope("head", |b| b.linear(pooled, head));
        b.rename(logits, "head");
        let (loss, stats) = b.cross_entropy(logits, targets, loss.smoothing);
        Ends { loss, stats, logits }
    }

    fn features(&self, b: &mut Builder, images: ValueId) -> Option<Features> {
        Some(Features::Stages(self.maps(b, images)))
    }

    fn shape(&self) -> Option<Shape> {
        Some(Shape::Stages)
    }

    fn kind(&self) -> &'static str {
        "a Swin V2"
    }

    fn numbers(&self, batch: usize) -> f64 {
        let size = |n: usize| n as f64;
        let image = size(self.channels) * size(self.image[0]).powi(2);
        let tokens = image / size(self.channels) / 16.0;
        let pixels = 16.0 * size(self.channels);
        let activations = size(self.depths.iter().sum()) * tokens * 40.0 * size(self.width);
        let weights = size(self.width) * (8.0 * size(self.classes) + pixels);
        size(batch) * (activations + image + size(self.classes)) + weights
    }

    fn vary(&mut self, variation: &Variation) -> Result<(), Misfit> {
        if let Some(rate) = variation.attention_dropout.filter(|rate| *rate != 0.0) {
            let why = "a Swin V2 has no dropout of attention probabilities".to_string();
            return Err(Misfit { flag: "attention-dropout", value: rate.to_string(), why });
        }
        if variation.pool == Some(Pool::ClassToken) {
            let why = "a Swin V2 has no class token; it pools by the mean".to_string();
            return Err(Misfit { flag: "pool", value: "class-token".to_string(), why });
        }
        variation.keeps_eps(EPS, self.kind())?;
        self.drop_path = variation.drop_path;
        self.dropout = variation.dropout.unwrap_or(0.0);
        Ok(())
    }

    fn norm_eps(&self) -> f64 {
        EPS
    }

    fn windows(&self) -> Option<architecture::Windows> {
        let (learned, used) = (self.learned_window(), self.window);
        Some(architecture::Windows { learned, used })
    }

    fn sized(&self, size: [usize; 2]) -> Option<Network> {
        Some(Swin::sized(self, size).into())
    }

    fn train_at(&mut self, size: [usize; 2]) {
        self.trained = Some(size).filter(|size| *size != self.image);
    }

    fn trained(&self) -> Option<[usize; 2]> {
        self.trained
    }

    fn published_image(&self) -> Option<usize> {
        PRETRAINED.iter().find(|(window, _)| *window == self.window).map(|(_, pixels)| *pixels)
    }
}

impl Family for Swin {
    const FORM: Option<&'static str> = Some("swinv2-SIZE/wWINDOW, such as swinv2-ti/w8");
    const NAMES: &'static dyn Table = &names::Swin;

    fn listed() -> Vec<Listed> {
        let listed = |&(size, window, image): &(&str, &str, &str)| {
            let timm = timm::size(size).map(|size| format!("swinv2_{size}_window{window}_{image}"));
            // Of 192to256, what it is for now.
            let now = image.rsplit("to").next().and_then(|pixels| pixels.parse().ok());
            Listed { name: format!("swinv2-{size}/w{window}"), timm, image: now.unwrap_or_default() }
        };
        PUBLISHED.iter().map(listed).collect()
    }

    fn decode(name: &str, image: usize, channels: usize, classes: usize) -> Decoded<Self> {
        let is_swin = name.to_ascii_lowercase().starts_with("swinv2-");
        is_swin.then(|| Swin::named(name, [image; 2], channels, classes))
    }

    fn identify(weights: &Weights, window: Option<usize>) -> Option<Identity> {
        shape_of(weights, "layers.0.blocks.0.attn.logit_scale")?.first()?;
        let name = || {
            let width = *shape_of(weights, PATCHES)?.first()?;
            let blocks =
                |stage: usize| counted(weights, &format!("layers.{stage}.blocks."), ".attn.logit_scale");
            Some(Swin::name_of(width, [0, 1, 2, 3].map(blocks)))
        };
        let common = Identity::of_head(weights, "head.fc.weight");
        let named = |window: String| Some(format!("{}/w{window}", name()?));
        Some(match window {
            Some(window) => Identity { model: named(window.to_string()), ..common },
            None => Identity { but_for_window: named("WINDOW".to_string()), ..common },
        })
    }
}

#[cfg(test)]
mod tests;
