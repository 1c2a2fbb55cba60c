//! Folders as transformers and timm write them, with the keys of published models.

use super::*;
use crate::locate::weights_file;
use crate::weights::{Named, load_for, write};
use models::names::{Convention, Tensor, Weights, from_canonical};
use testing::Folder;

const VIT: &str = r#"{"model_type": "vit", "architectures": ["ViTForImageClassification"], "image_size": 32, "patch_size": 8,
    "num_channels": 3, "hidden_size": 96, "num_hidden_layers": 4, "num_attention_heads": 3, "intermediate_size": 384,
    "layer_norm_eps": 1e-12, "hidden_act": "gelu", "qkv_bias": true, "initializer_range": 0.02,
    "id2label": {"0": "tench, Tinca tinca", "1": "goldfish", "10": "x", "2": "c", "3": "d", "4": "e", "5": "f", "6": "g", "7": "h",
    "8": "i", "9": "j"}}"#;
const SQUASH: &str = r#"{"do_normalize": true, "do_rescale": true, "do_resize": true, "image_mean": [0.5, 0.4, 0.3],
    "image_processor_type": "ViTImageProcessor", "image_std": [0.5, 0.25, 0.125], "resample": 2, "rescale_factor": 0.00392156862745098,
    "size": {"height": 32, "width": 32}}"#;

fn weights(network: &Network, convention: Convention) -> Weights {
    let tensor = |(i, shape): (usize, Vec<usize>)| {
        let count = shape.iter().product();
        Tensor { data: (0..count).map(|at| (i * 31 + at) as f32).collect(), shape }
    };
    let (names, shapes): (Vec<_>, Vec<_>) = network.expected().into_iter().unzip();
    let weights = names.into_iter().zip(shapes.into_iter().enumerate().map(tensor)).collect();
    from_canonical(weights, convention).unwrap()
}

/// A folder with the weights of a model, and these files beside.
fn folder(name: &str, network: &Network, convention: Convention, files: &[(&str, &str)]) -> Folder {
    let folder = Folder::new(name);
    write(&folder.0.join(FILES[0]), &weights(network, convention), &BTreeMap::new()).unwrap();
    files.iter().for_each(|(name, text)| fs::write(folder.0.join(name), text).unwrap());
    folder
}

fn card(folder: &Folder) -> Result<Card, String> {
    let file = weights_file(&folder.0).unwrap();
    Named::read(&file).unwrap().card().map_err(|error| {
        let text = error.to_string();
        text.strip_prefix(&format!("{}/", folder.0.display())).unwrap_or(&text).to_string()
    })
}

fn nano() -> Network {
    Network::named("vit-nano/8", 32, 3, 11).unwrap()
}

#[test]
fn a_vit_is_as_its_files_say() {
    let files = [(CONFIG, VIT), (PREPROCESSOR, SQUASH)];
    let folder = folder("hf-vit", &nano(), Convention::HuggingFace, &files);
    let card = card(&folder).unwrap();
    assert_eq!(
        (card.model.as_deref(), card.image_size, card.classes),
        (Some("vit-nano/8"), Some(32), Some(11))
    );
    assert_eq!((card.norm_eps, card.eval_resize), (Some(1e-12), None));
    assert_eq!((&card.mean[..], &card.std[..]), (&[0.5, 0.4, 0.3][..], &[0.5, 0.25, 0.125][..]));
    assert_eq!(card.interpolation, Some(Interpolation::Bilinear));
    assert_eq!(
        (card.class_names.len(), &card.class_names[10][..], &card.class_names[0][..]),
        (11, "x", "tench, Tinca tinca")
    );
    // A model with other norms is refused with the flag that mends it.
    let file = weights_file(&folder.0).unwrap();
    let error = load_for(&file, &nano(), false).unwrap_err().to_string();
    assert!(
        error.ends_with("its norms have 1e-12 under their root, this model's 1e-6: add --norm-eps 1e-12"),
        "{error}"
    );
    let mut network = nano();
    network.vary(&models::architecture::Variation { norm_eps: Some(1e-12), ..Default::default() }).unwrap();
    assert_eq!(load_for(&file, &network, false).unwrap(), weights(&network, Convention::Timm));
}

#[test]
fn a_swin_has_the_windows_that_its_config_says() {
    let config = |window: &str| {
        format!(
            r#"{{"model_type": "swinv2", "image_size": 64, "embed_dim": 32, "hidden_size": 256, "depths": [1, 1, 2, 1], "num_heads": [1, 2, 4, 8],
            "layer_norm_eps": 1e-05, {window}}}"#
        )
    };
    let network = Network::named("swinv2-nano/w8", 64, 3, 5).unwrap();
    let own = folder(
        "hf-swin",
        &network,
        Convention::HuggingFace,
        &[(CONFIG, &config(r#""window_size": 8, "pretrained_window_sizes": [0, 0, 0, 0]"#))],
    );
    let told = card(&own).unwrap();
    assert_eq!((told.model.as_deref(), told.image_size), (Some("swinv2-nano/w8"), Some(64)));
    assert!(told.class_names.is_empty());
    fs::write(own.0.join(CONFIG), config(r#""window_size": 16, "pretrained_window_sizes": [12, 12, 12, 6]"#))
        .unwrap();
    assert_eq!(card(&own).unwrap().model.as_deref(), Some("swinv2-nano/w12to16"));
}

#[test]
fn timms_folders_are_read() {
    let config = r#"{"architecture": "swinv2_tiny_window8_256", "num_classes": 5, "num_features": 768, "pretrained_cfg":
        {"tag": "ms_in1k", "input_size": [3, 256, 256], "interpolation": "bicubic", "crop_pct": 0.9, "crop_mode": "center",
        "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225], "num_classes": 5}, "label_names": ["a", "b", "c", "d", "e"]}"#;
    let network = Network::named("swinv2-ti/w8", 256, 3, 5).unwrap();
    let folder = folder("hf-timm", &network, Convention::Timm, &[(CONFIG, config)]);
    let card = card(&folder).unwrap();
    assert_eq!((card.model.as_deref(), card.image_size), (Some("swinv2_tiny_window8_256"), Some(256)));
    assert_eq!((card.eval_resize, card.interpolation), (Some(284), Some(Interpolation::Bicubic)));
    assert_eq!((card.mean[0], card.std[2], card.class_names.len()), (0.485, 0.225, 5));
}

#[test]
fn weights_in_several_files_are_one() {
    let folder = Folder::new("hf-sharded");
    let all = weights(&nano(), Convention::HuggingFace);
    let (mut map, mut parts) = (BTreeMap::new(), [Weights::new(), Weights::new()]);
    for (i, (name, tensor)) in all.into_iter().enumerate() {
        map.insert(name.clone(), format!("model-0000{}-of-00002.safetensors", i % 2 + 1));
        parts[i % 2].insert(name, tensor);
    }
    for (i, part) in parts.iter().enumerate() {
        let name = format!("model-0000{}-of-00002.safetensors", i + 1);
        write(&folder.0.join(name), part, &BTreeMap::new()).unwrap();
    }
    let index = folder.0.join(FILES[1]);
    fs::write(&index, serde_json::json!({"metadata": {"total_size": 1}, "weight_map": map}).to_string())
        .unwrap();
    assert_eq!(weights_file(&folder.0).unwrap(), index);
    assert_eq!(load_for(&index, &nano(), false).unwrap(), weights(&nano(), Convention::Timm));
    for (bad, why) in [
        (
            r#"{"weight_map": {"a": "../other.safetensors"}}"#,
            "`../other.safetensors` is not the name of a file",
        ),
        (r#"{"weight_map": {"a": "/etc/passwd"}}"#, "`/etc/passwd` is not the name of a file"),
        (r#"{"weight_map": {}}"#, "its weight_map names no file"),
        (r#"{"weight_map": {"a": "missing.safetensors"}}"#, "missing.safetensors: cannot open"),
        ("{", "can't be read: "),
    ] {
        fs::write(&index, bad).unwrap();
        let error = load_for(&index, &nano(), false).unwrap_err().to_string();
        assert!(error.contains(why) && !error.contains('\n'), "{error}");
    }
}

#[test]
fn what_is_not_here_is_refused_by_its_key() {
    let folder = folder("hf-refused", &nano(), Convention::HuggingFace, &[(PREPROCESSOR, SQUASH)]);
    let refused = |config: &str| {
        fs::write(folder.0.join(CONFIG), config).unwrap();
        card(&folder).err().unwrap_or_default()
    };
    assert_eq!(refused("{}"), "", "some other config.json");
    let changed = |from: &str, to: &str| refused(&VIT.replace(from, to));
    assert_eq!(
        changed(r#""model_type": "vit""#, r#""model_type": "resnet""#),
        "config.json: model_type `resnet`: what is read here is vit, swinv2, and upernet over swinv2"
    );
    assert_eq!(
        changed(r#""gelu""#, r#""quick_gelu""#),
        "config.json: hidden_act `quick_gelu`: models here have gelu"
    );
    assert_eq!(
        changed(r#""num_attention_heads": 3"#, r#""num_attention_heads": 6"#),
        "config.json: num_attention_heads 6, but vit-nano/8 has 3"
    );
    assert_eq!(
        changed(r#""image_size": 32"#, r#""image_size": 224"#),
        "config.json: image_size 224, but positions are for images of 32 px"
    );
    assert_eq!(
        refused(r#"{"architecture": "resnet50"}"#),
        "config.json: architecture `resnet50` is no model here; `vitesse models` lists them"
    );
    assert!(refused("{\"model_type\": 3}").starts_with("config.json: can't be read: "));
    let prepared = |from: &str, to: &str| {
        fs::write(folder.0.join(CONFIG), VIT).unwrap();
        fs::write(folder.0.join(PREPROCESSOR), SQUASH.replace(from, to)).unwrap();
        card(&folder).err().unwrap_or_default()
    };
    assert!(
        prepared(r#""resample": 2"#, r#""resample": 0"#).starts_with("preprocessor_config.json: resample 0")
    );
    assert!(prepared("0.00392156862745098", "1.0").starts_with("preprocessor_config.json: rescale_factor 1"));
    assert_eq!(
        prepared(r#""height": 32"#, r#""height": 64"#),
        "preprocessor_config.json: size is 32×64 px, but the model is for 32×32"
    );
    assert_eq!(prepared("", ""), "");
}
