//! The one way to a terminal. These macros stand in the place of the standard library's in all of this crate, so that nothing that a
//! command prints can hold an escape sequence, whatever files, weights or children it comes from.
//!
//! Nor does printing end a command. The files of a run are its record, so nobody need listen: a reader that leaves
//! (`vitesse train | head`) or a terminal that is closed is no failure of a run that goes on without ([`go_on_without_listeners`]). Anything
//! else that keeps lines from being written is remembered, and reported at the end.

use std::fmt;
use std::io::{self, Write};
use std::sync::OnceLock;
use text::printable;

/// An error with what caused it, on one line; a cause that the error names already is not named again.
pub fn one_line(error: &anyhow::Error) -> String {
    let mut line = error.to_string();
    for cause in error.chain().skip(1).map(|cause| cause.to_string()) {
        if !line.contains(&cause) {
            line = format!("{line}: {cause}");
        }
    }
    text::printable::line(&line)
}

macro_rules! println {
    () => { $crate::say::out(::std::format_args!("\n")) };
    ($($text:tt)*) => { $crate::say::out(::std::format_args!("{}\n", ::std::format_args!($($text)*))) };
}

macro_rules! print {
    ($($text:tt)*) => { $crate::say::out(::std::format_args!($($text)*)) };
}

macro_rules! eprintln {
    ($($text:tt)*) => { $crate::say::err(::std::format_args!($($text)*)) };
}

static FAILURE: OnceLock<String> = OnceLock::new();

/// Text on standard output.
pub fn out(text: fmt::Arguments<'_>) {
    let mut out = io::stdout().lock();
    let written = out.write_all(printable::text(&text.to_string()).as_bytes()).and_then(|()| out.flush());
    if let Err(error) = written
        && !nobody_listens(&error)
    {
        FAILURE.get_or_init(|| format!("standard output: {error}"));
    }
}

/// A line on standard error.
pub fn err(text: fmt::Arguments<'_>) {
    // There is nobody else to tell.
    let _ = writeln!(io::stderr(), "{}", printable::text(&text.to_string()));
}

/// Why text could not be written that someone wanted.
pub fn failure() -> Option<&'static str> {
    FAILURE.get().map(String::as_str)
}

/// A pipe without a reader, or a terminal that is gone.
fn nobody_listens(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::BrokenPipe || error.raw_os_error() == Some(libc::EIO)
}

/// From here on a reader that leaves is an error like others, not the end of the process.
pub fn go_on_without_listeners() {
    // SAFETY: sets what a signal does, before any thread is started.
    unsafe {
        libc::signal(libc::SIGPIPE, libc::SIG_IGN);
    }
}
