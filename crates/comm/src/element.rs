//! What can travel.

use half::{bf16, f16};

/// The type of the elements of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    F32,
    F64,
    Bf16,
    F16,
    U8,
    I32,
    I64,
    U64,
}

impl Kind {
    pub fn bytes(self) -> usize {
        match self {
            Kind::U8 => 1,
            Kind::Bf16 | Kind::F16 => 2,
            Kind::F32 | Kind::I32 => 4,
            Kind::F64 | Kind::I64 | Kind::U64 => 8,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Kind::F32 => "f32",
            Kind::F64 => "f64",
            Kind::Bf16 => "bf16",
            Kind::F16 => "f16",
            Kind::U8 => "u8",
            Kind::I32 => "i32",
            Kind::I64 => "i64",
            Kind::U64 => "u64",
        }
    }
}

/// How the ranks' elements become one. A mean of whole numbers is rounded towards zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reduction {
    Sum,
    Mean,
    Max,
}

/// An element type.
///
/// # Safety
/// `KIND` must be the type's own: engines work on the bytes.
pub unsafe trait Element: Copy + Send + Sync + 'static {
    const KIND: Kind;
}

macro_rules! elements {
    ($($type:ty => $kind:ident),* $(,)?) => {
        $(
            // SAFETY: the kind is that of the type.
            unsafe impl Element for $type {
                const KIND: Kind = Kind::$kind;
            }
        )*
    };
}

elements!(f32 => F32, f64 => F64, bf16 => Bf16, f16 => F16, u8 => U8, i32 => I32, i64 => I64, u64 => U64);
