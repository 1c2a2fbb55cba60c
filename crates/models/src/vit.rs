//! The Vision Transformer (Dosovitskiy et al., 2021, figure 1), with torchvision's numerics and initial values and
//! timm's names.
//!
//! Legend: B batch, N patches, T tokens, C width.

use crate::architecture::{
    Architecture, Decoded, Ends, Family, Features, Listed, Misfit, NetworkError, Positions, Shape, Sizes,
    Variation, check_patches,
};
use crate::identify::{Identity, PATCHES, counted, image_of, shape_of};
use crate::names::{self, Table, Weights};
use crate::timm;
use graph::build::{Linear, Targets};
use graph::op::Pooling;
use graph::{Builder, Init, Loss, ValueId};
use serde::{Deserialize, Serialize};

/// Number under the root of norms, as in torchvision and timm.
const EPS: f64 = 1e-6;

/// Pooling of the token sequence into one vector per image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Pool {
    /// A learned class token, normalised after the last block (torchvision, timm's `token`).
    ClassToken,
    /// The mean over patch tokens, normalised after pooling (timm's `avg` with `fc_norm`); no class token.
    Mean,
}

/// Everything that decides the shape of a ViT and of each of its parameters.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Vit {
    /// Side of the square input image, in pixels.
    pub image: usize,
    /// Side of a square patch, in pixels.
    pub patch: usize,
    pub channels: usize,
    pub classes: usize,
    /// C in the shape comments.
    pub width: usize,
    pub depth: usize,
    pub heads: usize,
    /// Hidden width of the MLP.
    pub mlp: usize,
    pub pool: Pool,
    /// Rate of element dropout after the embedding, the attention projection and both MLP layers.
    pub dropout: f64,
    /// Rate of dropout on attention probabilities.
    pub attention_dropout: f64,
    /// Stochastic depth at the last block; grows linearly from zero at the first.
    pub drop_path: f64,
    /// Number under the root of norms.
    #[serde(default = "usual_eps", skip_serializing_if = "is_usual_eps")]
    pub norm_eps: f64,
}

fn usual_eps() -> f64 {
    EPS
}

fn is_usual_eps(eps: &f64) -> bool {
    *eps == EPS
}

/// Table 1 of the paper for B, L and H; Touvron et al. (2021) for Ti and S; Zhai et al. (2022) for g and G and Chen et al. (2023) for e, as
/// big_vision has them; nano is our own, for a first run. g and G differ by case alone, in their papers too.
/// (name, width, depth, heads, MLP width)
const SIZES: [(&str, usize, usize, usize, usize); 9] = [
    ("nano", 96, 4, 3, 384),
    ("ti", 192, 12, 3, 768),
    ("s", 384, 12, 6, 1536),
    ("b", 768, 12, 12, 3072),
    ("l", 1024, 24, 16, 4096),
    ("h", 1280, 32, 16, 5120),
    ("g", 1408, 40, 16, 6144),
    ("G", 1664, 48, 16, 8192),
    ("e", 1792, 56, 16, 15360),
];

/// The largest that names may ask for, beyond any that was published: width, blocks, width of the MLP.
const MOST: (usize, usize, usize) = (1 << 14, 1000, 1 << 17);

/// Sizes, patches and images of the published models, and of ours. (size, patch, pixels)
const PUBLISHED: [(&str, usize, usize); 11] = [
    ("nano", 4, 32),
    ("ti", 16, 224),
    ("s", 16, 224),
    ("b", 32, 224),
    ("b", 16, 224),
    ("b", 16, 384),
    ("l", 16, 224),
    ("h", 14, 224),
    ("g", 14, 224),
    ("G", 14, 224),
    ("e", 14, 224),
];

/// Form of names of ViTs, for messages.
const NAMES: &str = "a ViT is vit-SIZE/PATCH with SIZE one of nano, ti, s, b, l, h, g, G, e, such as vit-ti/16, or \
     vit-WIDTH-DEPTH-HEADS-MLP/PATCH, such as vit-1152-27-16-4304/14";

const PREFIX: &str = "vit-";

/// Width, depth, heads and MLP width of a published size. Case matters only between g and G.
fn size_named(size: &str) -> Option<[usize; 4]> {
    let exactly = SIZES.iter().find(|s| s.0 == size);
    let found = exactly.or_else(|| SIZES.iter().find(|s| s.0.eq_ignore_ascii_case(size)));
    found.map(|&(_, width, depth, heads, mlp)| [width, depth, heads, mlp])
}

/// Refuses sizes that are no ViT's.
fn within([width, depth, heads, mlp]: [usize; 4]) -> Result<(), String> {
    let (widest, deepest, largest) = MOST;
    for (what, number, most) in [
        ("width", width, widest),
        ("depth", depth, deepest),
        ("heads", heads, width),
        ("MLP width", mlp, largest),
    ] {
        if !(1..=most).contains(&number) {
            return Err(format!("{what} {number} is not from 1 to {most}"));
        }
    }
    match width % heads {
        0 => Ok(()),
        _ => Err(format!("width {width} is not a multiple of {heads}, its heads")),
    }
}

impl Vit {
    /// Decodes a name such as `vit-b/16`, or by numbers `vit-768-12-12-3072/16`.
    pub fn named(name: &str, image: usize, channels: usize, classes: usize) -> Result<Vit, NetworkError> {
        let unknown = || NetworkError::unknown(name, NAMES);
        let after = name.split_at_checked(PREFIX.len()).filter(|(vit, _)| vit.eq_ignore_ascii_case(PREFIX));
        let (size, patch) = after.and_then(|(_, n)| n.split_once('/')).ok_or_else(unknown)?;
        let patch: usize = patch.parse().map_err(|_| unknown())?;
        let [width, depth, heads, mlp] = match size_named(size) {
            Some(_) if size == "G" && name.starts_with("VIT") => {
                let why = "ViT-g, of 1.0 billion parameters, and ViT-G, of 1.8 billion, differ by case alone: write \
                     vit-g or vit-G";
                return Err(NetworkError::unfit(name, why));
            }
            Some(sizes) => sizes,
            None => {
                let number = |text: &str| text.parse::<usize>().map_err(|_| unknown());
                let numbers = size.split('-').map(number).collect::<Result<Vec<_>, _>>()?;
                let sizes: [usize; 4] = numbers.try_into().map_err(|_| unknown())?;
                within(sizes).map_err(|why| NetworkError::unfit(name, why))?;
                sizes
            }
        };
        let pool = Pool::ClassToken;
        let (dropout, attention_dropout, drop_path) = (0.0, 0.0, 0.0);
        let vit = Vit {
            image,
            patch,
            channels,
            classes,
            width,
            depth,
            heads,
            mlp,
            pool,
            dropout,
            attention_dropout,
            drop_path,
            norm_eps: EPS,
        };
        vit.check(name)?;
        Ok(vit)
    }

    /// Name of the published size with this width, so many blocks and this MLP.
    pub(crate) fn size_of(width: usize, depth: usize, mlp: usize) -> Option<&'static str> {
        let found = SIZES.iter().find(|size| (size.1, size.2, size.4) == (width, depth, mlp));
        found.map(|size| size.0)
    }

    /// Number of patches along one side.
    pub fn grid(&self) -> usize {
        self.image / self.patch
    }

    /// T: patches, and the class token if there is one.
    pub fn tokens(&self) -> usize {
        self.grid().pow(2) + usize::from(self.pool == Pool::ClassToken)
    }

    /// Images to tokens (B,T,C), through all blocks.
    pub(crate) fn encode(&self, b: &mut Builder, images: ValueId) -> ValueId {
        let tokens = self.embed(b, images);
        through_blocks(b, tokens, self.depth, |b, x, i| self.block(b, x, i))
    }

    /// The norm after the last block.
    pub(crate) fn norm(&self, b: &mut Builder, x: ValueId) -> ValueId {
        b.layer_norm("norm", x, self.norm_eps)
    }

    /// Patches, linearly projected; the class token in front; positions added.
    fn embed(&self, b: &mut Builder, images: ValueId) -> ValueId {
        let class_token = match self.pool {
            Pool::ClassToken => Some(b.parameter("cls_token", [1, 1, self.width], Init::Zeros)),
            Pool::Mean => None,
        };
        let positions = [1, self.tokens(), self.width];
        let positions = b.parameter("pos_embed", positions, Init::Normal { std: 0.02 });
        let fan_in = (self.channels * self.patch * self.patch) as f64;
        let weight = Init::TruncatedNormal { std: (1.0 / fan_in).sqrt() };
        let proj = Linear { name: "proj", out: self.width, weight, bias: Init::Zeros };
        let patches = b.scope("patch_embed", |b| b.patch_embedding(images, self.patch, proj));
        let tokens = b.embed(patches, class_token, positions);
        b.dropout(tokens, self.dropout)
    }

    /// x + attention(norm(x)), then x + MLP(norm(x)).
    fn block(&self, b: &mut Builder, x: ValueId, i: usize) -> ValueId {
        let drop_path = self.drop_path * i as f64 / (self.depth - 1).max(1) as f64;

        let y = b.layer_norm("norm1", x, self.norm_eps);
        let y = b.scope("attn", |b| self.attention(b, y));
        let y = b.drop_path(y, drop_path);
        let x = b.add(x, y);

        let y = b.layer_norm("norm2", x, self.norm_eps);
        let y = b.scope("mlp", |b| self.mlp(b, y));
        let y = b.drop_path(y, drop_path);
        b.add(x, y)
    }

    fn attention(&self, b: &mut Builder, x: ValueId) -> ValueId {
        let c = self.width;
        let qkv =
            b.linear(x, Linear { name: "qkv", out: 3 * c, weight: xavier(c, 3 * c), bias: Init::Zeros });
        let y = b.attention(qkv, self.heads, self.attention_dropout);
        // torchvision leaves the projection at nn.Linear's own default.
        let weight = Init::Uniform { bound: (1.0 / c as f64).sqrt() };
        let y = b.linear(y, Linear { name: "proj", out: c, weight, bias: Init::Zeros });
        b.dropout(y, self.dropout)
    }

    fn mlp(&self, b: &mut Builder, x: ValueId) -> ValueId {
        let (c, hidden, weight) = (self.width, self.mlp, xavier(self.width, self.mlp));
        let bias = Init::Normal { std: 1e-6 };
        let y = b.linear(x, Linear { name: "fc1", out: hidden, weight, bias });
        let y = b.gelu(y);
        let y = b.dropout(y, self.dropout);
        let y = b.linear(y, Linear { name: "fc2", out: c, weight, bias });
        b.dropout(y, self.dropout)
    }
}

impl Architecture for Vit {
    fn check(&self, model: &str) -> Result<(), NetworkError> {
        let rates = [self.dropout, self.attention_dropout, self.drop_path];
        check_patches(model, self.sizes(), self.patch, rates)
    }

    fn sizes(&self) -> Sizes {
        let Vit { image, channels, classes, width, .. } = *self;
        Sizes { image: [image; 2], channels, classes, width }
    }

    fn stages(&self) -> Vec<usize> {
        vec![self.depth]
    }

    /// The model of the figure, from images to logits and loss.
    fn graph(&self, b: &mut Builder, images: ValueId, batch: usize, loss: Loss) -> Ends {
        let targets = b.targets([batch], loss.mixed);

        let x = self.encode(b, images); // (B,T,C)
        let head = Linear { name: "head", out: self.classes, weight: Init::Zeros, bias: Init::Zeros };
        classified(b, x, (self.pool, self.norm_eps), head, (targets, loss))
    }

    fn features(&self, b: &mut Builder, images: ValueId) -> Option<Features> {
        let tokens = self.encode(b, images);
        Some(Features::Tokens { tokens: self.norm(b, tokens), grid: (self.grid(), self.grid()) })
    }

    fn shape(&self) -> Option<Shape> {
        Some(Shape::Tokens)
    }

    fn kind(&self) -> &'static str {
        "a ViT"
    }

    fn numbers(&self, batch: usize) -> f64 {
        plain_numbers(self, (self.patch, self.width, self.depth), (self.heads, self.mlp, 1), batch)
    }

    fn vary(&mut self, variation: &Variation) -> Result<(), Misfit> {
        self.norm_eps = variation.norm_eps.unwrap_or(self.norm_eps);
        let Vit { pool, dropout, attention_dropout, drop_path, .. } = self;
        variation.put_into(pool, [dropout, attention_dropout, drop_path]);
        Ok(())
    }

    fn norm_eps(&self) -> f64 {
        self.norm_eps
    }

    fn pool(&self) -> Option<Pool> {
        Some(self.pool)
    }

    fn positions(&self) -> Option<Positions> {
        Some(Positions { grid: self.grid(), class_token: true })
    }
}

/// Tokens after all blocks, with borders between them.
pub(crate) fn through_blocks(
    b: &mut Builder,
    tokens: ValueId,
    depth: usize,
    block: impl Fn(&mut Builder, ValueId, usize) -> ValueId,
) -> ValueId {
    let mut x = b.border(tokens);
    for i in 0..depth {
        let y = b.scope(&format!("blocks.{i}"), |b| block(b, x, i));
        x = b.border(y);
    }
    x
}

/// The class of tokens (B,T,C) after all blocks: norm and pooling with this number under the root, head, loss.
pub(crate) fn classified(
    b: &mut Builder,
    tokens: ValueId,
    (pool, eps): (Pool, f64),
    head: Linear,
    (targets, loss): (Targets, Loss),
) -> Ends {
    let pooled = match pool {
        Pool::ClassToken => {
            let y = b.layer_norm("norm", tokens, eps);
            b.pool(y, Pooling::First)
        }
        Pool::Mean => {
            let y = b.pool(tokens, Pooling::Mean);
            b.layer_norm("fc_norm", y, eps)
        }
    }; // (B,C)
    let logits = b.linear(pooled, head);
    let (loss, stats) = b.cross_entropy(logits, targets, loss.smoothing);
    Ends { loss, stats, logits }
}

/// [`Architecture::numbers`] of blocks over patches of (patch, width, depth), with (heads, MLP width, tokens before the patches).
pub(crate) fn plain_numbers(
    model: &dyn Architecture,
    (patch, width, depth): (usize, usize, usize),
    (heads, mlp, prefix): (usize, usize, usize),
    batch: usize,
) -> f64 {
    let size = |n: usize| n as f64;
    let [height, image_width] = model.size().map(size);
    let image = size(model.channels()) * height * image_width;
    let tokens = (height / size(patch)) * (image_width / size(patch)) + size(prefix);
    let block = tokens * (size(heads) * tokens + 8.0 * size(mlp));
    let pixels = size(model.channels()) * size(patch).powi(2);
    let activations = size(depth) * block;
    let blocks = size(depth) * (4.0 * size(width) + 2.0 * size(mlp));
    let weights = size(width) * (size(model.classes()) + pixels + tokens + blocks);
    size(batch) * (activations + image + size(model.classes())) + weights
}

impl Family for Vit {
    const FORM: Option<&'static str> = Some("vit-SIZE/PATCH, such as vit-ti/16");
    const NAMES: &'static dyn Table = &names::Vit;

    fn listed() -> Vec<Listed> {
        let listed = |&(size, patch, image): &(&str, usize, usize)| {
            let timm = timm::size(size).map(|size| format!("vit_{size}_patch{patch}_{image}"));
            Listed { name: format!("vit-{size}/{patch}"), timm, image }
        };
        PUBLISHED.iter().map(listed).collect()
    }

    fn decode(name: &str, image: usize, channels: usize, classes: usize) -> Decoded<Self> {
        let is_vit = name.to_ascii_lowercase().starts_with("vit-");
        is_vit.then(|| Vit::named(name, image, channels, classes))
    }

    /// Whatever is no other family's.
    fn identify(weights: &Weights, _: Option<usize>) -> Option<Identity> {
        let class_token = weights.contains_key("cls_token");
        let model = || {
            let &[width, _, patch, _] = shape_of(weights, PATCHES)? else { return None };
            let &[mlp, _] = shape_of(weights, "blocks.0.mlp.fc1.weight")? else { return None };
            let depth = counted(weights, "blocks.", ".mlp.fc1.weight");
            Some(format!("vit-{}/{patch}", Vit::size_of(width, depth, mlp)?))
        };
        Some(Identity {
            model: model(),
            image: image_of(weights, usize::from(class_token)),
            pool: weights.contains_key("pos_embed").then_some(match class_token {
                true => Pool::ClassToken,
                false => Pool::Mean,
            }),
            ..Identity::of_head(weights, "head.weight")
        })
    }
}

pub(crate) fn xavier(fan_in: usize, fan_out: usize) -> Init {
    Init::Uniform { bound: (6.0 / (fan_in + fan_out) as f64).sqrt() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use graph::{DType, Graph};

    fn parameters(name: &str, image: usize, classes: usize) -> usize {
        let vit = Vit::named(name, image, 3, classes).unwrap();
        let model = vit.build(1, Loss::default(), DType::F32).unwrap();
        model.train.states.iter().map(|s| s.ty.shape.count()).sum()
    }

    #[test]
    fn parameter_counts_are_the_published_ones() {
        assert_eq!(parameters("vit-ti/16", 224, 1000), 5_717_416);
        assert_eq!(parameters("vit-s/16", 224, 1000), 22_050_664);
        assert_eq!(parameters("vit-b/16", 224, 1000), 86_567_656);
        assert_eq!(parameters("vit-l/16", 224, 1000), 304_326_632);
        assert_eq!(parameters("vit-h/14", 224, 1000), 632_045_800);
        assert_eq!(parameters("vit-g/14", 224, 1000), 1_012_611_432);
        assert_eq!(parameters("vit-G/14", 224, 1000), 1_844_440_680);
        // 3,926 million in the paper (Chen et al., 2023), with its pooling head (67.9 million) and 30 thousand classes.
        assert_eq!(parameters("vit-e/14", 224, 1000), 3_807_214_312);
    }

    #[test]
    fn case_tells_g_from_g_alone() {
        let named = |name: &str| Vit::named(name, 224, 3, 10);
        assert_eq!(named("ViT-B/16"), named("vit-b/16"));
        assert_eq!(named("ViT-E/14"), named("VIT-e/14"));
        let widths = ["vit-g/14", "ViT-g/14", "vit-G/14", "ViT-G/14", "VIT-g/14"]
            .map(|name| named(name).unwrap().width);
        assert_eq!(widths, [1408, 1408, 1664, 1664, 1408]);
        let refused = named("VIT-G/14").unwrap_err().to_string();
        assert!(refused.starts_with("VIT-G/14: ViT-g, of 1.0 billion"), "{refused}");
    }

    #[test]
    fn other_sizes_are_named_by_their_numbers() {
        let named = |name: &str| Vit::named(name, 224, 3, 10);
        assert_eq!(named("vit-768-12-12-3072/16"), named("vit-b/16"));
        // SoViT-400m (Alabdulmohsin et al., 2023), which has 428 million in the paper, with its pooling head (15.2 million).
        assert_eq!(parameters("vit-1152-27-16-4304/14", 224, 1000) / 1_000_000, 413);
        let message = |name: &str| named(name).unwrap_err().to_string();
        for (name, why) in [
            ("vit-100-12-12-3072/16", "width 100 is not a multiple of 12, its heads"),
            ("vit-768-0-12-3072/16", "depth 0 is not from 1 to 1000"),
            ("vit-768-12-0-3072/16", "heads 0 is not from 1 to 768"),
            ("vit-99999-12-3-3072/16", "width 99999 is not from 1 to 16384"),
            ("vit-768-12-12-0/16", "MLP width 0 is not from 1 to 131072"),
        ] {
            assert_eq!(message(name), format!("{name}: {why}"));
        }
        for name in
            ["vit-768-12-12/16", "vit-768-12-12-3072-1/16", "vit-768-12-x-3072/16", "vit--12-12-3072/16"]
        {
            assert!(message(name).starts_with(&format!("{name}: unknown model: a ViT is")), "{name}");
        }
    }

    #[test]
    fn training_alone_is_mixed() {
        let vit = Vit::named("vit-nano/4", 32, 3, 10).unwrap();
        let inputs = |graph: &Graph| {
            let inputs = graph.nodes.iter().filter(|n| n.op == graph::Op::Input);
            inputs.map(|n| n.layer.clone()).collect::<Vec<_>>()
        };
        let plain = ["images", "labels", "weights"];
        for mixed in [false, true] {
            let model = vit.build(2, Loss { smoothing: 0.1, mixed }, DType::F32).unwrap();
            let more: &[&str] = if mixed { &["partners", "mix"] } else { &[] };
            assert_eq!(inputs(&model.train), [&plain[..], more].concat());
            assert_eq!(inputs(&model.eval), plain);
        }
    }

    #[test]
    fn bad_names_and_sizes_are_refused_in_one_line() {
        let message = |name, image| Vit::named(name, image, 3, 10).unwrap_err().to_string();
        assert!(message("resnet50", 32).starts_with("resnet50: unknown model"));
        assert!(message("vit-xl/16", 32).starts_with("vit-xl/16: unknown model"));
        assert_eq!(message("vit-ti/5", 32), "vit-ti/5: patch 5 doesn't divide the 32×32 image");
        assert_eq!(message("vit-ti/0", 32), "vit-ti/0: the patch must be at least 1");
    }
}
