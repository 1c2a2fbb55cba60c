//! The same as OpenCV, PIL and PyTorch give. `fixtures/make_segment.py` wrote what is compared with.

use data::segment::{Canvas, Distortion, Grid, MaskChoice, MaskPreparer, MaskTransform, Windows};
use data::{Image, Sample};
use serde_json::Value;

fn fixture(part: &str) -> Value {
    let all: Value = serde_json::from_str(include_str!("../fixtures/segment.json")).unwrap();
    all[part].clone()
}

fn numbers(value: &Value) -> Vec<usize> {
    value.as_array().unwrap().iter().map(|n| n.as_u64().unwrap() as usize).collect()
}

fn bytes(value: &Value) -> Vec<u8> {
    numbers(value).into_iter().map(|n| n as u8).collect()
}

fn pair(value: &Value) -> (usize, usize) {
    let numbers = numbers(value);
    (numbers[0], numbers[1])
}

#[test]
fn colours_change_as_with_opencv() {
    let fixture = fixture("distortions");
    let before = bytes(&fixture["before"]);
    for case in fixture["cases"].as_array().unwrap() {
        let drawn = &case["drawn"];
        let float = |i: usize| drawn[i].as_f64().map(|x| x as f32);
        let distortion = Distortion {
            brightness: float(0),
            contrast: float(1),
            contrast_first: drawn[2].as_bool().unwrap(),
            saturation: float(3),
            hue: drawn[4].as_i64().map(|steps| steps as i32),
        };
        let mut pixels = before.clone();
        distortion.apply(3, &mut pixels);
        let expected = bytes(&case["after"]);
        let wrong = pixels.iter().zip(&expected).position(|(a, b)| a != b);
        if let Some(i) = wrong.map(|byte| byte / 3 * 3) {
            let (from, found, expected) = (&before[i..i + 3], &pixels[i..i + 3], &expected[i..i + 3]);
            let differing = pixels.iter().zip(&bytes(&case["after"])).filter(|(a, b)| a != b).count();
            panic!("{distortion:?}: {from:?} became {found:?}, not {expected:?}; {differing} bytes differ");
        }
    }
}

#[test]
fn labels_are_resized_as_pil_does_it() {
    for case in fixture("nearest").as_array().unwrap() {
        let ((width, height), to) = (pair(&case["size"]), pair(&case["to"]));
        let image = Image { width, height, channels: 1, pixels: vec![0; width * height] };
        let of = Sample { image, mask: bytes(&case["mask"]) };
        let transform = MaskTransform::plain(to.1, to.0, &[0.0], &[1.0]);
        let choice = MaskChoice {
            resized: (to.0 as u32, to.1 as u32),
            place: (0, 0),
            flip: false,
            distortion: Distortion::default(),
        };
        let (mut pixels, mut mask) = (vec![0; to.0 * to.1], vec![0; to.0 * to.1]);
        MaskPreparer::new(transform).unwrap().prepare(&of, &choice, &mut pixels, &mut mask).unwrap();
        assert_eq!(mask, bytes(&case["resized"]), "{width}×{height} to {to:?}");
    }
}

#[test]
fn windows_are_put_together_as_in_slide_inference() {
    for case in fixture("slide").as_array().unwrap() {
        let (image, size, grid) = (pair(&case["image"]), pair(&case["window"]), pair(&case["grid"]));
        let classes = case["classes"].as_u64().unwrap() as usize;
        let windows = Windows::of(image, size, pair(&case["stride"])).unwrap();
        let theirs = case["windows"].as_array().unwrap();
        let places: Vec<_> = theirs.iter().map(|window| pair(&window["place"])).collect();
        assert_eq!(windows.places, places);
        let mut canvas = Canvas::new((1, 1), classes);
        canvas.clear(image);
        for (place, window) in places.into_iter().zip(theirs) {
            assert!(canvas.labels(image, 2).is_err(), "not all windows are there yet");
            let logits: Vec<f32> =
                window["logits"].as_array().unwrap().iter().map(|x| x.as_f64().unwrap() as f32).collect();
            let grid = Grid { width: grid.0, height: grid.1, classes, logits: &logits };
            canvas.add(place, size, &grid, 2).unwrap();
        }
        let short = Grid { width: 2, height: 2, classes, logits: &[0.0; 3] };
        assert!(canvas.add((0, 0), size, &short, 2).is_err());
        let labels = canvas.labels(pair(&case["original"]), 2).unwrap();
        assert_eq!(labels, bytes(&case["labels"]));
    }
}
