//! What a run may compute in, and the one table of how far from double precision that may lead.

use graph::{DType, DynamicScale, LossScaling, Mixed};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arithmetic {
    Fp32,
    Tf32,
    Bf16,
    /// The residual stream in bf16 too.
    Bf16Residual,
    Fp16,
    Fp16Residual,
}

impl Arithmetic {
    pub fn mixed(self) -> Option<Mixed> {
        let mixed = |half, residual| Some(Mixed { half, residual });
        match self {
            Arithmetic::Fp32 | Arithmetic::Tf32 => None,
            Arithmetic::Bf16 => mixed(DType::Bf16, DType::F32),
            Arithmetic::Bf16Residual => mixed(DType::Bf16, DType::Bf16),
            Arithmetic::Fp16 => mixed(DType::F16, DType::F32),
            Arithmetic::Fp16Residual => mixed(DType::F16, DType::F16),
        }
    }

    /// Where the loss scale starts.
    pub fn scale(self) -> Option<f64> {
        matches!(self, Arithmetic::Fp16 | Arithmetic::Fp16Residual).then_some(256.0)
    }

    pub fn loss_scale(self) -> Option<LossScaling> {
        let dynamic = Some(DynamicScale { window: 1000, hysteresis: 2, min: 1.0 });
        self.scale().map(|initial| LossScaling { initial, dynamic })
    }
}

/// How far from double precision on the CPU each arithmetic may be, relative to the norm of each tensor (or to a thousandth of
/// the norm of all, where a tensor has almost none).
pub const TOLERANCES: [(Arithmetic, f64); 6] = [
    (Arithmetic::Fp32, 1e-4),
    (Arithmetic::Tf32, 5e-3),
    (Arithmetic::Bf16, 4e-2),
    (Arithmetic::Bf16Residual, 6e-2),
    (Arithmetic::Fp16, 5e-3),
    (Arithmetic::Fp16Residual, 8e-3),
];
