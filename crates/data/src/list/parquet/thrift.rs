//! Thrift's compact protocol, which Parquet writes what it says about itself in.

/// A value of any type. Numbers of all widths are one.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Value {
    Flag(bool),
    Number(i64),
    Bytes(Vec<u8>),
    List(Vec<Value>),
    /// Fields by their numbers.
    Struct(Vec<(i16, Value)>),
    /// A kind that nothing here is written in.
    Other,
}

/// Structures within structures; Parquet has six.
const DEEPEST: usize = 16;

/// A structure at the beginning of `bytes`, and its length.
pub(super) fn read(bytes: &[u8]) -> Result<(Value, usize), String> {
    let mut reader = Reader { rest: bytes };
    let value = reader.structure(0).ok_or("what it says about itself is broken")?;
    Ok((value, bytes.len() - reader.rest.len()))
}

impl Value {
    pub(super) fn get(&self, field: i16) -> Option<&Value> {
        let Value::Struct(fields) = self else { return None };
        fields.iter().find(|(number, _)| *number == field).map(|(_, value)| value)
    }

    /// A number that is not negative.
    pub(super) fn number(&self, field: i16) -> Option<u64> {
        match self.get(field)? {
            Value::Number(number) => u64::try_from(*number).ok(),
            _ => None,
        }
    }

    pub(super) fn flag(&self, field: i16) -> Option<bool> {
        match self.get(field)? {
            Value::Flag(flag) => Some(*flag),
            _ => None,
        }
    }

    pub(super) fn bytes(&self, field: i16) -> Option<&[u8]> {
        match self.get(field)? {
            Value::Bytes(bytes) => Some(bytes),
            _ => None,
        }
    }

    /// Elements of a list; none if there is no such field.
    pub(super) fn list(&self, field: i16) -> &[Value] {
        match self.get(field) {
            Some(Value::List(values)) => values,
            _ => &[],
        }
    }
}

struct Reader<'a> {
    rest: &'a [u8],
}

impl Reader<'_> {
    fn byte(&mut self) -> Option<u8> {
        let (first, rest) = self.rest.split_first()?;
        self.rest = rest;
        Some(*first)
    }

    fn varint(&mut self) -> Option<u64> {
        varint(&mut self.rest)
    }

    fn zigzag(&mut self) -> Option<i64> {
        let number = self.varint()?;
        Some((number >> 1) as i64 ^ -((number & 1) as i64))
    }

    fn taken(&mut self, len: usize) -> Option<Vec<u8>> {
        let (taken, rest) = self.rest.split_at_checked(len)?;
        self.rest = rest;
        Some(taken.to_vec())
    }

    fn structure(&mut self, depth: usize) -> Option<Value> {
        if depth > DEEPEST {
            return None;
        }
        let (mut fields, mut number) = (vec![], 0i16);
        loop {
            let head = self.byte()?;
            if head == 0 {
                return Some(Value::Struct(fields));
            }
            number = match head >> 4 {
                0 => i16::try_from(self.zigzag()?).ok()?,
                step => number.checked_add(i16::from(step))?,
            };
            let value = match head & 15 {
                1 => Value::Flag(true),
                2 => Value::Flag(false),
                kind => self.value(kind, depth)?,
            };
            fields.push((number, value));
        }
    }

    fn value(&mut self, kind: u8, depth: usize) -> Option<Value> {
        Some(match kind {
            1 | 2 => Value::Flag(self.byte()? == 1),
            3 => Value::Number(i64::from(self.byte()? as i8)),
            4..=6 => Value::Number(self.zigzag()?),
            7 => {
                self.taken(8)?;
                Value::Other
            }
            8 => {
                let len = self.varint()?;
                Value::Bytes(self.taken(usize::try_from(len).ok()?)?)
            }
            9 | 10 => self.list(depth)?,
            11 => self.map(depth)?,
            12 => self.structure(depth + 1)?,
            _ => return None,
        })
    }

    fn list(&mut self, depth: usize) -> Option<Value> {
        if depth > DEEPEST {
            return None;
        }
        let head = self.byte()?;
        let len = match head >> 4 {
            15 => usize::try_from(self.varint()?).ok()?,
            len => usize::from(len),
        };
        // Every element has a byte at least.
        if len > self.rest.len() {
            return None;
        }
        (0..len).map(|_| self.value(head & 15, depth + 1)).collect::<Option<Vec<_>>>().map(Value::List)
    }

    /// Passes over a map: nothing that is asked for is one.
    fn map(&mut self, depth: usize) -> Option<Value> {
        let len = usize::try_from(self.varint()?).ok()?;
        if depth > DEEPEST || len > self.rest.len() {
            return None;
        }
        let kinds = if len > 0 { self.byte()? } else { 0 };
        for _ in 0..len {
            self.value(kinds >> 4, depth + 1)?;
            self.value(kinds & 15, depth + 1)?;
        }
        Some(Value::Other)
    }
}

/// Seven bits in each byte, the lowest first; taken from the beginning of `rest`.
pub(super) fn varint(rest: &mut &[u8]) -> Option<u64> {
    let mut number = 0;
    for shift in (0..64).step_by(7) {
        let (byte, after) = rest.split_first()?;
        *rest = after;
        number |= u64::from(byte & 127) << shift;
        if byte & 128 == 0 {
            return Some(number);
        }
    }
    None
}
