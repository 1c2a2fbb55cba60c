//! What is evaluated, on what, and how, for people and as JSON.

use config::sets::Sets;
use config::{EvalMode, Geometry};
use serde_json::{Value, json};
use text::{many, printable};
use train::evaluated::Evaluated;

/// An evaluation before it begins.
pub struct Subject {
    weights: String,
    model: String,
    size: [usize; 2],
    classes: usize,
    data: String,
    images: usize,
    /// How an image comes to the model's size.
    reading: Reading,
    mean: Vec<f32>,
    std: Vec<f32>,
    /// Flag: nothing states mean and deviation.
    assumed: bool,
    /// Files beside the weights that say all this.
    told_by: Vec<&'static str>,
    norm_eps: f64,
}

enum Reading {
    Image { geometry: Geometry, interpolation: String },
    Pixels { fit: (usize, usize), mode: EvalMode, stride: usize },
}

impl Subject {
    pub fn of(evaluated: &Evaluated, sets: &Sets) -> Self {
        let Evaluated { file, run, .. } = evaluated;
        let augmentation = &run.augmentation;
        let reading = match &run.pixels {
            Some(pixels) => {
                Reading::Pixels { fit: pixels.fit, mode: pixels.eval_mode, stride: pixels.eval_stride }
            }
            None => {
                let interpolation = augmentation.interpolation.to_string();
                Reading::Image { geometry: augmentation.eval, interpolation }
            }
        };
        Subject {
            weights: file.display().to_string(),
            model: run.model.clone(),
            size: run.network.size(),
            classes: run.network.classes(),
            data: run.data.source.to_string(),
            images: sets.test_images(),
            reading,
            mean: augmentation.mean.clone(),
            std: augmentation.std.clone(),
            assumed: evaluated.assumed,
            told_by: evaluated.told_by.clone(),
            norm_eps: run.network.norm_eps(),
        }
    }

    pub fn print(&self) {
        let [height, width] = self.size;
        let [weights, model, data] =
            [&self.weights, &self.model, &self.data].map(|text| printable::line(text));
        println!("{weights}");
        println!("  model          {model}, {width}×{height} px, {}", many(self.classes, "class"));
        if !self.told_by.is_empty() {
            println!("  told by        {}; layer norms with {:e}", self.told_by.join(", "), self.norm_eps);
        }
        println!("  data           {data}, {}", many(self.images, "image"));
        println!("  preprocessing  {}", self.preprocessing());
        if self.assumed {
            println!("                 (mean and deviation are assumed: neither the weights nor flags say)");
        }
    }

    fn preprocessing(&self) -> String {
        let [height, width] = self.size;
        let reading = match &self.reading {
            Reading::Image { geometry, interpolation } => format!("{geometry}, {interpolation}"),
            Reading::Pixels { fit: (long, short), mode, stride } => {
                let how = match mode {
                    EvalMode::Whole => "read whole".to_string(),
                    EvalMode::Slide => format!("read in windows of {width}×{height} px, {stride} px apart"),
                };
                format!("resized to fit {long}×{short} px, {how}")
            }
        };
        format!("{reading}; mean {}, std {}", by_channel(&self.mean), by_channel(&self.std))
    }

    /// What is known before, for a report that adds what was found.
    pub fn to_json(&self) -> Value {
        let mut preprocessing = match &self.reading {
            Reading::Image { geometry, interpolation } => {
                let resize = match geometry {
                    Geometry::CenterCrop { resize } => Some(resize),
                    _ => None,
                };
                json!({"eval_resize": resize, "interpolation": interpolation})
            }
            Reading::Pixels { fit, mode, stride } => {
                let stride = (*mode == EvalMode::Slide).then_some(stride);
                json!({"fit": fit, "eval_mode": mode, "eval_stride": stride})
            }
        };
        preprocessing["mean"] = json!(self.mean);
        preprocessing["std"] = json!(self.std);
        preprocessing["assumed"] = json!(self.assumed);
        json!({
            "weights": self.weights,
            "model": self.model,
            "image_size": self.size,
            "norm_eps": self.norm_eps,
            "told_by": self.told_by,
            "data": self.data,
            "images": self.images,
            "preprocessing": preprocessing,
        })
    }
}

/// One number if all are alike.
fn by_channel(values: &[f32]) -> String {
    let alike = values.windows(2).all(|pair| pair[0] == pair[1]);
    let shown = if alike { &values[..values.len().min(1)] } else { values };
    shown.iter().map(f32::to_string).collect::<Vec<_>>().join(",")
}
