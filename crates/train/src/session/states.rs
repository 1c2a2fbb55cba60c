//! What outlives a step: weights, checkpoints, and what ranks begin with.

use super::{Session, shards};
use crate::error::TrainError;
use devices::device::planned;
use devices::{self, Real};
use formats::checkpoint::{Checkpoint, Progress};
use formats::locate::weights_file;
use formats::tensors::Outline;
use formats::weights;
use graph::{AVERAGE, Role, State, StateId};
use models::names::{Tensor, Weights};

impl<T: Real> Session<T> {
    /// Starts from the weights of `--init`, if there are any.
    pub(crate) fn load_init(&mut self) -> Result<(), TrainError> {
        // The other ranks get them from rank 0; they may not even have the file.
        if let Some(path) = self.run.init.as_ref().filter(|_| self.world.rank() == 0) {
            let weights = weights::load_for(&weights_file(path)?, &self.run.network, self.run.new_head)?;
            self.load_weights(&weights)?;
            self.init = Some(weights).filter(|_| self.is_divided());
        }
        Ok(())
    }

    /// Tells whether ranks divide states among them: then all of them take part where states are saved or collected.
    pub fn is_divided(&self) -> bool {
        let program = self.device.program();
        self.world.size() > 1 && self.lasting_ids().into_iter().any(|id| shards::is_divided(program, id))
    }

    /// Gives every rank the states of rank 0: the weights to begin with, or where a checkpoint was made.
    pub fn follow_first(&mut self) -> Result<(), TrainError> {
        if self.world.size() == 1 {
            return Ok(());
        }
        if self.is_divided() {
            self.give_init()?;
            shards::take_all(&self.world, &mut *self.device)?;
        }
        let program = self.device.program();
        let whole = self.lasting_ids().into_iter().filter(|id| !shards::is_divided(program, *id));
        for id in whole.collect::<Vec<_>>() {
            let call = self.world.name(&self.device.program().states[id.index()].name);
            let mut values = self.device.state(id)?.into_owned();
            self.world.broadcast(call, 0, &mut values)?;
            self.device.write_state(id, &values)?;
        }
        Ok(())
    }

    /// Gives every rank its part of the weights of `--init`, and of averages, which begin equal to them.
    fn give_init(&mut self) -> Result<(), TrainError> {
        let Some(weights) = self.init.take() else { return Ok(()) };
        let program = self.device.program();
        for (name, tensor) in &weights {
            let mut values = vec![T::ZERO; tensor.data.len()];
            devices::copy(&tensor.data, &mut values);
            for name in [name.clone(), format!("{name}{AVERAGE}")] {
                if let Some(id) = self.device.find_state(&name).filter(|id| shards::is_divided(program, *id))
                {
                    shards::give(&self.world, program, id, &values)?;
                }
            }
        }
        Ok(())
    }

    /// Sets a state on this rank; where ranks divide it, on all of them, which wait for that in [`follow_first`](Self::follow_first).
    fn set_for_all(&mut self, id: StateId, values: &[T]) -> Result<(), TrainError> {
        self.device.write_state(id, values)?;
        let program = self.device.program();
        if self.world.size() > 1 && shards::is_divided(program, id) {
            shards::give(&self.world, program, id, values)?;
        }
        Ok(())
    }

    /// The states that a checkpoint keeps.
    pub(crate) fn lasting_ids(&self) -> Vec<StateId> {
        let states = self.device.program().states.iter().enumerate();
        states.filter(|(_, state)| state.role.lasts()).map(|(index, _)| StateId(index as u32)).collect()
    }

    /// The parameters and running moments under their canonical names; with averages, those, since they are what is evaluated. Where
    /// ranks divide states all of them call this, and rank 0 gets the weights.
    pub fn weights(&self) -> Result<Weights, TrainError> {
        let holds = |state: &&State| state.is_parameter() || state.role == Role::Running;
        let values = |name: &str| -> Result<Option<Vec<f32>>, TrainError> {
            let Some(id) = self.device.find_state(name) else { return Ok(None) };
            let whole = shards::whole(&self.world, &*self.device, id)?;
            Ok(Some(whole.iter().map(|x| x.to_f64() as f32).collect()))
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

    /// Goes on where a checkpoint was made.
    pub fn restore(&mut self, checkpoint: Checkpoint) -> Result<Progress, TrainError> {
        let states: Vec<State> =
            self.device.program().states.iter().filter(|state| state.role.lasts()).cloned().collect();
        let expected: Vec<Outline<'_>> =
            states.iter().map(|s| Outline { name: &s.name, shape: &s.ty.shape.0 }).collect();
        self.ahead = None;
        checkpoint.restore(&expected, |name, values: &[T]| {
            let id = self.device.find_state(name);
            id.map_or(Ok(()), |id| self.set_for_all(id, values))
        })
    }
}
