//! Assignment of GPUs to ranks, and how they communicate: NCCL, or through the host.

mod choice;

use crate::device::Seat;
use crate::error::DeviceError;
use choice::View;
use comm::nccl::Library;
use comm::{Backend, CommError};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// What a rank tells the others of its GPUs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Found {
    /// What was typed after --comm.
    asked: Option<String>,
    /// Its number among the ranks of its machine.
    local_rank: usize,
    /// Identities of the GPUs that it can see.
    visible: Vec<String>,
    /// The identity of its GPU among these, once all know what the others see.
    #[serde(skip)]
    gpu: String,
    /// `NCCL_HOSTID`: ranks with different ones are on different hosts to NCCL, which lets them share a GPU.
    host_id: Option<String>,
    /// NCCL's name and version, or why there is none; nothing where nobody wants it.
    nccl: Option<Result<String, String>>,
}

/// The way of collectives between GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum How {
    Nccl,
    Host,
}

/// The GPU of a rank, and its way to the others.
pub(crate) struct Assigned {
    pub device: usize,
    pub communication: Option<cuda::GpuComm>,
    /// What to tell the user, where there are several ranks.
    pub line: Option<String>,
}

/// Finds out what every rank has; all come to the same decision.
pub(crate) fn assign(seat: &Seat) -> Result<Assigned, DeviceError> {
    let devices = cuda::devices()?.len();
    let world = &seat.world;
    if world.size() == 1 {
        return Ok(Assigned { device: seat.local_rank % devices, communication: None, line: None });
    }
    let wanted = matches!(seat.requested, None | Some(Backend::Nccl));
    let library = wanted.then(Library::find);
    let told = |error: &CommError| match error {
        CommError::Engine { why, .. } => why.clone(),
        other => other.to_string(),
    };
    let mine = Found {
        asked: seat.requested.map(|choice| choice.to_string()),
        local_rank: seat.local_rank,
        visible: (0..devices).map(identity).collect::<Result<_, _>>()?,
        gpu: String::new(),
        host_id: std::env::var("NCCL_HOSTID").ok().filter(|id| !id.is_empty()),
        nccl: library.as_ref().map(|found| found.as_ref().map(|l| l.name()).map_err(told)),
    };
    let text = serde_json::to_vec(&mine).map_err(|e| DeviceError::Disagree(e.to_string()))?;
    let texts = world.gather_bytes(world.name("which GPUs there are"), &text)?;
    let all: Option<Vec<Found>> = texts.iter().map(|text| serde_json::from_slice(text).ok()).collect();
    let mut all =
        all.ok_or_else(|| DeviceError::Disagree("a rank is of another version of vitesse".into()))?;
    let device = give_out(&mut all)?[world.rank()];
    let (how, line) = decide(&all, world.engine().name())?;
    let communication = match (how, library) {
        (How::Nccl, Some(Ok(library))) => cuda::GpuComm::Nccl {
            world: world.clone(),
            library: Arc::clone(&library),
            monitor: seat.monitor.clone(),
        },
        _ => cuda::GpuComm::Host(world.clone()),
    };
    Ok(Assigned { device, communication: Some(communication), line: Some(line) })
}

/// UUID of a GPU that this rank can see.
fn identity(device: usize) -> Result<String, DeviceError> {
    Ok(cuda::identity(device)?.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Gives every rank a GPU; returns each one's number, as its rank counts.
fn give_out(all: &mut [Found]) -> Result<Vec<usize>, DeviceError> {
    let views: Vec<View> =
        all.iter().map(|found| View { gpus: &found.visible, local_rank: found.local_rank }).collect();
    let numbers: Option<Vec<usize>> = choice::choose(&views).into_iter().collect();
    let numbers = numbers.ok_or_else(|| DeviceError::Disagree("a rank sees no GPU".into()))?;
    for (found, number) in all.iter_mut().zip(&numbers) {
        found.gpu = found.visible[*number].clone();
    }
    Ok(numbers)
}

/// NCCL, if every rank has it and a GPU of its own; else through the host, by the engine of this name. With the reason.
fn decide(all: &[Found], engine: &str) -> Result<(How, String), DeviceError> {
    let first = &all[0];
    let typed = |found: &Found| match &found.asked {
        Some(asked) => format!("--comm {asked}"),
        None => "no --comm".to_string(),
    };
    if let Some(rank) = all.iter().position(|found| found.asked != first.asked) {
        let (theirs, ours) = (typed(&all[rank]), typed(first));
        return Err(DeviceError::Disagree(format!(
            "rank {rank} was started with {theirs}, rank 0 with {ours}"
        )));
    }
    let host = |why: &str| Ok((How::Host, format!("all-reduce through the host ({engine}): {why}")));
    let nccl = Backend::Nccl.to_string();
    if let Some(asked) = first.asked.as_ref().filter(|asked| **asked != nccl) {
        return host(&format!("as --comm {asked} asks"));
    }
    let obstacle = shared(all).or_else(|| missing(all));
    match (obstacle, &first.asked, &first.nccl) {
        (None, _, Some(Ok(name))) => {
            let why = match distinct(all, |found| &found.gpu) {
                gpus if gpus == all.len() => "every rank has a GPU of its own".to_string(),
                gpus => format!(
                    "{} ranks share {}, each with an NCCL_HOSTID of its own; for tests, since they take turns on it",
                    all.len(),
                    counted(gpus)
                ),
            };
            Ok((How::Nccl, format!("all-reduce over {name}: {why}")))
        }
        (Some(why), Some(_), _) => Err(DeviceError::setting("comm", nccl, why)),
        (Some(why), None, _) => host(&why),
        (None, ..) => host("nobody has looked for NCCL"),
    }
}

/// Two ranks with one GPU, on what is one host to NCCL.
fn shared(all: &[Found]) -> Option<String> {
    let same = |a: &Found, b: &Found| (&a.gpu, &a.host_id) == (&b.gpu, &b.host_id);
    let pair = all.iter().enumerate().find_map(|(rank, found)| {
        all[..rank].iter().position(|other| same(other, found)).map(|other| (other, rank))
    });
    let (one, other) = pair?;
    Some(format!(
        "{} ranks have {}, ranks {one} and {other} the same one, and NCCL needs one for each",
        all.len(),
        counted(distinct(all, |found| &found.gpu))
    ))
}

/// Number of different values among ranks.
fn distinct<'a>(all: &'a [Found], of: impl Fn(&'a Found) -> &'a String) -> usize {
    all.iter().map(of).collect::<std::collections::BTreeSet<_>>().len()
}

fn counted(gpus: usize) -> String {
    if gpus == 1 { "1 GPU".to_string() } else { format!("{gpus} GPUs") }
}

/// A rank without NCCL.
fn missing(all: &[Found]) -> Option<String> {
    let why = |found: &Found| found.nccl.as_ref().and_then(|nccl| nccl.as_ref().err().cloned());
    let (rank, why) = all.iter().enumerate().find_map(|(rank, found)| Some((rank, why(found)?)))?;
    Some(format!("rank {rank} has no NCCL ({why})"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(asked: Option<Backend>, gpu: &str) -> Found {
        let nccl = matches!(asked, None | Some(Backend::Nccl)).then(|| Ok("NCCL 2.27.3".to_string()));
        let (asked, visible) = (asked.map(|choice| choice.to_string()), vec![gpu.to_string()]);
        Found { asked, local_rank: 0, visible, gpu: gpu.to_string(), host_id: None, nccl }
    }

    fn of(asked: Option<Backend>, gpus: &[&str]) -> Vec<Found> {
        gpus.iter().map(|gpu| found(asked, gpu)).collect()
    }

    fn decided(all: &[Found]) -> (How, String) {
        decide(all, "threads").unwrap_or_else(|error| panic!("{error}"))
    }

    fn refused(all: &[Found]) -> String {
        decide(all, "threads").unwrap_err().to_string()
    }

    #[test]
    fn nccl_is_for_ranks_with_gpus_of_their_own() {
        for asked in [None, Some(Backend::Nccl)] {
            let (how, line) = decided(&of(asked, &["a", "b"]));
            assert_eq!(how, How::Nccl);
            assert_eq!(line, "all-reduce over NCCL 2.27.3: every rank has a GPU of its own");
        }
        let shared = "3 ranks have 2 GPUs, ranks 0 and 2 the same one, and NCCL needs one for each";
        let (how, line) = decided(&of(None, &["a", "b", "a"]));
        assert_eq!(how, How::Host);
        assert_eq!(line, format!("all-reduce through the host (threads): {shared}"));
        assert_eq!(refused(&of(Some(Backend::Nccl), &["a", "b", "a"])), format!("--comm nccl: {shared}"));
        assert!(decided(&of(None, &["a", "a"])).1.contains("2 ranks have 1 GPU, ranks 0 and 1"));
    }

    #[test]
    fn ranks_of_different_host_ids_may_share_a_gpu() {
        let with = |ids: &[Option<&str>]| -> Vec<Found> {
            let found = |id: &Option<&str>| Found { host_id: id.map(str::to_string), ..found(None, "a") };
            ids.iter().map(found).collect()
        };
        let (how, line) = decided(&with(&[Some("h0"), Some("h1"), Some("h2")]));
        assert_eq!(how, How::Nccl);
        assert_eq!(
            line,
            "all-reduce over NCCL 2.27.3: 3 ranks share 1 GPU, each with an NCCL_HOSTID of its own; for tests, since they take turns on it"
        );
        // One host twice, or a rank without: of those NCCL sees that they have one GPU.
        assert_eq!(decided(&with(&[Some("h0"), Some("h1"), Some("h0")])).0, How::Host);
        assert_eq!(decided(&with(&[None, Some("h1"), None])).0, How::Host);
        assert_eq!(decided(&with(&[None, Some("h1")])).0, How::Nccl);
        // A host id of its own changes nothing for a rank with a GPU of its own.
        let mut all = of(None, &["a", "b"]);
        all[0].host_id = Some("h0".into());
        assert!(decided(&all).1.ends_with("every rank has a GPU of its own"));
    }

    #[test]
    fn ranks_that_see_the_same_gpus_are_given_different_ones() {
        let mut all = of(None, &["", "", ""]);
        for (rank, found) in all.iter_mut().enumerate() {
            (found.visible, found.local_rank) = (vec!["a".to_string(), "b".to_string()], rank);
        }
        assert_eq!(give_out(&mut all[..2]).ok(), Some(vec![0, 1]));
        assert_eq!(decided(&all[..2]).0, How::Nccl);
        assert_eq!(give_out(&mut all).ok(), Some(vec![0, 1, 0]));
        assert_eq!(decided(&all).0, How::Host);
        all[1].visible.clear();
        assert!(give_out(&mut all).is_err());
    }

    #[test]
    fn without_the_library_the_host_does_it() {
        let mut all = of(None, &["a", "b"]);
        all[1].nccl = Some(Err("there is no libnccl.so.2".to_string()));
        let why = "rank 1 has no NCCL (there is no libnccl.so.2)";
        let (how, line) = decided(&all);
        assert_eq!(how, How::Host);
        assert_eq!(line, format!("all-reduce through the host (threads): {why}"));
        all.iter_mut().for_each(|found| found.asked = Some("nccl".to_string()));
        assert_eq!(refused(&all), format!("--comm nccl: {why}"));
    }

    #[test]
    fn another_engine_is_used_if_asked_for() {
        let (how, line) = decided(&of(Some(Backend::Tcp), &["a", "b"]));
        assert_eq!(how, How::Host);
        assert_eq!(line, "all-reduce through the host (threads): as --comm tcp asks");
    }

    #[test]
    fn ranks_that_were_asked_for_different_things_don_t_start() {
        let all = [found(None, "a"), found(Some(Backend::Nccl), "b")];
        assert_eq!(refused(&all), "rank 1 was started with --comm nccl, rank 0 with no --comm");
    }
}
