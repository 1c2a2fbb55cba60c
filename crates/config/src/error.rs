//! Everything a setting can be refused for, each with the culprit in its text.

use crate::FileError;
use crate::settings::Raw;
use text::many;

/// A setting, a file of settings, or data that can't be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("--model {0}")]
    Model(#[from] models::NetworkError),
    #[error(transparent)]
    Data(#[from] data::DataError),
    #[error(transparent)]
    File(#[from] FileError),
    /// Numbers of images that don't multiply.
    #[error("{0}")]
    Batch(String),
    #[error("--{flag}{}{value}: {why}", if value.is_empty() { "" } else { " " })]
    Setting { flag: &'static str, value: String, why: String },
    /// Value of a settings file, by file and line.
    #[error("{place}: {what}")]
    InFile { place: String, what: String },
    #[error(
        "--model {model} on {image} px, {}, {}, {} at a time: no memory holds that",
        many(*channels, "channel"), many(*classes, "class"), many(*batch, "image")
    )]
    TooLarge { model: String, image: usize, channels: usize, classes: usize, batch: usize },
}

impl ConfigError {
    /// Refuses the value of a flag.
    pub fn setting(flag: &'static str, value: impl ToString, why: impl Into<String>) -> Self {
        ConfigError::Setting { flag, value: value.to_string(), why: why.into() }
    }

    /// Names file and line in place of the flag, where a settings file decided.
    pub(crate) fn placed(self, raw: &Raw) -> Self {
        let flag = match &self {
            ConfigError::Setting { flag, .. } => *flag,
            ConfigError::Model(_) => "model",
            _ => return self,
        };
        let Some(place) = raw.sources.of(flag) else { return self };
        let text = self.to_string();
        let what = text.strip_prefix("--").unwrap_or(&text).to_string();
        ConfigError::InFile { place: place.to_string(), what }
    }
}
