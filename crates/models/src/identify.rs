//! Identity of a model by its tensors: its name and its sizes, as far as they follow from shapes. Each family knows its
//! own tensors ([`Family::identify`](crate::architecture::Family::identify)).

use crate::names::Weights;
use crate::network;
use crate::vit::Pool;

/// Properties of a model that follow from its weights; nothing where they leave it open.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Identity {
    pub model: Option<String>,
    /// Name of a Swin V2 whose window is unknown, with the window left open.
    pub but_for_window: Option<String>,
    /// Side of the square images that position embeddings are for.
    pub image: Option<usize>,
    pub channels: Option<usize>,
    pub classes: Option<usize>,
    pub pool: Option<Pool>,
}

impl Identity {
    /// Identity by canonically named weights. `window`: the side of a Swin V2's windows, if the file has it.
    pub fn of(weights: &Weights, window: Option<usize>) -> Self {
        network::identify(weights, window)
    }

    /// Properties that every family has: the channels of its patches, the classes of its head's weight.
    pub(crate) fn of_head(weights: &Weights, head: &str) -> Self {
        let side = |name: &str, axis: usize| shape_of(weights, name)?.get(axis).copied();
        Identity { channels: side(PATCHES, 1), classes: side(head, 0), ..Identity::default() }
    }
}

pub(crate) const PATCHES: &str = "patch_embed.proj.weight";

pub(crate) fn shape_of<'w>(weights: &'w Weights, name: &str) -> Option<&'w [usize]> {
    weights.get(name).map(|tensor| tensor.shape.as_slice())
}

/// Number of tensors `PREFIX{n}SUFFIX`, from 0 on.
pub(crate) fn counted(weights: &Weights, prefix: &str, suffix: &str) -> usize {
    (0..).take_while(|n| weights.contains_key(&format!("{prefix}{n}{suffix}"))).count()
}

/// Side of the images that the position embedding is for, of which the first `prefix` are of no patch: patches lie in a square.
pub(crate) fn image_of(weights: &Weights, prefix: usize) -> Option<usize> {
    let &[_, _, patch, _] = shape_of(weights, PATCHES)? else { return None };
    let &[_, tokens, _] = shape_of(weights, "pos_embed")? else { return None };
    let patches = tokens.checked_sub(prefix)?;
    let grid = patches.isqrt();
    (grid * grid == patches).then(|| grid.checked_mul(patch)).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Network;
    use crate::names::Tensor;
    use crate::vit::Vit;

    fn weights(network: &Network) -> Weights {
        let tensor = |shape: Vec<usize>| Tensor { data: vec![], shape };
        network.expected().into_iter().map(|(name, shape)| (name, tensor(shape))).collect()
    }

    #[test]
    fn a_vit_is_known_by_its_shapes() {
        for name in ["vit-nano/4", "vit-ti/16", "vit-s/16", "vit-b/32"] {
            let network = Network::named(name, 96, 1, 7).unwrap();
            let found = Identity::of(&weights(&network), None);
            let pool = Some(Pool::ClassToken);
            let (image, channels, classes) = (Some(96), Some(1), Some(7));
            let model = Some(name.to_string());
            assert_eq!(found, Identity { model, image, channels, classes, pool, ..Identity::default() });
        }
        let mean = Vit { pool: Pool::Mean, ..Vit::named("vit-ti/4", 32, 3, 10).unwrap() };
        let found = Identity::of(&weights(&Network::Vit(mean.clone())), None);
        assert_eq!((found.pool, found.image), (Some(Pool::Mean), Some(32)));
        let odd = Vit { depth: 5, ..mean };
        assert_eq!(Identity::of(&weights(&Network::Vit(odd)), None).model, None);
    }

    #[test]
    fn a_swin_is_known_if_its_windows_are() {
        for name in ["swinv2-ti/w8", "swinv2-nano/w8+upernet", "swinv2-64-1-2-1-1/w8"] {
            let network = Network::named(name, 64, 3, 5).unwrap();
            let found = Identity::of(&weights(&network), Some(8));
            let (model, channels, classes) = (Some(name.to_string()), Some(3), Some(5));
            assert_eq!(found, Identity { model, channels, classes, ..Identity::default() });
            let but_for_window = Some(name.replace("w8", "wWINDOW"));
            let open = Identity { model: None, but_for_window, ..found };
            assert_eq!(Identity::of(&weights(&network), None), open);
        }
    }

    #[test]
    fn other_tensors_say_nothing() {
        let tensor = |shape: &[usize]| Tensor { shape: shape.to_vec(), data: vec![] };
        let odd = Weights::from([
            ("patch_embed.proj.weight".to_string(), tensor(&[4])),
            ("pos_embed".to_string(), tensor(&[1, usize::MAX, 4])),
            ("head.weight".to_string(), tensor(&[])),
        ]);
        let pool = Some(Pool::Mean);
        assert_eq!(Identity::of(&odd, None), Identity { pool, ..Identity::default() });
        assert_eq!(Identity::of(&Weights::new(), Some(8)), Identity::default());
    }
}
