//! How much memory is left.

use std::fs;
use std::path::Path;

/// Bytes that this process could still take without pushing anything out, or `None` where Linux isn't there to tell:
/// what the machine has left, or less if a control group (version 2; a container is one) allows less.
pub fn available_memory() -> Option<u64> {
    let machine = free_on_machine(&fs::read_to_string("/proc/meminfo").ok()?)?;
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let group = free_in_groups(Path::new("/sys/fs/cgroup"), own_group(&groups).unwrap_or_default());
    Some(machine.min(group.unwrap_or(u64::MAX)))
}

fn free_on_machine(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kilobytes: u64 = line.split_whitespace().next()?.parse().ok()?;
    Some(kilobytes * 1024)
}

/// The path of version 2's group, relative to where groups are mounted.
fn own_group(groups: &str) -> Option<&str> {
    groups.lines().find_map(|line| line.strip_prefix("0::/"))
}

/// The least that the group and those it is in leave; `None` without a limit.
fn free_in_groups(mount: &Path, group: &str) -> Option<u64> {
    let innermost = mount.join(group);
    let groups = innermost.ancestors().take_while(|folder| folder.starts_with(mount));
    groups.filter_map(free_in_group).min()
}

fn free_in_group(folder: &Path) -> Option<u64> {
    let number = |file: &str| fs::read_to_string(folder.join(file)).ok()?.trim().parse::<u64>().ok();
    // "max", where there is no limit, is no number.
    let limit = number("memory.max")?;
    let used = number("memory.current").unwrap_or(0);
    // Files that were read, and what Linux knows of them, count as used, but make way.
    let stat = fs::read_to_string(folder.join("memory.stat")).unwrap_or_default();
    let makes_way = |line: &str| {
        let (name, bytes) = line.split_once(' ')?;
        matches!(name, "inactive_file" | "active_file" | "slab_reclaimable")
            .then(|| bytes.trim().parse::<u64>().ok())?
    };
    let making_way: u64 = stat.lines().filter_map(makes_way).sum();
    Some(limit.saturating_sub(used.saturating_sub(making_way)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machine_says_what_it_has_left() {
        let meminfo =
            "MemTotal:       8000000 kB\nMemFree:  100 kB\nMemAvailable:    2000 kB\nBuffers: 1 kB\n";
        assert_eq!(free_on_machine(meminfo), Some(2000 * 1024));
        assert_eq!(free_on_machine("MemTotal: 1 kB"), None);
        if cfg!(target_os = "linux") {
            assert!(available_memory().is_some_and(|bytes| bytes > 0));
        }
    }

    #[test]
    fn the_tightest_group_counts() {
        assert_eq!(own_group("1:memory:/old\n0::/user/run\n"), Some("user/run"));
        assert_eq!(own_group("1:memory:/old\n"), None);

        let mount = testing::Folder::new("groups");
        let inner = mount.join("user/run");
        fs::create_dir_all(&inner).unwrap();
        let write = |folder: &Path, file: &str, text: &str| fs::write(folder.join(file), text).unwrap();
        assert_eq!(free_in_groups(&mount, "user/run"), None);
        write(&inner, "memory.max", "max\n");
        assert_eq!(free_in_groups(&mount, "user/run"), None);
        write(&mount.join("user"), "memory.max", "1000\n");
        write(&mount.join("user"), "memory.current", "700\n");
        assert_eq!(free_in_groups(&mount, "user/run"), Some(300));
        write(
            &mount.join("user"),
            "memory.stat",
            "anon 5\ninactive_file 50\nactive_file 20\nslab_reclaimable 5\nslab 9\n",
        );
        assert_eq!(free_in_groups(&mount, "user/run"), Some(375));
        write(&inner, "memory.max", "20\n");
        assert_eq!(free_in_groups(&mount, "user/run"), Some(20));
        write(&inner, "memory.current", "30\n");
        assert_eq!(free_in_groups(&mount, "user/run"), Some(0));
    }
}
