//! Input and output of the compiler: a model's graphs, a program's plans.

use crate::check::PlanError;
use crate::graph::{Graph, Role, State, own_bytes};
use crate::op::{Op, StateId};
use crate::plan::{Key, Place, Plan, Step};
use crate::run::Which;
use crate::settings::Zero;

/// A model as it was built, with and without dropout. Both end in the values `loss`, `loss.stats` and `head` (logits).
#[derive(Clone)]
pub struct Model {
    /// Graph of training.
    pub train: Graph,
    /// Graph of evaluation.
    pub eval: Graph,
    /// Sizes that both were built for.
    pub key: Key,
}

/// Every plan of a run, over one table of states.
#[derive(Clone, Debug, Default)]
pub struct Program {
    /// Table of states that all plans share.
    pub states: Vec<State>,
    /// Forward and backward of a step's first micro-batch, which begins the sums of gradients and statistics.
    pub first: Plan,
    /// Plan of a micro-batch that adds to them. Empty where steps have a single micro-batch.
    pub micro: Plan,
    /// Plan of the last micro-batch of a step: under data parallelism, with the all-reduce of gradients. Where it is
    /// the only one, it begins the sums; else it adds to them.
    pub last: Plan,
    /// Norm, clipping and optimizer.
    pub update: Plan,
    /// Loss and logits of a batch, without gradients.
    pub eval: Plan,
    /// What ranks divide: the stage that was asked for, or stage 1 in the place of stage 2 where that takes less memory.
    pub zero: Zero,
}

impl Program {
    /// True if `update` leaves collectives under way when it ends, for the next plans to wait for.
    pub fn leaves_collectives(&self) -> bool {
        self.update.steps.iter().any(|step| step.left)
    }

    /// Checks every plan, and that steps wait for what earlier plans may have left where they touch the same bytes.
    pub fn check(&self) -> Result<(), PlanError> {
        self.plans().into_iter().try_for_each(Plan::check)?;
        for plan in self.plans() {
            let (touched, clocks) = (plan.touched(), plan.clocks());
            for before in self.plans() {
                let left = before.steps.iter().zip(before.touched()).filter(|(step, _)| step.left);
                for (left, bytes) in left {
                    let is_of = |state: &StateId| {
                        let values = left.outputs.iter().chain(&left.inputs);
                        values.into_iter().any(|value| before.values[*value].place == Place::State(*state))
                    };
                    let waits = |step: usize| plan.steps[step].after.iter().any(is_of);
                    let known = |step: usize| {
                        (0..plan.steps.len()).any(|other| {
                            waits(other) && (other == step || clocks.happens_before(other, step))
                        }) || waits(plan.launch_of(step).start)
                    };
                    let conflicts = |step: &usize| {
                        plan.steps[*step].lane != left.lane && touched[*step].conflicts(&bytes)
                    };
                    if let Some(step) = (0..plan.steps.len()).filter(conflicts).find(|step| !known(*step)) {
                        let Step { op, layer, .. } = &plan.steps[step];
                        let why = format!(
                            "touches what {} of {} may be working on still",
                            left.op.name(),
                            left.layer
                        );
                        return Err(PlanError::Step { step, op: op.name(), layer: layer.clone(), why });
                    }
                }
            }
        }
        Ok(())
    }

    /// Bytes of the one arena that all plans share.
    pub fn arena(&self) -> usize {
        self.plans().map(|p| p.arena).into_iter().max().unwrap_or(0)
    }

    /// All plans, in the order of [`Which::ALL`].
    pub fn plans(&self) -> [&Plan; 5] {
        [&self.first, &self.micro, &self.last, &self.update, &self.eval]
    }

    /// One of the plans.
    pub fn plan(&self, which: Which) -> &Plan {
        self.plans()[which as usize]
    }

    /// The plan of a micro-step that is this one of so many.
    pub fn micro_step(index: usize, count: usize) -> Which {
        match index {
            last if last + 1 == count => Which::Last,
            0 => Which::First,
            _ => Which::Micro,
        }
    }

    /// Checks whether training takes moments over a batch, which samples of weight 0 would falsify.
    pub fn normalises_batches(&self) -> bool {
        self.last.steps.iter().any(|step| step.op == Op::Moments)
    }

    /// Initial values of a state other than a parameter, if they are not zero: running variances of one, scales.
    pub fn first_values(&self, state: &State) -> Option<Vec<f64>> {
        let bears = |op: &Op| match op {
            Op::LossScale { hysteresis, .. } => Some(*hysteresis as f64),
            _ => None,
        };
        let (count, channels) = (state.ty.shape.count(), state.ty.shape.last());
        let ones = |ones: std::ops::Range<usize>| (0..count).map(|i| f64::from(ones.contains(&i))).collect();
        match state.role {
            Role::Running => Some(ones(channels..2 * channels)),
            Role::Scale => Some(ones(0..1)),
            Role::LossScale { initial } => {
                let borne = self.update.steps.iter().find_map(|step| bears(&step.op)).unwrap_or(1.0);
                Some([initial, 0.0, borne].into_iter().take(count).collect())
            }
            _ => None,
        }
    }

    /// Bytes of arena and states.
    pub fn bytes(&self) -> usize {
        self.arena() + self.state_bytes()
    }

    /// Bytes of the states' own memory.
    pub fn state_bytes(&self) -> usize {
        own_bytes(&self.states)
    }
}
