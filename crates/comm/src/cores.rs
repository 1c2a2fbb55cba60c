//! Cores of a rank: those on which it may run, shared with the ranks of its machine that may run there too.
//!
//! `srun` and `mpirun` may bind each rank to cores of its own, to a socket, or to nothing. Only the ranks' lists together tell which.

use std::ops::RangeInclusive;

/// Cores on which this process may run, as the system lists them: `0-3,8`. Empty where it doesn't.
pub(crate) fn allowed() -> String {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    list.unwrap_or_default().trim().to_string()
}

/// Number of cores that the system offers this process.
pub(crate) fn available() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Number of cores for the rank with the list `mine`, of ranks on one machine with these lists, its own among them. `available` is what
/// the system offers this process, which a limit on its CPU time may make less than its list: then the ranks divide that.
pub(crate) fn share(mine: &str, all: &[&str], available: usize) -> usize {
    let ranks = all.len().max(1);
    let equal = (available / ranks).max(1);
    let (Some(cores), Some(others)) =
        (expand(mine), all.iter().map(|list| expand(list)).collect::<Option<Vec<_>>>())
    else {
        return equal;
    };
    let cores: Vec<usize> = cores.into_iter().flatten().collect();
    let limited = available < cores.len();
    if cores.is_empty() || limited {
        return equal;
    }
    let users =
        |core: &usize| others.iter().filter(|ranges| ranges.iter().any(|range| range.contains(core))).count();
    // Cores by the number of ranks that use them: a rank has a half of a core that two use.
    let mut shared = vec![0usize; ranks + 1];
    cores.iter().for_each(|core| shared[users(core)] += 1);
    let parts = shared.iter().enumerate().skip(1).map(|(users, cores)| *cores as f64 / users as f64);
    // Thirds don't add up to one.
    ((parts.sum::<f64>() + 1e-6) as usize).max(1)
}

fn expand(list: &str) -> Option<Vec<RangeInclusive<usize>>> {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.parse().ok()?..=last.parse().ok()?)
    };
    list.split(',').map(range).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_with_cores_of_their_own_use_all_of_them() {
        // srun --ntasks-per-node=4 --cpus-per-task=8, bound by task/affinity or cgroups.
        let bound = ["0-7", "8-15", "16-23", "24-31"];
        assert!(bound.iter().all(|mine| share(mine, &bound, 8) == 8));
        // With two threads a core, as Slurm deals them.
        assert_eq!(share("0-3,32-35", &["0-3,32-35", "4-7,36-39"], 8), 8);
    }

    #[test]
    fn ranks_that_may_run_anywhere_divide_the_machine() {
        assert_eq!(share("0-31", &["0-31"; 4], 32), 8);
        assert_eq!(share("0-1", &["0-1"; 4], 2), 1, "a rank has at least one");
        assert_eq!(share("0-2", &["0-2"; 3], 3), 1);
    }

    #[test]
    fn ranks_of_a_socket_divide_the_socket() {
        // mpirun binds more than two ranks to sockets.
        let sockets = ["0-15", "16-31", "0-15", "16-31"];
        assert!(sockets.iter().all(|mine| share(mine, &sockets, 16) == 8));
        assert_eq!(share("0-3", &["0-3", "2-5"], 4), 3, "two cores alone, two by halves");
    }

    #[test]
    fn a_limit_on_time_is_divided_by_all() {
        assert_eq!(share("0-31", &["0-31"; 2], 8), 4);
        for unknown in ["", "a-b"] {
            assert_eq!(share(unknown, &[unknown, "0-1"], 8), 4);
        }
    }

    #[test]
    fn this_process_may_run_somewhere() {
        let list = allowed();
        let cores = expand(&list).expect("a list").into_iter().flatten().count();
        assert!(cores >= std::thread::available_parallelism().map_or(1, usize::from), "{list}");
    }
}
