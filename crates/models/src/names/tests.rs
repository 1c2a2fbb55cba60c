use super::*;
use crate::Network;
use crate::vit::{Pool, Vit};

fn small(pool: Pool) -> Vit {
    Vit {
        image: 8,
        patch: 4,
        channels: 3,
        classes: 5,
        width: 6,
        depth: 11,
        heads: 2,
        mlp: 12,
        pool,
        dropout: 0.0,
        attention_dropout: 0.0,
        drop_path: 0.0,
        norm_eps: 1e-6,
    }
}

/// Each value differs from every other, so that a swap of tensors or rows cannot go unseen.
pub(super) fn counted_of(network: &Network) -> Weights {
    let mut next = 0.0;
    let mut count = |shape: Vec<usize>| {
        let data = (0..shape.iter().product()).map(|_| {
            next += 1.0;
            next
        });
        Tensor { data: data.collect(), shape }
    };
    network.expected().into_iter().map(|(name, shape)| (name, count(shape))).collect()
}

fn counted(vit: &Vit) -> Weights {
    counted_of(&Network::Vit(vit.clone()))
}

fn moved(mut weights: Weights, from: &str, to: &str) -> Weights {
    let tensor = weights.remove(from).expect(from);
    weights.insert(to.to_string(), tensor);
    weights
}

fn expected(vit: &Vit) -> Vec<(String, Vec<usize>)> {
    Network::Vit(vit.clone()).expected()
}

fn check(weights: &Weights, vit: &Vit) -> Result<(), NameError> {
    check_against(weights, &expected(vit))
}

#[test]
fn a_conversion_and_its_reverse_change_nothing() {
    let weights = counted(&small(Pool::ClassToken));
    for convention in Convention::ALL {
        let theirs = from_canonical(weights.clone(), convention).unwrap();
        assert_eq!(detect(theirs.keys().map(String::as_str)), Ok(convention));
        assert_eq!(to_canonical(theirs, convention), Ok(weights.clone()), "{convention}");
    }
}

#[test]
fn names_are_those_of_the_libraries() {
    let weights = counted(&small(Pool::ClassToken));
    let torchvision = from_canonical(weights.clone(), Convention::Torchvision).unwrap();
    assert_eq!(torchvision.len(), weights.len());
    let qkv = &weights["blocks.10.attn.qkv.weight"];
    assert_eq!(&torchvision["encoder.layers.encoder_layer_10.self_attention.in_proj_weight"], qkv);
    assert_eq!(torchvision["encoder.layers.encoder_layer_0.mlp.3.bias"], weights["blocks.0.mlp.fc2.bias"]);
    assert_eq!(torchvision["heads.head.weight"], weights["head.weight"]);

    let theirs = from_canonical(weights.clone(), Convention::HuggingFace).unwrap();
    assert_eq!(theirs.len(), weights.len() + 4 * 11);
    let key = &theirs["vit.encoder.layer.10.attention.attention.key.weight"];
    assert_eq!((&key.shape, &key.data[..]), (&vec![6, 6], &qkv.data[36..72]));
    assert_eq!(theirs["vit.encoder.layer.3.output.dense.weight"], weights["blocks.3.mlp.fc2.weight"]);
    assert_eq!(theirs["vit.layernorm.bias"], weights["norm.bias"]);
}

#[test]
fn early_torchvision_is_read_but_not_beside_the_later_spelling() {
    let weights = counted(&small(Pool::ClassToken));
    let theirs = from_canonical(weights.clone(), Convention::Torchvision).unwrap();
    let block = "encoder.layers.encoder_layer_2.mlp";
    let early = moved(theirs, &format!("{block}.0.weight"), &format!("{block}.linear_1.weight"));
    assert_eq!(to_canonical(early.clone(), Convention::Torchvision), Ok(weights));
    let mut both = early;
    both.insert(format!("{block}.0.weight"), Tensor { shape: vec![], data: vec![0.0] });
    let error = to_canonical(both, Convention::Torchvision).unwrap_err().to_string();
    assert_eq!(error, format!("`{block}.linear_1.weight` is a second `blocks.2.mlp.fc1.weight`"));
}

/// Names as `ViTForImageClassification(…).state_dict()` of transformers 5.22 has them (`fixtures/make_names.py`).
#[test]
fn names_that_transformers_has_in_memory_are_read_too() {
    let weights = counted(&small(Pool::ClassToken));
    let listed = include_str!("../../tests/fixtures/transformers-vit.txt");
    let theirs = from_canonical(weights.clone(), Convention::HuggingFace).unwrap();
    let in_memory: Weights =
        listed.lines().map(|name| (name.to_string(), theirs[&vit::in_file(name)].clone())).collect();
    assert_eq!(in_memory.len(), theirs.len(), "each is another's");
    assert!(in_memory.contains_key("vit.layers.10.attention.o_proj.weight"));
    assert_eq!(detect(in_memory.keys().map(String::as_str)), Ok(Convention::HuggingFace));
    assert_eq!(to_canonical(in_memory.clone(), Convention::HuggingFace), Ok(weights));
    let mut both = in_memory;
    both.insert("vit.encoder.layer.0.output.dense.bias".into(), Tensor { shape: vec![], data: vec![0.0] });
    let error = to_canonical(both, Convention::HuggingFace).unwrap_err().to_string();
    assert!(error.ends_with("is a second `vit.encoder.layer.0.output.dense.bias`"), "{error}");
}

#[test]
fn a_mean_pooled_model_is_only_timm() {
    let vit = small(Pool::Mean);
    let weights = counted(&vit);
    assert_eq!(weights["pos_embed"].shape, [1, 4, 6]);
    assert_eq!(from_canonical(weights.clone(), Convention::Timm), Ok(weights.clone()));
    assert_eq!(check(&weights, &vit), Ok(()));
    let error = from_canonical(weights, Convention::Torchvision).unwrap_err().to_string();
    assert_eq!(error, "a mean-pooled model (no class token) has no torchvision form: export it as timm");
}

#[test]
fn parts_that_do_not_fit_together_are_refused() {
    let theirs = from_canonical(counted(&small(Pool::ClassToken)), Convention::HuggingFace).unwrap();
    let key = "vit.encoder.layer.0.attention.attention.key.bias";
    let mut unlike = theirs.clone();
    unlike.insert(key.to_string(), Tensor { shape: vec![1], data: vec![0.0] });
    let error = to_canonical(unlike, Convention::HuggingFace).unwrap_err().to_string();
    let alike = "query, key and value must be alike";
    assert_eq!(error, format!("`{key}` is [1], but its query is [6]: {alike}"));
    let mut without = theirs;
    without.remove(key);
    let error = to_canonical(without, Convention::HuggingFace).unwrap_err().to_string();
    assert_eq!(error, format!("`{key}` is missing: query, key and value come together"));
}

#[test]
fn foreign_names_are_refused() {
    assert_eq!(detect([]), Err(NameError::Empty));
    assert_eq!(
        detect(["layers.0.conv"]).unwrap_err().to_string(),
        "no tensor is named as in a timm, torchvision or huggingface ViT or Swin V2 (the first is `layers.0.conv`)"
    );
    let weights = counted(&small(Pool::ClassToken));
    for (known, foreign) in [
        ("blocks.1.norm1.bias", "blocks.01.norm1.bias"),
        ("blocks.1.norm1.bias", "blocks.+1.norm1.bias"),
        ("blocks.1.norm1.bias", "blocks.1.ls3.gamma"),
        ("norm.bias", ""),
    ] {
        let error = to_canonical(moved(weights.clone(), known, foreign), Convention::Timm);
        let unknown = NameError::Unknown { name: foreign.to_string(), convention: Convention::Timm };
        assert_eq!(error, Err(unknown));
    }
    assert_eq!("timm".parse(), Ok(Convention::Timm));
    assert!("Timm".parse::<Convention>().is_err());
}

#[test]
fn another_model_is_told_by_its_first_tensor() {
    let vit = small(Pool::ClassToken);
    let other = |weights: Weights| check(&weights, &vit).unwrap_err().to_string();
    let weights = counted(&vit);
    assert_eq!(check(&weights, &vit), Ok(()));
    assert_eq!(
        other(counted(&Vit { mlp: 24, ..vit.clone() })),
        "weights are of another model: blocks.0.mlp.fc1.weight is [24, 6], this model needs [12, 6] \
         (and 32 more tensors differ)"
    );
    assert_eq!(
        other(counted(&Vit { depth: 10, ..vit.clone() })),
        "weights are of another model: blocks.10.norm1.weight [6] is missing (and 11 more tensors differ)"
    );
    assert_eq!(
        other(moved(weights.clone(), "head.bias", "head.scale")),
        "weights are of another model: head.bias [5] is missing (and 1 more tensor differs)"
    );
    let mut torn = weights;
    torn.entry("head.bias".to_string()).and_modify(|bias| bias.data.truncate(2));
    assert_eq!(other(torn), "weights are of another model: head.bias is [5] but holds 2 values");
}
