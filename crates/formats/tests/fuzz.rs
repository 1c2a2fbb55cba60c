//! Damaged files of weights end in an error or in other weights: never in a panic, nor in more memory than the file's
//! own length justifies.

use std::fs;
use std::path::Path;

use data::pickle::MEMORY_PER_BYTE;
use formats::weights;
use testing::allocations::{Counting, peak};
use testing::fuzz::rounds;
use testing::{Folder, Random};

#[global_allocator]
static ALLOCATOR: Counting = Counting::new();

/// For messages, and the buffers of files.
const OVERHEAD: usize = 20_000;
/// The values as f32, at most one for each byte of the file, and the bytes of one storage.
const VALUES_PER_BYTE: usize = 5;
/// A name in a header takes a few bytes there, and a tensor with a shape here.
const HEADER_PER_BYTE: usize = 40;

fn fixtures(names: &[&str]) -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/pth");
    names.iter().map(|name| fs::read(folder.join(name)).unwrap()).collect()
}

/// A file in a temporary folder.
struct Scratch(Folder);

impl Scratch {
    fn new(name: &str) -> Scratch {
        Scratch(Folder::new(name))
    }

    /// Reads these bytes as weights, and says how much memory that took.
    fn read(&self, bytes: &[u8]) -> usize {
        let file = self.0.file("weights", bytes);
        let (read, used) = peak(|| weights::read(&file));
        match read {
            Ok(weights) => assert!(weights.values().all(|tensor| tensor.is_whole())),
            Err(error) => {
                let error = error.to_string();
                assert!(!error.contains(char::is_control) && error.len() < 1500, "{error}");
            }
        }
        used
    }
}

#[test]
fn damaged_files_of_pytorch() {
    let files = fixtures(&["small.pth", "legacy.pth", "checkpoint.pth", "module.pth", "malicious.pth"]);
    let scratch = Scratch::new("fuzz-pth");
    rounds(
        "pth",
        25_000,
        |random| random.damaged(&files),
        |bytes| (scratch.read(bytes), (MEMORY_PER_BYTE + VALUES_PER_BYTE) * bytes.len() + OVERHEAD),
    );
}

/// Damage to the pickle alone, in an archive that is sound, which gets further.
#[test]
fn damaged_pickles_of_pytorch() {
    let files = fixtures(&["small.pth", "checkpoint.pth", "module.pth"]);
    let pickle_of = |file: &[u8]| {
        let begin = file.windows(2).position(|start| start == b"\x80\x02").unwrap();
        let length = data::pickle::Pickle::read_first(&file[begin..]).unwrap().1;
        begin..begin + length
    };
    let pickles: Vec<_> = files.iter().map(|file| file[pickle_of(file)].to_vec()).collect();
    let damage = |random: &mut Random| {
        let mut file = random.pick(&files).clone();
        let place = pickle_of(&file);
        let mut pickle = random.damaged(&pickles);
        // As long as it was: a stop ends it, and what follows is noticed only then.
        pickle.resize(place.len(), b'.');
        file[place].copy_from_slice(&pickle);
        file
    };
    let scratch = Scratch::new("fuzz-pth-pickle");
    rounds("pth-pickle", 12_000, damage, |bytes| {
        (scratch.read(bytes), (MEMORY_PER_BYTE + VALUES_PER_BYTE) * bytes.len() + OVERHEAD)
    });
}

#[test]
fn damaged_safetensors() {
    let header = br#"{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]},"b":{"dtype":"BF16","shape":[],"data_offsets":[8,10]}}"#;
    let plain = [&(header.len() as u64).to_le_bytes()[..], header, &[1; 10]].concat();
    let files = [fixtures(&["small.safetensors"]), vec![plain]].concat();
    let scratch = Scratch::new("fuzz-safetensors");
    rounds(
        "safetensors",
        40_000,
        |random| random.damaged(&files),
        |bytes| (scratch.read(bytes), (HEADER_PER_BYTE + VALUES_PER_BYTE) * bytes.len() + OVERHEAD),
    );
}
