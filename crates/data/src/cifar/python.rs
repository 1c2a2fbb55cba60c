//! The Python form: a pickled dict with a matrix of bytes, `data`, and lists of labels.

use super::{CifarKind, PIXELS, Planes, Records, checked_label, interleave, numpy};
use crate::pickle::{Pickle, Value};

pub(super) fn records(bytes: &[u8], kind: CifarKind) -> Result<Records, String> {
    if bytes.is_empty() {
        return Err("it is empty".to_string());
    }
    let pickle = Pickle::read(bytes).map_err(|error| error.to_string())?;
    let get = |key: &str| pickle.root().get(key).ok_or(format!("it has no `{key}`"));
    let key = kind.keys().0;
    let labels = get(key)?.items().ok_or(format!("`{key}` is not a list"))?;
    let images = numpy::byte_matrix(get("data")?, PIXELS).map_err(|problem| format!("`data`: {problem}"))?;
    let (images, _): (&[Planes], _) = images.as_chunks();
    if images.is_empty() {
        return Err("it holds no images".to_string());
    }
    if labels.len() != images.len() {
        return Err(format!("it has {} labels for {} images", labels.len(), images.len()));
    }
    let labels =
        labels.enumerate().map(|(record, label)| label_of(label, record, kind)).collect::<Result<_, _>>()?;
    let mut pixels = Vec::with_capacity(images.len() * PIXELS);
    images.iter().for_each(|planes| interleave(planes, &mut pixels));
    Ok(Records { labels, pixels })
}

fn label_of(label: Value<'_>, record: usize, kind: CifarKind) -> Result<u8, String> {
    let number = label.int().ok_or_else(|| format!("record {record} has {} for a label", label.kind()))?;
    checked_label(number, record, kind.classes())
}
