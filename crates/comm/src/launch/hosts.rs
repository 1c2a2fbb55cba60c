//! Address of rank 0, from the launcher's variables.

use super::{Launcher, Lookup, Place};
use crate::call::mix;

/// Host and port on which rank 0 listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MasterAddress {
    pub host: String,
    pub port: u16,
}

/// Ports that are neither reserved nor assigned by the system.
const PORTS: std::ops::Range<u16> = 15_000..31_000;

/// Address at which ranks without MPI connect to rank 0.
pub fn master_address(place: &Place, var: Lookup) -> Result<MasterAddress, String> {
    let port = port(var)?;
    if let Some(host) = var("MASTER_ADDR") {
        let port = port.or_else(|| job(place, var).map(derived));
        let port = port.ok_or("MASTER_ADDR is set, but MASTER_PORT is not")?;
        return Ok(MasterAddress { host, port });
    }
    let job = job(place, var);
    let host = match place.launcher {
        Launcher::Srun => first_node(var)?,
        Launcher::OpenMpi | Launcher::Mpich if place.local_world == place.world => "127.0.0.1".to_string(),
        _ => return Err("MASTER_ADDR is not set: it must name the host of rank 0".to_string()),
    };
    let port = port.or(job.map(derived)).ok_or("MASTER_PORT is not set: any free port above 1024 will do")?;
    Ok(MasterAddress { host, port })
}

/// The port that was set. torchrun's agent may listen on it itself; the next one is then used.
fn port(var: Lookup) -> Result<Option<u16>, String> {
    let Some(text) = var("MASTER_PORT") else { return Ok(None) };
    let agent = var("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|value| value.eq_ignore_ascii_case("true"));
    let port = text.parse().ok().filter(|port| *port > 0);
    let port = port.and_then(|port: u16| port.checked_add(u16::from(agent)));
    port.map(Some).ok_or_else(|| format!("MASTER_PORT is \"{text}\", which is not a port"))
}

/// Identifier of this job among others on the same hosts.
fn job(place: &Place, var: Lookup) -> Option<String> {
    match place.launcher {
        Launcher::Srun => Some(format!("{}.{}", var("SLURM_JOB_ID")?, var("SLURM_STEP_ID")?)),
        Launcher::OpenMpi => var("PMIX_NAMESPACE").or_else(|| var("OMPI_MCA_ess_base_jobid")),
        Launcher::Mpich => var("PMI_JOB_ID"),
        _ => None,
    }
}

fn derived(job: String) -> u16 {
    let hash = job.bytes().fold(0, |hash, byte| mix(hash, u64::from(byte)));
    PORTS.start + (hash % u64::from(PORTS.end - PORTS.start)) as u16
}

fn first_node(var: Lookup) -> Result<String, String> {
    const NAMES: [&str; 3] = ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"];
    let Some((name, list)) = NAMES.iter().find_map(|name| Some((name, var(name)?))) else {
        return Err("SLURM_STEP_NODELIST is not set: set MASTER_ADDR to the host of rank 0".to_string());
    };
    let nodes = expand_nodes(&list).map_err(|problem| format!("{name} is \"{list}\": {problem}"))?;
    nodes.into_iter().next().ok_or_else(|| format!("{name} names no host"))
}

/// Most hosts of a list, more than any cluster has: a longer one is a mistake.
const MOST_NODES: usize = 1 << 16;

/// Expands Slurm's list of hosts: `gpu[01-04,7],login`.
pub fn expand_nodes(list: &str) -> Result<Vec<String>, String> {
    let mut nodes = Vec::new();
    for part in outside_brackets(list)? {
        expand_part(part, &mut nodes)?;
    }
    Ok(nodes)
}

fn outside_brackets(list: &str) -> Result<Vec<&str>, String> {
    let (mut parts, mut begin, mut inside) = (Vec::new(), 0, false);
    for (at, letter) in list.char_indices() {
        match letter {
            '[' if inside => return Err("a bracket inside brackets".to_string()),
            '[' => inside = true,
            ']' if !inside => return Err("a bracket that nothing opens".to_string()),
            ']' => inside = false,
            ',' if !inside => {
                parts.push(&list[begin..at]);
                begin = at + 1;
            }
            _ => {}
        }
    }
    if inside {
        return Err("a bracket that nothing closes".to_string());
    }
    parts.push(&list[begin..]);
    Ok(parts)
}

fn expand_part(part: &str, nodes: &mut Vec<String>) -> Result<(), String> {
    if part.is_empty() {
        return Err("an empty name".to_string());
    }
    let Some((before, rest)) = part.split_once('[') else {
        nodes.push(part.to_string());
        return Ok(());
    };
    let Some((ranges, after)) = rest.split_once(']') else { return Err("a bracket too few".to_string()) };
    for range in ranges.split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let number = |text: &str| text.parse::<usize>().map_err(|_| format!("\"{range}\" is not a range"));
        let (from, to, width) = (number(first)?, number(last)?, first.len());
        if to < from || to - from >= MOST_NODES - nodes.len().min(MOST_NODES) {
            return Err(format!("\"{range}\" is not a range"));
        }
        for number in from..=to {
            // A second pair of brackets may follow.
            expand_part(&format!("{before}{number:0width$}{after}"), nodes)?;
        }
    }
    Ok(())
}

/// Expands Slurm's counts per node: `2(x3),1`.
pub(super) fn expand_counts(name: &str, list: &str) -> Result<Vec<usize>, String> {
    let wrong = || format!("{name} is \"{list}\", which is not a list of counts");
    let mut counts = Vec::new();
    for part in list.split(',') {
        let (count, times) = match part.split_once("(x") {
            Some((count, times)) => (count, times.strip_suffix(')').ok_or_else(wrong)?),
            None => (part, "1"),
        };
        let count: usize = count.trim().parse().map_err(|_| wrong())?;
        let times =
            times.parse().ok().filter(|times| counts.len() + times <= MOST_NODES).ok_or_else(wrong)?;
        counts.extend(std::iter::repeat_n(count, times));
    }
    Ok(counts)
}
