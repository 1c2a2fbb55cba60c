use super::*;
use serde_json::Value;

/// The formula of tests/fixtures/make_resize.py.
fn pixels(width: usize, height: usize, channels: usize) -> Image {
    let mut image = Image::default();
    image.reset(width, height, channels);
    for (at, pixel) in image.pixels.iter_mut().enumerate() {
        let (x, y, c) = (at / channels % width, at / channels / width, at % channels);
        let wave = (x * (3 + c) + y * 5) % 511;
        let smooth = if wave > 255 { 510 - wave } else { wave };
        let noise = (x * 7919 + y * 104_729 + c * 1_299_709 + x * y * 31) % 65_521 % 256;
        *pixel = if x * 2 < width { smooth } else { noise } as u8;
    }
    image
}

fn sampled(image: &Image, stride: usize) -> Vec<u8> {
    let rows = image.pixels.chunks(image.width * image.channels).step_by(stride);
    rows.flat_map(|row| row.chunks(image.channels).step_by(stride)).flatten().copied().collect()
}

fn from_hex(text: &str) -> Vec<u8> {
    (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap()).collect()
}

#[test]
fn equal_to_pil_and_within_one_of_torchvision_on_tensors() {
    let fixture: Value = serde_json::from_str(include_str!("../../tests/fixtures/resize.json")).unwrap();
    let mut resizer = Resizer::new();
    let mut out = Image::default();
    for case in fixture["cases"].as_array().unwrap() {
        let number = |value: &Value| value.as_u64().unwrap() as usize;
        let from = pixels(number(&case["width"]), number(&case["height"]), number(&case["channels"]));
        let side = |at: usize| case["crop"][at].as_f64().unwrap();
        let crop = CropBox { left: side(0), top: side(1), width: side(2), height: side(3) };
        let to = (number(&case["to"][0]), number(&case["to"][1]));
        let how = if case["mode"] == "bicubic" { Interpolation::Bicubic } else { Interpolation::Bilinear };
        resizer.resize(&from, crop, to, how, &mut out);
        let found = sampled(&out, number(&case["stride"]));
        for (peer, tolerance) in [("pil", 0), ("tensor", 1)] {
            let expected = from_hex(case[peer].as_str().unwrap());
            assert_eq!(found.len(), expected.len());
            let furthest = found.iter().zip(&expected).map(|(a, b)| a.abs_diff(*b)).max();
            assert!(furthest <= Some(tolerance), "{peer}: {furthest:?} for {crop:?} to {to:?}, {how:?}");
        }
    }
}

#[test]
fn whole_pixels_that_keep_their_size_are_copied() {
    for channels in [1, 2, 3, 4, 5] {
        let from = pixels(23, 17, channels);
        let mut out = Image::default();
        for how in [Interpolation::Bilinear, Interpolation::Bicubic] {
            Resizer::new().resize(&from, CropBox::whole(&from), (23, 17), how, &mut out);
            assert_eq!(out, from);
            let part = CropBox { left: 4.0, top: 3.0, width: 10.0, height: 5.0 };
            Resizer::new().resize(&from, part, (10, 5), how, &mut out);
            let row = &from.pixels[(3 * 23 + 4) * channels..][..10 * channels];
            assert_eq!(&out.pixels[..10 * channels], row);
        }
    }
}

/// Half a pixel to the right: the mean of two neighbours.
#[test]
fn boxes_may_begin_within_a_pixel() {
    let from = Image { width: 4, height: 1, channels: 1, pixels: vec![0, 100, 200, 100] };
    let crop = CropBox { left: 0.5, top: 0.0, width: 2.0, height: 1.0 };
    let mut out = Image::default();
    Resizer::new().resize(&from, crop, (2, 1), Interpolation::Bilinear, &mut out);
    assert_eq!(out.pixels, [50, 150]);
}

#[test]
fn boxes_outside_the_image_are_cut_and_never_empty() {
    let from = pixels(9, 7, 3);
    let nan = f64::NAN;
    let boxes = [
        [-5.0, -5.0, 100.0, 100.0],
        [8.5, 6.5, 4.0, 4.0],
        [20.0, 20.0, 1.0, 1.0],
        [3.0, 3.0, 0.0, 0.0],
        [3.0, 3.0, -2.0, -2.0],
        [nan, nan, nan, nan],
        [f64::NEG_INFINITY, 0.0, f64::INFINITY, 7.0],
        [2.999_999_999, 0.0, 1e-9, 1e-300],
    ];
    for [left, top, width, height] in boxes {
        let mut out = Image::default();
        let crop = CropBox { left, top, width, height };
        Resizer::new().resize(&from, crop, (5, 4), Interpolation::Bicubic, &mut out);
        assert_eq!((out.width, out.height, out.pixels.len()), (5, 4, 60));
    }
    let mut out = Image::default();
    let whole = CropBox::whole(&from);
    Resizer::new().resize(&from, whole, (0, 4), Interpolation::Bilinear, &mut out);
    assert!(out.pixels.is_empty());
    let nothing = Image { channels: 3, ..Image::default() };
    Resizer::new().resize(&nothing, CropBox::whole(&nothing), (2, 2), Interpolation::Bilinear, &mut out);
    assert_eq!(out.pixels, [0; 12]);
}

/// A resizer's scratch memory is left over from other sizes.
#[test]
fn results_do_not_depend_on_what_was_resized_before() {
    let (small, large) = (pixels(10, 8, 3), pixels(90, 70, 3));
    let mut used = Resizer::new();
    let (mut fresh_out, mut used_out) = (Image::default(), Image::default());
    for from in [&large, &small, &large] {
        let whole = CropBox::whole(from);
        used.resize(from, whole, (33, 21), Interpolation::Bicubic, &mut used_out);
        Resizer::new().resize(from, whole, (33, 21), Interpolation::Bicubic, &mut fresh_out);
        assert_eq!(used_out, fresh_out);
    }
}
