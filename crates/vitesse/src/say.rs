//! The one way to a terminal. These macros stand in the place of the standard library's in all of this crate, so that nothing that a
//! command prints can hold an escape sequence, whatever files, weights or children it comes from.

/// An error with what caused it, on one line; a cause that the error names already is not named again.
pub fn one_line(error: &anyhow::Error) -> String {
    let mut line = error.to_string();
    for cause in error.chain().skip(1).map(|cause| cause.to_string()) {
        if !line.contains(&cause) {
            line = format!("{line}: {cause}");
        }
    }
    train::printable::line(&line)
}

macro_rules! println {
    () => { ::std::println!() };
    ($($text:tt)*) => { ::std::println!("{}", ::train::printable::text(&::std::format!($($text)*))) };
}

macro_rules! print {
    ($($text:tt)*) => { ::std::print!("{}", ::train::printable::text(&::std::format!($($text)*))) };
}

macro_rules! eprintln {
    ($($text:tt)*) => { ::std::eprintln!("{}", ::train::printable::text(&::std::format!($($text)*))) };
}
