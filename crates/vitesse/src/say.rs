//! The one way to a terminal. These macros stand in the place of the standard library's in all of this crate, so that nothing that a
//! command prints can hold an escape sequence, whatever files, weights or children it comes from.
//!
//! Nor does printing end a command. The files of a run are its record, so nobody need listen: a reader that leaves
//! (`vitesse train | head`) or a terminal that is closed is no failure of a run that goes on without ([`go_on_without_listeners`]). Anything
//! else that keeps lines from being written is remembered, and reported at the end.

use crate::layout;
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
    without_codes(&text::printable::line(&line))
}

/// Errors of the system without their numbers: "No such file or directory (os error 2)" says it all before.
pub fn without_codes(line: &str) -> String {
    let mut parts = line.split(" (os error ");
    let mut out = parts.next().unwrap_or_default().to_string();
    for part in parts {
        match part.split_once(')') {
            Some((code, rest)) if code.bytes().all(|byte| byte.is_ascii_digit()) => out += rest,
            _ => out += &format!(" (os error {part}"),
        }
    }
    out
}

macro_rules! println {
    () => { $crate::say::out(::std::format_args!("\n")) };
    ($($text:tt)*) => { $crate::say::lines(::std::format_args!($($text)*)) };
}

macro_rules! print {
    ($($text:tt)*) => { $crate::say::out(::std::format_args!($($text)*)) };
}

macro_rules! eprintln {
    ($($text:tt)*) => { $crate::say::err(::std::format_args!($($text)*)) };
}

static FAILURE: OnceLock<String> = OnceLock::new();

/// Lines on standard output, each as wide as the terminal at most.
pub fn lines(text: fmt::Arguments<'_>) {
    let (text, width) = (text.to_string(), layout::width());
    let lines: Vec<String> = text.split('\n').map(|line| layout::wrapped(line, width)).collect();
    out(format_args!("{}\n", lines.join("\n")));
}

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
    let _ = writeln!(io::stderr(), "{}", printable::text(&without_codes(&text.to_string())));
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_of_the_system_have_no_numbers() {
        let error = std::fs::File::open("/nowhere").unwrap_err();
        let error = anyhow::Error::new(error)
            .context("/nowhere: cannot open: No such file or directory (os error 2)");
        assert_eq!(one_line(&error), "/nowhere: cannot open: No such file or directory");
        assert_eq!(without_codes("a (os error x) b"), "a (os error x) b");
        assert_eq!(without_codes("a (os error 2): b (os error 13)"), "a: b");
    }
}
