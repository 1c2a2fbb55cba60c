use super::*;
use graph::DType;

fn swin(name: &str, image: [usize; 2]) -> Swin {
    Swin::named(name, image, 3, 1000).unwrap()
}

#[test]
fn parameter_counts_are_timms() {
    let count = |name, side| {
        let model = swin(name, [side; 2]).build(1, Loss::default(), DType::F32).unwrap();
        model.train.states.iter().map(|s| s.ty.shape.count()).sum::<usize>()
    };
    assert_eq!(count("swinv2-ti/w8", 256), 28_347_154);
    assert_eq!(count("swinv2-s/w16", 256), 49_728_418);
    assert_eq!(count("swinv2-b/w8", 256), 87_918_816);
    assert_eq!(count("swinv2-l/w12to24", 384), 196_739_932);
}

#[test]
fn windows_shrink_with_the_map_and_stay_where_they_fill_it() {
    let windows = |swin: &Swin, stage| {
        let Windows { size, shift } = swin.cut(stage, true);
        (size, shift)
    };
    let square = swin("swinv2-ti/w8", [256; 2]);
    assert_eq!(windows(&square, 2), ([8, 8], [4, 4]));
    assert_eq!(windows(&square, 3), ([8, 8], [0, 0]));
    assert_eq!(square.cut(0, false).shift, [0, 0]);
    let odd = swin("swinv2-ti/w8", [200, 304]);
    assert_eq!(windows(&odd, 2), ([8, 8], [4, 4]));
    assert_eq!(windows(&odd, 3), ([6, 8], [0, 4]));
    assert_eq!(windows(&swin("swinv2-ti/w16", [256; 2]), 3), ([8, 8], [0, 0]));
}

#[test]
fn another_size_keeps_windows_and_shifts() {
    let (trained, larger) = (swin("swinv2-ti/w8", [64; 2]), swin("swinv2-ti/w8", [64; 2]).sized([128, 256]));
    assert_eq!((larger.image, larger.pretrained), ([128, 256], None));
    let of = |swin: &Swin| [0, 1, 2, 3].map(|stage| swin.cut(stage, true));
    let windows = [([8, 8], [4, 4]), ([8, 8], [0, 0]), ([4, 4], [0, 0]), ([2, 2], [0, 0])];
    assert_eq!(of(&larger), windows.map(|(size, shift)| Windows { size, shift }));
    assert_eq!(of(&larger), of(&trained));
    assert_eq!(of(&larger.sized([64, 320])), of(&trained), "of a size of another size, too");
    assert_eq!(swin("swinv2-b/w12to16", [256; 2]).sized([512; 2]).pretrained, Some([12, 12, 12, 6]));
    assert_eq!(larger.learned_window(), 8);
}

#[test]
fn stages_halve_maps_rounding_up() {
    let mut b = Builder::new(DType::F32, false);
    let images = b.input("images", DType::F32, [2, 3, 200, 304]);
    let stages = swin("swinv2-ti/w8", [200, 304]).maps(&mut b, images);
    let shapes = stages.map(|stage| b.shape(stage).0.clone());
    let expected = [[2, 50, 76, 96], [2, 25, 38, 192], [2, 13, 19, 384], [2, 7, 10, 768]];
    assert_eq!(shapes, expected.map(|shape| shape.to_vec()));
    b.finish(&stages).unwrap();
}

#[test]
fn names_say_what_windows_were_before() {
    assert_eq!(swin("swinv2-b/w12to16", [256; 2]).pretrained, Some([12, 12, 12, 6]));
    assert_eq!(swin("SwinV2-B/w12to24", [384; 2]).window, 24);
    assert_eq!(swin("swinv2-ti/w16to8", [256; 2]).pretrained, Some([16, 16, 16, 8]));
}

#[test]
fn other_sizes_are_named_by_their_numbers() {
    assert_eq!(swin("swinv2-96-2-2-6-2/w8", [256; 2]), swin("swinv2-ti/w8", [256; 2]));
    let huge = swin("swinv2-352-2-2-18-2/w8", [256; 2]);
    assert_eq!((huge.width, huge.depths, huge.heads), (352, [2, 2, 18, 2], [11, 22, 44, 88]));
    // SwinV2-H, which has 658 million in the paper; its few norms more are not here.
    let million = |name| {
        let numbers = architecture::expected(&swin(name, [256; 2]));
        numbers.iter().map(|(_, shape)| shape.iter().product::<usize>()).sum::<usize>() / 1_000_000
    };
    assert_eq!(million("swinv2-352-2-2-18-2/w8"), 658);
    let message = |name| Swin::named(name, [256; 2], 3, 10).unwrap_err().to_string();
    let width = message("swinv2-100-2-2-6-2/w8");
    assert!(width.contains("width 100 is not a multiple of 32"), "{width}");
    assert!(message("swinv2-96-2-0-6-2/w8").contains("0 blocks in a stage, but a stage has from 1 to 1000"));
    for name in ["swinv2-96-2-2-6/w8", "swinv2-96-2-2-6-2-2/w8", "swinv2-96-2-x-6-2/w8", "swinv2--2-2-6-2/w8"]
    {
        assert!(message(name).starts_with(&format!("{name}: unknown model")), "{name}");
    }
}

#[test]
fn bad_names_and_sizes_are_refused_in_one_line() {
    let message = |name, image| Swin::named(name, image, 3, 10).unwrap_err().to_string();
    for name in ["swinv2-xl/w8", "swinv2-ti", "swinv2-ti/8", "swinv2-ti/wx", "swinv2-b/w7to16", "swin-ti/w7"]
    {
        assert!(message(name, [256; 2]).starts_with(&format!("{name}: unknown model")), "{name}");
    }
    assert_eq!(message("swinv2-ti/w0", [256; 2]), "swinv2-ti/w0: the window must be at least 1");
    let odd = message("swinv2-ti/w8", [256, 250]);
    assert_eq!(odd, "swinv2-ti/w8: patch 4 doesn't divide the 256×250 image");
    assert_eq!(
        message("swinv2-ti/w16", [64, 32]),
        "swinv2-ti/w16: the 64×32 image has 16×8 tokens, fewer than one window of 16×16 or less than 8×8"
    );
}
