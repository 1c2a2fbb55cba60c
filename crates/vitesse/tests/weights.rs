//! The same weights, however they are stored and under whatever names: `eval`, `classify`, `segment` and `export` agree on what they
//! are, and start from what they say about themselves.

mod common;

use common::{Folder, VITESSE, scenes, text};
use formats::tensors::{self, Entry, Reader};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

#[path = "weights/exchange.rs"]
mod exchange;

const IMAGES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../data/tests/fixtures/images");

/// In the order in which they are evaluated.
const VALIDATION: [&str; 3] = ["photos/val/cat/a.jpg", "photos/val/cat/b.png", "photos/val/dog/a.jpg"];

/// Two classes of images of several sizes, none of them square.
fn photos(folder: &Folder) {
    let put = |path: &str, image: &str| {
        let path = folder.0.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::copy(Path::new(IMAGES).join(image), path).unwrap();
    };
    for class in ["cat", "dog"] {
        for (i, image) in ["rgb.jpg", "420.jpg", "422.jpg"].iter().enumerate() {
            put(&format!("photos/train/{class}/{i}.jpg"), image);
        }
    }
    for (path, image) in VALIDATION.into_iter().zip(["422.jpg", "rgb.png", "420.jpg"]) {
        put(path, image);
    }
}

fn words(line: &str) -> Vec<&str> {
    line.split_whitespace().collect()
}

fn json(folder: &Folder, line: &str) -> Value {
    let output = folder.run(&words(line));
    serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{line}: {error}: {}", text(&output)))
}

type Logits = (Vec<usize>, Vec<f32>);
type Tensors = BTreeMap<String, Logits>;

fn read(path: &Path) -> Tensors {
    let mut tensors = Tensors::new();
    let take = |name, shape, values| {
        tensors.insert(name, (shape, values));
    };
    Reader::open(path).unwrap().each(take).unwrap();
    tensors
}

/// The file as another library would have written it: tensors alone, under its names.
fn as_others_write(folder: &Folder, from: &str, to: &str, name: impl Fn(&str) -> String) {
    let tensors = read(&folder.0.join(from));
    let names: Vec<String> = tensors.keys().map(|own| name(own)).collect();
    let entries: Vec<Entry<'_>> = (names.iter().zip(tensors.values()))
        .map(|(name, (shape, values))| Entry { name, shape, values })
        .collect();
    let metadata = BTreeMap::from([("format".to_string(), "pt".to_string())]);
    tensors::write(&folder.0.join(to), &entries, &metadata).unwrap();
}

/// From the names in transformers' files of a ViT to those it has in memory.
fn in_memory(name: &str) -> String {
    const PARTS: [(&str, &str); 7] = [
        ("vit.encoder.layer.", "vit.layers."),
        (".attention.attention.query.", ".attention.q_proj."),
        (".attention.attention.key.", ".attention.k_proj."),
        (".attention.attention.value.", ".attention.v_proj."),
        (".attention.output.dense.", ".attention.o_proj."),
        (".intermediate.dense.", ".mlp.fc1."),
        (".output.dense.", ".mlp.fc2."),
    ];
    PARTS.iter().fold(name.to_string(), |name, (file, memory)| name.replace(file, memory))
}

/// Weights, and the flags that say what they don't say by themselves.
struct Case {
    weights: &'static str,
    flags: String,
    /// Flag: they know their classes.
    named: bool,
}

fn own(weights: &'static str, flags: &str) -> Case {
    Case { weights, flags: flags.to_string(), named: true }
}

fn foreign(weights: &'static str, flags: &str) -> Case {
    Case { weights, flags: flags.to_string(), named: false }
}

/// What an evaluation comes to, and how it came about; but for where the data is said to lie, and for the loss.
fn evaluation(report: &Value) -> Value {
    let mut report = report.clone();
    for key in ["weights", "data", "classes", "eval_loss"] {
        report.as_object_mut().unwrap().remove(key);
    }
    report
}

/// Losses are summed batch by batch, so that another batch size rounds them otherwise.
fn assert_alike(found: &Value, expected: &Value, what: &str) {
    assert_eq!(evaluation(found), evaluation(expected), "{what}");
    let [found, expected] = [found, expected].map(|report| report["eval_loss"].as_f64().unwrap());
    assert!((found - expected).abs() <= 1e-6 * expected, "{what}: loss {found}, not {expected}");
}

/// To the bit, or where images were computed in batches of another size, but for rounding.
fn assert_same_logits(found: &Logits, expected: &Logits, exact: bool, what: &str) {
    let off = found.1.iter().zip(&expected.1).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    let good = if exact { found == expected } else { found.0 == expected.0 && off < 1e-6 };
    assert!(good, "{what}: {found:?}, not {expected:?}");
}

fn softmax(logits: &[f32]) -> Vec<f64> {
    let largest = logits.iter().copied().fold(f32::MIN, f32::max);
    let powers: Vec<f64> = logits.iter().map(|x| f64::from(x - largest).exp()).collect();
    let sum: f64 = powers.iter().sum();
    powers.iter().map(|power| power / sum).collect()
}

#[test]
fn images_are_evaluated_and_classified_alike_whatever_holds_the_weights() {
    let folder = Folder::new("weights-images");
    photos(&folder);
    let run = "--model vit-nano/8 --image-size 32 --crop resized --mean 0.4,0.5,0.6 --std 0.2,0.25,0.3 --interpolation bicubic";
    folder.run(&words(&format!(
        "train --data folder:photos {run} --batch-size 3 --steps 4 --lr 0.01 --eval-every 9 --out run"
    )));
    for names in ["timm", "torchvision", "huggingface"] {
        folder.run(&words(&format!("export run {names}.safetensors --to {names}")));
        let plain = format!("{names}-plain.safetensors");
        as_others_write(&folder, &format!("{names}.safetensors"), &plain, str::to_string);
    }
    as_others_write(&folder, "huggingface.safetensors", "memory-plain.safetensors", in_memory);
    let told = "--mean 0.4,0.5,0.6 --std 0.2,0.25,0.3 --interpolation bicubic --eval-resize 37";
    let cases = [
        own("run", ""),
        own("run", "--model vit-nano/8"),
        own("run", "--image-size 32 --classes 2"),
        own("run", "--eval-resize 37"),
        own("run", "--batch-size 1"),
        own("run/checkpoints/best.safetensors", ""),
        own("run/weights.safetensors", "--model vit-nano/8"),
        own("timm.safetensors", ""),
        own("torchvision.safetensors", "--model vit-nano/8"),
        own("huggingface.safetensors", "--mean 0.4,0.5,0.6"),
        foreign("timm-plain.safetensors", told),
        foreign(
            "torchvision-plain.safetensors",
            &format!("{told} --model vit-nano/8 --image-size 32 --classes 2"),
        ),
        foreign("huggingface-plain.safetensors", told),
        foreign("memory-plain.safetensors", told),
    ];
    let logits = |name: &str| read(&folder.0.join(name)).remove("logits").unwrap();
    let mut expected = None;
    for (number, Case { weights, flags, named }) in cases.iter().enumerate() {
        let (data, exact) = match named {
            true => ("", !flags.contains("--batch-size")),
            false => ("--data folder:photos", false),
        };
        let dump = format!("{number}.safetensors");
        let report =
            json(&folder, &format!("eval --weights {weights} {flags} {data} --logits {dump} --json"));
        let (photos, found) = (folder.0.join("photos"), logits(&dump));
        let place = if *named { format!("folder:{}", photos.display()) } else { "folder:photos".into() };
        assert_eq!(report["data"], place, "{weights} {flags}");
        let expected = expected.get_or_insert_with(|| (report.clone(), found.clone()));
        assert_alike(&report, &expected.0, &format!("{weights} {flags}"));
        assert_same_logits(&found, &expected.1, exact, &format!("{weights} {flags}"));

        let line = format!("classify {} --weights {weights} {flags} --json --top 2", VALIDATION.join(" "));
        let said = String::from_utf8(folder.run(&words(&line)).stdout).unwrap();
        assert_eq!(said.lines().count(), VALIDATION.len());
        for (said, logits) in said.lines().zip(found.1.chunks_exact(2)) {
            let said: Value = serde_json::from_str(said).unwrap();
            for (class, probability) in softmax(logits).into_iter().enumerate() {
                let name = if *named { ["cat", "dog"][class].to_string() } else { format!("class {class}") };
                let entry = said["classes"].as_array().unwrap().iter().find(|entry| entry["class"] == name);
                let found =
                    entry.unwrap_or_else(|| panic!("{line}: no {name} in {said}"))["probability"].clone();
                assert!(
                    (found.as_f64().unwrap() - probability).abs() < 1e-6,
                    "{line}: {said}, not {probability}"
                );
            }
        }

        // What is exported says the rest by itself.
        let again = format!("again-{number}.safetensors");
        folder.run(&words(&format!(
            "export {weights} {again} {} --to huggingface",
            flags.replace("--batch-size 1", "")
        )));
        let dump = format!("again-{number}-logits.safetensors");
        let again = json(&folder, &format!("eval --weights {again} {data} --logits {dump} --json"));
        assert_alike(&again, &expected.0, &format!("exported {weights} {flags}"));
        assert_same_logits(&logits(&dump), &expected.1, *named, &format!("exported {weights} {flags}"));
    }
}

#[test]
fn pixels_are_evaluated_and_shown_alike_whatever_holds_the_weights() {
    let folder = Folder::new("weights-pixels");
    // Windows overlap.
    scenes(&folder, (56, 40), [8, 3]);
    let run = "--model swinv2-nano/w8+upernet --image-size 32 --mean 0.1 --std 0.2 --eval-mode slide --eval-stride 24";
    folder
        .run(&words(&format!("train --data masks:set {run} --batch-size 4 --steps 12 --lr 2e-3 --out run")));
    for names in ["timm", "huggingface"] {
        folder.run(&words(&format!("export run {names}.safetensors --to {names}")));
        let plain = format!("{names}-plain.safetensors");
        as_others_write(&folder, &format!("{names}.safetensors"), &plain, str::to_string);
    }
    let cases = [
        own("run", ""),
        own("run", "--model swinv2-nano/w8+upernet"),
        own("run", "--eval-mode slide"),
        own("run", "--eval-stride 24"),
        own("run/checkpoints/best.safetensors", "--mean 0.1"),
        own("timm.safetensors", "--image-size 32"),
        own("huggingface.safetensors", ""),
        foreign("timm-plain.safetensors", run),
        foreign("huggingface-plain.safetensors", run),
    ];
    let masks = |place: &str, kind: &str| -> Vec<Vec<u8>> {
        (0..3).map(|i| fs::read(folder.0.join(format!("{place}/{i}{kind}.png"))).unwrap()).collect()
    };
    let mut expected = None;
    for (number, Case { weights, flags, named }) in cases.iter().enumerate() {
        let data = if *named { "" } else { "--data masks:set" };
        let line = |place: &str| format!("--masks {place} --json {data}");
        let place = format!("eval-{number}");
        let report = json(&folder, &format!("eval --weights {weights} {flags} {}", line(&place)));
        let found = masks(&place, "");
        let expected = expected.get_or_insert_with(|| (report.clone(), found.clone()));
        assert_alike(&report, &expected.0, &format!("{weights} {flags}"));
        assert!(found == expected.1, "{weights} {flags}");

        let images = "set/val/images/0.png set/val/images/1.png set/val/images/2.png";
        let said = text(
            &folder
                .run(&words(&format!("segment {images} --weights {weights} {flags} --out shown-{number}"))),
        );
        assert!(masks(&format!("shown-{number}"), ".mask") == expected.1, "{weights} {flags}");
        assert_eq!(said.contains("ground"), *named, "{said}");

        let again = format!("again-{number}.safetensors");
        folder.run(&words(&format!("export {weights} {again} {flags} --to huggingface")));
        let place = format!("again-{number}");
        let report = json(&folder, &format!("eval --weights {again} {}", line(&place)));
        assert_alike(&report, &expected.0, &format!("exported {weights} {flags}"));
        assert!(masks(&place, "") == expected.1, "exported {weights} {flags}");
    }
    assert_eq!(expected.unwrap().0["preprocessing"]["eval_stride"], 24);
}

/// Whole images are larger than those of training; what is exported keeps the windows of training.
#[test]
fn a_size_that_is_typed_leaves_windows_as_they_were_trained() {
    let folder = Folder::new("weights-size");
    let run = "--model swinv2-nano/w8 --image-size 32 --train-samples 8 --test-samples 6 --batch-size 4 --steps 2 --lr 0.01";
    folder.run(&words(&format!("train {run} --out run")));
    let larger = json(&folder, "eval --weights run --image-size 64 --json");
    assert_eq!(
        (&larger["image_size"], &larger["images"]),
        (&serde_json::json!([64, 64]), &serde_json::json!(6))
    );
    folder.run(&words("export run larger.safetensors --image-size 64"));
    let again = json(&folder, "eval --weights larger.safetensors --json");
    assert_alike(&again, &larger, "exported at that size");
    as_others_write(&folder, "larger.safetensors", "plain.safetensors", str::to_string);
    let anew = json(
        &folder,
        "eval --weights plain.safetensors --model swinv2-nano/w8 --image-size 64 --data synthetic --test-samples 6 --json --mean 0.5 --std 0.5",
    );
    assert_ne!(anew["eval_loss"], larger["eval_loss"], "a model of that size has other windows");
}

/// As timm has DINOv2's: known by their tensors, to fine-tune at another size on classes and on pixels.
#[test]
fn a_vit_with_registers_is_fine_tuned_at_another_size_on_classes_and_on_pixels() {
    let folder = Folder::new("weights-registers");
    let model = "vit_nano_patch14_reg4_dinov2";
    let few = "--train-samples 8 --test-samples 6 --batch-size 4 --steps 2 --lr 0.01 --mean 0.5 --std 0.5";
    folder.run(&words(&format!("train --model {model} --image-size 28 {few} --out run")));
    let own = json(&folder, "eval --weights run --json");
    folder.run(&words("export run timm.safetensors"));
    let tensors = read(&folder.0.join("timm.safetensors"));
    let shape = |name: &str| tensors[name].0.clone();
    assert_eq!((shape("reg_token"), shape("pos_embed")), (vec![1, 4, 96], vec![1, 4, 96]));
    assert_eq!(shape("blocks.3.ls2.gamma"), [96]);

    as_others_write(&folder, "timm.safetensors", "plain.safetensors", str::to_string);
    let told = "--data synthetic --test-samples 6 --batch-size 4 --mean 0.5 --std 0.5";
    let plain = json(&folder, &format!("eval --weights plain.safetensors {told} --json"));
    assert_eq!(plain["model"], model);
    assert_alike(&plain, &own, "by tensors alone");

    let start = "--image-size 56 --init plain.safetensors --new-head";
    folder.run(&words(&format!("train --model {model} {start} {few} --classes 12 --out classes")));
    assert_eq!(read(&folder.0.join("classes/weights.safetensors"))["pos_embed"].0, [1, 16, 96]);
    folder.run(&words(&format!("train --model {model}+linear {start} {few} --out pixels")));
    let pixels = json(&folder, "eval --weights pixels --json");
    assert!(pixels["eval_miou"].as_f64().is_some(), "{pixels}");
    refuses(
        &folder,
        "export run hf.safetensors --to huggingface",
        &["a ViT with LayerScale", "export it as timm"],
    );
}

#[test]
fn a_run_is_evaluated_and_goes_on_from_any_folder_and_with_its_data_in_another() {
    let folder = Folder::new("weights-elsewhere");
    photos(&folder);
    let run = "--model vit-nano/8 --image-size 32 --batch-size 3 --checkpoint-every 2";
    folder.run(&words(&format!("train --data folder:photos {run} --steps 4 --out runs/first")));
    let here = json(&folder, "eval --weights runs/first --json");
    let elsewhere = Folder::new("weights-elsewhere-cwd");
    let first = folder.0.join("runs/first").display().to_string();
    let there = json(&elsewhere, &format!("eval --weights {first} --json"));
    assert_eq!((evaluation(&there), &there["data"]), (evaluation(&here), &here["data"]));
    folder.run(&words("export runs/first runs/first.safetensors"));

    // Both together, and what was exported beside them.
    let moved = Folder::new("weights-moved");
    for part in ["photos", "runs"] {
        fs::rename(folder.0.join(part), moved.0.join(part)).unwrap();
    }
    for weights in ["runs/first", "runs/first/checkpoints/best.safetensors", "runs/first.safetensors"] {
        let path = moved.0.join(weights).display().to_string();
        let there = json(&elsewhere, &format!("eval --weights {path} --json"));
        let place = fs::canonicalize(moved.0.join("photos")).unwrap();
        assert_eq!(there["data"], format!("folder:{}", place.display()), "{weights}");
        assert_eq!(evaluation(&there), evaluation(&here), "{weights}");
    }
    fs::remove_file(moved.0.join("runs/first/checkpoints/step-00000004.safetensors")).unwrap();
    let resume = moved.0.join("runs/first").display().to_string();
    let said = text(&elsewhere.run(&words(&format!("train --resume {resume}"))));
    assert!(said.contains("going on after step 2"), "{said}");

    // Without its data, the run says where it looked.
    fs::rename(moved.0.join("photos"), moved.0.join("pictures")).unwrap();
    for line in [format!("eval --weights {resume}"), format!("train --resume {resume}")] {
        let output = elsewhere.start(&words(&line)).wait_with_output().unwrap();
        let said = text(&output);
        assert!(!output.status.success() && said.contains("nor at ") && said.contains("--data"), "{said}");
        assert_eq!(said.trim_end().lines().count(), 1, "{said}");
    }
    let named = format!("eval --weights {resume} --data folder:{}/pictures --json", moved.0.display());
    assert_eq!(evaluation(&json(&elsewhere, &named)), evaluation(&here));
}

#[test]
fn an_evaluation_says_what_on_what_and_how() {
    let folder = Folder::new("weights-says");
    photos(&folder);
    let run = "--model vit-nano/8 --image-size 32 --crop resized --mean 0.4,0.5,0.6 --batch-size 3 --steps 1";
    folder.run(&words(&format!("train --data folder:photos {run} --out run")));
    let said = text(&folder.run(&words("eval --weights run --model vit-nano/8")));
    let photos = format!("  data           folder:{}, 3 images", folder.0.join("photos").display());
    for line in [
        "run/checkpoints/best.safetensors",
        "  model          vit-nano/8, 32×32 px, 2 classes",
        &photos,
        "  preprocessing  resized to 37 px, middle cut out, bilinear; mean 0.4,0.5,0.6, std 0.5",
    ] {
        assert!(said.lines().any(|said| said == line), "no '{line}' in: {said}");
    }
    folder.run(&words("export run timm.safetensors"));
    as_others_write(&folder, "timm.safetensors", "plain.safetensors", str::to_string);
    let said = text(&folder.run(&words("eval --weights plain.safetensors --data folder:photos")));
    assert!(said.contains("resized, bilinear; mean 0.5, std 0.5") && said.contains("assumed"), "{said}");
}

/// One line on standard error with all of `culprits` in it, and nothing written.
fn refuses(folder: &Folder, line: &str, culprits: &[&str]) {
    let before = fs::read_dir(&folder.0).unwrap().count();
    let output = folder.command(VITESSE, &words(line)).output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{line}: {error}");
    assert!(culprits.iter().all(|culprit| error.contains(culprit)), "{line}: {error}");
    assert_eq!(error.trim_end().lines().count(), 1, "{line}: {error}");
    assert_eq!(fs::read_dir(&folder.0).unwrap().count(), before, "{line} wrote something");
}

#[test]
fn what_cannot_be_is_refused() {
    let folder = Folder::new("weights-refused");
    photos(&folder);
    folder.run(&words("train --model vit-nano/8 --train-samples 8 --test-samples 4 --steps 1 --out run"));
    folder
        .run(&words("train --model swinv2-nano/w8 --train-samples 8 --test-samples 4 --steps 1 --out swin"));
    for ending in ["ckpt", "pth", "bin", "txt"] {
        refuses(
            &folder,
            &format!("export run x.{ending}"),
            &[&format!("x.{ending}"), ".safetensors", ".onnx"],
        );
    }
    refuses(&folder, "export run x", &["x: ", ".safetensors"]);
    refuses(&folder, "eval --weights run --logits x.npy", &["--logits x.npy", ".safetensors"]);
    refuses(&folder, "eval --weights run --confusion x.json", &["--confusion x.json", ".csv, .png, .svg"]);
    refuses(&folder, "classify photos/val/cat/a.jpg --weights run --grid x.jpg", &["--grid x.jpg", ".png"]);
    refuses(&folder, "data inspect --sheet x.jpg", &["--sheet x.jpg", ".png"]);

    folder.run(&words("export run plain-vit.safetensors"));
    folder.run(&words("export swin plain-swin.safetensors"));
    for name in ["plain-vit.safetensors", "plain-swin.safetensors"] {
        as_others_write(&folder, name, name, str::to_string);
    }
    let data = "--data folder:photos";
    refuses(
        &folder,
        "eval --weights plain-vit.safetensors",
        &["--data", "plain-vit.safetensors", "name a set"],
    );
    refuses(
        &folder,
        &format!("eval --weights plain-swin.safetensors {data}"),
        &["--model", "plain-swin.safetensors", "swinv2-nano/wWINDOW"],
    );
    refuses(&folder, "eval --weights run --data synthetic-masks", &["--data synthetic-masks", "vit-nano/8"]);
    refuses(&folder, "eval --weights run --classes 3", &["weights are of another model"]);
    let output = folder.command(VITESSE, &words("eval --weights run --classes 3")).output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(error.matches("weights are of another model").count(), 1, "{error}");
    refuses(&folder, "eval --weights run --model vit-nano/4", &["weights are of another model"]);
    refuses(&folder, "segment photos/val/cat/a.jpg --weights run", &["vit-nano/8", "vitesse classify"]);
    refuses(&folder, "eval --weights run --eval-mode slide", &["--eval-mode slide", "masks"]);
}

/// Whatever a help text offers is taken.
#[test]
fn help_offers_nothing_that_is_refused() {
    let folder = Folder::new("weights-help");
    for command in ["eval", "classify", "segment", "bench"] {
        let help = text(&folder.run(&[command, "--help"]));
        assert!(help.contains("--precision") && !help.contains("fp64"), "{command}: {help}");
        let output = folder.start(&[command, "--precision", "fp64"]).wait_with_output().unwrap();
        assert!(!output.status.success() && text(&output).contains("is none of fp32, tf32, bf16, fp16"));
    }
    for (command, flags) in [
        ("eval", "--task --train-samples --cache --channels --pool --epochs"),
        ("classify", "--task --seed --data --eval-mode --channels --pool"),
        ("segment", "--task --seed --data --eval-resize --interpolation --channels --pool"),
        ("export", "--task --seed --data --batch-size --threads --device --precision --channels --pool"),
    ] {
        let help = text(&folder.run(&[command, "--help"]));
        for flag in words(flags) {
            assert!(!help.contains(&format!("{flag} ")), "{command} offers {flag}, which changes nothing");
        }
    }
}
