//! Text with separators, as RFC 4180 has it: fields with quotes may hold separators, line breaks and doubled quotes.

use super::table::{Builder, Columns};
use crate::DataError;
use crate::error::shown;

/// Reads all rows. The first names the columns; lines without anything are passed over.
pub(super) fn read(bytes: Vec<u8>, separator: u8, table: &mut Builder) -> Result<(), DataError> {
    let text = match String::from_utf8(bytes) {
        Ok(text) => text,
        Err(error) => {
            let valid = error.utf8_error().valid_up_to();
            let line = 1 + error.as_bytes()[..valid].iter().filter(|byte| **byte == b'\n').count();
            return Err(table.error(Some(line), "not valid UTF-8"));
        }
    };
    // Excel begins UTF-8 with a byte order mark.
    let mut records = Records::new(text.strip_prefix('\u{feff}').unwrap_or(&text), separator);
    let mut fields = vec![];
    let Some(line) = records.next(&mut fields).map_err(|(line, why)| table.error(Some(line), why))? else {
        return Err(table.error(None, "is empty"));
    };
    let names: Vec<&str> = fields.iter().map(String::as_str).collect();
    let columns = Columns::find(&names).map_err(|mut why| {
        if names.len() == 1 && names[0].contains(';') {
            why += "; fields are separated by commas, not semicolons";
        }
        table.error(Some(line), why)
    })?;
    let width = names.len();
    while let Some(line) = records.next(&mut fields).map_err(|(line, why)| table.error(Some(line), why))? {
        if fields.len() != width {
            let why = format!("{} fields, but the first line names {width} columns", fields.len());
            return Err(table.error(Some(line), why));
        }
        let part = columns.part.map(|column| fields[column].as_str());
        table.add(line, &fields[columns.path], &fields[columns.label], part)?;
    }
    Ok(())
}

/// Records of a text, one after the other.
struct Records<'a> {
    rest: &'a str,
    separator: char,
    line: usize,
}

/// Line and what is wrong with it.
type Problem = (usize, String);

impl<'a> Records<'a> {
    fn new(text: &'a str, separator: u8) -> Self {
        Records { rest: text, separator: char::from(separator), line: 1 }
    }

    /// Replaces `fields` by those of the next record, and gives the line it begins in; none at the end.
    fn next(&mut self, fields: &mut Vec<String>) -> Result<Option<usize>, Problem> {
        fields.clear();
        loop {
            if self.rest.is_empty() {
                return Ok(None);
            }
            let (first, rest) = self.rest.split_once('\n').unwrap_or((self.rest, ""));
            if !first.trim().is_empty() {
                break;
            }
            (self.rest, self.line) = (rest, self.line + 1);
        }
        let start = self.line;
        loop {
            let field = match self.rest.strip_prefix('"') {
                Some(quoted) => self.quoted(quoted)?,
                None => self.plain(),
            };
            fields.push(field);
            if let Some(rest) = self.rest.strip_prefix(self.separator) {
                self.rest = rest;
                continue;
            }
            let end = self.rest.strip_prefix("\r\n").or_else(|| self.rest.strip_prefix('\n'));
            if let Some(rest) = end {
                (self.rest, self.line) = (rest, self.line + 1);
            }
            return Ok(Some(start));
        }
    }

    /// A field up to the next separator or the end of the line.
    fn plain(&mut self) -> String {
        let end = self.rest.find([self.separator, '\n']).unwrap_or(self.rest.len());
        let (field, rest) = self.rest.split_at(end);
        let at_line_end = rest.is_empty() || rest.starts_with('\n');
        let (field, cut) = match field.strip_suffix('\r').filter(|_| at_line_end) {
            Some(field) => (field, 1),
            None => (field, 0),
        };
        self.rest = &self.rest[end - cut..];
        if self.rest == "\r" {
            self.rest = "";
        }
        field.to_string()
    }

    /// A field up to the quote that ends it; `quoted` begins after the first.
    fn quoted(&mut self, quoted: &'a str) -> Result<String, Problem> {
        let (start, mut field, mut rest) = (self.line, String::new(), quoted);
        loop {
            let Some((part, after)) = rest.split_once('"') else {
                return Err((start, "a quote that begins here does not end".into()));
            };
            field.push_str(part);
            self.line += part.matches('\n').count();
            match after.strip_prefix('"') {
                Some(after) => {
                    field.push('"');
                    rest = after;
                }
                None => {
                    self.rest = after;
                    break;
                }
            }
        }
        let ends = self.rest.is_empty() || self.rest.starts_with([self.separator, '\n']);
        if !ends && !self.rest.starts_with("\r\n") && self.rest != "\r" {
            let found = shown(self.rest.chars().take(20).collect::<String>());
            return Err((self.line, format!("`{found}` follows the quote that ends a field")));
        }
        if self.rest == "\r" {
            self.rest = "";
        }
        Ok(field)
    }
}
