//! The one way to a terminal. These macros stand in the place of the standard library's in all of this crate, so that nothing that a
//! command prints can hold an escape sequence, whatever files, weights or children it comes from.

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
