//! What the tests of whole models share: weights and images by formula, and a model ready to run.
#![allow(dead_code)]

use cpu::{Executor, Float, Options, Which};
use graph::{DType, GraphError, Header, Loss, Model, Optimizer, Program, Recompute, Settings, compile};
use models::Segmenter;
use models::layer_scale_vit::LayerScaleVit;
use models::swin::Swin;
use models::vit::Vit;
pub use testing::formula::{units, words};

pub const HEADER: Header = Header { seed: 1, step: 0, first_sample: 0, learning_rate: 0.0, nominal: 1.0 };

pub fn adamw() -> Optimizer {
    Optimizer::AdamW { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.05 }
}

/// The formula's weights, each rounded to f32 once.
pub fn weights(name: &str, shape: &[usize]) -> impl Fn(usize) -> f64 + use<> {
    let is_norm = ["norm1.weight", "norm2.weight", "norm.weight"].iter().any(|end| name.ends_with(end));
    let fan_in: usize = shape.iter().skip(1).product();
    let (offset, scale, factor) = if is_norm {
        (1.0, 0.1, 1.0)
    } else if name.ends_with(".gamma") {
        (0.6, 0.4, 1.0)
    } else if ["cls_token", "reg_token", "pos_embed"].contains(&name) {
        (0.0, 0.2, 1.0)
    } else if name.ends_with(".weight") {
        (0.0, (3.0 / fan_in as f64).sqrt(), 0.8)
    } else if name.ends_with(".logit_scale") {
        (2.0, 1.0, 1.0)
    } else {
        (0.0, 0.05, 1.0)
    };
    let units = units(name);
    move |i| f64::from((offset + units(i) * scale * factor) as f32)
}

/// A model of any family.
pub trait Network {
    fn build(&self, batch: usize, loss: Loss, dtype: DType) -> Result<Model, GraphError>;
}

impl Network for Vit {
    fn build(&self, batch: usize, loss: Loss, dtype: DType) -> Result<Model, GraphError> {
        Vit::build(self, batch, loss, dtype)
    }
}

impl Network for Swin {
    fn build(&self, batch: usize, loss: Loss, dtype: DType) -> Result<Model, GraphError> {
        Swin::build(self, batch, loss, dtype)
    }
}

impl Network for LayerScaleVit {
    fn build(&self, batch: usize, loss: Loss, dtype: DType) -> Result<Model, GraphError> {
        LayerScaleVit::build(self, batch, loss, dtype)
    }
}

impl Network for Segmenter {
    fn build(&self, batch: usize, loss: Loss, dtype: DType) -> Result<Model, GraphError> {
        Segmenter::build(self, batch, loss, dtype)
    }
}

/// How a model is run in a test.
pub struct Setup {
    pub batch: usize,
    pub threads: usize,
    pub optimizer: Optimizer,
    pub recompute: Recompute,
    pub loss: Loss,
    pub ema: Option<f64>,
    pub accumulates: bool,
}

impl Setup {
    pub fn new(batch: usize) -> Self {
        Setup {
            batch,
            threads: 2,
            optimizer: adamw(),
            recompute: Recompute::None,
            loss: Loss::default(),
            ema: None,
            accumulates: false,
        }
    }

    pub fn program(&self, network: &dyn Network) -> Program {
        self.program_in(network, DType::F32)
    }

    fn program_in(&self, network: &dyn Network, dtype: DType) -> Program {
        let target = cpu::Target { threads: self.threads };
        let settings = Settings {
            recompute: self.recompute,
            ema: self.ema,
            accumulates: self.accumulates,
            ..Settings::plain(self.optimizer, &target)
        };
        let program = compile(network.build(self.batch, self.loss, dtype).unwrap(), &settings).unwrap();
        for plan in program.plans() {
            plan.check().unwrap_or_else(|error| panic!("{}: {error}", plan.name));
        }
        program
    }

    pub fn executor<T: Float>(&self, network: &dyn Network) -> Executor<T> {
        let dtype = if size_of::<T>() == 8 { DType::F64 } else { DType::F32 };
        Executor::new(self.program_in(network, dtype), Options::alone(self.threads, 1)).unwrap()
    }
}

/// Sets every parameter by the formula.
pub fn fill_weights<T: Float>(executor: &mut Executor<T>) {
    for state in executor.program().states.clone().iter().filter(|s| s.is_parameter()) {
        let id = executor.find_state(&state.name).unwrap();
        let weights = weights(&state.name, &state.ty.shape.0);
        for (i, value) in executor.state_mut(id).unwrap().iter_mut().enumerate() {
            *value = T::from_f64(weights(i));
        }
    }
}

/// Fills a batch with the formula's samples from number `first` on.
pub fn fill_batch<T: Float>(executor: &mut Executor<T>, which: Which, first: usize, classes: usize) {
    let labels = executor.labels(which).unwrap();
    let batch = labels.len();
    let random = words("labels");
    labels.iter_mut().enumerate().for_each(|(b, label)| {
        *label = (random(first + b) % classes as u64) as i32;
    });
    executor.input(which, "weights").unwrap().fill(T::ONE);
    let images = executor.input(which, "images").unwrap();
    let start = first * images.len() / batch;
    let units = units("images");
    images.iter_mut().enumerate().for_each(|(i, x)| *x = T::from_f64(units(start + i)));
}

pub fn state<T: Float>(executor: &Executor<T>, name: &str) -> Vec<f64> {
    let id = executor.find_state(name).unwrap_or_else(|| panic!("no state {name}"));
    executor.state(id).iter().map(|x| x.to_f64()).collect()
}

pub fn norm(values: &[f64]) -> f64 {
    values.iter().map(|x| x * x).sum::<f64>().sqrt()
}

/// |a - b| / |b|.
pub fn distance(a: &[f64], b: &[f64]) -> f64 {
    let difference: Vec<f64> = a.iter().zip(b).map(|(a, b)| a - b).collect();
    norm(&difference) / norm(b).max(1e-300)
}
