//! Element types and reductions of collectives.

use half::{bf16, f16};

/// Type of the elements of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ElementType {
    F32,
    F64,
    Bf16,
    F16,
    U8,
    I32,
    I64,
    U64,
}

impl ElementType {
    pub fn bytes(self) -> usize {
        match self {
            ElementType::U8 => 1,
            ElementType::Bf16 | ElementType::F16 => 2,
            ElementType::F32 | ElementType::I32 => 4,
            ElementType::F64 | ElementType::I64 | ElementType::U64 => 8,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            ElementType::F32 => "f32",
            ElementType::F64 => "f64",
            ElementType::Bf16 => "bf16",
            ElementType::F16 => "f16",
            ElementType::U8 => "u8",
            ElementType::I32 => "i32",
            ElementType::I64 => "i64",
            ElementType::U64 => "u64",
        }
    }
}

/// Reduction over the ranks' elements. A mean of integers is rounded towards zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reduction {
    Sum,
    Mean,
    Max,
}

/// A Rust type that collectives can transfer.
///
/// # Safety
/// `TYPE` must match the type: engines work on the bytes.
pub unsafe trait Element: Copy + Send + Sync + 'static {
    const TYPE: ElementType;
}

macro_rules! elements {
    ($($type:ty => $kind:ident),* $(,)?) => {
        $(
            // SAFETY: the kind is that of the type.
            unsafe impl Element for $type {
                const TYPE: ElementType = ElementType::$kind;
            }
        )*
    };
}

elements!(f32 => F32, f64 => F64, bf16 => Bf16, f16 => F16, u8 => U8, i32 => I32, i64 => I64, u64 => U64);
