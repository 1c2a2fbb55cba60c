//! Weights of others, and for others: ONNX, folders of Hugging Face, timm's names; and what an evaluation writes.

use super::*;

/// What the file computes is compared with onnxruntime by `scripts/onnx-check`.
#[test]
fn a_classifier_is_exported_as_onnx() {
    let folder = Folder::new("weights-onnx");
    for (model, flags) in [("vit-nano/8", ""), ("swinv2-nano/w8", "--image-size 64")] {
        let train = "--train-samples 8 --test-samples 4 --steps 1 --batch-size 4 --mean 0.25,0.5,0.75";
        let (run, file) = (model.replace('/', "-"), format!("{}.onnx", model.replace('/', "-")));
        folder.run(&words(&format!("train --model {model} {flags} {train} --out {run}")));
        let told = text(&folder.run(&words(&format!("export {run} {file}"))));
        assert!(told.contains("ONNX, opset 17: images (N,3,") && told.contains("logits (N,10))"), "{told}");
        let bytes = fs::read(folder.0.join(&file)).unwrap();
        let has = |text: &str| bytes.windows(text.len()).any(|window| window == text.as_bytes());
        let said = [model, "images", "logits", "0.25,0.5,0.75", "class_names", env!("CARGO_PKG_VERSION")];
        assert!(said.iter().all(|text| has(text)), "{model}");
        refuses(&folder, &format!("export {run} {file}"), &[&file, "exists already"]);
    }
    refuses(&folder, "export vit-nano-8 x.onnx --to timm", &["--to timm", "ONNX"]);
    folder.run(&words("train --task segment --train-samples 8 --test-samples 4 --steps 1 --out masks"));
    refuses(&folder, "export masks x.onnx", &["x.onnx", "classifiers", "swinv2-nano/w8+upernet"]);
}

/// A folder as transformers writes it: the weights under its names, and what they are in files beside them.
#[test]
fn a_folder_of_hugging_face_is_read_everywhere() {
    let folder = Folder::new("weights-hugging-face");
    let train = "--model vit-nano/8 --train-samples 8 --test-samples 4 --batch-size 4 --norm-eps 1e-12";
    folder.run(&words(&format!("train {train} --steps 2 --mean 0.4 --std 0.2 --out run")));
    folder.run(&words("export run named.safetensors --to huggingface"));
    fs::create_dir(folder.0.join("hub")).unwrap();
    as_others_write(&folder, "named.safetensors", "hub/model.safetensors", str::to_string);
    let config = r#"{"model_type": "vit", "image_size": 32, "patch_size": 8, "hidden_size": 96, "num_attention_heads": 3,
        "layer_norm_eps": 1e-12, "id2label": {"0": "a", "1": "b", "2": "c", "3": "d", "4": "e", "5": "f", "6": "g", "7": "h", "8": "i", "9": "j"}}"#;
    let prepared = r#"{"image_mean": [0.4, 0.4, 0.4], "image_std": [0.2, 0.2, 0.2], "resample": 2, "size": {"height": 32, "width": 32}}"#;
    fs::write(folder.0.join("hub/config.json"), config).unwrap();
    fs::write(folder.0.join("hub/preprocessor_config.json"), prepared).unwrap();
    let data = "--data synthetic --test-samples 4 --json";
    let [own, hub] = ["run", "hub"].map(|weights| json(&folder, &format!("eval --weights {weights} {data}")));
    for key in ["eval_loss", "image_size", "norm_eps", "preprocessing", "confusion"] {
        assert_eq!(hub[key], own[key], "{key}");
    }
    assert_eq!(hub["norm_eps"].as_f64(), Some(1e-12));
    assert_eq!(hub["told_by"], serde_json::json!(["config.json", "preprocessor_config.json"]));
    assert_eq!(hub["classes"][2]["class"], "c");
    let shown = text(&folder.run(&words("eval --weights hub --data synthetic --test-samples 4")));
    assert!(shown.contains("config.json, preprocessor_config.json; layer norms with 1e-12"), "{shown}");
    folder.run(&words("export hub again.safetensors"));
    folder.run(&words("export hub model.onnx"));
    folder.run(&words("export run own.safetensors"));
    let [again, own] = ["again", "own"].map(|name| read(&folder.0.join(format!("{name}.safetensors"))));
    assert!(again == own, "the same tensors");
    // Norms are those of the weights, or the line says how they would be.
    folder.run(&words(&format!("train {train} --steps 1 --init hub")));
    let other = train.replace("--norm-eps 1e-12", "");
    refuses(
        &folder,
        &format!("train {other} --steps 1 --init hub"),
        &["hub/model.safetensors", "--norm-eps 1e-12"],
    );
}

#[test]
fn timms_names_are_models_of_their_own_size() {
    let folder = Folder::new("weights-timm-names");
    let explained = |model: &str| text(&folder.run(&words(&format!("config explain --model {model}"))));
    let size =
        |told: &str| told.lines().find(|line| line.contains("image-size")).unwrap_or_default().to_string();
    let told = size(&explained("vit_tiny_patch16_224"));
    assert!(told.contains("224") && told.contains("vit_tiny_patch16_224"), "{told}");
    assert!(size(&explained("vit_tiny_patch16_224 --image-size 64")).contains("64"));
    let listed = json(&folder, "models --json");
    let rows = listed.as_array().unwrap();
    let row = |name: &str| rows.iter().find(|row| row["timm"] == name).unwrap_or_else(|| panic!("no {name}"));
    assert_eq!(row("vit_base_patch16_224")["parameters"], 86_567_656);
    assert_eq!(row("swinv2_tiny_window8_256")["model"], "swinv2-ti/w8");
    assert!(row("deit3_small_patch16_224")["forward_flops"].as_f64().unwrap() > 9e9);
    let table = text(&folder.run(&words("models")));
    assert!(table.contains("86,567,656") && table.lines().all(|line| line.chars().count() <= 100), "{table}");
}

#[test]
fn a_confusion_matrix_is_drawn_and_scores_may_be_undefined() {
    let folder = Folder::new("weights-confusion");
    folder.run(&words("train --model vit-nano/8 --train-samples 8 --test-samples 4 --steps 1 --out run"));
    for (file, start) in [("m.png", "\u{89}PNG"), ("m.svg", "<svg"), ("m.csv", "class,")] {
        folder.run(&words(&format!("eval --weights run --confusion {file}")));
        let bytes = fs::read(folder.0.join(file)).unwrap();
        let first: Vec<u8> = start.chars().map(|letter| letter as u32 as u8).collect();
        assert!(bytes.starts_with(&first), "{file}");
    }
    let svg = fs::read_to_string(folder.0.join("m.svg")).unwrap();
    assert!(svg.contains("Confusion matrix") && svg.contains("4 images"), "{svg}");
    // Four images of ten classes: some have none, and most are never predicted.
    let report = json(&folder, "eval --weights run --json");
    let classes = report["classes"].as_array().unwrap();
    let absent = classes.iter().filter(|class| class["images"] == 0);
    assert!(absent.clone().count() >= 6 && absent.clone().all(|class| class["recall"].is_null()));
    assert!(classes.iter().any(|class| class["precision"].is_null() && class["images"] == 1));
    assert!(report["macro"]["f1"].is_number() && report["macro"]["recall"].is_number());
    let shown = text(&folder.run(&words("eval --weights run")));
    assert!(shown.contains("–") && shown.contains("macro average") && shown.contains("F1"), "{shown}");
}
