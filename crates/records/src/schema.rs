//! The version of a kind of line or file.

use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// The schema version of a kind of which this version of vitesse knows those up to `KNOWN`. Its default, 0, is that of what was
/// written before there were versions. Reading a newer one fails.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Schema<const KNOWN: u32>(u32);

impl<const KNOWN: u32> Schema<KNOWN> {
    /// The version that is written.
    pub const CURRENT: Self = Schema(KNOWN);

    pub fn number(self) -> u32 {
        self.0
    }
}

impl<const KNOWN: u32> Serialize for Schema<KNOWN> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u32(self.0)
    }
}

impl<'de, const KNOWN: u32> Deserialize<'de> for Schema<KNOWN> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let number = u32::deserialize(deserializer)?;
        if number > KNOWN {
            let why = format!("has schema {number}; this version of vitesse reads schemas up to {KNOWN}");
            return Err(Error::custom(why));
        }
        Ok(Schema(number))
    }
}
