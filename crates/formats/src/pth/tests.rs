use std::fs;
use std::path::PathBuf;

use super::*;
use crate::weights;
use testing::Folder;

/// `make.py` beside the files wrote them with PyTorch.
fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/pth").join(name)
}

fn bytes(name: &str) -> Vec<u8> {
    fs::read(fixture(name)).unwrap()
}

fn refusal(path: &Path) -> String {
    let error = weights::read(path).expect_err("it should be refused").to_string();
    let told = error.strip_prefix(&format!("{}: ", path.display())).expect("it names the file");
    assert!(!told.contains(char::is_control), "{told}");
    told.to_string()
}

/// Bit by bit, since a zero has a sign.
fn bits(weights: Weights) -> BTreeMap<String, (Vec<usize>, Vec<u32>)> {
    let bits = |tensor: Tensor| (tensor.shape, tensor.data.into_iter().map(f32::to_bits).collect());
    weights.into_iter().map(|(name, tensor)| (name, bits(tensor))).collect()
}

#[test]
fn every_format_gives_the_values_of_its_safetensors_twin() {
    let twin = bits(weights::read(&fixture("small.safetensors")).unwrap());
    assert_eq!(twin.len(), 14);
    for name in ["small.pth", "legacy.pth", "checkpoint.pth"] {
        assert_eq!(bits(weights::read(&fixture(name)).unwrap()), twin, "{name}");
    }
}

#[test]
fn the_state_dict_of_a_module_is_read_without_its_counters() {
    let weights = weights::read(&fixture("module.pth")).unwrap();
    let names: Vec<&str> = weights.keys().map(String::as_str).collect();
    let expected = ["0.bias", "0.weight", "1.bias", "1.running_mean", "1.running_var", "1.weight"];
    assert_eq!(names, expected);
    assert_eq!(weights["0.weight"], Tensor { shape: vec![3, 2], data: vec![1.0; 6] });
}

#[test]
fn what_would_be_run_is_refused_by_name() {
    let system = if cfg!(windows) { "nt.system" } else { "posix.system" };
    let told = |what: &str| format!("this file asks to run {what}; vitesse reads tensors only");
    assert_eq!(refusal(&fixture("malicious.pth")), told(system));
    assert_eq!(refusal(&fixture("malicious-legacy.pth")), told(system));
    assert_eq!(refusal(&fixture("whole-model.pth")), told("torch.nn.modules.container.Sequential"));
    assert!(refusal(&fixture("script.pth")).starts_with("a TorchScript program; vitesse reads what"));
}

#[test]
fn other_archives_are_refused() {
    assert_eq!(refusal(&fixture("other.zip")), "a zip archive, but not of weights: it has no data.pkl");
    let told = "damaged zip archive: its files are compressed or encrypted, which PyTorch does not do";
    assert_eq!(refusal(&fixture("compressed.zip")), told);
}

fn replaced(bytes: &[u8], from: &[u8], to: &[u8]) -> Vec<u8> {
    assert_eq!(from.len(), to.len());
    let at = bytes.windows(from.len()).position(|window| window == from).expect("it has this");
    [&bytes[..at], to, &bytes[at + from.len()..]].concat()
}

/// The first tensor of the fixture is 3 × 4, from the start of storage 0, which has twelve values.
#[test]
fn views_beyond_their_storage_are_refused() {
    let folder = Folder::new("pth-views");
    let small = bytes("small.pth");
    let refused = |from: &[u8], to: &[u8]| refusal(&folder.file("v.pth", replaced(&small, from, to)));
    let (shape, strides) = (b"K\x03K\x04\x86q\x09K\x04K\x01\x86", "its storage has 12 values");
    for (to, told) in [
        (b"K\x03K\x05\x86q\x09K\x04K\x01\x86", "is [3, 5] with strides [4, 1] from 0 on"),
        (b"K\x04K\x04\x86q\x09K\x04K\x01\x86", "is [4, 4] with strides [4, 1] from 0 on"),
        (b"K\x03K\x04\x86q\x09K\x05K\x01\x86", "is [3, 4] with strides [5, 1] from 0 on"),
        // A few bytes that would become many values.
        (b"K\xffK\xff\x86q\x09K\x00K\x00\x86", "is [255, 255] with strides [0, 0] from 0 on"),
    ] {
        let error = refused(shape, to);
        let told = if to[1] == 0xff {
            "its tensors have more values than the file has bytes".to_string()
        } else {
            format!("tensor `single` {told}, but {strides}")
        };
        assert_eq!(error, told);
    }
    let expanded = refused(shape, b"K\x04K\x04\x86q\x09K\x00K\x00\x86");
    assert_eq!(expanded, format!("tensor `single` is [4, 4] with strides [0, 0] from 0 on, but {strides}"));
    let offset = refused(b"K\x00K\x03K\x04\x86", b"K\x01K\x03K\x04\x86");
    assert_eq!(offset, format!("tensor `single` is [3, 4] with strides [4, 1] from 1 on, but {strides}"));
    let missing = refused(b"X\x01\x00\x00\x000q", b"X\x01\x00\x00\x00xq");
    assert_eq!(missing, "tensor `single` lies in storage `x`, which the file does not have");
    let malformed = refused(b"K\x00K\x03K\x04\x86", b"K\x00K\x03K\x04\x85");
    assert!(malformed.contains("tensor `single` is not described as PyTorch does it"), "{malformed}");
}

#[test]
fn damaged_archives_are_refused() {
    let folder = Folder::new("pth-damage");
    let small = bytes("small.pth");
    let refused = |bytes: &[u8]| refusal(&folder.file("d.pth", bytes));
    let no_directory = "damaged zip archive: it has no directory, perhaps it is truncated";
    for length in (4..small.len()).step_by(7) {
        let error = refused(&small[..length]);
        assert_eq!(error, no_directory, "cut after {length} bytes");
    }
    assert_eq!(refused(&replaced(&small, b"little", b"big...")), "its values are in big-endian order");
    assert!(
        refused(&replaced(&small, b"PK\x01\x02", b"PK\x01\x03"))
            .starts_with("damaged zip archive: its directory")
    );
    assert_eq!(
        refused(&replaced(&small, b"_rebuild_tensor_v2", b"_rebuild_tensor_v9")),
        "this file asks to run torch._utils._rebuild_tensor_v9; vitesse reads tensors only"
    );
    assert_eq!(
        refused(&replaced(&small, b"\x80\x02ccoll", b"\x80\xffccoll")),
        "byte 0 of its pickle: protocol 255 is not known, only 0 to 5"
    );
    let legacy = bytes("legacy.pth");
    for length in (15..legacy.len()).step_by(7) {
        refused(&legacy[..length]);
    }
    assert_eq!(refused(&legacy[..legacy.len() - 1]), "damaged: it ends within a storage");
    assert_eq!(
        refused(&replaced(&legacy, b"M\xe9\x03.", b"M\xe8\x03.")),
        "damaged: the version of the format is not known"
    );
}

#[test]
fn what_is_no_dict_of_tensors_is_refused() {
    let folder = Folder::new("pth-no-dict");
    let legacy = |pickle: &[u8]| {
        let start = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.";
        folder.file("n.pth", [&start[..], b"\x80\x02}.", pickle, b"]."].concat())
    };
    assert_eq!(refusal(&legacy(b"].")), "there are no tensors in it, only a list");
    assert_eq!(refusal(&legacy(b"}X\x01\x00\x00\x00aK\x01s.")), "there are no tensors in it, only a dict");
    assert_eq!(
        refusal(&legacy(b"cargparse\nNamespace\n)\x81.")),
        "there are no tensors in it, only an object"
    );
    assert_eq!(refusal(&legacy(b"")), "byte 0 of its pickle: it ends in the middle");
}

#[test]
fn names_are_told_apart_without_their_wrappers() {
    assert_eq!(plain_name("module._orig_mod.module.head.weight"), "head.weight");
    assert_eq!(plain_name("modules.head"), "modules.head");
    let folder = Folder::new("pth-twice");
    let checkpoint = bytes("checkpoint.pth");
    let twice =
        replaced(&checkpoint, b"module._orig_mod.half_transposed", b"module._orig_mod.module.half\0\0\0\0");
    let error = refusal(&folder.file("t.pth", &twice));
    assert_eq!(error, "`half\u{fffd}\u{fffd}\u{fffd}\u{fffd}` cannot be the name of a tensor");
    let twice = replaced(&checkpoint, b"module._orig_mod.transposed", b"module._orig_mod.module.sca");
    let twice = replaced(&twice, b"module._orig_mod.module.sca", b"module.module.module.single");
    assert_eq!(refusal(&folder.file("t.pth", &twice)), "tensor `single` occurs twice");
}
