//! A ViT that classifies pixels: its tokens back where their patches came from, a linear classifier, resized to the image
//! (the simplest head of Strudel et al., 2021).
//!
//! Legend: B batch, T tokens, C width, K classes.

use crate::vit::Vit;
use graph::build::Linear;
use graph::{Builder, DType, Graph, GraphError, Init, Key, Loss, Model};

impl Vit {
    /// The graphs of training and evaluation, for labels and weights of a pixel each (B,image,image).
    pub fn build_segmenter(&self, batch: usize, loss: Loss, dtype: DType) -> Result<Model, GraphError> {
        let key = Key { batch, height: self.image, width: self.image };
        let train = self.segmenter(Builder::new(dtype, true), batch, loss, dtype)?;
        let eval = self.segmenter(Builder::new(dtype, false), batch, Loss::default(), dtype)?;
        Ok(Model { train, eval, key })
    }

    fn segmenter(&self, mut b: Builder, batch: usize, loss: Loss, dtype: DType) -> Result<Graph, GraphError> {
        let (image, grid) = (self.image, self.grid());
        let images = b.input("images", dtype, [batch, self.channels, image, image]);
        let targets = b.targets([batch, image, image], loss.mixed);

        let tokens = self.encode(&mut b, images); // (B,T,C)
        let tokens = self.norm(&mut b, tokens);
        let head = Linear { name: "head", out: self.classes, weight: Init::Zeros, bias: Init::Zeros };
        let tokens = b.linear(tokens, head);
        let small = b.grid(tokens, (grid, grid)); // (B,h,w,K)
        let logits = b.resize("logits", small, (image, image));
        let (loss, stats) = b.weighted_losses(logits, &[], targets, loss.smoothing);
        b.finish(&[loss, stats, logits])
    }
}
