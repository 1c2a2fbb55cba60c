//! UPerNet's heads against transformers: loss, every gradient (those of the stages' outputs too), ten steps of AdamW,
//! running moments, and logits of evaluation. The reference is in `fixtures/`, made by `fixtures/make_upernet.py` in f64.

mod common;

use common::{compiled_with, norm, settings};
use cpu::{Executor, Options, Which};
use graph::{Builder, DType, Graph, Header, Init, Key, Loss, Model, Optimizer, Settings};
use models::dense_names::{from_torch, to_torch};
use models::names::{Tensor, Weights};
use models::upernet::UperNet;
use serde_json::Value;
use testing::formula::{units, words};

const GRADIENT: f64 = 1e-4;
const STEPS: f64 = 1e-3;

fn fixture() -> Value {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/upernet.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value} is not a number"))
}

fn whole(value: &Value) -> usize {
    value.as_u64().unwrap_or_else(|| panic!("{value} is not a whole number")) as usize
}

fn weight(name: &str, shape: &[usize], i: usize) -> f64 {
    let u = units(name)(i);
    let value = match name {
        _ if name.starts_with("stage.") => u,
        _ if name.ends_with("norm.weight") => 1.0 + 0.1 * u,
        _ if name.ends_with(".weight") => {
            u * (3.0 / shape[1..].iter().product::<usize>() as f64).sqrt() * 0.8
        }
        _ => 0.05 * u,
    };
    f64::from(value as f32)
}

struct Heads {
    config: Value,
    net: UperNet,
    size: (usize, usize),
}

impl Heads {
    fn of(config: &Value) -> Self {
        let size = |key: &str| whole(&config[key]);
        let (classes, channels, auxiliary) = (size("classes"), size("channels"), size("auxiliary"));
        let net = UperNet { classes, channels, auxiliary, dropout: 0.0 };
        Heads { config: config.clone(), net, size: (size("height"), size("width")) }
    }

    fn pixels(&self) -> usize {
        whole(&self.config["batch"]) * self.size.0 * self.size.1
    }

    fn graph(&self, training: bool) -> Graph {
        let mut b = Builder::new(DType::F32, training);
        let batch = whole(&self.config["batch"]);
        let targets = b.targets([batch, self.size.0, self.size.1], false);
        let stages = [0, 1, 2, 3].map(|i| {
            let (size, width) = (&self.config["sizes"][i], whole(&self.config["widths"][i]));
            let shape = [batch, whole(&size[0]), whole(&size[1]), width];
            b.parameter(&format!("stage.{i}"), shape, Init::Zeros)
        });
        if training {
            let ends = self.net.finish(&mut b, stages, self.size, targets, Loss::default());
            return b.finish(&ends.values()).unwrap();
        }
        let logits = self.net.heads(&mut b, stages, self.size);
        let (loss, stats) = b.weighted_losses(logits.main, &[], targets, 0.0);
        b.finish(&[loss, stats, logits.main, logits.auxiliary]).unwrap()
    }

    fn executor(&self, optimizer: Optimizer) -> Executor<f32> {
        let (height, width) = self.size;
        let key = Key { batch: whole(&self.config["batch"]), height, width };
        let model = Model { train: self.graph(true), eval: self.graph(false), key };
        let target = cpu::Target { threads: 2 };
        let settings = Settings { optimizer, max_grad_norm: None, ..settings(&target) };
        let mut executor = Executor::new(compiled_with(model, &settings), Options::alone(2, 1)).unwrap();
        for state in executor.program().states.clone().iter().filter(|s| s.is_parameter()) {
            let id = executor.find_state(&state.name).unwrap();
            for (i, value) in executor.state_mut(id).unwrap().iter_mut().enumerate() {
                *value = weight(&state.name, &state.ty.shape.0, i) as f32;
            }
        }
        executor
    }

    fn fill(&self, executor: &mut Executor<f32>, which: Which) {
        let classes = self.net.classes as u64;
        let labels = executor.labels(which).unwrap().iter_mut().enumerate();
        labels.for_each(|(i, label)| *label = (words("labels")(i) % classes) as i32);
        let weights = executor.input(which, "weights").unwrap().iter_mut().enumerate();
        weights.for_each(|(i, weight)| *weight = f32::from(u8::from(!words("ignored")(i).is_multiple_of(7))));
    }
}

fn state(executor: &Executor<f32>, name: &str) -> Vec<f64> {
    let id = executor.find_state(name).unwrap_or_else(|| panic!("no state {name}"));
    executor.state(id).iter().map(|x| f64::from(*x)).collect()
}

/// Largest error of a tensor's norm, projection and elements, relative to the reference norm.
fn error(name: &str, tensor: &[f64], reference: &Value) -> f64 {
    let name = format!("projection/{name}");
    let units = units(&name);
    let projected: f64 = tensor.iter().enumerate().map(|(i, x)| x * units(i)).sum();
    let mut error = (norm(tensor) - number(&reference["norm"])).abs();
    error = error.max((projected - number(&reference["projection"])).abs());
    for pair in reference["elements"].as_array().unwrap() {
        error = error.max((tensor[whole(&pair[0])] - number(&pair[1])).abs());
    }
    error / number(&reference["norm"])
}

/// Holds every tensor of `references` against what `tensor` has for its name.
fn agree(what: &str, references: &Value, allowed: f64, tensor: impl Fn(&str) -> (Vec<f64>, f64)) {
    let mut worst = (String::new(), 0.0);
    for (name, reference) in references.as_object().unwrap() {
        let (values, rounding) = tensor(name);
        let off = error(name, &values, reference);
        assert!(off < allowed + rounding, "{what} of {name} is off by {off:.2e}");
        if off > worst.1 {
            worst = (name.clone(), off);
        }
    }
    println!("{what}: off by {:.1e} at worst ({})", worst.1, worst.0);
}

#[test]
fn heads_agree_with_transformers() {
    let fixture = fixture();
    let heads = Heads::of(&fixture["config"]);
    let hyper = |key: &str| number(&fixture["hyper"][key]);
    let (beta1, beta2, eps) = (hyper("beta1"), hyper("beta2"), hyper("eps"));
    let weight_decay = hyper("weight_decay");
    let mut executor = heads.executor(Optimizer::AdamW { beta1, beta2, eps, weight_decay });
    let (nominal, counted) = (heads.pixels() as f64, number(&fixture["counted"]));
    let (seed, learning_rate) = (1, hyper("lr"));
    let header = Header { seed, step: 0, first_sample: 0, learning_rate, nominal };

    for (step, expected) in fixture["losses"].as_array().unwrap().iter().enumerate() {
        heads.fill(&mut executor, Which::Last);
        executor.run(Which::Last, &Header { step: step as u64, ..header }).unwrap();
        if step == 0 {
            let names = fixture["gradients"].as_object().unwrap().len();
            assert_eq!(names, executor.program().states.iter().filter(|s| s.is_parameter()).count());
            agree("gradient", &fixture["gradients"], GRADIENT, |name| {
                // Of the mean over all pixels so far; `update` makes it that over those that count.
                let gradient = state(&executor, &format!("{name}.grad"));
                (gradient.iter().map(|g| g * nominal / counted).collect(), 0.0)
            });
        }
        let stats = state(&executor, "stats");
        assert_eq!(stats[1], counted, "pixels that are ignored don't count");
        // The statistics are those of the main loss; the reference has the weighted sum.
        assert!(stats[0] / counted < number(expected), "step {step}");
        executor.run(Which::Update, &Header { step: step as u64, ..header }).unwrap();
    }

    let states = executor.program().states.clone();
    agree("change", &fixture["changes"], STEPS, |name| {
        let shape = &states.iter().find(|s| s.name == *name).unwrap().ty.shape.0;
        let end = state(&executor, name);
        let start: Vec<f64> = (0..end.len()).map(|i| weight(name, shape, i)).collect();
        let moved: Vec<f64> = end.iter().zip(&start).map(|(x, start)| x - start).collect();
        // A parameter kept in f32 is rounded at every step, by half a unit in the last place.
        let rounding = 10f64.sqrt() * f64::from(f32::EPSILON) / 2.0 * norm(&start) / norm(&moved);
        (moved, rounding)
    });
    agree("running moments", &fixture["running"], GRADIENT, |name| (state(&executor, name), 0.0));

    heads.fill(&mut executor, Which::Eval);
    executor.run(Which::Eval, &header).unwrap();
    agree("logits", &fixture["logits"], STEPS, |name| {
        let name = if name == "main" { "logits" } else { name };
        let logits = executor.output(Which::Eval, name).unwrap();
        (logits.iter().map(|x| f64::from(*x)).collect(), 0.0)
    });
}

/// What is exported has transformers' names and shapes, no more and no less; what comes back is what was there.
#[test]
fn exported_names_are_those_of_transformers() {
    let fixture = fixture();
    let states = Heads::of(&fixture["config"]).graph(true).states;
    let heads = states.into_iter().filter(|s| !s.name.starts_with("stage."));
    let ours: Weights = heads
        .map(|s| {
            let words = words(&s.name);
            let data = (0..s.ty.shape.count()).map(|i| (words(i) % 1000) as f32).collect();
            (s.name, Tensor { shape: s.ty.shape.0, data })
        })
        .collect();
    let theirs = to_torch(ours.clone()).unwrap();
    let shapes: Vec<(&str, Vec<usize>)> = theirs.iter().map(|(n, t)| (n.as_str(), t.shape.clone())).collect();
    let published = fixture["state_dict"].as_object().unwrap().iter();
    let mut published: Vec<(&str, Vec<usize>)> = published
        .map(|(n, shape)| (n.as_str(), shape.as_array().unwrap().iter().map(whole).collect()))
        .collect();
    published.sort();
    assert_eq!(shapes, published);
    let back = from_torch(theirs).unwrap();
    for (name, tensor) in ours {
        // Of the counts of batches, which are one number, the first is left.
        let same = tensor.data.len() - if name.ends_with(".running") { tensor.shape[1] } else { 0 };
        assert_eq!(back[&name].data[..same], tensor.data[..same], "{name}");
        assert_eq!(back[&name].shape, tensor.shape, "{name}");
    }
}
