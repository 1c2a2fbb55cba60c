//! What outlives a step: weights, checkpoints, and what ranks begin with.

use super::Session;
use crate::error::TrainError;
use devices::device::planned;
use devices::{self, Real};
use formats::checkpoint::{Checkpoint, Checkpoints, Progress};
use formats::locate::weights_file;
use formats::tensors::Outline;
use formats::weights;
use graph::{AVERAGE, Role, State, StateId};
use models::names::{Tensor, Weights};
use std::path::PathBuf;

impl<T: Real> Session<T> {
    /// Starts from the weights of `--init`, if there are any.
    pub(crate) fn load_init(&mut self) -> Result<(), TrainError> {
        // The other ranks get them from rank 0; they may not even have the file.
        if let Some(path) = self.run.init.as_ref().filter(|_| self.world.rank() == 0) {
            let weights = weights::load_for(&weights_file(path)?, &self.run.network, self.run.new_head)?;
            self.load_weights(&weights)?;
        }
        Ok(())
    }

    /// Gives every rank the states of rank 0: the weights to begin with, or where a checkpoint was made.
    pub fn follow_first(&mut self) -> Result<(), TrainError> {
        if self.world.size() == 1 {
            return Ok(());
        }
        for id in self.lasting_ids() {
            let call = self.world.name(&self.device.program().states[id.index()].name);
            let mut values = self.device.state(id)?.into_owned();
            self.world.broadcast(call, 0, &mut values)?;
            self.device.write_state(id, &values)?;
        }
        Ok(())
    }

    /// The states that a checkpoint keeps.
    fn lasting_ids(&self) -> Vec<StateId> {
        let states = self.device.program().states.iter().enumerate();
        states.filter(|(_, state)| state.role.lasts()).map(|(index, _)| StateId(index as u32)).collect()
    }

    /// The parameters and running moments under their canonical names; with averages, those, since they are what is evaluated.
    pub fn weights(&self) -> Result<Weights, TrainError> {
        let holds = |state: &&State| state.is_parameter() || state.role == Role::Running;
        let values = |name: &str| -> Result<Option<Vec<f32>>, TrainError> {
            let Some(id) = self.device.find_state(name) else { return Ok(None) };
            Ok(Some(self.device.state(id)?.iter().map(|x| x.to_f64() as f32).collect()))
        };
        let tensor = |state: &State| {
            let own = planned(values(&state.name)?);
            let data = match values(&format!("{}{AVERAGE}", state.name))? {
                Some(average) if state.role == Role::Running => weights::with_count_of(average, &own),
                Some(average) => average,
                None => own,
            };
            Ok((state.name.clone(), Tensor { shape: state.ty.shape.0.clone(), data }))
        };
        self.device.program().states.iter().filter(holds).map(tensor).collect()
    }

    /// Sets the parameters that `weights` has; they were checked against this model when they were read.
    pub fn load_weights(&mut self, weights: &Weights) -> Result<(), TrainError> {
        let mut values = Vec::new();
        for (name, tensor) in weights {
            if let Some(id) = self.device.find_state(name) {
                values.resize(tensor.data.len(), T::ZERO);
                devices::copy(&tensor.data, &mut values);
                self.device.write_state(id, &values)?;
            }
        }
        Ok(self.device.reset_averages()?)
    }

    /// Writes a checkpoint, state by state: none is in flight.
    pub fn save(
        &self,
        checkpoints: &Checkpoints,
        progress: &Progress,
        config: &str,
        best: bool,
    ) -> Result<PathBuf, TrainError> {
        let (ids, states) = (self.lasting_ids(), &self.device.program().states);
        let outline = |id: &StateId| {
            let state = &states[id.index()];
            Outline { name: &state.name, shape: &state.ty.shape.0 }
        };
        let outlines: Vec<Outline<'_>> = ids.iter().map(outline).collect();
        let values = |index: usize| self.device.state(ids[index]);
        Ok(checkpoints.save(&outlines, values, progress, config, best)?)
    }

    /// Goes on where a checkpoint was made.
    pub fn restore(&mut self, checkpoint: Checkpoint) -> Result<Progress, TrainError> {
        let states: Vec<State> =
            self.device.program().states.iter().filter(|state| state.role.lasts()).cloned().collect();
        let expected: Vec<Outline<'_>> =
            states.iter().map(|s| Outline { name: &s.name, shape: &s.ty.shape.0 }).collect();
        self.ahead = None;
        checkpoint.restore(&expected, |name, values: &[T]| {
            let id = self.device.find_state(name);
            Ok(id.map_or(Ok(()), |id| self.device.write_state(id, values))?)
        })
    }
}
