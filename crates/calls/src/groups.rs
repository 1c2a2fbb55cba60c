//! Communicators of the groups that plans name.

use comm::{CommError, Communicator};
use graph::{Group, Plan};

/// A rank's communicators, one for each group that its plans name. They share the world's queue.
#[derive(Clone)]
pub struct PlanCommunicators {
    world: Communicator,
    parts: Vec<(Group, Communicator)>,
}

impl PlanCommunicators {
    /// Starts with the group of all ranks only.
    pub fn new(world: Communicator) -> Self {
        PlanCommunicators { world, parts: vec![] }
    }

    /// Communicator of all ranks.
    pub fn world(&self) -> &Communicator {
        &self.world
    }

    /// Makes communicators for the groups that plans name, if the plans are for this world size. All ranks call it at the same time,
    /// with the same groups. Returns the new ones.
    pub fn prepare<'a>(
        &mut self,
        plans: impl IntoIterator<Item = &'a Plan>,
    ) -> Result<Vec<Communicator>, CommError> {
        let known = self.parts.len();
        let fitting = plans.into_iter().filter(|plan| plan.mesh.ranks() == self.world.size());
        let named: Vec<_> =
            fitting.flat_map(|plan| plan.collectives().map(|(_, g)| (plan.mesh, g))).collect();
        for (mesh, group) in named {
            if self.get(group).is_none() {
                let (colour, key) = mesh.place(self.world.rank(), group);
                self.parts.push((group, self.world.split_sharing_queue(colour, key)?));
            }
        }
        Ok(self.parts[known..].iter().map(|(_, part)| part.clone()).collect())
    }

    /// Communicator of a group, for this rank.
    pub fn get(&self, group: Group) -> Option<&Communicator> {
        if group.ranks() == self.world.size() {
            return Some(&self.world);
        }
        self.parts.iter().find(|(known, _)| *known == group).map(|(_, part)| part)
    }
}
