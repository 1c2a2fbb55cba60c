//! Parquet files, as far as lists of images need them: columns of text and of whole numbers at the top of the schema, plain or
//! by dictionary, without compression or with Snappy, gzip or Zstandard.

mod page;
mod thrift;

use super::table::{Builder, Columns};
use crate::DataError;
use crate::error::shown;
use page::Chunk;
use thrift::Value;

const MAGIC: &[u8; 4] = b"PAR1";
/// Rows for each byte of a file, at most: every row has another path, which takes some bits. So a few broken bytes can't ask
/// for a huge allocation.
const ROWS_PER_BYTE: u64 = 8;

/// Reads all rows.
pub(super) fn read(bytes: &[u8], table: &mut Builder) -> Result<(), DataError> {
    let footer = footer(bytes).map_err(|why| table.error(None, why))?;
    let columns = schema(&footer).map_err(|why| table.error(None, why))?;
    let names: Vec<&str> = columns.iter().map(|column| column.name.as_str()).collect();
    let wanted = Columns::find(&names).map_err(|why| table.error(None, why))?;
    let (mut number, most) = (0, ROWS_PER_BYTE * bytes.len() as u64);
    for group in footer.list(4) {
        let rows = group.number(3).filter(|rows| rows.saturating_add(number as u64) <= most);
        let Some(rows) = rows else { return Err(table.error(None, "a row group has no valid size")) };
        let values = |column: usize| {
            let column = &columns[column];
            let values = column.values(group, bytes, rows as usize);
            values.map_err(|why| table.error(None, format!("column `{}`: {why}", shown(&column.name))))
        };
        let (paths, labels) = (values(wanted.path)?, values(wanted.label)?);
        let parts = wanted.part.map(values).transpose()?;
        for row in 0..rows as usize {
            number += 1;
            let part = parts.as_ref().map(|parts| parts[row].as_str());
            table.add(number, &paths[row], &labels[row], part)?;
        }
    }
    Ok(())
}

fn footer(bytes: &[u8]) -> Result<Value, String> {
    let ends = bytes.len() >= 12 && bytes.starts_with(MAGIC);
    let Some((rest, end)) = bytes.split_last_chunk::<8>().filter(|(_, end)| ends && end[4..] == MAGIC[..])
    else {
        return Err("not a whole Parquet file".into());
    };
    let len = u32::from_le_bytes([end[0], end[1], end[2], end[3]]) as usize;
    let start = rest.len().checked_sub(len).ok_or("its footer is longer than the file")?;
    Ok(thrift::read(&rest[start..])?.0)
}

/// A column at the top of the schema.
struct Column {
    name: String,
    /// Number among the columns that hold values, type and whether values may be missing; none if the column has parts.
    leaf: Option<(usize, u64, bool)>,
}

/// Columns at the top of the schema, which is a tree written parent first.
fn schema(footer: &Value) -> Result<Vec<Column>, String> {
    let mut elements = footer.list(2).iter();
    let count = elements.next().and_then(|root| root.number(5)).ok_or("it has no schema")?;
    let (mut columns, mut leaves) = (vec![], 0);
    for _ in 0..count {
        let element = elements.next().ok_or("its schema is cut off")?;
        let name = String::from_utf8_lossy(element.bytes(4).unwrap_or_default()).into_owned();
        let children = element.number(5).unwrap_or(0);
        let repetition = element.number(3).unwrap_or(0);
        let leaf = match (children, repetition) {
            (0, 0 | 1) => element.number(1).map(|kind| (leaves, kind, repetition == 1)),
            _ => None,
        };
        leaves += usize::from(children == 0);
        let mut below = children;
        while below > 0 {
            let element = elements.next().ok_or("its schema is cut off")?;
            let children = element.number(5).unwrap_or(0);
            leaves += usize::from(children == 0);
            below = (below - 1).checked_add(children).ok_or("its schema is too large")?;
        }
        columns.push(Column { name, leaf });
    }
    Ok(columns)
}

impl Column {
    /// Values of a row group as text; those that are missing are empty.
    fn values(&self, group: &Value, bytes: &[u8], rows: usize) -> Result<Vec<String>, String> {
        let Some((leaf, kind, optional)) = self.leaf else {
            return Err("is made of parts; only paths to image files are read, not images within".into());
        };
        let about =
            group.list(1).get(leaf).and_then(|chunk| chunk.get(3)).ok_or("is missing in a row group")?;
        let codec = about.number(4).ok_or("does not say how it is compressed")?;
        let start = [11, 9].into_iter().filter_map(|field| about.number(field)).min();
        let len = about.number(7).ok_or("does not say how long it is")?;
        let end = start.and_then(|start| start.checked_add(len)).filter(|end| *end <= bytes.len() as u64);
        let (Some(start), Some(end)) = (start, end) else {
            return Err("lies outside of the file".into());
        };
        let values = Chunk { kind, codec, optional, rows }.read(&bytes[start as usize..end as usize])?;
        if values.len() != rows {
            return Err(format!("{} values for {rows} rows", values.len()));
        }
        Ok(values)
    }
}
