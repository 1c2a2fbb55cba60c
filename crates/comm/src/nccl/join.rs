//! Creation of a device group.

use super::ffi::{Comm, ID_BYTES, UniqueId};
use super::handle::Handle;
use super::library::{Library, fault, spelled};
use super::{DeviceQueue, Nccl};
use crate::communicator::Communicator;
use crate::control::ranks;
use crate::engine::CommError;
use std::ffi::c_int;
use std::sync::Arc;

/// Makes a device group of the ranks of `world`, with the same ranks. All of them call it, each with its result of
/// loading NCCL ([`Library::find`]) and with its GPU current on the calling thread. It may take seconds, so a monitored rank marks
/// itself [`busy`](crate::Monitor::busy).
///
/// If a rank has no NCCL, or another version, all ranks fail with the same error. A later failure, on one rank's
/// GPU for example, is reported by that rank alone: the others wait for it, until a diagnosis ends them.
///
/// # Safety
/// The stream and the scratch are of the GPU that is current, and live until the group and all that was split off are gone.
pub unsafe fn join(
    library: Result<Arc<Library>, CommError>,
    world: &Communicator,
    queue: DeviceQueue,
) -> Result<Arc<Nccl>, CommError> {
    let library = agree(library, world)?;
    let id = broadcast_id(&library, world)?;
    let mut comm: Comm = std::ptr::null_mut();
    let (size, rank) = (world.size() as c_int, world.rank() as c_int);
    // SAFETY: the group is written; id, size and rank are what the other ranks have.
    let code = unsafe { (library.functions.comm_init_rank)(&mut comm, size, id, rank) };
    library.checked("ncclCommInitRank", code)?;
    // SAFETY: just made, and nobody else's.
    Nccl::new(unsafe { Handle::new(library, comm) }, queue)
}

/// Returns the library, if all ranks have one of the same version.
fn agree(library: Result<Arc<Library>, CommError>, world: &Communicator) -> Result<Arc<Library>, CommError> {
    let mine = match &library {
        Ok(library) => format!("={}", library.version()),
        Err(CommError::Engine { why, .. }) => format!("!{why}"),
        Err(error) => format!("!{error}"),
    };
    let all = world.gather_bytes(world.name("versions of NCCL"), mine.as_bytes())?;
    let all: Vec<String> = all.iter().map(|text| String::from_utf8_lossy(text).into_owned()).collect();
    let like = |text: &String| -> Vec<usize> { (0..all.len()).filter(|&rank| all[rank] == *text).collect() };
    if let Some(failed) = all.iter().find(|text| text.starts_with('!')) {
        let (who, why) = (like(failed), &failed[1..]);
        let everywhere = who.len() == all.len();
        return Err(fault(if everywhere { why.to_string() } else { format!("{}: {why}", ranks(&who)) }));
    }
    if let Some(other) = all.iter().find(|text| **text != all[0]) {
        let version = |text: &str| spelled(text[1..].parse().unwrap_or(0));
        let (who, theirs, first) = (like(other), version(other), version(&all[0]));
        let have = if who.len() == 1 { "has" } else { "have" };
        let who = ranks(&who);
        return Err(fault(format!(
            "{who} {have} version {theirs}, but rank 0 has {first}: all ranks need the same"
        )));
    }
    library
}

/// Broadcasts the unique id that rank 0 gets from NCCL.
fn broadcast_id(library: &Library, world: &Communicator) -> Result<UniqueId, CommError> {
    let mut message = Vec::new();
    if world.rank() == 0 {
        let mut id = UniqueId([0; ID_BYTES]);
        // SAFETY: the id is written.
        let code = unsafe { (library.functions.get_unique_id)(&mut id) };
        match library.checked("ncclGetUniqueId", code) {
            Ok(()) => message.extend([b'='].iter().chain(&id.0)),
            Err(CommError::Engine { why, .. }) => message.extend(format!("!rank 0: {why}").bytes()),
            Err(error) => message.extend(format!("!rank 0: {error}").bytes()),
        }
    }
    let message = world.broadcast_bytes(world.name("id of the NCCL group"), 0, message)?;
    let id = message.strip_prefix(b"=").and_then(|id| <[u8; ID_BYTES]>::try_from(id).ok());
    id.map(UniqueId).ok_or_else(|| fault(String::from_utf8_lossy(message.get(1..).unwrap_or_default())))
}
