//! What classes are called.

use text::printable;

/// What to call class `class` where people read it: one line that a terminal only shows.
pub fn class_name(names: &[String], class: usize) -> String {
    printable::line(&exact_name(names, class))
}

/// The same for programs, to the character.
pub fn exact_name(names: &[String], class: usize) -> String {
    names.get(class).cloned().unwrap_or_else(|| format!("class {class}"))
}
