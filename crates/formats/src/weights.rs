//! Weights of models on disk: in which file format, under whose names, for which model.

use crate::checkpoint::{CONFIG, is_checkpoint};
use crate::hugging_face;
use crate::pth::{self, PthFault};
use crate::tensors::{self, Entry, FileFault, Reader, TensorFault};
use config::FileError;
use config::Resolved;
use config::card::{CARD, Card};
use graph::AVERAGE;
use models::Network;
use models::dense_names::{HEADS, to_torch};
use models::identify::Identity;
use models::names::{self, Convention, NameError, Tensor, Weights};
use models::positions::{PositionsError, resize_positions};
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

#[derive(Debug, thiserror::Error)]
pub enum WeightsError {
    #[error("{}: cannot {doing}: {source}", path.display())]
    Io { path: PathBuf, doing: &'static str, source: io::Error },
    #[error("{}: {fault}", path.display())]
    File { path: PathBuf, fault: FileFault },
    #[error("{}: tensor `{tensor}` {fault}", path.display())]
    Tensor { path: PathBuf, tensor: String, fault: TensorFault },
    #[error("{}: {fault}", path.display())]
    Pth { path: PathBuf, fault: PthFault },
    #[error("{}: {source}", path.display())]
    Names { path: PathBuf, source: NameError },
    #[error("{}: {source}", path.display())]
    Positions { path: PathBuf, source: PositionsError },
    #[error(
        "{}: its position biases were learned in windows of {found}×{found}, this model's are for {needed}×{needed}; a model \
         named w{found}to{window} carries them over",
        path.display()
    )]
    Window { path: PathBuf, found: usize, needed: usize, window: usize },
    #[error(
        "{}: its norms have {found:e} under their root, this model's {needed:e}: add --norm-eps {found:e}",
        path.display()
    )]
    NormEps { path: PathBuf, found: f64, needed: f64 },
    /// What they say about themselves.
    #[error(transparent)]
    Card(#[from] FileError),
    #[error("{}: weights of a classifier: with --new-head its backbone is taken, and the heads for pixels are new", path.display())]
    Headless { path: PathBuf },
}

impl WeightsError {
    /// Whether a file was read that is not as it was written.
    pub fn is_damage(&self) -> bool {
        match self {
            WeightsError::File { .. } | WeightsError::Tensor { .. } => true,
            WeightsError::Io { source, .. } => source.raw_os_error() == Some(libc::EIO),
            _ => false,
        }
    }
}

/// Metadata of a file.
type Metadata = BTreeMap<String, String>;

/// Reads the weights in a file, as f32: PyTorch's, safetensors or a checkpoint, whichever it is by its content.
pub fn read(path: &Path) -> Result<Weights, WeightsError> {
    read_all(path).map(|(weights, _)| weights)
}

/// With the file's metadata, which PyTorch's have none of.
fn read_all(path: &Path) -> Result<(Weights, Metadata), WeightsError> {
    if let Some(parts) = hugging_face::parts(path) {
        return read_parts(&parts?);
    }
    if pth::is_pth(path) {
        return Ok((pth::read(path)?, Metadata::new()));
    }
    let mut weights = Weights::new();
    let reader = Reader::open(path)?;
    let (is_checkpoint, metadata) = (is_checkpoint(&reader), reader.metadata().clone());
    reader.each(|name, shape, data| {
        weights.insert(name, Tensor { shape, data });
    })?;
    if !is_checkpoint {
        return Ok((weights, metadata));
    }
    // A checkpoint has states as they lie in memory; all other files have them as torch does.
    let names_error = |source| WeightsError::Names { path: path.to_path_buf(), source };
    let weights = to_torch(of_checkpoint(weights)).map_err(|error| names_error(error.into()))?;
    Ok((weights, metadata))
}

/// The weights of several files together.
fn read_parts(parts: &[PathBuf]) -> Result<(Weights, Metadata), WeightsError> {
    let mut weights = Weights::new();
    for part in parts {
        for (name, tensor) in read_all(part)?.0 {
            if weights.contains_key(&name) {
                return Err(WeightsError::Tensor {
                    path: part.clone(),
                    tensor: name,
                    fault: TensorFault::Twice,
                });
            }
            weights.insert(name, tensor);
        }
    }
    Ok((weights, Metadata::new()))
}

/// Writes tensors as f32 under their names. The file is there whole or not at all, even if the power fails.
pub fn write(
    path: &Path,
    weights: &Weights,
    metadata: &BTreeMap<String, String>,
) -> Result<(), WeightsError> {
    let entries: Vec<Entry<'_>> =
        weights.iter().map(|(name, t)| Entry { name, shape: &t.shape, values: &t.data }).collect();
    tensors::write(path, &entries, metadata)
}

/// Reads weights for a model, whatever their convention.
pub fn load_for(path: &Path, network: &Network, new_head: bool) -> Result<Weights, WeightsError> {
    Named::read(path)?.for_model(network, new_head)
}

/// The weights of a file under canonical names, before it is known for which model.
pub struct Named {
    path: PathBuf,
    weights: Weights,
    /// Side of a Swin V2's windows, of files that hold the table of offsets.
    window: Option<usize>,
    /// What shapes say.
    identity: Identity,
    /// What they say about themselves, and the configuration of the run they come from, as JSON.
    card: Option<String>,
    pub config: Option<String>,
}

impl Named {
    pub fn read(path: &Path) -> Result<Self, WeightsError> {
        let name_error = |source| WeightsError::Names { path: path.to_path_buf(), source };
        let (weights, mut metadata) = read_all(path)?;
        let (window, own_window) = (names::window_of(&weights), names::own_window_of(&weights));
        let convention = names::detect(weights.keys().map(String::as_str)).map_err(name_error)?;
        let weights = names::to_canonical(weights, convention).map_err(name_error)?;
        let identity = Identity::of(&weights, own_window);
        let (card, config) = (metadata.remove(CARD), metadata.remove(CONFIG));
        Ok(Named { path: path.to_path_buf(), weights, window, identity, card, config })
    }

    /// What is known of the name of a Swin V2 that doesn't tell its windows.
    pub fn but_for_window(&self) -> Option<&str> {
        self.identity.but_for_window.as_deref()
    }

    /// What they say about themselves.
    pub fn card(&self) -> Result<Card, FileError> {
        let name = self.path.display().to_string();
        match (&self.card, &self.config) {
            (Some(card), _) => Card::from_json(&self.path, card),
            (None, Some(config)) => Ok(Card::of(&Resolved::from_json(&name, config)?)),
            (None, None) => Ok(match hugging_face::card_beside(&self.path, &self.identity)? {
                Some((card, _)) => card,
                None => Card::of_tensors(self.identity.clone()),
            }),
        }
    }

    /// Names of the files beside them that say something of weights that don't themselves.
    pub fn told_by(&self) -> Result<Vec<&'static str>, FileError> {
        if !self.is_foreign() {
            return Ok(vec![]);
        }
        Ok(hugging_face::card_beside(&self.path, &self.identity)?.map_or(vec![], |(_, files)| files))
    }

    /// True for weights that say nothing about themselves.
    fn is_foreign(&self) -> bool {
        self.card.is_none() && self.config.is_none()
    }

    /// For a model, with the position embedding resized to its grid. With `new_head`, a head of another number of classes is left
    /// out; and for a model of pixels, that of a classifier.
    pub fn for_model(self, network: &Network, new_head: bool) -> Result<Weights, WeightsError> {
        self.check_window(network)?;
        // What a run says about itself may be of another version; what files of others say is held against the model.
        let card = if self.is_foreign() { Some(self.card()?) } else { self.card().ok() };
        let eps = card.and_then(|card| card.norm_eps);
        if let Some(found) = eps.filter(|eps| *eps != network.norm_eps()) {
            return Err(WeightsError::NormEps { path: self.path, found, needed: network.norm_eps() });
        }
        let Named { path, mut weights, .. } = self;
        let name_error = |source| WeightsError::Names { path: path.clone(), source };
        let class_token = weights.contains_key("cls_token");
        if let (Some(pos), Some(positions)) = (weights.get_mut("pos_embed"), network.positions()) {
            *pos = resize_positions(pos, class_token && positions.class_token, positions.grid)
                .map_err(|source| WeightsError::Positions { path: path.clone(), source })?;
        }
        if is_headless(&weights, network) {
            if !new_head {
                return Err(WeightsError::Headless { path });
            }
            return backbone_of(weights, network).map_err(name_error);
        }
        if new_head {
            return without_head(weights, network).map_err(name_error);
        }
        names::check_against(&weights, &network.expected()).map_err(name_error)?;
        Ok(weights)
    }

    /// Position biases of a Swin V2 mean something only for the windows they were learned in. Which these were is known of files
    /// that vitesse wrote, and of those that hold the table of offsets.
    fn check_window(&self, network: &Network) -> Result<(), WeightsError> {
        let Some(windows) = network.windows() else { return Ok(()) };
        let (needed, window) = (windows.learned, windows.used);
        match self.window.or_else(|| self.card().ok()?.learned_window()) {
            Some(found) if found != needed => {
                Err(WeightsError::Window { path: self.path.clone(), found, needed, window })
            }
            _ => Ok(()),
        }
    }
}

fn is_of_dense_head(name: &str) -> bool {
    HEADS.iter().any(|head| name.starts_with(head))
}

/// Whether these are a classifier's, for a model whose heads have other names.
fn is_headless(weights: &Weights, network: &Network) -> bool {
    let wants = network.expected().iter().any(|(name, _)| is_of_dense_head(name));
    wants && !weights.keys().any(|name| is_of_dense_head(name))
}

/// Of a classifier, what is below its head; all of it must fit.
fn backbone_of(mut weights: Weights, network: &Network) -> Result<Weights, NameError> {
    weights.retain(|name, _| !name.starts_with("head.") && !name.starts_with("norm."));
    let mut expected = network.expected();
    expected.retain(|(name, _)| !is_of_dense_head(name));
    names::check_against(&weights, &expected)?;
    Ok(weights)
}

/// With the last layer of every head left out unless it has as many classes as the model's; the rest must fit.
fn without_head(mut weights: Weights, network: &Network) -> Result<Weights, NameError> {
    let expected = network.expected();
    let is_last =
        |name: &str| name.starts_with("head.") || (is_of_dense_head(name) && name.contains(".classifier."));
    let classes = weights.iter().find(|(name, _)| is_last(name) && name.ends_with(".weight"));
    let classes = classes.and_then(|(_, head)| head.shape.first().copied());
    if classes == Some(network.classes()) {
        names::check_against(&weights, &expected)?;
        return Ok(weights);
    }
    weights.retain(|name, _| !is_last(name));
    let heads = expected.iter().filter(|(name, _)| is_last(name));
    let mut whole = weights.clone();
    whole.extend(heads.map(|(name, shape)| {
        let data = vec![0.0; shape.iter().product()];
        (name.clone(), Tensor { shape: shape.clone(), data })
    }));
    names::check_against(&whole, &expected)?;
    Ok(weights)
}

/// Of a checkpoint, the weights: averages where it has them, since those are what was evaluated.
fn of_checkpoint(mut states: Weights) -> Weights {
    let parameters: Vec<String> = states.keys().filter(|name| is_parameter(name)).cloned().collect();
    let weight = |name: String| {
        let average = states.remove(&format!("{name}{AVERAGE}"));
        let own = states.remove(&name)?;
        let tensor = match average {
            Some(Tensor { shape, data }) if is_running(&name) => {
                Tensor { shape, data: with_count_of(data, &own.data) }
            }
            Some(average) => average,
            None => own,
        };
        Some((name, tensor))
    };
    parameters.into_iter().filter_map(weight).collect()
}

/// Running moments of a batch norm, by their name.
fn is_running(name: &str) -> bool {
    name.ends_with(".running")
}

/// Averaged running moments (3,C): mean and variance are averages, but the number of batches is what it is.
pub fn with_count_of(mut average: Vec<f32>, own: &[f32]) -> Vec<f32> {
    let counts = average.len() / 3 * 2;
    if average.len() == own.len() {
        average[counts..].copy_from_slice(&own[counts..]);
    }
    average
}

/// By its name in a checkpoint.
fn is_parameter(name: &str) -> bool {
    let beside = [".m", ".v", ".momentum", AVERAGE].iter().any(|suffix| name.ends_with(suffix));
    !beside && name != "applied" && name != "loss_scale"
}

/// Writes canonical weights for another library to read, with what they say about themselves and the configuration of the run they
/// come from, if any.
pub fn save_as(
    path: &Path,
    weights: &Weights,
    convention: Convention,
    card: &Card,
    config: Option<&str>,
) -> Result<(), WeightsError> {
    let renamed = names::from_canonical(weights.clone(), convention)
        .map_err(|source| WeightsError::Names { path: path.to_path_buf(), source })?;
    // Hugging Face's loader refuses files that do not name their framework.
    let mut metadata = BTreeMap::from([("format".to_string(), "pt".to_string())]);
    metadata.insert(CARD.to_string(), card.to_json()?);
    metadata.extend(config.map(|config| (CONFIG.to_string(), config.to_string())));
    write(path, &renamed, &metadata)
}

#[cfg(test)]
mod tests {
    use super::*;
    use models::vit::{Pool, Vit};
    use safetensors::SafeTensors;
    use std::fs;
    use testing::Folder;

    const SMALL: Vit = Vit {
        image: 8,
        patch: 4,
        channels: 1,
        classes: 3,
        width: 4,
        depth: 2,
        heads: 2,
        mlp: 8,
        pool: Pool::ClassToken,
        dropout: 0.0,
        attention_dropout: 0.0,
        drop_path: 0.0,
        norm_eps: 1e-6,
    };

    fn weights_of(vit: &Vit) -> Weights {
        let tensor = |seed: usize, shape: Vec<usize>| {
            let values = shape.iter().product();
            Tensor { shape, data: (0..values).map(|i| (seed * 1000 + i) as f32 / 7.0).collect() }
        };
        let expected = Network::Vit(vit.clone()).expected().into_iter().enumerate();
        expected.map(|(seed, (name, shape))| (name, tensor(seed, shape))).collect()
    }

    #[test]
    fn what_is_saved_in_any_convention_loads_again() {
        let folder = Folder::new("conventions");
        let weights = weights_of(&SMALL);
        for convention in Convention::ALL {
            let path = folder.0.join(format!("{convention}.safetensors"));
            save_as(&path, &weights, convention, &Card::default(), None).unwrap();
            assert_eq!(load_for(&path, &Network::Vit(SMALL), false).unwrap(), weights, "{convention}");
            let bytes = fs::read(&path).unwrap();
            let theirs = SafeTensors::deserialize(&bytes).unwrap();
            let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
            assert_eq!(header.metadata().as_ref().unwrap()["format"], "pt");
            assert_eq!(theirs.len(), read(&path).unwrap().len());
        }
        assert_eq!(fs::read_dir(&folder.0).unwrap().count(), 3, "no temporary file stays");
    }

    #[test]
    fn averaged_running_moments_keep_their_count() {
        let tensor = |data: &[f32]| Tensor { shape: vec![3, 2], data: data.to_vec() };
        let states = Weights::from([
            ("norm.running".to_string(), tensor(&[1.0, 2.0, 3.0, 4.0, 9.0, 9.0])),
            ("norm.running.ema".to_string(), tensor(&[0.5, 1.0, 1.5, 2.0, 6.3, 6.3])),
        ]);
        let weights = of_checkpoint(states);
        assert_eq!(
            weights,
            Weights::from([("norm.running".to_string(), tensor(&[0.5, 1.0, 1.5, 2.0, 9.0, 9.0]))])
        );
    }

    #[test]
    fn positions_are_resized_to_the_model() {
        let folder = Folder::new("positions");
        let path = folder.0.join("small.safetensors");
        let weights = weights_of(&SMALL);
        save_as(&path, &weights, Convention::Torchvision, &Card::default(), None).unwrap();
        let larger = load_for(&path, &Network::Vit(Vit { image: 16, ..SMALL }), false).unwrap();
        assert_eq!(larger["pos_embed"].shape, [1, 17, 4]);
        assert_eq!(larger["pos_embed"], resize_positions(&weights["pos_embed"], true, 4).unwrap());
        assert_eq!(larger["head.weight"], weights["head.weight"]);
    }

    #[test]
    fn weights_of_another_model_are_refused() {
        let folder = Folder::new("another");
        let path = folder.0.join("small.safetensors");
        save_as(&path, &weights_of(&SMALL), Convention::HuggingFace, &Card::default(), None).unwrap();
        let refused = |vit: &Vit| load_for(&path, &Network::Vit(vit.clone()), false).unwrap_err().to_string();
        let shown = path.display();
        assert_eq!(
            refused(&Vit { classes: 7, ..SMALL }),
            format!(
                "{shown}: weights are of another model: head.weight is [3, 4], this model needs [7, 4] \
                 (and 1 more tensor differs)"
            )
        );
        assert!(
            refused(&Vit { pool: Pool::Mean, ..SMALL })
                .ends_with("pos_embed is [1, 5, 4], this model needs [1, 4, 4] (and 5 more tensors differ)")
        );
        let mean = weights_of(&Vit { pool: Pool::Mean, ..SMALL });
        let error =
            save_as(&path, &mean, Convention::HuggingFace, &Card::default(), None).unwrap_err().to_string();
        assert!(error.ends_with("has no huggingface form: export it as timm"), "{error}");
    }

    #[test]
    fn a_damaged_file_is_an_error_or_other_weights_but_no_panic() {
        let folder = Folder::new("damage");
        let path = folder.0.join("whole.safetensors");
        save_as(&path, &weights_of(&SMALL), Convention::HuggingFace, &Card::default(), None).unwrap();
        let whole = fs::read(&path).unwrap();
        for i in 0..60 {
            let cut = &whole[..whole.len() * i / 60];
            let error =
                load_for(&folder.file("cut", cut), &Network::Vit(SMALL), false).unwrap_err().to_string();
            assert!(error.contains("cut: ") && !error.contains('\n'), "{error}");
        }
        let mut state = 1u64;
        let mut random = |below: usize| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) as usize % below
        };
        let header = 8 + u64::from_le_bytes(*whole.first_chunk().unwrap()) as usize;
        let mut refused = 0;
        for _ in 0..600 {
            let mut damaged = whole.clone();
            for _ in 0..=random(3) {
                damaged[random(header)] ^= 1 << random(8);
            }
            if let Err(error) = load_for(&folder.file("flip", &damaged), &Network::Vit(SMALL), false) {
                refused += 1;
                let error = error.to_string();
                assert!(error.contains("flip: ") && !error.contains('\n') && error.len() < 1000, "{error}");
            }
        }
        assert!(refused > 550, "only {refused} of 600 damaged headers were refused");
    }
}
