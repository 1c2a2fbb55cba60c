//! Damaged files of every kind that is read here end in an error or in other values: never in a panic, nor in more
//! memory than the file's own length justifies.

mod common;
use std::collections::HashSet;
use std::fs;
use std::path::Path;

use common::{Folder, fixture, gzip, tar};
use data::pickle::{MEMORY_PER_BYTE, Pickle, Value};
use data::{Cifar, CifarKind, CifarLabels, Dataset, Sample, Split};
use testing::Random;
use testing::allocations::{Counting, peak};
use testing::fuzz::rounds;

#[global_allocator]
static ALLOCATOR: Counting = Counting::new();

/// For messages, and the buffers of files.
const OVERHEAD: usize = 100_000;

fn files_in(folder: &Path) -> Vec<Vec<u8>> {
    let mut paths: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    paths
        .iter()
        .filter(|path| path.extension().is_none_or(|end| end != "py"))
        .map(|path| fs::read(path).unwrap())
        .collect()
}

/// Asks everything of every value that can be reached in a thousand steps.
fn look_at(pickle: &Pickle<'_>) {
    let mut next = vec![pickle.root()];
    for _ in 0..1000 {
        let Some(value) = next.pop() else { break };
        let _ = (value.is_none(), value.bool(), value.int(), value.float(), value.kind());
        let _ = (value.long_int(), value.bytes(), value.text(), value.global(), value.get("labels"));
        next.extend(
            [value.callable(), value.args(), value.state(), value.persistent_id()].into_iter().flatten(),
        );
        next.extend(value.items().into_iter().flatten().take(20));
        next.extend(value.entries().into_iter().flatten().take(20).flat_map(<[Value; 2]>::from));
    }
    let _ = (pickle.globals().count(), pickle.references().count());
}

fn read_pickle(bytes: &[u8]) -> (usize, usize) {
    let (pickle, used) = peak(|| Pickle::read_first(bytes));
    if let Ok((pickle, length)) = pickle {
        assert!(length <= bytes.len());
        look_at(&pickle);
    }
    (used, MEMORY_PER_BYTE * bytes.len() + 1000)
}

#[test]
fn damaged_pickles() {
    let mut files = files_in(&fixture("pickle"));
    for python in ["python2-numpy1", "python3-numpy1", "python3-numpy2"] {
        files.extend(
            ["cifar-10-batches-py/batches.meta", "cifar-100-python/meta"]
                .map(|name| fs::read(fixture("cifar").join(python).join(name)).unwrap()),
        );
    }
    rounds("damaged-pickles", 60_000, |random| random.damaged(&files), read_pickle);
}

/// Every opcode, each with something that it can use.
const PHRASES: [&[u8]; 70] = [
    b"(",
    b"0",
    b"1",
    b"2",
    b"F1.5\n",
    b"I01\n",
    b"I7\n",
    b"J\x01\x02\x03\x04",
    b"K\x01",
    b"L7L\n",
    b"M\x01\x02",
    b"N",
    b"Pkey\n",
    b"Q",
    b"R",
    b"S'it'\n",
    b"T\x02\x00\x00\x00it",
    b"U\x02it",
    b"Vit\\u20ac\n",
    b"X\x02\x00\x00\x00it",
    b"a",
    b"b",
    b"cm\nC\n",
    b"d",
    b"}",
    b"e",
    b"g1\n",
    b"h\x01",
    b"im\nC\n",
    b"j\x01\x00\x00\x00",
    b"l",
    b"]",
    b"o",
    b"p1\n",
    b"q\x01",
    b"r\x01\x00\x00\x00",
    b"s",
    b"t",
    b")",
    b"u",
    b"G\x3f\xf8\x00\x00\x00\x00\x00\x00",
    b"\x80\x02",
    b"\x81",
    b"\x82\x01",
    b"\x85",
    b"\x86",
    b"\x87",
    b"\x88",
    b"\x89",
    b"\x8a\x01\x07",
    b"\x8b\x01\x00\x00\x00\x07",
    b"B\x01\x00\x00\x00x",
    b"C\x01x",
    b"\x8c\x01x",
    b"\x8d\x01\x00\x00\x00\x00\x00\x00\x00x",
    b"\x8e\x01\x00\x00\x00\x00\x00\x00\x00x",
    b"\x8f",
    b"\x90",
    b"\x91",
    b"\x92",
    b"\x8c\x01m\x8c\x01C\x93",
    b"\x94",
    b"\x95\x00\x00\x00\x00\x00\x00\x00\x00",
    b"\x96\x01\x00\x00\x00\x00\x00\x00\x00x",
    b"\x97",
    b"\x98",
    b".",
    b"h\x00",
    b"h\x00h\x00",
    b"((",
];

#[test]
fn pickles_of_random_opcodes() {
    let sentence = |random: &mut Random| {
        let length = 1 + random.below(60);
        let mut bytes: Vec<u8> = (0..length).flat_map(|_| random.pick(&PHRASES).to_vec()).collect();
        bytes.push(b'.');
        bytes
    };
    rounds("random-opcodes", 150_000, sentence, read_pickle);
}

/// What would grow without end if anything did: up to three opcodes over and over.
#[test]
fn pickles_that_repeat_themselves() {
    let mut seen = HashSet::new();
    let refrain = |random: &mut Random| {
        let count = 1 + random.below(3);
        let phrase: Vec<u8> = (0..count).flat_map(|_| random.pick(&PHRASES).to_vec()).collect();
        let times = if seen.insert(phrase.clone()) { 20_000 / phrase.len() } else { 1 };
        [&b"]N(N"[..], &phrase.repeat(times)].concat()
    };
    rounds("repeated-opcodes", 15_000, refrain, read_pickle);
}

/// Small groups, each made on a stack that was large once.
#[test]
fn what_was_large_once_is_not_kept() {
    for group in [&b"(l0"[..], b"(t0", b"(d0", b"(\x910", b"](e0", b"}(u0", b"(N1"] {
        let bytes = [&b"("[..], &b"N".repeat(20_000), b"1", &group.repeat(20_000), b"N."].concat();
        let (used, allowed) = read_pickle(&bytes);
        assert!(used <= allowed, "{used} bytes for {group:?}");
    }
}

const TEN: CifarKind = CifarKind::Ten;
const FINE: CifarKind = CifarKind::Hundred { labels: CifarLabels::Fine };

/// Opens a set in a folder of one file, or an archive, and reads all of it.
fn read_set(path: &Path, kind: CifarKind) -> usize {
    let (set, used) = peak(|| Cifar::open(path, kind, Split::Test));
    match set {
        Ok(set) => {
            let mut sample = Sample::default();
            for index in 0..set.len() {
                set.read(index, &mut sample).unwrap();
                assert!(set.label(index) < set.classes());
            }
        }
        Err(error) => {
            let error = error.to_string();
            assert!(!error.contains(char::is_control) && error.len() < 1000, "{error}");
        }
    }
    used
}

fn records(labels: &[u8], count: usize) -> Vec<u8> {
    let planes = (0..3072).map(|i| (i * 7) as u8);
    labels.iter().copied().chain(planes).collect::<Vec<u8>>().repeat(count)
}

#[test]
fn damaged_binary_sets() {
    let folder = Folder::new("fuzz-binary");
    let files = [records(&[3], 1), records(&[9], 3), records(&[19, 99], 2)];
    rounds(
        "binary-sets",
        12_000,
        |random| random.damaged(&files),
        |bytes| {
            folder.file("test_batch.bin", bytes);
            folder.file("test.bin", bytes);
            (read_set(&folder.0, TEN).max(read_set(&folder.0, FINE)), 3 * bytes.len() + OVERHEAD)
        },
    );
}

#[test]
fn damaged_python_sets() {
    let folder = Folder::new("fuzz-python");
    let sets =
        ["python2-numpy1", "python3-numpy1", "python3-numpy2"].map(|python| fixture("cifar").join(python));
    let batches: Vec<_> =
        sets.iter().map(|set| fs::read(set.join("cifar-10-batches-py/data_batch_1")).unwrap()).collect();
    let others: Vec<_> =
        sets.iter().map(|set| fs::read(set.join("cifar-10-batches-py/data_batch_2")).unwrap()).collect();
    let files = [batches, others].concat();
    let tens = folder.0.join("ten");
    rounds(
        "python-sets",
        15_000,
        |random| random.damaged(&files),
        |bytes| {
            folder.file("ten/test_batch", bytes);
            (read_set(&tens, TEN), MEMORY_PER_BYTE * bytes.len() + OVERHEAD)
        },
    );
}

#[test]
fn damaged_archives() {
    let folder = Folder::new("fuzz-archives");
    let set = fixture("cifar/python3-numpy2/cifar-10-batches-py");
    let python = fs::read(set.join("test_batch")).unwrap();
    let meta = fs::read(set.join("batches.meta")).unwrap();
    let plain = vec![
        tar(&[
            ("bin/readme", b"about"),
            ("bin/test_batch.bin", &records(&[3], 2)),
            ("bin/batches.meta.txt", b"a\nb\n"),
        ]),
        tar(&[("py/test_batch", &python), ("py/batches.meta", &meta)]),
    ];
    let packed: Vec<_> = plain.iter().map(|tar| gzip(tar)).collect();
    let damage = |random: &mut Random| match random.below(3) {
        0 => random.damaged(&packed),
        1 => gzip(&random.damaged(&plain)),
        _ => random.damaged(&plain),
    };
    // Gzip packs a thousand bytes into one at best; each is held once packed in its file and once as pixels.
    let allowed = |length: usize| 3 * 1032 * length + OVERHEAD + (1 << 16);
    rounds("archives", 10_000, damage, |bytes| {
        let path = folder.file("archive", bytes);
        (read_set(&path, TEN), allowed(bytes.len()))
    });
}
