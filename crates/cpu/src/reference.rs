//! One step of a plan by itself: what it gives for operands that anyone has, each result rounded to the type that the plan stores
//! it in. Other executors are compared with this step by step, where whole plans would drift apart.

use crate::error::CpuError;
use crate::executor::{Executor, Options, Which};
use crate::kernels::Float;
use graph::ALIGN;
use graph::plan::{Place, PlanValue, Step};
use graph::{DType, Header, Op, Plan, Program};

/// The results of a step of a plan for these operands, computed in `T`. An `assign` gives what it is given.
pub fn step<T: Float>(
    plan: &Plan,
    index: usize,
    operands: &[Vec<f64>],
    header: &Header,
) -> Result<Vec<Vec<f64>>, CpuError> {
    if let Op::Assign { .. } = plan.steps[index].op {
        return Ok(operands.to_vec());
    }
    let program = alone(plan, index);
    let mut executor = Executor::<T>::new(program, Options::alone(1, 0))?;
    for (number, values) in operands.iter().enumerate() {
        let name = operand(number);
        if let Some(ints) = executor.ints(Which::Eval, &name) {
            ints.iter_mut().zip(values).for_each(|(int, value)| *int = *value as i32);
        } else if let Some(doubles) = executor.doubles(Which::Eval, &name) {
            doubles.copy_from_slice(values);
        } else {
            let values: Vec<T> = values.iter().map(|value| T::from_f64(*value)).collect();
            executor.write_input(Which::Eval, &name, &values);
        }
    }
    executor.run(Which::Eval, header)?;
    let outputs = executor.program().eval.outputs.clone();
    let numbers = |value: usize| executor.numbers_of(&executor.program().eval.values[value]);
    Ok(outputs.into_iter().map(numbers).collect())
}

fn operand(number: usize) -> String {
    format!("operand {number}")
}

/// A program whose evaluation is one step, its operands and results side by side.
fn alone(plan: &Plan, index: usize) -> Program {
    let step = &plan.steps[index];
    let mut arena = 0;
    let mut place = |name: String, value: usize| {
        let ty = plan.values[value].ty.clone();
        let offset = arena;
        arena += ty.bytes().next_multiple_of(ALIGN);
        PlanValue { name, ty, place: Place::Arena(offset) }
    };
    let mut values: Vec<PlanValue> =
        step.inputs.iter().enumerate().map(|(i, value)| place(operand(i), *value)).collect();
    values.extend(step.outputs.iter().enumerate().map(|(i, value)| place(format!("result {i}"), *value)));
    let (inputs, outputs): (Vec<usize>, Vec<usize>) =
        ((0..step.inputs.len()).collect(), (step.inputs.len()..values.len()).collect());
    let (waits, scratch) = (vec![], None);
    let (left, after) = (false, vec![]);
    let ends = (inputs.clone(), outputs.clone());
    let step = Step { inputs: ends.0, outputs: ends.1, waits, left, after, scratch, ..step.clone() };
    let eval = Plan { key: plan.key, arena, values, inputs, outputs, steps: vec![step], ..Plan::default() };
    Program { eval, ..Program::default() }
}

/// Operands and results of a step, as numbers; of an `assign`, what it wrote.
#[derive(Clone, Debug, PartialEq)]
pub struct Shown {
    /// Number of the step in the plan.
    pub step: usize,
    pub operands: Vec<Vec<f64>>,
    pub results: Vec<Vec<f64>>,
}

impl<T: Float> Executor<T> {
    /// Runs a plan like [`run`](Executor::run), one step at a time, and shows each with its operands and results.
    pub fn run_shown(
        &mut self,
        which: Which,
        header: &Header,
        show: &mut dyn FnMut(&Plan, Shown),
    ) -> Result<(), CpuError> {
        self.begin(which)?;
        for step in 0..self.plan(which).steps.len() {
            let operands = self.all_numbers(which, |step| &step.inputs, step);
            self.run_step(which, step, header)?;
            let results = match self.plan(which).steps[step].op {
                Op::Assign { .. } => operands.clone(),
                _ => self.all_numbers(which, |step| &step.outputs, step),
            };
            show(self.plan(which), Shown { step, operands, results });
        }
        Ok(())
    }

    fn all_numbers(&self, which: Which, list: impl Fn(&Step) -> &Vec<usize>, step: usize) -> Vec<Vec<f64>> {
        let plan = self.plan(which);
        let numbers = |value: &usize| self.numbers_of(&plan.values[*value]);
        list(&plan.steps[step]).iter().map(numbers).collect()
    }

    fn numbers_of(&self, value: &PlanValue) -> Vec<f64> {
        match value.ty.dtype {
            DType::I32 => self.whole_numbers(value).iter().map(|x| f64::from(*x)).collect(),
            DType::F64 => self.sums(value).to_vec(),
            _ => self.floats(value).map_or_else(Vec::new, |x| x.iter().map(|x| x.to_f64()).collect()),
        }
    }
}
