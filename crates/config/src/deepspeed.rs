//! DeepSpeed's JSON as a raw form: every key found, typed, and with its place in the file.
//!
//! Nothing is ignored: a key is honoured, or accepted because it asks for nothing that is not done anyway, or refused
//! with the reason. Which of these depends on flags, the device and the number of ranks, so [`DeepSpeed::verdicts`] says it when
//! a run is resolved. What is known is in `keys`, and what to say of a value in `judge`.

mod all_reduce;
pub mod json;
pub(crate) mod judge;
pub(crate) mod keys;
mod precision;
pub(crate) mod zero;

pub(crate) use judge::same_optimizer;
pub use judge::{Context, Verdict};
pub use keys::SCHEDULERS;

use crate::optimizers;
use crate::resolve::in_fp32;
use json::{Json, Node, Place};
use keys::{ABSENT, KEYS, Key, Kind, OPTIMIZER_PARAMS, Param, SCHEDULER_PARAMS};
use std::io::Read;
use std::path::{Path, PathBuf};
use text::nearest;

/// Error of a configuration file.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: std::io::Error },
    #[error("{file}: {why}")]
    File { file: String, why: String },
    #[error("{file}:{place}: {why}")]
    Syntax { file: String, place: Place, why: String },
    /// A key whose value can't be honoured; `more` others are refused too.
    #[error("{file}:{place}: {what}{}", others(*more, file))]
    Refused { file: String, place: Place, what: String, more: usize },
}

fn others(count: usize, file: &str) -> String {
    match count {
        0 => String::new(),
        1 => format!(" (one more key is refused: `vitesse config explain {file}` lists all)"),
        _ => format!(" ({count} more keys are refused: `vitesse config explain {file}` lists all)"),
    }
}

/// A value of the type its key asks for.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// Null: as if the key were not there.
    Null,
    Auto,
    Bool(bool),
    Number(f64),
    Text(String),
    Betas(f64, f64),
    /// A part of DeepSpeed that is not here, and whether it is switched off.
    Section {
        off: bool,
    },
    /// A value of no type that this key could use; its own verdict decides.
    Other,
}

/// Value of a key, or that it leaves the choice.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Setting<T> {
    Auto,
    Given(T),
}

#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// The full name, sections before a dot.
    pub key: String,
    /// The value as it stands in the file.
    pub text: String,
    pub place: Place,
    /// Or why there is no such key, or no such value for it.
    pub value: Result<Value, String>,
}

/// A configuration file.
#[derive(Clone, Debug, PartialEq)]
pub struct DeepSpeed {
    /// Its name, as typed.
    pub file: String,
    /// Its text.
    pub text: String,
    pub entries: Vec<Entry>,
}

/// Configurations have a few kilobytes.
const LARGEST: u64 = 64 * 1024;

/// The text of a file of settings; `otherwise` says what a larger one is not.
pub(crate) fn read_text(path: &Path, otherwise: &str) -> Result<String, FileError> {
    let io = |source| FileError::Io { path: path.to_path_buf(), source };
    let refused = |why: String| FileError::File { file: path.display().to_string(), why };
    let mut bytes = Vec::new();
    std::fs::File::open(path).map_err(io)?.take(LARGEST + 1).read_to_end(&mut bytes).map_err(io)?;
    if bytes.len() as u64 > LARGEST {
        return Err(refused(format!("more than {} KiB; {otherwise}", LARGEST / 1024)));
    }
    String::from_utf8(bytes).map_err(|error| {
        refused(format!("no text: byte {} is not UTF-8", error.utf8_error().valid_up_to() + 1))
    })
}

impl DeepSpeed {
    pub fn read(path: &Path) -> Result<Self, FileError> {
        Self::parse(&path.display().to_string(), &read_text(path, "that is no DeepSpeed configuration")?)
    }

    /// Reads a configuration; `file` is its name in messages.
    pub fn parse(file: &str, text: &str) -> Result<Self, FileError> {
        let syntax = |place, why| FileError::Syntax { file: file.to_string(), place, why };
        let root = json::parse(text).map_err(|fault| syntax(fault.place, fault.why))?;
        let Json::Object(members) = &root.json else {
            return Err(syntax(root.place, format!("expected an object, found {}", root.text)));
        };
        let types =
            Types { optimizer: type_of(members, "optimizer"), scheduler: type_of(members, "scheduler") };
        let mut entries = Vec::new();
        types.walk("", members, &mut entries);
        Ok(DeepSpeed { file: file.to_string(), text: text.to_string(), entries })
    }

    fn value(&self, key: &str) -> Option<&Value> {
        self.entries.iter().find(|e| e.key == key).and_then(|e| e.value.as_ref().ok())
    }

    /// A key that is there and is not null, as `pick` reads it.
    fn setting<T>(&self, key: &str, pick: impl Fn(&Value) -> Option<T>) -> Option<Setting<T>> {
        match self.value(key)? {
            Value::Auto => Some(Setting::Auto),
            value => pick(value).map(Setting::Given),
        }
    }

    pub fn number(&self, key: &str) -> Option<Setting<f64>> {
        self.setting(key, |value| if let Value::Number(x) = value { Some(*x) } else { None })
    }

    pub fn whole(&self, key: &str) -> Option<Setting<u64>> {
        self.setting(key, |value| if let Value::Number(x) = value { Some(*x as u64) } else { None })
    }

    pub fn boolean(&self, key: &str) -> Option<Setting<bool>> {
        self.setting(key, |value| if let Value::Bool(x) = value { Some(*x) } else { None })
    }

    pub fn betas(&self, key: &str) -> Option<Setting<(f64, f64)>> {
        self.setting(key, |value| if let Value::Betas(a, b) = value { Some((*a, *b)) } else { None })
    }

    pub fn text(&self, key: &str) -> Option<&str> {
        match self.value(key)? {
            Value::Text(text) => Some(text),
            _ => None,
        }
    }

    /// Verdicts on every key, in the order of the file.
    pub fn verdicts(&self, context: &Context) -> Vec<Verdict> {
        self.entries.iter().map(|entry| judge::judge(self, entry, context)).collect()
    }

    /// The first key that is refused, as an error.
    pub fn refusal(&self, verdicts: &[Verdict]) -> Option<FileError> {
        let mut refused = self.entries.iter().zip(verdicts).filter_map(|(entry, verdict)| match verdict {
            Verdict::Refused(why) => Some((entry, why)),
            _ => None,
        });
        let (entry, why) = refused.next()?;
        let (file, place) = (self.file.clone(), entry.place);
        let what = match &entry.value {
            Ok(_) => format!("{} {}: {why}", entry.key, entry.text),
            Err(_) => format!("{}: {why}", entry.key),
        };
        Some(FileError::Refused { file, place, what, more: refused.count() })
    }
}

/// The types on which the names of further parameters depend; in lower case.
struct Types {
    optimizer: Option<String>,
    scheduler: Option<String>,
}

fn type_of(members: &[(String, Node)], section: &str) -> Option<String> {
    let member = |members: &[(String, Node)], name: &str| {
        members.iter().find(|(key, _)| key == name).map(|(_, node)| node.json.clone())
    };
    let Some(Json::Object(section)) = member(members, section) else { return None };
    match member(&section, "type") {
        Some(Json::Text(name)) => Some(name.to_ascii_lowercase()),
        _ => None,
    }
}

impl Types {
    fn walk(&self, prefix: &str, members: &[(String, Node)], entries: &mut Vec<Entry>) {
        for (name, node) in members {
            let path = if prefix.is_empty() { name.clone() } else { format!("{prefix}.{name}") };
            match &node.json {
                Json::Object(members) if !name.contains('.') && is_section(&path) => {
                    self.walk(&path, members, entries)
                }
                // Or "fp16.enabled" would pass for a key of the section "fp16".
                _ if name.contains('.') => entries.push(Entry {
                    key: json::shown(&path),
                    text: node.text.clone(),
                    place: node.place,
                    value: Err("unknown key; a section is an object of its own".to_string()),
                }),
                _ => entries.push(self.entry(&path, node)),
            }
        }
    }

    fn entry(&self, path: &str, node: &Node) -> Entry {
        let value = match self.known(path) {
            Ok(key) => typed(key, node),
            Err(_) if keys::absent(path).is_some() => Ok(absent(&node.json)),
            Err(_) if is_section(path) => Err(format!("expected an object, found {}", node.text)),
            Err(why) => Err(why),
        };
        Entry { key: json::shown(path), text: node.text.clone(), place: node.place, value }
    }

    /// The key of this name, or what to say of its absence.
    fn known(&self, path: &str) -> Result<&'static Key, String> {
        if let Some(key) = KEYS.iter().find(|k| k.path == path) {
            return Ok(key);
        }
        for (section, params, of, types) in [
            ("optimizer", &OPTIMIZER_PARAMS[..], &self.optimizer, optimizers::deepspeed_types()),
            ("scheduler", SCHEDULER_PARAMS, &self.scheduler, SCHEDULERS.to_vec()),
        ] {
            let Some(name) = path.strip_prefix(section).and_then(|rest| rest.strip_prefix(".params.")) else {
                continue;
            };
            return parameter(section, path, name, params, of.as_deref(), &types);
        }
        Err(unknown(path, all_names()))
    }
}

fn parameter(
    section: &str,
    path: &str,
    name: &str,
    params: &'static [Param],
    of: Option<&str>,
    types: &[&str],
) -> Result<&'static Key, String> {
    let Some(of) = of else { return Err(format!("there is no {section}.type that could have it")) };
    let known_type = types.iter().find(|t| t.eq_ignore_ascii_case(of));
    let found = params.iter().find(|p| p.key.path == path);
    match (known_type, found) {
        // The type itself is refused; its parameters can't be told right from wrong.
        (None, Some(param)) => Ok(&param.key),
        (None, None) => Err(format!("{section}.type {of} is not known, and so are its parameters")),
        (Some(_), Some(param)) if param.is_of(of) => Ok(&param.key),
        (Some(kind), Some(_)) => Err(format!("{kind} has no parameter {name}")),
        (Some(_), None) => {
            let known = params.iter().filter(|p| p.is_of(of)).map(|p| p.key.path);
            Err(unknown(path, known))
        }
    }
}

fn all_names() -> impl Iterator<Item = &'static str> + Clone {
    let sections = ["fp16", "bf16", "zero_optimization", "pipeline", "optimizer", "scheduler"];
    keys::all().map(|k| k.path).chain(ABSENT.iter().map(|(name, _)| *name)).chain(sections)
}

/// Returns whether known keys lie below this name.
fn is_section(path: &str) -> bool {
    all_names().any(|name| name.strip_prefix(path).is_some_and(|rest| rest.starts_with('.')))
}

/// A key in the wrong section is nearer to what was meant than one of similar letters.
fn unknown(path: &str, known: impl Iterator<Item = &'static str> + Clone) -> String {
    let last = |name: &'static str| name.rsplit('.').next().unwrap_or(name);
    let misplaced = known.clone().find(|name| name.contains('.') && last(name) == path);
    match misplaced.or_else(|| nearest(path, known)) {
        Some(meant) => format!("unknown key; did you mean {meant}?"),
        None => "unknown key".to_string(),
    }
}

/// A section that DeepSpeed has and vitesse doesn't.
fn absent(json: &Json) -> Value {
    let off = match json {
        Json::Null | Json::Bool(false) => true,
        Json::Object(members) => {
            members.is_empty() || members.iter().any(|(k, v)| k == "enabled" && v.json == Json::Bool(false))
        }
        _ => false,
    };
    Value::Section { off }
}

fn typed(key: &Key, node: &Node) -> Result<Value, String> {
    let is_auto = matches!(&node.json, Json::Text(text) if text == "auto");
    if key.auto && is_auto {
        return Ok(Value::Auto);
    }
    let or_auto = if key.auto { " or \"auto\"" } else { "" };
    let expected = |what: &str| Err(format!("expected {what}{or_auto}, found {}", node.text));
    let number = |what: &str, limit: &str, good: &dyn Fn(f64) -> bool| match node.json {
        Json::Number(x) if good(x) => Ok(Value::Number(x)),
        Json::Number(_) if !limit.is_empty() => Err(format!("must be {limit}, found {}", node.text)),
        _ => expected(what),
    };
    let whole = |x: f64| x.fract() == 0.0 && (0.0..=MAX_WHOLE).contains(&x);
    match (key.kind, &node.json) {
        (_, Json::Null) => Ok(Value::Null),
        (Kind::Whole, _) => number("a whole number", "", &whole),
        (Kind::Count, Json::Number(0.0)) => Err("must be at least 1, found 0".to_string()),
        (Kind::Count, _) => number("a whole number", "", &whole),
        (Kind::Number, _) => number("a number", "", &|_| true),
        (Kind::Positive, Json::Number(x)) if *x > 0.0 => {
            let told = |why| format!("{why}, found {}", node.text);
            in_fp32(*x).map(Value::Number).map_err(told)
        }
        (Kind::Positive, _) => number("a number", "positive", &|x| x > 0.0),
        (Kind::NotNegative, _) => number("a number", "0 or more", &|x| x >= 0.0),
        (Kind::Share, _) => number("a number", "from 0 to below 1", &|x| (0.0..1.0).contains(&x)),
        (Kind::Bool, Json::Bool(flag)) => Ok(Value::Bool(*flag)),
        (Kind::Bool, _) => expected("true or false"),
        (Kind::Text, Json::Text(text)) => Ok(Value::Text(text.clone())),
        (Kind::Text, _) => expected("a text"),
        (Kind::OneOf(names), Json::Text(text)) if names.contains(&text.as_str()) => {
            Ok(Value::Text(text.clone()))
        }
        (Kind::OneOf(names), _) => expected(&format!("one of {}", names.join(", "))),
        (Kind::Betas, Json::List(items)) => match items.as_slice() {
            [Node { json: Json::Number(a), .. }, Node { json: Json::Number(b), .. }]
                if (0.0..1.0).contains(a) && (0.0..1.0).contains(b) =>
            {
                Ok(Value::Betas(*a, *b))
            }
            _ => expected("two numbers from 0 to below 1"),
        },
        (Kind::Betas, _) => expected("two numbers from 0 to below 1"),
        (Kind::Any, Json::Bool(flag)) => Ok(Value::Bool(*flag)),
        (Kind::Any, Json::Number(x)) => Ok(Value::Number(*x)),
        (Kind::Any, Json::Text(text)) => Ok(Value::Text(text.clone())),
        (Kind::Any, _) => Ok(Value::Other),
    }
}

/// Up to here f64 holds every whole number.
const MAX_WHOLE: f64 = 9_007_199_254_740_992.0;

#[cfg(test)]
mod tests;
