//! The communicators of the groups that plans name.

use comm::{CommError, Communicator};
use graph::{Group, Plan};

/// A rank's communicators, one for each kind of group that its plans name. They share the world's queue.
#[derive(Clone)]
pub struct Groups {
    world: Communicator,
    parts: Vec<(Group, Communicator)>,
}

impl Groups {
    /// Without a group but that of all.
    pub fn new(world: Communicator) -> Self {
        Groups { world, parts: vec![] }
    }

    /// All ranks.
    pub fn world(&self) -> &Communicator {
        &self.world
    }

    /// Makes the groups that plans name, if they are for as many ranks as there are. All ranks do so at the same time, with the
    /// same groups. Returns those that are new.
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
                self.parts.push((group, self.world.split_in_order(colour, key)?));
            }
        }
        Ok(self.parts[known..].iter().map(|(_, part)| part.clone()).collect())
    }

    /// Who a group of this kind is made of, for this rank.
    pub fn get(&self, group: Group) -> Option<&Communicator> {
        if group.ranks() == self.world.size() {
            return Some(&self.world);
        }
        self.parts.iter().find(|(known, _)| *known == group).map(|(_, part)| part)
    }
}
