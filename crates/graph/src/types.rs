//! Shapes and element types.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// Element type of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DType {
    /// 64-bit float.
    F64,
    /// 32-bit float.
    F32,
    /// 16-bit float with the range of f32.
    Bf16,
    /// IEEE half precision.
    F16,
    /// 8 bits, four of them exponent: see [`crate::fp8`].
    E4M3,
    /// 8 bits, five of them exponent.
    E5M2,
    /// 32-bit integer.
    I32,
    /// Byte.
    U8,
}

impl DType {
    /// Every type.
    pub const ALL: [DType; 8] =
        [DType::F64, DType::F32, DType::Bf16, DType::F16, DType::E4M3, DType::E5M2, DType::I32, DType::U8];

    /// Bytes of an element.
    pub fn bytes(self) -> usize {
        match self {
            DType::F64 => 8,
            DType::F32 | DType::I32 => 4,
            DType::Bf16 | DType::F16 => 2,
            DType::E4M3 | DType::E5M2 | DType::U8 => 1,
        }
    }

    /// True for floats of 16 bits.
    pub fn is_half(self) -> bool {
        matches!(self, DType::Bf16 | DType::F16)
    }

    /// True for floats of 8 bits, which mean nothing without a scale.
    pub fn is_fp8(self) -> bool {
        matches!(self, DType::E4M3 | DType::E5M2)
    }

    /// True for types that ops compute with directly.
    pub fn is_float(self) -> bool {
        matches!(self, DType::F64 | DType::F32) || self.is_half()
    }

    /// The name in plan texts.
    pub fn name(self) -> &'static str {
        match self {
            DType::F64 => "f64",
            DType::F32 => "f32",
            DType::Bf16 => "bf16",
            DType::F16 => "f16",
            DType::E4M3 => "e4m3",
            DType::E5M2 => "e5m2",
            DType::I32 => "i32",
            DType::U8 => "u8",
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Lengths of the axes, slowest first. A scalar has no axes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Shape(pub Vec<usize>);

impl Shape {
    /// No axes: one element.
    pub fn scalar() -> Self {
        Shape(Vec::new())
    }

    /// Elements.
    pub fn count(&self) -> usize {
        self.0.iter().product()
    }

    /// Axes.
    pub fn rank(&self) -> usize {
        self.0.len()
    }

    /// Length of the last axis; 1 for a scalar.
    pub fn last(&self) -> usize {
        self.0.last().copied().unwrap_or(1)
    }

    /// Number of rows of a row-wise op: all axes but the last.
    pub fn rows(&self) -> usize {
        self.0.split_last().map_or(1, |(_, rest)| rest.iter().product())
    }

    /// Exactly N axes over the same elements: leading ones are merged into the first, missing ones are 1.
    pub fn axes<const N: usize>(&self) -> [usize; N] {
        let mut axes = [1; N];
        for (place, length) in self.0.iter().rev().enumerate() {
            if let Some(axis) = axes.get_mut(N.saturating_sub(place + 1)) {
                *axis *= length;
            }
        }
        axes
    }

    /// The same with another last axis.
    pub fn with_last(&self, last: usize) -> Self {
        let mut axes = self.0.clone();
        match axes.last_mut() {
            Some(axis) => *axis = last,
            None => axes.push(last),
        }
        Shape(axes)
    }
}

impl<const N: usize> From<[usize; N]> for Shape {
    fn from(axes: [usize; N]) -> Self {
        Shape(axes.to_vec())
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[")?;
        for (i, axis) in self.0.iter().enumerate() {
            if i > 0 {
                f.write_str(",")?;
            }
            write!(f, "{axis}")?;
        }
        f.write_str("]")
    }
}

/// Type of a value: shape and element type.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Type {
    /// Element type.
    pub dtype: DType,
    /// Axes.
    pub shape: Shape,
}

impl Type {
    /// A type of a dtype and a shape.
    pub fn new(dtype: DType, shape: impl Into<Shape>) -> Self {
        Type { dtype, shape: shape.into() }
    }

    /// Bytes of all elements.
    pub fn bytes(&self) -> usize {
        self.shape.count() * self.dtype.bytes()
    }
}

impl fmt::Display for Type {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.dtype, self.shape)
    }
}

/// A text that is no type.
#[derive(Debug, thiserror::Error, PartialEq)]
#[error("'{0}' is not a type such as f32[64,192]")]
pub struct BadType(String);

impl FromStr for Type {
    type Err = BadType;

    fn from_str(text: &str) -> Result<Self, BadType> {
        let bad = || BadType(text.to_string());
        let (dtype, rest) = text.split_once('[').ok_or_else(bad)?;
        let axes = rest.strip_suffix(']').ok_or_else(bad)?;
        let dtype = DType::ALL.into_iter().find(|d| d.name() == dtype).ok_or_else(bad)?;
        let parse = |axis: &str| axis.trim().parse::<usize>().map_err(|_| bad());
        let shape = match axes.trim() {
            "" => Vec::new(),
            list => list.split(',').map(parse).collect::<Result<_, _>>()?,
        };
        Ok(Type { dtype, shape: Shape(shape) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_print_and_parse() {
        for text in ["f32[64,65,192]", "bf16[]", "i32[8]", "e4m3[2,3]"] {
            assert_eq!(text.parse::<Type>().unwrap().to_string(), text);
        }
        for text in ["f32", "q8[1]", "f32[1,]", "f32[-1]"] {
            assert!(text.parse::<Type>().is_err(), "{text}");
        }
    }

    #[test]
    fn rows_and_last_cover_the_shape() {
        let shape = Shape::from([4, 5, 6]);
        assert_eq!((shape.rows(), shape.last(), shape.count()), (20, 6, 120));
        assert_eq!((Shape::scalar().rows(), Shape::scalar().last(), Shape::scalar().count()), (1, 1, 1));
    }

    #[test]
    fn axes_are_merged_or_added_in_front() {
        let shape = Shape::from([4, 5, 6]);
        assert_eq!(shape.axes::<3>(), [4, 5, 6]);
        assert_eq!(shape.axes::<2>(), [20, 6]);
        assert_eq!(shape.axes::<5>(), [1, 1, 4, 5, 6]);
        assert_eq!(Shape::scalar().axes::<2>(), [1, 1]);
    }
}
