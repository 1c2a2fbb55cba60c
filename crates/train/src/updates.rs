//! How far an update moves the weights of each layer: ‖ΔW‖/‖W‖, on sampled steps. About 1e-3 is healthy; much more, and training
//! may diverge; much less, and a layer hardly learns.
//!
//! The weights are copied before the step and compared with those after it: no optimizer needs to know. A sampled step costs a copy of the
//! parameters and two passes over them, and steps before it leave the device first. Where ranks divide parameters, each does so with what it
//! holds, and they add up.

use crate::error::TrainError;
use crate::session::Session;
use comm::Reduction;
use devices::Real;
use graph::{Held, StateId};
use records::LayerValues;

/// The weights of each layer before a step.
pub(crate) struct Before<T> {
    pub step: u64,
    layers: Vec<(String, StateId, Vec<T>)>,
}

impl<T: Real> Session<T> {
    /// Copies the weights of each layer: parameters of two axes or more. Biases and norms begin at 0 or 1 and say nothing here.
    pub(crate) fn before_update(&self, step: u64) -> Result<Before<T>, TrainError> {
        let states = self.device().program().states.iter().enumerate();
        let weights = states.filter(|(_, state)| state.is_parameter() && state.ty.shape.0.len() > 1);
        let copy = |(index, state): (usize, &graph::State)| {
            let id = StateId(index as u32);
            let layer = state.name.strip_suffix(".weight").unwrap_or(&state.name);
            Ok((layer.to_string(), id, self.device().state(id)?.into_owned()))
        };
        Ok(Before { step, layers: weights.map(copy).collect::<Result<_, TrainError>>()? })
    }

    /// The ratio of each layer, after the step. A layer whose weights were all 0 has none.
    pub(crate) fn update_ratios(&self, before: Before<T>) -> Result<LayerValues, TrainError> {
        let states = &self.device().program().states;
        let is_part = |id: StateId| matches!(states[id.index()].held, Held::Of { .. });
        let divided = before.layers.iter().any(|(_, id, _)| is_part(*id));
        let (mesh, rank) = (self.device().program().last.mesh, self.world().rank());
        // Of groups that hold the same the first adds its parts, and of ranks that hold all of a tensor the first.
        let first_group = mesh.place(rank, mesh.shards()).0 == 0;
        let mut sums = vec![];
        for (_, id, old) in &before.layers {
            let new = self.device().state(*id)?;
            let counts = !divided || if is_part(*id) { first_group } else { rank == 0 };
            sums.extend(if counts { squares(old, &new) } else { [0.0; 2] });
        }
        if divided {
            let world = self.world();
            world.all_reduce(world.name("update ratios"), Reduction::Sum, &mut sums)?;
        }
        let layers = before.layers.into_iter().map(|(layer, ..)| layer);
        let ratios = layers.zip(sums.as_chunks().0).filter_map(|(layer, sums)| Some((layer, ratio(*sums)?)));
        Ok(LayerValues(ratios.collect()))
    }
}

/// ‖new - old‖² and ‖old‖², summed in f64.
fn squares<T: Real>(old: &[T], new: &[T]) -> [f64; 2] {
    let (mut moved, mut all) = (0.0, 0.0);
    for (old, new) in old.iter().zip(new) {
        let (old, new) = (old.to_f64(), new.to_f64());
        moved += (new - old) * (new - old);
        all += old * old;
    }
    [moved, all]
}

/// ‖new - old‖/‖old‖ of a layer, from the two sums over it.
fn ratio([moved, all]: [f64; 2]) -> Option<f64> {
    (all > 0.0).then(|| (moved / all).sqrt())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ratio_by_hand() {
        assert_eq!(ratio(squares(&[3.0f64, 4.0], &[3.0, 4.5])), Some(0.1));
        assert_eq!(ratio(squares(&[3.0f32, 4.0], &[3.0, 4.0])), Some(0.0));
        assert_eq!(ratio(squares(&[0.0f32, 0.0], &[1.0, 0.0])), None, "from nothing");
        assert!(ratio(squares(&[1.0f32], &[f32::NAN])).unwrap().is_nan());
    }
}
