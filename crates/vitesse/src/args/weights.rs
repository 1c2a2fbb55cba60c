//! Flags of the commands that read weights. Each overrides one thing of what the weights say about themselves; what could change
//! nothing, or is refused, is not offered. Groups stand last: in a help text, what follows one would stand under its heading.

use clap::Args;
use config::Raw;
use config::{Device, EvalMode, Interpolation, Precision, Residual};
use std::path::PathBuf;

/// The model of the weights.
#[derive(Args, Clone)]
#[command(next_help_heading = "Model")]
pub struct ModelOfWeightsArgs {
    /// The model, as for `train` [default: as the weights say]
    #[arg(long, value_name = "MODEL")]
    model: Option<String>,
    /// Side of the square images, or of the windows on images with masks, in pixels; positions of a ViT are resized, windows of a Swin
    /// V2 stay those of training [default: as the weights say]
    #[arg(long, value_name = "PIXELS")]
    image_size: Option<usize>,
    /// Classes of the head [default: as the weights have]
    #[arg(long)]
    classes: Option<usize>,
}

/// How a value of an image becomes what a model reads.
#[derive(Args, Clone)]
#[command(next_help_heading = "Preprocessing")]
pub struct NormaliseArgs {
    /// Mean of an image's values, from 0 to 1: one number, or one for each channel [default: as the weights say, or 0.5; with masks
    /// ImageNet's]
    #[arg(long, value_name = "NUMBERS", value_delimiter = ',')]
    mean: Vec<f32>,
    /// Their standard deviation [default: as the weights say, or 0.5; with masks ImageNet's]
    #[arg(long, value_name = "NUMBERS", value_delimiter = ',')]
    std: Vec<f32>,
}

/// How images with one class each come to the model's size.
#[derive(Args, Clone)]
#[command(next_help_heading = "Preprocessing")]
pub struct ResizeArgs {
    /// bilinear or bicubic, where images are resized [default: as the weights say, or bilinear]
    #[arg(long, value_name = "KIND")]
    interpolation: Option<Interpolation>,
    /// Take the middle of images resized to this, in pixels [default: as the weights say, or the whole image resized]
    #[arg(long, value_name = "PIXELS")]
    eval_resize: Option<usize>,
}

/// How images of any size are read where every pixel has a class.
#[derive(Args, Clone)]
#[command(next_help_heading = "Preprocessing")]
pub struct PixelArgs {
    /// With masks: read images whole, or slide: through windows [default: as the weights say, or whole; slide for a ViT]
    #[arg(long, value_name = "MODE")]
    eval_mode: Option<EvalMode>,
    /// With --eval-mode slide: from window to window, in pixels [default: as the weights say, or two thirds of the image size]
    #[arg(long, value_name = "PIXELS")]
    eval_stride: Option<usize>,
}

/// What weights are scored on.
#[derive(Args, Clone)]
#[command(next_help_heading = "Data")]
pub struct ScoredArgs {
    #[arg(long, value_name = "SET", help = config::data_help() + " [default: what the weights were trained on]")]
    data: Option<String>,
    /// Images to draw, of the synthetic sets [default: as in training]
    #[arg(long, value_name = "IMAGES")]
    test_samples: Option<usize>,
    /// Seed of the synthetic sets [default: as in training]
    #[arg(long)]
    seed: Option<u64>,
    /// Threads that read images ahead, of images with one class each [default: 1, or all where files are decoded]
    #[arg(long, value_name = "THREADS")]
    workers: Option<usize>,
    /// Leave out images that can't be read, instead of ending
    #[arg(long)]
    skip_bad_images: bool,
}

/// What computes without training.
#[derive(Args, Clone)]
#[command(next_help_heading = "Run")]
pub struct ComputeArgs {
    /// Images that are computed at once [default: as in training, or 64; with masks 8]
    #[arg(long, value_name = "IMAGES")]
    batch_size: Option<usize>,
    /// CPU threads [default: all]
    #[arg(long)]
    threads: Option<usize>,
    #[command(flatten)]
    device: SingleDeviceArgs,
}

/// As [`super::settings::DeviceArgs`], where nothing is computed in fp64.
#[derive(Args, Clone)]
#[command(next_help_heading = "Run")]
pub struct SingleDeviceArgs {
    /// What computes: cpu or cuda [default: cpu]
    #[arg(long)]
    device: Option<Device>,
    /// What products are computed in: fp32, on a GPU also tf32, bf16 or fp16 [default: fp32; on a GPU as in training there, or bf16]
    #[arg(long, value_parser = single)]
    precision: Option<Precision>,
    /// With bf16 or fp16: what the residual stream is kept in, fp32 or half [default: fp32]
    #[arg(long, value_name = "TYPE")]
    residual: Option<Residual>,
    /// Let nothing that is measured decide how numbers are computed: on a GPU, products are made by the first algorithm proposed
    /// instead of the fastest, so that every run on such a GPU gives the same bits
    #[arg(long)]
    deterministic: bool,
}

fn single(word: &str) -> Result<Precision, String> {
    const WORDS: [Precision; 4] = [Precision::Fp32, Precision::Tf32, Precision::Bf16, Precision::Fp16];
    let known = WORDS.into_iter().find(|precision| precision.to_string() == word);
    known.ok_or_else(|| format!("is none of {}", WORDS.map(|precision| precision.to_string()).join(", ")))
}

impl ModelOfWeightsArgs {
    pub fn raw(self) -> Raw {
        let ModelOfWeightsArgs { model, image_size, classes } = self;
        Raw { model, image_size, classes, ..Raw::default() }
    }
}

impl NormaliseArgs {
    pub fn raw(self, raw: Raw) -> Raw {
        Raw { mean: self.mean, std: self.std, ..raw }
    }
}

impl ResizeArgs {
    pub fn raw(self, raw: Raw) -> Raw {
        Raw { interpolation: self.interpolation, eval_resize: self.eval_resize, ..raw }
    }
}

impl PixelArgs {
    pub fn raw(self, raw: Raw) -> Raw {
        Raw { eval_mode: self.eval_mode, eval_stride: self.eval_stride, ..raw }
    }
}

impl ScoredArgs {
    pub fn raw(self, raw: Raw) -> Raw {
        let ScoredArgs { data, test_samples, seed, workers, skip_bad_images } = self;
        Raw { data, test_samples, seed, workers, skip_bad_images, ..raw }
    }
}

impl ComputeArgs {
    pub fn raw(self, raw: Raw) -> Raw {
        self.device.raw(Raw { batch_size: self.batch_size, threads: self.threads, ..raw })
    }
}

impl SingleDeviceArgs {
    pub fn raw(self, raw: Raw) -> Raw {
        let SingleDeviceArgs { device, precision, residual, deterministic } = self;
        Raw { device, precision, residual, deterministic, ..raw }
    }
}

#[derive(Args, Clone)]
pub struct EvalArgs {
    /// A run's folder (its best checkpoint is taken), a checkpoint, safetensors or .pth; settings are those of the run, as far as the
    /// file has them, and flags override them one by one
    #[arg(long, value_name = "RUN|WEIGHTS")]
    pub weights: PathBuf,
    /// Write the confusion matrix as CSV: a row for each class, a column for each class it was taken for
    #[arg(long, value_name = "FILE.csv")]
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
    /// Print JSON instead of text
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    model: ModelOfWeightsArgs,
    #[command(flatten)]
    compute: ComputeArgs,
    #[command(flatten)]
    data: ScoredArgs,
    #[command(flatten)]
    normalise: NormaliseArgs,
    #[command(flatten)]
    resize: ResizeArgs,
    #[command(flatten)]
    pixels: PixelArgs,
}

impl EvalArgs {
    pub fn raw(&self) -> Raw {
        let EvalArgs { model, compute, data, normalise, resize, pixels, .. } = self.clone();
        compute.raw(data.raw(pixels.raw(resize.raw(normalise.raw(model.raw())))))
    }
}

#[derive(Args, Clone)]
pub struct ClassifyArgs {
    /// JPEG, PNG or WebP files
    #[arg(required = true, value_name = "IMAGE")]
    pub images: Vec<PathBuf>,
    /// A run's folder, a checkpoint, safetensors or .pth
    #[arg(long, value_name = "RUN|WEIGHTS")]
    pub weights: PathBuf,
    /// How many classes to show for each image
    #[arg(long, default_value_t = 5)]
    pub top: usize,
    /// Draw the images with their most probable classes into a PNG file
    #[arg(long, value_name = "FILE.png")]
    pub grid: Option<PathBuf>,
    /// Print JSON instead of text
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    model: ModelOfWeightsArgs,
    #[command(flatten)]
    compute: ComputeArgs,
    #[command(flatten)]
    normalise: NormaliseArgs,
    #[command(flatten)]
    resize: ResizeArgs,
}

impl ClassifyArgs {
    pub fn raw(&self) -> Raw {
        let ClassifyArgs { model, compute, normalise, resize, .. } = self.clone();
        compute.raw(resize.raw(normalise.raw(model.raw())))
    }
}

#[derive(Args, Clone)]
pub struct SegmentArgs {
    /// JPEG, PNG or WebP files
    #[arg(required = true, value_name = "IMAGE")]
    pub images: Vec<PathBuf>,
    /// A run's folder, a checkpoint, safetensors or .pth
    #[arg(long, value_name = "RUN|WEIGHTS", visible_alias = "run")]
    pub weights: PathBuf,
    /// Where NAME.mask.png (values are classes, from 0 on) and NAME.overlay.png (with a legend) go
    #[arg(long, value_name = "DIR", default_value = ".")]
    pub out: PathBuf,
    /// How many classes to tell of each image
    #[arg(long, default_value_t = 5)]
    pub top: usize,
    /// Print JSON instead of text
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    model: ModelOfWeightsArgs,
    #[command(flatten)]
    compute: ComputeArgs,
    #[command(flatten)]
    normalise: NormaliseArgs,
    #[command(flatten)]
    pixels: PixelArgs,
}

impl SegmentArgs {
    pub fn raw(&self) -> Raw {
        let SegmentArgs { model, compute, normalise, pixels, .. } = self.clone();
        compute.raw(pixels.raw(normalise.raw(model.raw())))
    }
}

#[derive(Args, Clone)]
pub struct ExportArgs {
    /// A run's folder (its best checkpoint is taken), a checkpoint, safetensors or .pth
    #[arg(value_name = "RUN|WEIGHTS")]
    pub from: PathBuf,
    /// The file to write
    #[arg(value_name = "FILE.safetensors")]
    pub out: PathBuf,
    /// Whose names to use
    #[arg(long, value_name = "timm|torchvision|huggingface", default_value = "timm")]
    pub to: models::names::Convention,
    #[command(flatten)]
    model: ModelOfWeightsArgs,
    #[command(flatten)]
    normalise: NormaliseArgs,
    #[command(flatten)]
    resize: ResizeArgs,
    #[command(flatten)]
    pixels: PixelArgs,
}

impl ExportArgs {
    pub fn raw(&self) -> Raw {
        let ExportArgs { model, normalise, resize, pixels, .. } = self.clone();
        pixels.raw(resize.raw(normalise.raw(model.raw())))
    }
}
