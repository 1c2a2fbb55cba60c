//! What computes, and in which numbers.

use super::choice::{Device, Precision, choice};
use super::origin::{Log, Origin};
use super::resolved::Resolved;
use super::settings::Raw;
use crate::ConfigError;
use crate::deepspeed::{DeepSpeed, Setting};
use graph::{DType, DynamicScale, LossScaling, Mixed};
use serde::{Deserialize, Serialize};
use std::fmt;

choice! {
    /// Precision of the residual stream, where matmuls are computed in half precision.
    #[derive(Default)]
    Residual {
        #[default]
        Fp32 = "fp32",
        Half = "half",
    }
}

impl Precision {
    /// Type of matmuls and of activations, if it is not the type of the parameters.
    pub fn half(self) -> Option<DType> {
        match self {
            Precision::Bf16 => Some(DType::Bf16),
            Precision::Fp16 => Some(DType::F16),
            Precision::Fp32 | Precision::Tf32 | Precision::Fp64 => None,
        }
    }
}

/// Factor on the loss in fp16, so that small gradients don't vanish; as in DeepSpeed.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LossScale {
    pub initial: f64,
    /// Adapts to overflows; if not, the rest has no effect.
    pub dynamic: bool,
    /// Good steps after which it is doubled.
    pub window: u64,
    /// The skipped step at which it is halved: the first, the second, …
    pub hysteresis: u64,
    pub min: f64,
}

impl Default for LossScale {
    fn default() -> Self {
        LossScale { initial: 65_536.0, dynamic: true, window: 1000, hysteresis: 2, min: 1.0 }
    }
}

impl fmt::Display for LossScale {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let LossScale { initial, dynamic, window, hysteresis, min } = self;
        if !dynamic {
            return write!(f, "{initial}");
        }
        write!(f, "dynamic from {initial} (window {window}, hysteresis {hysteresis}, at least {min})")
    }
}

/// Reason why fp64 is refused on a GPU.
pub const NO_FP64: &str = "the GPU path has no fp64; use --device cpu";

impl Resolved {
    /// The types of a plan in mixed precision: of matmuls, and of the residual stream.
    pub fn mixed(&self) -> Option<Mixed> {
        let half = self.precision.half()?;
        let residual = match self.residual {
            Residual::Fp32 => DType::F32,
            Residual::Half => half,
        };
        Some(Mixed { half, residual })
    }

    /// The scale of the loss in fp16, as plans have it.
    pub fn loss_scaling(&self) -> Option<LossScaling> {
        let LossScale { initial, dynamic, window, hysteresis, min } = self.loss_scale?;
        Some(LossScaling { initial, dynamic: dynamic.then_some(DynamicScale { window, hysteresis, min }) })
    }
}

/// Device and precision.
#[derive(Clone, Copy, Debug)]
pub(super) struct Arithmetic {
    pub device: Device,
    pub precision: Precision,
    pub residual: Residual,
    /// In fp16.
    pub loss_scale: Option<LossScale>,
}

impl Raw {
    pub(super) fn arithmetic(&self, log: &mut Log) -> Result<Arithmetic, ConfigError> {
        let device = log.pick("device", self.device, Device::Cpu);
        let (precision, origin) = self.chosen_precision();
        log.note("precision", precision, origin);
        match (device, precision) {
            (Device::Cpu, Precision::Fp32 | Precision::Fp64) => {}
            (Device::Cpu, _) => {
                return Err(ConfigError::setting("precision", precision, "the CPU computes in fp32 or fp64"));
            }
            (Device::Cuda, Precision::Fp64) => {
                return Err(ConfigError::setting("precision", precision, NO_FP64));
            }
            (Device::Cuda, _) => {}
        }
        let loss_scale = (precision == Precision::Fp16).then(|| self.loss_scale(log));
        Ok(Arithmetic { device, precision, residual: self.residual_stream(precision, log)?, loss_scale })
    }

    /// The precision, and who says so; whether the device has it is another question.
    pub(super) fn chosen_precision(&self) -> (Precision, Origin) {
        if let Some(precision) = self.precision {
            return (precision, Origin::Flag);
        }
        if self.device != Some(Device::Cuda) {
            // A file that asks for another is refused.
            return (Precision::Fp32, Origin::default_value());
        }
        match self.deepspeed.as_ref().and_then(precision_of) {
            Some((precision, key)) => (precision, Origin::File(key.to_string())),
            None => (Precision::Bf16, Origin::Default("default on a GPU".to_string())),
        }
    }

    fn residual_stream(&self, precision: Precision, log: &mut Log) -> Result<Residual, ConfigError> {
        match (self.residual, precision.half()) {
            (Some(residual), None) => {
                let why = format!("is for bf16 and fp16, and this run computes in {precision}");
                Err(ConfigError::setting("residual", residual, why))
            }
            (None, None) => Ok(Residual::Fp32),
            (typed, Some(_)) => Ok(log.pick("residual", typed, Residual::Fp32)),
        }
    }

    /// DeepSpeed's, as far as the file says something. What can't be was refused with the file.
    fn loss_scale(&self, log: &mut Log) -> LossScale {
        let mut keys: Vec<&str> = Vec::new();
        let mut given = |key: &'static str| match self.deepspeed.as_ref()?.number(key)? {
            Setting::Given(number) => {
                keys.push(key);
                Some(number)
            }
            Setting::Auto => None,
        };
        let usual = LossScale::default();
        let scale = match given("fp16.loss_scale") {
            Some(fixed) if fixed != 0.0 => LossScale { initial: fixed, dynamic: false, ..usual },
            _ => LossScale {
                initial: given("fp16.initial_scale_power").map_or(usual.initial, f64::exp2),
                dynamic: true,
                window: given("fp16.loss_scale_window").map_or(usual.window, |steps| steps as u64),
                hysteresis: given("fp16.hysteresis").map_or(usual.hysteresis, |steps| steps as u64),
                min: given("fp16.min_loss_scale").unwrap_or(usual.min),
            },
        };
        let origin = if keys.is_empty() { Origin::default_value() } else { Origin::File(keys.join(", ")) };
        log.note("loss-scale", scale, origin);
        scale
    }

    /// A run that goes on keeps its precision, also on another device, unless it was ever told one.
    pub fn compute_again(&mut self, earlier: &Raw, before: &Resolved) {
        let told = self.precision.or(earlier.precision).is_some() || earlier.deepspeed.is_some();
        if self.device.is_some() && !told && self.deepspeed.is_none() {
            self.precision = Some(before.precision);
        }
    }
}

/// The precision that a file asks for, and by which key. What it switches off is fp32, as in DeepSpeed, unless it leaves bf16
/// open.
fn precision_of(file: &DeepSpeed) -> Option<(Precision, &'static str)> {
    const KEYS: [(&str, Precision); 3] = [
        ("fp16.enabled", Precision::Fp16),
        ("bf16.enabled", Precision::Bf16),
        ("bfloat16.enabled", Precision::Bf16),
    ];
    let says = |key: &str, what: Setting<bool>| file.boolean(key) == Some(what);
    if let Some((key, precision)) = KEYS.into_iter().find(|(key, _)| says(key, Setting::Given(true))) {
        return Some((precision, key));
    }
    let open = KEYS[1..].iter().any(|(key, _)| says(key, Setting::Auto));
    let off = KEYS.into_iter().find(|(key, _)| says(key, Setting::Given(false)));
    off.filter(|_| !open).map(|(key, _)| (Precision::Fp32, key))
}
