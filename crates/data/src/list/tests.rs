use super::*;
use crate::{Dataset, Sample, Split};
use std::fs;
use std::sync::atomic::{AtomicUsize, Ordering};
use testing::Folder;

/// A folder with images and lists.
struct Temporary(PathBuf, #[expect(dead_code, reason = "removes the folder when it is dropped")] Folder);

impl Temporary {
    fn new() -> Self {
        static NUMBER: AtomicUsize = AtomicUsize::new(0);
        let folder = Folder::new(&format!("list-{}", NUMBER.fetch_add(1, Ordering::Relaxed)));
        Temporary(folder.0.clone(), folder)
    }

    fn write(&self, name: &str, text: impl AsRef<[u8]>) -> PathBuf {
        let path = self.0.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, text).unwrap();
        path
    }

    /// Files that look as if they were images.
    fn with(self, names: &[&str]) -> Self {
        names.iter().for_each(|name| drop(self.write(name, "no image")));
        self
    }

    fn message(&self, text: impl AsRef<[u8]>) -> String {
        let file = self.write("list.csv", text);
        let message = open(&file, Split::Train).unwrap_err().to_string();
        message.replace(&self.0.display().to_string(), "").trim_start_matches('/').to_string()
    }
}

fn open(file: &Path, split: Split) -> Result<LabelledFiles, DataError> {
    super::open(file, Reading { split, channels: 3, skip_bad: false })
}

/// File names and class names of a part.
fn images(file: &Path, split: Split) -> Vec<(String, String)> {
    let list = open(file, split).unwrap();
    let name = |path: &PathBuf| path.file_name().unwrap().to_str().unwrap().to_string();
    let class = |label: &u32| list.class_names[*label as usize].clone();
    list.files.iter().map(name).zip(list.labels.iter().map(class)).collect()
}

fn pairs(expected: &[(&str, &str)]) -> Vec<(String, String)> {
    expected.iter().map(|(path, class)| (path.to_string(), class.to_string())).collect()
}

#[test]
fn columns_are_known_by_name_and_a_split_column_divides() {
    let folder = Temporary::new().with(&["a.jpg", "sub/b.jpg", "c, d.jpg", "e.jpg", "f.jpg"]);
    let text = "id,Label,FILE,split\n1,dog,a.jpg,train\n2,cat,sub/b.jpg,Train\n3,dog,\"c, d.jpg\",val\n4,cat,e.jpg,test\n";
    let file = folder.write("images.csv", text);
    assert_eq!(images(&file, Split::Train), pairs(&[("a.jpg", "dog"), ("b.jpg", "cat")]));
    assert_eq!(images(&file, Split::Test), pairs(&[("c, d.jpg", "dog")]), "val goes before test");
    assert_eq!(open(&file, Split::Test).unwrap().class_names(), ["cat", "dog"], "sorted, of training rows");
    let absolute = folder.0.join("f.jpg").display().to_string();
    let tabs = format!("path\tclass\tsubset\n{absolute}\tx\ttraining\na.jpg\tx\ttest\n");
    let file = folder.write("images.tsv", tabs);
    assert_eq!(images(&file, Split::Train), pairs(&[("f.jpg", "x")]));
    assert_eq!(images(&file, Split::Test), pairs(&[("a.jpg", "x")]));
}

#[test]
fn spreadsheets_write_what_they_like() {
    let folder = Temporary::new().with(&["a.jpg", "b\"c.jpg", "d\ne.jpg", "f.jpg"]);
    let text = "\u{feff}image,class,split\r\n\r\na.jpg,\"big, \"\"red\"\" cat\",train\r\n  \r\n\"b\"\"c.jpg\",x,train\r\n\"d\ne.jpg\",x,val\r\n f.jpg , x ,train\r";
    let file = folder.write("list.CSV", text);
    let expected = [("a.jpg", "big, \"red\" cat"), ("b\"c.jpg", "x"), ("f.jpg", "x")];
    assert_eq!(images(&file, Split::Train), pairs(&expected));
    assert_eq!(images(&file, Split::Test), pairs(&[("d\ne.jpg", "x")]));
}

#[test]
fn a_second_list_or_every_tenth_of_a_class_is_evaluated() {
    let names: Vec<String> = (0..25).map(|i| format!("{i:02}.png")).collect();
    let folder = Temporary::new().with(&names.iter().map(String::as_str).collect::<Vec<_>>());
    let row = |(i, name): (usize, &String)| format!("{name},{}\n", if i % 2 == 0 { "even" } else { "odd" });
    let text = "path,label\n".to_string() + &names.iter().enumerate().map(row).collect::<String>();
    let file = folder.write("all.csv", &text);
    assert_eq!(images(&file, Split::Test), pairs(&[("18.png", "even"), ("19.png", "odd")]));
    assert_eq!(images(&file, Split::Train).len(), 23);
    let train = folder.write("train.csv", &text);
    assert_eq!(images(&train, Split::Test).len(), 2, "nothing lies beside it");
    folder.write("test.csv", "path,label\n03.png,even\n");
    assert_eq!(images(&train, Split::Train).len(), 25);
    assert_eq!(images(&train, Split::Test), pairs(&[("03.png", "even")]));
    let few = folder.message("path,label\n01.png,a\n02.png,b\n");
    assert_eq!(
        few,
        "list.csv: no class has 10 images, of which every tenth would be in the validation set; add a column `split`"
    );
}

#[test]
fn numbers_are_classes_and_a_file_names_them() {
    let folder = Temporary::new().with(&["a.jpg", "b.jpg", "c.jpg"]);
    let text = "path,label,split\na.jpg,10,train\nb.jpg,2,train\nc.jpg,10,val\n";
    let file = folder.write("list.csv", text);
    let list = open(&file, Split::Train).unwrap();
    assert_eq!((list.classes(), list.label(0), list.label(1)), (11, 10, 2), "a number is its own label");
    let zeros = folder.write("zeros.csv", text.replace(",2,", ",02,"));
    assert_eq!(open(&zeros, Split::Train).unwrap().class_names(), ["02", "10"], "a name, as it is written");
    folder.write("classes.txt", "cat\r\ndog\n2\n");
    let named = folder.write("list.csv", "path,label,split\na.jpg,dog,train\nb.jpg,0,train\nc.jpg,2,val\n");
    assert_eq!(images(&named, Split::Train), pairs(&[("a.jpg", "dog"), ("b.jpg", "cat")]));
    assert_eq!(images(&named, Split::Test), pairs(&[("c.jpg", "2")]), "a name goes before a number");
    assert_eq!(
        folder.message("path,label,split\na.jpg,3,train\nb.jpg,0,val\n"),
        "list.csv:2: a class that classes.txt does not name: `3`"
    );
    folder.write("classes.txt", "cat\ncat\n");
    assert_eq!(folder.message(text), "classes.txt:2: class `cat` stands there twice");
}

#[test]
fn what_is_wrong_is_named_by_line() {
    let folder = Temporary::new().with(&["a.jpg", "b.jpg"]);
    let message = |text: &str| folder.message(text);
    assert_eq!(message(""), "list.csv: is empty");
    assert_eq!(message("\n\n"), "list.csv: is empty");
    assert_eq!(message("path,label\n"), "list.csv: names no images");
    let no_paths = "no column for paths (path, image, file, filename, file_name, filepath, image_path)";
    assert_eq!(message("\na.jpg,cat\n"), format!("list.csv:2: {no_paths}; the columns are a.jpg, cat"));
    let semicolons = message("path;label\na.jpg;cat\n");
    assert!(semicolons.ends_with("fields are separated by commas, not semicolons"), "{semicolons}");
    assert_eq!(
        message("path,label,class\n"),
        "list.csv:1: columns `label` and `class` could both hold classes: keep one"
    );
    let after = |rows: &str| message(&format!("path,label,split\n\n{rows}"));
    assert_eq!(after("a.jpg,cat\n"), "list.csv:3: 2 fields, but the first line names 3 columns");
    assert_eq!(after("a.jpg,,train\n"), "list.csv:3: the class is missing");
    assert_eq!(after(" ,cat,train\n"), "list.csv:3: the path is missing");
    assert_eq!(after("a.jpg,cat,holdout\n"), "list.csv:3: part `holdout` is none of train, val and test");
    assert_eq!(after("a.jpg,cat,val\n"), "list.csv: names no images for the train set");
    assert_eq!(after("a.jpg,cat,train\nz.jpg,cat,train\n"), "list.csv:4: there is no file /z.jpg");
    assert_eq!(
        after("a.jpg,cat,train\nb.jpg,cat,train\na.jpg,dog,train\n")
            .replace(&*folder.0.to_string_lossy(), ""),
        "list.csv:5: `a.jpg` stands in /list.csv:3, too"
    );
    assert_eq!(after("\"a.jpg,cat,train\n"), "list.csv:3: a quote that begins here does not end");
    assert_eq!(
        after("\"a.jpg\"x,cat,train\n"),
        "list.csv:3: `x,cat,train�` follows the quote that ends a field"
    );
    assert_eq!(
        after("a.jpg,4000000000,train\n"),
        "list.csv: label 4000000000 is too large for a class: 999999 is the most"
    );
    assert_eq!(folder.message(b"path,label\na\xff.jpg,cat\n"), "list.csv:2: not valid UTF-8");
    let file = folder.write("list.csv", "path,label,split\na.jpg,cat,train\nb.jpg,dog,val\n");
    let missing = open(&file, Split::Test).unwrap_err().to_string();
    assert!(missing.ends_with("list.csv:3: a class that no training row has: `dog`"), "{missing}");
    let other = folder.write("list.xlsx", "");
    assert!(
        open(&other, Split::Train).unwrap_err().to_string().ends_with("ends with .csv, .tsv or .parquet")
    );
    assert!(open(&folder.0.join("no.csv"), Split::Train).is_err());
}

#[test]
fn bad_rows_can_be_left_out() {
    let folder = Temporary::new().with(&["a.jpg", "b.jpg"]);
    let file = folder
        .write("list.csv", "path,label,split\na.jpg,x,train\nz.jpg,x,train\na.jpg,x,train\nb.jpg,x,val\n");
    let reading = Reading { split: Split::Train, channels: 3, skip_bad: true };
    let list = super::open(&file, reading).unwrap();
    assert_eq!((list.len(), list.left_out().len()), (1, 2));
    assert!(list.left_out()[0].name.ends_with("list.csv:3"), "{:?}", list.left_out());
    let mut sample = Sample::default();
    let error = list.read(0, &mut sample).unwrap_err().to_string();
    assert!(error.contains("a.jpg: not an image"), "{error}");
    assert_eq!(list.read(1, &mut sample), Err(DataError::IndexOutOfRange { index: 1, len: 1 }));
}

/// A list that another program wrote (see tests/fixtures/lists/README.md).
fn fixture(name: &str) -> Vec<u8> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/lists");
    fs::read(folder.join(format!("{name}.parquet"))).unwrap()
}

#[test]
fn parquet_files_are_read_as_others_write_them() {
    let names: Vec<String> = (0..60).map(|i| format!("{i:02}.png")).collect();
    let folder = Temporary::new().with(&names.iter().map(String::as_str).collect::<Vec<_>>());
    for name in ["snappy", "gzip", "zstd2"] {
        let file = folder.write(&format!("{name}.parquet"), fixture(name));
        for (split, val) in [(Split::Train, false), (Split::Test, true)] {
            let of_split = (0..60).filter(|i| (i % 5 == 4) == val);
            let expected = of_split.map(|i| (names[i].clone(), ["cat", "dog", "émeu"][i % 3].to_string()));
            assert_eq!(images(&file, split), expected.collect::<Vec<_>>(), "{name}, {split}");
        }
    }
    let message = |name: &str| {
        let file = folder.write(&format!("{name}.parquet"), fixture(name));
        open(&file, Split::Train).unwrap_err().to_string().replace(&*folder.0.to_string_lossy(), "")
    };
    assert_eq!(message("plain"), "/plain.parquet row 51: the class is missing");
    assert_eq!(
        message("delta"),
        "/delta.parquet: column `path`: is encoded as number 7; plain values and dictionaries are read"
    );
    assert_eq!(
        folder.message(fixture("plain")),
        "list.csv:1: not valid UTF-8",
        "a file is what its name says"
    );
}

#[test]
fn damaged_parquet_files_are_refused_in_one_line() {
    let folder = Temporary::new();
    let file = folder.0.join("list.parquet");
    let mut random = crate::random::Stream::new(5);
    for name in ["snappy", "gzip", "zstd2", "plain"] {
        let whole = fixture(name);
        for round in 0..300 {
            let mut bytes = whole.clone();
            match round % 3 {
                0 => bytes.truncate(random.below(whole.len() as u64) as usize),
                _ => {
                    for _ in 0..=random.below(4) {
                        let at = random.below(bytes.len() as u64) as usize;
                        bytes[at] = random.bits() as u8;
                    }
                }
            }
            fs::write(&file, bytes).unwrap();
            // Images are not there, so that even a list that is read is refused.
            let error = open(&file, Split::Train).unwrap_err().to_string();
            assert!(!error.contains(char::is_control) && error.len() < 1000, "{name}: {error}");
        }
    }
}
