//! Protocol buffers, as far as ONNX files need them: a message is written field by field, in the order of calls.
//!
//! A crate such as `prost` would need ONNX's schema as generated code and keep a second copy of every tensor; the wire format is three
//! kinds of fields.

use std::io::{self, Write};

/// Kinds of fields on the wire.
const VARINT: u64 = 0;
const LENGTH: u64 = 2;
const FIXED32: u64 = 5;

/// Bytes from which on a field is not copied into the message around it.
const LARGE: usize = 1 << 12;

/// A message: pieces that follow each other. Tensors are pieces of their own, so that nesting copies none of them.
#[derive(Debug, Default)]
pub struct Message {
    pieces: Vec<Vec<u8>>,
    length: usize,
}

impl Message {
    pub fn new() -> Self {
        Message::default()
    }

    /// Bytes of the message.
    pub fn length(&self) -> usize {
        self.length
    }

    /// A whole number, or an enum.
    pub fn int(mut self, field: u64, value: i64) -> Self {
        self.key(field, VARINT);
        // Negative numbers take ten bytes, as two's complement of 64 bits.
        self.varint(value as u64);
        self
    }

    /// Whole numbers, a field each.
    pub fn ints(self, field: u64, values: impl IntoIterator<Item = i64>) -> Self {
        values.into_iter().fold(self, |message, value| message.int(field, value))
    }

    pub fn float(mut self, field: u64, value: f32) -> Self {
        self.key(field, FIXED32);
        self.put(&value.to_le_bytes());
        self
    }

    pub fn text(self, field: u64, text: &str) -> Self {
        self.bytes(field, text.as_bytes().to_vec())
    }

    /// Texts, a field each.
    pub fn texts<'t>(self, field: u64, texts: impl IntoIterator<Item = &'t str>) -> Self {
        texts.into_iter().fold(self, |message, text| message.text(field, text))
    }

    pub fn bytes(mut self, field: u64, bytes: Vec<u8>) -> Self {
        self.key(field, LENGTH);
        self.varint(bytes.len() as u64);
        self.append(bytes);
        self
    }

    pub fn message(mut self, field: u64, inner: Message) -> Self {
        self.key(field, LENGTH);
        self.varint(inner.length as u64);
        inner.pieces.into_iter().for_each(|piece| self.append(piece));
        self
    }

    /// Messages, a field each.
    pub fn messages(self, field: u64, inner: impl IntoIterator<Item = Message>) -> Self {
        inner.into_iter().fold(self, |message, inner| message.message(field, inner))
    }

    pub fn write(&self, to: &mut impl Write) -> io::Result<()> {
        self.pieces.iter().try_for_each(|piece| to.write_all(piece))
    }

    fn key(&mut self, field: u64, kind: u64) {
        self.varint(field << 3 | kind);
    }

    /// Seven bits a byte, lowest first; all but the last have the eighth bit set.
    fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.put(&[value as u8 | 0x80]);
            value >>= 7;
        }
        self.put(&[value as u8]);
    }

    fn put(&mut self, bytes: &[u8]) {
        self.length += bytes.len();
        match self.pieces.last_mut() {
            Some(piece) if piece.len() < LARGE => piece.extend_from_slice(bytes),
            _ => self.pieces.push(bytes.to_vec()),
        }
    }

    fn append(&mut self, piece: Vec<u8>) {
        if piece.len() < LARGE {
            self.put(&piece);
        } else {
            self.length += piece.len();
            self.pieces.push(piece);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(message: &Message) -> Vec<u8> {
        let mut bytes = vec![];
        message.write(&mut bytes).unwrap();
        assert_eq!(bytes.len(), message.length());
        bytes
    }

    /// The examples of protobuf's own description of its encoding.
    #[test]
    fn fields_are_encoded_as_published() {
        assert_eq!(written(&Message::new().int(1, 150)), [0x08, 0x96, 0x01]);
        let text = Message::new().text(2, "testing");
        assert_eq!(written(&text), [0x12, 0x07, 0x74, 0x65, 0x73, 0x74, 0x69, 0x6e, 0x67]);
        let nested = Message::new().message(3, Message::new().int(1, 150));
        assert_eq!(written(&nested), [0x1a, 0x03, 0x08, 0x96, 0x01]);
        assert_eq!(written(&Message::new().float(2, 1.0)), [0x15, 0, 0, 0x80, 0x3f]);
        let negative = written(&Message::new().int(1, -2));
        assert_eq!(negative, [8, 0xfe, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1]);
    }

    #[test]
    fn large_fields_lie_where_small_ones_would() {
        let large = vec![7; 3 * LARGE];
        let inner = Message::new().int(1, 1).bytes(2, large.clone()).int(3, 3);
        let (inner_length, bytes) = (inner.length(), written(&Message::new().message(9, inner).int(4, 4)));
        assert_eq!(inner_length, 2 + 1 + 2 + large.len() + 2);
        assert_eq!(bytes[..5], [0x4a, 0x87, 0x60, 0x08, 0x01]);
        assert_eq!(bytes[bytes.len() - 4..], [0x18, 3, 0x20, 4]);
    }
}
