//! Models with batch norm train on whole batches: a sample of weight 0 counts for no loss, but it would count for the moments.

use crate::ConfigError;

/// Steps of an epoch. With `whole`, a last batch that is not full is left out.
pub(super) fn steps_per_epoch(images: usize, global_batch: usize, whole: bool) -> Result<u64, ConfigError> {
    let steps = if whole { images / global_batch } else { images.div_ceil(global_batch) };
    if whole && steps == 0 {
        let why = format!(
            "a whole batch of {global_batch}, which batch norm needs, can't be made of {}: lower --batch-size",
            text::many(images, "image")
        );
        return Err(ConfigError::Batch(why));
    }
    Ok(steps as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_that_is_not_full_is_left_out() {
        let steps = |images, batch, whole| steps_per_epoch(images, batch, whole).map_err(|e| e.to_string());
        assert_eq!(steps(100, 10, true), Ok(10));
        assert_eq!(steps(109, 10, true), Ok(10));
        assert_eq!(steps(109, 10, false), Ok(11));
        assert_eq!(steps(9, 10, false), Ok(1));
        assert_eq!(steps(0, 10, false), Ok(0), "refused elsewhere");
        let none =
            "a whole batch of 10, which batch norm needs, can't be made of 9 images: lower --batch-size";
        assert_eq!(steps(9, 10, true), Err(none.to_string()));
    }
}
