use super::*;
use serde_json::Value;
use std::fs;
use std::path::PathBuf;

/// zune-jpeg rounds the upsampled colours twice where libjpeg does once, and takes no special care of the last
/// column.
const JPEG_FURTHEST: u8 = 6;
const JPEG_MEAN: f64 = 0.5;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/images")
}

fn file(name: &str) -> Vec<u8> {
    fs::read(folder().join(name)).unwrap()
}

fn problem(bytes: &[u8]) -> String {
    let error = decode(bytes, Path::new("some/file"), 3, &mut Image::default()).unwrap_err().to_string();
    assert!(!error.contains('\n'), "{error}");
    error.strip_prefix("some/file: ").unwrap().to_string()
}

#[test]
fn every_kind_of_file_gives_the_pixels_that_pil_gives() {
    let expected: Value = serde_json::from_slice(&file("expected.json")).unwrap();
    let mut image = Image::default();
    for case in expected["images"].as_array().unwrap() {
        let name = case["file"].as_str().unwrap();
        let hex = case["rgb"].as_str().unwrap();
        let rgb: Vec<u8> =
            (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect();
        let size = [&case["width"], &case["height"]].map(|side| side.as_u64().unwrap() as usize);
        let bytes = file(name);
        let exact = !bytes.starts_with(&[0xff, 0xd8]);
        assert_eq!(dimensions(&bytes, Path::new(name)), Ok((size[0], size[1])), "{name}");

        for channels in [3, 1] {
            let mut expected = rgb.clone();
            Layout::Rgb.convert(&mut expected, channels);
            decode(&bytes, Path::new(name), channels, &mut image).unwrap();
            assert_eq!([image.width, image.height, image.channels], [size[0], size[1], channels], "{name}");
            let differences: Vec<u8> =
                image.pixels.iter().zip(&expected).map(|(a, b)| a.abs_diff(*b)).collect();
            assert_eq!(image.pixels.len(), expected.len(), "{name}");
            let furthest = differences.iter().max().copied().unwrap();
            let mean = differences.iter().map(|&d| f64::from(d)).sum::<f64>() / differences.len() as f64;
            if exact {
                assert_eq!(furthest, 0, "{name}, {channels} channels");
            } else {
                assert!(
                    furthest <= JPEG_FURTHEST && mean <= JPEG_MEAN,
                    "{name}: {furthest} at most, {mean} on average"
                );
            }
        }
    }
}

#[test]
fn what_is_no_image_is_named() {
    assert_eq!(problem(b""), "the file is empty");
    assert_eq!(problem(b"hello"), "not an image that can be read here: JPEG, PNG and WebP are");
    assert_eq!(problem(b"GIF89a..........."), "not an image that can be read here: JPEG, PNG and WebP are");
}

/// A decoder left to itself would paint the rest gray.
#[test]
fn a_truncated_file_is_an_error_wherever_it_ends() {
    let mut image = Image::default();
    for entry in fs::read_dir(folder()).unwrap() {
        let path = entry.unwrap().path();
        let bytes = fs::read(&path).unwrap();
        // The last bytes of a PNG are checksums and a chunk that says no more than "end"; the last of a WebP may be
        // padding.
        let spare = match Format::of(&bytes) {
            Ok(Format::Png) => 16,
            Ok(Format::WebP) => 1,
            _ => 0,
        };
        for end in (0..bytes.len() - spare).filter(|_| path.extension().unwrap() != "json") {
            let result = decode(&bytes[..end], &path, 3, &mut image);
            assert!(result.is_err(), "{} of {} bytes of {}", end, bytes.len(), path.display());
        }
    }
    let jpeg = file("420.jpg");
    assert_eq!(problem(&jpeg[..jpeg.len() - 40]), "truncated: this JPEG ends before its end marker");
}

/// Someone may have put an end marker where the file ended.
#[test]
fn a_scan_that_ends_early_is_an_error_despite_an_end_marker() {
    for name in ["420.jpg", "422.jpg", "gray.jpg", "cmyk.jpg", "rgb.jpg", "restart.jpg"] {
        let bytes = file(name);
        let scan = bytes.windows(2).position(|w| w == [0xff, 0xda]).unwrap();
        let data = scan + 2 + usize::from(bytes[scan + 3]);
        // The last bits may be padding.
        for end in data..bytes.len() - 4 {
            let cut = [&bytes[..end], &[0xff, 0xd9]].concat();
            assert!(problem(&cut).contains("JPEG"), "{name} cut at {end} of {}", bytes.len());
        }
    }
}

#[test]
fn sizes_are_checked_before_pixels_are_made() {
    let bytes = file("rgb.png");
    let read = |limit| decode_within(limit, &bytes, Path::new("a.png"), 3, &mut Image::default());
    assert_eq!(read(143), Ok(()));
    let message = read(142).unwrap_err().to_string();
    assert_eq!(message, "a.png: claims to hold 143 pixels (13×11); 142 are allowed");

    // Claims of 4 gigapixels; if they were believed, this test would take a while.
    let mut png = bytes.clone();
    png[16..24].copy_from_slice(&[0, 0, 0xff, 0xff, 0, 0, 0xff, 0xff]);
    assert!(problem(&png).starts_with("claims to hold 4294836225 pixels"));
    let mut jpeg = file("444-progressive.jpg");
    let frame = jpeg.windows(2).position(|w| w == [0xff, 0xc2]).unwrap();
    jpeg[frame + 5..frame + 9].fill(0xff);
    assert!(problem(&jpeg).starts_with("claims to hold 4294836225 pixels"));
    // The canvas of this WebP is small, but the frame within says that it isn't.
    let mut webp = file("lossy-alpha.webp");
    let frame = webp.windows(3).position(|w| w == [0x9d, 0x01, 0x2a]).unwrap();
    webp[frame + 3..frame + 7].fill(0x3f);
    assert!(problem(&webp).starts_with("claims to hold "), "{}", problem(&webp));
}

/// The png crate panics at this one.
#[test]
fn a_palette_holds_whole_colours() {
    let mut png = file("palette.png");
    let palette = png.windows(4).position(|w| w == b"PLTE").unwrap();
    png[palette - 4..palette].copy_from_slice(&[0, 0, 0, 1]);
    assert_eq!(problem(&png), "broken PNG: its palette has 1 bytes");
}

#[test]
fn only_gray_and_rgb_are_given() {
    let error = decode(&file("rgb.png"), Path::new("a"), 4, &mut Image::default()).unwrap_err();
    assert_eq!(error.to_string(), "a: images are read with 1 or 3 channels; 4 were asked for");
}

/// `out` holds another image from before, larger or smaller.
#[test]
fn memory_is_reused_without_traces() {
    let mut used = Image::default();
    used.reset(50, 50, 4).fill(7);
    let mut fresh = Image::default();
    for name in ["420.jpg", "gray.jpg", "rgba.png", "1-bit.png", "lossy.webp", "turned.jpg", "gray-alpha.png"]
    {
        decode(&file(name), Path::new(name), 3, &mut used).unwrap();
        fresh = Image { pixels: Vec::new(), ..fresh };
        decode(&file(name), Path::new(name), 3, &mut fresh).unwrap();
        assert_eq!(used, fresh, "{name}");
    }
}
