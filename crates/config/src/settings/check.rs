//! Ranges that plain settings lie in.

/// Nothing, or why a value can't be.
pub type Checked = Result<(), String>;

pub fn any<T>(_: &T) -> Checked {
    Ok(())
}

/// At least one.
pub fn counts<T: PartialEq + From<u8>>(value: &T) -> Checked {
    if *value == T::from(0) { Err("must be at least 1".to_string()) } else { Ok(()) }
}

/// Above 0 and below 1.
pub fn between_0_and_1(value: &f64) -> Checked {
    if *value > 0.0 && *value < 1.0 { Ok(()) } else { Err("must lie in 0 < decay < 1".to_string()) }
}

/// The check of a value that there may be.
pub fn if_given<T>(check: impl Fn(&T) -> Checked) -> impl Fn(&Option<T>) -> Checked {
    move |value| value.as_ref().map_or(Ok(()), &check)
}
