//! Every optimizer, declared once: what settings, help, DeepSpeed files and studies say of it.
//!
//! The engine's side is [`graph::Optimizer`]: its variant, what it keeps of earlier gradients, and the ops of its update.

use super::deepspeed::keys::Expected::{Equals, Is};
use super::deepspeed::keys::Kind::{Betas as TwoRates, Bool, NotNegative, Number, Positive, Share};
use super::deepspeed::keys::Rule::{Harmless, Honoured, Judged, Must};
use super::deepspeed::keys::{Key, OTHER_KERNEL, auto, key};
use super::deepspeed::{DeepSpeed, Setting, judge};
use super::numbers::Betas;
use super::optimize::{Picked, Section, or_flag};
use super::origin::Log;
use crate::{ConfigError, Raw};
use graph::Optimizer as Rule;

/// All that is said of an optimizer outside of the engine.
pub struct Optimizer {
    /// Name in `--optimizer`.
    pub name: &'static str,
    /// One line for help.
    pub help: &'static str,
    /// Default of the learning rate; none where it is the recipe's.
    pub lr: Option<f64>,
    /// Default of the weight decay; none where it is the recipe's.
    pub weight_decay: Option<f64>,
    /// Its numbers beside these two.
    numbers: &'static [Hyper],
    /// Its types in DeepSpeed files.
    pub deepspeed: &'static [&'static str],
    /// Reason why a DeepSpeed file can't ask for it, where it can't.
    pub refused: Option<&'static str>,
    /// The keys of `optimizer.params` in such files, beside those that all have.
    pub(crate) keys: &'static [Key],
    make: fn(&Values) -> Rule,
}

/// A number of an optimizer.
struct Hyper {
    name: &'static str,
    from: From,
    /// Default.
    ours: f64,
    /// DeepSpeed's default, which holds where a file has a section for the optimizer and leaves the number out.
    theirs: f64,
}

/// Key of a number in a DeepSpeed file.
enum From {
    /// A key of its own.
    Number(&'static str),
    /// A key that is true or false.
    Switch(&'static str),
    /// One of the two betas.
    Beta(usize),
}

/// The numbers of one run, by name.
struct Values {
    numbers: Vec<(&'static str, f64)>,
    weight_decay: f64,
}

impl Values {
    fn get(&self, name: &str) -> f64 {
        self.numbers.iter().find(|(known, _)| *known == name).map_or(0.0, |(_, value)| *value)
    }

    fn of_adam(&self) -> [f64; 3] {
        ["beta1", "beta2", "eps"].map(|name| self.get(name))
    }

    fn of_momentum(&self) -> (f64, bool) {
        (self.get("momentum"), self.get("nesterov") != 0.0)
    }
}

const fn hyper(name: &'static str, from: From, ours: f64, theirs: f64) -> Hyper {
    Hyper { name, from, ours, theirs }
}

const BETA1: Hyper = hyper("beta1", From::Beta(0), 0.9, 0.9);
const BETA2: Hyper = hyper("beta2", From::Beta(1), 0.999, 0.999);
const EPS: Hyper = hyper("eps", From::Number("eps"), 1e-8, 1e-8);

const BETAS: Key = auto("optimizer.params.betas", TwoRates, Honoured(Some("betas")));
const EPSILON: Key = auto("optimizer.params.eps", Positive, Honoured(Some("eps")));
const BIAS_CORRECTION: Key =
    key("optimizer.params.bias_correction", Bool, Must(Is(true), "bias correction is always on here"));
const AMSGRAD: Key = key("optimizer.params.amsgrad", Bool, Must(Is(false), "AMSGrad is not built"));

/// Every optimizer there is, the default first.
pub const ALL: &[Optimizer] = &[
    Optimizer {
        name: "adamw",
        help: "Adam with decoupled weight decay",
        lr: None,
        weight_decay: None,
        numbers: &[BETA1, BETA2, EPS],
        // DeepSpeed's Adam decays as AdamW does, unless it is told otherwise, which is refused.
        deepspeed: &["Adam", "AdamW"],
        refused: None,
        keys: &[
            BETAS,
            EPSILON,
            BIAS_CORRECTION,
            AMSGRAD,
            key("optimizer.params.adam_w_mode", Bool, Judged(judge::adam_w_mode)),
            key(
                "optimizer.params.torch_adam",
                Bool,
                Harmless(
                    "chooses a kernel; the arithmetic is the same, its default weight_decay is PyTorch's",
                ),
            ),
            key("optimizer.params.set_grad_none", Bool, OTHER_KERNEL),
            key("optimizer.params.fp32_optimizer_states", Bool, Must(Is(true), "moments are kept in fp32")),
        ],
        make: |v| {
            let [beta1, beta2, eps] = v.of_adam();
            Rule::AdamW { beta1, beta2, eps, weight_decay: v.weight_decay }
        },
    },
    Optimizer {
        name: "sgd",
        help: "gradient descent with Nesterov momentum",
        lr: Some(0.03),
        weight_decay: Some(1e-4),
        numbers: &[
            hyper("momentum", From::Number("momentum"), 0.9, 0.0),
            hyper("nesterov", From::Switch("nesterov"), 1.0, 0.0),
        ],
        deepspeed: &["SGD"],
        refused: None,
        keys: &[
            key("optimizer.params.momentum", Share, Honoured(Some("momentum"))),
            key("optimizer.params.nesterov", Bool, Honoured(None)),
            key("optimizer.params.dampening", Number, Must(Equals(0.0), "momentum is not dampened here")),
        ],
        make: |v| {
            let (momentum, nesterov) = v.of_momentum();
            Rule::Sgd { momentum, nesterov, weight_decay: v.weight_decay }
        },
    },
    Optimizer {
        name: "lamb",
        help: "Adam with a trust ratio for each tensor, for large batches",
        lr: Some(4e-3),
        weight_decay: Some(0.01),
        numbers: &[
            BETA1,
            BETA2,
            EPS,
            hyper("min_coeff", From::Number("min_coeff"), 0.01, 0.01),
            hyper("max_coeff", From::Number("max_coeff"), 10.0, 10.0),
        ],
        deepspeed: &["Lamb"],
        refused: None,
        keys: &[
            BETAS,
            EPSILON,
            BIAS_CORRECTION,
            AMSGRAD,
            key("optimizer.params.max_coeff", Positive, Honoured(None)),
            key("optimizer.params.min_coeff", NotNegative, Honoured(None)),
            key("optimizer.params.eps_inside_sqrt", Bool, Must(Is(false), "eps is added outside the root")),
        ],
        make: |v| {
            let [beta1, beta2, eps] = v.of_adam();
            let (min_coeff, max_coeff) = (v.get("min_coeff"), v.get("max_coeff"));
            Rule::Lamb { beta1, beta2, eps, weight_decay: v.weight_decay, min_coeff, max_coeff }
        },
    },
    Optimizer {
        name: "muon",
        help: "orthogonalised Nesterov momentum for the matrices of hidden layers, with updates of AdamW's size, \
               and AdamW at the same learning rate for all else",
        // Updates have the size of AdamW's, whose rate and decay carry over.
        lr: None,
        weight_decay: None,
        numbers: &[
            hyper("momentum", From::Number("momentum"), 0.95, 0.95),
            hyper("nesterov", From::Switch("nesterov"), 1.0, 1.0),
            BETA1,
            BETA2,
            EPS,
        ],
        deepspeed: &["Muon"],
        refused: Some(
            "DeepSpeed's Muon scales updates by √max(1, rows/columns) and has two learning rates; --optimizer muon \
             scales them by 0.2·√max(rows, columns), which is for AdamW's rate: give that flag to use it",
        ),
        keys: &[],
        make: |v| {
            let [beta1, beta2, eps] = v.of_adam();
            let (momentum, nesterov) = v.of_momentum();
            Rule::Muon { momentum, nesterov, beta1, beta2, eps, weight_decay: v.weight_decay }
        },
    },
];

impl Optimizer {
    /// The one of this name.
    pub fn named(name: &str) -> Option<&'static Optimizer> {
        ALL.iter().find(|one| one.name == name)
    }

    /// The one that a DeepSpeed file means by a type, if it may ask for it.
    pub fn of_deepspeed(kind: &str) -> Option<&'static Optimizer> {
        of_type(kind).filter(|one| one.refused.is_none())
    }

    /// Returns whether it has the number of this flag.
    pub(crate) fn has(&self, flag: &str) -> bool {
        self.numbers.iter().any(|hyper| match hyper.from {
            From::Number(key) => key == flag,
            From::Beta(_) => flag == "betas",
            From::Switch(_) => false,
        })
    }

    /// Its rule, by flags, the numbers of a file's section, or their defaults.
    pub(crate) fn rule(
        &self,
        raw: &Raw,
        section: &Section<'_>,
        weight_decay: f64,
        log: &mut Log,
    ) -> Result<Rule, ConfigError> {
        raw.check_numbers(self)?;
        let betas = |which: usize| move |Betas(first, second)| if which == 0 { first } else { second };
        let mut numbers = vec![];
        for hyper in self.numbers {
            let Hyper { ours, theirs, .. } = *hyper;
            let value = match hyper.from {
                From::Number(key) => {
                    let picked = section.number(key, ours, theirs);
                    match raw.number_of_optimizer(key) {
                        Some((flag, typed)) => {
                            let (value, origin) = or_flag(typed, picked);
                            log.note(flag, value, origin);
                            value
                        }
                        None => picked.0,
                    }
                }
                From::Switch(key) => {
                    let (on, _): Picked<bool> = section.boolean(key, ours != 0.0, theirs != 0.0);
                    f64::from(u8::from(on))
                }
                From::Beta(which) => {
                    let read = |file: &DeepSpeed, key: &str| {
                        file.betas(key).map(|pair| match pair {
                            Setting::Given((first, second)) => {
                                Setting::Given(betas(which)(Betas(first, second)))
                            }
                            Setting::Auto => Setting::Auto,
                        })
                    };
                    let (value, origin) =
                        or_flag(raw.betas.map(betas(which)), section.pick("betas", read, ours, theirs));
                    if let Some((_, first)) = numbers.last().filter(|_| which == 1) {
                        log.note("betas", Betas(*first, value), origin);
                    }
                    value
                }
            };
            numbers.push((hyper.name, value));
        }
        Ok((self.make)(&Values { numbers, weight_decay }))
    }
}

fn of_type(kind: &str) -> Option<&'static Optimizer> {
    ALL.iter().find(|one| one.deepspeed.iter().any(|name| name.eq_ignore_ascii_case(kind)))
}

/// Each with its line of help.
pub fn help() -> String {
    ALL.iter().map(|one| format!("{}: {}", one.name, one.help)).collect::<Vec<_>>().join("; ")
}

/// Those with a learning rate of their own, as in "0.03 for sgd, 0.004 for lamb".
pub fn rates() -> String {
    own(|one| one.lr)
}

/// Those with a weight decay of their own.
pub fn decays() -> String {
    own(|one| one.weight_decay)
}

fn own(of: impl Fn(&Optimizer) -> Option<f64>) -> String {
    let texts = ALL.iter().filter_map(|one| Some(format!("{} for {}", of(one)?, one.name)));
    texts.collect::<Vec<_>>().join(", ")
}

/// Types that a DeepSpeed file may ask for.
pub(crate) fn deepspeed_types() -> Vec<&'static str> {
    let honoured = ALL.iter().filter(|one| one.refused.is_none());
    let mut types: Vec<&str> = honoured.flat_map(|one| one.deepspeed.iter().copied()).collect();
    types.sort_unstable();
    types
}

/// Reason why a DeepSpeed file can't ask for an optimizer of this type, where that is known.
pub(crate) fn refused(kind: &str) -> Option<&'static str> {
    of_type(kind).and_then(|one| one.refused)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every number of the rule is one that is declared, with its default, and none is declared for nothing.
    #[test]
    fn numbers_are_those_of_the_engine() {
        let section = Section { file: None, name: "optimizer" };
        for one in ALL {
            let rule = one.rule(&Raw::default(), &section, 0.25, &mut Log::default()).unwrap();
            assert_eq!(rule.name(), one.name);
            assert_eq!(rule.weight_decay(), 0.25);
            let serde_json::Value::Object(members) = serde_json::to_value(rule).unwrap() else { panic!() };
            assert_eq!(
                members.len(),
                one.numbers.len() + 2,
                "{}: the type, the decay and {members:?}",
                one.name
            );
            for hyper in one.numbers {
                let value = &members[hyper.name];
                let value = value.as_f64().unwrap_or_else(|| f64::from(u8::from(value.as_bool().unwrap())));
                assert_eq!(value, hyper.ours, "{} of {}", hyper.name, one.name);
            }
        }
        assert!(help().contains("muon: orthogonalised"));
        assert_eq!(rates(), "0.03 for sgd, 0.004 for lamb");
        assert_eq!(decays(), "0.0001 for sgd, 0.01 for lamb");
    }

    #[test]
    fn deepspeed_types_are_those_that_are_honoured() {
        assert_eq!(deepspeed_types(), ["Adam", "AdamW", "Lamb", "SGD"]);
        assert_eq!(Optimizer::of_deepspeed("adam").unwrap().name, "adamw");
        assert!(Optimizer::of_deepspeed("Muon").is_none());
    }
}
