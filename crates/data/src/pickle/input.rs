//! The bytes of a pickle, taken from the front.

use std::borrow::Cow;

use super::Fault;

pub(super) struct Input<'a> {
    bytes: &'a [u8],
    position: usize,
}

impl<'a> Input<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, position: 0 }
    }

    pub fn position(&self) -> usize {
        self.position
    }

    /// The next `count` bytes; a count that the file only claims is compared with what it has.
    pub fn take(&mut self, count: u64) -> Result<&'a [u8], Fault> {
        let rest = &self.bytes[self.position..];
        let count = usize::try_from(count).ok().filter(|&count| count <= rest.len()).ok_or(Fault::Ends)?;
        self.position += count;
        Ok(&rest[..count])
    }

    pub fn array<const N: usize>(&mut self) -> Result<[u8; N], Fault> {
        self.take(N as u64)?.try_into().map_err(|_| Fault::Ends)
    }

    pub fn byte(&mut self) -> Result<u8, Fault> {
        self.array().map(|[byte]| byte)
    }

    /// Bytes after their count.
    pub fn take_u8(&mut self) -> Result<&'a [u8], Fault> {
        let count = self.byte()?;
        self.take(count.into())
    }

    pub fn take_u32(&mut self) -> Result<&'a [u8], Fault> {
        let count = u32::from_le_bytes(self.array()?);
        self.take(count.into())
    }

    pub fn take_u64(&mut self) -> Result<&'a [u8], Fault> {
        let count = u64::from_le_bytes(self.array()?);
        self.take(count)
    }

    /// Older protocols wrote counts with a sign.
    pub fn take_i32(&mut self) -> Result<&'a [u8], Fault> {
        let count = i32::from_le_bytes(self.array()?);
        self.take(u64::try_from(count).map_err(|_| Fault::Not("a length"))?)
    }

    /// Up to the next end of line, which is left out.
    pub fn line(&mut self) -> Result<&'a [u8], Fault> {
        let rest = &self.bytes[self.position..];
        let end = rest.iter().position(|&byte| byte == b'\n').ok_or(Fault::Ends)?;
        self.position += end + 1;
        Ok(&rest[..end])
    }
}

pub(super) fn utf8(bytes: &[u8]) -> Result<&str, Fault> {
    std::str::from_utf8(bytes).map_err(|_| Fault::Not("UTF-8"))
}

/// A string as Python 2 shows it, between quotes: `'it\'s\n'`.
pub(super) fn unquote(line: &[u8]) -> Result<Cow<'_, [u8]>, Fault> {
    let fault = Fault::Not("a quoted string");
    let inside = match line {
        [b'\'', inside @ .., b'\''] | [b'"', inside @ .., b'"'] => inside,
        _ => return Err(fault),
    };
    if !inside.contains(&b'\\') {
        return Ok(Cow::Borrowed(inside));
    }
    let mut out = Vec::with_capacity(inside.len());
    let mut bytes = inside.iter().copied();
    while let Some(byte) = bytes.next() {
        if byte != b'\\' {
            out.push(byte);
            continue;
        }
        out.push(match bytes.next() {
            Some(quoted @ (b'\\' | b'\'' | b'"')) => quoted,
            Some(b'n') => b'\n',
            Some(b'r') => b'\r',
            Some(b't') => b'\t',
            Some(b'x') => hexadecimal(&mut bytes, 2).ok_or(fault.clone())? as u8,
            _ => return Err(fault),
        });
    }
    Ok(Cow::Owned(out))
}

/// Python's `raw-unicode-escape`: Latin-1, with `\uXXXX` and `\UXXXXXXXX` for what that does not have.
pub(super) fn unescape(line: &[u8]) -> Result<Cow<'_, str>, Fault> {
    if let Some(plain) = std::str::from_utf8(line).ok().filter(|text| text.is_ascii() && !text.contains('\\'))
    {
        return Ok(Cow::Borrowed(plain));
    }
    let mut out = String::with_capacity(line.len());
    let mut bytes = line.iter().copied().peekable();
    while let Some(byte) = bytes.next() {
        let digits = match (byte, bytes.peek()) {
            (b'\\', Some(b'u')) => 4,
            (b'\\', Some(b'U')) => 8,
            _ => {
                out.push(char::from(byte));
                continue;
            }
        };
        bytes.next();
        let character = hexadecimal(&mut bytes, digits).and_then(char::from_u32);
        out.push(character.ok_or(Fault::Not("an escaped character"))?);
    }
    Ok(Cow::Owned(out))
}

fn hexadecimal(bytes: &mut impl Iterator<Item = u8>, digits: usize) -> Option<u32> {
    (0..digits).try_fold(0, |value, _| Some(value << 4 | char::from(bytes.next()?).to_digit(16)?))
}
