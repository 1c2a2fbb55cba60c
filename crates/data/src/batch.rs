//! From indices to the buffers a model reads.

use crate::{DataError, Dataset, Image};

/// Reads batches; keeps one image's bytes, so that filling a batch allocates nothing.
pub struct Filler {
    image_size: usize,
    scratch: Image,
}

impl Filler {
    pub fn new(image_size: usize) -> Self {
        Self { image_size, scratch: Image::default() }
    }

    /// Fills a batch of `capacity` (B) with the images at `indices`, of which there may be fewer.
    ///
    /// * `images` (B, C, H, W): bytes mapped from 0..=255 onto -1..=1, that is (x/255 - 0.5) / 0.5
    /// * `labels` (B)
    /// * `weights` (B): 1 for an image
    ///
    /// What is left of a partial batch gets pixels 0, label 0 and weight 0, so that a loss or an
    /// accuracy weighted by `weights` does not see it.
    pub fn fill(
        &mut self,
        dataset: &dyn Dataset,
        indices: &[usize],
        capacity: usize,
        images: &mut [f32],
        labels: &mut [i32],
        weights: &mut [f32],
    ) -> Result<(), DataError> {
        let (size, channels) = (self.image_size, dataset.channels());
        let image_len = size * size * channels;
        let count = indices.len();
        if count > capacity {
            return Err(DataError::BatchOverfull { indices: count, capacity });
        }
        check_length("images", images.len(), capacity.saturating_mul(image_len))?;
        check_length("labels", labels.len(), capacity)?;
        check_length("weights", weights.len(), capacity)?;

        for (&index, image) in indices.iter().zip(images.chunks_exact_mut(image_len.max(1))) {
            dataset.read(index, &mut self.scratch)?;
            let Image { width, height, channels: found, .. } = self.scratch;
            if (width, height, found) != (size, size, channels) {
                let image = dataset.name(index);
                return Err(DataError::Shape { image, width, height, found, expected: size, channels });
            }
            normalise(&self.scratch, image);
        }
        for (&index, label) in indices.iter().zip(&mut *labels) {
            *label = dataset.label(index) as i32;
        }
        weights[..count].fill(1.0);

        images[count * image_len..].fill(0.0);
        labels[count..].fill(0);
        weights[count..].fill(0.0);
        Ok(())
    }
}

/// (H, W, C) bytes become (C, H, W) numbers.
fn normalise(image: &Image, out: &mut [f32]) {
    let plane = image.width * image.height;
    for (channel, out) in out.chunks_exact_mut(plane.max(1)).enumerate() {
        let bytes = image.pixels.iter().skip(channel).step_by(image.channels);
        out.iter_mut().zip(bytes).for_each(|(pixel, byte)| *pixel = (f32::from(*byte) / 255.0 - 0.5) / 0.5);
    }
}

fn check_length(buffer: &'static str, found: usize, expected: usize) -> Result<(), DataError> {
    if found == expected { Ok(()) } else { Err(DataError::BufferLength { buffer, expected, found }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const IMAGE: usize = 2 * 2 * 3;

    /// Image i is all bytes i × 51; its class is i.
    struct Flat([String; 6]);

    impl Flat {
        fn new() -> Self {
            Flat(std::array::from_fn(|class| class.to_string()))
        }
    }

    impl Dataset for Flat {
        fn len(&self) -> usize {
            6
        }
        fn class_names(&self) -> &[String] {
            &self.0
        }
        fn channels(&self) -> usize {
            3
        }
        fn label(&self, index: usize) -> usize {
            index
        }
        fn name(&self, index: usize) -> String {
            format!("image {index}")
        }
        fn read(&self, index: usize, out: &mut Image) -> Result<(), DataError> {
            if index >= self.len() {
                return Err(DataError::IndexOutOfRange { index, len: 6 });
            }
            out.reset(2, 2, 3).fill(index as u8 * 51);
            Ok(())
        }
    }

    struct Buffers {
        images: Vec<f32>,
        labels: Vec<i32>,
        weights: Vec<f32>,
    }

    /// Buffers full of leftovers from a batch before.
    fn used_buffers(capacity: usize) -> Buffers {
        Buffers {
            images: vec![9.0; capacity * IMAGE],
            labels: vec![9; capacity],
            weights: vec![9.0; capacity],
        }
    }

    fn fill(indices: &[usize], capacity: usize, buffers: &mut Buffers) -> Result<(), DataError> {
        Filler::new(2).fill(
            &Flat::new(),
            indices,
            capacity,
            &mut buffers.images,
            &mut buffers.labels,
            &mut buffers.weights,
        )
    }

    #[test]
    fn a_partial_batch_is_normalised_and_padded() {
        let mut buffers = used_buffers(3);
        fill(&[5, 0], 3, &mut buffers).unwrap();
        assert_eq!(buffers.labels, [5, 0, 0]);
        assert_eq!(buffers.weights, [1.0, 1.0, 0.0]);
        assert_eq!(buffers.images[..12], [1.0; 12]);
        assert_eq!(buffers.images[12..24], [-1.0; 12]);
        assert_eq!(buffers.images[24..], [0.0; 12]);
    }

    #[test]
    fn an_empty_batch_is_all_padding() {
        let mut buffers = used_buffers(2);
        fill(&[], 2, &mut buffers).unwrap();
        assert!(buffers.images.iter().all(|&x| x == 0.0));
        assert_eq!(buffers.weights, [0.0, 0.0]);
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        assert_eq!(
            fill(&[0, 1, 2], 2, &mut used_buffers(2)),
            Err(DataError::BatchOverfull { indices: 3, capacity: 2 })
        );
        let short_labels = &mut used_buffers(2);
        short_labels.labels.pop();
        assert_eq!(
            fill(&[0], 2, short_labels),
            Err(DataError::BufferLength { buffer: "labels", expected: 2, found: 1 })
        );
        assert_eq!(fill(&[6], 2, &mut used_buffers(2)), Err(DataError::IndexOutOfRange { index: 6, len: 6 }));
    }
}
