//! Helpers of the tests of `steps/`.

use crate::action::{Action, Address, Facts, Launch, Operand, StepContext};
use crate::error::CudaError;
use graph::{Op, Type};

/// Values such as "bf16[4,8]", 1 MiB apart, from an address on.
pub fn operands(from: Address, types: &[&str]) -> Vec<Operand> {
    let of = |(i, text): (usize, &&str)| {
        let Type { dtype, shape } = text.parse().unwrap();
        Operand { address: from + ((i as Address) << 20), dtype, shape }
    };
    types.iter().enumerate().map(of).collect()
}

pub const SCRATCH: Address = 7 << 32;
pub const PARTIAL: Address = 6 << 32;

/// The actions of a step whose inputs start at 1 << 32 and outputs at 2 << 32.
pub fn step(op: Op, inputs: &[&str], outputs: &[&str]) -> Result<Vec<Action>, CudaError> {
    let (inputs, outputs) = (operands(1 << 32, inputs), operands(2 << 32, outputs));
    step_on(op, &inputs, &outputs)
}

pub fn step_on(op: Op, inputs: &[Operand], outputs: &[Operand]) -> Result<Vec<Action>, CudaError> {
    let facts = Facts::h200();
    let (layer, header, tf32) = ("blocks.0", 9 << 32, false);
    let cx = StepContext {
        op: &op,
        layer,
        inputs,
        outputs,
        scratch: SCRATCH,
        parts: PARTIAL,
        header,
        tf32,
        facts: &facts,
    };
    super::actions(&cx)
}

pub fn launches(actions: &[Action]) -> Vec<&Launch> {
    let mut launches = Vec::new();
    for action in actions {
        match action {
            Action::Launch(launch) => launches.push(launch),
            Action::Attention(attention) => launches.extend(&attention.own),
            _ => {}
        }
    }
    launches
}

pub fn names(actions: &[Action]) -> Vec<&str> {
    launches(actions).iter().map(|launch| launch.kernel.name.as_str()).collect()
}

/// A GPU of a compute capability, with so much shared memory of a block.
pub fn facts(capability: (u32, u32), shared: u32) -> Facts {
    Facts { name: "test".into(), capability, processors: 100, shared_per_block: shared }
}

/// Every architecture that is compiled for.
pub fn all_facts() -> Vec<Facts> {
    vec![
        facts((7, 5), 65_536),
        facts((8, 0), 166_912),
        facts((8, 6), 101_376),
        facts((8, 9), 101_376),
        Facts::h200(),
        facts((10, 0), 232_448),
        facts((12, 0), 101_376),
    ]
}
