//! No module of this crate knows a device. (That modules depend in one direction is a test of all crates, `testing/tests/rooms.rs`.)

use std::path::Path;
use testing::modules::Sources;

#[test]
fn no_device_is_named() {
    let named = ["hopper", "h100", "h200", "cuda", "nvidia", "gpu"];
    let sources = Sources::read(Path::new(env!("CARGO_MANIFEST_DIR")));
    assert!(sources.0.len() > 30);
    for (path, text) in sources.0 {
        let text = text.to_lowercase();
        let found = named.iter().find(|word| text.contains(**word));
        assert_eq!(found, None, "{}", path.display());
    }
}
