#![no_main]

use data::pickle::{MEMORY_PER_BYTE, Pickle, Value};
use fuzz::{check_error, within};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    match within(MEMORY_PER_BYTE * bytes.len() + 1000, || Pickle::read_first(bytes)) {
        Ok((pickle, length)) => {
            assert!(length <= bytes.len());
            look_at(&pickle);
        }
        Err(error) => check_error(error),
    }
});

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
