use super::*;
use crate::{CropBox, DataError, Image};

fn plain(size: usize, channels: usize) -> Transform {
    Transform::evaluation(size, None, &vec![0.5; channels], &vec![0.5; channels], Interpolation::Bilinear)
}

fn rich(geometry: Geometry) -> Transform {
    let rand_augment = Some(RandAugment { ops: 3, magnitude: 12 });
    Transform { geometry, flip: 0.5, rand_augment, erase: 0.5, mixup: 0.4, cutmix: 1.0, ..plain(16, 3) }
}

const CROP: Geometry = Geometry::RandomResizedCrop { scale: (0.08, 1.0), ratio: (0.75, 4.0 / 3.0) };

fn image(width: usize, height: usize, channels: usize) -> Image {
    let mut image = Image::default();
    let pixels = image.reset(width, height, channels);
    pixels.iter_mut().enumerate().for_each(|(i, byte)| *byte = (i * 37) as u8);
    image
}

fn prepare(transform: &Transform, image: &Image, choice: &Choice) -> Result<Vec<f32>, DataError> {
    let mut out = vec![f32::NAN; transform.sample_len()];
    Preparer::new(transform.clone())?.prepare(image, choice, &mut out)?;
    Ok(out)
}

#[test]
fn choices_depend_on_seed_epoch_and_position_alone() {
    let transform = rich(CROP);
    let choose = |seed, epoch, position| transform.choose(seed, epoch, position, (60, 40));
    assert_eq!(choose(1, 2, 3), choose(1, 2, 3));
    for other in [choose(2, 2, 3), choose(1, 3, 3), choose(1, 2, 4)] {
        assert_ne!(choose(1, 2, 3).region, other.region);
    }
    assert_eq!(choose(1, 2, 6).mix, choose(1, 2, 7).mix);
    assert_ne!(choose(1, 2, 6).mix, choose(1, 2, 8).mix);
}

#[test]
fn turning_one_thing_off_leaves_the_others_as_they_were() {
    let all = rich(CROP);
    let without = Transform { geometry: Geometry::Resize, flip: 0.0, rand_augment: None, ..all.clone() };
    for position in 0..50 {
        let (one, other) = (all.choose(1, 0, position, (60, 40)), without.choose(1, 0, position, (60, 40)));
        assert_eq!((one.erase, one.mix), (other.erase, other.mix));
        assert_eq!(other, Choice { erase: one.erase, mix: one.mix, ..Choice::plain(16, (60, 40)) });
    }
}

#[test]
fn an_evaluation_chooses_nothing() {
    let transform = plain(16, 3);
    assert!(
        (0..100).all(|position| transform.choose(1, 0, position, (60, 40)) == Choice::plain(16, (60, 40)))
    );
}

#[test]
fn the_centre_is_that_of_the_image_resized_to_whole_pixels() {
    let (mean, std) = ([0.5; 3], [0.5; 3]);
    let transform = Transform::evaluation(224, Some(256), &mean, &std, Interpolation::Bicubic);
    // 500 × 256 / 375 is 341 and a third; half of 341 − 224 is 58.5, which rounds to 58. On each side the filter reaches
    // three pixels further.
    let choice = transform.choose(0, 0, 0, (500, 375));
    assert_eq!((choice.resized, choice.shift), ((230, 230), (3, 3)));
    let (across, down) = (500.0 / 341.0, 375.0 / 256.0);
    let CropBox { left, top, width, height } = choice.region;
    let expected = [55.0 * across, 13.0 * down, 230.0 * across, 230.0 * down];
    for (found, expected) in [left, top, width, height].into_iter().zip(expected) {
        assert!((found - expected).abs() < 1e-9, "{found} {expected}");
    }
    // An image that fits is read to its edges.
    let choice = transform.choose(0, 0, 0, (256, 256));
    assert_eq!((choice.region.left, choice.resized, choice.shift), (13.0, (230, 230), (3, 3)));
    let transform = Transform::evaluation(224, Some(224), &mean, &std, Interpolation::Bicubic);
    assert_eq!(transform.choose(0, 0, 0, (300, 300)), Choice::plain(224, (300, 300)));
}

#[test]
fn images_of_any_size_become_samples() {
    let pad = Geometry::PadCrop { padding: 4 };
    for geometry in [Geometry::Resize, Geometry::CenterCrop { resize: 19 }, pad, CROP] {
        let transform = rich(geometry);
        for (position, (width, height)) in
            [(1, 1), (1, 400), (400, 1), (2, 3), (15, 16), (16, 16), (17, 300), (333, 77)]
                .into_iter()
                .enumerate()
        {
            for epoch in 0..20 {
                let choice = transform.choose(1, epoch, position, (width, height));
                let sample = prepare(&transform, &image(width, height, 3), &choice);
                let sample = sample.unwrap_or_else(|error| panic!("{width}×{height}, {geometry:?}: {error}"));
                assert!(sample.iter().all(|x| (-1.0..=1.0).contains(x)));
            }
        }
    }
}

#[test]
fn other_numbers_of_channels_go_without_rand_augment() {
    for channels in [2, 4] {
        let transform = Transform { flip: 1.0, ..plain(5, channels) };
        let (source, choice) = (image(5, 5, channels), transform.choose(0, 0, 0, (5, 5)));
        let sample = prepare(&transform, &source, &choice).unwrap();
        for (i, value) in sample.into_iter().enumerate() {
            let (channel, y, x) = (i / 25, i / 5 % 5, 4 - i % 5);
            let byte = source.pixels[(y * 5 + x) * channels + channel];
            assert_eq!(value, (f32::from(byte) / 255.0 - 0.5) / 0.5);
        }
    }
}

#[test]
fn what_does_not_fit_together_is_refused() {
    let transform = plain(16, 3);
    let whole = Choice::plain(16, (20, 20));
    assert!(matches!(
        prepare(&transform, &image(20, 20, 1), &whole),
        Err(DataError::Pixels { found: 1, .. })
    ));
    assert!(matches!(prepare(&transform, &image(0, 20, 3), &whole), Err(DataError::Pixels { width: 0, .. })));
    let short = Image { pixels: vec![0; 7], ..image(20, 20, 3) };
    assert!(matches!(prepare(&transform, &short, &whole), Err(DataError::Pixels { .. })));
    let mut preparer = Preparer::new(transform.clone()).unwrap();
    let refused = preparer.prepare(&image(16, 16, 3), &Choice::plain(16, (16, 16)), &mut [0.0; 5]);
    assert_eq!(refused, Err(DataError::BufferLength { buffer: "sample", expected: 768, found: 5 }));
    for geometry in [Geometry::Resize, CROP] {
        let transform = Transform { geometry, ..plain(16, 3) };
        let outside = Choice { region: CropBox { left: 15.0, ..whole.region }, ..whole };
        assert!(prepare(&transform, &image(20, 20, 3), &outside).is_err());
    }
}

/// A shift beyond the image leaves nothing of it, and nothing else happens.
#[test]
fn shifts_of_any_length_are_harmless() {
    let transform = plain(8, 3);
    for shift in [(8, 0), (-9, 3), (i32::MAX, i32::MIN)] {
        for flip in [false, true] {
            let choice = Choice { shift, flip, ..Choice::plain(8, (8, 8)) };
            assert!(prepare(&transform, &image(8, 8, 3), &choice).unwrap().iter().all(|&x| x == -1.0));
        }
    }
}
