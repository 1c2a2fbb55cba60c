//! Values that shells offer for settings that take any text.

use super::optimizers as registry;
use data::registry::{Open, SETS};
use std::sync::LazyLock;

/// Models that are trained most often; a name may have other sizes, patches and windows.
const MODELS: &[&str] = &[
    "vit-nano/4",
    "vit-nano/8",
    "vit-ti/4",
    "vit-ti/16",
    "vit-s/16",
    "vit-b/16",
    "vit-b/32",
    "vit-l/16",
    "vit-h/14",
    "vit-g/14",
    "vit-G/14",
    "vit-e/14",
    "swinv2-nano/w8",
    "swinv2-ti/w8",
    "swinv2-s/w8",
    "swinv2-b/w8",
    "swinv2-l/w12to16",
    "swinv2-nano/w8+upernet",
    "swinv2-ti/w8+upernet",
    "swinv2-s/w8+upernet",
    "swinv2-b/w8+upernet",
    "vit-ti/16+linear",
    "vit-b/16+linear",
    "vit_small_patch14_dinov2",
    "vit_base_patch14_dinov2",
    "vit_small_patch14_reg4_dinov2",
    "vit_base_patch14_reg4_dinov2",
    "vit_large_patch14_reg4_dinov2",
    "deit3_small_patch16_224",
    "deit3_base_patch16_224",
    "deit3_large_patch16_224",
];

/// Names of models.
pub fn models() -> Vec<&'static str> {
    MODELS.to_vec()
}

/// Names of optimizers.
pub fn optimizers() -> Vec<&'static str> {
    registry::ALL.iter().map(|one| one.name).collect()
}

/// Data sets; a place follows the colon.
pub fn sets() -> Vec<&'static str> {
    static NAMES: LazyLock<Vec<String>> = LazyLock::new(|| {
        let name = |entry: &data::Entry| match entry.open {
            Open::Synthetic(_) => entry.name.to_string(),
            Open::Path(_) => format!("{}:", entry.name),
        };
        SETS.iter().map(name).collect()
    });
    NAMES.iter().map(String::as_str).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Raw;

    #[test]
    fn what_is_offered_can_be_used() {
        for model in models() {
            let raw = Raw { model: Some(model.to_string()), ..Raw::default() };
            let image = models::Network::published_image(model).unwrap_or(224);
            let image = if model.starts_with("swin") { 256 } else { image };
            let image = if model.contains("patch14") || model.contains("/14") { 224 } else { image };
            models::Network::named(model, image, 3, 10).unwrap_or_else(|error| panic!("{model}: {error}"));
            assert!(raw.task().is_ok());
        }
        for set in sets() {
            let name = if set.ends_with(':') { format!("{set}somewhere") } else { set.to_string() };
            assert!(name.parse::<crate::Source>().is_ok(), "{name}");
        }
        assert_eq!(optimizers()[0], "adamw");
    }
}
