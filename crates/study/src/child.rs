//! A run as a child of the study: how it is started, watched and ended.

mod reason;

use crate::grid::Planned;
use crate::measure::Watched;
use crate::spec::Launch;
use std::collections::HashMap;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

pub use reason::signal_name;

pub const STDOUT: &str = "stdout.log";
pub const STDERR: &str = "stderr.log";
const HOSTS: &str = "hosts";

/// A file beside the folder of a run, which is the run's own: what it printed, and the hosts it was given.
pub fn beside(folder: &Path, name: &str) -> PathBuf {
    folder.with_added_extension(name)
}

/// The command of a run that makes `folder`.
pub fn command(
    program: &Path,
    launch: &Launch,
    planned: &Planned,
    repeat: usize,
    folder: &Path,
) -> Result<Command, String> {
    let mut words: Vec<OsString> = vec!["train".into()];
    words.extend(planned.options.iter().map(OsString::from));
    let says = |flag: &str| planned.options.iter().any(|option| option.split('=').next() == Some(flag));
    // With one seed for all, runs of a point would learn the same to the bit, and their scores tell nothing of chance.
    if !says("--seed") {
        words.extend(["--seed".into(), repeat.to_string().into()]);
    }
    // Points of any length are compared on the same images.
    if !says("--eval-images") {
        words.extend(["--eval-images", "all"].map(OsString::from));
    }
    // Of a run that is measured, every step is like the others.
    words.extend(["--out".into(), folder.into()]);
    words.extend(["--no-checkpoints", "--no-breakdown", "--json"].map(OsString::from));
    let mut hosts = hosts_of(launch, planned)?;
    if !hosts.names.is_empty() {
        let line = |name: &String| format!("{name} slots={}\n", hosts.ranks_each);
        let file = beside(folder, HOSTS);
        fs::write(&file, hosts.names.iter().map(line).collect::<String>())
            .map_err(|e| format!("{}: {e}", file.display()))?;
        hosts.file = Some(file);
    }
    if let Some(template) = &launch.launcher {
        return launched(template, program, words, planned, &hosts);
    }
    words.extend(["--ranks".into(), planned.settings.ranks.to_string().into()]);
    match (&launch.comm, &hosts.file) {
        (comm, None) => {
            words.extend(comm.iter().flat_map(|comm| ["--comm".into(), OsString::from(comm)]));
        }
        (_, Some(file)) => {
            words.extend(["--comm".into(), "mpi".into(), "--hostfile".into(), file.into()]);
        }
    }
    let mut command = Command::new(program);
    command.args(words);
    Ok(command)
}

/// Refuses a way of starting ranks that a point can't use, as far as that is known before.
pub fn check(launch: &Launch, planned: &Planned) -> Result<(), String> {
    let hosts = hosts_of(launch, planned)?;
    let program = Path::new("vitesse");
    launch
        .launcher
        .as_ref()
        .map_or(Ok(()), |template| launched(template, program, vec![], planned, &hosts).map(drop))
}

/// The hosts of a point.
#[derive(Default)]
struct Hosts {
    names: Vec<String>,
    file: Option<PathBuf>,
    ranks_each: usize,
}

/// As many of the hosts as the point has.
fn hosts_of(launch: &Launch, planned: &Planned) -> Result<Hosts, String> {
    let (ranks, hosts) = (planned.settings.ranks, planned.settings.hosts);
    if !ranks.is_multiple_of(hosts) {
        return Err(format!("{ranks} ranks can't be divided equally among {hosts} hosts"));
    }
    let ranks_each = ranks / hosts;
    let from_file = launch.hostfile.as_deref().map(names_in).transpose()?;
    let names = from_file.unwrap_or_else(|| launch.hosts.clone());
    if names.is_empty() {
        if hosts > 1 && launch.launcher.is_none() {
            return Err(format!("{hosts} hosts, but no --hosts, --hostfile or --launcher to reach them"));
        }
        return Ok(Hosts { ranks_each, ..Hosts::default() });
    }
    if names.len() < hosts {
        return Err(format!("{hosts} hosts, but only {} are named", names.len()));
    }
    Ok(Hosts { names: names[..hosts].to_vec(), file: None, ranks_each })
}

/// The first word of every line that is no comment.
fn names_in(path: &Path) -> Result<Vec<String>, String> {
    let text = fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))?;
    let lines = text.lines().map(|line| line.split('#').next().unwrap_or_default());
    Ok(lines.filter_map(|line| line.split_whitespace().next()).map(str::to_string).collect())
}

/// What a launcher's template may name.
pub const PLACES: &str = "{ranks}, {hosts}, {per-host}, {hostlist}, {hostfile}, {command}";

fn launched(
    template: &str,
    program: &Path,
    words: Vec<OsString>,
    planned: &Planned,
    hosts: &Hosts,
) -> Result<Command, String> {
    let split = shlex::split(template).filter(|words| !words.is_empty());
    let split = split.ok_or(format!("launcher {template:?}: is no command, or a quote is not closed"))?;
    let run = || std::iter::once(OsString::from(program)).chain(words.iter().cloned());
    let mut all: Vec<OsString> = Vec::new();
    for word in &split {
        if word == "{command}" {
            all.extend(run());
            continue;
        }
        let file = hosts.file.as_ref().map(|file| file.display().to_string());
        let filled = word
            .replace("{ranks}", &planned.settings.ranks.to_string())
            .replace("{hosts}", &planned.settings.hosts.to_string())
            .replace("{per-host}", &hosts.ranks_each.to_string())
            .replace("{hostlist}", &hosts.names.join(","))
            .replace("{hostfile}", &file.unwrap_or_default());
        if filled.contains('{') {
            return Err(format!("launcher: {word} is none of {PLACES}"));
        }
        all.push(filled.into());
    }
    if !split.iter().any(|word| word == "{command}") {
        all.extend(run());
    }
    let mut command = Command::new(&all[0]);
    command.args(&all[1..]);
    Ok(command)
}

/// How a child ended.
pub struct Ended {
    pub status: ExitStatus,
    pub watched: Watched,
    pub seconds: f64,
    /// It was asked to, as the study is to stop.
    pub stopped: bool,
}

/// Between two looks at a child, at least and at most.
const LOOK: [Duration; 2] = [Duration::from_millis(1), Duration::from_millis(50)];
/// A run that is asked to stop ends its step first; after this it is ended.
const PATIENCE: Duration = Duration::from_secs(20);

/// What a child gets when this process ends: a launcher has ranks to end before itself.
pub fn last_signal(launch: &Launch) -> i32 {
    if launch.launcher.is_some() { libc::SIGTERM } else { libc::SIGKILL }
}

/// Starts a child and waits for its end, calling `look` now and then; if that says so, the child is to stop.
pub fn watch(
    mut command: Command,
    folder: &Path,
    within: &Path,
    last_signal: i32,
    mut look: impl FnMut() -> bool,
) -> Result<Ended, String> {
    let log = |name: &str| {
        let path = beside(folder, name);
        // What a killed run may still write is no part of this one's.
        let _ = fs::remove_file(&path);
        File::create(&path).map_err(|e| format!("{}: {e}", path.display()))
    };
    command.stdin(Stdio::null()).stdout(log(STDOUT)?).stderr(log(STDERR)?).current_dir(within);
    end_with_parent(&mut command, last_signal);
    let program = command.get_program().to_string_lossy().into_owned();
    let start = Instant::now();
    let energy = Energy::now();
    let mut child = command.spawn().map_err(|e| format!("can't start {program}: {e}"))?;
    let mut memory = PeakMemory::default();
    let mut asked: Option<Instant> = None;
    loop {
        let status = child.try_wait().map_err(|e| format!("can't wait for the run: {e}"))?;
        if let Some(status) = status {
            let seconds = start.elapsed().as_secs_f64();
            let watched = Watched { memory_bytes: memory.most(), watts: energy.watts(seconds) };
            return Ok(Ended { status, watched, seconds, stopped: asked.is_some() });
        }
        memory.look(child.id());
        match asked {
            None if look() => {
                signal(&child, libc::SIGTERM);
                asked = Some(Instant::now());
            }
            Some(since) if since.elapsed() > PATIENCE => signal(&child, libc::SIGKILL),
            _ => {}
        }
        // A short run is looked at often enough to be seen near its end, too.
        std::thread::sleep((start.elapsed() / 5).clamp(LOOK[0], LOOK[1]));
    }
}

/// A group of its own, so that Ctrl-C comes from here alone; and an end with this process, even if that is killed.
fn end_with_parent(command: &mut Command, last_signal: i32) {
    command.process_group(0);
    let me = std::process::id();
    // SAFETY: between fork and exec only calls that are safe there are made: prctl and getppid; an error is only built.
    unsafe {
        command.pre_exec(move || {
            let asked = libc::prctl(libc::PR_SET_PDEATHSIG, last_signal);
            // Had the parent ended before, no signal would come.
            let orphan = libc::getppid() as u32 != me;
            if asked != 0 || orphan { Err(io::ErrorKind::NotFound.into()) } else { Ok(()) }
        });
    }
}

/// To the child and all in its group.
fn signal(child: &Child, signal: i32) {
    // SAFETY: a signal to the group of a child that was not waited for yet, so that its number is still its own.
    unsafe { libc::kill(-(child.id() as libc::pid_t), signal) };
}

/// What a child that failed had to say. All that it printed lies beside its folder.
pub fn last_words(folder: &Path, status: ExitStatus) -> String {
    let text = |log| String::from_utf8_lossy(&fs::read(beside(folder, log)).unwrap_or_default()).into_owned();
    reason::reason(&text(STDERR), &text(STDOUT), status)
}

/// The most memory that the processes of a run on this host had.
#[derive(Default)]
struct PeakMemory {
    of: HashMap<u32, u64>,
}

impl PeakMemory {
    fn look(&mut self, pid: u32) {
        let mut pids = vec![pid];
        while let Some(pid) = pids.pop() {
            let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
            let most = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
            let most = most.and_then(|value| value.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
            // Between fork and exec a child looks as large as its parent.
            self.of.extend(most.map(|kilobytes| (pid, kilobytes * 1024)));
            let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
            for task in tasks {
                let children = fs::read_to_string(task.path().join("children")).unwrap_or_default();
                pids.extend(children.split_whitespace().filter_map(|pid| pid.parse::<u32>().ok()));
            }
        }
    }

    fn most(&self) -> Option<u64> {
        (!self.of.is_empty()).then(|| self.of.values().sum())
    }
}

/// What the processors' own meters say, where they can be read.
struct Energy {
    joules: Option<f64>,
}

impl Energy {
    fn now() -> Self {
        Energy { joules: Self::read(Path::new("/sys/class/powercap")) }
    }

    fn watts(&self, seconds: f64) -> Option<f64> {
        let used = Self::now().joules? - self.joules?;
        // A meter that went round says nothing.
        (used > 0.0 && seconds > 0.0).then_some(used / seconds)
    }

    /// Of all packages together: `intel-rapl:0`, but not its parts, `intel-rapl:0:0`.
    fn read(folder: &Path) -> Option<f64> {
        let meters = fs::read_dir(folder).ok()?.flatten().filter(|entry| {
            let name = entry.file_name().to_string_lossy().into_owned();
            name.starts_with("intel-rapl:") && name.matches(':').count() == 1
        });
        let micro = |path: PathBuf| fs::read_to_string(path).ok()?.trim().parse::<f64>().ok();
        let all: Option<Vec<f64>> = meters.map(|entry| micro(entry.path().join("energy_uj"))).collect();
        all.filter(|all| !all.is_empty()).map(|all| all.iter().sum::<f64>() / 1e6)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{self, point};
    use ::testing::Folder;

    fn folder(name: &str) -> Folder {
        Folder::new(&format!("child-{name}"))
    }

    fn planned(ranks: usize, hosts: usize) -> Planned {
        let mut settings = point(ranks, &[]).settings;
        settings.hosts = hosts;
        let options = vec!["--threads".to_string(), "1".to_string()];
        Planned { options, ..testing::planned("p", settings) }
    }

    fn words(launch: &Launch, ranks: usize, hosts: usize) -> Result<String, String> {
        let out = folder(&format!("words-{ranks}-{hosts}"));
        let command = command(Path::new("/bin/vitesse"), launch, &planned(ranks, hosts), 2, &out)?;
        let all = std::iter::once(command.get_program()).chain(command.get_args());
        let text = all.map(|word| word.to_string_lossy().into_owned()).collect::<Vec<_>>().join(" ");
        Ok(text.replace(&out.display().to_string(), "OUT"))
    }

    #[test]
    fn ranks_are_started_in_the_way_that_is_asked_for() {
        let train = "/bin/vitesse train --threads 1 --seed 2 --eval-images all --out OUT --no-checkpoints --no-breakdown --json";
        assert_eq!(words(&Launch::default(), 2, 1).unwrap(), format!("{train} --ranks 2"));
        let mpi = Launch { comm: Some("mpi".into()), ..Launch::default() };
        assert_eq!(words(&mpi, 2, 1).unwrap(), format!("{train} --ranks 2 --comm mpi"));
        let hosts = Launch { hosts: vec!["a".into(), "b".into(), "c".into()], ..Launch::default() };
        let expected = format!("{train} --ranks 4 --comm mpi --hostfile OUT.hosts");
        assert_eq!(words(&hosts, 4, 2).unwrap(), expected);
        assert!(words(&hosts, 4, 4).unwrap_err().contains("only 3 are named"));
        assert!(words(&hosts, 3, 2).unwrap_err().contains("can't be divided equally"));
        let srun = |template: &str| Launch { launcher: Some(template.into()), ..Launch::default() };
        let found = words(&srun("srun -N {hosts} -n {ranks} --ntasks-per-node={per-host}"), 4, 2).unwrap();
        assert_eq!(found, format!("srun -N 2 -n 4 --ntasks-per-node=2 {train}"));
        let found = words(&srun("sh -c 'exec \"$@\"' sh {command} --seed 3"), 1, 1).unwrap();
        assert_eq!(found, format!("sh -c exec \"$@\" sh {train} --seed 3"));
        assert!(words(&srun("srun {rank}"), 1, 1).unwrap_err().contains("{rank} is none of"));
        assert!(words(&srun("srun 'x"), 1, 1).unwrap_err().contains("quote"));
    }

    #[test]
    fn a_child_is_watched_and_asked_to_stop() {
        let folder = folder("watch");
        // What a child prints lies beside its folder.
        let out = folder.join("run");
        fs::create_dir(&out).unwrap();
        let mut command = Command::new("sh");
        command.args(["-c", "echo 'vitesse: rank 1 was lost' >&2; exit 3"]);
        let ended = watch(command, &out, &out, libc::SIGKILL, || false).unwrap();
        assert_eq!(last_words(&out, ended.status), "rank 1 was lost (exit code 3)");
        let mut command = Command::new("sleep");
        command.arg("60");
        let ended = watch(command, &out, &out, libc::SIGKILL, || true).unwrap();
        assert!(ended.stopped && ended.seconds < 10.0);
        let missing = watch(Command::new("no-such-program"), &out, &out, libc::SIGKILL, || false);
        assert!(missing.is_err_and(|e| e.contains("can't start no-such-program")));
    }

    #[test]
    fn meters_of_packages_add_up() {
        let out = folder("meters");
        for (name, value) in
            [("intel-rapl:0", "5000000"), ("intel-rapl:1", "1000000"), ("intel-rapl:0:0", "9")]
        {
            fs::create_dir_all(out.join(name)).unwrap();
            fs::write(out.join(name).join("energy_uj"), value).unwrap();
        }
        assert_eq!(Energy::read(&out), Some(6.0));
        assert_eq!(Energy::read(&out.join("none")), None);
    }
}
