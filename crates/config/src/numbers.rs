//! Numbers of optimizers as flags: betas, momentum and eps.

use crate::optimizers::{self, Optimizer};
use crate::resolve::positive;
use crate::{ConfigError, Raw};
use std::fmt;
use std::str::FromStr;

/// `--betas`: decay rates of Adam's first and second moment.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Betas(pub f64, pub f64);

impl FromStr for Betas {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let pair =
            text.split_once(',').and_then(|(a, b)| Some((a.trim().parse().ok()?, b.trim().parse().ok()?)));
        match pair {
            Some((first, second)) if [first, second].iter().all(|beta| RATES.contains(beta)) => {
                Ok(Betas(first, second))
            }
            _ => Err("is not BETA1,BETA2: two numbers from 0 to below 1, such as 0.9,0.98".to_string()),
        }
    }
}

impl fmt::Display for Betas {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{},{}", self.0, self.1)
    }
}

/// Betas and momentum.
const RATES: std::ops::Range<f64> = 0.0..1.0;

impl Raw {
    /// What was typed for a number of an optimizer, by its key in DeepSpeed files, with its flag.
    pub(crate) fn number_of_optimizer(&self, key: &str) -> Option<(&'static str, Option<f64>)> {
        match key {
            "momentum" => Some(("momentum", self.momentum)),
            "eps" => Some(("eps", self.eps)),
            _ => None,
        }
    }

    /// Refuses numbers out of range, and those that the optimizer doesn't have.
    pub(crate) fn check_numbers(&self, one: &Optimizer) -> Result<(), ConfigError> {
        if let Some(momentum) = self.momentum.filter(|momentum| !RATES.contains(momentum)) {
            return Err(ConfigError::setting("momentum", momentum, "must lie in 0 ≤ momentum < 1"));
        }
        // A weight whose gradients are all zero would be updated by 0/0.
        self.eps.map(|eps| positive("eps", eps)).transpose()?;
        let typed = [
            ("betas", self.betas.map(|betas| betas.to_string())),
            ("momentum", self.momentum.map(|momentum| momentum.to_string())),
            ("eps", self.eps.map(|eps| eps.to_string())),
        ];
        for (flag, value) in typed {
            if let Some(value) = value.filter(|_| !one.has(flag)) {
                let others: Vec<&str> =
                    optimizers::ALL.iter().filter(|other| other.has(flag)).map(|other| other.name).collect();
                let why = format!("is for --optimizer {}; this run's is {}", others.join(", "), one.name);
                return Err(ConfigError::setting(flag, value, why));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::deepspeed::{DeepSpeed, Verdict};
    use crate::{Facts, Origin};
    use graph::Optimizer as Rule;

    fn resolved(raw: &Raw) -> Result<Rule, String> {
        let facts = Facts::synthetic(raw).unwrap();
        raw.resolve(&facts, 1).map(|run| run.optimizer).map_err(|error| error.to_string())
    }

    fn of(optimizer: &str) -> Raw {
        Raw { optimizer: Some(optimizer.to_string()), ..Raw::default() }
    }

    #[test]
    fn flags_set_the_numbers_of_an_optimizer() {
        let adam = Raw { betas: Some(Betas(0.8, 0.95)), eps: Some(1e-6), ..of("adamw") };
        let Rule::AdamW { beta1, beta2, eps, .. } = resolved(&adam).unwrap() else { panic!() };
        assert_eq!((beta1, beta2, eps), (0.8, 0.95, 1e-6));
        let Rule::Sgd { momentum, .. } = resolved(&Raw { momentum: Some(0.5), ..of("sgd") }).unwrap() else {
            panic!()
        };
        assert_eq!(momentum, 0.5);
        let muon = Raw { betas: Some(Betas(0.7, 0.9)), momentum: Some(0.0), ..of("muon") };
        let Rule::Muon { momentum, beta1, beta2, .. } = resolved(&muon).unwrap() else { panic!() };
        assert_eq!((momentum, beta1, beta2), (0.0, 0.7, 0.9));
    }

    #[test]
    fn flags_win_over_a_file_and_are_explained() {
        let text = r#"{"optimizer": {"type": "AdamW", "params": {"betas": [0.8, 0.9], "eps": 1e-7}}}"#;
        let file = Raw { deepspeed: Some(DeepSpeed::parse("ds.json", text).unwrap()), ..Raw::default() };
        let origin = |raw: &Raw, name: &str| {
            let explained = raw.explain(&Facts::synthetic(raw).unwrap(), 1);
            let note = explained.settings.into_iter().find(|note| note.name == name).unwrap();
            (note.value, note.origin)
        };
        let key = |name: &str| Origin::File(format!("optimizer.params.{name}"));
        assert_eq!(origin(&file, "betas"), ("0.8,0.9".to_string(), key("betas")));
        assert_eq!(origin(&file, "eps"), ("1e-7".to_string(), key("eps")));
        let flag = Raw { betas: Some(Betas(0.9, 0.98)), ..file };
        assert_eq!(origin(&flag, "betas"), ("0.9,0.98".to_string(), Origin::Flag));
        let keys = flag.explain(&Facts::synthetic(&flag).unwrap(), 1).keys;
        let row = keys.iter().find(|row| row.key == "optimizer.params.betas").unwrap();
        assert!(
            matches!(&row.verdict, Verdict::Overridden(by) if by.contains("--betas 0.9,0.98")),
            "{row:?}"
        );
    }

    #[test]
    fn a_number_that_an_optimizer_does_not_have_is_refused() {
        let refused = |raw: Raw| resolved(&raw).unwrap_err();
        assert_eq!(
            refused(Raw { momentum: Some(0.9), ..Raw::default() }),
            "--momentum 0.9: is for --optimizer sgd, muon; this run's is adamw"
        );
        assert!(
            refused(Raw { betas: Some(Betas(0.9, 0.9)), ..of("sgd") }).starts_with("--betas 0.9,0.9: is for")
        );
        assert_eq!(
            refused(Raw { momentum: Some(1.0), ..of("sgd") }),
            "--momentum 1: must lie in 0 ≤ momentum < 1"
        );
        assert_eq!(refused(Raw { eps: Some(-1.0), ..Raw::default() }), "--eps -1: must be positive");
        assert_eq!(refused(Raw { eps: Some(0.0), ..Raw::default() }), "--eps 0: must be positive");
        for (eps, why) in [(1e-50, "is less than fp32 holds"), (1e50, "is more than fp32 holds")] {
            assert!(refused(Raw { eps: Some(eps), ..Raw::default() }).ends_with(why));
        }
        for bad in ["", "0.9", "0.9,1", "-0.1,0.9", "a,b", "0.9,0.9,0.9", "nan,0.9"] {
            assert!(bad.parse::<Betas>().is_err(), "{bad}");
        }
    }
}
