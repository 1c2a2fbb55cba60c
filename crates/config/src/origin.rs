//! Where every setting of a run came from.

use std::fmt;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Typed, under the setting's own name.
    Flag,
    /// This line of a settings file.
    Settings(String),
    /// This key of the DeepSpeed file.
    File(String),
    /// Computed from others: the arithmetic.
    Derived(String),
    /// Nobody said; the reason, where it is not simply the default.
    Default(String),
}

impl Origin {
    pub fn default_value() -> Self {
        Origin::Default(String::new())
    }
}

/// A setting as it was resolved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Note {
    /// The flag's name, without its dashes.
    pub name: &'static str,
    pub value: String,
    pub origin: Origin,
}

/// Notes in the order in which settings were resolved.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Log(pub Vec<Note>);

impl Log {
    pub fn note(&mut self, name: &'static str, value: impl fmt::Display, origin: Origin) {
        let text = value.to_string();
        // 1e-8, which nobody has to count the zeros of.
        let small = text.parse::<f64>().ok().filter(|_| text.starts_with("0.000"));
        let value = small.filter(|small| *small > 0.0).map_or(text, |small| format!("{small:e}"));
        self.0.push(Note { name, value, origin });
    }

    /// Picks what was typed, or else the default.
    pub fn pick<T: fmt::Display>(&mut self, name: &'static str, typed: Option<T>, default: T) -> T {
        let origin = if typed.is_some() { Origin::Flag } else { Origin::default_value() };
        let value = typed.unwrap_or(default);
        self.note(name, &value, origin);
        value
    }

    /// For settings that can be left out altogether: noted only if typed.
    pub fn typed<T: fmt::Display>(&mut self, name: &'static str, typed: Option<T>) {
        if let Some(value) = typed {
            self.note(name, value, Origin::Flag);
        }
    }
}
