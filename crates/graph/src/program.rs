//! What is compiled, and what comes of it.

use crate::graph::{Graph, Role, State};
use crate::op::Op;
use crate::plan::{Key, Plan};

/// A model as it was built, with and without dropout. Both end in the values `loss`, `loss.stats` and `head` (logits).
pub struct Model {
    pub train: Graph,
    pub eval: Graph,
    pub key: Key,
}

/// Every plan of a run, over one table of states.
#[derive(Clone, Debug)]
pub struct Program {
    pub states: Vec<State>,
    /// Forward and backward of a micro-batch whose gradients only accumulate.
    pub micro: Plan,
    /// The last micro-batch of a step: under data parallelism, with the gradient exchange.
    pub last: Plan,
    /// Norm, clipping and optimizer.
    pub update: Plan,
    /// Loss and logits of a batch, without gradients.
    pub eval: Plan,
}

impl Program {
    /// Bytes of the one arena that all plans share.
    pub fn arena(&self) -> usize {
        self.plans().map(|p| p.arena).into_iter().max().unwrap_or(0)
    }

    /// All plans: micro, last, update, eval.
    pub fn plans(&self) -> [&Plan; 4] {
        [&self.micro, &self.last, &self.update, &self.eval]
    }

    /// Whether training takes moments over a batch, which samples of weight 0 would falsify.
    pub fn normalises_batches(&self) -> bool {
        self.last.steps.iter().any(|step| step.op == Op::Moments)
    }

    /// What a state holds first, if that is not zero and not drawn as parameters are: running variances of one, scales.
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

    /// Whether plans can add to what earlier micro-steps left: not where it lies in the arena.
    pub fn accumulates(&self) -> bool {
        self.states.iter().all(|state| state.arena.is_none())
    }

    /// Bytes of the states that don't lie in the arena.
    pub fn state_bytes(&self) -> usize {
        self.states.iter().filter(|s| s.arena.is_none()).map(|s| s.ty.bytes()).sum()
    }
}
