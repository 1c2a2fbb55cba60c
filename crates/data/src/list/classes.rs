//! Classes of a list: their names in a fixed order, and the number of each label.

use super::table::Row;
use crate::DataError;
use crate::error::shown;
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

const FILE: &str = "classes.txt";
/// No label may be a larger number: each class takes a part of the model's head.
const LARGEST: usize = 999_999;

/// Classes that labels stand for.
pub(super) struct Classes {
    names: Vec<String>,
    /// Places in `names`, sorted by name.
    sorted: Vec<u32>,
    /// Flag: a number may stand for a class.
    numbered: bool,
}

impl Classes {
    /// Classes of the training rows, or those of a file beside the list.
    pub(super) fn of<'a>(rows: impl Iterator<Item = &'a Row>, list: &Path) -> Result<Self, DataError> {
        let path = list.with_file_name(FILE);
        if path.is_file() {
            return Self::read(&path);
        }
        let labels: BTreeSet<&str> = rows.map(|row| row.label.as_str()).collect();
        if labels.is_empty() {
            return Err(DataError::file(list, "names no images for the train set"));
        }
        let numbers: Option<Vec<usize>> = labels.iter().map(|label| number(label)).collect();
        let names = match numbers.and_then(|numbers| numbers.into_iter().max()) {
            None => labels.into_iter().map(String::from).collect(),
            Some(largest) if largest <= LARGEST => (0..=largest).map(|class| class.to_string()).collect(),
            Some(largest) => {
                let problem = format!("label {largest} is too large for a class: {LARGEST} is the most");
                return Err(DataError::file(list, problem));
            }
        };
        Ok(Self::new(names, false))
    }

    fn read(path: &Path) -> Result<Self, DataError> {
        let text = fs::read_to_string(path).map_err(|error| DataError::file(path, error))?;
        let names: Vec<String> = text.trim_end().lines().map(|line| line.trim().to_string()).collect();
        let line = |place: usize| format!("{}:{}", path.display(), place + 1);
        if let Some(empty) = names.iter().position(String::is_empty) {
            return Err(DataError::file(line(empty), "names no class"));
        }
        let classes = Self::new(names, true);
        let twice = classes.sorted.windows(2).find(|pair| classes.name(pair[0]) == classes.name(pair[1]));
        match twice {
            Some(pair) => {
                let problem = format!("class `{}` stands there twice", shown(classes.name(pair[0])));
                Err(DataError::file(line(pair[1] as usize), problem))
            }
            None => Ok(classes),
        }
    }

    fn new(names: Vec<String>, numbered: bool) -> Self {
        let mut sorted: Vec<u32> = (0..names.len() as u32).collect();
        sorted.sort_by(|a, b| names[*a as usize].cmp(&names[*b as usize]));
        Classes { names, sorted, numbered }
    }

    fn name(&self, class: u32) -> &str {
        &self.names[class as usize]
    }

    pub(super) fn names(&self) -> &[String] {
        &self.names
    }

    /// Number of a row's class; a name goes before a number.
    pub(super) fn label(&self, row: &Row) -> Result<u32, DataError> {
        let found = self.sorted.binary_search_by(|class| self.name(*class).cmp(&row.label));
        let by_name = found.ok().map(|place| self.sorted[place]);
        let by_number = || number(&row.label).filter(|n| self.numbered && *n < self.names.len());
        by_name.or_else(|| by_number().map(|n| n as u32)).ok_or_else(|| {
            let known =
                if self.numbered { format!("{FILE} does not name") } else { "no training row has".into() };
            row.error(format!("a class that {known}: `{}`", shown(&row.label)))
        })
    }
}

/// A whole number as one writes it: without sign, point or leading zeros.
fn number(label: &str) -> Option<usize> {
    let plain = label.bytes().all(|byte| byte.is_ascii_digit()) && (label == "0" || !label.starts_with('0'));
    label.parse().ok().filter(|_| plain)
}
