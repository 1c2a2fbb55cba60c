//! Which parameters learn at which rate, and which are pulled towards zero.

use super::origin::{Log, Origin};
use super::settings::Raw;
use crate::ConfigError;
use graph::ParamGroup;
use models::Network;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// `--lr-scale PATTERN=FACTOR`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LrScale {
    pub pattern: String,
    pub factor: f64,
}

impl FromStr for LrScale {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts = text.rsplit_once('=').and_then(|(pattern, factor)| Some((pattern, factor.parse().ok()?)));
        match parts {
            Some((pattern, factor))
                if !pattern.is_empty() && factor >= 0.0 && (factor as f32).is_finite() =>
            {
                Ok(LrScale { pattern: pattern.to_string(), factor })
            }
            _ => Err("is not PATTERN=FACTOR, such as head=10 or blocks.*=0.1".to_string()),
        }
    }
}

impl fmt::Display for LrScale {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.pattern, self.factor)
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Groups {
    /// The last that matches a name holds.
    pub lr_scale: Vec<LrScale>,
    /// Each layer learns slower than the next by this factor (Bao et al., 2022).
    pub layer_decay: Option<f64>,
    /// Blocks of the model.
    pub depth: usize,
    /// Blocks of each of its stages; one stage, or none said, has blocks without a stage in their names.
    #[serde(default)]
    pub stages: Vec<usize>,
    /// Parameters that don't decay, beside the usual ones.
    pub no_decay: Vec<String>,
    /// Exempts biases, norms, the class token and positions from weight decay, as is usual.
    pub usual_exclusions: bool,
}

impl Groups {
    pub fn group(&self, name: &str) -> ParamGroup {
        let scale = self.lr_scale.iter().rfind(|s| matches(&s.pattern, name)).map_or(1.0, |s| s.factor);
        let layer = self.layer_decay.map_or(1.0, |decay| decay.powi(self.height(name) as i32));
        let excluded = self.no_decay.iter().any(|pattern| matches(pattern, name));
        let usual = self.usual_exclusions && !is_matrix(name);
        ParamGroup { lr_scale: scale * layer, decays: !excluded && !usual }
    }

    /// The number of a parameter's block, through all stages. Patches are merged in the first block of a stage.
    fn block(&self, name: &str) -> Option<usize> {
        let number = |text: &str| text.split('.').next()?.parse::<usize>().ok();
        if let Some(rest) = name.strip_prefix("blocks.") {
            return number(rest);
        }
        let (stage, rest) = name.strip_prefix("layers.")?.split_once('.')?;
        let before: usize = self.stages.get(..stage.parse().ok()?)?.iter().sum();
        let block = rest.strip_prefix("blocks.").map_or(Some(0), number)?;
        Some(before + block)
    }

    /// Layers above this parameter's: the embedding is layer 0, block i is i + 1, the head and what precedes it depth + 1.
    fn height(&self, name: &str) -> usize {
        let block = self.block(name);
        let parts = ["pos_embed", "patch_embed"];
        let embedding = name.ends_with("_token") || parts.iter().any(|part| matches(part, name));
        let layer = match block {
            Some(i) => i.saturating_add(1),
            None if embedding => 0,
            None => self.depth + 1,
        };
        (self.depth + 1).saturating_sub(layer)
    }
}

/// Weights of linear layers and convolutions, by name: those of norms are vectors. The network that makes position biases (Swin
/// V2) is left alone whole, as its authors have it.
fn is_matrix(name: &str) -> bool {
    let Some(owner) = name.strip_suffix(".weight").filter(|name| !name.contains(".cpb_mlp.")) else {
        return false;
    };
    let owner = owner.rsplit('.').next().unwrap_or(owner);
    !owner.contains("norm") && owner != "bn"
}

/// A pattern with `*` must match the whole name; without, it is a name or the part of one before a dot.
fn matches(pattern: &str, name: &str) -> bool {
    if pattern.contains('*') {
        return glob(pattern.as_bytes(), name.as_bytes());
    }
    name.strip_prefix(pattern).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

/// `*` stands for any text. Going back only to the last star keeps the time in bounds for any pattern.
fn glob(pattern: &[u8], name: &[u8]) -> bool {
    let (mut p, mut n) = (0, 0);
    let mut star: Option<(usize, usize)> = None;
    while n < name.len() {
        if pattern.get(p) == Some(&b'*') {
            star = Some((p, n));
            p += 1;
        } else if pattern.get(p) == Some(&name[n]) {
            p += 1;
            n += 1;
        } else if let Some((at, from)) = star {
            star = Some((at, from + 1));
            p = at + 1;
            n = from + 1;
        } else {
            return false;
        }
    }
    pattern[p..].iter().all(|c| *c == b'*')
}

/// `--no-decay none` lifts the usual exclusions.
const NOTHING: &str = "none";

impl Raw {
    pub(super) fn groups(&self, network: &Network, log: &mut Log) -> Result<Groups, ConfigError> {
        let names = network.expected();
        let known = |pattern: &str| names.iter().any(|(name, _)| matches(pattern, name));
        let no_such = "matches no parameter of this model; they are named like blocks.0.attn.qkv.weight";
        if let Some(scale) = self.lr_scale.iter().find(|scale| !known(&scale.pattern)) {
            return Err(ConfigError::setting("lr-scale", scale, no_such));
        }
        let no_decay: Vec<String> = self.no_decay.iter().filter(|p| *p != NOTHING).cloned().collect();
        if let Some(pattern) = no_decay.iter().find(|pattern| !known(pattern)) {
            return Err(ConfigError::setting("no-decay", pattern, no_such));
        }
        if let Some(pattern) = self.freeze.iter().find(|pattern| !known(pattern)) {
            return Err(ConfigError::setting("freeze", pattern, no_such));
        }
        // A frozen parameter is one whose rate is 0, whatever else is said of it.
        let frozen = self.freeze.iter().map(|pattern| LrScale { pattern: pattern.clone(), factor: 0.0 });
        let lr_scale: Vec<LrScale> = self.lr_scale.iter().cloned().chain(frozen).collect();
        if let Some(decay) = self.layer_decay.filter(|d| !(*d > 0.0 && *d <= 1.0)) {
            return Err(ConfigError::setting("layer-decay", decay, "must lie in 0 < F ≤ 1"));
        }
        let factor = |name: &str| lr_scale.iter().rfind(|s| matches(&s.pattern, name)).map(|s| s.factor);
        if let Some(scale) =
            lr_scale.last().filter(|_| names.iter().all(|(name, _)| factor(name) == Some(0.0)))
        {
            let why = "leaves no parameter that learns";
            return Err(match self.freeze.last() {
                Some(pattern) => ConfigError::setting("freeze", pattern, why),
                None => ConfigError::setting("lr-scale", scale, why),
            });
        }
        self.freeze.iter().for_each(|pattern| log.note("freeze", pattern, Origin::Flag));
        self.lr_scale.iter().for_each(|scale| log.note("lr-scale", scale, Origin::Flag));
        self.no_decay.iter().for_each(|pattern| log.note("no-decay", pattern, Origin::Flag));
        log.typed("layer-decay", self.layer_decay);
        Ok(Groups {
            lr_scale,
            layer_decay: self.layer_decay,
            depth: network.stages().iter().sum(),
            stages: network.stages(),
            usual_exclusions: no_decay.len() == self.no_decay.len(),
            no_decay,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use models::vit::{Pool, Vit};

    fn groups(raw: Raw) -> Groups {
        of_model("vit-ti/4", 32, raw)
    }

    fn of_model(name: &str, image: usize, raw: Raw) -> Groups {
        let network = Network::named(name, image, 3, 10).unwrap();
        raw.groups(&network, &mut Log::default()).unwrap()
    }

    #[test]
    fn by_default_matrices_decay_and_nothing_else() {
        for pool in [Pool::ClassToken, Pool::Mean] {
            let vit = Vit { pool, ..Vit::named("vit-nano/4", 32, 3, 10).unwrap() };
            let groups = Raw::default().groups(&Network::Vit(vit.clone()), &mut Log::default()).unwrap();
            let model = vit.build(1, graph::Loss::default(), graph::DType::F32).unwrap();
            assert!(model.train.states.len() > 50);
            for state in &model.train.states {
                // The rule before there were groups.
                let decays = state.name.ends_with(".weight") && state.ty.shape.rank() >= 2;
                assert_eq!(groups.group(&state.name), ParamGroup { lr_scale: 1.0, decays }, "{}", state.name);
            }
        }
    }

    #[test]
    fn rates_scale_by_pattern_and_by_layer() {
        let scale = |text: &str| text.parse::<LrScale>().unwrap();
        let scaled = groups(Raw {
            lr_scale: vec![scale("blocks.*=0.5"), scale("blocks.1=2"), scale("*.bias=3")],
            ..Raw::default()
        });
        let of = |groups: &Groups, name: &str| groups.group(name).lr_scale;
        assert_eq!(of(&scaled, "blocks.0.mlp.fc1.weight"), 0.5);
        assert_eq!(of(&scaled, "blocks.1.mlp.fc1.weight"), 2.0);
        assert_eq!(of(&scaled, "blocks.11.mlp.fc1.weight"), 0.5, "blocks.1 is not a prefix of blocks.11");
        assert_eq!(of(&scaled, "blocks.1.mlp.fc1.bias"), 3.0, "the last pattern holds");
        assert_eq!(of(&scaled, "head.weight"), 1.0);

        // BEiT: factor^(depth + 1 - layer), twelve blocks.
        let layered = groups(Raw { layer_decay: Some(0.5), ..Raw::default() });
        assert_eq!(of(&layered, "head.weight"), 1.0);
        assert_eq!(of(&layered, "norm.bias"), 1.0);
        assert_eq!(of(&layered, "blocks.11.attn.qkv.weight"), 0.5);
        assert_eq!(of(&layered, "blocks.0.attn.qkv.weight"), 0.5f64.powi(12));
        assert_eq!(of(&layered, "patch_embed.proj.weight"), 0.5f64.powi(13));
        assert_eq!(of(&layered, "cls_token"), 0.5f64.powi(13));
    }

    #[test]
    fn layers_of_a_swin_count_through_its_stages() {
        let groups = of_model("swinv2-ti/w8", 256, Raw { layer_decay: Some(0.5), ..Raw::default() });
        for (name, height, decays) in [
            ("head.fc.weight", 0, true),
            ("norm.weight", 0, false),
            ("layers.3.blocks.1.mlp.fc2.weight", 1, true),
            ("layers.1.blocks.0.attn.qkv.weight", 10, true),
            ("layers.1.downsample.reduction.weight", 10, true),
            ("layers.0.blocks.0.attn.q_bias", 12, false),
            ("layers.0.blocks.0.attn.logit_scale", 12, false),
            ("layers.0.blocks.0.attn.cpb_mlp.2.weight", 12, false),
            ("patch_embed.proj.weight", 13, true),
            ("patch_embed.norm.weight", 13, false),
        ] {
            assert_eq!(groups.group(name), ParamGroup { lr_scale: 0.5f64.powi(height), decays }, "{name}");
        }
    }

    #[test]
    fn decay_can_be_kept_from_more_or_from_none() {
        let head = groups(Raw { no_decay: vec!["head".into()], ..Raw::default() });
        assert!(!head.group("head.weight").decays && !head.group("head.bias").decays);
        assert!(head.group("blocks.0.attn.qkv.weight").decays);
        let all = groups(Raw { no_decay: vec!["none".into()], ..Raw::default() });
        assert!(all.group("head.bias").decays && all.group("pos_embed").decays);
    }

    #[test]
    fn frozen_parameters_do_not_learn_whatever_their_rate() {
        let raw = Raw {
            freeze: vec!["blocks.0".into(), "*_embed*".into()],
            lr_scale: vec!["blocks.*=3".parse().unwrap()],
            ..Raw::default()
        };
        let groups = groups(raw);
        for (name, frozen) in [
            ("blocks.0.attn.qkv.weight", true),
            ("patch_embed.proj.bias", true),
            ("pos_embed", true),
            ("blocks.1.attn.qkv.weight", false),
            ("head.weight", false),
        ] {
            assert_eq!(groups.group(name).is_frozen(), frozen, "{name}");
        }
        assert_eq!(groups.group("blocks.1.attn.qkv.weight").lr_scale, 3.0);
    }

    #[test]
    fn a_pattern_that_matches_nothing_is_refused() {
        let network = Network::named("vit-ti/4", 32, 3, 10).unwrap();
        let message = |raw: Raw| raw.groups(&network, &mut Log::default()).unwrap_err().to_string();
        let scale = LrScale { pattern: "block.*".into(), factor: 2.0 };
        let text = message(Raw { lr_scale: vec![scale], ..Raw::default() });
        assert!(text.starts_with("--lr-scale block.*=2: matches no parameter"), "{text}");
        assert!(
            message(Raw { no_decay: vec!["heads".into()], ..Raw::default() }).contains("--no-decay heads")
        );
        let freeze = |pattern: &str| message(Raw { freeze: vec![pattern.into()], ..Raw::default() });
        assert!(freeze("heads").starts_with("--freeze heads: matches no parameter"));
        assert_eq!(freeze("*"), "--freeze *: leaves no parameter that learns");
        assert!(message(Raw { layer_decay: Some(0.0), ..Raw::default() }).contains("--layer-decay 0"));
        for bad in ["head", "=1", "head=-1", "head=inf", "head=x"] {
            assert!(bad.parse::<LrScale>().is_err(), "{bad}");
        }
    }

    #[test]
    fn stars_match_any_text() {
        assert!(glob(b"*", b"") && glob(b"a*c*", b"abcabc") && glob(b"**x", b"x"));
        assert!(!glob(b"a*d", b"abc") && !glob(b"*b", b"abc"));
    }
}
