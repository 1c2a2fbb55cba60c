//! The Vision Transformer (Dosovitskiy et al., 2021), with torchvision's numerics.

/// How the token sequence becomes one vector per image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pool {
    /// A learned class token, normalised after the last block (torchvision, timm's `token`).
    ClassToken,
    /// The mean over patch tokens, normalised after pooling (timm's `avg` with `fc_norm`); no class token.
    Mean,
}

/// Everything that decides the shape of a ViT and of each of its parameters.
#[derive(Clone, Debug, PartialEq)]
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
}
