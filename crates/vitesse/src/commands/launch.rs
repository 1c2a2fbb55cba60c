//! `vitesse launch`: what to type, or to hand to the batch system, to start a run on several nodes.

mod slurm;

use crate::args;
use crate::args::launch::{LaunchArgs, WithArg};
use anyhow::{Context, bail, ensure};
use config::Raw;
use config::outputs::{self, Output};
use std::fmt::Write as _;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use text::many;

pub fn run(args: &LaunchArgs) -> anyhow::Result<()> {
    check(args)?;
    let text = match args.with {
        WithArg::Mpirun => mpirun(args)?,
        WithArg::Slurm => slurm::sbatch(args)?,
        WithArg::Torchrun => torchrun(args)?,
    };
    let Some(path) = &args.out else {
        print!("{text}");
        return Ok(());
    };
    outputs::check("out", Some(path), Output::File { force: args.overwrite.force })?;
    let script = if text.starts_with("#!") { text } else { format!("#!/bin/bash\n{text}") };
    write_script(path, &script).with_context(|| path.display().to_string())?;
    let how = if args.with == WithArg::Slurm { "sbatch " } else { "bash " };
    println!("wrote {}; start it with: {how}{}", path.display(), quoted(&path.display().to_string()));
    Ok(())
}

fn write_script(path: &Path, text: &str) -> std::io::Result<()> {
    fs::write(path, text)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o755))
}

/// What would be refused on every node is refused here, before it waits in a queue.
fn check(args: &LaunchArgs) -> anyhow::Result<()> {
    ensure!(args.nodes > 0 && args.per_node > 0, "--nodes and --per-node must be at least 1");
    let world = args.nodes * args.per_node;
    let train = train_args(args)?;
    if let Some(ranks) = train.ranks.filter(|ranks| *ranks != world) {
        bail!(
            "--ranks {ranks} after --, but {} × {} make {world}: leave it out",
            many(args.nodes, "node"),
            args.per_node
        );
    }
    if train.max_restarts.is_some() {
        bail!("--max-restarts can't be used under a launcher, which ends the whole job with a rank");
    }
    if !args.hosts.is_empty() && args.hosts.len() != args.nodes {
        bail!("--hosts names {}, but --nodes is {}", many(args.hosts.len(), "host"), args.nodes);
    }
    if args.hosts.iter().any(|host| !is_plain(host)) {
        bail!("--hosts {}: these are no names of hosts", args.hosts.join(","));
    }
    let slurm = args.with == WithArg::Slurm;
    let only_slurm = [
        ("--gpus", args.gpus),
        ("--cpus-per-rank", args.cpus_per_rank.is_some()),
        ("--time", args.time.is_some()),
        ("--partition", args.partition.is_some()),
    ];
    if let Some((flag, _)) = only_slurm.iter().find(|(_, given)| *given && !slurm) {
        bail!("{flag} is for --with slurm");
    }
    if args.hostfile.is_some() && args.with != WithArg::Mpirun {
        bail!("--hostfile is for --with mpirun");
    }
    Ok(())
}

fn train_args(args: &LaunchArgs) -> anyhow::Result<Raw> {
    let mut command = vec!["vitesse".to_string(), "train".to_string()];
    command.extend(args.train.iter().cloned());
    args::typed_for_train(&command).map_err(|error| anyhow::anyhow!("after --: {error}"))
}

/// `vitesse train` with its options, as a shell reads them.
fn train(args: &LaunchArgs) -> String {
    let words = [program(), "train".to_string()];
    let words: Vec<String> = words.iter().chain(&args.train).map(|word| quoted(word)).collect();
    words.join(" ")
}

/// By its name where a shell would find this program by it, by its path elsewhere.
fn program() -> String {
    let Ok(here) = std::env::current_exe() else { return "vitesse".to_string() };
    let paths = std::env::var_os("PATH").unwrap_or_default();
    let found =
        std::env::split_paths(&paths).map(|folder| folder.join("vitesse")).find(|path| path.is_file());
    match found.and_then(|path| path.canonicalize().ok()) {
        Some(path) if path == here => "vitesse".to_string(),
        _ => here.display().to_string(),
    }
}

fn mpirun(args: &LaunchArgs) -> anyhow::Result<String> {
    let (nodes, each) = (args.nodes, args.per_node);
    let mut line = format!("mpirun -n {} --map-by ppr:{each}:node --bind-to none", nodes * each);
    match &args.hostfile {
        Some(file) => write!(line, " --hostfile {}", quoted(&file.display().to_string()))?,
        None if !args.hosts.is_empty() => {
            let slots: Vec<String> = args.hosts.iter().map(|host| format!("{host}:{each}")).collect();
            write!(line, " --host {}", slots.join(","))?;
        }
        None if nodes > 1 => bail!("--nodes {nodes} with mpirun needs --hosts or --hostfile"),
        None => {}
    }
    Ok(format!("{line} {}\n", train(args)))
}

const TORCHRUN_PORT: u16 = 29_500;

fn torchrun(args: &LaunchArgs) -> anyhow::Result<String> {
    let (nodes, each) = (args.nodes, args.per_node);
    let start = format!("torchrun --no-python --nnodes {nodes} --nproc-per-node {each}");
    if nodes == 1 {
        return Ok(format!("{start} --standalone {}\n", train(args)));
    }
    let Some(first) = args.hosts.first() else {
        bail!("--nodes {nodes} with torchrun needs --hosts, to know where rank 0 is");
    };
    let mut script = "#!/bin/bash\n".to_string();
    for (node, host) in args.hosts.iter().enumerate() {
        writeln!(script, "# on {host}: bash THIS_SCRIPT {node}")?;
    }
    writeln!(script, "NODE=${{1:?the number of this node, from 0 to {}}}", nodes - 1)?;
    let meet = format!("--node-rank \"$NODE\" --master-addr {first} --master-port {TORCHRUN_PORT}");
    writeln!(script, "{start} {meet} {}", train(args))?;
    Ok(script)
}

/// Returns whether a word means itself wherever it is put.
fn is_plain(word: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"_@%+=:,./-".contains(&byte);
    !word.is_empty() && word.bytes().all(plain)
}

/// A word as a shell reads it.
fn quoted(word: &str) -> String {
    if is_plain(word) { word.to_string() } else { format!("'{}'", word.replace('\'', r"'\''")) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use std::process::Command;

    pub fn text(line: &[&str]) -> anyhow::Result<String> {
        let cli = args::Cli::try_parse_from([&["vitesse", "launch"], line].concat())?;
        let args::Command::Launch(args) = cli.command else { bail!("another command") };
        check(&args)?;
        match args.with {
            WithArg::Mpirun => mpirun(&args),
            WithArg::Slurm => slurm::sbatch(&args),
            WithArg::Torchrun => torchrun(&args),
        }
    }

    /// The words of the line that starts the run, as bash reads them, with `launcher` in the place of the real one.
    pub fn words(script: &str, launcher: &str, setup: &str) -> Vec<String> {
        let shown = format!("{launcher}() {{ printf '%s\\n' \"$@\"; }}\n{setup}\n{script}");
        let output = Command::new("bash").args(["-c", &shown, "script", "1"]).output().expect("bash runs");
        assert!(output.status.success(), "{}\n{shown}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).lines().map(str::to_string).collect()
    }

    pub fn is_valid(script: &str) {
        let status = Command::new("bash").args(["-n", "-c", script]).status().expect("bash runs");
        assert!(status.success(), "{script}");
    }

    pub const TRAIN: [&str; 7] =
        ["--", "--data", "folder:my photos", "--out", "it's $HOME; `x`", "--model", "vit-b/16"];

    #[test]
    fn an_mpirun_line_starts_every_rank_with_its_options_as_typed() {
        let line = [&["--with", "mpirun", "--nodes", "2", "--per-node", "4", "--hosts", "a,b"], &TRAIN[..]];
        let script = text(&line.concat()).unwrap();
        assert!(
            script.starts_with("mpirun -n 8 --map-by ppr:4:node --bind-to none --host a:4,b:4 "),
            "{script}"
        );
        is_valid(&script);
        assert_eq!(words(&script, "mpirun", "")[9..], [&["train"], &TRAIN[1..]].concat()[..]);
        let with_file = text(&["--with", "mpirun", "--nodes", "2", "--hostfile", "my hosts"]).unwrap();
        assert!(
            with_file.contains("-n 2 --map-by ppr:1:node --bind-to none --hostfile 'my hosts' "),
            "{with_file}"
        );
    }

    #[test]
    fn torchrun_starts_programs_that_are_not_python() {
        let one = text(&["--with", "torchrun", "--per-node", "4"]).unwrap();
        assert!(one.starts_with("torchrun --no-python --nnodes 1 --nproc-per-node 4 --standalone "), "{one}");
        let two = text(&["--with", "torchrun", "--nodes", "2", "--hosts", "a,b"]).unwrap();
        is_valid(&two);
        let said = words(&two, "torchrun", "").join(" ");
        assert!(said.contains("--node-rank 1 --master-addr a --master-port 29500 "), "{said}");
    }

    #[test]
    fn what_no_node_would_accept_is_refused_before_it_is_queued() {
        let refused = |line: &[&str], part: &str| {
            let problem = text(line).err().map(|error| error.to_string()).unwrap_or_default();
            assert!(problem.contains(part), "{line:?}: \"{part}\" is not in \"{problem}\"");
        };
        refused(
            &["--with", "mpirun", "--", "--modle", "x"],
            "after --: --modle: there is no such flag; did you mean --model?",
        );
        refused(&["--with", "mpirun", "--per-node", "4", "--", "--ranks", "2"], "--ranks 2 after --");
        refused(&["--with", "mpirun", "--", "--max-restarts", "2"], "--max-restarts");
        refused(&["--with", "mpirun", "--nodes", "2"], "needs --hosts or --hostfile");
        refused(&["--with", "mpirun", "--nodes", "2", "--hosts", "a"], "--hosts names 1 host,");
        refused(&["--with", "mpirun", "--hosts", "a;reboot"], "no names of hosts");
        refused(&["--with", "torchrun", "--nodes", "2"], "needs --hosts");
        refused(&["--with", "mpirun", "--gpus"], "--gpus is for --with slurm");
        refused(&["--with", "slurm", "--time", "1\n#SBATCH"], "--time");
        refused(&["--with", "slurm", "--nodes", "0"], "at least 1");
    }
}
