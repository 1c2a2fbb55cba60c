//! The axes of a grid, each declared once: its key in a study's file, its flag, the option of `vitesse train` that a value becomes, and how
//! series and points are named by it. Everything else follows from [`AXES`].

use crate::grid::set_name;
use crate::limiter::counted;
use records::study::Settings;
use serde::de::Error;
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::fmt;

/// An axis of a grid.
pub struct Axis {
    /// Key in a study's file.
    pub key: &'static str,
    /// Flag of `vitesse study`, and another name for it.
    pub flag: &'static str,
    pub alias: Option<&'static str>,
    pub help: &'static str,
    pub takes: Takes,
    /// Option of `vitesse train` that a value becomes; of ranks and hosts, none.
    pub option: Option<&'static str>,
    /// What its values are called where they are counted.
    pub plural: &'static str,
    /// A value in the names of series and points; of models the series has it anyway.
    pub name: Option<fn(&AxisValue) -> String>,
    /// True if a point's settings have a field for its value; the others are in [`Settings::other`].
    pub settled: bool,
}

/// The values that an axis takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Takes {
    Counts,
    Fractions,
    Words,
}

pub const RANKS: &str = "ranks";
pub const NODES: &str = "nodes";
pub const THREADS: &str = "threads";
pub const MODELS: &str = "models";
pub const DATA: &str = "data";
pub const DATA_FRACTIONS: &str = "data-fractions";
pub const BATCH_SIZES: &str = "batch-sizes";
pub const ACCUMULATION: &str = "accumulation";
pub const OPTIMIZERS: &str = "optimizers";
pub const PRECISIONS: &str = "precisions";
pub const ZERO: &str = records::study::ZERO;
pub const STAGES: &str = "stages of ZeRO";

/// All axes. Options follow in this order, and the names of points depend on it: new axes come last.
pub const AXES: &[Axis] = &[
    Axis {
        help: "Models, as vit-ti/4 or swinv2-b/w8+upernet",
        flag: "model",
        alias: Some("models"),
        option: Some("model"),
        name: None,
        ..words(MODELS)
    },
    Axis {
        help: "Data sets, as cifar10:DIR or ade20k:DIR",
        option: Some("data"),
        plural: "data sets",
        name: Some(|value| set_name(&value.to_string())),
        ..words(DATA)
    },
    Axis {
        help: "Part of the training set; for weak, of each rank [default: 1; for weak, such that all ranks use all of it]",
        flag: "data-fraction",
        alias: Some("data-fractions"),
        option: Some("data-fraction"),
        plural: "parts of the data",
        takes: Takes::Fractions,
        name: Some(|value| format!("{}% of the data", 100.0 * value.number())),
        ..words(DATA_FRACTIONS)
    },
    Axis {
        help: "Images of a micro-step of one rank; for strong and nodes, of a step of all ranks [default: those of one rank of \
               `vitesse train`; for strong and nodes, rounded up to what all ranks × accumulations divide]",
        alias: Some("batch-size"),
        option: Some("batch-size"),
        plural: "batch sizes",
        name: Some(|value| format!("batch {value}")),
        ..counts(BATCH_SIZES)
    },
    Axis {
        help: "Micro-steps for each all-reduce",
        option: Some("accumulate"),
        plural: "accumulations",
        name: Some(|value| format!("accumulation {value}")),
        ..counts(ACCUMULATION)
    },
    Axis {
        help: "Optimizers, as adamw, sgd, lamb, muon",
        alias: Some("optimizer"),
        option: Some("optimizer"),
        ..words(OPTIMIZERS)
    },
    Axis {
        help: "fp32, fp64; on a GPU also tf32, bf16, fp16",
        alias: Some("precision"),
        option: Some("precision"),
        ..words(PRECISIONS)
    },
    Axis {
        help: "Threads of a rank [default: the cores divided by the most ranks, the same for all points]",
        option: Some("threads"),
        name: Some(|value| counted(value.number() as usize, "thread")),
        ..counts(THREADS)
    },
    Axis {
        help: "Ranks [default: 1, 2, 4, … up to the cores, or 1 where something else varies]",
        name: Some(|value| counted(value.number() as usize, "rank")),
        ..counts(RANKS)
    },
    Axis {
        help: "Numbers of hosts [default: 1]",
        plural: "hosts",
        name: Some(|value| counted(value.number() as usize, "host")),
        ..counts(NODES)
    },
    Axis {
        help: "Elements that one all-reduce takes at most [default: those of `vitesse train`]",
        alias: Some("bucket-size"),
        option: Some("bucket-size"),
        plural: "bucket sizes",
        name: Some(|value| format!("buckets of {value}")),
        settled: false,
        ..counts("bucket-sizes")
    },
    Axis {
        help: "Stages of ZeRO: what ranks divide, 0 to 3",
        option: Some("zero"),
        plural: STAGES,
        name: Some(|value| format!("stage {value}")),
        settled: false,
        ..counts(ZERO)
    },
];

const fn words(key: &'static str) -> Axis {
    Axis {
        key,
        flag: key,
        alias: None,
        help: "",
        takes: Takes::Words,
        option: None,
        plural: key,
        name: Some(|value| value.to_string()),
        settled: true,
    }
}

const fn counts(key: &'static str) -> Axis {
    Axis { takes: Takes::Counts, ..words(key) }
}

/// The axes in the order in which they are varied: the last changes fastest.
pub fn varied() -> impl Iterator<Item = &'static Axis> {
    let first = |axis: &&Axis| [RANKS, NODES, THREADS].iter().position(|key| *key == axis.key);
    let mut axes: Vec<&Axis> = AXES.iter().collect();
    axes.sort_by_key(|axis| first(axis).unwrap_or(usize::MAX));
    axes.into_iter()
}

/// Values of the axes without a field of their own in a point's settings, as (plural, text); the same axes for every point.
pub fn unsettled(settings: &Settings) -> impl Iterator<Item = (&'static str, String)> + '_ {
    AXES.iter().filter(|axis| !axis.settled).map(|axis| {
        let value = settings.other.get(axis.key);
        let text = value.map(|text| axis.parse(text).map_or(text.clone(), |value| axis.called(&value)));
        (axis.plural, text.unwrap_or_default())
    })
}

impl Axis {
    /// A value as it is typed.
    pub fn parse(&self, text: &str) -> Result<AxisValue, String> {
        match self.takes {
            Takes::Counts => {
                text.parse().map(AxisValue::Count).map_err(|e: std::num::ParseIntError| e.to_string())
            }
            Takes::Fractions => {
                text.parse().map(AxisValue::Fraction).map_err(|e: std::num::ParseFloatError| e.to_string())
            }
            Takes::Words => Ok(AxisValue::Word(text.to_string())),
        }
    }

    /// A list of values as a file has it.
    pub fn read(&self, values: Value) -> Result<Vec<AxisValue>, serde_json::Error> {
        Ok(match self.takes {
            Takes::Counts => list(serde_json::from_value(values)?, AxisValue::Count),
            Takes::Fractions => list(serde_json::from_value(values)?, AxisValue::Fraction),
            Takes::Words => list(serde_json::from_value(values)?, AxisValue::Word),
        })
    }

    /// A value in the name of a series or point.
    pub fn called(&self, value: &AxisValue) -> String {
        self.name.map_or(String::new(), |name| name(value))
    }
}

fn list<T>(values: Vec<T>, of: fn(T) -> AxisValue) -> Vec<AxisValue> {
    values.into_iter().map(of).collect()
}

/// A place on an axis.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum AxisValue {
    Count(usize),
    Fraction(f64),
    Word(String),
}

impl AxisValue {
    /// Its number; NaN of a word.
    pub fn number(&self) -> f64 {
        match self {
            AxisValue::Count(count) => *count as f64,
            AxisValue::Fraction(fraction) => *fraction,
            AxisValue::Word(_) => f64::NAN,
        }
    }
}

impl fmt::Display for AxisValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            AxisValue::Count(count) => count.fmt(f),
            AxisValue::Fraction(fraction) => fraction.fmt(f),
            AxisValue::Word(word) => word.fmt(f),
        }
    }
}

impl From<usize> for AxisValue {
    fn from(count: usize) -> Self {
        AxisValue::Count(count)
    }
}

impl From<f64> for AxisValue {
    fn from(fraction: f64) -> Self {
        AxisValue::Fraction(fraction)
    }
}

impl From<&str> for AxisValue {
    fn from(word: &str) -> Self {
        AxisValue::Word(word.to_string())
    }
}

/// The values of each axis that an experiment names, by its key.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Axes(BTreeMap<&'static str, Vec<AxisValue>>);

impl Axes {
    pub fn get(&self, key: &str) -> Option<&[AxisValue]> {
        self.0.get(key).map(Vec::as_slice)
    }

    pub fn set(&mut self, axis: &'static Axis, values: Vec<AxisValue>) {
        self.0.insert(axis.key, values);
    }

    /// Names the values of the axis with this key.
    pub fn with<V: Into<AxisValue>>(
        mut self,
        key: &'static str,
        values: impl IntoIterator<Item = V>,
    ) -> Self {
        self.0.insert(key, values.into_iter().map(Into::into).collect());
        self
    }

    /// These, and those of `other` where these name none.
    pub fn or(mut self, other: &Axes) -> Self {
        for (key, values) in &other.0 {
            self.0.entry(key).or_insert_with(|| values.clone());
        }
        self
    }
}

/// The key in `study.json`.
fn field(axis: &Axis) -> String {
    axis.key.replace('-', "_")
}

impl Serialize for Axes {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        AXES.iter().try_for_each(|axis| map.serialize_entry(&field(axis), &self.get(axis.key)))?;
        map.end()
    }
}

impl<'de> Deserialize<'de> for Axes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut fields = Map::deserialize(deserializer)?;
        let mut axes = Axes::default();
        for axis in AXES {
            let values = fields.remove(&field(axis)).filter(|values| !values.is_null());
            if let Some(values) = values {
                axes.set(axis, axis.read(values).map_err(D::Error::custom)?);
            }
        }
        Ok(axes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_are_declared_once_and_written_as_ever() {
        for (i, axis) in AXES.iter().enumerate() {
            assert!(
                AXES[..i].iter().all(|other| other.key != axis.key && other.flag != axis.flag),
                "{}",
                axis.key
            );
            assert!(!axis.help.is_empty());
        }
        assert_eq!(varied().count(), AXES.len());
        let axes = Axes::default().with(RANKS, [1, 2]).with(DATA_FRACTIONS, [0.5]).with(MODELS, ["vit-ti/4"]);
        let text = serde_json::to_string(&axes).unwrap();
        assert!(text.contains("\"data_fractions\":[0.5]") && text.contains("\"precisions\":null"), "{text}");
        assert_eq!(serde_json::from_str::<Axes>(&text).unwrap(), axes);
        let whole = serde_json::from_str::<Axes>("{\"data_fractions\":[1],\"kind\":\"weak\"}").unwrap();
        assert_eq!(whole, Axes::default().with(DATA_FRACTIONS, [1.0]));
    }
}
