//! Masks as people see them.

use data::Image;
use data::segment::{IGNORED, overlay, palette};

fn sample() -> (Image, Vec<u8>) {
    let image = Image { width: 4, height: 3, channels: 3, pixels: [100, 60, 20].repeat(12) };
    let mask = vec![0, 0, 2, 2, 0, 0, 2, 2, 0, IGNORED, IGNORED, 2];
    (image, mask)
}

#[test]
fn classes_have_their_colours_and_outlines() {
    let (image, mask) = sample();
    let laid = overlay::overlay(&image, &mask).unwrap();
    let pixel = |x: usize, y: usize| &laid.pixels[(y * 4 + x) * 3..][..3];
    let half = |class: u8| -> Vec<u8> {
        let colour = palette::colour(class);
        (0..3).map(|i| ((u16::from(image.pixels[i]) + u16::from(colour[i])) / 2) as u8).collect()
    };
    assert_eq!(pixel(0, 0), half(0));
    assert_eq!(pixel(1, 0), palette::colour(0), "the border to the next class");
    assert_eq!(pixel(3, 0), half(2));
    assert_eq!(pixel(1, 2), [30; 3], "ignored pixels are gray and dim");
    assert!(overlay::overlay(&image, &mask[1..]).is_err());
    let gray = Image { channels: 1, pixels: vec![80; 12], ..image };
    assert_eq!(overlay::overlay(&gray, &mask).unwrap().channels, 3);
}

#[test]
fn shares_leave_out_what_is_ignored() {
    let (_, mask) = sample();
    let shares = overlay::shares(&mask);
    let found: Vec<(u8, f64)> = shares.iter().map(|share| (share.label, share.share)).collect();
    assert_eq!(found, [(0, 0.5), (2, 0.5)]);
    assert!(overlay::shares(&[IGNORED; 4]).is_empty());
    assert_eq!([0.00001, 0.0123, 0.5].map(overlay::percent), ["<0.1%", "1.2%", "50%"]);
}

#[test]
fn a_picture_has_a_legend() {
    let (image, mask) = sample();
    let names = ["wall", "sky", "road"].map(String::from);
    let picture = overlay::picture(&image, &mask, &names).unwrap();
    // Shown 64 times as large, with room for "wall 50%" beside it.
    let left = 6 + 256 + 6;
    assert_eq!((picture.width, picture.height), (left + 8 + 6 + 8 * 8 + 6, 6 + 192 + 6));
    let pixel = |x: usize, y: usize| &picture.pixels[(y * picture.width + x) * 3..][..3];
    assert_eq!(pixel(left + 3, 6 + 3), palette::colour(0));
    assert_eq!(pixel(left + 3, 6 + 12 + 3), palette::colour(2));
    let ink = |line: usize| {
        let area = (left + 14..picture.width).flat_map(|x| (0..8).map(move |y| (x, 6 + 12 * line + y)));
        area.filter(|&(x, y)| pixel(x, y) != [255; 3]).count()
    };
    assert!(ink(0) > 50 && ink(1) > 50 && ink(2) == 0);
}

#[test]
fn a_long_legend_ends_with_what_is_left_out() {
    let mask: Vec<u8> = (0..200).collect();
    let image = Image { width: 20, height: 10, channels: 3, pixels: vec![50; 600] };
    let picture = overlay::picture(&image, &mask, &[]).unwrap();
    assert!(picture.height < 400, "{}", picture.height);
}
