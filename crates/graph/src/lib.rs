//! A training step as a program: shaped values, a closed set of fused ops, passes, and the plan they end in.
//!
//! Nothing here computes; executors run the [`Plan`]. Start with [`build::Builder`] (how a model
//! is written), then [`compile`](compile::compile) (the passes in order), then [`plan::Plan`] (what is run).

#![deny(missing_docs)]

pub mod bad;
pub mod build;
pub mod check;
pub mod clocks;
pub mod compare;
pub mod compile;
pub mod flat;
pub mod fp8;
pub mod graph;
pub mod memory;
pub mod mesh;
pub mod op;
pub mod passes;
pub mod plan;
pub mod program;
pub mod random;
pub mod replay;
pub mod rules;
pub mod run;
pub mod settings;
pub mod target;
pub mod text;
pub mod touched;
pub mod types;
pub mod windows;

pub use build::{Builder, Loss};
pub use clocks::Clocks;
pub use compare::{Change, compare};
pub use compile::{compile, compile_observed, evaluation, inference, passes_of, stage_taken};
pub use flat::Flat;
pub use graph::{
    AVERAGE, COPY, GRADIENT, Graph, GraphError, Held, Home, Init, PENDING, Role, State, ValueId,
};
pub use memory::{Memory, Use};
pub use mesh::{Axis, Group, Mesh};
pub use op::{Lane, Op, StateId};
pub use passes::{Delivery, prepare};
pub use plan::{ALIGN, Header, Key, Plan};
pub use program::{Model, Program};
pub use replay::{Timeline, replay, replay_all};
pub use rules::cost::{Ceilings, Cost};
pub use settings::{
    Communication, DynamicScale, Gathering, LossScaling, Mixed, Optimizer, ParamGroup, Recompute, Settings,
    Zero,
};
pub use target::{Batching, Deferred, Partial, Target};
pub use types::{DType, Shape, Type};
pub use windows::Windows;
