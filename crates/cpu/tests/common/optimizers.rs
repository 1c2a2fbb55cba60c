//! Optimizers with the numbers that tests have.

// Each test takes what it needs.
#![allow(dead_code)]

use graph::Optimizer;

pub const ADAMW: Optimizer = Optimizer::AdamW { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.05 };

pub const SGD: Optimizer = Optimizer::Sgd { momentum: 0.9, nesterov: true, weight_decay: 0.01 };

pub const LAMB: Optimizer = Optimizer::Lamb {
    beta1: 0.9,
    beta2: 0.999,
    eps: 1e-6,
    weight_decay: 0.05,
    min_coeff: 0.01,
    max_coeff: 10.0,
};

pub const MUON: Optimizer = Optimizer::Muon {
    momentum: 0.95,
    nesterov: true,
    beta1: 0.9,
    beta2: 0.999,
    eps: 1e-8,
    weight_decay: 0.05,
};
