//! One convention for tests that can't run here.
//!
//! A test that never runs without special hardware is `#[ignore = "needs a GPU"]`, which libtest prints. One that finds out when it
//! runs calls [`skip!`](crate::skip) or [`need!`](crate::need).

use std::io::Write;

/// Ends a test that can't run here, with the reason: `skip!("no {program} was found")`.
///
/// Prints `test NAME ... skipped: REASON` to standard error, past libtest's capture. With `VITESSE_REQUIRE_ALL=1`, as in
/// `scripts/test`, the test fails instead.
#[macro_export]
macro_rules! skip {
    ($($reason:tt)*) => {
        return $crate::skipped(&format!($($reason)*))
    };
}

/// What a test can't run without: the value of a `Result`, or [`skip!`] with its error.
#[macro_export]
macro_rules! need {
    ($found:expr) => {
        match $found {
            Ok(found) => found,
            Err(reason) => $crate::skip!("{reason}"),
        }
    };
}

/// What [`skip!`] does before it returns.
#[track_caller]
pub fn skipped(reason: &str) {
    let required = std::env::var_os("VITESSE_REQUIRE_ALL").is_some_and(|value| value == "1");
    assert!(!required, "skipped, but VITESSE_REQUIRE_ALL is 1: {reason}");
    inapplicable(reason);
}

/// Prints that a test is skipped, and why, where it has no meaning on this machine: not for want of anything, so that it
/// never fails.
#[track_caller]
pub fn inapplicable(reason: &str) {
    let thread = std::thread::current();
    // libtest names a thread for its test; with one thread it runs tests on the main one.
    let name = match thread.name() {
        Some(name) if name != "main" => name.to_string(),
        _ => std::panic::Location::caller().to_string(),
    };
    let line = format!("test {name} ... skipped: {}\n", reason.trim());
    // Not `eprint!`, which libtest captures.
    let _ = std::io::stderr().write_all(line.as_bytes());
}
