//! Panics of ranks, caught and reported as one line.

use std::cell::{Cell, RefCell};
use std::panic::{self, AssertUnwindSafe, PanicHookInfo};
use std::sync::Once;

thread_local! {
    static IS_RANK: Cell<bool> = const { Cell::new(false) };
    static LINE: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Runs `work`; a panic becomes an error with its message and place.
pub(super) fn caught<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let before = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            IS_RANK.with(Cell::get).then(|| LINE.with(|line| line.replace(Some(exit_report(info)))));
            // A backtrace is printed if it was asked for; otherwise the rank's line is enough.
            if !IS_RANK.with(Cell::get) || std::env::var_os("RUST_BACKTRACE").is_some_and(|v| v != "0") {
                before(info);
            }
        }));
    });
    IS_RANK.with(|is_rank| is_rank.set(true));
    // The caller ends the rank's run: whatever the panic left half done isn't used again.
    let result = panic::catch_unwind(AssertUnwindSafe(work));
    IS_RANK.with(|is_rank| is_rank.set(false));
    result.map_err(|payload| {
        LINE.with(RefCell::take).unwrap_or_else(|| format!("panicked: {}", text(&*payload)))
    })
}

fn exit_report(info: &PanicHookInfo) -> String {
    let text = text(info.payload()).replace('\n', " ");
    match info.location() {
        Some(at) => format!("panicked at {}:{}: {text}", at.file(), at.line()),
        None => format!("panicked: {text}"),
    }
}

fn text(payload: &(dyn std::any::Any + Send)) -> String {
    let text = payload.downcast_ref::<String>().cloned();
    text.or_else(|| payload.downcast_ref::<&str>().map(|text| text.to_string())).unwrap_or_default()
}
