//! Conversion of a plan's collectives to calls of a communicator. Crate `graph` doesn't know communicators and `comm` doesn't know
//! plans; executors use both.

mod groups;

pub use groups::PlanCommunicators;

use comm::{Collective, ElementType};
use graph::flat::{UNIT, Views};
use graph::op::Reduction;
use graph::{DType, Op};

/// Collective of an op, if it is one.
pub fn collective(op: &Op) -> Option<Collective> {
    match op {
        Op::AllReduce { reduction, .. } => Some(Collective::AllReduce(reduced(*reduction))),
        Op::ReduceScatter { reduction, .. } => Some(Collective::ReduceScatter(reduced(*reduction))),
        Op::AllGather { .. } => Some(Collective::AllGather),
        _ => None,
    }
}

fn reduced(reduction: Reduction) -> comm::Reduction {
    match reduction {
        Reduction::Sum => comm::Reduction::Sum,
        Reduction::Mean => comm::Reduction::Mean,
        Reduction::Max => comm::Reduction::Max,
    }
}

/// Element type of a dtype, if collectives support it.
pub fn element_type(dtype: DType) -> Option<ElementType> {
    match dtype {
        DType::F64 => Some(ElementType::F64),
        DType::F32 => Some(ElementType::F32),
        DType::Bf16 => Some(ElementType::Bf16),
        DType::F16 => Some(ElementType::F16),
        DType::E4M3 | DType::E5M2 | DType::I32 | DType::U8 => None,
    }
}

/// Contiguous memory of operands that are communicated together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    pub address: u64,
    /// Number of elements, padding between operands included.
    pub len: usize,
}

/// Memory range of operands, each (address, elements), that follow each other with nothing between but padding. An error is the index
/// of the first that is not followed by the next. There is at least one operand, and an element has `size` bytes.
pub fn range(operands: &[(u64, usize)], size: usize) -> Result<Range, usize> {
    let end = |(address, elements): (u64, usize)| address + (elements * size) as u64;
    // Tensors of a flat buffer begin at multiples of this.
    let padding = (UNIT * size) as u64;
    let follows = |pair: &[(u64, usize)]| (end(pair[0])..end(pair[0]) + padding).contains(&pair[1].0);
    if let Some(at) = operands.windows(2).position(|pair| !follows(pair)) {
        return Err(at);
    }
    let (first, last) = (operands[0], operands[operands.len() - 1]);
    Ok(Range { address: first.0, len: (end(last) - first.0) as usize / size })
}

/// Memory range of a message whose tensors, each (address, elements), lie in it. An error is the index of the first whose next is not
/// where the message has it.
pub fn message(operands: &[(u64, usize)], views: &Views, size: usize) -> Result<Range, usize> {
    let start = |number: usize| (views.starts[number] * size) as u64;
    let base = operands[0].0.wrapping_sub(start(0));
    let lies = |number: usize| operands[number].0 == base.wrapping_add(start(number));
    match (1..operands.len()).find(|number| !lies(*number)) {
        Some(number) => Err(number - 1),
        None => Ok(Range { address: base, len: views.elements }),
    }
}

/// Memory ranges that a collective sends and receives.
pub fn ranges(
    op: &Op,
    inputs: &[(u64, usize)],
    outputs: &[(u64, usize)],
    size: usize,
) -> Result<(Range, Range), Apart> {
    let side = |operands: &[(u64, usize)], views: Option<&Views>| match views {
        Some(views) => message(operands, views, size),
        None => range(operands, size),
    };
    let gathers = matches!(op, Op::AllGather { .. });
    let send = side(inputs, op.views().filter(|_| !gathers)).map_err(Apart::Inputs)?;
    let receive = side(outputs, op.views().filter(|_| gathers)).map_err(Apart::Outputs)?;
    Ok((send, receive))
}

/// Operands, or results, that are not one message: the index of the first that is not followed by the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Apart {
    Inputs(usize),
    Outputs(usize),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adjacent_operands_are_one_range() {
        let unit = 4 * UNIT as u64;
        let (first, second) = ((1024, 3), (1024 + unit, UNIT));
        let both = range(&[first, second, (1024 + 2 * unit, 2)], 4).unwrap();
        assert_eq!(both, Range { address: 1024, len: 2 * UNIT + 2 });
        assert_eq!(range(&[second], 2).unwrap(), Range { address: second.0, len: UNIT });
        // The third doesn't follow the second, nor the first the second.
        assert_eq!(range(&[first, second, (1024 + 3 * unit, 2)], 4), Err(1));
        assert_eq!(range(&[second, first], 4), Err(0));
    }

    #[test]
    fn tensors_lie_in_their_message() {
        let shapes = vec![graph::Shape::from([10]), graph::Shape::from([3])];
        let views = Views { elements: 4096, starts: vec![64, 2048], shapes };
        let at = |element: u64| 1 << 20 | (4 * element);
        let both = message(&[(at(64), 10), (at(2048), 3)], &views, 4).unwrap();
        assert_eq!(both, Range { address: at(0), len: 4096 });
        assert_eq!(message(&[(at(64), 10), (at(2049), 3)], &views, 4), Err(0));
    }

    #[test]
    fn element_types_have_the_size_of_their_dtype() {
        for dtype in DType::ALL {
            if let Some(kind) = element_type(dtype) {
                assert_eq!(kind.bytes(), dtype.bytes(), "{dtype}");
            }
        }
        assert!(element_type(DType::I32).is_none() && collective(&Op::Accumulate).is_none());
        let op = Op::AllReduce { reduction: Reduction::Max, group: graph::Mesh::of_data(2).world() };
        assert_eq!(collective(&op), Some(Collective::AllReduce(comm::Reduction::Max)));
    }
}
