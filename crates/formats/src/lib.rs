//! Files of weights and checkpoints: safetensors ([`tensors`]), PyTorch's own ([`pth`]), ONNX ([`onnx`]), folders of Hugging Face
//! ([`hugging_face`]), checkpoints of a run ([`checkpoint`]), and weights of models under anyone's names ([`weights`]).

pub mod checkpoint;
pub mod hugging_face;
pub mod locate;
pub mod onnx;
pub mod pth;
pub mod tensors;
pub mod weights;

pub use checkpoint::{CheckpointError, Checkpoints};
pub use onnx::OnnxError;
pub use weights::WeightsError;
