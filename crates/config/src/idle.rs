//! Flags that could not change anything.
//!
//! A flag that shapes what is computed, evaluated or written is refused where it can't, with what keeps it from doing so: whoever
//! typed it expects a difference. Accepted though idle are
//!
//! * flags that say how a run is carried out (threads, ranks and their communication, caches, what to do with broken images),
//!   so that one command line serves any number of ranks, any device and any data;
//! * values that hold anyway;
//! * what a run is too short to come to, so that a few steps of a long run can be tried.
//!
//! Those that need nothing but the flags are here; others are refused where their setting is resolved.

use super::augmentation::Geometry;
use super::choice::Device;
use super::resolved::Resolved;
use super::settings::{self, Raw};
use crate::ConfigError;
use data::registry::Images;
use graph::Optimizer;

impl Raw {
    /// Refuses settings that exclude each other, or need one that is not there.
    pub(super) fn refuse_misfits(&self) -> Result<(), ConfigError> {
        let given = |name: &&str| settings::find(name).is_some_and(|setting| setting.is_set(self));
        for setting in settings::all().iter().filter(|setting| setting.is_set(self)) {
            let (texts, needs) = (setting.texts(self).join(","), setting.about.requires);
            if !needs.is_empty() && !given(&needs) {
                return Err(ConfigError::setting(setting.name, texts, format!("needs --{needs}")));
            }
            if let Some(other) = setting.about.excludes.iter().copied().find(given) {
                let why = format!("can't be used with --{other}");
                return Err(ConfigError::setting(setting.name, texts, why));
            }
        }
        Ok(())
    }

    pub(super) fn refuse_idle(&self, optimizer: &Optimizer) -> Result<(), ConfigError> {
        let idle = |flag, value: String, why: &str| Err(ConfigError::setting(flag, value, why));
        if let (None, None) = (&self.out, &self.resume) {
            let why = "needs --out: without it nothing is kept";
            if let Some(steps) = self.checkpoint_every {
                return idle("checkpoint-every", steps.to_string(), why);
            }
            if let Some(checkpoints) = self.keep {
                return idle("keep", checkpoints.to_string(), why);
            }
            if self.serve.is_some() {
                let why = "needs --out: the live page shows what the run writes there";
                return idle("serve", String::new(), why);
            }
        }
        if self.comm == Some(comm::Backend::Nccl) && self.device.unwrap_or_default() == Device::Cpu {
            let why = "NCCL is for GPUs: choose --device cuda, or leave out --comm";
            return idle("comm", "nccl".to_string(), why);
        }
        if self.deterministic && self.balance {
            let why = "divides the work by measured speeds, which --deterministic forbids";
            return idle("balance", String::new(), why);
        }
        if self.no_account && self.balance {
            return idle("balance", String::new(), "goes by measured times, and --no-account measures none");
        }
        if let Some(path) = self.trace.as_ref().filter(|_| self.no_account) {
            let why = "shows measured times, and --no-account measures none";
            return idle("trace", path.display().to_string(), why);
        }
        if let Some(pattern) = self.no_decay.first().filter(|_| optimizer.weight_decay() == 0.0) {
            let why = "nothing decays: --weight-decay is 0";
            return idle("no-decay", pattern.clone(), why);
        }
        Ok(())
    }

    /// Settings of resizing, where no image is resized.
    pub(super) fn refuse_idle_interpolation(&self, run: &Resolved) -> Result<(), ConfigError> {
        let (source, size) = (&run.data.source, run.network.image());
        let as_they_are = match source.entry().images {
            Images::Synthetic => !source.has_masks(),
            Images::Raw => size == source.image_size(),
            Images::Files => false,
        };
        let whole = |geometry| matches!(geometry, Geometry::Resize | Geometry::PadCrop { .. });
        match self.interpolation {
            Some(how) if as_they_are && whole(run.augmentation.train) && whole(run.augmentation.eval) => {
                let why = format!("no image is resized: --data {source} has images of {size} px");
                Err(ConfigError::setting("interpolation", how, why))
            }
            _ => Ok(()),
        }
    }
}
