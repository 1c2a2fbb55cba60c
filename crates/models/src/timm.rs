//! timm's names of models: those that name another library's model, as ours of it and the side of its images.

/// Sizes by timm's words and ours.
const VITS: [(&str, &str); 7] = [
    ("tiny", "ti"),
    ("small", "s"),
    ("base", "b"),
    ("large", "l"),
    ("huge", "h"),
    ("giant", "g"),
    ("gigantic", "G"),
];

/// Our name of a model with one of timm's, and the side of its images: `vit_base_patch16_224` is `vit-b/16` at 224 px. A weights' tag
/// (`.augreg_in1k`) and a head for pixels (`+upernet`) may follow. None for names that are no such ones.
pub fn ours(name: &str) -> Option<(String, usize)> {
    let lower = name.to_ascii_lowercase();
    let (model, head) = match lower.split_once('+') {
        Some((model, head)) => (model, format!("+{head}")),
        None => (lower.as_str(), String::new()),
    };
    let model = model.split_once('.').map_or(model, |(model, _)| model);
    let parts: Vec<&str> = model.split('_').collect();
    let ours = |theirs: &str| VITS.iter().find(|(word, _)| *word == theirs).map(|(_, ours)| *ours);
    match parts[..] {
        ["vit" | "deit", size, patch, image] => {
            let patch = number(patch.strip_prefix("patch")?)?;
            Some((format!("vit-{}/{patch}{head}", ours(size)?), number(image)?))
        }
        ["swinv2", size, window, image] => {
            let (window, size) = (window.strip_prefix("window")?, ours(size)?);
            // Windows of 16 pre-trained with 12, on images of 256 px after 192: window12to16_192to256.
            let image = match (window.split_once("to"), image.split_once("to")) {
                (Some((before, now)), Some((_, image))) => {
                    number(before).and(number(now))?;
                    number(image)?
                }
                (None, None) => {
                    number(window)?;
                    number(image)?
                }
                _ => return None,
            };
            Some((format!("swinv2-{size}/w{window}{head}"), image))
        }
        _ => None,
    }
}

/// The side of the images that a name of timm's ends in.
pub fn image(name: &str) -> Option<usize> {
    let deit3 = || {
        let lower = name.to_ascii_lowercase();
        let (_, image) = lower.strip_prefix("deit3_")?.split('+').next()?.rsplit_once('_')?;
        number(image)
    };
    ours(name).map(|(_, image)| image).or_else(deit3)
}

/// timm's name of a size of ours, of a ViT or Swin V2.
pub fn size(ours: &str) -> Option<&'static str> {
    VITS.iter().find(|(_, own)| *own == ours).map(|(theirs, _)| *theirs)
}

/// A number as it is printed.
fn number(text: &str) -> Option<usize> {
    text.parse().ok().filter(|number: &usize| number.to_string() == text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Network;

    #[test]
    fn timms_names_are_names_of_models() {
        for (theirs, name, side) in [
            ("vit_tiny_patch16_224", "vit-ti/16", 224),
            ("vit_base_patch16_384.augreg_in21k_ft_in1k", "vit-b/16", 384),
            ("ViT_Huge_patch14_224", "vit-h/14", 224),
            ("vit_giant_patch14_224", "vit-g/14", 224),
            ("vit_gigantic_patch14_224", "vit-G/14", 224),
            ("deit_small_patch16_224", "vit-s/16", 224),
            ("swinv2_tiny_window8_256", "swinv2-ti/w8", 256),
            ("swinv2_base_window12to24_192to384", "swinv2-b/w12to24", 384),
            ("swinv2_base_window8_256+upernet", "swinv2-b/w8+upernet", 256),
        ] {
            assert_eq!(ours(theirs), Some((name.to_string(), side)));
            assert_eq!(Network::image_in_name(theirs), Some(side));
            let [their, our] = [theirs, name].map(|name| Network::named(name, side, 3, 10).unwrap());
            assert_eq!(their, our, "{theirs}");
        }
        assert_eq!(Network::image_in_name("deit3_small_patch16_384"), Some(384));
        assert_eq!(Network::image_in_name("vit_small_patch14_reg4_dinov2"), None);
    }

    #[test]
    fn other_names_are_left_alone() {
        for name in [
            "vit-ti/16",
            "vit_tiny_patch16",
            "vit_tiny_patch016_224",
            "vit_medium_patch16_224",
            "vit_base_patch16_clip_224",
            "swinv2_tiny_window8to16_256",
            "swinv2_cr_tiny_224",
            "swin_tiny_patch4_window7_224",
            "resnet50",
        ] {
            assert_eq!(ours(name), None, "{name}");
        }
        let error = Network::named("vit_base_patch16_clip_224", 224, 3, 10).unwrap_err().to_string();
        assert!(error.contains("vit_SIZE_patchPATCH_IMAGE"), "{error}");
    }
}
