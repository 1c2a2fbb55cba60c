//! Interface of models to the rest of the program, whatever their family.
//!
//! A family is one file: its sizes, its figure written with [`Builder`], these two traits; its names (`names/`); and one line in the
//! registry (`network.rs`).

use crate::identify::Identity;
use crate::names::{Convention, Table, Weights};
use crate::network::Network;
use crate::vit::Pool;
use graph::{Builder, DType, Graph, GraphError, Key, Loss, Model, ValueId};
use std::ops::Range;

/// Range of dropout rates.
pub const RATES: Range<f64> = 0.0..1.0;

/// Sizes that every model has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Rows and columns of the images that it is trained on, in pixels.
    pub image: [usize; 2],
    pub channels: usize,
    pub classes: usize,
    /// Channels of a token, in the first stage.
    pub width: usize,
}

/// Defect of a model; each text begins with the model's name.
#[derive(Clone, Debug, thiserror::Error, PartialEq)]
pub enum NetworkError {
    /// Unknown name, with the forms that names have.
    #[error("{model}: unknown model: {names}; `vitesse models` lists them")]
    Unknown { model: String, names: String },
    #[error("{model}: patch {patch} doesn't divide the {}×{} image", image[0], image[1])]
    Patch { model: String, patch: usize, image: [usize; 2] },
    #[error("{model}: {what} must be at least 1")]
    Empty { model: String, what: &'static str },
    #[error("{model}: {what} is {rate}, but a rate lies in 0 ≤ rate < 1")]
    Rate { model: String, what: &'static str, rate: f64 },
    #[error("{model}: {why}")]
    Unfit { model: String, why: String },
}

impl NetworkError {
    pub fn unknown(model: &str, names: impl Into<String>) -> Self {
        NetworkError::Unknown { model: model.to_string(), names: names.into() }
    }

    pub fn unfit(model: &str, why: impl Into<String>) -> Self {
        NetworkError::Unfit { model: model.to_string(), why: why.into() }
    }
}

/// Refuses sizes of 0.
pub(crate) fn no_empty(model: &str, sizes: &[(&'static str, usize)]) -> Result<(), NetworkError> {
    match sizes.iter().find(|(_, size)| *size == 0) {
        Some((what, _)) => Err(NetworkError::Empty { model: model.to_string(), what }),
        None => Ok(()),
    }
}

/// Refuses rates that are none.
pub(crate) fn only_rates(model: &str, rates: &[(&'static str, f64)]) -> Result<(), NetworkError> {
    match rates.iter().find(|(_, rate)| !RATES.contains(rate)) {
        Some(&(what, rate)) => Err(NetworkError::Rate { model: model.to_string(), what, rate }),
        None => Ok(()),
    }
}

/// Refuses what no ViT of square patches can have: sizes of 0, rates that are none, patches that don't divide its images.
pub(crate) fn check_patches(
    model: &str,
    sizes: Sizes,
    patch: usize,
    [dropout, attention_dropout, drop_path]: [f64; 3],
) -> Result<(), NetworkError> {
    let Sizes { image, channels, classes, .. } = sizes;
    let counts = [
        ("the patch", patch),
        ("the image size", image[0]),
        ("the number of channels", channels),
        ("the number of classes", classes),
    ];
    no_empty(model, &counts)?;
    let rates = [("dropout", dropout), ("attention dropout", attention_dropout), ("drop path", drop_path)];
    only_rates(model, &rates)?;
    if image.iter().any(|side| !side.is_multiple_of(patch)) {
        return Err(NetworkError::Patch { model: model.to_string(), patch, image });
    }
    Ok(())
}

/// Ends of a model's graph.
#[derive(Clone, Copy, Debug)]
pub struct Ends {
    /// Loss that training minimises: a scalar.
    pub loss: ValueId,
    /// Statistics of the loss that is logged: see [`graph::Op::CrossEntropy`].
    pub stats: ValueId,
    /// (B,K), or of pixels (B,h,w,K), as coarse as the head makes them.
    pub logits: ValueId,
}

impl Ends {
    /// Values in the order of a graph's outputs.
    pub fn values(self) -> [ValueId; 3] {
        [self.loss, self.stats, self.logits]
    }
}

/// Features that a backbone gives to a segmentation head.
#[derive(Clone, Copy, Debug)]
pub enum Features {
    /// Maps of four stages, finest first, (B,h,w,C) each: half the rows and columns of the one before, twice the
    /// channels.
    Stages([ValueId; 4]),
    /// Normalised tokens (B,T,C), those of patches last, row by row in a grid.
    Tokens { tokens: ValueId, grid: (usize, usize) },
}

/// Kind of [`Features`] of a backbone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    Stages,
    Tokens,
}

/// Changes of a user to the model that a name describes; nothing where the model's own value holds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Variation {
    pub pool: Option<Pool>,
    pub dropout: Option<f64>,
    pub attention_dropout: Option<f64>,
    /// Drop path rate of the last block.
    pub drop_path: f64,
    /// Number under the root of layer norms.
    pub norm_eps: Option<f64>,
}

impl Variation {
    /// Sets the pooling, and the rates (dropout, attention dropout, drop path), of a model that has all of them.
    pub(crate) fn put_into(&self, pool: &mut Pool, [dropout, attention, drop_path]: [&mut f64; 3]) {
        *pool = self.pool.unwrap_or(*pool);
        *dropout = self.dropout.unwrap_or(0.0);
        *attention = self.attention_dropout.unwrap_or(0.0);
        *drop_path = self.drop_path;
    }

    /// Refuses another number under the root of norms than `eps`, that of `kind`.
    pub(crate) fn keeps_eps(&self, eps: f64, kind: &str) -> Result<(), Misfit> {
        match self.norm_eps.filter(|typed| *typed != eps) {
            None => Ok(()),
            Some(typed) => {
                let why = format!("{kind} of this family has norms with {eps:e}");
                Err(Misfit { flag: "norm-eps", value: format!("{typed:e}"), why })
            }
        }
    }
}

/// Something asked of a model that it doesn't have, by the name of the flag.
#[derive(Clone, Debug, PartialEq)]
pub struct Misfit {
    pub flag: &'static str,
    pub value: String,
    pub why: String,
}

/// A model: everything that decides the shapes of its parameters, and the figure of its paper.
pub trait Architecture: std::fmt::Debug {
    /// Refuses sizes no image or head can have, with `model` as the name to complain about.
    fn check(&self, model: &str) -> Result<(), NetworkError>;

    fn sizes(&self) -> Sizes;

    /// Rows and columns of the images that it is trained on, in pixels.
    fn size(&self) -> [usize; 2] {
        self.sizes().image
    }

    fn channels(&self) -> usize {
        self.sizes().channels
    }

    fn classes(&self) -> usize {
        self.sizes().classes
    }

    /// Blocks of each stage; most have one stage.
    fn stages(&self) -> Vec<usize>;

    /// The figure: from `images` (B,ch,height,width) to the ends, for batches of `batch`. `loss` is that of training; evaluation
    /// neither smooths nor mixes.
    fn graph(&self, b: &mut Builder, images: ValueId, batch: usize, loss: Loss) -> Ends;

    /// Features below the head, for segmentation heads; none for a model that has such a head already.
    fn features(&self, b: &mut Builder, images: ValueId) -> Option<Features>;

    /// The kind of [`Self::features`].
    fn shape(&self) -> Option<Shape>;

    /// Name of the family in error messages, with its article.
    fn kind(&self) -> &'static str;

    /// About as many numbers as a step of `batch` images has at hand: for refusing what no memory holds, before anything is
    /// multiplied that might not fit a number.
    fn numbers(&self, batch: usize) -> f64;

    /// Pooling and rates as they were typed, where the family has them.
    fn vary(&mut self, variation: &Variation) -> Result<(), Misfit>;

    /// Number under the root of layer norms.
    fn norm_eps(&self) -> f64;

    /// The network without a head for pixels, if it has one.
    fn below(&self) -> Option<&Network> {
        None
    }

    /// Pooling of tokens into one vector, where that is a choice.
    fn pool(&self) -> Option<Pool> {
        None
    }

    /// Patches along a side of the grid that position embeddings are for, and whether tokens before the patches have some too.
    fn positions(&self) -> Option<Positions> {
        None
    }

    /// Side of the windows that position biases are, or were, learned in, and of those that they are used in.
    fn windows(&self) -> Option<Windows> {
        None
    }

    /// The same model, with the same parameters, for images of so many rows and columns. None where positions are learned for one
    /// size.
    fn sized(&self, size: [usize; 2]) -> Option<Network> {
        let _ = size;
        None
    }

    /// Lets windows be those of images of other rows and columns, where there are any.
    fn train_at(&mut self, size: [usize; 2]) {
        let _ = size;
    }

    /// Rows and columns of the images that windows are for, if those were others.
    fn trained(&self) -> Option<[usize; 2]> {
        None
    }

    /// The side of the images that such a model was published for.
    fn published_image(&self) -> Option<usize> {
        None
    }

    /// Rate of dropout that it has unless told otherwise, and why.
    fn usual_dropout(&self) -> Option<(f64, &'static str)> {
        None
    }

    /// True for models whose training takes moments over a batch.
    fn normalises_batches(&self) -> bool {
        false
    }

    /// Weight of an auxiliary head's loss.
    fn auxiliary_weight(&self) -> Option<f64> {
        None
    }

    /// Reason why a model can't be written under these names, where its tensors don't show it.
    fn refuses(&self, convention: Convention) -> Option<&'static str> {
        let _ = convention;
        None
    }
}

/// Grid of a model's position embedding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Positions {
    /// Patches along a side.
    pub grid: usize,
    /// Flag: the class token, if there is one, has a position too.
    pub class_token: bool,
}

/// The windows of a model's first stage, in tokens along a side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Windows {
    /// Side of the windows that position biases were learned in.
    pub learned: usize,
    /// Side of the windows that they are used in.
    pub used: usize,
}

/// A model in the list of models.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    pub name: String,
    /// Name in timm, where timm has it.
    pub timm: Option<String>,
    /// Side of the images that it was published for, in pixels.
    pub image: usize,
}

/// A model by its name; none if the name is another family's.
pub type Decoded<M> = Option<Result<M, NetworkError>>;

/// A family of models.
pub trait Family: Architecture + Sized {
    /// Form of its names, for messages; nothing for a model that is no backbone.
    const FORM: Option<&'static str>;

    /// Names of its tensors by each library.
    const NAMES: &'static dyn Table;

    /// Models of the family: name, name in timm if that is another, side of the images they were published for. None for heads,
    /// which any backbone of theirs takes.
    fn listed() -> Vec<Listed> {
        vec![]
    }

    /// Decodes a name, for square images; none if it is another family's.
    fn decode(name: &str, image: usize, channels: usize, classes: usize) -> Decoded<Self>;

    /// Identity of the model of canonically named weights; none if it is another family's. `window`: the side of a Swin
    /// V2's windows, if the file has it.
    fn identify(weights: &Weights, window: Option<usize>) -> Option<Identity>;
}

/// The graphs of training and evaluation for batches of `batch` images.
pub(crate) fn build(
    model: &dyn Architecture,
    batch: usize,
    loss: Loss,
    dtype: DType,
) -> Result<Model, GraphError> {
    let [height, width] = model.size();
    let train = graph(model, Builder::new(dtype, true), batch, loss, dtype)?;
    let eval = graph(model, Builder::new(dtype, false), batch, Loss::default(), dtype)?;
    Ok(Model { train, eval, key: Key { batch, height, width } })
}

fn graph(
    model: &dyn Architecture,
    mut b: Builder,
    batch: usize,
    loss: Loss,
    dtype: DType,
) -> Result<Graph, GraphError> {
    let [height, width] = model.size();
    let images = b.input("images", dtype, [batch, model.channels(), height, width]);
    let ends = model.graph(&mut b, images, batch, loss);
    b.finish(&ends.values())
}

/// Every parameter, and every running moment, with its shape, canonically named, in the order of the forward pass.
pub(crate) fn expected(model: &dyn Architecture) -> Vec<(String, Vec<usize>)> {
    // What is wrong with a model's sizes, building it says.
    let graph = graph(model, Builder::new(DType::F32, true), 1, Loss::default(), DType::F32);
    let states = graph.map(|graph| graph.states).unwrap_or_default();
    states.into_iter().map(|state| (state.name, state.ty.shape.0)).collect()
}
