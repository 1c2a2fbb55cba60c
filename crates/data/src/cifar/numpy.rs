//! Arrays that numpy pickled.
//!
//! Protocols up to 4 call `_reconstruct` for an empty array and then restore a state of
//! (version, shape, dtype, Fortran order?, bytes). Protocol 5 calls `_frombuffer(bytes, dtype, shape, order)`.
//! Numpy 2 renamed the package `numpy.core` that both are in to `numpy._core`.

use std::borrow::Cow;

use crate::pickle::Value;

/// A matrix of bytes with rows of a given length, row after row.
pub(super) fn byte_matrix(array: Value<'_>, columns: usize) -> Result<Cow<'_, [u8]>, String> {
    let parts = reconstructed(array).or_else(|| from_buffer(array)).ok_or("it is not an array of numpy")?;
    if parts.fortran_order {
        return Err("it is an array in Fortran order".to_string());
    }
    if !is_bytes(parts.dtype) {
        return Err("its values are not bytes (uint8)".to_string());
    }
    let shape: Option<Vec<i64>> = parts
        .shape
        .items()
        .filter(|sides| sides.len() == 2)
        .and_then(|sides| sides.map(Value::int).collect());
    let rows = match shape.as_deref() {
        Some(&[rows, found]) if usize::try_from(found) == Ok(columns) => rows,
        _ => return Err(format!("it is not a matrix with rows of {columns}")),
    };
    let bytes = parts.bytes.bytes().ok_or("its values are missing")?;
    let needed = usize::try_from(rows).ok().and_then(|rows| rows.checked_mul(columns));
    if needed != Some(bytes.len()) {
        return Err(format!("it has {} bytes for {rows} rows of {columns}", bytes.len()));
    }
    Ok(bytes)
}

struct Parts<'p> {
    shape: Value<'p>,
    dtype: Value<'p>,
    fortran_order: bool,
    bytes: Value<'p>,
}

fn reconstructed(array: Value<'_>) -> Option<Parts<'_>> {
    array.call_of(|module, name| {
        matches!((module, name), ("numpy.core.multiarray" | "numpy._core.multiarray", "_reconstruct"))
    })?;
    let state = array.state()?;
    Some(Parts {
        shape: state.item(1)?,
        dtype: state.item(2)?,
        fortran_order: state.item(3)?.int()? != 0,
        bytes: state.item(4)?,
    })
}

fn from_buffer(array: Value<'_>) -> Option<Parts<'_>> {
    let args = array.call_of(|module, name| {
        matches!((module, name), ("numpy.core.numeric" | "numpy._core.numeric", "_frombuffer"))
    })?;
    Some(Parts {
        bytes: args.item(0)?,
        dtype: args.item(1)?,
        shape: args.item(2)?,
        fortran_order: args.item(3)?.text()? != "C",
    })
}

fn is_bytes(dtype: Value<'_>) -> bool {
    let args = dtype.call_of(|module, name| (module, name) == ("numpy", "dtype"));
    args.and_then(|args| args.item(0)?.text()) == Some("u1")
}
