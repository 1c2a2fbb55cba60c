//! Advice where a run doesn't fit into the memory of a GPU: the largest batch that would.

use crate::error::DeviceError;
use config::{Precision, Resolved};
use cuda::{CudaError, MemoryNeeds};
use graph::{Program, Recompute};

/// Adds to an error that says there is too little memory what to change; other errors stay as they are. `plan` compiles the
/// run's plans for so many images.
pub fn with_advice(
    error: DeviceError,
    run: &Resolved,
    plan: impl Fn(&Resolved, usize) -> Result<Program, DeviceError>,
) -> DeviceError {
    let DeviceError::Cuda(CudaError::Memory { gpu, free, .. }) = &error else { return error };
    let tf32 = run.precision == Precision::Tf32;
    let fits = |run: &Resolved, batch: usize| {
        let needs = plan(run, batch).ok().and_then(|program| MemoryNeeds::of(&program, gpu, tf32).ok());
        needs.is_some_and(|needs| needs.total() <= *free)
    };
    let pairs = if run.augmentation.mixes() { 2 } else { 1 };
    let as_it_is = largest(run.batch / pairs, |count| fits(run, count * pairs)) * pairs;
    let repeating = Resolved { recompute: Recompute::Full, ..run.clone() };
    let recomputed = match run.recompute {
        Recompute::Full => as_it_is,
        _ => largest(run.batch / pairs, |count| fits(&repeating, count * pairs)) * pairs,
    };
    // Evaluation keeps nothing that could be computed again.
    let gained = if recomputed > as_it_is { recomputed } else { 0 };
    DeviceError::Memory { problem: error.to_string(), advice: advice(as_it_is, gained) }
}

fn advice(as_it_is: usize, recomputed: usize) -> String {
    match (as_it_is, recomputed) {
        (0, 0) => {
            "not even one image fits: a smaller model or image, or a GPU with more memory, is needed".into()
        }
        (batch, 0) => format!("--batch-size {batch} would fit"),
        (0, batch) => format!("--recompute full --batch-size {batch} would fit"),
        (batch, more) => {
            format!("--batch-size {batch} would fit; with --recompute full, --batch-size {more}")
        }
    }
}

/// The largest number up to `most` that fits, if those that are smaller than one that fits do; 0 if none does.
fn largest(most: usize, fits: impl Fn(usize) -> bool) -> usize {
    let (mut good, mut bad) = (0, most + 1);
    while good + 1 < bad {
        let middle = good + (bad - good) / 2;
        if fits(middle) { good = middle } else { bad = middle }
    }
    good
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::program::program;
    use config::{Device, Raw};
    use cuda::action::Facts;

    fn refused(run: &Resolved, free: usize) -> String {
        let plan = |run: &Resolved, batch: usize| program::<f32>(run, batch);
        let needs = MemoryNeeds::of(&plan(run, run.batch).unwrap(), &Facts::h200(), false).unwrap();
        let error = needs.check(&Facts::h200(), (free, 2 * free)).unwrap_err();
        with_advice(error.into(), run, plan).to_string()
    }

    /// What is advised fits, and one image more doesn't.
    #[test]
    fn what_is_advised_is_the_most_that_fits() {
        let model = Some("vit-nano/4".to_string());
        let raw = Raw { device: Some(Device::Cuda), model, batch_size: Some(64), ..Raw::default() };
        let run = raw.resolve_without_data(1).unwrap();
        let repeating = Resolved { recompute: Recompute::Full, ..run.clone() };
        let needs = |run: &Resolved, batch| {
            MemoryNeeds::of(&program::<f32>(run, batch).unwrap(), &Facts::h200(), false).unwrap().total()
        };
        let free = needs(&run, 20) + needs(&run, 21).abs_diff(needs(&run, 20)) / 2;
        let text = refused(&run, free);
        let (problem, advice) = text.split_once("; ").unwrap();
        assert!(problem.starts_with("not enough memory on ") && problem.contains("activations"), "{problem}");
        let number = advice.rsplit_once("--batch-size ").unwrap().1.parse::<usize>().unwrap();
        assert_eq!(
            advice,
            format!("--batch-size 20 would fit; with --recompute full, --batch-size {number}")
        );
        assert!(number > 20 && needs(&repeating, number) <= free);
        assert!(number == 64 || needs(&repeating, number + 1) > free);
        let none = refused(&run, 1 << 20);
        assert!(none.ends_with("is needed") && none.contains("not even one image"), "{none}");
        // Pairs are not torn apart.
        let mixed = Raw { mixup: Some(0.2), ..raw }.resolve_without_data(1).unwrap();
        let free = needs(&mixed, 11);
        assert!(refused(&mixed, free).contains("--batch-size 10 would fit"), "{}", refused(&mixed, free));
    }

    #[test]
    fn other_errors_stay_as_they_are() {
        let run = Raw::default().resolve_without_data(1).unwrap();
        let error = with_advice(DeviceError::Disagree("x".into()), &run, |_, _| unreachable!());
        assert!(matches!(error, DeviceError::Disagree(why) if why == "x"));
    }
}
