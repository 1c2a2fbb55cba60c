//! Identity of a rank's process, enough to kill a stopped one without hitting another.

use std::fs;

/// Machine, process namespace and start time of this process: together with the pid unique among all processes.
pub(crate) fn identity() -> String {
    of(std::process::id()).unwrap_or_default()
}

/// Tells whether two processes are on one machine and in one process namespace.
pub(crate) fn same_machine(one: &str, other: &str) -> bool {
    let machine = |identity: &str| identity.rsplit_once('/').map(|(machine, _)| machine.to_string());
    machine(one).is_some() && machine(one) == machine(other)
}

/// Start of the machine of a process, which differs between machines.
pub(crate) fn boot(identity: &str) -> &str {
    identity.split('/').next().unwrap_or_default()
}

/// Kills a process that is stopped and so can't exit by itself, if it is on this machine and still the same one. One that
/// runs reaches a diagnosis of its own, and has a line to print.
pub(crate) fn kill_stopped(pid: u32, identity: &str) {
    let is_meant = || of(pid).is_some_and(|found| found == identity);
    if pid > 1 && !identity.is_empty() && is_meant() && is_stopped(pid) {
        // SAFETY: sends a signal to a process that was just seen to be the one meant; no memory is involved.
        unsafe { libc::kill(pid as libc::pid_t, libc::SIGKILL) };
    }
}

fn of(pid: u32) -> Option<String> {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let namespace = fs::read_link("/proc/self/ns/pid").ok()?;
    let started = field(pid, 19)?;
    Some(format!("{}/{}/{started}", boot.trim(), namespace.display()))
}

/// Tells whether a process is stopped by a signal or a debugger.
fn is_stopped(pid: u32) -> bool {
    matches!(field(pid, 0).as_deref(), Some("T" | "t"))
}

/// Field of `/proc/PID/stat` after the process's name, which stands in parentheses and may hold anything: 0 is the state, 19 the start.
fn field(pid: u32, number: usize) -> Option<String> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(')')?.1.split_whitespace().nth(number).map(str::to_string)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_known_by_its_start() {
        let mut child = std::process::Command::new("sleep").arg("30").spawn().expect("sleep starts");
        let identity = of(child.id()).expect("a child can be seen");
        assert!(same_machine(&identity, &self::identity()));
        kill_stopped(child.id(), "another/machine/1");
        assert_eq!(child.try_wait().expect("its state"), None, "another process was meant");
        kill_stopped(child.id(), &identity);
        std::thread::sleep(std::time::Duration::from_millis(50));
        assert_eq!(child.try_wait().expect("its state"), None, "it runs, and can end by itself");
        // SAFETY: a signal to our own child.
        unsafe { libc::kill(child.id() as libc::pid_t, libc::SIGSTOP) };
        while !is_stopped(child.id()) {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        kill_stopped(child.id(), &identity);
        assert!(!child.wait().expect("its end").success());
    }
}
