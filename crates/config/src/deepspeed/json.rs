//! JSON with the place of every value, and without the habit of dropping the first of two equal keys.

use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;
use std::collections::HashSet;
use std::fmt;

/// Line and column of a value, from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    pub line: usize,
    pub column: usize,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.line, self.column)
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    pub place: Place,
    pub json: Json,
    /// Text of the value in the file, on one line, shortened to what a message can show.
    pub text: String,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Json {
    Null,
    Bool(bool),
    Number(f64),
    Text(String),
    List(Vec<Node>),
    Object(Vec<(String, Node)>),
}

/// Reason why a text is no JSON, and its place.
#[derive(Clone, Debug, PartialEq)]
pub struct Fault {
    pub place: Place,
    pub why: String,
}

/// No configuration is nested deeper; a limit keeps hostile ones from using up the stack.
const DEEPEST: usize = 32;
const LONGEST_TEXT: usize = 60;

pub fn parse(text: &str) -> Result<Node, Fault> {
    let raw: &RawValue = serde_json::from_str(text).map_err(|error| {
        // What goes wrong in passing over a value is told less well than what goes wrong in reading it.
        let error = serde_json::from_str::<serde_json::Value>(text).err().unwrap_or(error);
        Fault { place: Place { line: error.line(), column: error.column() }, why: reason(&error) }
    })?;
    node(text, raw, 0)
}

fn node(file: &str, raw: &RawValue, depth: usize) -> Result<Node, Fault> {
    let text = raw.get();
    let place = place(file, text);
    if depth > DEEPEST {
        return Err(Fault { place, why: format!("nested more than {DEEPEST} deep") });
    }
    let fault = |e: serde_json::Error| Fault { place, why: reason(&e) };
    let json = match text.as_bytes().first() {
        Some(b'{') => {
            let Pairs(pairs) = serde_json::from_str(text).map_err(fault)?;
            let mut seen = HashSet::new();
            let mut entries = Vec::with_capacity(pairs.len());
            for (key, value) in pairs {
                let node = node(file, value, depth + 1)?;
                if !seen.insert(key.clone()) {
                    let why = format!("\"{}\" occurs twice", shown(&key));
                    return Err(Fault { place: node.place, why });
                }
                entries.push((key, node));
            }
            Json::Object(entries)
        }
        Some(b'[') => {
            let items: Vec<&RawValue> = serde_json::from_str(text).map_err(fault)?;
            Json::List(items.into_iter().map(|item| node(file, item, depth + 1)).collect::<Result<_, _>>()?)
        }
        Some(b'"') => Json::Text(serde_json::from_str(text).map_err(fault)?),
        Some(b't' | b'f') => Json::Bool(serde_json::from_str(text).map_err(fault)?),
        Some(b'n') => Json::Null,
        _ => Json::Number(serde_json::from_str(text).map_err(fault)?),
    };
    Ok(Node { place, json, text: shown(text) })
}

/// An object as it comes, both of two equal keys included.
struct Pairs<'a>(Vec<(String, &'a RawValue)>);

impl<'de> Deserialize<'de> for Pairs<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(PairsVisitor)
    }
}

struct PairsVisitor;

impl<'de> Visitor<'de> for PairsVisitor {
    type Value = Pairs<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Pairs<'de>, M::Error> {
        let mut pairs = Vec::new();
        while let Some(pair) = map.next_entry()? {
            pairs.push(pair);
        }
        Ok(Pairs(pairs))
    }
}

/// Raw values are parts of the file's text, so their address says where they lie.
fn place(file: &str, part: &str) -> Place {
    let offset = (part.as_ptr() as usize).saturating_sub(file.as_ptr() as usize).min(file.len());
    let before = &file.as_bytes()[..offset];
    let line = before.iter().filter(|b| **b == b'\n').count() + 1;
    let start = before.iter().rposition(|b| *b == b'\n').map_or(0, |newline| newline + 1);
    Place { line, column: String::from_utf8_lossy(&before[start..]).chars().count() + 1 }
}

/// Message of serde_json, without its own place, which is relative to a part of the file.
fn reason(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let end = text.rfind(" at line ").unwrap_or(text.len());
    text[..end].to_string()
}

/// Text from a file, fit to be shown on a line.
pub fn shown(text: &str) -> String {
    let mut words = text.split_whitespace().collect::<Vec<_>>().join(" ");
    words = words.chars().map(|c| if c.is_control() { char::REPLACEMENT_CHARACTER } else { c }).collect();
    if words.chars().count() > LONGEST_TEXT {
        words = words.chars().take(LONGEST_TEXT - 1).chain(['…']).collect();
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fault(text: &str) -> String {
        let Fault { place, why } = parse(text).unwrap_err();
        format!("{place}: {why}")
    }

    #[test]
    fn values_know_where_they_begin() {
        let root = parse("{\n  \"a\": 1,\n  \"ü\": { \"c\": [2e8, \"x\"] }\n}").unwrap();
        let Json::Object(entries) = root.json else { panic!("an object") };
        assert_eq!(entries[0].1.place, Place { line: 2, column: 8 });
        let Json::Object(inner) = &entries[1].1.json else { panic!("an object") };
        let Json::List(list) = &inner[0].1.json else { panic!("a list") };
        assert_eq!((list[0].place.to_string().as_str(), &list[0].json), ("3:16", &Json::Number(2e8)));
        assert_eq!(inner[0].1.text, "[2e8, \"x\"]");
    }

    #[test]
    fn unreadable_text_is_refused_with_its_place() {
        assert_eq!(fault("{\n \"a\": 1,\n}"), "3:1: trailing comma");
        assert_eq!(fault("{\"a\": tru}"), "1:10: expected ident");
        assert_eq!(fault(""), "1:0: EOF while parsing a value");
        assert_eq!(fault("{\"a\":\n 1e999}"), "2:2: number out of range");
        assert_eq!(fault("{\"a\": \"\\ud800\"}"), "1:7: unexpected end of hex escape");
        assert_eq!(fault("{\"a\": 1, \"b\": {\"c\": 1, \"c\": 2}}"), "1:29: \"c\" occurs twice");
        assert_eq!(fault("{\"a\": 1,\n\"\\u0061\": 2}"), "2:11: \"a\" occurs twice");
        assert_eq!(fault(&"[".repeat(100_000)), "1:128: recursion limit exceeded");
        let deep = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
        assert!(fault(&deep).contains("nested more than 32 deep"));
    }
}
