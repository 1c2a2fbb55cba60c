//! The binary form: records of one label (CIFAR-10) or two (CIFAR-100: coarse, fine), then the planes of an image.

use super::{CifarKind, CifarLabels, PIXELS, Planes, Records, checked_label, interleave};

pub(super) fn records(bytes: &[u8], kind: CifarKind) -> Result<Records, String> {
    match kind {
        CifarKind::Ten => split(bytes, |record, labels: &[u8; 1]| {
            let [label] = *labels;
            checked_label(label.into(), record, kind.classes())
        }),
        CifarKind::Hundred { labels: wanted } => split(bytes, |record, labels: &[u8; 2]| {
            let (fine, coarse) = (CifarLabels::Fine, CifarLabels::Coarse);
            // Both are checked, whichever is wanted: a wrong one is a sign of a file that is not what it seems.
            let check = |which: CifarLabels, label: u8| {
                checked_label(label.into(), record, CifarKind::Hundred { labels: which }.classes())
                    .map_err(|problem| format!("{problem} ({which})"))
            };
            let [coarse_label, fine_label] = *labels;
            let (coarse_label, fine_label) = (check(coarse, coarse_label)?, check(fine, fine_label)?);
            Ok(if wanted == fine { fine_label } else { coarse_label })
        }),
    }
}

/// Cuts a file into records of `L` labels each, of which `label` chooses one.
fn split<const L: usize>(
    bytes: &[u8],
    label: impl Fn(usize, &[u8; L]) -> Result<u8, String>,
) -> Result<Records, String> {
    let length = L + PIXELS;
    let (count, rest) = (bytes.len() / length, bytes.len() % length);
    if bytes.is_empty() {
        return Err("it is empty".to_string());
    }
    if rest != 0 {
        return Err(format!("truncated: {rest} bytes are left over after {count} records of {length} bytes"));
    }
    let mut records =
        Records { labels: Vec::with_capacity(count), pixels: Vec::with_capacity(count * PIXELS) };
    for (index, record) in bytes.chunks_exact(length).enumerate() {
        let Some((labels, planes)) = record.split_first_chunk::<L>() else { break };
        let Some(planes): Option<&Planes> = planes.first_chunk() else { break };
        records.labels.push(label(index, labels)?);
        interleave(planes, &mut records.pixels);
    }
    Ok(records)
}
