//! Programs that tests call, and hosts made of network namespaces.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Path of the first of these programs that `PATH` has, or a line that says that there is none.
pub fn find(names: &[&str]) -> Result<PathBuf, String> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let in_path = |name: &&str| std::env::split_paths(&path).map(|dir| dir.join(name)).find(|p| p.is_file());
    names.iter().find_map(in_path).ok_or_else(|| format!("no {} was found", names.join(" or ")))
}

/// Path of a Chromium that runs without a screen.
pub fn chromium() -> Result<PathBuf, String> {
    find(&["chromium-headless-shell", "chromium", "chromium-browser", "google-chrome"])
}

/// Path of Open MPI's or another mpirun.
pub fn mpirun() -> Result<PathBuf, String> {
    find(&["mpirun"])
}

/// An error where this user can't make network namespaces.
pub fn namespaces() -> Result<(), String> {
    find(&["ip"])?;
    let made = Command::new("unshare").args(["-n", "true"]).output();
    let made = made.is_ok_and(|output| output.status.success());
    if made { Ok(()) } else { Err("this user can't make network namespaces".to_string()) }
}

/// Builds a shared library from a C file: a stand-in for one that isn't here.
#[track_caller]
pub fn shared_library(source: &Path, library: &Path, flags: &[&str]) {
    let name = library.file_name().unwrap_or_default().to_string_lossy();
    let mut cc = Command::new("cc");
    cc.args(["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC", "-pthread"]).args(flags);
    cc.arg(format!("-Wl,-soname,{name}")).arg("-o").arg(library).arg(source);
    let output = cc.output().expect("cc: install gcc");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Hosts of network namespaces, made by `scripts/hosts` and gone when dropped.
pub struct Hosts {
    pub script: PathBuf,
    name: String,
    net: String,
}

impl Hosts {
    /// Two hosts whose link has this rate and a delay of 1 ms each way. An error where namespaces can't be made; where they
    /// can, but not the hosts, it panics. `name` and `net`, the first three numbers of addresses, must be the test's own.
    pub fn up(name: &str, net: &str, rate: &str) -> Result<Hosts, String> {
        Self::many(2, name, net, rate)
    }

    /// As [`up`](Hosts::up), but so many.
    pub fn many(count: usize, name: &str, net: &str, rate: &str) -> Result<Hosts, String> {
        namespaces()?;
        let script = crate::repository().join("scripts/hosts");
        let hosts = Hosts { script, name: name.to_string(), net: net.to_string() };
        let made: Output = hosts.command(&["up", &count.to_string(), rate, "1ms"]).output().unwrap();
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        Ok(hosts)
    }

    /// A call of `scripts/hosts` for these hosts.
    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(&self.script);
        self.set(&mut command).args(args);
        command
    }

    /// Makes calls of `scripts/hosts` by this command's children be for these hosts.
    pub fn set<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        command.env("VITESSE_HOSTS", &self.name).env("VITESSE_NET", &self.net)
    }

    /// Writes a file of these hosts with so many slots each, for an mpirun that vitesse calls.
    pub fn write_hostfile(&self, path: &Path, count: usize, slots: usize) {
        let line = |host: usize| format!("{}.{} slots={slots}\n", self.net, host + 1);
        std::fs::write(path, (0..count).map(line).collect::<String>()).unwrap();
    }

    /// Ids of the processes on a host.
    pub fn pids(&self, host: usize) -> Vec<String> {
        let found =
            Command::new("ip").args(["netns", "pids", &format!("{}-{host}", self.name)]).output().unwrap();
        String::from_utf8_lossy(&found.stdout).split_whitespace().map(str::to_string).collect()
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        let _ = self.command(&["down"]).output();
    }
}
