//! The macro by which settings are declared, and what it needs.

use super::value::{DefaultText, Plainly};
use crate::deepspeed::{DeepSpeed, Setting as Key};
use crate::error::ConfigError;
use crate::origin::{Log, Origin};

/// Settings by heading. Each is `field: type = what else there is to say`, under its help; a plain one ends in
/// `; plain type = default, check`, and its resolved value is then a member of `Plain`.
macro_rules! settings {
    ($($heading:literal {$(
        $(#[doc = $help:literal])+
        $field:ident: $type:ty = $about:expr $(; plain $plain:ty = $default:expr, $check:expr)?,
    )+})+) => {
        /// Values that the user typed; `None`, or nothing in a list, where the choice is left to a file or to defaults.
        #[derive(Clone, Debug, Default, PartialEq)]
        pub struct Raw {
            $($($(#[doc = $help])+ pub $field: $type,)+)+
            /// The DeepSpeed configuration, read.
            pub deepspeed: Option<DeepSpeed>,
            /// Settings that a settings file decided, and where it says so.
            pub sources: Sources,
        }

        /// Values of settings that are what was typed, or else a constant.
        #[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
        #[serde(default, deny_unknown_fields)]
        pub struct Plain {
            $($($(#[doc = concat!("Value of [`Raw::", stringify!($field), "`].")] pub $field: $plain,)?)+)+
        }

        impl Default for Plain {
            fn default() -> Self {
                Plain { $($($($field: $default,)?)+)+ }
            }
        }

        impl Raw {
            /// The plain settings, checked.
            pub(crate) fn plain(&self, log: &mut Log) -> Result<Plain, ConfigError> {
                let file = self.deepspeed.as_ref();
                Ok(Plain {$($($(
                    $field: {
                        let (name, keys) = (const { flag!($field) }, ($about).deepspeed);
                        let default: $plain = $default;
                        resolve(name, &self.$field, file, keys, default, $check, log)?
                    },
                )?)+)+})
            }
        }

        pub static SETTINGS: &[Setting] = &[$($(
            Setting {
                name: const { flag!($field) },
                field: stringify!($field),
                heading: $heading,
                help: concat!($($help),+),
                form: <$type as Typed>::FORM,
                words: <$type as Typed>::WORDS,
                about: $about,
                plain: || {
                    $(return DefaultText::text(&{ let default: $plain = $default; default });)?
                    #[allow(unreachable_code)]
                    None
                },
                is_plain: [$(stringify!($plain),)? ""].len() > 1,
                put: |raw, text| Typed::put(&mut raw.$field, text),
                texts: |raw| Typed::texts(&raw.$field),
                take: |raw, earlier| Typed::fill(&mut raw.$field, &earlier.$field),
            },
        )+)+];
    };
}

/// The flag of a field: its name with dashes.
macro_rules! flag {
    ($field:ident) => {{
        const BYTES: [u8; stringify!($field).len()] = dashed(stringify!($field));
        match std::str::from_utf8(&BYTES) {
            Ok(name) => name,
            Err(_) => stringify!($field),
        }
    }};
}

pub(crate) use {flag, settings};

pub const fn dashed<const N: usize>(name: &str) -> [u8; N] {
    let mut bytes = [0; N];
    let mut i = 0;
    while i < N {
        let byte = name.as_bytes()[i];
        bytes[i] = if byte == b'_' { b'-' } else { byte };
        i += 1;
    }
    bytes
}

/// The value of a plain setting: what was typed, what a key of the file says, or the default.
pub(super) fn resolve<F: Plainly<T>, T: DefaultText>(
    name: &'static str,
    typed: &F,
    file: Option<&DeepSpeed>,
    keys: &[&'static str],
    default: T,
    check: impl Fn(&T) -> Result<(), String>,
    log: &mut Log,
) -> Result<T, ConfigError> {
    let refused = |value: &dyn DefaultText, why: String| {
        // A switch has no value to show.
        let shown = value.text().filter(|text| text != "yes");
        ConfigError::setting(name, shown.unwrap_or_default(), why)
    };
    let (mut of_file, mut origin) = (F::default(), Origin::default_value());
    if !typed.texts().is_empty() {
        origin = Origin::Flag;
    } else if let Some((key, text)) = keys.iter().find_map(|key| Some((key, given(file?, key)?))) {
        of_file.put(&text).map_err(|why| ConfigError::setting(name, text, why))?;
        origin = Origin::File(key.to_string());
    }
    let value = if origin == Origin::Flag { typed } else { &of_file }.or_default(default);
    check(&value).map_err(|why| refused(&value, why))?;
    if let Some(text) = value.text() {
        log.note(name, text, origin);
    }
    Ok(value)
}

/// Value that a file gives for a key, as text.
fn given(file: &DeepSpeed, key: &str) -> Option<String> {
    let number = file.number(key).map(|number| match number {
        Key::Given(number) => Some(number.to_string()),
        Key::Auto => None,
    });
    let boolean = file.boolean(key).map(|flag| match flag {
        Key::Given(flag) => Some(flag.to_string()),
        Key::Auto => None,
    });
    number.or(boolean)?.or_else(|| file.text(key).map(str::to_string))
}
