//! Models that tell pixels apart, from the command line: they learn, go on, are judged and shown; many ranks do what one does.

mod common;

use common::{Folder, is_time, largest_difference, scenes, text};
use data::decode::decode_mask;
use formats::tensors::Reader;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

const SMALL: &str = "--model swinv2-nano/w8+upernet --image-size 32 --threads 2 --workers 1 --seed 3";

fn words(line: &str) -> Vec<&str> {
    line.split_whitespace().collect()
}

fn json(folder: &Folder, line: &str) -> Value {
    let output = folder.run(&words(line));
    serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{line}: {error}: {}", text(&output)))
}

fn mask(path: &Path) -> Vec<u8> {
    let mut labels = vec![];
    decode_mask(&fs::read(path).unwrap(), path, &mut labels).unwrap();
    labels
}

/// Mean IoU over classes that occur, class by class and pixel by pixel.
fn mean_iou(pairs: &[(Vec<u8>, Vec<u8>)], classes: u8) -> f64 {
    let pixels = || pairs.iter().flat_map(|(truth, found)| truth.iter().copied().zip(found.iter().copied()));
    let number =
        |of: &dyn Fn(u8, u8) -> bool| pixels().filter(|(t, f)| *t != 255 && of(*t, *f)).count() as f64;
    let iou = (0..classes).map(|c| (number(&|t, f| t == c && f == c), number(&|t, f| t == c || f == c)));
    let iou: Vec<f64> = iou.filter(|(_, either)| *either > 0.0).map(|(both, either)| both / either).collect();
    iou.iter().sum::<f64>() / iou.len() as f64
}

/// From training over evaluation, whole and through windows, to pictures and other libraries' names.
#[test]
fn a_model_learns_is_judged_and_shown() {
    let folder = Folder::new("segmentation-learns");
    scenes(&folder, (40, 24), [24, 6]);
    let run = "--augment standard --batch-size 4 --steps 60 --lr 2e-3 --eval-every 30it --out run --json";
    let trained = json(&folder, &format!("train --data masks:set {SMALL} {run}"));
    let miou = trained["eval_miou"].as_f64().unwrap();
    // The ground alone is right everywhere in a model that has learned nothing: a third of its own IoU.
    assert!(miou > 0.6, "{trained}");
    assert!(trained["eval_pixel_accuracy"].as_f64().unwrap() > 0.8 && trained["best_miou"].is_f64());
    let lines = fs::read_to_string(folder.0.join("run/metrics.jsonl")).unwrap();
    let judged: Vec<Value> =
        lines.lines().filter(|l| l.contains("eval_miou")).map(|l| serde_json::from_str(l).unwrap()).collect();
    assert_eq!(judged.iter().map(|l| l["step"].as_u64().unwrap()).collect::<Vec<_>>(), [29, 59]);
    assert_eq!(judged[1]["eval_miou"].as_f64(), Some(miou));
    let classes = fs::read_to_string(folder.0.join("run/classes.jsonl")).unwrap();
    let last: Value = serde_json::from_str(classes.lines().last().unwrap()).unwrap();
    assert_eq!(
        (last["iou"].as_array().unwrap(), classes.lines().count()),
        (trained["eval_iou"].as_array().unwrap(), 2)
    );

    for (mode, windows) in [("whole", ""), ("slide", "--eval-stride 16")] {
        let weights = "eval --weights run/weights.safetensors --json";
        let judged = json(&folder, &format!("{weights} --eval-mode {mode} {windows} --masks {mode}"));
        let pairs: Vec<(Vec<u8>, Vec<u8>)> = (0..6)
            .map(|i| {
                let truth = mask(&folder.0.join(format!("set/val/masks/{i}.png")));
                (truth, mask(&folder.0.join(format!("{mode}/{i}.png"))))
            })
            .collect();
        let found = judged["eval_miou"].as_f64().unwrap();
        assert!((found - mean_iou(&pairs, 3)).abs() < 1e-12, "{mode}: {found}, not {}", mean_iou(&pairs, 3));
        assert!(mode != "whole" || (found - miou).abs() < 1e-12, "the weights are those that were scored");
    }

    let said = text(
        &folder.run(&words("segment set/val/images/2.png --weights run/weights.safetensors --out shown")),
    );
    assert!(said.contains("ground") && said.contains("shown/2.overlay.png"), "{said}");
    assert_eq!(mask(&folder.0.join("shown/2.mask.png")), mask(&folder.0.join("whole/2.png")));
    let mut overlay = data::Image::default();
    let path = folder.0.join("shown/2.overlay.png");
    data::decode::decode(&fs::read(&path).unwrap(), &path, 3, &mut overlay).unwrap();
    assert!(overlay.width > 6 * 40 + 60, "enlarged, with a legend beside it");
    assert!(!folder.0.join("2.mask.png").exists());

    // transformers' names, and back: the model is told, since the file doesn't say.
    folder.run(&words("export run/weights.safetensors hf.safetensors --to huggingface"));
    let named = "--model swinv2-nano/w8+upernet --image-size 32 --classes 3 --data masks:set --threads 2";
    let again = json(&folder, &format!("eval --weights hf.safetensors {named} --json"));
    assert_eq!(again["eval_miou"].as_f64(), Some(miou));
}

/// A run that was interrupted after a checkpoint leaves what an uninterrupted one leaves: states of batch norms are among it.
#[test]
fn a_run_goes_on_as_if_it_had_not_stopped() {
    let folder = Folder::new("segmentation-resumes");
    let run = "--train-samples 36 --test-samples 5 --batch-size 4 --accumulate 2 --steps 8 --drop-path 0.2 --ema 0.9";
    folder.run(&words(&format!(
        "train --task segment {SMALL} {run} --eval-every 3it --checkpoint-every 4 --keep 9 --out run"
    )));
    let results = || {
        let lines = fs::read_to_string(folder.0.join("run/metrics.jsonl")).unwrap();
        let timeless = |line: &str| {
            let mut line: serde_json::Map<String, Value> = serde_json::from_str(line).unwrap();
            line.retain(|key, _| !is_time(key));
            Value::Object(line).to_string()
        };
        let lines: Vec<String> = lines.lines().map(timeless).collect();
        let classes = fs::read_to_string(folder.0.join("run/classes.jsonl")).unwrap();
        (lines, classes, states(&folder, 8))
    };
    let whole = results();
    assert_eq!(whole.1.lines().count(), 3, "after 3 and 6 steps, and at the end");
    for gone in ["step-00000006", "step-00000008", "best"] {
        let _ = fs::remove_file(folder.0.join(format!("run/checkpoints/{gone}.safetensors")));
    }
    fs::remove_file(folder.0.join("run/checkpoints/step-00000003.safetensors")).unwrap();
    let said = text(&folder.run(&words("train --resume run")));
    assert!(said.contains("going on after step 4"), "{said}");
    assert!(whole == results(), "not as it was");
    // Moments are taken over the images of a micro-step: they can't be divided otherwise.
    let refused =
        folder.start(&words("train --resume run --batch-size 8 --accumulate 1")).wait_with_output().unwrap();
    assert!(
        !refused.status.success() && text(&refused).contains("images of a micro-step is 8, was 4"),
        "{}",
        text(&refused)
    );
}

/// A checkpoint's tensors.
fn states(folder: &Folder, step: u64) -> BTreeMap<String, Vec<f64>> {
    let path = folder.0.join(format!("run/checkpoints/step-{step:08}.safetensors"));
    let mut states = BTreeMap::new();
    Reader::open(&path).unwrap().each(|name, _, values: Vec<f64>| drop(states.insert(name, values))).unwrap();
    states
}

/// Batch norms take their moments over all ranks: in f64 the norm of every weight and running moment after twenty steps is within
/// 1e-9 of one rank's; in f32 every loss within 1e-4, at the published learning rate (Adam turns rounding into steps as long as the rate).
/// Counts of pixels are the same to the last.
#[test]
fn many_ranks_do_what_one_does() {
    let run = |ranks: usize, precision: &str, lr: &str| {
        let folder = Folder::new(&format!("segmentation-{ranks}-{precision}"));
        let batch = 8 / ranks;
        let data = "--train-samples 50 --test-samples 7 --eval-every 100";
        folder.run(&words(&format!(
            "train --model swinv2-nano/w8+upernet --image-size 32 --seed 3 --threads 1 --workers 1 {data} --drop-path 0.2 \
             --batch-size {batch} --ranks {ranks} --precision {precision} --lr {lr} --steps 20 --out run"
        )));
        folder
    };
    let norms = |folder: &Folder| -> Vec<f64> {
        let kept =
            states(folder, 20).into_iter().filter(|(name, _)| !name.ends_with(".m") && !name.ends_with(".v"));
        kept.map(|(_, values)| values.iter().map(|x| x * x).sum::<f64>().sqrt()).collect()
    };
    let alone = run(1, "fp64", "1e-3");
    for ranks in [2, 4] {
        let many = run(ranks, "fp64", "1e-3");
        let apart = largest_difference(&norms(&many), &norms(&alone));
        println!("{ranks} ranks: norms differ by {apart:.1e}");
        assert!(apart < 1e-9, "{ranks} ranks: norms differ by {apart:e}");
        let classes = |folder: &Folder| fs::read_to_string(folder.0.join("run/classes.jsonl")).unwrap();
        assert_eq!(classes(&many), classes(&alone), "{ranks} ranks count other pixels");
    }
    let alone = run(1, "fp32", "6e-5");
    for ranks in [2, 4] {
        let apart = largest_difference(&run(ranks, "fp32", "6e-5").losses("run"), &alone.losses("run"));
        println!("{ranks} ranks: losses differ by {apart:.1e}");
        assert!(apart < 1e-4, "{ranks} ranks: losses differ by {apart:e}");
    }
}

/// A ViT with a linear head has no batch norm: a last batch may be partial, and bad pairs may be left out.
#[test]
fn a_vit_for_pixels_leaves_out_what_cannot_be_read() {
    let folder = Folder::new("segmentation-vit");
    scenes(&folder, (40, 24), [24, 6]);
    fs::write(folder.0.join("set/train/masks/3.png"), b"no mask").unwrap();
    fs::remove_file(folder.0.join("set/train/masks/4.png")).unwrap();
    let run = "--data masks:set --model vit-nano/8+linear --image-size 32 --batch-size 10 --epochs 1 --threads 2 --skip-bad-images";
    let said = text(&folder.run(&words(&format!("train {run} --out run"))));
    assert!(
        said.contains("images/4.png: has no mask")
            && said.contains("left out, as they could not be read: 1 image"),
        "{said}"
    );
    assert!(said.contains("3/3") && said.contains("validation mean IoU"), "{said}");
    let judged = json(&folder, "eval --weights run --json --confusion counts.csv");
    assert_eq!(judged["images"], 6);
    assert!(
        fs::read_to_string(folder.0.join("counts.csv")).unwrap().starts_with("class,\"ground\",\"circle\"")
    );
    let refused = folder.start(&words("eval --weights run --eval-mode whole")).wait_with_output().unwrap();
    assert!(text(&refused).contains("--eval-mode whole: a ViT's positions"), "{}", text(&refused));
}

/// What a classifier has learned starts a model for pixels, in windows of the same size or carried over to others.
#[test]
fn a_classifiers_backbone_starts_a_model_for_pixels() {
    let folder = Folder::new("segmentation-backbone");
    let data = "--train-samples 16 --test-samples 8 --batch-size 8 --steps 1 --threads 2";
    folder.run(&words(&format!("train --model swinv2-nano/w8 --image-size 32 {data} --out run")));
    let start = |model: &str, more: &str| {
        let line = format!(
            "train --model swinv2-nano/{model}+upernet --image-size 64 --init run/weights.safetensors {data} {more}"
        );
        folder.start(&words(&line)).wait_with_output().unwrap()
    };
    let refused = |model: &str, more: &str, why: &str| {
        let output = start(model, more);
        let said = text(&output);
        assert!(
            output.status.code() == Some(1) && said.contains(why) && said.contains("weights.safetensors"),
            "{said}"
        );
        assert_eq!(said.trim_end().lines().count(), 1, "{said}");
    };
    refused("w8", "", "with --new-head its backbone is taken");
    refused(
        "w16",
        "--new-head",
        "windows of 8×8, this model's are for 16×16; a model named w8to16 carries them over",
    );
    for model in ["w8", "w8to16"] {
        let output = start(model, "--new-head");
        assert!(output.status.success(), "{}", text(&output));
    }
}
