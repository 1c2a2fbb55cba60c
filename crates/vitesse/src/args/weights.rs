//! Flags of the commands that read weights. Each setting overrides one thing of what the weights say about themselves; what could change
//! nothing, or is refused, is not offered. Settings stand last: in a help text, what follows them would stand under their headings.

use super::Overwrite;
use super::settings::Settings;
use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use config::settings::{CLASSIFY, EVAL, EXPORT, SEGMENT};
use models::names::Convention;
use std::path::PathBuf;

#[derive(Args, Clone)]
pub struct EvalArgs {
    /// A run's folder (its best checkpoint is taken), a checkpoint, safetensors or .pth; settings are those of the run, as far as the
    /// file has them, and flags override them one by one
    #[arg(long, value_name = "RUN|WEIGHTS")]
    pub weights: PathBuf,
    /// Write the confusion matrix as a picture or as CSV: a row for each class, a column for each class it was taken for
    #[arg(long, value_name = "FILE.png|.svg|.csv")]
    pub confusion: Option<PathBuf>,
    /// Write the logits of all evaluated images, in order, with the labels and the images as the model saw them
    #[arg(long, value_name = "FILE.safetensors")]
    pub logits: Option<PathBuf>,
    /// Write the predicted masks of images with masks: PNG files under the images' names whose values are classes, from 0 on
    #[arg(long, value_name = "DIR", conflicts_with = "logits")]
    pub masks: Option<PathBuf>,
    /// With --logits: leave out the images
    #[arg(long, requires = "logits")]
    pub no_images: bool,
    #[command(flatten)]
    pub overwrite: Overwrite,
    /// Print JSON instead of text
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub settings: Settings<{ EVAL }>,
}

#[derive(Args, Clone)]
pub struct ClassifyArgs {
    /// JPEG, PNG or WebP files, or folders of them
    #[arg(required = true, value_name = "IMAGE|DIR")]
    pub images: Vec<PathBuf>,
    /// A run's folder, a checkpoint, safetensors or .pth
    #[arg(long, value_name = "RUN|WEIGHTS")]
    pub weights: PathBuf,
    /// Number of classes to print for each image
    #[arg(long, default_value_t = 5)]
    pub top: usize,
    /// Draw the images with their most probable classes into a PNG file
    #[arg(long, value_name = "FILE.png")]
    pub grid: Option<PathBuf>,
    #[command(flatten)]
    pub overwrite: Overwrite,
    /// Print JSON instead of text
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub settings: Settings<{ CLASSIFY }>,
}

#[derive(Args, Clone)]
pub struct SegmentArgs {
    /// JPEG, PNG or WebP files, or folders of them
    #[arg(required = true, value_name = "IMAGE|DIR")]
    pub images: Vec<PathBuf>,
    /// A run's folder, a checkpoint, safetensors or .pth
    #[arg(long, value_name = "RUN|WEIGHTS", visible_alias = "run")]
    pub weights: PathBuf,
    /// Where NAME.mask.png (values are classes, from 0 on) and NAME.overlay.png (with a legend) go; of images in a folder, under their names in it
    #[arg(long, value_name = "DIR", default_value = ".")]
    pub out: PathBuf,
    /// Number of classes to print for each image
    #[arg(long, default_value_t = 5)]
    pub top: usize,
    #[command(flatten)]
    pub overwrite: Overwrite,
    /// Print JSON instead of text
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub settings: Settings<{ SEGMENT }>,
}

#[derive(Args, Clone)]
pub struct ExportArgs {
    /// A run's folder (its best checkpoint is taken), a checkpoint, safetensors or .pth
    #[arg(value_name = "RUN|WEIGHTS")]
    pub from: PathBuf,
    /// The file to write: weights as safetensors, or a classifier with its graph as ONNX
    #[arg(value_name = "FILE.safetensors|FILE.onnx")]
    pub out: PathBuf,
    /// Whose names to use in safetensors [default: timm]
    #[arg(long, value_name = "timm|torchvision|huggingface", hide_possible_values = true,
        value_parser = PossibleValuesParser::new(["timm", "torchvision", "huggingface"]).try_map(|name| name.parse::<Convention>()))]
    pub to: Option<Convention>,
    #[command(flatten)]
    pub overwrite: Overwrite,
    #[command(flatten)]
    pub settings: Settings<{ EXPORT }>,
}
