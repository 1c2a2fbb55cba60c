use super::*;
use crate::Image;

const SPEC: SyntheticSpec =
    SyntheticSpec { split: Split::Train, len: 1000, image_size: 32, channels: 3, classes: 10, seed: 0 };

/// The bytes of an image, channel after channel.
fn image(spec: SyntheticSpec, index: usize) -> Vec<u8> {
    let mut sample = Sample::default();
    Synthetic::new(spec).unwrap().read(index, &mut sample).unwrap();
    let pixels = &sample.image.pixels;
    (0..spec.channels).flat_map(|c| pixels.iter().skip(c).step_by(spec.channels).copied()).collect()
}

/// FNV-1a.
fn fingerprint(bytes: impl IntoIterator<Item = u8>) -> u64 {
    bytes
        .into_iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}

/// Accuracies are quoted for this set. Drawing it otherwise makes them another set's.
#[test]
fn the_set_has_not_changed() {
    let default = (0..100).flat_map(|index| image(SPEC, index));
    let composed = SyntheticSpec { image_size: 70, channels: 1, classes: *CLASSES.end(), seed: 9, ..SPEC };
    let composed = (0..*CLASSES.end()).flat_map(|index| image(composed, index));
    assert_eq!([fingerprint(default), fingerprint(composed)], [0xc9a8_cb7a_ffb6_cecb, 0x46c9_b497_d097_f578]);
}

#[test]
fn an_image_depends_on_seed_split_and_index_but_not_on_length() {
    let first = image(SPEC, 5);
    assert_eq!(first, image(SyntheticSpec { len: 6, ..SPEC }, 5));
    assert_ne!(first, image(SPEC, 6));
    assert_ne!(first, image(SyntheticSpec { seed: 1, ..SPEC }, 5));
    assert_ne!(first, image(SyntheticSpec { split: Split::Test, ..SPEC }, 5));
}

#[test]
fn labels_are_balanced_at_every_length() {
    for classes in [2, 3, 10, 37, *CLASSES.end()] {
        let set = Synthetic::new(SyntheticSpec { classes, ..SPEC }).unwrap();
        let mut counts = vec![0usize; classes];
        for index in 0..set.len() {
            counts[set.label(index)] += 1;
            let (low, high) = (counts.iter().min().unwrap(), counts.iter().max().unwrap());
            assert!(high - low <= 1, "{classes} classes after {index}");
        }
    }
}

#[test]
fn labels_come_in_a_different_order_in_each_run() {
    for classes in [2, 10] {
        let set = Synthetic::new(SyntheticSpec { classes, ..SPEC }).unwrap();
        let firsts: Vec<usize> = (0..50).map(|run| set.label(run * classes)).collect();
        assert!((0..classes).all(|class| firsts.contains(&class)), "{firsts:?}");
    }
}

/// Average colour must say nothing of the class: each class's mean over many images is mid-grey.
#[test]
fn colour_does_not_give_the_class_away() {
    let set = Synthetic::new(SyntheticSpec { len: 10_000, image_size: 8, ..SPEC }).unwrap();
    let plane = 64;
    let mut sums = [[0.0f64; 3]; 10];
    let mut sample = Sample::default();
    for index in 0..set.len() {
        set.read(index, &mut sample).unwrap();
        for (channel, sum) in sums[set.label(index)].iter_mut().enumerate() {
            let pixels = sample.image.pixels.iter().skip(channel).step_by(3);
            *sum += pixels.map(|&p| f64::from(p)).sum::<f64>() / plane as f64;
        }
    }
    for (class, sum) in sums.iter().enumerate() {
        for mean in sum.map(|s| s / 1000.0) {
            assert!((mean - 127.5).abs() < 10.0, "class {class} has mean {mean}");
        }
    }
}

#[test]
fn the_whole_buffer_is_painted_at_odd_sizes() {
    for (image_size, channels) in [(8, 1), (9, 2), (65, 3), (130, 5)] {
        let set = Synthetic::new(SyntheticSpec { image_size, channels, ..SPEC }).unwrap();
        let before = |byte| {
            let pixels = vec![byte; image_size * image_size * channels];
            Sample { image: Image { pixels, ..Image::default() }, mask: vec![] }
        };
        let (mut over_black, mut over_white) = (before(0), before(255));
        set.read(3, &mut over_black).unwrap();
        set.read(3, &mut over_white).unwrap();
        assert_eq!(over_black, over_white, "{channels} channels of {image_size} pixels");
    }
}

#[test]
fn settings_out_of_range_are_refused() {
    let refusal = |spec| Synthetic::new(spec).unwrap_err().to_string();
    assert_eq!(
        refusal(SyntheticSpec { classes: 121, ..SPEC }),
        "--classes 121: must be from 2 to 120: the synthetic set can have so many"
    );
    assert_eq!(
        refusal(SyntheticSpec { image_size: 7, ..SPEC }),
        "--image-size 7: must be from 8 to 16384: synthetic images can have these sizes"
    );
    assert_eq!(
        refusal(SyntheticSpec { channels: 0, ..SPEC }),
        "--channels 0: must be from 1 to 256: synthetic images can have so many"
    );
}

#[test]
fn reads_outside_the_set_are_refused() {
    let set = Synthetic::new(SPEC).unwrap();
    let read = set.read(1000, &mut Sample::default());
    assert_eq!(read, Err(DataError::IndexOutOfRange { index: 1000, len: 1000 }));
}
