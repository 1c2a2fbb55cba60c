//! The ranks of a run as a mesh, and the groups in it that communicate.
//!
//! A rank has a coordinate along each axis; the last axis runs fastest. A group is the ranks that differ along some of the axes
//! and agree on all others, so that every rank is in one group of each kind.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// A direction in which the work is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Axis {
    /// Ranks along it have other samples, and hold the same of the states.
    Replica,
    /// Ranks along it have other samples. What ZeRO divides is divided among them.
    Data,
    /// Ranks along it have other tokens of the same samples.
    Sequence,
}

impl Axis {
    /// Every axis, the one whose coordinate runs fastest last.
    pub const ALL: [Axis; 3] = [Axis::Replica, Axis::Data, Axis::Sequence];

    /// The name in plan texts.
    pub fn name(self) -> &'static str {
        match self {
            Axis::Replica => "replica",
            Axis::Data => "data",
            Axis::Sequence => "sequence",
        }
    }
}

/// Ranks along each axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Mesh {
    /// Along [`Axis::Replica`].
    pub replica: usize,
    /// Along [`Axis::Data`].
    pub data: usize,
    /// Along [`Axis::Sequence`].
    pub sequence: usize,
}

impl Default for Mesh {
    fn default() -> Self {
        Mesh { replica: 1, data: 1, sequence: 1 }
    }
}

impl Mesh {
    /// Ranks that each have samples of their own.
    pub fn of_data(ranks: usize) -> Self {
        Mesh { data: ranks, ..Mesh::default() }
    }

    /// As [`Mesh::of_data`], where `among` ranks that follow each other divide the states, and the other such groups hold the same.
    pub fn of_replicas(ranks: usize, among: usize) -> Self {
        Mesh { replica: ranks / among.max(1), data: among, ..Mesh::default() }
    }

    /// All ranks.
    pub fn ranks(self) -> usize {
        self.replica * self.data * self.sequence
    }

    /// The ranks along one axis.
    pub fn along(self, axis: Axis) -> usize {
        match axis {
            Axis::Replica => self.replica,
            Axis::Data => self.data,
            Axis::Sequence => self.sequence,
        }
    }

    /// The kind of group whose ranks differ along these axes.
    pub fn group(self, axes: &[Axis]) -> Group {
        let bits = axes.iter().fold(0, |bits, axis| bits | 1 << *axis as u8);
        let sizes = Axis::ALL.into_iter().filter(|axis| axes.contains(axis)).map(|axis| self.along(axis));
        Group { axes: bits, ranks: sizes.product() }
    }

    /// The group of all ranks. An axis without a second rank is not named.
    pub fn world(self) -> Group {
        self.group_along(&Axis::ALL)
    }

    /// The ranks that divide states among each other.
    pub fn shards(self) -> Group {
        self.group_along(&[Axis::Data, Axis::Sequence])
    }

    /// The ranks that hold the same part of what is divided.
    pub fn replicas(self) -> Group {
        self.group(&[Axis::Replica])
    }

    /// The group along those of the axes that have a second rank.
    fn group_along(self, axes: &[Axis]) -> Group {
        let longer: Vec<Axis> = axes.iter().copied().filter(|axis| self.along(*axis) > 1).collect();
        self.group(if longer.is_empty() { &[Axis::Data] } else { &longer })
    }

    /// Checks whether all ranks are in one group of this kind.
    pub fn spans(self, group: Group) -> bool {
        group.ranks == self.ranks()
    }

    /// Coordinate of a rank along an axis.
    pub fn coordinate(self, rank: usize, axis: Axis) -> usize {
        let faster: usize =
            Axis::ALL.into_iter().filter(|other| *other > axis).map(|a| self.along(a)).product();
        rank / faster % self.along(axis)
    }

    /// Number of a rank's group among those of a kind, and its place there: what communicators are split by.
    pub fn place(self, rank: usize, group: Group) -> (usize, usize) {
        let number = |inside: bool| {
            let axes = Axis::ALL.into_iter().filter(|axis| group.has(*axis) == inside);
            axes.fold(0, |number, axis| number * self.along(axis) + self.coordinate(rank, axis))
        };
        (number(false), number(true))
    }
}

impl fmt::Display for Mesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let longer = self.world().axes().into_iter();
        let axes: Vec<String> = longer.map(|axis| format!("{}:{}", axis.name(), self.along(axis))).collect();
        f.write_str(&axes.join(","))
    }
}

impl FromStr for Mesh {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut mesh = Mesh::default();
        for part in text.split(',') {
            let (axes, ranks) = parts(part)?;
            match axes[..] {
                [Axis::Replica] => mesh.replica = ranks,
                [Axis::Data] => mesh.data = ranks,
                [Axis::Sequence] => mesh.sequence = ranks,
                _ => return Err(format!("'{part}' is not one axis")),
            }
        }
        Ok(mesh)
    }
}

/// A kind of group: the axes along which its ranks differ, and how many ranks that makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Group {
    axes: u8,
    ranks: usize,
}

impl Group {
    /// Number of ranks in a group of this kind.
    pub fn ranks(self) -> usize {
        self.ranks
    }

    /// Checks whether its ranks differ along an axis.
    pub fn has(self, axis: Axis) -> bool {
        self.axes & 1 << axis as u8 != 0
    }

    /// The axes along which its ranks differ.
    pub fn axes(self) -> Vec<Axis> {
        Axis::ALL.into_iter().filter(|axis| self.has(*axis)).collect()
    }
}

/// Such as `data:4`, or `data+sequence:8`.
impl fmt::Display for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&str> = self.axes().into_iter().map(Axis::name).collect();
        write!(f, "{}:{}", names.join("+"), self.ranks)
    }
}

impl From<Group> for String {
    fn from(group: Group) -> String {
        group.to_string()
    }
}

impl TryFrom<String> for Group {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let (axes, ranks) = parts(&text)?;
        Ok(Group { ranks, ..Mesh::default().group(&axes) })
    }
}

/// The axes and the number of `data+sequence:8`.
fn parts(text: &str) -> Result<(Vec<Axis>, usize), String> {
    let bad = || format!("'{text}' is not axes and ranks, such as data:4");
    let (names, ranks) = text.split_once(':').ok_or_else(bad)?;
    let axis = |name: &str| Axis::ALL.into_iter().find(|axis| axis.name() == name).ok_or_else(bad);
    let axes = names.split('+').map(axis).collect::<Result<Vec<_>, _>>()?;
    let ranks = ranks.parse().ok().filter(|ranks| *ranks > 0).ok_or_else(bad)?;
    Ok((axes, ranks))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rank_has_its_place_in_each_kind_of_group() {
        let mesh = Mesh { data: 3, sequence: 4, ..Mesh::default() };
        for group in [mesh.group(&[Axis::Data]), mesh.group(&[Axis::Sequence]), mesh.world()] {
            let mut found: Vec<(usize, usize)> = (0..12).map(|rank| mesh.place(rank, group)).collect();
            found.sort_unstable();
            let groups = 12 / group.ranks();
            let all = (0..groups).flat_map(|g| (0..group.ranks()).map(move |place| (g, place)));
            assert_eq!(found, all.collect::<Vec<_>>(), "{group}");
        }
        // The tokens of a sample are with neighbours.
        assert_eq!((mesh.coordinate(7, Axis::Data), mesh.coordinate(7, Axis::Sequence)), (1, 3));
        assert!(mesh.spans(mesh.world()) && !mesh.spans(mesh.group(&[Axis::Data])));
    }

    #[test]
    fn groups_that_follow_each_other_divide_and_repeat() {
        let mesh = Mesh::of_replicas(6, 3);
        let of = |group: Group| (0..6).map(|rank| mesh.place(rank, group)).collect::<Vec<_>>();
        assert_eq!(of(mesh.shards()), [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]);
        assert_eq!(of(mesh.replicas()), [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)]);
        assert_eq!(of(mesh.world()), (0..6).map(|rank| (0, rank)).collect::<Vec<_>>());
        assert_eq!(
            (mesh.to_string(), mesh.world().to_string()),
            ("replica:2,data:3".into(), "replica+data:6".into())
        );
        let plain = Mesh::of_data(4);
        assert_eq!((plain.shards(), plain.replicas().ranks()), (plain.world(), 1));
        let both = Mesh { sequence: 2, ..mesh };
        assert_eq!((both.shards().to_string(), both.shards().ranks()), ("data+sequence:6".into(), 6));
    }

    #[test]
    fn groups_and_meshes_survive_their_text() {
        let mesh = Mesh { data: 3, sequence: 4, ..Mesh::default() };
        for mesh in [mesh, Mesh::default(), Mesh { sequence: 2, ..Mesh::default() }, Mesh::of_replicas(6, 3)]
        {
            assert_eq!(mesh.to_string().parse(), Ok(mesh));
        }
        assert_eq!(Mesh::of_data(2).to_string(), "data:2");
        for group in [mesh.group(&[Axis::Sequence]), mesh.world(), Mesh::of_data(2).world()] {
            assert_eq!(Group::try_from(group.to_string()), Ok(group));
        }
        assert_eq!(Mesh::of_data(5).world().to_string(), "data:5");
        assert_eq!(mesh.world().to_string(), "data+sequence:12");
        for bad in ["", "data", "data:0", "rows:2", "data:x", "data+:2"] {
            assert!(Group::try_from(bad.to_string()).is_err(), "{bad}");
        }
        assert!("data+sequence:4".parse::<Mesh>().is_err());
    }
}
