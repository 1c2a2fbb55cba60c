//! A training step as a program: shaped values, a closed set of fused ops, passes, and the plan they end in.
//!
//! Nothing here computes; executors (`cpu`, later `cuda`) run the [`Plan`]. Start with [`build::Builder`] (how a model
//! is written), then [`compile`](compile::compile) (the passes in order), then [`plan::Plan`] (what is run).

pub mod bad;
pub mod build;
pub mod check;
pub mod compile;
pub mod fp8;
pub mod graph;
pub mod op;
pub mod passes;
pub mod plan;
pub mod random;
pub mod rules;
pub mod run;
pub mod text;
pub mod types;
pub mod windows;

pub use build::{Builder, Loss};
pub use compile::{
    DynamicScale, Group, LossScaling, Model, Optimizer, Program, Settings, compile, evaluation, inference,
};
pub use graph::{AVERAGE, COPY, Graph, GraphError, Init, PENDING, Role, State, ValueId};
pub use op::{Lane, Op, StateId};
pub use passes::{Delivery, Exchange, Mixed, Recompute, prepare};
pub use plan::{Header, Key, Plan};
pub use rules::cost::{Ceilings, Cost};
pub use types::{DType, Shape, Type};
pub use windows::Windows;
