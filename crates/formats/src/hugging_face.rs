//! Folders of Hugging Face: what `config.json` and `preprocessor_config.json` say of the weights beside them, by transformers' keys or
//! timm's, and weights in several files.

use config::card::Card;
use config::{FileError, Interpolation};
use files::folder_of;
use models::Network;
use models::identify::Identity;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use text::printable::shortened;

/// Files of weights that a folder may have, the first that is there.
pub const FILES: [&str; 3] = ["model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"];
const INDEX: &str = ".safetensors.index.json";
const CONFIG: &str = "config.json";
const PREPROCESSOR: &str = "preprocessor_config.json";

/// transformers' `config.json`, and timm's; keys that nothing here depends on are not read.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Config {
    model_type: Option<String>,
    image_size: Option<usize>,
    layer_norm_eps: Option<f64>,
    hidden_act: Option<String>,
    id2label: BTreeMap<String, String>,
    window_size: Option<usize>,
    pretrained_window_sizes: Vec<usize>,
    backbone_config: Option<Box<Config>>,
    /// timm's.
    architecture: Option<String>,
    label_names: Vec<String>,
    pretrained_cfg: Option<Pretrained>,
    #[serde(flatten)]
    others: BTreeMap<String, Value>,
}

/// timm's account of how images are prepared.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Pretrained {
    input_size: Vec<usize>,
    mean: Vec<f32>,
    std: Vec<f32>,
    interpolation: Option<String>,
    crop_pct: Option<f64>,
}

/// transformers' `preprocessor_config.json`.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Preprocessor {
    do_normalize: Option<bool>,
    image_mean: Vec<f32>,
    image_std: Vec<f32>,
    rescale_factor: Option<f64>,
    resample: Option<u8>,
    size: Option<Size>,
    do_center_crop: Option<bool>,
    crop_size: Option<Size>,
}

/// A size: one number, both sides, or the shorter one.
#[derive(Clone, Copy, Deserialize)]
#[serde(untagged)]
enum Size {
    Side(usize),
    Sides { height: usize, width: usize },
    Shorter { shortest_edge: usize },
}

/// Keys of which a model's `config.json` has one: transformers', and timm's.
const KINDS: [&str; 2] = ["model_type", "architecture"];

/// Key of `config.json` and the field of a model's record that says the same.
const ALIKE: [(&str, &str); 9] = [
    ("hidden_size", "width"),
    ("embed_dim", "width"),
    ("num_hidden_layers", "depth"),
    ("depths", "depths"),
    ("num_attention_heads", "heads"),
    ("num_heads", "heads"),
    ("intermediate_size", "mlp"),
    ("patch_size", "patch"),
    ("num_channels", "channels"),
];

/// What the files beside `weights` say of them, over what their tensors do; none where there is no such `config.json`. With it, the names
/// of the files that were read.
pub fn card_beside(
    weights: &Path,
    identity: &Identity,
) -> Result<Option<(Card, Vec<&'static str>)>, FileError> {
    let folder = folder_of(weights);
    let path = folder.join(CONFIG);
    let config_error = |why: String| refuse(&path, why);
    // Others have files of that name, too: those of a model say which.
    let told = json::<Value>(&path)?.filter(|value| KINDS.iter().any(|key| value.get(key).is_some()));
    let Some(told) = told else { return Ok(None) };
    let config: Config = serde_json::from_value(told).map_err(|error| unreadable(&path, &error))?;
    let mut card = Card::of_tensors(identity.clone());
    if let Some(architecture) = &config.architecture {
        of_timm(&mut card, &config, architecture).map_err(config_error)?;
        return Ok(Some((card, vec![CONFIG])));
    }
    let Some(kind) = &config.model_type else { return Ok(None) };
    of_transformers(&mut card, &config, kind, identity).map_err(config_error)?;
    let mut files = vec![CONFIG];
    if let Some(preprocessor) = json::<Preprocessor>(&folder.join(PREPROCESSOR))? {
        preprocessor.put_into(&mut card).map_err(|why| refuse(&folder.join(PREPROCESSOR), why))?;
        files.push(PREPROCESSOR);
    }
    Ok(Some((card, files)))
}

fn unreadable(file: &Path, error: &serde_json::Error) -> FileError {
    refuse(file, format!("can't be read: {}", shortened(&error.to_string())))
}

fn refuse(file: &Path, why: String) -> FileError {
    FileError::File { file: file.display().to_string(), why }
}

/// A JSON file; none where there is no such file.
fn json<T: DeserializeOwned>(path: &Path) -> Result<Option<T>, FileError> {
    let text = match fs::read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(FileError::Io { path: path.to_path_buf(), source }),
        Ok(text) => text,
    };
    serde_json::from_slice(&text).map(Some).map_err(|error| unreadable(path, &error))
}

fn of_timm(card: &mut Card, config: &Config, architecture: &str) -> Result<(), String> {
    let name = shortened(architecture);
    if Network::of_any_size(architecture).is_none() {
        return Err(format!("architecture `{name}` is no model here; `vitesse models` lists them"));
    }
    card.model = Some(architecture.to_string());
    card.class_names = config.label_names.clone();
    let Some(Pretrained { input_size, mean, std, interpolation, crop_pct }) = &config.pretrained_cfg else {
        return Ok(());
    };
    card.image_size = card.image_size.or(input_size.last().copied());
    (card.mean, card.std) = (mean.clone(), std.clone());
    card.interpolation = match interpolation.as_deref() {
        None => None,
        Some(kind) => Some(kind.parse().map_err(|_| format!("interpolation `{}`", shortened(kind)))?),
    };
    // As timm has it: images are resized so that the middle of the model's size is this share.
    let share = crop_pct.filter(|share| (0.05..=1.0).contains(share));
    let resize = |(share, image): (f64, usize)| (image as f64 / share).floor() as usize;
    card.eval_resize = share.zip(card.image_size).map(resize);
    Ok(())
}

fn of_transformers(card: &mut Card, config: &Config, kind: &str, identity: &Identity) -> Result<(), String> {
    let body = match (kind, &config.backbone_config) {
        ("vit" | "swinv2", _) => config,
        ("upernet", Some(backbone)) if backbone.model_type.as_deref() == Some("swinv2") => &**backbone,
        _ => {
            let kind = shortened(kind);
            return Err(format!(
                "model_type `{kind}`: what is read here is vit, swinv2, and upernet over swinv2"
            ));
        }
    };
    if let Some(other) = body.hidden_act.as_deref().filter(|kind| *kind != "gelu") {
        return Err(format!("hidden_act `{}`: models here have gelu", shortened(other)));
    }
    if let (None, Some(name), Some(window)) = (&card.model, &identity.but_for_window, body.window_size) {
        let before =
            body.pretrained_window_sizes.first().copied().filter(|side| *side > 0 && *side != window);
        let window = before.map_or(window.to_string(), |before| format!("{before}to{window}"));
        card.model = Some(name.replace("WINDOW", &window));
    }
    // A model for pixels takes images of any size; that of pre-training says nothing.
    let image = body.image_size.filter(|_| kind != "upernet");
    if let Some((tensors, said)) = card.image_size.zip(image).filter(|(tensors, said)| tensors != said) {
        return Err(format!("image_size {said}, but positions are for images of {tensors} px"));
    }
    card.image_size = card.image_size.or(image);
    card.norm_eps = body.layer_norm_eps;
    card.class_names = labels(&config.id2label, card.classes);
    check_alike(card, body)
}

/// Refuses a number of `config.json` that the model, known by its tensors, has otherwise.
fn check_alike(card: &Card, body: &Config) -> Result<(), String> {
    let Some(model) = &card.model else { return Ok(()) };
    let channels = card.channels.unwrap_or(3);
    let Ok(network) = Network::named(model, card.image_size.unwrap_or(EVERY_SIZE), channels, 2) else {
        return Ok(());
    };
    let record = serde_json::to_value(network.backbone()).unwrap_or_default();
    // Of a Swin, the hidden size is the last stage's width.
    let staged = body.others.contains_key("embed_dim");
    for (key, field) in ALIKE.into_iter().filter(|(key, _)| !staged || *key != "hidden_size") {
        if let (Some(said), Some(is)) = (body.others.get(key), record.get(field))
            && said != is
        {
            return Err(format!("{key} {}, but {model} has {is}", shortened(&said.to_string())));
        }
    }
    Ok(())
}

/// A side that windows and patches of any size divide.
const EVERY_SIZE: usize = 7 << 10;

/// Names of classes in order; none where they are transformers' placeholders, or not those of the head.
fn labels(by_id: &BTreeMap<String, String>, classes: Option<usize>) -> Vec<String> {
    let placeholder = by_id.iter().all(|(id, name)| *name == format!("LABEL_{id}"));
    let names: Option<Vec<String>> = (0..by_id.len()).map(|id| by_id.get(&id.to_string()).cloned()).collect();
    match names {
        Some(names) if !placeholder && Some(names.len()) == classes => names,
        _ => vec![],
    }
}

impl Preprocessor {
    fn put_into(&self, card: &mut Card) -> Result<(), String> {
        if let Some(factor) = self.rescale_factor.filter(|factor| (factor * 255.0 - 1.0).abs() > 1e-3) {
            return Err(format!("rescale_factor {factor}: values here are from 0 to 1"));
        }
        let plain = self.do_normalize == Some(false);
        card.mean = if plain { vec![0.0] } else { self.image_mean.clone() };
        card.std = if plain { vec![1.0] } else { self.image_std.clone() };
        card.interpolation = match self.resample {
            None => None,
            Some(2) => Some(Interpolation::Bilinear),
            Some(3) => Some(Interpolation::Bicubic),
            Some(other) => {
                return Err(format!("resample {other}: 2 (bilinear) and 3 (bicubic) are what is here"));
            }
        };
        let crop = self.crop_size.filter(|_| self.do_center_crop == Some(true));
        match (self.size, crop) {
            (Some(Size::Shorter { shortest_edge }), Some(crop)) => {
                card.eval_resize = Some(shortest_edge);
                crop.of(card, "crop_size")
            }
            (Some(Size::Shorter { shortest_edge }), None) => {
                // Rectangles, of which no model here of one size reads more than the middle.
                Err(format!("size has a shortest_edge of {shortest_edge} px without do_center_crop"))
            }
            (Some(_), Some(_)) => {
                Err("size has both sides, but do_center_crop cuts their middle".to_string())
            }
            (Some(size), None) => size.of(card, "size"),
            (None, _) => Ok(()),
        }
    }
}

impl Size {
    /// Refuses another size than the model's.
    fn of(self, card: &mut Card, key: &str) -> Result<(), String> {
        let (height, width) = match self {
            Size::Side(side) | Size::Shorter { shortest_edge: side } => (side, side),
            Size::Sides { height, width } => (height, width),
        };
        let image = *card.image_size.get_or_insert(height);
        match (height, width) == (image, image) {
            true => Ok(()),
            false => Err(format!("{key} is {width}×{height} px, but the model is for {image}×{image}")),
        }
    }
}

/// Of a file that says in which others the weights are: these files, in order.
pub fn parts(path: &Path) -> Option<Result<Vec<PathBuf>, FileError>> {
    let name = path.file_name()?.to_str()?;
    name.ends_with(INDEX).then(|| {
        #[derive(Deserialize)]
        struct Index {
            weight_map: BTreeMap<String, String>,
        }
        let index = json::<Index>(path)?.ok_or_else(|| refuse(path, "there is no such file".to_string()))?;
        let files: BTreeSet<&str> = index.weight_map.values().map(String::as_str).collect();
        if files.is_empty() {
            return Err(refuse(path, "its weight_map names no file".to_string()));
        }
        let beside = |name: &&str| {
            // Names of files alone: a folder must not reach out of itself.
            match Path::new(name).file_name().is_some_and(|own| own == *name) {
                true => Ok(folder_of(path).join(name)),
                false => Err(refuse(path, format!("`{}` is not the name of a file", shortened(name)))),
            }
        };
        files.iter().map(beside).collect()
    })
}

#[cfg(test)]
mod tests;
