//! What the user typed: how it is merged, and values that are steps or epochs.

use crate::deepspeed::Context;
use crate::pixels::EvalMode;
use crate::settings::{self, Raw};
use std::fmt;
use std::path::Path;
use std::str::FromStr;

impl Raw {
    /// These settings, and where they say nothing, those of `earlier`: what a continued run was told, then and now.
    pub fn or(self, mut earlier: Raw) -> Raw {
        earlier.yield_to(&self);
        let deepspeed = self.deepspeed.clone().or_else(|| earlier.deepspeed.clone());
        Raw { deepspeed, ..self.filled_from(&earlier) }
    }

    /// Drops what `now` says in other words, or contradicts.
    pub(crate) fn yield_to(&mut self, now: &Raw) {
        if now.epochs.or(now.steps).is_some() {
            (self.epochs, self.steps) = (None, None);
        }
        if now.eval_mode == Some(EvalMode::Whole) {
            self.eval_stride = None;
        }
        if now.no_checkpoints {
            (self.checkpoint_every, self.keep) = (None, None);
        }
        if now.checkpoint_every.is_some() || now.keep.is_some() {
            self.no_checkpoints = false;
        }
    }

    /// The same with relative paths of data, weights, traces and hosts taken from `folder`.
    pub fn within(mut self, folder: &Path) -> Raw {
        self.data = self.data.map(|data| match data.split_once(':') {
            Some((kind, path)) => format!("{kind}:{}", folder.join(path).display()),
            None => data,
        });
        for path in [&mut self.init, &mut self.trace, &mut self.hostfile] {
            *path = path.take().map(|path| folder.join(path));
        }
        self
    }

    /// The flags that a DeepSpeed file has keys for, as they were typed.
    pub(crate) fn context(&self, world: usize) -> Context {
        let known = settings::all().iter().filter(|setting| !setting.about.deepspeed.is_empty());
        let flags = known.filter_map(|setting| Some((setting.name, setting.typed(self)?))).collect();
        let (device, precision) = (self.device.unwrap_or_default(), self.chosen_precision().0);
        Context { world, device, precision, flags }
    }
}

/// A number of steps, or of epochs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Span {
    Steps(u64),
    Epochs(f64),
}

impl Span {
    pub fn steps(self, steps_per_epoch: u64) -> u64 {
        match self {
            Span::Steps(steps) => steps,
            Span::Epochs(epochs) => (epochs * steps_per_epoch as f64).round() as u64,
        }
    }
}

impl FromStr for Span {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.trim();
        let epochs = ["epochs", "epoch", "ep"].iter().find_map(|unit| text.strip_suffix(unit));
        let span = match epochs {
            Some(number) => number.trim().parse().ok().filter(|x| (0.0..1e9).contains(x)).map(Span::Epochs),
            None => text.parse().ok().map(Span::Steps),
        };
        span.ok_or_else(|| "is neither steps, such as 1000, nor epochs, such as 30ep".to_string())
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Span::Steps(steps) => write!(f, "{steps}"),
            Span::Epochs(epochs) => write!(f, "{epochs}ep"),
        }
    }
}

/// Interval between actions: every so many epochs, or steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Every {
    Epochs(u64),
    Steps(u64),
}

impl FromStr for Every {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.trim();
        let steps = ["iterations", "steps", "it"].iter().find_map(|unit| text.strip_suffix(unit));
        let every = match steps {
            Some(number) => number.trim().parse().ok().map(Every::Steps),
            None => text.parse().ok().map(Every::Epochs),
        };
        every.ok_or_else(|| "is neither epochs, such as 2, nor iterations, such as 16000it".to_string())
    }
}

impl fmt::Display for Every {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Every::Epochs(epochs) => write!(f, "{epochs}"),
            Every::Steps(steps) => write!(f, "{steps}it"),
        }
    }
}

/// How much of a set is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    All,
    Images(usize),
}

impl FromStr for Part {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.trim() {
            "all" => Ok(Part::All),
            number => number
                .parse()
                .map(Part::Images)
                .map_err(|_| "is neither a number of images nor all".to_string()),
        }
    }
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Part::All => f.write_str("all"),
            Part::Images(images) => write!(f, "{images}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_repeated_has_a_unit() {
        assert_eq!("2".parse(), Ok(Every::Epochs(2)));
        for text in ["16000it", "16000 iterations", "16000steps"] {
            assert_eq!(text.parse(), Ok(Every::Steps(16_000)));
        }
        assert_eq!(Every::Steps(5).to_string().parse(), Ok(Every::Steps(5)));
        for bad in ["", "it", "-1it", "1.5", "2ep"] {
            assert!(bad.parse::<Every>().is_err(), "{bad}");
        }
    }

    #[test]
    fn spans_are_steps_or_epochs() {
        assert_eq!("30ep".parse::<Span>().unwrap().steps(313), 9390);
        assert_eq!("0.5 epochs".parse::<Span>().unwrap().steps(10), 5);
        assert_eq!("7".parse::<Span>().unwrap().steps(313), 7);
        assert_eq!("0".parse::<Span>().unwrap().steps(313), 0);
        for bad in ["", "-1", "ep", "-1ep", "nanep", "infep", "1.5", "x"] {
            assert!(bad.parse::<Span>().is_err(), "{bad}");
        }
    }
}
