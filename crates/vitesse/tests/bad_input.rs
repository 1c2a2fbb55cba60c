//! Whatever is wrong with data, configuration, checkpoints or folders: one line that names it, a failure, nothing lost.

use data::segment::overlay::save_mask;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const IMAGES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../data/tests/fixtures/images");
const TINY: [&str; 6] = ["--model", "vit-nano/8", "--batch-size", "4", "--steps", "2"];

struct Folder(testing::Folder);

impl Folder {
    fn new(name: &str) -> Self {
        let parent = Path::new(env!("CARGO_TARGET_TMPDIR"));
        Folder(testing::Folder::within(parent, &format!("bad-{name}")))
    }

    fn write(&self, name: &str, bytes: &[u8]) {
        self.0.file(name, bytes);
    }

    fn run(&self, args: &[&str]) -> Output {
        Command::new(env!("CARGO_BIN_EXE_vitesse")).args(args).current_dir(&self.0).output().unwrap()
    }

    fn works(&self, args: &[&str]) -> String {
        let output = self.run(args);
        assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    /// One line on standard error with all of `culprits` in it, a failure, no panic.
    fn refuses(&self, args: &[&str], culprits: &[&str]) {
        let output = self.run(args);
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{args:?} should fail");
        assert_eq!(output.status.code(), Some(1), "{args:?}: {error}");
        for culprit in culprits {
            assert!(error.contains(culprit), "{args:?}: '{culprit}' is not in: {error}");
        }
        assert_eq!(error.trim_end().lines().count(), 1, "{args:?}: {error}");
    }
}

fn train<'a>(more: &[&'a str]) -> Vec<&'a str> {
    [&["train"], &TINY[..], more].concat()
}

fn image(name: &str) -> Vec<u8> {
    fs::read(Path::new(IMAGES).join(name)).unwrap()
}

/// Two classes of four images for training, two for judging.
fn photos(folder: &Folder) {
    let files = ["rgb.jpg", "420.jpg", "rgb.png", "lossy.webp"];
    for class in ["cat", "dog"] {
        for (i, file) in files.iter().enumerate() {
            let name = file.split('.').next_back().unwrap();
            folder.write(&format!("photos/train/{class}/{i}.{name}"), &image(file));
        }
        folder.write(&format!("photos/val/{class}/a.jpg"), &image("422.jpg"));
    }
}

/// Four records a file, as CIFAR-10 has them.
fn cifar(folder: &Folder) {
    let record = |i: u8| [&[i % 10][..], &[i.wrapping_mul(37); 3072]].concat();
    let records: Vec<u8> = (0..8).flat_map(record).collect();
    for i in 1..=5 {
        folder.write(&format!("cifar/cifar-10-batches-bin/data_batch_{i}.bin"), &records);
    }
    folder.write("cifar/cifar-10-batches-bin/test_batch.bin", &records);
}

#[test]
fn cifar_files() {
    let folder = Folder::new("cifar");
    cifar(&folder);
    let args = train(&["--data", "cifar10:cifar", "--out", "run"]);
    folder.refuses(&train(&["--data", "cifar10:nowhere"]), &["nowhere"]);

    let path = "cifar/cifar-10-batches-bin/data_batch_3.bin";
    let whole = fs::read(folder.0.join(path)).unwrap();
    folder.write(path, &whole[..3073 * 3 + 100]);
    folder.refuses(&args, &["data_batch_3.bin", "100"]);
    let mut wrong = whole.clone();
    wrong[3073 * 2] = 77;
    folder.write(path, &wrong);
    folder.refuses(&args, &["data_batch_3.bin", "77"]);
    folder.write(path, b"");
    folder.refuses(&args, &["data_batch_3.bin"]);
    fs::remove_file(folder.0.join(path)).unwrap();
    folder.refuses(&args, &["data_batch_3"]);
    assert!(!folder.0.join("run").exists(), "a refused run leaves no folder");

    folder.write(path, &whole);
    folder.refuses(&train(&["--data", "cifar10:cifar", "--classes", "4"]), &["10", "4"]);
    folder.works(&args);
}

#[test]
fn image_folders() {
    let folder = Folder::new("folder");
    photos(&folder);
    let data = ["--data", "folder:photos", "--image-size", "32"];
    folder.works(&train(&data));
    folder.works(&train(&[&data[..], &["--data-fraction", "0.5", "--augment", "strong"]].concat()));

    fs::create_dir_all(folder.0.join("photos/train/empty")).unwrap();
    folder.refuses(&train(&data), &["empty"]);
    fs::remove_dir(folder.0.join("photos/train/empty")).unwrap();
    fs::create_dir_all(folder.0.join("nothing/train")).unwrap();
    folder.refuses(&train(&["--data", "folder:nothing"]), &["nothing"]);
    folder.refuses(&train(&["--data", "folder:nowhere"]), &["nowhere"]);
    folder.write("photos/val/bird/a.jpg", &image("rgb.jpg"));
    folder.refuses(&train(&data), &["bird"]);
    fs::remove_dir_all(folder.0.join("photos/val/bird")).unwrap();
    folder.refuses(&train(&[&data[..], &["--classes", "1"]].concat()), &["2", "1"]);
}

/// Each broken file is named; with `--skip-bad-images` it is named, counted and left out.
#[test]
fn broken_images() {
    for (name, bytes) in [
        ("truncated.jpg", image("420.jpg")[..400].to_vec()),
        ("empty.jpg", vec![]),
        ("text.png", b"this is a text".to_vec()),
    ] {
        let folder = Folder::new(&format!("image-{name}"));
        photos(&folder);
        folder.write(&format!("photos/train/cat/{name}"), &bytes);
        let data = ["--data", "folder:photos", "--image-size", "32", "--epochs", "2"];
        let args: Vec<&str> = [&["train", "--model", "vit-nano/8", "--batch-size", "2"], &data[..]].concat();
        folder.refuses(&args, &[name]);
        let out = ["--skip-bad-images", "--json", "--out"];
        let counted = |run: &str, workers: &str| {
            let more = [&out[..], &[run, "--workers", workers]].concat();
            let summary: serde_json::Value =
                serde_json::from_str(&folder.works(&[&args[..], &more[..]].concat())).unwrap();
            let metrics = fs::read_to_string(folder.0.join(run).join("metrics.csv")).unwrap();
            let losses: Vec<String> =
                metrics.lines().map(|line| line.split(',').take(3).collect::<Vec<_>>().join(",")).collect();
            (summary["skipped_images"].clone(), summary["images"].clone(), losses)
        };
        let alone = counted("one", "1");
        assert_eq!((&alone.0, &alone.1), (&2.into(), &16.into()), "nine images twice, one of them broken");
        assert_eq!(alone, counted("three", "3"));
        let said = folder.works(&[&args[..], &["--skip-bad-images"]].concat());
        assert!(
            said.contains(name) && said.contains("left out, as they could not be read: 2 images"),
            "{said}"
        );
    }
    let folder = Folder::new("classify");
    photos(&folder);
    let args = ["--data", "folder:photos", "--image-size", "32", "--out", "run"];
    folder.works(&train(&args));
    folder.write("text.jpg", b"not an image");
    folder.refuses(&["classify", "text.jpg", "--weights", "run"], &["text.jpg"]);
    folder.refuses(&["classify", "missing.jpg", "--weights", "run"], &["missing.jpg"]);
    let said = folder.works(&[
        "classify",
        "photos/val/cat/a.jpg",
        "photos/val/dog/a.jpg",
        "--weights",
        "run",
        "--grid",
        "grid.png",
    ]);
    assert!(said.contains("cat") && said.contains("dog") && said.contains('%'), "{said}");
    assert!(folder.0.join("grid.png").metadata().unwrap().len() > 100);
}

#[test]
fn configurations() {
    let folder = Folder::new("config");
    for (text, culprits) in [
        ("{", &["ds.json:1:"][..]),
        ("[1, 2]", &["ds.json"]),
        (r#"{"train_batch_size": 32, "train_micro_batch_size_per_gpu": 5}"#, &["32", "5"]),
        (r#"{"fp16": {"enabled": true}, "bf16": {"enabled": true}}"#, &["fp16", "bf16"]),
        (r#"{"train_batch_sise": 32}"#, &["train_batch_sise", "train_batch_size"]),
        (r#"{"train_batch_size": "many"}"#, &["train_batch_size", "many"]),
        (r#"{"optimizer": {"type": "Adagrad"}}"#, &["optimizer.type", "Adagrad"]),
    ] {
        folder.write("ds.json", text.as_bytes());
        folder.refuses(&["train", "--model", "vit-nano/8", "--config", "ds.json", "--out", "run"], culprits);
        assert!(!folder.0.join("run").exists());
    }
    folder.refuses(&train(&["--device", "cuda"]), &["cuda"]);
    folder.refuses(&train(&["--precision", "bf16"]), &["bf16"]);
}

/// A model of 215 billion parameters: before anything is allocated, with the bytes of each kind.
#[test]
fn models_that_memory_does_not_hold() {
    let folder = Folder::new("memory");
    // 160 GiB of states.
    if data::available_memory().is_some_and(|bytes| bytes > 128 << 30) {
        return testing::inapplicable("this machine's memory holds the model");
    }
    let model = ["--model", "vit-8192-8-16-65536/16", "--image-size", "32", "--batch-size", "1"];
    for command in [&["train", "--steps", "1", "--out", "run"][..], &["bench"]] {
        let kinds = ["not enough memory on this machine", "moments ", "parameters ", "states alone"];
        folder.refuses(&[command, &model].concat(), &kinds);
    }
    let planned = folder.works(&[&["plan"], &model[..]].concat());
    assert!(planned.contains("it doesn't fit here: not enough memory"), "{planned}");
    assert!(!folder.0.join("run").exists(), "a refused run leaves no folder");
}

#[test]
fn checkpoints_and_run_folders() {
    let folder = Folder::new("checkpoints");
    let small = ["--train-samples", "32", "--test-samples", "8", "--checkpoint-every", "1"];
    folder.works(&train(&[&small[..], &["--out", "run"]].concat()));
    let listing = || {
        let mut files: Vec<_> =
            walk(&folder.0.join("run")).into_iter().map(|p| (fs::read(&p).unwrap(), p)).collect();
        files.sort_by(|a, b| a.1.cmp(&b.1));
        files
    };
    let before = listing();
    folder.refuses(&train(&[&small[..], &["--out", "run"]].concat()), &["run", "already holds a run"]);
    folder.refuses(
        &["train", "--resume", "run", "--model", "vit-ti/8"],
        &["run", "other settings", "vit-ti/8"],
    );
    folder.refuses(&["train", "--resume", "run", "--lr", "0.5"], &["other settings"]);
    folder.refuses(&["train", "--resume", "nowhere"], &["nowhere"]);
    folder.refuses(&["train", "--resume"], &["--resume"]);
    folder.refuses(&["train", "--resume", "auto"], &["--resume auto", "--out"]);
    assert!(before == listing(), "nothing was touched");

    let latest = folder.0.join("run/checkpoints/step-00000002.safetensors");
    let bytes = fs::read(&latest).unwrap();
    fs::write(&latest, &bytes[..bytes.len() / 2]).unwrap();
    folder.refuses(&["eval", "--weights", "run/checkpoints/step-00000002.safetensors"], &["step-00000002"]);

    // A checkpoint of another model in this run's folder.
    let other = [&["train", "--model", "vit-nano/16", "--steps", "2", "--out", "other"], &small[..]].concat();
    folder.works(&other);
    fs::copy(folder.0.join("other/checkpoints/step-00000002.safetensors"), &latest).unwrap();
    folder.refuses(&["train", "--resume", "run"], &["run", "vit-nano/16"]);

    // Fine-tuning: the same run's weights with another head, only if that is asked for.
    let again = ["train", "--model", "vit-nano/16", "--steps", "1", "--init", "other", "--classes", "12"];
    folder.refuses(&again, &["head.weight"]);
    folder.works(&[&again[..], &["--new-head"]].concat());

    folder.write("file", b"");
    folder.refuses(&train(&["--out", "file/run"]), &["file/run"]);
    folder.refuses(&train(&["--out", "/proc/run"]), &["/proc/run"]);
}

/// Classes, files and titles can be called anything. What commands print of them is only shown, and stays on its line.
#[test]
fn names_that_a_terminal_would_obey_are_only_shown() {
    let folder = Folder::new("escapes");
    photos(&folder);
    let class = "cat\u{1b}]0;owned\u{7}\u{9b}2J\u{202e}\nvitesse: all is well";
    for part in ["train", "val"] {
        let named = |name: &str| folder.0.join(format!("photos/{part}/{name}"));
        fs::rename(named("cat"), named(class)).unwrap();
    }
    let broken = format!("photos/train/{class}/\u{1b}[2J\nvitesse: x.jpg");
    folder.write(&broken, b"\xff\xd8 no");
    let shown = |args: &[&str], code: i32| {
        let output = folder.run(args);
        let text = [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap()).concat();
        assert_eq!(output.status.code(), Some(code), "{args:?}: {text:?}");
        let obeyed = text.chars().find(|c| *c != '\n' && text::printable::is_unprintable(*c));
        assert_eq!(obeyed, None, "{args:?}: {text:?}");
        assert!(!text.contains("\nvitesse: all") && !text.contains("\nvitesse: x"), "{args:?}: {text}");
        text
    };
    let small = ["--data", "folder:photos", "--image-size", "16"];
    assert!(shown(&[&["data", "inspect"], &small[..]].concat(), 0).contains("cat\\u001b]0;owned"));
    let inspected = shown(&[&["data", "inspect", "--json"], &small[..]].concat(), 0);
    let inspected: serde_json::Value = serde_json::from_str(&inspected).unwrap();
    assert_eq!(inspected["parts"]["train"]["classes"][class], 5, "{inspected}");
    // Batches of all images.
    let tiny = ["train", "--model", "vit-nano/8", "--batch-size", "9", "--steps", "2"];
    let error = shown(&[&tiny[..], &small[..]].concat(), 1);
    assert_eq!(
        error.lines().filter(|line| line.starts_with("vitesse: photos/train/cat")).count(),
        1,
        "{error}"
    );
    let training = [&tiny[..], &["--skip-bad-images", "--out", "run"], &small[..]].concat();
    assert!(shown(&training, 0).contains("left out: "));
    assert!(shown(&["eval", "--weights", "run"], 0).contains("cat\\u001b"));
    let photo = format!("photos/val/{class}/a.jpg");
    assert!(shown(&["classify", "--weights", "run", &photo], 0).contains("cat\\u001b"));
    let classified = shown(&["classify", "--weights", "run", "--json", &photo], 0);
    let classified: serde_json::Value = serde_json::from_str(&classified).unwrap();
    let classes = classified["classes"].as_array().unwrap();
    assert!(classified["image"] == photo.as_str() && classes.iter().any(|found| found["class"] == class));
    folder.write(
        "s.toml",
        b"title = \"\\u001b[2J\\nvitesse: all is well\"\nmodels = \"vit-nano/8\"\nsteps = 9\n",
    );
    shown(&["study", "plan", "s.toml"], 0);
    folder.write("bad.toml", b"\"\\u001b[2J\\nvitesse: all is well\" = 1\n");
    shown(&["study", "plan", "bad.toml"], 1);
}

/// Where results can't go is known before they are made.
#[test]
fn outputs_that_cannot_be_written_are_refused_at_the_start() {
    let folder = Folder::new("outputs");
    let small = ["--train-samples", "8", "--test-samples", "4"];
    folder.write("taken.png", b"");
    for (flag, path) in [
        ("--trace", "no/t.json"),
        ("--trace", "taken.png/t.json"),
        ("--trace", "."),
        ("--rank-logs", "taken.png"),
        ("--rank-logs", "/proc/logs"),
    ] {
        let run = train(&[&small[..], &["--out", "run", flag, path]].concat());
        folder.refuses(&run, &[&format!("{flag} {path}: ")]);
        assert!(!folder.0.join("run").exists(), "{flag} {path}");
    }
    for wrong in
        [["--mixup", "0.0001"], ["--rand-augment", "9,9"], ["--eval-resize", "20000"], ["--epochs", "3"]]
    {
        folder.refuses(
            &train(&[&["--out", "run"], &wrong[..]].concat()),
            &[&format!("{} {}: ", wrong[0], wrong[1])],
        );
        assert!(!folder.0.join("run").exists(), "{wrong:?}");
    }
    folder.works(&train(&[&small[..], &["--out", "run"]].concat()));
    let image = Path::new(IMAGES).join("rgb.png").display().to_string();
    let (eval, classify) = (["eval", "--weights", "run"], ["classify", "--weights", "run", &image]);
    for (command, flag, path) in [
        (&eval[..], "--confusion", "no/c.csv"),
        (&eval, "--confusion", "run"),
        (&eval, "--logits", "no/l.safetensors"),
        (&eval, "--masks", "taken.png"),
        (&classify, "--grid", "taken.png"),
        (&classify, "--grid", "no/g.png"),
        (&["segment", "--weights", "run", &image], "--out", "taken.png"),
        (&["data", "inspect"], "--sheet", "taken.png"),
        (&["data", "inspect", "--data", "synthetic-masks"], "--sheet", "no/s.png"),
    ] {
        folder.refuses(&[command, &[flag, path]].concat(), &[&format!("{flag} {path}: ")]);
    }
}

fn walk(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries.flat_map(|path| if path.is_dir() { walk(&path) } else { vec![path] }).collect()
}

/// Two pairs of 4×2 pixels to learn from and one to judge by, in ADE20K's layout, whose masks hold 1 and 2.
fn scenes(folder: &Folder) {
    for (part, name) in [("training", "a"), ("training", "b"), ("validation", "c")] {
        for kind in ["images", "annotations"] {
            fs::create_dir_all(folder.0.join(format!("ade/{kind}/{part}"))).unwrap();
        }
        let image = folder.0.join(format!("ade/images/{part}/{name}.png"));
        save_mask(&[0, 1, 2, 3, 4, 5, 6, 7], (4, 2), &image).unwrap();
        let mask = folder.0.join(format!("ade/annotations/{part}/{name}.png"));
        save_mask(&[1, 1, 1, 1, 2, 2, 2, 2], (4, 2), &mask).unwrap();
    }
}

/// What a model for pixels can't be trained on, judged by or started from.
#[test]
fn segmentation_that_cannot_be_is_refused() {
    let folder = Folder::new("segmentation");
    scenes(&folder);
    let small =
        ["--model", "swinv2-nano/w8+upernet", "--image-size", "32", "--batch-size", "2", "--steps", "1"];
    let train = |more: &[&'static str]| -> Vec<&str> { [&["train"], &small[..], more].concat() };
    let ade = train(&["--data", "ade20k:ade"]);
    let mask = folder.0.join("ade/annotations/training/a.png");
    let replace = |labels: &[u8], size| {
        fs::remove_file(&mask).unwrap();
        save_mask(labels, size, &mask).unwrap();
    };
    replace(&[1; 8], (2, 4));
    folder.refuses(&ade, &["annotations/training/a.png", "2×4", "images/training/a.png", "4×2"]);
    replace(&[1, 1, 1, 1, 151, 1, 1, 1], (4, 2));
    folder.refuses(&ade, &["annotations/training/a.png", "label 151 at column 0, row 1", "150 classes"]);
    fs::remove_file(&mask).unwrap();
    folder.refuses(&ade, &["images/training/a.png: has no mask", "annotations/training/a.png"]);
    let gaps = [&ade[..], &["--skip-bad-images"]].concat();
    folder.refuses(&gaps, &["a whole batch of 2, which batch norm needs, can't be made of 1 image"]);

    let tiny = ["train", "--model", "swinv2-nano/w8+upernet", "--image-size", "16"];
    folder.refuses(&tiny, &["swinv2-nano/w8: the 16×16 image has 4×4 tokens, fewer than one window of 8×8"]);
    let unlike = ["--model", "vit-nano/8", "--data", "ade20k:ade"];
    folder.refuses(
        &[&["train"], &unlike[..]].concat(),
        &["--data ade20k:ade", "--model vit-nano/8 has one class for each image"],
    );
    folder.refuses(
        &["train", "--task", "segment", "--model", "vit-nano/8"],
        &["--model vit-nano/8", "vit-nano/8+linear"],
    );
    folder.refuses(
        &["train", "--task", "classify", "--data", "synthetic-masks"],
        &["--data synthetic-masks", "--task is classify"],
    );
    folder.refuses(
        &["train", "--model", "vit-nano/8+upernet"],
        &["vit-nano/8+upernet: UPerNet reads four stages"],
    );
    folder.refuses(&train(&["--mixup", "0.5"]), &["--mixup 0.5"]);
    folder.refuses(&train(&["--skip-bad-images"]), &["--skip-bad-images", "batch norm"]);

    let run = ["--train-samples", "4", "--test-samples", "2", "--out", "run"];
    folder.works(&train(&run));
    folder.works(&[
        "train",
        "--model",
        "vit-nano/8",
        "--batch-size",
        "4",
        "--steps",
        "1",
        "--train-samples",
        "4",
        "--test-samples",
        "2",
        "--out",
        "images",
    ]);
    folder
        .refuses(&["classify", "a.jpg", "--weights", "run"], &["its task is segment; use `vitesse segment`"]);
    folder.refuses(
        &["segment", "a.jpg", "--weights", "images"],
        &["its task is classify; use `vitesse classify`"],
    );
    folder.refuses(&["segment", "missing.jpg", "--weights", "run"], &["missing.jpg"]);
    folder.refuses(&["eval", "--weights", "run", "--logits", "l.safetensors"], &["--logits", "--masks"]);
    folder.refuses(&["eval", "--weights", "images", "--masks", "m"], &["--masks"]);
    folder.refuses(&["eval", "--weights", "run", "--data", "synthetic"], &["--data synthetic", "segment"]);
    folder.refuses(
        &["eval", "--weights", "run", "--data", "ade20k:ade"],
        &["images/training/a.png: has no mask"],
    );
    folder.refuses(&["export", "run", "tv.safetensors", "--to", "torchvision"], &["has no torchvision form"]);
}

#[test]
fn masks_that_do_not_fit_are_named() {
    let folder = Folder::new("masks");
    scenes(&folder);
    let inspect = ["data", "inspect", "--data", "ade20k:ade"];
    let skipping = [&inspect[..], &["--skip-bad-images"]].concat();
    let shown = folder.works(&[&inspect[..], &["--augment", "strong", "--sheet", "sheet.png"]].concat());
    assert!(
        shown.contains("train: 2 images with masks, 150 classes") && shown.contains("building"),
        "{shown}"
    );
    assert!(folder.0.join("sheet.png").exists());

    let mask = folder.0.join("ade/annotations/training/a.png");
    let replace = |labels: &[u8], size| {
        fs::remove_file(&mask).unwrap();
        save_mask(labels, size, &mask).unwrap();
    };
    replace(&[1; 8], (2, 4));
    folder.refuses(&inspect, &["annotations/training/a.png", "2×4", "images/training/a.png", "4×2"]);
    replace(&[1, 1, 1, 1, 151, 1, 1, 1], (4, 2));
    folder.refuses(&inspect, &["annotations/training/a.png", "label 151 at column 0, row 1", "150 classes"]);
    assert!(folder.works(&skipping).contains("label 151"), "named, and left out");
    fs::remove_file(&mask).unwrap();
    folder.refuses(&inspect, &["images/training/a.png: has no mask", "annotations/training/a.png"]);
    assert!(folder.works(&skipping).contains("has no mask"));
    fs::remove_dir_all(folder.0.join("ade/images/validation")).unwrap();
    folder.refuses(&skipping, &["ade: no folder `images/validation`"]);

    let mixed = ["data", "inspect", "--data", "synthetic-masks", "--mixup", "0.5"];
    folder.refuses(&mixed, &["--mixup 0.5"]);
}
