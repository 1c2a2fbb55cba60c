//! Types that a setting can have: each is read from text, and written as the text it is read from.

use crate::{Betas, Cache, ClassWeights, Every, LrScale, PageAddress, Part, RandAugment, ShardGroup, Span};
use graph::{Recompute, Zero};
use models::vit::Pool;
use std::path::PathBuf;
use std::time::Duration;
use text::nearest;

/// A value of a setting.
pub trait Value: Clone + PartialEq {
    /// Words it can be, where they are few.
    const WORDS: &'static [&'static str] = &[];

    fn read(text: &str) -> Result<Self, String>;

    /// Text that [`Value::read`] reads as this value.
    fn write(&self) -> String;
}

/// Form in which a setting is typed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// Alone.
    Switch,
    /// With one value.
    One,
    /// Repeatedly, each time with a value.
    List,
    /// With a value or alone.
    Perhaps,
}

/// Typed value of a setting.
pub trait Typed: Clone + Default {
    const FORM: Form;
    const WORDS: &'static [&'static str];

    fn put(&mut self, text: &str) -> Result<(), String>;

    /// Its values; none if nothing was typed, an empty text for a switch.
    fn texts(&self) -> Vec<String>;

    /// Takes the place of nothing.
    fn fill(&mut self, earlier: &Self) {
        if self.texts().is_empty() {
            *self = earlier.clone();
        }
    }
}

impl Typed for bool {
    const FORM: Form = Form::Switch;
    const WORDS: &'static [&'static str] = &[];

    fn put(&mut self, text: &str) -> Result<(), String> {
        *self = match text {
            "" | "true" => true,
            "false" => false,
            _ => return Err("is neither true nor false".to_string()),
        };
        Ok(())
    }

    fn texts(&self) -> Vec<String> {
        self.then(String::new).into_iter().collect()
    }
}

impl<T: Value> Typed for Option<T> {
    const FORM: Form = Form::One;
    const WORDS: &'static [&'static str] = T::WORDS;

    fn put(&mut self, text: &str) -> Result<(), String> {
        *self = Some(T::read(text)?);
        Ok(())
    }

    fn texts(&self) -> Vec<String> {
        self.iter().map(T::write).collect()
    }
}

impl<T: Value> Typed for Vec<T> {
    const FORM: Form = Form::List;
    const WORDS: &'static [&'static str] = T::WORDS;

    fn put(&mut self, text: &str) -> Result<(), String> {
        self.push(T::read(text)?);
        Ok(())
    }

    fn texts(&self) -> Vec<String> {
        self.iter().map(T::write).collect()
    }
}

impl<T: Value> Typed for Option<Option<T>> {
    const FORM: Form = Form::Perhaps;
    const WORDS: &'static [&'static str] = T::WORDS;

    fn put(&mut self, text: &str) -> Result<(), String> {
        *self = Some(if text.is_empty() { None } else { Some(T::read(text)?) });
        Ok(())
    }

    fn texts(&self) -> Vec<String> {
        self.iter().map(|value| value.as_ref().map_or_else(String::new, T::write)).collect()
    }
}

/// Values whose text is that of `FromStr` and `Display`.
macro_rules! by_text {
    ($($type:ty)*) => {$(
        impl Value for $type {
            fn read(text: &str) -> Result<Self, String> {
                text.parse().map_err(|error: <$type as std::str::FromStr>::Err| error.to_string())
            }

            fn write(&self) -> String {
                self.to_string()
            }
        }
    )*};
}

by_text!(String PageAddress Span Every LrScale Part RandAugment Betas ClassWeights ShardGroup);

/// Numbers, refused in the words of all other settings.
macro_rules! numbers {
    ($($type:ty: $refusal:literal)*) => {$(
        impl Value for $type {
            fn read(text: &str) -> Result<Self, String> {
                text.trim().parse().map_err(|_| $refusal.to_string())
            }

            fn write(&self) -> String {
                self.to_string()
            }
        }
    )*};
}

numbers! {
    usize: "is no whole number of 0 or more"
    u32: "is no whole number of 0 or more"
    u64: "is no whole number of 0 or more"
    f32: "is no number"
    f64: "is no number"
}

/// What a value that is none of a few words is refused with, and the one that was meant.
pub(crate) fn none_of(text: &str, words: &[&str]) -> String {
    let lower = text.to_ascii_lowercase();
    let meant = match lower.as_str() {
        // What other programs call them.
        "gpu" => words.iter().copied().find(|word| *word == "cuda"),
        "adam" => words.iter().copied().find(|word| *word == "adamw"),
        lower => nearest(lower, words.iter().copied()),
    };
    let hint = meant.map(|meant| format!("; did you mean {meant}?")).unwrap_or_default();
    format!("is none of {}{hint}", words.join(", "))
}

/// Values that are one of a few words and whose type is another crate's.
macro_rules! by_word {
    ($($type:ty { $($word:literal => $value:path),+ })*) => {$(
        impl Value for $type {
            const WORDS: &'static [&'static str] = &[$($word),+];

            fn read(text: &str) -> Result<Self, String> {
                match text {
                    $($word => Ok($value),)+
                    _ => Err(none_of(text, Self::WORDS)),
                }
            }

            fn write(&self) -> String {
                match self { $($value => $word),+ }.to_string()
            }
        }
    )*};
}

by_word! {
    Pool { "class-token" => Pool::ClassToken, "mean" => Pool::Mean }
    Recompute { "none" => Recompute::None, "gelu" => Recompute::Gelu, "full" => Recompute::Full }
    Zero { "0" => Zero::Stage0, "1" => Zero::Stage1, "2" => Zero::Stage2, "3" => Zero::Stage3 }
    comm::Backend {
        "threads" => comm::Backend::Threads,
        "mpi" => comm::Backend::Mpi,
        "tcp" => comm::Backend::Tcp,
        "nccl" => comm::Backend::Nccl
    }
}

impl Value for Cache {
    fn read(text: &str) -> Result<Self, String> {
        text.parse()
    }

    /// Writes bytes, as a size that is shown may be rounded.
    fn write(&self) -> String {
        if let Cache::Bytes(bytes) = self { bytes.to_string() } else { self.to_string() }
    }
}

impl Value for PathBuf {
    fn read(text: &str) -> Result<Self, String> {
        if text.is_empty() { Err("is no path".to_string()) } else { Ok(text.into()) }
    }

    fn write(&self) -> String {
        self.display().to_string()
    }
}

/// Time that ranks wait for each other.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Timeout(pub Duration);

/// Shortest timeout: ranks send several heartbeats a second; on a busy machine some come late.
const SHORTEST_TIMEOUT: Duration = Duration::from_secs(1);

impl Value for Timeout {
    /// Reads seconds, or a number with its unit.
    fn read(text: &str) -> Result<Self, String> {
        let (number, unit) = match text.strip_suffix(['s', 'm', 'h']) {
            Some(number) => (number, &text[number.len()..]),
            None => (text, "s"),
        };
        let seconds = match unit {
            "h" => 3600.0,
            "m" => 60.0,
            _ => 1.0,
        };
        let number: f64 = number.parse().map_err(|_| "must be a time such as 30, 30s or 5m".to_string())?;
        let time = Duration::try_from_secs_f64(number * seconds).ok();
        let time = time.filter(|time| *time >= SHORTEST_TIMEOUT);
        time.map(Timeout).ok_or_else(|| "must be at least 1s".to_string())
    }

    fn write(&self) -> String {
        format!("{}s", self.0.as_secs_f64())
    }
}

/// Resolving of a plain setting: what was typed, or else its default.
pub trait Plainly<T>: Typed {
    fn or_default(&self, default: T) -> T;
}

impl<T: Value> Plainly<T> for Option<T> {
    fn or_default(&self, default: T) -> T {
        self.clone().unwrap_or(default)
    }
}

impl<T: Value> Plainly<Option<T>> for Option<T> {
    fn or_default(&self, default: Option<T>) -> Option<T> {
        self.clone().or(default)
    }
}

impl Plainly<bool> for bool {
    fn or_default(&self, default: bool) -> bool {
        *self || default
    }
}

/// Text of a default; none where nothing holds by default.
pub trait DefaultText {
    fn text(&self) -> Option<String>;
}

impl<T: Value> DefaultText for T {
    fn text(&self) -> Option<String> {
        Some(self.write())
    }
}

impl<T: Value> DefaultText for Option<T> {
    fn text(&self) -> Option<String> {
        self.as_ref().map(T::write)
    }
}

impl DefaultText for bool {
    fn text(&self) -> Option<String> {
        self.then(|| "yes".to_string())
    }
}
