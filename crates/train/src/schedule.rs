//! Learning rate by step.

/// Linear warm-up, then half a cosine down to zero.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WarmupCosine {
    pub peak: f64,
    pub warmup: u64,
    pub total: u64,
}

impl WarmupCosine {
    /// The rate of step `step`, counted from 0.
    pub fn at(&self, step: u64) -> f64 {
        if step < self.warmup {
            return self.peak * (step + 1) as f64 / self.warmup as f64;
        }
        let left = self.total.saturating_sub(self.warmup).max(1) as f64;
        let done = ((step - self.warmup) as f64 / left).min(1.0);
        self.peak * 0.5 * (1.0 + (std::f64::consts::PI * done).cos())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rises_then_falls_to_nothing() {
        let schedule = WarmupCosine { peak: 1.0, warmup: 10, total: 110 };
        assert_eq!(schedule.at(0), 0.1);
        assert_eq!(schedule.at(9), 1.0);
        assert_eq!(schedule.at(10), 1.0);
        assert!((schedule.at(60) - 0.5).abs() < 1e-12);
        assert!(schedule.at(109) < 1e-3 && schedule.at(500) < 1e-12);
    }
}
