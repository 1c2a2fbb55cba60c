//! The Vision Transformer with LayerScale (Touvron et al., 2021), as DeiT III (Touvron et al., 2022) and DINOv2 (Oquab et al., 2024)
//! have it: with register tokens (Darcet et al., 2024) and gated MLPs (SwiGLU) where asked for. timm's numerics, initial values and
//! names, those of models included.
//!
//! Legend: B batch, N patches, T tokens, C width.

use crate::architecture::{
    Architecture, Decoded, Ends, Family, Features, Listed, Misfit, NetworkError, Positions, Shape, Sizes,
    Variation, check_patches,
};
use crate::identify::{Identity, PATCHES, counted, image_of, shape_of};
use crate::names::{self, Table, Weights};
use crate::vit::{Pool, classified, plain_numbers, through_blocks};
use graph::build::Linear;
use graph::op::Op;
use graph::{Builder, Init, Loss, ValueId};
use serde::{Deserialize, Serialize};

const EPS: f64 = 1e-6;
/// Every linear layer but the patch embedding.
const WEIGHT: Init = Init::TruncatedNormal { std: 0.02 };
/// The tokens that are no patches.
const TOKEN: Init = Init::Normal { std: 1e-6 };

/// Everything that decides the shape of such a ViT and of each of its parameters.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerScaleVit {
    /// Side of the square input image, in pixels.
    pub image: usize,
    /// Side of the images it was published for.
    pub published: usize,
    /// Side of a square patch, in pixels.
    pub patch: usize,
    pub channels: usize,
    pub classes: usize,
    /// C in the shape comments.
    pub width: usize,
    pub depth: usize,
    pub heads: usize,
    /// Columns that the first layer of the MLP makes; of a gated one, gates and values together.
    pub mlp: usize,
    /// Flag: the MLP is a SwiGLU.
    pub gated: bool,
    /// Register tokens beside the class token.
    pub registers: usize,
    /// Flag: the class token has a position, too. Registers have none.
    pub class_position: bool,
    /// Initial value of LayerScale.
    pub scale: f64,
    /// The class token, normalised after the last block, or the mean over patch tokens, normalised after pooling.
    pub pool: Pool,
    /// Rate of element dropout after the embedding, the attention projection and both MLP layers.
    pub dropout: f64,
    /// Rate of dropout on attention probabilities.
    pub attention_dropout: f64,
    /// Stochastic depth at the last block; grows linearly from zero at the first.
    pub drop_path: f64,
}

/// timm's; nano is our own, for a first run. (name, width, depth, heads, MLP width, gated)
const SIZES: [(&str, usize, usize, usize, usize, bool); 7] = [
    ("nano", 96, 4, 3, 384, false),
    ("small", 384, 12, 6, 1536, false),
    ("medium", 512, 12, 8, 2048, false),
    ("base", 768, 12, 12, 3072, false),
    ("large", 1024, 24, 16, 4096, false),
    ("huge", 1280, 32, 16, 5120, false),
    ("giant", 1536, 40, 24, 8192, true),
];

/// Side of the images that DINOv2 was published for.
const DINOV2_IMAGE: usize = 518;
/// Initial value of LayerScale in either.
const DINOV2_SCALE: f64 = 1e-5;
const DEIT3_SCALE: f64 = 1e-6;
/// More tokens than any image of ours has.
const MOST_REGISTERS: usize = 1 << 10;

/// Published models.
const PUBLISHED: [&str; 13] = [
    "deit3_small_patch16_224",
    "deit3_medium_patch16_224",
    "deit3_base_patch16_224",
    "deit3_large_patch16_224",
    "deit3_huge_patch14_224",
    "vit_small_patch14_dinov2",
    "vit_base_patch14_dinov2",
    "vit_large_patch14_dinov2",
    "vit_giant_patch14_dinov2",
    "vit_small_patch14_reg4_dinov2",
    "vit_base_patch14_reg4_dinov2",
    "vit_large_patch14_reg4_dinov2",
    "vit_giant_patch14_reg4_dinov2",
];

/// Form of names, for messages.
const NAMES: &str = "timm's names here are vit_SIZE_patchPATCH_IMAGE, swinv2_SIZE_windowWINDOW_IMAGE and, of ViTs with LayerScale, \
     deit3_SIZE_patchPATCH_IMAGE, vit_SIZE_patchPATCH_dinov2 and \
     vit_SIZE_patchPATCH_regREGISTERS_dinov2 with SIZE one of nano, small, medium, base, large, huge, giant, such as \
     vit_small_patch14_reg4_dinov2";

impl LayerScaleVit {
    /// Decodes one of timm's names, such as `vit_small_patch14_reg4_dinov2` or `deit3_small_patch16_224`.
    pub fn named(name: &str, image: usize, channels: usize, classes: usize) -> Result<Self, NetworkError> {
        let lower = name.to_ascii_lowercase();
        let model = Self::parsed(&lower).ok_or_else(|| NetworkError::unknown(name, NAMES))?;
        let model = LayerScaleVit { image, channels, classes, ..model };
        model.check(name)?;
        Ok(model)
    }

    fn parsed(name: &str) -> Option<Self> {
        let number = |text: &str| text.parse::<usize>().ok().filter(|n| n.to_string() == text);
        let parts: Vec<&str> = name.split('_').collect();
        let (size, patch, published, registers, class_position, scale) = match parts[..] {
            ["deit3", size, patch, image] => (size, patch, number(image)?, 0, false, DEIT3_SCALE),
            ["vit", size, patch, "dinov2"] => (size, patch, DINOV2_IMAGE, 0, true, DINOV2_SCALE),
            ["vit", size, patch, registers, "dinov2"] => {
                let registers = number(registers.strip_prefix("reg")?).filter(|n| *n > 0)?;
                (size, patch, DINOV2_IMAGE, registers, false, DINOV2_SCALE)
            }
            _ => return None,
        };
        let &(_, width, depth, heads, mlp, gated) = SIZES.iter().find(|s| s.0 == size)?;
        let patch = number(patch.strip_prefix("patch")?)?;
        let (image, channels, classes) = (published, 3, 1000);
        let (pool, dropout, attention_dropout, drop_path) = (Pool::ClassToken, 0.0, 0.0, 0.0);
        Some(LayerScaleVit {
            image,
            published,
            patch,
            channels,
            classes,
            width,
            depth,
            heads,
            mlp,
            gated,
            registers,
            class_position,
            scale,
            pool,
            dropout,
            attention_dropout,
            drop_path,
        })
    }

    fn grid(&self) -> usize {
        self.image / self.patch
    }

    /// Images to tokens (B,T,C), through all blocks.
    fn encode(&self, b: &mut Builder, images: ValueId) -> ValueId {
        let tokens = self.embed(b, images);
        through_blocks(b, tokens, self.depth, |b, x, i| self.block(b, x, i))
    }

    /// Patches, linearly projected; positions added; the class token and registers in front.
    fn embed(&self, b: &mut Builder, images: ValueId) -> ValueId {
        let c = self.width;
        let class_token = b.parameter("cls_token", [1, 1, c], TOKEN);
        let registers = (self.registers > 0).then(|| b.parameter("reg_token", [1, self.registers, c], TOKEN));
        let positions = self.grid().pow(2) + usize::from(self.class_position);
        let positions = b.parameter("pos_embed", [1, positions, c], WEIGHT);
        let fan_in = (self.channels * self.patch * self.patch) as f64;
        let init = Init::Uniform { bound: (1.0 / fan_in).sqrt() };
        let proj = Linear { name: "proj", out: c, weight: init, bias: init };
        let patches = b.scope("patch_embed", |b| b.patch_embedding(images, self.patch, proj));
        let mut prefix: Vec<ValueId> = registers.into_iter().collect();
        let placed = if self.class_position {
            b.embed(patches, Some(class_token), positions)
        } else {
            prefix.insert(0, class_token);
            b.embed(patches, None, positions)
        };
        let tokens = match prefix[..] {
            [] => placed,
            _ => b.op("prefix", Op::Prepend, &[&[placed], &prefix[..]].concat()),
        };
        b.dropout(tokens, self.dropout)
    }

    /// x + γ·attention(norm(x)), then x + γ·MLP(norm(x)).
    fn block(&self, b: &mut Builder, x: ValueId, i: usize) -> ValueId {
        let drop_path = self.drop_path * i as f64 / (self.depth - 1).max(1) as f64;

        let y = b.layer_norm("norm1", x, EPS);
        let y = b.scope("attn", |b| self.attention(b, y));
        let y = self.layer_scale(b, "ls1", y);
        let y = b.drop_path(y, drop_path);
        let x = b.add(x, y);

        let y = b.layer_norm("norm2", x, EPS);
        let y = b.scope("mlp", |b| self.mlp(b, y));
        let y = self.layer_scale(b, "ls2", y);
        let y = b.drop_path(y, drop_path);
        b.add(x, y)
    }

    fn layer_scale(&self, b: &mut Builder, name: &str, y: ValueId) -> ValueId {
        let gamma =
            b.scope(name, |b| b.parameter("gamma", [self.width], Init::Constant { value: self.scale }));
        b.op(name, Op::LayerScale, &[y, gamma])
    }

    fn attention(&self, b: &mut Builder, x: ValueId) -> ValueId {
        let qkv = b.linear(x, linear("qkv", 3 * self.width));
        let y = b.attention(qkv, self.heads, self.attention_dropout);
        let y = b.linear(y, linear("proj", self.width));
        b.dropout(y, self.dropout)
    }

    fn mlp(&self, b: &mut Builder, x: ValueId) -> ValueId {
        let y = b.linear(x, linear("fc1", self.mlp));
        let y = if self.gated { b.op("swiglu", Op::SwiGlu, &[y]) } else { b.gelu(y) };
        let y = b.dropout(y, self.dropout);
        let y = b.linear(y, linear("fc2", self.width));
        b.dropout(y, self.dropout)
    }

    /// The tokens of patches alone (B,N,C).
    fn patches(&self, b: &mut Builder, tokens: ValueId) -> ValueId {
        let batch = b.shape(tokens).0.first().copied().unwrap_or(1);
        let map = b.grid(tokens, (self.grid(), self.grid()));
        b.reshape(map, [batch, self.grid().pow(2), self.width])
    }
}

fn linear(name: &str, out: usize) -> Linear<'_> {
    Linear { name, out, weight: WEIGHT, bias: Init::Zeros }
}

impl Architecture for LayerScaleVit {
    fn kind(&self) -> &'static str {
        "a ViT"
    }

    fn shape(&self) -> Option<Shape> {
        Some(Shape::Tokens)
    }

    fn stages(&self) -> Vec<usize> {
        vec![self.depth]
    }

    fn check(&self, model: &str) -> Result<(), NetworkError> {
        if self.registers > MOST_REGISTERS {
            let why = format!("{} registers, but there are at most {MOST_REGISTERS}", self.registers);
            return Err(NetworkError::unfit(model, why));
        }
        let rates = [self.dropout, self.attention_dropout, self.drop_path];
        check_patches(model, self.sizes(), self.patch, rates)
    }

    fn sizes(&self) -> Sizes {
        let LayerScaleVit { image, channels, classes, width, .. } = *self;
        Sizes { image: [image; 2], channels, classes, width }
    }

    fn graph(&self, b: &mut Builder, images: ValueId, batch: usize, loss: Loss) -> Ends {
        let targets = b.targets([batch], loss.mixed);

        let x = self.encode(b, images); // (B,T,C)
        let of = if self.pool == Pool::Mean { self.patches(b, x) } else { x };
        classified(b, of, (self.pool, EPS), linear("head", self.classes), (targets, loss))
    }

    fn features(&self, b: &mut Builder, images: ValueId) -> Option<Features> {
        let tokens = self.encode(b, images);
        let tokens = b.layer_norm("norm", tokens, EPS);
        Some(Features::Tokens { tokens, grid: (self.grid(), self.grid()) })
    }

    fn numbers(&self, batch: usize) -> f64 {
        let prefix = 1 + self.registers;
        plain_numbers(self, (self.patch, self.width, self.depth), (self.heads, self.mlp, prefix), batch)
    }

    fn vary(&mut self, variation: &Variation) -> Result<(), Misfit> {
        variation.keeps_eps(EPS, self.kind())?;
        let LayerScaleVit { pool, dropout, attention_dropout, drop_path, .. } = self;
        variation.put_into(pool, [dropout, attention_dropout, drop_path]);
        Ok(())
    }

    fn norm_eps(&self) -> f64 {
        EPS
    }

    fn pool(&self) -> Option<Pool> {
        Some(self.pool)
    }

    fn positions(&self) -> Option<Positions> {
        Some(Positions { grid: self.grid(), class_token: self.class_position })
    }

    fn published_image(&self) -> Option<usize> {
        Some(self.published)
    }
}

impl Family for LayerScaleVit {
    const FORM: Option<&'static str> = Some(
        "timm's, such as vit_base_patch16_224, vit_small_patch14_reg4_dinov2 or deit3_small_patch16_224",
    );
    const NAMES: &'static dyn Table = &names::LayerScaleVit;

    fn listed() -> Vec<Listed> {
        let listed = |name: &&str| {
            let (name, image) = (name.to_string(), Self::parsed(name).map_or(0, |model| model.published));
            Listed { timm: Some(name.clone()), name, image }
        };
        PUBLISHED.iter().map(listed).collect()
    }

    fn decode(name: &str, image: usize, channels: usize, classes: usize) -> Decoded<Self> {
        let lower = name.to_ascii_lowercase();
        let timms = lower.starts_with("vit_") || lower.starts_with("deit3_");
        timms.then(|| LayerScaleVit::named(name, image, channels, classes))
    }

    fn identify(weights: &Weights, _: Option<usize>) -> Option<Identity> {
        shape_of(weights, "blocks.0.ls1.gamma")?;
        let registers = shape_of(weights, "reg_token").and_then(|shape| shape.get(1).copied());
        let (placed, bare) = (image_of(weights, 1), image_of(weights, 0));
        let name = || {
            let &[width, _, patch, _] = shape_of(weights, PATCHES)? else { return None };
            let &[mlp, _] = shape_of(weights, "blocks.0.mlp.fc1.weight")? else { return None };
            let &[_, inner] = shape_of(weights, "blocks.0.mlp.fc2.weight")? else { return None };
            let depth = counted(weights, "blocks.", ".ls1.gamma");
            let alike = |s: &&(&str, usize, usize, usize, usize, bool)| {
                (s.1, s.2, s.4, s.5) == (width, depth, mlp, mlp != inner)
            };
            let size = SIZES.iter().find(alike)?.0;
            match (registers, bare) {
                (Some(registers), _) => Some(format!("vit_{size}_patch{patch}_reg{registers}_dinov2")),
                (None, Some(image)) => Some(format!("deit3_{size}_patch{patch}_{image}")),
                (None, None) => placed.map(|_| format!("vit_{size}_patch{patch}_dinov2")),
            }
        };
        let mean = weights.contains_key("fc_norm.weight");
        Some(Identity {
            model: name(),
            image: bare.or(placed),
            pool: Some(if mean { Pool::Mean } else { Pool::ClassToken }),
            ..Identity::of_head(weights, "head.weight")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Network;
    use crate::names::{Convention, Tensor, detect, from_canonical, to_canonical};

    fn named(name: &str, image: usize) -> LayerScaleVit {
        LayerScaleVit::named(name, image, 3, 1000).unwrap()
    }

    /// `sum(p.numel() for p in timm.create_model(NAME, img_size=…, num_classes=1000).parameters())`.
    #[test]
    fn parameter_counts_are_timms() {
        let count = |name: &str, image| -> usize {
            let expected = Network::from(named(name, image)).expected();
            expected.iter().map(|(_, shape)| shape.iter().product::<usize>()).sum()
        };
        assert_eq!(count("vit_small_patch14_reg4_dinov2", 518), 22_442_344);
        assert_eq!(count("vit_base_patch14_dinov2", 518), 87_348_712);
        assert_eq!(count("vit_giant_patch14_reg4_dinov2", 518), 1_138_020_840);
        assert_eq!(count("deit3_small_patch16_224", 224), 22_059_496);
        assert_eq!(count("deit3_medium_patch16_224", 224), 38_849_512);
        assert_eq!(count("deit3_huge_patch14_224", 224), 632_126_440);
    }

    #[test]
    fn bad_names_and_sizes_are_refused_in_one_line() {
        let message = |name, image| Network::named(name, image, 3, 10).unwrap_err().to_string();
        for name in [
            "vit_small_patch14",
            "vit_small_patch14_reg0_dinov2",
            "vit_small_patch014_dinov2",
            "vit_tiny_patch14_dinov2",
            "deit3_small_patch16",
            "vit_small_patch14_reg4_dinov3",
        ] {
            assert!(
                message(name, 224).starts_with(&format!("{name}: unknown model: timm's names")),
                "{name}"
            );
        }
        let odd = message("vit_small_patch14_reg4_dinov2", 256);
        assert_eq!(odd, "vit_small_patch14_reg4_dinov2: patch 14 doesn't divide the 256×256 image");
        let many = message("vit_small_patch14_reg9999_dinov2", 224);
        assert!(many.ends_with("9999 registers, but there are at most 1024"), "{many}");
        assert!(
            message("vit_small_patch14_dinov2+upernet", 224)
                .ends_with("which a ViT doesn't have: write +linear")
        );
    }

    fn weights(network: &Network) -> Weights {
        let mut next = 0;
        let tensor = |shape: Vec<usize>| {
            let count = shape.iter().product::<usize>();
            next += count;
            Tensor { data: (next - count..next).map(|i| i as f32).collect(), shape }
        };
        let expected = network.expected();
        let (names, shapes): (Vec<_>, Vec<_>) = expected.into_iter().unzip();
        names.into_iter().zip(shapes.into_iter().map(tensor)).collect()
    }

    #[test]
    fn a_model_is_known_by_its_shapes() {
        for (name, image) in [
            ("vit_nano_patch14_reg4_dinov2", 56),
            ("vit_nano_patch14_dinov2", 56),
            ("deit3_nano_patch16_64", 64),
            ("vit_small_patch14_reg1_dinov2", 28),
        ] {
            let network = Network::named(name, image, 1, 7).unwrap();
            let found = Identity::of(&weights(&network), None);
            let (model, image) = (Some(name.to_string()), Some(image));
            let (channels, classes, pool) = (Some(1), Some(7), Some(Pool::ClassToken));
            assert_eq!(found, Identity { model, image, channels, classes, pool, ..Identity::default() });
        }
        let giant = LayerScaleVit { depth: 40, ..named("vit_giant_patch14_reg4_dinov2", 14) };
        let shapes: Weights = Network::from(giant)
            .expected()
            .into_iter()
            .map(|(name, shape)| (name, Tensor { shape, data: vec![] }))
            .collect();
        let found = Identity::of(&shapes, None).model;
        assert_eq!(found.as_deref(), Some("vit_giant_patch14_reg4_dinov2"));
    }

    #[test]
    fn names_are_timms_alone() {
        let network = Network::named("vit_nano_patch14_reg4_dinov2", 28, 3, 5).unwrap();
        let ours = weights(&network);
        assert_eq!(detect(ours.keys().map(String::as_str)), Ok(Convention::Timm));
        assert_eq!(from_canonical(ours.clone(), Convention::Timm), Ok(ours.clone()));
        assert_eq!(to_canonical(ours.clone(), Convention::Timm), Ok(ours.clone()));
        let error = from_canonical(ours, Convention::HuggingFace).unwrap_err().to_string();
        assert_eq!(error, "a ViT with LayerScale has no huggingface form here: export it as timm");
    }

    /// Files of DINOv2's authors have a position for the class token, a mask token, other names.
    #[test]
    fn the_authors_files_are_read() {
        let giant = LayerScaleVit {
            width: 6,
            heads: 2,
            mlp: 16,
            depth: 2,
            ..named("vit_giant_patch14_reg4_dinov2", 28)
        };
        let ours = weights(&giant.into());
        let mut theirs = Weights::new();
        for (name, tensor) in ours.clone() {
            let name = name.replace("mlp.fc1", "mlp.w12").replace("mlp.fc2", "mlp.w3");
            theirs.insert(name.replace("reg_token", "register_tokens"), tensor);
        }
        let token = Tensor { shape: vec![1, 6], data: vec![0.0; 6] };
        theirs.insert("mask_token".into(), token);
        let first = vec![0.5; 6];
        let positions = theirs.get_mut("pos_embed").unwrap();
        positions.shape[1] += 1;
        positions.data.splice(..0, first);
        let read = to_canonical(theirs, Convention::Timm).unwrap();
        let mut expected = ours;
        expected.get_mut("cls_token").unwrap().data.iter_mut().for_each(|x| *x += 0.5);
        assert_eq!(read, expected);
    }
}
