//! Image files that a list names: a CSV, TSV or Parquet file with a row for each image.
//!
//! ```text
//! path,label,split
//! photos/a.jpg,cat,train
//! "photos/b, c.jpg",dog,val
//! ```
//!
//! * Columns are known by their names, in either case; the first line of a CSV file names them. One holds paths (`path`,
//!   `image`, `file`, `filename`, `file_name`, `filepath` or `image_path`), one classes (`label`, `class`, `target`, `category`
//!   or `class_name`), and one may hold the part (`split`, `subset` or `set`). Others are passed over.
//! * Paths are absolute, or relative to the folder that the list lies in.
//! * Classes are those of the training rows. If all of their labels are whole numbers, a class is its number, from 0 to the
//!   largest; otherwise classes are sorted by name, byte by byte. A file `classes.txt` beside the list, with a class in each
//!   line, fixes them instead: a label is then a name in it, or a number from 0.
//! * `split` is `train`, `val` (or `valid`, `validation`, `dev`) or `test`. What is evaluated is `val`, or `test` if no row is
//!   `val`; rows of the other are not used. Without the column, a list `train.csv` has `val.csv` (or `test.csv`) beside it. If
//!   that is not there, every tenth image of each class, in the order of the list, is in the validation set.
//! * Images come in the order of the list. Every file must be there, and no path may stand twice in a part; with
//!   `--skip-bad-images` such rows are left out.

mod classes;
mod csv;
mod parquet;
mod table;
#[cfg(test)]
mod tests;

use crate::error::shown;
use crate::labelled::LabelledFiles;
use crate::registry::{Entry, Images, Open, Place, Reading};
use crate::{DataError, Skipped, Split, Task};
use classes::Classes;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use table::{Part, Row, Table};

/// Entry of the registry.
pub(crate) const ENTRY: Entry = Entry {
    name: "list",
    place: Some(Place::File),
    task: Task::Classify,
    about: "image files and their classes as a CSV, TSV or Parquet file lists them",
    image_size: 224,
    images: Images::Files,
    facts: None,
    run: None,
    archive: None,
    open: Open::Path(|file, reading| Ok(Arc::new(open(file, reading)?))),
};

/// One image of so many of a class is in the validation set, where nothing else says which are.
const ONE_IN: usize = 10;

/// Reads the list, and looks for the files of one part; none is opened.
pub fn open(file: &Path, reading: Reading) -> Result<LabelledFiles, DataError> {
    let Reading { split, channels, skip_bad } = reading;
    let mut set = LabelledFiles::empty(file, channels)?;
    let table = Table::read(file)?;
    let (table, parts) = parts(table, file)?;
    let training = table.rows.iter().zip(&parts).filter(|(_, part)| **part == Some(Split::Train));
    let classes = Classes::of(training.map(|(row, _)| row), file)?;
    set.class_names = classes.names().to_vec();
    let of_split = table.rows.iter().zip(&parts).filter(|(_, part)| **part == Some(split));
    let mut lines = HashMap::new();
    for (row, _) in of_split {
        let label = classes.label(row)?;
        let path = row.folder().join(&row.path);
        let problem = match lines.insert(path.clone(), row.place()) {
            Some(before) => format!("`{}` stands in {before}, too", shown(&row.path)),
            None if !path.is_file() => format!("there is no file {}", shown(path.display())),
            None => {
                set.files.push(path);
                set.labels.push(label);
                continue;
            }
        };
        if !skip_bad {
            return Err(row.error(problem));
        }
        set.left_out.push(Skipped { index: set.left_out.len(), name: row.place(), problem });
    }
    if set.files.is_empty() {
        return Err(DataError::file(file, format!("names no images for the {split} set")));
    }
    Ok(set)
}

/// All rows with the part of each, from the split column, a second list, or every tenth image of each class.
fn parts(mut table: Table, file: &Path) -> Result<(Table, Vec<Option<Split>>), DataError> {
    if table.rows.iter().any(|row| row.part.is_some()) {
        let has_val = table.rows.iter().any(|row| row.part == Some(Part::Val));
        let split = |row: &Row| match row.part {
            Some(Part::Train) => Some(Split::Train),
            Some(Part::Val) => Some(Split::Test),
            Some(Part::Test) if !has_val => Some(Split::Test),
            _ => None,
        };
        let parts = table.rows.iter().map(split).collect();
        return Ok((table, parts));
    }
    if let Some(second) = second_list(file) {
        let mut parts = vec![Some(Split::Train); table.rows.len()];
        table.rows.extend(Table::read(&second)?.rows);
        parts.resize(table.rows.len(), Some(Split::Test));
        return Ok((table, parts));
    }
    let mut seen: HashMap<&str, usize> = HashMap::new();
    let mut parts = Vec::with_capacity(table.rows.len());
    for row in &table.rows {
        let count = seen.entry(&row.label).or_default();
        *count += 1;
        parts.push(Some(if count.is_multiple_of(ONE_IN) { Split::Test } else { Split::Train }));
    }
    if !parts.contains(&Some(Split::Test)) {
        let problem = format!(
            "no class has {ONE_IN} images, of which every tenth would be in the validation set; add a column `split`"
        );
        return Err(DataError::file(file, problem));
    }
    Ok((table, parts))
}

/// `val` or `test` beside a list called `train`.
fn second_list(file: &Path) -> Option<PathBuf> {
    let named = file.file_stem().filter(|stem| stem.eq_ignore_ascii_case("train"));
    let extension = file.extension().filter(|_| named.is_some())?;
    let beside = ["val", "test"].map(|name| file.with_file_name(name).with_extension(extension));
    beside.into_iter().find(|path| path.is_file())
}
