//! Refusal of a run that doesn't fit into the memory of its device, with the arithmetic, and advice: the largest batch that would.

use crate::error::DeviceError;
use config::{Device, Precision, Resolved};
use cuda::{CudaError, MemoryNeeds};
use graph::memory::{Memory, size};
use graph::{Program, Recompute};

/// Refuses plans that don't fit into the memory that this machine has available. Linux promises memory that it doesn't have, and
/// ends the process when that is used.
pub(crate) fn check_host(program: &Program) -> Result<(), DeviceError> {
    let available = data::available_memory().and_then(|bytes| usize::try_from(bytes).ok());
    available.map_or(Ok(()), |available| fits_host(program.memory(), available))
}

/// Refuses plans that don't fit into the device that this machine has for them; where it has none, a run may be planned for another
/// machine.
pub fn check_here(run: &Resolved, program: &Program) -> Result<(), DeviceError> {
    if run.device == Device::Cpu {
        return check_host(program);
    }
    let Ok(gpus) = cuda::devices() else { return Ok(()) };
    let Some((gpu, memory)) = gpus.first().and_then(|gpu| Some((gpu, cuda::memory(0).ok()?))) else {
        return Ok(());
    };
    let needs = MemoryNeeds::of(program, gpu, run.precision == Precision::Tf32)?;
    Ok(needs.check(gpu, memory)?)
}

fn fits_host(needs: Memory, available: usize) -> Result<(), DeviceError> {
    if needs.total() <= available {
        return Ok(());
    }
    Err(DeviceError::HostMemory { needs: Box::new(needs), available })
}

/// Room on a device.
enum Room<'a> {
    Gpu(&'a cuda::action::Facts, usize),
    Host(usize),
}

impl Room<'_> {
    fn holds(&self, program: &Program, tf32: bool) -> bool {
        match self {
            Room::Gpu(gpu, free) => {
                MemoryNeeds::of(program, gpu, tf32).is_ok_and(|needs| needs.total() <= *free)
            }
            Room::Host(available) => program.bytes() <= *available,
        }
    }

    /// States alone, which no batch makes smaller.
    fn holds_states(&self, needs: &Memory) -> bool {
        let (Room::Gpu(_, bytes) | Room::Host(bytes)) = self;
        needs.states() <= *bytes
    }
}

/// Adds to an error that says there is too little memory what to change; other errors stay as they are. `plan` compiles the
/// run's plans for so many images.
pub fn with_advice(
    error: DeviceError,
    run: &Resolved,
    plan: impl Fn(&Resolved, usize) -> Result<Program, DeviceError>,
) -> DeviceError {
    let (room, needs) = match &error {
        DeviceError::Cuda(CudaError::Memory { gpu, free, needs, .. }) => (Room::Gpu(gpu, *free), needs.uses),
        DeviceError::HostMemory { needs, available } => (Room::Host(*available), **needs),
        _ => return error,
    };
    if !room.holds_states(&needs) {
        let advice = format!(
            "states alone, {}, don't fit: a smaller model or more memory is needed",
            size(needs.states())
        );
        return DeviceError::Memory { problem: error.to_string(), advice };
    }
    let tf32 = run.precision == Precision::Tf32;
    let fits =
        |run: &Resolved, batch: usize| plan(run, batch).is_ok_and(|program| room.holds(&program, tf32));
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
        (0, 0) => "not even one image fits: a smaller model or image, or more memory, is needed".into(),
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
    use config::Raw;
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
        let states = program::<f32>(&run, 1).unwrap().state_bytes();
        let none = refused(&run, states + 1000);
        assert!(none.ends_with("is needed") && none.contains("not even one image"), "{none}");
        let none = refused(&run, 1 << 20);
        assert!(none.ends_with("is needed") && none.contains("states alone"), "{none}");
        // Pairs are not torn apart.
        let mixed = Raw { mixup: Some(0.2), ..raw }.resolve_without_data(1).unwrap();
        let free = needs(&mixed, 11);
        assert!(refused(&mixed, free).contains("--batch-size 10 would fit"), "{}", refused(&mixed, free));
    }

    /// The host's memory is counted as a GPU's is, and every kind of bytes is named.
    #[test]
    fn a_host_refuses_what_it_cannot_hold() {
        let raw = Raw { batch_size: Some(64), ..Raw::default() };
        let run = raw.resolve_without_data(1).unwrap();
        let plan = |run: &Resolved, batch: usize| program::<f32>(run, batch);
        let needs = plan(&run, 64).unwrap().memory();
        assert!(fits_host(needs, needs.total()).is_ok());
        let available = plan(&run, 20).unwrap().bytes();
        let refused = with_advice(fits_host(needs, available).unwrap_err(), &run, plan).to_string();
        let expected =
            format!("not enough memory on this machine: {} needed ({needs}), ", size(needs.total()));
        assert!(refused.starts_with(&expected) && refused.contains("--batch-size 20 would fit"), "{refused}");
        for kind in ["activations", "parameters", "moments"] {
            assert!(refused.contains(kind), "{refused}");
        }
    }

    #[test]
    fn other_errors_stay_as_they_are() {
        let run = Raw::default().resolve_without_data(1).unwrap();
        let error = with_advice(DeviceError::Disagree("x".into()), &run, |_, _| unreachable!());
        assert!(matches!(error, DeviceError::Disagree(why) if why == "x"));
    }
}
