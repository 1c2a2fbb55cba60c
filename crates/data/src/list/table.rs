//! Rows of a list, whatever file they come from.

use super::{csv, parquet};
use crate::DataError;
use crate::error::shown;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A larger file is no list of images.
const MAX_FILE: u64 = 2 << 30;

const PATHS: [&str; 7] = ["path", "image", "file", "filename", "file_name", "filepath", "image_path"];
const LABELS: [&str; 5] = ["label", "class", "target", "category", "class_name"];
const PARTS: [&str; 3] = ["split", "subset", "set"];

/// A list in memory.
#[derive(Debug)]
pub(super) struct Table {
    pub(super) rows: Vec<Row>,
}

/// A row of a list: an image and its class.
#[derive(Debug)]
pub(super) struct Row {
    pub(super) path: String,
    pub(super) label: String,
    pub(super) part: Option<Part>,
    file: Arc<Path>,
    /// Line of a text file, or row of a Parquet file, from 1.
    number: usize,
    kind: Kind,
}

/// Part of a set, as a list names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    Train,
    Val,
    Test,
}

impl Part {
    fn named(word: &str) -> Option<Self> {
        Some(match word.to_ascii_lowercase().as_str() {
            "train" | "training" => Part::Train,
            "val" | "valid" | "validation" | "dev" => Part::Val,
            "test" | "testing" => Part::Test,
            _ => return None,
        })
    }
}

/// Form of a file, by its extension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// Text with a separator.
    Text(u8),
    Parquet,
}

impl Kind {
    fn of(file: &Path) -> Result<Self, DataError> {
        let extension = file.extension().unwrap_or_default().to_string_lossy().to_ascii_lowercase();
        match extension.as_str() {
            "csv" => Ok(Kind::Text(b',')),
            "tsv" => Ok(Kind::Text(b'\t')),
            "parquet" => Ok(Kind::Parquet),
            _ => Err(DataError::file(file, "a list is a file that ends with .csv, .tsv or .parquet")),
        }
    }
}

/// The columns that matter, in the order in which [`Columns::find`] names them; the part need not be there.
pub(super) struct Columns {
    pub(super) path: usize,
    pub(super) label: usize,
    pub(super) part: Option<usize>,
}

impl Columns {
    /// Looks for the columns among their names. Two that could be the same are refused: nobody would know which was used.
    pub(super) fn find(names: &[&str]) -> Result<Self, String> {
        let one = |what: &str, known: &[&str]| {
            let is_known = |name: &&str| known.iter().any(|known| name.trim().eq_ignore_ascii_case(known));
            let found: Vec<usize> = (0..names.len()).filter(|column| is_known(&names[*column])).collect();
            match found[..] {
                [] => Ok(None),
                [column] => Ok(Some(column)),
                [first, second, ..] => {
                    let [first, second] = [first, second].map(|column| shown(names[column].trim()));
                    Err(format!("columns `{first}` and `{second}` could both hold {what}: keep one"))
                }
            }
        };
        let missing = |what: &str, known: &[&str]| {
            let found: Vec<String> = names.iter().take(12).map(|name| shown(name.trim())).collect();
            format!("no column for {what} ({}); the columns are {}", known.join(", "), found.join(", "))
        };
        Ok(Columns {
            path: one("paths", &PATHS)?.ok_or_else(|| missing("paths", &PATHS))?,
            label: one("classes", &LABELS)?.ok_or_else(|| missing("classes", &LABELS))?,
            part: one("parts", &PARTS)?,
        })
    }
}

impl Table {
    pub(super) fn read(file: &Path) -> Result<Self, DataError> {
        let kind = Kind::of(file)?;
        let about = fs::metadata(file).map_err(|error| DataError::file(file, error))?;
        if !about.is_file() {
            return Err(DataError::file(file, "not a file"));
        }
        if about.len() > MAX_FILE {
            return Err(DataError::file(file, format!("{} bytes are too many for a list", about.len())));
        }
        let bytes = fs::read(file).map_err(|error| DataError::file(file, error))?;
        let mut table = Builder { file: file.into(), kind, rows: vec![] };
        match kind {
            Kind::Text(separator) => csv::read(bytes, separator, &mut table)?,
            Kind::Parquet => parquet::read(&bytes, &mut table)?,
        }
        if table.rows.is_empty() {
            return Err(DataError::file(file, "names no images"));
        }
        Ok(Table { rows: table.rows })
    }
}

/// Takes rows as they are read, and refuses what is missing in them.
pub(super) struct Builder {
    file: Arc<Path>,
    kind: Kind,
    rows: Vec<Row>,
}

impl Builder {
    /// Adds a row; `part` is none where there is no such column.
    pub(super) fn add(
        &mut self,
        number: usize,
        path: &str,
        label: &str,
        part: Option<&str>,
    ) -> Result<(), DataError> {
        let (path, label) = (path.trim(), label.trim());
        let (file, kind) = (Arc::clone(&self.file), self.kind);
        let mut row = Row { path: path.into(), label: label.into(), part: None, file, number, kind };
        for (what, text) in [("path", path), ("class", label)] {
            if text.is_empty() {
                return Err(row.error(format!("the {what} is missing")));
            }
        }
        if path.contains('\0') {
            return Err(row.error(format!("`{}` is no path", shown(path))));
        }
        if let Some(word) = part {
            let named = Part::named(word.trim());
            let unknown = || row.error(format!("part `{}` is none of train, val and test", shown(word)));
            row.part = Some(named.ok_or_else(unknown)?);
        }
        self.rows.push(row);
        Ok(())
    }

    /// Refusal of the whole file, or of a line of it.
    pub(super) fn error(&self, number: Option<usize>, problem: impl ToString) -> DataError {
        match number {
            Some(number) => DataError::file(place(&self.file, self.kind, number), problem),
            None => DataError::file(&self.file, problem),
        }
    }
}

fn place(file: &Path, kind: Kind, number: usize) -> String {
    match kind {
        Kind::Text(_) => format!("{}:{number}", file.display()),
        Kind::Parquet => format!("{} row {number}", file.display()),
    }
}

impl Row {
    /// File and line, or row.
    pub(super) fn place(&self) -> String {
        place(&self.file, self.kind, self.number)
    }

    /// Folder that relative paths start from.
    pub(super) fn folder(&self) -> PathBuf {
        self.file.parent().unwrap_or(Path::new("")).to_path_buf()
    }

    pub(super) fn error(&self, problem: impl ToString) -> DataError {
        DataError::file(self.place(), problem)
    }
}
