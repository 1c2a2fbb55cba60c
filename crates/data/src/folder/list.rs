//! Lists that say of which class an image is; the form is described above, in [`super`].

use crate::DataError;
use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};

/// The list that goes with a folder of images.
pub(super) fn find(root: &Path, folder: &Path) -> Result<PathBuf, DataError> {
    let name = folder.file_name().unwrap_or_default().to_string_lossy();
    let places = [
        format!("{name}.txt"),
        format!("{name}.csv"),
        format!("{name}/labels.txt"),
        format!("{name}/labels.csv"),
    ];
    let found = places.iter().map(|place| root.join(place)).find(|path| path.is_file());
    found.ok_or_else(|| {
        let problem = format!(
            "images without class folders need a list of their classes; none of {} is in {}",
            places.join(", "),
            root.display()
        );
        DataError::file(folder, problem)
    })
}

/// The classes and files that a list names, each among `files`, which are sorted.
pub(super) fn read(
    list: &Path,
    files: &[PathBuf],
    class_names: &[String],
) -> Result<Vec<(u32, PathBuf)>, DataError> {
    let bytes = fs::read(list).map_err(|error| DataError::file(list, error))?;
    let text = String::from_utf8(bytes).map_err(|_| DataError::file(list, "not valid UTF-8"))?;
    let comma = list.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("csv"));
    let mut images = Vec::new();
    let mut seen = HashSet::new();
    for (number, line) in (1..).zip(text.lines()).filter(|(_, line)| !line.trim().is_empty()) {
        let problem = |problem: String| DataError::file(format!("{}:{number}", list.display()), problem);
        let (file, class) = fields(line, comma).ok_or_else(|| problem(expected(line, comma)))?;
        let (file, label) = (Path::new(file.trim_start_matches("./")), label(class, class_names));
        // A heading's fields are neither files nor classes.
        if comma && number == 1 && label.is_none() && file.extension().is_none() {
            continue;
        }
        let label = label.ok_or_else(|| {
            problem(format!(
                "class `{class}` is neither a class folder nor a number below {}",
                class_names.len()
            ))
        })?;
        let Ok(place) = files.binary_search_by(|known| known.as_path().cmp(file)) else {
            return Err(problem(format!("there is no image `{}`", file.display())));
        };
        if !seen.insert(place) {
            return Err(problem(format!("names `{}` a second time", file.display())));
        }
        images.push((label, files[place].clone()));
    }
    if images.is_empty() {
        return Err(DataError::file(list, "names no images"));
    }
    Ok(images)
}

fn fields(line: &str, comma: bool) -> Option<(&str, &str)> {
    let line = line.trim();
    let (file, class) = if comma { line.rsplit_once(',')? } else { line.rsplit_once(char::is_whitespace)? };
    let (file, class) = (unquoted(file), unquoted(class));
    (!file.is_empty() && !class.is_empty()).then_some((file, class))
}

fn unquoted(field: &str) -> &str {
    let field = field.trim();
    field.strip_prefix('"').and_then(|field| field.strip_suffix('"')).unwrap_or(field)
}

fn expected(line: &str, comma: bool) -> String {
    let form = if comma { "file,class" } else { "file class" };
    format!("expected `{form}`, found `{}`", line.trim())
}

fn label(class: &str, class_names: &[String]) -> Option<u32> {
    let by_name = class_names.binary_search_by(|name| name.as_str().cmp(class)).ok();
    let by_number = || class.parse().ok().filter(|&number: &usize| number < class_names.len());
    by_name.or_else(by_number).map(|label| label as u32)
}
