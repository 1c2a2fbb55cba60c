//! Files that lie, files that come back.

use super::*;
use models::names::{Tensor, Weights};
use testing::Folder;

fn read(path: &Path) -> Result<Weights, WeightsError> {
    crate::weights::read(path)
}

fn write_weights(path: &Path, weights: &Weights) -> Result<(), WeightsError> {
    crate::weights::write(path, weights, &BTreeMap::new())
}

fn with_header(json: &str, values: &[u8]) -> Vec<u8> {
    [&(json.len() as u64).to_le_bytes()[..], json.as_bytes(), values].concat()
}

#[test]
fn other_types_become_f32() {
    let folder = Folder::new("types");
    let json = r#"{"d":{"dtype":"F64","shape":[1],"data_offsets":[0,8]},
        "h":{"dtype":"F16","shape":[2],"data_offsets":[8,12]},
        "__metadata__":{"a":"b"},
        "b":{"dtype":"BF16","shape":[],"data_offsets":[12,14]},
        "n":{"dtype":"F32","shape":[0,4],"data_offsets":[14,14]}}"#;
    let values = [&0.1f64.to_le_bytes()[..], &[0x00, 0x3c, 0x01, 0x00], &[0xc0, 0xbf]].concat();
    let weights = read(&folder.file("types", with_header(json, &values))).unwrap();
    assert_eq!(weights["d"].data, [0.1]);
    assert_eq!(weights["h"].data, [1.0, 2f32.powi(-24)]);
    assert_eq!(weights["b"], Tensor { shape: vec![], data: vec![-1.5] });
    assert_eq!(weights["n"], Tensor { shape: vec![0, 4], data: vec![] });
}

#[test]
fn headers_that_lie_are_refused() {
    let folder = Folder::new("lies");
    let entry = |name: &str, dtype: &str, shape: &str, begin: u64, end: u64| {
        format!(r#""{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{begin},{end}]}}"#)
    };
    let one = |dtype, shape, begin, end| format!("{{{}}}", entry("a", dtype, shape, begin, end));
    let two = |name, begin| {
        format!("{{{},{}}}", entry("a", "F32", "[1]", 0, 4), entry(name, "F32", "[1]", begin, begin + 4))
    };
    // Eight tensors whose offsets reach almost to the largest number there is.
    let far = |i: u64| {
        let size = u64::MAX / 8 - 3;
        entry(&i.to_string(), "F32", &format!("[{}]", size / 4), i * size, (i + 1) * size)
    };
    let far: Vec<String> = (0..8).map(far).collect();
    for (json, fault) in [
        (one("F32", "[3]", 0, 8), "tensor `a` is [3] of F32, which is 12 bytes, but has 8"),
        (one("F32", "[2]", 8, 16), "tensor `a` is at bytes 8 to 16, but the file has 8 bytes"),
        (one("F32", "[2]", 8, 0), "tensor `a` is at bytes 8 to 0, but the file has 8 bytes"),
        (one("I32", "[2]", 0, 8), "tensor `a` is of type I32: only F32, F64, F16, BF16 and I64 can be read"),
        (one("F32", "[1]", 0, 4), "its tensors have 4 bytes, the file has 8 for them"),
        (one("F32", "[9223372036854775807,3]", 0, 8), "more bytes than can be counted"),
        (one("F64", "[2305843009213693952]", 0, 0), "more bytes than can be counted"),
        (one("F32", "[1,1,1,1,1,1,1,1,2]", 0, 8), "tensor `a` has 9 dimensions, more than 8"),
        (two("b", 0), "tensor `b` begins at byte 0 of the values, but the tensor before it ends at 4"),
        (two("b", 2), "tensor `b` begins at byte 2 of the values, but the tensor before it ends at 4"),
        (two("a", 4), "tensor `a` occurs twice"),
        (two(r"b\nc", 4), "`b\u{fffd}c` cannot be the name of a tensor"),
        (one("F31", "[2]", 0, 8), "not a safetensors header: tensor `a`: unknown variant `F31`"),
        (one("F32", "[-2]", 0, 8), "not a safetensors header: tensor `a`: invalid value: integer `-2`"),
        (format!("{{{}}}", far.join(",")), "but the file has 8 bytes of values"),
        ("[1,2]".to_string(), "not a safetensors header: invalid type: sequence"),
        ("garbage".to_string(), "not a safetensors header: expected value"),
        (format!("{{\"a\":{}", "[".repeat(100_000)), "not a safetensors header"),
    ] {
        let path = folder.file("lie", with_header(&json, &[0; 8]));
        let error = read(&path).unwrap_err().to_string();
        assert!(error.contains(fault), "{error}\nshould say\n{fault}");
        assert!(error.starts_with(&format!("{}: ", path.display())) && !error.contains('\n'), "{error}");
    }
}

#[test]
fn lengths_beyond_the_file_are_refused() {
    let folder = Folder::new("lengths");
    let refused = |bytes: &[u8]| read(&folder.file("f", bytes)).unwrap_err().to_string();
    assert!(refused(b"").ends_with("0 bytes are too few for the length of a header"));
    assert!(refused(&[0xff; 16]).ends_with("should be 18446744073709551615 bytes, the file has 16"));
    assert!(refused(&[&(9u64 << 40).to_le_bytes()[..], b"{}"].concat()).contains("truncated"));
    assert!(read(&folder.0).unwrap_err().to_string().ends_with("not a regular file"));
    assert!(
        read(&folder.0.join("none")).unwrap_err().to_string().contains("none: cannot open: No such file")
    );
    // As long as it says, and all of it a hole.
    let path = folder.file("hole", (1u64 << 40).to_le_bytes());
    File::options().append(true).open(&path).unwrap().set_len((1 << 40) + 8).unwrap();
    assert!(read(&path).unwrap_err().to_string().contains("a header of 1099511627776 bytes is more than"));
}

#[test]
fn writing_refuses_what_could_not_be_read_and_keeps_the_old_file() {
    let folder = Folder::new("write");
    let path = folder.file("w", b"old");
    let tensor = |values: usize| Tensor { shape: vec![2], data: vec![1.0; values] };
    let torn = Weights::from([("a".to_string(), tensor(3))]);
    let error = write_weights(&path, &torn).unwrap_err().to_string();
    assert!(error.ends_with("tensor `a` is [2] but holds 3 values"), "{error}");
    assert!(write_weights(&path, &Weights::from([(METADATA.to_string(), tensor(2))])).is_err());
    assert!(write_weights(&folder.0.join("none/w"), &Weights::new()).is_err());
    assert_eq!(fs::read(&path).unwrap(), b"old");
    let whole = Weights::from([("a".to_string(), tensor(2))]);
    write_weights(&path, &whole).unwrap();
    assert_eq!(read(&path).unwrap(), whole);
}

#[test]
fn doubles_come_back_whole() {
    let folder = Folder::new("doubles");
    let path = folder.0.join("d");
    write(&path, &[Entry { name: "a", shape: &[2], values: &[0.1f64, 1e300] }], &BTreeMap::new()).unwrap();
    let mut found = vec![];
    Reader::open(&path).unwrap().each(|_, _, values: Vec<f64>| found = values).unwrap();
    assert_eq!(found, [0.1, 1e300]);
}

#[test]
fn metadata_comes_back() {
    let folder = Folder::new("metadata");
    let path = folder.0.join("m");
    let metadata = BTreeMap::from([("step".to_string(), "7 \"of\" 9".to_string())]);
    write(&path, &[Entry { name: "a", shape: &[1], values: &[2.5f32] }], &metadata).unwrap();
    let reader = Reader::open(&path).unwrap();
    assert_eq!(reader.metadata(), &metadata);
    assert_eq!(reader.tensors().collect::<Vec<_>>(), [("a", &[1][..])]);
}

/// To other readers the checksums are metadata; files without them are read as ever.
#[test]
fn checksums_are_verified_where_there_are_some() {
    let folder = Folder::new("checksums");
    let path = folder.0.join("w");
    let entry = Entry { name: "a", shape: &[3], values: &[1f32, -2.0, 0.5] };
    // Metadata taken over from another file brings none of its checksums.
    let metadata =
        BTreeMap::from([("format".into(), "pt".into()), ("crc32".to_string(), "stale".to_string())]);
    write(&path, &[entry], &metadata).unwrap();
    let whole = fs::read(&path).unwrap();
    let (header, theirs) = safetensors::SafeTensors::read_metadata(&whole).unwrap();
    let text = &theirs.metadata().as_ref().unwrap()["crc32"];
    let values = crc32fast::hash(&whole[8 + header..]);
    assert!(text.len() == 17 && text.ends_with(&format!(" {values:08x}")), "{text}");
    assert_eq!(Reader::open(&path).unwrap().metadata().keys().collect::<Vec<_>>(), ["format"]);

    let mut damaged = whole.clone();
    *damaged.last_mut().unwrap() ^= 1;
    let error = Reader::open(&folder.file("w", &damaged)).unwrap().verify().unwrap_err().to_string();
    assert!(
        error.ends_with("w: tensor `a` is damaged: it has another checksum than when it was written"),
        "{error}"
    );
    let zeroed = [&whole[..8 + header], &[0; 12]].concat();
    assert!(Reader::open(&folder.file("w", &zeroed)).unwrap().verify().is_err());

    let json = r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#;
    let old = Reader::open(&folder.file("old", with_header(json, &[0; 4]))).unwrap();
    assert!(!old.has_checksums());
    old.verify().unwrap();
    // As a program does that copies metadata, but not tensors.
    let copied = format!(
        r#"{{"__metadata__":{{"crc32":"{text}"}},"a":{{"dtype":"F16","shape":[1],"data_offsets":[0,2]}}}}"#
    );
    let error =
        Reader::open(&folder.file("copied", with_header(&copied, &[0; 2]))).err().unwrap().to_string();
    assert!(error.contains("copied: damaged") && error.contains("`crc32`"), "{error}");
}
