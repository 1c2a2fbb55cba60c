//! What becomes of one pair.

use data::segment::{Distortion, IGNORED, MaskChoice, MaskFinish, MaskPreparer, MaskTransform};
use data::{CropBox, Image, Interpolation, Resizer, Sample};

/// A picture with a texture, and a mask of four parts with a frame that is ignored.
fn pair(width: usize, height: usize) -> Sample {
    let mut pair = Sample { mask: vec![0; width * height], ..Sample::default() };
    let pixels = pair.image.reset(width, height, 3);
    for (i, pixel) in pixels.iter_mut().enumerate() {
        let (x, y, c) = (i / 3 % width, i / 3 / width, i % 3);
        *pixel = (20 + (x * 5 + y * 3 + c * 40 + (x * 31 + y * 17) * (x + 2 * y + 3) % 53) % 200) as u8;
    }
    for (i, label) in pair.mask.iter_mut().enumerate() {
        let (x, y) = (i % width, i / width);
        let frame = x == 0 || y == 0 || x == width - 1 || y == height - 1;
        *label = if frame { IGNORED } else { u8::from(x * 2 > width) + 2 * u8::from(y * 3 > height) };
    }
    pair
}

fn transform(height: usize, width: usize) -> MaskTransform {
    MaskTransform::plain(height, width, &[0.485, 0.456, 0.406], &[0.229, 0.224, 0.225])
}

fn prepared(transform: &MaskTransform, pair: &Sample, choice: &MaskChoice) -> (Vec<u8>, Vec<u8>, [i32; 2]) {
    let (mut pixels, mut mask) = (vec![7; transform.area() * 3], vec![7; transform.area()]);
    let mut preparer = MaskPreparer::new(transform.clone()).unwrap();
    let extent = preparer.prepare(pair, choice, &mut pixels, &mut mask).unwrap();
    (pixels, mask, extent)
}

/// Resizes all of the pair, then looks every pixel up.
fn slowly(transform: &MaskTransform, pair: &Sample, choice: &MaskChoice) -> (Vec<u8>, Vec<u8>) {
    let (width, height) = (choice.resized.0 as usize, choice.resized.1 as usize);
    let mut resized = Image::default();
    let whole = CropBox::whole(&pair.image);
    Resizer::new().resize(&pair.image, whole, (width, height), Interpolation::Bilinear, &mut resized);
    let (left, top) = (choice.place.0 as usize, choice.place.1 as usize);
    let columns = transform.width.min(width - left);
    let (mut pixels, mut mask) = (vec![], vec![]);
    for y in 0..transform.height {
        for x in 0..transform.width {
            let from_x = left + if choice.flip { columns.wrapping_sub(x + 1) } else { x };
            if x >= columns || top + y >= height {
                pixels.extend([0; 3]);
                mask.push(IGNORED);
                continue;
            }
            let mut pixel = [0; 3];
            pixel.copy_from_slice(&resized.pixels[((top + y) * width + from_x) * 3..][..3]);
            choice.distortion.apply(3, &mut pixel);
            pixels.extend(pixel);
            let original = |i: usize, to: usize, from: usize| {
                ((i as f64 + 0.5) * from as f64 / to as f64).floor() as usize
            };
            let column = original(from_x, width, pair.image.width);
            mask.push(pair.mask[original(top + y, height, pair.image.height) * pair.image.width + column]);
        }
    }
    (pixels, mask)
}

#[test]
fn choices_are_carried_out_as_a_slow_and_plain_way_would() {
    let mut compared = 0;
    for (width, height) in [(61, 40), (33, 90), (120, 25)] {
        let pair = pair(width, height);
        // Colours stay: a difference of 1 before a distortion may be a larger one after it.
        let transform = transform(32, 48).with_crops();
        for position in 0..40 {
            let choice = transform.choose(5, 1, position, &pair);
            let (pixels, mask, extent) = prepared(&transform, &pair, &choice);
            let (slow_pixels, slow_mask) = slowly(&transform, &pair, &choice);
            assert_eq!(mask, slow_mask, "{choice:?}");
            let apart = pixels.iter().zip(&slow_pixels).map(|(a, b)| a.abs_diff(*b)).max().unwrap();
            assert!(apart <= 1, "{apart} at {choice:?}");
            assert!(extent[0] <= 32 && extent[1] <= 48);
            compared += usize::from(pixels == slow_pixels);
        }
    }
    assert!(compared > 60, "{compared} of 120 are equal to the byte");
}

#[test]
fn colours_are_distorted_before_padding() {
    let (pair, transform) = (pair(40, 20), transform(32, 48));
    let distortion = Distortion { brightness: Some(30.0), hue: Some(5), ..Distortion::default() };
    let choice = MaskChoice { resized: (40, 20), place: (0, 0), flip: true, distortion };
    let (pixels, mask, extent) = prepared(&transform, &pair, &choice);
    assert_eq!((pixels.clone(), mask.clone()), slowly(&transform, &pair, &choice));
    assert_eq!(extent, [20, 40]);
    assert!(pixels[20 * 48 * 3..].iter().all(|&byte| byte == 0));
    assert!(mask[20 * 48..].iter().all(|&label| label == IGNORED));
}

#[test]
fn padding_is_0_after_normalisation() {
    let transform = transform(3, 4);
    let finish = MaskFinish::of(&transform).unwrap();
    let (pixels, mut out) = (vec![200; 36], vec![f32::NAN; 36]);
    finish.apply(&pixels, [2, 3], &mut out);
    for (i, &value) in out.iter().enumerate() {
        let (channel, y, x) = (i / 12, i / 4 % 3, i % 4);
        let normal = (200.0 / 255.0 - transform.mean[channel]) / transform.std[channel];
        assert_eq!(value, if y < 2 && x < 3 { normal } else { 0.0 });
    }
    let larger = finish.sized(2, 12);
    larger.apply(&[200; 72], [2, 12], &mut [0.0; 72]);
}

#[test]
fn choices_depend_on_seed_epoch_and_position_alone() {
    let (pair, transform) = (pair(100, 80), transform(32, 32).with_crops().with_distortion());
    let choose = |seed, epoch, position| transform.choose(seed, epoch, position, &pair);
    assert_eq!(choose(1, 2, 3), choose(1, 2, 3));
    for other in [choose(2, 2, 3), choose(1, 3, 3), choose(1, 2, 4)] {
        assert_ne!(other, choose(1, 2, 3));
    }
    // Turning colours off leaves the geometry as it was.
    let plain = MaskTransform { distort: false, ..transform.clone() }.choose(1, 2, 3, &pair);
    assert_eq!(MaskChoice { distortion: Distortion::default(), ..choose(1, 2, 3) }, plain);
}

#[test]
fn draws_cover_their_ranges_evenly() {
    let (pair, transform) = (pair(64, 32), transform(32, 32).with_crops().with_distortion());
    let choices: Vec<MaskChoice> = (0..4000).map(|i| transform.choose(9, 0, i, &pair)).collect();
    let share = |holds: &dyn Fn(&MaskChoice) -> bool| {
        choices.iter().filter(|choice| holds(choice)).count() as f64 / choices.len() as f64
    };
    let about = |holds: &dyn Fn(&MaskChoice) -> bool, expected: f64| {
        // Four deviations.
        let found = share(holds);
        let allowed = 4.0 * (expected * (1.0 - expected) / choices.len() as f64).sqrt();
        assert!((found - expected).abs() < allowed, "{found}, not {expected}");
    };
    // Heights from 16 to 64 pixels; boxes of whole pixels are cut off.
    assert!(choices.iter().all(|c| (16..=64).contains(&c.resized.1) && c.resized.0 == 2 * c.resized.1));
    about(&|c| c.resized.1 < 28, 0.25);
    about(&|c| c.flip, 0.5);
    about(&|c| c.distortion.brightness.is_some(), 0.5);
    about(&|c| c.distortion.brightness.is_some_and(|b| b < 0.0), 0.25);
    about(&|c| c.distortion.contrast.is_some_and(|f| f < 0.75), 0.125);
    about(&|c| c.distortion.saturation.is_some_and(|f| f > 1.0), 0.25);
    about(&|c| c.distortion.contrast_first, 0.5);
    about(&|c| c.distortion.hue.is_some_and(|h| h < 0), 0.25);
    let hues: Vec<i32> = choices.iter().filter_map(|c| c.distortion.hue).collect();
    assert_eq!((hues.iter().min(), hues.iter().max()), (Some(&-18), Some(&17)));
}

/// One class covers nearly everything; the rest lies in a corner.
#[test]
fn cuts_with_too_much_of_one_class_are_drawn_again() {
    let mut pair = pair(200, 200);
    for (i, label) in pair.mask.iter_mut().enumerate() {
        let (x, y) = (i % 200, i / 200);
        *label = if x < 40 && y < 40 { 1 + u8::from(x < 20) } else { 0 };
    }
    let any = MaskTransform { random_place: true, ratio: (1.0, 1.0), fit: (200, 200), ..transform(50, 50) };
    let varied = MaskTransform { max_share: 0.75, ..any.clone() };
    let hits = |transform: &MaskTransform| {
        let varied = |i| {
            let (_, mask, _) = prepared(transform, &pair, &transform.choose(3, 0, i, &pair));
            let most =
                (0..3).map(|class| mask.iter().filter(|&&label| label == class).count()).max().unwrap();
            usize::from((most as f64) < 0.75 * mask.len() as f64)
        };
        (0..1000).map(varied).sum::<usize>()
    };
    let (once, again) = (hits(&any) as f64 / 1000.0, hits(&varied) as f64 / 1000.0);
    // The first draw, and ten more.
    let expected = 1.0 - (1.0 - once).powi(11);
    assert!(
        once > 0.01 && (again - expected).abs() < 0.05,
        "{once} at first, {again} in the end, {expected}"
    );
    // One class alone is never varied: the last draw is taken.
    pair.mask.fill(4);
    varied.choose(3, 0, 0, &pair);
    pair.mask.fill(IGNORED);
    varied.choose(3, 0, 0, &pair);
}

#[test]
fn buffers_and_choices_that_do_not_fit_are_refused() {
    let (pair, transform) = (pair(40, 20), transform(16, 16));
    let mut preparer = MaskPreparer::new(transform.clone()).unwrap();
    let choice = transform.choose(0, 0, 0, &pair);
    let (mut pixels, mut mask) = (vec![0; 768], vec![0; 256]);
    assert!(preparer.prepare(&pair, &choice, &mut pixels[1..], &mut mask).is_err());
    assert!(preparer.prepare(&pair, &choice, &mut pixels, &mut mask[1..]).is_err());
    let outside = MaskChoice { place: (choice.resized.0, 0), ..choice };
    assert!(preparer.prepare(&pair, &outside, &mut pixels, &mut mask).is_err());
    let short = Sample { mask: vec![0; 10], ..pair.clone() };
    assert!(preparer.prepare(&short, &choice, &mut pixels, &mut mask).is_err());
    let gray = Sample { image: Image { channels: 1, ..pair.image.clone() }, ..pair };
    assert!(preparer.prepare(&gray, &choice, &mut pixels, &mut mask).is_err());
}
