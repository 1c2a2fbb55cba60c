//! A line of metrics, and how it is written and read.

use super::{Declared, Digits, METRICS, Metric};
use crate::parts::{PARTS, Parts};
use crate::schema::Schema;
use serde::de::{Error, IgnoredAny, MapAccess, Visitor};
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::borrow::Cow;
use std::fmt;
use std::io::{self, Write};

/// The numbers of a line, each where it is known.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Values([Option<f64>; METRICS.len()]);

impl Values {
    pub fn get(&self, metric: Metric) -> Option<f64> {
        self.0[metric as usize]
    }

    /// Sets a metric; `None` leaves it unknown.
    pub fn set(&mut self, metric: Metric, value: impl Into<Option<f64>>) {
        self.0[metric as usize] = value.into();
    }

    /// Removes a metric, and returns its value.
    pub fn take(&mut self, metric: Metric) -> Option<f64> {
        self.0[metric as usize].take()
    }

    /// The metrics that are known, with their values, in the order of the columns.
    pub fn known(&self) -> impl Iterator<Item = (&'static Declared, f64)> + '_ {
        let all = METRICS.iter().map(|declared| declared.metric.declared());
        all.filter_map(|declared| Some((declared, self.get(declared.metric)?)))
    }
}

/// A value for each layer, in the order of the model.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LayerValues(pub Vec<(String, f64)>);

impl LayerValues {
    /// The median over the layers; of an even number, the lower of the two in the middle.
    pub fn median(&self) -> Option<f64> {
        let mut values: Vec<f64> = self.0.iter().map(|(_, value)| *value).collect();
        values.sort_by(f64::total_cmp);
        values.get(values.len().saturating_sub(1) / 2).copied()
    }
}

/// A line of `metrics.jsonl`: a step, or an evaluation after it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MetricsLine {
    pub step: u64,
    pub epoch: u64,
    pub values: Values,
    /// Values by layer, of the metrics that have them.
    pub layers: Vec<(Metric, LayerValues)>,
    pub schema: Schema<1>,
}

impl MetricsLine {
    pub fn new(step: u64, epoch: u64) -> Self {
        MetricsLine { step, epoch, schema: Schema::CURRENT, ..MetricsLine::default() }
    }

    pub fn get(&self, metric: Metric) -> Option<f64> {
        self.values.get(metric)
    }

    /// Sets a metric; `None` leaves it unknown.
    pub fn set(&mut self, metric: Metric, value: impl Into<Option<f64>>) {
        self.values.set(metric, value);
    }

    /// Sets a metric to the largest of its values by layer, and keeps these; nothing where there are none.
    pub fn set_layers(&mut self, metric: Metric, layers: LayerValues) {
        if let Some(largest) = layers.0.iter().map(|(_, value)| *value).max_by(f64::total_cmp) {
            self.set(metric, largest);
            self.layers.push((metric, layers));
        }
    }

    /// Returns whether the line is of a step, and not of an evaluation.
    pub fn is_step(&self) -> bool {
        self.get(Metric::LearningRate).or(self.get(Metric::Seconds)).is_some()
    }

    /// Images that the step took.
    pub fn images(&self) -> f64 {
        self.get(Metric::ImagesPerSecond).unwrap_or(0.0) * self.get(Metric::Seconds).unwrap_or(0.0)
    }

    /// Sets the account of time: the means over the ranks.
    pub fn set_parts(&mut self, parts: &Parts) {
        PARTS.iter().for_each(|part| self.set(part.metric, (part.of)(parts)));
    }

    /// The account of time, as the mean over the ranks; an evaluation has none.
    pub fn parts(&self) -> Option<Parts> {
        Some(Parts {
            compute: self.get(Metric::ComputeSeconds)?,
            communication: self.get(Metric::CommunicationSeconds)?,
            wait: self.get(Metric::WaitSeconds)?,
            data: self.get(Metric::DataSeconds)?,
            optimizer: self.get(Metric::OptimizerSeconds)?,
            idle: self.get(Metric::IdleSeconds)?,
            hidden: self.get(Metric::HiddenSeconds)?,
        })
    }

    /// Words for a line of a log: the metrics that are declared to stand there.
    pub fn log(&self) -> String {
        self.values
            .known()
            .filter_map(|(declared, value)| Some(format!(" · {} {value:.1e}", declared.log?)))
            .collect()
    }

    /// Writes the line of `metrics.jsonl`, without building it in memory.
    pub fn write_json(&self, out: &mut impl Write) -> io::Result<()> {
        write!(out, "{{\"step\":{},\"epoch\":{}", self.step, self.epoch)?;
        for (declared, value) in self.values.known() {
            write!(out, ",\"{}\":{}", declared.name, Shown(declared.digits, value, "null"))?;
        }
        for (metric, LayerValues(layers)) in &self.layers {
            let Some(key) = metric.declared().layers else { continue };
            write!(out, ",\"{key}\":{{")?;
            for (i, (layer, value)) in layers.iter().enumerate() {
                let comma = if i == 0 { "" } else { "," };
                write!(out, "{comma}\"{layer}\":{}", Shown(Digits::Real, *value, "null"))?;
            }
            write!(out, "}}")?;
        }
        writeln!(out, ",\"schema\":{}}}", self.schema.number())
    }

    /// Writes the row of `metrics.csv`.
    pub fn write_csv(&self, out: &mut impl Write) -> io::Result<()> {
        write!(out, "{},{}", self.step, self.epoch)?;
        for declared in &METRICS {
            match self.get(declared.metric) {
                Some(value) => write!(out, ",{}", Shown(declared.digits, value, ""))?,
                None => write!(out, ",")?,
            }
        }
        writeln!(out)
    }
}

/// The first line of `metrics.csv`.
pub fn csv_heading() -> String {
    let names = METRICS.iter().map(|declared| declared.name);
    ["step", "epoch"].into_iter().chain(names).collect::<Vec<_>>().join(",")
}

/// A value with its digits, or what stands for NaN and the infinities, which neither JSON nor every reader of tables knows.
pub(crate) struct Shown(pub Digits, pub f64, pub &'static str);

impl fmt::Display for Shown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Shown(digits, value, missing) = *self;
        match digits {
            _ if !value.is_finite() => f.write_str(missing),
            Digits::Whole => write!(f, "{}", value as u64),
            Digits::Real => write!(f, "{value}"),
            Digits::Measured => write!(f, "{value:.6}"),
        }
    }
}

impl Serialize for Values {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        self.known().try_for_each(|(declared, value)| map.serialize_entry(declared.name, &value))?;
        map.end()
    }
}

impl<'de> Deserialize<'de> for Values {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Map;
        impl<'de> Visitor<'de> for Map {
            type Value = Values;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("numbers by their names")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Values, A::Error> {
                let mut values = Values::default();
                while let Some(key) = map.next_key::<Cow<'_, str>>()? {
                    match Metric::named(&key) {
                        Some(metric) => values.0[metric as usize] = map.next_value()?,
                        None => drop(map.next_value::<IgnoredAny>()?),
                    }
                }
                Ok(values)
            }
        }
        deserializer.deserialize_map(Map)
    }
}

impl<'de> Deserialize<'de> for LayerValues {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Map;
        impl<'de> Visitor<'de> for Map {
            type Value = LayerValues;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("numbers by their layers")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<LayerValues, A::Error> {
                let mut layers = vec![];
                while let Some((layer, value)) = map.next_entry::<String, Option<f64>>()? {
                    layers.push((layer, value.unwrap_or(f64::NAN)));
                }
                Ok(LayerValues(layers))
            }
        }
        deserializer.deserialize_map(Map)
    }
}

impl<'de> Deserialize<'de> for MetricsLine {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Map;
        impl<'de> Visitor<'de> for Map {
            type Value = MetricsLine;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a line of metrics")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<MetricsLine, A::Error> {
                let mut line = MetricsLine::default();
                let (mut step, mut epoch) = (None, None);
                while let Some(key) = map.next_key::<Cow<'_, str>>()? {
                    let layered = METRICS.iter().find(|declared| declared.layers == Some(&*key));
                    match (&*key, Metric::named(&key), layered) {
                        ("step", ..) => step = Some(map.next_value()?),
                        ("epoch", ..) => epoch = Some(map.next_value()?),
                        ("schema", ..) => line.schema = map.next_value()?,
                        (_, Some(metric), _) => line.values.0[metric as usize] = map.next_value()?,
                        (_, _, Some(layered)) => line.layers.push((layered.metric, map.next_value()?)),
                        _ => drop(map.next_value::<IgnoredAny>()?),
                    }
                }
                line.step = step.ok_or_else(|| A::Error::missing_field("step"))?;
                line.epoch = epoch.ok_or_else(|| A::Error::missing_field("epoch"))?;
                Ok(line)
            }
        }
        deserializer.deserialize_map(Map)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(line: &MetricsLine) -> (String, String) {
        let (mut json, mut csv) = (vec![], vec![]);
        line.write_json(&mut json).unwrap();
        line.write_csv(&mut csv).unwrap();
        (String::from_utf8(json).unwrap(), String::from_utf8(csv).unwrap())
    }

    #[test]
    fn a_line_is_read_as_it_was_written() {
        let mut line = MetricsLine::new(7, 1);
        line.set(Metric::Loss, 1.0 / 3.0);
        line.set(Metric::SlowestRank, 2.0);
        line.set(Metric::Seconds, 0.25);
        line.set_parts(&Parts { compute: 0.125, hidden: 0.5, ..Parts::default() });
        let (json, csv) = written(&line);
        assert!(
            json.starts_with("{\"step\":7,\"epoch\":1,\"loss\":0.3333333333333333,\"seconds\":0.250000,")
        );
        assert!(json.ends_with("\"slowest_rank\":2,\"schema\":1}\n"), "{json}");
        assert_eq!(csv.trim_end().split(',').count(), csv_heading().split(',').count());
        let read: MetricsLine = serde_json::from_str(&json).unwrap();
        assert_eq!(read, line);
        assert_eq!(written(&read), (json, csv), "digit for digit");
    }

    #[test]
    fn values_by_layer_are_read_as_they_were_written() {
        let layers =
            LayerValues([("a", 0.25), ("b", 0.5), ("c", 1e-7)].map(|(a, x)| (a.to_string(), x)).to_vec());
        let mut line = MetricsLine::new(0, 0);
        line.set(Metric::UpdateRatioMedian, layers.median());
        line.set_layers(Metric::UpdateRatio, layers);
        line.set_layers(Metric::UpdateRatio, LayerValues::default());
        let (json, csv) = written(&line);
        let expected = "\"update_ratio\":0.5,\"update_ratio_median\":0.25,\"update_ratios\":{\"a\":0.25,";
        assert!(json.contains(expected), "{json}");
        assert!(csv.ends_with(",0.5,0.25,\n") && line.log() == " · update 5.0e-1", "{csv}");
        assert_eq!(serde_json::from_str::<MetricsLine>(&json).unwrap(), line);
    }

    #[test]
    fn lines_of_other_versions_are_read_or_refused() {
        let line: MetricsLine =
            serde_json::from_str("{\"step\":0,\"epoch\":0,\"eval_loss\":null,\"odd\":[1]}").unwrap();
        assert_eq!((line.get(Metric::EvalLoss), line.is_step(), line.schema.number()), (None, false, 0));
        let newer = serde_json::from_str::<MetricsLine>("{\"step\":0,\"epoch\":0,\"schema\":2}").unwrap_err();
        assert!(newer.to_string().starts_with("has schema 2; this version of vitesse reads schemas up to 1"));
        for damaged in
            ["{\"epoch\":0}", "{\"step\":-1,\"epoch\":0}", "{\"step\":1,\"epoch\":0,\"loss\":\"x\"}"]
        {
            assert!(serde_json::from_str::<MetricsLine>(damaged).is_err(), "{damaged}");
        }
    }
}
