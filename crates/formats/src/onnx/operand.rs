//! Operands of ops, and the nodes that many ops are made of.

use super::writer::{Attribute, Writer};

/// Operand of an op.
pub struct Operand<'a> {
    /// Name in the ONNX graph; of a parameter, its own.
    pub name: String,
    pub shape: &'a [usize],
    /// Values of a parameter.
    pub values: Option<&'a [f32]>,
}

impl Operand<'_> {
    /// The operand as it lies; a parameter becomes a constant when it is first used.
    pub fn get(&self, w: &mut Writer) -> String {
        match self.values {
            Some(values) => w.floats(&self.name, self.shape, || values.to_vec()),
            None => self.name.clone(),
        }
    }

    /// A weight (O,..) as a matrix (I,O), transposed: what MatMul takes on its right.
    pub fn transposed(&self, w: &mut Writer) -> Option<String> {
        let (values, &outer) = (self.values?, self.shape.first()?);
        let inner = values.len() / outer.max(1);
        let turned = || (0..inner).flat_map(|i| (0..outer).map(move |o| values[o * inner + i])).collect();
        Some(w.floats(&format!("{}.T", self.name), &[inner, outer], turned))
    }
}

pub fn ints(values: impl Into<Vec<i64>>) -> Attribute {
    Attribute::Ints(values.into())
}

/// A reshape of all axes but the batch, which is the first.
pub fn reshape(w: &mut Writer, x: &str, sides: &[usize]) -> String {
    // 0 stands for the axis as it is.
    let shape: Vec<i64> = std::iter::once(0).chain(sides.iter().map(|side| *side as i64)).collect();
    let shape = w.row(&shape);
    w.node("Reshape", &[x, &shape], vec![])
}

pub fn transpose(w: &mut Writer, x: &str, order: &[i64]) -> String {
    w.node("Transpose", &[x], vec![("perm", ints(order))])
}

pub fn softmax(w: &mut Writer, x: &str) -> String {
    w.node("Softmax", &[x], vec![("axis", Attribute::Int(-1))])
}
