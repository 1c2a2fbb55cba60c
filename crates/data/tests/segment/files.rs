//! Sets of files, and what is wrong with them.

use crate::common::Folder;
use data::segment::{MaskedFiles, Unpaired, ade20k, masks, overlay};
use data::{DataError, Dataset, Sample, Split, fingerprint};
use std::fs;

/// A PNG of `bits` for a pixel, with a palette or gray.
fn png(width: u32, height: u32, kind: png::ColorType, depth: png::BitDepth, data: &[u8]) -> Vec<u8> {
    let mut bytes = vec![];
    let mut encoder = png::Encoder::new(&mut bytes, width, height);
    encoder.set_color(kind);
    encoder.set_depth(depth);
    if kind == png::ColorType::Indexed {
        encoder.set_palette(vec![9; 3 * 256.min(1 << depth as usize)]);
    }
    encoder.write_header().unwrap().write_image_data(data).unwrap();
    bytes
}

fn gray(width: u32, height: u32, labels: &[u8]) -> Vec<u8> {
    png(width, height, png::ColorType::Grayscale, png::BitDepth::Eight, labels)
}

fn colours(width: u32, height: u32) -> Vec<u8> {
    let data: Vec<u8> = (0..width * height * 3).map(|i| i as u8).collect();
    png(width, height, png::ColorType::Rgb, png::BitDepth::Eight, &data)
}

/// Two pairs to train on and one to judge by, of 3×2 pixels.
fn ade(test: &str) -> Folder {
    let folder = Folder::new(test);
    for (part, name) in [("training", "b"), ("training", "a"), ("validation", "c")] {
        folder.file(&format!("images/{part}/{name}.png"), colours(3, 2));
        folder.file(&format!("annotations/{part}/{name}.png"), gray(3, 2, &[0, 1, 2, 150, 3, 1]));
    }
    folder
}

fn read(set: &MaskedFiles, index: usize) -> Result<Sample, DataError> {
    let mut pair = Sample::default();
    set.read(index, &mut pair).map(|()| pair)
}

/// One line that names the file, with this folder called `root`.
fn told(folder: &Folder, error: DataError) -> String {
    let message = error.to_string();
    assert!(!message.contains('\n'), "{message}");
    message.replace(folder.0.to_str().unwrap(), "root")
}

#[test]
fn ade20k_is_shifted_by_one_and_ignores_0() {
    let folder = ade("ade");
    let train = ade20k::open(&folder.0, Split::Train, Unpaired::Refused).unwrap();
    assert_eq!((train.len(), train.classes(), train.channels()), (2, 150, 3));
    assert!(train.name(0).ends_with("a.png") && train.name(1).ends_with("b.png"));
    let Sample { image, mask } = read(&train, 0).unwrap();
    assert_eq!((image.width, image.height, mask), (3, 2, vec![255, 0, 1, 149, 2, 0]));
    assert_eq!(train.class_names()[149], "flag");
    assert_eq!(ade20k::open(&folder.0, Split::Test, Unpaired::Refused).unwrap().len(), 1);
    assert!(matches!(read(&train, 2), Err(DataError::IndexOutOfRange { index: 2, len: 2 })));

    // A list of classes in the folder is read: the first name of each.
    let names: Vec<String> = train.class_names().to_vec();
    let list = |change: &dyn Fn(usize) -> String| {
        let line = |class: usize| format!("{}\t0.1\t5\t6\t{}\n", class + 1, change(class));
        let lines: String = (0..150).map(line).collect();
        format!("Idx\tRatio\tTrain\tVal\tName\n{lines}")
    };
    folder.file("objectInfo150.txt", list(&|class| format!("{}, other", names[class])).as_bytes());
    assert_eq!(ade20k::open(&folder.0, Split::Train, Unpaired::Refused).unwrap().class_names(), names);
    folder.file("objectInfo150.txt", list(&|class| format!("class {class}")).as_bytes());
    let train = ade20k::open(&folder.0, Split::Train, Unpaired::Refused).unwrap();
    assert_eq!(train.class_names()[7], "class 7");
    folder.file("objectInfo150.txt", b"1\twall\n3\tsky\n");
    let refused = ade20k::open(&folder.0, Split::Train, Unpaired::Refused).unwrap_err();
    assert_eq!(
        told(&folder, refused),
        "root/objectInfo150.txt: line 2: `3\u{fffd}sky` is not class 2 and its names"
    );
}

#[test]
fn whatever_is_wrong_is_one_line_that_names_the_file() {
    let folder = ade("ade-bad");
    let open = || ade20k::open(&folder.0, Split::Train, Unpaired::Refused);
    let first = || told(&folder, read(&open().unwrap(), 0).unwrap_err());
    let mask = "annotations/training/a.png";

    folder.file(mask, gray(2, 3, &[1; 6]));
    assert_eq!(
        first(),
        "root/annotations/training/a.png: a mask of 2×3 pixels; its image, root/images/training/a.png, has 3×2"
    );
    folder.file(mask, gray(3, 2, &[1, 1, 1, 1, 151, 200]));
    assert_eq!(
        first(),
        "root/annotations/training/a.png: label 151 at column 1, row 1; 1 to 150 are the 150 classes, 0 is ignored"
    );
    folder.file(mask, png(3, 2, png::ColorType::Grayscale, png::BitDepth::Sixteen, &[0; 12]));
    assert_eq!(
        first(),
        "root/annotations/training/a.png: a mask with 16 bits for a label; 8 at most are read"
    );
    folder.file(mask, colours(3, 2));
    assert!(first().contains("a mask in colours"));
    let whole = gray(3, 2, &[1; 6]);
    folder.file(mask, &whole[..whole.len() - 20]);
    assert!(first().contains("broken PNG"), "{}", first());
    folder.file(mask, b"");
    assert_eq!(first(), "root/annotations/training/a.png: the file is empty");
    folder.file(mask, b"\xff\xd8\xff\xe0 a JPEG");
    assert!(first().contains("not a PNG"));

    fs::remove_file(folder.0.join(mask)).unwrap();
    let missing = "root/images/training/a.png: has no mask: root/annotations/training/a.png is not there";
    assert_eq!(told(&folder, open().unwrap_err()), missing);
    folder.file("annotations/training/z.png", &whole);
    let skipping = ade20k::open(&folder.0, Split::Train, Unpaired::LeftOut).unwrap();
    let left_out: Vec<String> =
        skipping.left_out().iter().map(|s| format!("{}: {}", s.name, s.problem)).collect();
    assert_eq!((skipping.len(), left_out.len()), (1, 2));
    assert_eq!(left_out[0].replace(folder.0.to_str().unwrap(), "root"), missing);

    folder.file(mask, &whole);
    assert_eq!(
        told(&folder, open().unwrap_err()),
        "root/annotations/training/z.png: a mask without an image: there is no root/images/training/z.*"
    );
    fs::remove_file(folder.0.join("annotations/training/z.png")).unwrap();
    folder.file("images/training/a.jpg", b"");
    assert_eq!(
        told(&folder, open().unwrap_err()),
        "root/images/training/a.jpg: has the name of root/images/training/a.png, but for the extension"
    );
}

#[test]
fn folders_that_are_empty_or_missing_are_named() {
    let folder = Folder::new("ade-empty");
    let open = || told(&folder, ade20k::open(&folder.0, Split::Test, Unpaired::LeftOut).unwrap_err());
    assert!(open().starts_with("root: no folder `images/validation` in it; ADE20K is looked for as"));
    fs::create_dir_all(folder.0.join("images/validation")).unwrap();
    assert!(open().contains("no folder `annotations/validation`"));
    fs::create_dir_all(folder.0.join("annotations/validation")).unwrap();
    assert_eq!(open(), "root/images/validation: no images in it (jpg, jpeg, png or webp)");
    folder.file("images/validation/a.png", colours(1, 1));
    assert_eq!(open(), "root/images/validation: no image in it has a mask");
    let nowhere = folder.0.join("nowhere");
    let error = ade20k::open(&nowhere, Split::Test, Unpaired::Refused).unwrap_err();
    assert_eq!(told(&folder, error), "root/nowhere: no such folder");
    let error = masks::open(&nowhere, Split::Test, 3, Unpaired::Refused).unwrap_err();
    assert_eq!(told(&folder, error), "root/nowhere: no such folder");
}

#[test]
fn masks_of_few_bits_and_with_palettes_hold_labels() {
    use png::{BitDepth, ColorType};
    let folder = Folder::new("masks-bits");
    for part in ["train", "val"] {
        folder.file(&format!("{part}/images/a.png"), colours(5, 2));
    }
    folder.file("classes.txt", b"ground\nleft\nmiddle\nright\n");
    let open = || masks::open(&folder.0, Split::Train, 3, Unpaired::Refused).unwrap();
    let cases: [(ColorType, BitDepth, &[u8], [u8; 10]); 5] = [
        (ColorType::Grayscale, BitDepth::One, &[0b1011_0000, 0b0100_1000], [1, 0, 1, 1, 0, 0, 1, 0, 0, 1]),
        (
            ColorType::Indexed,
            BitDepth::Two,
            &[0b0001_1011, 0b1100_0000, 0b1110_0100, 0],
            [0, 1, 2, 3, 3, 3, 2, 1, 0, 0],
        ),
        (
            ColorType::Indexed,
            BitDepth::Four,
            &[0x01, 0x23, 0x30, 0x32, 0x10, 0x10],
            [0, 1, 2, 3, 3, 3, 2, 1, 0, 1],
        ),
        (
            ColorType::Indexed,
            BitDepth::Eight,
            &[0, 1, 2, 3, 255, 3, 2, 1, 0, 1],
            [0, 1, 2, 3, 255, 3, 2, 1, 0, 1],
        ),
        (ColorType::Grayscale, BitDepth::Eight, &[3; 10], [3; 10]),
    ];
    for (kind, depth, data, labels) in cases {
        folder.file("train/masks/a.png", png(5, 2, kind, depth, data));
        assert_eq!(read(&open(), 0).unwrap().mask, labels, "{kind:?} {depth:?}");
    }
    folder.file("train/masks/a.png", gray(5, 2, &[4; 10]));
    assert_eq!(
        told(&folder, read(&open(), 0).unwrap_err()),
        "root/train/masks/a.png: label 4 at column 0, row 0; 0 to 3 are the 4 classes, 255 is ignored"
    );
    folder.file("classes.txt", b"ground\n\nleft\n");
    let refused = masks::open(&folder.0, Split::Train, 3, Unpaired::Refused).unwrap_err();
    assert_eq!(told(&folder, refused), "root/classes.txt: line 2 names no class");
}

#[test]
fn folders_of_masks_come_in_three_forms() {
    let labels = [0, 1, 5, 255];
    let sets = |folder: &Folder| {
        [Split::Train, Split::Test].map(|split| masks::open(&folder.0, split, 1, Unpaired::Refused))
    };
    let parts = ["train", "val"];
    for (test, image, mask) in [
        ("masks-1", "images/PART/x/NAME.png", "masks/PART/x/NAME.png"),
        ("masks-2", "PART/images/NAME.png", "PART/masks/NAME.png"),
    ] {
        let folder = Folder::new(test);
        for (part, name) in [(0, "a"), (0, "b"), (1, "c")] {
            let named = |text: &str| text.replace("PART", parts[part]).replace("NAME", name);
            folder.file(&named(image), colours(2, 2));
            folder.file(&named(mask), gray(2, 2, &labels));
        }
        let [train, test] = sets(&folder).map(Result::unwrap);
        assert_eq!((train.len(), test.len(), train.classes(), test.classes()), (2, 1, 6, 6));
        assert_eq!(train.class_names()[5], "5");
        assert_eq!(read(&test, 0).unwrap().mask, labels);
        assert_eq!(train.channels(), 1);
    }
    let folder = Folder::new("masks-3");
    for i in 0..25 {
        folder.file(&format!("images/{i:02}.png"), colours(2, 2));
        folder.file(&format!("masks/{i:02}.png"), gray(2, 2, &labels));
    }
    let [train, test] = sets(&folder).map(Result::unwrap);
    let names: Vec<_> =
        (0..test.len()).map(|i| told(&folder, DataError::file(test.paths(i).0, ""))).collect();
    assert_eq!(
        (train.len(), names),
        (23, vec!["root/images/09.png: ".to_string(), "root/images/19.png: ".to_string()])
    );
    (9..25).for_each(|i| {
        fs::remove_file(folder.0.join(format!("images/{i:02}.png"))).unwrap();
        fs::remove_file(folder.0.join(format!("masks/{i:02}.png"))).unwrap();
    });
    let [train, _] = sets(&folder);
    assert!(told(&folder, train.unwrap_err()).contains("9 pairs"));
}

#[test]
fn fingerprints_see_masks() {
    let folder = ade("ade-print");
    let print = || fingerprint(&ade20k::open(&folder.0, Split::Train, Unpaired::Refused).unwrap());
    let before = print();
    assert_eq!(before, print());
    folder.file("annotations/training/b.png", gray(3, 2, &[0, 1, 2, 149, 3, 1]));
    assert_ne!(before, print());
}

/// What is written can be read again, as a set.
#[test]
fn written_masks_are_read_back() {
    let folder = Folder::new("masks-written");
    let labels = [0, 1, 2, 255, 1, 0];
    for part in ["train", "val"] {
        folder.file(&format!("images/{part}/a.png"), colours(3, 2));
        fs::create_dir_all(folder.0.join(format!("masks/{part}"))).unwrap();
        overlay::save_mask(&labels, (3, 2), &folder.0.join(format!("masks/{part}/a.png"))).unwrap();
    }
    let set = masks::open(&folder.0, Split::Train, 3, Unpaired::Refused).unwrap();
    assert_eq!((read(&set, 0).unwrap().mask, set.classes()), (labels.to_vec(), 3));
    assert!(overlay::save_mask(&labels, (3, 3), &folder.0.join("b.png")).is_err());
}
