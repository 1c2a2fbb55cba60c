//! CIFAR-10 and CIFAR-100, as they are published: binary or Python, packed or unpacked.
//!
//! [`Cifar::open`] takes the path of an archive (tar, or tar packed with gzip; told by its content) or of a folder.
//! In a folder it looks for, in this order, and takes the first that is there:
//!
//! 1. the files of the set themselves;
//! 2. the folder that the official archive unpacks to;
//! 3. the official archive.
//!
//! At each of these the binary form is preferred to the Python form: it is read without a pickle.
//!
//! A set may be a part of the published one. Each file holds any number of whole records; of CIFAR-10's five training
//! files the first is needed, and others may only be missing from the end, so that an incomplete copy is noticed.
//!
//! All records are kept in memory as bytes, about 154 MB for a training set. What a file or an archive could
//! make us allocate is limited by [`MAX_FILE`] and [`MAX_UNPACKED`].

mod archive;
mod binary;
mod layout;
mod names;
mod numpy;
mod python;
mod source;

use std::path::Path;
use std::sync::Arc;

use crate::registry::{Archive, Entry, Facts, Images, Open, Place};
use crate::{DataError, Dataset, Sample, Split, Task};
use layout::Form;
use source::Source;

/// Width and height of an image.
pub const SIZE: usize = 32;
pub const CHANNELS: usize = 3;
const PLANE: usize = SIZE * SIZE;
const PIXELS: usize = PLANE * CHANNELS;

/// No file of a set may be larger. The largest that is published, CIFAR-100's training set, has 155 MB.
pub const MAX_FILE: u64 = 256 << 20;
/// No archive may unpack to more. Those that are published come to 186 MB.
pub const MAX_UNPACKED: u64 = 512 << 20;

/// Entries of the registry. Checksums as published at <https://www.cs.toronto.edu/~kriz/cifar.html>.
pub(crate) const TEN: Entry = Entry {
    name: "cifar10",
    place: Some(Place::Folder),
    task: Task::Classify,
    about: "CIFAR-10",
    image_size: SIZE,
    images: Images::Raw,
    facts: Some(Facts { train_images: 50_000, test_images: 10_000, classes: 10, channels: CHANNELS }),
    run: None,
    archive: Some(Archive {
        name: "cifar-10-binary.tar.gz",
        base_url: "https://www.cs.toronto.edu/~kriz",
        md5: "c32a1d4ab5d03f1284b67883e8d87530",
        bytes: 170_052_171,
    }),
    open: Open::Path(|path, reading| Ok(Arc::new(Cifar::open(path, CifarKind::Ten, reading.split)?))),
};
pub(crate) const HUNDRED: Entry = Entry {
    name: "cifar100",
    about: "CIFAR-100",
    facts: Some(Facts { train_images: 50_000, test_images: 10_000, classes: 100, channels: CHANNELS }),
    archive: Some(Archive {
        name: "cifar-100-binary.tar.gz",
        base_url: "https://www.cs.toronto.edu/~kriz",
        md5: "03b5dce01913d631647c71ecec9e9cb8",
        bytes: 168_513_733,
    }),
    open: Open::Path(|path, reading| {
        let kind = CifarKind::Hundred { labels: CifarLabels::Fine };
        Ok(Arc::new(Cifar::open(path, kind, reading.split)?))
    }),
    ..TEN
};
pub(crate) const HUNDRED_COARSE: Entry = Entry {
    name: "cifar100-coarse",
    about: "CIFAR-100 with its twenty groups of classes",
    facts: Some(Facts { train_images: 50_000, test_images: 10_000, classes: 20, channels: CHANNELS }),
    archive: None,
    open: Open::Path(|path, reading| {
        let kind = CifarKind::Hundred { labels: CifarLabels::Coarse };
        Ok(Arc::new(Cifar::open(path, kind, reading.split)?))
    }),
    ..TEN
};

/// One of the two sets, with its labels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CifarKind {
    Ten,
    Hundred { labels: CifarLabels },
}

/// CIFAR-100 has two labels for each image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CifarLabels {
    /// One of 100 classes.
    Fine,
    /// One of 20 groups of five classes.
    Coarse,
}

impl std::fmt::Display for CifarLabels {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            CifarLabels::Fine => "fine",
            CifarLabels::Coarse => "coarse",
        })
    }
}

impl std::fmt::Display for CifarKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            CifarKind::Ten => "CIFAR-10",
            CifarKind::Hundred { .. } => "CIFAR-100",
        })
    }
}

/// One split of a set.
#[derive(Debug)]
pub struct Cifar {
    class_names: Vec<String>,
    labels: Vec<u8>,
    parts: Vec<Part>,
}

/// The images of one file.
#[derive(Debug)]
struct Part {
    /// Name of the file in messages.
    file: String,
    len: usize,
    /// (N, H, W, C)
    pixels: Vec<u8>,
}

impl Cifar {
    pub fn open(path: &Path, kind: CifarKind, split: Split) -> Result<Self, DataError> {
        let Source { place, form, names, records } = Source::find(path, kind, split)?;
        let class_names = match names {
            Some((file, bytes)) => {
                names::read(&bytes, kind, form).map_err(|problem| place.error(&file, problem))?
            }
            None => names::built_in(kind).iter().map(ToString::to_string).collect(),
        };
        let mut set = Self { class_names, labels: Vec::new(), parts: Vec::new() };
        for (file, bytes) in records {
            let records = match form {
                Form::Binary => binary::records(&bytes, kind),
                Form::Python => python::records(&bytes, kind),
            };
            let Records { labels, pixels } = records.map_err(|problem| place.error(&file, problem))?;
            set.parts.push(Part { file: place.name(&file), len: labels.len(), pixels });
            set.labels.extend(labels);
        }
        Ok(set)
    }

    /// The part that an image lies in, and its number there.
    fn locate(&self, index: usize) -> Result<(&Part, usize), DataError> {
        let mut record = index;
        for part in &self.parts {
            if record < part.len {
                return Ok((part, record));
            }
            record -= part.len;
        }
        Err(DataError::IndexOutOfRange { index, len: self.len() })
    }
}

impl Dataset for Cifar {
    fn len(&self) -> usize {
        self.labels.len()
    }

    fn class_names(&self) -> &[String] {
        &self.class_names
    }

    fn channels(&self) -> usize {
        CHANNELS
    }

    fn label(&self, index: usize) -> usize {
        self.labels[index].into()
    }

    fn name(&self, index: usize) -> String {
        match self.locate(index) {
            Ok((part, record)) => format!("{} record {record}", part.file),
            Err(error) => error.to_string(),
        }
    }

    fn size(&self) -> Option<(usize, usize)> {
        Some((SIZE, SIZE))
    }

    fn in_memory(&self) -> bool {
        true
    }

    fn read(&self, index: usize, out: &mut Sample) -> Result<(), DataError> {
        let (part, record) = self.locate(index)?;
        out.image.reset(SIZE, SIZE, CHANNELS).copy_from_slice(&part.pixels[record * PIXELS..][..PIXELS]);
        Ok(())
    }
}

/// Contents of a file, with the labels that were asked for.
#[derive(Debug, PartialEq)]
struct Records {
    labels: Vec<u8>,
    /// (N, H, W, C)
    pixels: Vec<u8>,
}

/// Bytes of one image plane by plane, as CIFAR has them: (C, H, W).
type Planes = [u8; PIXELS];

/// Adds an image pixel by pixel.
fn interleave(planes: &Planes, out: &mut Vec<u8>) {
    out.extend((0..PLANE).flat_map(|at| [planes[at], planes[at + PLANE], planes[at + 2 * PLANE]]));
}

/// A label that a class has, and so has a place in a byte.
fn checked_label(label: i64, record: usize, classes: usize) -> Result<u8, String> {
    match u8::try_from(label) {
        Ok(byte) if usize::from(byte) < classes => Ok(byte),
        _ => Err(format!("record {record} has label {label}; labels are 0 to {}", classes - 1)),
    }
}
