//! CIFAR in all its forms. The Python form comes from `fixtures/cifar/make.py`; the binary form is made here from
//! the same formula.

mod common;

use std::fs;
use std::path::Path;

use common::{Folder, fixture, gzip, tar};
use data::{Cifar, CifarKind, CifarLabels, Dataset, Image, Sample, Split};

const TEN: CifarKind = CifarKind::Ten;
const FINE: CifarKind = CifarKind::Hundred { labels: CifarLabels::Fine };
const COARSE: CifarKind = CifarKind::Hundred { labels: CifarLabels::Coarse };

/// Image `n` of the fixtures, plane by plane, after its labels.
fn record(labels: &[u8], n: usize) -> Vec<u8> {
    let planes = (0..3072).map(|i| ((n * 89 + i * 7 + i / 1024 * 31) % 256) as u8);
    labels.iter().copied().chain(planes).collect()
}

fn names(prefix: &str, count: usize) -> Vec<u8> {
    (0..count).map(|i| format!("{prefix}-{i}\n")).collect::<String>().into_bytes()
}

/// The binary form of the fixtures: CIFAR-10 with two of five training files.
fn ten() -> Vec<(&'static str, Vec<u8>)> {
    vec![
        ("cifar-10-batches-bin/data_batch_2.bin", record(&[4], 2)),
        ("cifar-10-batches-bin/batches.meta.txt", [names("ten", 10), b"\n".to_vec()].concat()),
        ("cifar-10-batches-bin/test_batch.bin", record(&[7], 3)),
        ("cifar-10-batches-bin/readme.html", b"<p>".to_vec()),
        ("cifar-10-batches-bin/data_batch_1.bin", [record(&[0], 0), record(&[9], 1)].concat()),
    ]
}

fn hundred() -> Vec<(&'static str, Vec<u8>)> {
    vec![
        ("cifar-100-binary/train.bin", [record(&[19, 99], 4), record(&[1, 0], 5)].concat()),
        ("cifar-100-binary/test.bin", record(&[10, 50], 6)),
        ("cifar-100-binary/fine_label_names.txt", names("fine", 100)),
        ("cifar-100-binary/coarse_label_names.txt", names("coarse", 20)),
    ]
}

fn packed(files: &[(&str, Vec<u8>)]) -> Vec<u8> {
    tar(&files.iter().map(|(name, bytes)| (*name, bytes.as_slice())).collect::<Vec<_>>())
}

/// Files of a fixture's folder, in the order of their names.
fn files_of(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let name = |path: &Path| path.file_name().unwrap().to_str().unwrap().to_string();
    let mut files: Vec<_> = entries.map(|path| (name(&path), fs::read(&path).unwrap())).collect();
    files.sort();
    files
}

type Contents = (Vec<String>, Vec<(usize, Image)>);

fn contents(set: &Cifar) -> Contents {
    let image = |index| {
        let mut sample = Sample::default();
        set.read(index, &mut sample).unwrap();
        (set.label(index), sample.image)
    };
    (set.class_names().to_vec(), (0..set.len()).map(image).collect())
}

fn read(path: &Path, kind: CifarKind, split: Split) -> Contents {
    contents(&Cifar::open(path, kind, split).unwrap_or_else(|error| panic!("{error}")))
}

fn refusal(path: &Path, kind: CifarKind, split: Split) -> String {
    let error = Cifar::open(path, kind, split).expect_err("it should be refused").to_string();
    assert!(!error.contains(|c: char| c.is_control()), "{error}");
    error.replace(&*path.to_string_lossy(), "PATH")
}

/// Every way a set may lie on disk, and what must be in it, by the formula.
#[test]
fn all_forms_hold_the_same() {
    let folder = Folder::new("forms");
    for (name, bytes) in ten().into_iter().chain(hundred()) {
        folder.file(&format!("unpacked/{name}"), &bytes);
    }
    folder.file("packed/cifar-10-binary.tar.gz", gzip(&packed(&ten())));
    folder.file("packed/cifar-100-binary.tar.gz", gzip(&packed(&hundred())));
    let mut places = vec![(folder.0.join("unpacked"), folder.0.join("unpacked"))];
    places.push((folder.0.join("unpacked/cifar-10-batches-bin"), folder.0.join("unpacked/cifar-100-binary")));
    places.push((folder.0.join("packed"), folder.0.join("packed")));
    places.push((
        folder.0.join("packed/cifar-10-binary.tar.gz"),
        folder.0.join("packed/cifar-100-binary.tar.gz"),
    ));
    places.push((folder.file("ten.tar", packed(&ten())), folder.file("any-name", packed(&hundred()))));
    for python in ["python2-numpy1", "python3-numpy1", "python3-numpy2"] {
        let unpacked = fixture("cifar").join(python);
        let [ten, hundred] = ["cifar-10-batches-py", "cifar-100-python"].map(|name| unpacked.join(name));
        let archive = |path: &Path, name: &str| {
            let files = files_of(path);
            let files: Vec<_> = files.iter().map(|(name, bytes)| (name.as_str(), bytes.as_slice())).collect();
            folder.file(&format!("{python}/{name}"), gzip(&tar(&files)))
        };
        places.push((archive(&ten, "cifar-10-python.tar.gz"), archive(&hundred, "cifar-100-python.tar.gz")));
        places.push((folder.0.join(python), folder.0.join(python)));
        places.push((ten, hundred));
        places.push((unpacked.clone(), unpacked));
    }
    let expected = |prefix: &str, classes: usize, images: &[(usize, usize)]| -> Contents {
        let pixel = |n: usize, i: usize, c: usize| ((n * 89 + (c * 1024 + i) * 7 + c * 31) % 256) as u8;
        let image = |n| (0..1024).flat_map(|i| [pixel(n, i, 0), pixel(n, i, 1), pixel(n, i, 2)]).collect();
        let image = |n| Image { width: 32, height: 32, channels: 3, pixels: image(n) };
        let names = (0..classes).map(|class| format!("{prefix}-{class}")).collect();
        (names, images.iter().map(|&(label, n)| (label, image(n))).collect())
    };
    for (ten, hundred) in places {
        let shown = ten.display();
        assert_eq!(read(&ten, TEN, Split::Train), expected("ten", 10, &[(0, 0), (9, 1), (4, 2)]), "{shown}");
        assert_eq!(read(&ten, TEN, Split::Test), expected("ten", 10, &[(7, 3)]), "{shown}");
        assert_eq!(read(&hundred, FINE, Split::Train), expected("fine", 100, &[(99, 4), (0, 5)]), "{shown}");
        assert_eq!(
            read(&hundred, COARSE, Split::Train),
            expected("coarse", 20, &[(19, 4), (1, 5)]),
            "{shown}"
        );
        assert_eq!(read(&hundred, FINE, Split::Test), expected("fine", 100, &[(50, 6)]), "{shown}");
        assert_eq!(read(&hundred, COARSE, Split::Test), expected("coarse", 20, &[(10, 6)]), "{shown}");
    }
}

#[test]
fn without_a_file_of_names_the_published_ones_are_used() {
    let folder = Folder::new("names");
    folder.file("test_batch.bin", record(&[9], 0));
    folder.file("test.bin", record(&[19, 99], 0));
    let name = |kind| {
        let set = Cifar::open(&folder.0, kind, Split::Test).unwrap();
        set.class_names()[set.label(0)].clone()
    };
    assert_eq!((name(TEN), name(FINE), name(COARSE)), ("truck".into(), "worm".into(), "vehicles_2".into()));
    folder.file("batches.meta.txt", b"one\ntwo\n");
    let error = refusal(&folder.0, TEN, Split::Test);
    assert_eq!(error, "PATH/batches.meta.txt: it names 2 classes; CIFAR-10 has 10 here");
    folder.file("batches.meta.txt", b"\xff");
    assert_eq!(refusal(&folder.0, TEN, Split::Test), "PATH/batches.meta.txt: it is not text");
}

#[test]
fn images_are_named_by_file_and_record() {
    let folder = Folder::new("image-names");
    ten().iter().for_each(|(name, bytes)| drop(folder.file(name, bytes)));
    let set = Cifar::open(&folder.0, TEN, Split::Train).unwrap();
    let path = folder.0.join("cifar-10-batches-bin");
    assert_eq!(set.name(1), format!("{} record 1", path.join("data_batch_1.bin").display()));
    assert_eq!(set.name(2), format!("{} record 0", path.join("data_batch_2.bin").display()));
    let archive = folder.file("a.tar", packed(&ten()));
    let set = Cifar::open(&archive, TEN, Split::Train).unwrap();
    assert_eq!(set.name(2), format!("{}: data_batch_2.bin record 0", archive.display()));
    let error = set.read(3, &mut Sample::default()).unwrap_err().to_string();
    assert_eq!(error, "image 3 was asked of a set that holds 3");
    assert_eq!(set.name(3), error);
}

#[test]
fn only_the_last_training_files_may_be_missing() {
    let folder = Folder::new("missing");
    let missing = |name: &str| format!("PATH/{name}: it is missing, and CIFAR-10's train set needs it");
    folder.file("test_batch.bin", record(&[1], 0));
    assert_eq!(refusal(&folder.0, TEN, Split::Train), missing("data_batch_1.bin"));
    folder.file("data_batch_1.bin", record(&[1], 0));
    folder.file("data_batch_2.bin", record(&[2], 0));
    assert_eq!(Cifar::open(&folder.0, TEN, Split::Train).unwrap().len(), 2);
    folder.file("data_batch_4.bin", record(&[4], 0));
    assert_eq!(refusal(&folder.0, TEN, Split::Train), missing("data_batch_3.bin"));
    let archive = folder.file("a", tar(&[("train.bin", &record(&[1, 1], 0))]));
    assert_eq!(
        refusal(&archive, FINE, Split::Test),
        "PATH: test.bin: it is missing, and CIFAR-100's test set needs it"
    );
}

#[test]
fn damaged_binary_files_are_refused() {
    let folder = Folder::new("binary");
    let ten = |bytes: &[u8]| {
        folder.file("test_batch.bin", bytes);
        refusal(&folder.0, TEN, Split::Test)
    };
    let path = "PATH/test_batch.bin";
    assert_eq!(ten(b""), format!("{path}: it is empty"));
    let two = [record(&[1], 0), record(&[10], 0)].concat();
    assert_eq!(ten(&two), format!("{path}: record 1 has label 10; labels are 0 to 9"));
    assert_eq!(
        ten(&two[..3173]),
        format!("{path}: truncated: 100 bytes are left over after 1 records of 3073 bytes")
    );
    for (labels, told) in [
        ([20, 99], "record 0 has label 20; labels are 0 to 19 (coarse)"),
        ([19, 100], "record 0 has label 100; labels are 0 to 99 (fine)"),
    ] {
        folder.file("test.bin", record(&labels, 0));
        assert_eq!(refusal(&folder.0, FINE, Split::Test), format!("PATH/test.bin: {told}"));
        assert_eq!(refusal(&folder.0, COARSE, Split::Test), format!("PATH/test.bin: {told}"));
    }
    fs::remove_file(folder.0.join("test.bin")).unwrap();
    fs::create_dir(folder.0.join("test.bin")).unwrap();
    folder.file("train.bin", record(&[1, 1], 0));
    assert_eq!(refusal(&folder.0, FINE, Split::Test), "PATH/test.bin: it is not a regular file");
    let huge = fs::File::create(folder.0.join("test_batch.bin")).unwrap();
    huge.set_len(3073 << 20).unwrap();
    let told = "3222274048 bytes are more than a file of this set may have, 268435456";
    assert_eq!(refusal(&folder.0, TEN, Split::Test), format!("{path}: {told}"));
}

#[test]
fn damaged_python_files_are_refused() {
    let folder = Folder::new("python");
    let ten = |bytes: &[u8]| {
        let path = folder.file("test_batch", bytes);
        let error = refusal(&folder.0, TEN, Split::Test);
        fs::remove_file(path).unwrap();
        error.strip_prefix("PATH/test_batch: ").expect("it names the file").to_string()
    };
    let whole = fs::read(fixture("cifar/python2-numpy1/cifar-10-batches-py/test_batch")).unwrap();
    let replaced = |from: &[u8], to: &[u8]| {
        let at = whole.windows(from.len()).position(|window| window == from).expect("it has this");
        [&whole[..at], to, &whole[at + from.len()..]].concat()
    };
    assert_eq!(ten(b""), "it is empty");
    assert_eq!(ten(&whole[..3000]), "byte 197 of its pickle: it ends in the middle");
    assert_eq!(ten(b"N."), "it has no `labels`");
    assert_eq!(ten(&replaced(b"U\x04data", b"U\x04dada")), "it has no `data`");
    assert_eq!(ten(&replaced(b"U\x02u1", b"U\x02f4")), "`data`: its values are not bytes (uint8)");
    assert_eq!(ten(&replaced(b"M\x00\x0c", b"M\x00\x0b")), "`data`: it is not a matrix with rows of 3072");
    assert_eq!(
        ten(&replaced(b"K\x01M\x00\x0c", b"K\x02M\x00\x0c")),
        "`data`: it has 3072 bytes for 2 rows of 3072"
    );
    assert_eq!(ten(&replaced(b"_reconstruct", b"_reconstrukt")), "`data`: it is not an array of numpy");
    assert_eq!(ten(&replaced(b"K\x07a", b"K\x0ba")), "record 0 has label 11; labels are 0 to 9");
    assert_eq!(ten(&replaced(b"K\x07a", b"]a")), "record 0 has a list for a label");
    assert_eq!(ten(&replaced(b"K\x07a", b"K\x07aK\x07a")), "it has 2 labels for 1 images");
}

#[test]
fn damaged_archives_are_refused() {
    let folder = Folder::new("archives");
    let open = |bytes: &[u8], kind| refusal(&folder.file("a", bytes), kind, Split::Test);
    let (plain, gzipped) = (packed(&ten()), gzip(&packed(&ten())));
    assert_eq!(open(b"", TEN), "PATH: it is empty");
    assert_eq!(open(b"hello", TEN), "PATH: it is neither a tar archive nor one packed with gzip");
    assert!(open(b"\xfd7zXZ\0...", TEN).starts_with("PATH: it is packed with xz; unpack it first"));
    assert_eq!(open(&gzipped, FINE), "PATH: this archive holds CIFAR-10, not CIFAR-100");
    assert_eq!(
        open(&tar(&[("x/photo.jpg", b"...")]), TEN),
        "PATH: this archive does not hold CIFAR-10; its first file is photo.jpg"
    );
    assert_eq!(open(&tar(&[]), TEN), "PATH: it is neither a tar archive nor one packed with gzip");
    assert_eq!(open(&gzip(&tar(&[])), TEN), "PATH: this archive does not hold CIFAR-10: it has no files");
    assert!(open(&gzipped[..gzipped.len() / 2], TEN).starts_with("PATH: cannot unpack: "));
    let mut wrong_sum = gzipped.clone();
    let sum = wrong_sum.len() - 8;
    wrong_sum[sum] ^= 1;
    assert_eq!(
        open(&wrong_sum, TEN),
        "PATH: cannot unpack: corrupt gzip stream does not have a matching checksum"
    );
    // The third file begins at 5632.
    assert_eq!(
        open(&plain[..6000], TEN),
        "PATH: cannot unpack: test_batch.bin: truncated: 368 of 3073 bytes are there"
    );
    assert_eq!(open(&plain[..9500], TEN), "PATH: cannot unpack: failed to read entire block");
    let twice = tar(&[("test_batch.bin", &record(&[1], 0)), ("a/test_batch.bin", b"")]);
    assert_eq!(open(&twice, TEN), "PATH: cannot unpack: test_batch.bin: it is there twice");
    let text = folder.file("set/notes.txt", b"");
    let told =
        "there is no CIFAR-10 here: no cifar-10-batches-bin, no cifar-10-batches-py, no archive of them";
    assert_eq!(refusal(text.parent().unwrap(), TEN, Split::Test), format!("PATH: {told}"));
    hundred().iter().for_each(|(name, bytes)| drop(folder.file(&format!("set/{name}"), bytes)));
    assert_eq!(
        refusal(text.parent().unwrap(), TEN, Split::Test),
        format!("PATH: {told}; it holds CIFAR-100")
    );
    assert!(refusal(Path::new("/no/such"), TEN, Split::Test).starts_with("PATH: cannot open: No such file"));
}

/// A few hundred kilobytes that unpack to zeros without end.
#[test]
fn bombs_end_at_the_limit() {
    let folder = Folder::new("bombs");
    let claim = |size: u64| {
        let mut header = tar::Header::new_gnu();
        header.set_path("test_batch.bin").unwrap();
        header.set_size(size);
        header.set_cksum();
        header.as_bytes().to_vec()
    };
    let refused = |bytes: &[u8]| refusal(&folder.file("bomb", bytes), TEN, Split::Test);
    let told = "1099511627776 bytes are more than a file of this set may have, 268435456";
    assert_eq!(refused(&claim(1 << 40)), format!("PATH: cannot unpack: test_batch.bin: {told}"));

    let mut unwanted = tar::Header::new_gnu();
    unwanted.set_path("zeros").unwrap();
    unwanted.set_size(1 << 40);
    unwanted.set_cksum();
    let zeros = gzip(&vec![0; 8 << 20]);
    let members = [gzip(unwanted.as_bytes()), zeros.repeat(65)].concat();
    assert!(members.len() < 4 << 20, "{}", members.len());
    assert_eq!(
        refused(&members),
        "PATH: cannot unpack: it unpacks to more than 536870912 bytes, which no such set does"
    );
}
