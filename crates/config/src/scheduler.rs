//! The configuration file's scheduler: DeepSpeed's, with flags over it.

use super::optimize::{Length, Picked, Section, or_flag};
use super::origin::{Log, Origin};
use super::settings::Raw;
use crate::ConfigError;
use crate::deepspeed::{DeepSpeed, FileError, Setting};
use crate::schedule::{Half, Ramp, Scheduler};
use text::many;

const MAX_LR: &str = "scheduler.params.warmup_max_lr";

impl Raw {
    /// DeepSpeed's scheduler of this name; that its parameters are there and of their types was checked before.
    pub(super) fn scheduler(
        &self,
        file: &DeepSpeed,
        name: &str,
        lr: Picked<f64>,
        length: Length,
        log: &mut Log,
    ) -> Result<Scheduler, ConfigError> {
        self.refuse_flags_of_others(&format!("{name} of {}", file.file), |_| false)?;
        let section = Section { file: Some(file), name: "scheduler" };
        let name = name.to_ascii_lowercase();
        let mut peak = |theirs: Picked<f64>| {
            let (peak, origin) = or_flag(
                self.lr,
                match file.number(MAX_LR) {
                    Some(Setting::Given(max)) => (max, Origin::File(MAX_LR.to_string())),
                    Some(Setting::Auto) => lr.clone(),
                    None => theirs,
                },
            );
            log.note("lr", peak, origin);
            peak
        };
        let ramp = match file.text("scheduler.params.warmup_type") {
            Some("linear") => Ramp::Linear,
            _ => Ramp::Log,
        };
        let min = |name: &str| section.number(name, 0.0, 0.0).0;
        let total = section.whole("total_num_steps", length.steps, length.steps).0;
        let scheduler = match name.as_str() {
            "warmuplr" => {
                Scheduler::WarmupLr { min: min("warmup_min_lr"), max: peak(lr.clone()), warmup: 0, ramp }
            }
            "warmupdecaylr" => {
                let max =
                    peak((0.001, Origin::Default(format!("DeepSpeed's default, as {MAX_LR} is not given"))));
                Scheduler::WarmupDecayLr { min: min("warmup_min_lr"), max, warmup: 0, ramp, total }
            }
            "warmupcosinelr" => {
                let cos_min_ratio = section.number("cos_min_ratio", 0.0001, 0.0001).0;
                let (peak, min_ratio, warmup) = (lr.0, min("warmup_min_ratio"), 0);
                log.note("lr", peak, lr.1);
                Scheduler::WarmupCosineLr { peak, min_ratio, cos_min_ratio, warmup, ramp, total }
            }
            "onecycle" => one_cycle(&section, self.lr),
            _ => Scheduler::LrRangeTest {
                min: section.number("lr_range_test_min_lr", 1e-3, 1e-3).0,
                every: section.whole("lr_range_test_step_size", 2000, 2000).0,
                rate: section.number("lr_range_test_step_rate", 1.0, 1.0).0,
                staircase: section.boolean("lr_range_test_staircase", false, false).0,
            },
        };
        self.warm_up(scheduler, &section, length, log)
    }

    /// Sets the steps of warm-up, or refuses flags that the scheduler has no use for.
    fn warm_up(
        &self,
        mut scheduler: Scheduler,
        section: &Section<'_>,
        length: Length,
        log: &mut Log,
    ) -> Result<Scheduler, ConfigError> {
        let no_use = |flag, value: String| {
            Err(ConfigError::setting(flag, value, "the file's scheduler has no use for it; add --schedule"))
        };
        match &mut scheduler {
            Scheduler::WarmupLr { warmup, .. }
            | Scheduler::WarmupDecayLr { warmup, .. }
            | Scheduler::WarmupCosineLr { warmup, .. } => {
                let of_file = section.whole("warmup_num_steps", (length.steps / 20).max(1), 1000);
                let (steps, origin) = or_flag(self.warmup(length), of_file);
                let origin = self.warmup_origin(length, origin);
                if steps == 0 {
                    return Err(ConfigError::setting(
                        "warmup-steps",
                        0,
                        "DeepSpeed warms up over at least 1 step",
                    ));
                }
                log.note("warmup-steps", steps, origin);
                *warmup = steps;
                if let Scheduler::WarmupCosineLr { total, .. } = &scheduler {
                    divides(section.file, steps, *total, length)?;
                }
            }
            Scheduler::OneCycle { .. } | Scheduler::LrRangeTest { .. } => {
                if let Some(steps) = self.warmup_steps {
                    return no_use("warmup-steps", steps.to_string());
                }
                if let (Scheduler::LrRangeTest { .. }, Some(lr)) = (&scheduler, self.lr) {
                    return no_use("lr", lr.to_string());
                }
            }
        }
        Ok(scheduler)
    }
}

/// After a warm-up that ends with the schedule, WarmupCosineLR divides by zero.
fn divides(file: Option<&DeepSpeed>, warmup: u64, total: u64, length: Length) -> Result<(), ConfigError> {
    let ends = warmup.max(2);
    match file {
        Some(file) if total == ends && length.steps > ends.saturating_add(1) => {
            let why = format!(
                "scheduler.params.total_num_steps and warmup_num_steps are both {total}, where WarmupCosineLR divides by \
                 zero, and the run has {}",
                many(length.steps as usize, "step")
            );
            Err(FileError::File { file: file.file.clone(), why }.into())
        }
        _ => Ok(()),
    }
}

fn one_cycle(section: &Section<'_>, lr: Option<f64>) -> Scheduler {
    let rise = Half {
        steps: section.whole("cycle_first_step_size", 2000, 2000).0,
        stairs: section.whole("cycle_first_stair_count", 0, 0).0,
    };
    let fall = Half {
        steps: section.whole("cycle_second_step_size", rise.steps, rise.steps).0,
        stairs: section.whole("cycle_second_stair_count", rise.stairs, rise.stairs).0,
    };
    Scheduler::OneCycle {
        min: section.number("cycle_min_lr", 0.0, 0.0).0,
        max: lr.unwrap_or_else(|| section.number("cycle_max_lr", 0.0, 0.0).0),
        rise,
        fall,
        decay_rate: section.number("decay_lr_rate", 0.0, 0.0).0,
        decay_every: section.whole("decay_step_size", 0, 0).0,
    }
}
