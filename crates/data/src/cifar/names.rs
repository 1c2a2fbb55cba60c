//! What the classes are called.

use super::layout::Form;
use super::{CifarKind, CifarLabels};
use crate::error::shown;
use crate::pickle::{Pickle, Value};

/// The names in a file that comes with the set: one for each class.
pub(super) fn read(bytes: &[u8], kind: CifarKind, form: Form) -> Result<Vec<String>, String> {
    let names = match form {
        Form::Binary => lines(bytes)?,
        Form::Python => pickled(bytes, kind.keys().1)?,
    };
    if let Some(name) = names.iter().find(|name| name.chars().any(char::is_control)) {
        return Err(format!("`{}` cannot be the name of a class", shown(name)));
    }
    match names.len() {
        count if count == kind.classes() => Ok(names),
        count => Err(format!("it names {count} classes; {kind} has {} here", kind.classes())),
    }
}

fn lines(bytes: &[u8]) -> Result<Vec<String>, String> {
    let text = std::str::from_utf8(bytes).map_err(|_| "it is not text")?;
    // The official file ends in an empty line.
    Ok(text.lines().map(str::trim).filter(|line| !line.is_empty()).map(str::to_string).collect())
}

fn pickled(bytes: &[u8], key: &str) -> Result<Vec<String>, String> {
    let pickle = Pickle::read(bytes).map_err(|error| error.to_string())?;
    let names = pickle.root().get(key).and_then(Value::items).ok_or(format!("it has no list `{key}`"))?;
    let names = names.map(|name| name.text().map(str::to_string));
    names.collect::<Option<_>>().ok_or(format!("`{key}` holds something that is not a string"))
}

/// The published names, for sets that come without.
pub(super) fn built_in(kind: CifarKind) -> &'static [&'static str] {
    match kind {
        CifarKind::Ten => &TEN,
        CifarKind::Hundred { labels: CifarLabels::Fine } => &FINE,
        CifarKind::Hundred { labels: CifarLabels::Coarse } => &COARSE,
    }
}

const TEN: [&str; 10] =
    ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"];

#[rustfmt::skip]
const FINE: [&str; 100] = [
    "apple", "aquarium_fish", "baby", "bear", "beaver", "bed", "bee", "beetle", "bicycle", "bottle", "bowl",
    "boy", "bridge", "bus", "butterfly", "camel", "can", "castle", "caterpillar", "cattle", "chair",
    "chimpanzee", "clock", "cloud", "cockroach", "couch", "crab", "crocodile", "cup", "dinosaur", "dolphin",
    "elephant", "flatfish", "forest", "fox", "girl", "hamster", "house", "kangaroo", "keyboard", "lamp",
    "lawn_mower", "leopard", "lion", "lizard", "lobster", "man", "maple_tree", "motorcycle", "mountain",
    "mouse", "mushroom", "oak_tree", "orange", "orchid", "otter", "palm_tree", "pear", "pickup_truck",
    "pine_tree", "plain", "plate", "poppy", "porcupine", "possum", "rabbit", "raccoon", "ray", "road",
    "rocket", "rose", "sea", "seal", "shark", "shrew", "skunk", "skyscraper", "snail", "snake", "spider",
    "squirrel", "streetcar", "sunflower", "sweet_pepper", "table", "tank", "telephone", "television",
    "tiger", "tractor", "train", "trout", "tulip", "turtle", "wardrobe", "whale", "willow_tree", "wolf",
    "woman", "worm",
];

#[rustfmt::skip]
const COARSE: [&str; 20] = [
    "aquatic_mammals", "fish", "flowers", "food_containers", "fruit_and_vegetables",
    "household_electrical_devices", "household_furniture", "insects", "large_carnivores",
    "large_man-made_outdoor_things", "large_natural_outdoor_scenes", "large_omnivores_and_herbivores",
    "medium_mammals", "non-insect_invertebrates", "people", "reptiles", "small_mammals", "trees",
    "vehicles_1", "vehicles_2",
];
