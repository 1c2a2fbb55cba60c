use super::*;
use crate::{Dataset, Sample};
use std::fs;
use testing::Folder;

/// A set in a temporary folder.
struct Temporary(Folder);

impl Temporary {
    fn new() -> Self {
        Temporary(Folder::new("folder"))
    }

    /// Writes files, making folders for them; images by extension are images.
    fn with(self, files: &[&str]) -> Self {
        files.iter().for_each(|file| self.write(file, png()));
        self
    }

    fn write(&self, file: &str, bytes: impl AsRef<[u8]>) {
        self.0.file(file, bytes);
    }

    fn open(&self, split: Split) -> Result<LabelledFiles, DataError> {
        super::open(&self.0, split, 3)
    }

    /// The message of a failure, with this folder called `root`.
    fn problem(&self, split: Split) -> String {
        let message = self.open(split).unwrap_err().to_string();
        assert!(!message.contains('\n'), "{message}");
        message.replace(self.0.to_str().unwrap(), "root")
    }
}

fn png() -> Vec<u8> {
    fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/images/rgb.png")).unwrap()
}

fn listing(set: &LabelledFiles) -> Vec<(usize, &str)> {
    (0..set.len()).map(|i| (set.label(i), set.files[i].to_str().unwrap())).collect()
}

const TRAIN: [&str; 3] = ["train/cat/1.jpg", "train/dog/1.png", "train/emu/1.webp"];

#[test]
fn images_come_by_class_then_by_path() {
    let files = [
        "train/dog/b.JPG",
        "train/dog/a/z.jpeg",
        "train/dog/B.png",
        "train/cat/2.WebP",
        "train/cat/10.jpg",
        "train/cat/notes.txt",
        "train/cat/.hidden.jpg",
        "train/.cache/x.jpg",
        "train/readme.md",
    ];
    let folder = Temporary::new().with(&files);
    let set = folder.open(Split::Train).unwrap();
    assert_eq!(set.class_names(), ["cat", "dog"]);
    let expected =
        [(0, "cat/10.jpg"), (0, "cat/2.WebP"), (1, "dog/B.png"), (1, "dog/a/z.jpeg"), (1, "dog/b.JPG")];
    assert_eq!(listing(&set), expected);
    assert_eq!(set.ignored(), 2);
}

#[test]
fn images_are_read_and_named_by_path() {
    let folder = Temporary::new().with(&["train/cat/1.png"]);
    folder.write("train/cat/2.jpg", "no image");
    let set = folder.open(Split::Train).unwrap();
    let mut sample = Sample::default();
    set.read(0, &mut sample).unwrap();
    let image = &sample.image;
    assert_eq!((image.width, image.height, image.channels), (13, 11, 3));
    let message = set.read(1, &mut sample).unwrap_err().to_string();
    assert_eq!(
        message,
        format!("{}: not an image that can be read here: JPEG, PNG and WebP are", set.name(1))
    );
    assert!(set.name(1).ends_with("train/cat/2.jpg"));
    assert_eq!(set.read(2, &mut sample), Err(DataError::IndexOutOfRange { index: 2, len: 2 }));

    fs::remove_file(set.path(0)).unwrap();
    assert!(set.read(0, &mut sample).unwrap_err().to_string().starts_with(&set.name(0)));
}

#[test]
fn test_images_have_the_classes_of_train() {
    for part in ["val", "test"] {
        let folder =
            Temporary::new().with(&TRAIN).with(&[&format!("{part}/emu/1.jpg"), &format!("{part}/cat/2.jpg")]);
        let set = folder.open(Split::Test).unwrap();
        assert_eq!(set.class_names(), ["cat", "dog", "emu"]);
        assert_eq!(listing(&set), [(0, "cat/2.jpg"), (2, "emu/1.jpg")]);
    }
    let stray = Temporary::new().with(&TRAIN).with(&["val/fox/1.jpg"]);
    assert_eq!(stray.problem(Split::Test), "root/val/fox: a class that root/train has no folder for");
}

#[test]
fn lists_name_classes_or_their_numbers() {
    let lists = [
        ("val.txt", "b b.jpg 2\n./a.jpg cat\n\n"),
        ("val.csv", "image,label\nb b.jpg,emu\n\"a.jpg\",\"0\"\n"),
        ("val.csv", "b b.jpg, 2\r\na.jpg, cat\r\n"),
    ];
    for (name, text) in lists {
        let flat = ["val/b b.jpg", "val/c.jpg"];
        let folder = Temporary::new().with(&TRAIN).with(&flat);
        fs::create_dir(folder.0.join("val/.git")).unwrap();
        folder.write(name, text);
        folder.write("val/a.jpg", png());
        folder.write("val/notes.md", "");
        let set = folder.open(Split::Test).unwrap();
        assert_eq!(listing(&set), [(0, "a.jpg"), (2, "b b.jpg")], "{text}");
        assert_eq!(set.ignored(), 2);
    }
}

#[test]
fn a_list_may_lie_beside_its_images() {
    for name in ["val/labels.txt", "test/labels.txt"] {
        let folder = Temporary::new().with(&TRAIN);
        folder.write(name, "a.jpg dog");
        folder.write(&name.replace("labels.txt", "a.jpg"), png());
        let set = folder.open(Split::Test).unwrap();
        assert_eq!((listing(&set), set.ignored()), (vec![(1, "a.jpg")], 0));
    }
}

/// A class that is called by a number is meant by it.
#[test]
fn names_come_before_numbers() {
    let folder = Temporary::new().with(&["train/1/a.jpg", "train/7/a.jpg", "val/a.jpg", "val/b.jpg"]);
    folder.write("val.txt", "a.jpg 1\nb.jpg 7\n");
    assert_eq!(listing(&folder.open(Split::Test).unwrap()), [(0, "a.jpg"), (1, "b.jpg")]);
}

#[test]
fn a_broken_list_is_named_with_its_line() {
    let problem = |name: &str, text: &str| {
        let folder = Temporary::new().with(&TRAIN).with(&["val/a.jpg", "val/b.jpg"]);
        folder.write(name, text);
        folder.problem(Split::Test)
    };
    assert_eq!(
        problem("val.txt", "a.jpg cat\nb.jpg\n"),
        "root/val.txt:2: expected `file class`, found `b.jpg`"
    );
    assert_eq!(problem("val.csv", "a.jpg cat\n"), "root/val.csv:1: expected `file,class`, found `a.jpg cat`");
    assert_eq!(problem("val.txt", "\nc.jpg cat"), "root/val.txt:2: there is no image `c.jpg`");
    assert_eq!(
        problem("val.txt", "a.jpg fox"),
        "root/val.txt:1: class `fox` is neither a class folder nor a number below 3"
    );
    assert_eq!(
        problem("val.csv", "file,class\na.jpg,3"),
        "root/val.csv:2: class `3` is neither a class folder nor a number below 3"
    );
    assert_eq!(problem("val.txt", "a.jpg 1\na.jpg 1"), "root/val.txt:2: names `a.jpg` a second time");
    assert_eq!(problem("val.txt", " \n"), "root/val.txt: names no images");
    assert_eq!(
        problem("other.txt", ""),
        "root/val: images without class folders need a list of their classes; \
         none of val.txt, val.csv, val/labels.txt, val/labels.csv is in root"
    );
}

#[test]
fn what_is_missing_is_named() {
    let message = open(Path::new("/no/such"), Split::Train, 3).unwrap_err().to_string();
    assert_eq!(message, "/no/such: no such folder");
    assert!(open(Path::new(file!()), Split::Train, 2).is_err());

    let looked_for = "root: no folder `train` in it; images are looked for in train/<class>/";
    assert_eq!(Temporary::new().problem(Split::Train), looked_for);
    assert_eq!(
        Temporary::new().with(&["cat/1.jpg"]).problem(Split::Train),
        format!("{looked_for}. If `cat` is a class, move the class folders into `train`")
    );
    assert_eq!(
        Temporary::new().with(&["train/1.jpg"]).problem(Split::Train),
        "root/train: no class folders in it; images are looked for in <class>/"
    );
    assert_eq!(
        Temporary::new().with(&["train/cat/1.jpg", "train/dog/notes.txt"]).problem(Split::Train),
        "root/train/dog: no images in this class folder (jpg, jpeg, png or webp)"
    );
    assert_eq!(
        Temporary::new().with(&TRAIN).problem(Split::Test),
        "root: no folder `val` or `test` in it to take images for testing from"
    );
    assert_eq!(
        Temporary::new().with(&TRAIN).with(&["val/notes.txt"]).problem(Split::Test),
        "root/val: no images in it (jpg, jpeg, png or webp)"
    );
    let four = open(&Temporary::new().0, Split::Train, 4).unwrap_err().to_string();
    assert!(four.ends_with("images are read with 1 or 3 channels; 4 were asked for"));
}

#[cfg(unix)]
#[test]
fn links_are_followed_but_not_in_circles() {
    use std::os::unix::fs::symlink;
    let folder = Temporary::new().with(&["train/cat/1.jpg", "elsewhere/2.jpg", "elsewhere/in/3.jpg"]);
    symlink(folder.0.join("elsewhere"), folder.0.join("train/dog")).unwrap();
    symlink(folder.0.join("elsewhere"), folder.0.join("elsewhere/in/again")).unwrap();
    symlink("..", folder.0.join("elsewhere/in/up")).unwrap();
    symlink("1.jpg", folder.0.join("train/cat/linked.jpg")).unwrap();
    let set = folder.open(Split::Train).unwrap();
    assert_eq!(
        listing(&set),
        [(0, "cat/1.jpg"), (0, "cat/linked.jpg"), (1, "dog/2.jpg"), (1, "dog/in/3.jpg")]
    );

    symlink("nothing", folder.0.join("train/cat/broken.jpg")).unwrap();
    assert_eq!(folder.problem(Split::Train), "root/train/cat/broken.jpg: a link that leads nowhere");
}
