//! The ranks that divide states among each other, where that is not all of them.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// Ranks that divide states; other such groups hold the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum ShardGroup {
    /// Those of one host.
    Node,
    /// So many that follow each other.
    Ranks(usize),
}

impl FromStr for ShardGroup {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.trim() {
            "node" => Ok(ShardGroup::Node),
            number => number
                .parse()
                .map(ShardGroup::Ranks)
                .map_err(|_| "is neither node nor a number of ranks".to_string()),
        }
    }
}

impl fmt::Display for ShardGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ShardGroup::Node => f.write_str("node"),
            ShardGroup::Ranks(ranks) => write!(f, "{ranks}"),
        }
    }
}

impl From<ShardGroup> for String {
    fn from(group: ShardGroup) -> String {
        group.to_string()
    }
}

impl TryFrom<String> for ShardGroup {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}
