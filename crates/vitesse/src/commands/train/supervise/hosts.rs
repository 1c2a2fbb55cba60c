//! Hosts of mpirun, and those of them that still answer.

use super::{child, mpirun};
use anyhow::{Context, bail, ensure};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Time for a host to start a program: it has to accept a connection, and mpirun to start its daemon.
const ANSWER: Duration = Duration::from_secs(10);

/// A line of a file of hosts.
#[derive(Clone, Debug, PartialEq)]
struct Host {
    name: String,
    /// Ranks that it can run.
    slots: usize,
    line: String,
}

/// The hosts of a run.
#[derive(Debug)]
pub struct Hosts {
    all: Vec<Host>,
    /// Where those that answer are written.
    file: PathBuf,
    /// Ranks of the run as it was asked for, and the fewest it may go on with.
    ranks: usize,
    least: usize,
    /// Ranks of a group that divides states: what is left has whole groups.
    group: usize,
}

/// What is left of a run's ranks after a loss.
#[derive(Debug, PartialEq)]
pub struct Left {
    pub ranks: usize,
    /// The hosts that answer.
    pub file: PathBuf,
    /// Names of the others.
    pub lost: Vec<String>,
}

impl Hosts {
    /// Reads a file of hosts. `folder` is that of the run, beside which the list of those that answer lies; ranks are left out in `group`s.
    pub fn read(
        path: &Path,
        folder: &Path,
        ranks: usize,
        least: usize,
        group: usize,
    ) -> anyhow::Result<Self> {
        let text = fs::read_to_string(path).with_context(|| format!("--hostfile {}", path.display()))?;
        let all = parse(&text, &path.display().to_string())?;
        let file = study::child::beside(folder, "hosts");
        let same = |a: &Path, b: &Path| {
            fs::canonicalize(a).ok().is_some_and(|a| fs::canonicalize(b).ok() == Some(a))
        };
        ensure!(
            !same(path, &file),
            "--hostfile {}: the hosts that answer would be written over it; give it another name",
            path.display()
        );
        Ok(Hosts { all, file, ranks, least, group })
    }

    /// Asks every host to start a program, and keeps those that do so in time.
    pub fn left(&self) -> anyhow::Result<Left> {
        let program = std::env::current_exe().context("can't find this program")?;
        let names = self.all.iter().map(|host| mpirun::on_host(&host.name, &program));
        let answers = answers(names.collect::<anyhow::Result<_>>()?, ANSWER)?;
        child::end_orphans();
        let left = self.among(&answers)?;
        let lines = self.all.iter().zip(&answers).filter(|(_, answers)| **answers);
        let text: String = lines.map(|(host, _)| format!("{}\n", host.line)).collect();
        fs::write(&self.file, text).with_context(|| self.file.display().to_string())?;
        Ok(left)
    }

    /// The ranks that these hosts can run, if they are enough.
    fn among(&self, answers: &[bool]) -> anyhow::Result<Left> {
        let pairs = || self.all.iter().zip(answers);
        let slots: usize = pairs().filter(|(_, answers)| **answers).map(|(host, _)| host.slots).sum();
        let lost: Vec<String> =
            pairs().filter(|(_, answers)| !**answers).map(|(host, _)| host.name.clone()).collect();
        if let (Some(host), Some(false)) = (self.all.first(), answers.first()) {
            bail!("host {} of rank 0, which has the checkpoints, does not answer", host.name);
        }
        let ranks = self.ranks.min(slots);
        let ranks = ranks - ranks % self.group;
        ensure!(
            ranks >= self.least,
            "{}, and {ranks} of {} are fewer than --min-ranks {}",
            silent(&lost),
            text::many(self.ranks, "rank"),
            self.least
        );
        Ok(Left { ranks, file: self.file.clone(), lost })
    }
}

/// Names hosts that don't answer.
pub fn silent(lost: &[String]) -> String {
    match lost {
        [one] => format!("host {one} does not answer"),
        many => format!("hosts {} do not answer", many.join(", ")),
    }
}

/// Which of these commands succeed in time. All run at once.
fn answers(mut commands: Vec<Command>, limit: Duration) -> anyhow::Result<Vec<bool>> {
    let begun = Instant::now();
    let quiet = |command: &mut Command| {
        child::start(command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()))
    };
    let mut running = commands.iter_mut().map(quiet).collect::<anyhow::Result<Vec<_>>>()?;
    let mut answers = vec![None; running.len()];
    while answers.contains(&None) && begun.elapsed() < limit {
        for (child, answer) in running.iter_mut().zip(&mut answers).filter(|(_, answer)| answer.is_none()) {
            *answer = child.try_wait().context("can't wait for mpirun")?.map(|status| status.success());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    for (child, _) in running.iter_mut().zip(&answers).filter(|(_, answer)| answer.is_none()) {
        let _ = child.kill();
        let _ = child.wait();
    }
    Ok(answers.into_iter().map(|answer| answer == Some(true)).collect())
}

/// Hosts in the forms of Open MPI (`name slots=2`) and of MPICH (`name:2`).
fn parse(text: &str, file: &str) -> anyhow::Result<Vec<Host>> {
    let mut hosts = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let plain = line.split('#').next().unwrap_or_default().replace(" =", "=").replace("= ", "=");
        let mut words = plain.split_whitespace();
        let Some(first) = words.next() else { continue };
        let given = words.find_map(|word| word.strip_prefix("slots="));
        let short = first.split_once(':').filter(|(_, slots)| slots.parse::<usize>().is_ok());
        let (name, slots) = match (given, short) {
            (Some(slots), _) => (first, slots),
            (None, Some((name, slots))) => (name, slots),
            (None, None) => bail!(
                "{file}:{}: {first} has no slots=N, the ranks it can run, which --min-ranks needs",
                number + 1
            ),
        };
        let slots = slots.parse().ok().filter(|slots| *slots > 0);
        let slots =
            slots.with_context(|| format!("{file}:{}: slots of {first}: no number from 1", number + 1))?;
        hosts.push(Host { name: name.to_string(), slots, line: line.to_string() });
    }
    ensure!(!hosts.is_empty(), "--hostfile {file} names no host");
    Ok(hosts)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hosts(text: &str, ranks: usize, least: usize) -> Hosts {
        Hosts { all: parse(text, "hosts").unwrap(), file: "run.hosts".into(), ranks, least, group: 1 }
    }

    #[test]
    fn both_forms_of_a_file_of_hosts_are_read() {
        let found =
            parse("# ours\na slots=2 max_slots=4\n\nb:4  # MPICH\nfd00::1 slots = 1\n", "hosts").unwrap();
        let found: Vec<(&str, usize)> = found.iter().map(|host| (host.name.as_str(), host.slots)).collect();
        assert_eq!(found, [("a", 2), ("b", 4), ("fd00::1", 1)]);
        let refused = |text: &str| parse(text, "hosts").unwrap_err().to_string();
        assert_eq!(
            refused("a slots=1\nb\n"),
            "hosts:2: b has no slots=N, the ranks it can run, which --min-ranks needs"
        );
        assert_eq!(refused("a slots=0\n"), "hosts:1: slots of a: no number from 1");
        assert_eq!(refused("# nothing\n"), "--hostfile hosts names no host");
    }

    #[test]
    fn ranks_go_on_where_hosts_answer() {
        let three = hosts("a slots=2\nb slots=2\nc slots=2\n", 6, 3);
        let left = three.among(&[true, false, true]).unwrap();
        assert_eq!((left.ranks, left.lost), (4, vec!["b".to_string()]));
        assert_eq!(three.among(&[true; 3]).unwrap().ranks, 6, "a rank was lost, but no host");
        let of_pairs = Hosts { group: 2, ..hosts("a slots=2\nb slots=1\nc slots=2\n", 4, 2) };
        assert_eq!(of_pairs.among(&[true, true, false]).unwrap().ranks, 2, "whole groups that divide states");
        let spare = hosts("a slots=4\nb slots=4\n", 4, 4);
        assert_eq!(spare.among(&[true, false]).unwrap().ranks, 4, "the others have room for all");
        let refused = |answers: &[bool]| three.among(answers).unwrap_err().to_string();
        assert_eq!(
            refused(&[true, false, false]),
            "hosts b, c do not answer, and 2 of 6 ranks are fewer than --min-ranks 3"
        );
        assert_eq!(
            refused(&[false, true, true]),
            "host a of rank 0, which has the checkpoints, does not answer"
        );
    }

    #[test]
    fn who_takes_too_long_or_fails_does_not_answer() {
        let command = |program: &str, argument: &str| {
            let mut command = Command::new(program);
            command.arg(argument);
            command
        };
        let all = vec![command("true", ""), command("false", ""), command("sleep", "600")];
        assert_eq!(answers(all, Duration::from_secs(2)).unwrap(), [true, false, false]);
    }
}
