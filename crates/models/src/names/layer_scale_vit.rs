//! The names of a ViT with LayerScale: timm's, which are canonical. The files of DINOv2's authors are read too.

use super::vit::rename;
use super::{Convention, NameError, Table, Tensor, Weights};

/// Tensor that it has beside those of a plain ViT.
const OUTSIDE: &str = "reg_token";
/// Endings of the names of a block's further tensors.
const BLOCK: [&str; 2] = ["ls1.gamma", "ls2.gamma"];

/// (DINOv2's authors, timm) of what they name otherwise.
const AUTHORS: [[&str; 2]; 3] =
    [["register_tokens", OUTSIDE], [".mlp.w12.", ".mlp.fc1."], [".mlp.w3.", ".mlp.fc2."]];
/// Tensor of pre-training in their files, which is ignored.
const MASK: &str = "mask_token";

/// The names of a ViT with LayerScale.
pub struct LayerScaleVit;

impl Table for LayerScaleVit {
    fn detect(&self, names: &[&str]) -> Option<Convention> {
        let scale = |name: &&str| in_block(name).is_some_and(|leaf| BLOCK.contains(&leaf));
        names.iter().any(scale).then_some(Convention::Timm)
    }

    fn import(&self, weights: Weights, from: Convention) -> Result<Weights, NameError> {
        let mut renamed = Weights::new();
        for (name, tensor) in of_authors(weights)? {
            if !is_known(&name) {
                return Err(NameError::Unknown { name, convention: from });
            }
            renamed.insert(name, tensor);
        }
        Ok(renamed)
    }

    fn export(&self, weights: Weights, to: Convention) -> Result<Weights, NameError> {
        match to {
            Convention::Timm => self.import(weights, to),
            _ => Err(NameError::OnlyTimm { what: "a ViT with LayerScale", convention: to }),
        }
    }
}

/// Part of a name after the number of a block.
fn in_block(name: &str) -> Option<&str> {
    let (number, leaf) = name.strip_prefix("blocks.")?.split_once('.')?;
    (number.parse::<usize>().ok()?.to_string() == number).then_some(leaf)
}

fn is_known(name: &str) -> bool {
    let own = name == OUTSIDE || in_block(name).is_some_and(|leaf| BLOCK.contains(&leaf));
    own || rename(name, Convention::Timm, Convention::Timm).is_some()
}

/// Timm's names for those of DINOv2's authors. Of models with registers, theirs add a position to the class token; timm's have it
/// in the token.
fn of_authors(mut weights: Weights) -> Result<Weights, NameError> {
    weights.remove(MASK);
    if weights.contains_key(AUTHORS[0][0])
        && let (Some(positions), Some(token)) = (weights.remove("pos_embed"), weights.get_mut("cls_token"))
    {
        let rest = without_first(positions, token)?;
        weights.insert("pos_embed".to_string(), rest);
    }
    let mut renamed = Weights::new();
    for (name, tensor) in weights {
        let canonical =
            AUTHORS.iter().fold(name.clone(), |name, [theirs, timms]| name.replace(theirs, timms));
        if renamed.contains_key(&canonical) {
            return Err(NameError::Duplicate { name, canonical });
        }
        renamed.insert(canonical, tensor);
    }
    Ok(renamed)
}

/// Moves the first of some positions into the class token.
fn without_first(mut positions: Tensor, token: &mut Tensor) -> Result<Tensor, NameError> {
    let channels = token.data.len();
    let fits = matches!(positions.shape[..], [1, tokens, c] if tokens > 1 && c == channels);
    if !fits || !positions.is_whole() || !token.is_whole() {
        return Err(NameError::ClassPosition { shape: positions.shape });
    }
    let rest = positions.data.split_off(channels);
    token.data.iter_mut().zip(&positions.data).for_each(|(token, position)| *token += position);
    positions.shape[1] -= 1;
    Ok(Tensor { shape: positions.shape, data: rest })
}
