//! Processes and machines as ranks know each other: enough to end a stopped one without hitting another.

use std::fs;

/// Machine, process namespace and start time of this process: no other process anywhere has the same with the same number.
pub(crate) fn identity() -> String {
    of(std::process::id()).unwrap_or_default()
}

/// Whether two processes can see each other by number.
pub(crate) fn same_machine(one: &str, other: &str) -> bool {
    let machine = |identity: &str| identity.rsplit_once('/').map(|(machine, _)| machine.to_string());
    machine(one).is_some() && machine(one) == machine(other)
}

/// Ends a process that can't end itself, if it is on this machine and still the one that was meant.
pub(crate) fn end(pid: u32, identity: &str) {
    if pid > 1 && !identity.is_empty() && of(pid).is_some_and(|found| found == identity) {
        // SAFETY: sends a signal to a process that was just seen to be the one meant; no memory is involved.
        unsafe { libc::kill(pid as libc::pid_t, libc::SIGKILL) };
    }
}

fn of(pid: u32) -> Option<String> {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let namespace = fs::read_link("/proc/self/ns/pid").ok()?;
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in parentheses may hold anything; the start time is the 20th field after it.
    let started = stat.rsplit_once(')')?.1.split_whitespace().nth(19)?;
    Some(format!("{}/{}/{started}", boot.trim(), namespace.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_known_by_its_start() {
        let mut child = std::process::Command::new("sleep").arg("30").spawn().expect("sleep starts");
        let identity = of(child.id()).expect("a child can be seen");
        assert!(same_machine(&identity, &self::identity()));
        end(child.id(), "another/machine/1");
        assert_eq!(child.try_wait().expect("its state"), None, "another process was meant");
        end(child.id(), &identity);
        assert!(!child.wait().expect("its end").success());
    }
}
