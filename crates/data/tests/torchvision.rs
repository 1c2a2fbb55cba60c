//! Given the same choices, the same samples as torchvision makes of PIL images.
//!
//! Everything but resizing is exact to the bit. `fixtures/make_torchvision.py` wrote what is compared with.

use data::augment::{BINS, Op, OpKind, Ops, Rect};
use data::{Choice, CropBox, Geometry, Image, Interpolation, Mix, Preparer, Transform};

const MEAN: [f32; 3] = [0.485, 0.456, 0.406];
const STD: [f32; 3] = [0.229, 0.224, 0.225];

/// The fixtures' picture.
fn picture(width: usize, height: usize, channels: usize) -> Image {
    let mut image = Image::default();
    let pixels = image.reset(width, height, channels);
    for (i, pixel) in pixels.iter_mut().enumerate() {
        let (x, y, c) = (i / channels % width, i / channels / width, i % channels);
        let slope = x * 5 + y * 3 + c * 40;
        let texture = (x * 31 + y * 17 + c * 7) * (x + 2 * y + 3) % 53;
        *pixel = (20 + (slope + texture) % 200) as u8;
    }
    image
}

fn fnv(bytes: impl IntoIterator<Item = u8>) -> u64 {
    bytes
        .into_iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}

fn unhex(text: &str) -> Vec<u8> {
    let digits: Vec<u32> = text.chars().filter_map(|c| c.to_digit(16)).collect();
    digits.chunks_exact(2).map(|pair| (pair[0] << 4 | pair[1]) as u8).collect()
}

fn floats(text: &str) -> Vec<f32> {
    unhex(text).as_chunks::<4>().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect()
}

fn numbers<T: std::str::FromStr<Err: std::fmt::Debug>>(text: &str) -> Vec<T> {
    text.split(',').map(|number| number.parse().unwrap()).collect()
}

/// What bytes become if normalisation does nothing but divide by 255.
fn bytes(size: usize, channels: usize) -> Transform {
    Transform::evaluation(size, None, &vec![0.0; channels], &vec![1.0; channels], Interpolation::Bilinear)
}

fn prepare(transform: Transform, image: &Image, choice: &Choice) -> Vec<f32> {
    let mut out = vec![f32::NAN; transform.sample_len()];
    Preparer::new(transform).unwrap().prepare(image, choice, &mut out).unwrap();
    out
}

/// (C, S, S) of 0..=1 back to (S, S, C) bytes.
fn interleaved(sample: &[f32], channels: usize) -> Vec<u8> {
    let plane = sample.len() / channels;
    let pixel = |i: usize| (0..channels).map(move |c| c * plane + i);
    (0..plane).flat_map(pixel).map(|i| (sample[i] * 255.0).round() as u8).collect()
}

fn op(name: &str, bin: usize, sign: f32, size: usize) -> Op {
    let kind = OpKind::ALL.into_iter().find(|kind| format!("{kind:?}") == name).unwrap();
    Op { kind, magnitude: sign * kind.magnitude(bin, size) }
}

#[test]
fn every_rand_augment_operation() {
    let mut different = Vec::new();
    for line in include_str!("fixtures/rand_augment.txt").lines() {
        let [name, bin, sign, size, channels, hash] = line.split(' ').collect::<Vec<_>>().try_into().unwrap();
        let (size, channels): (usize, usize) = (size.parse().unwrap(), channels.parse().unwrap());
        let mut ops = Ops::default();
        ops.push(op(name, bin.parse().unwrap(), sign.parse().unwrap(), size));
        let choice = Choice { ops, ..Choice::plain(size, (size, size)) };
        let sample = prepare(bytes(size, channels), &picture(size, size, channels), &choice);
        if format!("{:016x}", fnv(interleaved(&sample, channels))) != hash {
            different.push(line);
        }
    }
    assert!(different.is_empty(), "{} differ:\n{}", different.len(), different.join("\n"));
}

#[test]
fn every_step_of_translation_is_whole_pixels() {
    for size in [32, 224, 384] {
        for bin in 0..BINS {
            let pixels = OpKind::TranslateX.magnitude(bin, size);
            assert_eq!(pixels, pixels.trunc());
        }
    }
    assert_eq!(OpKind::TranslateX.magnitude(30, 224), 101.0);
}

#[test]
fn resizing_and_cutting() {
    let mut largest = [0; 3];
    for line in include_str!("fixtures/geometry.txt").lines() {
        let fields: Vec<&str> = line.split(' ').collect();
        let [width, height, channels, size] = [1, 2, 3, 4].map(|i| fields[i].parse::<usize>().unwrap());
        let interpolation =
            if fields[5] == "bilinear" { Interpolation::Bilinear } else { Interpolation::Bicubic };
        let given: Vec<f64> = numbers(fields[6]);
        let kind = ["resize", "centre", "crop"].iter().position(|kind| *kind == fields[0]).unwrap();
        let anything = Geometry::RandomResizedCrop { scale: (0.5, 1.0), ratio: (1.0, 1.0) };
        let geometry =
            [Geometry::Resize, Geometry::CenterCrop { resize: given[0].max(size as f64) as usize }, anything]
                [kind];
        let transform = Transform { geometry, interpolation, ..bytes(size, channels) };
        let mut choice = transform.choose(0, 0, 0, (width, height));
        if let [left, top, width, height] = given[..] {
            choice.region = CropBox { left, top, width, height };
        }
        let ours = interleaved(&prepare(transform, &picture(width, height, channels), &choice), channels);
        let theirs = unhex(fields[7]);
        assert_eq!(ours.len(), theirs.len());
        let difference = ours.iter().zip(theirs).map(|(a, b)| a.abs_diff(b)).max().unwrap();
        assert!(difference <= 1, "{difference}/255 apart: {}", &line[..60]);
        largest[kind] = largest[kind].max(difference);
    }
    println!("largest differences of 255: resize {}, centre {}, crop {}", largest[0], largest[1], largest[2]);
}

#[test]
fn the_whole_chain_in_its_order() {
    for line in include_str!("fixtures/pad_crop.txt").lines() {
        let [channels, ops_name, given, hash] = line.split(' ').collect::<Vec<_>>().try_into().unwrap();
        let channels: usize = channels.parse().unwrap();
        let given: Vec<i32> = numbers(given);
        let (size, padding) = (32, 4);
        let geometry = Geometry::PadCrop { padding: padding as usize };
        let transform = Transform {
            geometry,
            mean: MEAN[..channels].to_vec(),
            std: STD[..channels].to_vec(),
            ..bytes(size, channels)
        };
        let mut choice = Choice::plain(size, (size, size));
        choice.shift = (given[0] - padding, given[1] - padding);
        choice.flip = given[2] == 1;
        if ops_name == "ops" {
            let chain = [("ShearX", 9, 1.0), ("Color", 20, -1.0), ("Rotate", 9, -1.0), ("Equalize", 0, 1.0)];
            chain.into_iter().for_each(|(name, bin, sign)| choice.ops.push(op(name, bin, sign, size)));
        }
        let [left, top, width, height] = [3, 4, 5, 6].map(|i| given[i] as u32);
        choice.erase = (width > 0).then_some(Rect { left, top, width, height });
        let sample = prepare(transform, &picture(size, size, channels), &choice);
        assert_eq!(format!("{:016x}", fnv(sample.iter().flat_map(|x| x.to_le_bytes()))), hash, "{line}");
    }
}

#[test]
fn normalising() {
    let mut ramp = Image::default();
    ramp.reset(16, 16, 3).iter_mut().enumerate().for_each(|(i, byte)| *byte = (i / 3) as u8);
    let transform = Transform { mean: MEAN.to_vec(), std: STD.to_vec(), ..bytes(16, 3) };
    let ours = prepare(transform, &ramp, &Choice::plain(16, (16, 16)));
    let theirs: Vec<f32> = include_str!("fixtures/normalise.txt").lines().flat_map(floats).collect();
    assert_eq!(ours, theirs);
}

#[test]
fn mixing() {
    let size = 8;
    let transform = Transform { mean: MEAN.to_vec(), std: STD.to_vec(), ..bytes(size, 3) };
    let one = prepare(transform, &picture(size, size, 3), &Choice::plain(size, (size, size)));
    let other: Vec<f32> = one
        .chunks_exact(size * size)
        .flat_map(|plane| plane.chunks_exact(size).rev().flatten())
        .copied()
        .collect();
    for line in include_str!("fixtures/mix.txt").lines() {
        let [kind, lambda, patch, theirs] = line.split(' ').collect::<Vec<_>>().try_into().unwrap();
        let lambda = lambda.parse().unwrap();
        let [left, top, width, height] = numbers(patch).try_into().unwrap();
        let mix = match kind {
            "blend" => Mix::Blend { lambda },
            _ => Mix::Patch { patch: Rect { left, top, width, height }, lambda },
        };
        let (mut one, mut other) = (one.clone(), other.clone());
        mix.apply(size, &mut one, &mut other);
        let ours = [one, other].concat();
        let theirs = floats(theirs);
        assert_eq!(ours.len(), theirs.len());
        // The compiler may fuse torch's multiplication and addition.
        let close = |(a, b): (&f32, &f32)| (a - b).abs() <= 3e-7;
        assert!(ours.iter().zip(&theirs).all(close), "{kind} {lambda}");
    }
}
