//! TensorBoard's event files. An event is a protobuf of a few fields (`tensorflow/core/util/event.proto`) in a TFRecord
//! frame: its length, a checksum of the length, the event, a checksum of the event.

use crate::error::TrainError;
use records::MetricsLine;
use std::fs::File;
use std::io::{self, BufWriter, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// The version whose readers drop what a session start makes obsolete.
const FILE_VERSION: &str = "brain.Event:2";
/// `SessionLog.SessionStatus.START`.
const START: u64 = 1;
/// `DataType.DT_STRING`.
const DT_STRING: u64 = 7;

/// How the names of event files begin.
pub(crate) const PREFIX: &str = "events.out.tfevents.";

pub struct EventFile {
    path: PathBuf,
    file: BufWriter<File>,
    encoder: Encoder,
}

impl EventFile {
    /// A new file in `folder`, for a run whose next step is `start_step`. TensorBoard forgets what the folder's earlier
    /// files say of that step and of later ones.
    pub fn create(folder: &Path, start_step: u64) -> Result<Self, TrainError> {
        let (path, file) = create_file(folder)?;
        let mut events = EventFile { path, file: BufWriter::new(file), encoder: Encoder::default() };
        events.write(|encoder| encoder.file_version(now()))?;
        // A first run's file has a start too: TensorBoard takes only the second it sees for a restart.
        events.write(|encoder| encoder.session_start(now(), start_step))?;
        events.flush()?;
        Ok(events)
    }

    /// Adds a point to the curve called `tag`. Allocates nothing once its buffers have grown to the longest tag.
    pub fn scalar(&mut self, step: u64, tag: &str, value: f64) -> Result<(), TrainError> {
        self.write(|encoder| encoder.scalar(now(), step, tag, value as f32))
    }

    /// Adds the metrics of a line that have a tag; those by layer under the tag of their metric.
    pub fn draw(&mut self, line: &MetricsLine) -> Result<(), TrainError> {
        for (declared, value) in line.values.known() {
            if let Some(tag) = declared.tag {
                self.scalar(line.step, tag, value)?;
            }
        }
        for (metric, layers) in &line.layers {
            let Some(tag) = metric.declared().tag else { continue };
            for (layer, value) in &layers.0 {
                self.scalar(line.step, &format!("{tag}/{layer}"), *value)?;
            }
        }
        Ok(())
    }

    /// Adds a text, which TensorBoard renders as Markdown.
    pub fn text(&mut self, step: u64, tag: &str, text: &str) -> Result<(), TrainError> {
        self.write(|encoder| encoder.text(now(), step, tag, text))
    }

    /// Hands what was written so far to the system, for TensorBoard to see.
    pub fn flush(&mut self) -> Result<(), TrainError> {
        self.file.flush().map_err(|source| TrainError::Io { path: self.path.clone(), source })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    fn write(&mut self, encode: impl FnOnce(&mut Encoder)) -> Result<(), TrainError> {
        encode(&mut self.encoder);
        let written = write_record(&mut self.file, &self.encoder.event.0);
        written.map_err(|source| TrainError::Io { path: self.path.clone(), source })
    }
}

fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64())
}

/// TensorBoard reads a folder's files in the order of their names, so the time comes first; a run resumed within the
/// second is told apart by a number at the end.
fn create_file(folder: &Path) -> Result<(PathBuf, File), TrainError> {
    let name = format!("{PREFIX}{:010}.{}", now() as u64, host_name());
    let mut path = folder.join(&name);
    for number in 1.. {
        match files::create_new(&path) {
            Ok(file) => return Ok((path, file)),
            Err(source) if source.kind() == ErrorKind::AlreadyExists => {
                path = folder.join(format!("{name}.{number:03}"));
            }
            Err(source) => return Err(TrainError::Io { path, source }),
        }
    }
    unreachable!("numbers don't end")
}

/// The machine's name as far as a file can bear it. Nothing depends on it: it helps whoever looks at the folder.
fn host_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").ok();
    let name = name.or_else(|| std::env::var("HOSTNAME").ok()).unwrap_or_default();
    let good = |c: &char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    let name: String = name.trim().chars().filter(good).take(64).collect();
    if name.is_empty() { "localhost".to_string() } else { name }
}

/// Events, built in buffers that are used again. A message within a message needs its length first, hence one buffer
/// for each level.
#[derive(Default)]
struct Encoder {
    event: Message,
    summary: Message,
    value: Message,
    part: Message,
}

impl Encoder {
    fn begin(&mut self, time: f64, step: u64) {
        self.event.clear();
        self.event.fixed64(1, time.to_bits());
        // Zero is what a missing number means, and how protobuf writes it.
        if step > 0 {
            self.event.varint(2, step);
        }
    }

    fn file_version(&mut self, time: f64) {
        self.begin(time, 0);
        self.event.bytes(3, FILE_VERSION.as_bytes());
    }

    fn session_start(&mut self, time: f64, step: u64) {
        self.part.clear();
        self.part.varint(1, START);
        self.begin(time, step);
        self.event.bytes(7, &self.part.0);
    }

    fn scalar(&mut self, time: f64, step: u64, tag: &str, value: f32) {
        self.value.clear();
        self.value.bytes(1, tag.as_bytes());
        self.value.fixed32(2, value.to_bits());
        self.end_summary(time, step);
    }

    /// A tensor of strings of shape \[1\], marked as the text plugin's.
    fn text(&mut self, time: f64, step: u64, tag: &str, text: &str) {
        let (axis, plugin) = ([0x12, 0x02, 0x08, 0x01], b"\x0a\x04text");
        self.part.clear();
        self.part.varint(1, DT_STRING);
        self.part.bytes(2, &axis);
        self.part.bytes(8, text.as_bytes());
        self.value.clear();
        self.value.bytes(1, tag.as_bytes());
        self.value.bytes(8, &self.part.0);
        self.part.clear();
        self.part.bytes(1, plugin);
        self.value.bytes(9, &self.part.0);
        self.end_summary(time, step);
    }

    /// Wraps the value in a summary, and that in an event.
    fn end_summary(&mut self, time: f64, step: u64) {
        self.summary.clear();
        self.summary.bytes(1, &self.value.0);
        self.begin(time, step);
        self.event.bytes(5, &self.summary.0);
    }
}

/// The bytes of a protobuf message. A field starts with its number and how it is coded: 0 a variable-length integer, 1
/// eight bytes, 2 a length and so many bytes, 5 four bytes.
#[derive(Default)]
struct Message(Vec<u8>);

impl Message {
    fn clear(&mut self) {
        self.0.clear();
    }

    fn raw_varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }

    fn varint(&mut self, field: u64, value: u64) {
        self.raw_varint(field << 3);
        self.raw_varint(value);
    }

    fn fixed64(&mut self, field: u64, bits: u64) {
        self.raw_varint(field << 3 | 1);
        self.0.extend_from_slice(&bits.to_le_bytes());
    }

    fn fixed32(&mut self, field: u64, bits: u32) {
        self.raw_varint(field << 3 | 5);
        self.0.extend_from_slice(&bits.to_le_bytes());
    }

    fn bytes(&mut self, field: u64, bytes: &[u8]) {
        self.raw_varint(field << 3 | 2);
        self.raw_varint(bytes.len() as u64);
        self.0.extend_from_slice(bytes);
    }
}

fn write_record(out: &mut impl Write, event: &[u8]) -> io::Result<()> {
    let length = (event.len() as u64).to_le_bytes();
    out.write_all(&length)?;
    out.write_all(&masked(crc32c(&length)).to_le_bytes())?;
    out.write_all(event)?;
    out.write_all(&masked(crc32c(event)).to_le_bytes())
}

/// TFRecord keeps no checksum as it is, lest a checksum of data that holds checksums go wrong.
fn masked(crc: u32) -> u32 {
    crc.rotate_right(15).wrapping_add(0xa282_ead8)
}

/// CRC-32C (Castagnoli), by bytes: a few hundred bytes per step.
fn crc32c(bytes: &[u8]) -> u32 {
    let next = |crc: u32, byte: &u8| (crc >> 8) ^ CRC_TABLE[usize::from(crc as u8 ^ byte)];
    !bytes.iter().fold(!0, next)
}

const CRC_TABLE: [u32; 256] = {
    let mut table = [0; 256];
    let mut i = 0;
    while i < 256 {
        let (mut crc, mut bit) = (i as u32, 0);
        while bit < 8 {
            crc = (crc >> 1) ^ (if crc & 1 == 1 { 0x82f6_3b78 } else { 0 });
            bit += 1;
        }
        table[i] = crc;
        i += 1;
    }
    table
};

#[cfg(test)]
mod tests {
    use super::*;

    /// The record of an event, in hexadecimal.
    fn record(encode: impl FnOnce(&mut Encoder)) -> String {
        let (mut encoder, mut bytes) = (Encoder::default(), Vec::new());
        // What a buffer held before must not matter.
        encoder.text(1.0, 2, "an earlier tag", "an earlier text");
        encode(&mut encoder);
        write_record(&mut bytes, &encoder.event.0).unwrap();
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    #[test]
    fn the_checksum_is_castagnolis() {
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(b""), 0);
    }

    /// Made by the writer of tensorboard 2.21 from its own protobufs.
    #[test]
    fn records_are_tensorboards_byte_for_byte() {
        const TIME: f64 = 1_700_000_000.5;
        let version = "1800000000000000a37f4b220900002040fc54d9411a0d627261696e2e4576656e743a322b353110";
        assert_eq!(record(|e| e.file_version(TIME)), version);
        let start = "100000000000000095fbfe180900002040fc54d94110ac023a020801b94512a3";
        assert_eq!(record(|e| e.session_start(TIME, 300)), start);
        let scalar = "1a00000000000000129bd82d0900002040fc54d94110032a0d0a0b0a046c6f7373150000803ebcf29b54";
        assert_eq!(record(|e| e.scalar(TIME, 3, "loss", 0.25)), scalar);
        let text = "34000000000000005e33175c0900002040fc54d94110032a270a250a06636f6e66696742110807120412020801\
            42076c722031652d334a080a060a04746578748bd7a52c";
        assert_eq!(record(|e| e.text(TIME, 3, "config", "lr 1e-3")), text);
    }

    #[test]
    fn a_host_name_can_be_part_of_a_file_name() {
        let name = host_name();
        assert!(!name.is_empty() && !name.contains(['/', '\n', ' ']), "{name}");
    }
}
