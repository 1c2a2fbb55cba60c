//! Division of states among ranks, or among groups of them.

use crate::Raw;
use crate::deepspeed::{DeepSpeed, Setting};
use crate::error::ConfigError;
use crate::origin::{Log, Origin};
use crate::resolved::Resolved;
use crate::settings::Plain;
use crate::shard_group::ShardGroup;
use graph::{Mesh, Zero};
use text::many;

const FLAG: &str = "shard-group";

/// Key of a DeepSpeed file (MiCS), which is for stage 3; -1 switches it off.
const SIZE: &str = "zero_optimization.mics_shard_size";

impl Raw {
    /// The group that ranks divide states in, checked as far as the number of ranks tells.
    pub(crate) fn shard_group(
        &self,
        plain: &Plain,
        world: usize,
        log: &mut Log,
    ) -> Result<Option<ShardGroup>, ConfigError> {
        let of_file = self.deepspeed.as_ref().and_then(|file| mics(file, plain.zero, world));
        let (group, origin) = match (self.shard_group, of_file) {
            (Some(group), _) => (group, Origin::Flag),
            (None, Some(group)) => (group, Origin::File(SIZE.to_string())),
            (None, None) => return Ok(None),
        };
        let refused = |why: String| Err(ConfigError::setting(FLAG, group, why));
        // Who says --zero 0 knows that; a study of all stages does.
        if plain.zero == Zero::Stage0 && self.zero.is_none() {
            return refused("ranks divide nothing without --zero 1, 2 or 3".to_string());
        }
        if let ShardGroup::Ranks(ranks) = group {
            if ranks < 2 {
                return refused("a group that divides states has at least 2 ranks".to_string());
            }
            // A command line is the same for any number of ranks.
            if world > 1 && plain.zero > Zero::Stage0 && !world.is_multiple_of(ranks) {
                let all = many(world, "rank");
                return refused(format!("{all} can't be divided into groups of {ranks}"));
            }
        }
        log.note(FLAG, group, origin);
        Ok(Some(group))
    }
}

/// The group that a DeepSpeed file asks for.
fn mics(file: &DeepSpeed, stage: Zero, world: usize) -> Option<ShardGroup> {
    match file.number(SIZE)? {
        Setting::Given(ranks) if ranks >= 1.0 && stage == Zero::Stage3 && world > 1 => {
            Some(ShardGroup::Ranks(ranks as usize))
        }
        _ => None,
    }
}

impl Resolved {
    /// The ranks of the run, each with samples of its own, and those of them that divide states.
    pub fn mesh(&self) -> Mesh {
        match self.shard_group {
            Some(ShardGroup::Ranks(ranks)) if self.world.is_multiple_of(ranks) => {
                Mesh::of_replicas(self.world, ranks)
            }
            _ => Mesh::of_data(self.world),
        }
    }

    /// That the plans are of another stage of ZeRO than was asked for, and why.
    pub fn stage_instead(&self, taken: Zero) -> Option<String> {
        let asked = self.zero;
        let why = match taken < asked {
            true => ", which need less memory here",
            false => ": with --reduce-every-micro-step a rank keeps its part of the gradients alone",
        };
        let differs = self.world > 1 && taken != asked;
        differs.then(|| format!("--zero {asked} takes the plans of stage {taken}{why}"))
    }

    /// Puts the number of ranks of a host in the place of `node`, from each rank's number on its host and the number of ranks there.
    pub fn settle_shard_group(&mut self, ranks: &[(usize, usize)]) -> Result<(), ConfigError> {
        if self.shard_group != Some(ShardGroup::Node) {
            return Ok(());
        }
        let refused = |why: String| Err(ConfigError::setting(FLAG, ShardGroup::Node, why));
        let each = ranks.first().map_or(1, |(_, of)| *of);
        if let Some((rank, (_, other))) = ranks.iter().enumerate().find(|(_, (_, of))| *of != each) {
            return refused(format!(
                "the host of rank 0 has {each} of the ranks, that of rank {rank} {other}; groups are of one size: give \
                 hosts as many ranks, or --shard-group N"
            ));
        }
        if each == 1 && ranks.len() > 1 {
            return refused("hosts have one rank each, so nothing would be divided".to_string());
        }
        if let Some(rank) = (0..ranks.len()).find(|rank| ranks[*rank].0 != rank % each) {
            return refused(format!(
                "rank {rank} is number {} of its host, so that its ranks don't follow each other; with mpirun use --map-by slot, with srun \
                 --distribution=block",
                ranks[rank].0
            ));
        }
        self.shard_group = (ranks.len() > 1).then_some(ShardGroup::Ranks(each));
        Ok(())
    }

    /// Refuses what only a start can tell: which ranks share a host.
    pub fn refuse_unknown_hosts(&self) -> Result<(), ConfigError> {
        if self.shard_group == Some(ShardGroup::Node) && self.world > 1 {
            let why = "no hosts are known here: give the ranks of one, as --shard-group 8";
            return Err(ConfigError::setting(FLAG, ShardGroup::Node, why));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolved(group: &str, ranks: usize, zero: Option<Zero>) -> Result<Resolved, String> {
        let raw = Raw { shard_group: Some(group.parse()?), zero, ..Raw::default() };
        raw.resolve_without_data(ranks).map_err(|error| error.to_string())
    }

    #[test]
    fn groups_divide_the_ranks() {
        let mesh = |group, ranks| resolved(group, ranks, Some(Zero::Stage2)).unwrap().mesh();
        assert_eq!(mesh("2", 6), Mesh::of_replicas(6, 2));
        assert_eq!(mesh("6", 6), Mesh::of_data(6));
        let refused = |group, ranks, zero| resolved(group, ranks, zero).unwrap_err();
        let stage = Some(Zero::Stage1);
        assert_eq!(refused("4", 6, stage), "--shard-group 4: 6 ranks can't be divided into groups of 4");
        assert_eq!(resolved("2", 1, stage).unwrap().mesh(), Mesh::default(), "one rank shares with nobody");
        assert_eq!(resolved("4", 6, Some(Zero::Stage0)).unwrap().mesh(), Mesh::of_data(6));
        assert_eq!(
            refused("1", 4, stage),
            "--shard-group 1: a group that divides states has at least 2 ranks"
        );
        assert_eq!(
            refused("0", 4, stage),
            "--shard-group 0: a group that divides states has at least 2 ranks"
        );
        let without = "--shard-group 2: ranks divide nothing without --zero 1, 2 or 3";
        assert_eq!(refused("2", 4, None), without);
        assert!(resolved("2", 4, Some(Zero::Stage0)).is_ok(), "a study of all stages");
        for bad in ["", "nodes", "-1", "1.5"] {
            assert!(bad.parse::<ShardGroup>().is_err(), "{bad}");
        }
        for group in [ShardGroup::Node, ShardGroup::Ranks(4)] {
            assert_eq!(group.to_string().parse(), Ok(group));
        }
    }

    #[test]
    fn a_node_is_the_ranks_of_a_host() {
        let settled = |ranks: &[(usize, usize)]| {
            let mut run = resolved("node", ranks.len(), Some(Zero::Stage3)).unwrap();
            run.settle_shard_group(ranks).map_err(|error| error.to_string())?;
            Ok::<_, String>(run.mesh())
        };
        assert_eq!(settled(&[(0, 2), (1, 2), (0, 2), (1, 2)]), Ok(Mesh::of_replicas(4, 2)));
        assert_eq!(settled(&[(0, 3), (1, 3), (2, 3)]), Ok(Mesh::of_data(3)));
        assert_eq!(settled(&[(0, 1)]), Ok(Mesh::default()));
        let refused = |ranks: &[(usize, usize)]| settled(ranks).unwrap_err();
        assert!(refused(&[(0, 2), (1, 2), (0, 1)]).contains("that of rank 2 1"));
        assert!(refused(&[(0, 1), (0, 1)]).contains("one rank each"));
        let scattered = refused(&[(0, 2), (0, 2), (1, 2), (1, 2)]);
        assert!(scattered.contains("rank 1 is number 0 of its host"), "{scattered}");
        let unknown = resolved("node", 4, Some(Zero::Stage3)).unwrap().refuse_unknown_hosts();
        assert!(unknown.unwrap_err().to_string().contains("--shard-group 8"));
    }

    #[test]
    fn mics_of_a_deepspeed_file_is_a_group() {
        let of = |keys: &str, zero: Option<Zero>, ranks: usize| {
            let text =
                format!("{{\"train_micro_batch_size_per_gpu\": 4, \"zero_optimization\": {{{keys}}}}}");
            let raw =
                Raw { deepspeed: Some(DeepSpeed::parse("ds.json", &text).unwrap()), zero, ..Raw::default() };
            raw.resolve_without_data(ranks).map(|run| run.shard_group).map_err(|error| error.to_string())
        };
        let stage_3 = r#""stage": 3, "mics_shard_size": 2"#;
        assert_eq!(of(stage_3, None, 4), Ok(Some(ShardGroup::Ranks(2))));
        assert_eq!(of(stage_3, None, 1), Ok(None));
        assert_eq!(of(stage_3, Some(Zero::Stage2), 4), Ok(None), "MiCS is for stage 3");
        assert_eq!(of(r#""stage": 3, "mics_shard_size": -1"#, None, 4), Ok(None));
        assert!(of(stage_3, None, 3).unwrap_err().contains("3 ranks can't be divided into groups of 2"));
    }
}
